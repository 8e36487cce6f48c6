"""Every parameter of a run as text: `parameters.txt`."""

from k3jax.config import ModelConfig
from k3jax.models.accounting import count_parameters


def parameter_table(config: ModelConfig, params: dict) -> str:
    """Every parameter with shape, dtype and size, then the totals, as aligned text.

    Args:
        config: the architecture, for the published way of counting.
        params: nested dictionaries of arrays.
    Returns:
        Lines of text.
    """
    rows = [("parameter", "shape", "dtype", "size")]
    total = 0
    for name, leaf in _walk(params, ()):
        total += leaf.size
        rows.append((name, "x".join(map(str, leaf.shape)), str(leaf.dtype), f"{leaf.size:,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {dtype:<{widths[2]}}  {size:>{widths[3]}}"
        for name, shape, dtype, size in rows
    ]
    table = count_parameters(config)
    lines += [
        "",
        f"{total:,} trained values",
        f"{table.total:,} parameters with router biases, {table.active:,} active a token",
    ]
    return "\n".join(lines) + "\n"


def _walk(tree: dict, path: tuple[str, ...]):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _walk(value, (*path, name))
        else:
            yield "/".join((*path, name)), value
