"""One bad client costs its own update only; nothing it sends ends a run, evicts others or poisons the model."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedMedian, Strategy
from toy import client_app, fedavg, model, put_sent_frame, stack, update

from fedcomp import wire
from fedcomp.clients.compressed import compression
from fedcomp.clients.private.mod import private
from fedcomp.codecs import Identity, RandomK, ScaleCom, TopK
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME, put_frame
from fedcomp.flower.records import same_model
from fedcomp.layout import SmallDense
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.replies import MAX_ENTRIES, MAX_NUMBERS, MAX_RECORDS, weight_of
from fedcomp.strategies.shared_support import SharedSupport

Client = Callable[[Message, Context], Message]
ONE = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}


def run(strategy, evil, *, nodes=4, rounds=2, culprit=1, mods=True, kind="train", initial=None, app=None):
    """Run with one client whose reply content ``evil`` changes; return the result."""
    honest = app or client_app([compression()] if mods else [])

    def client(msg: Message, context: Context) -> Message:
        reply = honest(msg, context)
        if context.node_config["partition-id"] == culprit and msg.metadata.message_type == kind:
            changed = evil(reply.content)
            if changed is not None:
                reply.content = changed
        return reply

    grid = MeteredGrid(InProcessGrid(client, nodes, seed=4), TrafficLedger())
    return strategy.start(grid, initial or model(), num_rounds=rounds, timeout=9)


def header(**fields):
    def evil(content: RecordDict) -> None:
        for name, value in fields.items():
            content["fedcomp.node"][name.replace("_", "-")] = value

    return evil


def metric(name, value):
    def evil(content: RecordDict) -> None:
        content["metrics"][name] = value

    return evil


def plain(array):
    """Reply with a plain model whose bias is ``array``, as a client without the mod would."""

    def evil(content: RecordDict) -> RecordDict:
        arrays = {"weight": Array(np.zeros((40, 30), np.float32)), "bias": array}
        return RecordDict({"arrays": ArrayRecord(arrays), "metrics": content["metrics"]})

    return evil


def raw(data: bytes) -> Array:
    return Array("float32", (12,), "numpy.ndarray", data)


def npy(dtype: str, shape: tuple[int, ...]) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
    return out.getvalue()


def npz() -> bytes:
    out = io.BytesIO()
    np.savez(out, a=np.zeros(3))
    return out.getvalue()


def frame(*tensors: wire.Tensor):
    def evil(content: RecordDict) -> None:
        put_sent_frame(content, wire.encode(list(tensors)))

    return evil


BAD = {
    "node record is a metric record": lambda c: RecordDict(
        {"arrays": model(), "fedcomp.node": MetricRecord({"num-examples": 1})}
    ),
    "record named like the metrics": header(record="metrics", partition_id=-1),
    "record named like no other, from the first partition": header(record="evil", partition_id=-1),
    "reserved record name": header(record="fedcomp.node"),
    "record is a number": header(record=3),
    "stale sequence": header(sequence=10**18),
    "sequence is text": header(sequence="1"),
    "generation is a list": header(generation=[1, 2]),
    "one more metric": metric("extra", 1.0),
    "metric is a list": metric("seen", [1.0, 2.0]),
    "weight NaN": metric("num-examples", float("nan")),
    "weight negative": metric("num-examples", -1),
    "weight missing": lambda c: RecordDict({**c, "metrics": MetricRecord({"partition": 1, "seen": 0.0})}),
    "no metrics": lambda c: RecordDict({k: v for k, v in c.items() if k != "metrics"}),
    "empty reply": lambda c: RecordDict(),
    "frame is a metric record": lambda c: RecordDict({**c, FRAME + "values": MetricRecord({"x": 1})}),
    "frame is text": lambda c: RecordDict({**c, FRAME + "values": ConfigRecord({"fedcomp.fcw1": "text"})}),
    "array data empty": plain(raw(b"")),
    "array data is a zip": plain(raw(b"PK\x03\x04" + bytes(40))),
    "array data is an npz": plain(raw(npz())),
    "array header claims 2**50 elements": plain(raw(npy("<f4", (2**50,)))),
    "array header claims another shape": plain(raw(npy("<f4", (30, 1)) + bytes(120))),
    "array is truncated": plain(raw(npy("<f4", (12,)) + bytes(40))),
    "array header never ends": plain(raw(npy("<f4", (12,)).replace(b"{", b"((((") + bytes(120))),
    "array of objects": plain(raw(npy("|O", (12,)) + bytes(240))),
    "array of text": plain(Array(np.array(["abc"] * 30))),
    "array of dates": plain(Array(np.zeros(12, "datetime64[s]"))),
    "array complex": plain(Array(np.full(12, np.nan, np.complex64))),
    "array overflows float32": plain(Array(np.full(12, 1e300))),
    "array of another serialisation": plain(Array("float32", (12,), "pickle", b"x")),
    "tensors of other names": lambda c: RecordDict(
        {"arrays": ArrayRecord({"w": Array(np.zeros(3, np.float32))}), "metrics": c["metrics"]}
    ),
    "coefficients posing as dense": frame(
        wire.sparse((1200,), np.array([0]), np.float32([1])),
        wire.Tensor(wire.Raw(np.float32([1e6])), (12,), kind=wire.COEFFICIENTS),
    ),
    "two coefficients posing as dense": frame(
        wire.sparse((1200,), np.array([0]), np.float32([1])),
        wire.Tensor(wire.Raw(np.float32([1e6, 1e6])), (12,), kind=wire.COEFFICIENTS),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("inner", [fedavg, lambda **o: FedMedian(**ONE, **o)], ids=["mean", "dense"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_client_costs_its_own_update_only(name: str, inner) -> None:
    strategy = Compressed(inner(fraction_evaluate=0.0), TopK(density=1.0))
    result = run(strategy, BAD[name])
    reports = list(strategy.reports.values())
    assert [r.compressed for r in reports] == [3, 3], reports
    assert [len(r.refused) for r in reports] == [1, 1]
    assert np.isfinite(stack(result.arrays)).all()
    if inner is fedavg:
        weights = {0: 1, 2: 3, 3: 4}
        expected = sum(update(1, p, (12,), 1).astype(np.float64) * w for p, w in weights.items()) / 8
        expected += sum(update(2, p, (12,), 1).astype(np.float64) * w for p, w in weights.items()) / 8
        np.testing.assert_allclose(result.arrays["bias"].numpy(), expected, rtol=1e-5, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("downlink", [None, TopK(density=0.1)], ids=["plain", "downlink"])
@pytest.mark.parametrize(
    "evil",
    [
        lambda c: RecordDict({"metrics": MetricRecord({"other": 1})}),
        metric("num-examples", float("nan")),
        metric("more", 1.0),
        header(version="x"),
        header(version=10**12),
        lambda c: RecordDict(),
    ],
)
def test_a_bad_evaluation_reply_costs_itself_only(evil, downlink) -> None:
    def guarded(content: RecordDict):
        if "fedcomp.node" not in content:
            content["fedcomp.node"] = ConfigRecord({"partition-id": 1})
        return evil(content)

    strategy = Compressed(fedavg(), TopK(density=0.1), downlink=downlink)
    result = run(strategy, guarded, kind="evaluate")
    assert set(result.evaluate_metrics_clientapp) == {1, 2}
    assert all(np.isfinite(list(m.values())).all() for m in result.evaluate_metrics_clientapp.values())


@pytest.mark.slow
def test_reasons_are_cut_before_they_are_kept() -> None:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.1))
    run(strategy, header(unsupported="x" * 5_000_000))
    assert all(len(reason) <= 300 for r in strategy.reports.values() for reason in r.unsupported.values())
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.1))
    run(strategy, header(record="x" * 5_000_000))
    assert all(len(reason) <= 300 for r in strategy.reports.values() for reason in r.refused.values())


def test_exact_buffers_are_checked() -> None:
    """A client cannot slip NaN into a statistic, nor another shape or dtype into a counter."""
    for bad in (np.full(12, np.nan, np.float32), np.zeros(13, np.float32), np.zeros(12)):

        def evil(content: RecordDict, bad=bad) -> None:
            put_frame(content, "fedcomp.exact", wire.encode([wire.dense(bad)]))

        initial = ArrayRecord({**model(), "bn.running_var": Array(np.ones(12, np.float32))})
        strategy = Compressed(fedavg(fraction_evaluate=0.0), Identity())
        result = run(strategy, evil, initial=initial, rounds=1)
        assert strategy.reports[1].compressed == 3
        assert np.isfinite(result.arrays["bn.running_var"].numpy()).all()


@pytest.mark.slow
def test_finite_updates_whose_sum_is_not_leave_the_model_as_it_was() -> None:
    """Two clients at the edge of float32: each frame is in order, their sum is not."""
    huge = np.full(12, 3.4e38, np.float32)

    def app(msg: Message, context: Context) -> Message:
        reply = honest(msg, context)
        if context.node_config["partition-id"] < 2 and msg.metadata.message_type == "train":
            reply.content["metrics"]["num-examples"] = 10**12
            tensors = [wire.sparse((1200,), np.array([0]), np.float32([1])), wire.dense(huge)]
            put_sent_frame(reply.content, wire.encode(tensors))
            # Its own update was lost in the rounding of so large a model.
            reply.content["fedcomp.node"].pop("unchanged", None)
        return reply

    honest = client_app([compression()])
    for downlink in (None, TopK(density=0.1)):
        strategy = Compressed(fedavg(), TopK(density=1.0), downlink=downlink, policy=SmallDense())
        grid = MeteredGrid(InProcessGrid(app, 4, seed=4), TrafficLedger())
        result = strategy.start(grid, model(3e38), num_rounds=2, timeout=9)
        assert same_model(result.arrays, model(3e38)), "no round produced a model"
        assert all("not finite" in r.notes[0] for r in strategy.reports.values())


def test_a_sender_does_not_choose_its_own_random_coordinates() -> None:
    """Random-k is drawn from the round's key; a frame with another seed is refused."""

    def evil(content: RecordDict) -> None:
        values = wire.Raw(np.full(12, 9, np.float32))
        tensors = [wire.seeded((1200,), 4711, 12, values), wire.dense(np.zeros(12, np.float32))]
        put_sent_frame(content, wire.encode(tensors))

    strategy = Compressed(fedavg(fraction_evaluate=0.0), RandomK(density=0.01), feedback=False, policy=SmallDense())
    run(strategy, evil)
    assert [r.compressed for r in strategy.reports.values()] == [3, 3]
    assert all("seed" in reason for r in strategy.reports.values() for reason in r.refused.values())


def many(count: int, kind: type) -> Callable[[RecordDict], None]:
    def evil(content: RecordDict) -> None:
        for i in range(count):
            content[f"more.{i}"] = kind({"a": 1.0})

    return evil


def entries(count: int, name: str = "metrics") -> Callable[[RecordDict], None]:
    def evil(content: RecordDict) -> None:
        kind = MetricRecord if name == "metrics" else ConfigRecord
        content[name] = kind({**content.get(name, {}), **{f"k{i}": 1.0 for i in range(count)}})

    return evil


LARGE = {
    "2,000 records": (many(2_000, ConfigRecord), "2002 records; at most 64"),
    "records, one too many": (many(MAX_RECORDS - 1, ConfigRecord), "65 records; at most 64"),
    "5,000 metrics": (entries(5_000), "record 'metrics' of the reply holds 5003 entries; at most 1024"),
    "metrics, one too many": (entries(MAX_ENTRIES - 2), "1025 entries; at most 1024"),
    "5,000 settings": (entries(5_000, "more"), "record 'more' of the reply holds 5000 entries"),
    "a list, one too long": (metric("seen", [1.0] * (MAX_NUMBERS + 1)), "lists hold 65537 numbers; at most 65536"),
}


PATHS: dict[str, Callable[[], tuple[Strategy, Client]]] = {
    "frames": lambda: (Compressed(fedavg(fraction_evaluate=0.0), TopK(1.0)), client_app([compression()])),
    "private": lambda: (
        Compressed(
            DpFedAvg(
                fedavg(fraction_evaluate=0.0), clip=1.0, noise_multiplier=0.0, population=4, insecure_deterministic=True
            ),
            TopK(1.0),
        ),
        client_app([compression(), private()]),
    ),
    "shared support": lambda: (SharedSupport(ScaleCom(1.0)), client_app([compression()])),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "name"),
    [*(("frames", name) for name in LARGE), ("private", "5,000 settings"), ("shared support", "5,000 metrics")],
)
def test_d4_a_reply_that_holds_too_much_is_refused_unread(path: str, name: str, monkeypatch) -> None:
    """Before, 2,000 records were accepted without a word, and every metric was compared, or averaged."""
    evil, said = LARGE[name]
    strategy, app = PATHS[path]()
    read: list[int] = []

    def watched(content: RecordDict, key: str | None) -> tuple[str, float]:
        read.append(len(content) + sum(len(record) for record in content.values()))
        return weight_of(content, key)

    monkeypatch.setattr("fedcomp.strategies.inbox.weight_of", watched)
    run(strategy, evil, app=app, rounds=1)
    (reason,) = strategy.reports[1].refused.values()
    assert said in reason
    assert strategy.reports[1].compressed == 3
    # A private round weighs nobody.
    assert len(read) == (0 if path == "private" else 3)
    assert max(read, default=0) < 30


def test_d4_what_is_just_within_the_limits_is_read() -> None:
    def full(content: RecordDict) -> None:
        many(MAX_RECORDS - len(content), ConfigRecord)(content)

    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(1.0))
    run(strategy, full, rounds=1)
    assert strategy.reports[1].refused == {}
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(1.0))
    run(strategy, entries(MAX_ENTRIES - 3), rounds=1)
    (reason,) = strategy.reports[1].refused.values()
    assert reason.startswith("records and metrics [")


def test_d4_evaluation_replies_are_bounded_too() -> None:
    strategy = Compressed(fedavg(), TopK(1.0))
    run(strategy, entries(5_000), kind="evaluate", rounds=1)
    (reason,) = strategy.evaluations[1].refused.values()
    assert "5002 entries" in reason
