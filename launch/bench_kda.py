"""`k3 bench kda`: the KDA kernels beside tokamax's, as TPU schedules or timed here; their memory; the decoding step.

With a topology, programs are compiled for one of its chips and their cycles read from the final schedule
(launch/tpu_schedule.py). Without one, the XLA form is timed on this machine. All forms take the same raw inputs:
L2 norm of q and k and the bounded gate are inside.
"""

import contextlib
import importlib.util
import logging
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.ops.decay import bounded_decay
from k3jax.ops.delta_attention import kda, kda_step
from launch.tpu_schedule import schedule
from pallas_kernels.kda import kda as pallas_kda

NORM_EPS, LOWER_BOUND = 1e-6, -5.0
TPU_SHAPE = {"T": 8192, "H": 8, "K": 128, "dtype": "bfloat16"}
CPU_SHAPE = {"H": 4, "K": 128, "dtype": "float32"}
CPU_LENGTHS = (2048, 8192)
DECODE = {"batch": 64, "H": 96, "K": 128}  # a layer of Kimi K3


def bench_kda(topology: str | None, repeats: int) -> None:
    """Prints the figures of this machine, or of a TPU that is not there.

    Args:
        topology: of a TPU, as libtpu names it, or None.
        repeats: timed rounds.
    """
    if topology is not None:
        _schedules(topology)
        return
    device = jax.devices()[0]
    print(f"device    {device.device_kind} ({device.platform}), jax {jax.__version__}, medians of {repeats} rounds")
    for T in CPU_LENGTHS:
        _times(T, repeats)
    _decode(repeats)


class Form(NamedTuple):
    """One implementation: op(q, k, v, z, beta, a_log) -> o, all but a_log in its own layout."""

    name: str
    op: Callable
    heads_first: bool  # [H, B, T, K], else [B, T, H, K]


def ours_pallas(q_BTHK, k_BTHK, v_BTHV, z_BTHK, beta_BTH, a_log_H):
    fused = {"norm_eps": NORM_EPS, "lower_bound": LOWER_BOUND, "a_log_J": a_log_H}
    return pallas_kda(q_BTHK, k_BTHK, v_BTHV, z_BTHK, beta_BTH, **fused).o_BTJV


def ours_chunked(q_BTHK, k_BTHK, v_BTHV, z_BTHK, beta_BTH, a_log_H):
    q_BTHK, k_BTHK = (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + NORM_EPS) for x in (q_BTHK, k_BTHK))
    g_BTHK = bounded_decay(z_BTHK, a_log_H, LOWER_BOUND)
    return kda(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, implementation="chunked").o_BTJV


def _tokamax(implementation, q, k, v, z, beta, a_log):
    from tokamax._src.ops.kda.api import kimi_delta_attention

    logging.getLogger("absl").setLevel(logging.ERROR)  # a warning a call that it was not tuned for this machine
    fused = {"use_qk_l2norm": True, "use_gate_in_kernel": True, "lower_bound": LOWER_BOUND, "a_log": a_log}
    return kimi_delta_attention(q, k, v, z, beta, implementation=implementation, **fused)[0]


FORMS = {
    "ours": Form("ours, pallas", ours_pallas, False),
    "ours_chunked": Form("ours, chunked", ours_chunked, False),
    "tokamax": Form("tokamax, mosaic", lambda *x: _tokamax("mosaic", *x), True),
    "tokamax_chunked": Form("tokamax, xla_chunked", lambda *x: _tokamax("xla_chunked", *x), True),
}


def _forms(*names):
    """Those that can run here, and a line on why others cannot."""
    if not importlib.util.find_spec("tokamax"):
        print("peer      not run: tokamax is not installed here (it needs Python 3.12)")
        names = [name for name in names if not name.startswith("tokamax")]
    return {name: FORMS[name] for name in names}


def _shapes(form: Form, T, H, K, dtype):
    lead = (H, 1, T) if form.heads_first else (1, T, H)
    shape = jax.ShapeDtypeStruct
    return [shape((*lead, K), dtype)] * 4 + [shape(lead, jnp.float32), shape((H,), jnp.float32)]


def program(name: str, what: str, T: int, H: int, K: int, dtype: str):
    """A form's forward pass, or that and its gradients, and the shapes it takes."""
    form = FORMS[name]
    shapes = _shapes(form, int(T), int(H), int(K), dtype)

    def forward(*inputs):
        with _for_absent_devices(name):
            return form.op(*inputs)

    def forward_backward(do, *inputs):
        with _for_absent_devices(name):
            o, gradient = jax.vjp(form.op, *inputs)
            return o, gradient(do)

    return (forward, shapes) if what == "forward" else (forward_backward, [shapes[2], *shapes])


def _for_absent_devices(name):
    """tokamax asks for the device that a kernel is made for, unless told that it is elsewhere."""
    if name != "tokamax":
        return contextlib.nullcontext()
    import tokamax

    return tokamax.config.cross_compile(True)


def _schedules(topology):
    print(
        f"shape     B 1, {_named(TPU_SHAPE)}, L2 norm and bounded gate inside; one chip of {topology}, "
        f"jax {jax.__version__}"
    )
    for name, form in _forms("ours", "tokamax").items():
        for what in ("forward", "forward+backward"):
            compiled = schedule("launch.bench_kda:program", topology, name, what, *map(str, TPU_SHAPE.values()))
            kernels = {op: cycles for op, cycles in compiled.cycles.items() if cycles > compiled.total / 100}
            parts = ", ".join(f"{op} {n}" for op, n in sorted(kernels.items(), key=lambda item: -item[1]))
            print(
                f"{form.name:<16} {what:<17} {compiled.total:>9} cycles, "
                f"{compiled.temp_bytes / 1e6:6.1f} MB of scratch, {compiled.kernels} kernels ({parts})"
            )


def _named(shape):
    return ", ".join(f"{name} {value}" if len(name) == 1 else str(value) for name, value in shape.items())


def _times(T, repeats):
    shape = {"T": T, **CPU_SHAPE}
    print(f"shape     B 1, {_named(shape)}, L2 norm and bounded gate inside")
    H, K = shape["H"], shape["K"]
    random = np.random.default_rng(0)
    normal = [random.standard_normal((1, T, H, K), np.float32) for _ in range(5)]
    beta_BTH, a_log_H = random.random((1, T, H), np.float32), np.zeros(H, np.float32)
    forms = _forms("ours_chunked", "tokamax_chunked")
    memory = 5 * T * H * K * jnp.dtype(shape["dtype"]).itemsize  # q, k, v, g, o
    results = {}
    for what in ("forward", "forward+backward"):
        runs = {}
        for name, form in forms.items():
            fn, shapes = program(name, what, *shape.values())
            arrays = [*normal[:4], beta_BTH]
            if form.heads_first:
                arrays = [np.moveaxis(x, 2, 0) for x in arrays]
            do = normal[4] if not form.heads_first else np.moveaxis(normal[4], 2, 0)
            arrays = [*([] if what == "forward" else [do]), *arrays, a_log_H]
            compiled = jax.jit(fn).lower(*shapes).compile()
            runs[name] = (compiled, [jnp.asarray(x) for x in arrays])
            results[name, what] = compiled(*runs[name][1])
        seconds = _medians(runs, repeats)
        for name, form in forms.items():
            temp = runs[name][0].memory_analysis().temp_size_in_bytes
            print(
                f"{form.name:<21} {what:<17} {seconds[name] * 1e3:8.1f} ms, "
                f"temporary memory {temp / memory:5.2f} times q, k, v, g, o"
            )
        if len(seconds) == 2:
            print(f"{'ratio':<21} {what:<17} {seconds['tokamax_chunked'] / seconds['ours_chunked']:8.2f} times faster")
    if len(forms) == 2:
        ours, peer = results["ours_chunked", "forward"], np.moveaxis(results["tokamax_chunked", "forward"], 0, 2)
        apart = np.abs(ours - peer).max() / np.abs(peer).max()
        print(f"{'difference':<21} {'forward':<17} {apart:8.1e} of the largest output")


def _decode(repeats):
    batch, H, K = DECODE.values()
    print(f"decode    batch {batch}, H {H}, K {K}, float32, one layer, one token, state updated in place")
    random = np.random.default_rng(0)
    q, k, v, z = (jnp.asarray(random.standard_normal((batch, H, K), np.float32)) for _ in range(4))
    beta = jnp.asarray(random.random((batch, H), np.float32))

    def step(state):
        g = bounded_decay(z, None, LOWER_BOUND)
        out = kda_step(q, k / jnp.linalg.norm(k, axis=-1, keepdims=True), v, g, beta, state)
        return out.state_BJKV, out.o_BJV

    def copy(state):
        return state * 0.5, ()  # nothing else of the state may be read, or XLA copies it first

    states = {name: jnp.zeros((batch, H, K, K)) for name in ("kda_step", "read and write")}
    functions = {name: jax.jit(f, donate_argnums=0) for name, f in zip(states, (step, copy), strict=True)}

    def run(name):
        states[name], read = functions[name](states[name])
        jax.block_until_ready((states[name], read))

    seconds = _medians({name: (lambda name=name: run(name), []) for name in states}, repeats)
    for name, value in seconds.items():
        print(f"{name:<21} {'':<17} {value * 1e3:8.1f} ms")
    ratio = seconds["kda_step"] / seconds["read and write"]
    print(f"{'ratio':<21} {'':<17} {ratio:8.2f} times reading and writing the state")


def _medians(runs, repeats):
    """Seconds of each, median over rounds in which all run forth and back, so that drift cancels."""
    for fn, args in runs.values():
        jax.block_until_ready(fn(*args))
    seconds = {name: [] for name in runs}
    for _ in range(repeats):
        for name in [*runs, *reversed(runs)]:
            fn, args = runs[name]
            begin = time.perf_counter()
            jax.block_until_ready(fn(*args))
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}
