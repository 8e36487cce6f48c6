"""Reading released checkpoints: dtypes, and mistakes in a folder. tests/models/test_parity.py compares values."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from k3jax.checkpoint import hf
from tests.conftest import FIXTURES

# spec §1.4, by our leaf names: rates and their bias, convolutions, KDA's output norm, router bias.
FLOAT32 = {"a_log", "dt_bias", "q_conv", "k_conv", "v_conv", "o_norm", "bias"}


def test_bfloat16_leaves_what_must_be_float32():
    config, variables = hf.load(FIXTURES / "kimi_k3_tiny", dtype="bfloat16")
    assert config.dtype == "bfloat16"
    leaves = flatten_dict(variables)
    assert {path[-1] for path, x in leaves.items() if x.dtype == "float32"} == FLOAT32
    assert {str(x.dtype) for x in leaves.values()} == {"float32", "bfloat16"}


def test_float64_needs_x64():
    with pytest.raises(ValueError, match=r"float64 would become float32; enable x64: jax.enable_x64\(True\)"):
        hf.load(FIXTURES / "kimi_k3_tiny", dtype="float64")
    with jax.enable_x64(True):
        _, variables = hf.load(FIXTURES / "kimi_k3_tiny", dtype="float64")
    assert {x.dtype for x in jax.tree.leaves(variables)} == {np.dtype("float64")}


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("kimi_linear_tiny", "hidden_size"),
        ("kimi_linear_tiny", "linear_attn_config.num_heads"),
        ("kimi_k3_tiny", "text_config"),
        ("kimi_k3_tiny", "text_config.hidden_act"),
        ("kimi_k3_tiny", "text_config.linear_attn_config"),
        ("kimi_k3_tiny", "text_config.linear_attn_config.full_attn_layers"),
    ],
)
def test_a_missing_key_is_named(tmp_path, model, path):
    values = json.loads((FIXTURES / model / "config.json").read_text())
    *sections, key = path.split(".")
    inner = values
    for section in sections:
        inner = inner[section]
    del inner[key]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError) as caught:
        hf.load(tmp_path)
    assert f"config.json: no {path};" in str(caught.value)


def test_tensors_that_are_missing(tmp_path):
    shutil.copy(FIXTURES / "kimi_k3_tiny" / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        hf.load(tmp_path)
