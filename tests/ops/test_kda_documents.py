"""KDA over packed rows: every document as if it were alone, padding as if it were not there."""

import jax
import numpy as np
import pytest

from tests.conftest import rel_error
from tests.ops.kda_cases import NAMES, compiled_gradients, cotangents, random_inputs

FORMS = ["recurrent", "chunked"]
CHUNK = 8
# Every remainder modulo the chunk, length 1 and lengths beyond one and two chunks, at every alignment to the chunks.
LENGTHS = [1, 2, 3, 1, 4, 5, 6, 7, 8, 9, 10, 1, 1, 11, 12, 13, 14, 15, 16, 17, 18]
T = sum(LENGTHS)


def documents_alone(x, do, dfinal_state, documents):
    """The float64 recurrence on each document (row, first token, length), without segment ids.

    Documents are rows of one batch; tokens of all zeros, which leave the state as it is, fill them up behind.
    x["initial_state"], do and dfinal_state come by document here.
    """
    longest = max(n for _, _, n in documents)

    def rows(a):
        out = np.zeros((len(documents), longest, *a.shape[2:]))
        for i, (row, start, n) in enumerate(documents):
            out[i, :n] = a[row, start : start + n]
        return out

    alone = {name: rows(x[name]) for name in NAMES[:5]} | {"initial_state": np.float64(x["initial_state"])}
    with jax.enable_x64(True):
        out = compiled_gradients("recurrent", CHUNK)(alone, rows(do), np.float64(dfinal_state))
        return jax.tree.map(np.asarray, out)


def check_rows(got, want, documents, tolerance):
    """Every token of every document as alone; every other token 0 in the output and in all gradients."""
    for name in ("o", *(f"d{n}" for n in NAMES[:5])):
        expected = np.zeros(got[name].shape)
        for i, (row, start, n) in enumerate(documents):
            expected[row, start : start + n] = want[name][i, :n]
        assert rel_error(got[name], expected) < tolerance, name
        outside = np.ones(got[name].shape[:2], bool)
        for row, start, n in documents:
            outside[row, start : start + n] = False
        assert not np.any(np.asarray(got[name])[outside]), name


@pytest.mark.parametrize("form", FORMS)
def test_packed_rows_equal_documents_alone(form):
    """Two rows, the second in reverse order; strong and weak decay; an initial state for the first document only."""
    x = random_inputs(0, 2, T, 1, 2, 8, 4)
    ids = np.stack([np.repeat(np.arange(1, len(lengths) + 1), lengths) for lengths in (LENGTHS, LENGTHS[::-1])])
    documents = [
        (row, start, n)
        for row, lengths in enumerate((LENGTHS, LENGTHS[::-1]))
        for start, n in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True)
    ]
    do, dfinal_state = cotangents(x)
    got = compiled_gradients(form, CHUNK)(x, do, dfinal_state, ids.astype(np.int32))

    first, last = [0, len(LENGTHS)], [len(LENGTHS) - 1, 2 * len(LENGTHS) - 1]
    states, dfinal_states = (np.zeros((len(documents), *dfinal_state.shape[1:])) for _ in range(2))
    states[first], dfinal_states[last] = x["initial_state"], dfinal_state
    want = documents_alone(x | {"initial_state": states}, do, dfinal_states, documents)

    check_rows(got, want, documents, 2e-6)
    assert rel_error(got["final_state"], want["final_state"][last]) < 2e-6
    assert rel_error(got["dinitial_state"], want["dinitial_state"][first]) < 2e-6


@pytest.mark.parametrize("form", FORMS)
def test_padding_is_inert(form):
    """Padding left, between, right and everywhere, holding NaN: no output, no gradient, no trace in the state."""
    n = 30
    ids = np.zeros((4, n), np.int32)
    ids[0, 11:] = 3  # left: the initial state waits for the first token
    ids[1, :6], ids[1, 13:15], ids[1, 15:26] = 4, 4, 2  # between: the id repeats, the state does not; and right
    ids[2, :20] = 1  # right: the state stays as the last token left it
    # Row 3 is padding only: the state passes through.
    documents = [(0, 11, 19), (1, 0, 6), (1, 13, 2), (1, 15, 11), (2, 0, 20)]
    x = random_inputs(1, 4, n, 1, 2, 8, 4)
    do, dfinal_state = cotangents(x)
    clean = dict(x)
    for name in NAMES[:5]:
        x[name] = np.where((ids != 0).reshape(4, n, *[1] * (x[name].ndim - 2)), x[name], np.nan)
    got = compiled_gradients(form, CHUNK)(x, do, dfinal_state, ids)

    states, dfinal_states = (np.zeros((5, *dfinal_state.shape[1:])) for _ in range(2))
    first, last = [0, 1, 4], [0, 3, 4]
    states[first], dfinal_states[last] = x["initial_state"][:3], dfinal_state[:3]
    want = documents_alone(clean | {"initial_state": states}, do, dfinal_states, documents)

    check_rows(got, want, documents, 2e-6)
    assert rel_error(got["final_state"][:3], want["final_state"][last]) < 2e-6
    assert rel_error(got["dinitial_state"][:3], want["dinitial_state"][first]) < 2e-6
    assert np.array_equal(got["final_state"][3], x["initial_state"][3])
    assert np.array_equal(got["dinitial_state"][3], dfinal_state[3])
