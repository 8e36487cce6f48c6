"""Means, standard errors, budgets and flags of a comparison, against numbers worked out by hand."""

import dataclasses
import json

import numpy as np
import pytest

from k3jax.config import ConfigError
from k3jax.models.accounting import train_flops_per_token
from k3jax.study.groups import at_end, at_flops, at_tokens, best_within, compare, estimate
from k3jax.study.runs import Curve, read_runs
from k3jax.study.tables import latex, markdown, notes, summary_table
from k3jax.train.run_dir import RunRefused
from tests.study.made_up import config, seeds, write_run, write_sweep


def test_mean_and_standard_error_by_hand():
    value = estimate([2.0, 4.0, 9.0])  # deviations -3, -1, 4: variance 26 / 2 = 13, error sqrt(13 / 3)
    assert (value.mean, value.count) == (5.0, 3)
    assert value.error == pytest.approx(2.0816659994661)
    assert estimate([7.0]).error is None
    assert estimate([]) is None


def test_the_best_within_a_budget():
    curve = Curve(np.array([1000.0, 2000.0, 3000.0]), np.array([5.0, 3.0, 2.0]))
    assert best_within(curve, 999) is None
    assert best_within(curve, 1000) == (5.0, False)
    assert best_within(curve, 1500) == (4.0, True)
    assert best_within(curve, 9000) == (2.0, False)
    rising = Curve(curve.tokens, np.array([2.0, 3.0, 4.0]))
    assert best_within(rising, 2500) == (2.0, False)  # overfitted: the best was before


@pytest.fixture
def sweep(tmp_path):
    """Ratio 1 with three seeds that finished, ratio 3 with one that finished, one that failed, one not begun."""
    sweep = write_sweep(tmp_path / "sweep")
    runs = {run.path.name: run for run in read_runs([sweep.path])}

    def write(name, losses, **options):
        write_run(sweep.path / name, runs[name].config, losses, **options)

    for seed, end in enumerate((2.0, 2.2, 2.4)):
        write(f"kda_per_mla=1,seed={seed}", {20: 3.0, 40: end}, speed=1000.0 + 100 * seed)
    write("kda_per_mla=3,seed=0", {20: 3.5, 40: 2.5})
    write("kda_per_mla=3,seed=1", {20: 3.6}, state="unfinished")
    sweep.write_failures({"kda_per_mla=3,seed=1": "k3 train: error: not finite"})
    return sweep


def test_a_sweeps_table_by_hand(sweep):
    comparison = compare(read_runs([sweep.path]))
    table = summary_table(comparison)
    one, three = table.rows
    assert table.heading[:2] == ["kda_per_mla", "runs"]
    assert table.heading[-3:-1] == ["held-out loss", "at 4k tokens"]
    # Means 2.2 and 1100; standard deviations 0.2 and 100, over sqrt(3).
    assert one[:2] == ["1", "3"] and one[5:8] == ["4k", "1.1k ± 58", "2.2000 ± 0.1155"]
    assert three[:2] == ["3", "1 of 3"] and three[7] == "2.5000"
    assert {column for row, column in table.best if row == 0} == {7, 8, 9}
    said = "\n".join(notes(comparison))
    assert "One run alone, so no error bar: kda_per_mla=3." in said
    assert "Not counted: kda_per_mla=3,seed=1, failed at step 20 of 40: k3 train: error: not finite." in said
    assert "Not counted: kda_per_mla=3,seed=2, not begun." in said
    assert "FLAG" not in said


def test_unfinished_runs_count_where_asked(sweep):
    sweep.write_failures({})
    comparison = compare(read_runs([sweep.path]), unfinished="count")
    assert comparison.tokens == 2000  # as far as the shortest has come
    three = at_tokens(comparison.groups[1], comparison.tokens)
    assert (three.mean, three.count) == (pytest.approx(3.55), 2)


def test_equal_flops_by_hand(tmp_path):
    """The dearer model gets fewer tokens, to a point between two evaluations."""
    cheap, dear = config(), config({"intermediate_size": 200})
    write_run(tmp_path / "a", cheap, {20: 3.0, 40: 2.0})
    write_run(tmp_path / "b", dear, {20: 2.8, 40: 1.8})
    comparison = compare(read_runs([tmp_path / "a", tmp_path / "b"]))
    per_token = [train_flops_per_token(c.model, 32) for c in (cheap, dear)]
    assert comparison.flops == 4000 * per_token[0]
    tokens = 4000 * per_token[0] / per_token[1]
    assert 2000 < tokens < 4000
    a, b = comparison.groups
    assert at_flops(a, comparison.flops).mean == 2.0
    got = at_flops(b, comparison.flops)
    assert got.mean == pytest.approx(2.8 - (tokens - 2000) / 2000) and got.interpolated
    assert summary_table(comparison).rows[1][-1].startswith("~")
    assert any(line.startswith("~ lies between") for line in notes(comparison))


def test_runs_of_unequal_length_and_without_evaluations(tmp_path):
    write_run(tmp_path / "long", config(steps=80), {40: 2.0, 80: 1.0})
    write_run(tmp_path / "short", config(), {20: 3.0, 40: 2.1})
    write_run(tmp_path / "silent", config({"hidden_size": 64}), {20: None, 40: None})
    comparison = compare(read_runs([tmp_path]))
    by_name = {group.runs[0].path.name: group for group in comparison.groups}
    assert comparison.tokens == 4000
    assert at_tokens(by_name["long"], 4000).mean == 2.0 and at_end(by_name["long"]).mean == 1.0
    assert at_end(by_name["silent"]) is None and at_tokens(by_name["silent"], 4000) is None
    said = "\n".join(notes(comparison))
    assert "No evaluation on held-out text, so not among the losses: silent." in said
    assert "had not finished its learning-rate schedule" in said


def test_a_field_beside_the_swept_ones_is_flagged(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", count=2)
    for run in read_runs([sweep.path]):
        write_run(run.path, run.config, {40: 2.0})
    other = dataclasses.replace(
        config({"kda_per_mla": 7}), optim=dataclasses.replace(config().optim, learning_rate=0.5)
    )
    write_run(tmp_path / "other", other, {40: 2.0})
    comparison = compare(read_runs([sweep.path, tmp_path / "other"]))
    assert comparison.swept.fields == ("ModelConfig.kda_per_mla",)
    assert [group.extra for group in comparison.groups] == [{}, {}, {"OptimConfig.learning_rate": (0.5, 0.001)}]
    line = "FLAG: other: differs in more than ModelConfig.kda_per_mla: OptimConfig.learning_rate = 0.5, not 0.001."
    assert line in notes(comparison)
    assert summary_table(comparison).rows[2][1] == "learning_rate"
    told = compare(read_runs([sweep.path, tmp_path / "other"]), by=["OptimConfig.learning_rate"])
    assert told.groups[0].extra == {} and "ModelConfig.kda_per_mla" in told.groups[-1].extra


def test_what_is_compared_is_inferred_without_a_sweep(tmp_path):
    """The fewest fields that tell runs apart; of a field that goes along with them, the odd value is flagged."""
    for ratio, rate in ((0, 0.1), (1, 0.1), (10, 0.2)):
        for own in seeds(config({"kda_per_mla": ratio}, {"learning_rate": rate}), 2):
            write_run(tmp_path / f"r{ratio}-{own.train.seed}", own, {40: 2.0})
    comparison = compare(read_runs(sorted(tmp_path.iterdir())))
    assert comparison.swept == (("ModelConfig.kda_per_mla",), "inferred")
    assert [group.labels for group in comparison.groups] == [{"kda_per_mla": str(n)} for n in (0, 1, 10)]  # by size
    assert [bool(group.extra) for group in comparison.groups] == [False, False, True]


def test_settings_without_a_say_make_no_difference(tmp_path):
    write_run(tmp_path / "a", config(log_every=5), {40: 2.0})
    write_run(tmp_path / "b", config(log_every=10, seed=1), {40: 3.0})
    comparison = compare(read_runs([tmp_path / "a", tmp_path / "b", tmp_path / "a"]))
    assert [len(group.runs) for group in comparison.groups] == [2]


def test_an_evaluation_between_logged_steps_has_the_tokens_of_its_step(tmp_path):
    write_run(tmp_path / "a", config(), {20: None, 40: None})
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 30, "eval_loss": 2.0}) + "\n" + '{"step": 40, "eval_')  # torn by a kill
    run = read_runs([tmp_path / "a"])[0]
    assert run.heldout.tokens.tolist() == [3000.0] and run.heldout.loss.tolist() == [2.0]


def test_what_is_no_run_is_refused_in_a_line(tmp_path):
    for path, line in ((tmp_path, "is no run, no sweep"), (tmp_path / "x", "is not there")):
        with pytest.raises(RunRefused, match=line):
            read_runs([path])
    write_run(tmp_path / "a", config(), {40: 2.0})
    with pytest.raises(ConfigError, match="--by=seed: no such field"):
        compare(read_runs([tmp_path / "a"]), by=["seed"])


def test_markdown_and_latex(sweep):
    table = summary_table(compare(read_runs([sweep.path])))
    lines = markdown(table).splitlines()
    assert lines[0].startswith("| kda_per_mla | runs |")
    assert lines[1].startswith("| :-- | --: |")
    assert "| **2.2000 ± 0.1155** |" in lines[2] and "**" not in lines[3]
    text = latex(table)
    assert text.startswith("\\begin{tabular}{lrrrrrrrrr}\n\\toprule\nkda\\_per\\_mla & runs & ")
    assert "\\textbf{2.2000 $\\pm$ 0.1155}" in text and text.count("\\\\") == 3
