"""What the KDA tests share: random inputs, the recurrence in plain float64 numpy, gradients of a fixed objective."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.ops.delta_attention import kda

NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def random_inputs(seed, B, T, H, J, K, V, dtype=np.float32, gate=None):
    """q, k (unit length), v, g, beta and initial_state by name; gate replaces every log decay by one number."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal
    x = {"q": normal((B, T, H, K)), "k": normal((B, T, H, K)), "v": normal((B, T, J, V))}
    for name in ("q", "k"):
        x[name] /= np.linalg.norm(x[name], axis=-1, keepdims=True)
    x["g"] = -np.exp(2 * normal((B, T, J, K)) - 1) if gate is None else np.full((B, T, J, K), float(gate))
    x["beta"] = 1 / (1 + np.exp(-normal((B, T, J))))
    x["initial_state"] = normal((B, J, K, V))
    return {name: np.asarray(value, dtype) for name, value in x.items()}


def recurrence(q, k, v, g, beta, initial_state=None, scale=None):
    """The equations of spec §2.3, token by token, head by head, in float64: (o, final_state)."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    B, T, J, V = v.shape
    H, K = q.shape[2:]
    scale = K**-0.5 if scale is None else scale
    o, final_state = np.zeros_like(v), np.zeros((B, J, K, V))
    if initial_state is not None:
        final_state[:] = initial_state
    for b in range(B):
        for j in range(J):
            S, h = final_state[b, j], j // (J // H)
            for t in range(T):
                S = np.exp(g[b, t, j])[:, None] * S
                S = S + beta[b, t, j] * np.outer(k[b, t, h], v[b, t, j] - S.T @ k[b, t, h])
                o[b, t, j] = S.T @ (scale * q[b, t, h])
            final_state[b, j] = S
    return o, final_state


def cotangents(x, seed=7):
    """Fixed weights of o and of the final state; the objective is their weighted sum."""
    random = np.random.default_rng(seed)
    B, T, J, V = x["v"].shape
    do, dfinal_state = random.standard_normal((B, T, J, V)), random.standard_normal((B, J, x["q"].shape[-1], V))
    return do.astype(x["v"].dtype), dfinal_state.astype(x["v"].dtype)


def run_quickly_compiled(function, *args):
    """function(*args) through jit without LLVM's optimisation, where compiling is all the time a test takes."""
    compiled = jax.jit(function).lower(*args).compile(compiler_options={"xla_backend_optimization_level": 0})
    return jax.tree.map(np.asarray, compiled(*args))


def objective_gradients(x, do, dfinal_state, segment_ids=None, **options):
    """o, final_state and d<name> for every array of x, by name."""

    def objective(x):
        arrays, state = (x[name] for name in NAMES[:5]), x.get("initial_state")
        o, final_state = kda(*arrays, initial_state_BJKV=state, segment_ids_BT=segment_ids, **options)
        loss = jnp.sum(o * do) + jnp.sum(final_state * dfinal_state)
        return loss, {"o": o, "final_state": final_state}

    grads, out = jax.grad(objective, has_aux=True)(x)
    return out | {f"d{name}": grad for name, grad in grads.items()}


@functools.cache
def compiled_gradients(implementation, chunk_size):
    """objective_gradients under jit; tests that share shapes share its compilation."""
    return jax.jit(functools.partial(objective_gradients, implementation=implementation, chunk_size=chunk_size))
