"""A server that is killed in a round and goes on from its checkpoint, among nodes that were not set back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from plain_grid import PlainGrid

from fedcomp.clients.app import app as client_app
from fedcomp.experiments.serve import serve
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.flower import checkpoint as checkpoints
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


def bits(result: RunResult) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in result.arrays.items()}


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
    assert bits(resumed) == bits(whole)


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
    assert bits(resumed) != bits(whole)
