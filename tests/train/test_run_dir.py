"""Whose directory it is: what may be started, resumed or must be refused, and that a refusal changes nothing."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from k3jax.config import MeshConfig
from k3jax.train import run_dir
from k3jax.train.run_dir import Claim, RunRefused, new_workdir, record_versions
from launch.configure import load_config
from tests.train.tiny_run import tiny_config


@pytest.fixture
def config(tmp_path):
    return tiny_config(tmp_path / "text")


def snapshot(path):
    return {p: (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else None) for p in path.rglob("*")}


def changed(config, section, **values):
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def test_a_new_run_holds_its_whole_configuration(tmp_path, config):
    with Claim(tmp_path / "run", config) as claim:
        assert claim.status == "new"
    # Either file alone reproduces the run.
    assert load_config([str(tmp_path / "run" / "config.gin")]).config == config
    assert claim.run.load_config() == config


def test_the_same_configuration_resumes_and_another_is_refused_field_by_field(tmp_path, config):
    Claim(tmp_path / "run", config).close()
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
    Claim(tmp_path / "run", config).close()
    with pytest.raises(RunRefused, match=r"schedule depends on TrainConfig\.steps"):
        Claim(tmp_path / "run", changed(config, "train", steps=99))


def test_what_has_no_say_in_the_result_may_change(tmp_path, config):
    Claim(tmp_path / "run", config).close()
    other = dataclasses.replace(changed(config, "train", log_every=7, keep_checkpoints=9), mesh=MeshConfig(data=8))
    with Claim(tmp_path / "run", other) as claim:
        assert claim.status == "resumable"
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
        assert claim.run.load_config() == config


def test_a_start_killed_between_its_two_files_is_completed(tmp_path, config):
    Claim(tmp_path / "run", config).close()
    (tmp_path / "run" / "config.gin").unlink()
    Claim(tmp_path / "run", config).close()
    assert load_config([str(tmp_path / "run" / "config.gin")]).config == config


def test_a_finished_run_is_left_alone(tmp_path, config):
    with Claim(tmp_path / "run", config) as claim:
        claim.run.summary.write_text("{}")
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
    Claim(tmp_path / "run", config).close()
    lock = tmp_path / "run" / ".lock"
    with subprocess.Popen([sys.executable, "-c", hold, str(lock)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(RunRefused, match=r"in use by another process \(process 7 on there"):
                Claim(tmp_path / "run", config)
        finally:
            holder.kill()
    Claim(tmp_path / "run", config).close()
    assert lock.exists()


def test_default_directories_never_collide(tmp_path):
    paths = [new_workdir("quickstart", tmp_path / "runs") for _ in range(5)]
    assert len(set(paths)) == 5
    assert all(path.is_dir() and not os.listdir(path) for path in paths)
    assert all(path.name.startswith("quickstart-") for path in paths)


def test_a_changed_corpus_is_refused_and_other_versions_are_recorded(tmp_path, config, monkeypatch):
    with Claim(tmp_path / "run", config) as claim:
        assert record_versions(claim.run, "aaaa", step=0) == []
        stored = json.loads(claim.run.versions.read_text())
        assert {"python", "jax", "jaxlib", "flax", "optax", "orbax", "k3jax", "git_revision", "platform"} <= set(stored)
        assert (stored["corpus"], stored["device_count"]) == ("aaaa", 8)
        assert record_versions(claim.run, "aaaa", step=4) == []
        with pytest.raises(RunRefused, match="not what this run was trained on"):
            record_versions(claim.run, "bbbb", step=4)
        monkeypatch.setattr(
            run_dir, "versions", lambda: {k: v for k, v in stored.items() if k != "corpus"} | {"jax": "9"}
        )
        changes = record_versions(claim.run, "aaaa", step=8)
        assert [str(change) for change in changes] == [f"jax: {stored['jax']!r} -> '9'"]
        again = json.loads(claim.run.versions.read_text())
        assert again == stored | {"resumed": [{"step": 8, "jax": "9"}]}
