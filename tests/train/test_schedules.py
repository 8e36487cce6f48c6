"""Schedules against values worked out by hand."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from k3jax.config import OptimConfig
from k3jax.train.schedules import make_schedule

BASE = OptimConfig(learning_rate=1.0, warmup_fraction=0.04, decay_fraction=0.05, final_learning_rate_fraction=0.1)


def rates(total_steps, after=0, **changes):
    """The rate of every step, and of `after` more."""
    learning_rate_at = make_schedule(dataclasses.replace(BASE, **changes), total_steps)
    return np.asarray(learning_rate_at(np.arange(total_steps + after)))


def test_cosine_by_hand():
    # 100 steps: warm-up 4, then 96 steps from the peak at step 3 to a tenth of it at step 99; step 51 is half way.
    got = rates(100, schedule="cosine")
    np.testing.assert_allclose(got[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    np.testing.assert_allclose(got[51], 0.55, rtol=1e-6)
    np.testing.assert_allclose(got[27], 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, rtol=1e-6)
    assert got[99] == np.float32(0.1)
    assert (np.diff(got[3:]) < 0).all()


def test_wsd_by_hand():
    # 100 steps: warm-up 4, flat to step 94, then 5 equal steps down to a tenth.
    got = rates(100, schedule="wsd")
    np.testing.assert_allclose(got[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    assert (got[3:95] == 1).all()
    np.testing.assert_allclose(got[94:], [1.0, 0.82, 0.64, 0.46, 0.28, 0.1], rtol=1e-6)
    assert got[99] == np.float32(0.1)


def test_constant_warms_up_and_stays():
    got = rates(100, schedule="constant")
    np.testing.assert_allclose(got[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    assert (got[3:] == 1).all()


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("total_steps", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("warmup_fraction", [0.0, 0.01, 0.5, 1.0])
def test_any_length_starts_above_zero_reaches_the_peak_and_ends_exactly(schedule, total_steps, warmup_fraction):
    decay_fraction = min(0.3, 1 - warmup_fraction)
    changes = {"schedule": schedule, "warmup_fraction": warmup_fraction, "decay_fraction": decay_fraction}
    got = rates(total_steps, after=5, **changes)
    warmup = max(1, round(warmup_fraction * total_steps))
    np.testing.assert_allclose(got[0], 1 / warmup, atol=1e-7)
    assert got.max() == 1 == got[warmup - 1]
    end = 1.0 if schedule == "constant" or warmup == total_steps else 0.1
    assert (got[total_steps - 1 :] == np.float32(end)).all()


def test_only_the_step_decides_and_jit_agrees():
    learning_rate_at = make_schedule(BASE, 50)
    steps = [7, 49, 0, 7]
    eager = [float(learning_rate_at(step)) for step in steps]
    assert eager[0] == eager[3]
    traced = [float(jax.jit(learning_rate_at)(np.int32(step))) for step in steps]
    np.testing.assert_allclose(traced, eager, rtol=1e-6)


def test_peak_replaces_the_learning_rate():
    other = make_schedule(BASE, 50, peak=3.0)
    for step in (0, 10, 49):
        np.testing.assert_allclose(other(step), 3 * make_schedule(BASE, 50)(step), rtol=1e-6)


def test_errors_name_field_and_fix():
    with pytest.raises(ValueError, match=r"total_steps = 0.*at least 1"):
        make_schedule(BASE, 0)
    config = dataclasses.replace(BASE)
    object.__setattr__(config, "schedule", "cosin")
    with pytest.raises(ValueError, match=r"OptimConfig.schedule = 'cosin'.*'cosine'"):
        make_schedule(config, 10)
