"""What a run was computed with: recorded, and refused where it would change the run's meaning."""

import json

import pytest

from k3jax.train import versions
from k3jax.train.run_dir import RunDir, RunRefused
from k3jax.train.versions import record_versions
from tests.train.tiny_run import snapshot


def test_a_changed_corpus_is_refused_and_other_versions_are_recorded(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    assert record_versions(run, "aaaa", "float32", step=0) == []
    stored = json.loads(run.versions.read_text())
    assert {"python", "jax", "jaxlib", "flax", "optax", "orbax", "k3jax", "git_revision", "platform"} <= set(stored)
    assert (stored["corpus"], stored["device_count"], stored["compute_dtype"]) == ("aaaa", 8, "float32")
    assert record_versions(run, "aaaa", "float32", step=4) == []
    with pytest.raises(RunRefused, match="not what this run was trained on"):
        record_versions(run, "bbbb", "float32", step=4)
    monkeypatch.setattr(
        versions,
        "versions",
        lambda: {k: v for k, v in stored.items() if k not in ("corpus", "compute_dtype")} | {"jax": "9"},
    )
    changes = record_versions(run, "aaaa", "float32", step=8)
    assert [str(change) for change in changes] == [f"jax: {stored['jax']!r} -> '9'"]
    again = json.loads(run.versions.read_text())
    assert again == stored | {"resumed": [{"step": 8, "jax": "9"}]}


def test_a_damaged_file_is_refused(tmp_path):
    run = RunDir(tmp_path)
    record_versions(run, "aaaa", "float32", step=0)
    run.versions.write_text("{")
    with pytest.raises(RunRefused, match=r"versions\.json cannot be read: .*damaged: restore it from a copy"):
        record_versions(run, "aaaa", "float32", step=4)


def test_a_run_is_not_resumed_in_another_dtype(tmp_path):
    run = RunDir(tmp_path)
    record_versions(run, "aaaa", "float32", step=0)
    record_versions(run, "aaaa", "bfloat16", step=0)  # nothing was computed yet
    record_versions(run, "aaaa", "bfloat16", step=4)
    before = snapshot(tmp_path)
    with pytest.raises(RunRefused, match=r"begun in bfloat16, .*'auto' is float32 .*with ModelConfig\.dtype set"):
        record_versions(run, "aaaa", "float32", step=4)
    assert snapshot(tmp_path) == before
