"""Water-filled inclusion probabilities, base weights, and the two draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp.errors import ConfigError
from fedcomp.graphs.adjacency import columns_of, normalised
from fedcomp.graphs.inclusion import base_weight, local_mass, multinomial, poisson, waterfill
from fedcomp.rng import Key

WEIGHT = st.one_of(
    st.just(0.0),
    st.sampled_from([1.0, 2.0]),
    st.floats(1e-3, 1e3),
    st.floats(-300, 300).map(lambda exponent: 10.0**exponent),
)


def sequential(w: np.ndarray, n: float) -> np.ndarray:
    """The rule one candidate at a time, largest first: capped while its share of what is left reaches 1."""
    pi = np.zeros(len(w))
    order = [i for i in np.argsort(-w, kind="stable") if w[i] > 0]
    for at, i in enumerate(order):
        tail = sum(w[j] / w[i] for j in reversed(order[at:]))
        if n - at >= tail:
            pi[i] = 1.0
            continue
        for j in order[at:]:
            pi[j] = (n - at) * (w[j] / w[i]) / tail
        break
    return pi


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(WEIGHT, max_size=40), st.one_of(st.integers(1, 50), st.floats(1, 50)))
def test_7_08_water_filling(weights: list[float], n: float) -> None:
    """Sum min(n, positive), at most 1, order kept, proportional below the cap, 0 for weight 0."""
    w = np.array(weights)
    pi = waterfill(w, n)
    positive = int((w > 0).sum())
    assert abs(float(pi.sum()) - min(n, positive)) < 1e-9
    assert (pi >= 0).all()
    assert (pi <= 1).all()
    assert (pi[w == 0] == 0).all()
    assert (np.diff(pi[np.argsort(w, kind="stable")]) >= 0).all()
    below = (pi < 1) & (pi > 1e-280)
    rates = pi[below] / w[below] * w[below].max(initial=1.0)
    np.testing.assert_allclose(rates, rates.max(initial=0.0), rtol=1e-12)
    capped = (pi == 1) & (w > 0)
    if below.any() and capped.any():  # none was capped that did not have to be
        at = int(np.argmax(w * below))
        assert (w[capped] / w[at] * pi[at] >= 1 - 1e-9).all()
    np.testing.assert_allclose(pi, sequential(w, n), rtol=1e-9, atol=1e-12)


def test_water_filling_does_not_depend_on_the_unit_of_weights() -> None:
    w = Key(2, "test/unit").uniform(500)
    for power in (-900, -3, 900):
        np.testing.assert_allclose(waterfill(np.ldexp(w, power), 77), waterfill(w, 77), rtol=1e-15)
    assert waterfill(np.full(4, 1e308), 2).tolist() == [0.5] * 4  # their sum is not a float


def test_7_14_water_filling_at_the_edges() -> None:
    assert waterfill(np.zeros(0), 5).tolist() == []
    assert waterfill(np.zeros(3), 2).tolist() == [0, 0, 0]
    assert waterfill(np.array([0.0, 2.0, 1e-300]), 2).tolist() == [0, 1, 1]
    assert waterfill(np.array([1e300, 1e300, 1e-300, 1e-300]), 3).tolist() == [1, 1, 0.5, 0.5]
    assert waterfill(np.array([3.0, 1.0]), float("inf")).tolist() == [1, 1]
    # As many capped as n: the rest keeps its tiny share, because a column that is never drawn would be a bias.
    pi = waterfill(np.concatenate([np.full(3, 0.1), np.full(1000, 1e-20)]), 3)
    np.testing.assert_allclose(pi, np.concatenate([np.ones(3), np.full(1000, 1e-19)]), rtol=1e-12)


@pytest.mark.parametrize("n", [0, 0.99, -1, float("nan"), -float("inf")])
def test_less_than_one_column_is_refused(n: float) -> None:
    with pytest.raises(ConfigError, match="at least one column"):
        waterfill(np.ones(3), n)


@pytest.mark.parametrize("wrong", [[-1.0, 2.0], [np.nan], [np.inf, 1.0], [[1.0]]])
def test_weights_that_are_none_are_refused(wrong: list[Any]) -> None:
    with pytest.raises(ConfigError, match="finite numbers of at least 0"):
        waterfill(np.array(wrong), 1)
    with pytest.raises(ConfigError, match="finite numbers of at least 0"):
        multinomial(np.array(wrong), 1, np.zeros(1))


def test_poisson_keeps_certain_columns_and_never_impossible_ones() -> None:
    pi = np.array([0.0, 1.0, 0.3, 0.0, 1.0])
    nearly = 1 - 2.0**-53
    assert poisson(pi, np.zeros(5)).tolist() == [1, 2, 4]
    assert poisson(pi, np.full(5, nearly)).tolist() == [1, 4]
    assert poisson(np.zeros(0), np.zeros(0)).tolist() == []
    with pytest.raises(ConfigError, match="3 uniform numbers for 5"):
        poisson(pi, np.zeros(3))


def test_multinomial_counts_are_what_the_probabilities_say() -> None:
    p = np.array([0.0, 1.0, 2.0, 0.0, 5.0, 0.0])
    n = 40_000
    counts = multinomial(p, n, Key(9, "test/multinomial").uniform(n))
    assert counts.dtype == np.int64
    assert counts.sum() == n
    assert (counts[p == 0] == 0).all()
    q = p / p.sum()
    assert (np.abs(counts - n * q) <= 4.5 * np.sqrt(n * q * (1 - q))).all()
    # On both sides of each border.
    ends = np.array([0.0, 0.25 - 2.0**-53, 0.25, 0.5 - 2.0**-53, 0.5, 1 - 2.0**-53])
    assert multinomial(np.array([0.0, 1.0, 1.0, 0.0, 2.0, 0.0]), 6, ends).tolist() == [0, 2, 2, 0, 2, 0]
    assert multinomial(np.array([1e300, 1e300]), 2, np.array([0.4, 0.6])).tolist() == [1, 1]


def test_7_14_multinomial_without_anything_to_draw() -> None:
    assert multinomial(np.zeros(3), 2, np.zeros(2)).tolist() == [0, 0, 0]
    assert multinomial(np.zeros(0), 2, np.zeros(2)).tolist() == []
    for n, given_ in ((0, 0), (3, 2), (-1, 0)):
        with pytest.raises(ConfigError, match="expected as many"):
            multinomial(np.ones(3), n, np.zeros(given_))


def test_base_weights_are_column_sums() -> None:
    src, dst = np.divmod(Key(1, "test/edges").bits(90).astype(np.int64) & 1023, 32)
    adjacency = normalised(src, dst, 32)
    ids = np.array([3, 30, 11, 4, *range(12, 28)])
    rows = adjacency.rows(ids)
    candidates, positions = columns_of(rows)
    u = np.zeros((len(ids), len(candidates)))
    u[np.repeat(np.arange(len(ids)), np.diff(rows.indptr)), positions] = rows.values
    assert (u != 0).sum(0).max() > 5
    m = len(candidates)
    np.testing.assert_allclose(base_weight(rows, positions, m), np.abs(u).sum(0), rtol=1e-15)
    np.testing.assert_allclose(base_weight(rows, positions, m, "count"), (u != 0).sum(0), rtol=0)
    np.testing.assert_allclose(base_weight(rows, positions, m, "l2sq"), (u * u).sum(0), rtol=1e-15)
    assert (base_weight(rows, positions, m, "l1") > 0).all()
    empty = adjacency.rows(np.array([], np.int64))
    assert base_weight(empty, empty.columns, 0).tolist() == []
    with pytest.raises(ConfigError, match="did you mean 'l2sq'"):
        base_weight(rows, positions, m, "l2")


def test_local_mass_is_a_share_of_any_unit_and_not_a_number_without_weight() -> None:
    local = np.array([True, False, True, False])
    w = np.array([1.0, 2.0, 2.0, 3.0])
    assert local_mass(w, local) == pytest.approx(3 / 8, rel=1e-15)
    for unit in (1e-300, 1e300):
        assert local_mass(w * unit, local) == pytest.approx(3 / 8, rel=1e-15)
    assert local_mass(np.full(4, 1e308), local) == 0.5
    assert local_mass(w, np.ones(4, bool)) == 1.0
    assert local_mass(w, np.zeros(4, bool)) == 0.0
    assert np.isnan(local_mass(np.zeros(4), local))
    assert np.isnan(local_mass(np.zeros(0), np.zeros(0, bool)))
