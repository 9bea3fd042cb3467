"""RLNC over GF(2^8): random linear combinations of a payload's symbols, which relays can recombine.

Any K independent packets decode, whoever made them; K random ones are independent with probability 0.996, K+1 with
0.99998 (``fedcomp.coding.plan``). The code has no fixed number of packets and, unlike Reed-Solomon, relays that hold
several packets may send combinations of them (Ho and others, "A random linear network coding approach to multicast",
IEEE Transactions on Information Theory 2006; recalled). It is no encryption: any K packets decode, and fewer still
narrow the payload down.

Encoder and relay are here; the decoder, which is that of Reed-Solomon packets too, is :mod:`fedcomp.coding.decoder`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.code import FIELD, CodeName, Encoder, EncoderMode, PacketPlace, PayloadHead, admit, check_mode
from fedcomp.coding.decoder import Decoder, DecoderStats
from fedcomp.coding.elimination import Basis
from fedcomp.coding.errors import NotDecodable
from fedcomp.coding.packet import Mode, Packet, PacketLimits, shorter_mode
from fedcomp.coding.stream import coefficient_rows, coefficients, derive
from fedcomp.errors import ConfigError

__all__ = ["Decoder", "DecoderStats", "Recoder", "RlncEncoder"]


class RlncEncoder(Encoder):
    """Random code, the symbols themselves first in mode "systematic"; see :func:`fedcomp.coding.encoder.encoder`."""

    code: ClassVar[CodeName] = "rlnc"

    def __init__(
        self, payload: bytes | memoryview, place: PacketPlace, *, mode: EncoderMode = "systematic", **common: Any
    ) -> None:
        check_mode("rlnc", mode, ("systematic", "random"))
        if common.get("threshold"):
            raise ConfigError(
                f"threshold = {common['threshold']} with code 'rlnc'; random rows do not guarantee that T packets are "
                "independent of the payload. Use code 'mds'"
            )
        self.systematic = mode == "systematic"
        super().__init__(payload, place, **common)

    def _most_shards(self) -> None:
        return None

    def _name(self, index: int) -> tuple[Mode, int]:
        if self.systematic and index < self.symbols:
            return Mode.SYSTEMATIC, index
        # Eight bytes instead of K coefficients: whoever has the seed draws the same row.
        return Mode.SEED, derive(self.run, self.round, self.source, index)

    def _rows(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        rows = np.zeros((indices.size, self.symbols), np.uint8)
        unit = (indices < self.symbols) & self.systematic
        rows[unit, indices[unit]] = 1
        rows[~unit] = coefficient_rows([self._name(int(index))[1] for index in indices[~unit]], self.symbols)
        return rows


class Recoder:
    """Holds packets of one payload at a relay and sends random combinations of them.

    Only packets that add to the rank are kept, so at most K.

    Parameters
    ----------
    limits : PacketLimits
    """

    def __init__(self, limits: PacketLimits | None = None) -> None:
        self.limits = limits or PacketLimits()
        self._head: PayloadHead | None = None
        self._basis: Basis | None = None
        self._held: list[Packet] = []

    @property
    def rank(self) -> int:
        """How many independent packets are held; nothing sent from here has more."""
        return len(self._held)

    def add(self, packet: Packet) -> bool:
        """Take a packet in; return whether it added to the rank.

        Raises
        ------
        PacketError
            When it belongs to another round, source or payload than those held, or exceeds the limits.
        """
        head = admit(packet, self.limits, self._head)
        if self._basis is None:
            self._head, self._basis = head, Basis(head.symbols)
        if not self._basis.add(packet.row()):
            return False
        self._held.append(packet)
        return True

    def recode(self, seed: int) -> Packet:
        """Return a random combination of the held packets; the one that is held, as it is, when it is alone.

        Parameters
        ----------
        seed : int
            64 bits that choose the combination, e.g. ``derive(run, round, source, relay, count)``. It does not travel:
            what it means depends on what is held here, so the coefficients are sent themselves.

        Raises
        ------
        NotDecodable
            When nothing is held.
        """
        if not self._held:
            raise NotDecodable("this relay holds no packet of the payload, so it has nothing to send")
        # A multiple of it would say no more, with coefficients that have to be written out.
        if len(self._held) == 1:
            return self._held[0]
        first = self._held[0]
        # Never all zero, and the held packets are independent: the combination always carries something.
        weights = coefficients(seed, len(self._held))[None, :]
        vector = FIELD.matmul(weights, np.stack([packet.row() for packet in self._held]))[0]
        body = np.empty((1, *first.body.shape), np.uint8)
        # One generation at a time: all together would be another copy of all packets that are held.
        for generation in range(first.generations):
            held = np.stack([packet.body[generation] for packet in self._held])
            FIELD.matmul(weights, held, out=body[:, generation])
        return Packet(
            mode=shorter_mode(vector),
            number=0,
            vector=vector,
            round=first.round,
            source=first.source,
            symbols=first.symbols,
            payload_bytes=first.payload_bytes,
            digest=first.digest,
            body=body[0],
            first_generation=first.first_generation,
            recoded=True,
        )
