"""One field adjusted until parameters or FLOPs are what they were, against counting every value of it."""

import dataclasses

import pytest

from k3jax.config import ConfigError
from k3jax.models.accounting import count_parameters
from k3jax.study.hold import Hold, adjust, measure
from tests.study.made_up import config


def with_field(base, **fields):
    return dataclasses.replace(base, model=dataclasses.replace(base.model, **fields))


@pytest.mark.parametrize("quantity", ["parameters", "active", "flops"])
@pytest.mark.parametrize(
    "changes", [{"kda_per_mla": 0}, {"kda_per_mla": None}, {"hidden_size": 30}, {"num_experts": 6}]
)
def test_the_nearest_of_all_values_is_found(quantity, changes):
    base = config({"intermediate_size": 300})
    target = measure(base, quantity)
    hold = Hold(quantity, "ModelConfig.intermediate_size", tolerance=0.5)
    got = adjust(with_field(base, **changes), hold, target).config
    off = {
        value: abs(measure(with_field(base, **changes, intermediate_size=value), quantity) - target)
        for value in range(1, 1200)
    }
    assert off[got.model.intermediate_size] == min(off.values())
    assert with_field(got, intermediate_size=300) == with_field(base, **changes)


def test_what_was_adjusted_and_how_close_it_came_is_said():
    base = config()  # an expert's width of 16: 4 routed experts of 3 x 16 x 16, one shared of 3 x 32 x 16
    before = count_parameters(base.model).total
    wider = with_field(base, moe_intermediate_size=40)
    adjusted = adjust(wider, Hold("parameters", "ModelConfig.moe_intermediate_size"), before)
    assert adjusted.config == base
    assert adjusted.line == f"moe_intermediate_size 40 -> 16: {before / 1e3:.3g}k parameters (+0.00%)"
    same = adjust(base, Hold("parameters", "ModelConfig.moe_intermediate_size"), before)
    assert same.line.startswith("moe_intermediate_size 16 as it was: ")


def test_multiples():
    base = config({"intermediate_size": 300})
    got = adjust(base, Hold("parameters", "ModelConfig.intermediate_size", 64, 0.5), measure(base, "parameters"))
    assert got.config.model.intermediate_size == 320


def test_values_that_are_impossible_bound_the_search():
    base = config({"num_experts": 4})
    target = measure(with_field(base, num_experts=3), "parameters")
    got = adjust(base, Hold("parameters", "ModelConfig.num_experts"), target)
    assert got.config.model.num_experts == 3
    with pytest.raises(ConfigError, match="num_experts = 3 gives"):  # two chosen of three: no fewer are possible
        adjust(base, Hold("parameters", "ModelConfig.num_experts"), 0.5 * target)


@pytest.mark.parametrize(
    ("field", "target", "line"),
    [
        ("ModelConfig.intermediate_size", 10.0, "nothing comes nearer: ModelConfig.intermediate_size = 1 gives"),
        ("ModelConfig.balancing_bins", 1e5, "parameters do not depend on ModelConfig.balancing_bins here"),
        ("ModelConfig.q_lora_rank", 1e5, "ModelConfig.q_lora_rank is None here"),
    ],
)
def test_the_impossible_is_one_line(field, target, line):
    with pytest.raises(ConfigError) as caught:
        adjust(config(), Hold("parameters", field), target)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["ModelConfig.dtype", "DataConfig.seq_len", "intermediate_size", "ModelConfig.nope"])
def test_only_integers_of_the_model_are_adjusted(field):
    with pytest.raises(ConfigError, match="give an integer field of ModelConfig"):
        Hold("parameters", field).check()
