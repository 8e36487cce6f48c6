"""Devices as a mesh, and batches laid over it. jax is imported inside: the checks are made before it loads."""

import dataclasses
import typing

import numpy as np

from k3jax.config import Config, MeshConfig
from k3jax.config_checks import require

if typing.TYPE_CHECKING:
    import jax

    from k3jax.data import Batch

DATA_AXIS = "data"  # rows of the batch lie over it


def check_mesh(mesh_config: MeshConfig) -> None:
    """Refuses every mesh but a data-parallel one, without loading jax.

    Args:
        mesh_config: devices along each axis.
    Raises:
        ConfigError: an axis other than data is not 1.
    """
    for field in dataclasses.fields(mesh_config):
        ok = field.name == DATA_AXIS or getattr(mesh_config, field.name) == 1
        require(ok, mesh_config, field.name, "only data parallelism works so far; set it to 1 and use MeshConfig.data")


def make_mesh(mesh_config: MeshConfig) -> "jax.sharding.Mesh":
    """A mesh of all devices of all processes along the axis "data".

    Args:
        mesh_config: data is -1 or the number of devices, every other axis 1.
    Returns:
        The mesh.
    Raises:
        ConfigError: any other mesh.
    """
    import jax

    check_mesh(mesh_config)
    devices = jax.device_count()
    fits = mesh_config.data in (-1, devices)
    require(fits, mesh_config, "data", f"there are {devices} devices, and all are used; set it to -1 or {devices}")
    return jax.make_mesh((devices,), (DATA_AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


def check_batch(config: Config, mesh: "jax.sharding.Mesh") -> None:
    """Refuses a batch that does not split into equal parts, one for each device and micro-batch.

    Args:
        config: a whole run.
        mesh: from `make_mesh`.
    Raises:
        ConfigError: DataConfig.batch_size is not a multiple of devices times micro-batches.
    """
    devices, parts = mesh.shape[DATA_AXIS], config.train.num_microbatches
    share = devices * parts
    rows = config.data.batch_size
    near = sorted({max(rows // share, 1) * share, -(-rows // share) * share})
    require(
        rows % share == 0,
        config.data,
        "batch_size",
        f"must be a multiple of {share} = {devices} devices x {parts} micro-batches (TrainConfig.num_microbatches), "
        f"such as {' or '.join(map(str, near))}",
    )


def replicated(mesh: "jax.sharding.Mesh") -> "jax.sharding.NamedSharding":
    """The sharding of what every device holds whole: the training state."""
    import jax

    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def over_rows(mesh: "jax.sharding.Mesh") -> "jax.sharding.NamedSharding":
    """The sharding of a batch: its rows over the devices."""
    import jax

    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(DATA_AXIS))


def shard_batch(batch: "Batch", mesh: "jax.sharding.Mesh") -> "Batch":
    """Puts a batch on the devices, its rows spread over them.

    Args:
        batch: this process's rows, in the order of the whole batch; numpy arrays [rows, T].
        mesh: from `make_mesh`.
    Returns:
        The same tuple of global arrays [rows of all processes, T].
    Raises:
        ValueError: the rows do not divide among this process's devices.
    """
    import jax

    local = len(mesh.local_devices)
    for x in batch:
        if len(x) % local != 0:
            raise ValueError(
                f"a batch of {len(x)} rows does not divide among {local} devices; use a multiple of {local}"
            )
    sharding = over_rows(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), batch)
