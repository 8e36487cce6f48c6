"""Learning-rate schedules: linear warm-up, then cosine, warm-up-stable-decay or constant."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax


def make_schedule(optim_config, total_steps: int, peak: float | None = None) -> Callable[[int], jax.Array]:
    """Builds the learning rate as a pure function of the step.

    Warm-up counts from one, so that step 0 already learns: step s of a W-step warm-up has (s+1)/W of the
    peak, and step W-1 all of it. Cosine and WSD end at exactly peak * final_learning_rate_fraction on the
    last step, total_steps-1, and stay there.

    Args:
        optim_config: has schedule ("cosine", "wsd" or "constant"), learning_rate, warmup_fraction,
            decay_fraction (the last part of a WSD run), both of total_steps and rounded, and
            final_learning_rate_fraction.
        total_steps: length of the run in optimiser steps.
        peak: the highest learning rate, in place of optim_config.learning_rate.

    Returns:
        learning_rate_at(step) -> array of the step's shape, float32 or wider; step is an int or an integer
            array, counted from 0.

    Raises:
        ValueError: total_steps is below 1, or the schedule's name is unknown.

    Source: spec §7.1.
    """
    c = optim_config
    peak = c.learning_rate if peak is None else peak
    if total_steps < 1:
        raise ValueError(f"total_steps = {total_steps}: a schedule needs at least 1 step")
    if c.schedule not in ("cosine", "wsd", "constant"):
        raise ValueError(f"OptimConfig.schedule = {c.schedule!r}: use 'cosine', 'wsd' or 'constant'")

    warmup = max(1, round(c.warmup_fraction * total_steps))
    after_warmup = total_steps - warmup  # steps from the first one at the peak to the last one of the run
    final = peak * c.final_learning_rate_fraction
    if c.schedule == "constant" or after_warmup == 0:
        pieces, ends = [optax.constant_schedule(peak)], []
    elif c.schedule == "cosine":
        pieces, ends = [optax.cosine_decay_schedule(peak, after_warmup, c.final_learning_rate_fraction)], []
    else:
        decay = min(max(1, round(c.decay_fraction * total_steps)), after_warmup)
        pieces = [optax.constant_schedule(peak), optax.linear_schedule(peak, final, decay)]
        ends = [total_steps - 1 - decay]
    if warmup > 1:
        pieces = [optax.linear_schedule(peak / warmup, peak, warmup - 1), *pieces]
        ends = [warmup - 1, *ends]
    joined = optax.join_schedules(pieces, ends)
    return lambda step: jnp.broadcast_to(jnp.asarray(joined(jnp.asarray(step))), jnp.shape(step))
