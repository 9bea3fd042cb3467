"""A file that grows by what has changed: written once, read whole, and whole after a crash at any byte."""

from __future__ import annotations

import gc
import itertools
import json
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict

from fedcomp.flower import growing, store
from fedcomp.flower.growing import GrowingFile, read
from fedcomp.flower.records import to_record
from fedcomp.flower.store import Lasting, StoreError


def lasting(value: Any) -> Lasting:
    return Lasting(lambda: value)


def value(number: int, parts: list[Lasting]) -> dict[str, Any]:
    arrays = ArrayRecord({"w": Array(np.full(5, number, np.float32))})
    return {"number": number, "arrays": arrays, "parts": parts, 3: (np.asfortranarray(np.eye(2, 3)), np.int64(number))}


def same(found: dict[str, Any], number: int, parts: list[Any]) -> None:
    assert (found["number"], found["parts"]) == (number, parts)
    assert found["arrays"]["w"].numpy().tolist() == [number] * 5
    assert found[3][0].flags.f_contiguous
    assert np.array_equal(found[3][0], np.eye(2, 3))
    assert (type(found[3][1]), found[3][1]) == (np.int64, number)


def test_what_lasts_is_written_once(tmp_path: Path) -> None:
    path, reads = tmp_path / "f", []

    def part(content: bytes) -> Lasting:
        def get() -> bytes:
            reads.append(content[:1])
            return content

        return Lasting(get)

    file, parts = GrowingFile(path, "x"), [part(b"a" * 50_000), part(b"b" * 50_000)]
    sizes = []
    for number in range(4):
        if number == 2:
            parts[1] = part(b"c" * 9)
        file.write(value(number, parts))
        sizes.append(path.stat().st_size)
        same(read(path, "x"), number, [part.read() for part in parts])
        del reads[-2:]
    assert reads == [b"a", b"b", b"c"]
    assert sizes[0] > 100_000
    assert all(0 < later - earlier < 3000 for earlier, later in itertools.pairwise(sizes))


def test_a_file_of_the_past_is_written_anew(tmp_path: Path) -> None:
    """Bounded, whatever changes; and another object of the same place in memory is another value."""
    path, file = tmp_path / "f", GrowingFile(tmp_path / "f", "x")
    kept = lasting(b"k" * 1000)
    for number in range(60):
        changing = [lasting(bytes([number]) * 1000) for _ in range(4)]
        file.write([kept, *changing])
        assert read(path, "x") == [b"k" * 1000, *[bytes([number]) * 1000] * 4]
        assert path.stat().st_size < (growing.MOST + 1) * 5 * 1000 + 20_000
        del changing
        gc.collect()
    assert [each.name for each in tmp_path.iterdir()] == ["f"]


def test_a_value_in_two_places_is_two_when_it_is_read(tmp_path: Path) -> None:
    """As the report of a private strategy, which the one around it has, too."""
    path, file, shared = tmp_path / "f", GrowingFile(tmp_path / "f", "x"), lasting({"w": np.zeros(3)})
    for number in range(3):
        file.write([number, shared, {"again": shared}])
        _, first, second = read(path, "x")
        first["w"] += 1
        assert second["again"]["w"].tolist() == [0, 0, 0]


def three(path: Path) -> list[bytes]:
    """Write three values; return the file after each."""
    file, big, found = GrowingFile(path, "x"), lasting(b"z" * 4000), []
    for number in range(3):
        file.write(value(number, [big, lasting(bytes([number]) * 20)]))
        found.append(path.read_bytes())
    return found


def test_a_crash_at_any_byte_leaves_the_value_before(tmp_path: Path) -> None:
    path = tmp_path / "f"
    _, second, third = three(path)
    for cut in {*range(len(second), len(third), 29), len(third) - 1}:
        for tail in (b"", bytes(100)):  # what was not flushed may be missing, or zero
            path.write_bytes(third[:cut] + tail)
            if path.read_bytes().startswith(third):  # it was zero anyway
                continue
            same(read(path, "x"), 1, [b"z" * 4000, b"\1" * 20])
    path.write_bytes(third)
    same(read(path, "x"), 2, [b"z" * 4000, b"\2" * 20])


def test_every_damaged_byte_before_the_last_entry_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    first, second, third = three(path)
    for position in {*range(0, len(second), 37), *range(len(first), len(first) + 30)}:
        damaged = bytearray(third)
        damaged[position] ^= 0x41
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match="damaged at byte"):
            read(path, "x")
    for cut in (0, 5, len(first) // 2, len(first) - 1):
        path.write_bytes(third[:cut])
        with pytest.raises(StoreError, match="damaged"):
            read(path, "x")


def test_a_write_that_fails_leaves_the_value_and_the_next_one_works(tmp_path: Path, monkeypatch: Any) -> None:
    path, file, kept = tmp_path / "f", GrowingFile(tmp_path / "f", "x"), lasting(b"k" * 9000)
    file.write([1, kept])
    with pytest.raises(StoreError, match=r"value\[2\]\['a'\] is a builtins.object"):
        file.write([2, kept, {"a": object()}])
    assert read(path, "x") == [1, b"k" * 9000]
    with monkeypatch.context() as patch:
        # A disk that is full when half of it is written.
        patch.setattr(growing.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            file.write([3, kept])
    file.write([4, kept])
    assert read(path, "x") == [4, b"k" * 9000]
    assert path.read_bytes().count(growing.MAGIC) == 2


def peak_of(call: Any) -> tuple[Any, int]:
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_arrays_are_written_from_where_they_lie_and_read_one_by_one(tmp_path: Path) -> None:
    million = 1 << 20
    records = RecordDict({f"r{i}": to_record({"a": np.full(million // 4, i, np.float32)}) for i in range(8)})
    parts, peak = peak_of(lambda: growing.packed(records, "x"))
    assert peak < million / 4
    (tmp_path / "f").write_bytes(b"before" + b"".join(parts))
    found, peak = peak_of(lambda: read(tmp_path / "f", "x", len(b"before")))
    assert found == records
    # The value, the array that is read, and once more its bytes.
    assert peak < 10.5 * million
    _, peak = peak_of(lambda: GrowingFile(tmp_path / "g", "x").write(records))
    assert peak < million / 4
    assert read(tmp_path / "g", "x") == records


def entry(document: Any, *members: bytes, kind: str = "x", version: int = 1) -> bytes:
    """Return an entry with correct checksums, whatever it says."""
    own = {"format": "fedcomp.growing", "version": version, "kind": kind, "lasting": []}
    own |= {"members": [len(member) for member in members], **document}
    text = json.dumps(own).encode()
    body = struct.pack("<Q", len(text)) + text + b"".join(members)
    head = struct.pack("<8sQI", growing.MAGIC, len(body), zlib.crc32(body))
    return head + struct.pack("<I", zlib.crc32(head)) + body


TWICE = [store.lasting_at(0)] * 2
FORGED: dict[str, tuple[bytes, str]] = {
    "newer": (entry({"value": 1}, version=9), "version 9"),
    "of another kind": (entry({"value": 1}, kind="y"), "'y'"),
    "a value that is nowhere": (entry({"value": store.lasting_at(7)}), "KeyError"),
    "one value a thousand times": (entry({"value": TWICE, "lasting": [[0, [0, "x"]]]}), "KeyError"),
    "a value in itself": (entry({"value": TWICE[0], "lasting": [[0, [0, TWICE[0]]]]}), "KeyError|unknown kind"),
    "an array that is not there": (entry({"value": {"$": "array", "at": "m0"}, "members": [2**50]}), "claims"),
    "an array of 2**40 numbers": (entry({"value": {"$": "array", "at": "m0"}}, b"\x93NUMPY\x01\x00"), "damaged|m0"),
    "deep": (entry({"value": 1}).replace(b'"value": 1', b'"value": ' + b"[" * 10**5), "damaged"),
    "members": (entry({"value": 1, "members": {"a": -1}}), "damaged"),
    "nothing": (b"", "empty"),
}


@pytest.mark.parametrize("name", FORGED)
def test_what_is_forged_is_refused(name: str, tmp_path: Path) -> None:
    data, said = FORGED[name]
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(StoreError, match=said):
        read(tmp_path / "f", "x")
