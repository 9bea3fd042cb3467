"""Expectations of every sampler, exactly: all that its uniform numbers can lead to, weighed by how likely it is.

The harness knows nothing of inclusion probabilities. It feeds chosen uniform numbers to the real sampler, finds by
bisection where its answer changes, and sums over all answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, pairwise, permutations, product
from typing import Any

import numpy as np
import pytest
from graph_toys import cut, toy_features, toy_owner, toy_parts
from numpy.typing import NDArray

from fedcomp.graphs.adjacency import normalised
from fedcomp.graphs.base import GraphPart, Ids, Operator
from fedcomp.graphs.plan import plan_layer, plan_step
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.rng import Key

EXACT = 1e-10
BELOW_ONE = 1.0 - 2.0**-53
Dense = NDArray[np.float64]
Run = Callable[[NDArray[np.float64]], Dense]
"""From uniform numbers to the sampled matrix, one column per node of the graph."""


def dense(operator: Operator, nodes: int) -> Dense:
    out = np.zeros((len(operator.rows), nodes))
    rows = np.repeat(np.arange(len(operator.rows)), np.diff(operator.indptr))
    out[rows, operator.columns[operator.positions]] = operator.values
    return out


def truth(part: GraphPart, ids: Ids) -> Dense:
    rows = part.structure.rows(ids)
    out = np.zeros((len(ids), part.structure.nodes))
    out[np.repeat(np.arange(len(ids)), np.diff(rows.indptr)), rows.columns] = rows.values
    return out


def runner(part: GraphPart, ids: Ids, settings: SamplerSettings, level: int = 0) -> tuple[Run, int]:
    """Return the real sampler as a function of its uniform numbers, and how many it asks for."""
    asked = []

    def run(uniforms: NDArray[np.float64] | None) -> Dense:
        def give(count: int) -> NDArray[np.float64]:
            asked.append(count)
            given = np.full(count, 0.5) if uniforms is None else uniforms
            assert len(given) == count
            return given

        return dense(plan_layer(part, ids, settings, level, give), part.structure.nodes)

    run(None)
    return run, asked[0] if asked else 0


def over_subsets(run: Run, count: int) -> Dense:
    """Return the expectation of a sampler whose uniform numbers each decide on one thing, by all 2^count decisions."""
    none = run(np.full(count, BELOW_ONE))

    def kept_at(one: int, u: float) -> bool:
        return not np.array_equal(run(np.where(np.arange(count) == one, u, BELOW_ONE)), none)

    chances = np.zeros(count)
    for one in range(count):
        low, high = 0.0, 1.0
        if kept_at(one, 0.0):
            for _ in range(54):
                middle = (low + high) / 2.0
                low, high = (middle, high) if kept_at(one, middle) else (low, middle)
            chances[one] = high
    open_ = np.flatnonzero(chances)
    assert len(open_) <= 12
    total = np.zeros_like(none)
    for keep in product((False, True), repeat=len(open_)):
        uniforms = np.full(count, BELOW_ONE)
        uniforms[open_[list(keep)]] = 0.0
        total += np.prod(np.where(keep, chances[open_], 1.0 - chances[open_])) * run(uniforms)
    return total


def pieces(same: Callable[[float], object], grid: int) -> Iterator[tuple[float, float]]:
    """Return the intervals of [0, 1) on which an answer stays the same: a point of each, and its length.

    One shorter than the grid may be overlooked, which makes an expectation wrong, never right.
    """
    points = np.append(np.arange(grid) / grid, BELOW_ONE)
    start, answer = 0.0, same(0.0)
    for left, right in pairwise(points):
        if same(right) == answer:
            continue
        low, high = left, right
        while high - low > 1e-15:
            middle = (low + high) / 2.0
            low, high = (middle, high) if same(middle) == answer else (low, middle)
        yield start, high - start
        start, answer = high, same(right)
    yield start, 1.0 - start


def over_sequences(
    run: Run, count: int, row: int | None = None, first: int = 0, last: int | None = None, grid: int = 48
) -> Dense:
    """Return the expectation of a sampler that makes one draw per uniform number, by all sequences of draws.

    With ``row`` that of one row of it, whose draws are those from ``first`` to ``last``.
    """
    places = np.arange(count)[first:last]

    def alike(u: float) -> bytes:
        uniforms = np.full(count, 0.5)
        uniforms[places] = u
        return (run(uniforms)[row] != 0.0).tobytes()

    found = list(pieces(alike, grid))
    total = np.zeros_like(run(np.full(count, 0.5)))
    for sequence in product(found, repeat=len(places)):
        uniforms = np.full(count, 0.5)
        uniforms[places] = [point for point, _ in sequence]
        total += np.prod([length for _, length in sequence]) * run(uniforms)
    return total if row is None else total[row]


def small(*, kind: str = "sym", nodes: int = 12, degree: float = 3.0, seed: int = 1) -> GraphPart:
    return toy_parts(nodes, 3, degree, 3, seed, kind=kind)[0]


ROWS = np.array([0, 2, 3])


def apart() -> tuple[GraphPart, Ids]:
    """Return a part, and rows of it of which one has owned neighbours only, and all have some."""
    lists = normalised(np.array([0, 0, 0, 0, 1, 1, 2]), np.array([1, 4, 5, 6, 5, 8, 0]), 9, "mean")
    return cut(lists, toy_owner(9, 2), toy_features(9, 2, 0))[0], np.array([0, 2, 1])


def lonely() -> tuple[GraphPart, Ids]:
    """Return a part, and a row of it without owned neighbours."""
    lists = normalised(np.zeros(4, int), np.arange(2, 6), 6, "mean", self_loops=False)
    return cut(lists, toy_owner(6, 3), np.ones((6, 1)))[0], np.array([0])


def over_rows(run: Run, count: int) -> Dense:
    """Return the expectation of a sampler whose rows draw twice each, row by row."""
    return np.stack([over_sequences(run, count, row, 2 * row, 2 * row + 2) for row in range(count // 2)])


Expectation = Callable[[Run, int], Dense]
PLACES: dict[str, Callable[[], tuple[GraphPart, Ids]]] = {
    "small": lambda: (small(), ROWS),
    "two rows": lambda: (small(), ROWS[:2]),
    "one row": lambda: (small(nodes=9, degree=2.0), ROWS[:1]),
    "mean": lambda: (small(kind="mean", seed=4), ROWS),
    "apart": apart,
    "lonely": lonely,
}
SUBSETS, SEQUENCES, BY_ROW = over_subsets, partial(over_sequences, grid=256), over_rows
FIXED = {"mode": "fixed"}
NODE = {"sampler": "node", "fanout": 2}
DRAWS = {"estimator": "multinomial"}
UNBIASED: list[tuple[str, dict[str, Any], Expectation]] = [
    *(
        (place, {**options, **FIXED, "scale": scale, "keep_self": keep_self}, expectation)
        for place, options, scales, expectation in (
            ("small", {"n": 2}, (1.0, 2.0, 16.0), SUBSETS),
            ("two rows", {"n": 3, **DRAWS}, (1.0, 3.0, 16.0), SEQUENCES),
            ("apart", NODE, (1.0, 4.0), SUBSETS),
        )
        for scale in scales
        for keep_self in (False, True)
    ),
    *(
        ("mean", {"n": 2, "mode": mode, "weight": weight, "budget": 1.5}, SUBSETS)
        for mode in ("matched", "measured", "worst")
        for weight in ("count", "l2sq")
    ),
    *(
        ("apart", {**NODE, **DRAWS, "mode": mode, "scale": scale}, BY_ROW)
        for mode, scale in (("fixed", 4.0), ("matched", 1.0), ("measured", 1.0))
    ),
    ("lonely", {**NODE, "budget": 2.0}, SUBSETS),
    ("lonely", {**NODE, **DRAWS, "budget": 2.0}, BY_ROW),
    *(("small", {"sampler": "boundary", "q": q}, SUBSETS) for q in (0.1, 0.5)),
    *(("one row", {"sampler": "fastgcn", "n": 3, "keep_self": keep_self}, SEQUENCES) for keep_self in (False, True)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "options", "expectation"), UNBIASED, ids=lambda value: None if callable(value) else str(value)[:60]
)
def test_7_01_a_sampler_that_is_called_unbiased_is(
    place: str, options: dict[str, Any], expectation: Expectation
) -> None:
    part, rows = PLACES[place]()
    settings = SamplerSettings(**options)
    assert not settings.biased
    run, count = runner(part, rows, settings)
    assert 1 < count <= 12
    # Something is drawn: else nothing would be shown.
    assert len({run(np.full(count, u)).tobytes() for u in np.arange(24) / 24}) > 1
    assert np.abs(expectation(run, count) - truth(part, rows)).max() < EXACT


def test_7_01_what_keeps_all_is_exact() -> None:
    part = small()
    for options in ({"sampler": "boundary", "q": 1.0}, {"sampler": "full"}):
        run, count = runner(part, ROWS, SamplerSettings(**options))
        assert np.abs(run(np.zeros(count)) - truth(part, ROWS)).max() < EXACT


def test_7_01_the_harness_fails_for_local_only() -> None:
    part = small()
    run, count = runner(part, ROWS, SamplerSettings(sampler="local"))
    assert count == 0
    assert np.abs(run(np.zeros(0)) - truth(part, ROWS)).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_7_01_the_harness_fails_for_clipped_weights(scale: float) -> None:
    part = small()
    run, count = runner(part, ROWS, SamplerSettings(n=4, mode="fixed", scale=scale))
    exact = truth(part, ROWS)
    clipped = over_subsets(lambda uniforms: np.minimum(run(uniforms), 1.25 * exact), count)
    assert np.abs(clipped - exact).max() > 0.01


@pytest.mark.parametrize("renormalise", [False, True])
def test_7_01_the_harness_fails_for_ladies(renormalise: bool) -> None:
    part, n = small(), 4
    rows = part.structure.rows(ROWS)
    run, count = runner(part, ROWS, SamplerSettings(sampler="ladies", n=n, renormalise=renormalise))
    exact = truth(part, ROWS)
    weights = np.square(exact).sum(0)[np.unique(rows.columns)]
    assert len(weights) == count > n
    mean, mass = np.zeros_like(exact), 0.0
    for chosen in combinations(range(count), n):
        chance = 0.0
        for order in permutations(weights[list(chosen)]):
            chance += np.prod([w / (weights.sum() - sum(order[:at])) for at, w in enumerate(order)])
        uniforms = np.full(count, BELOW_ONE)
        uniforms[list(chosen)] = 2.0**-53
        drawn = run(uniforms)
        assert set(np.flatnonzero(drawn.any(0))) == set(np.unique(rows.columns)[list(chosen)])
        mean, mass = mean + chance * drawn, mass + chance
    assert abs(mass - 1.0) < EXACT
    assert np.abs(mean - exact).max() > 0.01
    assert np.linalg.norm(mean - exact) > 0.03 * np.linalg.norm(exact)


@pytest.mark.slow
def test_ladies_draws_one_after_the_other_without_replacement() -> None:
    part, n, draws = small(), 2, 1500
    exact = truth(part, ROWS)
    columns = np.flatnonzero(exact.any(0))
    p = np.square(exact).sum(0)[columns]
    p = p / p.sum()
    expected = p + [sum(p[j] * p[i] / (1.0 - p[j]) for j in range(len(p)) if j != i) for i in range(len(p))]
    run, count = runner(part, ROWS, SamplerSettings(sampler="ladies", n=n))
    seen = np.zeros(len(columns))
    for one in range(draws):
        kept = run(Key(one, "test").uniform(count)).any(0)[columns]
        assert kept.sum() == n
        seen += kept
    assert (np.abs(seen / draws - expected) < 4.0 * np.sqrt(expected * (1.0 - expected) / draws)).all()


@pytest.mark.parametrize("sampler", ["skewed", "node", "ladies", "fastgcn"])
def test_kept_own_columns_weigh_one_wherever_they_are_used(sampler: str) -> None:
    part = small()
    settings = SamplerSettings(sampler=sampler, n=1, fanout=1, keep_self=True, mode="fixed", scale=4.0)
    exact, across = truth(part, ROWS), 0
    for seed in range(20):
        found = dense(plan_layer(part, ROWS, settings, 1, Key(seed).uniform), 12)
        assert np.array_equal(found[np.arange(3), ROWS], exact[np.arange(3), ROWS])
        if sampler != "node":
            assert np.array_equal(found[:, ROWS], exact[:, ROWS])
            across += int((found[:, ROWS] > 0.0).sum()) - 3
    assert sampler == "node" or across > 0


@pytest.mark.parametrize("sampler", ["skewed", "node"])
def test_remote_rows_do_not_keep_their_own_columns(sampler: str) -> None:
    part = small()
    rows = np.array([2, 5, 9])
    settings = SamplerSettings(sampler=sampler, n=1, fanout=1, keep_self=True, mode="fixed")
    bare = plan_layer(part, rows, settings, 0, lambda count: np.full(count, BELOW_ONE))
    assert bare.columns.tolist() == [2]


@pytest.mark.slow
def test_7_03_two_linear_layers_are_unbiased_with_independent_draws_and_not_with_shared_ones() -> None:
    nodes, draws = 4, 500
    src, dst = np.triu_indices(nodes, 1)
    adjacency = normalised(src, dst, nodes)
    features = toy_features(nodes, 2, 3) + 1.0
    part = cut(adjacency, toy_owner(nodes, 2), features)[0]
    batch = part.ids
    settings = SamplerSettings(n=1, mode="fixed", scale=2.0)
    p = truth(part, np.arange(nodes))
    weight = np.array([[1.0], [-0.5]])
    expected = (p @ p @ features @ weight)[batch]

    def two(top: Operator, bottom: Operator) -> Dense:
        return dense(top, nodes)[:, top.columns] @ dense(bottom, nodes) @ features @ weight

    apart_, shared = [], []
    for seed in range(draws):
        plan = plan_step(part, batch, settings, Key(seed, "test"))
        apart_.append(two(plan.layers[1], plan.layers[0]))
        top = plan_layer(part, batch, settings, 1, Key(seed, "test").uniform)
        shared.append(two(top, plan_layer(part, top.columns, settings, 0, Key(seed, "test").uniform)))
    off = [np.abs(np.mean(found, 0) - expected) / (np.std(found, 0) / np.sqrt(draws)) for found in (apart_, shared)]
    assert off[0].max() < 4.0
    assert off[1].min() > 4.0
