"""Checkpoints of a run: saved in the background, complete or absent, restored only into what they are.

orbax does the writing; here is what it leaves to its users: a failed save becomes one error, and a checkpoint whose
tree, shapes or dtypes differ from what is asked for is refused with a list of the differences (orbax by itself
casts silently).
"""

import contextlib
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from k3jax.errors import UserError

STATE, LOOP = "state", "loop"
MAX_DIFFERENCES = 20  # lines of a refusal
CHUNK_BYTES = 64 * 2**20  # of an array's parts that are stored and read as a whole


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written; one line."""


class CheckpointMismatch(UserError):
    """A checkpoint that does not exist or does not fit. The message may be a list of several lines."""


class CheckpointDamaged(UserError):
    """A checkpoint whose files cannot be read."""


class Restored(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        state: the tree that was asked for.
        loop: plain values, as given to `Checkpoints.save`.
    """

    state: Any
    loop: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, a directory a step.

    Args:
        directory: where they lie; made by the first save.
        keep: how many to keep, the newest; None opens for reading, and changes nothing.
    """

    def __init__(self, directory: pathlib.Path, keep: int | None):
        self.directory = pathlib.Path(directory).absolute()
        self._saving: int | None = None  # the step of a save that is not known to have ended well
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=None if keep is None else ocp.checkpoint_managers.LatestN(keep),
                create=keep is not None,
                # What a killed process was writing.
                cleanup_tmp_directories=keep is not None,
                save_root_metadata=False,
            ),
            item_handlers={STATE: ocp.StandardCheckpointHandler(), LOOP: ocp.JsonCheckpointHandler()},
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        try:
            self.close()
        except CheckpointError:
            if exception is None:
                raise

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, ascending."""
        # From disk: the manager's own list has the save in it that is going on.
        return sorted(found.step for found in ocp.path.step.standard_name_format().find_all(self.directory))

    def latest(self) -> int | None:
        """The newest of `steps`, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, loop: dict[str, Any]) -> None:
        """Copies a state to the host and writes it in the background; waits for an earlier save first.

        The state may be donated as soon as this returns. Host memory for one copy of it is needed.

        Args:
            step: steps taken.
            state: a tree of arrays.
            loop: plain values for JSON.
        Raises:
            CheckpointError: this save could not start, or the one before it failed.
        """
        layout = jax.tree_util.tree_map_with_path(_stored, state)
        arguments = ocp.args.Composite(
            **{STATE: ocp.args.StandardSave(state, save_args=layout), LOOP: ocp.args.JsonSave(loop)}
        )
        self.wait()
        self._saving = step
        self._guard(lambda: self._manager.save(step, args=arguments, force=True))

    def check(self) -> None:
        """Raises CheckpointError if a save failed in the background; costs next to nothing."""
        # orbax's check_for_errors sees nothing once its own thread has seen the error; waiting does.
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until everything is written, or raises CheckpointError."""
        self._guard(self._manager.wait_until_finished)
        self._saving = None

    def close(self) -> None:
        """Waits until everything is written and ends the background threads, or raises CheckpointError."""
        self._guard(self._manager.close)

    def restore(self, step: int, like: Any) -> Restored:
        """Reads a checkpoint into given shapes, dtypes and shardings, whatever devices wrote it.

        Args:
            step: one of `steps`.
            like: a tree of jax.ShapeDtypeStruct with shardings.
        Returns:
            The state, laid out as `like`, and the plain values.
        Raises:
            CheckpointMismatch: no such step, or another tree, shape or dtype.
            CheckpointDamaged: files that cannot be read.
        """
        self._check_step(step)
        self._refuse_differences(step, _leaves(like), partly=False)
        arguments = ocp.args.Composite(**{STATE: ocp.args.StandardRestore(like), LOOP: ocp.args.JsonRestore()})
        with self._reading(step):
            restored = self._manager.restore(step, args=arguments)
        return Restored(restored[STATE], restored[LOOP])

    def restore_part(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """As `restore`, but only the top-level entries of the state that `like` names; the rest is not read.

        Args:
            step: one of `steps`.
            like: {name: tree of jax.ShapeDtypeStruct with shardings}, such as params and router.
        Returns:
            The same dictionary with arrays.
        Raises:
            CheckpointMismatch: no such step, or another tree, shape or dtype.
            CheckpointDamaged: files that cannot be read.
        """
        self._check_step(step)
        self._refuse_differences(step, _leaves(like), partly=True)
        arguments = ocp.args.PyTreeRestore(
            item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
        )
        with self._reading(step), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(self.directory / str(step) / STATE, args=arguments)

    def _check_step(self, step: int) -> None:
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointMismatch(f"{self.directory}: no checkpoint of step {step}; there are: {there}")

    def _refuse_differences(self, step: int, wanted: dict[str, str], partly: bool) -> None:
        with self._reading(step):
            metadata = self._manager.item_metadata(step)[STATE]
            if metadata is None:
                raise FileNotFoundError("its description of the state is gone")
        found = _leaves(getattr(metadata, "tree", metadata))
        if partly:
            tops = {path.partition("/")[0] for path in wanted}
            found = {path: leaf for path, leaf in found.items() if path.partition("/")[0] in tops}
        lines = [
            f"  {path}: {found.get(path, 'absent')} -> {wanted.get(path, 'absent')}"
            for path in sorted(found.keys() | wanted.keys())
            if found.get(path) != wanted.get(path)
        ]
        if lines:
            more = len(lines) - MAX_DIFFERENCES
            shown = lines[:MAX_DIFFERENCES] + ([f"  ... and {more} more"] if more > 0 else [])
            where = self.directory / str(step)
            heading = f"{where} does not fit the configuration (in the checkpoint -> asked for):"
            raise CheckpointMismatch("\n".join([heading, *shown]))

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError) as error:  # what orbax and tensorstore say of missing or cut files
            reason = _first_line(error)
            raise CheckpointDamaged(
                f"{self.directory / str(step)} cannot be read ({reason}); restore it from a copy, or move it away to "
                "use the one before it"
            ) from error

    def _guard(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            reason = _first_line(error)
            what = f"checkpoint {self.directory}/{self._saving} could not be saved"
            if self._saving is None:
                what = f"{self.directory}: all checkpoints are saved, but closing failed"
            raise CheckpointError(f"{what}: {reason}") from error


def _stored(path: tuple, leaf: Any) -> ocp.SaveArgs:
    """How an array is cut into chunks: what is read is decompressed by the chunk, so one holds a single layer, of
    large experts a single one, and never much. Axes as in k3jax.models.kimi_k3: [block, repeat] first in a stage.
    """
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    axes: tuple[int, ...] = ()
    if any(name.startswith("stage_") for name in names) and leaf.ndim >= 2:
        layer_bytes = leaf.nbytes // (leaf.shape[0] * leaf.shape[1])
        by_expert = names[-1].startswith("expert_") and layer_bytes > CHUNK_BYTES
        axes = (0, 1, 2) if by_expert else (0, 1)
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=axes)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _leaves(tree: Any) -> dict[str, str]:
    """{path: "dtype[shape]"} of a tree of arrays, or of what stands for them."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        # A field of a NamedTuple, a key or an index: orbax's metadata has dictionaries where the state has fields.
        name = "/".join(re.sub(r"^\W+|\W+$", "", str(key)) for key in path)
        leaves[name] = f"{jax.numpy.dtype(leaf.dtype).name}{list(leaf.shape)}"
    return leaves
