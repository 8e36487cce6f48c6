"""A training run's checkpoint as a `Source`: read from the files, on any machine, without restoring it.

Whatever devices wrote it, one CPU reads a slice at a time. No jax import here: TensorStore, which orbax writes with,
reads the chunks.
"""

import ast
import base64
import json
import pathlib
import re
from typing import NamedTuple

import numpy as np

from k3jax.checkpoint.ocdbt_index import missing_chunks, read_index, read_value
from k3jax.checkpoint.source import Index, Leaf, Path
from k3jax.config import ConfigError, ModelConfig, from_dict
from k3jax.errors import UserError
from k3jax.in_use import is_in_use

STATE = "state"
CACHE_BYTES = 128 * 2**20  # of decompressed chunks; what a layer's slices share is decompressed once


class Step(NamedTuple):
    """A checkpoint of a run.

    Attributes:
        step: its number.
        folder: where it lies.
        problem: why it cannot be read, in a few words; "" = it can.
    """

    step: int
    folder: pathlib.Path
    problem: str


def checkpoint_steps(run: pathlib.Path) -> list[Step]:
    """Every checkpoint of a run, half-written ones too, by step.

    Args:
        run: the run directory.
    Raises:
        UserError: no run, or none of its checkpoints.
    """
    folder = run / "checkpoints"
    if not folder.is_dir():
        if not run.is_dir():
            raise UserError(f"{run}: no such directory; give the directory of a run or of a released checkpoint")
        raise UserError(no_checkpoint(run) if (run / "config.json").is_file() else f"{run} holds no run")
    steps = []
    for child in folder.iterdir():
        number = re.match(r"(\d+)(\.orbax-checkpoint-tmp.*)?$", child.name)
        if number and child.is_dir():
            problem = "never finished: the process that wrote it was stopped" if number[2] else _problem(child)
            steps.append(Step(int(number[1]), child, problem))
    return sorted(steps, key=lambda step: (step.step, bool(step.problem)))


def no_checkpoint(run: pathlib.Path) -> str:
    """Says that a run has none, and what to do: wait while a process is at work there, else go on with the run."""
    advice = "wait for its first" if is_in_use(run) else f"go on with: k3 train --workdir={run}"
    return f"{run} has no checkpoint yet; {advice}"


def choose_step(run: pathlib.Path, step: int | None) -> Step:
    """One checkpoint of a run.

    Args:
        run: the run directory.
        step: its number; None = the newest that can be read.
    Raises:
        UserError: there is none, with those that there are.
    """
    steps = checkpoint_steps(run)
    whole = [found for found in steps if not found.problem]
    if step is not None:
        for found in whole:
            if found.step == step:
                return found
        for found in steps:
            if found.step == step:
                raise UserError(f"{found.folder}: {found.problem}; steps that can be read: {_listed(whole)}")
        raise UserError(f"{run}: no checkpoint of step {step}; there are: {_listed(whole)}")
    if not whole:
        if not steps:
            raise UserError(no_checkpoint(run))
        raise UserError(f"{run} has no checkpoint that can be read; step {steps[-1].step}: {steps[-1].problem}")
    return whole[-1]


def open_run(path: pathlib.Path, step: int | None = None) -> "RunSource":
    """Opens a checkpoint of a run.

    Args:
        path: the run directory.
        step: which checkpoint; None = the newest.
    Raises:
        UserError: no run, no such step, or damaged files.
    """
    found = choose_step(path, step)
    return RunSource(found.folder, found.step, _model_config(path))


def open_step(folder: pathlib.Path) -> "RunSource":
    """Opens a checkpoint by its own folder, RUN/checkpoints/STEP.

    Raises:
        UserError: damaged files.
    """
    step = int(folder.name) if folder.name.isdigit() else 0
    problem = _problem(folder)
    if problem:
        raise UserError(f"{folder}: {problem}")
    return RunSource(folder, step, _model_config(folder.parent.parent))


class RunSource:
    """A step's state: `Source` over orbax's files.

    Args:
        folder: RUN/checkpoints/STEP.
        step: its number.
        config: of the run's model; None = not known.
    Attributes:
        path, config, leaves: as of `Source`.
        step: as given.
    Raises:
        UserError: files that are missing, cut off or damaged, or a chunk that is not there.
    """

    def __init__(self, folder: pathlib.Path, step: int, config: ModelConfig | None):
        import ml_dtypes  # noqa: F401  (numpy learns bfloat16)

        self.path, self.step, self.config = folder, step, config
        self._state = folder / STATE
        self._index = read_index(self._state)
        self._names: dict[Path, str] = {}
        self._stores: dict[Path, object] = {}
        self._context = None
        self.leaves: dict[Path, Leaf] = {}
        shardings = _shardings(self._state / "_sharding")
        nbytes: dict[str, int] = {}
        for key, stored in self._index.items():
            name = key.rpartition("/")[0]
            nbytes[name] = nbytes.get(name, 0) + stored.nbytes
        for path in _tree(self._state / "_METADATA"):
            name = ".".join(path)
            self._names[path] = name
            self.leaves[path] = self._leaf(name, nbytes.get(name, 0), shardings.get(name, ""))

    def read(self, path: Path, index: Index = ()) -> np.ndarray:
        """A leaf, or a slice of it: see `Source.read`."""
        part = self._store(path)
        if index:  # a slice ends where the array does, as numpy has it
            shape = self.leaves[path].shape
            part = part[tuple(slice(*x.indices(n)) if isinstance(x, slice) else x for x, n in zip(index, shape))]  # noqa: B905
        try:
            return np.asarray(part.read().result())
        except ValueError as error:
            key = re.search(r'Error reading "([^"]+)"', str(error))
            if key is None:  # not of the files, but of the index
                raise
            why = str(error).partition(" [")[0].rpartition('": ')[2]
            raise UserError(f"{self._index.get(key[1], self._state)}: damaged ({'/'.join(path)}: {why})") from None

    def _store(self, path: Path):
        import tensorstore as ts

        if path not in self._stores:
            if self._context is None:
                self._context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
            base = {"driver": "file", "path": f"{self._state.absolute()}/"}
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{self._names[path]}/"}
            spec = {"driver": "zarr", "kvstore": kvstore, "recheck_cached_data": "open"}
            self._stores[path] = ts.open(spec, read=True, open=True, context=self._context).result()
        return self._stores[path]

    def _leaf(self, name: str, nbytes: int, sharding: str) -> Leaf:
        key = f"{name}/.zarray"
        if key not in self._index:
            raise UserError(f"{self._state}: {name} is in the tree, but no array of it is stored; copy it again, whole")
        try:
            zarray = json.loads(read_value(self._state, self._index, key))
            shape, chunks = tuple(zarray["shape"]), tuple(zarray["chunks"])
            dtype = np.dtype(zarray["dtype"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self._index[key]}: damaged ({key}: {error})") from None
        missing = missing_chunks(self._index, name, shape, chunks)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(f"{self._state}: chunk {missing[0]}{more} of {name} not there; copy the checkpoint again")
        return Leaf(shape, dtype, nbytes, sharding, chunks)


def _problem(folder: pathlib.Path) -> str:
    """Why a step's folder cannot be read, as far as a glance tells."""
    for name in ("_CHECKPOINT_METADATA", STATE, f"{STATE}/_METADATA", f"{STATE}/manifest.ocdbt"):
        if not (folder / name).exists():
            return f"no {name}: not written to its end, or not copied whole"
    return ""


def _listed(steps: list[Step]) -> str:
    return ", ".join(str(found.step) for found in steps) or "none"


def _model_config(run: pathlib.Path) -> ModelConfig | None:
    """Of the run's config.json; None where there is none."""
    file = run / "config.json"
    try:
        return from_dict(json.loads(file.read_text())).model
    except FileNotFoundError:
        return None
    except (ConfigError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read: {next(iter(str(error).splitlines()), '')}") from None


def _tree(file: pathlib.Path) -> list[Path]:
    """The paths of all leaves in a state's `_METADATA`."""
    try:
        values = json.loads(file.read_text())
        if values.get("use_zarr3") or not values.get("use_ocdbt", True):
            raise UserError(f"{file}: arrays in a form that k3jax does not write (use_ocdbt, no use_zarr3 expected)")
        entries = values["tree_metadata"]
        # A key is the text of a tuple; an empty dictionary ({} for no router) is an entry without an array.
        return [
            tuple(str(key) for key in ast.literal_eval(path))
            for path, entry in entries.items()
            if entry["value_metadata"]["value_type"] in ("jax.Array", "np.ndarray", "scalar")
        ]
    except FileNotFoundError:
        raise UserError(f"{file}: missing; copy the checkpoint again, whole") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: damaged at offset {error.pos} ({error.msg})") from None
    except (KeyError, TypeError, AttributeError, SyntaxError) as error:
        raise UserError(f"{file}: damaged ({type(error).__name__}: {error})") from None


def _shardings(file: pathlib.Path) -> dict[str, str]:
    """{array: how it lay on devices, in a few words}; {} where that was not kept."""
    try:
        entries = json.loads(file.read_text())
        return {base64.b64decode(name).decode(): _words(json.loads(text)) for name, text in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _words(sharding: dict) -> str:
    """Such as "P(-,-,data) on 8 (data=8)"; "1 device" where nothing could be split."""
    if sharding.get("sharding_type") != "NamedSharding":
        return sharding.get("sharding_type", "").removesuffix("Sharding").lower()
    axes = dict(zip(sharding["axis_names"], sharding["shape"], strict=True))
    spec = ["-" if axis is None else "+".join([axis] if isinstance(axis, str) else axis)
            for axis in sharding["partition_spec"]]  # fmt: skip
    devices = int(np.prod(list(axes.values())))
    if devices == 1:
        return "1 device"
    mesh = ",".join(f"{name}={size}" for name, size in axes.items() if size > 1)
    return f"P({','.join(spec)}) of {mesh}" if any(s != "-" for s in spec) else f"copies on {devices} ({mesh})"
