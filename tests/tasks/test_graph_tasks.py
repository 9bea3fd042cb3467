"""Tasks on a graph: what an owner has, what it has not, and that the whole of it can be learnt."""

from __future__ import annotations

import gc
import hashlib
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graph_planetoid as written
import numpy as np
import pytest
import torch

from fedcomp.errors import ConfigError
from fedcomp.graphs.adjacency import Adjacency, FullStructure, HaloStructure
from fedcomp.graphs.base import UnknownStructure
from fedcomp.graphs.partition import METHODS, cut, partition
from fedcomp.rng import Key
from fedcomp.tasks import TASKS, get_task, graph_sources, planetoid, registry, sources
from fedcomp.tasks.arrays import to_arrays
from fedcomp.tasks.graph import GraphTask
from fedcomp.tasks.planetoid import PlanetoidError
from fedcomp.tasks.registry import task_class
from fedcomp.tasks.sources import DataMismatch, DataWarning

GRAPHS = sorted(name for name in TASKS if task_class(name).needs == "graph")
FILES = ("cora", "citeseer", "cora-ml")


def _task(name: str, **options: Any) -> GraphTask:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        task = get_task(name, **options)
    assert isinstance(task, GraphTask)
    return task


def _small(name: str) -> GraphTask:
    """Return the task for three owners, with a small model."""
    dropout = {"dropout": 0.3} if name == "digits-graph" else {}
    return _task(name, hidden=7, **dropout, **({"parts": 3} if "parts" in task_class(name).OPTIONS else {}))


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


@pytest.mark.parametrize("structure", ["full", "halo"])
def test_nothing_in_a_part_leads_to_another_owners_features(structure: str) -> None:
    task = _task("digits-graph", structure=structure)
    parts = [task.part(p, 4) for p in range(4)]
    for p, part in enumerate(parts):
        assert part.features.base is None
        np.testing.assert_array_equal(part.features, task.graph.features[part.ids])
        np.testing.assert_array_equal(part.labels, task.graph.labels[part.ids])
        assert leaked(part, task) == 0
        held = [a for a in reachable(part) if np.issubdtype(a.dtype, np.floating) and a.ndim > 1]
        assert len(held) == 1
        for other in [*parts[:p], *parts[p + 1 :], task.graph]:
            assert not np.shares_memory(part.features, other.features)
            assert not np.shares_memory(part.labels, other.labels)
        with pytest.raises(ValueError, match="read-only"):
            part.features[0] = 0


def test_the_search_for_leaks_finds_a_shared_array() -> None:
    from dataclasses import replace

    task = _task("digits-graph")
    part = task.part(0, 4)
    view = task.graph.features[: len(part.ids)]
    assert leaked(replace(part, features=view), task) > 0

    class Lazy:
        def __init__(self) -> None:
            self.rows = lambda: task.graph.features

    assert leaked(replace(part, structure=Lazy()), task) > 0


@pytest.mark.parametrize("name", GRAPHS)
def test_global_generators_are_untouched_by_learning_from_a_graph(name: str) -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    # Options that no test before has: it is built here.
    task = _small(name)
    model = task.model(0)
    task.owner(3)
    task.train_centrally(model, steps=2, lr=0.01)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    first, same, other = (to_arrays(task.model(seed)) for seed in (7, 7, 8))
    assert all(np.array_equal(first[key], same[key]) for key in first)
    assert any(not np.array_equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", GRAPHS)
def test_parts_are_the_graph_and_no_node_twice(name: str) -> None:
    task = _small(name)
    parts = [task.part(p, 3) for p in range(3)]
    owner = task.owner(3)
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
        assert task.part(p, 3) is part
    assert len({part.digest for part in parts}) == 1
    with pytest.raises(ConfigError, match=r"range\(3\)"):
        task.part(3, 3)


def test_boundary_nodes_are_those_that_others_have_in_their_rows() -> None:
    # Directed lists: that a node has neighbours elsewhere does not put it into their rows.
    task = _task("cross-partition", nodes=120, parts=3, own=3, telling=2, other=1)
    adjacency, owner = task.adjacency, task.owner(3)
    seen = [set(), set(), set()]
    for node in range(120):
        for column in adjacency.columns[adjacency.indptr[node] : adjacency.indptr[node + 1]].tolist():
            if owner[column] != owner[node]:
                seen[owner[column]].add(column)
    assert [task.part(p, 3).boundary.tolist() for p in range(3)] == [sorted(nodes) for nodes in seen]
    alone = _task("digits-graph").part(0, 1)
    assert len(alone.boundary) == 0
    assert len(alone.ids) == 1797


def test_structure_is_all_of_the_graph_or_ones_own_rows() -> None:
    full, halo = _task("digits-graph"), _task("digits-graph", structure="halo")
    ours, theirs = full.part(1, 4), halo.part(1, 4)
    assert isinstance(ours.structure, FullStructure)
    assert isinstance(theirs.structure, HaloStructure)
    assert ours.digest == theirs.digest
    mine, near = ours.structure.rows(ours.ids), theirs.structure.rows(theirs.ids)
    np.testing.assert_array_equal(mine.columns, near.columns)
    np.testing.assert_array_equal(mine.values, near.values)
    np.testing.assert_array_equal(theirs.structure.owner_of(near.columns), full.owner(4)[near.columns])
    other = full.part(0, 4).ids
    assert len(ours.structure.rows(other).ids) == len(other)
    with pytest.raises(UnknownStructure):
        theirs.structure.rows(other)


def test_the_digest_names_rows_adjacency_and_owners() -> None:
    digest = _task("karate").digest(4)
    for same in ({"hidden": 8}, {"layers": 3}, {"structure": "halo"}, {"dropout": 0.5}):
        assert _task("karate", **same).digest(4) == digest
    for other in (
        {"normalisation": "mean"},
        {"self_loops": False},
        {"partition_seed": 1},
        {"cut": "random"},
        {"features": "rows"},
        {"dtype": "float64"},
        {"labels": 2},
    ):
        assert _task("karate", **other).digest(4) != digest
    assert _task("karate").digest(3) != digest
    assert _task("digits-graph").digest(4) != _task("digits-graph", k=9).digest(4)


def test_owners_who_train_alone_are_sent_to_the_system_that_asks_for_rows() -> None:
    task = _task("digits-graph", hidden=8)
    with pytest.raises(ConfigError, match="skewed-gcn"):
        task.train(task.model(0), task.client(0, 4), lr=0.1, key=Key(0, "batches"))


@pytest.mark.parametrize("normalisation", ["sym", "mean"])
def test_evaluation_is_the_network_on_the_whole_graph(normalisation: str) -> None:
    task = _task("karate", dtype="float64", normalisation=normalisation)
    model = task.model(3)
    near = np.zeros((34, 34))
    near[task.graph.sources, task.graph.targets] = 1
    if normalisation == "sym":
        near = near + near.T
    near += np.eye(34)
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
    task = _task("digits-graph", hidden=8)
    model = task.model(0)
    whole = task.evaluate(model, task.test)
    found = [task.evaluate(model, task.client_test(p, 5)) for p in range(5)]
    weights = [metrics["num-examples"] for metrics in found]
    for key in ("loss", "accuracy"):
        assert np.average([m[key] for m in found], weights=weights) == pytest.approx(whole[key], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "steps", "lr", "least"),
    [("digits-graph", 30, 0.1, 0.95), ("karate", 60, 0.05, 0.85), ("synthetic-graph", 30, 0.1, 0.8)],
)
def test_the_whole_graph_is_learnable(name: str, steps: int, lr: float, least: float) -> None:
    task = _task(name, hidden=32)
    model = task.model(0)
    before = task.evaluate(model, task.test)["accuracy"]
    task.train_centrally(model, steps=steps, lr=lr)
    assert before < 0.5
    assert task.evaluate(model, task.test)["accuracy"] >= least


def test_7_12_the_label_stands_in_other_parts_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    task = _task("cross-partition")
    model = task.model(0)
    task.train_centrally(model, steps=50, lr=0.2)
    assert task.evaluate(model, task.test)["accuracy"] >= 0.93
    # The same graph without its edges between owners.
    registry._build.cache_clear()
    alone = _task("cross-partition")
    owner, adjacency = alone.owner(4), alone.adjacency
    home = np.repeat(owner, np.diff(adjacency.indptr)) == owner[adjacency.columns]
    assert home.sum() == 10 * 1200
    indptr = np.arange(1201) * 10
    local = Adjacency(indptr, adjacency.columns[home], 2 * adjacency.values[home], 1200)
    monkeypatch.setitem(vars(alone), "adjacency", local)
    model = alone.model(0)
    alone.train_centrally(model, steps=50, lr=0.2)
    assert alone.evaluate(model, alone.test)["accuracy"] <= 0.5
    registry._build.cache_clear()


@pytest.mark.parametrize("parts", [2, 4, 7])
def test_cross_partition_neighbourhoods_are_made_as_said(parts: int) -> None:
    task = _task("cross-partition", nodes=600, parts=parts)
    graph, owner = task.graph, task.owner(parts)
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
        task.owner(5)


@pytest.mark.parametrize("options", [{"parts": 1}, {"nodes": 30}, {"nodes": 100, "telling": 40}, {"nodes": 44}])
def test_cross_partition_that_cannot_be_made_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        _task("cross-partition", **options)


def test_drawn_graphs_are_the_same_everywhere() -> None:
    # Edges, labels and owners come from whole-number arithmetic: any machine has to find these.
    found = []
    for name in ("cross-partition", "synthetic-graph"):
        graph = _task(name).graph
        arrays = (graph.sources, graph.targets, graph.labels, graph.owner)
        found.append(hashlib.sha256(b"".join(a.astype("<i8").tobytes() for a in arrays)).hexdigest()[:16])
    assert found == ["c8e852617e9ac5e1", "1471c00702ac4d7c"]


def test_planted_parts_have_the_share_of_cross_edges_that_was_asked_for() -> None:
    task = _task("synthetic-graph", nodes=20_000, degree=10, cross=0.1, parts=5)
    graph = task.graph
    assert len(graph.sources) == 100_000
    # A tenth, five standard deviations either way.
    assert np.mean(graph.owner[graph.sources] != graph.owner[graph.targets]) == pytest.approx(0.1, abs=0.005)
    assert np.bincount(graph.owner).tolist() == [4000] * 5
    # Some 180 repeats within the groups of 500 nodes and 30 between them, and 85 loops, are dropped.
    assert 99_600 < task.neighbours.edges < 99_800
    assert task.method(5) == "planted"
    assert task.cut(5) == pytest.approx(0.1, abs=0.005)
    assert np.mean(graph.labels[graph.sources] == graph.labels[graph.targets]) == pytest.approx(0.475, abs=0.008)
    with pytest.raises(ConfigError, match="option parts=4"):
        _task("synthetic-graph", nodes=500, parts=5, cut="planted").owner(4)
    assert _task("synthetic-graph", nodes=500, parts=5).method(4) == "metis"


@pytest.mark.parametrize("options", [{"nodes": 20}, {"parts": 1}])
def test_planted_graphs_that_cannot_be_made_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        _task("synthetic-graph", **options)
    assert _task("synthetic-graph", nodes=100, parts=1, cross=0).owner(1).tolist() == [0] * 100


def test_digits_are_joined_to_their_nearest_in_both_directions() -> None:
    task = _task("digits-graph", k=3)
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
    assert set(zip(rows.tolist(), near.ids.tolist(), strict=True)) == set(
        zip(near.ids.tolist(), rows.tolist(), strict=True)
    )
    assert _task("digits-graph").neighbours.edges == 12339


def test_ties_of_nearest_neighbours_go_to_the_smaller_id() -> None:
    grid = np.array([[0.0], [1.0], [2.0], [1.0], [0.0]])
    sources_, targets = graph_sources.nearest_neighbours(grid, 2)
    assert targets.reshape(5, 2).tolist() == [[1, 4], [0, 3], [1, 3], [1, 0][::-1], [0, 1]]
    assert sources_.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    for k in (0, 5):
        with pytest.raises(ConfigError, match="neighbours of 5 nodes"):
            graph_sources.nearest_neighbours(grid, k)


def test_7_13_cuts_of_the_digits() -> None:
    graph = _task("digits-graph").neighbours
    found = {method: cut(graph, partition(graph, 4, method)) for method in METHODS}
    assert found["metis"] < 0.10
    assert found["kernighan-lin"] < 0.10
    assert found["greedy"] < 0.30
    assert found["random"] > 0.70


def test_karate_is_networkx_own() -> None:
    import networkx as nx

    club = nx.karate_club_graph()
    four, two = _task("karate"), _task("karate", labels=2)
    pairs = {tuple(sorted(edge)) for edge in club.edges()}
    assert set(zip(*(ends.tolist() for ends in four.neighbours.pairs()), strict=True)) == pairs
    assert two.graph.labels.tolist() == [int(club.nodes[i]["club"] != "Mr. Hi") for i in range(34)]
    assert (four.classes, two.classes) == (4, 2)
    # The four are pieces of the two, but for one member each way at most.
    assert len(set(zip(four.graph.labels.tolist(), two.graph.labels.tolist(), strict=True))) <= 6
    np.testing.assert_array_equal(four.graph.features, np.eye(34))
    with pytest.raises(ConfigError, match="labels=3"):
        _task("karate", labels=3)


def test_features_as_given_binary_or_by_rows() -> None:
    given, binary, rows = (_task("digits-graph", features=kind).graph.features for kind in ("given", "binary", "rows"))
    np.testing.assert_array_equal(binary, given > 0)
    np.testing.assert_allclose(rows.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(rows * given.sum(1)[:, None], given, rtol=1e-5)
    assert _task("digits-graph", dtype="float64").part(0, 2).features.dtype == np.float64
    assert given.dtype == np.float32


def test_splits_are_drawn_by_their_seed_or_public() -> None:
    first, again, other = (_task("cora", split_seed=seed, hidden=h) for seed, h in ((0, 8), (0, 9), (1, 8)))
    np.testing.assert_array_equal(first.test.x, again.test.x)
    assert set(first.test.x) != set(other.test.x)
    assert len(first.test) == 542
    assert not set(first.test.x) & set(first.train_split.x)
    public = _task("cora", split="public")
    assert (len(public.train_split), len(public.test)) == (140, 1000)
    assert np.bincount(public.train_split.y).tolist() == [20] * 7
    with pytest.raises(ConfigError, match="leaves none"):
        _task("karate", held_out=0.99)
    with pytest.raises(ConfigError, match="split='public'"):
        _task("karate", split="public")


def test_the_record_says_how_the_graph_was_cut() -> None:
    registry._build.cache_clear()
    task = _task("digits-graph")
    assert task.record()["graph"]["partitions"] == {}
    task.owner(4)
    record = task.record()
    assert record["options"]["cut"] == "auto"
    assert record["graph"] == {
        "nodes": 1797,
        "edges": 12339,
        "features": 64,
        "directed": False,
        "partitions": {"4": {"method": "metis", "cut": task.cut(4)}},
    }
    assert 0 < task.cut(4) < 0.1


@pytest.mark.parametrize("name", FILES)
def test_graphs_without_their_files_are_stood_in_for_and_say_so(name: str) -> None:
    registry._build.cache_clear()
    sources._load.cache_clear()
    with pytest.warns(DataWarning, match="a drawn graph of its sizes is used instead"):
        task = get_task(name)
    assert isinstance(task, GraphTask)
    assert task.record()["data"]["substitute"]
    sizes = {"cora": (2708, 5278, 1433, 7), "citeseer": (3327, 4552, 3703, 6), "cora-ml": (2995, 8158, 2879, 7)}
    assert (task.nodes, task.neighbours.edges, task.graph.features.shape[1], task.classes) == sizes[name]
    words = {"cora": 18.17, "citeseer": 31.61, "cora-ml": 50.47}
    assert task.graph.features.sum(1).mean() == pytest.approx(words[name], rel=0.05)
    assert set(np.unique(task.graph.features)) == {0.0, 1.0}


def _own_planetoid(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Six nodes: three rows in allx, those of nodes 5 and 3 in tx, none of node 4; a loop and a repeated edge."""
    from dataclasses import replace

    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    tx = np.array([[0, 50, 0, 0], [30, 0, 0, 0]], np.float32)
    one_hot = np.eye(3, dtype=np.int32)
    near = {0: [1, 1], 1: [0, 2], 2: [1, 2], 3: [5], 4: [0], 5: [3]}
    bodies = {
        "x": written.matrix(x[:2]),
        "y": written.array(one_hot[:2]),
        "tx": written.matrix(tx),
        "ty": written.array(one_hot[[2, 0]]),
        "allx": written.matrix(x),
        "ally": written.array(one_hot[[0, 1, 1]]),
        "graph": written.lists(near),
    }
    files = {f"ind.cora.{kind}": written.file(body) for kind, body in bodies.items()}
    files["ind.cora.test.index"] = b"5\n3\n"
    (folder / "planetoid").mkdir()
    for name, data in files.items():
        (folder / "planetoid" / name).write_bytes(data)
    recorded = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    entry = replace(sources.SETS["cora"], files=recorded)
    monkeypatch.setattr(sources, "SETS", {**sources.SETS, "cora": entry})
    sources._load.cache_clear()
    registry._build.cache_clear()
    return files


def test_planetoid_files_are_put_together_by_their_test_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _own_planetoid(tmp_path, monkeypatch)
    task = _task("cora", root=tmp_path, split="public")
    assert (task.data.used, task.data.verified) == ("local", True)
    graph = task.graph
    np.testing.assert_array_equal(graph.features[:3], np.arange(12).reshape(3, 4))
    assert graph.features[5].tolist() == [0, 50, 0, 0]
    assert graph.features[3].tolist() == [30, 0, 0, 0]
    assert not graph.features[4].any()
    assert graph.labels.tolist() == [0, 1, 1, 0, -1, 2]
    assert [ends.tolist() for ends in task.neighbours.pairs()] == [[0, 0, 1, 3], [1, 4, 2, 5]]
    assert (task.train_split.x.tolist(), task.test.x.tolist()) == ([0, 1], [3, 5])
    # A node without a label is in neither half of a random split.
    every = _task("cora", root=tmp_path)
    assert sorted([*every.train_split.x, *every.test.x]) == [0, 1, 2, 3, 5]


def test_a_changed_planetoid_file_is_refused_before_it_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _own_planetoid(tmp_path, monkeypatch)
    (tmp_path / "planetoid" / "ind.cora.graph").write_bytes(files["ind.cora.graph"] + b".")
    read: list[bytes] = []
    monkeypatch.setattr(planetoid, "unpickle", read.append)
    with pytest.raises(DataMismatch, match=r"ind\.cora\.graph"):
        _task("cora", root=tmp_path)
    assert read == []


@pytest.mark.parametrize(
    "body",
    [
        b"cos\nsystem\n" + b"U\x04true\x85R",
        b"cbuiltins\neval\nU\x011\x85R",
        b"cnumpy\nload\nU\x01x\x85R",
        b"ccollections\nOrderedDict\n)R",
        b"cscipy.sparse.csr\ncsc_matrix\n)\x81",
    ],
)
def test_the_unpickler_knows_six_names_and_no_other(body: bytes) -> None:
    with pytest.raises(PlanetoidError, match="names"):
        planetoid.unpickle(written.file(body))
    assert planetoid.unpickle(written.file(written.array(np.arange(3)))).tolist() == [0, 1, 2]


def _fake_pyg(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, str]]) -> None:
    class Data:
        def __init__(self) -> None:
            self.x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
            self.edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
            self.y = torch.tensor([1, 0, 0, 1])
            self.train_mask = torch.tensor([True, False, False, False])
            self.test_mask = torch.tensor([False, True, True, True])

    class Planetoid:
        def __init__(self, root: str, name: str) -> None:
            calls.append((root, name))

        def __getitem__(self, index: int) -> Data:
            return Data()

    module = types.SimpleNamespace(Planetoid=Planetoid, CitationFull=Planetoid)
    monkeypatch.setitem(sys.modules, "torch_geometric.datasets", module)


@pytest.mark.parametrize("name", FILES)
def test_torch_geometric_is_asked_only_with_leave_to_download(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    _fake_pyg(monkeypatch, calls)
    registry._build.cache_clear()
    if name == "cora":
        assert _task(name, root=tmp_path).data.used == "offline"
        assert calls == []
    task = _task(name, root=tmp_path, download=True)
    assert task.data.used == "library"
    assert not task.data.substitute
    assert [(Path(root).parent, given) for root, given in calls] == [
        (tmp_path, {"cora": "Cora", "citeseer": "CiteSeer", "cora-ml": "Cora_ML"}[name])
    ]
    # A node without a row has no label here, whatever class it was given there.
    assert task.graph.labels.tolist() == [1, 0, -1, 1]
    assert task.neighbours.edges == 2
    if name != "cora-ml":
        assert _task(name, root=tmp_path, download=True, split="public").test.x.tolist() == [1, 3]
    sources._load.cache_clear()
    registry._build.cache_clear()


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("cora", {"nodes": 2708, "edges": 5278, "features": 1433, "classes": 7, "public": (140, 1000)}),
        ("citeseer", {"nodes": 3327, "edges": 4552, "features": 3703, "classes": 6, "public": (120, 1000)}),
        ("cora-ml", {"nodes": 2995, "edges": 8158, "features": 2879, "classes": 7, "public": None}),
    ],
)
def test_real_graphs_have_their_published_sizes(name: str, facts: dict[str, Any], local_data: Path) -> None:
    task = _task(name, root=local_data)
    assert (task.data.used, task.data.verified, task.data.substitute) == ("local", True, False)
    assert (task.nodes, task.neighbours.edges) == (facts["nodes"], facts["edges"])
    assert (task.graph.features.shape, task.classes) == ((facts["nodes"], facts["features"]), facts["classes"])
    empty = np.flatnonzero(~task.graph.features.any(1))
    np.testing.assert_array_equal(empty, np.flatnonzero(task.graph.labels < 0))
    assert len(empty) == (15 if name == "citeseer" else 0)
    assert set(np.unique(task.graph.features)) == {0.0, 1.0}
    if facts["public"]:
        public = _task(name, root=local_data, split="public")
        assert (len(public.train_split), len(public.test)) == facts["public"]
        assert set(np.bincount(public.train_split.y)) == {20}
    if name == "cora":
        assert round(float(task.graph.features.sum(1).mean()), 1) == 18.2
    if name == "cora-ml":
        assert np.bincount(task.graph.labels).tolist() == [354, 402, 452, 442, 857, 193, 295]
        assert len(task.graph.sources) == 8416
        weights = _task(name, root=local_data, features="given").graph.features
        assert int((weights != 0).sum()) == 151_171


def test_7_13_cuts_of_cora(local_data: Path) -> None:
    found = {method: _task("cora", root=local_data, cut=method) for method in METHODS}
    assert found["metis"].cut(4) < 0.10
    assert found["kernighan-lin"].cut(4) < 0.15
    assert found["greedy"].cut(4) < 0.30
    assert found["random"].cut(4) > 0.70
    for task in found.values():
        sizes = np.bincount(task.owner(4))
        assert sizes.min() >= 0.95 * 677
        assert sizes.max() <= 1.05 * 677
