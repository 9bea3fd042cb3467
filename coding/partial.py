"""The exact sum of a group's integer updates, as bytes: what an edge aggregator codes instead of its members' updates.

Adding in the field of the code would give the XOR (GF(2^8) has characteristic 2), so the aggregator adds integers, and
the sum becomes a payload like any other. Little endian: magic ``FPS1``, bytes per integer, a zero, number of members
(2 bytes), number of integers (4 bytes); per member index (4), weight, sequence, generation (8 each), length of its note
(4) and the note; then the integers in two's complement, each in as few bytes as the largest needs.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.errors import PacketError
from fedcomp.errors import ConfigError

MAGIC = b"FPS1"
_HEAD = struct.Struct("<4sBxHI")
_PART = struct.Struct("<IQQQI")


@dataclass(frozen=True)
class GroupPart:
    """One member of a partial sum.

    Attributes
    ----------
    index : int
        The member's index in the round's plan.
    weight : int
        By which its integers were multiplied.
    sequence, generation : int
        Which message its update answers, and which memory it came from: what the server acknowledges.
    note : bytes
        Whatever of the member's reply has to reach the server beside the sum (its metrics).
    """

    index: int
    weight: int
    sequence: int
    generation: int
    note: bytes = b""


@dataclass(frozen=True, eq=False)
class PartialSum:
    """The sum over ``parts`` of weight times integers.

    Attributes
    ----------
    integers : int64 array, shape (n,)
    parts : tuple of GroupPart
    """

    integers: NDArray[np.int64]
    parts: tuple[GroupPart, ...]

    @property
    def weight(self) -> int:
        """The total weight."""
        return sum(part.weight for part in self.parts)

    def plus(self, integers: NDArray[np.int64], part: GroupPart) -> PartialSum:
        """Return the sum with one more member.

        Raises
        ------
        ConfigError
            When the sum could leave 64 bits: no integer may wrap.
        """
        if integers.shape != self.integers.shape:
            raise ConfigError(f"{integers.shape} integers do not fit a sum of {self.integers.shape}")
        # In Python's integers, and before numpy multiplies anything: its products would wrap silently.
        largest = self.largest + part.weight * _largest(integers)
        if part.weight < 0 or largest >= 1 << 63:
            raise ConfigError(
                f"weight {part.weight} brings the sum to {largest}, beyond 64 bits; use smaller weights or fewer levels"
            )
        return PartialSum(self.integers + integers * np.int64(part.weight), (*self.parts, part))

    def merged(self, other: PartialSum) -> PartialSum:
        """Return the sum over the members of both.

        Raises
        ------
        ConfigError
            When they do not hold equally many integers, or the sum could leave 64 bits.
        """
        if other.integers.shape != self.integers.shape or self.largest + other.largest >= 1 << 63:
            raise ConfigError(
                f"sums of {self.integers.shape} integers up to {self.largest} and {other.integers.shape} up to "
                f"{other.largest} cannot be added in 64 bits"
            )
        return PartialSum(self.integers + other.integers, (*self.parts, *other.parts))

    @property
    def largest(self) -> int:
        """The largest magnitude among the integers."""
        return _largest(self.integers)

    def to_bytes(self) -> bytes:
        """Return the sum as bytes."""
        largest = self.largest
        # "or size == 8" is for the smallest int64, whose magnitude of 2^63 passes none of the comparisons.
        width = next(size for size in range(1, 9) if largest < 1 << (8 * size - 1) or size == 8)
        parts = b"".join(
            _PART.pack(p.index, p.weight, p.sequence, p.generation, len(p.note)) + p.note for p in self.parts
        )
        # The low bytes of two's complement are the same number in fewer bytes, its sign in the last one's top bit.
        low = self.integers.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width]
        return _HEAD.pack(MAGIC, width, len(self.parts), self.integers.size) + parts + low.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, count: int, members: Collection[int]) -> PartialSum:
        """Return what :meth:`to_bytes` wrote.

        Parameters
        ----------
        data : bytes
        count : int
            How many integers the receiver expects.
        members : collection of int
            Who may be in the sum.

        Raises
        ------
        PacketError
            When the bytes are no such sum; nothing is allocated beyond them but 8 bytes for each expected integer.
        """
        if len(data) < _HEAD.size:
            raise PacketError(f"{len(data)} bytes are no partial sum: its head alone has {_HEAD.size}")
        magic, width, number, found = _HEAD.unpack_from(data)
        if magic != MAGIC or not 1 <= width <= 8:
            raise PacketError(f"no partial sum: it begins with {magic!r} and {width} bytes per integer")
        # The sender's number is only compared: what is allocated goes by the receiver's.
        if found != count:
            raise PacketError(f"a partial sum of {found} integers; this receiver expects {count}")
        place = _HEAD.size
        parts: list[GroupPart] = []
        for _ in range(number):
            if place + _PART.size > len(data):
                raise PacketError(f"a partial sum of {len(data)} bytes ends before its {number} members")
            index, weight, sequence, generation, length = _PART.unpack_from(data, place)
            place += _PART.size
            if place + length > len(data):
                raise PacketError(f"the note of member {index} has {length} bytes, {len(data) - place} are left")
            if index not in members or any(index == part.index for part in parts):
                raise PacketError(f"member {index} is not of this group, or is in the sum twice")
            parts.append(GroupPart(index, weight, sequence, generation, data[place : place + length]))
            place += length
        if len(data) - place != width * count:
            raise PacketError(f"{len(data) - place} bytes for {count} integers of {width} bytes")
        wide = np.zeros((count, 8), np.uint8)
        low = np.frombuffer(data, np.uint8, offset=place).reshape(count, width)
        wide[:, :width] = low
        # Of a negative number the bytes that did not travel are all ones.
        wide[:, width:] = np.where(low[:, -1:] & 0x80, 0xFF, 0)
        return cls(wide.view("<i8").reshape(count).astype(np.int64), tuple(parts))


def empty_sum(count: int) -> PartialSum:
    """Return the sum of nobody: ``count`` zeros."""
    return PartialSum(np.zeros(count, np.int64), ())


def _largest(integers: NDArray[np.int64]) -> int:
    """Return the largest magnitude, as a Python integer: that of the smallest int64 is no int64."""
    return max(int(integers.max()), -int(integers.min())) if integers.size else 0
