"""Graphs and weights: what every family promises, the known rates, and what is refused."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.gossip.errors import TopologyError
from fedcomp.gossip.topology import (
    Complete,
    DirectedRing,
    Edges,
    Exponential,
    OnePeerExponential,
    RandomDigraph,
    Ring,
    Topology,
    Torus,
    topology_of,
)
from fedcomp.gossip.weights import disconnection_bound, strong_components
from fedcomp.rng import Key

WEIGHTED = "edges:0>1=0.5,1>2=0.25,1>0=0.25,2>0=0.875"
PATH = "edges:0-1,1-2,2-3"
TEXTS = ["ring", "directed-ring", "torus", "exponential", "one-peer", "digraph:0.3", "complete"]
UNDIRECTED = ["ring", "torus", "complete"]


def graphs() -> list[Topology]:
    """Every family at a few sizes, powers of two and others, and the user's own with and without weights."""
    sized = [topology_of(text, n, 7) for text in TEXTS for n in (6, 8, 9)]
    two = [topology_of(text, 2, 7) for text in TEXTS if text != "torus"]
    own = [topology_of(WEIGHTED, 3), topology_of(PATH, 4), topology_of("edges:0-1=0.5,1-2=0.25", 3)]
    return [*sized, *two, *own]


@pytest.mark.slow
@pytest.mark.parametrize("graph", graphs(), ids=lambda g: f"{g.text}-{g.n}")
@pytest.mark.parametrize("gone", [(), (1,)], ids=["all", "one-dead"])
def test_columns_sum_to_one_and_every_node_keeps_a_share(graph: Topology, gone: tuple[int, ...]) -> None:
    alive = frozenset(range(graph.n)) - set(gone) if gone else None
    for t in range(6):
        matrix = graph.mixing_matrix(t, alive, symmetric=False)
        assert max(abs(math.fsum(column) - 1.0) for column in matrix.T) <= 1e-15
        assert (np.diag(matrix) > 0).all()
        assert (matrix >= 0).all()
        for dead in gone:
            assert np.array_equal(matrix[dead], np.eye(graph.n)[dead])
            assert np.array_equal(matrix[:, dead], np.eye(graph.n)[dead])


@pytest.mark.parametrize("graph", [g for g in graphs() if not g.directed], ids=lambda g: f"{g.text}-{g.n}")
@pytest.mark.parametrize("gone", [(), (0,), (0, 1)], ids=["all", "one-dead", "two-dead"])
def test_undirected_weights_are_symmetric_and_doubly_stochastic(graph: Topology, gone: tuple[int, ...]) -> None:
    alive = frozenset(range(graph.n)) - set(gone) if gone else None
    matrix = graph.mixing_matrix(0, alive, symmetric=True)
    assert np.array_equal(matrix, matrix.T)
    assert max(abs(math.fsum(row) - 1.0) for row in matrix) <= 1e-15
    assert (np.diag(matrix) > 0).all()


@pytest.mark.parametrize("graph", graphs(), ids=lambda g: f"{g.text}-{g.n}")
def test_in_neighbours_are_the_other_side_of_out_neighbours(graph: Topology) -> None:
    for t in range(4):
        pairs = {(i, j) for i in range(graph.n) for j in graph.out_neighbours(i, t)}
        assert pairs == {(i, j) for j in range(graph.n) for i in graph.in_neighbours(j, t)}
        assert all(i != j for i, j in pairs)
        assert sorted(pairs) == graph.edges(t)
        assert graph.directed or pairs == {(j, i) for i, j in pairs}
        for i in range(graph.n):
            assert list(graph.column(i, t)) == list(graph.out_neighbours(i, t)) == sorted(graph.column(i, t))
            assert list(graph.row(i, t)) == list(graph.in_neighbours(i, t))


@pytest.mark.parametrize(
    ("graph", "t", "edges"),
    [
        (Ring(4), 0, {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2), (3, 0), (0, 3)}),
        (Ring(2), 0, {(0, 1), (1, 0)}),
        (DirectedRing(3), 5, {(0, 1), (1, 2), (2, 0)}),
        (Exponential(4), 0, {(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 3), (2, 0), (3, 1)}),
        (OnePeerExponential(5), 2, {(i, (i + 4) % 5) for i in range(5)}),
        (OnePeerExponential(5), 3, {(i, (i + 1) % 5) for i in range(5)}),
        (Complete(3), 0, {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}),
        (Torus(4), 0, {(0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (2, 0), (1, 3), (3, 1)}),
    ],
    ids=lambda v: v.text if isinstance(v, Topology) else "",
)
def test_edges_of_small_graphs(graph: Topology, t: int, edges: set[tuple[int, int]]) -> None:
    assert set(graph.edges(t)) == edges


def test_torus_is_as_square_as_possible() -> None:
    assert [Torus(n).sides for n in (4, 6, 12, 16, 30)] == [(2, 2), (2, 3), (3, 4), (4, 4), (5, 6)]
    assert Torus(16).out_neighbours(5) == (1, 4, 6, 9)
    assert Torus(16).out_neighbours(0) == (1, 3, 4, 12)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("start", [0, 1])
def test_7_18_one_peer_exponential_averages_exactly_in_log2_n_rounds(n: int, start: int) -> None:
    graph, rounds = OnePeerExponential(n), int(math.log2(n))
    values = Key(3, "values").uniform(n * 5).reshape(n, 5)
    mixed = values
    for t in range(rounds):
        mixed = graph.mixing_matrix(start + t) @ mixed
    assert np.abs(mixed - values.mean(axis=0)).max() < 1e-14
    assert graph.mixing_rate() == 0.0
    assert graph.averaging_rounds() == graph.averaging_rounds(start=start) == rounds
    if n > 2:
        assert not np.allclose(np.linalg.matrix_power(graph.mixing_matrix(0), rounds), 1 / n, atol=1e-3)


def test_one_peer_exponential_is_not_exact_when_n_is_no_power_of_two() -> None:
    graph = OnePeerExponential(6)
    assert 0.3 < graph.mixing_rate() < 0.9
    assert graph.averaging_rounds() == 6


@pytest.mark.parametrize(
    ("graph", "rate"),
    [
        (Ring(8), 1 / 3 + 2 / 3 * math.cos(math.pi / 4)),
        (DirectedRing(8), math.cos(math.pi / 8)),
        (Exponential(8), 0.5),
        (Torus(16), 0.6),
        (Complete(8), 0.0),
    ],
    ids=lambda v: v.text if isinstance(v, Topology) else "",
)
def test_mixing_rate_is_the_second_eigenvalue_known_in_closed_form(graph: Topology, rate: float) -> None:
    assert graph.mixing_rate() == pytest.approx(rate, abs=1e-12)


def test_measured_rate_of_a_graph_without_period_is_that_of_push_sum_on_it() -> None:
    graph = RandomDigraph(8, 0.3, seed=4)
    values, mass, errors = Key(1, "values").uniform(8), np.ones(8), []
    mean = values.mean()
    for t in range(45):
        values, mass = graph.mixing_matrix(t) @ values, graph.mixing_matrix(t) @ mass
        errors.append(math.log(np.abs(values / mass - mean).max()))
    assert math.exp(np.polyfit(np.arange(45), errors, 1)[0]) == pytest.approx(graph.mixing_rate(), rel=0.1)


def test_averaging_rounds_reach_the_tolerance_and_never_exceed_the_nodes() -> None:
    graph = Exponential(64)
    rounds = graph.averaging_rounds()
    rate = graph.mixing_rate()
    assert rate**rounds < 1e-3 <= rate ** (rounds - 1)
    assert DirectedRing(16).averaging_rounds() == 16
    assert Exponential(8).averaging_rounds() == 8
    assert Complete(9).averaging_rounds() == 1
    assert RandomDigraph(32, 0.3).averaging_rounds() == RandomDigraph(32, 0.3).averaging_rounds()


def test_random_digraph_is_redrawn_and_the_same_for_the_same_seed() -> None:
    one, same, other = RandomDigraph(12, 0.3, seed=5), RandomDigraph(12, 0.3, seed=5), RandomDigraph(12, 0.3, seed=6)
    drawn = [one.edges(t) for t in range(20)]
    assert drawn == [same.edges(t) for t in reversed(range(20))][::-1]
    assert len({tuple(edges) for edges in drawn}) == 20
    assert drawn[3] != other.edges(3)
    share = sum(map(len, drawn)) / (20 * 12 * 11)
    assert share == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / (20 * 132)))


def test_random_digraph_window_is_the_smallest_that_is_connected_but_for_one_in_1e9() -> None:
    for n, p in ((4, 0.5), (8, 0.3), (64, 0.3)):
        window = RandomDigraph(n, p).window
        failing = [disconnection_bound(n, 1 - (1 - p) ** k) for k in (window - 1, window)]
        assert failing[1] <= 1e-9 < failing[0]
    assert RandomDigraph(8, 1.0).window == 1
    # One graph alone is often not connected: the window is what makes it so.
    graph = RandomDigraph(8, 0.3, seed=1)
    assert not all(len(graph.components(t, window=1)) == 1 for t in range(20))
    assert all(len(graph.components(t)) == 1 for t in range(60))


def test_disconnection_bound_holds_and_is_close_for_drawn_graphs() -> None:
    n, p, draws = 6, 0.5, 3000
    drawn = Key(9, "graphs").uniform(draws * n * n).reshape(draws, n, n) < p
    split = sum(len(strong_components([np.flatnonzero(row).tolist() for row in g], range(n))) > 1 for g in drawn)
    bound = disconnection_bound(n, p)
    spread = 4 * math.sqrt(split / draws / draws)
    assert bound / 2 < split / draws <= bound + spread


def test_nodes_without_edges_keep_everything() -> None:
    graph = RandomDigraph(4, 0.2, seed=2)
    alone = [(i, t) for t in range(30) for i in range(4) if not graph.out_neighbours(i, t)]
    assert alone
    assert all(graph.view(i, t, seed=0, directed_algorithm=True).own_share == 1.0 for i, t in alone)


def test_dead_neighbours_get_nothing_and_the_others_more() -> None:
    graph, alive = Exponential(8), frozenset(range(8)) - {1, 4}
    assert graph.column(0) == {1: 0.25, 2: 0.25, 4: 0.25}
    assert graph.column(0, 0, alive) == {2: 0.5}
    assert graph.column(1, 0, alive) == {} == graph.row(1, 0, alive)
    assert graph.row(2, 0, alive) == {0: 0.5, 6: 0.25}
    assert graph.edges(0, alive) == [(i, j) for i, j in graph.edges(0) if {i, j} <= alive]


def test_metropolis_weights_are_those_of_the_living() -> None:
    graph = topology_of("edges:0-1,0-2,0-3,1-2,3-4", 5)
    assert graph.row(0) == {1: 0.25, 2: 0.25, 3: 0.25}
    assert graph.row(4) == {3: 1 / 3}
    assert graph.row(0, 0, {0, 1, 2, 4}) == {1: 1 / 3, 2: 1 / 3}
    assert graph.row(4, 0, {0, 1, 2, 4}) == {}
    # A second set right after the first: nothing of the first is left over.
    assert graph.row(0, 0, frozenset({0, 3, 4})) == {3: 1 / 3}


def test_own_weights_are_renormalised_over_the_living() -> None:
    graph = topology_of(WEIGHTED, 3)
    assert graph.column(1) == {0: 0.25, 2: 0.25}
    assert graph.column(1, 0, {0, 1}) == {0: 0.25 / 0.75}
    assert graph.row(0) == {1: 0.25, 2: 0.875}
    symmetric = topology_of("edges:0-1=0.5,1-2=0.25", 3)
    assert symmetric.row(1) == symmetric.column(1) == {0: 0.5, 2: 0.25}
    assert (
        symmetric.row(1, 0, {0, 1})
        == {0: 0.5}
        == symmetric.view(1, 0, seed=0, alive={0, 1}, directed_algorithm=False).row
    )
    assert symmetric.column(1, 0, {0, 1}) == {0: 0.5 / 0.75}


def test_view_tells_what_the_graph_says() -> None:
    graph, alive = Exponential(8), frozenset(range(8)) - {4}
    view = graph.view(0, 3, seed=11, alive=alive, directed_algorithm=True, dense=True, resync=(2, 4, 5))
    assert (view.node, view.iteration, view.seed, view.dense) == (0, 3, 11, True)
    assert view.column == graph.column(0, 3, alive) == {1: 1 / 3, 2: 1 / 3}
    assert view.row == graph.row(0, 3, alive)
    assert view.resync == {2}
    assert view.own_share == pytest.approx(1 / 3)


def test_view_of_a_symmetric_algorithm_has_equal_row_and_column() -> None:
    graph = topology_of("edges:0-1,0-2,0-3", 4)
    view = graph.view(0, 0, seed=0, directed_algorithm=False)
    assert view.row == view.column == {1: 0.25, 2: 0.25, 3: 0.25}
    assert graph.view(1, 0, seed=0, directed_algorithm=False).row == {0: 0.25}
    pushed = graph.view(1, 0, seed=0, directed_algorithm=True)
    assert pushed.column == {0: 0.5}


def test_components_of_the_living() -> None:
    path = topology_of(PATH, 4)
    assert path.components() == [{0, 1, 2, 3}]
    assert path.components(alive={0, 2, 3}) == [{0}, {2, 3}]
    assert DirectedRing(4).components(alive={0, 1, 3}) == [{0}, {1}, {3}]
    assert OnePeerExponential(8).components() == [set(range(8))]
    assert OnePeerExponential(8).components(2, window=1) == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert len(OnePeerExponential(8).components(0, window=1)) == 1


def algorithm(name: str, *, directed: bool, time_varying: bool) -> Any:
    return cast(Any, SimpleNamespace(name=name, directed=directed, time_varying=time_varying))


def test_check_lets_algorithms_run_where_they_can() -> None:
    push, symmetric = (
        algorithm("push", directed=True, time_varying=True),
        algorithm("mix", directed=False, time_varying=False),
    )
    for graph in graphs():
        graph.check(push)
    for text in UNDIRECTED:
        topology_of(text, 8).check(symmetric)


@pytest.mark.parametrize("text", ["directed-ring", "exponential", "one-peer", "digraph:0.3"])
def test_check_refuses_directed_graphs_for_symmetric_algorithms(text: str) -> None:
    graph = topology_of(text, 8)
    with pytest.raises(TopologyError, match=r"choco needs symmetric weights W.*ring, torus, complete.*sgp"):
        graph.check(algorithm("choco", directed=False, time_varying=True))
    with pytest.raises(TopologyError, match="symmetric"):
        graph.view(0, 0, seed=0, directed_algorithm=False)
    with pytest.raises(TopologyError, match="symmetric"):
        graph.mixing_matrix(0, symmetric=True)


def test_check_refuses_graphs_that_change_for_static_algorithms() -> None:
    with pytest.raises(TopologyError, match=r"static graph \(ring, .*exponential\).*sparse-push"):
        OnePeerExponential(8).check(algorithm("broadcast", directed=True, time_varying=False))


class Broken(Topology):
    """A graph whose weights a test breaks."""

    name = "broken"
    directed = False

    def __init__(self, rows: dict[int, dict[int, float]], columns: dict[int, dict[int, float]] | None = None) -> None:
        super().__init__(3)
        self.rows, self.columns = rows, rows if columns is None else columns

    def targets(self, t: int) -> Any:
        return [list(self.columns.get(i, {})) for i in range(3)]

    def row(self, i: int, t: int = 0, alive: Any = None) -> dict[int, float]:
        return self.rows[i]

    def column(self, i: int, t: int = 0, alive: Any = None) -> dict[int, float]:
        return self.columns[i]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({0: {1: 0.5}, 1: {0: 0.25, 2: 0.25}, 2: {1: 0.25}}, "not symmetric"),
        ({0: {1: 0.5, 2: 0.5}, 1: {0: 0.5}, 2: {0: 0.5}}, "keep a positive share"),
        ({0: {1: 0.75, 2: 0.75}, 1: {0: 0.75}, 2: {0: 0.75}}, "keep a positive share"),
        ({0: {1: -0.25, 2: 0.25}, 1: {0: -0.25}, 2: {0: 0.25}}, "below 0"),
        ({0: {1: math.nan}, 1: {0: math.nan, 2: 0.25}, 2: {1: 0.25}}, "not a number"),
        ({0: {1: 0.5}, 1: {0: 0.5}, 2: {}}, r"2 components: 0, 1; 2"),
    ],
)
def test_validate_refuses_weights_of_any_graph(rows: dict[int, dict[int, float]], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Broken(rows).check(algorithm("mix", directed=False, time_varying=False))


@pytest.mark.parametrize(
    ("text", "n", "message"),
    [
        ("edges:0>1=0.5,0>2=0.5,1>2=0.3,2>0=0.3", 3, "node 0 pushes 1 of itself away; its own share must be positive"),
        ("edges:0>1=0.6,0>2=0.6,1>2=0.3,2>0=0.3", 3, r"node 0 pushes 1\.2"),
        ("edges:0>0=0.5,0>1=0.6,1>0=0.3", 2, r"column 0 sums to 1\.1, not to 1"),
        ("edges:0-1=0.5,1-0=0.25", 2, r"0\.5 and 0\.25; a symmetric W has one"),
        ("edges:0>1,1>2,0>2", 3, r"not strongly connected \(3 components: 0; 1; 2\)"),
        ("edges:0-1,2-3", 4, "not strongly connected"),
        ("edges:0>1,1>0", 3, "2 components"),
        ("edges:0>1,1>3", 3, r"edge 1>3 leaves the vertices 0\.\.2"),
        ("edges:0>0,0>1,1>0", 2, "keeps its own share; give only edges"),
        ("edges:0>1=1,1>0=0.5", 2, r"weight=1\.0 is not valid"),
        ("edges:0>1,1-0", 2, "written in different ways"),
        ("edges:0>1=0.5,1>0", 2, "written in different ways"),
        ("edges:0>1;1>0", 2, "cannot be read; expected edges as in"),
        ("edges:", 2, "cannot be read"),
        ("edges:0>1=0.5.5,1>0=0.5", 2, "no number for a weight"),
        ("rin", 8, "did you mean 'ring'"),
        ("one_peer", 8, "did you mean 'one-peer'"),
        ("exponental", 8, "did you mean 'exponential'"),
        ("ring:3", 8, "takes no parameter"),
        ("digraph", 8, r"digraph:0\.3"),
        ("digraph:x", 8, r"digraph:0\.3"),
        ("digraph:0", 8, r"p=0\.0 is not valid"),
        ("digraph:1.5", 8, r"p must be a number in \(0, 1\]"),
        ("digraph:0.00001", 4, "take a larger p"),
        ("torus", 7, "fills no grid but 1 x 7; use ring, or n=8"),
        ("torus", 2, "n=4"),
        ("ring", 1, "at least 2"),
        ("one-peer", 0, "at least 2"),
    ],
)
def test_graphs_that_cannot_be_are_refused_with_advice(text: str, n: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        topology_of(text, n)


def test_a_window_too_short_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"not strongly connected over iterations .* longer window"):
        RandomDigraph(8, 0.2, seed=0, window=1)


@pytest.mark.slow
@pytest.mark.parametrize("graph", graphs(), ids=lambda g: f"{g.text}-{g.n}")
def test_text_and_configuration_make_the_same_graph_again(graph: Topology) -> None:
    config = json.loads(json.dumps(graph.to_config()))
    for again in (topology_of(config, graph.n), topology_of(graph.text, graph.n, 7), topology_of(graph, graph.n)):
        assert again == graph
        assert hash(again) == hash(graph)
        assert repr(again) == repr(graph)
        assert all(np.array_equal(again.mixing_matrix(t), graph.mixing_matrix(t)) for t in range(3))
    assert graph != topology_of("complete", graph.n + 1)


def test_configurations_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TopologyError, match=r"8 vertices and the run 9 nodes"):
        topology_of(Ring(8).to_config(), 9)
    with pytest.raises(TopologyError, match=r"refused its parameters"):
        topology_of({"name": "ring", "p": 0.5}, 8)
    with pytest.raises(TopologyError, match="unknown graph None"):
        topology_of({}, 8)
    with pytest.raises(TopologyError, match="2 weights for 3 edges"):
        Edges(3, [(0, 1), (1, 2), (2, 0)], [0.5, 0.5])
    with pytest.raises(TopologyError, match="two vertex numbers"):
        Edges(3, [(0, 1, 2)])


def test_undirected_edges_may_be_given_in_both_directions() -> None:
    assert Edges(3, [(0, 1), (1, 0), (1, 2)], directed=False) == topology_of("edges:1-2,0-1", 3)
    # Own weights that agree with the rest say nothing new.
    assert topology_of("edges:0>0=0.5,0>1=0.5,1>0=0.25", 2) == topology_of("edges:0>1=0.5,1>0=0.25", 2)


def test_cost_of_a_view_is_that_of_its_neighbours() -> None:
    """64 nodes, 300 iterations, with and without dead ones: no table is made twice."""
    made = []

    class Counted(Exponential):
        name = "exponential"

        def targets(self, t: int) -> Any:
            made.append(t)
            return super().targets(t)

    graph, alive = Counted(64), frozenset(range(60))
    for t in range(300):
        for i in range(0, 64, 16):
            graph.view(i, t, seed=0, directed_algorithm=True)
            graph.view(i, t, seed=0, directed_algorithm=True, alive=alive)
    assert made == [0]
