"""The messages of a coded sum and a relay's part in it: shards, reports of held shards, one sum per round.

The mathematics are in :mod:`fedcomp.coding.sumcode`; here are its bytes, and the rule that a relay adds once. Nothing
here is kept in the process: :class:`AnsweredSets` and the shards live where the caller keeps them.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fedcomp.coding.errors import CodingError, NotDecodable, PacketError
from fedcomp.coding.prime import ReadBytes, Residues
from fedcomp.coding.sumcode import SumPlan

SHARE: Final = 0
SUM: Final = 1
MASKED: Final = 2
"""Kinds of shards: one contributor's, for one relay; a relay's sum; a masked vector in full, for the server."""

_KINDS: Final = {SHARE: "share", SUM: "sum", MASKED: "masked vector"}
_MAGIC: Final = b"FS"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<2sBBBxHI8s24sI")
"""Magic, version, field, kind, padding, relay, source, plan digest, tag, and the crc32 of all that and the body."""

HEADER_BYTES: Final = _HEADER.size
TAG_BYTES: Final = 24
_TAG: Final = struct.Struct("<8sQQ")


@dataclass(frozen=True, eq=False)
class Shard:
    """What travels between contributor, relay and server.

    Attributes
    ----------
    kind : int
        SHARE, SUM or MASKED.
    relay : int
        Row of the code; 0 for a masked vector.
    source : int
        Index of the contributor; of a sum, how many there are in it.
    tag : bytes
        24 bytes. Of a share, :func:`make_tag`; of a sum, :func:`set_digest`.
    body : ndarray
        Residues, (S,); (length,) of a masked vector.

    Notes
    -----
    A packet of the relay code has no place here: its digest of the payload would let a relay test guesses of what the
    shards hide. The header is 48 bytes, little-endian: magic "FS", version, field, kind, one byte 0, relay u16, source
    u32, plan digest 8, tag 24, crc32 of all this and the body.
    """

    kind: int
    relay: int
    source: int
    tag: bytes
    body: Residues

    def to_bytes(self, plan: SumPlan) -> bytes:
        """Return the bytes that travel."""
        head = (_MAGIC, _VERSION, plan.field.code, self.kind, self.relay, self.source, plan.digest, self.tag)
        body = self.body.astype(plan.field.dtype, copy=False).tobytes()
        crc = zlib.crc32(body, zlib.crc32(_HEADER.pack(*head, 0)[:-4]))
        return _HEADER.pack(*head, crc) + body

    @classmethod
    def from_bytes(cls, data: bytes, plan: SumPlan) -> Shard:
        """Parse ``data``; its size follows from the receiver's own plan, never from the bytes.

        Raises
        ------
        PacketError
            For anything that is not a shard of this plan.
        """
        if len(data) < HEADER_BYTES:
            raise PacketError(f"{len(data)} bytes are not a shard: its header alone has {HEADER_BYTES}")
        magic, version, code, kind, relay, source, digest, tag, crc = _HEADER.unpack_from(data)
        # struct skips byte 5, the padding. It has to be 0, so that a shard has one form only.
        if magic != _MAGIC or version != _VERSION or kind not in _KINDS or data[5]:
            raise PacketError(f"not a shard of version {_VERSION}: magic {magic!r}, version {version}, kind {kind}")
        if code != plan.field.code or digest != plan.digest:
            raise PacketError("the shard belongs to another plan: other parameters, another round, or another run")
        count = plan.length if kind == MASKED else plan.shard_symbols
        # The size is checked first: no checksum is computed over more bytes than the plan allows.
        if len(data) != HEADER_BYTES + count * plan.field.symbol_bytes:
            raise PacketError(
                f"a {_KINDS[kind]} of this plan has {HEADER_BYTES + count * plan.field.symbol_bytes} bytes, "
                f"this one has {len(data)}"
            )
        body = memoryview(data)[HEADER_BYTES:]
        if zlib.crc32(body, zlib.crc32(data[: HEADER_BYTES - 4])) != crc:
            raise PacketError("the shard was damaged on the way: its checksum differs")
        if relay >= plan.relays:
            raise PacketError(f"the shard is for relay {relay} of {plan.relays}")
        residues = np.frombuffer(body, plan.field.dtype)
        # The wire's type holds numbers of p and more, with which floating-point products would not be exact.
        if not plan.field.check(residues):
            raise PacketError(f"the shard holds numbers that are not elements of {plan.field.name}")
        return cls(kind, relay, source, tag, residues)


def make_tag(sequence: int, generation: int, read: ReadBytes = os.urandom) -> bytes:
    """Return the tag of one encoding: a name drawn for it, and two numbers of the contributor's.

    Shards of two encodings of one vector do not belong together, since each has random pieces of its own. The numbers
    say which message the vector answers; a relay passes them on when the contributor no longer can.
    """
    return _TAG.pack(read(8), sequence, generation)


def read_tag(tag: bytes) -> tuple[int, int]:
    """Return sequence and generation of :func:`make_tag`."""
    _, sequence, generation = _TAG.unpack(tag)
    return sequence, generation


@dataclass(frozen=True)
class HeldTags:
    """What a relay says it holds, one bit per contributor: the server has most tags from the contributors themselves.

    Attributes
    ----------
    bitmap : bytes
        Sources of which the relay holds one encoding, source 0 in the highest bit of the first byte.
    digest : bytes
        Eight bytes over these sources and their tags.
    details : tuple of (int, bytes)
        Source and tag of every encoding of the other sources: those whose tag the server does not know, and those of
        which the relay holds several.
    """

    bitmap: bytes
    digest: bytes
    details: tuple[tuple[int, bytes], ...] = ()

    @classmethod
    def of(cls, plan: SumPlan, tags: Mapping[int, Sequence[bytes]], unknown: Sequence[int] = ()) -> HeldTags:
        """Return the report of a relay that holds encodings with ``tags`` by source.

        ``unknown`` are the sources whose tags the server asked for.
        """
        single = {source: held[0] for source, held in tags.items() if len(held) == 1 and source not in unknown}
        bits = np.zeros(plan.contributors, np.bool_)
        bits[list(single)] = True
        details = [(s, tag) for s in sorted(tags) if s not in single for tag in sorted(tags[s])]
        return cls(np.packbits(bits).tobytes(), _tags_digest(plan, single), tuple(details))

    def tags(self, plan: SumPlan, known: Mapping[int, bytes]) -> dict[int, tuple[bytes, ...]]:
        """Return the tags by source, with those the server knows filled in.

        Raises
        ------
        PacketError
            When the relay holds an encoding under another tag than the contributor announced, or names sources that
            do not exist: what it would add cannot be known.
        """
        bits = np.unpackbits(np.frombuffer(self.bitmap, np.uint8))
        # Bits after the last contributor only fill up a byte; one that is set was not written by of().
        if len(self.bitmap) != -(-plan.contributors // 8) or bits[plan.contributors :].any():
            raise PacketError(f"a report of {len(self.bitmap)} bytes does not fit {plan.contributors} contributors")
        sources = np.flatnonzero(bits).tolist()
        if not known.keys() >= set(sources) or any(not 0 <= s < plan.contributors for s, _ in self.details):
            raise PacketError("the report names contributors with unknown tags")
        found: dict[int, tuple[bytes, ...]] = {source: (known[source],) for source in sources}
        if _tags_digest(plan, {source: known[source] for source in sources}) != self.digest:
            raise PacketError("the relay holds other encodings than the contributors announced")
        for source, tag in self.details:
            found[source] = (*found.get(source, ()), tag)
        return found


def _tags_digest(plan: SumPlan, tags: Mapping[int, bytes]) -> bytes:
    return set_digest(plan, 0, tags)[:8]


class AnsweredSets:
    """What a relay has already added up: one set of contributors a round, and no second one.

    Two sums over different sets differ by single contributors' shards, and the server could solve for these.

    Parameters
    ----------
    answered : mapping of int to bytes, optional
        Round and digest of the set, as :attr:`answered` gave it.
    """

    def __init__(self, answered: Mapping[int, bytes] | None = None) -> None:
        self.answered = dict(answered or {})

    def add_up(self, plan: SumPlan, round: int, chosen: Mapping[int, bytes], shards: Mapping[int, Shard]) -> Shard:
        """Return the sum over ``chosen``; the same question is answered again, another one is not.

        Parameters
        ----------
        chosen : mapping of int to bytes
            Source and the tag of the shard that is meant, for every contributor of the set.
        shards : mapping of int to Shard
            By source, what this relay holds under these tags.

        Raises
        ------
        CodingError
            When another set was answered in this round or the set is too small.
        NotDecodable
            When a shard is missing: a sum without it is worse than none.
        """
        if len(chosen) < plan.least:
            raise CodingError(f"a sum over {len(chosen)} contributor(s) was asked for; this relay adds {plan.least}")
        name = set_digest(plan, round, chosen)
        before = self.answered.get(round)
        if before is not None and before != name:
            raise CodingError(
                f"this relay has answered for another set of contributors in round {round}; a second answer would give "
                "single contributors' shards away"
            )
        # Another tag is another encoding, with random pieces of its own: the relays' sums would not belong to one code
        # word.
        missing = [source for source, tag in chosen.items() if source not in shards or shards[source].tag != tag]
        if missing:
            raise NotDecodable(f"this relay lacks the shards of {len(missing)} contributor(s), first {missing[0]}")
        held = [shards[source] for source in sorted(chosen)]
        if len({shard.relay for shard in held}) != 1 or any(shard.kind != SHARE for shard in held):
            raise CodingError("the shards to be added were made for different relays")
        body = plan.field.sum([shard.body for shard in held])
        # Recorded only now: a question that could not be answered gives nothing away and does not use up the round.
        self.answered[round] = name
        return Shard(SUM, held[0].relay, len(held), name, body)


def set_digest(plan: SumPlan, round: int, chosen: Mapping[int, bytes]) -> bytes:
    """Return 24 bytes that name a set of contributions of one round: what a relay's sum must carry."""
    # Sorted and of fixed width: a set has one digest, in whatever order it was listed.
    text = b"".join(source.to_bytes(4, "little") + tag for source, tag in sorted(chosen.items()))
    head = plan.digest + round.to_bytes(8, "little")
    return hashlib.blake2b(head + text, digest_size=TAG_BYTES).digest()
