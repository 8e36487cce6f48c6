"""A run's checkpoints read without restoring: to the bit, in bounded memory, damage named by file and offset."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.checkpoint import manager, ocdbt_index, run_source
from k3jax.checkpoint.manager import Checkpoints
from k3jax.checkpoint.run_source import checkpoint_steps, open_run, open_step
from k3jax.checkpoint.source import Leaf, parts, tensors
from k3jax.errors import UserError
from k3jax.models.plan import layer_slots
from tests.checkpoint import small_run

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "small"
    return path, small_run.write_run(path)


@pytest.fixture
def copy(run, tmp_path):
    """A copy of step 8's folder that a test may damage."""
    return shutil.copytree(run[0] / "checkpoints/8", tmp_path / "8")


def test_every_leaf_to_the_bit_in_one_process_without_jax(run, tmp_path):
    """What eight devices wrote in shards, a process that has not imported jax reads, dtype and layout known."""
    path, states = run
    program = f"""
import sys, numpy as np
from k3jax.checkpoint.open import open_any
source = open_any({str(path)!r})
np.savez({str(tmp_path / "read.npz")!r}, **{{"/".join(p): source.read(p) for p in source.leaves}})
print(source.leaves["params", "stage_0", "run_0", "layer_0", "mixer_norm"].sharding, source.step)
assert "jax" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "P(-,-,data) of data=8 8\n"
    want = small_run.flat(states[8])
    with np.load(tmp_path / "read.npz") as read:
        assert set(read.files) == {"/".join(path) for path in want}
        for path, array in want.items():
            got = read["/".join(path)]
            assert got.dtype == array.dtype and got.tobytes() == array.tobytes(), path


def test_tensors_are_the_layers_of_the_stacked_leaves(run):
    path, states = run
    source = open_run(path, 4)
    found = {tensor.name: tensor for tensor in tensors(source)}
    router = [name for name in found if name.endswith("moe/router") and name.startswith("params")]
    assert router == ["params/layer 2/moe/router", "params/layer 3/moe/router", "params/layer 4/moe/router"]
    for number, slot in enumerate(layer_slots(small_run.config().model), start=1):
        stacked = states[4].params[slot.stage][slot.run][slot.layer]["mixer_norm"]
        tensor = found[f"params/layer {number}/mixer_norm"]
        np.testing.assert_array_equal(source.read(tensor.path, tensor.index), stacked[slot.block, slot.repeat])
    assert sum(np.prod(tensor.shape, dtype=int) for tensor in found.values()) == sum(
        x.size for x in small_run.flat(states[4]).values()
    )


def test_slices_are_what_numpy_makes_of_the_whole(run):
    path, states = run
    source = open_run(path, 8)
    for leaf_path, array in small_run.flat(states[8]).items():
        if array.ndim >= 4:
            for index in [(0,), (0, 0, slice(1, 3)), (slice(None), 0, 1), (0, slice(None), slice(0, 1), slice(1, 2))]:
                np.testing.assert_array_equal(source.read(leaf_path, index), array[index])


@pytest.mark.parametrize("chunks", [None, (1, 1, 4, 8, 5)])
@pytest.mark.parametrize("limit", [1, 100, 200, 1000, 10**9])
def test_parts_cover_a_tensor_once_within_the_limit(limit, chunks):
    array = np.arange(2 * 3 * 16 * 8 * 5, dtype=np.int32).reshape(2, 3, 16, 8, 5)
    pieces = [array[index] for index in parts(Leaf(array.shape, array.dtype, 0, chunks=chunks), (1, 2), limit)]
    np.testing.assert_array_equal(np.concatenate([p.ravel() for p in pieces]), array[1, 2].ravel())
    row = 5 * 4
    assert max(p.nbytes for p in pieces) <= max(2 * limit if chunks else limit, row)


def test_a_chunk_holds_one_layer_and_of_large_experts_one(tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "CHUNK_BYTES", 2**20)
    large = {
        "stage_0": {
            "run_0": {"layer_0": {"moe": {"expert_up": jnp.ones((2, 3, 4, 512, 256))}, "b": jnp.ones((2, 3, 8))}}
        }
    }
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, {"params": large | {"embed": jnp.ones((1024, 512))}}, {})
    chunks = {path[-1]: leaf.chunks for path, leaf in open_step(tmp_path / "1").leaves.items()}
    assert chunks["expert_up"] == (1, 1, 1, 512, 256)
    assert chunks["b"] == (1, 1, 8)
    assert np.prod(chunks["embed"]) * 4 <= 2**20


def largest(folder: pathlib.Path) -> pathlib.Path:
    """The file that holds the largest value."""
    index = ocdbt_index.read_index(folder / "state")
    return max((stored for stored in index.values() if stored.inline is None), key=lambda stored: stored.nbytes).file


def truncate(file: pathlib.Path, size: int) -> None:
    os.truncate(file, size)


DAMAGE = {
    "data cut": (lambda f: truncate(largest(f), 5000), r"/d/\w+: cut off at offset 5000"),
    "data gone": (lambda f: largest(f).unlink(), r"/d/\w+: missing"),
    "tree cut": (lambda f: truncate(next((f / "state/d").iterdir()), 50), r"/d/\w+: cut off at offset 50"),
    "tree damaged": (
        lambda f: next((f / "state/d").iterdir()).open("r+b").write(b"\xff" * 40),
        r"/d/\w+ at offset 0: damaged",
    ),
    "manifest cut": (lambda f: truncate(f / "state/manifest.ocdbt", 40), r"manifest.ocdbt: damaged"),
    "manifest gone": (lambda f: (f / "state/manifest.ocdbt").unlink(), r"no state/manifest.ocdbt: not written to its"),
    "tree of names cut": (lambda f: truncate(f / "state/_METADATA", 300), r"_METADATA: damaged at offset \d+"),
    "names gone": (lambda f: (f / "state/_METADATA").unlink(), r"no state/_METADATA: not written to its end"),
    "names of another form": (lambda f: (f / "state/_METADATA").write_text("[]"), r"_METADATA: damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_line_with_the_file(copy, damage):
    do, message = DAMAGE[damage]
    do(copy)
    with pytest.raises(UserError, match=message) as error:
        open_step(copy)
    assert "\n" not in str(error.value) and str(copy) in str(error.value)


def test_values_that_cannot_be_decompressed_name_file_and_offset(copy):
    file = largest(copy)
    file.write_bytes(b"\xff" * file.stat().st_size)
    source = open_step(copy)
    with pytest.raises(UserError, match=rf"{re.escape(str(file))} at offset \d+: damaged \(.*\)") as error:
        for path in source.leaves:
            source.read(path)
    assert "\n" not in str(error.value) and "tensorstore" not in str(error.value)


def test_a_chunk_that_is_not_there_is_no_zeros(copy, monkeypatch):
    read_index = ocdbt_index.read_index

    def without_one(folder):
        return {key: stored for key, stored in read_index(folder).items() if key != "params.embed/0.3"}

    monkeypatch.setattr(run_source, "read_index", without_one)
    with pytest.raises(UserError, match=r"chunk params.embed/0.3 of params.embed not there"):
        open_step(copy)


def test_a_reference_out_of_the_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="a file outside of it"):
        ocdbt_index._located(tmp_path, "value:..%2F..%2F:etc:0:5")
    with pytest.raises(UserError, match="a file outside of it"):
        ocdbt_index._located(pathlib.Path("relative"), "value:%2Fetc%2F:passwd:0:5")


def test_half_written_steps_are_listed_and_never_the_newest(run, tmp_path):
    path = shutil.copytree(run[0], tmp_path / "run")
    shutil.copytree(path / "checkpoints/8", path / "checkpoints/12.orbax-checkpoint-tmp-3")
    (path / "checkpoints/8/state/manifest.ocdbt").unlink()
    assert [(s.step, bool(s.problem)) for s in checkpoint_steps(path)] == [(4, False), (8, True), (12, True)]
    assert open_run(path).step == 4
    with pytest.raises(UserError, match=r"checkpoints/8: no state/manifest.ocdbt.*; steps that can be read: 4"):
        open_run(path, 8)
    with pytest.raises(UserError, match="no checkpoint of step 5; there are: 4"):
        open_run(path, 5)
    with pytest.raises(UserError, match="no such directory"):
        open_run(tmp_path / "nothing")


def test_a_checkpoint_larger_than_the_memory_that_is_used(tmp_path):
    """512 MB in two leaves are scanned with far less; zeros, which lie in few bytes on the disk."""
    leaf = jnp.zeros((4, 1, 8192, 2048), jnp.float32)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, {"params": {"stage_0": {"run_0": {"layer_0": {"up": leaf, "gate": leaf}}}}}, {})
    program = f"""
import resource
from k3jax.checkpoint.inspect_stats import tensor_stats
from k3jax.checkpoint.open import open_any
from k3jax.checkpoint.source import tensors
import tensorstore
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source = open_any({str(tmp_path / "1")!r})
assert sum(tensor_stats(source, t).size for t in tensors(source)) == 2**27
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 400, f"{ran.stdout.strip()} MB for tensors of 64 MB"
