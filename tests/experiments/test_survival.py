"""A server that is killed in a round and goes on from its checkpoint, among nodes that were not set back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from plain_grid import PlainGrid

from fedcomp.clients.app import app as client_app
from fedcomp.errors import ConfigError
from fedcomp.experiments.federation import Cohorts
from fedcomp.experiments.findings import different_bytes
from fedcomp.experiments.serve import serve
from fedcomp.experiments.spec import RunSpec
from fedcomp.flower import checkpoint as checkpoints
from fedcomp.flower._private import set_source
from fedcomp.flower.grid import InProcessGrid

SPEC = RunSpec("topk", rounds=5, clients=3, settings={"task.hidden": "16", "lr": 0.05, "codec.density": 0.05})
KILLED = 3


class Killed(BaseException):
    """What SIGKILL is to a process: nothing after it happens."""


class Dying(PlainGrid):
    """Is killed when the nodes have answered round ``at``, and nobody has read it."""

    def __init__(self, engine: InProcessGrid, at: int = 0) -> None:
        super().__init__(engine)
        self.round, self.at = 0, at

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if self.round == self.at:
            raise Killed
        return super().pull_messages(message_ids)


class Renamed(PlainGrid):
    """Knows the nodes of the engine under other ids, as a fresh SuperLink does."""

    def get_node_ids(self) -> Iterable[int]:
        return [node + 1 for node in super().get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        batch = list(messages)
        for message in batch:
            message.metadata.dst_node_id -= 1
        ids = super().push_messages(batch)
        for message in batch:
            message.metadata.dst_node_id += 1
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            set_source(reply, reply.metadata.src_node_id + 1)
        return replies


def nodes(spec: RunSpec = SPEC) -> InProcessGrid:
    return InProcessGrid(client_app, spec.clients, seed=3)


def interrupted(spec: RunSpec, engine: InProcessGrid, path: Path, **options: Any) -> None:
    with pytest.raises(Killed):
        serve(spec, Dying(engine, KILLED), checkpoint=path, **options)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"downlink": "topk", "downlink.density": 0.1},
        {"inner": "fedadam"},
        {"fraction": 0.7},
    ],
    ids=lambda s: "-".join(s) or "feedback",
)
def test_it_comes_to_the_same_bits(settings: dict[str, Any], tmp_path: Path) -> None:
    spec = RunSpec("topk", rounds=5, clients=3, settings={**SPEC.settings, **settings})
    with nodes(spec) as engine:
        whole = serve(spec, PlainGrid(engine))
    with nodes(spec) as engine:
        interrupted(spec, engine, tmp_path / "c")
        resumed = serve(spec, PlainGrid(engine), checkpoint=tmp_path / "c")
    assert [record.round for record in resumed] == [0, 1, 2, 3, 4, 5]
    assert [record.metrics["report.fresh"] for record in resumed.rounds[2:]] == [0, 0, 0, 0]
    assert different_bytes(resumed.arrays, whole.arrays) == 0


@pytest.mark.parametrize("settings", [{}, {"downlink": "topk", "downlink.density": 0.1}], ids=["up", "both ways"])
@pytest.mark.parametrize("recognised", [True, False])
def test_nodes_with_other_ids_are_the_same_nodes(
    settings: dict[str, Any], recognised: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Killed after a round: what a node's memory waits for is in the checkpoint, under the id that the node had."""
    spec = RunSpec("topk", rounds=5, clients=3, settings={**SPEC.settings, **settings})
    with nodes(spec) as engine:
        whole = serve(spec, PlainGrid(engine))
    with nodes(spec) as engine:
        serve(replace(spec, rounds=KILLED), PlainGrid(engine), checkpoint=tmp_path / "c")
        if not recognised:
            # The wrong variant: whoever has another id is somebody else.
            monkeypatch.setattr(Cohorts, "recall", lambda self, known: None)
        resumed = serve(spec, Renamed(engine), checkpoint=tmp_path / "c")
    assert (different_bytes(resumed.arrays, whole.arrays) == 0) is recognised
    rolled_back = [record.metrics["report.rolled_back"] for record in resumed.rounds[1:]]
    assert rolled_back == ([0] * 5 if recognised else [0, 0, 0, 3, 0])
    if recognised:
        assert resumed.rounds[KILLED + 1].metrics["nodes.returned"] == [0, 1, 2]


def test_with_numbers_that_were_used_before_it_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The wrong variant: to the nodes the restarted server's messages are those that they have answered."""
    monkeypatch.setattr(checkpoints, "renumber_strategy", lambda strategy: None)
    spec = RunSpec("topk", rounds=5, clients=3, settings={**SPEC.settings, "downlink": "topk", "downlink.density": 0.1})
    with nodes(spec) as engine:
        whole = serve(spec, PlainGrid(engine))
    with nodes(spec) as engine:
        interrupted(spec, engine, tmp_path / "c", checkpoint_every=2)
        # Two rounds beyond the checkpoint of round 2, and read; of the third nothing is known.
        with pytest.raises(Killed):
            serve(spec, Dying(engine, 5), checkpoint=tmp_path / "c", checkpoint_every=9)
        resumed = serve(spec, PlainGrid(engine), checkpoint=tmp_path / "c")
    assert resumed.rounds[3].metrics["report.refused"] == spec.clients
    assert different_bytes(resumed.arrays, whole.arrays) > 0


def test_there_is_a_checkpoint_every_k_rounds_and_after_the_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved: list[int] = []
    monkeypatch.setattr(checkpoints.CheckpointFile, "save", lambda _, **what: saved.append(what["server_round"]))
    with nodes() as engine:
        serve(SPEC, PlainGrid(engine), checkpoint=tmp_path / "c", checkpoint_every=2)
    assert saved == [2, 4, 5]
    with nodes() as engine, pytest.raises(ConfigError, match="checkpoint_every"):
        serve(SPEC, PlainGrid(engine), checkpoint=tmp_path / "c", checkpoint_every=0)
