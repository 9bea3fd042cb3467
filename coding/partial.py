"""The exact sum of a group's integer updates, as bytes: what an edge aggregator codes instead of its members' updates.

Adding in the field of the code would give the XOR (GF(2^8) has characteristic 2), so the aggregator adds integers, and
the sum becomes a payload like any other. Little endian: magic ``FPS2``, bits per integer, a zero, number of members
(2 bytes), number of integers (4 bytes); per member index (4), weight, sequence, generation (8 each), length of its note
(4) and the note; then the integers in two's complement as a string of bits (:mod:`fedcomp.coding.bits`), each in as few
bits as the largest needs. Of integers modulo M these are at most ceil(log2 M).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.bits import pack, unpack, width_of
from fedcomp.coding.errors import PacketError
from fedcomp.errors import ConfigError

MAGIC = b"FPS2"

MAX_WEIGHT: Final = 2**40
"""Weights at or above it are refused: 64-bit sums have room for many clients below it."""

_HEAD = struct.Struct("<4sBBHI")
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
            When they do not hold equally many integers, share a member, or the sum could leave 64 bits.
        """
        if other.integers.shape != self.integers.shape or self.largest + other.largest >= 1 << 63:
            raise ConfigError(
                f"sums of {self.integers.shape} integers up to {self.largest} and {other.integers.shape} up to "
                f"{other.largest} cannot be added in 64 bits"
            )
        twice = {part.index for part in self.parts} & {part.index for part in other.parts}
        if twice:
            raise ConfigError(f"members {sorted(twice)[:5]} are in both sums; each counts once: leave one of them out")
        return PartialSum(self.integers + other.integers, (*self.parts, *other.parts))

    def reduced(self, modulus: int) -> PartialSum:
        """Return the sum with integers of [-M/2, M/2) that are equal to these modulo M; itself where M is 0."""
        if not modulus:
            return self
        found = self.integers % modulus
        found[found >= modulus - modulus // 2] -= modulus
        return replace(self, integers=found)

    @property
    def largest(self) -> int:
        """The largest magnitude among the integers."""
        return _largest(self.integers)

    @property
    def member_bytes(self) -> int:
        """How many of the bytes say who is in the sum; the others, its head and integers, are the same for any."""
        return sum(_PART.size + len(part.note) for part in self.parts)

    def to_bytes(self) -> bytes:
        """Return the sum as bytes."""
        width = width_of(self.integers)
        parts = b"".join(
            _PART.pack(p.index, p.weight, p.sequence, p.generation, len(p.note)) + p.note for p in self.parts
        )
        head = _HEAD.pack(MAGIC, width, 0, len(self.parts), self.integers.size)
        return head + parts + pack(self.integers, width)

    @classmethod
    def from_bytes(cls, data: bytes, count: int, sequences: Mapping[int, int], levels: int) -> PartialSum:
        """Return what :meth:`to_bytes` wrote, checked: whoever adds it to others, or uses it, need not look again.

        Parameters
        ----------
        data : bytes
        count : int
            How many integers the receiver expects.
        sequences : mapping of int to int
            By member that may be in the sum, the number of the message that its update answers.
        levels : int
            The largest magnitude of a member's own integers.

        Raises
        ------
        PacketError
            When the bytes are no such sum, somebody is in it who should not be, or an integer is larger than it can be;
            nothing is allocated beyond them but 8 bytes for each expected integer.
        """
        if len(data) < _HEAD.size:
            raise PacketError(f"{len(data)} bytes are no partial sum: its head alone has {_HEAD.size}")
        magic, width, reserved, number, found = _HEAD.unpack_from(data)
        if magic != MAGIC or reserved or width > 64:
            raise PacketError(f"no partial sum: it begins with {magic!r}, {width} bits per integer and {reserved}")
        # The sender's number is only compared: what is allocated goes by the receiver's.
        if found != count:
            raise PacketError(f"a partial sum of {found} integers; this receiver expects {count}")
        place = _HEAD.size
        parts: dict[int, GroupPart] = {}
        for _ in range(number):
            if place + _PART.size > len(data):
                raise PacketError(f"a partial sum of {len(data)} bytes ends before its {number} members")
            index, weight, sequence, generation, length = _PART.unpack_from(data, place)
            place += _PART.size
            if place + length > len(data):
                raise PacketError(f"the note of member {index} has {length} bytes, {len(data) - place} are left")
            if index not in sequences or index in parts:
                raise PacketError(f"member {index} is not of this group, or is in the sum twice")
            if sequence != sequences[index]:
                raise PacketError(f"member {index} answers message {sequence}, not {sequences[index]}: a stale update")
            if weight >= MAX_WEIGHT or generation >= 2**63:
                raise PacketError(f"member {index} has weight {weight}, generation {generation}")
            parts[index] = GroupPart(index, weight, sequence, generation, data[place : place + length])
            place += length
        made = cls(unpack(data[place:], count, width), tuple(parts.values()))
        if width_of(made.integers) != width:
            raise PacketError(f"integers of {width_of(made.integers)} bits in {width}: there is one way to write a sum")
        # Every member's codec clips to its levels, so no honest sum exceeds them times its weight.
        if made.largest > levels * made.weight:
            raise PacketError(f"a sum of weight {made.weight} holds {made.largest}, beyond {levels} levels each")
        return made


def empty_sum(count: int) -> PartialSum:
    """Return the sum of nobody: ``count`` zeros."""
    return PartialSum(np.zeros(count, np.int64), ())


def _largest(integers: NDArray[np.int64]) -> int:
    """Return the largest magnitude, as a Python integer: that of the smallest int64 is no int64."""
    return max(int(integers.max()), -int(integers.min())) if integers.size else 0
