"""Every leaf name once, with its shape, and what the optimiser must do with it: written down here, not derived."""

from typing import Literal, NamedTuple

import numpy as np

# Small and different within a leaf, so that a confusion of axes changes a shape; equal over leaves, so that few
# programs are compiled.
D, H, K, J, V, X, R, Q, C, P, N, F, E, L, M, W = 14, 2, 5, 3, 4, 4, 7, 7, 6, 1, 8, 7, 3, 7, 13, 17


class Leaf(NamedTuple):
    shape: tuple[int, ...]
    # How Muon cuts it: one matrix of the first axis by the rest, of all but the last by the last, a matrix a middle
    # index (head), a matrix a first index (expert); None: AdamW.
    matrices: Literal["first", "last", "head", "expert"] | None
    weight_decay: bool


def vector(*shape):
    return Leaf(shape, None, False)


ROOT = {
    "embed": Leaf((W, D), None, True),
    "head": Leaf((D, W), None, True),
    "final_norm": vector(D),
    "output_res_query": vector(D),
    "output_res_gain": vector(D),
}
LAYER = {
    "mixer_norm": vector(D),
    "ffn_norm": vector(D),
    "mixer_res_query": vector(D),
    "mixer_res_gain": vector(D),
    "ffn_res_query": vector(D),
    "ffn_res_gain": vector(D),
}
KDA = {
    "q_proj": Leaf((D, H, K), "head", True),
    "k_proj": Leaf((D, H, K), "head", True),
    "v_proj": Leaf((D, J, V), "head", True),
    "q_conv": vector(H, K, X),
    "k_conv": vector(H, K, X),
    "v_conv": vector(J, V, X),
    "decay_down": Leaf((D, R), "first", True),
    "decay_up": Leaf((R, J, K), "first", True),
    "dt_bias": vector(J, K),
    "a_log": vector(J),
    "beta_proj": Leaf((D, J), "first", True),
    "gate_proj": Leaf((D, J, V), "first", True),
    "gate_down": Leaf((D, R), "first", True),
    "gate_up": Leaf((R, J, V), "first", True),
    "o_norm": vector(V),
    "o_proj": Leaf((J, V, D), "last", True),
}
MLA = {
    "q_proj": Leaf((D, H, K + P), "head", True),
    "q_down": Leaf((D, Q), "first", True),
    "q_norm": vector(Q),
    "q_up": Leaf((Q, H, K + P), "head", True),
    "kv_down": Leaf((D, C + P), "first", True),
    "kv_norm": vector(C),
    "kv_up": Leaf((C, H, N + V), "head", True),
    "gate_proj": Leaf((D, H, V), "first", True),
    "o_proj": Leaf((H, V, D), "last", True),
}
MLP = {
    "gate": Leaf((D, F), "first", True),
    "up": Leaf((D, F), "first", True),
    "down": Leaf((F, D), "first", True),
}
MOE = {
    "router": Leaf((D, E), "first", True),
    "latent_down": Leaf((D, L), "first", True),
    "latent_up": Leaf((L, D), "first", True),
    "routed_norm": vector(L),
    "expert_gate": Leaf((E, L, M), "expert", True),
    "expert_up": Leaf((E, L, M), "expert", True),
    "expert_down": Leaf((E, M, L), "expert", True),
}
# path prefix, stack axes in front of each leaf, leaves: unstacked, under one scan, under two.
PLACES = [
    ((), (), ROOT),
    (("first",), (), LAYER),
    (("first", "kda"), (), KDA),
    (("first", "mlp"), (), MLP),
    (("body", "a"), (2,), LAYER),
    (("body", "a", "mla"), (2,), MLA),
    (("body", "a", "shared"), (2,), MLP),
    (("body", "a", "moe"), (2,), MOE),
    (("body", "b"), (2, 3), LAYER),
    (("body", "b", "kda"), (2, 3), KDA),
    (("body", "b", "moe"), (2, 3), MOE),
]
LEAVES = {(*prefix, name): (stack, leaf) for prefix, stack, leaves in PLACES for name, leaf in leaves.items()}


def random_tree(seed=0, scale=1.0, dtype=np.float32):
    """A nested dict of random arrays with every leaf of LEAVES."""
    rng = np.random.default_rng(seed)
    tree = {}
    for path, (stack, leaf) in LEAVES.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = (scale * rng.standard_normal(stack + leaf.shape)).astype(dtype)
    return tree


def get(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def matrix_slices(path, blocks="per_head"):
    """Yields an index and a 2-D shape a matrix: leaf[index].reshape(shape) is one matrix, leaf[index] its place."""
    stack, leaf = LEAVES[path]
    kind = "first" if leaf.matrices == "head" and blocks == "whole" else leaf.matrices
    for place in np.ndindex(*stack):
        if kind == "first":
            yield place, (leaf.shape[0], -1)
        elif kind == "last":
            yield place, (-1, leaf.shape[-1])
        elif kind == "head":
            for head in range(leaf.shape[1]):
                yield (*place, slice(None), head), (leaf.shape[0], leaf.shape[2])
        elif kind == "expert":
            for expert in range(leaf.shape[0]):
                yield (*place, expert), leaf.shape[1:]
