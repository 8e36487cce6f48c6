"""`k3 bench ckpt`: importing and exporting a released checkpoint beside `cp` of the same bytes, in one run."""

import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from k3jax.checkpoint.hf_config import hf_config
from k3jax.checkpoint.hf_layout import K3_PREFIX, hf_tensors
from k3jax.checkpoint.hf_write import index_text, made, packed, split
from k3jax.config import ModelConfig
from launch.ckpt_convert import progress_bar

_STEP = 64 * 2**20


class Result(NamedTuple):
    """One process.

    Attributes:
        seconds: from start to end, the interpreter's start included.
        peak: the most resident memory, in bytes.
    """

    seconds: float
    peak: int


def k3_shaped(gigabytes: float) -> ModelConfig:
    """Kimi K3 with every part it has, narrower and of five layers, with as many experts as fill a size.

    As in the original most of it is packed experts.
    """
    model = ModelConfig.kimi_k3(
        vocab_size=16384, num_layers=5, hidden_size=2048, kda_num_heads=16, mla_num_heads=16, q_lora_rank=512,
        intermediate_size=8192, moe_intermediate_size=1536, moe_latent_size=1792, num_experts=17,
    )  # fmt: skip
    fixed = sum(np.prod(t.stored) * 2 for t in hf_tensors(model, K3_PREFIX) if t.expert is None)
    expert = 3 * model.moe_intermediate_size * model.moe_latent_size * (1 / 2 + 1 / 32) * (model.num_layers - 1)
    count = max(17, int((gigabytes * 1e9 - fixed) / expert))
    return ModelConfig.kimi_k3(**{**_changes(model), "num_experts": count})


def _changes(model: ModelConfig) -> dict:
    default = ModelConfig()
    return {name: value for name, value in vars(model).items() if value != getattr(default, name)}


def bench_ckpt(gigabytes: float, repeats: int, folder: pathlib.Path | None) -> None:
    """Makes a synthetic checkpoint, times the ways through it round by round, prints a table and deletes everything.

    Args:
        gigabytes: size of the checkpoint; so much again is on disk at any time, twice that while experts are unpacked.
        repeats: rounds; medians are printed.
        folder: where to work; None = the system's temporary folder.
    """
    with tempfile.TemporaryDirectory(prefix="k3-bench-ckpt-", dir=folder) as name:
        root = pathlib.Path(name)
        largest = _write(root / "hf", k3_shaped(gigabytes))
        nbytes = sum(file.stat().st_size for file in (root / "hf").iterdir())
        count = len(list((root / "hf").glob("*.safetensors")))
        where = os.statvfs(root)
        print(
            f"{nbytes / 1e9:.2f} GB in {count} files, largest tensor {largest / 1e6:.0f} MB, {repeats} rounds, medians"
        )
        print(f"{os.cpu_count()} CPU cores, {where.f_bavail * where.f_frsize / 1e9:.0f} GB free, page cache warm")
        k3 = [sys.executable, "-m", "launch", "ckpt"]
        ways = {
            "cp": ["cp", "-r", f"{root}/hf", f"{root}/out"],
            "import": [*k3, "import", f"{root}/hf", f"{root}/out"],
            "export": [*k3, "export", f"{root}/run", f"{root}/out"],
            "export in 1 GB files": [*k3, "export", f"{root}/run", f"{root}/out", "--shard_size=1GB"],
            "export, experts unpacked": [*k3, "export", f"{root}/run", f"{root}/out", "--experts=unpacked"],
        }
        subprocess.run([*k3, "import", f"{root}/hf", f"{root}/run"], check=True, stdout=subprocess.DEVNULL)
        found: dict[str, list[Result]] = {way: [] for way in ways}
        sizes = {}
        for _ in range(repeats):
            for way, command in ways.items():
                _warm(root)
                found[way].append(_run(command))
                if way == "export" and not _same(root / "hf", root / "out"):
                    raise RuntimeError("the export is not the imported checkpoint, byte for byte")
                sizes[way] = sum(file.stat().st_size for file in (root / "out").rglob("*") if file.is_file())
                shutil.rmtree(root / "out")
        cp = statistics.median(result.seconds for result in found["cp"])
        limit = 1.5 * largest + 300e6
        print(f"{'':26}{'seconds':>9}{'GB written':>12}{'MB/s':>8}{'speed / cp':>12}{'peak MB':>9}")
        for way, results in found.items():
            seconds = statistics.median(result.seconds for result in results)
            rate = sizes[way] / seconds
            peak = max(result.peak for result in results)
            ratio = rate / (sizes["cp"] / cp)
            print(f"{way:26}{seconds:9.2f}{sizes[way] / 1e9:12.2f}{rate / 1e6:8.0f}{ratio:12.2f}{peak / 1e6:9.0f}")
        print(f"1.5 x the largest tensor + 300 MB = {limit / 1e6:.0f} MB; the export is the import, byte for byte")


def _write(folder: pathlib.Path, model: ModelConfig) -> int:
    """Writes random bytes in the form of a released checkpoint; returns the size of its largest tensor."""
    folder.mkdir()
    pieces = []
    for tensor in hf_tensors(model, K3_PREFIX):
        plain = [made(tensor, "F32" if tensor.wide else "BF16")]
        pieces += plain if tensor.expert is None else packed(tensor, None)
    noise = np.random.default_rng(0).integers(0, 128, _STEP, np.uint8)  # no bfloat16 or float32 of it is special
    shards = split(pieces, 500_000_000)
    total = sum(piece.nbytes for piece in pieces)
    with progress_bar("writing a checkpoint", total) as advance:
        for shard in shards:
            with open(folder / shard.name, "wb") as file:
                file.write(shard.header)
                for piece in shard.pieces:
                    zeros = piece.name.endswith("A_log")
                    for block in _blocks(piece.nbytes):
                        file.write(bytes(block) if zeros else noise[:block])
                        advance(block)
    values = hf_config(model, layout="kimi_k3", dtype="bfloat16", mxfp4=True)
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    (folder / "model.safetensors.index.json").write_text(index_text(shards))
    return max(piece.nbytes for piece in pieces)


def _blocks(nbytes: int) -> Iterator[int]:
    yield from (min(_STEP, nbytes - start) for start in range(0, nbytes, _STEP))


def _run(command: list[str]) -> Result:
    """Times a process; its own peak is read from /proc, because what wait4 tells includes its parent's."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=pathlib.Path(__file__).parents[1])
    peak = 0
    while process.poll() is None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
            peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        time.sleep(0.02)
    seconds = time.perf_counter() - begin
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {process.returncode}")
    return Result(seconds, peak)


def _warm(root: pathlib.Path) -> None:
    """Reads all sources once, and lets earlier writes reach the disk."""
    os.sync()
    for file in [*(root / "hf").iterdir(), *(root / "run").rglob("*")]:
        if file.is_file():
            with open(file, "rb", buffering=0) as handle:
                while handle.read(_STEP):
                    pass


def _same(a: pathlib.Path, b: pathlib.Path) -> bool:
    done = subprocess.run(["diff", "-r", "-q", str(a), str(b)], stdout=subprocess.DEVNULL)
    return done.returncode == 0
