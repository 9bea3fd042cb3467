"""Sharing out a graph: one owner per node, even sizes, few edges cut, and the same again."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.errors import ConfigError, MissingExtra
from fedcomp.graphs import partition as sharing
from fedcomp.graphs.base import GraphError
from fedcomp.graphs.partition import METHODS, Neighbours, available, balance, cut, partition
from fedcomp.rng import Key

NOBODY = np.zeros(0, np.int64)


def ring(nodes: int) -> Neighbours:
    here = np.arange(nodes)
    return Neighbours.of(here, (here + 1) % nodes, nodes)


def cliques(count: int, size: int) -> Neighbours:
    """Complete graphs of ``size`` nodes each, ids mixed, with one edge from each to the next."""
    nodes = count * size
    name = np.argsort(Key(0, "test/cliques").bits(nodes), kind="stable")
    first, second = np.triu_indices(size, 1)
    start = np.arange(count) * size
    inner = [(start[:, None] + ends).reshape(-1) for ends in (first, second)]
    link = [start, (start + size) % nodes]
    source, target = (name[np.concatenate(ends)] for ends in zip(inner, link, strict=True))
    return Neighbours.of(source, target, nodes)


def loose(nodes: int) -> Neighbours:
    """Three components of unlike size and density, and a quarter of the nodes without any edge."""
    u = Key(1, "test/loose").uniform(4 * nodes).reshape(2, 2 * nodes)
    third = nodes // 4
    parts = [(u * third).astype(np.int64)[:, : 2 * nodes // (i + 1)] + i * third for i in range(3)]
    source, target = np.concatenate(parts, axis=1)
    return Neighbours.of(source, target, nodes)


def star(nodes: int) -> Neighbours:
    return Neighbours.of(np.zeros(nodes - 1, np.int64), np.arange(1, nodes), nodes)


GRAPHS = {
    "ring": ring(103),
    "cliques": cliques(6, 15),
    "loose": loose(200),
    "star": star(61),
    "no edges": Neighbours.of(NOBODY, NOBODY, 50),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", GRAPHS)
def test_7_13_every_node_has_one_owner_and_sizes_are_within_five_percent(name: str, method: str) -> None:
    graph = GRAPHS[name]
    for parts in (1, 2, 3, 4, 7, 10, 25, 50):
        owner = partition(graph, parts, method, seed=3)
        assert owner.dtype == np.int32
        assert owner.shape == (graph.nodes,)
        sizes = np.bincount(owner, minlength=parts)
        assert len(sizes) == parts
        assert sizes.min() >= 1
        mean = graph.nodes / parts
        # Five per cent, or the next whole node where that is less than one.
        assert sizes.min() >= np.floor(0.95 * mean)
        assert sizes.max() <= np.ceil(1.05 * mean)


@pytest.mark.parametrize("method", ["metis", "kernighan-lin"])
def test_cliques_are_not_torn(method: str) -> None:
    graph = cliques(4, 12)
    for seed in range(3):
        # One edge leads from each clique to the next.
        assert cut(graph, partition(graph, 4, method, seed=seed)) == pytest.approx(4 / graph.edges)


@pytest.mark.parametrize("method", METHODS)
def test_the_seed_alone_decides_and_no_global_generator_is_read(method: str) -> None:
    graph = loose(120)
    first = partition(graph, 3, method, seed=5)
    state, numpys = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    np.testing.assert_array_equal(partition(graph, 3, method, seed=5), first)
    # Whoever reads a generator moves it.
    assert random.getstate() == state
    assert np.array_equal(np.random.get_state()[1], numpys)  # noqa: NPY002
    assert any((partition(graph, 3, method, seed=seed) != first).any() for seed in range(6, 12))


def test_edges_are_undirected_without_loops_and_repeats() -> None:
    graph = Neighbours.of(np.array([0, 1, 1, 3, 3]), np.array([1, 0, 2, 3, 0]), 5)
    assert [graph.ids[a:b].tolist() for a, b in zip(graph.indptr[:-1], graph.indptr[1:], strict=True)] == [
        [1, 3],
        [0, 2],
        [1],
        [0],
        [],
    ]
    assert graph.edges == 3
    assert [ends.tolist() for ends in graph.pairs()] == [[0, 0, 1], [1, 3, 2]]


def test_cut_is_the_share_of_edges_between_owners() -> None:
    graph = ring(8)
    assert cut(graph, np.arange(8) // 4) == 2 / 8
    assert cut(graph, np.arange(8) % 2) == 1.0
    assert cut(Neighbours.of(NOBODY, NOBODY, 3), np.arange(3)) == 0.0


@pytest.mark.parametrize("ends", [([0], [5]), ([-1], [0]), ([0, 1], [1])])
def test_edges_out_of_range_are_refused(ends: Any) -> None:
    with pytest.raises(GraphError):
        Neighbours.of(np.array(ends[0]), np.array(ends[1]), 5)


@pytest.mark.parametrize("parts", [0, -1, 9, True, 2.0])
def test_impossible_numbers_of_parts_are_refused(parts: Any) -> None:
    with pytest.raises(ConfigError, match="8 nodes cannot be shared"):
        partition(ring(8), parts)


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'metis'"):
        partition(ring(8), 2, "metys")


def _without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    found = sharing.importlib.util.find_spec
    monkeypatch.setattr(sharing.importlib.util, "find_spec", lambda name: None if name in missing else found(name))


def test_auto_is_the_best_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = loose(80)
    assert available(10**7) == "metis"
    np.testing.assert_array_equal(partition(graph, 3), partition(graph, 3, "metis"))
    _without(monkeypatch, "pymetis")
    assert (available(5000), available(5001)) == ("kernighan-lin", "greedy")
    np.testing.assert_array_equal(partition(graph, 3), partition(graph, 3, "kernighan-lin"))
    _without(monkeypatch, "pymetis", "networkx")
    assert available(50) == "greedy"
    np.testing.assert_array_equal(partition(graph, 3), partition(graph, 3, "greedy"))


@pytest.mark.parametrize(("method", "library"), [("metis", "pymetis"), ("kernighan-lin", "networkx")])
def test_a_method_without_its_library_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, method: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra, match=rf"needs {library}.*\.\[graph\]"):
        partition(ring(8), 2, method)


def test_balance_moves_the_excess_and_those_that_lose_least() -> None:
    # Parts 0 and 1 are rings of 30 and 10; node 0 and 1 of the large one have three neighbours in the small one.
    here, there = np.arange(30), 30 + np.arange(10)
    source = np.concatenate([here, there, np.repeat([0, 1], 3)])
    target = np.concatenate([(here + 1) % 30, 30 + (there - 29) % 10, 30 + np.arange(6)])
    graph = Neighbours.of(source, target, 40)
    owner = (np.arange(40) >= 30).astype(np.int32)
    moved = balance(graph, owner, 2)
    assert np.bincount(moved).tolist() == [20, 20]
    assert (moved[[0, 1]] == 1).all()
    assert (moved != owner).sum() == 10
    assert not owner[:30].any()


@pytest.mark.slow
@given(st.lists(st.integers(0, 4), min_size=5, max_size=60))
def test_balance_ends_wherever_it_starts(start: list[int]) -> None:
    graph = ring(len(start))
    owner = balance(graph, np.array(start, np.int32), 5)
    low, high = sharing.bounds(len(start), 5)
    assert low >= 1
    assert all(low <= size <= high for size in np.bincount(owner, minlength=5))


def test_what_is_even_enough_is_left_alone() -> None:
    owner = np.repeat([0, 1, 2, 3], [104, 96, 100, 100]).astype(np.int32)
    np.testing.assert_array_equal(balance(ring(400), owner, 4), owner)
    assert sharing.bounds(400, 4) == (95, 105)
    assert sharing.bounds(34, 4) == (8, 9)
