"""The KDA kernels compiled for TPUs, none of which need be here, and what they ask of the chip's memories."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.kda import kda

TOPOLOGIES = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
VMEM_BUDGET = 12 * 2**20  # bytes of blocks and scratch a program; a v5e compiler grants 16 MiB unasked


def gradients(q, k, v, z, beta, do, fused=True):
    """o and gradients, from q, k, v, z and do [B, T, heads, channels] as a layer of K3 gives them."""
    options = {"norm_eps": 1e-6, "lower_bound": -5.0} if fused else {}
    z = z if fused else -jnp.square(z.astype(jnp.float32))
    o, vjp = jax.vjp(lambda *x: kda(*x, **options).o_BTJV, q, k, v, z, beta)
    return o, vjp(do)


def arguments(T, heads, channels=128, dtype=jnp.bfloat16):
    shape = (1, T, heads, channels)
    return [jax.ShapeDtypeStruct(s, dtype) for s in (*[shape] * 4, shape[:3], shape)]


def compile_for(topology, function, arrays):
    devices = topologies.get_topology_desc(topology, platform="tpu").devices
    mesh = Mesh(np.array(devices[:1]), ("x",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jitted = jax.jit(function, in_shardings=NamedSharding(mesh, PartitionSpec()))
        return jitted.lower(*arrays).compile()


def kernels_in(compiled):
    return compiled.as_text().count('custom_call_target="tpu_custom_call"')


def test_compiles_for_a_tpu_on_a_host_without_one():
    compiled = compile_for("v6e:2x2", gradients, arguments(T=200, heads=1))
    assert kernels_in(compiled) == 2  # forward and backward


@pytest.mark.slow
@pytest.mark.parametrize("heads", [96, 12])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_layer_of_k3(topology, heads):
    """96 heads of 128 channels, and the 12 that a device holds when they are sharded over 8."""
    compiled = compile_for(topology, gradients, arguments(T=8192, heads=heads))
    assert kernels_in(compiled) == 2


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_a_row_of_131072_tokens_and_any_decay(topology):
    assert kernels_in(compile_for(topology, gradients, arguments(T=131072, heads=8))) == 2
    for dtype in (jnp.bfloat16, jnp.float32):
        general = functools.partial(gradients, fused=False)
        assert kernels_in(compile_for(topology, general, arguments(T=512, heads=8, dtype=dtype))) == 2


@pytest.mark.slow
def test_vmapped_models_are_one_batch():
    arrays = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in arguments(T=200, heads=1)]
    assert kernels_in(compile_for("v6e:2x2", jax.vmap(gradients), arrays)) == 2


@pytest.mark.slow
def test_scratch_memory():
    """HBM beside arguments and results, at 8 heads and 8192 tokens; tokamax's backward takes 522 MB."""
    compiled = compile_for("v6e:2x2", gradients, arguments(T=8192, heads=8))
    assert compiled.memory_analysis().temp_size_in_bytes < 130e6


def vmem_bytes(T, heads):
    """Blocks, two of each since they are fetched while the program before computes, and scratch, of each kernel."""
    found = {}
    for eqn in equations(jax.make_jaxpr(gradients)(*arguments(T, heads)).jaxpr):
        if eqn.primitive.name != "pallas_call":
            continue
        mapping, refs = eqn.params["grid_mapping"], [ref.aval for ref in eqn.params["jaxpr"].invars]
        blocks = mapping.num_inputs + mapping.num_outputs
        found[eqn.params["name"]] = sum(
            int(np.prod(ref.shape)) * ref.dtype.itemsize * (2 if i < blocks else 1)
            for i, ref in enumerate(refs)
            if jnp.issubdtype(ref.dtype, jnp.number)
        )
    return found


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_vmem_is_within_budget_and_independent_of_time():
    assert vmem_bytes(8192, heads=1) == vmem_bytes(131072, heads=1)
    most = vmem_bytes(8192, heads=8)
    assert most.keys() == {"kda_forward", "kda_backward"}
    assert max(most.values()) < VMEM_BUDGET, most
