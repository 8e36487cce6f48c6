"""Which meshes and batches are accepted, and where rows land."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from k3jax.config import ConfigError, MeshConfig
from k3jax.data import Batch
from k3jax.train.mesh import check_batch, check_mesh, make_mesh, shard_batch
from tests.train.tiny import make_batch, make_config, mesh_of


def test_all_devices_lie_along_data():
    for data in (-1, jax.device_count()):
        mesh = make_mesh(MeshConfig(data=data))
        assert mesh.axis_names == ("data",) and list(mesh.devices) == jax.devices()


@pytest.mark.parametrize("axis", ["fsdp", "expert", "context", "tensor"])
@pytest.mark.parametrize("size", [2, -1])
def test_other_axes_are_refused_in_a_line(axis, size):
    mesh_config = MeshConfig(**({"data": 1} | {axis: size}))
    for check in (check_mesh, make_mesh):
        with pytest.raises(
            ConfigError, match=rf"^MeshConfig.{axis} = {size}: only data parallelism .* set it to 1"
        ) as e:
            check(mesh_config)
        assert "\n" not in str(e.value)


def test_another_number_of_devices_is_refused_with_the_fix():
    n = jax.device_count()
    with pytest.raises(ConfigError, match=rf"MeshConfig.data = {n + 1}: there are {n} devices.* set it to -1 or {n}"):
        make_mesh(MeshConfig(data=n + 1))


def test_axes_are_checked_without_jax():
    program = (
        "import sys; from k3jax.config import MeshConfig; from k3jax.train.mesh import check_mesh;"
        "check_mesh(MeshConfig()); assert 'jax' not in sys.modules and 'grain' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_batch_divides_among_devices_and_micro_batches():
    check_batch(make_config(batch_size=16, num_microbatches=2), mesh_of(8))
    with pytest.raises(ConfigError, match=r"^DataConfig.batch_size = 8: must be a multiple of 16 = 8 devices x 2 "):
        check_batch(make_config(batch_size=8, num_microbatches=2), mesh_of(8))


def test_rows_are_spread_in_order():
    mesh, batch = mesh_of(4), make_batch(8)
    spread = shard_batch(batch, mesh)
    assert isinstance(spread, Batch)
    for got, want in zip(spread, batch, strict=True):
        assert got.dtype == np.int32 and np.array_equal(got, want)
        for i, device in enumerate(mesh.devices):
            (shard,) = (s for s in got.addressable_shards if s.device == device)
            assert np.array_equal(shard.data, want[2 * i : 2 * i + 2])


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="a batch of 6 rows does not divide among 4 devices; use a multiple of 4"):
        shard_batch(make_batch(6), mesh_of(4))
