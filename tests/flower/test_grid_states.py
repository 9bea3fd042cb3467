"""Clients' states in files: the same runs, one state in memory at a time, nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedcomp.clients.app import app
from fedcomp.clients.memory import MEMORY
from fedcomp.errors import ConfigError
from fedcomp.experiments import engines
from fedcomp.experiments.serve import serve
from fedcomp.experiments.spec import RunSpec
from fedcomp.flower import nodes
from fedcomp.flower.faults import Delivery, Fault
from fedcomp.flower.grid import InProcessGrid

SPEC = RunSpec("topk", rounds=4, clients=3, settings={"task.hidden": "16", "feedback": True, "codec.density": 0.05})


def counting(message: Message, context: Context) -> Message:
    """Remember how often this node was asked, in a record of some size."""
    held = context.state.get("count")
    count = 0 if held is None else int(held["n"])
    context.state["count"] = ConfigRecord({"n": count + 1})
    context.state["bulk"] = ArrayRecord({"x": Array(np.full(1000, count, np.float32))})
    return Message(RecordDict({"count": ConfigRecord({"n": count + 1})}), reply_to=message)


def ask(grid: InProcessGrid, *asked: int) -> list[int]:
    messages = [Message(RecordDict({"c": ConfigRecord({"x": 1})}), grid.node_id_of(p), "train") for p in asked]
    replies = {r.metadata.reply_to_message_id: r for r in grid.send_and_receive(messages)}
    return [replies[m.metadata.message_id].content["count"]["n"] for m in messages]


def fault(delivery: Delivery) -> Fault | None:
    kinds = {(1, 0): "lost_reply", (2, 1): "raise", (2, 2): "duplicate", (3, 0): "late"}
    kind = kinds.get((delivery.round, delivery.partition))
    return None if kind is None or delivery.message_type != "train" else Fault(kind)


def test_a_run_with_faults_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    found = []
    for states in (None, tmp_path):
        with InProcessGrid(app, 3, fault=fault, states=states) as grid:
            result = serve(SPEC, grid)
            contexts = {node: grid.context(node).state for node in grid.get_node_ids()}
            # Not the contexts' bytes: the session in them is drawn anew for every strategy.
            memories = {n: s[MEMORY]["memory"].data for n, s in contexts.items()}
        found.append(({k: a.tobytes() for k, a in result.arrays.items()}, result.uplink_payload_bytes, memories))
    assert found[0] == found[1]
    assert list(tmp_path.iterdir()) == []


def test_only_who_was_asked_has_a_file_and_it_ends_with_the_node_and_the_grid(tmp_path: Path) -> None:
    with InProcessGrid(counting, 5, states=tmp_path) as grid, InProcessGrid(counting, 5, states=tmp_path) as other:
        assert ask(grid, 1, 3) == [1, 1]
        assert ask(grid, 1) == [2]
        # The same ids, since the seed is the same; another folder.
        assert ask(other, 1) == [1]
        folders = sorted(tmp_path.iterdir(), key=lambda folder: -len(list(folder.iterdir())))
        assert [len(list(folder.iterdir())) for folder in folders] == [2, 1]
        assert not grid.node(1).state
        assert grid.context(1).state["count"]["n"] == 2
        grid.wipe(1)
        assert not grid.context(1).state
        grid.remove_node(3)
        assert len(list(folders[0].iterdir())) == 1
        grid.add_node(3)
        assert ask(grid, 3, 1) == [1, 1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("before", [None, "files"])
@pytest.mark.parametrize("after", [None, "files"])
def test_a_snapshot_is_the_same_from_files_and_goes_on_in_either(
    before: str | None, after: str | None, tmp_path: Path
) -> None:
    def folder(kind: str | None) -> Path | None:
        return None if kind is None else tmp_path

    with InProcessGrid(counting, 3, states=folder(before)) as grid:
        ask(grid, 0, 2)
        data = grid.snapshot()
    with InProcessGrid(counting, 3) as plain:
        ask(plain, 0, 2)
        assert [plain.node(p).stored() for p in range(3)] == _stored(data, after, tmp_path)
    with InProcessGrid(counting, 3, states=folder(after)) as grid:
        grid.restore(data)
        assert ask(grid, 0, 1, 2) == [2, 1, 2]


def _stored(data: bytes, kind: str | None, tmp_path: Path) -> list[bytes]:
    with InProcessGrid(counting, 3, states=None if kind is None else tmp_path) as grid:
        grid.restore(data)
        return [grid.node(p).stored() for p in range(3)]


def test_a_state_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with InProcessGrid(counting, 1, states=tmp_path) as grid:
        assert ask(grid, 0) == [1]

        def full(*_: object) -> None:
            raise OSError("no space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(nodes.os, "replace", full)
            with pytest.raises(OSError, match="no space"):
                ask(grid, 0)
        assert grid.context(0).state["count"]["n"] == 1
        assert ask(grid, 0) == [2]
    assert os.listdir(tmp_path) == []


def test_an_engine_keeps_states_where_it_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "states"
    seen = []
    kept = engines.run(SPEC, client_states=folder, on_round=lambda record: seen.append(len(list(folder.rglob("*")))))
    alone = engines.run(SPEC)
    assert {k: a.tobytes() for k, a in kept.arrays.items()} == {k: a.tobytes() for k, a in alone.arrays.items()}
    assert kept.ledger == alone.ledger
    # The folder of the grid, and a file for each client from the first round on.
    assert seen == [1, 4, 4, 4, 4]
    assert list(folder.iterdir()) == []
    for engine in ("ray", "superlink"):
        with pytest.raises(ConfigError, match="client_states is for engine=inprocess"):
            engines.run(RunSpec("topk", engine=engine), client_states=folder)
