"""Decentralised learning from node to node: the bits, the exactly-once rules and the fault table of the mailbox."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message
from gossip_toy import NODES, ROUNDS, central, client, grid, kept, made, model, states, states_of, strategy
from peer_key_files import make_key, make_list
from running_listener import Running, free_port
from toy import with_halves

from fedcomp.clients.edge.node_config import PEER_ADDRESS, PEER_KEY, PEER_KEYS, PEER_STORE
from fedcomp.clients.gossip import gossip_node
from fedcomp.clients.gossip_links import GOSSIP
from fedcomp.coding.errors import SealError
from fedcomp.coding.parcels import MemoryStore
from fedcomp.coding.sealing import PeerIdentity
from fedcomp.coding.transport import HEADER_BYTES, Parcel, Spool, SpoolRoot
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower import checkpoint, gossip
from fedcomp.flower.faults import Delivery, RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.gossip.reference import REFERENCE_BYTES, Reference
from fedcomp.gossip_simulation import FaultPlan
from fedcomp.rng import Key
from fedcomp.strategies.coded.links import REST_ROUNDS
from fedcomp.strategies.gossip import links as gossip_links
from fedcomp.strategies.gossip.strategy import GossipRelay

SEALED = 48


def peers(algorithm: str, root: Path | None = None, **options) -> GossipRelay:
    return strategy(algorithm, transport="peers", spool=root, **options)


def run(relay: GossipRelay, over: MeteredGrid, rounds: int = ROUNDS, after: Callable | None = None):
    with over.inner:
        return fit(relay, over, model(), rounds, timeout=9, on_round=after)


def sections(relay: GossipRelay):
    return relay.reports.sections("gossip").values()


def spool(root: Path, vertex: int) -> Spool:
    return SpoolRoot(root).spool(vertex)


def kept_parcels(root: Path, vertex: int) -> list[Path]:
    return sorted(spool(root, vertex).directory.glob("*.parcel"))


@pytest.mark.parametrize("name", ["sgp", "sparse-push", "choco", "beer", "power-gossip"])
def test_the_same_bits_as_over_the_mailbox_and_every_byte_on_its_link(name: str) -> None:
    hub, over_hub = strategy(name, observe_every=1), grid()
    run(hub, over_hub)
    links, over_links = peers(name, observe_every=1), grid()
    run(links, over_links)
    assert states(over_links) == states(over_hub)
    theirs, ours = hub.relay.traffic, links.relay.traffic
    assert ours.edge == theirs.edge
    assert ours.edge_bytes > 0
    if name != "power-gossip":  # whose first messages to both neighbours are the same bytes
        assert ours.node == theirs.node
    # The relay has references, and nothing of a message.
    assert ours.down.bytes == ours.down.messages * REFERENCE_BYTES
    assert ours.up.bytes == ours.up.messages * REFERENCE_BYTES
    assert ours.down.messages == theirs.down.messages
    by_link = [sum(section.link_bytes.values()) for section in sections(links)]
    carried = [
        section.traffic["edge"] + section.traffic["edge.messages"] * (HEADER_BYTES + SEALED)
        for section in sections(links)
    ]
    assert by_link == carried
    assert sum(by_link) == over_links.ledger.total("wire", link="peer")
    assert over_links.ledger.total("wire", link="peer", direction="up") == sum(by_link)
    assert all(set(section.link_bytes) == set(links.reports[1].gossip.link_bytes) for section in sections(links))
    assert not any(section.events for section in sections(links))
    assert over_hub.ledger.total("wire", link="peer") == 0


def test_what_passes_the_server_does_not_grow_with_the_model() -> None:
    def larger(times: int) -> ArrayRecord:
        rng = np.random.default_rng(0)
        shapes = {"weight": (8, 6 * times), "bias": (6 * times,)}
        return ArrayRecord(
            {name: Array(rng.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}
        )

    class Still:
        def __init__(self, partition: int) -> None:
            self.partition = partition

        def gradient(self, arrays, key):
            return {name: array - np.float32(self.partition) for name, array in arrays.items()}

        def buffers_after(self):
            return {}

        def evaluate(self, arrays):
            return {}

    app = with_halves([gossip_node(lambda msg, context, setup: Still(int(context.node_config["partition-id"])))])
    wire: dict[tuple[str, int], int] = {}
    for transport in ("hub", "peers"):
        for times in (1, 200):
            relay, over = strategy("dpsgd", transport=transport), grid(app)
            with over.inner:
                fit(relay, over, larger(times), 3, timeout=9)
            wire[transport, times] = over.ledger.total("wire", message_type=gossip.EXCHANGE_TYPE, link="hub", round=2)
    assert wire["hub", 200] > 20 * wire["hub", 1]
    assert abs(wire["peers", 200] - wire["peers", 1]) < 100
    assert wire["peers", 200] < wire["hub", 200] / 20


@pytest.mark.slow
@pytest.mark.parametrize(("name", "error_state"), [("choco", "discard"), ("beer", "keep"), ("power-gossip", "discard")])
def test_faults_leave_no_trace_in_a_synchronous_run(name: str, error_state: str) -> None:
    rates = {"silent": 0.08, "lost_reply": 0.08, "duplicate": 0.08, "raise": 0.08, "offline": 0.05, "late": 0.05}
    faults = RandomFaults(Key(1, "faults"), rates | {"duplicate_reply": 0.05}, message_types=("train",))
    relay, over = peers(name, patience=20), grid(fault=faults, error_state=error_state)
    run(relay, over, rounds=8)
    alone = central(made(name), iterations=8)
    assert relay.relay.report.repeated > 3
    assert not relay.relay.report.gone
    assert states(over) == states_of(alone)
    assert relay.relay.traffic.edge_bytes == alone.traffic.edge_bytes
    assert not [reason for section in sections(relay) for reason in section.events.get("needed", [])]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgp", "sparse-push"])
def test_push_sum_with_the_faults_of_the_mailbox_agrees_with_it_to_the_bit(name: str) -> None:
    plan = FaultPlan(3, {"silent": 0.1, "raise": 0.1, "lost_reply": 0.1, "duplicate": 0.1}, until=8)

    def deliver(delivery: Delivery) -> str:
        trains = delivery.message_type.startswith("train")
        return plan(delivery.partition, delivery.exchange) if trains else "none"

    relay, over = peers(name), grid(fault=deliver)
    run(relay, over, rounds=12)
    alone = central(made(name), faults=plan, iterations=12)
    assert relay.relay.report.repeated > 3
    assert states(over) == states_of(alone)
    assert relay.relay.traffic.edge == alone.traffic.edge
    assert relay.relay.traffic.undelivered == alone.traffic.undelivered
    assert relay.reports[12].gossip.observed["sum_w"] == pytest.approx(NODES, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgp", "sparse-push"])
def test_what_was_under_way_to_a_node_that_is_given_up_goes_back_to_its_senders(name: str) -> None:
    """They keep their own messages: the server, which gives them back, has references only."""

    def deliver(delivery: Delivery) -> str:
        return "silent" if delivery.partition == 3 and 2 <= delivery.round <= 5 else "none"

    relay, over = peers(name, patience=2, observe_every=1), grid(fault=deliver)
    run(relay, over, rounds=12)
    assert relay.reports[3].gossip.members == [0, 1, 2]
    assert relay.reports[12].gossip.members == [0, 1, 2, 3]
    assert relay.relay.report.undelivered > 0
    assert not relay.relay.report.lost
    weights = [relay.reports[r].gossip.observed["sum_w"] for r in (8, 10, 12)]
    assert weights == pytest.approx([weights[0]] * 3, abs=1e-12)
    other, over_hub = strategy(name, patience=2, observe_every=1), grid(fault=deliver)
    run(other, over_hub, rounds=12)
    assert states(over) == states(over_hub)


@pytest.mark.slow
def test_a_node_that_lost_its_state_joins_with_another_key() -> None:
    relay, over = peers("sparse-push", observe_every=1, topology="complete"), grid()
    lost: list[float] = []

    def after(server_round: int, arrays: object, outcome: object) -> None:
        if server_round == 6:
            lost.append(float(kept(over, 2).memory.state["w"]))
            over.wipe(2)

    run(relay, over, 14, after)
    assert "memory is lost" in relay.reports[7].gossip.events["gone"][0]
    assert relay.reports[8].gossip.events["joined"] == ["vertex 2: with a new state"]
    left = NODES - lost[0]
    assert [relay.reports[r].gossip.observed["sum_w"] for r in (10, 14)] == pytest.approx([left] * 2, abs=1e-12)
    assert not any("needed" in relay.reports[r].gossip.events for r in range(8, 15))


@pytest.mark.parametrize("name", ["sgp", "choco"])
def test_a_parcel_that_is_gone_from_its_receivers_disk_is_a_lost_edge_and_is_named(name: str, tmp_path: Path) -> None:
    relay, over = peers(name, tmp_path, observe_every=1), grid()

    def after(server_round: int, arrays: object, outcome: object) -> None:
        if server_round == 2:
            for path in kept_parcels(tmp_path, 2):
                if path.name.split("-")[3] == f"{1:08x}":
                    path.unlink()

    run(relay, over, 6, after)
    reasons = relay.reports[3].gossip.events["needed"]
    assert [r for r in reasons if "vertex 2: messages of node 1: its message of iteration 1 is not in this node's" in r]
    assert relay.reports[6].gossip.members == [0, 1, 2, 3]
    if name == "sgp":
        # Back to its sender, with the mass it carries.
        assert 1 <= relay.relay.report.undelivered <= 2  # and what followed it meanwhile, by the rule of the mailbox
        assert [s.observed["sum_w"] for s in sections(relay)] == pytest.approx([NODES] * 6, abs=1e-12)
    else:
        assert relay.reports[6].gossip.epoch == 1


def test_whatever_else_lies_in_a_store_is_not_taken_for_a_message(tmp_path: Path) -> None:
    """A peer may send valid parcels in another's name: one that does not fit its reference is as good as not there."""
    relay, over = peers("choco", tmp_path, seal=False), grid()

    def forge(server_round: int, arrays: object, outcome: object) -> None:
        session = bytes.fromhex(relay.relay.settings.session)
        for body in (b"", b"noise", bytes(500)):
            spool(tmp_path, 2).put(Parcel(session, server_round - 1, GOSSIP, 1, 2, body))

    run(relay, over, 5, forge)
    assert states(over) == states_of(central(made("choco"), iterations=5))
    assert not any(section.events for section in sections(relay))


@pytest.mark.parametrize("seal", [True, False])
def test_what_lies_in_a_store_is_sealed_for_its_owner(seal: bool, tmp_path: Path) -> None:
    relay, over = peers("dpsgd", tmp_path, seal=seal), grid()
    run(relay, over, 3)
    parcels = [
        Parcel.from_bytes(path.read_bytes()) for vertex in range(NODES) for path in kept_parcels(tmp_path, vertex)
    ]
    # A message begins with its iteration.
    readable = [int.from_bytes(parcel.body[:4], "little") == parcel.round for parcel in parcels]
    assert len(readable) >= 2 * NODES
    assert readable == [not seal] * len(readable)


def test_stores_and_memories_hold_no_more_than_what_may_still_be_needed(tmp_path: Path) -> None:
    relay, over = peers("sgp", tmp_path), grid()
    held: list[tuple[int, int]] = []

    def after(server_round: int, arrays: object, outcome: object) -> None:
        record = over.context(0).state.array_records["fedcomp.gossip.memory.sent"]
        own = MemoryStore.from_arrays({name: array.numpy() for name, array in record.items()})
        held.append((len(kept_parcels(tmp_path, 0)), len(own)))

    run(relay, over, 12, after)
    assert max(held[3:]) <= (3 * 2, 3 * 2)
    assert held[-1] <= held[4]


# Through the server, edge by edge.


def test_nodes_without_a_listener_are_reached_through_the_server_and_every_edge_says_so() -> None:
    relay, over = peers("choco", ""), grid()
    run(relay, over)
    assert states(over) == states_of(central(made("choco")))
    for section in list(sections(relay))[:-1]:
        edges = sorted(re.findall(r"edge (\d)>(\d): vertex (\d) has no listener", "\n".join(section.events["mailbox"])))
        assert edges == sorted((f"{i}", f"{j}", f"{j}") for i in range(4) for j in ((i + 1) % 4, (i - 1) % 4))
        assert section.link_bytes == {}
    # Sealed for their receivers: the server has the reference, and as many bytes more as a seal takes.
    traffic = relay.relay.traffic
    assert traffic.down.bytes == traffic.edge_bytes + traffic.messages * (REFERENCE_BYTES + SEALED)


@pytest.fixture
def links(tmp_path: Path) -> Iterator[Callable[[int], dict]]:
    """Real listeners for all vertices but 0, whose address nobody listens at; returns each one's node configuration."""
    running = {vertex: Running(tmp_path / f"store-{vertex}") for vertex in range(1, NODES)}
    addresses = {0: f"tcp://127.0.0.1:{free_port()}"} | {vertex: there.address for vertex, there in running.items()}

    def config(partition: int) -> dict:
        store = str(tmp_path / f"store-{partition}")
        return {"partition-id": partition, PEER_ADDRESS: addresses[partition], PEER_STORE: store}

    yield config
    for there in running.values():
        there.kill()


@pytest.mark.slow
def test_an_edge_whose_link_fails_goes_through_the_server_and_is_tried_again_later(links) -> None:
    inner = InProcessGrid(client(), NODES, seed=2, node_config=links)
    relay, over = peers("choco", ""), MeteredGrid(inner)
    rounds = REST_ROUNDS + 2
    run(relay, over, rounds)
    assert states(over) == states_of(central(made("choco"), iterations=rounds))
    told = {r: relay.reports[r].gossip.events.get("mailbox", []) for r in range(1, rounds + 1)}
    # 1 and 3 cannot reach 0, which reaches them.
    assert [sorted(reason[:9] for reason in told[r]) for r in told] == [["edge 1>0:", "edge 3>0:"]] * rounds
    tried = [r for r in told if not any("not tried again" in reason for reason in told[r])]
    assert tried == [1, 1 + REST_ROUNDS]
    assert all("Connection refused" in reason for reasons in told.values() for reason in reasons)
    assert f"not tried again before round {1 + REST_ROUNDS}; in round 1: peer tcp://" in told[2][0]
    direct = {"0>1", "0>3", "1>2", "2>1", "2>3", "3>2"}
    assert [set(section.link_bytes) for section in sections(relay)] == [direct] * rounds


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Callable[..., Callable[[int], dict]]]:
    """Listeners with pinned keys; returns a function that starts them and returns each node's configuration.

    It takes vertices whose listeners, and those whose apps, have another key than the one that is pinned for them.
    """
    running: dict[int, Running] = {}

    def begin(listeners: tuple[int, ...] = (), apps: tuple[int, ...] = ()) -> Callable[[int], dict]:
        keys = {i: make_key(tmp_path / f"node-{i}") for i in (*range(NODES), 9)}
        pinned = {i: keys[i] for i in range(NODES)}
        listed = make_list(tmp_path / "peers", pinned)
        lies = {i: (keys[9], make_list(tmp_path / f"lying-{i}", {**pinned, i: keys[9]})) for i in (*listeners, *apps)}
        for i in range(NODES):
            key, path = lies[i] if i in listeners else (keys[i], listed)
            running[i] = Running(tmp_path / f"store-{i}", "--key", str(key), "--peer-keys", str(path))

        def config(partition: int) -> dict:
            key, path = lies[partition] if partition in apps else (keys[partition], listed)
            own = {"partition-id": partition, PEER_KEY: str(key), PEER_KEYS: str(path)}
            there = running[partition]
            return {**own, PEER_ADDRESS: there.address, PEER_STORE: str(there.store)}

        begin.running = running  # type: ignore[attr-defined]
        return config

    yield begin
    for there in running.values():
        there.kill()


@pytest.mark.slow
def test_pairs_that_prove_who_they_are_use_their_link_and_all_others_the_sealed_mailbox(secured) -> None:
    """At the address of vertex 2 is somebody else; its own key is sealed for all the same."""
    config = secured(listeners=(2,))
    relay, over = peers("choco", ""), MeteredGrid(InProcessGrid(client(), NODES, seed=2, node_config=config))
    run(relay, over)
    said = {i: there.end()[2] for i, there in secured.running.items()}
    assert states(over) == states_of(central(made("choco")))
    for section in list(sections(relay)):
        assert set(section.link_bytes) == {"0>1", "0>3", "1>0", "3>0", "2>1", "2>3"}
        assert {reason[:8] for reason in section.events["mailbox"]} == {"edge 1>2", "edge 3>2"}
    first = {reason[5:8]: reason for reason in relay.reports[1].gossip.events["mailbox"]}
    assert "a key that is not in the list of peer keys, not that of partition 2; nothing was sent" in first["1>2"]
    assert [said[i] for i in (0, 1, 3)] == [""] * 3
    # Both saw who it is and left without a word.
    assert "(broken off 2)" in said[2]


@pytest.mark.slow
def test_nothing_is_sealed_for_a_node_with_another_key_than_the_one_that_is_pinned(secured) -> None:
    config = secured(listeners=(2,), apps=(2,))
    relay, over = peers("choco", ""), MeteredGrid(InProcessGrid(client(), NODES, seed=2, node_config=config))
    run(relay, over)
    said = {i: there.end()[2] for i, there in secured.running.items()}
    first = {reason[5:8]: reason for reason in relay.reports[1].gossip.events["mailbox"]}
    assert set(first) == {"1>2", "3>2", "2>1", "2>3"}
    assert (
        "the message was not sent: the seal key of partition 2 is not signed by the key listed for it" in first["1>2"]
    )
    assert "is this node's key in its list of peer keys?" in first["2>3"]
    assert "(unlisted key 2)" in said[1]
    assert any("or not sealed for this node" in reason for reason in relay.reports[2].gossip.events["needed"])


@pytest.mark.parametrize("seal", ["own key", "of another vertex", "no signature"])
def test_a_server_cannot_put_another_seal_key_in_a_nodes_place(seal: str, secured, monkeypatch) -> None:
    """Nothing that it could open passes through it, and the edge is named."""
    mallory = PeerIdentity.generate()
    told = gossip_links.PeerLinks._hello

    def lying(self, vertex: int) -> gossip.LinkHello:
        hello = told(self, vertex)
        if vertex != 2:
            return replace(hello, address="")
        if seal == "no signature":
            return replace(hello, signature=b"", address="")
        other = told(self, 1).signature
        return replace(hello, public=mallory.public, address="", **({"signature": other} if "another" in seal else {}))

    monkeypatch.setattr(gossip_links.PeerLinks, "_hello", lying)
    relay, over = peers("choco", ""), MeteredGrid(InProcessGrid(client(), NODES, seed=2, node_config=secured()))
    seen: list[Message] = []
    send = over.send_and_receive

    def watching(messages, **options):
        replies = send(messages, **options)
        seen.extend(replies)
        return replies

    monkeypatch.setattr(over, "send_and_receive", watching)
    run(relay, over, 2)
    answers = [gossip.AnswerRecord.find(reply) for reply in seen if reply.has_content()]
    bodies = [data[REFERENCE_BYTES:] for answer in answers if answer is not None for data in answer.messages]
    # In each of two iterations the two edges to vertex 2 have references alone.
    assert sum(body == b"" for body in bodies) == 4
    session = bytes.fromhex(relay.relay.settings.session)
    for body in filter(None, bodies):
        for iteration, source in itertools.product(range(2), range(NODES)):
            with pytest.raises(SealError):
                mallory.open(body, Parcel(session, iteration, GOSSIP, source, 2, b"").coordinates)
    said = "is not signed, so nothing is sealed" if seal == "no signature" else "not signed by the key listed for it"
    named = [reason for reason in relay.reports[1].gossip.events["mailbox"] if said in reason]
    assert {reason[:8] for reason in named} == {"edge 1>2", "edge 3>2"}


def test_a_node_told_to_secure_its_links_sends_nothing_in_the_clear(tmp_path: Path) -> None:
    """Its key file is gone: an error that says so, and no link without it."""

    def config(partition: int) -> dict:
        own = {"partition-id": partition, PEER_ADDRESS: f"tcp://127.0.0.1:{9100 + partition}"}
        return own | {
            PEER_STORE: str(tmp_path / "s"),
            PEER_KEY: str(tmp_path / "gone"),
            PEER_KEYS: str(tmp_path / "no"),
        }

    relay = peers("sgp", "", nodes=NODES, patience=1)
    with pytest.raises(StateError, match="no node is left"):
        run(relay, MeteredGrid(InProcessGrid(client(), NODES, seed=2, node_config=config)))
    assert "the list of peer keys" in relay.reports[1].gossip.events["unknown"][0]


# What a node may not say.


class Lying:
    """An honest node whose answers are changed on their way."""

    def __init__(self, change: Callable[[Message], None], vertex: int = 1) -> None:
        self.honest, self.change, self.vertex = client(), change, vertex

    def __call__(self, message: Message, context: Context) -> Message:
        reply = self.honest(message, context)
        if context.node_config["partition-id"] == self.vertex and reply.has_content():
            self.change(reply)
        return reply


def strange_links(reply: Message) -> None:
    if gossip.LinkReport.KEY in reply.content:
        gossip.LinkReport(to=(77,), sent=(1 << 30,), failed=("",)).put(reply.content)


def other_iteration(reply: Message) -> None:
    answer = gossip.AnswerRecord.find(reply)
    if answer is not None and answer.messages:
        old = Reference.to(900, b"x").to_bytes()
        replace(answer, messages=(old,) * len(answer.messages)).put(reply.content)


def too_long(reply: Message) -> None:
    answer = gossip.AnswerRecord.find(reply)
    if answer is not None and answer.messages:
        here = Reference.split(answer.messages[0])[0]
        replace(answer, messages=(replace(here, length=2**32 - 1).to_bytes(),)).put(reply.content)


def no_reference(reply: Message) -> None:
    answer = gossip.AnswerRecord.find(reply)
    if answer is not None and answer.messages:
        replace(answer, messages=(b"short",) * len(answer.messages)).put(reply.content)


@pytest.mark.parametrize(
    ("change", "where", "said"),
    [
        (strange_links, "unanswered", r"reports links to \(77,\)"),
        (other_iteration, "refused", "a message of iteration 900 in one of 0"),
        (too_long, "refused", "a message of 4294967295 bytes; the largest"),
        (no_reference, "refused", "a reference to a message has 5 bytes"),
    ],
)
def test_an_answer_that_cannot_be_one_is_as_good_as_none(change: Callable, where: str, said: str) -> None:
    relay, over = peers("sgp", patience=2), grid(Lying(change))
    run(relay, over)
    assert re.search(said, "\n".join(relay.reports[1].gossip.events[where]))
    assert {node for _, node, _ in relay.relay.report.gone} == {1}
    assert {node for _, node, _ in relay.relay.report.refused} <= {1}
    assert over.ledger.total("wire", link="peer") < 1 << 20


def test_a_key_that_is_no_key_costs_its_node_its_seat_and_nobody_else_anything() -> None:
    def change(reply: Message) -> None:
        if gossip.LinkHello.KEY in reply.content:
            gossip.LinkHello(public=bytes(32)).put(reply.content)

    relay, over = peers("sgp", patience=2), grid(Lying(change))
    run(relay, over)
    assert "agrees on no secret" in relay.reports[1].gossip.events["unknown"][0]
    # Nothing can be sealed for it, so that nothing is sent; what would have been goes back when it is given up.
    assert any("edge 0>1: vertex 1 has not introduced itself" in r for r in relay.reports[1].gossip.events["mailbox"])
    assert relay.reports[ROUNDS].gossip.members == [0, 2, 3]
    assert relay.reports[ROUNDS].gossip.observed["sum_w"] == pytest.approx(3.0, abs=1e-12)
    assert not relay.relay.report.lost


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparse-push", "beer"])
def test_a_stored_run_goes_on_with_the_parcels_that_were_under_way(name: str, tmp_path: Path) -> None:
    """Stored while one node has not answered, and resumed with other folders: those of the first run are gone."""

    def deliver(delivery: Delivery) -> str:
        lost = delivery.partition == 1 and delivery.round == 2 and delivery.message_type == gossip.EXCHANGE_TYPE
        return "lost_reply" if lost and name == "sparse-push" else "none"

    whole, over = peers(name), grid(fault=deliver)
    run(whole, over, 5)
    first, before, file = peers(name), grid(fault=deliver), tmp_path / "checkpoint"

    def store(server_round: int, arrays, outcome) -> None:
        checkpoint.save(file, server_round=server_round, arrays=arrays, strategy=first, grid=before)
        if server_round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(first, before, 5, store)
    shutil.rmtree(first._links._simulated.root)
    again, after = peers(name), grid(fault=deliver)
    found = checkpoint.load(file)
    found.apply(again, after)
    with after.inner:
        fit(again, after, found.arrays, 5, start_round=3, result=found.result)
    assert states(after) == states(over)
    assert again.relay.traffic == whole.relay.traffic
    assert not again.relay.report.needed
    with pytest.raises(StateError, match="resume with the same settings"):
        strategy(name).load_state_dict(again.state_dict())


@pytest.mark.slow
def test_a_run_whose_parcels_are_in_stores_of_other_machines_is_not_stored(links) -> None:
    relay, over = peers("choco", ""), MeteredGrid(InProcessGrid(client(), NODES, seed=2, node_config=links))
    run(relay, over, 1)
    with pytest.raises(StateError, match="run with transport='hub' to resume"):
        relay.state_dict()


@pytest.mark.parametrize(
    "options", [{"transport": "post"}, {"seal": 1, "transport": "peers"}, {"spool": "/tmp"}, {"max_store_bytes": 0}]
)
def test_settings_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        strategy("sgp", **options)
