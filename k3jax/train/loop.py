"""The training loop: start or go on, step, measure, evaluate, save, finish.

The host stays one step ahead of the devices: it looks at a step's metrics after the next step is on its way, so
that the devices never wait for it, and never has more than two steps' batches on them.
"""

import contextlib
import json
import logging
import time
from typing import Any, Literal, NamedTuple

import jax

from k3jax.checkpoint.manager import CheckpointError, Checkpoints
from k3jax.config import Config
from k3jax.data import Batch, TextDataset, check_vocabulary, load_dataset
from k3jax.models.accounting import count_parameters, train_flops_per_token
from k3jax.models.kimi_k3 import compute_dtype, init_variables
from k3jax.train.balance import layer_values
from k3jax.train.claim import Claim
from k3jax.train.diagnose import explain_nonfinite
from k3jax.train.diagnostics import write_diagnostics
from k3jax.train.evaluate import evaluate
from k3jax.train.mesh import check_batch, make_mesh, replicated, shard_batch
from k3jax.train.metrics import MetricsLog, bits_per_byte, load_interval, peak_flops, read_metrics, violations
from k3jax.train.parameter_table import parameter_table
from k3jax.train.progress import Progress, warn
from k3jax.train.run_dir import RunDir, write_atomically
from k3jax.train.signals import AFTER_STEP, COMPILING, STARTING, StopRequest
from k3jax.train.start import RECORD, keep_beside, load_start, plan_start
from k3jax.train.state import abstract_state, make_state
from k3jax.train.step import make_eval_step, make_train_step
from k3jax.train.versions import record_versions

logger = logging.getLogger(__name__)


class RunError(RuntimeError):
    """A run that had to stop; one line that says why and what to do."""


class Outcome(NamedTuple):
    """How a call of `train` ended.

    Attributes:
        status: "finished", or "stopped" by a signal after a checkpoint was written.
        step: steps taken in all.
        signal: the signal's number, or None.
    """

    status: Literal["finished", "stopped"]
    step: int
    signal: int | None = None


def train(config: Config, claim: Claim) -> Outcome:
    """Trains from the run's newest checkpoint, or from the start, to the last step.

    Args:
        config: the whole run.
        claim: the run directory, held by this process; its status is not "finished".
    Returns:
        How it ended.
    Raises:
        UserError: settings that cannot work with these devices, this text or TrainConfig.init_from's checkpoint.
        RunRefused: the text is not what the run was trained on, or these devices compute in another dtype.
        RunError: too many steps in a row that were not finite, or a checkpoint that could not be written.
    """
    mesh = make_mesh(config.mesh)
    check_batch(config, mesh)
    dataset = load_dataset(config.data)
    check_vocabulary(config, dataset.tokenizer.vocab_size)
    if config.train.init_from is not None and claim.status == "new":
        plan_start(config)  # so that one that cannot begin leaves no run behind
    claim.write_config()
    checkpoints = None
    try:
        with StopRequest() as stop, Checkpoints(claim.run.checkpoints, config.train.keep_checkpoints) as checkpoints:
            return _Training(config, claim.run, mesh, dataset, checkpoints, stop).run()
    except CheckpointError as error:
        newest = None if checkpoints is None else checkpoints.latest()
        rest = "no checkpoint is complete" if newest is None else f"the newest complete checkpoint is of step {newest}"
        raise RunError(f"{error}; the run is stopped, {rest}") from error


class _Pending(NamedTuple):
    """A step that is on its way on the devices."""

    step: int
    metrics: dict[str, Any]
    batch: Batch


class _Clock:
    """Time that steps take, without pauses for compilation, evaluation and saving."""

    def __init__(self):
        self.restart()
        self.clear()

    def restart(self) -> None:
        """Leaves out what has passed since the last tick."""
        self._last = time.perf_counter()

    def tick(self, tokens: int) -> None:
        now = time.perf_counter()
        self.seconds += now - self._last
        self.steps += 1
        self.tokens += tokens
        self._last = now

    def clear(self) -> None:
        self.seconds, self.steps, self.tokens = 0.0, 0, 0


class _Training:
    """One process's share of a run, from where it stands to the end or a signal."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        mesh: jax.sharding.Mesh,
        dataset: TextDataset,
        checkpoints: Checkpoints,
        stop: StopRequest,
    ):
        self.config, self.run_dir, self.mesh, self.dataset = config, run, mesh, dataset
        self.checkpoints, self.stop = checkpoints, stop
        self.progress, self.clock = Progress(config.train.steps), _Clock()
        self.train_step, self.eval_step = make_train_step(config, mesh), make_eval_step(config, mesh)
        self.batches = dataset.train_batches(jax.process_index(), jax.process_count())
        self.pending: _Pending | None = None
        self.step = self.tokens = 0
        self.warm = False  # whether the step is compiled
        self.fault = ""  # what made the current streak of steps non-finite
        kind = jax.devices()[0].device_kind
        self.peak = peak_flops(kind)
        self.flops_per_token = train_flops_per_token(config.model, config.data.seq_len)
        stop.promise = STARTING
        self._start()

    def _start(self) -> None:
        """Makes or restores the state, and cuts the metrics to it."""
        config, run, newest = self.config, self.run_dir, self.checkpoints.latest()
        dtype = compute_dtype(config.model).name
        for change in record_versions(run, self.dataset.fingerprint, dtype, newest or 0):
            warn(f"going on with another {change}; results may differ in the last bits")
        self.progress.say(self._describe())
        if newest is None:
            self.state = make_state(config, self.mesh, self._first_variables())
            table = parameter_table(config.model, self.state.params)
            write_atomically(run.parameters, table)
        else:
            self.state, loop = self.checkpoints.restore(newest, abstract_state(config, self.mesh))
            self.batches.set_state(loop["data"])
            self.step, self.tokens = newest, loop["tokens"]
            self.progress.say(f"resuming {run.path} at step {newest}")
        self.skipped, self.streak = int(self.state.skipped), int(self.state.streak)
        self.saved = newest
        self.log = MetricsLog(run.metrics, run.tensorboard, self.step)
        self.evaluated = max((r["step"] for r in read_metrics(run.metrics) if "eval_loss" in r), default=0)

    def _first_variables(self) -> dict[str, Any] | None:
        """What TrainConfig.init_from gives, on the mesh; None without it."""
        if self.config.train.init_from is None:
            return None
        start = plan_start(self.config)
        shapes = abstract_state(self.config, self.mesh).variables
        fresh = None
        if start.fresh:
            fresh = init_variables(self.config.model, self.config.train.seed, replicated(self.mesh))
        variables = load_start(start, shapes, fresh)
        if jax.process_index() == 0:
            keep_beside(start, self.run_dir.path)
            write_atomically(self.run_dir.path / RECORD, start.record())
        for line in start.differences:
            warn(f"the model differs from {start.source.path}: {line}")
        self.progress.say(start.summary())
        return variables

    def run(self) -> Outcome:
        try:
            with self.progress:
                self._steps()
                if self.stop:
                    return Outcome("stopped", self.step, self.stop.received)
                self._finish()
                return Outcome("finished", self.step)
        finally:
            self.batches.close()
            self.log.close()

    def _steps(self) -> None:
        settings = self.config.train
        self._pause()  # an evaluation that a kill has prevented
        while self.step < settings.steps and not self.stop:
            batch = shard_batch(next(self.batches), self.mesh)
            if not self.warm:
                self.progress.say("compiling the training step (may take a minute)")
                self.stop.promise = COMPILING
            self.state, metrics = self.train_step(self.state, batch)
            self.step += 1
            self._observe()
            self.pending = _Pending(self.step, metrics, batch)
            self.checkpoints.check()
            self.progress.step(self.step)
            if not self.warm:
                self._observe()
                self.clock.restart()
                self.warm, self.stop.promise = True, AFTER_STEP
            if self.step % settings.checkpoint_every == 0 or self.step == settings.steps:
                self._save()
            self._pause()
        self._observe()
        self._save()

    def _pause(self) -> None:
        """Evaluates if it is time to."""
        settings, step = self.config.train, self.step
        due = step > 0 and (step % settings.eval_every == 0 or step == settings.steps)
        if not due or self.evaluated == step or self.stop:
            return
        self._observe()
        start = time.perf_counter()
        result = evaluate(self.eval_step, self.state.variables, self.dataset, self.mesh, self.stop)
        if result is not None:
            record = {"step": step, **{f"eval_{name}": value for name, value in result._asdict().items()}}
            self.log.write({**record, "eval_seconds": time.perf_counter() - start})
            self.evaluated = step
            bits = "" if result.bits_per_byte is None else f"  {result.bits_per_byte:.3f} bits/byte"
            self.progress.say(f"step {step}: held-out loss {result.loss:.4f}{bits}  accuracy {result.accuracy:.1%}")
        self.clock.restart()

    def _observe(self) -> None:
        """Waits for the pending step, and accounts for it."""
        if self.pending is None:
            return
        step, metrics, batch = self.pending
        self.pending = None
        nonfinite, tokens = jax.device_get((metrics["nonfinite"], metrics["num_tokens"]))
        self.tokens += int(tokens)
        if self.warm:
            self.clock.tick(int(tokens))
        self.streak = self.streak + 1 if nonfinite else 0
        if step % self.config.train.log_every == 0 or step in (1, self.config.train.steps):
            self._log(step, jax.device_get(metrics), bool(nonfinite))
        if nonfinite:
            self._report_nonfinite(step, batch)

    def _log(self, step: int, metrics: dict[str, Any], nonfinite: bool) -> None:
        config, train_text = self.config, self.dataset.train
        loss = float(metrics["loss"])
        record: dict[str, Any] = {"step": step, "loss": loss, "tokens": self.tokens}
        record["bits_per_byte"] = bits_per_byte(loss, train_text.num_targets, train_text.num_bytes)
        record["epoch"] = step * config.data.batch_size / train_text.num_rows
        for name in ("learning_rate", "grad_norm", "accuracy", "z_loss", "aux_loss"):
            record[name] = float(metrics[name])
        record["skipped"] = self.skipped + nonfinite
        load = {n: x.tolist() for n, x in layer_values(config.model, metrics["load"], "moe", "load").items()}
        if load:
            by_layer = violations(list(load.values()))
            record["max_violation"] = sum(by_layer) / len(by_layer)
            record["max_violation_worst"] = max(by_layer)
            record["max_violation_by_layer"] = dict(zip(map(str, load), by_layer, strict=True))
            interval = config.train.log_every * load_interval(len(load), config.model.num_experts)
            if step % interval == 0 or step in (1, config.train.steps):
                record["load"] = {str(layer): load_E for layer, load_E in load.items()}
        if self.clock.steps:
            record["step_seconds"] = self.clock.seconds / self.clock.steps
            record["tokens_per_second"] = rate = self.clock.tokens / self.clock.seconds
            if self.peak is not None:
                record["mfu"] = rate * self.flops_per_token / (self.peak * self.mesh.size)
            self.clock.clear()
        self.log.write(record)
        self.progress.record(record)

    def _report_nonfinite(self, step: int, batch: Batch) -> None:
        self.skipped += 1
        if not self.fault or self.streak == 1:
            self.fault = explain_nonfinite(self.config, self.state, batch)
            if int(self.state.streak) == 0:  # the step that was already on its way was finite, and moved them
                self.fault += " (seen with the parameters one step later)"
            self.clock.restart()
        self.progress.say(f"step {step}: not finite, so skipped ({self.skipped} in all): {self.fault}")
        if self.streak >= self.config.train.max_nonfinite_steps:
            raise RunError(
                f"stopped at step {step}, {self.streak} in a row not finite (TrainConfig.max_nonfinite_steps): "
                f"{self.fault}. Newest checkpoint: step {self.saved or 0}; try a lower OptimConfig.learning_rate"
            )

    def _save(self) -> None:
        """Saves the state unless this step is saved already; what was measured up to it is on disk before."""
        if self.saved == self.step:
            return
        self._observe()
        self.log.sync()
        self.checkpoints.save(self.step, self.state, {"data": self.batches.get_state(), "tokens": self.tokens})
        self.saved = self.step
        self.clock.restart()

    def _finish(self) -> None:
        """Writes what a finished run leaves; the summary last, because it says that all is there."""
        self.checkpoints.wait()
        self.log.sync()
        try:
            self._write_report()
        except Exception as error:  # nothing that was trained depends on it
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            warn(f"trained and saved; the report failed: {reason}")
            logger.debug("the report failed", exc_info=True)
        records = read_metrics(self.run_dir.metrics)
        summary: dict[str, Any] = {}
        for record in records:
            summary |= {name: value for name, value in record.items() if isinstance(value, (int, float))}
        write_atomically(self.run_dir.summary, json.dumps(summary, indent=2) + "\n")

    def _write_report(self) -> None:
        """Looks into the model on a batch of held-out text, or of the training text without, and draws."""
        from k3jax.train.report import write_report  # here, because matplotlib takes a second to load

        share = jax.process_index(), jax.process_count()
        batches = self.dataset.heldout_batches(*share) if self.dataset.heldout.num_rows else self.batches
        with contextlib.closing(batches):
            batch = next(batches)
        write_diagnostics(self.run_dir.path, self.config, self.state.variables, batch)
        write_report(self.run_dir.path)

    def _describe(self) -> str:
        """The model, the data and the devices in one line."""
        table, text, device = count_parameters(self.config.model), self.dataset.train, jax.devices()[0]
        return (
            f"{table.total:,} parameters ({table.active:,} active a token); {text.num_bytes:,} bytes of text in "
            f"{text.num_rows:,} rows of {text.seq_len} an epoch, {self.dataset.heldout.num_bytes:,} held out; "
            f"{self.mesh.size} x {device.device_kind}"
        )
