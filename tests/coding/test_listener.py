"""The listener: parcels arrive and are acknowledged from the disk; whatever one peer does, the others are served."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from running_listener import Running, free_port, open_files
from test_transport import RUN, parcel

from fedcomp.coding import listener
from fedcomp.coding.errors import TransportError
from fedcomp.coding.transport import (
    ACK,
    BUSY,
    FULL,
    HEADER_BYTES,
    KEPT,
    REFUSED,
    DeliveryFailed,
    Parcel,
    Spool,
    TcpTransport,
    deliver,
    transport_of,
)
from fedcomp.errors import ConfigError


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def begin(*options: str) -> Running:
        running.append(Running(tmp_path / f"store-{len(running)}", *options))
        return running[-1]

    yield begin
    for one in running:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


def answer_to(connection: socket.socket, data: bytes) -> int:
    """Send ``data`` and return the status that comes back."""
    connection.sendall(data)
    answer = b""
    while len(answer) < ACK.size:
        more = connection.recv(ACK.size - len(answer))
        assert more, "closed without an answer"
        answer += more
    assert answer[:4] == b"FCPA"
    return answer[4]


def wait_until(true: Callable[[], bool], seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_parcel_is_on_disk_when_it_is_acknowledged_and_the_bytes_are_those_of_the_socket(start, tmp_path) -> None:
    there = start()
    sender = there.transport(tmp_path / "own")
    large = parcel(5, os.urandom(3_000_000))
    assert sender.send(there.address, large) == len(large.to_bytes()) == 3_000_000 + HEADER_BYTES
    assert Spool(there.store).list(RUN, 7) == [large]
    assert sender.send(there.address, large) == len(large)  # again: acknowledged, kept once
    assert Spool(there.store).held == len(large)
    receiver = transport_of(there.address, there.store)
    assert receiver.store.list(RUN, 7) == [large]
    status, out, err = there.end()
    assert (status, err) == (0, "")
    assert out == f"listening for parcels on 127.0.0.1:{there.port}\n"


@pytest.mark.slow
def test_the_acknowledgement_names_the_parcel(start) -> None:
    there = start()
    data = parcel().to_bytes()
    with there.connect() as connection:
        connection.sendall(data)
        answer = connection.recv(100)
        assert answer == b"FCPA\0\0\0\0" + data[32:36]
        assert connection.recv(1) == b""  # one parcel, one connection


@pytest.mark.slow
def test_many_senders_at_once_are_all_served(start, tmp_path) -> None:
    there = start()
    sender = there.transport(tmp_path / "own")
    outgoing = [(there.address, parcel(source, bytes([source]) * 20_000)) for source in range(40)]
    done = deliver(sender, outgoing, workers=16)
    assert [d.error for d in done] == [None] * 40
    assert [d.handed_over for d in done] == [20_000 + HEADER_BYTES] * 40
    assert Spool(there.store).list(RUN, 7) == [p for _, p in outgoing]


def changed(place: int, value: bytes) -> bytes:
    data = bytearray(parcel().to_bytes())
    data[place : place + len(value)] = value
    return bytes(data)


@pytest.mark.slow
def test_no_bad_peer_stops_it_and_every_one_is_counted(start) -> None:
    there = start("--parcel-bytes", "1000")
    bad = [
        (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" + bytes(20), REFUSED),
        (changed(28, b"\xff\xff\xff\xff"), REFUSED),  # a length of 4 GiB
        (changed(28, struct.pack("<I", 965)), REFUSED),  # one byte above the limit
        (changed(4, b"\x02"), REFUSED),
        (changed(40, b"x"), REFUSED),  # a flipped byte of the body
        (changed(33, b"x"), REFUSED),  # of the checksum
    ]
    for data, status in bad:
        with there.connect() as connection:
            assert answer_to(connection, data) == status
    for data in (b"", b"FCP1", parcel().to_bytes()[:-1]):
        with there.connect() as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""  # a parcel broken off is not answered
    with there.connect() as connection:
        # Leave with a reset in the middle.
        connection.sendall(b"FCP1")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with there.connect() as connection:
        assert answer_to(connection, parcel().to_bytes()) == KEPT
    assert Spool(there.store).list(RUN, 7) == [parcel()]
    status, _, err = there.end()
    assert status == 0
    assert "Traceback" not in err
    assert "10 connections brought nothing so far (broken off 4, no parcel 6)" in err


@pytest.mark.slow
def test_a_slow_sender_is_cut_off_and_meanwhile_the_others_are_served(start) -> None:
    there = start("--seconds", "2")
    slow = there.connect()
    began = time.monotonic()
    for i in range(3):
        slow.sendall(parcel().to_bytes()[i : i + 1])
        with there.connect() as connection:
            assert answer_to(connection, parcel(i).to_bytes()) == KEPT
    slow.settimeout(100)
    # It ends although bytes came, and not before the others were served.
    assert slow.recv(1) == b""
    assert time.monotonic() - began > 1.5
    slow.close()


@pytest.mark.slow
@pytest.mark.parametrize(("connections", "per_host"), [("3", "9"), ("9", "3")])
def test_connections_are_few_and_come_back(start, connections, per_host) -> None:
    there = start("--connections", connections, "--per-host", per_host, "--seconds", "5")
    idle = [there.connect() for _ in range(3)]
    for connection in idle:
        connection.sendall(b"F")
    with there.connect() as connection:
        assert answer_to(connection, b"") == BUSY
    idle[0].close()

    def free() -> bool:
        with there.connect() as connection:
            return answer_to(connection, parcel().to_bytes()) == KEPT

    wait_until(free)
    for connection in idle[1:]:
        connection.close()


@pytest.mark.slow
def test_a_parcel_in_single_bytes_is_the_same_parcel(start) -> None:
    there = start()
    data = parcel(body=bytes(range(200))).to_bytes()
    with there.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for place in range(len(data) - 1):
            connection.sendall(data[place : place + 1])
        assert answer_to(connection, data[-1:]) == KEPT
    assert Spool(there.store).list(RUN, 7) == [Parcel.from_bytes(data)]


@pytest.mark.slow
def test_unfinished_parcels_share_one_memory(start) -> None:
    there = start("--parcel-bytes", "100000", "--buffered-bytes", "150000", "--seconds", "20")
    data = parcel(1, bytes(99_000)).to_bytes()
    announced = [there.connect() for _ in range(5)]
    for connection in announced:
        connection.sendall(data[:HEADER_BYTES])  # what is only announced takes nothing
    with there.connect() as connection:
        assert answer_to(connection, data) == KEPT
    first, second = announced[:2]
    first.sendall(data[HEADER_BYTES:-1])

    def full() -> bool:
        with there.connect() as connection:
            return answer_to(connection, data) == BUSY

    wait_until(full)
    first.sendall(data[-1:])  # finished: what it held is free again
    assert first.recv(5)[4] == KEPT
    assert answer_to(second, data[HEADER_BYTES:]) == KEPT
    for connection in announced:
        connection.close()


@pytest.mark.slow
def test_one_address_holds_half_of_the_memory_and_others_are_served(start) -> None:
    there = start("--parcel-bytes", "50000", "--buffered-bytes", "180000", "--seconds", "60")
    data = parcel(1, bytes(49_000)).to_bytes()
    flood = [there.connect() for _ in range(4)]
    for connection in flood:
        connection.settimeout(0.5)
        connection.sendall(data[:-1])

    def told() -> bool:
        # What is above the share of this address is turned away: three unfinished parcels are more than half.
        for connection in flood:
            try:
                if connection.recv(100)[4:5] == bytes([BUSY]):
                    return True
            except TimeoutError:
                continue
        return False

    wait_until(told)
    with socket.create_connection(("127.0.0.1", there.port), source_address=("127.0.0.2", 0)) as other:
        assert answer_to(other, parcel(3, bytes(49_000)).to_bytes()) == KEPT
    for connection in flood:
        connection.close()


@pytest.mark.slow
def test_a_full_store_says_so_and_is_not_tried_again(start, tmp_path) -> None:
    there = start("--store-bytes", "100")
    sender = there.transport(tmp_path / "own")
    sender.send(there.address, parcel(1))
    sender.send(there.address, parcel(2))
    with pytest.raises(DeliveryFailed, match="store is full; raise its --peer-store-bytes") as failed:
        sender.send(there.address, parcel(3))
    assert failed.value.handed_over == 41  # once
    with there.connect() as connection:
        assert answer_to(connection, parcel(4).to_bytes()) == FULL
    assert Spool(there.store).held == 82


@pytest.mark.slow
def test_a_disk_that_cannot_be_written_is_that_nodes_trouble_and_it_goes_on(start, tmp_path) -> None:
    there = start()
    away = there.store.rename(tmp_path / "away")
    with pytest.raises(DeliveryFailed, match="could not write it to its disk"):
        there.transport(tmp_path / "own").send(there.address, parcel())
    away.rename(there.store)
    assert there.transport(tmp_path / "own").send(there.address, parcel()) == 41
    _, _, err = there.end()
    assert "(not written 1)" in err
    assert "cannot be written" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_what_a_receiver_refuses_is_an_error_that_says_what_to_compare(start, tmp_path) -> None:
    there = start("--parcel-bytes", "100")
    with pytest.raises(DeliveryFailed, match="compare their size limits"):
        there.transport(tmp_path / "own").send(there.address, parcel(1, bytes(2_000_000)))
    with pytest.raises(DeliveryFailed, match="exceeds the 100 a peer accepts") as failed:
        there.transport(tmp_path / "own", max_parcel_bytes=100).send(there.address, parcel(1, bytes(100)))
    assert failed.value.handed_over == 0


class Peer:
    """A peer that does as it is told, connection by connection, and remembers what it got."""

    def __init__(self, *behaviours: Callable[[socket.socket], None]) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.server.getsockname()[1]}"
        self.behaviours = behaviours
        self.got: list[bytes] = []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        for behave in self.behaviours:
            connection, _ = self.server.accept()
            with connection:
                self.got.append(connection.recv(1 << 16))
                behave(connection)
        self.server.close()


def acknowledge(connection: socket.socket) -> None:
    connection.sendall(b"FCPA\0\0\0\0" + parcel().to_bytes()[32:36])


def busy(connection: socket.socket) -> None:
    connection.sendall(bytes([*b"FCPA", BUSY]) + bytes(7))


def wrong_parcel(connection: socket.socket) -> None:
    connection.sendall(b"FCPA\0\0\0\0abcd")


def http(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")


def hang_up(connection: socket.socket) -> None:
    pass


@pytest.mark.parametrize("first", [busy, wrong_parcel, http, hang_up], ids=lambda f: f.__name__)
def test_a_parcel_that_is_not_acknowledged_is_sent_once_more_and_both_count(first, tmp_path) -> None:
    peer = Peer(first, acknowledge)
    sender = TcpTransport("tcp://127.0.0.1:9", Spool(tmp_path))
    assert sender.send(peer.address, parcel()) == 2 * 41
    peer.thread.join(100)
    assert peer.got == [parcel().to_bytes()] * 2


def test_after_the_second_attempt_it_is_a_loss_with_its_bytes(tmp_path) -> None:
    peer = Peer(hang_up, wrong_parcel, acknowledge)
    sender = TcpTransport("tcp://127.0.0.1:9", Spool(tmp_path))
    with pytest.raises(DeliveryFailed, match="it acknowledged another parcel") as failed:
        sender.send(peer.address, parcel())
    assert failed.value.handed_over == 82
    assert isinstance(failed.value, TransportError)


def test_a_peer_that_never_answers_costs_the_timeout_and_no_more(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sender = TcpTransport("tcp://127.0.0.1:9", Spool(tmp_path), send_timeout=0.2)
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        done = deliver(sender, [(address, parcel(i, bytes(12_000_000))) for i in range(3)])
        assert time.monotonic() - began >= 0.4  # two attempts each
    for delivery in done:
        assert "no acknowledgement arrived in time" in str(delivery.error) or "timed out" in str(delivery.error)
        assert 0 < delivery.handed_over < 2 * 12_000_036  # what the connection took before it was full


def test_a_peer_that_is_gone_is_a_loss_at_once(tmp_path) -> None:
    sender = TcpTransport("tcp://127.0.0.1:9", Spool(tmp_path))
    with pytest.raises(
        DeliveryFailed, match=r"peer tcp://127.0.0.1:\d+ did not take a parcel of 41 bytes.*refused"
    ) as e:
        sender.send(f"tcp://127.0.0.1:{free_port()}", parcel())
    assert e.value.handed_over == 0
    with pytest.raises(DeliveryFailed, match="did not take"):
        sender.send("tcp://no-such-host.invalid:9100", parcel())
    with pytest.raises(DeliveryFailed, match="host:port"):
        sender.send("spool:/tmp", parcel())


# Coming and going.


@pytest.mark.slow
def test_it_leaves_with_the_pipe_with_a_signal_and_not_with_a_ctrl_c_or_the_terminal(start) -> None:
    by_pipe, by_signal = start(), start()
    os.kill(by_pipe.process.pid, signal.SIGINT)
    os.kill(by_pipe.process.pid, signal.SIGHUP)
    with by_pipe.connect() as connection:
        assert answer_to(connection, parcel().to_bytes()) == KEPT
    open_connection = by_pipe.connect()
    assert by_pipe.end()[0] == 0
    assert open_connection.recv(1) == b""
    open_connection.close()
    with pytest.raises(ConnectionRefusedError):
        by_pipe.connect()
    os.kill(by_signal.process.pid, signal.SIGTERM)
    assert by_signal.process.wait(100) == 0


@pytest.mark.slow
def test_it_listens_where_it_is_told_and_nowhere_else(start) -> None:
    there = start()
    inodes = {name[8:-1] for name in open_files(there.process.pid) if name.startswith("socket:[")}
    listening = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{there.process.pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.append(fields[1])
    assert listening == [f"0100007F:{there.port:04X}"]


@pytest.mark.slow
def test_a_temporary_store_goes_with_it_and_another_stays(start) -> None:
    passing, lasting = start("--temporary"), start()
    for there in (passing, lasting):
        with there.connect() as connection:
            assert answer_to(connection, parcel().to_bytes()) == KEPT
        there.end()
    assert not passing.store.exists()
    assert Spool(lasting.store).list(RUN, 7) == [parcel()]


def test_what_cannot_begin_says_why(tmp_path, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert listener.main(["--listen", f"127.0.0.1:{port}", "--store", str(tmp_path)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    for options, said in [
        (["--listen", "127.0.0.1"], "expected HOST:PORT"),
        (["--listen", "127.0.0.1:1", "--parcel-bytes", "3"], "a parcel's header alone has 36"),
        (["--listen", "127.0.0.1:1", "--connections", "0"], "must be positive"),
        (["--listen", "127.0.0.1:1", "--store-bytes", "1"], "max_store_bytes is 1"),
    ]:
        assert listener.main([*options, "--store", str(tmp_path)]) == 1
        assert said in capsys.readouterr().err


def test_its_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="less than the"):
        listener.ListenerLimits(parcel_bytes=100, buffered_bytes=99)
    assert replace(listener.ListenerLimits(), seconds=0.1).seconds == 0.1
