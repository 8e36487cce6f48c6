"""The runs of a sweep as processes of their own: several at a time, one after the other, until all are done."""

import contextlib
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from k3jax.in_use import is_in_use
from k3jax.study.plan import PlannedRun, SweepDir
from k3jax.train.figures import duration
from k3jax.train.run_dir import RunDir
from k3jax.train.signals import StopRequest
from launch.sweep_progress import SweepProgress, last_record

POLL_SECONDS = 0.1
STOPPED = {128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT}  # exit statuses
LINE = 300  # characters of a failure's line
GPU_MEMORY = 0.75  # the part that jax takes by default


class Outcome(NamedTuple):
    """How a call of `run_all` ended, by the names of runs.

    Attributes:
        finished: now or before.
        failed: the last line of each failure, now or before.
        stopped: saved part way, by a signal to the sweep or to the run.
        signal: that stopped the sweep, or None.
    """

    finished: list[str]
    failed: dict[str, str]
    stopped: list[str]
    signal: int | None


class _Job(NamedTuple):
    run: PlannedRun
    process: subprocess.Popen
    log_start: int  # where in the log this attempt begins
    started: float


def train_command(config: pathlib.Path, workdir: pathlib.Path) -> list[str]:
    """The command that trains one run, or goes on with it."""
    child = [sys.executable, "-m", "launch.sweep_child", str(os.getpid())]
    return [*child, "train", f"--gin_file={config}", f"--workdir={workdir}"]


def run_all(sweep: SweepDir, runs: Sequence[PlannedRun], jobs: int) -> Outcome:
    """Trains every run that is neither finished nor noted as failed; a signal stops all, saved.

    Args:
        sweep: where the runs lie; failures are noted there as they happen.
        runs: in the order to start them.
        jobs: how many at a time.
    Returns:
        Outcome.
    """
    finished = [run.name for run in runs if RunDir(sweep.path / run.name).status() == "finished"]
    failed = {name: line for name, line in sweep.read_failures().items() if name not in finished}
    waiting = [run for run in runs if run.name not in finished and run.name not in failed]
    running: list[_Job] = []
    stopped: list[str] = []
    told = False
    with StopRequest() as stop, SweepProgress(len(runs)) as progress, contextlib.ExitStack() as at_exit:
        at_exit.callback(_stop, running)  # whatever goes wrong here, no run stays behind
        for run in runs:
            if run.name in failed:
                progress.say(f"failed before, not tried again: {run.name}: {failed[run.name]}")
        while waiting or running:
            if stop and not told:
                waiting, told = [], True
                _stop(running)
            while len(running) < jobs and (run := _free(sweep, waiting, progress)) is not None:
                waiting.remove(run)
                running.append(_start(sweep, run, jobs))
                progress.say(f"{len(finished) + len(failed) + len(stopped) + len(running)}/{len(runs)} {run.name}")
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                _account(sweep, job, finished, failed, stopped, progress)
            paths = [sweep.path / job.run.name for job in running]
            progress.show(paths, [job.run.config.train.steps for job in running], len(finished), len(failed))
            if running or waiting:
                time.sleep(POLL_SECONDS)
        return Outcome(finished, failed, stopped, stop.received)


def _stop(running: list[_Job]) -> None:
    """Asks each run to save and end; once, because a second signal ends it at once."""
    for job in running:
        job.process.send_signal(signal.SIGTERM)


def _free(sweep: SweepDir, waiting: list[PlannedRun], progress: SweepProgress) -> PlannedRun | None:
    """The first waiting run that no process is at work in, such as one that a killed sweep has left."""
    for run in waiting:
        if not is_in_use(sweep.path / run.name):
            return run
        progress.say_once(f"waiting for the process that is at work in {run.name}")
    return None


def _start(sweep: SweepDir, run: PlannedRun, jobs: int) -> _Job:
    environment = dict(os.environ)
    # Seeds share their compiled steps. By machine, because code for one CPU need not run on another.
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(sweep.compilations / platform.node()))
    if jobs > 1 and "XLA_PYTHON_CLIENT_PREALLOCATE" not in environment:
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{GPU_MEMORY / jobs:.2f}")  # runs share a GPU
    with open(sweep.log(run.name), "ab") as log:
        start = log.seek(0, os.SEEK_END)
        # In a session of its own, so that Ctrl-C reaches the sweep alone, which tells each run once.
        process = subprocess.Popen(
            train_command(sweep.config(run.name), sweep.path / run.name),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return _Job(run, process, start, time.monotonic())


def _account(
    sweep: SweepDir, job: _Job, finished: list[str], failed: dict[str, str], stopped: list[str], progress: SweepProgress
) -> None:
    """Notes how a process has ended."""
    name, code, run = job.run.name, job.process.returncode, RunDir(sweep.path / job.run.name)
    if code == 0 and run.status() == "finished":
        finished.append(name)
        loss = last_record(run.metrics, "eval_loss")
        heldout = f", held-out loss {loss['eval_loss']:.4f}" if loss else ""
        progress.say(f"finished {name} in {duration(time.monotonic() - job.started)}{heldout}")
    elif code in STOPPED:
        stopped.append(name)
        record = last_record(run.metrics, "loss")
        progress.say(f"stopped {name}" + (f" at step {record['step']}" if record else ""))
    else:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
        line = ": ".join(filter(None, (how, _last_line(sweep.log(name), job.log_start)))) or f"exit status {code}"
        failed[name] = line
        sweep.write_failures(failed)
        progress.say(f"failed {name}: {line}")


def _last_line(log: pathlib.Path, start: int) -> str:
    with open(log, "rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next((line[:LINE] for line in reversed(lines) if line), "")
