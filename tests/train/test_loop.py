"""The loop in one process: a run that crashes anywhere and resumes is the run that never did, to the bit."""

import dataclasses
import functools
import json
import os
import signal
import sys
import types

import jax
import numpy as np
import pytest

from k3jax.checkpoint.manager import Checkpoints
from k3jax.config import ConfigError, TrainConfig
from k3jax.errors import UserError
from k3jax.train import evaluate as evaluate_module
from k3jax.train import loop
from k3jax.train.claim import Claim
from k3jax.train.loop import RunError, train
from k3jax.train.mesh import make_mesh
from k3jax.train.metrics import TIMING_FIELDS, read_metrics
from k3jax.train.state import abstract_state
from tests.train.tiny_run import tiny_config, write_text


class Crash(BaseException):
    """Stands for the end of the process."""


@functools.cache
def _compiled(make, config, mesh):
    return make(config, mesh)


def _once(make):
    """The same compiled step for all runs of this file that compute the same."""

    def cached(config, mesh):
        train_config = TrainConfig(steps=config.train.steps, num_microbatches=config.train.num_microbatches)
        return _compiled(make, dataclasses.replace(config, train=train_config), mesh)

    return cached


@pytest.fixture(scope="module", autouse=True)
def one_compilation():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_train_step", _once(loop.make_train_step))
        patch.setattr(loop, "make_eval_step", _once(loop.make_eval_step))
        patch.setattr(loop, "make_state", _kept_state(loop.make_state))
        patch.setattr(loop, "abstract_state", _abstract)
        patch.setattr(loop, "write_diagnostics", lambda workdir, config, variables, batch: None)
        report = types.ModuleType("k3jax.train.report")
        report.write_report = lambda workdir: (workdir / "report.html").write_text("report")
        patch.setitem(sys.modules, "k3jax.train.report", report)
        jax.config.update("jax_disable_most_optimizations", True)  # compile fast; ten steps are taken
        yield
        jax.config.update("jax_disable_most_optimizations", False)


_abstract = functools.cache(abstract_state)


def _kept_state(make):
    kept = functools.cache(lambda config, mesh: jax.device_get(make(config, mesh)))

    def placed(config, mesh, variables):
        if variables is not None:
            return make(config, mesh, variables)
        return jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), kept(config, mesh), _abstract(config, mesh))

    return placed


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def config(text):
    return tiny_config(text)


def run(workdir, config):
    with Claim(workdir, config) as claim:
        return train(config, claim)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, config, one_compilation):
    """A run from start to end."""
    workdir = tmp_path_factory.mktemp("reference") / "run"
    assert run(workdir, config).status == "finished"
    return workdir


def final(workdir, config):
    """Everything that must be equal: the last checkpoint, and the metrics but for timing."""
    with Checkpoints(workdir / "checkpoints", keep=None) as checkpoints:
        state, values = checkpoints.restore(config.train.steps, _abstract(config, make_mesh(config.mesh)))
    leaves = [(jax.tree_util.keystr(path), np.asarray(x)) for path, x in jax.tree_util.tree_leaves_with_path(state)]
    records = [{k: v for k, v in r.items() if k not in TIMING_FIELDS} for r in read_metrics(workdir / "metrics.jsonl")]
    return {name: (x.dtype, x.tobytes()) for name, x in leaves}, values, records


def assert_same_run(workdir, reference, config):
    got, want = final(workdir, config), final(reference, config)
    assert got[0] == want[0], [name for name in want[0] if got[0].get(name) != want[0][name]]
    assert got[1] == want[1]
    assert got[2] == want[2]


def at_step(monkeypatch, number, action):
    """Does something when a step has been computed, before the loop knows."""
    make = loop.make_train_step

    def wrapped(config, mesh):
        step = make(config, mesh)

        def train_step(state, batch):
            result = step(state, batch)
            if int(result[0].step) == number:
                action()
            return result

        return train_step

    monkeypatch.setattr(loop, "make_train_step", wrapped)


def crash():
    raise Crash


def test_a_run_directory_explains_itself(reference, config):
    assert {p.name for p in reference.iterdir()} == {
        ".lock", "config.gin", "config.json", "versions.json", "parameters.txt", "metrics.jsonl", "checkpoints",
        "tensorboard", "report.html", "summary.json",
    }  # fmt: skip
    assert sorted(os.listdir(reference / "checkpoints")) == ["12", "8"]  # keep_checkpoints = 2
    table = (reference / "parameters.txt").read_text()
    assert "embed" in table and "257x32" in table
    size = sum(x.size for x in jax.tree.leaves(abstract_state(config, make_mesh(config.mesh)).params))
    assert f"{size:,} trained values" in table
    summary = json.loads((reference / "summary.json").read_text())
    assert summary["step"] == 12 and 0 < summary["eval_bits_per_byte"] < 8


def test_metrics_of_a_run(reference):
    records = read_metrics(reference / "metrics.jsonl")
    training = [r for r in records if "loss" in r]
    assert [r["step"] for r in training] == [1, 2, 4, 6, 8, 10, 12]
    assert [r["step"] for r in records if "eval_loss" in r] == [5, 10, 12]
    assert [r["step"] for r in records] == sorted(r["step"] for r in records)
    first, last = training[0], training[-1]
    # A fresh model guesses evenly among 257 tokens.
    assert first["loss"] == pytest.approx(np.log(257), abs=0.1)
    assert last["loss"] < first["loss"] - 0.2
    assert last["tokens"] > 11 * 8 * 32 * 0.9 and last["skipped"] == 0
    for r in training:
        # Two of four experts for every token: the loads of the one MoE layer add up to twice the step's tokens.
        (load,) = r["load"].values()
        assert len(load) == 4 and sum(load) % 2 == 0 and 0 < sum(load) <= 2 * 8 * 32
        assert r["max_violation"] == pytest.approx(max(load) / (sum(load) / 4) - 1)
    assert "tokens_per_second" not in first  # it was compiled
    assert all(r["step_seconds"] > 0 and r["tokens_per_second"] > 0 for r in training[1:])
    evaluation = records[-1]
    assert evaluation["eval_bits_per_byte"] == pytest.approx(evaluation["eval_loss"] / np.log(2), rel=0.05)


@pytest.mark.parametrize("step", [1, 4, 7, 12])
def test_crashed_and_resumed_is_never_crashed(tmp_path, config, reference, monkeypatch, step):
    with monkeypatch.context() as patch:
        at_step(patch, step, crash)
        with pytest.raises(Crash):
            run(tmp_path / "run", config)
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 12, "loss": 0.1')  # what a kill may leave
    assert run(tmp_path / "run", config) == loop.Outcome("finished", 12)
    assert_same_run(tmp_path / "run", reference, config)


@pytest.mark.parametrize(
    ("number", "step", "said"),
    [
        (signal.SIGTERM, 6, "SIGTERM: stopping after this step, then saving; again"),
        (signal.SIGINT, 1, "SIGINT: still compiling; stops as soon as that returns; again"),
    ],
)
def test_a_signal_stops_after_the_step_saves_and_resumes(
    tmp_path, config, reference, monkeypatch, capfd, number, step, said
):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        at_step(patch, step, lambda: os.kill(os.getpid(), number))
        assert run(tmp_path / "run", config) == loop.Outcome("stopped", step, number)
    out, err = capfd.readouterr()
    assert said in err and "compiling the training step (may take a minute)\n" in out
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert str(step) in os.listdir(tmp_path / "run" / "checkpoints")
    assert run(tmp_path / "run", config).status == "finished"
    assert_same_run(tmp_path / "run", reference, config)


@pytest.mark.parametrize("step", [5, 12])
def test_a_signal_while_evaluating_stops_at_once(tmp_path, config, reference, monkeypatch, step):
    batches = []

    def interrupted(make):
        def wrapped(config, mesh):
            evaluate = make(config, mesh)

            def eval_step(variables, batch):
                if not batches and read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] >= step - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                    batches.append(batch)
                return evaluate(variables, batch)

            return eval_step

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(loop, "make_eval_step", interrupted(loop.make_eval_step))
        assert run(tmp_path / "run", config) == loop.Outcome("stopped", step, signal.SIGTERM)
    assert not (tmp_path / "run" / "summary.json").exists()
    # The evaluation that was given up is made up for, so that the metrics are the same.
    assert run(tmp_path / "run", config).status == "finished"
    assert_same_run(tmp_path / "run", reference, config)


def test_a_signal_before_the_first_step_loses_nothing(tmp_path, config, reference, monkeypatch, capfd):
    make = loop.make_state

    def slow(*args):
        os.kill(os.getpid(), signal.SIGTERM)  # as while it compiles
        return make(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "make_state", slow)
        assert run(tmp_path / "run", config) == loop.Outcome("stopped", 0, signal.SIGTERM)
    assert "SIGTERM: still starting; stops as soon as that is done" in capfd.readouterr().err
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["0"]
    assert run(tmp_path / "run", config).status == "finished"
    assert_same_run(tmp_path / "run", reference, config)


def test_how_often_is_evaluated_logged_and_saved_changes_no_bit(tmp_path, text, config, reference):
    other = tiny_config(text, eval_every=1, log_every=5, checkpoint_every=3)
    run(tmp_path / "run", other)
    got, want = final(tmp_path / "run", other), final(reference, config)
    assert got[:2] == want[:2]
    heldout = [{r["step"]: r["eval_loss"] for r in records if "eval_loss" in r} for records in (got[2], want[2])]
    assert len(heldout[0]) == 12
    assert heldout[0].items() >= heldout[1].items()


def test_a_failed_save_stops_the_run_in_one_line(tmp_path, config, reference, monkeypatch):
    from orbax.checkpoint._src.path.atomicity import AtomicRenameTemporaryPath as Temporary

    finalize = Temporary.finalize

    async def full(self, *args, **kwargs):
        if "/8." in str(self.get()):
            raise OSError(28, "No space left on device")
        return await finalize(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Temporary, "finalize", full)
        with pytest.raises(RunError, match=r"checkpoints/8 could not be saved: .*No space left") as caught:
            run(tmp_path / "run", config)
    assert "newest complete checkpoint is of step 4" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert run(tmp_path / "run", config).status == "finished"
    assert_same_run(tmp_path / "run", reference, config)


def nonfinite_steps(monkeypatch, steps):
    """Makes the loop believe that these steps were skipped."""
    make = loop.make_train_step

    def wrapped(config, mesh):
        step = make(config, mesh)

        def train_step(state, batch):
            before = int(state.streak)
            state, metrics = step(state, batch)
            if int(state.step) in steps:
                metrics = metrics | {"nonfinite": np.array(True), "loss": np.array(np.nan)}
                state = state._replace(streak=jax.device_put(np.int32(before + 1), state.streak.sharding))
            return state, metrics

        return train_step

    monkeypatch.setattr(loop, "make_train_step", wrapped)
    monkeypatch.setattr(loop, "explain_nonfinite", lambda config, state, batch: "layer 2 (MLA) went bad")


def test_too_many_nonfinite_steps_in_a_row_stop_the_run(tmp_path, text, monkeypatch, capsys):
    config = tiny_config(text, max_nonfinite_steps=3)
    nonfinite_steps(monkeypatch, {2, 4, 6, 7, 8})
    with pytest.raises(
        RunError, match=r"at step 8, 3 in a row .*max_nonfinite_steps.*layer 2 \(MLA\) went bad\. Newest"
    ) as caught:
        run(tmp_path / "run", config)
    assert "\n" not in str(caught.value)
    out = capsys.readouterr().out
    # Step 3 was finite and on its way before step 2 was looked at; after step 4, which saves, nothing was.
    assert "step 2: not finite, so skipped (1 in all): layer 2 (MLA) went bad (seen with the param" in out
    assert "step 4: not finite, so skipped (2 in all): layer 2 (MLA) went bad\n" in out
    assert "step 7: not finite, so skipped (4 in all): layer 2 (MLA) went bad\n" in out
    records = {r["step"]: r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r}
    assert [records[step]["skipped"] for step in (1, 2, 4, 6, 8)] == [0, 1, 2, 3, 5]
    assert records[2]["loss"] is None  # NaN is no JSON


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path, text):
    config = tiny_config(text, model={"vocab_size": 256})
    with pytest.raises(ConfigError, match=r"ModelConfig\.vocab_size = 256: .* set it to 257"):
        run(tmp_path / "run", config)


def test_a_configuration_that_failed_its_checks_can_be_corrected_in_place(tmp_path, text, config, reference):
    for wrong in (
        tiny_config(text, data={"batch_size": 12}),
        tiny_config(text, model={"vocab_size": 256}),
        tiny_config(text / "nowhere"),
    ):
        with pytest.raises(ValueError):
            run(tmp_path / "run", wrong)
    assert run(tmp_path / "run", config).status == "finished"
    assert_same_run(tmp_path / "run", reference, config)


def test_a_failed_report_leaves_the_run_finished(tmp_path, config, reference, monkeypatch, capsys):
    def fail(workdir):
        raise RuntimeError("no font\nat all")

    monkeypatch.setattr(sys.modules["k3jax.train.report"], "write_report", fail)
    assert run(tmp_path / "run", config).status == "finished"
    assert "k3: trained and saved; the report failed: no font\n" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 12
    assert_same_run(tmp_path / "run", reference, config)


def test_a_run_begins_with_a_checkpoint_and_says_so(tmp_path, text, config, reference, monkeypatch):
    settings = {"steps": 12, "init_from": str(reference), "init_tensors": ("params/*",)}
    mine = tiny_config(text, **settings)
    with pytest.raises(UserError, match="no tensor is called 'param/"):
        run(tmp_path / "run", tiny_config(text, **settings | {"init_tensors": ("param/*",)}))
    assert not (tmp_path / "run" / "config.json").exists()
    assert run(tmp_path / "run", mine).status == "finished"
    record = (tmp_path / "run" / "init_from.txt").read_text()
    assert f"began with {reference}" in record
    assert "fresh: 1 tensors\n  router/layer */moe/bias   layers 2\n" in record
    before, after = ([r["loss"] for r in read_metrics(path / "metrics.jsonl") if "loss" in r]
                     for path in (reference, tmp_path / "run"))  # fmt: skip
    assert abs(after[0] - before[-1]) < abs(after[0] - before[0])
    crashed = tmp_path / "crashed"  # resumes from its own checkpoint, not from the one it began with
    with monkeypatch.context() as patch:
        at_step(patch, 7, crash)
        with pytest.raises(Crash):
            run(crashed, mine)
    assert run(crashed, mine).status == "finished"
    assert_same_run(crashed, tmp_path / "run", mine)


def test_tokens_are_counted_rather_than_targets(tmp_path, config, monkeypatch):
    make = loop.make_train_step

    def counting(config, mesh):
        step = make(config, mesh)

        def train_step(state, batch):
            state, metrics = step(state, batch)
            return state, metrics | {"num_tokens": np.int32(1000), "num_targets": np.int32(1)}

        return train_step

    monkeypatch.setattr(loop, "make_train_step", counting)
    run(tmp_path / "run", config)
    for r in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert r.get("tokens", 1000 * r["step"]) == 1000 * r["step"]
        if "step_seconds" in r:
            assert r["tokens_per_second"] * r["step_seconds"] == pytest.approx(1000)


@pytest.mark.parametrize("stop", [False, True])
def test_evaluation_closes_what_it_reads_from(stop):
    class Batches:
        closed = False

        def __iter__(self):
            return iter([None, None])

        def close(self):
            self.closed = True

    batches = Batches()
    side = types.SimpleNamespace(num_rows=2, num_targets=10, num_bytes=10)
    dataset = types.SimpleNamespace(heldout=side, heldout_batches=lambda index, count: batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate_module, "shard_batch", lambda batch, mesh: batch)
        sums = {"nats": 10.0, "count": 5, "correct": 1}
        result = evaluate_module.evaluate(lambda variables, batch: sums, {}, dataset, None, stop)
    assert batches.closed
    assert result == (None if stop else (2.0, pytest.approx(2 / np.log(2)), 0.2, 10))
