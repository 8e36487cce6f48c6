"""Continuing a prompt, the plain way: the whole window is run again for every token."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import ModelConfig
from k3jax.models.kimi_k3 import KimiK3

BUCKET = 64  # windows are a multiple of it


def generate_tokens(
    config: ModelConfig,
    variables: dict[str, Any],
    prompt: Sequence[int],
    max_tokens: int,
    *,
    max_window: int,
    num_ids: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
) -> Iterator[int]:
    """Samples one token after the other; the same arguments give the same tokens.

    Compiled once: the window has a fixed length, padded on the right with segment id 0. When it is full, its older
    half is forgotten.

    Args:
        config: the architecture.
        variables: {"params": ..., "router": ...}.
        prompt: at least one token.
        max_tokens: how many to sample.
        max_window: most tokens the model is shown, such as the length of rows it was trained on.
        num_ids: only ids below it are sampled; None = the whole vocabulary.
        temperature: logits are divided by it; 0 takes the most probable token.
        seed: of the samples.
    Yields:
        Token ids.
    Raises:
        ValueError: an empty prompt, or a number that is out of range.
    """
    if not len(prompt):
        raise ValueError("the prompt has no tokens; give at least one")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}: use 0 (the most probable token) or more")
    if max_tokens < 0:
        raise ValueError(f"max_tokens is {max_tokens}: use 0 or more")
    window = min(max(max_window, 2), -(-(len(prompt) + max_tokens) // BUCKET) * BUCKET)
    key = jax.random.key(seed)
    shown = [int(token) for token in prompt][-window:]
    for i in range(max_tokens):
        if len(shown) == window:
            shown = shown[window // 2 :]
        tokens_T = np.zeros(window, np.int32)
        tokens_T[: len(shown)] = shown
        draw = jax.random.fold_in(key, i)
        token = int(_sample(config, num_ids, variables, tokens_T, len(shown), temperature, draw))
        shown.append(token)
        yield token


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sample(config, num_ids, variables, tokens_T, length, temperature, key) -> jax.Array:
    """The token after the first `length` of tokens_T."""
    segment_ids_T = (jnp.arange(len(tokens_T)) < length).astype(jnp.int32)
    hidden_BTD = KimiK3(config).apply(variables, tokens_T[None], segment_ids_T[None], output="hidden")
    last_D, head_DW = hidden_BTD[0, length - 1], variables["params"]["head"]
    wide = jnp.promote_types(last_D.dtype, jnp.float32)
    logits_W = jnp.matmul(
        last_D, head_DW.astype(last_D.dtype),
        precision=jax.lax.Precision.HIGHEST if last_D.dtype == wide else None, preferred_element_type=wide,
    )[:num_ids]  # fmt: skip
    drawn = jax.random.categorical(key, logits_W / jnp.where(temperature > 0, temperature, 1.0))
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits_W))
