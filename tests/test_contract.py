"""Names and parameters that others build on: they may gain optional keywords, and lose nothing."""

import inspect
import pathlib
import types

import pytest

import k3jax.checkpoint.hf
import k3jax.config
import k3jax.models
import k3jax.ops

# Positional parameters in order, then keywords with their defaults.
OPS = {
    "kda": (
        "q_BTHK k_BTHK v_BTJV g_BTJK beta_BTJ",
        {
            "scale": None, "initial_state_BJKV": None, "segment_ids_BT": None, "chunk_size": None,
            "implementation": "auto",
        },
    ),
    "kda_step": ("q_BHK k_BHK v_BJV g_BJK beta_BJ state_BJKV", {"scale": None}),
    "softplus_decay": ("z_BTJK a_log_J", {}),
    "bounded_decay": ("z_BTJK a_log_J", {"lower_bound": -5.0}),
    "situ_glu": ("gate up", {"beta": 4.0, "linear_beta": 25.0}),
    "attention_residual": ("sources_BTRD query_D gain_D", {"mask_R": None, "eps": 1e-5}),
    "quantile_balancing.exact_bias": ("scores_TE bias_E k", {"mask_T": None}),
    "quantile_balancing.histogram": ("scores_TE bias_E k bins", {"mask_T": None}),
    "quantile_balancing.bias_from_histogram": ("counts_EX bias_E k", {}),
}  # fmt: skip
# Optional parameters that are also taken by position.
BY_POSITION = {"lower_bound", "beta", "linear_beta", "mask_T"}


@pytest.mark.parametrize("name", OPS)
def test_operations(name):
    function = k3jax.ops
    for part in name.split("."):
        function = getattr(function, part)
    assert isinstance(inspect.unwrap(function), types.FunctionType)
    positional, keywords = OPS[name]
    parameters = inspect.signature(function).parameters
    required = [p.name for p in parameters.values() if p.default is p.empty]
    assert required == positional.split()
    assert list(parameters)[: len(required)] == required
    for keyword, default in keywords.items():
        assert parameters[keyword].default == default
        by_position = parameters[keyword].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert by_position == (keyword in BY_POSITION), keyword


def test_an_operation_is_not_hidden_by_a_module_of_its_name():
    """`import k3jax.ops.x` sets the attribute x of the package, whatever stood there."""
    modules = {name for name, value in vars(k3jax.ops).items() if isinstance(value, types.ModuleType)}
    assert "quantile_balancing" in modules
    assert not modules & (set(k3jax.ops.__all__) - {"quantile_balancing"})
    files = {file.stem for path in k3jax.ops.__path__ for file in pathlib.Path(path).glob("*.py")}
    assert not files & (set(k3jax.ops.__all__) - {"quantile_balancing"})


def test_results():
    assert k3jax.ops.KDAOutput._fields == ("o_BTJV", "final_state_BJKV")
    assert {"o_BJV", "state_BJKV"} <= set(dir(k3jax.ops.KDAOutput))
    assert k3jax.ops.AttentionResidual._fields == ("mix_BTD", "weights_BTR")


def test_configurations():
    ModelConfig = k3jax.config.ModelConfig
    assert isinstance(ModelConfig.kimi_k3(), ModelConfig)
    assert ModelConfig.kimi_k3().num_layers == 93
    assert ModelConfig.kimi_linear_48b().num_layers == 27
    assert ModelConfig.kimi_k3(kda_per_mla=0).kda_per_mla == 0


def test_model_and_checkpoints():
    KimiK3 = k3jax.models.KimiK3
    assert KimiK3(k3jax.config.ModelConfig()).config.num_layers == 93
    assert list(inspect.signature(KimiK3.__call__).parameters)[1:3] == ["tokens_BT", "segment_ids_BT"]
    load = inspect.signature(k3jax.checkpoint.hf.load).parameters
    assert list(load)[:2] == ["path", "dtype"]
    assert load["dtype"].default is None
