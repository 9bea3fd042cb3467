"""Codecs for innovations: a segment of a vector as a few bytes, without a frame.

The codecs are those of updates (:mod:`fedcomp.codecs`). Length and dtype of the stretch and the codec itself are known
to both ends, so that only a section travels (:class:`fedcomp.wire.Section`), whose end is known. What a receiver makes
of it is a :class:`Delta`, and it is what the sender adds to its own estimate, too. Values and scales travel as
float32 also for float64 states, unless told otherwise: what rounding leaves out stays in the innovation and goes with a
later message. What lies beyond the largest value of the wire's dtype is sent as that value; what rounds to zero is not
sent. A stretch of no elements has no bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs import Codec, PositionalCodec, Stretch, get_codec
from fedcomp.codecs.forms import narrowed
from fedcomp.errors import ConfigError
from fedcomp.gossip.base import Real
from fedcomp.gossip.errors import MessageError
from fedcomp.gossip.packet import all_finite, put_real, require_finite, take_real
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.wire import Section, WireError


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A decoded change of a vector of ``n`` elements.

    Attributes
    ----------
    n : int
    indices : ndarray of int64, shape (k,), or None
        Strictly ascending; None: ``values`` are those of ``[:values.size]``.
    values : ndarray, shape (k,), in the dtype of the estimate
    tail : ndarray, shape (m,), in the dtype of the estimate
        Change of the last m elements; none of ``indices`` lies there.
    """

    n: int
    indices: NDArray[np.int64] | None
    values: Real
    tail: Real

    def add_to(self, out: Real, scale: float = 1.0) -> None:
        """Add ``scale`` times the change to ``out`` (shape ``(n,)``, own dtype) in place.

        Both ends call this, so that both do the same arithmetic.
        """
        values, tail = self.values, self.tail
        # In the estimate's dtype: with a numpy float64 the sum would be float64 before it is rounded back.
        if scale != 1.0:
            values, tail = out.dtype.type(scale) * values, out.dtype.type(scale) * tail
        if self.indices is None:
            out[: values.size] += values
        else:  # distinct, so that fancy assignment is addition
            out[self.indices] += values
        if tail.size:
            out[self.n - tail.size :] += tail

    def dense(self) -> Real:
        """Return the change as a fresh vector of shape ``(n,)``."""
        out = np.zeros(self.n, self.values.dtype)
        self.add_to(out)
        return out


class _Form(NamedTuple):
    """The form of a codec for stretches of one length and dtype; ``section`` is None if it needs its frame."""

    layout: Layout
    stretch: Stretch
    section: Section | None


@dataclass(frozen=True)
class Compressor:
    """A codec, and how its bytes travel in a message. Equal when codec and scale are.

    Parameters
    ----------
    codec : Codec
        A function of the vector and the key alone: :func:`get_compressor` refuses others.
    scale : float
        What vectors are divided by before they are encoded, and multiplied by after they were decoded; both ends know
        it (Dyna-COLD).

    Examples
    --------
    >>> import numpy as np
    >>> from fedcomp.gossip.compressor import get_compressor
    >>> from fedcomp.rng import Key
    >>> c = get_compressor({"id": "topk", "density": 0.25})
    >>> data = c.encode(np.array([0.0, 3.0, 1.0, 0.5]), 3, Key(0))  # the last element travels whole
    >>> c.decode(memoryview(data), 4, 3, "float64", Key(0)).dense()
    array([0. , 3. , 0. , 0.5])
    """

    codec: Codec
    scale: float = 1.0
    # A cache that ``scaled`` copies share: no form depends on the scale, and Dyna-COLD makes a copy per message.
    _forms: dict[tuple[int, str], _Form] = field(default_factory=dict, repr=False, compare=False)

    def scaled(self, scale: float) -> Compressor:
        """Return the same codec for vectors of about the size ``scale``."""
        return replace(self, scale=scale)

    def encode(self, v: Real, split: int, key: Key) -> bytes:
        """Return ``v[:split]`` compressed, then ``v[split:]`` in its own dtype; v is float32 or float64.

        ``key`` names iteration, sender and stream, under the run's seed: where random codecs draw from.

        Raises
        ------
        NonFiniteUpdate
        """
        return self.compress(v, split, key)[0]

    def compress(self, v: Real, split: int, key: Key) -> tuple[bytes, Delta]:
        """Return what :meth:`encode` does, and the change that :meth:`decode` makes of it, bit for bit.

        The sender needs both. Where the codec knows what it wrote, its own bytes are not read again: of a compressed
        message that is a quarter of the work.
        """
        data, indices, values = self._encode(v[:split], key)
        # As decode does it, rounding included: the sender's estimate must get the values that the receivers get.
        if self.scale != 1.0:
            values = _within(values, self.scale)
        tail = v[split:]
        return (data + put_real(tail) if tail.size else data), Delta(v.size, indices, values, tail)

    def decode(self, data: memoryview, n: int, split: int, dtype: Any, key: Key) -> Delta:
        """Return the change of a vector of ``n`` elements that exactly ``data`` describes, in ``dtype``.

        ``key`` is the sender's but for the seed, which a receiver need not know: the rest is in envelope and header.

        Raises
        ------
        MessageError
            For every byte string that :meth:`encode` could not have written.
        """
        dtype = np.dtype(dtype)
        # The tail's length is known to both ends, so the section in front of it needs no length of its own.
        end = len(data) - (n - split) * dtype.itemsize
        if end < 0:
            raise MessageError(f"{n - split} uncompressed values do not fit into {len(data)} bytes")
        tail = take_real(data[end:], n - split, dtype)
        indices, values = self._decode(data[:end], split, dtype, key)
        if self.scale != 1.0:
            values = _within(values, self.scale)
        return Delta(n, indices, values, tail)

    def most(self, n: int, split: int, dtype: Any) -> int:
        """Return the bytes of the longest section of ``n`` elements: what a receiver is ready to read."""
        dtype = np.dtype(dtype)
        tail = (n - split) * dtype.itemsize
        if not split:
            return tail
        form = self._form(split, dtype)
        return tail + (self.codec.limits(form.layout).max_bytes_in if form.section is None else form.section.most_bytes)

    def contraction(self, n: int) -> float | None:
        """Return δ with ``E‖v - C(v)‖² <= (1 - δ)‖v‖²`` for all v of ``n`` elements (over the key), None without.

        Excepted are vectors whose values leave the wire's dtype: above 3.4e38, or below 1.2e-38, in float32, to which
        a normal number of a float64 vector is rounded by at most 2⁻²⁴ of it.
        """
        kept = self.codec.contraction(Layout.flat(n)) if n else None
        exact = isinstance(self.codec, PositionalCodec) and self.codec.wire_dtype("float64") == "float64"
        # Rounding to float32 costs at most (2**-24)**2 of the squared norm of what is kept.
        return kept if kept is None or exact else kept * (1.0 - 2.0**-48)

    def to_config(self) -> dict[str, Any]:
        """Return ``{"id": id, **parameters}``, JSON-able, what :func:`get_compressor` takes."""
        return self.codec.to_config()

    def _form(self, n: int, dtype: np.dtype[Any]) -> _Form:
        form = self._forms.get((n, dtype.char))  # a dtype takes long to say its name
        if form is None:
            layout = Layout.flat(n)
            stretch, section = Stretch(0, "the innovation", 0, n), None
            parts = self.codec.stretches(layout) if isinstance(self.codec, PositionalCodec) else ()
            # Several tensors for parts of the innovation need a frame.
            if isinstance(self.codec, PositionalCodec) and len(parts) == 1:
                (stretch,) = parts
                section = self.codec.section(stretch, dtype.name)
            form = self._forms[n, dtype.char] = _Form(layout, stretch, section)
        return form

    def _encode(self, v: Real, key: Key) -> tuple[bytes, NDArray[np.int64] | None, Real]:
        """Return the bytes of a stretch, and the indices and values (before scaling) that a reader gets."""
        require_finite(v)
        if not v.size:
            return b"", None, v
        if self.scale != 1.0:
            v = _within(v, self.scale, np.divide)
        layout, stretch, section = self._form(v.size, v.dtype)
        codec = self.codec
        # A codec in a frame of its own does not say what a reader gets: its bytes are read back.
        if section is None or not isinstance(codec, PositionalCodec):
            # An empty state is right for all: get_compressor refuses codecs that keep one.
            data = bytes(codec.encode(Update(narrowed(v), layout), {}, key)[0])
            return data, *self._decode(memoryview(data), v.size, v.dtype, key)
        # A support that is drawn and not sent must come from numbers that the receiver has.
        if section.index == "known":
            key = _public(key)
        tensor = codec.pack(v if codec.wide else narrowed(v), stretch, key)
        known = section.index == "known"
        data = section.write(tensor.values, None if known else tensor.indices)
        indices = codec.positions(stretch, key) if known else tensor.indices
        # Decoded from what was written, rounded and quantised: the receivers' values without reading the bytes.
        return data, indices, tensor.values.decode().astype(v.dtype, copy=False)

    def _decode(
        self, data: memoryview, n: int, dtype: np.dtype[Any], key: Key
    ) -> tuple[NDArray[np.int64] | None, Real]:
        if not n:
            return None, take_real(data, 0, dtype)
        layout, stretch, section = self._form(n, dtype)
        codec = self.codec
        try:
            if section is None or not isinstance(codec, PositionalCodec):
                vector = codec.decode(bytes(data), layout)
                # A frame of a peer may decode to anything, and a NaN in a copy stays there for good.
                if not all_finite(vector):
                    raise MessageError(f"a frame of {codec!r} decodes to NaN or infinity")
                return None, vector.astype(dtype)
            known = codec.positions(stretch, _public(key))
            tensor = section.read(data, known)
            if known is None:
                codec.check(tensor, stretch)
        except WireError as error:
            raise MessageError(f"not a section of {codec!r} for {n} elements: {error}") from error
        return tensor.indices, tensor.values.decode().astype(dtype)


def _within(values: Real, scale: float, operation: np.ufunc = np.multiply) -> Real:
    """Return values times a scale, or divided by it, in their dtype; what is too large becomes the largest number."""
    largest = np.finfo(values.dtype).max
    with np.errstate(over="ignore"):
        scaled = operation(values, values.dtype.type(scale))
    return np.clip(scaled, -largest, largest, out=scaled)


def _public(key: Key) -> Key:
    """Return the key from which a support is drawn. It lacks the run's seed, which a node may not know yet when a
    message arrives."""
    return replace(key, seed=0)


def get_compressor(config: Mapping[str, Any] | Codec | Compressor) -> Compressor:
    """Return the compressor of a codec or its configuration, ``{"id": ..., **parameters}``; a compressor itself.

    Raises
    ------
    ConfigError
        For an unknown codec or parameter, a value the codec refuses, and for a codec that remembers what was not sent
        (the innovation already does), adapts, votes, or needs a second exchange.
    """
    if isinstance(config, Compressor):
        return config
    codec = get_codec(config)
    # ``init`` returns something only for a codec with a state; any layout shows it.
    if codec.remembers or codec.votes or codec.phases > 1 or codec.init(Layout.flat(64)):
        raise ConfigError(
            f"{codec!r} cannot compress innovations: it keeps a state, votes, or needs {codec.phases} exchanges; "
            "expected a codec that is a function of the vector alone, without error feedback around it"
        )
    return Compressor(codec)
