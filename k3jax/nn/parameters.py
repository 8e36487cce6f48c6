"""The one table of parameters: what each leaf's axes mean, which matrices Muon sees in it, whether it decays.

Layers are stacked under scans, so a bias may have two axes and a matrix four: the number of axes says
nothing. Everything is therefore looked up by the last component of a parameter's path, the leaf name, and
axes in front of the natural ones are stack axes.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MatrixAxes:
    """How a leaf's natural axes form matrices: each of rows and columns may join several axes.

    Attributes:
        rows: axis names whose product is the number of rows.
        columns: axis names whose product is the number of columns.
        batch: axis names that number separate matrices (experts).
        head: the axis of `columns` along which per-head Muon cuts the matrix into blocks; None never cuts.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    batch: tuple[str, ...] = ()
    head: str | None = None


@dataclass(frozen=True)
class ParameterSpec:
    """What is known of a parameter from its leaf name.

    Attributes:
        axes: logical names of the natural axes, input axes first; sharding rules use them too.
        muon: the matrices that Muon orthogonalises; None leaves the parameter to AdamW.
        weight_decay: whether decoupled weight decay applies.
    """

    axes: tuple[str, ...]
    muon: MatrixAxes | None = None
    weight_decay: bool = False


def _vector(*axes):
    return ParameterSpec(axes)


def _matrix(rows, columns, *, batch="", head=None):
    """A decayed Muon parameter whose axes are batch, rows, columns, in this order."""
    batch, rows, columns = tuple(batch.split()), tuple(rows.split()), tuple(columns.split())
    return ParameterSpec(batch + rows + columns, MatrixAxes(rows, columns, batch, head), weight_decay=True)


# AdamW takes embeddings, head, norms, vectors and conv taps, Muon every other matrix. Where the router, beta
# and the low-rank decay belong is not stated (spec §7.2): here, as in Moonlight, they are matrices like any
# other. Gates and outputs are one matrix over all heads; only q, k and v projections are cut by head, and
# keys and values of kv_up, whose split is not stated either, stay together.
PARAMETERS: dict[str, ParameterSpec] = {
    "embed": ParameterSpec(("vocab", "embed"), weight_decay=True),
    "head": ParameterSpec(("embed", "vocab"), weight_decay=True),
    # Norm gains and Attention-Residual vectors (spec §4)
    "final_norm": _vector("embed"),
    "mixer_norm": _vector("embed"),
    "ffn_norm": _vector("embed"),
    "output_res_query": _vector("embed"),
    "output_res_gain": _vector("embed"),
    "mixer_res_query": _vector("embed"),
    "mixer_res_gain": _vector("embed"),
    "ffn_res_query": _vector("embed"),
    "ffn_res_gain": _vector("embed"),
    # Both mixers (spec §2.1, §3); in MLA value_heads are the query heads, and key is content and rope slot
    # together
    "q_proj": _matrix("embed", "heads key", head="heads"),
    "gate_proj": _matrix("embed", "value_heads value"),
    "o_proj": _matrix("value_heads value", "embed"),
    # KDA
    "k_proj": _matrix("embed", "heads key", head="heads"),
    "v_proj": _matrix("embed", "value_heads value", head="value_heads"),
    "q_conv": _vector("heads", "key", "taps"),
    "k_conv": _vector("heads", "key", "taps"),
    "v_conv": _vector("value_heads", "value", "taps"),
    "decay_down": _matrix("embed", "gate_rank"),
    "decay_up": _matrix("gate_rank", "value_heads key"),
    "dt_bias": _vector("value_heads", "key"),
    "a_log": _vector("value_heads"),
    "beta_proj": _matrix("embed", "value_heads"),
    "gate_down": _matrix("embed", "gate_rank"),
    "gate_up": _matrix("gate_rank", "value_heads value"),
    "o_norm": _vector("value"),
    # MLA
    "q_down": _matrix("embed", "q_latent"),
    "q_norm": _vector("q_latent"),
    "q_up": _matrix("q_latent", "heads key", head="heads"),
    "kv_down": _matrix("embed", "kv_latent_rope"),
    "kv_norm": _vector("kv_latent"),
    "kv_up": _matrix("kv_latent", "heads key_value", head="heads"),
    # Dense MLP and shared experts
    "gate": _matrix("embed", "mlp"),
    "up": _matrix("embed", "mlp"),
    "down": _matrix("mlp", "embed"),
    # Mixture of experts (spec §5.1)
    "router": _matrix("embed", "experts"),
    "latent_down": _matrix("embed", "latent"),
    "latent_up": _matrix("latent", "embed"),
    "routed_norm": _vector("latent"),
    "expert_gate": _matrix("latent", "expert_mlp", batch="experts"),
    "expert_up": _matrix("latent", "expert_mlp", batch="experts"),
    "expert_down": _matrix("expert_mlp", "latent", batch="experts"),
}


def parameter_spec(path: tuple[str, ...], ndim: int) -> ParameterSpec:
    """The table's row for one parameter.

    Args:
        path: keys from the root of the parameter tree to the leaf; only the last one decides.
        ndim: number of axes of the leaf, stack axes included.

    Returns:
        The ParameterSpec of the leaf name.

    Raises:
        ValueError: the leaf name is not in the table, or the leaf has fewer axes than the table says.
    """
    spec = PARAMETERS.get(path[-1])
    name = "/".join(path)
    if spec is None:
        raise ValueError(f"parameter {name!r}: unknown leaf name {path[-1]!r}; add it to PARAMETERS in {__name__}")
    if ndim < len(spec.axes):
        raise ValueError(f"parameter {name!r} has {ndim} axes; it needs {len(spec.axes)}: {', '.join(spec.axes)}")
    return spec
