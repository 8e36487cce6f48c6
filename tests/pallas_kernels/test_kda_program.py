"""The KDA kernels as part of a program: transformations, shards, fused norm and gate, other platforms."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from k3jax.ops import delta_attention
from k3jax.ops.decay import bounded_decay
from pallas_kernels.kda import kda
from tests.conftest import rel_error
from tests.ops.kda_cases import NAMES, random_inputs

SHAPE = {"B": 2, "T": 20, "H": 1, "J": 2, "K": 8, "V": 4}
IDS = np.tile(np.repeat([1, 2, 0], [7, 8, 5]), (2, 1)).astype(np.int32)


def loss(x, ids, implementation="pallas"):
    arrays = (x[name] for name in NAMES[:5])
    out = delta_attention.kda(
        *arrays, initial_state_BJKV=x["initial_state"], segment_ids_BT=ids, implementation=implementation
    )
    return jnp.sum(jnp.sin(out.o_BTJV)) + jnp.sum(jnp.sin(out.final_state_BJKV))


def check(got, want, tolerance=2e-6):
    assert got.keys() == want.keys()
    for name in want:
        assert rel_error(got[name], want[name]) < tolerance, name


def test_vmap_of_a_scan_over_rematerialised_layers():
    """Two layers of v <- kda(v) with segment ids, two models at once."""

    def stack(x, implementation):
        def layer(v, beta):
            arrays = x["q"], x["k"], v, x["g"], beta
            out = delta_attention.kda(
                *arrays,
                initial_state_BJKV=x["initial_state"],
                segment_ids_BT=jnp.asarray(IDS),
                implementation=implementation,
            )
            return out.o_BTJV, None

        betas = jnp.stack([x["beta"], 0.5 * x["beta"]])
        return jnp.sum(jnp.square(jax.lax.scan(jax.checkpoint(layer), x["v"], betas)[0]))

    models = [random_inputs(seed, **(SHAPE | {"J": 1})) for seed in (0, 1)]
    x = {name: np.stack([model[name] for model in models]) for name in NAMES}
    got, want = (
        jax.jit(jax.vmap(jax.grad(functools.partial(stack, implementation=i))))(x) for i in ("pallas", "chunked")
    )
    check(got, want)


def test_sharded_over_batch_and_heads():
    """Inside shard_map with its default check of what differs between devices; gradients as on one device."""
    x = random_inputs(2, **(SHAPE | {"H": 2}))
    mesh = jax.make_mesh((2, 2), ("batch", "head"), axis_types=(AxisType.Auto,) * 2)
    specs = dict.fromkeys(NAMES, PartitionSpec("batch", None, "head"))
    specs["initial_state"] = PartitionSpec("batch", "head")
    sharded = jax.shard_map(
        lambda x, ids: jax.lax.psum(loss(x, ids), ("batch", "head")),
        mesh=mesh,
        in_specs=(specs, PartitionSpec("batch")),
        out_specs=PartitionSpec(),
    )
    check(
        jax.jit(jax.grad(sharded))(x, IDS), jax.jit(jax.grad(functools.partial(loss, implementation="chunked")))(x, IDS)
    )


def test_one_length_leaves_no_trace_in_another():
    """A prefix is the prefix of the whole, to the bit, in one process and in what is as good as a fresh one."""
    x = random_inputs(5, 1, 150, 1, 1, 8, 4, gate=-1.0)

    def outputs(T):
        arrays = (x[name][:, :T] for name in NAMES[:5])
        return np.asarray(jax.jit(functools.partial(kda, decay_floor=-5.0))(*arrays).o_BTJV)

    short, long = outputs(20), outputs(150)
    assert np.array_equal(short, long[:, :20])
    jax.clear_caches()
    assert np.array_equal(long, outputs(150))


def test_fused_norm_and_gate_equal_the_separate_ops():
    """Raw q, k and gate in, gradients of them and of a_log out; grouped heads; sizes that fill no block."""
    x = random_inputs(3, 1, 130, 1, 2, 8, 4)
    x["g"] = np.random.default_rng(4).standard_normal(x["g"].shape).astype(np.float32)
    x["q"], x["k"] = 3 * x["q"], 0.1 * x["k"]
    x["a_log"] = np.float32([-0.5, 0.5])

    def fused(x, implementation):
        out = delta_attention.kda(
            *(x[n] for n in NAMES[:5]),
            initial_state_BJKV=x["initial_state"],
            norm_eps=1e-6,
            lower_bound=-5.0,
            a_log_J=x["a_log"],
            implementation=implementation,
        )
        return jnp.sum(jnp.sin(out.o_BTJV)) + jnp.sum(jnp.sin(out.final_state_BJKV))

    def separate(x):
        q, k = (y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6) for y in (x["q"], x["k"]))
        g = bounded_decay(x["g"], x["a_log"], -5.0)
        return loss(x | {"q": q, "k": k, "g": g}, None, "chunked")

    want = jax.jit(jax.grad(separate))(x)
    for implementation in ("pallas", "chunked"):
        check(jax.jit(jax.grad(functools.partial(fused, implementation=implementation)))(x), want, 5e-6)


def test_other_platforms_are_refused_when_lowered():
    x = {name: jnp.asarray(value) for name, value in random_inputs(0, **SHAPE).items()}
    traced = jax.jit(functools.partial(loss, ids=IDS)).trace(x)
    with pytest.raises(NotImplementedError, match="run on TPU, or interpreted on CPU, not on cuda"):
        traced.lower(lowering_platforms=("cuda",))


def test_wrong_options_are_named():
    x = random_inputs(0, **SHAPE)
    arrays = [x[name] for name in NAMES[:5]]
    with pytest.raises(ValueError, match="chunk_size is 64; the Pallas kernels have 128"):
        delta_attention.kda(*arrays, implementation="pallas", chunk_size=64)
    with pytest.raises(ValueError, match="a_log_J belongs to the fused gate"):
        kda(*arrays, a_log_J=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="must be negative"):
        kda(*arrays, lower_bound=0.0)
    with jax.enable_x64(True), pytest.raises(ValueError, match="float64"):
        delta_attention.kda(*(x.astype(np.float64) for x in arrays), implementation="pallas")


def test_auto_says_what_it_chose_and_why_once(caplog):
    """On CPU chunked; for a mesh of TPUs, none of which need be here, pallas."""
    delta_attention._log_choice.cache_clear()
    x = random_inputs(0, **SHAPE)
    arrays = [x[name] for name in NAMES[:5]]
    tpu = jax.sharding.AbstractMesh((), (), abstract_device=jax.sharding.AbstractDevice("TPU v6 lite", 1, "tpu"))
    with caplog.at_level(logging.INFO, delta_attention.__name__):
        for _ in range(2):
            jax.eval_shape(delta_attention.kda, *arrays)
            with jax.sharding.use_abstract_mesh(tpu):
                jax.eval_shape(delta_attention.kda, *arrays)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0] == "kda on cpu: chunked implementation, because the Pallas kernels are for TPU"
    assert messages[1] == "kda on tpu: pallas implementation, the fastest form here"
