"""A file that holds a value as last written, extended by the changes since then.

::

    file    one entry for each time the value was written
    entry   head (magic, length, CRC-32 of the body, CRC-32 of the head), body
    body    length of the document, the document (JSON), arrays as in .npy files, one after the other

A document describes the whole value in the format of :mod:`fedcomp.flower.store`. For what lasts
(:class:`~fedcomp.flower.store.Lasting`) it has a number, under which some entry has the value itself. Only the last
entry counts. One that a crash cut short is ignored, so that the one before it counts; the file is replaced in one step
by one that holds the last value alone when most of it is of the past. Nothing of it is ever run.
"""

from __future__ import annotations

import io
import json
import os
import struct
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import files
from fedcomp.errors import naming
from fedcomp.flower import store
from fedcomp.flower.logs import log
from fedcomp.flower.store import Lasting, StoreError

MAGIC: Final = b"\x89fgrow\r\n"
_HEAD: Final = struct.Struct("<8sQI")
_CHECK: Final = struct.Struct("<I")
_HEAD_BYTES: Final = _HEAD.size + _CHECK.size
_LENGTH: Final = struct.Struct("<Q")
_PIECE: Final = 1 << 22
"""Bytes that are read at a time where they are checked."""

_FORMAT: Final = "fedcomp.growing"
VERSION: Final = 1
"""Version of the file; a reader refuses newer ones."""

MOST: Final = 3
"""How many times the bytes of its value a file takes before it is written anew."""


_Place = tuple[int, int]
"""Identity of a lasting value, and the number of its earlier occurrences in the whole value."""


@dataclass
class _Written:
    """A lasting value in the file: its identity, its number and its bytes."""

    value: weakref.ref[Lasting]
    number: int
    size: int


class GrowingFile:
    """Writes one value again and again.

    Parameters
    ----------
    path : Path
        What is there is replaced when the value is written for the first time.
    kind : str
        A label, so that files are not mixed up.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self._kind = kind
        # By identity, which a weak reference guards: to keep the values would keep all that they hold.
        self._written: dict[_Place, _Written] = {}
        self._next = 0
        self._size = 0

    def write(self, value: Any) -> None:
        """Make ``value`` the one that the file holds; it is on the disk when this returns.

        A crash at any moment leaves the former value or this one.

        Raises
        ------
        StoreError
            When ``value`` holds something that is not plain data; the file is as it was.
        OSError
            When it cannot be written; the former value can be read.
        """
        held = sum(each.size for each in self._written.values())
        # Neither when this object has not written it, nor when most of it is of the past, is there much to go on from.
        anew = not self._size or self._size > MOST * held or not self.path.exists()
        entry = _Entry(self._kind, {} if anew else self._written, self._next)
        data = entry.packed(value)
        self._next = entry.next
        if anew:
            files.write(self.path, *data)
            self._size = 0
        else:
            self._append(data)
        self._written = entry.lasting
        self._size += sum(map(len, data))

    def _append(self, data: list[bytes | memoryview]) -> None:
        with naming(self.path), self.path.open("r+b") as file:
            # What a write that failed has left behind the last value goes.
            file.truncate(self._size)
            file.seek(self._size)
            for part in data:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())


class _Entry:
    """One entry during writing. It contains the lasting values that are not in ``written``, the earlier entries."""

    def __init__(self, kind: str, written: dict[_Place, _Written], following: int) -> None:
        self._kind = kind
        self._before = written
        self.next = following
        self.lasting: dict[_Place, _Written] = {}
        self._times: Counter[int] = Counter()
        self._new: list[tuple[int, Any]] = []
        self._members: dict[str, NDArray[Any]] = {}

    def packed(self, value: Any) -> list[bytes | memoryview]:
        """Return the entry in parts; arrays are parts without a copy."""
        own = store.encode(value, self._members, self._once)
        parts = [_npy(array) for array in self._members.values()]
        lengths = [sum(map(len, part)) for part in parts]
        document = {"format": _FORMAT, "version": VERSION, "kind": self._kind, "value": own}
        text = json.dumps({**document, "lasting": self._new, "members": lengths}, separators=(",", ":")).encode()
        body = [_LENGTH.pack(len(text)), text, *(each for part in parts for each in part)]
        checksum = 0
        for each in body:
            checksum = zlib.crc32(each, checksum)
        head = _HEAD.pack(MAGIC, sum(map(len, body)), checksum)
        return [head + _CHECK.pack(zlib.crc32(head)), *body]

    def _once(self, value: Lasting) -> dict[str, Any]:
        # Written for each time it is there: a reader gives out each value once, and nobody shares what is read.
        place = id(value), self._times[id(value)]
        self._times[id(value)] += 1
        found = self._before.get(place)
        if found is None or found.value() is not value:
            held: dict[str, NDArray[Any]] = {}
            described = store.encode(value.read(), held)
            # Members have one numbering in an entry.
            shift = len(self._members)
            self._members |= {f"m{shift + each}": array for each, array in enumerate(held.values())}
            found = _Written(weakref.ref(value), self.next, len(json.dumps(described)) + _bytes_of(held))
            self._new.append((self.next, [shift, described]))
            self.next += 1
        self.lasting[place] = found
        return store.lasting_at(found.number)


def _bytes_of(members: dict[str, NDArray[Any]]) -> int:
    return sum(array.nbytes for array in members.values())


def _npy(array: NDArray[Any]) -> tuple[bytes, memoryview]:
    """Return the header and the data of an array in a ``.npy`` file; the data are usually not copied."""
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    head = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": fortran, "shape": array.shape}
    np.lib.format.write_array_header_1_0(head, described)
    flat = np.ascontiguousarray(array.T if fortran else array).reshape(-1)
    # As bytes: not every dtype can be shown as a buffer.
    return head.getvalue(), flat.view(np.uint8).data if flat.nbytes else memoryview(b"")


def packed(value: Any, kind: str) -> list[bytes | memoryview]:
    """Return the only entry of a file that will not grow, in parts; arrays are parts without a copy.

    Raises
    ------
    StoreError
        When ``value`` holds something that is not plain data.
    """
    return _Entry(kind, {}, 0).packed(value)


def is_growing(path: Path) -> bool:
    """Return whether a file is one of these; raise ``OSError`` when it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read(path: Path, kind: str, first: int = 0) -> Any:
    """Return the value that a file holds.

    Takes memory in proportion to the value and twice its largest array, whatever the file says of itself.

    Parameters
    ----------
    first : int
        Position of the first entry, where something else is before it.

    Raises
    ------
    StoreError
        When the file is damaged, was written by a newer version, or holds another ``kind``.
    OSError
        When it cannot be read.
    """
    with path.open("rb") as file:
        starts = list(_entries(file, kind, first))
        document, take = _opened(file, starts[-1], kind)
        with store.reading(f"stored {kind}"):
            wanted = store.lasting_in(document["value"])
            found: dict[int, Any] = {}
            for start in starts:
                found |= _lasting_of(*_opened(file, start, kind), wanted)
            return store.decode(document["value"], take, found.pop)


def pieces(file: BinaryIO, length: int) -> Iterator[bytes]:
    """Yield the next ``length`` bytes of a file, or what there is of them, in short parts."""
    while length > 0 and (piece := file.read(min(length, _PIECE))):
        yield piece
        length -= len(piece)


def _entries(file: BinaryIO, kind: str, first: int) -> Iterator[int]:
    """Yield the positions of the complete entries; there is at least one."""
    start, size = first, os.fstat(file.fileno()).st_size
    while start < size:
        file.seek(start)
        head = file.read(_HEAD_BYTES)
        magic, length, checksum = _HEAD.unpack(head[: _HEAD.size]) if len(head) == _HEAD_BYTES else (b"", 0, 0)
        known = magic == MAGIC and _CHECK.unpack(head[_HEAD.size :])[0] == zlib.crc32(head[: _HEAD.size])
        # In pieces: what is checked here is read for its own sake later.
        if not known or length > size - start - len(head) or reduce(_crc32, pieces(file, length), 0) != checksum:
            file.seek(start + 1)
            # A crash cuts the end only: where another entry follows, this one was whole once.
            if start == first or MAGIC in file.read():
                raise StoreError(f"stored {kind} is damaged at byte {start} of {size}")
            log.warning("the last entry of %s was not written to its end: the one before it counts", file.name)
            return
        yield start
        start += len(head) + length
    if size <= first:
        raise StoreError(f"stored {kind} is damaged: it is empty")


def _crc32(checksum: int, data: bytes) -> int:
    return zlib.crc32(data, checksum)


def _opened(file: BinaryIO, start: int, kind: str) -> tuple[dict[str, Any], Callable[[str], NDArray[Any]]]:
    """Return an entry's document and a function that extracts one of its arrays."""
    file.seek(start)
    last = start + _HEAD_BYTES + _HEAD.unpack(file.read(_HEAD_BYTES)[: _HEAD.size])[1]
    try:
        length = _LENGTH.unpack(file.read(min(_LENGTH.size, last - file.tell())))[0]
        # Of the entry alone: a length may claim anything.
        document = json.loads(file.read(min(length, last - file.tell())))
        store.require_readable(document, kind, _FORMAT, VERSION)
    except StoreError:
        raise
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise StoreError(f"stored {kind} is damaged or not one: {error}") from error
    except RecursionError as error:
        raise StoreError(f"stored {kind} is nested deeper than anything that is stored; it is forged") from error
    places: dict[str, tuple[int, int]] = {}
    end = file.tell()
    with store.reading(f"stored {kind}"):
        for number, length in enumerate(document["members"]):
            if not 0 <= length <= last - end:
                raise StoreError(f"stored {kind} claims an array of {length} bytes, where {last - end} are left")
            places[f"m{number}"] = end, length
            end += length

    def take(name: str) -> NDArray[Any]:
        position, size = places.pop(name)
        file.seek(position)
        return store.read_npy(file.read(size), name)

    return document, take


def _lasting_of(document: dict[str, Any], take: Callable[[str], NDArray[Any]], wanted: set[int]) -> dict[int, Any]:
    """Return the wanted lasting values of an entry, by number."""

    def shifted(shift: int) -> Callable[[str], NDArray[Any]]:
        return lambda name: take(f"m{shift + int(name[1:])}")

    return {
        number: store.decode(described, shifted(shift))
        for number, (shift, described) in document["lasting"]
        if number in wanted
    }
