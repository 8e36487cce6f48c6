"""Sampling: the most probable token is that of a plain forward pass, and a seed gives the same text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import ModelConfig
from k3jax.models import KimiK3, init_variables
from k3jax.models.generate import BUCKET, generate_tokens
from launch.generate import stream_text
from tests.train.tiny_run import MODEL

PROMPT = [256, *b"the cat and the"]


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(**MODEL | {"num_layers": 1, "first_k_dense": 1, "kda_per_mla": None, "last_layer": "by_ratio"})
    variables = init_variables(config, 3)
    # Larger logits, so that which one is the largest is no matter of rounding.
    variables["params"]["head"] = variables["params"]["head"] * 30
    return config, variables


def test_the_most_probable_token_at_every_position(model):
    config, variables = model
    got = list(generate_tokens(config, variables, PROMPT, 12, max_window=128, temperature=0))
    # One pass over the whole text gives every next token, by causality.
    tokens = jnp.array([[*PROMPT, *got]])
    logits_TW = jax.jit(KimiK3(config).apply)(variables, tokens)[0]
    want = np.argmax(logits_TW, axis=-1)[len(PROMPT) - 1 : -1]
    assert got == want.tolist()
    assert len(set(got)) > 1


def test_samples_follow_the_seed_and_stay_below_num_ids(model):
    config, variables = model

    def sample(seed, **options):
        return list(generate_tokens(config, variables, PROMPT, 20, max_window=64, seed=seed, **options))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert max(sample(1, num_ids=5)) < 5


def test_a_full_window_forgets_its_older_half(model):
    config, variables = model
    prompt = [i % 250 for i in range(BUCKET)]
    (first,) = generate_tokens(config, variables, prompt, 1, max_window=BUCKET, temperature=0)
    (later,) = generate_tokens(config, variables, prompt[BUCKET // 2 :], 1, max_window=BUCKET, temperature=0)
    assert first == later


def test_impossible_requests_are_named(model):
    config, variables = model
    with pytest.raises(ValueError, match="no tokens"):
        next(generate_tokens(config, variables, [], 1, max_window=8))
    for temperature in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"temperature is {temperature}"):
            next(generate_tokens(config, variables, PROMPT, 1, max_window=8, temperature=temperature))


def test_text_streams_by_whole_characters_up_to_the_end_of_the_document():
    from k3jax.data import ByteTokenizer

    tokens = [*"aé€".encode(), 256, *b"next"]
    assert [piece for piece in stream_text(ByteTokenizer(), tokens) if piece] == ["a", "é", "€"]
    # Half a character at the end is shown as such.
    assert "".join(stream_text(ByteTokenizer(), [97, 0xE2])) == "a\ufffd"
