"""Parcels: the bytes one client hands to another, and what a receiver keeps of them in memory.

A parcel names where it belongs (run, round, kind, source, destination) and carries a body that is not interpreted here.
Twenty clients in a round make hundreds of them, so the header is 36 bytes, little endian:

====== ===== ===========================================================
offset bytes field
====== ===== ===========================================================
0      4     magic ``FCP1``
4      1     version, 1
5      1     kind, 0 to 255
6      2     reserved, 0
8      8     run
16     4     round
20     4     source
24     4     destination
28     4     length of the body
32     4     CRC-32 of bytes 0 to 31 and the body (as of zlib)
36           body
====== ===== ===========================================================

The checksum finds accidents. It is no protection from somebody who changes a parcel on purpose: that is
:mod:`fedcomp.coding.sealing`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.errors import PacketError, TransportError
from fedcomp.errors import ConfigError, StateError

MAGIC: Final = b"FCP1"
VERSION: Final = 1
RUN_BYTES: Final = 8
HEADER_BYTES: Final = 36
MAX_PARCEL_BYTES: Final = 64 << 20
"""The default limit of one parcel, header included: a shard of a model with a billion parameters at K = 64."""
MAX_STORE_BYTES: Final = 1 << 30
"""The default limit of what one receiver keeps, headers included."""

PARTITIONS_FROM: Final = 48
"""Parcels of kinds from here on name partitions as source and destination. Those below have the constructions' own
numbers, which are given anew in every round."""

_HEADER: Final = struct.Struct("<4sBBH8sIIII")
_CRC: Final = struct.Struct("<I")
# Columns of the array ``meta`` of MemoryStore.to_arrays().
_META: Final = 5


class StoreFull(TransportError):
    """A parcel does not fit into what its receiver keeps."""


@dataclass(frozen=True)
class Parcel:
    """One body and where it belongs.

    Attributes
    ----------
    run : bytes
        8 bytes that name the run, so that a node which serves two keeps them apart.
    round : int
        Server round, below 2**32.
    kind : int
        What the body is, 0 to 255; the constructions number their own.
    source, destination : int
        Partitions of sender and receiver, below 2**32. The source is the sender's word.
    body : bytes

    Raises
    ------
    ConfigError
        When a field does not fit its place.
    """

    run: bytes
    round: int
    kind: int
    source: int
    destination: int
    body: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.run, bytes) or len(self.run) != RUN_BYTES:
            raise ConfigError(f"a parcel's run is {self.run!r}; expected {RUN_BYTES} bytes")
        for name, bound in (("round", 2**32), ("kind", 2**8), ("source", 2**32), ("destination", 2**32)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < bound:
                raise ConfigError(f"a parcel's {name} is {value!r}; expected a whole number from 0 to {bound - 1}")
        if not isinstance(self.body, bytes):
            raise ConfigError(f"a parcel's body is a {type(self.body).__name__}; expected bytes")
        if len(self.body) >= 2**32 - HEADER_BYTES:
            raise ConfigError(f"a parcel's body has {len(self.body)} bytes; 4 GiB is more than its header can say")

    def __len__(self) -> int:
        """Return ``len(self.to_bytes())``."""
        return HEADER_BYTES + len(self.body)

    @property
    def coordinates(self) -> bytes:
        """The 28 header bytes without length and checksum: what a sealed body is bound to."""
        # Sealing makes the body longer, and so changes its length and the checksum: the seal cannot cover these two.
        return self._prefix()[:28]

    @property
    def order(self) -> tuple[int, int, int, bytes]:
        """Sort key inside a round: kind, source, destination, body; never the order of arrival."""
        # With the body: two parcels that differ in it alone have the same order on every machine.
        return self.kind, self.source, self.destination, self.body

    def to_bytes(self) -> bytes:
        """Return header and body."""
        prefix = self._prefix()
        return b"".join((prefix, _CRC.pack(zlib.crc32(self.body, zlib.crc32(prefix))), self.body))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray, limit: int = MAX_PARCEL_BYTES) -> Parcel:
        """Return the parcel that ``data`` holds, and nothing beside it.

        Parameters
        ----------
        data : bytes-like
        limit : int
            Most bytes a parcel may have, header included.

        Raises
        ------
        PacketError
            When ``data`` is no parcel, is longer or shorter than its header says, exceeds ``limit``, or was damaged.
        """
        total = parcel_length(bytes(data[:HEADER_BYTES]), limit)
        if len(data) != total:
            raise PacketError(f"a parcel's header announces {total} bytes, but there are {len(data)}")
        _, _, kind, _, run, round_, source, destination, _ = _HEADER.unpack_from(data)
        (stated,) = _CRC.unpack_from(data, _HEADER.size)
        # Through a view: a slice of a bytearray would copy a large body once more.
        body = bytes(memoryview(data)[HEADER_BYTES:])
        found = zlib.crc32(body, zlib.crc32(data[: _HEADER.size]))
        if found != stated:
            raise PacketError(f"a parcel of {total} bytes was damaged: its checksum is {found:08x}, not {stated:08x}")
        return cls(run, round_, kind, source, destination, body)

    def _prefix(self) -> bytes:
        fields = (self.kind, 0, self.run, self.round, self.source, self.destination, len(self.body))
        return _HEADER.pack(MAGIC, VERSION, *fields)


Parcels = list[Parcel]


def parcel_source(header: bytes) -> int | None:
    """Return the partition that a parcel's valid header names as its source; None where it is another number."""
    _, _, kind, _, _, _, source, _, _ = _HEADER.unpack_from(header)
    return int(source) if kind >= PARTITIONS_FROM else None


def parcel_length(header: bytes, limit: int = MAX_PARCEL_BYTES) -> int:
    """Return how many bytes the parcel that begins with ``header`` has in all; nothing is allocated for them.

    Raises
    ------
    PacketError
        When ``header`` does not begin a parcel of this version, or announces more than ``limit`` bytes.
    """
    if len(header) < HEADER_BYTES:
        raise PacketError(f"a parcel's header has {HEADER_BYTES} bytes; there are only {len(header)}")
    magic, version, _, reserved, _, _, _, _, length = _HEADER.unpack_from(header)
    if magic != MAGIC:
        raise PacketError(f"not a parcel: it begins with {bytes(magic)!r} instead of {MAGIC!r}")
    if version != VERSION or reserved:
        raise PacketError(
            f"a parcel of version {version} with reserved field {reserved}; this receiver reads version {VERSION} with "
            "0: run the same release on all nodes"
        )
    total = HEADER_BYTES + int(length)
    if total > limit:
        raise PacketError(f"a parcel announces {total} bytes; this receiver accepts at most {limit}")
    return total


class ParcelStore(Protocol):
    """Where a receiver keeps parcels until its round is over.

    Two parcels that are equal in every field are one. Two with the same coordinates and different bodies are two: which
    of them is right is for whoever decodes them to find out.
    """

    max_store_bytes: int

    def put(self, parcel: Parcel) -> bool:
        """Keep ``parcel``; return False when it was there already.

        Raises
        ------
        StoreFull
            When it does not fit into ``max_store_bytes``, which what is kept never exceeds.
        TransportError
            When it cannot be written.
        """

    def list(self, run: bytes, round: int) -> Parcels:
        """Return what is kept for a round in the order of :attr:`Parcel.order`."""

    def count(self, run: bytes, round: int) -> int:
        """Return how many parcels are kept for a round."""

    def take(self, run: bytes, round: int) -> Parcels:
        """Return what is kept for a round, and keep it no longer."""

    def drop_before(self, run: bytes, round: int) -> int:
        """Forget the run's parcels of rounds before ``round``; return the bytes that became free."""

    @property
    def held(self) -> int:
        """Bytes kept, headers included."""


class MemoryStore:
    """Parcels in memory, and as three arrays that fit into Flower's ``context.state``.

    Parameters
    ----------
    max_store_bytes : int
        Limit of :attr:`held`.

    Examples
    --------
    >>> store, run = MemoryStore(1 << 20), bytes(8)
    >>> store.put(Parcel(run, 1, 1, source=0, destination=2, body=b"a shard"))
    True
    >>> [parcel.body for parcel in store.list(run, 1)], store.held
    ([b'a shard'], 43)

    Notes
    -----
    A context belongs to one run of one server, so :meth:`drop_before` forgets the parcels of every other run: their
    round will never advance here.
    """

    def __init__(self, max_store_bytes: int = MAX_STORE_BYTES) -> None:
        self.max_store_bytes = require_limit(max_store_bytes)
        # By the parcel itself: one that is delivered twice is found without a search.
        self._parcels: dict[Parcel, None] = {}
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes kept, headers included."""
        return self._held

    def __len__(self) -> int:
        return len(self._parcels)

    def put(self, parcel: Parcel) -> bool:
        """Keep ``parcel``; return False when it was there already. See :class:`ParcelStore`."""
        if parcel in self._parcels:
            return False
        require_room(parcel, self._held, self.max_store_bytes, "this client's memory")
        self._parcels[parcel] = None
        self._held += len(parcel)
        return True

    def list(self, run: bytes, round: int) -> Parcels:
        """Return what is kept for a round, ordered by kind, source and destination."""
        return sorted((p for p in self._parcels if p.run == run and p.round == round), key=lambda p: p.order)

    def count(self, run: bytes, round: int) -> int:
        """Return how many parcels are kept for a round."""
        return sum(p.run == run and p.round == round for p in self._parcels)

    def take(self, run: bytes, round: int) -> Parcels:
        """Return what is kept for a round, and keep it no longer."""
        taken = self.list(run, round)
        self._forget(taken)
        return taken

    def drop_before(self, run: bytes, round: int) -> int:
        """Forget earlier rounds of ``run``, and all other runs; return the bytes that became free."""
        return self._forget([p for p in self._parcels if p.run != run or p.round < round])

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the store as three arrays; equal contents give equal arrays.

        Returns
        -------
        dict
            ``data``: uint8, all bodies one after the other. ``offsets``: int64 (n + 1,), where each begins.
            ``meta``: int64 (n, 5), run (its 8 bytes as a little-endian integer), round, kind, source, destination.
        """
        # Sorted, so that the order of arrival does not show in the state.
        kept = sorted(self._parcels, key=lambda p: (p.run, p.round, p.order))
        lengths = np.array([0, *(len(p.body) for p in kept)], np.int64)
        # Signed: as an unsigned number every second run's name would overflow the int64 array.
        rows = [(int.from_bytes(p.run, "little", signed=True), p.round, p.kind, p.source, p.destination) for p in kept]
        return {
            "data": np.frombuffer(b"".join(p.body for p in kept), np.uint8),
            "offsets": np.cumsum(lengths),
            "meta": np.array(rows, np.int64).reshape(len(kept), _META),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], max_store_bytes: int = MAX_STORE_BYTES) -> MemoryStore:
        """Return the store :meth:`to_arrays` described.

        Raises
        ------
        StateError
            When the arrays do not belong together.
        StoreFull
            When they hold more than ``max_store_bytes``.
        """
        try:
            data, offsets, meta = (np.asarray(arrays[name]) for name in ("data", "offsets", "meta"))
        except KeyError as error:
            raise StateError(f"a stored parcel store lacks its array {error}; it restarts without it") from error
        # -1 belongs to no shape, so that anything but a table is refused below.
        count = len(meta) if meta.ndim == 2 else -1
        fits = (
            (data.dtype, offsets.dtype, meta.dtype) == (np.uint8, np.int64, np.int64)
            and data.ndim == 1
            and meta.shape == (count, _META)
            and offsets.shape == (count + 1,)
            and offsets[0] == 0
            and offsets[-1] == len(data)
            # An offset below the one before it would pass silently for an empty body.
            and bool((np.diff(offsets) >= 0).all())
        )
        if not fits:
            raise StateError(
                f"a stored parcel store has data {data.dtype}{data.shape}, offsets {offsets.dtype}{offsets.shape} and "
                f"meta {meta.dtype}{meta.shape}, which do not describe one another"
            )
        store = cls(max_store_bytes)
        raw = data.tobytes()
        bounds = offsets.tolist()
        for row, begin, end in zip(meta.tolist(), bounds[:-1], bounds[1:], strict=True):
            run, round_, kind, source, destination = row
            name = run.to_bytes(RUN_BYTES, "little", signed=True)
            try:
                # Through put(): it counts the bytes, and refuses what exceeds a limit that was lowered since.
                store.put(Parcel(name, round_, kind, source, destination, raw[begin:end]))
            except ConfigError as error:
                raise StateError(f"a stored parcel store holds an impossible parcel: {error}") from error
        return store

    def _forget(self, parcels: Iterable[Parcel]) -> int:
        freed = 0
        for parcel in parcels:
            del self._parcels[parcel]
            freed += len(parcel)
        self._held -= freed
        return freed


def require_limit(max_store_bytes: int) -> int:
    """Return ``max_store_bytes``.

    Raises
    ------
    ConfigError
        When no parcel could ever be kept under it.
    """
    if isinstance(max_store_bytes, bool) or not isinstance(max_store_bytes, int) or max_store_bytes < HEADER_BYTES:
        raise ConfigError(
            f"max_store_bytes is {max_store_bytes!r}; expected a whole number of at least {HEADER_BYTES}, one header"
        )
    return max_store_bytes


def require_room(parcel: Parcel, held: int, limit: int, where: str) -> None:
    """Raise :class:`StoreFull` when ``parcel`` would bring ``where`` above ``limit`` bytes."""
    if held + len(parcel) > limit:
        raise StoreFull(
            f"a parcel of {len(parcel)} bytes does not fit beside {held} of at most {limit} bytes; "
            f"raise max_store_bytes, or send smaller or fewer shards ({where})"
        )
