"""Nodes that say anything: what one of them sends costs itself, with a reason in the report, and the run goes on."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Context, Message, MetricRecord, RecordDict
from gossip_toy import COUNTER, NODES, Pull, client, grid, kept, model, strategy
from toy import with_halves

from fedcomp.clients.gossip import gossip_node
from fedcomp.errors import ConfigError
from fedcomp.flower import gossip
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import NODE_RECORD, STYPE, put_frame
from fedcomp.flower.rounds import fit
from fedcomp.gossip import ALGORITHMS
from fedcomp.strategies.gossip.strategy import GossipRelay

Change = Callable[[RecordDict], None]

LIE, LAST = 2, 4
"""The round in which a node lies, and the last one."""


class Liar:
    """Node ``culprit`` says something else in one round, in messages of one type."""

    def __init__(self, change: Change, kind: str, culprit: int) -> None:
        self.honest = client()
        self.change, self.kind, self.culprit = change, kind, culprit

    def __call__(self, message: Message, context: Context) -> Message:
        reply = self.honest(message, context)
        now = message.content.config_records["config"]["server-round"]
        who = (now, context.node_config["partition-id"], message.metadata.message_type)
        if who == (LIE, self.culprit, self.kind):
            self.change(reply.content)
        return reply


def lied_to(change: Change, kind: str, culprit: int, name: str = "sgp") -> tuple[GossipRelay, Any]:
    relay, over = strategy(name, observe_every=LIE, patience=4), grid(Liar(change, kind, culprit))
    with over.inner:
        result = fit(relay, over, model(), LAST)
    assert relay.reports[LAST].gossip.members == list(range(NODES))
    assert relay.reports[LAST].gossip.observed["observed"] == NODES
    return relay, result


def npy(array: np.ndarray, **claims: Any) -> bytes:
    out = io.BytesIO()
    header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape, **claims}
    np.lib.format.write_array_header_1_0(out, header)
    return out.getvalue() + array.tobytes()


def shown(data: bytes, stype: str = "numpy.ndarray", name: str = "weight") -> Change:
    def change(content: RecordDict) -> None:
        content[gossip.MODEL][name] = Array("float32", (8, 6), stype, data)

    return change


def zipped() -> bytes:
    out = io.BytesIO()
    np.savez(out, a=np.ones(3))
    return out.getvalue()


WEIGHT = np.zeros((8, 6), np.float32)
MODELS: dict[str, tuple[Change, str]] = {
    "text": (shown(npy(np.full((8, 6), "a"))), "is <U1"),
    "complex numbers": (shown(npy(WEIGHT.astype(complex))), "is complex128"),
    "2**40 rows, it claims": (shown(npy(WEIGHT, shape=(2**40, 6))), "expected float32"),
    "a header that never ends": (shown(npy(WEIGHT).replace(b"{'descr'", b"((((((((")), "cannot be read"),
    "an archive": (shown(zipped()), "cannot be read"),
    "another serialisation": (shown(b"1234", "pickle"), "serialised as"),
    "not finite": (shown(npy(np.full_like(WEIGHT, np.nan))), "non-finite"),
    "beyond float32": (shown(npy(np.full((8, 6), 1e308))), "non-finite"),
    "a counter with a fraction": (shown(npy(np.array(2.5)), name=COUNTER), "is float64"),
    "nothing": (lambda content: content.__delitem__(gossip.MODEL), "no model"),
    "5000 figures": (
        lambda content: content.__setitem__(gossip.FIGURES, MetricRecord({str(k): 1.0 for k in range(5000)})),
        "5000 figures",
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("how", MODELS)
def test_a_model_that_cannot_be_one_is_not_seen(how: str) -> None:
    """Also not when it is the first one, whose form the mean would take."""
    change, reason = MODELS[how]
    relay, result = lied_to(change, gossip.OBSERVE_TYPE, 0)
    (said,) = relay.reports[LIE].gossip.events["unseen"]
    assert said.startswith("vertex 0: ")
    assert reason in said
    assert relay.reports[LIE].gossip.observed["observed"] == NODES - 1
    for name, array in model().items():
        assert result.arrays[name].numpy().dtype == array.numpy().dtype


@pytest.mark.slow
@pytest.mark.parametrize("values", [(np.inf, -np.inf), (1.7e308, 1.7e308), (np.nan, 1.0)])
def test_figures_of_any_size_are_reported_as_they_are(values: tuple[float, float]) -> None:
    honest = client()

    def app(message: Message, context: Context) -> Message:
        reply, vertex = honest(message, context), context.node_config["partition-id"]
        if message.metadata.message_type == gossip.OBSERVE_TYPE and vertex < 2:
            reply.content[gossip.FIGURES] = MetricRecord({"own": values[vertex]})
            reply.content[gossip.HEADER]["facts.values"] = [values[vertex]]
        return reply

    relay, over = strategy("sgp"), grid(app)
    with over.inner:
        fit(relay, over, model(), 2)
    figures = relay.reports[2].gossip.observed
    assert not np.isfinite(figures["own_mean"])
    assert not np.isfinite(figures["sum_w"])
    assert figures["loss_mean"] > 0.0, "those of others count, also when the first node has none"


def entry(**values: Any) -> Change:
    def change(content: RecordDict) -> None:
        for name, value in values.items():
            content[gossip.HEADER][name.replace("_", ".")] = value

    return change


def messages(make: Callable[[RecordDict, str], None]) -> Change:
    def change(content: RecordDict) -> None:
        for name in [name for name in content if "/messages/" in name]:
            make(content, name)

    return change


def more(content: RecordDict) -> None:
    for place in range(3000):
        put_frame(content, f"{gossip.HEADER}/messages/{place}", b"1")


ANSWERS: dict[str, tuple[Change, str]] = {
    "a number as text": (entry(serial="1"), "'serial'"),
    "50 000 destinations": (entry(messages_to=list(range(50_000))), "of 50000 destinations"),
    "counts beyond all numbers": (entry(messages_counts=[2**62, 2**62]), "destinations"),
    "99 figures": (entry(facts=[str(k) for k in range(99)], facts_values=[0.0] * 99), "99 figures"),
    "figures without values": (entry(facts=["a", "b", "c"]), "not an answer to a gossip instruction"),
    "needs without reasons": (entry(needs=[1]), "for 0 reasons"),
    "losses of nothing": (entry(lost=["x"]), "0 did"),
    "3000 messages": (more, "3000 messages"),
    "messages of a megabyte": (messages(lambda content, name: put_frame(content, name, bytes(10**6))), "1000000 bytes"),
    "nothing": (lambda content: [content.__delitem__(name) for name in list(content)], "nothing under"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ANSWERS)
def test_an_answer_that_cannot_be_one_counts_as_none_and_is_asked_for_again(how: str) -> None:
    change, reason = ANSWERS[how]
    relay, _ = lied_to(change, gossip.EXCHANGE_TYPE, 2)
    said = relay.reports[LIE].gossip.events
    assert [kind for kind in said if kind != "unseen"] in (["unanswered"], ["refused"])
    assert any(reason in one for one in (*said.get("unanswered", ()), *said.get("refused", ())))
    assert relay.reports[LAST].gossip.observed["sum_w"] == pytest.approx(NODES, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgp", "sparse-push"])
def test_messages_damaged_on_their_way_up_cost_what_they_carried_and_not_their_sender(name: str) -> None:
    """Nobody can read them any more: neither their receivers, nor, when they come back, the node that wrote them."""
    carried: list[float] = []

    def noise(content: RecordDict, key: str) -> None:
        carried.append(float(np.frombuffer(content[key][STYPE], np.float64, 1, 8)[0]))
        put_frame(content, key, b"\xff" * 40)

    relay, _ = lied_to(messages(noise), gossip.EXCHANGE_TYPE, 1, name)
    lost = relay.reports[LAST].gossip.events["lost"]
    assert len(lost) == 2  # out-neighbours on the exponential graph of four
    assert all(one.startswith("vertex 1: message to node ") for one in lost)
    assert not relay.relay.report.gone
    gone = sum(carried) * len(lost) / len(carried)  # the same message for both, or one each
    assert relay.reports[LAST].gossip.observed["sum_w"] == pytest.approx(NODES - gone, abs=1e-12)
    assert gone > 0.03


class Gone(Pull):
    """From the second round on one node's own data drive its model away, to values that are finite and absurd."""

    def __init__(self, partition: int, now: int) -> None:
        super().__init__(partition)
        self.astray = partition == 2 and now >= LIE

    def gradient(self, arrays: Any, key: Any) -> dict[str, np.ndarray]:
        found = super().gradient(arrays, key)
        return {name: np.full_like(g, -1e30) for name, g in found.items()} if self.astray else found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_finite_and_absurd_model_stays_with_its_node_and_is_named(name: str) -> None:
    def problem(message: Message, context: Context, setup: gossip.GossipSetup) -> Gone:
        now = message.content.config_records["config"]["server-round"]
        return Gone(int(context.node_config["partition-id"]), now)

    relay, over = strategy(name, observe_every=1, patience=4), grid(with_halves([gossip_node(problem)]))
    with over.inner:
        result = fit(relay, over, model(), 6)
    assert relay.reports[6].gossip.members == list(range(NODES))
    for array in result.arrays.values():
        assert np.abs(array.numpy()).max() < 10.0
    for partition in (0, 1, 3):
        assert np.abs(relay.algorithm.model(kept(over, partition).memory.state)).max() < 10.0
    events = [event for report in relay.reports.values() for kind in report.gossip.events.values() for event in kind]
    assert any("times its own norm" in event and "2" in event for event in events)


def test_a_vertex_nobody_has_is_reported_in_the_first_round_too() -> None:
    class Blind(InProcessGrid):
        def partition_of(self, node_id: int) -> None:
            return None

    honest = client()

    def app(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == gossip.HELLO_TYPE and context.node_config["partition-id"] == 3:
            reply.content[NODE_RECORD]["partition-id"] = 2**31 - 1
        return reply

    relay, over = strategy("sgp", nodes=NODES, patience=2), MeteredGrid(Blind(app, NODES, seed=2))
    with over.inner:
        fit(relay, over, model(), 3)
    assert relay.reports[1].gossip.events["unknown"] == [f"a node says it is vertex {2**31 - 1} of a graph of {NODES}"]
    assert relay.reports[3].gossip.members == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("told", ["nodes", "clients"])
def test_the_first_round_waits_for_vertices_whose_node_is_late(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcomp.strategies.gossip.seats._POLL_SECONDS", 0.001)

    class Slow(InProcessGrid):
        calls = 0

        def get_node_ids(self) -> list[int]:
            self.calls += 1
            return sorted(super().get_node_ids())[: 2 if self.calls < 4 else None]

    relay = strategy("sgp", wait=30.0, nodes=NODES if told == "nodes" else 0)
    over = MeteredGrid(Slow(client(), NODES, seed=2))
    config = ConfigRecord({"clients": NODES} if told == "clients" else {})
    with over.inner:
        fit(relay, over, model(), 2, train_config=config)
    assert relay.reports[1].gossip.members == list(range(NODES))
    assert relay.reports[1].gossip.answers == NODES


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "some"])
def test_closing_iterations_out_of_range_are_refused_at_once(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="skew_rounds"):
        strategy("sgp", skew_rounds=wrong)


@pytest.mark.slow
def test_state_does_not_grow_with_the_rounds() -> None:
    for name in ("sparse-push", "cold"):
        relay, over = strategy(name), grid()
        sizes: list[int] = []

        def size(server_round: int, arrays: object, outcome: object, over=over, sizes=sizes) -> None:
            sizes.append(sum(record.count_bytes() for record in over.context(1).state.values()))

        with over.inner:
            fit(relay, over, model(), 9, on_round=size)
        assert len(set(sizes[2:8])) == 1
