"""Links between clients that fail, pair by pair: what is sealed takes the server, and keys that nobody vouches for
are sealed for by nobody."""

from __future__ import annotations

import dataclasses
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from coded_runs import bits, coded_app, run
from coded_sum_runs import CODEC
from flwr.app import Context, Message, RecordDict
from peer_key_files import make_key, make_list
from running_listener import Running, free_port
from toy import fedavg, model

from fedcomp.clients.edge.node_config import PEER_ADDRESS, PEER_KEY, PEER_KEYS, PEER_STORE
from fedcomp.codecs import TopK
from fedcomp.coding.errors import SealError
from fedcomp.coding.relay import RelayPlan
from fedcomp.coding.sealing import PeerIdentity, seal
from fedcomp.coding.transport import DeliveryFailed, Parcel, Spool, TcpSender
from fedcomp.flower.coded import BUNDLE, SHARD, SUM_SHARD, put_bundle, take_bundle
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.strategies.coded.links import REST_ROUNDS, SimulatedLinks
from fedcomp.strategies.coded.strategy import CodedFedAvg, CodedRound
from fedcomp.strategies.compressed import Compressed

NODES = 4
TO_0 = ["1>0", "2>0", "3>0"]

Config = Callable[[int], dict[str, Any]]


def system(name: str, *, spare: int = 0, **options: Any) -> CodedFedAvg:
    """Return a system that needs the shards of all relays but ``spare``."""
    given: dict[str, Any] = {
        "relay": {"code": "mds", "symbols": NODES - spare},
        "random symbols": {"code": "mds", "symbols": NODES - 1 - spare, "threshold": 1},
        "sum": {"construction": "sumcode", "symbols": NODES - 1 - spare, "threshold": 1},
        "masks": {"construction": "sumcode", "symbols": NODES - 1 - spare, "threshold": 1, "mode": "mask"},
    }[name]
    codec = TopK(density=0.1) if name in ("relay", "random symbols") else CODEC
    inner = Compressed(fedavg(fraction_evaluate=0.0), codec)
    return CodedFedAvg(inner, transport="peers", collect_timeout=20.0, **{**given, **options})


SYSTEMS = pytest.mark.parametrize("name", ["relay", "random symbols", "sum", "masks"])


def pairs(strategy: CodedFedAvg, round_: int = 1) -> list[str]:
    """Return the pairs that a round's report names."""
    found = [re.match(r"pair (\d>\d): ", reason) for reason in strategy.reports[round_].coded.failed_links]
    return sorted(match[1] for match in found if match)


class Nodes:
    """Nodes with listeners of their own; those of ``without`` have an address at which nobody listens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[int, Running] = {}
        self.own: dict[int, dict[str, Any]] = {}

    def start(self, without: dict[int, str] | None = None, keys: bool = False) -> Config:
        files: dict[int, Path] = {}
        if keys:
            files = {i: make_key(self.folder / f"node-{i}") for i in range(NODES)}
            listed = make_list(self.folder / "peers", files)
        for i in range(NODES):
            store = self.folder / f"store-{i}"
            secured = {PEER_KEY: str(files[i]), PEER_KEYS: str(listed)} if keys else {}
            address = (without or {}).get(i)
            if address is None:
                options = ("--key", str(files[i]), "--peer-keys", str(listed)) if keys else ()
                self.running[i] = Running(store, *options)
                address = self.running[i].address
            self.own[i] = {"partition-id": i, PEER_ADDRESS: address, PEER_STORE: str(store), **secured}
        return lambda partition: self.own[partition]

    def stored(self, node: int, strategy: CodedFedAvg, round_: int = 1) -> list[Parcel]:
        return Spool(self.folder / f"store-{node}").list(strategy._run, round_)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    for there in made.running.values():
        there.kill()


def closed() -> dict[int, str]:
    return {0: f"tcp://127.0.0.1:{free_port()}"}


@pytest.fixture
def deaf(monkeypatch) -> Iterator[tuple[dict[int, str], list[int]]]:
    """An address that takes connections and never answers, and a list with an item for each; timeouts are short."""
    assert TcpSender.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(TcpSender.__init__.__kwdefaults__, "send_timeout", 0.3)
    taken: list[int] = []
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            while True:
                try:
                    held.append(server.accept()[0])
                except OSError:
                    return
                taken.append(1)

        thread = threading.Thread(target=take)
        thread.start()
        yield {0: f"tcp://127.0.0.1:{server.getsockname()[1]}"}, taken
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    for connection in held:
        connection.close()


def whole(name: str, rounds: int = 1, **options: Any) -> tuple[CodedFedAvg, bytes]:
    """Return the run in which every link holds: simulated ones."""
    strategy = system(name, **options)
    result, _ = run(strategy, NODES, rounds=rounds)
    return strategy, bits(result)


@SYSTEMS
@pytest.mark.long
def test_what_a_link_does_not_take_follows_through_the_server(name: str, nodes: Nodes) -> None:
    strategy = system(name)
    result, grid = run(strategy, NODES, node_config=nodes.start(closed()))
    intact, same = whole(name)
    assert bits(result) == same
    report, other = strategy.reports[1].coded, intact.reports[1].coded
    assert len(report.included) == NODES
    assert (report.received, report.refused, report.notes) == (other.received, [], [])
    assert set(pairs(strategy)) <= set(TO_0)
    assert pairs(strategy)
    assert all("Connection refused" in reason for reason in report.failed_links)
    assert pairs(intact) == []
    # Exactly the parcels of these pairs, once up and once down, and nothing of the others.
    through = report.payload_bytes["hub_down"]
    assert through > 0
    assert "hub_down" not in other.payload_bytes
    assert report.payload_bytes["peer"] + through == other.payload_bytes["peer"]
    if name not in ("sum", "masks"):
        # The sums' own answers have a length of their own.
        assert abs(report.payload_bytes["hub_up"] - through - other.payload_bytes["hub_up"]) <= 8 * NODES
    assert grid.ledger.total("wire", link="peer") == report.payload_bytes["peer"]
    # The relay that nobody reached has them in its own store.
    sources = [parcel.source for parcel in nodes.stored(0, strategy) if parcel.source != parcel.destination]
    assert len(sources) == len(set(sources))
    assert sources


@pytest.mark.parametrize("name", ["relay", "sum"])
def test_a_node_without_a_listener_sends_over_links_and_gets_its_shards_through_the_server(
    name: str, nodes: Nodes, monkeypatch
) -> None:
    config = nodes.start(closed())
    for key in (PEER_ADDRESS, PEER_STORE):
        del nodes.own[0][key]
    # Simulated links are on the server's machine, and this node is to be on another one.
    monkeypatch.setattr(SimulatedLinks, "root", "")
    strategy = system(name)
    result, _ = run(strategy, NODES, rounds=2, node_config=config)
    monkeypatch.undo()
    assert bits(result) == whole(name, 2)[1]
    for round_ in (1, 2):
        report = strategy.reports[round_].coded
        assert pairs(strategy, round_) == TO_0
        assert all(reason.endswith("partition 0 has no listener") for reason in report.failed_links)
        assert report.refused == []
        # Its own went over the links of the others.
        assert [p.source for p in nodes.stored(1, strategy, round_) if p.source == 0] == [0]


def test_such_a_node_is_refused_with_the_remedy_where_shards_are_not_sealed(nodes: Nodes, monkeypatch) -> None:
    config = nodes.start(closed())
    for key in (PEER_ADDRESS, PEER_STORE):
        del nodes.own[0][key]
    monkeypatch.setattr(SimulatedLinks, "root", "")
    strategy = system("relay", seal=False, symbols=2)
    run(strategy, NODES, node_config=config)
    (reason,) = strategy.reports[1].coded.direct.values()
    assert "start it with --peer HOST:PORT, or leave out seal=False" in reason


@pytest.mark.slow
def test_a_link_that_failed_rests_for_some_rounds_and_is_then_tried_again(nodes: Nodes, caplog) -> None:
    strategy, rounds = system("relay"), REST_ROUNDS + 2
    result, _ = run(strategy, NODES, rounds=rounds, node_config=nodes.start(closed()))
    assert bits(result) == whole("relay", rounds)[1]
    assert [pairs(strategy, r) for r in range(1, rounds + 1)] == [TO_0] * rounds
    told = {r: strategy.reports[r].coded.failed_links for r in range(1, rounds + 1)}
    tried = [r for r in told if not any("not tried again" in reason for reason in told[r])]
    assert tried == [1, 1 + REST_ROUNDS]
    assert f"not tried again before round {1 + REST_ROUNDS}; in round 1: peer tcp://" in told[2][0]
    lines = [record.message for record in caplog.records if "links took no shard" in record.message]
    assert lines == [
        f"coded round {r}: 3 links took no shard; report.coded.failed_links names them" for r in range(1, rounds + 1)
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", ["relay", "sum"])
def test_a_peer_that_never_answers_costs_its_timeout_in_one_round(name: str, nodes: Nodes, deaf) -> None:
    addresses, taken = deaf
    strategy, count = system(name), []

    def after(server_round: int, arrays: object, outcome: object) -> None:
        count.append(len(taken))

    with InProcessGrid(coded_app(), NODES, seed=3, node_config=nodes.start(addresses)) as inner:
        result = fit(strategy, MeteredGrid(inner), model(), 3, timeout=20, on_round=after)
    assert bits(result) == whole(name, 3)[1]
    assert count == [6, 6, 6], "each sender tries twice"
    assert pairs(strategy, 1) == pairs(strategy, 2) == TO_0
    assert "timed out" in strategy.reports[2].coded.failed_links[0]


def test_another_address_or_key_is_tried_at_once(nodes: Nodes, monkeypatch) -> None:
    """What the node says anew after it lost its state."""
    strategy = system("relay")
    config = nodes.start(closed())
    app, calls = coded_app(), []

    def restarted(msg: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 0 and msg.metadata.message_type == "train":
            calls.append(1)
            if len(calls) == 2:
                context.state.clear()
        return app(msg, context)

    run(strategy, NODES, rounds=3, node_config=config, app=restarted)
    tried = ["not tried again" not in strategy.reports[r].coded.failed_links[0] for r in (1, 2, 3)]
    assert tried == [True, False, True]


@pytest.mark.parametrize("name", ["relay", "sum"])
def test_what_is_not_sealed_is_lost_and_the_pair_is_named(name: str, nodes: Nodes) -> None:
    strategy = system(name, spare=1, seal=False)
    put: list[str] = []
    app = coded_app()

    def watching(msg: Message, context: Context) -> Message:
        if msg.metadata.message_type == "query.coded_put" and BUNDLE in msg.content:
            put.append(msg.metadata.message_type)
        reply = app(msg, context)
        if msg.metadata.message_type == "train" and BUNDLE in reply.content:
            put.append("train")
        return reply

    run(strategy, NODES, rounds=2, node_config=nodes.start(closed()), app=watching)
    assert put == []
    for round_ in (1, 2):
        report = strategy.reports[round_].coded
        assert pairs(strategy, round_)
        # Nothing stands in for the link, so it is tried in every round.
        for reason in report.failed_links:
            assert ": lost, as shards that are not sealed do not go through the server: peer tcp://" in reason
            assert "not tried again" not in reason
        assert "hub_down" not in report.payload_bytes


@pytest.mark.long
@pytest.mark.parametrize("name", ["relay", "sum"])
def test_a_parcel_whose_acknowledgement_was_lost_is_kept_and_counted_once(name: str, nodes: Nodes, monkeypatch) -> None:
    original = TcpSender.send

    def send(self, address: str, parcel: Parcel, partition: int | None = None) -> int:
        size = original(self, address, parcel, partition)
        if parcel.destination == 0:
            raise DeliveryFailed("the acknowledgement was lost", size)
        return size

    monkeypatch.setattr(TcpSender, "send", send)
    strategy = system(name)
    result, _ = run(strategy, NODES, node_config=nodes.start())
    intact, same = whole(name)
    assert bits(result) == same
    report, other = strategy.reports[1].coded, intact.reports[1].coded
    assert (report.received, report.refused) == (other.received, [])
    places = [(p.kind, p.source) for p in nodes.stored(0, strategy)]
    assert len(places) == len(set(places))
    assert report.payload_bytes["peer"] == other.payload_bytes["peer"]
    assert report.payload_bytes["hub_down"] > 0


# What a source may not put in the place of what its links did not take.


def changed(change: Callable[[list[Parcel], Message], list[bytes]], node: int = 1) -> Callable:
    """Return an app in which a node's answer to its training message has another bundle."""
    app = coded_app()

    def dishonest(msg: Message, context: Context) -> Message:
        asked = Message(RecordDict(dict(msg.content.items())), reply_to=msg)
        reply = app(msg, context)
        if context.node_config["partition-id"] == node and msg.metadata.message_type == "train":
            held = [Parcel.from_bytes(data) for data in take_bundle(reply.content, most=99, longest=1 << 24)]
            assert [parcel.destination for parcel in held] == [0]
            del reply.content[BUNDLE]
            put_bundle(reply.content, change(held, asked))
        return reply

    return dishonest


def each(**fields: Any) -> Callable[[list[Parcel], Message], list[bytes]]:
    return lambda held, asked: [dataclasses.replace(parcel, **fields).to_bytes() for parcel in held]


def forged(held: list[Parcel], asked: Message) -> list[bytes]:
    """Another packet than the one that was announced for the relay, sealed for it."""
    key = asked.content.config_records["fedcomp.coded"]["keys"]
    where = asked.content.config_records["fedcomp.coded"]["relays"].index(0)
    public = bytes(key[32 * where : 32 * where + 32])
    (parcel,) = held
    packet = RelayPlan("mds", NODES - 1, NODES, 1).packets(1, b"another payload")[where]
    return [dataclasses.replace(parcel, body=seal(packet, public, parcel.coordinates)).to_bytes()]


LIES: dict[str, tuple[Callable, str]] = {
    "another source": (each(source=2), "claims another run, round, kind or source"),
    "another round": (each(round=9), "claims another run, round, kind or source"),
    "another run": (each(run=b"another!"), "claims another run, round, kind or source"),
    "another kind": (each(kind=77), "claims another run, round, kind or source"),
    "a relay whose link holds": (each(destination=2), "the second for relay 2, or that one keeps none"),
    "itself": (each(destination=1), "the second for relay 1, or that one keeps none"),
    "nobody": (each(destination=NODES), f"the second for relay {NODES}, or that one keeps none"),
    "too long": (each(body=bytes(1 << 22)), "at most"),
    "too many": (lambda held, asked: [p.to_bytes() for p in held * 2], "more than 1 items"),
    "not a parcel": (lambda held, asked: [b"noise"], "a parcel's header has"),
    "damaged": (lambda held, asked: [(b := p.to_bytes())[:-1] + bytes([b[-1] ^ 1]) for p in held], "damaged"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ["relay", pytest.param("sum", marks=pytest.mark.long)])
@pytest.mark.parametrize("lie", LIES)
def test_a_source_fills_in_for_its_own_failed_links_alone(lie: str, name: str, nodes: Nodes) -> None:
    """One shard of one source is lost; with a relay to spare the round is whole all the same."""
    change, said = LIES[lie]
    strategy = system(name, spare=1)
    result, _ = run(strategy, NODES, node_config=nodes.start(closed()), app=changed(change))
    report = strategy.reports[1].coded
    assert any(said in reason and reason.startswith("source 1: ") for reason in report.refused), report.refused
    assert bits(result) == whole(name, spare=1)[1]
    assert len(report.included) == NODES
    assert sorted(parcel.source for parcel in nodes.stored(0, strategy)) == [0, 2, 3]


@pytest.mark.parametrize("name", ["relay", "sum"])
def test_a_source_cannot_send_through_the_server_what_is_not_sealed(name: str, nodes: Nodes) -> None:
    app = coded_app()

    def careless(msg: Message, context: Context) -> Message:
        asked = msg.content.config_records["fedcomp.coded"]
        reply = app(msg, context)
        if context.node_config["partition-id"] == 1 and msg.metadata.message_type == "train":
            kind = SHARD if name == "relay" else SUM_SHARD
            put_bundle(reply.content, [Parcel(bytes(asked["run"]), 1, kind, 1, 0, b"a shard").to_bytes()])
        return reply

    strategy = system(name, spare=1, seal=False)
    run(strategy, NODES, node_config=nodes.start(closed()), app=careless)
    report = strategy.reports[1].coded
    assert any(reason.startswith("source 1: ") and "more than 0 items" in reason for reason in report.refused)
    assert "hub_down" not in report.payload_bytes
    assert [parcel.source for parcel in nodes.stored(0, strategy)] in ([], [0])
    assert len(report.included) == NODES


def test_two_parcels_for_one_relay_are_one(nodes: Nodes) -> None:
    """Where two links failed, a source could try to send both parcels to one relay."""
    ports = closed() | {2: f"tcp://127.0.0.1:{free_port()}"}
    app = coded_app()

    def dishonest(msg: Message, context: Context) -> Message:
        reply = app(msg, context)
        if context.node_config["partition-id"] == 1 and msg.metadata.message_type == "train":
            held = [Parcel.from_bytes(data) for data in take_bundle(reply.content, most=99, longest=1 << 24)]
            assert sorted(parcel.destination for parcel in held) == [0, 2]
            first = next(parcel for parcel in held if parcel.destination == 0)
            del reply.content[BUNDLE]
            put_bundle(reply.content, [first.to_bytes(), first.to_bytes()])
        return reply

    strategy = system("relay", spare=1)
    run(strategy, NODES, node_config=nodes.start(ports), app=dishonest)
    assert any("the second for relay 0" in reason for reason in strategy.reports[1].coded.refused)
    assert len([p for p in nodes.stored(0, strategy) if p.source == 1]) == 1


def test_a_shard_that_its_source_did_not_announce_is_not_handed_out(nodes: Nodes) -> None:
    strategy = system("relay", spare=1)
    result, _ = run(strategy, NODES, node_config=nodes.start(closed()), app=changed(forged))
    assert bits(result) == whole("relay", spare=1)[1]
    told = strategy.reports[1].coded.refused
    assert any("source 1" in reason for reason in told), told


def test_a_node_that_names_links_that_are_none_of_its_own_is_refused(nodes: Nodes) -> None:
    app = coded_app()

    def dishonest(msg: Message, context: Context) -> Message:
        reply = app(msg, context)
        if context.node_config["partition-id"] == 1 and msg.metadata.message_type == "train":
            reply.content.config_records["fedcomp.coded"]["missed"] = [1]
        return reply

    strategy = system("relay", spare=1)
    result, _ = run(strategy, NODES, node_config=nodes.start(closed()), app=dishonest)
    assert any("names links to [1], which are none of its own" in r for r in strategy.reports[1].coded.refused)
    assert bits(result) == whole("relay", spare=1)[1]
    assert pairs(strategy) == ["2>0", "3>0"]


# Whose keys these are.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relay", "sum"])
def test_nodes_with_keys_have_the_bits_of_nodes_without(name: str, nodes: Nodes) -> None:
    strategy = system(name)
    result, _ = run(strategy, NODES, node_config=nodes.start(keys=True))
    assert bits(result) == whole(name)[1]
    report = strategy.reports[1].coded
    assert (report.refused, report.failed_links) == ([], [])
    assert "hub_down" not in report.payload_bytes
    assert {len(nodes.stored(i, strategy)) for i in range(NODES)} != {0}


def told(monkeypatch, change: Callable[[dict[str, Any], int], None]) -> None:
    """Let the server change what plans say of the relay of partition 0; ``change`` gets the fields and its place."""
    original = CodedRound.peers

    def lying(self, source, relays, *, seal: bool) -> dict[str, Any]:
        fields = {k: list(v) if k != "keys" else v for k, v in original(self, source, relays, seal=seal).items()}
        for place, relay in enumerate(relays):
            if relay.partition == 0 and source.partition != 0:
                change(fields, place)
        return {k: tuple(v) if k != "keys" else v for k, v in fields.items()}

    monkeypatch.setattr(CodedRound, "peers", lying)


MALLORY = PeerIdentity.generate()


def own_key(fields: dict[str, Any], place: int) -> None:
    fields["keys"] = fields["keys"][: 32 * place] + MALLORY.public + fields["keys"][32 * place + 32 :]


def unsigned(fields: dict[str, Any], place: int) -> None:
    own_key(fields, place)
    fields["signatures"][place] = b""


def nobodys(fields: dict[str, Any], place: int) -> None:
    own_key(fields, place)
    fields["partitions"], fields["signatures"] = [], []


def of_another(fields: dict[str, Any], place: int) -> None:
    """The key and the signature of partition 1, under the number of partition 0."""
    other = fields["partitions"].index(1)
    fields["keys"] = (
        fields["keys"][: 32 * place] + fields["keys"][32 * other :][:32] + fields["keys"][32 * place + 32 :]
    )
    fields["signatures"][place] = fields["signatures"][other]


def unlisted(fields: dict[str, Any], place: int) -> None:
    own_key(fields, place)
    fields["partitions"][place] = 77


SUBSTITUTES: dict[str, tuple[Callable, str]] = {
    "the server's key": (own_key, "is not signed by the key listed for it"),
    "the server's key, unsigned": (unsigned, "is not signed, so nothing is sealed"),
    "no partitions at all": (nobodys, "the seal key is not signed, so nothing is sealed"),
    "another node's": (of_another, "is not signed by the key listed for it"),
    "a partition nobody lists": (unlisted, "partition 77 is not in this node's list of peer keys"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "substitute"), [*(("relay", each) for each in SUBSTITUTES), ("sum", next(iter(SUBSTITUTES)))]
)
def test_a_server_cannot_put_its_own_key_in_the_place_of_a_relays(
    name: str, substitute: str, nodes: Nodes, monkeypatch
) -> None:
    change, said = SUBSTITUTES[substitute]
    told(monkeypatch, change)
    through: list[Parcel] = []
    app = coded_app()

    def watching(msg: Message, context: Context) -> Message:
        reply = app(msg, context)
        if msg.metadata.message_type == "train" and reply.has_content():
            through.extend(Parcel.from_bytes(d) for d in take_bundle(reply.content, most=99, longest=1 << 24))
        return reply

    # The address of the relay is the server's own word, too: everything would pass it.
    strategy = system(name, spare=1)
    result, _ = run(strategy, NODES, node_config=nodes.start(closed(), keys=True), app=watching)
    named = {reason[:17] for reason in strategy.reports[1].coded.refused if said in reason}
    assert named >= {f"source {i}: relay 0" for i in (1, 2, 3)}, strategy.reports[1].coded.refused
    assert through == []
    assert [p.source for p in nodes.stored(0, strategy)] in ([], [0])
    for node in (1, 2, 3):
        for parcel in nodes.stored(node, strategy):
            with pytest.raises(SealError):
                MALLORY.open(parcel.body, parcel.coordinates)
    monkeypatch.undo()
    if change is not nobodys:
        assert bits(result) == whole(name, spare=1)[1]


@pytest.mark.slow
def test_a_key_signed_for_another_run_is_not_sealed_for(nodes: Nodes, monkeypatch) -> None:
    config = nodes.start(keys=True)
    first = system("relay", spare=1)
    run(first, NODES, node_config=config)
    old = {client.partition: client for client in first._known.values()}[0]

    def again(fields: dict[str, Any], place: int) -> None:
        fields["keys"] = fields["keys"][: 32 * place] + old.public + fields["keys"][32 * place + 32 :]
        fields["signatures"][place] = old.signature

    told(monkeypatch, again)
    strategy = system("relay", spare=1)
    run(strategy, NODES, node_config=config)
    refused = strategy.reports[1].coded.refused
    assert len([r for r in refused if "relay 0: " in r and "in this run" in r]) == 3


@pytest.mark.parametrize(("name", "late"), [("relay", "its state is lost"), ("sum", "its keys come later")])
def test_a_node_says_anew_whose_its_key_is(name: str, late: str, nodes: Nodes) -> None:
    """One round in which it is a lost relay, and none after that."""
    config = nodes.start(keys=True)
    keyed = dict(nodes.own[0])
    if late == "its keys come later":
        for key in (PEER_KEY, PEER_KEYS):
            del nodes.own[0][key]
    app, calls = coded_app(), []

    def changing(msg: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 0 and msg.metadata.message_type == "train":
            calls.append(1)
            if len(calls) == 2:
                context.node_config.update(keyed)
                if late == "its state is lost":
                    context.state.clear()
        return app(msg, context)

    strategy = system(name, spare=1)
    run(strategy, NODES, rounds=3, node_config=config, app=changing)
    assert [bool(strategy.reports[r].coded.refused) for r in (2, 3)] == [True, False]
    assert strategy.reports[3].coded.failed_links == []
    assert len(nodes.stored(0, strategy, 3)) == NODES


@pytest.mark.slow
def test_a_node_without_keys_among_nodes_with_them_is_a_lost_relay_and_the_report_has_the_remedy(nodes: Nodes) -> None:
    config = nodes.start(keys=True)
    for key in (PEER_KEY, PEER_KEYS):
        del nodes.own[0][key]
    strategy = system("relay", spare=1)
    result, _ = run(strategy, NODES, node_config=config)
    told_of = [r for r in strategy.reports[1].coded.refused if "start its node with --key and --peer-keys" in r]
    assert {r[:17] for r in told_of} == {f"source {i}: relay 0" for i in (1, 2, 3)}
    # It seals for whom it is told, and its plain connections are refused: what it shares takes the server.
    assert pairs(strategy) == ["0>1", "0>2", "0>3"]
    assert len(strategy.reports[1].coded.included) == NODES
    assert bits(result) == whole("relay", spare=1)[1]


@pytest.mark.slow
def test_at_an_address_only_the_node_that_is_meant_is_sent_to(nodes: Nodes, monkeypatch) -> None:
    """The server hands out the address of partition 1 for partition 0: another listed node, but not that one."""
    config = nodes.start(keys=True)

    def elsewhere(fields: dict[str, Any], place: int) -> None:
        fields["addresses"][place] = nodes.running[1].address

    told(monkeypatch, elsewhere)
    strategy = system("relay")
    result, _ = run(strategy, NODES, node_config=config)
    assert bits(result) == whole("relay")[1]
    assert pairs(strategy) == TO_0
    assert all(
        "it has the key of partition 1 of peer keys, not that of partition 0; nothing was sent" in reason
        for reason in strategy.reports[1].coded.failed_links
    )
    assert {p.destination for p in nodes.stored(1, strategy)} == {1}
