"""Cycles of a compiled TPU program read from libtpu's final schedule: no TPU needed, the same on every machine.

libtpu dumps the schedule of every operation it compiles; a Pallas kernel is one operation. A schedule is a list of
bundles of which one issues a cycle, so the bundles, each counted as often as its loop runs it, are a lower bound of
the cycles: waiting for memory is not in it, and what a predicate skips is. It compares schedules of the same work.

Compilation runs in a process of its own, because libtpu reads its options once, when it is loaded.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

from k3jax.errors import UserError

# "address  label: > > { instructions }": a ">" for each loop around the bundle; LB marks a loop's first bundle.
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|\d+)\s+(?P<label>[A-Z]{2})?[^:]*:\s*(?:>\s?)*\{(?P<body>.*)$")
_EXIT = re.compile(r"%(p\d+)\w* = scmp\.\w+\.s32\.totalorder (?:\(\S+\), )?%\S+, (\d+) /\* loop exit test")
_DELAY_SLOTS = 4  # bundles that still issue after a branch is taken
_FILE = re.compile(r"^\d+-(?P<name>.+)-\d+-final_bundles\.txt$")
_WHOLE_PROGRAM = "TLP"  # its schedule repeats those of its operations


class Schedule(NamedTuple):
    """What compiling for a topology tells.

    Attributes:
        cycles: of each operation that has a schedule of its own, by its name.
        temp_bytes: scratch memory of the program on the device, besides arguments and outputs.
        kernels: Pallas kernels in the compiled program.
    """

    cycles: dict[str, int]
    temp_bytes: int
    kernels: int

    @property
    def total(self) -> int:
        return sum(self.cycles.values())


def schedule(program: str, topology: str, *arguments: str) -> Schedule:
    """Compiles a program for a TPU and reads its schedule.

    Args:
        program: "module:function"; function(*arguments) returns a jax function and the shapes of its arguments.
        topology: as libtpu names it: "v6e:2x2", "tpu7x:2x2x1"; one of its chips is used.
        arguments: handed on.

    Returns:
        Schedule.

    Raises:
        UserError: libtpu does not compile it; the last line of what it says.
    """
    with tempfile.TemporaryDirectory(prefix="k3-schedule-") as folder:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
        }
        command = [sys.executable, "-m", "launch.tpu_schedule", program, topology, *arguments]
        root = pathlib.Path(__file__).parents[1]
        environment["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [environment.get("PYTHONPATH")])])
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
            raise UserError(f"{program} for {topology}: {(lines or [f'exit status {done.returncode}'])[-1]}")
        compiled = json.loads(done.stdout.splitlines()[-1])
        cycles: dict[str, int] = {}
        for path in pathlib.Path(folder).glob("*final_bundles.txt"):
            match = _FILE.match(path.name)
            if match and match["name"] != _WHOLE_PROGRAM and "schedule-analysis" not in path.name:
                name = re.sub(r"\.\d+$", "", match["name"])
                cycles[name] = cycles.get(name, 0) + count_cycles(path.read_text(errors="replace"))
    if not cycles:
        raise UserError(f"{program} for {topology}: this libtpu leaves no schedule behind")
    return Schedule(cycles, **compiled)


def count_cycles(text: str) -> int:
    """Cycles of one schedule: its bundles, each as often as the loops around it run.

    Args:
        text: libtpu's final bundles of one operation.
    """
    bundles = [match for match in map(_BUNDLE.match, text.splitlines()) if match]
    repeats = [1] * len(bundles)
    open_loops = []
    for i, bundle in enumerate(bundles):
        if bundle["label"] == "LB":
            open_loops.append(i)
        for predicate, trips in _EXIT.findall(bundle["body"]):  # of inner loops before those around them
            if open_loops:
                branch = f"sbr.rel (!%{predicate}"
                last = next((j for j in range(i, len(bundles)) if branch in bundles[j]["body"]), i) + _DELAY_SLOTS
                for j in range(open_loops.pop(), min(last, len(bundles) - 1) + 1):
                    repeats[j] *= int(trips)
    return sum(repeats)


def _compile(program: str, topology: str, *arguments: str) -> None:
    """In the process of its own: compiles and prints what the compiled program tells of itself."""
    import importlib

    import jax
    import numpy as np
    from jax.experimental import topologies

    module, _, function = program.partition(":")
    fn, shapes = getattr(importlib.import_module(module), function)(*arguments)
    devices = topologies.get_topology_desc(topology, platform="tpu").devices[:1]
    mesh = jax.sharding.Mesh(np.array(devices), ("chip",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # Pallas asks it which chip to compile for
        compiled = jax.jit(fn, in_shardings=whole).lower(*shapes).compile()
    kernels = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    print(json.dumps({"temp_bytes": compiled.memory_analysis().temp_size_in_bytes, "kernels": kernels}))


if __name__ == "__main__":
    _compile(*sys.argv[1:])
