"""Every mutant is caught by the tier that is there for it, and its original is not."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from toy import with_halves

from fedcomp.clients.private.mod import private
from fedcomp.experiments.audits.mutants import MUTANTS
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.privacy import PRIVATE

pytestmark = pytest.mark.audit


QUICK = {"clip before memory", "same seed", "record twice"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MUTANTS]
)
def test_a_mutant_is_caught_and_its_original_is_not(name: str) -> None:
    right = MUTANTS[name].original()
    assert right
    assert [v for v in right if not v.ok] == []
    wrong = MUTANTS[name].mutated()
    assert [v for v in wrong if not v.ok], wrong


def replies(mods: list, loss: float, examples: int, counter: int) -> tuple[dict, dict]:
    """Return metrics and arrays of one client's reply to a private training message."""
    app = with_halves(mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = message.content.array_records["arrays"]
        after = {"w": Array(model["w"].numpy() + np.float32(1.0)), "n": Array(model["n"].numpy() + counter)}
        metrics = MetricRecord({"loss": loss, "num-examples": examples})
        return Message(RecordDict({"arrays": ArrayRecord(after), "metrics": metrics}), reply_to=message)

    model = ArrayRecord({"w": Array(np.zeros(3, np.float32)), "n": Array(np.zeros(2, np.int64))})
    config = ConfigRecord({PRIVATE: True, "server-round": 1})
    with InProcessGrid(app, 1) as grid:
        message = Message(RecordDict({"arrays": model, "config": config}), grid.get_node_ids()[0], "train")
        (reply,) = grid.send_and_receive([message])
    arrays = {k: v.numpy().tolist() for k, v in reply.content.array_records["arrays"].items()}
    return {name: dict(record) for name, record in reply.content.metric_records.items()}, arrays


def test_mutant_exact_loss_in_the_reply_is_caught() -> None:
    """Two clients with the same update: whatever else is in a reply tells them apart without any noise."""
    worlds = ((0.25, 10, 3), (7.5, 1000, 4))
    one, other = (replies([private()], *world) for world in worlds)
    assert one == other == ({}, {"w": [1.0, 1.0, 1.0], "n": [0, 0]})
    one, other = (replies([], *world) for world in worlds)
    assert one[0]["metrics"]["loss"] == 0.25
    assert one != other
