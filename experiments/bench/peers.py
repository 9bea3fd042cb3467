"""Our codecs against those of other libraries: bytes, error and time on the same updates, in one run and one thread.

Updates are those of a client of a CNN, an LSTM and a transformer (:func:`captured`), and normal values as a control,
each as one vector. Peers are libraries, called as a user would, and encodings of other frameworks, written from their
descriptions:

- torch.topk with int64 positions, which is what GRACE sends (code read), and numpy's argpartition with int32, plain and
  through zstd or zlib, with sorted positions, which compress better.
- GRACE's dense form of quantised values: a whole byte for every coordinate, however few the levels, and one norm for
  the tensor or for each 128 values (code read). Here with our buckets, so that the error is that of our QSGD.
- hivemind's 8 bit: 256 equal levels over six standard deviations, or quantiles, with the mean of each level in a
  codebook (code read); and blocks of 4096 divided by their largest magnitude and rounded to the dynamic levels of
  bitsandbytes (Dettmers 2015; Dettmers et al. 2022; code read, the block's length recalled). hivemind sends those
  levels with each tensor; here they are known.
- float16.

Times are read passes, see :mod:`experiments.bench.readpass`. Encoding is from values to bytes, decoding from bytes to a
new dense vector. As in a client, which encodes once a round, a call finds the caches as another method has left them,
but for the vector: short calls take longer than they would in a loop.

Where errors differ, bytes are compared at the peer's error: a bit more a coordinate divides the squared error by four
(derived, for many levels). A claim about a peer that is not installed is not measured.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.codecs import EDEN, QSGD, Codec, TopK
from fedcomp.errors import why_missing
from fedcomp.experiments.bench.readpass import Vector, one_thread, read_pass
from fedcomp.kernels import select_topk, warm
from fedcomp.layout import Layout, Update
from fedcomp.measuring import Bound, Case, Found, Row, Times
from fedcomp.rng import Key

DENSITY: Final = 0.01
CONTROL: Final = "normal"
UPDATES: Final[Mapping[str, tuple[str, dict[str, Any], float]]] = {
    "CNN": ("mnist", {}, 0.05),
    "LSTM": ("tiny-shakespeare", {"speakers": 20, "hidden": 256}, 1.0),
    "transformer": (
        "tiny-shakespeare",
        {"speakers": 20, "model": "transformer", "hidden": 128, "layers": 4, "heads": 4},
        0.1,
    ),
}
"""Whose updates are sent, by name: a task, its options, and the step size."""
BLOCK: Final = 4096
BUCKET: Final = 512
RIVAL: Final = "as many bytes of int32 + float32"
"""The largest values in as many bytes as top-k with two bits takes."""

_LEVELS: Final = 256

Positions = NDArray[np.int64]


class Method(NamedTuple):
    """One way to send a vector: from float32 values of shape (n,) to bytes, from those bytes and n to such values, and
    the library without which it is not measured."""

    encode: Callable[[Vector], bytes]
    decode: Callable[[bytes, int], Vector]
    needs: str = ""


def ours(codec: Codec, *, dense: bool = False) -> Method:
    """Return a codec of this package; ``dense`` sends everything in the form of its dense rest."""

    def layout(n: int) -> Layout:
        return Layout.flat(n, density=1.0 if dense else None)

    def encode(values: Vector) -> bytes:
        return codec.encode(Update(values, layout(values.size)), {}, Key(0, "uplink", 1, 0))[0]

    return Method(encode, lambda data, n: codec.decode(data, layout(n)))


def by_torch(values: Vector, k: int) -> Positions:
    """Return the positions of the ``k`` largest magnitudes, in no order."""
    import torch

    found: Positions = torch.topk(torch.from_numpy(values).abs(), k, sorted=False).indices.numpy()
    return found


def by_numpy(values: Vector, k: int) -> Positions:
    """Return the positions of the ``k`` largest magnitudes, in no order."""
    return np.argpartition(np.abs(values), values.size - k)[values.size - k :]


def listed(select: Callable[[Vector, int], Positions], dtype: str, *, ordered: bool = False, needs: str = "") -> Method:
    """Return top-k as positions of ``dtype`` and then float32 values; ``ordered`` sorts the positions."""

    def encode(values: Vector) -> bytes:
        positions = select(values, params.count(DENSITY, values.size))
        if ordered:
            positions = np.sort(positions)
        return positions.astype(dtype).tobytes() + values[positions].tobytes()

    def decode(data: bytes, n: int) -> Vector:
        k = len(data) // (np.dtype(dtype).itemsize + 4)
        out = np.zeros(n, np.float32)
        out[np.frombuffer(data, dtype, k)] = np.frombuffer(data, np.float32, k, k * np.dtype(dtype).itemsize)
        return out

    return Method(encode, decode, needs)


def through(compress: Callable[[bytes], bytes], decompress: Callable[[bytes], bytes], needs: str = "") -> Method:
    """Return int32 positions in order and values, compressed."""
    inner = listed(by_numpy, "int32", ordered=True)
    return Method(
        lambda values: compress(inner.encode(values)), lambda data, n: inner.decode(decompress(data), n), needs
    )


def _zstandard(way: str) -> Callable[[bytes], bytes]:
    def call(data: bytes) -> bytes:
        import zstandard

        found: bytes = getattr(zstandard, way)(data)
        return found

    return call


def bytes_of_levels(levels: int) -> Method:
    """Return stochastic rounding to ``levels`` of each bucket's norm, int8 for every coordinate, then the norms."""

    def encode(values: Vector) -> bytes:
        rows = _in_rows(values, BUCKET)
        norms = np.linalg.norm(rows, axis=1).astype(np.float32)
        scale = levels / np.where(norms > 0, norms, 1)
        scaled = np.abs(rows) * scale[:, None]
        coded = np.floor(scaled + np.random.default_rng(0).random(scaled.shape, np.float32)) * np.sign(rows)
        return coded.astype(np.int8).ravel()[: values.size].tobytes() + norms.tobytes()

    def decode(data: bytes, n: int) -> Vector:
        coded = _in_rows(np.frombuffer(data, np.int8, n).astype(np.float32), BUCKET)
        coded *= (np.frombuffer(data, np.float32, offset=n) / np.float32(levels))[:, None]
        return coded.ravel()[:n]

    return Method(encode, decode)


def _uniform(values: Vector) -> NDArray[Any]:
    """Return which of 256 equal steps over six standard deviations around the mean each value falls on."""
    step = 6.0 * float(values.std(ddof=1)) / _LEVELS or 1.0
    return np.clip(np.rint((values - values.mean()) / step) + _LEVELS // 2, 0, _LEVELS - 1)


def _quantiles(values: Vector) -> NDArray[Any]:
    """Return which of 256 levels, with equally many values in each, each value falls on."""
    borders = np.quantile(values, np.linspace(0, 1, _LEVELS + 1))[1:-1]
    return np.searchsorted(borders.astype(np.float32), values)


def by_codebook(coder: Callable[[Vector], NDArray[Any]]) -> Method:
    """Return the means of what falls on each level, then a byte for each value."""

    def encode(values: Vector) -> bytes:
        coded = coder(values).astype(np.uint8)
        counts = np.maximum(np.bincount(coded, minlength=_LEVELS), 1)
        means = (np.bincount(coded, values, minlength=_LEVELS) / counts).astype(np.float32)
        return means.tobytes() + coded.tobytes()

    def decode(data: bytes, n: int) -> Vector:
        found: Vector = np.frombuffer(data, np.float32, _LEVELS)[np.frombuffer(data, np.uint8, n, 4 * _LEVELS)]
        return found

    return Method(encode, decode)


@functools.cache
def dynamic_levels() -> Vector:
    """Return the 256 levels in [-1, 1] of a sign, an exponent in unary, and the bits that are left for a fraction.

    Seven decades; the largest, from .1 to 1, has 64 levels, and each below half as many: the centres of equal steps.
    0 and 1 are levels of their own.
    """
    positive: list[float] = []
    for bits in range(7):
        edges = np.linspace(0.1, 1.0, 2**bits + 1)
        positive += list(10.0 ** (bits - 6) * (edges[:-1] + edges[1:]) / 2)
    return np.sort(np.array([*positive, *(-level for level in positive), 0.0, 1.0], np.float32))


def blockwise() -> Method:
    """Return the nearest dynamic level of each value over its block's largest magnitude, then those magnitudes."""
    levels = dynamic_levels()
    middles = (levels[:-1] + levels[1:]) / 2

    def encode(values: Vector) -> bytes:
        rows = _in_rows(values, BLOCK)
        largest = np.abs(rows).max(axis=1)
        coded = np.searchsorted(middles, rows / np.where(largest > 0, largest, 1)[:, None]).astype(np.uint8)
        return coded.ravel()[: values.size].tobytes() + largest.tobytes()

    def decode(data: bytes, n: int) -> Vector:
        rows = _in_rows(levels[np.frombuffer(data, np.uint8, n)], BLOCK)
        rows *= np.frombuffer(data, np.float32, offset=n)[:, None]
        return rows.ravel()[:n]

    return Method(encode, decode)


def _in_rows(values: NDArray[Any], width: int) -> NDArray[Any]:
    """Return a copy of ``values`` in rows of ``width``, zeros after the last."""
    rows = np.zeros((-(-values.size // width), width), values.dtype)
    rows.ravel()[: values.size] = values
    return rows


EXACT: Final = "our top-k 1 %"
TWO_BITS: Final = "our top-k 1 %, q2"
TORCH: Final = "torch.topk, int64"
NUMPY: Final = "argpartition, int32"
ZSTD: Final = "argpartition, int32, zstd"
ZLIB: Final = "argpartition, int32, zlib"
DENSE_127: Final = "int8 of 127 levels"
DENSE_7: Final = "int8 of 7 levels"
BLOCKS: Final = "8-bit blocks"
UNIFORM: Final = "8-bit uniform"
QUANTILES: Final = "8-bit quantiles"

METHODS: Final[Mapping[str, Method]] = {
    EXACT: ours(TopK(DENSITY)),
    TWO_BITS: ours(TopK(DENSITY, values="q2")),
    "our q8": ours(TopK(DENSITY, rest="q8"), dense=True),
    "our QSGD(127)": ours(QSGD(127, BUCKET)),
    "our QSGD(7)": ours(QSGD(7, BUCKET)),
    "our EDEN, 4 bits": ours(EDEN(4)),
    "our EDEN, 1 bit": ours(EDEN(1)),
    TORCH: listed(by_torch, "int64", needs="torch"),
    NUMPY: listed(by_numpy, "int32"),
    ZSTD: through(_zstandard("compress"), _zstandard("decompress"), "zstandard"),
    ZLIB: through(zlib.compress, zlib.decompress),
    DENSE_127: bytes_of_levels(127),
    DENSE_7: bytes_of_levels(7),
    BLOCKS: blockwise(),
    UNIFORM: by_codebook(_uniform),
    QUANTILES: by_codebook(_quantiles),
    "float16": Method(
        lambda values: values.astype(np.float16).tobytes(),
        lambda data, n: np.frombuffer(data, np.float16).astype(np.float32),
    ),
}
"""Ours first."""

SELECTIONS: Final[Mapping[str, tuple[Callable[[Vector, int], object], str]]] = {
    "select_topk": (select_topk, ""),
    "torch.topk": (by_torch, "torch"),
    "argpartition": (by_numpy, ""),
}
"""Selecting alone, and what it needs."""


NEVER_SLOWER: Final = "goal: never slower than what it replaces"
SAME_ERROR: Final = "goal: no more bytes at the same error"

LISTS: Final = (
    (TORCH, 0.45, "8.1 bits of entropy of uniform positions and 32, against 96 (derived), and a header"),
    (NUMPY, 0.65, "8.1 bits of entropy of uniform positions and 32, against 64 (derived), and a header"),
    (ZSTD, 0.75, "40.1 bits a value, against 57 through zstd (measured on uniform positions)"),
    (ZLIB, 1.0, "goal: never larger"),
)
"""Peers of exact top-k, which send the same values: the bound on our bytes over theirs, and its source."""

DENSE: Final = (
    ("our q8", BLOCKS, 1.0, SAME_ERROR),
    ("our q8", UNIFORM, 1.0, SAME_ERROR),
    ("our q8", QUANTILES, 1.0, SAME_ERROR),
    ("our EDEN, 4 bits", BLOCKS, 1.0, SAME_ERROR),
    ("our QSGD(127)", DENSE_127, 0.75, "5.5 bits of Student's t(4), Elias gamma codes, against 8 (measured)"),
    ("our QSGD(7)", DENSE_7, 0.25, "1.5 bits of Student's t(4), Elias gamma codes, against 8 (measured)"),
)
"""What sends every coordinate, and peers: the bound on our bytes over theirs at their error, and its source."""


def cases(quick: bool) -> Iterator[Case]:
    """Yield every update, sent and timed in every way.

    A row has the bytes, how many times fewer than those of float32, the squared error over that of sending nothing, and
    the times in read passes. Claimed is that top-k is never slower than the peers', takes fewer bytes than theirs for
    the same values, and that dense codecs take fewer bytes at the same error.
    """
    warm()
    for library in dict.fromkeys(method.needs for method in METHODS.values()):
        if library and (missing := why_missing(library)):
            yield Case(f"{missing}; what is compared with it is not measured")
    for name in (*UPDATES, CONTROL):
        data = ""
        if name == CONTROL:
            values = np.random.default_rng(0).standard_normal(20_000 if quick else 1_000_000, np.float32)
        elif missing := why_missing("torch"):
            yield Case(bounds=_bounds(name, missing))
            continue
        else:
            values, data = captured(name, quick=quick)
        text = f"{name}, {values.size:,} values{data and f': {data}'}"
        yield Case(text, partial(_measure, name, values, 2 if quick else 15), _bounds(name, ""))


def captured(name: str, seed: int = 0, *, quick: bool = False) -> tuple[Vector, str]:
    """Return what one client sends in the second round of a training, float32 of shape (n,), and which data it was
    trained on.

    It is trained when it is asked for, from keys, and stored nowhere. The client begins with the model that another one
    has trained, since the initial one gives larger updates than most rounds do.

    Parameters
    ----------
    name : str
        One of :data:`UPDATES`.
    seed : int
        Of the batches.
    quick : bool
        Train a smaller model, for two steps instead of an epoch of at most 50.
    """
    from torch.nn.utils import parameters_to_vector

    from fedcomp.tasks import get_task

    kind, options, rate = UPDATES[name]
    task = get_task(kind, **{**options, **({"hidden": 32} if quick and "hidden" in options else {})})
    model, held = task.model(0), []
    for client in (0, 1):
        key = Key(seed, "bench peers", 1 + client, client)
        task.train(model, task.client(client, 10), lr=rate, key=key, max_steps=2 if quick else 50)
        held.append(parameters_to_vector(model.parameters()).detach().numpy())
    return held[1] - held[0], task.data.note


def _measure(update: str, values: Vector, repetitions: int, found: Found) -> list[Row]:
    """Encode and decode ``values`` in every way, then time it all, interleaved."""
    k, n = params.count(DENSITY, values.size), values.size
    calls: dict[str, Callable[[], object]] = {
        name: partial(select, values, k) for name, (select, needs) in SELECTIONS.items() if not _missing(needs)
    }
    sent: dict[str, tuple[int, float]] = {}
    for name, method in METHODS.items():
        if not _missing(method.needs):
            data = method.encode(values)
            sent[name] = len(data), _error(values, method.decode(data, n))
            calls[f"{name}, encoding"] = partial(method.encode, values)
            calls[f"{name}, decoding"] = partial(method.decode, data, n)
    kept, largest = np.zeros_like(values), by_numpy(values, max(1, sent[TWO_BITS][0] // 8))
    kept[largest] = values[largest]
    with one_thread():
        times = found.times = Times(calls, repetitions, read_pass(values))
    rows: list[Row] = [
        {
            "update": update,
            "n": n,
            "method": name,
            "bytes": size,
            "times fewer": round(4 * n / size, 2),
            "error": float(f"{error:.5g}"),
            "encode, read passes": round(times.multiple(f"{name}, encoding"), 1),
            "decode, read passes": round(times.multiple(f"{name}, decoding"), 1),
        }
        for name, (size, error) in sent.items()
    ]
    return [*rows, {"update": update, RIVAL: _error(values, kept)}]


def _missing(library: str) -> str:
    return why_missing(library) if library else ""


def _error(values: Vector, decoded: Vector) -> float:
    wide = values.astype(np.float64)
    return float(np.sum((wide - decoded) ** 2) / np.sum(wide**2))


def at_error(found: Found, update: str, name: str, of: str) -> float:
    """Return the bytes of ``name`` over those of ``of``, with the bits more or fewer that make the errors equal."""
    mine, other = ({"update": update, "method": method} for method in (name, of))
    n = found.of("n", **mine)
    bits = 8 * found.of("bytes", **mine) / n + 0.5 * math.log2(found.of("error", **mine) / found.of("error", **other))
    return float(bits * n / 8 / found.of("bytes", **other))


def _bounds(update: str, missing: str) -> list[Bound]:
    def bound(text: str, value: Any, most: float, source: str, needs: str = "") -> Bound:
        return Bound(f"{update}: {text}", value, f"<= {most}", source, skipped=missing or _missing(needs))

    sent = {name: {"update": update, "method": name} for name in METHODS}
    bounds = [
        bound(f"selecting 1 %, time over {peer}", f"select_topk / {peer}", 1.0, NEVER_SLOWER, needs)
        for peer, (_, needs) in SELECTIONS.items()
        if peer != "select_topk"
    ]
    for peer, most, source in LISTS:
        needs, times = METHODS[peer].needs, f"{EXACT}, encoding / {peer}, encoding"
        bounds.append(bound(f"{EXACT} to bytes, time over {peer}", times, 1.0, NEVER_SLOWER, needs))
        bounds.append(bound(f"{EXACT}, bytes over {peer}", ("bytes", sent[EXACT], sent[peer]), most, source, needs))

    def over_rival(found: Found) -> float:
        return float(found.of("error", **sent[TWO_BITS]) / found.of(RIVAL, update=update))

    rough = "goal: rough values of many coordinates tell more"
    bounds.append(bound(f"{TWO_BITS}, error over {RIVAL}", over_rival, 1.0, rough))
    for name, peer, most, source in DENSE:
        text = f"{name}, bytes over {peer} at their error"
        bounds.append(bound(text, partial(at_error, update=update, name=name, of=peer), most, source))
    return bounds
