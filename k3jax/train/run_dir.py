"""The run directory: what it holds, who may write in it, and when a run may go on in it. No jax import here.

A directory is a run from the moment `config.json` is in it. Everything is written to a temporary name and
renamed, so that a file is whole or absent.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from typing import Literal, NamedTuple

from k3jax.config import SECTIONS, Config, ConfigError, ModelConfig, from_dict, to_dict
from k3jax.config_checks import require
from k3jax.config_text import config_to_gin

# What a resumed run may change: none of it has a say in what the parameters become.
FREE_FIELDS = frozenset(
    {
        "TrainConfig.log_every",
        "TrainConfig.eval_every",
        "TrainConfig.checkpoint_every",
        "TrainConfig.keep_checkpoints",
        "TrainConfig.max_nonfinite_steps",
        *(f"MeshConfig.{field.name}" for field in dataclasses.fields(SECTIONS["mesh"])),
    }
)
LOCK = ".lock"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "k3jax")

RunStatus = Literal["new", "resumable", "finished"]


class RunRefused(ValueError):
    """A run directory that cannot be used as asked. The message may be a list of several lines."""


class Change(NamedTuple):
    """A setting that differs between a run and what is asked for now."""

    field: str
    old: object
    new: object

    def __str__(self):
        return f"{self.field}: {self.old!r} -> {self.new!r}"


class RunDir(NamedTuple):
    """Where the parts of a run lie.

    Attributes:
        path: the run directory itself.
    """

    path: pathlib.Path

    @property
    def config_json(self) -> pathlib.Path:
        return self.path / "config.json"

    @property
    def config_gin(self) -> pathlib.Path:
        return self.path / "config.gin"

    @property
    def versions(self) -> pathlib.Path:
        return self.path / "versions.json"

    @property
    def parameters(self) -> pathlib.Path:
        return self.path / "parameters.txt"

    @property
    def metrics(self) -> pathlib.Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> pathlib.Path:
        return self.path / "tensorboard"

    @property
    def summary(self) -> pathlib.Path:
        """Written last: a run that has it is finished."""
        return self.path / "summary.json"

    @property
    def report(self) -> pathlib.Path:
        return self.path / "report.html"

    def status(self) -> RunStatus:
        """How far a run has come."""
        if self.summary.exists():
            return "finished"
        return "resumable" if self.config_json.exists() else "new"

    def load_config(self) -> Config:
        """The configuration of the run.

        Raises:
            RunRefused: there is no run here, or another version of k3jax wrote it.
        """
        try:
            return from_dict(json.loads(self.config_json.read_text()))
        except (FileNotFoundError, NotADirectoryError):
            raise RunRefused(f"{self.path} holds no run (no config.json); give the directory of one") from None
        except (ConfigError, json.JSONDecodeError) as error:
            raise RunRefused(f"{self.config_json} cannot be read: {error}; give the directory of a run") from None
        except OSError as error:
            raise RunRefused(f"{self.config_json} cannot be read ({error.strerror}); make it readable") from None
        except (ValueError, TypeError, AttributeError):  # JSON or bytes of another form
            form = "not sections with fields, as k3jax writes them"
            raise RunRefused(f"{self.config_json} cannot be read: {form}; give the directory of a run") from None


def new_workdir(name: str, root: pathlib.Path = pathlib.Path("runs")) -> pathlib.Path:
    """Makes a directory of its own for a run, also when several start in the same second.

    Args:
        name: what the run is called, such as the gin file's stem.
        root: where runs lie.
    Returns:
        The new, empty directory root/name-DATE-TIME-NN.
    Raises:
        RunRefused: no directory can be made there.
    """
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    number = 0
    while True:
        path = root / f"{name}-{stamp}-{number:02d}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise _unusable(path, error) from None
        else:
            return path


def remove_unused(path: pathlib.Path) -> None:
    """Removes a directory of `new_workdir` in which no run has begun; leaves every other as it is."""
    with contextlib.suppress(OSError):  # it may be gone by now
        if os.listdir(path) in ([], [LOCK]):
            (path / LOCK).unlink(missing_ok=True)
            path.rmdir()


def check_vocabulary(config: Config, vocabulary: int) -> None:
    """Refuses a model that has no row for some token.

    Args:
        config: a whole run.
        vocabulary: ids of the tokenizer run from 0 to vocabulary - 1.
    Raises:
        ConfigError: ModelConfig.vocab_size is smaller.
    """
    require(
        vocabulary <= config.model.vocab_size,
        config.model,
        "vocab_size",
        f"the tokenizer {config.data.tokenizer!r} has {vocabulary} tokens; set it to {vocabulary} or more",
    )


def config_changes(old: Config, new: Config) -> list[Change]:
    """Every field in which two configurations differ, in the order of their declaration."""
    changes = []
    for section, cls in SECTIONS.items():
        before, after = getattr(old, section), getattr(new, section)
        for field in dataclasses.fields(cls):
            a, b = getattr(before, field.name), getattr(after, field.name)
            if a != b:
                changes.append(Change(f"{cls.__name__}.{field.name}", a, b))
    return changes


class Claim:
    """A run directory held by this process alone, until `close` or the end of the process.

    A new directory gets nothing but a lock, until `write_config` makes it a run.

    Args:
        workdir: a new or empty directory, or that of a run with the same configuration.
        config: of the run.
    Attributes:
        run: RunDir.
        status: what was found: "new", "resumable" or "finished" (in which case nothing was touched).
        changes: settings of `FREE_FIELDS` that now differ from the run's.
    Raises:
        RunRefused: files of something else, a run with another configuration, a process at work here, or no
            directory can be made or used here. Nothing was changed then.
    """

    def __init__(self, workdir: str | os.PathLike, config: Config):
        self.run = RunDir(pathlib.Path(workdir))
        self.changes: list[Change] = []
        self._config, self._lock = config, None
        try:
            self.status = self._inspect(config)
            if self.status == "finished":
                return
            self.run.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.run.path)
            self.status = self._inspect(config)  # what another process did before we had the lock
        except OSError as error:
            self.close()
            raise _unusable(self.run.path, error) from None
        except BaseException:
            self.close()
            raise

    def write_config(self) -> None:
        """Makes the directory a run of this configuration: config.json and config.gin, where they are not there.

        To be called when the configuration has passed all checks, because from then on the directory takes no other.
        """
        outdated = bool(self.changes)
        if outdated or not self.run.config_json.exists():
            write_atomically(self.run.config_json, json.dumps(to_dict(self._config), indent=2) + "\n")
        if outdated or not self.run.config_gin.exists():
            write_atomically(self.run.config_gin, config_to_gin(self._config))

    def close(self) -> None:
        """Gives the directory free."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _inspect(self, config: Config) -> RunStatus:
        path = self.run.path
        if path.exists() and not path.is_dir():
            raise RunRefused(f"{path} is a file; choose another --workdir")
        status = self.run.status() if path.exists() else "new"
        if status == "new":
            foreign = [name for name in sorted(_names(path)) if not _is_leftover(name)]
            if foreign:
                shown = ", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else "")
                raise RunRefused(f"{path} is not empty and holds no run ({shown}); choose another --workdir")
            return status
        changes = config_changes(self.run.load_config(), config)
        self.changes = [change for change in changes if change.field in FREE_FIELDS]
        fixed = [change for change in changes if change.field not in FREE_FIELDS]
        if fixed:
            raise RunRefused(_refusal(path, fixed))
        return status


def _refusal(path: pathlib.Path, changes: list[Change]) -> str:
    lines = [f"{path} holds a run with another configuration (its value -> the one asked for):"]
    lines += [f"  {change}" for change in changes]
    if any(change.field == "TrainConfig.steps" for change in changes):
        lines.append(
            "The learning-rate schedule depends on TrainConfig.steps, so a run cannot be made longer or shorter."
        )
    lines.append("Nothing was changed. Choose another --workdir, or go on with the run's own config.gin.")
    return "\n".join(lines)


def _unusable(path: pathlib.Path, error: OSError) -> RunRefused:
    return RunRefused(f"{path} cannot be used ({error.strerror or error}); choose another --workdir")


def _names(path: pathlib.Path) -> list[str]:
    return os.listdir(path) if path.is_dir() else []


def _is_leftover(name: str) -> bool:
    """Whether a start of ours that was killed at once could have left this behind."""
    return name in (LOCK, ".config.json.tmp")


def _lock(path: pathlib.Path) -> int:
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
        os.close(descriptor)
        by = f" ({holder})" if holder else ""
        raise RunRefused(f"{path} is in use by another process{by}; wait for it or choose another --workdir") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
    return descriptor


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all, also after a crash."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


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
    stored = json.loads(run.versions.read_text())
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


def parameter_table(config: ModelConfig, params: dict) -> str:
    """Every parameter with shape, dtype and size, then the totals, as aligned text.

    Args:
        config: the architecture, for the published way of counting.
        params: nested dictionaries of arrays.
    Returns:
        Lines of text.
    """
    from k3jax.models.accounting import count_parameters

    rows = [("parameter", "shape", "dtype", "size")]
    total = 0
    for name, leaf in _walk(params, ()):
        total += leaf.size
        rows.append((name, "x".join(map(str, leaf.shape)), str(leaf.dtype), f"{leaf.size:,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {dtype:<{widths[2]}}  {size:>{widths[3]}}"
        for name, shape, dtype, size in rows
    ]
    table = count_parameters(config)
    lines += [
        "",
        f"{total:,} trained values",
        f"{table.total:,} parameters with router biases, {table.active:,} active a token",
    ]
    return "\n".join(lines) + "\n"


def _walk(tree: dict, path: tuple[str, ...]):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _walk(value, (*path, name))
        else:
            yield "/".join((*path, name)), value
