"""`k3 ckpt import` and `export` by the command line: what is printed, what is left, and what an imported run is."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest

from k3jax.checkpoint import hf
from k3jax.checkpoint.open import open_any
from k3jax.config import from_dict
from k3jax.errors import UserError
from k3jax.train.start import plan_start
from launch.__main__ import main
from launch.session import load_run
from tests.checkpoint.released import VISION, all_tensors, assert_same_files, assert_same_tensors, k3_tensors, write_k3


@pytest.fixture(scope="module")
def k3(tmp_path_factory) -> pathlib.Path:
    return write_k3(tmp_path_factory.mktemp("hf") / "k3")


@pytest.fixture(scope="module")
def run(k3, tmp_path_factory) -> pathlib.Path:
    run = tmp_path_factory.mktemp("runs") / "k3"
    assert main(["ckpt", "import", str(k3), str(run)]) == 0
    return run


def test_import_then_export_is_the_same_to_the_byte(k3, run, tmp_path, capsys):
    assert sorted(file.name for file in run.iterdir()) == ["config.gin", "config.json", "released"]
    assert main(["ckpt", "export", str(run), str(tmp_path / "out")]) == 0
    assert_same_files(tmp_path / "out", k3)
    assert f"kimi_k3, {len(k3_tensors())} tensors in 3 files" in capsys.readouterr().out


def test_import_says_what_it_does(k3, tmp_path, capsys):
    (k3 / "pytorch_model.bin").write_bytes(b"never read")
    assert main(["ckpt", "import", str(k3), str(tmp_path / "run")]) == 0
    (k3 / "pytorch_model.bin").unlink()
    said = capsys.readouterr().out
    assert "575,728 parameters" in said
    assert f"kept aside, for the export: {len(VISION)} tensors" in said
    assert "left behind: pytorch_model.bin" in said
    assert "also tokenizer.json" in said


def test_a_run_that_was_imported_trains_from_itself(run, capsys):
    config = from_dict(json.loads((run / "config.json").read_text()))
    assert config.train.init_from == str(run / "released")
    assert config.model == open_any(run).config
    (run / "checkpoints").mkdir()  # as training does in the same directory
    assert not plan_start(config).fresh
    (run / "checkpoints").rmdir()
    assert main(["train", f"--gin_file={run}/config.gin", "--print_config"]) == 0
    assert f"TrainConfig.init_from = '{run}/released'" in capsys.readouterr().out


def test_verbs_read_an_imported_run_in_place(k3, run):
    loaded = load_run(str(run), None, devices=2)
    assert (loaded.step, loaded.config.model) == (0, open_any(k3).config)
    _, want = hf.load(k3)
    jax.tree.map(np.testing.assert_array_equal, loaded.variables, want)
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(loaded.variables)} == {2}
    assert jax.tree.map(lambda x: x.dtype, loaded.variables) == jax.tree.map(lambda x: x.dtype, want)
    with pytest.raises(UserError, match="a released checkpoint has no steps"):
        load_run(str(run), 3)


def test_export_converts(run, tmp_path):
    out = tmp_path / "out"
    arguments = ["--experts=unpacked", "--dtype=float32", "--shard_size=300KB"]
    assert main(["ckpt", "export", str(run), str(out), *arguments]) == 0
    tensors = all_tensors(out)
    assert {x.dtype for name, x in tensors.items() if name not in VISION} == {np.dtype(np.float32)}
    assert_same_tensors({name: tensors[name] for name in VISION}, {name: k3_tensors()[name] for name in VISION})
    assert len(list(out.glob("model-*.safetensors"))) > 5
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "nowhere", "out"], "nowhere: no config.json"),
        (["export", "nowhere", "out"], "nowhere"),
        (["export", "RUN", "out", "--step=3"], "a released checkpoint has no steps"),
        (["export", "RUN", "out", "--like=nowhere"], "--like: .* is a released checkpoint itself"),
        (["import", "HF", "full"], "full exists already"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(k3, run, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    places = {"RUN": str(run), "HF": str(k3)}
    assert main(["ckpt", *[places.get(argument, argument) for argument in arguments]]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert [child.name for child in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("size", ["0", "5 parsecs", "-1GB"])
def test_sizes(size, capsys):
    with pytest.raises(SystemExit):
        main(["ckpt", "export", "a", "b", f"--shard_size={size}"])
    assert "expected a size such as 500MB or 5GB" in capsys.readouterr().err
