"""What every test shares: a CPU with eight fake devices, fixtures' folder, and how errors are measured."""

import os
import pathlib

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight devices, and machine code without LLVM's optimiser, which takes half of the suite's time and leaves XLA's own
# rewrites as they are. XLA_FLAGS=--xla_backend_optimization_level=3 runs the tests on optimised code.
for flag, value in {"xla_force_host_platform_device_count": 8, "xla_backend_optimization_level": 0}.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{flag}={value}"
# libtpu, where it is installed: look for no chip, and let several test processes load it.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

FIXTURES = pathlib.Path(__file__).parent / "fixtures"


def rel_error(got, want) -> float:
    """max |got - want| over max |want|, as the fixtures' README defines "rel"."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert np.isfinite(got).all(), "not finite"
    return float(np.max(np.abs(got - want), initial=0.0) / max(np.max(np.abs(want), initial=0.0), 1e-300))


@pytest.fixture
def fixtures() -> pathlib.Path:
    return FIXTURES
