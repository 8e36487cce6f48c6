"""Checkpoints: what comes back is what was there, whatever wrote it; what does not fit is refused; no half ones."""

import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.checkpoint.manager import CheckpointDamaged, CheckpointError, CheckpointMismatch, Checkpoints


class Moments(NamedTuple):
    count: Any
    momentum: Any


class State(NamedTuple):
    step: Any
    params: Any
    router: Any
    opt_state: Any


def devices_mesh(count):
    return jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:count])


def make_state(step=16777217, size=8, mesh=None, spec=None):
    """Values that float32 or bfloat16 in between would change: int32 above 2^24, float32 with full mantissas."""
    rng = np.random.default_rng(step)
    params = {
        "embed": rng.standard_normal((size, 16)).astype(np.float32),
        "stage_0": {"run_0": {"w": rng.standard_normal((1, 2, 3)), "half": jnp.arange(8, dtype=jnp.bfloat16)}},
    }
    params["stage_0"]["run_0"]["w"] = params["stage_0"]["run_0"]["w"].astype(np.float32)
    state = State(np.int32(step), params, {}, Moments(np.int32(step), {"embed": params["embed"] * 3}))
    place = NamedSharding(mesh or devices_mesh(1), PartitionSpec())
    state = jax.tree.map(lambda x: jax.device_put(jnp.asarray(x), place), state)
    if spec is not None:
        sharded = jax.device_put(state.params["embed"], NamedSharding(mesh, spec))
        state = state._replace(params=state.params | {"embed": sharded})
    return state


def abstract(state, mesh):
    place = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(("written_on", "read_on"), [(8, 1), (1, 8), (8, 8)])
def test_round_trip_to_the_bit_across_device_counts(tmp_path, written_on, read_on):
    state = make_state(mesh=devices_mesh(written_on), spec=PartitionSpec("data"))
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(3, state, {"data": {"next_row": 24}, "tokens": 2**40})
    mesh = devices_mesh(read_on)
    with Checkpoints(tmp_path / "checkpoints", keep=None) as checkpoints:
        assert checkpoints.latest() == 3
        restored = checkpoints.restore(3, abstract(state, mesh))
    assert_same(restored.state, state)
    assert restored.loop == {"data": {"next_row": 24}, "tokens": 2**40}
    assert all(x.sharding == NamedSharding(mesh, PartitionSpec()) for x in jax.tree.leaves(restored.state))


def test_restores_inside_an_active_mesh(tmp_path):
    mesh = devices_mesh(8)
    state = make_state(mesh=mesh)
    with jax.set_mesh(mesh), Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        assert_same(checkpoints.restore(1, abstract(state, mesh)).state, state)
        part = checkpoints.restore_part(1, {"params": abstract(state, mesh).params})
        assert_same(part, {"params": state.params})


@pytest.mark.parametrize("devices", [1, 8])
def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path, devices):
    state = make_state(step=0, size=200_000, mesh=devices_mesh(devices))
    kept = jax.tree.map(np.array, state)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        for _ in range(5):
            state = overwrite(state)
        jax.block_until_ready(state)
        checkpoints.wait()
        assert_same(checkpoints.restore(1, abstract(kept, devices_mesh(1))).state, kept)


def test_keeps_the_newest(tmp_path):
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        for step in (2, 4, 10, 12):
            checkpoints.save(step, make_state(step), {})
        checkpoints.wait()
        assert checkpoints.steps() == [10, 12]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["10", "12"]


def test_dtype_shape_and_tree_differences_are_refused_by_name(tmp_path):
    mesh, state = devices_mesh(1), make_state()
    like = abstract(state, mesh)
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(5, state, {})
        checkpoints.wait()

        def refusal(**changes):
            with pytest.raises(CheckpointMismatch) as caught:
                checkpoints.restore(5, like._replace(**changes))
            return str(caught.value).splitlines()

        place = like.step.sharding
        # int32 16777217 would come back as float32 16777216.
        lines = refusal(step=jax.ShapeDtypeStruct((), jnp.float32, sharding=place))
        assert lines[1:] == ["  step: int32[] -> float32[]"]
        lines = refusal(params=like.params | {"embed": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=place)})
        assert lines[1:] == ["  params/embed: float32[8, 16] -> float32[8, 4]"]
        lines = refusal(router={"bias": like.step}, opt_state=Moments(like.step, {}))
        assert lines[1:] == ["  opt_state/momentum/embed: float32[8, 16] -> absent", "  router/bias: absent -> int32[]"]
        with pytest.raises(CheckpointMismatch, match="no checkpoint of step 4; there are: 5"):
            checkpoints.restore(4, like)
        with pytest.raises(CheckpointMismatch, match="params/embed: float32"):
            embed = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16, sharding=place)
            checkpoints.restore_part(5, {"params": like.params | {"embed": embed}})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of reads beside the failed one
@pytest.mark.parametrize("lost", ["state", "state/_METADATA", "state/*/*", "state/manifest.ocdbt", "loop"])
def test_files_that_are_gone_are_one_line(tmp_path, lost):
    mesh, state = devices_mesh(1), make_state()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, state, {"data": 1})
    for path in sorted((tmp_path / "5").glob(lost)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        with pytest.raises(CheckpointDamaged) as caught:
            checkpoints.restore(5, abstract(state, mesh))
        if lost != "loop":
            with pytest.raises(CheckpointDamaged):
                checkpoints.restore_part(5, {"params": abstract(state.params, mesh)})
    assert str(caught.value).startswith(f"{tmp_path}/5 cannot be read (") and "\n" not in str(caught.value)


def test_reading_changes_nothing(tmp_path):
    state = make_state()
    with Checkpoints(tmp_path / "checkpoints", keep=3) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.save(2, state, {})
    (tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir()  # another process may be writing it
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    with Checkpoints(tmp_path / "checkpoints", keep=None) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        checkpoints.restore_part(1, {"params": abstract(state, devices_mesh(1)).params})
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("noticed_by", ["check", "wait", "save"])
def test_a_save_that_fails_in_the_background_is_one_error_and_no_checkpoint(tmp_path, monkeypatch, noticed_by):
    state = make_state()
    with Checkpoints(tmp_path / "checkpoints", keep=3) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()

        def no_space(*args, **kwargs):
            raise OSError(28, "No space left on device")

        # The last thing a save does in its thread is this rename.
        monkeypatch.setattr("orbax.checkpoint._src.path.atomicity.AtomicRenameTemporaryPath.finalize", no_space)
        checkpoints.save(2, state, {})
        with pytest.raises(CheckpointError, match=r"checkpoints/2 could not be saved: .*No space left") as caught:
            if noticed_by == "check":
                for _ in range(100):
                    checkpoints.check()
                    time.sleep(0.05)
            elif noticed_by == "wait":
                checkpoints.wait()
            else:
                checkpoints.save(3, state, {})
        assert "\n" not in str(caught.value)
        assert checkpoints.steps() == [1]


def test_a_failure_noticed_only_at_the_end_is_still_an_error(tmp_path, monkeypatch):
    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orbax.checkpoint._src.path.atomicity.AtomicRenameTemporaryPath.finalize", no_space)
    with pytest.raises(CheckpointError, match="No space left"):  # noqa: SIM117
        with Checkpoints(tmp_path / "checkpoints", keep=3) as checkpoints:
            checkpoints.save(2, make_state(), {})


def test_a_failure_to_close_after_good_saves_says_so(tmp_path, monkeypatch):
    def broken():
        raise OSError(5, "Input/output error")

    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    checkpoints.save(2, make_state(), {})
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._manager, "close", broken)
        with pytest.raises(CheckpointError, match=r"all checkpoints are saved, but closing failed: .*Input/output"):
            checkpoints.close()
    checkpoints.close()


KILLED_WHILE_SAVING = """
import os, signal, sys
import jax.numpy as jnp
from k3jax.checkpoint.manager import Checkpoints

checkpoints = Checkpoints(sys.argv[1], keep=3)
checkpoints.save(1, {"w": jnp.ones(1000)}, {})
checkpoints.wait()
checkpoints.save(2, {"w": jnp.ones((4000, 5000))}, {})
while not any("tmp" in name for name in os.listdir(sys.argv[1])):
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_while_saving_leaves_the_checkpoint_before(tmp_path):
    folder = tmp_path / "checkpoints"
    environment = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_SAVING, str(folder)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert any("tmp" in name for name in os.listdir(folder)), "the save was over before the kill"
    with Checkpoints(folder, keep=3) as checkpoints:
        assert checkpoints.latest() == 1
        place = NamedSharding(devices_mesh(1), PartitionSpec())
        like = {"w": jax.ShapeDtypeStruct((1000,), jnp.float32, sharding=place)}
        np.testing.assert_array_equal(checkpoints.restore(1, like).state["w"], np.ones(1000))
        checkpoints.save(2, {"w": jnp.zeros(1000)}, {})
    assert sorted(os.listdir(folder)) == ["1", "2"]
