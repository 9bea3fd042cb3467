"""Tasks on a graph: what an owner has, what it has not, and that the whole of it can be learnt."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from graph_tasks import graph_task

from fedcomp.errors import ConfigError
from fedcomp.graphs.adjacency import Adjacency, FullStructure, HaloStructure
from fedcomp.graphs.base import UnknownStructure
from fedcomp.graphs.partition import METHODS, cut, partition
from fedcomp.graphs.plan import plan_round
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.rng import Key
from fedcomp.tasks import TASKS, graph_sources, registry, sources
from fedcomp.tasks.arrays import to_arrays
from fedcomp.tasks.graph import GraphTask, Karate, train_centrally
from fedcomp.tasks.registry import task_class

GRAPHS = sorted(name for name in TASKS if task_class(name).needs == "graph")


def _small(name: str) -> GraphTask:
    """Return the task for three owners, with a small model, and with stand-ins for files of a tenth of their sizes."""
    options = {"dropout": 0.3} if name == "digits-graph" else {}
    options |= {"parts": 3} if "parts" in task_class(name).OPTIONS else {}
    drawn = graph_sources.citations
    with pytest.MonkeyPatch.context() as smaller:
        # What is kept of them is kept for all.
        smaller.setattr(sources, "_load", sources._load.__wrapped__)
        smaller.setattr(graph_sources, "citations", lambda n, e, d, *rest: drawn(n // 10, e // 10, d // 10, *rest))
        return graph_task(name, hidden=7, **options)


def reachable(*starts: Any) -> Iterator[np.ndarray]:
    """Yield every array that the objects lead to, and what those arrays are views of."""
    waiting, seen = list(starts), set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, type | types.ModuleType):
            continue
        seen.add(id(item))
        if isinstance(item, np.ndarray):
            yield item
            waiting.append(item.base)
        elif isinstance(item, types.FunctionType):
            # What a function refers to besides its module.
            waiting += [cell.cell_contents for cell in item.__closure__ or ()] + [item.__defaults__]
        else:
            waiting += gc.get_referents(item)


def leaked(part: Any, task: GraphTask) -> int:
    """Return how many of a sample of other owners' feature rows stand in memory that ``part`` leads to."""
    mine = {row.tobytes() for row in task.graph.features[part.ids]}
    others = np.flatnonzero(~np.isin(np.arange(task.nodes), part.ids))
    rows = [row for row in (task.graph.features[i].tobytes() for i in others[:: len(others) // 30]) if row not in mine]
    assert len(rows) > 20
    held = [a.tobytes() for a in reachable(part) if a.nbytes >= len(rows[0])]
    return sum(any(row in data for data in held) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["full", "halo"])
def test_nothing_in_a_part_leads_to_another_owners_features(structure: str) -> None:
    task = graph_task("digits-graph", structure=structure)
    parts = [task.shared(4).part(p) for p in range(4)]
    for p, part in enumerate(parts):
        # What a part has worked out by then is part of it.
        sampler = "fastgcn" if structure == "full" else "skewed"
        with contextlib.suppress(UnknownStructure):
            plan_round(part, SamplerSettings(sampler, n=9), seed=0, round=1, steps=1, batch_size=9)
        assert part.features.base is None
        np.testing.assert_array_equal(part.features, task.graph.features[part.ids])
        np.testing.assert_array_equal(part.labels, task.graph.labels[part.ids])
        assert leaked(part, task) == 0
        held = [a for a in reachable(part) if np.issubdtype(a.dtype, np.floating) and a.ndim > 1]
        assert len(held) == 1
        for other in [*parts[:p], *parts[p + 1 :], task.graph]:
            assert not np.shares_memory(part.features, other.features)
            assert not np.shares_memory(part.labels, other.labels)
        labels = [other.labels.tobytes() for other in parts if other is not part]
        assert not any(some in a.tobytes() for a in reachable(part) for some in labels)
        assert not any(np.array_equal(a, task.graph.labels) for a in reachable(part))
        assert part.labels.tobytes() in {a.tobytes() for a in reachable(part)}
        shared = [vars(part.structure)[name] for name in ("adjacency", "owner")] if structure == "full" else []
        for array in (part.features, part.labels, part.ids, *(a for a in reachable(shared) if a.ndim)):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0


def test_the_search_for_leaks_finds_a_shared_array() -> None:
    task = graph_task("digits-graph")
    part = task.shared(4).part(0)
    view = task.graph.features[: len(part.ids)]
    assert leaked(replace(part, features=view), task) > 0

    class Lazy:
        def __init__(self) -> None:
            self.rows = lambda: task.graph.features

    assert leaked(replace(part, structure=Lazy()), task) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_global_generators_are_untouched_by_learning_from_a_graph(name: str) -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    # Options that no test before has: it is built here.
    task = _small(name)
    model = task.model(0)
    task.shared(3)
    train_centrally(task, model, steps=2, lr=0.01)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    first, same, other = (to_arrays(task.model(seed)) for seed in (7, 7, 8))
    assert all(np.array_equal(first[key], same[key]) for key in first)
    assert any(not np.array_equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", GRAPHS)
def test_parts_are_the_graph_and_no_node_twice(name: str) -> None:
    task = _small(name)
    parts = [task.shared(3).part(p) for p in range(3)]
    owner = task.shared(3).owner
    assert sorted(np.concatenate([part.ids for part in parts]).tolist()) == list(range(task.nodes))
    for split, of in ((task.train_split, "train"), (task.test, "test")):
        held = np.concatenate([getattr(part, of) for part in parts])
        assert sorted(held.tolist()) == split.x.tolist()
    for p, part in enumerate(parts):
        assert (part.index, part.parts) == (p, 3)
        assert (owner[part.ids] == p).all()
        assert (np.diff(part.ids) > 0).all()
        assert part.owned(part.train).all()
        np.testing.assert_array_equal(task.client(p, 3).x, part.train)
        np.testing.assert_array_equal(task.client(p, 3).y, part.labels[part.positions(part.train)])
        np.testing.assert_array_equal(task.client_test(p, 3).x, part.test)
        assert task.shared(3).part(p) is part
    assert len({part.digest for part in parts}) == 1
    with pytest.raises(ConfigError, match=r"range\(3\)"):
        task.shared(3).part(3)


def test_boundary_nodes_are_those_that_others_have_in_their_rows() -> None:
    # Directed lists: that a node has neighbours elsewhere does not put it into their rows.
    task = graph_task("cross-partition", nodes=120, parts=3, own=3, telling=2, other=1)
    adjacency, owner = task.adjacency, task.shared(3).owner
    seen = [set(), set(), set()]
    for node in range(120):
        for column in adjacency.columns[adjacency.indptr[node] : adjacency.indptr[node + 1]].tolist():
            if owner[column] != owner[node]:
                seen[owner[column]].add(column)
    assert [task.shared(3).part(p).boundary.tolist() for p in range(3)] == [sorted(nodes) for nodes in seen]
    alone = graph_task("digits-graph").shared(1).part(0)
    assert len(alone.boundary) == 0
    assert len(alone.ids) == 1797


def test_structure_is_all_of_the_graph_or_ones_own_rows() -> None:
    full, halo = graph_task("digits-graph"), graph_task("digits-graph", structure="halo")
    ours, theirs = full.shared(4).part(1), halo.shared(4).part(1)
    assert isinstance(ours.structure, FullStructure)
    assert isinstance(theirs.structure, HaloStructure)
    assert ours.digest == theirs.digest
    mine, near = ours.structure.rows(ours.ids), theirs.structure.rows(theirs.ids)
    np.testing.assert_array_equal(mine.columns, near.columns)
    np.testing.assert_array_equal(mine.values, near.values)
    np.testing.assert_array_equal(theirs.structure.owner_of(near.columns), full.shared(4).owner[near.columns])
    other = full.shared(4).part(0).ids
    assert len(ours.structure.rows(other).ids) == len(other)
    with pytest.raises(UnknownStructure):
        theirs.structure.rows(other)


def test_parts_of_a_validating_task_learn_from_its_nodes_whatever_was_asked_for_before() -> None:
    task = graph_task("karate", cut="greedy")
    before = [task.shared(2).part(index).train for index in range(2)]
    other = task.validating(0.25)
    after = [other.shared(2).part(index) for index in range(2)]
    assert sorted(np.concatenate([part.train for part in after])) == sorted(other.train_split.x)
    assert sorted(np.concatenate([part.test for part in after])) == sorted(other.test.x)
    assert all(task.shared(2).part(index).train is one for index, one in enumerate(before))


def test_the_digest_names_rows_adjacency_and_owners() -> None:
    digest = graph_task("karate").shared(4).digest
    for same in (
        {"hidden": 8},
        {"layers": 3},
        {"structure": "halo"},
        {"dropout": 0.5},
        {"split_seed": 1},
        {"held_out": 0.5},
        {"cut": "metis"},
    ):
        assert graph_task("karate", **same).shared(4).digest == digest
    for other in (
        {"normalisation": "mean"},
        {"self_loops": False},
        {"partition_seed": 1},
        {"cut": "random"},
        {"features": "rows"},
        {"dtype": "float64"},
        {"labels": 2},
    ):
        assert graph_task("karate", **other).shared(4).digest != digest
    assert graph_task("karate").shared(3).digest != digest
    assert graph_task("digits-graph").shared(4).digest != graph_task("digits-graph", k=9).shared(4).digest
    # One neighbour is another one, and nothing else changes.
    task = Karate(graph_task("karate").options)
    columns = task.adjacency.columns.copy()
    columns[task.adjacency.indptr[33]] -= 1
    vars(task)["adjacency"] = replace(task.adjacency, columns=columns)
    assert task.shared(4).digest != digest
    task = Karate(graph_task("karate").options)
    task.data = replace(task.data, used="library")
    assert task.shared(4).digest != digest


def test_owners_who_train_alone_are_sent_to_the_system_that_asks_for_rows() -> None:
    task = graph_task("digits-graph", hidden=8)
    with pytest.raises(ConfigError, match="skewed-gcn"):
        task.train(task.model(0), task.client(0, 4), lr=0.1, key=Key(0, "batches"))
    with pytest.raises(ConfigError, match="skewed-gcn"):
        task.gradient(task.model(0), task.client(0, 4))


@pytest.mark.parametrize("normalisation", ["sym", "mean"])
def test_evaluation_is_the_network_on_the_whole_graph(normalisation: str) -> None:
    task = graph_task("karate", dtype="float64", normalisation=normalisation)
    model = task.model(3)
    near = np.zeros((34, 34))
    near[task.graph.sources, task.graph.targets] = 1
    # A friendship is written once, from either side.
    near += near.T + np.eye(34)
    degree = near.sum(1)
    p = near / np.sqrt(np.outer(degree, degree)) if normalisation == "sym" else near / degree[:, None]
    w1, b1, w2, b2 = (array.astype(np.float64) for array in to_arrays(model).values())
    hidden = np.maximum(p @ task.graph.features @ w1.T + b1, 0)
    logits = (p @ hidden @ w2.T + b2)[task.test.x]
    loss = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(7), task.test.y])
    found = task.evaluate(model, task.test)
    assert found["loss"] == pytest.approx(loss, abs=1e-12)
    assert found["accuracy"] == np.mean(logits.argmax(1) == task.test.y)
    assert found["num-examples"] == 7


def test_owners_metrics_average_to_those_of_the_test_nodes() -> None:
    task = graph_task("digits-graph", hidden=8)
    model = task.model(0)
    whole = task.evaluate(model, task.test)
    found = [task.evaluate(model, task.client_test(p, 5)) for p in range(5)]
    weights = [metrics["num-examples"] for metrics in found]
    for key in ("loss", "accuracy"):
        assert np.average([m[key] for m in found], weights=weights) == pytest.approx(whole[key], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "lr", "least"),
    [("digits-graph", 30, 0.1, 0.95), ("karate", 60, 0.05, 0.85), ("synthetic-graph", 30, 0.1, 0.8)],
)
def test_the_whole_graph_is_learnable(name: str, steps: int, lr: float, least: float) -> None:
    task = graph_task(name, hidden=32)
    model = task.model(0)
    before = task.evaluate(model, task.test)["accuracy"]
    train_centrally(task, model, steps=steps, lr=lr)
    assert before < 0.5
    assert task.evaluate(model, task.test)["accuracy"] >= least


def test_weight_decay_is_part_of_the_gradient() -> None:
    task = graph_task("karate", dtype="float64")
    model = task.model(0)
    before = to_arrays(model)["layers.0.weight"].copy()
    # So much of it that nothing else counts; and Adam's first step is as long in every direction.
    train_centrally(task, model, steps=1, lr=0.01, weight_decay=1e9)
    np.testing.assert_allclose(to_arrays(model)["layers.0.weight"], before - 0.01 * np.sign(before), rtol=1e-4)


@pytest.mark.slow
def test_7_12_the_label_stands_in_other_parts_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    task = graph_task("cross-partition")
    model = task.model(0)
    train_centrally(task, model, steps=50, lr=0.2)
    assert task.evaluate(model, task.test)["accuracy"] >= 0.93
    # The same graph without its edges between owners.
    owner, adjacency = task.shared(4).owner, task.adjacency
    home = np.repeat(owner, np.diff(adjacency.indptr)) == owner[adjacency.columns]
    assert home.sum() == 10 * 1200
    indptr = np.arange(1201) * 10
    local = Adjacency(indptr, adjacency.columns[home], 2 * adjacency.values[home], 1200)
    monkeypatch.setitem(vars(task), "adjacency", local)
    monkeypatch.delitem(vars(task), "whole")
    model = task.model(0)
    train_centrally(task, model, steps=50, lr=0.2)
    assert task.evaluate(model, task.test)["accuracy"] <= 0.5


@pytest.mark.parametrize("parts", [2, 4, 7])
def test_cross_partition_neighbourhoods_are_made_as_said(parts: int) -> None:
    task = graph_task("cross-partition", nodes=600, parts=parts)
    graph, owner = task.graph, task.shared(parts).owner
    targets = graph.targets.reshape(600, 20)
    colour = graph.features[:, :4].argmax(1)
    assert all(len(set(row)) == 20 for row in targets.tolist())
    home = owner[targets] == owner[:, None]
    assert (home.sum(1) == 10).all()
    assert (targets != np.arange(600)[:, None]).all()
    right = (colour[targets] == graph.labels[:, None]) & ~home
    assert right.sum(1).min() >= 7
    # The other three are of any colour: a quarter of them right by chance.
    assert 7.5 < right.sum(1).mean() < 8.0
    assert abs(np.corrcoef(colour, graph.labels)[0, 1]) < 0.1
    assert np.std(graph.features[:, 4:]) == pytest.approx(0.3, rel=0.05)
    np.testing.assert_array_equal(np.diff(task.adjacency.indptr), 20)
    np.testing.assert_allclose(task.adjacency.values, 0.05)
    assert (len(task.train_split), len(task.test)) == (450, 150)
    with pytest.raises(ConfigError, match="parts=5"):
        task.shared(5)


def test_drawn_graphs_are_the_same_everywhere() -> None:
    # Edges, labels and owners come from whole-number arithmetic: any machine has to find these.
    found = []
    for name in ("cross-partition", "synthetic-graph"):
        graph = graph_task(name).graph
        arrays = (graph.sources, graph.targets, graph.labels, graph.owner)
        found.append(hashlib.sha256(b"".join(a.astype("<i8").tobytes() for a in arrays)).hexdigest()[:16])
    assert found == ["c8e852617e9ac5e1", "1471c00702ac4d7c"]


def test_planted_parts_have_the_share_of_cross_edges_that_was_asked_for() -> None:
    task = graph_task("synthetic-graph", nodes=20_000, degree=10, cross=0.1, parts=5)
    graph = task.graph
    assert len(graph.sources) == 100_000
    # A tenth, five standard deviations either way.
    assert np.mean(graph.owner[graph.sources] != graph.owner[graph.targets]) == pytest.approx(0.1, abs=0.005)
    assert np.bincount(graph.owner).tolist() == [4000] * 5
    # Some 180 repeats within the groups of 500 nodes and 30 between them, and 85 loops, are dropped.
    assert 99_600 < task.neighbours.edges < 99_800
    assert task.shared(5).method == "planted"
    assert task.shared(5).cut == pytest.approx(0.1, abs=0.005)
    assert np.mean(graph.labels[graph.sources] == graph.labels[graph.targets]) == pytest.approx(0.475, abs=0.008)
    with pytest.raises(ConfigError, match="option parts=4"):
        graph_task("synthetic-graph", nodes=500, parts=5, cut="planted").shared(4)
    assert graph_task("synthetic-graph", nodes=500, parts=5).shared(4).method == "metis"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("cross-partition", o) for o in ({"parts": 1}, {"nodes": 30}, {"nodes": 100, "telling": 40}, {"nodes": 44})),
        *(("synthetic-graph", o) for o in ({"nodes": 20}, {"parts": 1})),
    ],
)
def test_graphs_that_cannot_be_made_are_refused(name: str, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        graph_task(name, **options)
    assert graph_task("synthetic-graph", nodes=100, parts=1, cross=0).shared(1).owner.tolist() == [0] * 100


@pytest.mark.slow
def test_digits_are_joined_to_their_nearest_in_both_directions() -> None:
    task = graph_task("digits-graph", k=3)
    x = task.graph.features * 16
    distance = ((x[:60, None] - x[None]) ** 2).sum(2)
    distance[np.arange(60), np.arange(60)] = np.inf
    for node in range(60):
        # Of several as far as the third, the smallest ids.
        expected = np.lexsort((np.arange(1797), distance[node]))[:3]
        assert set(task.graph.targets[3 * node : 3 * node + 3]) == set(expected)
    near = task.neighbours
    assert task.graph.features.max() == 1.0
    assert task.graph.features.min() == 0.0
    assert np.diff(near.indptr).min() >= 3
    rows = np.repeat(np.arange(1797), np.diff(near.indptr))
    pairs = set(zip(rows.tolist(), near.ids.tolist(), strict=True))
    assert pairs == set(zip(near.ids.tolist(), rows.tolist(), strict=True))
    mean = graph_task("digits-graph", k=3, normalisation="mean", self_loops=False).adjacency
    np.testing.assert_array_equal(mean.columns, near.ids)
    np.testing.assert_allclose(mean.values, 1 / np.diff(near.indptr)[rows])
    assert graph_task("digits-graph").neighbours.edges == 12339


def test_ties_of_nearest_neighbours_go_to_the_smaller_id() -> None:
    grid = np.array([[0.0], [1.0], [2.0], [1.0], [0.0]])
    sources_, targets = graph_sources.nearest_neighbours(grid, 2)
    assert targets.reshape(5, 2).tolist() == [[1, 4], [0, 3], [1, 3], [1, 0][::-1], [0, 1]]
    assert sources_.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    for k in (0, 5):
        with pytest.raises(ConfigError, match="neighbours of 5 nodes"):
            graph_sources.nearest_neighbours(grid, k)


@pytest.mark.slow
def test_7_13_cuts_of_the_digits() -> None:
    graph = graph_task("digits-graph").neighbours
    found = {method: cut(graph, partition(graph, 4, method)) for method in METHODS}
    assert found["metis"] < 0.10
    assert found["kernighan-lin"] < 0.10
    assert found["greedy"] < 0.30
    assert found["random"] > 0.70


def test_karate_is_networkx_own() -> None:
    import networkx as nx

    club = nx.karate_club_graph()
    four, two = graph_task("karate"), graph_task("karate", labels=2)
    pairs = {tuple(sorted(edge)) for edge in club.edges()}
    assert set(zip(*(ends.tolist() for ends in four.neighbours.pairs()), strict=True)) == pairs
    assert two.graph.labels.tolist() == [int(club.nodes[i]["club"] != "Mr. Hi") for i in range(34)]
    assert (four.classes, two.classes) == (4, 2)
    # The four are pieces of the two, but for one member each way at most.
    assert len(set(zip(four.graph.labels.tolist(), two.graph.labels.tolist(), strict=True))) <= 6
    np.testing.assert_array_equal(four.graph.features, np.eye(34))
    with pytest.raises(ConfigError, match="labels=3"):
        graph_task("karate", labels=3)


@pytest.mark.slow
def test_features_as_given_binary_or_by_rows() -> None:
    given, binary, rows = (
        graph_task("digits-graph", features=kind).graph.features for kind in ("given", "binary", "rows")
    )
    np.testing.assert_array_equal(binary, given > 0)
    np.testing.assert_allclose(rows.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(rows * given.sum(1)[:, None], given, rtol=1e-5)
    assert graph_task("digits-graph", dtype="float64").shared(2).part(0).features.dtype == np.float64
    assert given.dtype == np.float32


def test_splits_are_drawn_by_their_seed_or_public() -> None:
    first, again, other = (graph_task("cora", split_seed=seed, hidden=h) for seed, h in ((0, 8), (0, 9), (1, 8)))
    np.testing.assert_array_equal(first.test.x, again.test.x)
    assert set(first.test.x) != set(other.test.x)
    assert len(first.test) == 542
    assert not set(first.test.x) & set(first.train_split.x)
    public = graph_task("cora", split="public")
    assert (len(public.train_split), len(public.test)) == (140, 1000)
    assert np.bincount(public.train_split.y).tolist() == [20] * 7
    with pytest.raises(ConfigError, match="leaves none"):
        graph_task("karate", held_out=0.99)
    with pytest.raises(ConfigError, match="split='public'"):
        graph_task("karate", split="public")


def test_the_record_says_how_the_graph_was_cut() -> None:
    registry._build.cache_clear()
    task = graph_task("digits-graph")
    assert task.record()["graph"]["partitions"] == {}
    task.shared(4)
    record = task.record()
    assert record["options"]["cut"] == "auto"
    assert record["graph"] == {
        "nodes": 1797,
        "edges": 12339,
        "features": 64,
        "directed": False,
        "partitions": {"4": {"method": "metis", "cut": task.shared(4).cut}},
    }
    assert 0 < task.shared(4).cut < 0.1
