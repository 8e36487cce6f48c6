"""What the kernel tests share: many cases as the rows of one call, since compiling an interpreted kernel costs seconds.

A case is one head over at most ROW tokens and WIDTH channels: arrays q, k, v, g, beta, initial_state, do, dfinal_state
without batch and head axes. Its row is filled up with padding (segment id 0), which holds NaN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import kda

ROWS, ROW, WIDTH = 24, 256, 64  # two chunks of 128
ARRAYS = ("q", "k", "v", "g", "beta")


def random_case(seed, T=ROW, K=WIDTH, V=WIDTH, gate=None):
    """gate replaces every log decay: a number or an array [T, K]."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal
    case = {name: normal((T, K)) for name in ("q", "k")}
    for name in ("q", "k"):
        case[name] /= np.linalg.norm(case[name], axis=-1, keepdims=True)
    case["g"] = -np.exp(2 * normal((T, K)) - 1) if gate is None else np.broadcast_to(gate, (T, K)).astype(float)
    case |= {"v": normal((T, V)), "do": normal((T, V)), "beta": 1 / (1 + np.exp(-normal(T)))}
    case |= {"initial_state": normal((K, V)), "dfinal_state": normal((K, V))}
    return {name: np.asarray(x, np.float32) for name, x in case.items()}


def filled(x, shape, value=0.0):
    """x in the corner of an array of that shape."""
    out = np.full(shape, value, np.float32)
    out[tuple(slice(n) for n in x.shape)] = x
    return out


@functools.cache
def _compiled(floor):
    def run(x, ids):
        def objective(x):
            arrays = (x[name][:, :, None] for name in ARRAYS)
            state = x["initial_state"][:, None]
            out = kda(*arrays, scale=1.0, initial_state_BJKV=state, segment_ids_BT=ids, decay_floor=floor)
            o, final_state = out.o_BTJV[:, :, 0], out.final_state_BJKV[:, 0]
            return jnp.sum(o * x["do"]) + jnp.sum(final_state * x["dfinal_state"]), (o, final_state)

        grads, (o, final_state) = jax.grad(objective, has_aux=True)(x)
        return {"o": o, "final_state": final_state} | {f"d{n}": grads[n] for n in (*ARRAYS, "initial_state")}

    return jax.jit(run)


def run_cases(cases, floor=None, ids=None):
    """o, final_state and gradients of every case, as a list of dicts; ids: segment ids of each case, None for all 1."""
    assert len(cases) <= ROWS
    shapes = dict.fromkeys(("q", "k", "v", "g", "do"), (ROW, WIDTH)) | {"beta": (ROW,)}
    shapes |= dict.fromkeys(("initial_state", "dfinal_state"), (WIDTH, WIDTH))
    all_ids = np.zeros((ROWS, ROW), np.int32)
    x = {name: np.zeros((ROWS, *shape), np.float32) for name, shape in shapes.items()}
    for row, case in enumerate(cases):
        T = len(case["q"])
        all_ids[row, :T] = 1 if ids is None else ids[row]
        for name, shape in shapes.items():
            x[name][row] = filled(case[name], shape)
            if name in ARRAYS:
                x[name][row][all_ids[row] == 0] = np.nan
    out = jax.tree.map(np.asarray, _compiled(floor)(x, all_ids))
    return [
        {name: value[row][tuple(slice(n) for n in _shape(case, name))] for name, value in out.items()}
        for row, case in enumerate(cases)
    ]


def _shape(case, name):
    return case[{"o": "v", "final_state": "initial_state"}.get(name, name[1:] if name[0] == "d" else name)].shape


@jax.jit
def _recurrence(case):
    def objective(x):
        def token(state, x):
            q, k, v, g, beta = x
            state = jnp.exp(g)[:, None] * state
            state = state + beta * jnp.outer(k, v - state.T @ k)
            return state, state.T @ q

        final_state, o = jax.lax.scan(token, x["initial_state"], tuple(x[name] for name in ARRAYS))
        loss = jnp.sum(o * case["do"]) + jnp.sum(final_state * case["dfinal_state"])
        return loss, {"o": o, "final_state": final_state}

    inputs = {n: case[n] for n in (*ARRAYS, "initial_state")}
    grads, out = jax.grad(objective, has_aux=True)(inputs)
    return out | {f"d{name}": grad for name, grad in grads.items()}


def exact(case):
    """The float64 recurrence of a case of any length, by autodiff; tokens of zeros behind change nothing."""
    padded = {
        name: np.pad(x, [(0, -len(x) % ROW)] + [(0, 0)] * (x.ndim - 1)) if "state" not in name else x
        for name, x in case.items()
    }
    with jax.enable_x64(True):
        out = jax.tree.map(np.asarray, _recurrence({n: np.asarray(x, np.float64) for n, x in padded.items()}))
    return {name: value[tuple(slice(n) for n in _shape(case, name))] for name, value in out.items()}


def worst_error(got, want):
    """Largest error of any output or gradient, relative to its largest number."""
    # A gradient that saturated decay wipes out is compared with the size of the others.
    floor = 1e-3 * max(np.max(np.abs(a)) for name, a in want.items() if name.startswith("d"))
    errors = {}
    for name, a in want.items():
        assert got[name].shape == a.shape, name
        assert np.isfinite(got[name]).all(), name
        errors[name] = np.max(np.abs(got[name] - a)) / max(np.max(np.abs(a)), floor)
    return max(errors.values())
