"""Rounds of two exchanges against odd clients: what one of them can do to a run.

Every test but the last failed once: a run ended, a model was destroyed, or nothing was learnt and nobody was told.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from toy import client_app, model, stack, training

from fedcomp import wire
from fedcomp.clients.compressed import compression
from fedcomp.codecs import ScaleCom
from fedcomp.flower.faults import FaultPlan
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import FRAME, put_frame, take_frame
from fedcomp.flower.rounds import drive
from fedcomp.rng import Key
from fedcomp.strategies.cohort import CohortSettings
from fedcomp.strategies.shared_support import SharedSupport

Client = Callable[[Message, Context], Message]


def grid_of(nodes: int = 4, client: Client | None = None, fault: FaultPlan | None = None) -> InProcessGrid:
    return InProcessGrid(client or app(), nodes, seed=4, fault=fault)


def app() -> ClientApp:
    return client_app([compression()])


# What one client's numbers do to the model.


def test_a_value_too_large_for_float16_does_not_enter_the_model() -> None:
    """Finite as float32, infinite as the model's float16: the model is kept, and nobody's memory is dropped."""

    def client(msg: Message, context: Context) -> Message:
        asked, reply = msg.metadata.message_type, honest(msg, context)
        if asked == "query" and context.node_config["partition-id"] == 1:
            (tensor,) = wire.decode(take_frame(reply.content, FRAME + "values")).tensors
            huge = wire.shared(tensor.shape, tensor.index.support_id, np.full(tensor.values.k, 3e5, np.float32))
            put_frame(reply.content, FRAME + "values", wire.encode([huge]))
        return reply

    def step(arrays: dict[str, np.ndarray], number: int, p: int) -> dict[str, np.ndarray]:
        moved = arrays["w"] + Key(3, "half", partition=p).generator().integers(-9, 10, 2000)
        return {"w": moved.astype(np.float16)}

    honest, initial = training(step, [compression()]), ArrayRecord({"w": Array(np.zeros(2000, np.float16))})
    strategy = SharedSupport(ScaleCom(0.02))
    result = strategy.start(grid_of(3, client), initial, num_rounds=3, timeout=9)
    assert np.isfinite(result.arrays["w"].numpy()).all()
    assert ["kept" in " ".join(r.notes) for r in strategy.reports.values()] == [True, False, True]
    assert [len(r.fresh) for r in strategy.reports.values()] == [3, 0, 0]
    assert len(strategy.reports[2].rolled_back) == 3


@pytest.mark.slow
def test_nodes_of_two_servers_lose_rounds_but_no_run_ends() -> None:
    """Two strategies take turns on the same nodes: a foreign replica is noticed, and a full model follows."""
    grid = grid_of(3)
    servers = [SharedSupport(ScaleCom(0.02)), SharedSupport(ScaleCom(0.03))]
    models = [model(), model()]
    for round_ in range(1, 7):
        for index, strategy in enumerate(servers):
            new, _ = drive(strategy.round(round_, models[index], ConfigRecord(), grid), grid, timeout=9)
            models[index] = models[index] if new is None else new
    for strategy, arrays in zip(servers, models, strict=True):
        reports = strategy.reports.values()
        reasons = [reason for report in reports for reason in report.refused.values()]
        assert reasons
        assert all("resync" in reason for reason in reasons)
        assert [r.compressed for r in reports].count(3) >= 3
        # Memory of another session is not continued, and the reports say so.
        assert sum(len(r.fresh) for r in reports) > 3
        assert np.count_nonzero(stack(arrays)) > 24


def test_a_round_waits_until_enough_nodes_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Flower's own strategies do; the nodes of this grid come one per look."""
    looks: list[int] = []

    class Slow:
        def get_node_ids(self) -> list[int]:
            looks.append(1)
            return list(range(10 + len(looks), 10, -1))

    monkeypatch.setattr("fedcomp.strategies.nodes._POLL_SECONDS", 0.0)
    half = CohortSettings(fraction_train=0.5, min_available_nodes=6)
    found = half.draw("train", Slow(), Key(1, "cohort/train", 3))  # type: ignore[arg-type]
    assert len(looks) == 6
    assert len(found) == 3
    everyone = CohortSettings().draw("train", Slow(), Key(1, "cohort/train", 3))  # type: ignore[arg-type]
    assert everyone == [11, 12, 13, 14, 15, 16, 17]
