"""The normalised adjacency, and the two ways of knowing it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graph_toys import halo

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


ADJACENCY = normalised(*edges(), NODES)
OWNER = (np.arange(NODES) % 3).astype(np.int32)
MINE = np.flatnonzero(OWNER == 1)
FULL, HALO = FullStructure(ADJACENCY, OWNER), halo(ADJACENCY, OWNER, MINE)


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
    assert np.array_equal(dense(found), dense(found).T) == (kind == "sym")
    assert found.values.dtype == np.float64
    order = Key(3, "test/order").bits(len(src)).argsort()
    again = normalised(src[order], dst[order], NODES, kind, self_loops)
    assert np.array_equal(again.values, found.values)
    assert np.array_equal(again.columns, found.columns)


def test_7_14_an_isolated_node_is_its_own_neighbour_or_an_empty_row() -> None:
    none = np.zeros(0, np.int64)
    for kind in ("sym", "mean"):
        with_loops = normalised(none, none, 3, kind).rows(np.array([2]))
        assert (with_loops.columns.tolist(), with_loops.values.tolist()) == ([2], [1.0])
        without = normalised(none, none, 3, kind, self_loops=False).rows(np.array([2, 0]))
        assert (without.indptr.tolist(), len(without.columns)) == ([0, 0, 0], 0)


def test_rows_come_in_the_order_asked_for_with_repeats() -> None:
    whole = dense(ADJACENCY)
    ids = np.array([7, 39, 0, 7, 3])
    rows = ADJACENCY.rows(ids)
    assert rows.columns.dtype == np.int64
    for r, i in enumerate(ids):
        at = slice(rows.indptr[r], rows.indptr[r + 1])
        got = np.zeros(NODES)
        got[rows.columns[at]] = rows.values[at]
        assert np.array_equal(got, whole[i])
        assert (np.diff(rows.columns[at]) > 0).all()
    assert rows.indptr[-1] == len(rows.columns)
    empty = ADJACENCY.rows(np.array([], dtype=np.int64))
    assert empty.indptr.tolist() == [0]
    assert len(empty.values) == 0


@pytest.mark.parametrize("wrong", [[-1], [NODES], [0, 10**12], [[0, 1]], [0.5]])
def test_7_14_ids_out_of_range_are_refused_everywhere(wrong: list[Any]) -> None:
    asked: list[Callable[[Any], Any]] = [ADJACENCY.rows]
    for structure in (FULL, HALO):
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
    rows = ADJACENCY.rows(np.array([30, 2, 17]))
    candidates, positions = columns_of(rows)
    assert np.array_equal(candidates, np.unique(rows.columns))
    assert np.array_equal(candidates[positions], rows.columns)
    assert candidates.dtype == positions.dtype == np.int64
    nothing = columns_of(ADJACENCY.rows(np.array([], np.int64)))
    assert [len(part) for part in nothing] == [0, 0]


def test_a_halo_knows_its_own_rows_and_the_owners_of_their_columns() -> None:
    backwards = MINE[::-1]
    assert same(HALO.rows(backwards), FULL.rows(backwards))
    seen = np.union1d(FULL.rows(MINE).columns, MINE)
    assert np.array_equal(HALO.owner_of(seen), FULL.owner_of(seen))
    assert np.array_equal(HALO.known(np.arange(NODES)), OWNER == 1)
    assert FULL.known(np.arange(NODES)).all()
    unseen = np.setdiff1d(np.arange(NODES), seen)
    assert len(unseen)
    with pytest.raises(UnknownStructure) as owners:
        HALO.owner_of(np.concatenate([MINE, unseen, unseen]))
    assert np.array_equal(owners.value.ids, unseen)
    with pytest.raises(UnknownStructure) as rows:
        HALO.rows(np.array([5, MINE[0], 3, 5]))
    assert rows.value.ids.tolist() == [3, 5]


def test_a_halo_that_was_told_all_rows_is_the_full_structure() -> None:
    told = HALO
    for ids in (np.array([6, 0, 39]), np.array([0, 2, 4]), np.setdiff1d(np.arange(NODES), [2])[::-1]):
        rows = FULL.rows(ids)
        told = told.learn(rows, FULL.owner_of(rows.columns))
        assert told.known(ids).all()
    everything = Key(1, "test/ids").bits(NODES).argsort()
    assert same(told.rows(everything), FULL.rows(everything))
    assert np.array_equal(told.owner_of(everything), FULL.owner_of(everything))
    assert np.array_equal(HALO.known(np.arange(NODES)), OWNER == 1)  # another one was returned


def test_what_a_halo_knows_is_not_replaced_by_what_it_is_told() -> None:
    learnt = AdjacencyRows(np.array([1, 3, 3]), np.array([0, 1, 2, 3]), np.array([1, 3, 3]), np.array([9.0, 8.0, 7.0]))
    after = HALO.learn(learnt, OWNER[learnt.columns])
    assert same(after.rows(np.array([1])), HALO.rows(np.array([1])))
    assert after.rows(np.array([3])).values.tolist() == [8.0]
    later = after.learn(ADJACENCY.rows(np.array([3])), OWNER[ADJACENCY.rows(np.array([3])).columns])
    assert later.rows(np.array([3])).values.tolist() == [8.0]
    every = np.arange(NODES)
    assert np.flatnonzero(later.known(every) & ~HALO.known(every)).tolist() == [3]


def test_rows_that_lie_are_refused() -> None:
    rows = ADJACENCY.rows(np.array([0, 3]))
    learnt = HALO.learn(rows, OWNER[rows.columns])
    seen = np.union1d(HALO.rows(MINE).columns, MINE)
    known = np.intersect1d(rows.columns, seen)
    fresh = np.setdiff1d(rows.columns, seen)
    assert len(known)
    assert len(fresh)
    for node, structure in ((known[0], HALO), (fresh[0], learnt)):
        wrong = OWNER[rows.columns].copy()
        wrong[rows.columns == node] += 1
        with pytest.raises(GraphError, match=f"node {node} is listed in part {OWNER[node] + 1} and in part"):
            structure.learn(rows, wrong)
    with pytest.raises(GraphError, match="one integer per"):
        HALO.learn(rows, OWNER[rows.columns][1:])
    with pytest.raises(GraphError, match="numbered from 0"):
        HALO.learn(rows, np.full(len(rows.columns), -1))
    with pytest.raises(GraphError, match="finite"):
        HALO.learn(AdjacencyRows(rows.ids, rows.indptr, rows.columns, rows.values * np.inf), OWNER[rows.columns])
    own = ADJACENCY.rows(np.array([4, 1]))
    with pytest.raises(GraphError, match="4 stands before 1"):
        HaloStructure(own, OWNER[own.columns], NODES, 1)
    with pytest.raises(GraphError, match="expected one integer per 40 nodes"):
        FullStructure(ADJACENCY, OWNER[:-1])


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
        full, own = FullStructure(adjacency, owner), halo(adjacency, owner, np.flatnonzero(owner == 0))
        ids = np.arange(100) + nodes // 2 - 50  # on both sides of the border
        tracemalloc.start()
        try:
            rows = full.rows(ids)
            learnt = own.learn(rows, full.owner_of(rows.columns))
            assert same(learnt.rows(ids), rows)
            learnt.owner_of(columns_of(rows)[0])
            assert learnt.known(ids).all()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(2_000)  # what is made once, on the first call
    assert peak(200_000) < 1.2 * peak(2_000)
