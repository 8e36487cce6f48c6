"""Parameter and FLOP counts against published figures and a model small enough to count by hand."""

import jax
import jax.numpy as jnp
import pytest

from k3jax.config import ModelConfig
from k3jax.models import KimiK3
from k3jax.models.accounting import count_parameters, flops_per_token, train_flops_per_token

# spec §1.3, each computed there from the checkpoint's tensor shapes.
KIMI_K3 = {
    "token embedding": (1_174_405_120, 1),
    "KDA mixers": (443_740_384, 69),
    "MLA mixers": (232_196_096, 24),
    "dense FFN": (726_663_168, 1),
    "routed experts": (896 * 33_030_144, 92),
    "shared experts": (132_120_576, 92),
    "router and latent": (57_807_232, 92),
    "layer norms and AttnRes": (43_008, 93),
    "final norm and AttnRes": (3 * 7168, 1),
    "output head": (1_174_405_120, 1),
}


def tiny(**changes) -> ModelConfig:
    """Three layers with a different size for every letter: layers 1 and 2 KDA, layer 3 MLA; layer 1 dense."""
    return ModelConfig(
        **{
            "vocab_size": 101, "num_layers": 3, "hidden_size": 10, "kda_per_mla": 2,
            "kda_num_heads": 2, "kda_num_value_heads": 4, "kda_key_dim": 3, "kda_value_dim": 5, "kda_conv_size": 4,
            "mla_num_heads": 3, "q_lora_rank": 7, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
            "v_head_dim": 8, "intermediate_size": 11, "num_experts": 9, "num_experts_per_token": 2,
            "num_shared_experts": 2, "moe_intermediate_size": 13, "moe_latent_size": 5,
        }
        | changes
    )  # fmt: skip


@pytest.mark.parametrize("name", KIMI_K3)
def test_kimi_k3_by_component(name):
    component = count_parameters(ModelConfig.kimi_k3())[name]
    assert (component.per_layer, component.layers) == KIMI_K3[name]


def test_published_totals():
    k3 = count_parameters(ModelConfig.kimi_k3())
    assert [c.name for c in k3.components] == list(KIMI_K3)
    assert f"{k3.total:.6e}" == "2.779484e+12"
    assert f"{k3.active:.5e}" == "1.04190e+11"
    assert f"{k3.active_with_embedding:.4e}" == "1.0536e+11"
    linear = count_parameters(ModelConfig.kimi_linear_48b())
    assert f"{linear.total:.3e}" == "4.912e+10"
    assert f"{linear.active:.2e}" == "3.11e+09"
    assert f"{linear.active_without_head:.2e}" == "2.73e+09"


def test_counted_by_hand():
    table = count_parameters(tiny())
    kda = (
        10 * 2 * 3 * 2 + 10 * 4 * 5  # q, k, v
        + 4 * (2 * 3 * 2 + 4 * 5)  # taps
        + 10 * 3 + 3 * 4 * 3 + 4 * 3 + 4  # decay down, up, dt_bias, a_log
        + 10 * 4  # beta
        + 10 * 4 * 5 + 5 + 4 * 5 * 10  # gate, o_norm, out
    )  # fmt: skip
    mla = 10 * 7 + 7 + 7 * 3 * 6 + 10 * (6 + 2) + 6 + 6 * 3 * (4 + 8) + 10 * 3 * 8 + 3 * 8 * 10
    assert [(c.per_layer, c.active_per_layer, c.layers) for c in table.components] == [
        (1010, 0, 1),
        (kda, kda, 2),
        (mla, mla, 1),
        (3 * 10 * 11, 3 * 10 * 11, 1),
        (9 * 3 * 5 * 13, 2 * 3 * 5 * 13, 2),
        (3 * 10 * 26, 3 * 10 * 26, 2),
        (10 * 9 + 9 + 2 * 10 * 5 + 5, 10 * 9 + 9 + 2 * 10 * 5 + 5, 2),
        (60, 60, 3),
        (30, 30, 1),
        (1010, 1010, 1),
    ]
    assert table.total == 2 * 1010 + 2 * kda + mla + 330 + 2 * (1755 + 780 + 204) + 180 + 30


@pytest.mark.parametrize(
    ("changes", "name", "per_layer_change"),
    [
        ({"kda_output_gate": "low_rank"}, "KDA mixers", 10 * 5 + 5 * 4 * 5 - 10 * 4 * 5),
        ({"kda_decay": "softplus"}, "KDA mixers", 0),
        ({"q_lora_rank": None}, "MLA mixers", 10 * 3 * 6 - (10 * 7 + 7 + 7 * 3 * 6)),
        ({"mla_output_gate": "none"}, "MLA mixers", -10 * 3 * 8),
        ({"moe_latent_size": None}, "routed experts", 9 * 3 * (10 - 5) * 13),
        ({"moe_latent_size": None}, "router and latent", -2 * 10 * 5 + 10 - 5),
        ({"moe_routed_norm": False}, "router and latent", -5),
        ({"num_shared_experts": 0}, "shared experts", -3 * 10 * 26),
        ({"attn_res": "none"}, "layer norms and AttnRes", -4 * 10),
        ({"attn_res": "none"}, "final norm and AttnRes", -2 * 10),
        ({"attn_res": "full"}, "layer norms and AttnRes", 0),
    ],
)
def test_each_choice_changes_its_component(changes, name, per_layer_change):
    before, after = count_parameters(tiny()), count_parameters(tiny(**changes))
    assert after[name].per_layer - before[name].per_layer == per_layer_change


def test_layers_without_a_kind_count_zero():
    assert count_parameters(tiny(kda_per_mla=0))["KDA mixers"].total == 0
    assert count_parameters(tiny(kda_per_mla=None))["MLA mixers"].total == 0
    dense = count_parameters(tiny(first_k_dense=3))
    assert dense["routed experts"].total == dense["router and latent"].total == 0
    assert dense["dense FFN"].layers == 3


def test_flops_are_twice_the_active_matrices_and_the_attention():
    config, T = tiny(kda_value_dim=3), 32  # K = V = dh, where the published formula holds
    flops, table = flops_per_token(config, T), count_parameters(config)
    dh, C = 3, 64
    assert flops["KDA recurrence"] * T == 2 * 4 * (6 * T * dh**2 + 3 * T * C * dh + T * C**2)
    assert flops["MLA attention"] * T == 1 * 3 * (2 * T * T * (4 + 2) + 2 * T * T * 8) / 2
    kda_vectors = 4 * (2 * 2 * 3 + 4 * 3) + 4 * 3 + 4 + 3
    assert flops["KDA projections"] == 2 * (table["KDA mixers"].active - 2 * kda_vectors)
    assert flops["MLA projections"] == 2 * (table["MLA mixers"].active - 7 - 6)
    assert flops["router and latent"] == 2 * (table["router and latent"].active - 2 * (9 + 5))
    for name in ("dense FFN", "routed experts", "shared experts", "output head"):
        assert flops[name] == 2 * table[name].active, name
    assert train_flops_per_token(config, T) == 3 * sum(flops.values())


def test_only_mla_attention_grows_with_the_row():
    short, long = flops_per_token(tiny(), 100), flops_per_token(tiny(), 200)
    assert [name for name in short if short[name] != long[name]] == ["MLA attention"]
    assert long["MLA attention"] == 2 * short["MLA attention"]


def test_kimi_k3_forward_is_near_two_flops_a_parameter():
    config = ModelConfig.kimi_k3()
    ratio = sum(flops_per_token(config, 4096).values()) / (2 * count_parameters(config).active)
    assert 1.0 < ratio < 1.03  # the rest is attention over 4096 tokens and the recurrence


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig.kimi_k3(num_layers=5),
        ModelConfig.kimi_linear_48b(num_layers=5),
        tiny(),
        tiny(kda_output_gate="low_rank", q_lora_rank=None, mla_output_gate="none", attn_res="full"),
        tiny(moe_latent_size=None, num_shared_experts=0, attn_res="none"),
        tiny(moe_latent_size=None, moe_routed_norm=False, first_k_dense=0, kda_per_mla=None),
        tiny(first_k_dense=3, kda_per_mla=0),
    ],
    ids=["kimi_k3", "kimi_linear_48b", "tiny", "gates", "full_width", "all_kda", "all_dense_mla"],
)
def test_counts_equal_the_models_own_tree(config):
    tokens = jnp.zeros((1, 4), jnp.int32)
    variables = jax.eval_shape(lambda: KimiK3(config).init(jax.random.key(0), tokens))
    leaves = jax.tree.leaves(variables["params"]) + jax.tree.leaves(variables.get("router", {}))
    assert sum(leaf.size for leaf in leaves) == count_parameters(config).total
