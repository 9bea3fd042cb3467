"""Parcels and where they are kept: golden bytes, limits before allocation, several writers, crashes in between."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.coding import spool as spool_module
from fedcomp.coding.errors import CodingError, PacketError, TransportError
from fedcomp.coding.transport import (
    HEADER_BYTES,
    DeliveryFailed,
    Parcel,
    Spool,
    SpoolRoot,
    StoreFull,
    deliver,
    parcel_length,
    parse_tcp,
    transport_of,
)
from fedcomp.errors import ConfigError

RUN = b"run-0001"
OTHER = b"run-0002"
GOLDEN = bytes.fromhex("464350310103000072756e2d3030303107000000020000000900000005000000101c65287368617264")


def parcel(source: int = 2, body: bytes = b"shard", **fields: Any) -> Parcel:
    return replace(Parcel(RUN, 7, 3, source, 9, body), **fields)


parcels = st.builds(
    Parcel,
    run=st.binary(min_size=8, max_size=8),
    round=st.integers(0, 2**32 - 1),
    kind=st.integers(0, 255),
    source=st.integers(0, 2**32 - 1),
    destination=st.integers(0, 2**32 - 1),
    body=st.binary(max_size=60),
)


# The format.


def test_golden_bytes() -> None:
    assert parcel().to_bytes() == GOLDEN
    assert Parcel.from_bytes(GOLDEN) == parcel()
    # By hand, from the table in the module.
    head = b"FCP1" + bytes([1, 3, 0, 0]) + RUN + struct.pack("<IIII", 7, 2, 9, 5)
    assert head + struct.pack("<I", zlib.crc32(head + b"shard")) + b"shard" == GOLDEN


@given(parcels)
def test_every_parcel_comes_back(sent: Parcel) -> None:
    data = sent.to_bytes()
    assert len(data) == len(sent) == HEADER_BYTES + len(sent.body) == parcel_length(data[:HEADER_BYTES])
    assert Parcel.from_bytes(data) == sent


@pytest.mark.slow
@given(parcels, st.data())
def test_a_changed_truncated_or_longer_parcel_is_refused(sent: Parcel, draw: st.DataObject) -> None:
    data = sent.to_bytes()
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    cut = draw.draw(st.integers(0, len(data) - 1))
    for wrong in (bytes(changed), data[:cut], data + b"\0"):
        with pytest.raises(PacketError):
            Parcel.from_bytes(wrong)


@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_no_parcel(data: bytes) -> None:
    with pytest.raises(PacketError):
        Parcel.from_bytes(data)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, b"FCW1", "begins with b'FCW1'"),
        (4, b"\x02", "version 2"),
        (6, b"\x01\x00", "reserved field 1"),
        (28, b"\xff\xff\xff\xff", "announces 4294967331 bytes; this receiver accepts at most 1000"),
        (28, struct.pack("<I", 965), "announces 1001 bytes; this receiver accepts at most 1000"),
    ],
)
def test_a_header_is_judged_before_anything_is_read_or_allocated(place: int, value: bytes, said: str) -> None:
    header = bytearray(GOLDEN[:HEADER_BYTES])
    header[place : place + len(value)] = value
    with pytest.raises(PacketError, match=said):
        parcel_length(bytes(header), 1000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", b"short"),
        ("run", "run-0001"),
        ("round", -1),
        ("round", 2**32),
        ("round", True),
        ("kind", 256),
        ("source", 1.0),
        ("destination", -1),
        ("body", bytearray(b"x")),
    ],
)
def test_a_parcel_that_cannot_be_written_is_refused_with_the_fields_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"a parcel's {field} is"):
        parcel(**{field: value})


# What a store promises.


@pytest.fixture
def store(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", 1000)


def test_a_round_comes_in_its_own_order_whatever_the_order_of_arrival(store: Spool) -> None:
    wanted = [parcel(s, kind=k, body=b) for k in (1, 3) for s in (0, 2, 11) for b in (b"a", b"b")]
    for p in [*wanted[::2], *wanted[1::2], parcel(round=8), parcel(run=OTHER)]:
        assert store.put(p)
    assert store.list(RUN, 7) == wanted
    assert store.list(RUN, 6) == []


def test_equal_parcels_are_one_and_others_with_the_same_coordinates_are_two(store: Spool) -> None:
    assert store.put(parcel())
    assert not store.put(parcel())
    assert store.held == len(parcel())
    assert store.put(parcel(body=b"other"))
    assert [p.body for p in store.list(RUN, 7)] == [b"other", b"shard"]


def test_the_limit_counts_headers_and_refuses_without_losing_anything(store: Spool) -> None:
    store.put(parcel(1, b"x" * (500 - HEADER_BYTES)))
    store.put(parcel(2, b"x" * (500 - HEADER_BYTES)))
    assert store.held == 1000 == store.max_store_bytes
    with pytest.raises(StoreFull, match=r"41 bytes does not fit beside 1000 of at most 1000"):
        store.put(parcel(3))
    assert not store.put(parcel(1, b"x" * (500 - HEADER_BYTES)))  # what is there already needs no room
    assert len(store.list(RUN, 7)) == 2
    assert store.drop_before(RUN, 8) == 1000
    assert store.put(parcel(3))


def test_a_round_that_advances_frees_the_ones_before_it(store: Spool) -> None:
    for round_ in (5, 6, 7):
        store.put(parcel(round=round_))
    assert store.drop_before(RUN, 6) == len(parcel())
    assert [len(store.list(RUN, r)) for r in (5, 6, 7)] == [0, 1, 1]
    assert store.drop_before(RUN, 6) == 0


@pytest.mark.parametrize("limit", [0, 35, -1, True, 1.5])
def test_a_limit_that_holds_no_header_is_refused(limit: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_store_bytes"):
        Spool(tmp_path, limit)


# In a directory.


def files(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name != ".lock")


def test_a_spool_outlives_its_process_and_is_its_owners_alone(tmp_path: Path) -> None:
    Spool(tmp_path / "a" / "spool").put(parcel())
    again = Spool(tmp_path / "a" / "spool")
    assert again.list(RUN, 7) == [parcel()]
    assert (tmp_path / "a" / "spool").stat().st_mode & 0o077 == 0
    (name,) = files(again.directory)
    assert (again.directory / name).read_bytes() == GOLDEN


def test_one_parcel_is_forgotten_and_the_others_stay(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for body in (b"a", b"b"):
        spool.put(parcel(body=body))
    assert spool.remove(parcel(body=b"a"))
    assert not spool.remove(parcel(body=b"a"))
    gone, kept = parcel(body=b"a"), parcel(body=b"b")
    assert spool.list(kept.run, kept.round) == [kept]
    assert spool.held == len(kept)
    assert spool.put(gone), "it can come again"


WRITER = """
import sys
from pathlib import Path
from fedcomp.coding.errors import TransportError
from fedcomp.coding.transport import Parcel, Spool
store, refused = Spool(Path(sys.argv[1]), 50 * 136), 0
for i in range(40):
    try:
        store.put(Parcel(b"run-0001", 7, 3, 1000 * int(sys.argv[2]) + i, 9, bytes(100)))
    except TransportError:
        refused += 1
print(refused)
"""


@pytest.mark.slow
def test_several_writers_never_exceed_the_limit_together(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(3)]
    refused = [int(writer.communicate(timeout=60)[0]) for writer in writers]
    store = Spool(tmp_path)
    assert sum(refused) == 3 * 40 - 50
    assert store.held == 50 * 136
    assert len(store.list(RUN, 7)) == 50
    assert all(name.endswith(".parcel") for name in files(tmp_path))


DIES = """
import os, signal, sys
from pathlib import Path
from fedcomp.coding import spool
from fedcomp.coding.transport import Parcel, Spool
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
spool.os.replace = die
Spool(Path(sys.argv[1])).put(Parcel(b"run-0001", 7, 3, 2, 9, b"shard"))
"""


@pytest.mark.slow
def test_a_writer_killed_before_the_rename_leaves_nothing_that_counts(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = files(tmp_path)
    assert left.endswith(".partial")
    store = Spool(tmp_path, 41)
    assert store.list(RUN, 7) == []
    assert store.held == 0
    # The lock went with the process; the next writer cleans up and is not refused for what never arrived.
    assert store.put(parcel(5))
    assert len(files(tmp_path)) == 1
    assert store.list(RUN, 7) == [parcel(5)]


def test_a_disk_that_is_full_leaves_no_half_a_parcel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Spool(tmp_path, durable=True)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool_module.os, "fsync", full)
    with pytest.raises(TransportError, match=r"could not be kept in .*No space left"):
        store.put(parcel())
    assert files(tmp_path) == []
    monkeypatch.undo()
    assert store.put(parcel())


def test_a_spool_that_somebody_else_holds_for_ever_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr(spool_module, "LOCK_SECONDS", 0.05)
    store = Spool(tmp_path)
    with (tmp_path / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TransportError, match="locked by another process"):
            store.put(parcel())
    assert store.put(parcel())


def test_damaged_files_are_losses_and_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Spool(tmp_path)
    for source in range(4):
        store.put(parcel(source))
    names = files(tmp_path)
    (tmp_path / names[0]).write_bytes(b"")
    (tmp_path / names[1]).write_bytes(GOLDEN[:-1] + b"x")
    # A parcel that is whole, but not the one its name promises.
    (tmp_path / names[3]).write_bytes(parcel(2).to_bytes())
    assert store.list(RUN, 7) == [parcel(2)]
    assert files(tmp_path) == [names[2]]
    assert caplog.text.count("removed the damaged parcel") == 3


def test_files_that_are_no_parcels_are_left_alone(tmp_path: Path) -> None:
    store = Spool(tmp_path)
    (tmp_path / "readme.txt").write_text("mine")
    (tmp_path / "zz-not-hex.parcel").write_text("?")
    store.put(parcel())
    store.drop_before(RUN, 100)
    assert store.list(RUN, 7) == []
    assert files(tmp_path) == ["readme.txt", "zz-not-hex.parcel"]


def test_other_runs_are_kept_until_they_are_stale(tmp_path: Path) -> None:
    store = Spool(tmp_path, 100, keep_seconds=60)
    store.put(parcel(run=OTHER))
    store.drop_before(RUN, 100)
    assert len(store.list(OTHER, 7)) == 1
    old = time.time() - 61
    (name,) = files(tmp_path)
    os.utime(tmp_path / name, (old, old))
    store.put(parcel())
    assert len(store.list(OTHER, 7)) == 1  # there was room for both
    assert store.put(parcel(3))  # now there is not
    assert len(store.list(OTHER, 7)) == 0
    assert len(store.list(RUN, 7)) == 2


def test_parcels_that_vanish_while_a_reader_looks_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Spool(tmp_path)
    store.put(parcel(1))
    store.put(parcel(2))
    read = Path.read_bytes

    def taken_first(path: Path) -> bytes:
        if "-00000001-" in path.name:
            path.unlink()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", taken_first)
    assert store.list(RUN, 7) == [parcel(2)]


def test_a_directory_that_went_away_is_a_typed_error(tmp_path: Path) -> None:
    store = Spool(tmp_path / "spool")
    (tmp_path / "spool").rmdir()
    for act in (lambda: store.put(parcel()), lambda: store.list(RUN, 7), lambda: store.drop_before(RUN, 8)):
        with pytest.raises(
            TransportError, match=r"the parcel store .* cannot be (read|written).*No such file"
        ) as error:
            act()
        assert not isinstance(error.value, StoreFull)


def test_a_place_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        Spool(tmp_path / "file")


# Addresses and links.


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("tcp://10.0.0.7:9100", ("10.0.0.7", 9100)),
        ("tcp://edge-1.example:1", ("edge-1.example", 1)),
        ("tcp://[fe80::1]:65535", ("fe80::1", 65535)),
    ],
)
def test_tcp_addresses(address: str, place: tuple[str, int]) -> None:
    assert parse_tcp(address) == place


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.7:9100",
        "tcp://10.0.0.7",
        "tcp://:9100",
        "tcp://10.0.0.7:0",
        "tcp://10.0.0.7:65536",
        "tcp://10.0.0.7:٣",
        "tcp://10.0.0.7:-1",
        "tcp://fe80::1:9100",
        "tcp://[10.0.0.7]:9100",
        "tcp://user@host:9100",
        "tcp://host/path:9100",
        "tcp://" + "x" * 70 + ".example:9100",
        "udp://10.0.0.7:9100",
    ],
)
def test_other_texts_are_no_tcp_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match=r"host:port|HOST:PORT"):
        parse_tcp(address)


def test_a_transport_is_chosen_by_the_address(tmp_path: Path) -> None:
    root = SpoolRoot.create(tmp_path / "ro ot")
    assert transport_of(root.address(3)).store.directory == tmp_path / "ro ot" / "00000003"
    assert transport_of("tcp://127.0.0.1:9100", tmp_path / "s").store.directory == tmp_path / "s"
    for address, store, said in [
        ("udp://h:1", None, "of an unknown kind"),
        ("tcp://h:1", None, "needs the folder"),
        ("tcp://h", tmp_path, "HOST:PORT"),
        (root.address(3), tmp_path, "its own store"),
        ("spool:relative", None, "expected 'spool:/absolute/folder'"),
        (f"spool:{tmp_path}/ro%20ot/../x", None, "expected 'spool:/absolute/folder'"),
    ]:
        with pytest.raises(ConfigError, match=said):
            transport_of(address, store)


def test_a_simulated_link_hands_over_what_the_file_holds(tmp_path: Path) -> None:
    root = SpoolRoot.create(tmp_path)
    first, second = transport_of(root.address(0)), transport_of(root.address(1))
    handed_over = [first.send(second.address, parcel(s)) for s in (5, 4, 5)]
    assert handed_over == [41, 41, 41]  # a copy crosses the link as well
    assert second.store.list(RUN, 7) == [parcel(4), parcel(5)]
    assert second.store.list(RUN, 7) == [parcel(4), parcel(5)]
    assert sum(p.stat().st_size for p in (tmp_path / "00000001").glob("*.parcel")) == 82
    assert root.spool(1).held == 82
    assert first.store.list(RUN, 7) == []


def test_a_client_makes_no_files_where_nobody_on_this_machine_marked_a_folder(tmp_path: Path) -> None:
    root = SpoolRoot.create(tmp_path / "marked")
    (tmp_path / "private").mkdir()
    with pytest.raises(ConfigError, match="not a folder of simulated peer links"):
        transport_of(f"spool:{tmp_path}/private/00000001")
    with pytest.raises(DeliveryFailed, match="not a folder of simulated peer links"):
        transport_of(root.address(0)).send(f"spool:{tmp_path}/private/00000001", parcel())
    assert list((tmp_path / "private").iterdir()) == []


def test_a_full_receiver_is_a_failed_delivery(tmp_path: Path) -> None:
    root = SpoolRoot.create(tmp_path)
    sender = transport_of(root.address(0), max_store_bytes=50)
    done = deliver(sender, [(root.address(1), parcel(s)) for s in (1, 2)] + [(root.address(2), parcel(1))], workers=1)
    assert [(d.handed_over, d.error is None) for d in done] == [(41, True), (0, False), (41, True)]
    assert isinstance(done[1].error, DeliveryFailed)
    assert isinstance(done[1].error, TransportError)
    assert isinstance(done[1].error, CodingError)
    assert "does not fit" in str(done[1].error)
    assert deliver(sender, []) == []


def test_an_address_that_is_of_no_use_is_that_peers_loss_alone(tmp_path: Path) -> None:
    root = SpoolRoot.create(tmp_path)
    wrong = ["", "tcp://10.0.0.1:9100", "spool:relative", "spool:/nowhere/00000001"]
    done = deliver(transport_of(root.address(0)), [(a, parcel()) for a in (*wrong, root.address(1))])
    assert [(d.handed_over, d.error is None) for d in done] == [(0, False)] * 4 + [(41, True)]
