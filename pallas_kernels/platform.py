"""One kernel for a program that may be lowered for a TPU or for a CPU: compiled there, interpreted here."""

import functools

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def on_platform(kernel, *args):
    """kernel(interpret, *args): interpret is False where the program is lowered for TPU and True where for CPU.

    It is decided at lowering, whatever devices this process has, so a CPU host can compile for a TPU. Elsewhere the
    lowering raises NotImplementedError.

    Args:
        kernel: takes a bool and pytrees of arrays, returns a pytree of arrays.
        args: the pytrees.
    """
    return jax.lax.platform_dependent(
        *args,
        tpu=functools.partial(kernel, False),
        default=functools.partial(_interpreted, functools.partial(kernel, True)),
    )


def _interpreted(function, *args):
    function = jax.jit(function)  # traced once for its types and its jaxpr
    leaves, tree = jax.tree.flatten(args)

    def flat(*leaves):
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

    out_tree = jax.tree.structure(jax.eval_shape(function, *args))
    return jax.tree.unflatten(out_tree, _bind(flat, leaves))


# A primitive of its own has two uses: it refuses other platforms, and it hides from jax.shard_map's check of what
# differs between devices the interpreter's loops, which do not pass it.
_call = Primitive("pallas_interpreted")
_call.multiple_results = True
_call.def_abstract_eval(lambda *args, flat, outputs: list(outputs))


def _bind(flat, leaves):
    outputs = tuple(jax.make_jaxpr(flat)(*leaves).out_avals)
    return _call.bind(*leaves, flat=flat, outputs=outputs)


def _lower_for_cpu(ctx, *args, flat, outputs):
    plain_in, plain_out = (
        [jax.core.ShapedArray(x.shape, x.dtype) for x in avals] for avals in (ctx.avals_in, ctx.avals_out)
    )
    return mlir.lower_fun(flat)(ctx.replace(avals_in=plain_in, avals_out=plain_out), *args)


def _refuse(ctx, *args, **params):
    raise NotImplementedError(
        f"Pallas TPU kernels run on TPU, or interpreted on CPU, not on {'/'.join(ctx.module_context.platforms)}; "
        "choose another implementation there"
    )


def _batch(args, axes, *, flat, outputs):
    outs = _bind(jax.vmap(flat, in_axes=axes), args)
    return outs, [0] * len(outs)


mlir.register_lowering(_call, _refuse)
mlir.register_lowering(_call, _lower_for_cpu, platform="cpu")
batching.primitive_batchers[_call] = _batch
