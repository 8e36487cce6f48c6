"""`k3 ckpt` from outside: what is printed, written and refused, on a run that eight devices wrote and on fixtures."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from k3jax.checkpoint.ocdbt_index import read_index
from launch.__main__ import main
from launch.ckpt_common import select
from tests.checkpoint import small_run
from tests.conftest import FIXTURES
from tests.launch.test_cli import REPORT_IMPORTS, ROOT, k3

K3 = str(FIXTURES / "kimi_k3_tiny")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "small"
    small_run.write_run(path)
    return path


@pytest.fixture
def ckpt(capsys):
    """Runs `k3 ckpt ...` and returns (status, standard output, standard error)."""

    def run_it(*arguments) -> tuple[int, str, str]:
        try:
            status = main(["ckpt", *map(str, arguments)])
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return run_it


def as_json(result) -> dict:
    status, out, err = result
    assert status in (0, 1) and err == ""
    return json.loads(out)


def test_list_says_what_is_complete(run, ckpt, tmp_path):
    status, out, _ = ckpt("list", run)
    assert status == 0 and [line.split()[0] for line in out.splitlines()] == ["step", "4", "8"]
    assert out.count(" complete") == 2 and " 1.5 " in out
    broken = shutil.copytree(run, tmp_path / "broken")
    data = read_index(broken / "checkpoints/8/state")["params.embed/0.0"].file
    os.truncate(data, 50)
    found = as_json(ckpt("list", broken, "--json"))["checkpoints"]
    assert [(c["step"], c["complete"]) for c in found] == [(4, True), (8, False)]
    assert found[1]["problem"].startswith(f"{data}: cut off at offset 50")
    assert found[0]["bytes"] > 1000 and found[0]["metrics"] == {"loss": 1.5}
    assert "step 8: " in ckpt("list", broken)[1]


def test_show_adds_up_and_imports_no_jax(run, ckpt):
    found = as_json(ckpt("show", run, "--json"))
    leaves = small_run.flat(small_run.state(8))
    assert found["total"] == {
        "arrays": len(leaves),
        "values": sum(x.size for x in leaves.values()),
        "bytes": sum(x.nbytes for x in leaves.values()),
    }
    by_name = {entry["name"]: entry for entry in found["arrays"]}
    embed = by_name["params/embed"]
    assert (embed["shape"], embed["dtype"], embed["sharding"]) == ([257, 32], "float32", "copies on 8 (data=8)")
    each = as_json(ckpt("show", run, "--each", "--json"))
    assert each["total"]["values"] == found["total"]["values"] and each["groups"].keys() == found["groups"].keys()
    status, out, _ = ckpt("show", run, "--step=4", "--match=layer 3/kda", "--each")
    assert status == 0 and "params/layer 3/kda/q_proj" in out and "layer 1/" not in out and "P(" in out
    for path in (run, K3):
        result = k3("ckpt", "show", str(path), program=REPORT_IMPORTS)
        assert result.returncode == 0 and "imported: []" in result.stdout, result.stderr


def test_show_of_a_released_checkpoint_has_its_names(ckpt):
    status, out, _ = ckpt("show", K3)
    assert status == 0
    line = next(line for line in out.splitlines() if "experts" in line)
    name = "language_model.model.layers.{1..8}.block_sparse_moe.experts.{0..7}.w1.weight"
    assert line.split() == [name, "[32,32]", "x64", "BF16", "131", "kB"]
    found = as_json(ckpt("show", K3, "--match=experts.5.w?.weight", "--json"))
    assert [entry["count"] for entry in found["arrays"]] == [8, 8, 8]
    each = as_json(ckpt("show", K3, "--each", "--json"))
    together = as_json(ckpt("show", K3, "--json"))
    assert len(each["arrays"]) == 426 > len(together["arrays"]) and each["total"] == together["total"]


def test_stats_prints_and_draws(run, ckpt, tmp_path):
    status, out, err = ckpt("stats", run, "--match=moe", f"--out={tmp_path}", "--html")
    assert status == 0, err
    pictures = re.findall(r"^picture  (.*)$", out, re.M)
    assert len(pictures) == 3 and all(pathlib.Path(file).read_bytes().startswith(b"\x89PNG") for file in pictures)
    page = (tmp_path / "step-8-stats.html").read_text()
    assert page.count("data:image/png;base64") == 3 and "layer 4/moe/router" in page and "http" not in page
    found = as_json(ckpt("stats", run, "--match=layer 3/*expert_up", "--json", "--passes=0"))["tensors"]
    assert {entry["spectral"] for entry in found} == {None} and {entry["layer"] for entry in found} == {3}


def test_scan_tells_by_its_exit_status(run, ckpt, tmp_path, monkeypatch):
    status, out, _ = ckpt("scan", run)
    assert status == 0 and "all values are finite" in out
    bad = small_run.state(1)
    bad.params["embed"][3, 4] = np.nan
    bad.params["head"][0, 0] = 3.4e38
    monkeypatch.setattr(small_run, "state", lambda step: bad)
    small_run.write_run(tmp_path / "bad", (1,))
    found = as_json(ckpt("scan", tmp_path / "bad", "--json"))["bad"]
    counts = {entry["name"]: (entry["nonfinite"], entry["infinite_in_bf16"], entry["risky"]) for entry in found}
    assert counts == {"params/embed": (1, 0, 0), "params/head": (0, 1, 1)}
    status, out, _ = ckpt("scan", tmp_path / "bad")
    assert status == 1 and "2 tensors are at fault" in out


def test_diff_ranks_and_names_what_is_missing(run, ckpt, tmp_path):
    status, out, _ = ckpt("diff", run / "checkpoints/4", run, f"--out={tmp_path}", "--top=3")
    assert status == 0 and "step 4" in out and "step 8" in out and "0 are equal" in out and "--top=0 prints all" in out
    changes = as_json(ckpt("diff", run / "checkpoints/4", run, "--json"))["changes"]
    order = [c["relative"] for c in changes]
    assert order == sorted(order, reverse=True) and len(order) > 50
    same = as_json(ckpt("diff", run, run, "--json", "--match=*"))
    assert all(c["relative"] == 0 for c in same["changes"]) and same["only_a"] == same["only_b"] == []
    other = as_json(ckpt("diff", run, K3, "--json"))
    assert (
        "params/layer 5/moe/router" in other["only_b"] and ["params/embed", [257, 32], [256, 64]] in other["reshaped"]
    )


@pytest.mark.parametrize("verb", ["experts", "attnres", "gates"])
def test_what_the_model_is_made_of(run, ckpt, verb, tmp_path):
    for path in (run, K3):
        status, out, err = ckpt(verb, path, f"--out={tmp_path}", "--html")
        assert status == 0, err
        for file in re.findall(r"^(?:picture|page) +(.*)$", out, re.M):
            assert os.path.getsize(file) > 5000
        assert as_json(ckpt(verb, path, "--json"))
    if verb == "experts":
        layers = as_json(ckpt(verb, run, "--json"))
        assert layers["load_at_step"] == 8 and layers["layers"][0]["load"] == [0.5, 1.5, 0, 2]
        assert layers["layers"][0]["dead"] == [2] and layers["layers"][1]["dead"] == []
        assert "layer 2: dead experts 3" in ckpt(verb, run, f"--out={tmp_path}")[1]


def test_pictures_lie_beside_and_never_in_a_released_folder(run, ckpt, tmp_path):
    released = shutil.copytree(K3, tmp_path / "released-k3")
    before = sorted(os.listdir(released))
    assert f"picture  {tmp_path}/released-k3-inspect/gates-at-rest.png" in ckpt("gates", released)[1]
    assert sorted(os.listdir(released)) == before
    assert f"picture  {run}/inspect/step-4-gates-at-rest.png" in ckpt("gates", run, "--step=4")[1]


def test_measure_needs_text(ckpt):
    status, _, err = ckpt("gates", K3, "--measure")
    assert status == 2 and "--measure needs a run" in err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["show", "{nothing}"], "no such directory"),
        (["list", "{nothing}"], "no such directory"),
        (["list", K3], "released weights and no step of a run yet"),
        (["show", "{run}", "--step=5"], "no checkpoint of step 5; there are: 4, 8"),
        (["show", K3, "--step=5"], "a released checkpoint has no steps; leave out --step"),
        (["show", "{run}", "--match=expert_gat_"], "no tensor has such a name; did you mean expert_gate"),
        (["stats", "{run}", "--passes=-1"], "--passes=-1: give 0 or more"),
        (["stats", "{run}", "--out=/proc/nothing", "--match=embed"], "/proc/nothing: cannot be written to"),
        (["diff", "{run}", "{nothing}"], "no such directory"),
        (["parity", K3, "--reference={nothing}"], "no such file; give an .npz file"),
        (["parity", K3, "--reference={nothing}", "--tolerance=0"], "--tolerance=0.0: give a number above 0"),
        (["shw"], "invalid choice: 'shw'"),
        ([], "are required: WHAT; see k3 ckpt --help"),
        (["show", "{run}", "--jsn"], "--jsn; did you mean --json"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(run, ckpt, tmp_path, arguments, line):
    status, _, err = ckpt(*(a.format(run=run, nothing=tmp_path / "nothing") for a in arguments))
    assert (status, err.count("\n")) == (2, 1), err
    assert line in err and "Traceback" not in err


def test_a_match_is_a_part_or_a_pattern():
    names = ["params/layer 1/kda/q_proj", "params/layer 12/moe/router", "router/layer 12/moe/bias", "step"]
    assert select(names, "layer 1/") == [0]
    assert select(names, "router") == [1, 2]
    assert select(names, "moe/*") == [1, 2] and select(names, "router/*") == [2] and select(names, "*router") == [1]
    assert select(names, None, ("params/",)) == [0, 1] and select(names, None) == [0, 1, 2, 3]


def test_help_names_every_subverb_with_an_example(ckpt):
    out = ckpt("--help")[1]
    for verb in ("list", "show", "stats", "diff", "scan", "experts", "attnres", "gates", "parity"):
        assert re.search(rf"^    {verb} ", out, re.M), verb
        assert f"example:\n  k3 ckpt {verb} " in ckpt(verb, "--help")[1]


@pytest.mark.slow
def test_show_of_93_layers_does_without_jax(tmp_path, monkeypatch):
    """Kimi K3's tree with small axes, written by eight devices; it takes about a second, most of an import of jax."""
    small = {
        "vocab_size": 256, "hidden_size": 16, "kda_num_heads": 8, "kda_key_dim": 8, "kda_value_dim": 8,
        "mla_num_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "intermediate_size": 16, "num_experts": 896, "moe_intermediate_size": 8, "moe_latent_size": 8,
        "num_layers": 93, "kda_per_mla": 3, "attn_res_block_size": 12,
    }  # fmt: skip
    monkeypatch.setattr(small_run, "MODEL", small)
    small_run._shapes.cache_clear()
    small_run.write_run(tmp_path / "k3", (1,))
    small_run._shapes.cache_clear()
    program = "import sys; from launch.__main__ import main; main(sys.argv[1:]); assert 'jax' not in sys.modules"
    command = [sys.executable, "-c", program, "ckpt", "show", tmp_path / "k3"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0 and len(shown.stdout.splitlines()) > 900, shown.stderr
