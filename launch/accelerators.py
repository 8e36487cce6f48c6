"""Whether jax should look for a TPU: settled before it is imported.

Where libtpu is installed (it also compiles for TPUs from afar, so the tests bring it), jax starts it to look for
chips. On a machine without any, libtpu prints a page of errors, may wait for a metadata server, and takes a lock that
a second process then fails at.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
from collections.abc import MutableMapping

CHOICES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "JAX_FORCE_TPU_INIT")
SAY_NOTHING = ("TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY")  # jax and libtpu set them on any machine
GOOGLE = "0x1ae0"
NO_CHIP = ("0x01", "0x02", "0x06")  # PCI classes of Google's disks, network cards and bridges
DEVICE_FILES = ("accel[0-9]*", "vfio/[0-9]*", "nvidia0", "nvidiactl", "dxg", "kfd")


def leave_libtpu_asleep(environ: MutableMapping[str, str] = os.environ, root: pathlib.Path = pathlib.Path("/")) -> None:
    """Sets JAX_PLATFORMS=cpu where libtpu is installed and the machine has no accelerator that jax could use.

    Changes nothing where something may be a TPU or a GPU, where a plugin of jax is installed for any other device,
    or where the environment says anything about platforms or TPUs.

    Args:
        environ: the environment.
        root: of the file system.
    """
    decided = any(name in environ for name in CHOICES)
    tpu = any(name.startswith("TPU_") and name not in SAY_NOTHING for name in environ)
    if decided or tpu or not importlib.util.find_spec("libtpu"):
        return
    if any(any((root / "dev").glob(pattern)) for pattern in DEVICE_FILES) or _has_chip(root):
        return
    if importlib.util.find_spec("jax_plugins") or importlib.metadata.entry_points(group="jax_plugins"):
        return
    environ["JAX_PLATFORMS"] = "cpu"


def _has_chip(root: pathlib.Path) -> bool:
    """Whether a PCI device could be a TPU: Google's, and nothing that every Google virtual machine has."""
    # Not by device numbers, as jax does, because the next generation's are not known.
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == GOOGLE and not kind.startswith(NO_CHIP):
            return True
    return False
