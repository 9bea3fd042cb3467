"""What clients bring each other by themselves: the same as through the server, which sees none of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_posts_over_messages as posts
from flwr.app import ConfigRecord
from peer_key_files import make_key, make_list
from running_listener import Running
from test_posts import Relayed
from toy import client_app
from toys import Halving, Passing, SealedPassing

from fedcomp.clients.compressed import compression
from fedcomp.clients.edge.node_config import PEER_ADDRESS, PEER_KEY, PEER_KEYS, PEER_STORE
from fedcomp.clients.links import SENT
from fedcomp.coding.sealing import PeerIdentity
from fedcomp.coding.spool import Spool
from fedcomp.flower.asks import data_in
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.links import Book, Box, Letter, LinkError, PeerEntry, Reference
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import MAIL, POST, take_frame
from fedcomp.program import System
from fedcomp.strategies.links import Links
from fedcomp.systems import SYSTEMS

NODES, SPARSE = posts.NODES, posts.SPARSE


class TracedHalving(Halving, id="traced-halving"):
    TRACED = True


SYSTEMS["traced-halving"] = TracedHalving
SYSTEMS.setdefault("relayed", Relayed)


class Run(posts.Run):
    """A server with or without links, and what passed it of posts."""

    def __init__(self, system: System, links: Links | None, fault: Any = None) -> None:
        super().__init__(system, fault, links=links)
        self.passed: list[bytes] = []

    def step(self, number: int) -> None:
        self.grid.round = number
        opened = self.server.round(number, self.arrays, ConfigRecord(), self.grid)
        try:
            pushed = next(opened)
            while True:
                messages = list(pushed)
                replies = list(self.grid.send_and_receive(messages, timeout=9)) if messages else []
                for each in (*messages, *replies):
                    if each.has_content():
                        self.passed += [*data_in(each.content, MAIL).values(), *data_in(each.content, POST).values()]
                pushed = opened.send(replies)
        except StopIteration as end:
            found, _ = end.value
            self.arrays = self.arrays if found is None else found


SYSTEMS_HERE = [TracedHalving(nodes=NODES), Passing(SPARSE), SealedPassing(SPARSE), Relayed(SPARSE)]


@pytest.mark.slow
@pytest.mark.parametrize("seal", [True, False])
@pytest.mark.parametrize("system", SYSTEMS_HERE, ids=lambda s: s.ID)
def test_by_links_comes_what_comes_through_the_server(system: System, seal: bool, tmp_path: Path) -> None:
    """And nothing of it passes the server but references, where the system is traced."""
    hub, peers = Run(system, None), Run(system, Links(tmp_path, seal=seal))
    for number in range(1, 5):
        hub.step(number), peers.step(number)
        assert peers.seen() == hub.seen()
        assert peers.server.reports[number].refused == {}
        assert peers.server.reports[number].notes == []
    assert hub.passed
    assert all(Reference.find(data) is not None for data in peers.passed)
    assert bool(peers.passed) == system.TRACED


@pytest.mark.parametrize("system", [TracedHalving(nodes=NODES), Passing(SPARSE)], ids=lambda s: s.ID)
def test_what_no_link_takes_follows_sealed_through_the_server(system: System, tmp_path: Path) -> None:
    """The failed links are named, and rest for some rounds; nothing of what was meant for others can be read."""
    hub, peers = Run(system, None), Run(system, Links(tmp_path))
    hub.step(1), peers.step(1)
    nowhere = peers.grid.node_id_of(2)
    peers.server.roster.peer(nowhere).address = "tcp://127.0.0.1:1"
    for number in range(2, 5):
        peers.passed.clear()
        hub.step(number), peers.step(number)
        assert peers.seen() == hub.seen()
        boxes = [data for data in peers.passed if Box.find(data) is not None]
        assert boxes
        assert all(b"mass" not in data and b"number" not in data for data in boxes)
        notes = [note for note in peers.server.reports[number].notes if ">2 " in note]
        assert notes
    # The same pair tries nothing in the next rounds.
    assert not isinstance(system, Passing) or any("is not retried before round" in note for note in notes)


def test_what_is_not_sealed_never_passes_the_server(tmp_path: Path) -> None:
    run = Run(Passing(SPARSE), Links(tmp_path, seal=False))
    run.step(1)
    run.server.roster.peer(run.grid.node_id_of(2)).address = ""
    run.passed.clear()
    run.step(2)
    assert run.passed == []
    assert run.server.state["heard"]["2"] == []
    assert run.server.reports[2].notes == ["link 1>2 it has no listener"]


def test_a_message_lost_by_the_server_is_not_lost_by_links(tmp_path: Path) -> None:
    """Mass stays under losses, and nodes forget of what they sent what cannot come back."""

    def lossy(delivery: Any) -> str | None:
        kinds = {0: "silent", 1: "lost_reply", 2: "duplicate", 3: "raise"}
        return kinds.get((delivery.round * 7 + delivery.partition * 3) % 9) if delivery.round < 12 else None

    run = Run(TracedHalving(nodes=NODES), Links(tmp_path), lossy)
    for number in range(1, 16):
        run.step(number)
    held = sum(float(np.frombuffer(memory["mass"], np.float64)[0]) for memory in run.memories().values())
    waiting = [post for posts in run.server.mailbox.waiting.values() for post in posts]
    references = [Reference.find(bytes(post.data)) for post in waiting]
    for post, reference in zip(waiting, references, strict=True):
        assert reference is not None
        (letter,) = [
            Letter.of(parcel)
            for parcel in _letters(run, post.source)
            if Reference.of(reference.number, Letter.of(parcel)) == reference
        ]
        held += float(np.frombuffer(letter.data, np.float64)[0])
    assert held == float(1 << 40) * 10
    kept = [key for p in range(NODES) for key in run.grid.context(run.grid.node_id_of(p)).state if key.startswith(SENT)]
    assert len(kept) <= 3 * NODES


def _letters(run: Run, node: int) -> list[bytes]:
    state = run.grid.context(run.grid.node_id_of(node)).state
    return [bytes(take_frame(state, key) or b"") for key in state if key.startswith(SENT)]


def test_a_run_with_simulated_links_is_saved_with_what_is_in_them(tmp_path: Path) -> None:
    one = Run(TracedHalving(nodes=NODES), Links(tmp_path / "one"))
    (tmp_path / "two").mkdir()
    for number in (1, 2):
        one.step(number)
    saved = copy.deepcopy(one.server.state_dict())
    assert saved["posts"]["links"]
    # The folder that nodes know is gone.
    one.server = posts.server(one.system, Links(tmp_path / "two"))
    one.server.load_state_dict(saved)
    one.server.renumber()
    other = Run(TracedHalving(nodes=NODES), None)
    for number in (1, 2, 3, 4):
        other.step(number)
    for number in (3, 4):
        one.step(number)
    assert one.memories() == other.memories()
    none = Run(one.system, None).server
    with pytest.raises(ValueError, match="this one has no spool"):
        none.load_state_dict(saved)


def test_a_grid_with_a_ledger_counts_what_links_took(tmp_path: Path) -> None:
    run = Run(Passing(SPARSE), Links(tmp_path))
    rows: list[tuple[Any, ...]] = []
    run.grid.record_peer = lambda *row: rows.append(row)  # type: ignore[attr-defined]
    assert hasattr(MeteredGrid, "record_peer")
    run.step(1)
    # 8 bytes of a number, sealed (48), with its name and exchange (9 + 6), and a header (36).
    assert [row[3:] for row in rows] == [(71, 107)] * NODES


DAMAGED = [b"", b"[]", b"{}", b'["",true,1,{"x":["","",""]}]', b'["",true,1,{"1":["","zz",""]}]', b'["",1,1,{}]']


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_book_is_refused(data: bytes) -> None:
    with pytest.raises(LinkError):
        Book.of(data)


def test_books_letters_references_and_boxes_are_read_as_they_were_written() -> None:
    book = Book("/x", True, 7, {3: PeerEntry("tcp://a:1", b"k" * 32, b"s")})
    assert Book.of(book.to_bytes()) == book
    letter = Letter(1 << 40, "näme", b"data")
    assert Letter.of(letter.to_bytes()) == letter
    for wrong in (b"", b"x" * 8, b"\0" * 9, b"\0" * 8 + b"\2\xff\xff"):
        with pytest.raises(LinkError):
            Letter.of(wrong)
    reference, box = Reference.of(3, letter), Box(4, b"body")
    assert Reference.find(reference.to_bytes()) == reference
    assert Box.find(box.to_bytes()) == box
    for other in (b"", b"plain", reference.to_bytes()[:-1]):
        assert Reference.find(other) is None
        assert Box.find(other) is None


# Real listeners, and keys that are pinned.


class Nodes:
    """Nodes with listeners of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[int, Running] = {}

    def start(self, *, keys: bool = False, without: tuple[int, ...] = ()) -> Callable[[int], dict[str, Any]]:
        """Return the configuration of each; those ``without`` have none, and say so."""
        own: dict[int, dict[str, Any]] = {}
        files = {i: make_key(self.folder / f"node-{i}") for i in range(NODES)} if keys else {}
        listed = make_list(self.folder / "peers", files)
        for i in range(NODES):
            own[i] = {"partition-id": i} | ({PEER_KEY: str(files[i]), PEER_KEYS: str(listed)} if keys else {})
            if i not in without:
                store = self.folder / f"store-{i}"
                options = ("--key", str(files[i]), "--peer-keys", str(listed)) if keys else ()
                self.running[i] = Running(store, *options)
                own[i] |= {PEER_ADDRESS: self.running[i].address, PEER_STORE: str(store)}
        return own.__getitem__


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    for there in made.running.values():
        there.kill()


@pytest.mark.slow
@pytest.mark.parametrize("keys", [False, True], ids=["plain", "keys"])
def test_listeners_take_what_is_posted(keys: bool, nodes: Nodes) -> None:
    hub, peers = Run(TracedHalving(nodes=NODES), None), Run(TracedHalving(nodes=NODES), Links(""))
    peers.grid = InProcessGrid(client_app([compression()]), NODES, seed=4, node_config=nodes.start(keys=keys))
    for number in range(1, 4):
        hub.step(number), peers.step(number)
        assert peers.server.reports[number].notes == []
    assert peers.memories() == hub.memories()
    assert all(Reference.find(data) is not None for data in peers.passed)
    # What is posted may be asked for until the last of its round has arrived.
    assert any(Spool(nodes.folder / f"store-{i}").list(peers.server._session, 3) for i in range(NODES))


def test_a_node_without_a_listener_gets_sealed_boxes_and_sends_by_the_links_of_others(nodes: Nodes) -> None:
    hub, peers = Run(Passing(SPARSE), None), Run(Passing(SPARSE), Links(""))
    peers.grid = InProcessGrid(client_app([compression()]), NODES, seed=4, node_config=nodes.start(without=(2,)))
    hub.step(1), peers.step(1)
    assert peers.server.reports[1].notes == ["link 1>2 it has no listener"]
    assert peers.server.state == hub.server.state
    assert all(Box.find(data) is not None for data in peers.passed)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["own key", "no signature", "of another node"])
def test_a_server_cannot_put_another_seal_key_in_a_nodes_place(how: str, nodes: Nodes) -> None:
    """Nothing is sealed for it, and nothing passes the server that it could open."""
    run = Run(Passing(SPARSE), Links(""))
    run.grid = InProcessGrid(client_app([compression()]), NODES, seed=4, node_config=nodes.start(keys=True))
    run.step(1)
    assert run.server.reports[1].notes == []
    run.passed.clear()
    peer, other = (run.server.roster.peer(run.grid.node_id_of(node)) for node in (2, 3))
    if how == "of another node":
        peer.key, peer.signature = other.key, other.signature
    else:
        peer.key = PeerIdentity.generate().public
        peer.signature = b"" if how == "no signature" else peer.signature
    run.step(2)
    assert run.passed == []
    assert run.server.state["heard"]["2"] == []
    (note,) = run.server.reports[2].notes
    assert note.startswith("link 1>2 the seal key of partition 2 is not signed")
