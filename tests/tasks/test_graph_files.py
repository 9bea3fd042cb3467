"""Graphs from files: read as they are meant, verified first, never run; and what there is without them."""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import graph_planetoid as written
import numpy as np
import pytest
import torch
from graph_tasks import graph_task

from fedcomp.tasks import get_task, graph_sources, planetoid, registry, sources
from fedcomp.tasks.graph import GraphTask
from fedcomp.tasks.planetoid import PlanetoidError
from fedcomp.tasks.sources import DataError, DataMismatch, DataWarning

FILES = ("cora", "citeseer", "cora-ml")


@pytest.mark.slow
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


def _own_planetoid(folder: Path, monkeypatch: pytest.MonkeyPatch, **others: bytes) -> dict[str, bytes]:
    """Six nodes: rows of 0 to 2 in allx, of 5 and 3 in tx, of 4 nowhere; 2 of no class; a loop and a repeated edge.

    All files are as they were recorded, also those that are one of ``others``."""
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
        "ally": written.array(one_hot * np.int32([[1], [1], [0]])),
        "graph": written.lists(near),
        **others,
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
    task = graph_task("cora", root=tmp_path, split="public")
    assert (task.data.used, task.data.verified) == ("local", True)
    graph = task.graph
    np.testing.assert_array_equal(graph.features[:3], np.arange(12).reshape(3, 4))
    assert graph.features[5].tolist() == [0, 50, 0, 0]
    assert graph.features[3].tolist() == [30, 0, 0, 0]
    assert not graph.features[4].any()
    assert graph.labels.tolist() == [0, 1, -1, 0, -1, 2]
    assert [ends.tolist() for ends in task.neighbours.pairs()] == [[0, 0, 1, 3], [1, 4, 2, 5]]
    assert (task.train_split.x.tolist(), task.test.x.tolist()) == ([0, 1], [3, 5])
    rows = graph_task("cora", root=tmp_path, features="rows").graph.features
    np.testing.assert_allclose(rows.sum(1), [1, 1, 1, 1, 0, 1])
    # A node without a label is in neither half of a random split.
    every = graph_task("cora", root=tmp_path)
    assert sorted([*every.train_split.x, *every.test.x]) == [0, 1, 3, 5]
    assert len(graph_task("cora", root=tmp_path, held_out=0.5).test) == 2


def test_cora_ml_is_read_without_its_objects() -> None:
    x = np.array([[0, 2.5], [1, 0], [0, 0]], np.float32)
    fields = {
        "adj_matrix.data": np.ones(2),
        "adj_matrix.indices": np.array([1, 1], np.int32),
        "adj_matrix.indptr": np.array([0, 1, 1, 2], np.int32),
        "adj_matrix.shape": np.array([3, 3]),
        "attr_matrix.data": x[x != 0],
        "attr_matrix.indices": np.array([1, 0], np.int32),
        "attr_matrix.indptr": np.array([0, 1, 2, 2], np.int32),
        "attr_matrix.shape": np.array([3, 2]),
        "labels": np.array([1, 0, 1]),
        "idx_to_node": np.array([{0: "a"}], object),
    }
    file = io.BytesIO()
    np.savez(file, **fields)
    graph = graph_sources.read_cora_ml({"cora_ml.npz": file.getvalue()})
    np.testing.assert_array_equal(graph.features, x)
    assert list(zip(graph.sources.tolist(), graph.targets.tolist(), strict=True)) == [(0, 1), (2, 1)]
    assert (graph.labels.tolist(), graph.classes, graph.directed) == ([1, 0, 1], 2, False)


def test_a_changed_planetoid_file_is_refused_before_it_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _own_planetoid(tmp_path, monkeypatch)
    (tmp_path / "planetoid" / "ind.cora.graph").write_bytes(files["ind.cora.graph"] + b".")
    read: list[bytes] = []
    monkeypatch.setattr(planetoid, "unpickle", read.append)
    # CiteSeer's files may be in the same folder, which must not go.
    with pytest.raises(DataMismatch, match=r"ind\.cora\.graph.*remove all files of this set"):
        graph_task("cora", root=tmp_path)
    assert read == []


def test_a_program_in_a_planetoid_file_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its checksum: first with one that nobody recorded, then as if it had been recorded."""
    mark = tmp_path / "ran"
    path = str(mark).encode()
    program = b"cio\nopen\nX" + len(path).to_bytes(4, "little") + path + b"U\x01w\x86R"
    pickle.loads(written.file(program)).close()
    assert mark.exists()
    mark.unlink()
    with monkeypatch.context() as recorded:
        _own_planetoid(tmp_path, recorded, graph=program)
        with pytest.raises(PlanetoidError, match=r"io\.open"):
            graph_task("cora", root=tmp_path)
    with pytest.raises(DataMismatch, match=r"ind\.cora\.x"):
        graph_task("cora", root=tmp_path)
    assert not mark.exists()


def test_a_folder_of_several_sets_need_not_hold_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = _own_planetoid(tmp_path, monkeypatch)
    assert sources.local_stamp("citeseer", str(tmp_path)) is None
    monkeypatch.setattr(graph_sources, "citations", lambda *_: graph_sources.karate())
    with pytest.warns(DataWarning, match="no files of it in 'planetoid'"):
        assert get_task("citeseer", root=tmp_path).data.substitute
    (tmp_path / "planetoid" / "ind.citeseer.graph").write_bytes(files["ind.cora.graph"])
    with pytest.raises(DataError, match=r"ind\.citeseer\.x is missing.*or none of them"):
        get_task("citeseer", root=tmp_path)
    (tmp_path / "planetoid" / "ind.citeseer.graph").unlink()
    (tmp_path / "planetoid" / "ind.citeseer.tx").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"ind\.citeseer\.x is missing"):
        get_task("citeseer", root=tmp_path)
    registry._build.cache_clear()
    sources._load.cache_clear()


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
        assert graph_task(name, root=tmp_path).data.used == "offline"
        assert calls == []
    task = graph_task(name, root=tmp_path, download=True)
    assert task.data.used == "library"
    assert not task.data.substitute
    assert [(Path(root).parent, given) for root, given in calls] == [
        (tmp_path, {"cora": "Cora", "citeseer": "CiteSeer", "cora-ml": "Cora_ML"}[name])
    ]
    # A node without a row has no label here, whatever class it was given there.
    assert task.graph.labels.tolist() == [1, 0, -1, 1]
    assert task.neighbours.edges == 2
    if name != "cora-ml":
        assert graph_task(name, root=tmp_path, download=True, split="public").test.x.tolist() == [1, 3]
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
    task = graph_task(name, root=local_data)
    assert (task.data.used, task.data.verified, task.data.substitute) == ("local", True, False)
    assert (task.nodes, task.neighbours.edges) == (facts["nodes"], facts["edges"])
    assert (task.graph.features.shape, task.classes) == ((facts["nodes"], facts["features"]), facts["classes"])
    empty = np.flatnonzero(~task.graph.features.any(1))
    np.testing.assert_array_equal(empty, np.flatnonzero(task.graph.labels < 0))
    assert len(empty) == (15 if name == "citeseer" else 0)
    assert set(np.unique(task.graph.features)) == {0.0, 1.0}
    if facts["public"]:
        public = graph_task(name, root=local_data, split="public")
        assert (len(public.train_split), len(public.test)) == facts["public"]
        assert set(np.bincount(public.train_split.y)) == {20}
        assert public.test.y.min() == 0
        validation = np.arange(len(public.train_split), len(public.train_split) + 500)
        assert not np.isin(validation, public.test.x).any()
    if name == "cora":
        assert round(float(task.graph.features.sum(1).mean()), 1) == 18.2
    if name == "cora-ml":
        assert np.bincount(task.graph.labels).tolist() == [354, 402, 452, 442, 857, 193, 295]
        assert len(task.graph.sources) == 8416
        weights = graph_task(name, root=local_data, features="given").graph.features
        assert int((weights != 0).sum()) == 151_171
        assert len(np.unique(weights)) > 2
