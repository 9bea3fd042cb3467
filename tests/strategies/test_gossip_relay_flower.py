"""Decentralised learning through Flower's star: the same bits as in one process, whatever the network does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from gossip_toy import (
    COUNTER,
    NODES,
    ROUNDS,
    Pull,
    central,
    client,
    grid,
    kept,
    made,
    model,
    states,
    states_of,
    strategy,
)
from plain_grid import Blind
from toy import by_partition, client_app, with_halves

from fedcomp.clients.compressed import compression
from fedcomp.clients.gossip import GossipSetup, gossip_node
from fedcomp.coding.spool import Spool
from fedcomp.errors import ConfigError, NoUsableReply, StateError
from fedcomp.flower import asks, checkpoint
from fedcomp.flower import store as store_module
from fedcomp.flower.faults import Delivery, RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME, NODE_RECORD, POST, put_frame
from fedcomp.flower.rounds import fit
from fedcomp.gossip import ALGORITHMS
from fedcomp.gossip.errors import Diverged
from fedcomp.gossip.packet import HEADER_BYTES
from fedcomp.gossip.topology import Complete, TopologyError
from fedcomp.gossip_simulation import FaultPlan
from fedcomp.program import AnswerError, Said
from fedcomp.rng import Key
from fedcomp.strategies.gossip.report import Observed, why_not_finite
from fedcomp.strategies.gossip.strategy import GossipRelay
from fedcomp.systems.gossip import Done, Gossip, Turn, own_of, state_of


def run(relay: GossipRelay, over: MeteredGrid, rounds: int = ROUNDS):
    with over.inner:
        return relay.start(over, model(), num_rounds=rounds, timeout=9)


def fitted(relay: GossipRelay, over: MeteredGrid, rounds: int, **options: Any):
    with over.inner:
        return fit(relay, over, model(), rounds, timeout=9, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgp", "gradient-tracking", "dyna-cold", "power-gossip"])
def test_7_16_and_7_17_relay_and_central_mode_agree_to_the_bit(name: str) -> None:
    """The states of all nodes, and the messages' bytes whatever way they take; every row: test_gossip_systems.py."""
    algorithm, relay, over = made(name), strategy(name), grid()
    result, alone = run(relay, over), central(made(name))
    assert states(over) == states_of(alone)
    for counter in ("edge", "node", "up", "down", "undelivered"):
        assert getattr(relay.traffic, counter) == getattr(alone.traffic, counter)
    told = sum(report.traffic["edge"] for report in relay.reports.sections("gossip").values())
    assert told == relay.traffic.edge_bytes == alone.traffic.edge_bytes > 0
    assert [report.exchanges for report in relay.reports.sections("gossip").values()] == [1] * (ROUNDS - 1) + [2]
    # Buffers that never leave a node are its own: every gradient counted once.
    assert [int(own_of(kept(over, p))[COUNTER]) for p in range(NODES)] == [ROUNDS] * NODES
    middle = np.mean([algorithm.model(alone.states[p]).astype(float) for p in range(NODES)], axis=0)
    tensors = [t.name for t in relay.layout.tensors]
    seen = np.concatenate([result.arrays[name].numpy().ravel() for name in tensors])
    assert seen.tobytes() == middle.astype(np.float32).tobytes()


def test_a_training_with_another_model_knows_neither_graph_nor_figures_of_the_former_one() -> None:
    """It had as many vertices, and ended as diverged at innovations that were large beside those before."""
    relay, first, second = strategy("choco"), grid(), grid(nodes=NODES + 2)
    run(relay, first)
    former, far = relay._watch, model()
    far["bias"] = Array(np.full(6, 1e5, np.float32))
    with second.inner:
        relay.start(second, far, num_rounds=2, timeout=9)
    assert relay.vertices == NODES + 2
    assert not any(report.events for report in relay.reports.sections("gossip").values())
    assert [int(own_of(kept(second, p))[COUNTER]) for p in range(NODES + 2)] == [2] * (NODES + 2)
    assert relay._watch is not former


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [("sparse-push", {"skew_rounds": "auto"}), ("cold", {"dtype": "float64"})]
)
def test_7_16_closing_iterations_and_other_dtypes_agree_to_the_bit(name: str, options: dict) -> None:
    relay, over = strategy(name, **options), grid()
    run(relay, over)
    alone = central(made(name), **options)
    assert states(over) == states_of(alone)
    assert relay.traffic == alone.traffic
    dense = relay.reports[ROUNDS].gossip.traffic["edge.dense"]
    assert (dense > 0) == (name == "sparse-push")
    assert dense == alone.traffic.edge["dense"].bytes


WORDS = {"silent": "silent", "lost": "lost_reply", "twice": "duplicate", "": "none"}


def same_faults(rates: dict[str, float], until: int) -> tuple[FaultPlan, Callable[[Delivery], str]]:
    """The same faults for both: the first push of a run asks who is there, so exchange t is the relay's attempt t."""
    plan = FaultPlan(3, rates, until)

    def deliver(delivery: Delivery) -> str:
        trains = delivery.message_type.startswith("train")
        return WORDS[plan(delivery.partition, delivery.exchange)] if trains else "none"

    return plan, deliver


@pytest.mark.parametrize(
    ("name", "options", "whole"),
    [
        # 12 of 60 values travel whole, then all of them.
        ("choco", {}, False),
        ("choco", {"dense_below": 49}, True),
        # Nothing is compressed, whatever the layout allows.
        ("dpsgd", {"dense_below": 0}, True),
    ],
)
def test_the_line_of_a_round_has_the_bytes_of_messages_and_what_of_them_travels_whole(
    name: str, options: dict, whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    relay, over = strategy(name, **options), grid()
    with caplog.at_level("INFO", "flwr.fedcomp"):
        run(relay, over)
    reports = list(relay.reports.values())
    assert sum(report.payload_bytes for report in reports) == relay.traffic.node_bytes
    sent = [record.getMessage() for record in caplog.records if "GossipRelay, round" in record.getMessage()]
    values = sum(np.prod(shape) for shape in ((8, 6), (6,), (6,)))
    for report, line in zip(reports, sent, strict=True):
        assert report.ratio == NODES * 4 * values / report.payload_bytes
        share = 100 * report.dense_bytes / report.frame_bytes
        assert f"messages {report.payload_bytes:,} bytes, " in line
        assert f"{share:.0f} % of the frames dense" in line
        assert ("no fewer than models" in line) == whole
        assert report.frame_bytes == report.payload_bytes - NODES * HEADER_BYTES
        assert report.dense_bytes == NODES * 4 * (values if whole else 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgp", "sparse-push"])
def test_7_16_push_sum_with_the_same_faults_agrees_to_the_bit(name: str) -> None:
    rates = {"silent": 0.15, "lost": 0.15, "twice": 0.1}
    plan, deliver = same_faults(rates, until=8)
    relay, over = strategy(name), grid(fault=deliver)
    run(relay, over, rounds=12)
    alone = central(made(name), faults=plan, iterations=12)
    assert relay.events.repeated > 3
    assert states(over) == states_of(alone)
    assert relay.traffic == alone.traffic
    assert relay.reports[12].gossip.observed["sum_w"] == pytest.approx(NODES, abs=1e-12)


def test_7_17_what_a_run_costs_beside_its_messages() -> None:
    relay, over = strategy("choco"), grid()
    run(relay, over)
    # The model travels once to every node.
    begin = NODES * sum(len(array.data) for array in model().values())
    assert [section.start for section in relay.reports.sections("gossip").values()] == [begin, *[0] * (ROUNDS - 1)]
    payload = {d: over.ledger.total("payload", direction=d, message_type="train") for d in ("up", "down")}
    assert payload["down"] == relay.traffic.down.bytes + begin
    # What goes to several neighbours travels once to the server, and from it to each.
    assert payload["up"] == relay.traffic.up.bytes < relay.traffic.edge_bytes
    assert over.ledger.total("messages", direction="down", message_type="query.show") == NODES
    assert over.ledger.total("messages", direction="down", message_type="query.hello") == NODES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparse-push", "beer"])
def test_7_17_edge_bytes_by_phase_are_the_messages_the_nodes_wrote_each_counted_once(name: str) -> None:
    """Whatever is sent again on the way. Written down at the nodes, which know nothing of the counters."""
    wrote: dict[tuple[int, int, int], tuple[str, int]] = {}
    honest = client()

    def app(message: Message, context: Context) -> Message:
        turn = said(message)
        reply = honest(message, context)
        node = int(context.node_config["partition-id"])
        for post in asks.posts_in(reply.content, POST, node) if message.metadata.message_type == "train" else ():
            phase = "resync" if post.to in turn.resync else "dense" if turn.dense else "train"
            wrote[node, turn.turn, post.to] = (phase, len(post.data))
        return reply

    rates = {"silent": 0.06, "lost_reply": 0.08, "raise": 0.06, "duplicate": 0.05}
    faults = RandomFaults(Key(4, "faults"), rates, message_types=("train",))
    relay = strategy(name, patience=30, observe_every=2, skew_rounds=3 if name == "sparse-push" else 0)
    run(relay, grid(app, fault=faults), rounds=6)
    assert relay.events.repeated > 3
    for phase, count in relay.traffic.edge.items():
        assert count.bytes == sum(size for said, size in wrote.values() if said == phase)
        assert count.bytes == sum(
            report.traffic[f"edge.{phase}"] for report in relay.reports.sections("gossip").values()
        )
    assert relay.traffic.edge["train"].bytes > 0
    assert (relay.traffic.edge["dense"].bytes > 0) == (name == "sparse-push")


SYSTEM = Gossip({"name": "sgp"}, Complete(2))
"""Its words are those of all algorithms."""


def said(message: Message) -> Any:
    """Return what an ask says."""
    head = asks.find_ask(message.content)
    return None if head is None or not head.say else asks.say_of(message.content, head, SYSTEM)


@pytest.mark.slow
def test_a_second_node_of_a_vertex_waits_until_the_first_is_silent() -> None:
    """Its SuperNode was started with the partition id of another one, by mistake or as its successor."""

    def deliver(delivery: Delivery) -> str:
        return "silent" if delivery.partition == 3 and delivery.round >= 4 else "none"

    inner = Blind(client(), NODES, seed=2, fault=deliver, node_config=lambda p: {"partition-id": min(p, 3)})
    relay = strategy("sparse-push", nodes=NODES, observe_every=1)
    arrive = {1: lambda: inner.add_node(4)}
    fitted(relay, MeteredGrid(inner), 9, on_round=lambda r, *_: arrive.get(r, lambda: None)())
    (claim,) = relay.reports[2].gossip.events["unknown"]
    assert "2 nodes declare partition 3" in claim
    assert f"only node {inner.node_id_of(3)}" in claim
    assert [relay.reports[r].gossip.events for r in (1, 3)] == [{}, {}]
    assert "memory is lost" in relay.reports[5].gossip.events["gone"][0]
    assert relay.reports[9].gossip.members == [0, 1, 2, 3]
    assert relay.reports[9].gossip.observed["observed"] == NODES


def test_a_report_counts_a_node_once_in_a_round_that_is_observed_too() -> None:
    relay, over = strategy("sgp", observe_every=1), grid()
    fitted(relay, over, 2)
    assert relay.reports[2].gossip.observed
    assert [(report.asked, report.used) for report in relay.reports.values()] == [(NODES, NODES)] * 2


def test_a_vertex_outside_the_graph_takes_no_part() -> None:
    over = MeteredGrid(Blind(client(), 4, seed=2))
    relay = strategy("choco", nodes=NODES)
    fitted(relay, over, 4, on_round=lambda r, *_: over.add_node(7) if r == 1 else None)
    assert relay.reports[2].gossip.events["unknown"] == ["a node says it is vertex 7 of a graph of 4"]
    assert relay.reports[4].gossip.members == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_node_leaves_in_good_order_and_takes_nothing_with_it() -> None:
    relay, over = strategy("sparse-push", observe_every=1), grid()
    fitted(relay, over, 8, on_round=lambda r, *_: relay.leave(0) if r == 3 else None)
    assert relay.reports[8].gossip.members == [1, 2, 3]
    assert relay.reports[8].gossip.observed["sum_w"] == pytest.approx(NODES, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparse-push", "beer"])
def test_a_stored_run_goes_on_to_the_same_bits_and_bytes(name: str, tmp_path) -> None:
    """Stored while one node has not answered: its instruction is repeated by the new process as it was."""

    def deliver(delivery: Delivery) -> str:
        lost = delivery.partition == 1 and delivery.round == 2 and delivery.message_type == "train"
        return "lost_reply" if lost and name == "sparse-push" else "none"

    def fresh() -> tuple[GossipRelay, MeteredGrid]:
        return strategy(name), grid(fault=deliver)

    whole, over = fresh()
    fitted(whole, over, 5)
    first, before = fresh()
    file = tmp_path / "checkpoint"

    def store(server_round: int, arrays, outcome) -> None:
        checkpoint.save(file, server_round=server_round, arrays=arrays, strategy=first, grid=before)
        if server_round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(first, before, 5, on_round=store)
    again, after = fresh()
    found = checkpoint.load(file)
    found.apply(again, after)
    assert bool(again.mailbox.asked) == (name == "sparse-push")
    with after.inner:
        fit(again, after, found.arrays, 5, start_round=3, result=found.result)
    assert states(after) == states(over)
    assert again.traffic == whole.traffic
    assert again.state_dict()["watch"] == whole.state_dict()["watch"]
    for direction in ("up", "down"):
        assert after.ledger.by("round", "payload", direction=direction) == over.ledger.by(
            "round", "payload", direction=direction
        )


def test_a_state_of_another_run_is_refused() -> None:
    relay, over = strategy("choco"), grid()
    run(relay, over)
    with pytest.raises(StateError, match="resume with the same settings"):
        strategy("cold").load_state_dict(relay.state_dict())


@pytest.mark.parametrize("options", [{"nodes": -1}, {"watch": 3}, {"skew_rounds": -1}, {"skew_rounds": "some"}])
def test_arguments_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        strategy("sgp", **options)


@pytest.mark.parametrize("app", [client_app(), ClientApp()], ids=["one that trains", "an empty one"])
def test_apps_without_the_half_end_the_run_in_its_first_round_with_the_line_to_write(app: ClientApp) -> None:
    relay, calls = strategy("choco"), []

    def counted(msg: Message, context: Context) -> Message:
        calls.append(msg.metadata.message_type)
        return app(msg, context)

    with pytest.raises(NoUsableReply, match=r"round 1: none of the 4.*write app = fc.client\(app, fc.gossip_node\("):
        run(relay, grid(counted))
    assert calls == ["query.hello"] * NODES
    report = relay.reports[1]
    assert len(report.without_mod) == len(report.refused) == NODES


def test_an_app_with_other_halves_alone_is_refused_where_it_would_learn_nothing() -> None:
    with pytest.raises(StateError, match=r"no node is left.*write app = fc.client\(app, fc.gossip_node\("):
        run(strategy("choco", patience=2), grid(client_app([compression()])))


def test_one_app_without_the_half_is_refused_by_name_and_the_others_go_on() -> None:
    apps = [client() for _ in range(NODES - 1)] + [client_app()]
    relay = strategy("choco", nodes=NODES, topology="complete")
    result = run(relay, grid(by_partition(apps.__getitem__)), rounds=3)
    assert np.any(result.arrays["weight"].numpy())
    for report in relay.reports.values():
        (reason,) = report.refused.values()
        assert "lacks the client half of GossipRelay" in reason
        assert report.without_mod == list(report.refused)


@pytest.mark.parametrize(("topology", "why"), [("rng", "did you mean 'ring'"), ("exponential", "is directed")])
def test_a_graph_that_cannot_carry_the_algorithm_is_refused_where_it_is_written(topology: str, why: str) -> None:
    with pytest.raises(TopologyError, match=why):
        strategy("choco", topology=topology, nodes=NODES)
    assert repr(strategy("choco", topology="ring")).endswith(", 'ring')")


class Blindfolded(Pull):
    """It learns, and cannot show what it has learnt."""

    evaluate = None  # type: ignore[assignment]


def test_a_run_whose_models_nobody_shows_ends_with_what_the_nodes_said() -> None:
    app = with_halves([compression(), gossip_node(lambda msg, context, setup: Blindfolded(0))])
    with pytest.raises(StateError, match=r"no node has shown its model.*'NoneType' object is not callable"):
        run(strategy("choco"), grid(app), rounds=2)


def test_a_run_whose_result_is_not_finite_ends_with_an_error() -> None:
    """Before a watch has seen enough to judge: a watcher needs a hundred iterations."""
    with np.errstate(all="ignore"), pytest.raises(Diverged, match=r"'loss' of 4 of 4 nodes is infinite.*Halve gamma"):
        run(strategy(made("dpsgd", lr=3e5), observe_every=1), grid())
    # Two finite models may have a mean that is not.
    seen = [Observed({"w": np.full(2, 3e38)}, {}, {})] * 2
    with np.errstate(over="ignore"):
        middle = {"w": (2 * seen[0].arrays["w"]).astype(np.float32)}
    assert why_not_finite(seen, middle) == "the mean of the nodes' models is not finite in 'w'"


class PullOne(Pull):
    """Pulls one number to that of the node."""

    def gradient(self, arrays: Mapping[str, np.ndarray], key: Key) -> dict[str, np.ndarray]:
        return {"scale": arrays["scale"] - np.float32(self.partition)}

    def evaluate(self, arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
        return {"loss": float(arrays["scale"])}


@pytest.mark.parametrize("name", ["dpsgd", "sgp"])
def test_a_tensor_without_dimensions_is_averaged_like_any_other(name: str) -> None:
    relay = strategy(made(name, lr=0.5), topology="complete")
    half = gossip_node(lambda message, context, setup: PullOne(int(context.node_config["partition-id"])))
    with InProcessGrid(with_halves([compression(), half]), NODES, seed=2) as over:
        start = ArrayRecord({"scale": Array(np.array(9.0, np.float32))})
        found = relay.start(over, start, num_rounds=12, timeout=9).arrays["scale"].numpy()
    assert (found.shape, found.dtype) == ((), np.float32)
    assert found == pytest.approx(np.mean(range(NODES)), abs=0.01)


def test_figures_that_one_node_calls_infinite_end_no_run() -> None:
    class Odd(Pull):
        def evaluate(self, arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
            return {"loss": np.inf if self.partition == 1 else 1.0, "odd": np.nan}

    app = with_halves([compression(), gossip_node(lambda m, context, s: Odd(int(context.node_config["partition-id"])))])
    assert np.any(run(strategy("dpsgd"), grid(app)).arrays["weight"].numpy())


def test_a_run_whose_nodes_all_fail_ends_with_what_they_said() -> None:
    app = with_halves([compression(), gossip_node(lambda context: Pull(0))])  # type: ignore[arg-type,misc]
    with pytest.raises(StateError, match=r"(?s)no node is left.*Nodes answered.*takes 1 positional argument but 3"):
        run(strategy("choco", patience=2), grid(app))


def test_d5_the_state_of_another_number_of_nodes_is_refused() -> None:
    relay = strategy("sparse-push", nodes=NODES)
    state = relay.state_dict()
    with pytest.raises(StateError, match=f"of {NODES - 1} nodes, this strategy of {NODES}"):
        relay.load_state_dict({**state, "vertices": NODES - 1})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparse-push", "choco"])
def test_by_links_of_their_own_nodes_come_to_the_same_bits(name: str) -> None:
    """The server has references, also where answers are lost; what was not taken in goes back to its sender."""
    rates = {"silent": 0.1, "lost_reply": 0.1, "duplicate": 0.1}
    runs = []
    for transport in ("hub", "peers"):
        faults = RandomFaults(Key(4, "faults"), rates, message_types=("train",))
        relay, over = strategy(name, patience=30, transport=transport), grid(fault=faults)
        run(relay, over, rounds=6)
        runs.append((states(over), relay.traffic.edge, relay.traffic.node, relay.traffic.undelivered))
        assert relay.events.repeated > 3
    assert runs[0] == runs[1]
    # A reference and no more, however long a message is.
    assert relay.traffic.down.bytes == relay.traffic.down.messages * 36
    assert over.ledger.total("wire", link="peer", direction="up") > relay.traffic.edge_bytes


def test_a_node_reads_what_others_left_in_its_store_once_for_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it again for each neighbour takes the square of what they left."""
    reads, read = [], Spool.list
    monkeypatch.setattr(Spool, "list", lambda spool, run, number: reads.append(number) or read(spool, run, number))
    relay, over = strategy("choco", topology="complete", transport="peers"), grid()
    run(relay, over, rounds=4)
    assert 0 < len(reads) <= over.ledger.total("messages", direction="down", link="hub")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "lost_reply", "silent"])
@pytest.mark.parametrize("name", ["sparse-push", "choco"])
def test_a_restarted_server_goes_on_with_nodes_that_are_ahead_of_it(name: str, fault: str) -> None:
    """It was lost in round 3, in which some or all nodes had carried out what they were asked; nobody does it twice."""

    def deliver(delivery: Delivery) -> str:
        at = (delivery.partition, delivery.round, delivery.message_type) == (1, 3, "train")
        return fault if at and not restarted else "none"

    restarted: list[bool] = []
    whole, other = strategy(name, observe_every=2), grid()
    run(whole, other, rounds=6)
    first, over = strategy(name, observe_every=2), grid(fault=deliver)
    kept: dict[str, Any] = {}

    def store(server_round: int, arrays: object, outcome: object) -> None:
        if server_round == 2:
            kept.update(store_module.loads(store_module.dumps(first.state_dict(), "run"), "run"), arrays=arrays)
        if server_round == 3:
            raise KeyboardInterrupt

    with over.inner:
        with pytest.raises(KeyboardInterrupt):
            fit(first, over, model(), 6, timeout=9, on_round=store)
        again, arrays = strategy(name, observe_every=2), kept.pop("arrays")
        again.load_state_dict(kept)
        again.renumber()
        restarted.append(True)
        fit(again, over, arrays, 6, timeout=9, start_round=3)
    assert states(over) == states(other)
    assert not again.events.gone


@pytest.mark.parametrize("name", ["sgp", "choco"])
def test_models_are_seen_alike_where_messages_wait_in_links(name: str) -> None:
    seen = []
    for transport in ("hub", "peers"):
        relay = strategy(name, observe_every=1, transport=transport)
        run(relay, grid())
        seen.append([section.observed for section in relay.reports.sections("gossip").values()])
        assert not any("unseen" in section.events for section in relay.reports.sections("gossip").values())
    assert seen[0] == seen[1]


# Nodes that say anything: what one of them sends costs itself, with a reason in the report, and the run goes on.

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


def lied_to(change: Change, kind: str, culprit: int) -> tuple[GossipRelay, Any]:
    relay = strategy("sgp", observe_every=LIE, patience=4)
    result = fitted(relay, grid(Liar(change, kind, culprit)), LAST)
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

    relay = strategy("sgp")
    fitted(relay, grid(app), 2)
    figures = relay.reports[2].gossip.observed
    assert not np.isfinite(figures["own_mean"])
    assert not np.isfinite(figures["sum_w"])
    assert figures["loss_mean"] > 0.0, "those of others count, also when the first node has none"


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
    result = fitted(relay, over, 6)
    assert relay.reports[6].gossip.members == list(range(NODES))
    for array in result.arrays.values():
        assert np.abs(array.numpy()).max() < 10.0
    for partition in (0, 1, 3):
        assert np.abs(relay.algorithm.model(state_of(kept(over, partition)))).max() < 10.0
    events = [event for report in relay.reports.values() for kind in report.gossip.events.values() for event in kind]
    assert any("times its own norm" in event and "2" in event for event in events)


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
    fitted(relay, over, 2, train_config=ConfigRecord({"clients": NODES} if told == "clients" else {}))
    assert relay.reports[1].gossip.members == list(range(NODES))
    assert relay.reports[1].gossip.answers == NODES


@pytest.mark.slow
def test_state_does_not_grow_with_the_rounds() -> None:
    for name in ("sparse-push", "cold"):
        relay, over = strategy(name), grid()
        sizes: list[int] = []

        def size(*_: object, over=over, sizes=sizes) -> None:
            sizes.append(sum(record.count_bytes() for record in over.context(1).state.values()))

        fitted(relay, over, 9, on_round=size)
        assert len(set(sizes[2:8])) == 1
