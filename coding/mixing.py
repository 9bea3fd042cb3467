"""Multi-source mixing: one generation whose symbols are the whole payloads of different clients, combined by relays.

Every client's payload, padded to a common length, is one symbol; relays that hold several send random combinations of
them, and from as many independent combinations as there are clients the server solves for all (as FedNC proposes, arXiv
2305.03292; abstract). **All or nothing**: fewer combinations than clients determine, in general, nobody, and one that
is wrong spoils everybody. A relay needs whole payloads, not K-th parts, so what clients hand to each other is K times
that of a plain relay. Use :mod:`fedcomp.coding.relay` unless mixing itself is what is studied.

A symbol is the payload's length (4 bytes, little endian), its digest (8 bytes), the payload, and zeros.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedcomp.coding.code import payload_digest
from fedcomp.coding.decoder import Decoder
from fedcomp.coding.errors import CodingError, NotDecodable, PacketError
from fedcomp.coding.packet import Mode, Packet, PacketLimits
from fedcomp.coding.rlnc import Recoder
from fedcomp.coding.stream import derive
from fedcomp.errors import ConfigError

SOURCE = 2**32 - 1
"""The source number of mixed packets: no client's."""

FRAMING = struct.Struct("<I8s")
MAX_CLIENTS = 1024


@dataclass(frozen=True)
class MixPlan:
    """What all parties of one mixed round agree on.

    Parameters
    ----------
    clients : int
        Symbols of the generation, 1 to 1024.
    symbol_bytes : int
        Bytes of one symbol, a multiple of 64; 12 of them are framing.
    round, seed : int

    Raises
    ------
    ConfigError
        When a number is out of range.

    Examples
    --------
    >>> plan = MixPlan(clients=2, symbol_bytes=64, round=1)
    >>> held = [plan.packet(client, payload) for client, payload in enumerate((b"one", b"two"))]
    >>> mixture = Mixture(plan)
    >>> [mixture.add(relay, plan.combine(held, relay, 0, 1)[0]) for relay in (0, 1)]
    [True, True]
    >>> mixture.payload(1)
    b'two'
    """

    clients: int
    symbol_bytes: int
    round: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.clients <= MAX_CLIENTS:
            raise ConfigError(f"{self.clients} clients cannot be mixed; a generation has 1 to {MAX_CLIENTS} symbols")
        if self.symbol_bytes % 64 or self.symbol_bytes < 64 or self.symbol_bytes * self.clients >= 1 << 32:
            raise ConfigError(
                f"symbols of {self.symbol_bytes} bytes from {self.clients} clients; expected a multiple of 64, less "
                "than 4 GiB in all"
            )

    @property
    def digest(self) -> bytes:
        """Eight bytes that packets of this plan have in common; they vouch for nobody's payload."""
        numbers = struct.pack("<QQQq", self.clients, self.symbol_bytes, self.round, self.seed)
        return hashlib.blake2b(numbers, digest_size=8).digest()

    @property
    def limits(self) -> PacketLimits:
        """What is accepted of a packet."""
        # One generation: a client's payload is one symbol, however long it is.
        return PacketLimits(self.clients, self.symbol_bytes, self.clients * self.symbol_bytes, 1)

    @property
    def max_packet(self) -> int:
        """Bytes of the longest packet: a symbol, the header and dense coefficients."""
        return self.symbol_bytes + self.clients + 64

    def packet(self, client: int, payload: bytes) -> bytes:
        """Return the packet that carries one client's symbol.

        Raises
        ------
        ConfigError
            When the payload does not fit into a symbol.
        """
        room = self.symbol_bytes - FRAMING.size
        if len(payload) > room:
            raise ConfigError(
                f"the payload has {len(payload)} bytes, a symbol of this round has room for {room}: raise mix_bytes"
            )
        body = np.zeros((1, self.symbol_bytes), np.uint8)
        framed = FRAMING.pack(len(payload), payload_digest(payload)) + payload
        body[0, : len(framed)] = np.frombuffer(framed, np.uint8)
        # One head for all clients' packets, since those of different payloads are never combined. The payload's own
        # length and digest are in the framing.
        made = Packet(
            mode=Mode.SYSTEMATIC,
            number=client,
            vector=None,
            round=self.round,
            source=SOURCE,
            symbols=self.clients,
            payload_bytes=self.clients * self.symbol_bytes,
            digest=self.digest,
            body=body,
        )
        return made.to_bytes()

    def combine(self, held: Iterable[bytes], relay: int, first: int, count: int) -> list[bytes]:
        """Return ``count`` combinations of the packets a relay holds, numbers ``first`` and on; none if it holds none.

        Raises
        ------
        PacketError
            When what it holds is not of this plan.
        """
        recoder = Recoder(self.limits)
        for data in held:
            recoder.add(self.parse(data))
        # A relay that holds nothing answers with nothing, where recode() would raise.
        if not recoder.rank:
            return []
        # Relay and number are in the seed, so that no two relays send the same combination.
        seeds = [derive(self.seed, self.round, relay, number) for number in range(first, first + count)]
        return [recoder.recode(seed).to_bytes() for seed in seeds]

    def parse(self, data: bytes) -> Packet:
        """Return a packet of this plan; raise :class:`PacketError` for any other."""
        packet = Packet.from_bytes(data, self.limits)
        found = (packet.round, packet.source, packet.symbols, packet.symbol_bytes, packet.digest)
        if found != (self.round, SOURCE, self.clients, self.symbol_bytes, self.digest):
            raise PacketError("a packet of another round, or not of this mixture")
        return packet


class Mixture:
    """The server's end: combinations in, payloads out.

    Attributes
    ----------
    received, innovative, dependent : int
    refused : list of str
    """

    def __init__(self, plan: MixPlan) -> None:
        self.plan = plan
        self.received = self.innovative = self.dependent = 0
        self.refused: list[str] = []
        # One decoder for all clients: their payloads are the symbols of one generation.
        self._decoder = Decoder(limits=plan.limits, expect=(plan.round, SOURCE))

    @property
    def rank(self) -> int:
        """How many independent combinations came."""
        return self._decoder.rank

    def add(self, relay: int, data: bytes) -> bool:
        """Take a combination in; return whether it was innovative. What cannot be used is in :attr:`refused`."""
        try:
            innovative = self._decoder.add(self.plan.parse(data))
        except CodingError as error:
            self.refused.append(f"relay {relay}: {error}")
            return False
        self.received += 1
        self.innovative += innovative
        self.dependent += not innovative
        return innovative

    def payload(self, client: int) -> bytes:
        """Return what a client sent.

        Raises
        ------
        NotDecodable
            When the combinations do not determine it, or a wrong one among them spoilt it.
        """
        if not self.rank:
            raise NotDecodable("no combination came")
        symbol = self._decoder.symbol(client)
        # The packets' digest is the plan's; only the framing inside vouches for a payload.
        length, digest = FRAMING.unpack_from(symbol)
        payload = symbol[FRAMING.size : FRAMING.size + length]
        if len(payload) != length or payload_digest(payload) != digest:
            raise NotDecodable(
                f"the symbol of client {client} does not have its digest: some combination was wrong, and it cannot be "
                "told which"
            )
        return payload
