"""Where documents begin and end in a chunk, as 0/1 masks: what a token neither reads nor writes across."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Documents(NamedTuple):
    """Whether no document begins in between; bool."""

    same_CC: jax.Array  # two tokens of the chunk
    starts_C1: jax.Array  # the token before the chunk and the row
    starts_1C: jax.Array
    ends_C1: jax.Array  # the row and the chunk's last token
    ends_1C: jax.Array
    whole_11: jax.Array  # the token before the chunk and the chunk's last token


def document_numbers(segment_ids_BT):
    """int32 number of each token's document, 0 for the first of a row; padding carries on the one before it."""
    changed_BT = segment_ids_BT != jnp.pad(segment_ids_BT[:, :-1], [(0, 0), (1, 0)])
    starts_BT = jnp.cumsum((segment_ids_BT != 0) & changed_BT, axis=1, dtype=jnp.int32)
    return jnp.maximum(starts_BT - 1, 0)


def run_rows(run_BT):
    """[B, 2, T]: the number of each token's document and that of the token before, 0 before the first."""
    return jnp.stack([run_BT, jnp.pad(run_BT[:, :-1], [(0, 0), (1, 0)])], axis=1)


def documents_of_chunk(runs_2C) -> Documents:
    """From a chunk's columns of `run_rows`."""
    C = runs_2C.shape[1]
    run_1C, before_11, last_11 = runs_2C[:1], runs_2C[1:, :1], runs_2C[:1, C - 1 :]
    run_CC = jnp.broadcast_to(run_1C, (C, C)).T  # a row's number along its lanes
    run_C1 = run_CC[:, :1]
    return Documents(
        run_CC == run_1C,
        run_C1 == before_11,
        run_1C == before_11,
        run_C1 == last_11,
        run_1C == last_11,
        before_11 == last_11,
    )
