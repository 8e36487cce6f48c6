"""What a run was computed with: software, devices and text, written down at its start and compared when it goes on."""

import importlib.metadata
import json
import pathlib
import platform
import subprocess

from k3jax.train.run_dir import Change, RunDir, RunRefused, read_json, write_atomically

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "k3jax")


def versions() -> dict[str, object]:
    """What the results of a run depend on beside its configuration: software, and the devices in use."""
    import jax

    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        **{package.removesuffix("-checkpoint"): _version(package) for package in PACKAGES},
        "git_revision": _git_revision(),
        "system": platform.platform(),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
    }


def record_versions(run: RunDir, corpus: str, compute_dtype: str, step: int) -> list[Change]:
    """Writes versions.json at the start of a run; on a later start, adds what is different now.

    Args:
        run: the run.
        corpus: fingerprint of the data.
        compute_dtype: what ModelConfig.dtype comes to on these devices.
        step: the step this process starts from.
    Returns:
        What differs from the start of the run.
    Raises:
        RunRefused: the data is not what the run has been trained on, or the dtype not what it computes in.
    """
    now = {**versions(), "corpus": corpus, "compute_dtype": compute_dtype}
    if not run.versions.exists():
        write_atomically(run.versions, json.dumps(now, indent=2) + "\n")
        return []
    stored = read_json(run.versions)
    if stored.get("corpus") != corpus and step > 0:
        raise RunRefused(
            f"{run.path}: the text is not what this run was trained on (fingerprint {str(stored.get('corpus'))[:12]}, "
            f"now {corpus[:12]}): files, tokenizer or Python version changed; restore them, or start a new run"
        )
    begun_in = stored.get("compute_dtype", compute_dtype)
    if begun_in != compute_dtype and step > 0:
        raise RunRefused(
            f"{run.path}: the run was begun in {begun_in}, and ModelConfig.dtype = 'auto' is {compute_dtype} on these "
            f"devices; resume it where it is {begun_in}, or start a new run with ModelConfig.dtype set"
        )
    resumed = stored.pop("resumed", [])
    changes = [Change(name, stored.get(name), value) for name, value in now.items() if stored.get(name) != value]
    if step == 0:  # nothing depends on the first start yet
        write_atomically(run.versions, json.dumps(now, indent=2) + "\n")
    elif changes:
        resumed.append({"step": step, **{change.field: change.new for change in changes}})
        write_atomically(run.versions, json.dumps({**stored, "resumed": resumed}, indent=2) + "\n")
    return changes if step > 0 else []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """The commit of the source tree this file lies in, with "+" where files differ from it; None outside of git."""
    here = pathlib.Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        if not git("ls-files", pathlib.Path(__file__).name):
            return None  # installed inside of somebody else's repository
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
