"""Compressors of innovations: one stretch of a vector as a few bytes, without a frame.

The bytes of a compressor are a *section* whose end the reader knows; the length of the stretch, the dtype of the
estimate and the compressor itself are known to both ends. What a receiver reconstructs is a :class:`Delta`, and it is
what the sender adds to its own estimate, too. Values and scales travel as float32 also for float64 states, unless told
otherwise: what rounding leaves out stays in the innovation and goes with a later letter. What lies beyond the largest
value of the wire's dtype is sent as that value; what rounds to zero is not sent. A stretch of no elements has no bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs import Codec, get_codec, params
from fedcomp.errors import ConfigError, nearest
from fedcomp.gossip import sparse
from fedcomp.gossip.base import Real
from fedcomp.gossip.delta import Compressor, Delta, everything, narrow, nothing, widen
from fedcomp.gossip.errors import LetterError
from fedcomp.gossip.packet import all_finite, put_real, require_finite, take_real
from fedcomp.gossip.quantisers import Dithered, NormSign, ScaledSign, SignHalf
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.wire import WireError
from fedcomp.wire.support import seeded_support

__all__ = [
    "Compressor",
    "Delta",
    "Dithered",
    "FromCodec",
    "Identity",
    "NormSign",
    "RandomK",
    "ScaledSign",
    "SignHalf",
    "TopK",
    "decode_parts",
    "encode_parts",
    "get_compressor",
    "most_parts",
]

_WORD: Final = (1 << 64) - 1
_WIRE: Final[dict[str, np.dtype[Any]]] = {
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}


@dataclass(frozen=True)
class Identity(Compressor):
    """Everything, in the state's own dtype: nothing is lost (contraction 1).

    An estimate is then the vector itself up to the rounding of ``ẑ + (z - ẑ)``.
    """

    id: ClassVar[str] = "identity"

    def encode(self, v: Real, key: Key) -> bytes:
        return put_real(v)

    def decode(self, data: memoryview, n: int, dtype: Any, key: Key) -> Delta:
        return everything(take_real(data, n, dtype))

    def most(self, n: int, dtype: Any) -> int:
        return n * np.dtype(dtype).itemsize

    def contraction(self, n: int) -> float:
        return 1.0


@dataclass(frozen=True)
class _Counted(Compressor):
    """What :class:`TopK` and :class:`RandomK` share: how many values travel, and as what."""

    fraction: float | None = None
    k: int | None = None
    values: str = "float32"

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.k is None):
            raise ConfigError(f"give fraction or k, not both or neither: fraction={self.fraction!r}, k={self.k!r}")
        if self.fraction is not None:
            params.assign(self, fraction=params.density(self.fraction))
        else:
            params.assign(self, k=params.integer("k", self.k, low=0))
        params.assign(self, values=params.choice("values", self.values, _WIRE))

    def count(self, n: int) -> int:
        """Return k for a stretch of ``n`` elements: ``ceil(fraction n)`` and at least 1, or the given k, at most n."""
        if self.fraction is not None:
            return params.count(self.fraction, n) if n else 0
        assert self.k is not None
        return min(self.k, n)

    def contraction(self, n: int) -> float | None:
        """Return k/n (in expectation for a random support); a little less for the rounding of float16 and float32.

        float32 rounds a normal number by at most 2⁻²⁴ of it. float16 has no bound: it loses small numbers altogether.
        """
        if self.values == "float16" or not n:
            return None
        kept = self.count(n) / n
        return kept if self.values == "float64" else kept * (1.0 - 2.0**-48)

    def _wire(self, dtype: Any) -> np.dtype[Any]:
        """Return the dtype of values on the wire: never wider than the state's."""
        return min(_WIRE[self.values], np.dtype(dtype), key=lambda d: d.itemsize).newbyteorder("<")


@dataclass(frozen=True)
class TopK(_Counted):
    """The k coordinates of largest magnitude, exactly; of equal magnitudes those of lowest index.

    They are ranked in the state's own dtype, before anything is rounded. Coordinates that are zero on the wire do not
    travel: fewer than k values, or none, is a letter like any other.

    Parameters
    ----------
    fraction : float
        k = ceil(fraction n), at least 1; in (0, 1].
    k : int
        Instead of a fraction.
    values : {"float32", "float16", "float64"}
        How values travel; never wider than the state's. With float32 innovations below 7e-46 are never sent, with
        float16 those below 3e-8, which is where convergence then ends.
    index : {"auto", "packed", "bitmap", "rice"}
        See :mod:`fedcomp.gossip.sparse`. "packed" is fields of ceil(log2 n) bits, a bitmap where that is shorter, and
        nothing else; "auto" is the shortest with a byte that says which.
    """

    id: ClassVar[str] = "topk"

    index: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        params.assign(self, index=params.choice("index", self.index, sparse.LAYOUTS))

    def encode(self, v: Real, key: Key) -> bytes:
        require_finite(v)
        indices = sparse.largest(v, self.count(v.size))
        values = narrow(v[indices], self._wire(v.dtype))
        travels = values != 0.0
        if not travels.all():
            indices, values = indices[travels], values[travels]
        return sparse.write(indices, values, v.size, self.index)

    def decode(self, data: memoryview, n: int, dtype: Any, key: Key) -> Delta:
        indices, values = sparse.read(data, n, self.count(n), self._wire(dtype), self.index)
        return Delta(n, indices, widen(values, dtype), nothing(dtype))

    def most(self, n: int, dtype: Any) -> int:
        return sparse.most_bytes(n, self.count(n), self._wire(dtype).itemsize)


@dataclass(frozen=True)
class RandomK(_Counted):
    """k coordinates drawn uniformly, unscaled; both ends draw them, so that no index travels.

    They are drawn from iteration, sender and stream (envelope and header) and from ``seed``, not from the run's seed,
    which a node may not have been told yet when a letter comes. Unscaled it is a contraction (k/n, exactly, in
    expectation), which methods with estimates need; scaled by n/k it would be unbiased and, measured, diverges under
    LEAD. Always exactly k values travel, zeros included.

    Parameters
    ----------
    fraction, k, values
        As :class:`TopK`.
    seed : int
        Below 2**64, for other supports in another run.
    """

    id: ClassVar[str] = "randomk"

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        params.assign(self, seed=params.integer("seed", self.seed, low=0, high=_WORD))

    def encode(self, v: Real, key: Key) -> bytes:
        require_finite(v)
        return narrow(v[self._support(v.size, key)], self._wire(v.dtype)).tobytes()

    def decode(self, data: memoryview, n: int, dtype: Any, key: Key) -> Delta:
        values = take_real(data, self.count(n), self._wire(dtype))
        return Delta(n, self._support(n, key), values.astype(dtype), nothing(dtype))

    def most(self, n: int, dtype: Any) -> int:
        return self.count(n) * self._wire(dtype).itemsize

    def _support(self, n: int, key: Key) -> NDArray[np.int64]:
        drawn = Key(self.seed, key.purpose, key.round, key.partition, key.layer)
        return seeded_support(drawn.u64(), n, self.count(n))


@dataclass(frozen=True)
class FromCodec(Compressor):
    """Any codec of :mod:`fedcomp.codecs` without a memory of its own, in its frame; float32 on the wire.

    A frame is self-describing and longer than the sections of this module by 40 bytes and more.

    Parameters
    ----------
    codec : mapping
        ``{"id": ..., **parameters}``.

    Raises
    ------
    ConfigError
        For a codec that remembers what was not sent (the innovation already does), adapts, votes, or needs a second
        exchange.
    """

    id: ClassVar[str] = "codec"

    codec: Mapping[str, Any]

    def __post_init__(self) -> None:
        inner = get_codec(self.codec)
        if inner.remembers or inner.votes or inner.phases > 1 or inner.init(Layout.flat(64)):
            raise ConfigError(
                f"{inner!r} cannot compress innovations: it keeps a state, votes, or needs {inner.phases} exchanges; "
                "expected a codec that is a function of the vector alone, without error feedback around it"
            )
        params.assign(self, codec=inner.to_config())

    def __hash__(self) -> int:
        return hash(self._inner)

    @cached_property
    def _inner(self) -> Codec:
        return get_codec(self.codec)

    def encode(self, v: Real, key: Key) -> bytes:
        require_finite(v)
        if not v.size:
            return b""
        update = Update(narrow(v, _WIRE["float32"]), Layout.flat(v.size))
        return bytes(self._inner.encode(update, {}, key)[0])

    def decode(self, data: memoryview, n: int, dtype: Any, key: Key) -> Delta:
        if not n:
            return everything(take_real(data, 0, dtype))
        layout = Layout.flat(n)
        try:
            vector = self._inner.decode(bytes(data), layout)
        except WireError as error:
            raise LetterError(f"a frame in a letter is no frame of {self._inner!r}: {error}") from error
        if not all_finite(vector):
            raise LetterError(f"a frame of {self._inner!r} in a letter decodes to NaN or infinity")
        return everything(vector.astype(dtype))

    def most(self, n: int, dtype: Any) -> int:
        return self._inner.limits(Layout.flat(n)).max_bytes_in if n else 0

    def contraction(self, n: int) -> float | None:
        return self._inner.contraction(Layout.flat(n)) if n else None


_KNOWN: Final[Mapping[str, type[Compressor]]] = {
    cls.id: cls for cls in (Identity, TopK, RandomK, ScaledSign, NormSign, SignHalf, Dithered, FromCodec)
}


def get_compressor(config: Mapping[str, Any] | Compressor) -> Compressor:
    """Return the compressor of ``{"id": ..., **parameters}``; a compressor returns itself.

    Ids: "identity", "topk" (fraction | k, values, index), "randomk" (fraction | k, values, seed), "scaled-sign",
    "norm-sign", "dithered" (bits), "sign-half" (scale), "codec" (codec).

    Raises
    ------
    ConfigError
        For an unknown id or parameter, or a value the compressor refuses.
    """
    if isinstance(config, Compressor):
        return config
    options = dict(config) if isinstance(config, Mapping) else {}
    name = options.pop("id", None)
    if not isinstance(name, str) or name not in _KNOWN:
        raise ConfigError(f"no compressor {params.shown(config)}{nearest(str(name)[:64], _KNOWN)}")
    known = inspect.signature(_KNOWN[name]).parameters
    for key in options:
        if key not in known:
            raise ConfigError(f"compressor {name!r} has no parameter {key!r}{nearest(str(key)[:64], known)}")
    try:
        return _KNOWN[name](**options)
    except TypeError as error:
        raise ConfigError(f"compressor {name!r} refused its parameters {sorted(map(str, options))}: {error}") from error


def encode_parts(compressor: Compressor, v: Real, split: int, key: Key) -> bytes:
    """Return the section of a whole vector: ``compressor`` on ``v[:split]``, then ``v[split:]`` in its own dtype."""
    head = compressor.encode(v[:split], key)
    return head + put_real(v[split:]) if split < v.size else head


def decode_parts(compressor: Compressor, data: memoryview, n: int, split: int, dtype: Any, key: Key) -> Delta:
    """Undo :func:`encode_parts` for a vector of ``n`` elements; refuses trailing bytes. Both ends use the result.

    Raises
    ------
    LetterError
    """
    if split == n:
        return compressor.decode(data, n, dtype, key)
    end = len(data) - (n - split) * np.dtype(dtype).itemsize
    if end < 0:
        raise LetterError(f"{n - split} values that travel whole do not fit into {len(data)} bytes")
    tail = take_real(data[end:], n - split, dtype)
    head = compressor.decode(data[:end], split, dtype, key)
    return Delta(n, head.indices, head.values, tail)


def most_parts(compressor: Compressor, n: int, split: int, dtype: Any) -> int:
    """Return the bytes of the longest section :func:`encode_parts` writes for ``n`` elements."""
    return compressor.most(split, dtype) + (n - split) * np.dtype(dtype).itemsize
