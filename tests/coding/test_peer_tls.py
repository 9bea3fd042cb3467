"""Mutual TLS between nodes whose keys are pinned: everybody else is refused before a byte of a body is read."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from peer_key_files import make_key, make_list
from running_listener import Running

from fedcomp.coding.parcels import PARTITIONS_FROM
from fedcomp.coding.peertls import PeerKeys, PeerTls
from fedcomp.coding.transport import HEADER_BYTES, DeliveryFailed, Parcel, Spool, TcpSender, deliver
from fedcomp.errors import ConfigError

RUN = b"run-0001"
HERE, THERE, STRANGER = 1, 2, 7
"""Partitions of the sender and of the listener; one that is on nobody's list."""


def parcel(
    source: int = HERE, destination: int = THERE, body: bytes = b"a message", kind: int = PARTITIONS_FROM
) -> Parcel:
    return Parcel(RUN, 7, kind, source, destination, body)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the keys of four nodes, the list of three of them, and one of all."""
    folder = tmp_path_factory.mktemp("keys")
    made = {i: make_key(folder / f"node-{i}") for i in (HERE, THERE, 3, STRANGER)}
    make_list(folder / "peers", {i: key for i, key in made.items() if i != STRANGER})
    make_list(folder / "all", made)
    return folder


def tls(keys: Path, partition: int, listed: str = "peers") -> PeerTls:
    return PeerTls(keys / f"node-{partition}", PeerKeys.read(keys / listed))


@pytest.fixture
def start(keys: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def begin(*options: str) -> Running:
        own = ("--key", str(keys / f"node-{THERE}"), "--peer-keys", str(keys / "peers"))
        running.append(Running(tmp_path / f"store-{len(running)}", *own, *options))
        return running[-1]

    yield begin
    for one in running:
        one.kill()


def stored(there: Running) -> list[Parcel]:
    return Spool(there.store).list(RUN, 7)


def refused(there: Running, kind: str) -> str:
    """End a listener that has kept nothing; return what it said of one kind of refusal, which is one line."""
    assert stored(there) == []
    status, _, err = there.end()
    assert status == 0
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1, err
    assert kind in lines[0]
    assert "Traceback" not in err
    return lines[0]


def test_listed_nodes_exchange_parcels_of_any_size(start, keys: Path) -> None:
    there, large = start(), parcel(body=os.urandom(3_000_000))
    sender = TcpSender(tls=tls(keys, HERE))
    assert sender.send(there.address, parcel()) == len(parcel())
    assert sender.send(there.address, large) == 3_000_000 + HEADER_BYTES
    assert sender.send(there.address, large) == len(large)  # again: acknowledged, kept once
    assert sorted(map(len, stored(there))) == sorted([len(parcel()), len(large)])
    # The constructions' own numbers are nobody's partition.
    other = parcel(source=40, destination=41, kind=1)
    assert sender.send(there.address, other) == len(other)
    assert there.end() == (0, f"listening for parcels on 127.0.0.1:{there.port}\n", "")


@pytest.mark.slow
def test_many_senders_at_once(start, keys: Path) -> None:
    """The first bytes of a handshake must never be read as a parcel's, however they come in."""
    there = start("--per-key", "64")
    sender = TcpSender(tls=tls(keys, HERE))
    done = deliver(sender, [(there.address, parcel(body=bytes([i]) * 1000)) for i in range(64)], workers=32)
    assert [str(result.error) for result in done if result.error] == []
    assert len(stored(there)) == 64


# Whom a listener refuses.


def test_a_key_that_is_not_listed_is_refused_in_the_handshake(start, keys: Path) -> None:
    there = start()
    sender = TcpSender(tls=tls(keys, STRANGER, "all"))
    with pytest.raises(DeliveryFailed, match="is this node's key in its list of peer keys") as failed:
        sender.send(there.address, parcel(source=STRANGER))
    assert "certificate" not in str(failed.value)
    refused(there, "(unlisted key 2)")


def test_a_listed_key_under_the_name_of_another_partition_is_refused_from_the_header(start, keys: Path) -> None:
    there = start()
    with pytest.raises(DeliveryFailed, match="that peer does not accept this parcel"):
        TcpSender(tls=tls(keys, 3)).send(there.address, parcel(source=HERE, body=bytes(100)))
    assert "has the key of partition 3 and sends in the name of 1" in refused(there, "(another partition 1)")


def test_a_refusal_comes_before_the_body_does(start, keys: Path) -> None:
    """From the header alone: the body is never sent."""
    there = start()
    raw = socket.create_connection(("127.0.0.1", there.port), timeout=100)
    with tls(keys, 3).client.wrap_socket(raw) as connection:
        connection.sendall(parcel(source=HERE, body=bytes(1000)).to_bytes()[:HEADER_BYTES])
        assert connection.recv(12)[:5] == b"FCPA\x01"
    refused(there, "another partition 1")


def test_without_a_certificate_nobody_gets_in(start) -> None:
    there = start()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    raw = socket.create_connection(("127.0.0.1", there.port), timeout=100)
    with context.wrap_socket(raw) as connection:
        connection.settimeout(100)
        received = b"-"
        try:
            connection.sendall(parcel().to_bytes())
            received = connection.recv(12)
        except (ssl.SSLError, ConnectionError):
            received = b""
        assert received == b""
    refused(there, "(no certificate 1)")


def test_plain_tcp_gets_nowhere(start) -> None:
    there = start()
    with pytest.raises(DeliveryFailed):
        TcpSender().send(there.address, parcel())
    refused(there, "(no TLS 2)")


def test_tls_1_2_gets_nowhere(start, keys: Path) -> None:
    there, old = start(), tls(keys, HERE)
    old.client.minimum_version = old.client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(DeliveryFailed):
        TcpSender(tls=old).send(there.address, parcel())
    refused(there, "(TLS below 1.3 2)")


def test_who_connects_and_says_nothing_is_cut_off(start, keys: Path) -> None:
    there = start("--seconds", "0.3")
    with there.connect() as connection:
        connection.settimeout(100)
        assert connection.recv(1) == b""
    refused(there, "(broken off 1)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "room", "size", "said"),
    [
        (("--key-bytes", "3000"), 2, 1400, "partition 1 has 2872 bytes here, and sends 1436 more"),
        # By number, where bytes would let thousands in: every writer looks through all files there.
        (("--key-parcels", "4"), 4, 1, "partition 1 has 4 parcels here"),
    ],
    ids=["bytes", "parcels"],
)
def test_one_key_has_a_share_of_the_store_and_no_more(option, room, size, said, start, keys: Path) -> None:
    there = start(*option)
    sender, other = (TcpSender(tls=tls(keys, i)) for i in (HERE, 3))
    for i in range(room):
        sender.send(there.address, parcel(body=bytes([i]) * size))
    with pytest.raises(DeliveryFailed, match="store is full"):
        sender.send(there.address, parcel(body=b"x" * size))
    other.send(there.address, parcel(source=3, body=bytes(size)))
    assert len(stored(there)) == room + 1
    # What the round's app takes makes room.
    Spool(there.store).drop_before(RUN, 8)
    sender.send(there.address, parcel(body=b"x" * size))
    status, _, err = there.end()
    assert status == 0
    assert "(quota 1)" in err
    assert said in err


@pytest.mark.slow
def test_one_key_has_a_share_of_the_connections_and_no_more(start, keys: Path) -> None:
    there, own = start("--per-key", "1"), tls(keys, HERE)
    with own.client.wrap_socket(there.connect()) as first:
        first.sendall(parcel().to_bytes()[:HEADER_BYTES])
        time.sleep(0.3)
        with pytest.raises(DeliveryFailed, match="no free connection"):
            TcpSender(tls=own).send(there.address, parcel())
        TcpSender(tls=tls(keys, 3)).send(there.address, parcel(source=3))
    assert len(stored(there)) == 1


# Whom a sender refuses.


@pytest.mark.parametrize(("wanted", "said"), [(3, "the key of partition 2 of peer keys, not that of partition 3")])
def test_another_node_than_the_one_it_was_sent_to_gets_nothing(start, keys: Path, wanted: int, said: str) -> None:
    """The server hands round addresses: one that it gives for another partition is as good as none."""
    there = start()
    with pytest.raises(DeliveryFailed, match=said) as failed:
        TcpSender(tls=tls(keys, HERE)).send(there.address, parcel(destination=wanted))
    assert failed.value.handed_over == 0
    assert stored(there) == []


def test_a_listener_of_an_unlisted_key_gets_nothing(keys: Path, tmp_path: Path) -> None:
    own = ("--key", str(keys / f"node-{STRANGER}"), "--peer-keys", str(keys / "all"))
    there = Running(tmp_path / "store", *own)
    try:
        with pytest.raises(DeliveryFailed, match=r"a key that is not in the list .* nothing was sent") as failed:
            TcpSender(tls=tls(keys, HERE)).send(there.address, parcel(kind=1))
        assert failed.value.handed_over == 0
    finally:
        there.kill()


def test_a_plain_listener_gets_nothing(keys: Path, tmp_path: Path) -> None:
    there = Running(tmp_path / "store")
    try:
        with pytest.raises(DeliveryFailed) as failed:
            TcpSender(connect_timeout=1.0, send_timeout=1.0, tls=tls(keys, HERE)).send(there.address, parcel())
        assert failed.value.handed_over == 0
    finally:
        there.kill()


# Keys and lists.


def test_a_list_says_what_is_wrong_with_it(keys: Path, tmp_path: Path) -> None:
    good = (keys / "peers").read_text()
    assert PeerKeys.read(keys / "peers").by_partition.keys() == {HERE, THERE, 3}
    path = tmp_path / "list"
    path.write_text(f"# the nodes\n\n{good}")
    assert PeerKeys.read(path) == PeerKeys.read(keys / "peers")
    first = good.splitlines()[0]
    for text, said in [
        ("", "lists 0 keys"),
        ("3\n", "line 1: expected a partition and an ECDSA public key"),
        (first.replace("ecdsa-sha2-nistp384", "ssh-ed25519"), "expected a partition and an ECDSA"),
        (f"{first}\n9{first[1:]}\n", "line 2: partition 9 or its key is in the list twice"),
        (f"{first}\n{HERE} ecdsa-sha2-nistp384 AAAA\n", "twice"),
        ("x" * 5 + first, "expected a partition"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            PeerKeys.read(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        PeerKeys.read(tmp_path / "none")
    with pytest.raises(ConfigError, match="not in the list of peer keys"):
        tls(keys, STRANGER)
    with pytest.raises(ConfigError, match="not a readable private key"):
        PeerTls(keys / "peers", PeerKeys.read(keys / "peers"))
    path.write_text(f"{good}{STRANGER} ecdsa-sha2-nistp384 AAAA\n")
    with pytest.raises(ConfigError, match="is not a public key"):
        _ = PeerTls(keys / f"node-{HERE}", PeerKeys.read(path)).server


def test_the_private_key_is_on_no_disk_but_where_it_was(keys: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = tls(keys, HERE)
    assert own.client.minimum_version == own.server.minimum_version == ssl.TLSVersion.TLSv1_3
    assert list(tmp_path.iterdir()) == []
