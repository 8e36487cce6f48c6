"""The interpreted KDA kernels against stored references and the float64 recurrence, at the corners of what they take.

float32 inputs throughout; test_kda_precision.py has bfloat16 and what products the kernels may hold.
"""

import itertools
import json

import jax
import numpy as np
import pytest

from k3jax.ops.decay import bounded_decay, softplus_decay
from tests.conftest import FIXTURES, rel_error
from tests.pallas_kernels.kernel_cases import ARRAYS, ROW, ROWS, exact, random_case, run_cases, worst_error

FOLDER = FIXTURES / "kda_ops"
FIXTURE_CASES = json.loads((FOLDER / "cases.json").read_text())
TOLERANCE = 1e-5
FLOORS = [None, -5.0]


def stored_heads(name):
    """Every head and segment of a stored case as a case of its own, with the stored o and final state.

    Gate and normalisation are done here, so gradients are those of the recurrence; they come from `exact`.
    """
    case = FIXTURE_CASES[name]
    with np.load(FOLDER / f"{name}.npz") as file:
        x = {n: np.asarray(file[n], np.float64) for n in file}
    with jax.enable_x64(True):
        if case["qk_l2norm"]:
            x["q"], x["k"] = (y / np.sqrt(np.sum(y * y, axis=-1, keepdims=True) + 1e-6) for y in (x["q"], x["k"]))
        if case["gate"] != "log":
            z = x["g"] + x["dt_bias"].reshape(x["g"].shape[2:])
            bounded = case["gate"] == "lower_bound"
            g = bounded_decay(z, x["A_log"], case["lower_bound"]) if bounded else softplus_decay(z, x["A_log"])
            x["g"] = np.asarray(g)
    B, _, J, V = x["v"].shape
    H, K = x["q"].shape[2:]
    scale = K**-0.5 if case["scale"] is None else case["scale"]
    T = x["q"].shape[1]
    bounds = case["cu_seqlens"] or [0, min(T, ROW)]  # outputs are causal, so the beginning of a long case is a case
    segments = list(itertools.pairwise(bounds))
    states = np.zeros((B * len(segments), J, K, V))
    for row in range(B):
        for segment, (start, end) in enumerate(segments):
            for j in range(J):
                h, s = j // (J // H), row * len(segments) + segment
                tokens = {n: x[n][row, start:end, h] for n in ("q", "k")}
                tokens |= {n: x[n][row, start:end, j] for n in ("v", "g", "beta", "do")}
                tokens["q"] = scale * tokens["q"]
                state = x.get("initial_state", states)[s, j]
                dstate = x.get("dfinal_state", states)[s, j]
                stored = {"o": x["o"][row, start:end, j]}
                if T <= ROW:
                    stored["final_state"] = x["final_state"][s, j]
                yield tokens | {"initial_state": state, "dfinal_state": dstate}, stored


@pytest.mark.parametrize("floor", FLOORS)
def test_stored_references(floor):
    """Outputs and states against the files, gradients against float64 autodiff of the same recurrence."""
    heads = [(name, *list(stored_heads(name))[-1]) for name in FIXTURE_CASES]
    heads += [(name, *head) for name in ("packed", "packed_initial_state") for head in list(stored_heads(name))[:3]]
    if floor is not None:
        heads = [head for head in heads if head[1]["g"].min() >= floor]
        assert len({name for name, _, _ in heads}) >= 10
    for got, (name, case, stored) in zip(run_cases([case for _, case, _ in heads], floor), heads, strict=True):
        want = exact(case)
        for n, value in stored.items():
            assert rel_error(want[n], value) < 1e-7, (name, n)  # the file and the recurrence say the same
        assert worst_error(got, want) < TOLERANCE, name


def test_any_decay():
    """From none to e^-1000 a token, everywhere, at single tokens and mixed over neighbours; a complete reset."""
    gates = [0, -1e-6, -5, -11, -100, -1000]
    cases = [random_case(i, T=150, K=8, V=8, gate=gate) for i, gate in enumerate(gates)]
    for positions in ([0], [127], [128], [15, 16, 130], range(0, 150, 7)):
        cases.append(random_case(20, T=150, K=8, V=8))
        cases[-1]["g"][list(positions)] = -1000
    mixed = -(10 ** np.random.default_rng(4).uniform(-8, 3, (150, 8)))
    cases.append(random_case(21, T=150, K=8, V=8, gate=mixed))

    reset = random_case(22, T=150, K=8, V=8)
    reset["g"][140] = -np.inf
    reset["do"][:140] = 0
    *gots, got = run_cases([*cases, reset])
    for case, got_case in zip(cases, gots, strict=True):
        assert worst_error(got_case, exact(case)) < 3e-6
    after = {name: x if "state" in name else x[140:] for name, x in reset.items()}
    after |= {"initial_state": np.zeros((8, 8)), "g": np.concatenate([np.zeros((1, 8)), after["g"][1:]])}
    want = exact(after)
    assert rel_error(got["o"][140:], want["o"]) < 1e-6
    assert rel_error(got["dk"][140:], want["dk"]) < 1e-6
    for name in ARRAYS:
        assert not np.any(got[f"d{name}"][:140]), name
    assert not np.any(got["dinitial_state"])


@pytest.mark.parametrize("floor", FLOORS)
def test_floor_and_corners_of_the_delta_rule(floor):
    """Saturated and vanishing bounded decay, gradients as small as a mean over a batch makes them; repeated keys, no
    writes, beta up to 2."""
    random = np.random.default_rng(3)
    saturated = -5 / (1 + np.exp(-random.standard_normal((ROW, 16)) - 6))
    cases = [random_case(i, K=16, V=16, gate=gate) for i, gate in enumerate([saturated, saturated / 1e4, -5, 0])]
    small = random_case(5, K=16, V=16, gate=saturated)
    cases.append(small | {name: 1e-12 * small[name] for name in ("do", "dfinal_state")})
    no_writes = random_case(6, K=16, V=16, gate=saturated / 10)
    cases.append(no_writes | {"beta": 0 * no_writes["beta"]})
    tolerances = [TOLERANCE] * len(cases)
    for beta, tolerance in ((1, 1e-5), (2, 3e-4)):  # at beta 2 every entry of the inverse is 2
        same = random_case(7, T=200, K=16, V=16, gate=-1e-3)
        same["k"][:] = same["k"][0]
        same["beta"][:] = beta
        cases.append(same)
        tolerances.append(tolerance)
    for case, got, tolerance in zip(cases, run_cases(cases, floor), tolerances, strict=True):
        assert worst_error(got, exact(case)) < tolerance


@pytest.mark.parametrize("floor", FLOORS)
def test_later_tokens_change_no_earlier_bit(floor):
    """Outputs before P, and gradients before P of an objective that ends at P, are the same bits whatever follows."""
    base, other = (random_case(seed, K=8, V=8, gate=gate) for seed, gate in ((8, -4.0), (9, -0.1)))
    places = (1, 15, 16, 100, 127, 128, 129, 250)
    cases = []
    for P in places:
        ending = base | {"do": np.where(np.arange(ROW)[:, None] < P, base["do"], 0), "dfinal_state": np.zeros((8, 8))}
        cases += [ending, ending | {n: np.concatenate([base[n][:P], other[n][P:]]) for n in ARRAYS}]
    outs = run_cases(cases, floor)
    for P, want, got in zip(places, outs[::2], outs[1::2], strict=True):
        for name in ("o", *(f"d{n}" for n in ARRAYS)):
            assert np.array_equal(got[name][:P], want[name][:P]), (P, name)
        assert np.array_equal(got["dinitial_state"], want["dinitial_state"]), P


@pytest.mark.parametrize("floor", FLOORS)
def test_packed_documents_equal_documents_alone(floor):
    """Lengths of every remainder modulo the chunk (with a floor; some without), 1 included, at any alignment; NaN in
    the padding between."""
    random = np.random.default_rng(10)
    lengths = [*random.permutation(np.arange(1, 129, 5 if floor is None else 1)), 256, 1, 1]
    rows, ids, row, at = [], [], None, ROW
    places = []
    for number, n in enumerate(lengths):
        if at + n > ROW:
            row, at = len(rows), 0
            rows.append(random_case(100 + row, K=8, V=8, gate=None if floor is None else -1.5))
            ids.append(np.zeros(ROW, np.int32))
        ids[row][at : at + n] = 1 + number % 3
        places.append((row, at, n))
        at += n + number % 2  # every other document is followed by a token of padding
    gots = []
    for first in range(0, len(rows), ROWS):
        gots += run_cases(rows[first : first + ROWS], floor, ids[first : first + ROWS])
    firsts = {row: start for row, start, _ in reversed(places)}
    lasts = {row: start for row, start, _ in places}
    zeros = np.zeros((8, 8))
    for row, start, n in places:
        alone = {name: x if "state" in name else x[start : start + n] for name, x in rows[row].items()}
        if start != firsts[row]:
            alone["initial_state"] = zeros
        if start != lasts[row]:
            alone["dfinal_state"] = zeros
        want, got = exact(alone), gots[row]
        for name in ("o", *(f"d{n}" for n in ARRAYS)):
            scale = max(np.max(np.abs(want[name])), 0.1)  # 0 for the decay of a document of one token
            assert np.max(np.abs(got[name][start : start + n] - want[name])) < TOLERANCE * scale, (name, start, n)
        if start == firsts[row]:
            assert rel_error(got["dinitial_state"], want["dinitial_state"]) < TOLERANCE
        if start == lasts[row]:
            assert rel_error(got["final_state"], want["final_state"]) < TOLERANCE
    for row, got in enumerate(gots):
        for name in ("o", *(f"d{n}" for n in ARRAYS)):
            assert not np.any(got[name][ids[row] == 0]), name
