"""The common interface of RLNC and MDS: symbols of a payload, encoders, and encoders by name.

A payload is cut into generations of at most about 1 MiB, a generation into K symbols of S bytes, contiguous and in
order; zeros fill the end. All generations of a payload are coded with the same coefficients, so that a packet carries
one vector and one symbol of each generation, and the receiver inverts one matrix however long the payload is.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from operator import index
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.errors import PacketError
from fedcomp.coding.field import GF256
from fedcomp.coding.packet import DIGEST_BYTES, Mode, Packet, PacketLimits, PayloadHead, bytes_of
from fedcomp.coding.stream import SplitMix64
from fedcomp.errors import ConfigError, nearest

GENERATION_BYTES = 1 << 20
"""Beyond this input and output leave the processor's caches, and products slow down several times (measured)."""

ALIGN = 64
"""Symbols are padded to a multiple of one cache line, which is also the widest vector register."""

MAX_PAYLOAD = (1 << 32) - 1
MAX_SYMBOLS = 1024

FIELD = GF256()

CodeName = Literal["rlnc", "mds"]
EncoderMode = Literal["systematic", "random", "cauchy"]


class GenerationShape(NamedTuple):
    """How a payload is cut: ``generations``, each of ``symbols`` pieces and ``threshold`` random ones, S bytes long."""

    symbols: int
    threshold: int
    symbol_bytes: int
    generations: int

    @property
    def coded(self) -> int:
        """K of the packets: data symbols and random ones; so many independent packets decode."""
        return self.symbols + self.threshold


def symbols_for(payload_len: int, wanted: int) -> int:
    """Return K for a payload: ``wanted``, but at most one symbol per 64 bytes when the payload has fewer than K bytes.

    An empty payload has one symbol, of no bytes.

    Raises
    ------
    ConfigError
        When ``wanted`` is not in 1..1024.
    """
    if not 1 <= wanted <= MAX_SYMBOLS:
        raise ConfigError(f"symbols = {wanted}; a generation has 1 to {MAX_SYMBOLS} symbols")
    # With fewer bytes than symbols most symbols would be nothing but padding.
    return wanted if payload_len >= wanted else max(1, -(-payload_len // 64))


def shape_of(payload_len: int, wanted: int, *, threshold: int = 0, align: int = ALIGN) -> GenerationShape:
    """Return how a payload of ``payload_len`` bytes is cut into ``wanted`` symbols per generation.

    Raises
    ------
    ConfigError
        When the payload has 4 GiB or more, or a parameter is out of range.
    """
    if not 0 <= payload_len <= MAX_PAYLOAD:
        raise ConfigError(f"a payload of {payload_len} bytes; a packet's header counts to {MAX_PAYLOAD}")
    if threshold < 0:
        raise ConfigError(f"threshold = {threshold}; the number of random symbols cannot be negative")
    if not 1 <= align <= ALIGN:
        raise ConfigError(f"align = {align}; symbols are padded to a multiple of 1 to {ALIGN} bytes")
    symbols = symbols_for(payload_len, wanted)
    wished = max(1, -(-payload_len // GENERATION_BYTES))
    # Rounded up twice, to a whole byte and to ``align``: the division of a negative number rounds away from zero.
    symbol_bytes = -(-payload_len // (wished * symbols) // align) * align
    # Padding may have made room enough for all in fewer generations.
    return GenerationShape(symbols, threshold, symbol_bytes, max(1, -(-payload_len // max(1, symbols * symbol_bytes))))


def payload_digest(payload: bytes | memoryview, hidden: bytes | memoryview = b"") -> bytes:
    """Return the 8-byte BLAKE2b digest of a payload, followed by its random symbols where there are some.

    With random symbols the digest covers them too: a digest of the payload alone, readable in every packet, would let
    a relay test guesses of what it must learn nothing about.
    """
    state = hashlib.blake2b(payload, digest_size=DIGEST_BYTES)
    state.update(hidden)
    return state.digest()


def admit(packet: Packet, limits: PacketLimits, held: PayloadHead | None) -> PayloadHead:
    """Return what the packet shares with others of its payload, or raise PacketError when it is not one to take in."""
    head = packet.head
    # What is checked below is all part of the head, and was checked in the first packet with this one.
    if head == held:
        return head
    if packet.field != 0:
        raise PacketError(f"field {packet.field}; network codes of this package work in GF(2^8), field 0")
    # Parsing did this already; a packet that was constructed in this process was never parsed.
    head.require_within(limits)
    if held is not None:
        held.require_same(head)
    return head


class PacketPlace(NamedTuple):
    """Where the packets of a payload belong; a receiver mixes neither rounds nor sources.

    ``run`` names the run: with round, source and packet number it seeds the coefficients of the random code.
    """

    round: int
    source: int
    run: int | bytes


class Encoder(ABC):
    """Makes the packets of one payload. Packet i is always the same bytes, in whatever order packets are asked for.

    Parameters
    ----------
    payload : bytes
    place : PacketPlace
    symbols : int
        K that is wanted, 1 to 1024; short payloads get fewer, see :func:`symbols_for`.
    shards : int, optional
        How many packets will be asked for; for RLNC no limit by default, for MDS as many as the field has.
    threshold : int
        T, the privacy threshold: any T packets are independent of the payload, since T uniformly random symbols are
        coded along with it; K + T packets decode. Code "mds" only; all packets are then Cauchy rows.
    align : int
        Symbols are padded to a multiple of so many bytes, 1 to 64.
    insecure_seed : int, optional
        Draws the random symbols from a public stream instead of the operating system: for tests only.

    Attributes
    ----------
    symbols : int
        K of the packets, random symbols included: so many independent packets decode.
    symbol_bytes, generations : int
        S, and how many symbols a packet carries.
    shards : int or None
        How many packets there are; None when there is no end to them.
    digest : bytes
        What every packet carries of the payload, see :func:`payload_digest`.
    """

    code: ClassVar[CodeName]

    def __init__(
        self,
        payload: bytes | memoryview,
        place: PacketPlace,
        *,
        symbols: int,
        shards: int | None = None,
        threshold: int = 0,
        align: int = ALIGN,
        insecure_seed: int | None = None,
    ) -> None:
        # As bytes, whatever the elements of the buffer that was given.
        view = bytes_of(payload)
        # Numbers out of an array have 64 bits, and the streams that are named by these wrap around.
        symbols, round, source = index(symbols), index(place.round), index(place.source)
        run = place.run if isinstance(place.run, bytes) else index(place.run)
        self.shape = shape_of(len(view), symbols, threshold=threshold, align=align)
        self.symbols = self.shape.coded
        self.symbol_bytes = self.shape.symbol_bytes
        self.generations = self.shape.generations
        for name, value in (("round", round), ("source", source)):
            if not 0 <= value < 1 << 32:
                raise ConfigError(f"{name} = {value}; a packet has 32 bits for it")
        most = self._most_shards()
        if shards is not None and shards < self.symbols:
            raise ConfigError(
                f"shards = {shards} of {self.symbols} symbols (random ones included); no receiver could ever decode. "
                f"Make at least {self.symbols} shards, or fewer symbols"
            )
        if most is not None and max(self.symbols, shards or 0) > most:
            raise ConfigError(
                f"code {self.code!r} has at most {most} shards for {self.symbols} symbols; "
                f"{max(self.symbols, shards or 0)} are needed. Take fewer symbols, or code 'rlnc' if threshold is 0"
            )
        self.shards = most if shards is None else shards
        self.round, self.source, self.run = round, source, run
        self._payload_bytes = len(view)
        self._data = self._cut(view, insecure_seed)
        self.digest = payload_digest(view, self._data[:, self.shape.symbols :].tobytes())

    def coefficients(self, index: int) -> NDArray[np.uint8]:
        """Return the coefficients of packet ``index``, shape ``(symbols,)``."""
        return self._rows(np.array([self._checked(index)]))[0]

    def packet(self, index: int) -> Packet:
        """Return packet ``index``.

        Raises
        ------
        ConfigError
            When there is no such packet.
        """
        return self.packets([index])[0]

    def packets(self, indices: Iterable[int]) -> list[Packet]:
        """Return several packets, in the order of ``indices``; all that are coded come from one product."""
        wanted = [self._checked(index) for index in indices]
        names = [self._name(index) for index in wanted]
        # Systematic packets are slices of the payload and need no product.
        coded = [place for place, (mode, _) in enumerate(names) if mode is not Mode.SYSTEMATIC]
        bodies: dict[int, NDArray[np.uint8]] = {}
        if coded:
            rows = self._rows(np.array([wanted[place] for place in coded]))
            made = np.empty((len(coded), self.generations, self.symbol_bytes), np.uint8)
            for generation in range(self.generations):
                FIELD.matmul(rows, self._data[generation], out=made[:, generation])
            made.flags.writeable = False
            bodies = dict(zip(coded, made, strict=True))
        return [
            Packet(
                mode=mode,
                number=number,
                vector=None,
                round=self.round,
                source=self.source,
                symbols=self.symbols,
                payload_bytes=self._payload_bytes,
                digest=self.digest,
                body=bodies[place] if place in bodies else self._data[:, number],
            )
            for place, (mode, number) in enumerate(names)
        ]

    @abstractmethod
    def _most_shards(self) -> int | None:
        """Return how many packets this code has at most for ``symbols``; None when there is no end to them."""

    @abstractmethod
    def _name(self, index: int) -> tuple[Mode, int]:
        """Return how packet ``index`` names its coefficients."""

    @abstractmethod
    def _rows(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the coefficients of several packets, shape ``(len(indices), symbols)``."""

    def _checked(self, index: int) -> int:
        if index < 0 or (self.shards is not None and index >= self.shards):
            raise ConfigError(f"packet {index}; this encoder makes packets 0 to {(self.shards or 0) - 1}")
        return index

    def _cut(self, view: memoryview, insecure_seed: int | None) -> NDArray[np.uint8]:
        """Return the symbols, shape (generations, symbols, symbol_bytes); a view of the payload when it fits."""
        symbols, threshold, symbol_bytes, generations = self.shape
        whole = generations * symbols * symbol_bytes
        if len(view) == whole:
            flat = np.frombuffer(view, np.uint8) if whole else np.zeros(0, np.uint8)
        else:
            flat = np.zeros(whole, np.uint8)
            flat[: len(view)] = np.frombuffer(view, np.uint8)
        # Packets keep what nobody can write to; of a payload in a writable buffer they are copies all the same.
        flat.flags.writeable = False
        data = flat.reshape(generations, symbols, symbol_bytes)
        if not threshold:
            return data
        # From the operating system: whoever could predict these symbols could subtract them from every packet.
        hidden = threshold * generations * symbol_bytes
        noise = os.urandom(hidden) if insecure_seed is None else SplitMix64(insecure_seed).bytes(hidden).tobytes()
        drawn = np.array(memoryview(noise), np.uint8).reshape(generations, threshold, symbol_bytes)
        whole_data = np.concatenate([data, drawn], axis=1)
        whole_data.flags.writeable = False
        return whole_data


def check_mode(code: CodeName, mode: str, known: Sequence[str]) -> None:
    """Raise :class:`ConfigError` unless the code has that mode."""
    if mode not in known:
        raise ConfigError(f"mode = {mode!r} of code {code!r}{nearest(mode, known)}")
