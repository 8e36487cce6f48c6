"""Both ways with the real transformers: its model in, its logits matched, ten steps trained, and its model again.

torch and transformers may live in another Python: K3_TORCH_PYTHON names it.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from k3jax.checkpoint import hf
from k3jax.checkpoint.open import open_any
from k3jax.config import Config, DataConfig, MeshConfig, OptimConfig, TrainConfig
from k3jax.models import KimiK3
from k3jax.train.claim import Claim
from k3jax.train.loop import train
from launch.__main__ import main
from tests.conftest import rel_error
from tests.train.tiny_run import write_text

SCRIPT = pathlib.Path(__file__).with_name("torch_kimi_linear.py")
HERE = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
PYTHON = os.environ.get("K3_TORCH_PYTHON") or (sys.executable if HERE else None)
pytestmark = [
    pytest.mark.hf,
    pytest.mark.skipif(PYTHON is None, reason="needs torch and transformers, here or in the Python of K3_TORCH_PYTHON"),
]


def torch_side(*arguments) -> None:
    done = subprocess.run([PYTHON, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def our_logits(folder: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    config, variables = hf.load(folder, dtype="float32")
    return np.asarray(jax.jit(KimiK3(config).apply)(variables, tokens.astype(np.int32)))


def test_transformers_in_trained_and_out(tmp_path):
    torch_side("make", tmp_path / "theirs", tmp_path / "made.npz")
    made = np.load(tmp_path / "made.npz")
    assert rel_error(our_logits(tmp_path / "theirs", made["tokens"]), made["logits"]) < 5e-5

    # Imported and exported again it is the same to the byte; written anew, transformers computes the same.
    assert main(["ckpt", "import", str(tmp_path / "theirs"), str(tmp_path / "imported")]) == 0
    assert main(["ckpt", "export", str(tmp_path / "imported"), str(tmp_path / "same")]) == 0
    for file in (tmp_path / "theirs").iterdir():
        assert (tmp_path / "same" / file.name).read_bytes() == file.read_bytes(), file.name
    config, variables = hf.load(tmp_path / "theirs")
    hf.save(tmp_path / "anew", config, variables)
    torch_side("check", tmp_path / "anew", tmp_path / "made.npz")
    again = np.load(tmp_path / "made.npz")
    np.testing.assert_array_equal(again["again"], again["logits"])

    text = write_text(tmp_path / "text")
    run = Config(
        open_any(tmp_path / "imported").config,
        DataConfig(source="files", paths=(str(text),), seq_len=32, batch_size=8, heldout_fraction=0.0),
        OptimConfig(learning_rate=3e-3),
        MeshConfig(),
        TrainConfig(steps=10, init_from=str(tmp_path / "imported")),
    )
    with Claim(tmp_path / "run", run) as claim:
        assert train(run, claim).status == "finished"
    assert main(["ckpt", "export", str(tmp_path / "run"), str(tmp_path / "trained"), "--dtype=float32"]) == 0
    trained = our_logits(tmp_path / "trained", made["tokens"])
    assert rel_error(trained, made["logits"]) > 0.05, "ten steps have changed the model"
    np.savez(tmp_path / "trained.npz", tokens=made["tokens"])
    torch_side("check", tmp_path / "trained", tmp_path / "trained.npz")
    assert rel_error(trained, np.load(tmp_path / "trained.npz")["again"]) < 5e-5
