"""Whose directory it is: what may be started, resumed or must be refused, and that a refusal changes nothing."""

import contextlib
import dataclasses
import os
import subprocess
import sys

import pytest

from k3jax.config import MeshConfig
from k3jax.train.claim import Claim, new_workdir
from k3jax.train.run_dir import RunRefused
from launch.configure import load_config
from tests.train.tiny_run import snapshot, tiny_config


@pytest.fixture
def config(tmp_path):
    return tiny_config(tmp_path / "text")


def changed(config, section, **values):
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def begin(workdir, config):
    with Claim(workdir, config) as claim:
        claim.write_config()
    return claim.run


def test_a_new_run_holds_its_whole_configuration(tmp_path, config):
    with Claim(tmp_path / "run", config) as claim:
        assert claim.status == "new"
        claim.write_config()
    # Either file alone reproduces the run.
    assert load_config([str(tmp_path / "run" / "config.gin")]).config == config
    assert claim.run.load_config() == config


def test_the_same_configuration_resumes_and_another_is_refused_field_by_field(tmp_path, config):
    begin(tmp_path / "run", config)
    with Claim(tmp_path / "run", config) as claim:
        assert claim.status == "resumable"
    before = snapshot(tmp_path)
    other = changed(changed(config, "model", num_layers=3, kda_per_mla=None), "optim", learning_rate=0.5)
    with pytest.raises(RunRefused) as caught:
        Claim(tmp_path / "run", other)
    lines = str(caught.value).splitlines()
    assert lines[1:4] == [
        "  ModelConfig.num_layers: 2 -> 3",
        "  ModelConfig.kda_per_mla: 1 -> None",
        "  OptimConfig.learning_rate: 0.003 -> 0.5",
    ]
    assert snapshot(tmp_path) == before


def test_more_steps_are_refused_with_the_reason(tmp_path, config):
    begin(tmp_path / "run", config)
    with pytest.raises(RunRefused, match=r"schedule depends on TrainConfig\.steps"):
        Claim(tmp_path / "run", changed(config, "train", steps=99))


def test_what_has_no_say_in_the_result_may_change(tmp_path, config):
    begin(tmp_path / "run", config)
    other = dataclasses.replace(changed(config, "train", log_every=7, keep_checkpoints=9), mesh=MeshConfig(data=8))
    with Claim(tmp_path / "run", other) as claim:
        assert claim.status == "resumable"
        claim.write_config()
        assert [c.field for c in claim.changes] == [
            "MeshConfig.data",
            "TrainConfig.log_every",
            "TrainConfig.keep_checkpoints",
        ]
    assert claim.run.load_config() == other
    assert load_config([str(claim.run.config_gin)]).config == other


def test_a_directory_of_something_else_is_refused_untouched(tmp_path, config):
    for name in ("thesis.tex", "config.gin", ".hidden"):
        folder = tmp_path / name.strip(".")
        folder.mkdir()
        (folder / name).write_text("mine")
        before = snapshot(folder)
        with pytest.raises(RunRefused, match="not empty and holds no run"):
            Claim(folder, config)
        assert snapshot(folder) == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunRefused, match="is a file"):
        Claim(tmp_path / "file", config)


def test_an_empty_directory_and_a_start_killed_at_once_are_new(tmp_path, config):
    for leftover in ((), (".lock", ".config.json.tmp")):
        folder = tmp_path / str(len(leftover))
        folder.mkdir()
        for name in leftover:
            (folder / name).write_text("{")
        with Claim(folder, config) as claim:
            assert claim.status == "new"
            claim.write_config()
        assert claim.run.load_config() == config


def test_a_start_killed_between_its_two_files_is_completed(tmp_path, config):
    begin(tmp_path / "run", config)
    (tmp_path / "run" / "config.gin").unlink()
    begin(tmp_path / "run", config)
    assert load_config([str(tmp_path / "run" / "config.gin")]).config == config


def test_a_finished_run_is_left_alone(tmp_path, config):
    begin(tmp_path / "run", config).summary.write_text("{}")
    before = snapshot(tmp_path)
    assert Claim(tmp_path / "run", config).status == "finished"
    assert snapshot(tmp_path) == before
    with pytest.raises(RunRefused, match="num_layers"):
        Claim(tmp_path / "run", changed(config, "model", num_layers=3))


def test_two_processes_cannot_hold_a_run_and_a_dead_one_does_not(tmp_path, config):
    hold = (
        "import fcntl, os, sys, time\n"
        "d = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(d, fcntl.LOCK_EX); os.write(d, b'process 7 on there'); print('held', flush=True); time.sleep(60)"
    )
    begin(tmp_path / "run", config)
    lock = tmp_path / "run" / ".lock"
    with subprocess.Popen([sys.executable, "-c", hold, str(lock)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(RunRefused, match=r"in use by another process \(process 7 on there"):
                Claim(tmp_path / "run", config)
        finally:
            holder.kill()
    begin(tmp_path / "run", config)
    assert lock.exists()


def test_default_directories_never_collide(tmp_path):
    with contextlib.ExitStack() as stack:
        paths = [stack.enter_context(new_workdir("quickstart", tmp_path / "runs")) for _ in range(5)]
        assert len(set(paths)) == 5
        assert all(path.is_dir() and not os.listdir(path) for path in paths)
        assert all(path.name.startswith("quickstart-") for path in paths)


def test_a_claim_alone_is_no_run_yet(tmp_path, config):
    with Claim(tmp_path / "new" / "run", config):
        assert (tmp_path / "new" / "run").is_dir()
    assert not (tmp_path / "new").exists()
    (tmp_path / "run").mkdir()
    with Claim(tmp_path / "run", config):
        pass
    assert (tmp_path / "run").is_dir()
    other = changed(config, "data", batch_size=16)
    with Claim(tmp_path / "run", other) as claim:
        assert claim.status == "new"
        claim.write_config()
    assert claim.run.load_config() == other


def test_a_directory_that_cannot_be_used_is_refused_in_one_line(tmp_path, config):
    (tmp_path / "file").write_text("mine")
    for path in ("/proc/x", tmp_path / "file" / "run", tmp_path / ("x" * 300)):
        with pytest.raises(RunRefused, match=r"cannot be used \(.*\); choose another --workdir") as caught:
            Claim(path, config)
        assert "\n" not in str(caught.value)
    with pytest.raises(RunRefused, match="cannot be used"), new_workdir("quickstart", tmp_path / "file"):
        pass


def test_a_config_that_cannot_be_opened_is_refused(tmp_path, config):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(RunRefused, match=r"config\.json cannot be read \(Is a directory\)"):
        Claim(tmp_path, config)


def test_a_default_directory_stays_only_where_a_run_has_begun(tmp_path, config):
    root = tmp_path / "runs"
    with new_workdir("quickstart", root) as path:
        Claim(path, config).close()
    assert not root.exists()
    with pytest.raises(KeyboardInterrupt), new_workdir("quickstart", root):
        raise KeyboardInterrupt
    assert not root.exists()
    with new_workdir("quickstart", root) as path:
        begin(path, config)
    assert (path / "config.json").exists()
    with new_workdir("quickstart", root) as other:
        pass
    assert os.listdir(root) == [path.name] and other != path


def test_a_directory_of_runs_that_was_there_stays(tmp_path):
    (tmp_path / "runs").mkdir()
    with new_workdir("quickstart", tmp_path / "runs"):
        pass
    assert os.listdir(tmp_path / "runs") == []
