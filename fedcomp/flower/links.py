"""Links between clients as bytes: addresses, the encoding of a message, and its placeholder at the server."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, Self

from fedcomp.errors import FedcompError
from fedcomp.mailbox import LONGEST_NAME
from fedcomp.plain import PlainError, from_plain

LINK: Final = 49
"""Kind of a parcel that holds a post; its source and destination are partitions."""

SIMULATED: Final = "spool:"
"""Address of a node whose links are simulated: the server knows where they lead."""

_LETTER: Final = struct.Struct("<QB")
_NUMBER: Final = struct.Struct("<I")
_REFERENCE: Final = b"\0fedcomp.link/1\0"
_BOX: Final = b"\0fedcomp.box/1\0"


class LinkError(FedcompError, ValueError):
    """Bytes are none that a link brings."""


class PeerEntry(NamedTuple):
    """Where a node is reached, its public key, and its signature of that; all empty where they are not known."""

    address: str
    key: bytes
    signature: bytes


@dataclass(frozen=True)
class Book:
    """What a node needs to reach others; the same for all of them, so that it travels once.

    Attributes
    ----------
    spool : str
        Folder of simulated links; empty where there are none.
    seal : bool
        Whether posts are sealed for their receivers.
    max_store : int
        Bytes that a node keeps of what others left for it.
    peers : mapping of int to PeerEntry
        By partition.
    """

    NAME: ClassVar[str] = "fedcomp.peers"

    spool: str
    seal: bool
    max_store: int
    peers: Mapping[int, PeerEntry]

    def to_bytes(self) -> bytes:
        """Return the book as bytes; equal books give equal ones."""
        peers = {str(n): [p.address, p.key.hex(), p.signature.hex()] for n, p in sorted(self.peers.items())}
        return json.dumps([self.spool, self.seal, self.max_store, peers], separators=(",", ":")).encode()

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Return the book; raise LinkError where bytes are none."""
        kind = tuple[str, bool, int, dict[int, tuple[str, str, str]]]
        try:
            spool, seal, most, peers = from_plain(kind, json.loads(data), "peers")
            found = {n: PeerEntry(a, bytes.fromhex(k), bytes.fromhex(s)) for n, (a, k, s) in peers.items()}
        except (ValueError, PlainError) as why:
            raise LinkError(f"the addresses of other nodes cannot be read: {why}") from why
        return cls(spool, seal, most, found)


class Letter(NamedTuple):
    """A post as it travels.

    Attributes
    ----------
    sequence : int
        Of the exchange in which it was posted: nobody is to read it in that one.
    name : str
    data : bytes
    """

    sequence: int
    name: str
    data: bytes

    def to_bytes(self) -> bytes:
        """Return the letter as bytes."""
        name = self.name.encode()
        return _LETTER.pack(self.sequence, len(name)) + name + self.data

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Return the letter; raise LinkError where bytes are none."""
        try:
            sequence, length = _LETTER.unpack_from(data)
            name = data[_LETTER.size : _LETTER.size + length].decode()
        except (struct.error, UnicodeDecodeError) as why:
            raise LinkError(f"{len(data)} bytes are not a message between clients: {why}") from why
        if not 0 < len(name) <= LONGEST_NAME:
            raise LinkError(f"the name of a post has {len(name)} characters")
        return cls(sequence, name, data[_LETTER.size + length :])


class Reference(NamedTuple):
    """What stands for a post in the server's mailbox: the round in which it was posted, and its digest."""

    number: int
    digest: bytes

    @classmethod
    def of(cls, number: int, letter: Letter) -> Self:
        """Return the reference to a letter."""
        return cls(number, hashlib.blake2b(letter.to_bytes(), digest_size=16).digest())

    @property
    def name(self) -> str:
        """A text that names it."""
        return f"{self.number}/{self.digest.hex()}"

    def to_bytes(self) -> bytes:
        """Return the reference as bytes."""
        return _REFERENCE + _NUMBER.pack(self.number) + self.digest

    @classmethod
    def find(cls, data: bytes) -> Self | None:
        """Return the reference that bytes are, None where they are something else."""
        if not data.startswith(_REFERENCE) or len(data) != len(_REFERENCE) + _NUMBER.size + 16:
            return None
        (number,) = _NUMBER.unpack_from(data, len(_REFERENCE))
        return cls(number, data[-16:])


class Box(NamedTuple):
    """A post that no link took, on its way through the server: its round, and what was sealed for its receiver."""

    number: int
    body: bytes

    def to_bytes(self) -> bytes:
        """Return the box as bytes."""
        return _BOX + _NUMBER.pack(self.number) + self.body

    @classmethod
    def find(cls, data: bytes) -> Self | None:
        """Return the box that bytes are, None where they are something else."""
        if not data.startswith(_BOX) or len(data) < len(_BOX) + _NUMBER.size:
            return None
        (number,) = _NUMBER.unpack_from(data, len(_BOX))
        return cls(number, data[len(_BOX) + _NUMBER.size :])
