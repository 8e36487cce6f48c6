"""`k3 train`, `eval` and `generate` as a user has them: processes that are killed, stopped, refused and resumed."""

import errno
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from k3jax.checkpoint.manager import Checkpoints
from k3jax.config import to_dict
from k3jax.config_text import config_to_gin
from k3jax.data import ByteTokenizer
from k3jax.train.claim import Claim
from k3jax.train.metrics import TIMING_FIELDS, read_metrics
from k3jax.train.run_dir import RunDir, write_atomically
from k3jax.train.state import abstract_state
from launch.__main__ import main
from tests.train.tiny_run import snapshot, tiny_config, write_text

STEPS = 40
REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A configuration in a gin file, and a command line whose processes share their compilations."""
    root = tmp_path_factory.mktemp("cli")
    config = tiny_config(write_text(root / "text"), steps=STEPS, log_every=1, eval_every=15, checkpoint_every=7)
    (root / "b.jsonl").write_text('{"body": "not in the field text"}\n')
    (root / "tiny.gin").write_text(config_to_gin(config))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        # One device, and no time spent on fast code.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "JAX_COMPILATION_CACHE_DIR": str(root / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return World(root, config, environment)


class World:
    def __init__(self, root, config, environment):
        self.root, self.config, self.environment = root, config, environment

    def start(self, verb, *arguments):
        command = [sys.executable, "-m", "launch", verb, *map(str, arguments)]
        return subprocess.Popen(
            command, cwd=self.root, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def finish(self, process):
        out, err = process.communicate(timeout=600)
        assert "Traceback" not in err, err
        return process.returncode, out, err

    def run(self, verb, *arguments):
        return self.finish(self.start(verb, *arguments))

    def train(self, name):
        return self.start("train", f"--gin_file={self.root / 'tiny.gin'}", f"--workdir={self.root / name}")

    def wait_for_step(self, process, name, step):
        """Returns as soon as a step has been logged."""
        path = self.root / name / "metrics.jsonl"
        while process.poll() is None:
            if path.exists() and path.read_bytes().count(b'"loss"') >= step:
                return
            time.sleep(0.001)
        raise AssertionError(process.communicate())

    def result(self, name):
        """All that two runs of one configuration must agree in."""
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        with Checkpoints(self.root / name / "checkpoints", keep=None) as checkpoints:
            state, loop = checkpoints.restore(STEPS, abstract_state(self.config, mesh))
        records = read_metrics(self.root / name / "metrics.jsonl")
        records = [{k: v for k, v in r.items() if k not in TIMING_FIELDS} for r in records]
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)], loop, records


@pytest.fixture(scope="module")
def reference(world):
    status, out, err = world.finish(world.train("reference"))
    assert status == 0, err
    return out


def test_what_a_run_prints_and_leaves(world, reference):
    run = world.root / "reference"
    lines = reference.splitlines()
    assert lines[0] == f"run directory: {run}"
    assert "parameters" in lines[1] and "active a token" in lines[1] and "bytes of text" in lines[1]
    assert any(line.startswith(f"step  5/{STEPS}  loss ") and "bits/byte" in line and "ETA" in line for line in lines)
    assert any(line.startswith("step 15: held-out loss") for line in lines)
    assert lines.count("compiling the training step (may take a minute)") == 1
    assert lines[-1] == f"finished: {STEPS} steps; report: {run / 'report.html'}"
    assert "MaxVio" in (run / "report.html").read_text()


def test_a_finished_run_is_not_touched(world, reference, capsys):
    before = snapshot(world.root / "reference")
    assert main(["train", f"--workdir={world.root / 'reference'}"]) == 0
    assert "is finished" in capsys.readouterr().out
    assert snapshot(world.root / "reference") == before


def test_another_configuration_is_refused_with_the_differences(world, reference, capsys):
    before = snapshot(world.root / "reference")
    gin = f"--gin_file={world.root / 'tiny.gin'}"
    status = main(["train", gin, f"--workdir={world.root / 'reference'}", "--gin_bindings=ModelConfig.num_layers = 3"])
    assert status == 2
    assert "  ModelConfig.num_layers: 2 -> 3" in capsys.readouterr().err.splitlines()
    assert snapshot(world.root / "reference") == before


def test_killed_twice_and_stopped_is_the_run_that_never_was(world, reference):
    """SIGKILL at a random step, SIGTERM after that, and a second process that wants the directory meanwhile."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # shown when the test fails
    first = random.Random(seed).randint(1, 24)
    second = random.Random(seed).randint(first + 1, 30)

    process = world.train("killed")
    world.wait_for_step(process, "killed", first)
    process.kill()
    assert process.wait() == -signal.SIGKILL

    process = world.train("killed")
    # Steps after the newest checkpoint are taken again, so the file shrinks before it grows.
    out = [process.stdout.readline() for _ in range(3)]
    world.wait_for_step(process, "killed", second)
    status, _, err = world.run("train", f"--workdir={world.root / 'killed'}")
    if process.poll() is None:
        assert status == 2 and "in use by another process" in err
    process.send_signal(signal.SIGTERM)
    status, rest, err = world.finish(process)
    assert status in (143, 0), err  # 0 if it was done by then
    if status == 143:
        # A step that was logged before the kill may be what was waited for.
        assert "SIGTERM: stopping after this step" in err or "SIGTERM: still " in err
        assert f"to go on: k3 train --workdir={world.root / 'killed'}" in rest
        if first > 14:  # the save of step 14 has waited for that of step 7
            assert any(line.startswith("resuming") for line in out)
        status, out, err = world.run("train", f"--workdir={world.root / 'killed'}")
        assert status == 0 and "resuming" in out, err
    got, want = world.result("killed"), world.result("reference")
    assert got[0] == want[0]
    assert got[1] == want[1]
    assert got[2] == want[2]


def test_eval_gives_the_numbers_of_the_run_and_changes_nothing(world, reference):
    run = world.root / "reference"
    before = snapshot(run)
    status, out, err = world.run("eval", f"--workdir={run}", "--json")
    assert status == 0, err
    last = read_metrics(run / "metrics.jsonl")[-1]
    figures = json.loads(out)
    assert all(0 < figures.pop(f"{name}_bits_per_byte") < 8 for name in ("zlib", "xz"))
    assert figures == {
        "step": STEPS,
        **{name: last[f"eval_{name}"] for name in ("loss", "bits_per_byte", "accuracy", "targets")},
    }
    assert snapshot(run) == before


def test_generate_continues_a_prompt_and_changes_nothing(world, reference):
    run = world.root / "reference"
    before = snapshot(run)
    status, out, err = world.run("generate", f"--workdir={run}", "--prompt=document ", "--max_tokens=40", "--step=35")
    assert status == 0, err
    assert out.startswith("document ") and len(out) > len("document ")
    assert snapshot(run) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "no configuration; give --gin_file=F"),
        (["train", "--gin_file={gin}", "--workdir={root}"], "is not empty and holds no run"),
        (["train", "--gin_file={gin}", "--workdir=x", "--gin_bindings=MeshConfig.fsdp = 2"], "MeshConfig.fsdp = 2"),
        (["eval", "--workdir={root}"], "holds no run"),
        (["generate", "--workdir={root}/nowhere"], "holds no run"),
        (["train", "--gin_file={gin}", "--workdir=/proc/x"], "/proc/x cannot be used (No such file"),
        (["train", "--gin_file={gin}", "--workdir={gin}/run"], "cannot be used (Not a directory); choose another"),
        (["train", "--gin_file={gin}", "--workdir=x", "--gin.ModelConfig.vocab_size=256"], "set it to 257 or more"),
        (["train", "--gin_file={gin}", "--workdir=x", "--gin.ModelConfig.dtype=float64"], "under jax.enable_x64(True)"),
        (["train", "--gin_file={gin}", "--workdir=x", "--gin.DataConfig.paths=('gone',)"], "nothing matches 'gone'"),
        (["train", "--gin_file={gin}", "--workdir=x", "--gin.DataConfig.paths=('b.jsonl',)"], "the text: body"),
        (["train", "--gin_file={gin}", "--workdir=x/y", "--gin.DataConfig.batch_size=12"], "must be a multiple of 8"),
    ],
)
def test_mistakes_are_one_line(world, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(world.root)
    gin = world.root / "tiny.gin"
    assert main([a.format(gin=gin, root=world.root) for a in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (world.root / "x").exists()


@pytest.mark.parametrize(
    "option", ["--seed=-1", "--seed=2147483648", "--temperature=nan", "--temperature=inf", "--temperature=-1",
               "--max_tokens=0", "--max_tokens=x"],
)  # fmt: skip
def test_impossible_samples_are_refused_before_anything_is_loaded(capsys, option):
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--workdir=nowhere", option])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    name, _, value = option.partition("=")
    assert line.startswith(f"k3 generate: error: argument {name}: {value!r} is not a ")


@pytest.mark.parametrize(
    ("verb", "option", "problem"),
    [
        ("train", "--workdir=", "--workdir: is empty; give a directory"),
        ("eval", "--workdir=", "--workdir: is empty; give a directory"),
        ("eval", "--step=x", "--step: invalid int value: 'x'"),
        ("generate", "--prompt=\udcff", "--prompt: is not text in UTF-8"),  # the byte 255, as Python hands it on
    ],
)
def test_impossible_options_are_refused(capsys, verb, option, problem):
    with pytest.raises(SystemExit) as caught:
        main([verb, option])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"k3 {verb}: error: argument {problem}; see k3 {verb} --help\n"


def test_a_run_without_the_checkpoint_is_refused_before_jax_is_loaded(world, tmp_path, capsys, monkeypatch):
    run = RunDir(tmp_path)
    write_atomically(run.config_json, json.dumps(to_dict(world.config)))
    monkeypatch.setitem(sys.modules, "jax", None)  # importing it fails

    def refusal(*arguments):
        assert main(["eval", f"--workdir={tmp_path}", *arguments]) == 2
        return capsys.readouterr().err.removeprefix(f"k3 eval: error: {tmp_path}")

    go_on = f" has no checkpoint yet; go on with: k3 train --workdir={tmp_path}\n"
    assert refusal() == go_on
    with Claim(tmp_path, world.config):
        assert refusal() == " has no checkpoint yet; wait for its first\n"
    run.checkpoints.write_text("a file")
    assert refusal() == go_on
    run.checkpoints.unlink()
    (run.checkpoints / "12.orbax-checkpoint-tmp").mkdir(parents=True)
    assert refusal() == go_on
    (run.checkpoints / "10").mkdir()
    (run.checkpoints / "9").mkdir()
    assert refusal("--step=8") == ": no checkpoint of step 8; there are: 9, 10\n"

    def closed(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr("launch.session.os.listdir", closed)  # root may read everything
    assert refusal() == "/checkpoints cannot be read (Permission denied); make it readable\n"


def test_an_empty_prompt_needs_a_token_to_start_with(world, reference, capsys, monkeypatch):
    class Plain(ByteTokenizer):
        document_token = None

    monkeypatch.setattr("k3jax.data.load_tokenizer", lambda *names: Plain())
    assert main(["generate", f"--workdir={world.root / 'reference'}"]) == 2
    assert "k3 generate: error: --prompt is empty" in capsys.readouterr().err


def test_a_default_directory_of_a_run_that_could_not_begin_is_removed(world, capsys, monkeypatch):
    monkeypatch.chdir(world.root)
    # The tests' 8 devices cannot share such a batch.
    assert main(["train", f"--gin_file={world.root / 'tiny.gin'}", "--gin.DataConfig.batch_size=12"]) == 2
    assert "DataConfig.batch_size = 12: must be a multiple of 8" in capsys.readouterr().err
    assert not os.path.exists("runs")


def test_print_config_prints_gin_and_starts_nothing(world, capsys, monkeypatch):
    monkeypatch.chdir(world.root)
    before = set(os.listdir(world.root))
    assert main(["train", f"--gin_file={world.root / 'tiny.gin'}", "--print_config"]) == 0
    assert capsys.readouterr().out == config_to_gin(world.config)
    assert set(os.listdir(world.root)) == before
