"""`k3 bench train`: tokens a second, share of the machine's matmul rate, cost of parts, and a PyTorch peer."""

import dataclasses
import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import Config
from k3jax.data import Batch
from k3jax.models.accounting import count_parameters, train_flops_per_token
from k3jax.train.mesh import make_mesh, shard_batch
from k3jax.train.state import make_state
from k3jax.train.step import make_train_step

MATMUL_SIZE = 3072
PEER_SCRIPT = pathlib.Path(__file__).with_name("bench_peer_torch.py")


class _Steps:
    """A compiled train step with its state, timed a few steps at a time."""

    def __init__(self, config: Config):
        mesh = make_mesh(config.mesh)
        data, rng = config.data, np.random.default_rng(0)
        tokens = rng.integers(config.model.vocab_size, size=(data.batch_size, data.seq_len + 1), dtype=np.int32)
        self.batch = shard_batch(Batch(tokens[:, :-1], tokens[:, 1:], np.ones_like(tokens[:, 1:])), mesh)
        self.state = make_state(config, mesh)
        self.step = make_train_step(config, mesh)
        self.tokens = data.batch_size * data.seq_len
        begin = time.perf_counter()
        self.compiled = self.step.lower(self.state, self.batch).compile()
        self.compile_seconds = time.perf_counter() - begin
        self.seconds(2)  # warm up

    def seconds(self, steps: int = 1) -> float:
        """Wall time a step, over `steps` steps."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.state, metrics = self.compiled(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return (time.perf_counter() - begin) / steps

    def dispatch_seconds(self) -> float:
        """Time until the call comes back, before the device has finished."""
        begin = time.perf_counter()
        self.state, metrics = self.compiled(self.state, self.batch)
        elapsed = time.perf_counter() - begin
        jax.block_until_ready((self.state, metrics))
        return elapsed


def bench_train(config: Config, repeats: int, peer_python: str | None) -> None:
    """Times everything in interleaved rounds and prints one table.

    Args:
        config: a whole run; its batch is random tokens.
        repeats: rounds; every figure is a median over them, every ratio the median of ratios within a round.
        peer_python: interpreter with torch and transformers; None = this one where it has them.
    """
    model, data = config.model, config.data
    device = jax.devices()[0]
    flops = train_flops_per_token(model, data.seq_len)
    table = count_parameters(model)
    print(f"device        {jax.device_count()} x {device.device_kind} ({device.platform}), jax {jax.__version__}")
    print(
        f"shape         {model.num_layers} layers, hidden {model.hidden_size}, {model.num_experts} experts top-"
        f"{model.num_experts_per_token}, {table.total / 1e6:.1f}M parameters, "
        f"batch {data.batch_size} x {data.seq_len}, "
        f"{model.dtype}, {config.optim.name}, remat {model.remat}"
    )

    variants = {"step": config}
    without = {"Quantile Balancing": {"balancing": "none"}, "Attention Residuals": {"attn_res": "none"}}
    for part, change in without.items():
        ((field, value),) = change.items()
        if getattr(model, field) != value:
            variants[part] = dataclasses.replace(config, model=dataclasses.replace(model, **change))
    steps = {name: _Steps(variant) for name, variant in variants.items()}
    full = steps["step"]

    operand = jnp.asarray(np.random.default_rng(0).normal(size=(MATMUL_SIZE, MATMUL_SIZE)), jnp.float32)
    matmul = jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))
    jax.block_until_ready(matmul(operand, operand))
    rounds: list[dict[str, float]] = []
    for _ in range(repeats):
        times = {}
        for name in [*steps, "matmul", *reversed(steps)]:  # forth and back, so that drift cancels
            if name == "matmul":
                begin = time.perf_counter()
                jax.block_until_ready(matmul(operand, operand))
                times[name] = time.perf_counter() - begin
            else:
                times[name] = times.get(name, 0.0) + steps[name].seconds() / 2
        rounds.append(times)

    def median(value) -> float:
        return statistics.median(value(times) for times in rounds)

    rate = median(lambda t: full.tokens / t["step"])
    matmul_rate = median(lambda t: 2 * MATMUL_SIZE**3 / t["matmul"])
    share = median(lambda t: (flops * full.tokens / t["step"]) / (2 * MATMUL_SIZE**3 / t["matmul"]))
    dispatch = statistics.median(full.dispatch_seconds() for _ in range(repeats))
    print(f"step          {full.tokens / rate:.4f} s, {rate:.0f} tokens/s (compiled in {full.compile_seconds:.1f} s)")
    print(f"dispatch      {dispatch * 1e3:.2f} ms of host time a step")
    print(f"model FLOPs   {flops / 1e6:.2f} M a token, forward and backward (formula: k3jax/models/accounting.py)")
    print(f"matmul        {matmul_rate / 1e9:.1f} GFLOP/s, float32, {MATMUL_SIZE}^3")
    print(f"share         {100 * share:.1f}% of the matmul rate")
    for part in without:
        if part in steps:
            ratio = median(lambda t, part=part: t["step"] / t[part])
            print(f"{part:<13} step with / without = {ratio:.4f}")
    peer = _peer(config, peer_python, repeats)
    if isinstance(peer, str):
        print(f"peer          not run: {peer}")
    else:
        print(
            f"peer          {peer['name']}: {peer['tokens_per_second']:.1f} tokens/s "
            f"({peer['parameters'] / 1e6:.1f}M parameters, batch {data.batch_size} x {data.seq_len}, float32, "
            f"{peer['threads']} threads)"
        )
        print(f"ratio         {rate / peer['tokens_per_second']:.1f} times the peer's tokens/s")


def _peer(config: Config, peer_python: str | None, repeats: int) -> dict | str:
    """The peer's figures, or why there are none."""
    if peer_python is None:
        if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
            return "torch and transformers are not installed here (--peer_python=PYTHON names a Python that has them)"
        peer_python = sys.executable
    shape = {**dataclasses.asdict(config.model), "mla_layers": config.model.global_layers}
    shape |= {"batch_size": config.data.batch_size, "seq_len": config.data.seq_len, "repeats": min(repeats, 3)}
    try:
        done = subprocess.run(
            [peer_python, str(PEER_SCRIPT)], input=json.dumps(shape), capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"{peer_python}: {error.strerror}"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"{peer_python} failed"])[-1]
    return json.loads(done.stdout.splitlines()[-1])
