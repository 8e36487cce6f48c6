"""`k3 sweep` and `k3 compare` as a user has them, mostly with runs that compute nothing (fake_train.py)."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from k3jax.config_text import config_to_gin
from k3jax.study.plan import SweepDir, read_plan
from k3jax.train.metrics import read_metrics
from k3jax.train.run_dir import RunDir
from launch.__main__ import main
from tests.launch.test_cli import REPORT_IMPORTS
from tests.launch.test_train_cli import world  # noqa: F401 - a fixture
from tests.train.tiny_run import snapshot, tiny_config, write_text

ROOT = pathlib.Path(__file__).parents[2]
FAKE = pathlib.Path(__file__).parent / "fake_train.py"
DRIVER = f"""
import sys
import launch.sweep_jobs
launch.sweep_jobs.train_command = lambda config, workdir: [sys.executable, {str(FAKE)!r}, str(config), str(workdir)]
from launch.__main__ import main
sys.exit(main(["sweep", *sys.argv[1:]]))
"""
STEPS = 6


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a configuration, in which sweeps in this process train nothing."""
    config = tiny_config(write_text(tmp_path / "text", 3), steps=STEPS, log_every=1, eval_every=3, checkpoint_every=2)
    (tmp_path / "tiny.gin").write_text(config_to_gin(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("launch.sweep_jobs.train_command", lambda c, w: [sys.executable, str(FAKE), str(c), str(w)])
    return tmp_path


def sweep(*arguments: str, seeds: str = "0,1", workdir: str = "out") -> int:
    return main(
        ["sweep", "--gin_file=tiny.gin", f"--workdir={workdir}", f"--sweep=TrainConfig.seed={seeds}", *arguments]
    )


def steps_of(run: str) -> list[int]:
    return [r["step"] for r in read_metrics(pathlib.Path("out") / run / "metrics.jsonl")]


def begun() -> list[str]:
    return sorted(p.parent.name for p in pathlib.Path("out").glob("*/config.json"))


def test_each_run_is_an_ordinary_run_in_order(here, capsys):
    assert sweep("--sweep=ModelConfig.kda_per_mla=0,1") == 0
    out = capsys.readouterr().out.splitlines()
    names = [f"seed={seed},kda_per_mla={ratio}" for seed in (0, 1) for ratio in (0, 1)]
    assert [line for line in out if "/4 " in line] == [f"{n}/4 {name}" for n, name in enumerate(names, 1)]
    assert out[-1] == "finished: 4 of 4 runs; to compare: k3 compare out"
    for run in read_plan(SweepDir(here / "out").plan).runs:
        found = RunDir(here / "out" / run.name)
        assert found.load_config() == run.config and found.status() == "finished"
    before = snapshot(here / "out" / names[0])
    assert main(["sweep", "--workdir=out"]) == 0 and snapshot(here / "out" / names[0]) == before


def test_a_failure_in_the_middle_is_kept_and_the_rest_goes_on(here, capsys):
    assert sweep(seeds="0,13,1") == 1
    out, err = capsys.readouterr()
    line = "seed=13: k3 train: error: stopped at step 3: not finite"
    assert f"failed {line}" in out and "finished: 2 of 3 runs" in out
    assert "1 of 3 runs failed" in err and line in err and "--failed=retry" in err
    assert len(steps_of("seed=13")) == 2 and len(steps_of("seed=1")) == STEPS

    assert main(["sweep", "--workdir=out"]) == 1  # still failed, not tried again
    assert (here / "out/logs/seed=13.log").read_text().count("from step") == 1
    assert f"not tried again: {line}" in capsys.readouterr().out
    assert main(["sweep", "--workdir=out", "--failed=retry"]) == 1
    assert (here / "out/logs/seed=13.log").read_text().count("from step") == 2
    assert main(["compare", "out"]) == 0
    assert f"Not counted: seed=13, failed at step 2 of {STEPS}: k3 train: error" in capsys.readouterr().out


def test_every_point_is_checked_before_the_first_run(here, capsys):
    assert sweep("--sweep=ModelConfig.num_experts_per_token=2,9") == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and not (here / "out").exists() and out == ""
    assert err.startswith("k3 sweep: error: seed=0,num_experts_per_token=9: ") and "must not exceed" in err
    assert sweep("--sweep=DataConfig.paths=('nowhere',)") == 2
    assert "seed=0,paths=nowhere" in capsys.readouterr().err


def test_another_sweep_in_the_same_directory_is_refused_with_the_differences(here, capsys):
    assert sweep() == 0
    before = snapshot(here / "out")
    assert sweep("--gin.OptimConfig.learning_rate=0.5", seeds="0,2") == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:3] == ["  OptimConfig.learning_rate: 0.003 -> 0.5", "  TrainConfig.seed: 0, 1 -> 0, 2"]
    assert sweep("--zip") == 2 and "order: product -> zip" in capsys.readouterr().err
    assert sweep("--hold=parameters", "--adjust=ModelConfig.intermediate_size") == 2
    assert "hold: nothing -> parameters by ModelConfig.intermediate_size" in capsys.readouterr().err
    assert snapshot(here / "out") == before
    assert sweep("--gin.TrainConfig.log_every=2") == 0  # without a say in the results
    assert main(["sweep", "--gin_file=tiny.gin", "--sweep=TrainConfig.seed=0", "--workdir=text"]) == 2
    assert "text holds something else, not a sweep" in capsys.readouterr().err


def test_a_quantity_is_held(here, capsys):
    hold = ["--hold=parameters", "--adjust=ModelConfig.intermediate_size", "--tolerance=0.05"]
    assert sweep("--sweep=ModelConfig.kda_per_mla=0,1", *hold, seeds="0") == 0
    out = capsys.readouterr().out
    assert "seed=0,kda_per_mla=0: intermediate_size 64 -> " in out and "seed=0,kda_per_mla=1: " in out
    runs = read_plan(SweepDir(here / "out").plan).runs
    assert runs[0].config.model.intermediate_size != 64 == runs[1].config.model.intermediate_size
    assert main(["compare", "out"]) == 0
    out = capsys.readouterr().out
    assert "intermediate_size" in out.splitlines()[0] and "FLAG" not in out and "Adjusted to hold" in out
    assert sweep(*hold, "--sweep=ModelConfig.intermediate_size=1,2", workdir="x") == 2
    assert "is swept, so it cannot be adjusted too" in capsys.readouterr().err
    assert sweep("--sweep=ModelConfig.hidden_size=512", *hold, workdir="x") == 2
    err = capsys.readouterr().err
    assert err.startswith("k3 sweep: error: seed=0,hidden_size=512: nothing comes nearer") and err.count("\n") == 1


def test_what_is_asked_wrongly_is_one_line(here, capsys):
    sweeps = ["--gin_file=tiny.gin", "--sweep=TrainConfig.seed=0"]
    for arguments, line in (
        (["--gin_file=tiny.gin"], "nothing is swept"),
        (["--workdir=none"], "nothing is swept"),
        (["--sweep=TrainConfig.seed=0"], "no configuration; give --gin_file=F"),
        ([*sweeps, "--jobs=0"], "--jobs=0: must be at least 1"),
        ([*sweeps, "--hold=flops"], "--hold and --adjust go together"),
        (["--gin_file=tiny.gin", "--sweep=TrainConfig.sed=0"], "sed=0: command line: TrainConfig.sed = 0"),
        (["--gin_file=tiny.gin", "--sweep=n: a{TrainConfig.seed=1}, b{TrainConfig.seed=01}"], "seed = '01'"),
        (["--gin_file=tiny.gin", "--sweep=n: a{TrainConfig.seed=1}, b{TrainConfig.seed=1}"], "n=b: the same config"),
    ):
        assert main(["sweep", *arguments]) == 2
        err = capsys.readouterr().err
        assert line in err and err.count("\n") == 1, (arguments, err)


def test_two_ratios_that_are_one_model_are_pointed_out(here, capsys):
    assert main(["sweep", "--gin_file=tiny.gin", "--sweep=ModelConfig.kda_per_mla=1,3", "--list"]) == 0
    out = capsys.readouterr().out
    assert "note: kda_per_mla=3 is the same model as kda_per_mla=1: MLA layers 2" in out
    assert not (here / "runs").exists()


def driver(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", DRIVER, *arguments]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


LONG = ["--gin_file=tiny.gin", "--workdir=out", "--sweep=TrainConfig.seed=0,1,2", "--gin.TrainConfig.steps=40"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_runs_saved_and_the_sweep_goes_on(here, number):
    process = driver(*LONG, "--jobs=2")
    wait_for(lambda: all((here / f"out/seed={seed}/metrics.jsonl").exists() for seed in (0, 1)))
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert f"stopped by {number.name}, 2 runs part way; to go on: k3 sweep --workdir=out" in out
    assert begun() == ["seed=0", "seed=1"] and 1 <= len(steps_of("seed=0")) < 40
    assert main(["sweep", "--workdir=out", "--jobs=2"]) == 0
    assert all(steps_of(f"seed={seed}") == list(range(1, 41)) for seed in range(3))


def test_a_killed_sweep_goes_on_where_it_was(here, capsys):
    """Also while a run that it has left is still at work."""
    process = driver(*LONG)
    wait_for(lambda: (here / "out/seed=1/metrics.jsonl").exists())
    process.kill()
    process.communicate()
    assert begun() == ["seed=0", "seed=1"]
    assert main(["sweep", *LONG]) == 0
    out = capsys.readouterr().out
    assert "waiting for the process that is at work in seed=1" in out and "finished: 3 of 3 runs" in out
    assert all(steps_of(f"seed={seed}") == list(range(1, 41)) for seed in range(3))


def test_a_second_sweep_in_the_directory_is_refused(here, capsys):
    process = driver(*LONG)
    wait_for(lambda: (here / "out/seed=0/metrics.jsonl").exists())
    assert main(["sweep", "--workdir=out"]) == 2
    assert "out is in use by another process" in capsys.readouterr().err
    process.terminate()
    process.communicate(timeout=60)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs prctl")
def test_runs_of_a_killed_sweep_are_asked_to_stop(here):
    child = "import os, sys, time; from launch.sweep_child import follow; follow(int(sys.argv[1])); open('up', 'w');"
    child += "import signal; signal.signal(15, lambda *_: (open('told', 'w'), os._exit(0))); open('ready', 'w');"
    child += "time.sleep(60)"
    parent = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())]).wait()"
    process = subprocess.Popen([sys.executable, "-c", parent])
    wait_for(lambda: (here / "ready").exists())
    process.kill()
    process.wait()
    wait_for(lambda: (here / "told").exists())


def test_neither_verb_imports_jax(here):
    def imported(*arguments: str) -> subprocess.CompletedProcess:
        program = DRIVER.split("from launch")[0] + REPORT_IMPORTS
        return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)

    short = [*LONG[:2], "--sweep=TrainConfig.seed=0", "--hold=flops", "--adjust=ModelConfig.intermediate_size"]
    for arguments in (["sweep", *short], ["compare", "out"]):
        result = imported(*arguments)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == "imported: []"
    assert "<svg" not in (page := (here / "out/compare.html").read_text()) and page.count("data:image/png") == 3
    assert "http" not in page.replace("http-equiv", "")


def test_what_compare_prints_and_writes(here, capsys):
    assert sweep("--sweep=ModelConfig.kda_per_mla=0,1") == 0
    capsys.readouterr()
    assert main(["compare", "out", "--format=latex", "--page=mine.html"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("\\begin{tabular}") and err == "page: mine.html\n" and (here / "mine.html").exists()
    assert all(line.startswith("% ") for line in out.split("\\end{tabular}\n\n")[1].splitlines())
    assert main(["compare", "out/seed=0,kda_per_mla=0", "out/seed=1,kda_per_mla=0", "--format=markdown"]) == 0
    out = capsys.readouterr().out  # losses 10 / 6 and 1 + 10 / 6
    assert "| 2.1667 ± 0.5000 |" in out.splitlines()[2] and (here / "compare.html").exists()
    assert main(["compare", "nowhere"]) == 2
    assert "error: nowhere is not there; give run directories" in capsys.readouterr().err


@pytest.mark.slow
def test_real_runs_of_a_killed_sweep_go_on_bit_for_bit(world):  # noqa: F811
    """The sweep is killed in the middle of its second run, and goes on; that run is the one trained alone."""
    seed = "--gin.TrainConfig.seed=1"
    alone = world.start("train", f"--gin_file={world.root / 'tiny.gin'}", f"--workdir={world.root / 'alone'}", seed)
    assert world.finish(alone)[0] == 0
    out_dir = f"--workdir={world.root / 'out'}"
    process = world.start("sweep", f"--gin_file={world.root / 'tiny.gin'}", "--sweep=TrainConfig.seed=0,1", out_dir)
    world.wait_for_step(process, "out/seed=1", 5)
    process.kill()
    process.communicate()
    status, out, err = world.run("sweep", out_dir)
    assert status == 0 and "finished: 2 of 2 runs" in out, err
    log = (world.root / "out/logs/seed=1.log").read_text()
    assert "SIGTERM: stopping after this step" in log and "resuming" in log
    assert world.result("out/seed=1") == world.result("alone")
