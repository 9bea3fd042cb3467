"""One bad client costs its own update only; nothing it sends ends a run, evicts others or poisons the model."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

import datalens_toy
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedMedian, Strategy
from plain_grid import Blind
from private_runs import Room, forged
from private_runs import inner as bare_mean
from toy import ONE, bias_of, client_app, fedavg, model, put_sent_frame, stack

from fedcomp import wire
from fedcomp.clients.compressed import compression
from fedcomp.clients.private.mod import private
from fedcomp.codecs import Identity, RandomK, ScaleCom, TopK
from fedcomp.errors import NoUsableReply
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME, put_frame
from fedcomp.flower.report import Report
from fedcomp.flower.rounds import fit
from fedcomp.layout import SmallDense
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.partitions import Holders, contest
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.replies import MAX_ENTRIES, MAX_NUMBERS, MAX_RECORDS, Usual, agreeing, weight_of
from fedcomp.strategies.shared_support import SharedSupport

Client = Callable[[Message, Context], Message]


def run(strategy, evil, *, nodes=4, rounds=2, culprit=1, mods=True, kind="train", initial=None, app=None):
    """Run with one client whose reply content ``evil`` changes; return the result."""
    honest = app or client_app([compression()] if mods else [])
    hostile = forged(honest, evil, culprit)

    def client(msg: Message, context: Context) -> Message:
        return (hostile if msg.metadata.message_type == kind else honest)(msg, context)

    grid = MeteredGrid(InProcessGrid(client, nodes, seed=4))
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
        expected = bias_of((1, (0, 2, 3)), (2, (0, 2, 3)))
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
        grid = MeteredGrid(InProcessGrid(app, 4, seed=4))
        with pytest.raises(NoUsableReply, match=r"the run has learnt nothing.*not finite"):
            strategy.start(grid, model(3e38), num_rounds=2, timeout=9)
        assert len(strategy.reports) == 2
        assert not any(r.used for r in strategy.reports.values())
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


def many(count: int, kind: type, name: str = "more.") -> Callable[[RecordDict], None]:
    def evil(content: RecordDict) -> None:
        for i in range(count):
            content[f"{name}{i}"] = kind({"a": 1.0})

    return evil


def entries(count: int, name: str = "metrics") -> Callable[[RecordDict], None]:
    def evil(content: RecordDict) -> None:
        kind = MetricRecord if name == "metrics" else ConfigRecord
        content[name] = kind({**content.get(name, {}), **{f"k{i}": 1.0 for i in range(count)}})

    return evil


LARGE = {
    "2,000 records": (many(2_000, ConfigRecord), "2002 records; at most 64"),
    "records, one too many": (many(MAX_RECORDS - 1, ConfigRecord), "65 records; at most 64"),
    "frames, one too many": (
        many(MAX_ENTRIES + 1, ConfigRecord, "fedcomp.post."),
        "holds 1025 frames; at most 1024",
    ),
    "5,000 metrics": (entries(5_000), "record 'metrics' of the reply holds 5003 entries; at most 1024"),
    "metrics, one too many": (entries(MAX_ENTRIES - 2), "1025 entries; at most 1024"),
    "5,000 settings": (entries(5_000, "more"), "record 'more' of the reply holds 5000 entries"),
    "a list, one too long": (metric("seen", [1.0] * (MAX_NUMBERS + 1)), "lists hold 65537 numbers; at most 65536"),
    "one post for many": (many(1, ConfigRecord, "fedcomp.post.0/1" + ",1" * (MAX_NUMBERS + 1) + "/x"), "65537 numbers"),
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


# Two nodes that declare one partition, the likeliest mistake with many devices: refused and named on every path.

TWIN = 7
"""Nodes of this partition and those after it declare partition 2."""


def grid_of(app: Any, nodes: int = 4) -> Blind:
    """Return a grid whose nodes added as partition ``TWIN`` and later declare partition 2."""
    return Blind(app, nodes, seed=4, node_config=lambda p: {"partition-id": 2 if p >= TWIN else p})


def play(
    strategy: Any, grid: InProcessGrid, rounds: int, *, start: int = 1, arrays: ArrayRecord | None = None
) -> ArrayRecord:
    initial = model() if arrays is None else arrays
    return fit(strategy, MeteredGrid(grid), initial, rounds, start_round=start, timeout=9).arrays


MEANS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "frames": (lambda: Compressed(fedavg(), TopK(1.0)), lambda: client_app([compression()])),
    "plain": (lambda: Compressed(fedavg(), TopK(1.0)), client_app),
    "shared support": (
        lambda: SharedSupport(ScaleCom(density=1.0), fraction_evaluate=1.0),
        lambda: client_app([compression()]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", MEANS)
def test_d1_twins_are_both_refused_and_named_in_report_and_log(path: str, caplog) -> None:
    strategy, app = (make() for make in MEANS[path])
    grid = grid_of(app, 3)
    twins = {grid.node_id_of(2), grid.add_node(TWIN)}
    with caplog.at_level(logging.WARNING, "flwr.fedcomp"):
        arrays = play(strategy, grid, 2)
    for report in strategy.reports.values():
        assert report.refused.keys() == twins
        assert all("2 nodes declare partition 2" in reason for reason in report.refused.values())
    np.testing.assert_allclose(arrays["bias"].numpy(), bias_of((1, (0, 1)), (2, (0, 1))), rtol=1e-5, atol=1e-2)
    told = [r.getMessage() for r in caplog.records if "declare partition 2" in r.getMessage()]
    assert len(told) >= 1
    assert all(str(node) in told[0] for node in twins)
    # What evaluates is refused, too, whether or not its reply says again which partition it is.
    assert all(report.refused.keys() == twins for report in strategy.evaluations.values())
    assert len(strategy.evaluations) == 2


@pytest.mark.slow
@pytest.mark.parametrize("path", MEANS)
def test_d1_a_newcomer_does_not_drive_out_the_holder_and_takes_over_when_that_one_is_gone(path: str) -> None:
    strategy, app = (make() for make in MEANS[path])
    grid = grid_of(app, 3)
    arrays = play(strategy, grid, 1)
    held, twin = grid.node_id_of(2), grid.add_node(TWIN)
    arrays = play(strategy, grid, 2, start=2, arrays=arrays)
    assert strategy.reports[2].refused.keys() == {twin}
    assert f"only node {held}" in strategy.reports[2].refused[twin]
    np.testing.assert_allclose(arrays["bias"].numpy(), bias_of((1, (0, 1, 2)), (2, (0, 1, 2))), rtol=1e-5, atol=1e-2)
    fresh = MEANS[path][0]()
    fresh.load_state_dict(strategy.state_dict())
    grid.remove_node(held)
    play(fresh, grid, 3, start=3, arrays=arrays)
    assert fresh.reports[3].refused == {}


@pytest.mark.slow
def test_d1_a_hundred_copied_configurations_train_nothing_and_say_so() -> None:
    """Everybody is partition 0: an error in the first round, rather than one device's model a hundred times."""
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(1.0))
    grid = Blind(client_app([compression()]), 100, seed=4, node_config=lambda p: {"partition-id": 0})
    with pytest.raises(NoUsableReply, match=r"100 x 100 nodes declare partition 0 .*partition-id of its own"):
        fit(strategy, grid, model(), 1, timeout=9)
    assert len(strategy.reports[1].refused) == 100


@pytest.mark.parametrize("pair", [True, False], ids=["compressed", "alone"])
def test_d1_in_a_private_round_twins_are_left_out_whoever_was_there_before(pair: bool) -> None:
    """A holder of earlier rounds would make what one client adds to the sum depend on another's part in it."""

    def made() -> Any:
        inner = DpFedAvg(
            bare_mean(), clip=1.0, noise_multiplier=0.0, population=8, insecure_deterministic=True, delta=1e-5
        )
        return Compressed(inner, Identity()) if pair else inner

    strategy = made()
    grid = grid_of(client_app([compression(), private()] if pair else [private()]), 3)
    arrays = play(strategy, grid, 1)
    assert strategy.reports[1].refused == {}
    held, twin = grid.node_id_of(2), grid.add_node(TWIN)
    play(strategy, grid, 2, start=2, arrays=arrays)
    assert strategy.reports[2].refused.keys() == {held, twin}


@pytest.mark.parametrize("teachers", [1, 3])
def test_d1_in_a_round_of_datalens_twins_votes_are_left_out_and_named(teachers: int, caplog) -> None:
    def played(copied: tuple[int, ...]) -> Report:
        strategy = datalens_toy.strategy(teachers=teachers, adjacency="replace" if teachers > 1 else "zero_out")
        config = lambda p: {"partition-id": 0 if p in copied else p}  # noqa: E731
        grid = MeteredGrid(Blind(datalens_toy.client(), 4, seed=2, node_config=config))
        strategy.start(grid, datalens_toy.model(), num_rounds=1, timeout=9)
        return strategy.reports[1]

    with caplog.at_level(logging.WARNING, "fedcomp"):
        report = played((0, 1, 2, 3))
    assert (report.asked, report.used, len(report.refused)) == (4, 0, 4)
    assert all("4 nodes declare partition 0" in reason for reason in report.refused.values())
    assert any("4 nodes declare partition 0" in message for message in caplog.messages)
    report = played((0, 2))
    assert (report.datalens.answered, len(report.refused), report.lost) == (2, 2, 0)
    assert played(()).refused == {}


def test_d1_where_the_engine_knows_a_claim_in_a_reply_costs_its_own_update_alone() -> None:
    """A hostile node says it is another's partition: in process it is known not to be, and the other one stays."""
    liar = forged(client_app([compression()]), header(partition_id=2), 1)
    for grid, refused in ((InProcessGrid(liar, 4, seed=4), 1), (Blind(liar, 4, seed=4), 2)):
        strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(1.0))
        play(strategy, grid, 1)
        assert len(strategy.reports[1].refused) == refused


@pytest.mark.parametrize("blind", [False, True], ids=["the engine knows", "what nodes say"])
def test_d1_a_claim_in_an_answer_to_a_query_drives_out_no_holder(blind: bool) -> None:
    """Honest in training, a twin in the second exchange: before, that evicted the honest node, on any engine."""

    def liar(msg: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(msg, context)
        if context.node_config["partition-id"] == 3 and "query" in msg.metadata.message_type:
            reply.content["fedcomp.node"]["partition-id"] = 2
        return reply

    grid = (Blind if blind else InProcessGrid)(client_app([liar, compression()]), 4, seed=4)
    strategy = SharedSupport(ScaleCom(density=0.5), fraction_evaluate=0.0)
    play(strategy, grid, 2)
    for report in strategy.reports.values():
        assert grid.node_id_of(2) not in report.refused
        assert report.refused.keys() <= {grid.node_id_of(3)}
    assert strategy.reports[1].refused


def test_d1_contest() -> None:
    """Of one partition: its only node; the one that held it; nobody. Every refused node is named with its rivals."""
    held, refused = contest({11: 0, 12: 1, 13: 1, 14: 2, 15: 2}, {1: 13, 2: 99})
    assert held == {0: 11, 1: 13}
    assert refused.keys() == {12, 14, 15}
    assert "only node 13" in refused[12]
    assert "none of them" in refused[14]
    assert "14, 15" in refused[15]


def test_d1_a_node_without_a_configured_partition_is_nobodys_twin() -> None:
    """What such a node declares is drawn from its id; that two draws are equal is no mistake."""
    a, b = (5 << 31) + 3, (9 << 31) + 3
    assert Holders().settle([a, b], {a: 3, b: 3}) == {}
    assert Holders().settle([a, 77], {a: 3, 77: 3}) == {}, "one of them is configured as 3, and alone"
    assert Holders().settle([76, 77], {76: 3, 77: 3}).keys() == {76, 77}


def test_d1_a_holder_that_is_silent_or_offline_or_declares_another_partition_holds_no_longer() -> None:
    book = Holders()
    assert book.settle([1, 2], {1: 0, 2: 5}) == {}
    assert book.settle([1, 3], {1: None, 3: 0}).keys() == {3}, "its last word stands"
    assert book.settle([1, 3], {3: 0}) == {}, "the holder did not answer"
    assert book.settle([1, 3], {1: 0, 3: 0}).keys() == {3}, "and is heard when it comes back"
    book.meet(Room([1, 2]))
    assert book.settle([1], {1: 0}) == {}
    assert book.settle([1, 2], {1: 5, 2: 5}).keys() == {1}
    again = Holders()
    again.load_state_dict(book.state_dict())
    assert again.settle([1, 2], {1: 5, 2: 5}).keys() == {1}


def test_who_declares_a_partition_while_its_holder_misses_a_reply_does_not_keep_it() -> None:
    """Node 1 has a key, or has it not: under its id it held partition 0 first."""
    book = Holders()
    assert book.settle([1, 2], {1: 0, 2: 5}) == {}
    for _ in range(3):
        assert book.settle([1, 2, 3], {2: 5, 3: 0}) == {}, "a replacement is used while nobody else answers"
        restored = Holders()
        restored.load_state_dict(book.state_dict())
        for each in (book, restored):
            assert each.settle([1, 2, 3], {1: 0, 2: 5, 3: 0}).keys() == {3}
    # A holder that came back under another id is one that came later; of the later ones the first is meant, too.
    book.meet(Room([2, 4]))
    assert book.settle([2, 4], {2: 5, 4: 0}) == {}
    assert book.settle([2, 4, 6], {2: 5, 6: 0}) == {}
    assert book.settle([2, 4, 6], {2: 5, 4: 0, 6: 0}).keys() == {6}
    # Whoever comes under many ids fills no memory.
    for stranger in range(100, 200):
        book.meet(Room([4, stranger]))
        assert book.settle([4, stranger], {stranger: 0}) == {}
    assert len(book.former[0]) == 16
    assert book.settle([4, 199], {4: 0, 199: 0}).keys() == {199}


# What a tie of forms decides.


def odd(strategy: Compressed, culprit: int, rounds: int, *, since: int = 1, nodes: int = 2) -> ArrayRecord:
    honest = client_app([compression()])

    def app(msg: Message, context: Context) -> Message:
        reply = honest(msg, context)
        number = int(next(iter(msg.content.config_records.values()))["server-round"])
        if context.node_config["partition-id"] == culprit and number >= since:
            reply.content["metrics"]["more"] = 1.0
        return reply

    return play(strategy, Blind(app, nodes, seed=4), rounds)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("inner", [fedavg, FedMedian])
def test_d3_between_two_forms_that_are_equally_frequent_nobody_is_chosen(culprit: int, inner: Any) -> None:
    strategy = Compressed(inner(**ONE), TopK(1.0))
    with pytest.raises(NoUsableReply, match="equally frequent"):
        odd(strategy, culprit, 1)
    assert len(strategy.reports[1].refused) == 2
    assert all("equally frequent" in reason for reason in strategy.reports[1].refused.values())


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
def test_d3_the_form_of_earlier_rounds_decides_a_tie(culprit: int) -> None:
    """Who is odd is known when the others' form is: the honest client stays, in training and in evaluation."""
    strategy = Compressed(fedavg(), TopK(1.0))
    arrays = odd(strategy, culprit, 3, since=2)
    assert [len(report.refused) for report in strategy.reports.values()] == [0, 1, 1]
    assert [len(report.refused) for report in strategy.evaluations.values()] == [0, 1, 1]
    other = (1 - culprit,)
    np.testing.assert_allclose(
        arrays["bias"].numpy(), bias_of((1, (0, 1)), (2, other), (3, other)), rtol=1e-5, atol=1e-2
    )


def test_d3_a_tie_among_many_rejects_its_forms_only_when_none_was_usual() -> None:
    def item(node: int, *names: str) -> tuple[int, str, RecordDict]:
        return node, "arrays", RecordDict({"metrics": MetricRecord(dict.fromkeys(names, 1.0))})

    items = [item(1, "a"), item(2, "b"), item(3, "a"), item(4, "b"), item(5, "c")]
    report = Report(1)
    assert agreeing(items, report, lambda node: node) == []
    assert report.refused.keys() == {1, 2, 3, 4, 5}
    usual = Usual()
    assert agreeing([item(2, "b")], Report(1), lambda node: node, usual) == [2]
    assert agreeing(items, Report(2), lambda node: node, usual) == [2, 4]
    assert agreeing([item(1, "a"), item(3, "a"), item(2, "b")], Report(3), lambda node: node, usual) == [1, 3]
