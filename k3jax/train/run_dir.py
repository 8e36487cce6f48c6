"""The run directory: what it holds, and how its files are written. No jax import here.

A directory is a run from the moment `config.json` is in it. Everything is written to a temporary name and
renamed, so that a file is whole or absent.
"""

import json
import os
import pathlib
from typing import Any, Literal, NamedTuple

from k3jax.config import Config, ConfigError, from_dict
from k3jax.errors import UserError

RunStatus = Literal["new", "resumable", "finished"]


class RunRefused(UserError):
    """A run directory that cannot be used as asked."""


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
        if not self.config_json.exists():
            raise RunRefused(f"{self.path} holds no run (no config.json); give the directory of one")
        values = read_json(self.config_json)
        try:
            return from_dict(values)
        except ConfigError as error:
            raise RunRefused(f"{self.config_json} cannot be read: {error}; give the directory of a run") from None
        except (ValueError, TypeError, AttributeError):  # JSON of another form
            form = "not sections with fields, as k3jax writes them"
            raise RunRefused(f"{self.config_json} cannot be read: {form}; give the directory of a run") from None


def read_json(path: pathlib.Path) -> Any:
    """The content of one of the run's JSON files.

    Raises:
        RunRefused: it cannot be opened, or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunRefused(f"{path} cannot be read ({error.strerror}); make it readable") from None
    except ValueError as error:
        raise RunRefused(f"{path} cannot be read: {error}; it is damaged: restore it from a copy") from None


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all, also after a crash."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
