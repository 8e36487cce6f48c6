"""Muon's orthogonalisation against singular values and a plain loop over matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from k3jax.nn.parameters import PARAMETERS
from k3jax.train.muon import matrix_view, newton_schulz, orthogonalise
from tests.conftest import rel_error
from tests.train.parameter_tree import LEAVES, matrix_slices, random_tree


def loop_newton_schulz(m):
    """Spec §7.2 for one matrix, float64."""
    x = np.asarray(m, np.float64)
    transpose = x.shape[0] > x.shape[1]
    x = x.T if transpose else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if transpose else x


def loop_direction(path, momentum, blocks="per_head"):
    out = np.full(momentum.shape, np.nan)
    for index, shape in matrix_slices(path, blocks):
        m = momentum[index].reshape(shape)
        o = loop_newton_schulz(m) * 0.2 * np.sqrt(max(m.shape))
        out[index] = o.reshape(momentum[index].shape)
    assert np.isfinite(out).all(), "the slices do not cover the leaf"
    return out


def muon_leaves(tree):
    return {path: leaf for path, leaf in flatten_dict(tree).items() if LEAVES[path][1].matrices}


def with_singular_values(s, rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    u, _ = np.linalg.qr(rng.standard_normal((rows, len(s))))
    v, _ = np.linalg.qr(rng.standard_normal((columns, len(s))))
    return u * s @ v.T


@pytest.mark.parametrize("rows, columns", [(16, 16), (16, 24), (16, 32), (16, 200), (1, 8), (30, 10)])
def test_singular_values_near_one_and_vectors_kept(rows, columns):
    s = np.linspace(1.0, 0.05, min(rows, columns))
    m = with_singular_values(s, rows, columns)
    u, _, vt = np.linalg.svd(m, full_matrices=False)
    o = np.asarray(newton_schulz(jnp.asarray(m, jnp.float32)))
    in_basis = u.T @ o @ vt.T
    assert (np.diag(in_basis) > 0.67).all() and (np.diag(in_basis) < 1.21).all(), np.diag(in_basis)
    assert np.abs(in_basis - np.diag(np.diag(in_basis))).max() < 1e-3


@pytest.mark.parametrize("rows, columns", [(16, 24), (16, 64)])
@pytest.mark.parametrize("decades", [3, 8, 30])
def test_ill_conditioned_float32_stays_close_and_bounded(rows, columns, decades):
    m = with_singular_values(np.logspace(0, -decades, rows), rows, columns).astype(np.float32)
    o = newton_schulz(jnp.asarray(m))
    assert rel_error(o, loop_newton_schulz(m)) < 2e-3
    assert np.linalg.norm(o, 2) < 1.21


def test_float64_equals_the_loop_for_both_forms():
    with jax.enable_x64(True):
        for shape in [(9, 9), (9, 17), (9, 18), (9, 100)]:
            m = np.random.default_rng(1).standard_normal(shape)
            o = newton_schulz(jnp.asarray(m))
            assert o.dtype == jnp.float64
            assert rel_error(o, loop_newton_schulz(m)) < 1e-12


def test_zero_and_fading_matrices():
    m = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    assert (np.asarray(newton_schulz(jnp.zeros((3, 8, 16)))) == 0).all()
    assert (np.asarray(newton_schulz(jnp.zeros((8, 9)))) == 0).all()
    np.testing.assert_allclose(newton_schulz(m * 1e6), newton_schulz(m), rtol=1e-3, atol=1e-4)  # scale is no signal
    assert np.abs(newton_schulz(m * 1e-13)).max() < 1e-2  # far below EPS nothing moves
    assert np.isfinite(newton_schulz(m * 1e-30)).all()


@pytest.fixture(scope="module")
def directions():
    """Momentum and what Muon makes of it in either mode, float64."""
    with jax.enable_x64(True):
        momentum = muon_leaves(random_tree(seed=3, dtype=np.float64))
        got = {}
        for blocks in ("per_head", "whole"):
            flat = jax.jit(lambda tree, b=blocks: unflatten_dict(orthogonalise(flatten_dict(tree), b)))
            got[blocks] = flatten_dict(jax.device_get(flat(unflatten_dict(momentum))))
    return momentum, got


@pytest.mark.parametrize("blocks", ["per_head", "whole"])
def test_every_label_equals_the_loop(directions, blocks):
    momentum, got = directions
    assert got[blocks].keys() == momentum.keys()
    for path, m in momentum.items():
        assert got[blocks][path].dtype == np.float64
        assert rel_error(got[blocks][path], loop_direction(path, m, blocks)) < 1e-12, path


def test_per_head_differs_from_whole_only_for_q_k_v(directions):
    momentum, got = directions
    differ = {path[-1] for path in momentum if rel_error(got["per_head"][path], got["whole"][path]) > 1e-2}
    assert differ == {"q_proj", "k_proj", "v_proj", "q_up", "kv_up"}


def test_batched_form_for_accelerators_equals_the_cpu_form():
    x_NRC = jnp.asarray(np.random.default_rng(0).standard_normal((5, 8, 12)), jnp.float32)
    for x in (x_NRC, jnp.tile(x_NRC, (1, 1, 3))):
        assert rel_error(newton_schulz(x), jax.lax.map(newton_schulz, x)) < 1e-5


def test_one_newton_schulz_loop_a_matrix_shape():
    momentum = muon_leaves(random_tree())
    views = [matrix_view(path, m.shape, "per_head") for path, m in momentum.items()]
    shapes = {(view.short, view.long) for view in views}
    flat = jax.jit(lambda tree: unflatten_dict(orthogonalise(flatten_dict(tree), "per_head")))
    text = flat.lower(unflatten_dict(momentum)).as_text()
    assert text.count("stablehlo.while") == len(shapes) < len(momentum) / 2


def test_split_and_join_are_inverse():
    for path, leaf in muon_leaves(random_tree()).items():
        view = matrix_view(path, leaf.shape, "per_head")
        x_NRC = view.split(leaf)
        assert x_NRC.shape == (view.count, view.short, view.long) and view.short <= view.long
        assert (view.join(x_NRC) == leaf).all(), path


def test_every_leaf_name_is_listed_once_in_both_tables():
    assert set(PARAMETERS) == {path[-1] for path in LEAVES}
    for path, (_, leaf) in LEAVES.items():
        assert len(PARAMETERS[path[-1]].axes) == len(leaf.shape), path


def test_errors_name_leaf_and_choices():
    with pytest.raises(ValueError, match=r"'body/kda/q_bias': unknown leaf name 'q_bias'.*PARAMETERS"):
        matrix_view(("body", "kda", "q_bias"), (3,), "per_head")
    with pytest.raises(ValueError, match=r"'x/q_proj' has 2 axes.*embed, heads, key"):
        matrix_view(("x", "q_proj"), (3, 4), "per_head")
    with pytest.raises(ValueError, match=r"OptimConfig.muon_blocks = 'heads'.*'per_head' or 'whole'"):
        matrix_view(("x", "q_proj"), (3, 4, 5), "heads")
