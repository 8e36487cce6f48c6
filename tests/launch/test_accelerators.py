"""libtpu stays asleep on a machine without accelerators, and nothing changes on any other."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from launch import accelerators
from launch.accelerators import leave_libtpu_asleep

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def packages(monkeypatch):
    """The packages that can be found: libtpu, and what a test adds."""
    there = {"libtpu"}
    monkeypatch.setattr(accelerators.importlib.util, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(accelerators.importlib.metadata, "entry_points", lambda group: there & {group})
    return there


def choose(root, **environ):
    leave_libtpu_asleep(environ, root)
    return environ.get("JAX_PLATFORMS")


def plug_in(root, vendor, kind):
    device = root / "sys/bus/pci/devices" / f"0000:00:{vendor[-2:]}.{kind[2]}"
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(kind + "\n")


def test_a_machine_without_accelerators_uses_its_cpu(packages, tmp_path):
    assert choose(tmp_path) == "cpu"  # no sysfs at all, as in some containers
    plug_in(tmp_path, "0x8086", "0x120000")
    plug_in(tmp_path, "0x1ae0", "0x020000")  # a Google virtual machine's network card
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/vfio").touch()
    (tmp_path / "dev/accel").mkdir()  # laptops' neural processors
    assert choose(tmp_path, TPU_SKIP_MDS_QUERY="1", TPU_LIBRARY_PATH="x") == "cpu"


@pytest.mark.parametrize("kind", ["0xff0000", "0x088000", "0x120000"])
def test_a_tpu_is_left_to_jax(packages, tmp_path, kind):
    plug_in(tmp_path, "0x1ae0", kind)
    assert choose(tmp_path) is None


@pytest.mark.parametrize("file", ["accel0", "vfio/0", "nvidia0", "nvidiactl", "dxg", "kfd"])
def test_a_device_file_is_left_to_jax(packages, tmp_path, file):
    (tmp_path / "dev" / file).parent.mkdir(parents=True)
    (tmp_path / "dev" / file).touch()
    assert choose(tmp_path) is None


def test_other_plugins_are_left_to_jax(packages, tmp_path):
    packages.add("jax_plugins")
    assert choose(tmp_path) is None


def test_without_libtpu_there_is_nothing_to_do(packages, tmp_path):
    packages.clear()
    assert choose(tmp_path) is None


@pytest.mark.parametrize(
    "name", ["JAX_PLATFORM_NAME", "JAX_FORCE_TPU_INIT", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "TPU_NAME"]
)
def test_what_the_environment_says_stands(packages, tmp_path, name):
    assert choose(tmp_path, **{name: "1"}) is None
    for platforms in ("", "tpu", "cuda,cpu"):
        assert choose(tmp_path, JAX_PLATFORMS=platforms) == platforms


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu")
def test_a_command_that_starts_jax_says_nothing_of_tpus():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TPU_"))}
    leave_libtpu_asleep(probe := dict(environment))
    if "JAX_PLATFORMS" not in probe:
        pytest.skip("this machine has an accelerator")
    # In a process of its own, with libtpu's lock out of the way, under which it fails before it says much.
    code = (
        "import launch.__main__, launch.config\n"
        "def run(args):\n    import jax\n    print(jax.default_backend())\n    return 0\n"
        "launch.config.run = run\n"
        "raise SystemExit(launch.__main__.main(['config']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (result.returncode, result.stdout, result.stderr) == (0, "cpu\n", "")
