"""How long a frame is: section 5's bits and docs/formats/wire.md's overhead, added up by hand."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from naive_codecs import Part, largest, length_of_chunk, parts_of, wanted

from fedcomp.codecs import (
    DGC,
    FFT,
    LGC,
    QSGD,
    AdaComp,
    Chain,
    ChunkTop1,
    Codec,
    Dithering,
    Domain,
    FixedPoint,
    GradiVeQ,
    Identity,
    ModularSum,
    NaturalCompression,
    PowerSGD,
    RandomBlock,
    RandomK,
    Replay,
    ScaleCom,
    ScaledSign,
    SignSGD,
    TernGrad,
    TopK,
)
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.layout import Layout


class Section(NamedTuple):
    """One tensor: elements, values, bytes of index parameters, indices, value parameters and values."""

    n: int
    k: int
    index_params: int
    index: int
    value_params: int
    values: int
    dense: bool = False


def varint(number: int) -> int:
    return max(1, -(-number.bit_length() // 7))


def fields(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def frame_length(sections: list[Section], tlvs: int = 0) -> int:
    """Sixteen bytes of header, optional fields, an end mark, nine bytes and six numbers per tensor, padding, sections,
    checksum."""
    start = (
        17
        + tlvs
        + sum(
            9 + varint(s.n) + varint(s.k) + s.index_params + s.value_params + varint(s.index) + varint(s.values)
            for s in sections
        )
    )
    before, longest, at = 0, 1023, -1
    for s in sections:
        if s.dense and s.values > longest:
            longest, at = s.values, before + s.index
        before += s.index + s.values
    slack = -(start + at) % 8 if at >= 0 else 0
    return start + (2 + (slack - 2) % 8 if slack else 0) + before + 4


def rice(indices: np.ndarray, n: int) -> int:
    """Unary streams of g >> b and b low bits of every gap g, with the best b."""
    gaps = np.diff(indices, prepend=-1) - 1
    return min(fields(int((gaps >> b).sum()) + gaps.size, 1) + fields(gaps.size, b) for b in range(40))


def support_bytes(indices: np.ndarray, n: int, length: int) -> tuple[int, int]:
    """The least and the most that a list takes, parameters included, beside the one byte of Rice's parameter.

    The most is what Rice codes, a bitmap or packed offsets in bins of ``length`` take; the least is the entropy of all
    supports of this size, which a lucky support may undercut by a little, or the packed offsets.
    """
    k = indices.size
    absent = np.setdiff1d(np.arange(n), indices)
    most = min(rice(indices, n), fields(n, 1), 1 + rice(absent, n) if 2 * k > n else n)
    least = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    least_bytes = max(0, int(least / math.log(2) / 8) - 4)
    if length:
        w, which = (length - 1).bit_length(), indices // length
        bins = -(-n // length)
        one = k == bins == np.unique(which).size
        packed = fields(k, w) if one else fields(k + bins - np.unique(which).size, w + 1) + varint(bins)
        most, least_bytes = min(most, packed + varint(length)), min(least_bytes, packed)
    return least_bytes, most


def gamma(levels: np.ndarray) -> int:
    """Split Elias-gamma of the zigzag levels: the lengths in unary, then per length its low bits."""
    zigzag = np.where(levels >= 0, 2 * levels, -2 * levels - 1)
    lengths = np.array([int(z + 1).bit_length() - 1 for z in zigzag.tolist()])
    streams = fields(int(lengths.sum()) + lengths.size, 1)
    return streams + sum(fields(int((lengths == bits).sum()), bits) for bits in range(1, int(lengths.max()) + 1))


def coded(form: str, k: int) -> tuple[tuple[int, int], int]:
    """The least and the most bytes of k values of a form, and those of its parameters.

    Levels are written in whichever packing is shortest: a bit each at least, fields of their width at most.
    """
    if form in ("q8", "q4"):
        scales = 4 * -(-k // 256)
        return (scales + fields(k, 1), scales + fields(k, int(form[1]))), 4
    if form.startswith("range"):
        # The number of positive magnitudes takes a byte or two, the lowest magnitude two.
        return (fields(k, int(form[5:])), fields(k, int(form[5:])) + 1), 5
    exact = {"q2": 8 * (k > 0) + fields(k, 2), "sign": 4 * (k > 0) + fields(k, 1), "fp16": 2 * k, "bf16": 2 * k}
    return (exact.get(form, 4 * k),) * 2, int(form in ("q2", "sign"))


def values_of(codec: Any, part: Part, x: np.ndarray, y: np.ndarray, most: bool) -> Section:
    """A dense tensor, or a drawn one, exactly; ``x`` went in and ``y`` came out."""
    n = part.size
    match codec:
        case Identity():
            return Section(n, n, 0, 0, 0, 4 * n, True)
        case RandomBlock() | RandomK():
            density = codec.density if part.density is None else part.density
            k = max(1, int(density * n + 1e-9)) if isinstance(codec, RandomBlock) else wanted(codec, part)
            values, params = coded(codec.values, k)
            return Section(n, k, 9, 0, params, values[most])
        case ModularSum():
            bits = (codec.m - 1).bit_length()
            if part.density == 1.0:  # the dense rest
                return Section(n, n, 0, 0, varint(codec.m), 4 + fields(n, bits), True)
            k = values_of(codec.codec, part, x, y, most).k
            return Section(n, k, 9, 0, varint(codec.m), 4 + fields(k, bits))
        case FixedPoint():
            values = 6 + fields(n, (2 * codec.levels).bit_length())
            if part.density == 1.0:  # the dense rest
                return Section(n, n, 0, 0, 3, values, True)
            k = values_of(codec.codec, part, x, y, most).k
            return Section(n, k, 9, 0, 3, 6 + fields(k, (2 * codec.levels).bit_length()))
        case QSGD():
            norms = np.sqrt(np.add.reduceat(x.astype(np.float64) ** 2, range(0, n, codec.bucket)))
            spread = np.repeat(np.where(norms > 0, norms, 1), codec.bucket)[:n]
            levels = np.rint(y / spread * codec.levels).astype(int)
            packed = min(fields(n, (2 * codec.levels).bit_length()), gamma(levels))
            return Section(n, n, 0, 0, 1 + varint(codec.levels) + varint(codec.bucket), 4 * norms.size + packed, True)
        case SignSGD():
            return Section(n, n, 0, 0, 1, 4 + fields(n, 1), True)
        case Dithering():
            params = 1 + varint(codec.levels) + 1
            top = np.abs(x.astype(np.float64)).max(initial=0.0) or 1.0
            packed = min(fields(n, codec.bits + 1), gamma(np.rint(y / top * codec.levels).astype(int)))
            return Section(n, n, 0, 0, params, 4 + packed, True)
        case ScaledSign():
            scales = -(-n // codec.block) if codec.block else 1
            return Section(n, n, 0, 0, varint(codec.block), 4 * scales + fields(n, 1), True)
        case NaturalCompression():
            return Section(n, n, 0, 0, 0, fields(n, 9), True)
        case TernGrad():
            sent = np.flatnonzero(y)
            listed = rice(sent, n) + fields(sent.size, 1)
            if 2 * sent.size <= n and listed + 1 < -(-n // 5):
                return Section(n, n, 0, 0, 2 + varint(sent.size), 4 + listed, True)
            return Section(n, n, 0, 0, 1, 4 + -(-n // 5), True)
    raise TypeError(f"no size is written down for {codec!r}")


def inmost(codec: Codec) -> Any:
    """The codec that makes the frame."""
    while isinstance(codec, ErrorFeedback | Chain | DGC | Domain | FFT | GradiVeQ | LGC | PowerSGD | Replay | ScaleCom):
        codec = codec.codec
    return codec


def frame_bounds(codec: Codec, layout: Layout, x: np.ndarray, y: np.ndarray) -> tuple[int, int]:
    """The least and the most bytes of the frame that turned ``x`` into ``y``; equal unless a list of indices is in it
    whose form the wire chooses."""
    codec = inmost(codec)
    # Eight bytes that name the dithers.
    tlvs = 10 if isinstance(codec, ModularSum) else 0
    bounds: list[list[Section]] = [[], []]
    end = 0
    for part in parts_of(codec, layout):
        end = part.place.stop
        got = y[part.place]
        if isinstance(codec, RandomBlock | RandomK) or not (isinstance(codec, AdaComp) or hasattr(codec, "values")):
            for sections in bounds:
                sections.append(values_of(codec, part, x[part.place], got, sections is bounds[1]))
            continue
        # As raw float32 a negative zero travels, too; see TopK.
        indices = np.flatnonzero(got.view(np.int32) if isinstance(codec, TopK) else got)
        if isinstance(codec, TopK) and codec.values in ("q8", "q4", "range8", "range6"):
            # Those that are rounded to 0 travel, too.
            chosen = largest(x[part.place], wanted(codec, part))
            indices = chosen[x[part.place][chosen] != 0]
        k, n = indices.size, part.size
        length = length_of_chunk(codec, part) if isinstance(codec, ChunkTop1) else 0
        if isinstance(codec, AdaComp):
            length = min(n, codec.conv_bin if len(part.shape) >= 3 else codec.bin)
        values, value_params = coded("sign" if isinstance(codec, AdaComp) else codec.values, k)
        sizes = support_bytes(indices, n, length)
        named = getattr(codec, "index", "auto")
        if named == "bitmap":
            sizes, params = (fields(n, 1),) * 2, (0, 0)
        elif named == "rice":
            sizes, params = (rice(indices, n),) * 2, (1, 1)
        else:  # what Elias-Fano takes more than Rice is under a bit per index
            sizes, params = (sizes[0], sizes[1] + (fields(k, 1) + 2 if named == "elias-fano" else 0)), (0, 2)
        for sections, size, extra, value in zip(bounds, sizes, params, values, strict=True):
            sections.append(Section(n, k, extra, size, value_params, value))
    if rest := layout.size - end:
        for sections in bounds:
            form = getattr(codec, "rest", "auto")
            if form == "auto":
                form = "q8" if getattr(codec, "values", "float32").startswith(("q", "sign", "range")) else "float32"
            values, value_params = coded(form, rest)
            sections.append(Section(rest, rest, 0, 0, value_params, values[sections is bounds[1]], True))
    low, high = bounds
    # Padding may fall either way when a size in front of it is not known to the byte.
    slack = 0 if low == high else 8
    return frame_length(low, tlvs) - slack, frame_length(high, tlvs) + slack
