"""Nodes that say anything: what one of them sends costs itself, with a reason in the report, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from gossip_toy import COUNTER, NODES, Pull, client, grid, kept, model, strategy
from toy import with_halves

from fedcomp.clients.compressed import compression
from fedcomp.clients.gossip import GossipSetup, gossip_node
from fedcomp.errors import ConfigError
from fedcomp.flower import asks
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME, NODE_RECORD, POST, put_frame
from fedcomp.flower.rounds import fit
from fedcomp.gossip import ALGORITHMS
from fedcomp.program import HELLO, AnswerError, Said
from fedcomp.strategies.gossip.strategy import GossipRelay
from fedcomp.systems.gossip import Done, Turn, state_of

Change = Callable[[RecordDict], None]

LIE, LAST = 2, 4
"""The round in which a node lies, and the last one."""


class Liar:
    """Node ``culprit`` says something else in one iteration, in messages of one type."""

    def __init__(self, change: Change, kind: str, culprit: int) -> None:
        self.honest = client()
        self.change, self.kind, self.culprit = change, kind, culprit
        self.lied = False

    def __call__(self, message: Message, context: Context) -> Message:
        head = asks.find_ask(message.content)
        reply = self.honest(message, context)
        who = (0 if head is None else head.number, context.node_config["partition-id"], message.metadata.message_type)
        # Once: what is asked again has the number of the round in which it was asked first.
        if who == (LIE, self.culprit, self.kind) and not self.lied:
            self.lied = True
            # A copy: the node keeps what it has answered, and answers so again.
            reply.content = RecordDict({name: record.copy() for name, record in reply.content.items()})
            self.change(reply.content)
        return reply


def lied_to(change: Change, kind: str, culprit: int, name: str = "sgp") -> tuple[GossipRelay, Any]:
    relay, over = strategy(name, observe_every=LIE, patience=4), grid(Liar(change, kind, culprit))
    with over.inner:
        result = fit(relay, over, model(), LAST)
    assert relay.reports[LAST].gossip.members == list(range(NODES))
    assert relay.reports[LAST].gossip.observed["observed"] == NODES
    return relay, result


def shown(data: bytes, name: str = "model") -> Change:
    def change(content: RecordDict) -> None:
        put_data(content, FRAME + name, data)

    return change


def put_data(content: RecordDict, name: str, data: bytes) -> None:
    """Put other bytes in the place of some, which are an entry of the head's record where they are short."""
    if name in content[NODE_RECORD]:
        content[NODE_RECORD][name] = data
    else:
        put_frame(content, name, data)


def entry(name: str, value: Any) -> Change:
    return lambda content: content[NODE_RECORD].__setitem__(name, value)


SIZE = 60
MODELS: dict[str, tuple[Change, str]] = {
    "too short": (shown(b"1234"), "not one of the run"),
    "too long": (shown(bytes(10**6)), "not one of the run"),
    "of another dtype": (shown(np.zeros(SIZE).tobytes()), "not one of the run"),
    "not finite": (shown(np.full(SIZE, np.nan, np.float32).tobytes()), "non-finite"),
    "a counter too long": (shown(bytes(16), "own/" + COUNTER), "not one of the run"),
    "another tensor": (shown(bytes(8), "own/x"), "not one of the run"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("how", MODELS)
def test_a_model_that_cannot_be_one_is_not_seen(how: str) -> None:
    """Also not when it is the first one, whose form the mean would take."""
    change, reason = MODELS[how]
    relay, result = lied_to(change, "query.show", 0)
    (said,) = relay.reports[LIE].gossip.events["unseen"]
    assert said.startswith("vertex 0: ")
    assert reason in said
    assert relay.reports[LIE].gossip.observed["observed"] == NODES - 1
    for name, array in model().items():
        assert result.arrays[name].numpy().dtype == array.numpy().dtype


@pytest.mark.slow
def test_words_that_break_their_rules_are_refused_and_the_node_is_asked_again() -> None:
    for name, value, reason in (
        ("fedcomp.say.figures", [str(k) for k in range(5000)], "'figures' of Done"),
        ("fedcomp.say.values", [1.0, 2.0, 3.0], "facts of another length"),
        ("fedcomp.say.fresh", "yes", "'fresh' of Done"),
        ("fedcomp.say.unknown", 1, "no entries"),
    ):
        relay, _ = lied_to(entry(name, value), "train", 2)
        assert any(reason in why for why in relay.reports[LIE].refused.values()), relay.reports[LIE].refused
        assert relay.reports[LAST].gossip.observed["sum_w"] == pytest.approx(NODES, abs=1e-12)


@pytest.mark.parametrize(
    ("words", "lists"),
    [
        *((Done, each) for each in ({"needs": (1,)}, {"noticed": (1,)}, {"facts": ("own",)}, {"measured": (1.0,)})),
        *((Turn, {"do": "step", "turn": 1, **each}) for each in ({"out": (1,)}, {"weights": (0.5,)})),
    ],
)
def test_words_whose_lists_are_of_unequal_length_are_refused(words: type[Said], lists: dict[str, Any]) -> None:
    with pytest.raises(AnswerError, match="length"):
        words.of(lists)


@pytest.mark.slow
@pytest.mark.parametrize("values", [(np.inf, -np.inf), (1.7e308, 1.7e308), (np.nan, 1.0)])
def test_figures_of_any_size_are_reported_as_they_are(values: tuple[float, float]) -> None:
    honest = client()

    def app(message: Message, context: Context) -> Message:
        reply, vertex = honest(message, context), context.node_config["partition-id"]
        if message.metadata.message_type == "query.show" and vertex < 2:
            reply.content[NODE_RECORD]["fedcomp.say.figures"] = ["own"]
            reply.content[NODE_RECORD]["fedcomp.say.measured"] = [values[vertex]]
            reply.content[NODE_RECORD]["fedcomp.say.values"] = [values[vertex]]
        return reply

    relay, over = strategy("sgp"), grid(app)
    with over.inner:
        fit(relay, over, model(), 2)
    figures = relay.reports[2].gossip.observed
    assert not np.isfinite(figures["own_mean"])
    assert not np.isfinite(figures["sum_w"])
    assert figures["loss_mean"] > 0.0, "those of others count, also when the first node has none"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgp", "sparse-push"])
def test_messages_damaged_on_their_way_up_cost_what_they_carried_and_not_their_sender(name: str) -> None:
    """Nobody can read them any more: neither their receivers, nor, when they come back, the node that wrote them."""
    carried: list[float] = []

    def noise(content: RecordDict) -> None:
        for key, data in asks.data_in(content, POST).items():
            carried.append(float(np.frombuffer(data, np.float64, 1, 8)[0]))
            put_data(content, POST + key, b"\xff" * 40)

    relay, _ = lied_to(noise, "train", 1, name)
    lost = relay.reports[LAST].gossip.events["lost"]
    assert len(lost) == 2  # out-neighbours on the exponential graph of four
    assert all(one.startswith("vertex 1: message to node ") for one in lost)
    assert not relay.events.gone
    gone = sum(carried)
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
    def problem(message: Message, context: Context, setup: GossipSetup) -> Gone:
        now = message.content.config_records["config"]["server-round"]
        return Gone(int(context.node_config["partition-id"]), now)

    relay, over = strategy(name, observe_every=1, patience=4), grid(with_halves([compression(), gossip_node(problem)]))
    with over.inner:
        result = fit(relay, over, model(), 6)
    assert relay.reports[6].gossip.members == list(range(NODES))
    for array in result.arrays.values():
        assert np.abs(array.numpy()).max() < 10.0
    for partition in (0, 1, 3):
        assert np.abs(relay.algorithm.model(state_of(kept(over, partition)))).max() < 10.0
    events = [event for report in relay.reports.values() for kind in report.gossip.events.values() for event in kind]
    assert any("times its own norm" in event and "2" in event for event in events)


def test_a_vertex_nobody_has_is_reported_in_the_first_round_too() -> None:
    class Blind(InProcessGrid):
        def partition_of(self, node_id: int) -> None:
            return None

    honest = client()

    def app(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == HELLO and context.node_config["partition-id"] == 3:
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
    monkeypatch.setattr("fedcomp.strategies.gossip.strategy._POLL_SECONDS", 0.001)

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
