"""The packet: one coded symbol of every generation of a payload, with a header for the receiver.

Forty fixed bytes, the coefficients in one of five forms, then the body; little-endian throughout, laid out byte by byte
in ``docs/formats/packets.md``. A packet is parsed under the receiver's own :class:`PacketLimits`: nothing is
allocated from what a header claims, and only :class:`fedcomp.coding.errors.PacketError` comes out.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from dataclasses import field as dataclass_field
from enum import IntEnum
from functools import cached_property
from operator import index
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.errors import PacketError
from fedcomp.coding.field import GF256
from fedcomp.coding.stream import MASK, SplitMix64, coefficients
from fedcomp.errors import ConfigError

MAGIC = 0x4C52
VERSION = 1
HEADER = struct.Struct("<HBBBBIIHHHII8sI")
HEADER_BYTES = HEADER.size
DIGEST_BYTES = 8
ENCRYPTED, RECODED = 1, 2

_CRC_AT = HEADER_BYTES - 4
_WHOLE = ("number", "round", "source", "symbols", "payload_bytes", "field", "first_generation")


class PacketField(NamedTuple):
    """What a field number of the header stands for."""

    order: int
    dtype: np.dtype[Any]


FIELDS = (
    PacketField(256, np.dtype("u1")),
    PacketField(251, np.dtype("u1")),
    PacketField(65521, np.dtype("<u2")),
    PacketField(2**31 - 1, np.dtype("<u4")),
)
"""0: GF(2^8)/0x11D, 1: GF(251), 2: GF(65521), 3: GF(2^31-1). An element takes ``dtype.itemsize`` bytes on the wire."""


class Mode(IntEnum):
    """How a packet names its coefficients."""

    SYSTEMATIC = 0  # the index of the one symbol it carries
    SEED = 1  # the seed of a SplitMix64 stream
    DENSE = 2  # all K of them
    SPARSE = 3  # indices and values of those that are not zero
    CAUCHY = 4  # the row of the Cauchy matrix


@dataclass(frozen=True)
class PacketLimits:
    """The receiver's limits, checked before any allocation.

    Parameters
    ----------
    max_symbols : int
        K, at most 65535; includes random symbols.
    max_symbol_bytes : int
        S. One symbol of one generation.
    max_payload : int
        Bytes of the whole payload.
    max_generations : int
        Generations of one payload.
    """

    max_symbols: int = 1024
    max_symbol_bytes: int = 1 << 20
    max_payload: int = 1 << 28
    max_generations: int = 1024

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value < 1:
                raise ConfigError(f"{one.name} = {value}; a receiver that accepts packets accepts at least 1")

    def check(self, symbols: int, symbol_bytes: int, payload_bytes: int, last_generation: int) -> None:
        """Raise :class:`PacketError` when a header claims more than is accepted here."""
        for name, claimed, most in (
            ("K", symbols, self.max_symbols),
            ("S", symbol_bytes, self.max_symbol_bytes),
            ("payload_len", payload_bytes, self.max_payload),
            ("generations", last_generation, self.max_generations),
        ):
            if claimed > most:
                raise PacketError(f"the header claims {name} = {claimed}; this receiver accepts at most {most}")


def bytes_of(buffer: Any) -> memoryview:
    """Return a buffer as bytes, whatever its elements: a view. Of one without elements the shape does not matter."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


class PayloadHead(NamedTuple):
    """What all packets of one payload have in common; packets that differ in any of it never meet in one product."""

    field: int
    round: int
    source: int
    first_generation: int
    generations: int
    symbols: int
    symbol_bytes: int
    payload_bytes: int
    digest: bytes

    def require_same(self, other: PayloadHead) -> None:
        """Raise PacketError, naming what differs, unless the other head is equal."""
        for name, mine, its in zip(self._fields, self, other, strict=True):
            if mine != its:
                raise PacketError(f"{name} = {its!r} among packets with {mine!r}; packets of two payloads never mix")

    def require_within(self, limits: PacketLimits) -> None:
        """Raise PacketError when the payload claims more than the limits accept."""
        limits.check(self.symbols, self.symbol_bytes, self.payload_bytes, self.first_generation + self.generations)


@dataclass(frozen=True, eq=False, repr=False)
class Packet:
    """One coded symbol of each of ``body.shape[0]`` generations, all with the same coefficients.

    Parameters
    ----------
    mode : Mode
    number : int
        Systematic: the symbol's index. Seed: the seed. Cauchy: the row. Otherwise 0.
    vector : array of shape (K,), optional
        The coefficients themselves in modes DENSE and SPARSE, of the field's dtype.
    round, source : int
        The source is an index inside the round's plan, not a node id. 32 bits each.
    symbols : int
        K, random symbols included.
    payload_bytes : int
        Length of the whole payload; what follows it is padding.
    digest : bytes
        8 bytes, see :func:`fedcomp.coding.code.payload_digest`.
    body : uint8 array of shape (generations, S)
        A stored packet must not change. So a read-only array is kept as it is (a view of a ``bytes`` object, or of an
        array that its owner made read-only), and any other is copied.
    field : int
        Number of the finite field, 0 to 3, see :data:`FIELDS`.
    first_generation : int
        Number of the generation that ``body[0]`` belongs to.
    recoded : bool
        Whether a relay combined it from several packets.

    Attributes
    ----------
    head : PayloadHead
        The fields common to all packets of the payload.

    Raises
    ------
    ConfigError
        When the parts do not make a packet that could be written.
    """

    mode: Mode
    number: int
    vector: NDArray[Any] | None
    round: int
    source: int
    symbols: int
    payload_bytes: int
    digest: bytes
    body: NDArray[np.uint8]
    field: int = 0
    first_generation: int = 0
    recoded: bool = False
    _wire_bytes: int | None = None
    head: PayloadHead = dataclass_field(init=False)

    def __post_init__(self) -> None:
        if self._wire_bytes is None:
            self._check()
        body = _settled(self.body)
        if body is not self.body:
            object.__setattr__(self, "body", body)
        # Once, and without the properties: receivers compare it for every packet.
        generations, symbol_bytes = body.shape
        head = PayloadHead(
            self.field,
            self.round,
            self.source,
            self.first_generation,
            generations,
            self.symbols,
            symbol_bytes,
            self.payload_bytes,
            self.digest,
        )
        object.__setattr__(self, "head", head)

    def _check(self) -> None:
        """Raise ConfigError unless this is a packet that could be written; parsing made these checks already."""
        for name in _WHOLE:
            # Numbers out of an array, numpy's own, are taken; they neither have to_bytes nor room for 64 bits.
            try:
                object.__setattr__(self, name, index(getattr(self, name)))
            except TypeError:
                raise ConfigError(f"{name} = {getattr(self, name)!r} is not valid: give a whole number") from None
        if self.body.dtype != np.uint8 or self.body.ndim != 2:
            raise ConfigError(f"body is {self.body.dtype} {self.body.shape}; a packet's is uint8 (generations, S)")
        if not 0 <= self.field < len(FIELDS):
            raise ConfigError(f"field = {self.field}; the packet knows the fields 0 to {len(FIELDS) - 1}")
        if (self.vector is None) == (self.mode in (Mode.DENSE, Mode.SPARSE)):
            raise ConfigError(f"mode {self.mode.name}: the modes DENSE and SPARSE have a vector, the others have none")
        if self.vector is not None:
            shape, dtype = (self.symbols,), FIELDS[self.field].dtype
            if self.vector.shape != shape or self.vector.dtype != dtype:
                raise ConfigError(
                    f"vector is {self.vector.dtype} {self.vector.shape}; this packet's is {dtype} {shape}"
                )
        try:
            _check_claims(self)
            _check_elements(self)
        except PacketError as error:
            raise ConfigError(str(error)) from error
        for name, value, bits in (
            ("round", self.round, 32),
            ("source", self.source, 32),
            ("first_generation", self.first_generation, 16),
            ("generations", self.generations, 16),
            ("symbols", self.symbols, 16),
            ("S", self.symbol_bytes, 32),
            ("payload_bytes", self.payload_bytes, 32),
        ):
            if not 0 <= value < 1 << bits:
                raise ConfigError(f"{name} = {value}; the packet has {bits} bits for it")

    def __repr__(self) -> str:
        origin = f"round {self.round}, source {self.source}{', recoded' if self.recoded else ''}"
        size = f"K={self.symbols}, {self.generations} x {self.symbol_bytes} bytes"
        return f"<Packet {self.mode.name.lower()} {self.number}: {origin}, {size}>"

    @property
    def generations(self) -> int:
        """How many generations this packet carries a symbol of."""
        return int(self.body.shape[0])

    @property
    def symbol_bytes(self) -> int:
        """S, the bytes of one symbol of one generation."""
        return int(self.body.shape[1])

    @cached_property
    def wire_bytes(self) -> int:
        """How long the packet is as bytes."""
        if self._wire_bytes is not None:
            return self._wire_bytes
        return HEADER_BYTES + len(_coefficient_bytes(self)) + self.body.nbytes

    def row(self) -> NDArray[Any]:
        """Return the coefficients as a dense vector of shape ``(K,)`` in the field's dtype (uint8 for GF(2^8))."""
        order, dtype = FIELDS[self.field]
        if self.vector is not None:
            return self.vector
        if self.mode is Mode.SEED:
            if self.field == 0:
                return coefficients(self.number, self.symbols)
            return _prime_coefficients(self.number, self.symbols, order).astype(dtype)
        if self.mode is Mode.CAUCHY:
            return _cauchy_row(self.number, self.symbols, self.field)
        unit = np.zeros(self.symbols, dtype)
        unit[self.number] = 1
        return unit

    def to_bytes(self) -> bytes:
        """Return the packet's bytes; parsing and writing again gives the same ones."""
        # Without its last field, the checksum, which is taken of all the rest.
        head = HEADER.pack(
            MAGIC,
            VERSION,
            self.field,
            self.mode,
            RECODED if self.recoded else 0,
            self.round,
            self.source,
            self.first_generation,
            self.generations,
            self.symbols,
            self.symbol_bytes,
            self.payload_bytes,
            self.digest,
            0,
        )[:_CRC_AT]
        coefficients_, body = _coefficient_bytes(self), np.ascontiguousarray(self.body).data
        # Chained, so that header, coefficients and body are joined only once, below.
        crc = zlib.crc32(body, zlib.crc32(coefficients_, zlib.crc32(head)))
        return b"".join((head, crc.to_bytes(4, "little"), coefficients_, body))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, limits: PacketLimits) -> Packet:
        """Parse a packet. Its body, and a dense vector, are views of ``data`` when that is all of a ``bytes`` object.

        Of anything else they are a copy: a buffer may be used again by its owner, and a view of a part would keep the
        rest in memory, which no limit counts.

        Raises
        ------
        PacketError
            When the bytes are no packet, are damaged, or claim more than ``limits`` accept.
        """
        # Lengths and offsets below count bytes, whatever the elements of the buffer that came.
        view = bytes_of(data)
        if len(view) < HEADER_BYTES:
            raise PacketError(f"{len(view)} bytes are not a packet: the header alone has {HEADER_BYTES}")
        (
            magic,
            version,
            field_,
            mode,
            flags,
            round_,
            source,
            first,
            generations,
            symbols,
            symbol_bytes,
            payload_bytes,
            digest,
            crc,
        ) = HEADER.unpack_from(view)
        if magic != MAGIC:
            raise PacketError(f"magic 0x{magic:04x}; a packet starts with 0x{MAGIC:04x}")
        if version != VERSION:
            raise PacketError(f"packet version {version}; this receiver reads version {VERSION}")
        if field_ >= len(FIELDS):
            raise PacketError(f"field {field_}; this receiver knows the fields 0 to {len(FIELDS) - 1}")
        if mode > Mode.CAUCHY:
            raise PacketError(f"coefficient mode {mode}; this receiver knows the modes 0 to {Mode.CAUCHY:d}")
        if flags & ENCRYPTED:
            raise PacketError("the packet is encrypted; open what sealed it before parsing it")
        if flags & ~RECODED:
            raise PacketError(f"flags 0x{flags:02x}; only 0x{RECODED:02x} (recoded) is known here")
        if symbols < 1 or generations < 1:
            raise PacketError(f"K = {symbols}, generations = {generations}; a packet has at least one of each")
        # Before anything is computed from them: so far these figures are only the sender's word.
        limits.check(symbols, symbol_bytes, payload_bytes, first + generations)
        place = HEADER_BYTES
        place += _coefficient_length(Mode(mode), symbols, FIELDS[field_].dtype.itemsize, view)
        # An exact fit: from here on the header's figures are backed by bytes that are really there.
        if len(view) != place + generations * symbol_bytes:
            raise PacketError(
                f"{len(view)} bytes; the header says {place} and {generations} symbols of {symbol_bytes} bytes"
            )
        if type(view.obj) is not bytes or len(view.obj) != len(view):
            # Before the checksum, so that it is of the bytes that are kept; after the limits, which bound the copy.
            view = memoryview(bytes(view))
        if zlib.crc32(view[HEADER_BYTES:], zlib.crc32(view[:_CRC_AT])) != crc:
            raise PacketError("checksum differs: the packet was damaged on the way")
        number, vector = _parse_coefficients(Mode(mode), symbols, FIELDS[field_].dtype, view[HEADER_BYTES:place])
        body = np.frombuffer(view, np.uint8, offset=place) if place < len(view) else np.zeros(0, np.uint8)
        packet = cls(
            mode=Mode(mode),
            number=number,
            vector=vector,
            round=round_,
            source=source,
            symbols=symbols,
            payload_bytes=payload_bytes,
            digest=digest,
            body=body.reshape(generations, symbol_bytes),
            field=field_,
            first_generation=first,
            recoded=bool(flags & RECODED),
            _wire_bytes=len(view),
        )
        # With _wire_bytes the constructor checks nothing: what it would call a ConfigError is a PacketError here.
        _check_claims(packet)
        _check_elements(packet)
        return packet


def _settled(body: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return ``body`` if nobody can write to its bytes, else a copy of it that nobody can."""
    memory: Any = body
    # A read-only view says nothing of what it is a view of.
    while type(memory) is np.ndarray and memory.base is not None:
        memory = memory.base
        while type(memory) is memoryview:
            memory = memory.obj
    if type(memory) is bytes:
        return body
    if type(memory) is np.ndarray and not memory.flags.writeable and not body.flags.writeable:
        return body
    body = np.array(body)
    body.flags.writeable = False
    return body


def _check_claims(packet: Packet) -> None:
    """Raise PacketError when header fields contradict each other; needs no coefficient and no body byte."""
    order, dtype = FIELDS[packet.field]
    symbols, mode, number = packet.symbols, packet.mode, packet.number
    if symbols < 1 or packet.generations < 1:
        raise PacketError(f"K = {symbols}, generations = {packet.generations}; a packet has at least one of each")
    if len(packet.digest) != DIGEST_BYTES:
        raise PacketError(f"digest of {len(packet.digest)} bytes; it has {DIGEST_BYTES}")
    if packet.symbol_bytes % dtype.itemsize:
        raise PacketError(f"S = {packet.symbol_bytes} is not a multiple of the field's {dtype.itemsize}-byte elements")
    if packet.symbol_bytes == 0 and (packet.payload_bytes or packet.generations != 1 or packet.first_generation):
        raise PacketError("symbols of 0 bytes; only an empty payload has these, in one generation")
    if packet.recoded and mode not in (Mode.DENSE, Mode.SPARSE):
        raise PacketError(f"a recoded packet in mode {mode.name}; a relay's combination has no seed and no row number")
    if mode is Mode.SYSTEMATIC and not 0 <= number < symbols:
        raise PacketError(f"systematic index {number} of K = {symbols} symbols")
    if mode is Mode.CAUCHY and not 0 <= number < order - symbols:
        raise PacketError(f"Cauchy row {number} with K = {symbols}; the field of {order} has {order - symbols} rows")
    if mode is Mode.SEED and not 0 <= number <= MASK:
        raise PacketError(f"seed {number}; a seed has 64 bits")
    if mode in (Mode.DENSE, Mode.SPARSE) and number:
        raise PacketError(f"number {number} in mode {mode.name}; this mode needs no number")


def _check_elements(packet: Packet) -> None:
    """Raise PacketError when a coefficient or a symbol is no element of a prime field."""
    order, dtype = FIELDS[packet.field]
    # In GF(2^8) every byte is an element, so the body need not be looked through.
    if order > np.iinfo(dtype).max:
        return
    for name, elements in (("coefficient", packet.vector), ("symbol", packet.body.view(dtype))):
        if elements is not None and elements.size and int(elements.max()) >= order:
            raise PacketError(f"a {name} is {int(elements.max())}; elements of GF({order}) are below {order}")


def _coefficient_length(mode: Mode, symbols: int, width: int, view: memoryview) -> int:
    if mode is Mode.SEED:
        return 8
    if mode is Mode.DENSE:
        return symbols * width
    if mode is Mode.SPARSE:
        if len(view) < HEADER_BYTES + 2:
            raise PacketError("the packet ends before its sparse coefficients")
        entries = int.from_bytes(view[HEADER_BYTES : HEADER_BYTES + 2], "little")
        if entries > symbols:
            raise PacketError(f"{entries} sparse coefficients for K = {symbols} symbols")
        return 2 + (2 + width) * entries
    return 2


def _parse_coefficients(
    mode: Mode, symbols: int, dtype: np.dtype[Any], data: memoryview
) -> tuple[int, NDArray[Any] | None]:
    """Return number and vector; ``data`` has exactly the length of the coefficients."""
    if mode is Mode.DENSE:
        return 0, np.frombuffer(data, dtype)
    if mode is not Mode.SPARSE:
        return int.from_bytes(data, "little"), None
    entries = np.frombuffer(data[2:], _sparse_entry(dtype)) if len(data) > 2 else np.zeros(0, _sparse_entry(dtype))
    places, values = entries["index"], entries["value"]
    # A vector has one sparse form, so that writing it again gives the same bytes. Of an index that came twice the last
    # value would win silently.
    if np.any(places[1:] <= places[:-1]) or (places.size and int(places[-1]) >= symbols) or not values.all():
        raise PacketError("sparse coefficients are not those of ascending symbols below K, none of them zero")
    vector = np.zeros(symbols, dtype)
    vector[places] = values
    return 0, vector


def _coefficient_bytes(packet: Packet) -> bytes:
    dtype = FIELDS[packet.field].dtype
    if packet.vector is None:
        return packet.number.to_bytes(8 if packet.mode is Mode.SEED else 2, "little")
    if packet.mode is Mode.DENSE:
        return packet.vector.astype(dtype, copy=False).tobytes()
    places = np.flatnonzero(packet.vector)
    entries = np.zeros(places.size, _sparse_entry(dtype))
    entries["index"], entries["value"] = places, packet.vector[places]
    return len(entries).to_bytes(2, "little") + entries.tobytes()


def _sparse_entry(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype([("index", "<u2"), ("value", dtype)])


def shorter_mode(vector: NDArray[Any]) -> Mode:
    """Return SPARSE when it takes fewer bytes than DENSE for this vector, else DENSE."""
    sparse = 2 + (2 + vector.dtype.itemsize) * int(np.count_nonzero(vector))
    return Mode.SPARSE if sparse < vector.nbytes else Mode.DENSE


def cauchy_rows(rows: Sequence[int] | NDArray[Any], symbols: int) -> NDArray[np.uint8]:
    """Return rows of the Cauchy matrix over GF(2^8): entry (i, j) is 1 / ((K + i) XOR j). Shape ``(len(rows), K)``.

    The points K+i and j are distinct for i < 256 - K, so every square submatrix is invertible: any K of the identity's
    rows and these decode.

    Raises
    ------
    ConfigError
        When a row is not in 0 .. 255 - K: the field has no more points.
    """
    numbers = np.asarray(rows, np.int64)
    if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) >= 256 - symbols):
        raise ConfigError(
            f"Cauchy rows {int(numbers.min())} to {int(numbers.max())} with K = {symbols}; GF(2^8) has rows 0 to "
            f"{255 - symbols}: symbols and rows together are at most 256"
        )
    points = (symbols + numbers)[:, None] ^ np.arange(symbols)[None, :]
    return GF256().reciprocal(points.astype(np.uint8))


def _cauchy_row(number: int, symbols: int, field_: int) -> NDArray[Any]:
    """Return one Cauchy row; over a prime field entry (i, j) is 1 / (K + i - j)."""
    if field_ == 0:
        return cauchy_rows([number], symbols)[0]
    order, dtype = FIELDS[field_]
    return np.array([pow(symbols + number - j, -1, order) for j in range(symbols)], dtype)


def _prime_coefficients(seed: int, symbols: int, order: int) -> NDArray[np.int64]:
    while True:
        row = SplitMix64(seed & MASK).below(order, symbols)
        # A row of zeros says nothing; the next seed takes its place, as for GF(2^8).
        if row.any():
            return row
        seed += 1
