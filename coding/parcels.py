"""Parcels: shard messages from one client to another, as bytes, and the receiver's store of them in memory.

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
from dataclasses import dataclass
from typing import Final

from fedcomp.coding.errors import PacketError, TransportError
from fedcomp.errors import ConfigError

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
