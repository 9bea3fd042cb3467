"""The normalised adjacency, and the two ways of knowing it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.graphs.adjacency import Adjacency, FullStructure, HaloStructure, check_rows, columns_of, normalised
from fedcomp.graphs.base import AdjacencyRows, GraphError, UnknownStructure
from fedcomp.rng import Key

NODES = 40


def edges(nodes: int = NODES, count: int = 120, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Directed edges with repeats and loops among all nodes but the last three."""
    bits = Key(seed, "test/edges").bits(2 * count) % np.uint64(nodes - 3)
    return bits[:count].astype(np.int64), bits[count:].astype(np.int64)


def dense(adjacency: Adjacency) -> np.ndarray:
    whole = np.zeros((adjacency.nodes, adjacency.nodes))
    for i in range(adjacency.nodes):
        at = slice(adjacency.indptr[i], adjacency.indptr[i + 1])
        whole[i, adjacency.columns[at]] = adjacency.values[at]
    return whole


def formula(src: np.ndarray, dst: np.ndarray, nodes: int, kind: str, self_loops: bool) -> np.ndarray:
    a = np.zeros((nodes, nodes))
    a[src, dst] = 1.0
    if kind == "sym":
        a = np.maximum(a, a.T)
    if self_loops:
        np.fill_diagonal(a, 1.0)
    degree = a.sum(1)
    inverse = np.divide(1.0, degree, out=np.zeros(nodes), where=degree > 0)
    return a * np.sqrt(inverse)[:, None] * np.sqrt(inverse)[None, :] if kind == "sym" else a * inverse[:, None]


def halves(adjacency: Adjacency, owner: np.ndarray, index: int) -> HaloStructure:
    own = adjacency.rows(np.flatnonzero(owner == index))
    return HaloStructure(own, owner[own.columns], adjacency.nodes, index)


def same(a: AdjacencyRows, b: AdjacencyRows) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("ids", "indptr", "columns", "values"))


@pytest.mark.parametrize("kind", ["sym", "mean"])
@pytest.mark.parametrize("self_loops", [True, False])
def test_the_adjacency_is_its_formula(kind: str, self_loops: bool) -> None:
    src, dst = edges()
    assert len(np.unique(src * NODES + dst)) < len(src)  # parallel edges
    assert (src == dst).any()  # loops
    found = normalised(src, dst, NODES, kind, self_loops)
    np.testing.assert_allclose(dense(found), formula(src, dst, NODES, kind, self_loops), rtol=0, atol=1e-15)
    assert found.values.dtype == np.float64
    order = Key(3, "test/order").bits(len(src)).argsort()
    again = normalised(src[order], dst[order], NODES, kind, self_loops)
    assert np.array_equal(again.values, found.values)
    assert np.array_equal(again.columns, found.columns)


def test_sym_is_exactly_symmetric_and_mean_keeps_directions() -> None:
    src, dst = np.array([0, 1, 2, 0]), np.array([1, 2, 3, 3])
    whole = dense(normalised(src, dst, 5, "sym"))
    assert np.array_equal(whole, whole.T)
    mean = dense(normalised(src, dst, 5, "mean", self_loops=False))
    assert mean[0].tolist() == [0, 0.5, 0, 0.5, 0]
    assert mean[3].tolist() == [0, 0, 0, 0, 0]
    np.testing.assert_allclose(dense(normalised(src, dst, 5, "mean")).sum(1), 1.0, rtol=1e-15)


def test_7_14_an_isolated_node_is_its_own_neighbour_or_an_empty_row() -> None:
    none = np.zeros(0, np.int64)
    for kind in ("sym", "mean"):
        with_loops = normalised(none, none, 3, kind).rows(np.array([2]))
        assert (with_loops.columns.tolist(), with_loops.values.tolist()) == ([2], [1.0])
        without = normalised(none, none, 3, kind, self_loops=False).rows(np.array([2, 0]))
        assert (without.indptr.tolist(), len(without.columns)) == ([0, 0, 0], 0)


def test_rows_come_in_the_order_asked_for_with_repeats() -> None:
    adjacency = normalised(*edges(), NODES)
    whole = dense(adjacency)
    ids = np.array([7, 39, 0, 7, 3])
    rows = adjacency.rows(ids)
    assert rows.columns.dtype == np.int64
    for r, i in enumerate(ids):
        at = slice(rows.indptr[r], rows.indptr[r + 1])
        got = np.zeros(NODES)
        got[rows.columns[at]] = rows.values[at]
        assert np.array_equal(got, whole[i])
        assert (np.diff(rows.columns[at]) > 0).all()
    assert rows.indptr[-1] == len(rows.columns)
    empty = adjacency.rows(np.array([], dtype=np.int64))
    assert empty.indptr.tolist() == [0]
    assert len(empty.values) == 0


@pytest.mark.parametrize("wrong", [[-1], [NODES], [0, 10**12], [[0, 1]], [0.5]])
def test_7_14_ids_out_of_range_are_refused_everywhere(wrong: list[Any]) -> None:
    adjacency = normalised(*edges(), NODES)
    owner = (np.arange(NODES) % 3).astype(np.int32)
    asked: list[Callable[[Any], Any]] = [adjacency.rows]
    for structure in (FullStructure(adjacency, owner), halves(adjacency, owner, 1)):
        asked += [structure.rows, structure.owner_of, structure.known]
    for ask in asked:
        with pytest.raises(GraphError):
            ask(np.array(wrong))
    if np.ndim(wrong) == 1 and isinstance(wrong[0], int):
        with pytest.raises(GraphError, match="not of the graph's 40 nodes"):
            normalised(np.array(wrong), np.array(wrong), NODES)


@pytest.mark.parametrize(
    ("change", "message"), [({"kind": "symmetric"}, "did you mean"), ({"nodes": 0}, "nodes=0 is not valid")]
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"nodes": 3, "kind": "sym"} | change
    with pytest.raises(ConfigError, match=message):
        normalised(np.array([0]), np.array([1]), **arguments)
    with pytest.raises(GraphError, match="as many"):
        normalised(np.array([0]), np.array([1, 2]), 3)


@pytest.mark.parametrize(
    ("indptr", "columns", "values", "message"),
    [
        ([0, 1], [0], [1.0], "expected 3"),
        ([0, 2, 1], [0], [1.0], "negative length"),
        ([0, 1, 3], [0, 1], [1.0, 1.0], "2 columns"),
        ([0, 1, 2], [0, 1], [1.0], "1 values"),
        ([0, 1, 2], [0, 2], [1.0, 1.0], "graph of 2 nodes"),
        ([0, 1, 2], [0, -1], [1.0, 1.0], "graph of 2 nodes"),
        ([0, 2, 2], [1, 0], [1.0, 1.0], "ascending"),
        ([0, 0, 2], [1, 1], [1.0, 1.0], "without repeats"),
        ([0, 1, 2], [0, 1], [1.0, np.nan], "finite"),
        ([0, 1, 2], [0, 1], [1.0, 0.0], "not 0"),
    ],
)
def test_arrays_that_are_no_matrix_are_refused(
    indptr: list[int], columns: list[int], values: list[float], message: str
) -> None:
    arrays = np.array(indptr), np.array(columns), np.array(values)
    with pytest.raises(GraphError, match=message):
        Adjacency(*arrays, 2)
    with pytest.raises(GraphError, match=message):
        check_rows(AdjacencyRows(np.array([0, 1]), *arrays), 2)


def test_columns_may_go_down_between_rows_and_rows_may_be_empty() -> None:
    rows = AdjacencyRows(np.array([4, 2, 3, 0]), np.array([0, 2, 2, 3, 3]), np.array([1, 4, 0]), np.ones(3))
    check_rows(rows, 5)


def test_candidates_are_ascending_and_positions_lead_back() -> None:
    rows = normalised(*edges(), NODES).rows(np.array([30, 2, 17]))
    candidates, positions = columns_of(rows)
    assert np.array_equal(candidates, np.unique(rows.columns))
    assert np.array_equal(candidates[positions], rows.columns)
    assert candidates.dtype == positions.dtype == np.int64
    nothing = columns_of(normalised(*edges(), NODES).rows(np.array([], np.int64)))
    assert [len(part) for part in nothing] == [0, 0]


def test_a_halo_knows_its_own_rows_and_the_owners_of_their_columns() -> None:
    adjacency = normalised(*edges(), NODES)
    owner = (np.arange(NODES) % 3).astype(np.int32)
    full, halo = FullStructure(adjacency, owner), halves(adjacency, owner, 1)
    mine = np.flatnonzero(owner == 1)
    backwards = mine[::-1]
    assert same(halo.rows(backwards), full.rows(backwards))
    seen = np.union1d(full.rows(mine).columns, mine)
    assert np.array_equal(halo.owner_of(seen), full.owner_of(seen))
    assert np.array_equal(halo.known(np.arange(NODES)), owner == 1)
    assert full.known(np.arange(NODES)).all()
    unseen = np.setdiff1d(np.arange(NODES), seen)
    assert len(unseen)
    with pytest.raises(UnknownStructure) as owners:
        halo.owner_of(np.concatenate([mine, unseen, unseen]))
    assert np.array_equal(owners.value.ids, unseen)
    with pytest.raises(UnknownStructure) as rows:
        halo.rows(np.array([5, mine[0], 3, 5]))
    assert rows.value.ids.tolist() == [3, 5]


def test_a_halo_that_was_told_all_rows_is_the_full_structure() -> None:
    adjacency = normalised(*edges(), NODES)
    owner = (np.arange(NODES) % 3).astype(np.int32)
    full = FullStructure(adjacency, owner)
    first = halves(adjacency, owner, 1)
    halo = first
    for ids in (np.array([6, 0, 39]), np.array([0, 2, 4]), np.setdiff1d(np.arange(NODES), [2])[::-1]):
        rows = full.rows(ids)
        halo = halo.learn(rows, full.owner_of(rows.columns))
        assert halo.known(ids).all()
    everything = Key(1, "test/ids").bits(NODES).argsort()
    assert same(halo.rows(everything), full.rows(everything))
    assert np.array_equal(halo.owner_of(everything), full.owner_of(everything))
    assert np.array_equal(first.known(np.arange(NODES)), owner == 1)  # another one was returned


def test_what_a_halo_knows_is_not_replaced_by_what_it_is_told() -> None:
    adjacency = normalised(*edges(), NODES)
    owner = (np.arange(NODES) % 3).astype(np.int32)
    halo = halves(adjacency, owner, 1)
    learnt = AdjacencyRows(np.array([1, 3, 3]), np.array([0, 1, 2, 3]), np.array([1, 3, 3]), np.array([9.0, 8.0, 7.0]))
    after = halo.learn(learnt, owner[learnt.columns])
    assert same(after.rows(np.array([1])), halo.rows(np.array([1])))
    assert after.rows(np.array([3])).values.tolist() == [8.0]
    later = after.learn(adjacency.rows(np.array([3])), owner[adjacency.rows(np.array([3])).columns])
    assert later.rows(np.array([3])).values.tolist() == [8.0]
    every = np.arange(NODES)
    assert np.flatnonzero(later.known(every) & ~halo.known(every)).tolist() == [3]


def test_rows_that_lie_are_refused() -> None:
    adjacency = normalised(*edges(), NODES)
    owner = (np.arange(NODES) % 3).astype(np.int32)
    halo = halves(adjacency, owner, 1)
    rows = adjacency.rows(np.array([0, 3]))
    learnt = halo.learn(rows, owner[rows.columns])
    seen = np.union1d(halo.rows(np.flatnonzero(owner == 1)).columns, np.flatnonzero(owner == 1))
    known = np.intersect1d(rows.columns, seen)
    fresh = np.setdiff1d(rows.columns, seen)
    assert len(known)
    assert len(fresh)
    for node, structure in ((known[0], halo), (fresh[0], learnt)):
        wrong = owner[rows.columns].copy()
        wrong[rows.columns == node] += 1
        with pytest.raises(GraphError, match=f"node {node} is listed in part {owner[node] + 1} and in part"):
            structure.learn(rows, wrong)
    with pytest.raises(GraphError, match="one integer per"):
        halo.learn(rows, owner[rows.columns][1:])
    with pytest.raises(GraphError, match="numbered from 0"):
        halo.learn(rows, np.full(len(rows.columns), -1))
    with pytest.raises(GraphError, match="finite"):
        halo.learn(AdjacencyRows(rows.ids, rows.indptr, rows.columns, rows.values * np.inf), owner[rows.columns])
    own = adjacency.rows(np.array([4, 1]))
    with pytest.raises(GraphError, match="4 stands before 1"):
        HaloStructure(own, owner[own.columns], NODES, 1)
    with pytest.raises(GraphError, match="expected one integer per 40 nodes"):
        FullStructure(adjacency, owner[:-1])


def ring(nodes: int) -> Adjacency:
    """A ring with loops, its arrays written down."""
    i = np.arange(nodes)
    columns = np.sort(np.stack([(i - 1) % nodes, i, (i + 1) % nodes], 1), 1).ravel()
    return Adjacency(3 * np.arange(nodes + 1), columns.astype(np.int32), np.full(3 * nodes, 1 / 3), nodes)


def test_what_is_asked_for_costs_the_same_in_a_graph_a_hundred_times_as_large() -> None:
    """Memory that numpy asks for while rows are read and learnt: nothing of the size of the graph or of the part."""

    def peak(nodes: int) -> int:
        adjacency = ring(nodes)
        owner = (np.arange(nodes) >= nodes // 2).astype(np.int32)
        full, halo = FullStructure(adjacency, owner), halves(adjacency, owner, 0)
        ids = np.arange(100) + nodes // 2 - 50  # on both sides of the border
        tracemalloc.start()
        try:
            rows = full.rows(ids)
            learnt = halo.learn(rows, full.owner_of(rows.columns))
            assert same(learnt.rows(ids), rows)
            learnt.owner_of(columns_of(rows)[0])
            assert learnt.known(ids).all()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(2_000)  # what is made once, on the first call
    assert peak(200_000) < 1.2 * peak(2_000)
