"""Rounds of two exchanges against odd clients: what one of them can do to a run.

Every test but the last failed once: a run ended, a model was destroyed, or nothing was learnt and nobody was told.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from toy import client_app, model, stack, with_halves

from fedcomp import wire
from fedcomp.clients.compressed import compression
from fedcomp.codecs import ScaleCom
from fedcomp.codecs.scalecom import support_id_of
from fedcomp.flower.faults import FaultPlan
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import FRAME, put_frame, take_frame
from fedcomp.flower.rounds import drive
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.strategies.cohort import CohortSettings
from fedcomp.strategies.shared_support import SharedSupport

Change = Callable[[Message, Message, Context], None]
Client = Callable[[Message, Context], Message]


def grid_of(nodes: int = 4, client: Client | None = None, fault: FaultPlan | None = None) -> InProcessGrid:
    return InProcessGrid(client or app(), nodes, seed=4, fault=fault)


def app() -> ClientApp:
    return client_app([compression()])


def altered(change: Change, base: Client | None = None) -> Client:
    """Return an app whose replies ``change(reply, message, context)`` alters."""
    inner = base or app()

    def client(msg: Message, context: Context) -> Message:
        asked = Message(RecordDict(dict(msg.content.items())), msg.metadata.dst_node_id, msg.metadata.message_type)
        reply = inner(msg, context)
        if not reply.has_error():
            change(reply, asked, context)
        return reply

    return client


def partition(context: Context) -> int:
    return int(context.node_config["partition-id"])


def learner(
    delta: Callable[[int, np.ndarray], np.ndarray], weight: Callable[[int], float] = lambda p: 1.0
) -> ClientApp:
    """Return an app that adds ``delta(partition, tensor)`` to the tensors that are finite."""
    learns = with_halves([compression()])

    @learns.train()
    def train(msg: Message, context: Context) -> Message:
        (record,) = msg.content.array_records.values()
        p, out = partition(context), {}
        for name, array in record.items():
            old = array.numpy()
            moves = np.isfinite(old).all()
            out[name] = Array(np.asarray(old + delta(p, old) if moves else old).astype(old.dtype))
        metrics = MetricRecord({"num-examples": weight(p)})
        return Message(RecordDict({"arrays": ArrayRecord(out), "m": metrics}), reply_to=msg)

    return learns


# What one client's numbers do to the model.


def test_a_value_too_large_for_float16_does_not_enter_the_model() -> None:
    """Finite as float32, infinite as the model's float16: the model is kept, and nobody's memory is dropped."""

    def change(reply: Message, asked: Message, context: Context) -> None:
        frame = take_frame(reply.content, FRAME + "values")
        if partition(context) == 1 and asked.metadata.message_type == "query" and frame is not None:
            (tensor,) = wire.decode(frame).tensors
            huge = wire.shared(tensor.shape, tensor.index.support_id, np.full(tensor.values.k, 3e5, np.float32))
            put_frame(reply.content, FRAME + "values", wire.encode([huge]))

    def delta(p: int, old: np.ndarray) -> np.ndarray:
        return Key(3, "half", partition=p).generator().integers(-9, 10, old.shape)

    initial = ArrayRecord({"w": Array(np.zeros(2000, np.float16))})
    strategy = SharedSupport(ScaleCom(0.02))
    client = altered(change, learner(delta))
    result = strategy.start(grid_of(3, client), initial, num_rounds=3, timeout=9)
    assert np.isfinite(result.arrays["w"].numpy()).all()
    assert ["kept" in " ".join(r.notes) for r in strategy.reports.values()] == [True, False, True]
    assert [len(r.fresh) for r in strategy.reports.values()] == [3, 0, 0]
    assert len(strategy.reports[2].rolled_back) == 3


# Memory.


def test_reading_a_means_support_allocates_nothing_of_the_models_size() -> None:
    tracemalloc = pytest.importorskip("tracemalloc")
    layout, codec = Layout.flat(1_000_000), ScaleCom(0.001)
    supports = (np.arange(0, 1_000_000, 1000),)
    frame, _ = codec.mean(supports, 7).encode(Update(np.ones(1_000_000, np.float32), layout), {}, Key(1, "mean"))
    tracemalloc.start()
    try:
        assert support_id_of(frame, codec, layout) == 7
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


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
