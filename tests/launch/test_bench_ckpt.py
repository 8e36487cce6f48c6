"""`k3 bench ckpt` on a tiny checkpoint: every way is taken, and nothing is left on the disk."""

import pytest

from k3jax.checkpoint.hf_layout import K3_PREFIX, hf_tensors
from k3jax.checkpoint.hf_source import open_released
from launch import bench_ckpt
from tests.conftest import FIXTURES


@pytest.mark.slow
def test_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_ckpt, "k3_shaped", lambda gigabytes: open_released(FIXTURES / "kimi_k3_tiny").config)
    bench_ckpt.bench_ckpt(0.001, 1, tmp_path)
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert rows[3:8] == ["cp", "import", "export", "export in 1 GB files", "export, experts unpacked"]
    assert list(tmp_path.iterdir()) == []


def test_shape_is_k3s_and_of_the_size_that_was_asked_for():
    model = bench_ckpt.k3_shaped(2.0)
    tensors = hf_tensors(model, K3_PREFIX)
    sizes = [(tensor, tensor.stored[0] * (tensor.stored[1:] or (1,))[0]) for tensor in tensors]
    packed = sum(n * (1 / 2 + 1 / 32) for tensor, n in sizes if tensor.expert is not None)
    others = sum(2 * n for tensor, n in sizes if tensor.expert is None)
    assert 1.8e9 < packed + others < 2.1e9
    assert packed > 2 * others
