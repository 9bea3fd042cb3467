"""The decoder: takes the packets of one payload in any order and mode, of RLNC or Reed-Solomon.

It has two phases. While packets arrive only their coefficients are eliminated (:mod:`fedcomp.coding.elimination`), and
bodies stay where they are: the decoder keeps the packets' own arrays, which nobody can write to (see
:class:`~fedcomp.coding.packet.Packet`). When they are enough, an e x e system is solved and one product makes the e
symbols that did not arrive as themselves. That costs e * K * S multiplications, as much as encoding e packets, instead
of the K * K * S of eliminating bodies row by row as they arrive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.code import ALIGN, FIELD, PayloadHead, admit, payload_digest
from fedcomp.coding.elimination import Basis, recovery
from fedcomp.coding.errors import CorruptGeneration, NotDecodable, PacketError
from fedcomp.coding.kernels import Rows, reduce
from fedcomp.coding.packet import Mode, Packet, PacketLimits
from fedcomp.errors import ConfigError

ATTEMPTS = 8
"""How many packets are suspected, one after the other, when the digest of a decoded payload differs; and how many
surplus packets are kept for it."""

SYSTEMATIC = Mode.SYSTEMATIC

Row = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Coefficients of a packet, and its body."""

SymbolState = Literal["missing", "partial", "decoded"]


@dataclass(frozen=True)
class DecoderStats:
    """What a decoder was given: ``received`` = ``innovative`` + ``dependent`` packets, and their ``bytes``.

    ``repaired`` says whether a surplus packet replaced one that did not fit the digest.
    """

    received: int = 0
    innovative: int = 0
    dependent: int = 0
    bytes: int = 0
    repaired: bool = False


class Decoder:
    """Collects packets of one payload, in any order and of any mode, and decodes it when they are enough.

    The first packet fixes what the payload is: its K, S, length, digest, round and source; others are refused. A forged
    first packet therefore makes the payload undecodable, but never wrong.

    Parameters
    ----------
    limits : PacketLimits, optional
    expect : (round, source), optional
        Refuse packets of any other.
    threshold : int
        T of the encoder, known from the plan: the last T of the K symbols are random and are thrown away.

    Examples
    --------
    >>> from fedcomp.coding.encoder import encoder
    >>> source = encoder("mds", bytes(1000), symbols=4, round=1, source=0, run=7)
    >>> decoder = Decoder(expect=(1, 0))
    >>> [decoder.add(packet) for packet in source.packets([0, 5, 9, 2])]
    [True, True, True, True]
    >>> decoder.payload() == bytes(1000)
    True
    """

    def __init__(
        self, *, limits: PacketLimits | None = None, expect: tuple[int, int] | None = None, threshold: int = 0
    ) -> None:
        if threshold < 0:
            raise ConfigError(f"threshold = {threshold}; the number of random symbols cannot be negative")
        self.limits = limits or PacketLimits()
        self.expect = expect
        self.threshold = threshold
        self._held: _Held | None = None
        self._surplus: list[Row] = []
        self._received = self._dependent = self._bytes = 0
        self._verified = self._repaired = False

    @property
    def rank(self) -> int:
        """How many independent packets arrived."""
        return 0 if self._held is None else self._held.basis.rank

    @property
    def symbols(self) -> int:
        """K, random symbols included; 0 before the first packet."""
        return 0 if self._held is None else self._held.head.symbols

    @property
    def needed(self) -> int:
        """How many more independent packets it takes; before the first packet at least 1."""
        return 1 if self._held is None else self.symbols - self.rank

    @property
    def complete(self) -> bool:
        """Whether :meth:`payload` can be asked for."""
        return self.needed == 0

    @property
    def stats(self) -> DecoderStats:
        """What was received so far."""
        innovative = self._received - self._dependent
        return DecoderStats(self._received, innovative, self._dependent, self._bytes, self._repaired)

    def add(self, packet: Packet) -> bool:
        """Take a packet in; return whether it was innovative, i.e. raised the rank.

        Duplicates and dependent packets are counted, and a few are kept in case the digest differs.

        Raises
        ------
        PacketError
            When the packet belongs to another payload, or is more than this receiver accepts. Nothing has changed then.
        """
        held = self._held
        head = admit(packet, self.limits, None if held is None else held.head)
        if held is None:
            held = self._held = _store(head, self.threshold, self.expect)
        self._received += 1
        self._bytes += packet.wire_bytes
        # Once the digest has been verified no packet can add anything; it is only counted.
        innovative = not self._verified and self._absorb(
            held, packet.number if packet.mode is SYSTEMATIC else packet.row(), packet.body
        )
        self._dependent += not innovative
        return innovative

    def payload(self) -> bytes:
        """Return the payload; its digest is checked.

        When the digest differs and more than K packets arrived, at most 8 single packets are replaced, one at a time,
        by what a surplus packet says they should have been.

        Raises
        ------
        NotDecodable
            When the rank is below K.
        CorruptGeneration
            When the digest differs and cannot be made to fit: a packet was forged, or is not of this payload.
        """
        held = self._complete()
        data = _assembled(held, self.threshold)
        if not self._verified and not _genuine(held, self.threshold, data):
            data = _repaired(held, self.threshold, self._surplus)
            self._repaired = True
        self._verified = True
        # Surplus packets were kept for a repair alone, and the payload is verified now.
        self._surplus.clear()
        return data

    def solve(self) -> int:
        """Make the e symbols that did not arrive as themselves in one product; return e.

        This is the second phase, apart from the assembly and the digest; :meth:`payload` calls it. They take the place
        of the combinations they are made from, so a second call has nothing left to do.

        Raises
        ------
        NotDecodable
            When the rank is below K.
        """
        return self._complete().solve()

    def symbol(self, index: int) -> bytes:
        """Return ``payload()[index * S : (index + 1) * S]`` as soon as it is determined; no digest vouches for it yet.

        Raises
        ------
        NotDecodable
            When what arrived does not determine it.
        ConfigError
            When the payload has no such symbol.
        """
        if self._held is None:
            raise NotDecodable("no packet has arrived; nothing is known of the payload")
        held, data_symbols = self._held, self.symbols - self.threshold
        if not 0 <= index < data_symbols * held.head.generations:
            raise ConfigError(f"symbol {index}; the payload has {data_symbols * held.head.generations}")
        generation, column = divmod(index, data_symbols)
        values = held.determined([column]).get(column)
        if values is None:
            raise NotDecodable(f"symbol {index} is not determined by the {self.rank} independent packets that arrived")
        return values[generation].tobytes()[: held.length_of(index)]

    def partial(self) -> dict[int, bytes]:
        """Return every symbol that is determined, by its index; see :meth:`symbol`. Nothing that arrived is lost."""
        if self._held is None:
            return {}
        held, data_symbols = self._held, self.symbols - self.threshold
        found = {}
        for column, values in held.determined(range(data_symbols)).items():
            for generation, value in enumerate(values):
                index = generation * data_symbols + column
                found[index] = value.tobytes()[: held.length_of(index)]
        return dict(sorted(found.items()))

    def states(self) -> list[SymbolState]:
        """Return how far each of the K symbols of a generation is; "partial" ones occur in packets that arrived."""
        if self._held is None:
            return []
        reduced = self._held.reduced()
        decoded, seen = reduced.determined(), np.any(reduced.form, axis=0)
        return [
            "decoded" if column in decoded else "partial" if seen[column] else "missing"
            for column in range(self.symbols)
        ]

    def _complete(self) -> _Held:
        """Return what is held, or raise NotDecodable when it is not enough."""
        if self._held is None:
            raise NotDecodable("no packet has arrived; nothing is known of the payload")
        if not self.complete:
            raise NotDecodable(
                f"rank {self.rank} of {self.symbols}: {self.needed} more independent packets are needed; partial() has "
                "the symbols that are determined already"
            )
        return self._held

    def _absorb(self, held: _Held, content: int | NDArray[np.uint8], body: NDArray[np.uint8]) -> bool:
        """Keep a packet; ``content`` is the symbol that it is, or else its coefficients."""
        # One row for a product. Of what came as bytes every body is contiguous already.
        if not body.flags.c_contiguous:
            body = body.copy()
        if held.add(content, body):
            return True
        vector = held.unit(content) if isinstance(content, int) else content
        if len(self._surplus) < ATTEMPTS and not held.has(vector, body):
            self._surplus.append((vector, body))
        return False


def _store(head: PayloadHead, threshold: int, expect: tuple[int, int] | None) -> _Held:
    """Return an empty store for a payload.

    The header's figures are bound to each other, so that K bodies are the payload, which the limits bound, with its
    padding and its random symbols; as many bytes again, at most, are made of them.

    Raises
    ------
    PacketError
        When they contradict each other, or it is another payload than is expected.
    """
    if expect is not None and (head.round, head.source) != expect:
        raise PacketError(f"round and source {head.round, head.source}; this decoder expects {expect}")
    data_symbols = head.symbols - threshold
    if data_symbols < 1:
        raise PacketError(f"K = {head.symbols} with {threshold} random symbols; none is left for the payload")
    if head.first_generation:
        raise PacketError(f"first generation {head.first_generation}; this decoder takes packets of whole payloads")
    length, row = head.payload_bytes, data_symbols * head.symbol_bytes
    # An empty payload has no bytes and S = 0, but still one generation.
    if head.generations != max(1, -(-length // max(1, row))):
        raise PacketError(f"{head.generations} generations of {row} bytes each for a payload of {length}")
    # Encoders round S up to ALIGN. Without this bound a tiny payload could claim symbols of any size.
    if (head.symbol_bytes - ALIGN) * data_symbols * head.generations >= max(length, 1):
        raise PacketError(
            f"S = {head.symbol_bytes} for a payload of {length} in {head.generations} x {data_symbols} symbols; "
            f"padding is less than {ALIGN} bytes for a symbol"
        )
    return _Held(head)


def _assembled(held: _Held, threshold: int) -> bytes:
    """Return the payload, without its padding, in one copy of what arrived and what was made."""
    pieces = held.pieces(range(held.head.symbols - threshold))
    whole, rest = divmod(held.head.payload_bytes, max(1, held.head.symbol_bytes))
    return b"".join(pieces[:whole] + [piece[:rest] for piece in pieces[whole : whole + 1]])


def _genuine(held: _Held, threshold: int, data: bytes) -> bool:
    """Whether a payload, with the random symbols that were decoded beside it, has its digest."""
    hidden = b"".join(held.pieces(range(held.head.symbols - threshold, held.head.symbols)))
    return payload_digest(data, hidden) == held.head.digest


def _repaired(held: _Held, threshold: int, surplus: list[Row]) -> bytes:
    """Return the payload with one packet corrected by the surplus ones, or raise CorruptGeneration."""
    for column, change in _suspects(held, surplus):
        held.correct(column, change)
        data = _assembled(held, threshold)
        if _genuine(held, threshold, data):
            return data
        # Addition is XOR: the same correction a second time takes it back.
        held.correct(column, change)
    raise CorruptGeneration(
        f"the decoded payload of source {held.head.source} in round {held.head.round} does not have its digest, "
        f"with {len(surplus)} surplus packets to find out which one is wrong"
    )


def _suspects(held: _Held, surplus: list[Row]) -> list[Row]:
    """Return for at most 8 packets that may be the wrong one how symbols depend on it, and by what it is wrong.

    If packet i alone is wrong, by d, every surplus packet differs from what the others predict by its own multiple
    of d: the one with which packet i enters the prediction. That narrows i down and gives d. Correcting packet i
    is the same as decoding without it, from a surplus packet instead (derived).
    """
    if not surplus:
        return []
    vectors = np.stack([vector for vector, _ in surplus])
    difference = held.encode(vectors) ^ np.stack([body for _, body in surplus])
    wrong = np.argwhere(difference.any(axis=0))
    if not wrong.size:
        return []  # all surplus agrees with what was decoded: no packet stands out
    # One byte that differs is enough to find the packet: all of a body's bytes enter with the same coefficients.
    generation, place = wrong[0]
    sample = difference[:, generation, place]
    witness = int(np.flatnonzero(sample)[0])
    inverse = held.reduced().transform
    weights = FIELD.matmul(vectors, inverse)
    # sample / weights has to be the same in every surplus packet; multiplied crosswise no zero weight is divided by.
    fits = FIELD.multiply(weights, sample[witness]) == FIELD.multiply(sample[:, None], weights[witness][None, :])
    slots = np.flatnonzero(fits.all(axis=0) & (weights[witness] != 0))[:ATTEMPTS]
    factors = FIELD.reciprocal(weights[witness, slots])
    return [
        (inverse[:, slot], FIELD.multiply(difference[witness], factor))
        for slot, factor in zip(slots, factors, strict=True)
    ]


class _Held:
    """The independent packets of one payload; slot i holds the i-th of them.

    ``vectors`` (K, K) are the coefficients as they came. ``bodies`` are the packets' own arrays, each of shape
    (generations, S), until :meth:`solve` made the missing symbols, which take the place of the combinations. None of
    them is written to: they belong to the packets.
    """

    def __init__(self, head: PayloadHead) -> None:
        self.head = head
        self.basis = Basis(head.symbols)
        self.vectors = np.zeros((head.symbols, head.symbols), np.uint8)
        self.bodies: list[NDArray[np.uint8]] = []
        # Where a symbol is that is there as itself, which symbol a slot holds then, and the other slots.
        # Lists: arrivals write single entries, and numpy takes several times as long for one.
        self.slot_of, self.symbol_at = [-1] * head.symbols, [0] * head.symbols
        self.coded: list[int] = []
        self._reduced: _Reduced | None = None

    @property
    def complete(self) -> bool:
        return self.basis.rank == self.head.symbols

    def add(self, content: int | NDArray[np.uint8], body: NDArray[np.uint8]) -> bool:
        """Keep a packet, the symbol or the coefficients ``content``, if it is independent; return whether it was."""
        slot = len(self.bodies)
        if isinstance(content, int):
            if not self.basis.add_unit(content):
                return False
            self.vectors[slot, content] = 1
            self.slot_of[content], self.symbol_at[slot] = slot, content
        else:
            if not self.basis.add(content):
                return False
            self.vectors[slot] = content
            self.coded.append(slot)
        self.bodies.append(body)
        self._reduced = None
        return True

    def unit(self, symbol: int) -> NDArray[np.uint8]:
        """Return the coefficients of a packet that is this symbol itself."""
        found = np.zeros(self.head.symbols, np.uint8)
        found[symbol] = 1
        return found

    def has(self, vector: NDArray[np.uint8], body: NDArray[np.uint8]) -> bool:
        """Return whether this very packet was stored."""
        same = np.flatnonzero((self.vectors[: self.basis.rank] == vector).all(axis=1))
        if not same.size:
            return False
        # At rank K the slot may hold a solved symbol in the packet's place, so the packet is made again.
        stored = self.encode(vector[None, :])[0] if self.complete else self.bodies[same[0]]
        return np.array_equal(stored, body)

    def combine(self, weights: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return ``weights @ bodies``, shape (len(weights), generations, S)."""
        made = FIELD.matmul(weights, Rows(self.bodies))
        return made.reshape(len(weights), self.head.generations, self.head.symbol_bytes)

    def solve(self) -> int:
        """Put the symbols that did not arrive as themselves where the combinations are; return how many; at rank K."""
        e = len(self.coded)
        if not e:
            return 0
        missing = [symbol for symbol, slot in enumerate(self.slot_of) if slot < 0]
        made = self.combine(recovery(self.vectors, np.array(self.coded), np.array(self.slot_of)))
        for symbol, slot, body in zip(missing, self.coded, made, strict=True):
            self.bodies[slot], self.slot_of[symbol], self.symbol_at[slot] = body, slot, symbol
        self.coded = []
        return e

    def encode(self, vectors: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return what packets with these coefficients would carry, shape (len(vectors), generations, S); at rank K."""
        self.solve()
        return self.combine(vectors.take(self.symbol_at, axis=1))

    def correct(self, column: NDArray[np.uint8], change: NDArray[np.uint8]) -> None:
        """Add ``change``, shape (generations, S), times ``column[p]`` to every symbol p; repeating takes it back."""
        for symbol in np.flatnonzero(column):
            slot = self.slot_of[symbol]
            # A new array: the old one may be the packet's own.
            self.bodies[slot] = self.bodies[slot] ^ FIELD.multiply(change, column[symbol])

    def determined(self, columns: Iterable[int]) -> dict[int, NDArray[np.uint8]]:
        """Return those of the symbols that are determined: values of shape (generations, S)."""
        if self.complete:
            self.solve()
            return {symbol: self.bodies[self.slot_of[symbol]] for symbol in columns}
        combinations = self.reduced().determined()
        found = {symbol: combinations[symbol] for symbol in columns if symbol in combinations}
        if not found:
            return {}
        weights = np.array(list(found.values()), np.uint8).reshape(-1, self.basis.rank)
        return dict(zip(found, self.combine(weights), strict=True))

    def reduced(self) -> _Reduced:
        """Return the reduced row echelon form of the coefficients that were received."""
        if self._reduced is None:
            rank, symbols = self.basis.rank, self.head.symbols
            work = np.concatenate([self.vectors[:rank], np.eye(rank, dtype=np.uint8)], axis=1)
            reduce(work, symbols)
            self._reduced = _Reduced(work[:, :symbols], work[:, symbols:])
        return self._reduced

    def pieces(self, columns: range) -> list[memoryview]:
        """Return these symbols, generation by generation, as views; at rank K."""
        self.solve()
        bodies = [self.bodies[slot] for slot in self.slot_of[columns.start : columns.stop]]
        return [body[generation].data for generation in range(self.head.generations) for body in bodies]

    def length_of(self, index: int) -> int:
        """Return how many bytes of symbol ``index`` are payload."""
        return max(0, min(self.head.symbol_bytes, self.head.payload_bytes - index * self.head.symbol_bytes))


class _Reduced(NamedTuple):
    """``form = transform @ vectors`` in reduced row echelon form: rows by pivot, pivots ascending."""

    form: NDArray[np.uint8]
    transform: NDArray[np.uint8]

    def determined(self) -> dict[int, NDArray[np.uint8]]:
        """Return for every symbol that is determined the combination of packets that is it."""
        unit = np.flatnonzero(np.count_nonzero(self.form, axis=1) == 1)
        return {int(self.form[row].argmax()): self.transform[row] for row in unit}
