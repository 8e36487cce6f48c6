"""Held-out loss."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from k3jax.data import Batch, TextDataset
from k3jax.train.mesh import shard_batch
from k3jax.train.metrics import bits_per_byte


class Evaluation(NamedTuple):
    """What held-out text costs.

    Attributes:
        loss: nats a target, the mean over all of them.
        bits_per_byte: the same for each byte of the text; None where the text has no bytes.
        accuracy: the part of targets that are the most probable token.
        targets: how many.
    """

    loss: float
    bits_per_byte: float | None
    accuracy: float
    targets: int


def evaluate(
    eval_step: Callable[[dict, Batch], dict],
    variables: dict[str, Any],
    dataset: TextDataset,
    mesh: jax.sharding.Mesh,
    stop: Iterable | object = (),
) -> Evaluation | None:
    """Evaluates on all held-out rows; changes nothing.

    Args:
        eval_step: from `make_eval_step`.
        variables: of the model.
        dataset: whose held-out side is read.
        mesh: over which batches are laid.
        stop: looked at after each batch; when true, evaluation is given up.
    Returns:
        The result, or None if it was given up or there is no held-out text.
    """
    if not dataset.heldout.num_rows:
        return None
    nats, count, correct = 0.0, 0, 0
    pending = None

    def add(sums: dict) -> None:
        nonlocal nats, count, correct
        sums = jax.device_get(sums)
        nats, count, correct = nats + float(sums["nats"]), count + int(sums["count"]), correct + int(sums["correct"])

    with contextlib.closing(dataset.heldout_batches(jax.process_index(), jax.process_count())) as batches:
        for batch in batches:
            sums = eval_step(variables, shard_batch(batch, mesh))
            if pending is not None:
                add(pending)  # one batch late: the devices have work while the host waits
            pending = sums
            if stop:
                return None
    if pending is not None:
        add(pending)
    if not count:
        return None
    heldout = dataset.heldout
    bits = bits_per_byte(nats / count, heldout.num_targets, heldout.num_bytes)
    return Evaluation(nats / count, bits, correct / count, count)
