"""Who may write in a run directory, and when a run may go on in it. No jax import here."""

import contextlib
import dataclasses
import datetime
import fcntl
import itertools
import json
import os
import pathlib
import platform
from collections.abc import Iterator

from k3jax.config import SECTIONS, Config, to_dict
from k3jax.config_text import config_to_gin
from k3jax.in_use import LOCK
from k3jax.train.run_dir import Change, RunDir, RunRefused, RunStatus, write_atomically

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


@contextlib.contextmanager
def new_workdir(name: str, root: pathlib.Path = pathlib.Path("runs")) -> Iterator[pathlib.Path]:
    """A directory of its own for a run, also when several start in the same second; gone at the end if none began.

    Args:
        name: what the run is called, such as the gin file's stem.
        root: where runs lie.
    Yields:
        The new, empty directory root/name-DATE-TIME-NN.
    Raises:
        RunRefused: no directory can be made there.
    """
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    made_root = not root.exists()
    for number in itertools.count():
        path = root / f"{name}-{stamp}-{number:02d}"
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            continue
        except OSError as error:
            raise _unusable(path, error) from None
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):  # it may be gone, or in use, by now
            if os.listdir(path) in ([], [LOCK]):
                (path / LOCK).unlink(missing_ok=True)
                path.rmdir()
                if made_root:
                    root.rmdir()


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

    A new directory gets nothing but a lock, until `write_config` makes it a run; one that was made here and did not
    become a run is gone at the end.

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
        self._made: list[pathlib.Path] = []  # the directory and those above it, as far as they were not there
        try:
            self.status = self._inspect(config)
            if self.status == "finished":
                return
            made = [path for path in (self.run.path, *self.run.path.parents) if not path.exists()]
            self.run.path.mkdir(parents=True, exist_ok=True)
            self._made = made
            self._lock = lock_directory(self.run.path)
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
            if self._made and set(_names(self.run.path)) == {LOCK}:
                with contextlib.suppress(OSError):  # one that is in use by now stays
                    (self.run.path / LOCK).unlink()
                    for path in self._made:
                        path.rmdir()
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


def lock_directory(path: pathlib.Path) -> int:
    """Keeps a directory for this process until the returned file descriptor is closed.

    Raises:
        RunRefused: another process has it.
        OSError: no file can be made there.
    """
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
