"""The page of a comparison: averages of curves by hand, tables with any characters, and nothing fetched."""

import dataclasses
import re

import numpy as np

from k3jax.study.curves import MAX_LINES, average, shown_groups
from k3jax.study.groups import compare
from k3jax.study.page import comparison_page
from k3jax.study.runs import Curve, read_runs
from tests.study.made_up import config, write_run, write_sweep


def curve(tokens, loss) -> Curve:
    return Curve(np.array(tokens, float), np.array(loss, float))


def test_the_mean_of_curves_by_hand():
    mean, error = average([curve([1, 2], [4, 2]), curve([1, 2], [6, 2])])
    assert mean.loss.tolist() == [5, 2] and error.tolist() == [1, 0]  # deviations of 1: sqrt(2) / sqrt(2)
    assert average([curve([1], [4])])[1] is None
    mean, error = average([curve([0, 10, 20], [3, 2, 1]), curve([10, 30], [4, 2])])  # both known from 10 to 20
    assert (mean.tokens[0], mean.tokens[-1]) == (10, 20)
    assert np.allclose(mean.loss[[0, -1]], [3.0, 2.0]) and np.allclose(error[[0, -1]], [1.0, 1.0])


def test_a_page_of_odd_names_and_hardly_any_runs(tmp_path):
    write_run(tmp_path / "<b>&", config(), {40: 2.0})
    write_run(tmp_path / "silent", config({"hidden_size": 64}), {20: None})
    text = comparison_page(compare(read_runs([tmp_path])), "a < b")
    assert "<title>a &lt; b</title>" in text and "&lt;b&gt;&amp;" in text and "<b>&" not in text
    outside = re.sub(r"data:image/png;base64,[^\"]*", "", text)
    assert "http" not in outside and "src=" in outside
    nothing = write_sweep(tmp_path / "new", count=1)  # no run has begun: a table of what they will cost
    text = comparison_page(compare(read_runs([nothing.path])), "x")
    assert "not begun" in text and "<img" not in text


def test_of_many_configurations_the_best_get_a_line(tmp_path):
    for i in range(MAX_LINES + 3):
        own = dataclasses.replace(config().optim, learning_rate=1e-3 * (i + 1))
        write_run(tmp_path / str(i), dataclasses.replace(config(), optim=own), {40: 3.0 - 0.1 * i})
    comparison = compare(read_runs([tmp_path]))
    shown = shown_groups(comparison)
    assert len(comparison.groups) == MAX_LINES + 3
    assert shown[0].labels["learning_rate"] == "0.004"  # the three smallest rates are the worst
    assert len(shown) == MAX_LINES
