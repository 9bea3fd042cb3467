"""What every codec says it delivers and how long it says its frames are, written down once more, naively.

Nothing here uses a codec's own code, a kernel or the wire's encoders: selection is a full sort, sums are ``math.fsum``,
formats are arithmetic, seeded supports follow the prose of docs/formats/wire.md. Randomness is the key's, drawn as
documented. Clipping, which is no codec, is the package's own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from fedcomp.codecs import (
    DGC,
    LGC,
    QSGD,
    STC,
    AdaComp,
    Chain,
    ChunkTop1,
    ChunkTopK,
    Clip,
    Codec,
    Dithering,
    FixedPoint,
    GradiVeQ,
    Identity,
    KeyRegion,
    ModularSum,
    NaturalCompression,
    NormSign,
    RandomBlock,
    RandomK,
    ScaleCom,
    ScaledSign,
    SIDCo,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
)
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

F32 = np.float32


class Part(NamedTuple):
    """A tensor of the frame: its place in the vector, its number, its shape and the density its layout asks for."""

    index: int
    place: slice
    shape: tuple[int, ...]
    density: float | None

    @property
    def size(self) -> int:
        return self.place.stop - self.place.start


def parts_of(codec: Codec, layout: Layout) -> list[Part]:
    """The vector's parts: everything, everything compressible, or every compressible tensor."""
    if isinstance(codec, Identity):
        return [Part(0, slice(0, layout.size), (layout.size,), None)] if layout.size else []
    if isinstance(codec, FixedPoint):
        parts = parts_of(codec.codec, layout)
        end = parts[-1].place.stop if parts else 0
        rest = Part(len(parts), slice(end, layout.size), (layout.size - end,), 1.0)
        return [*parts, rest] if rest.size else parts
    tensors = [t for t in layout.tensors if t.density != 1.0]
    if getattr(codec, "scope", "global") == "layer":
        return [Part(i, t.slice, t.shape, t.density) for i, t in enumerate(tensors)]
    n = sum(t.size for t in tensors)
    return [Part(0, slice(0, n), (n,), None)] if n else []


def meant(density: float) -> Fraction:
    """The density as it is written: 0.07 and not the binary number beside it."""
    return Fraction(repr(density))


def wanted(codec: Any, part: Part, key: Key | None = None) -> int:
    """k = max(1, ceil(d n)), with the warm-up's density if there is one."""
    density = codec.density if part.density is None else part.density
    for start, other in getattr(codec, "schedule", ()):
        if part.density is None and key is not None and max(1, key.round) >= start:
            density = other
    w = getattr(codec, "warmup", 0)
    if key is not None and w and key.round <= w:
        return min(part.size, math.ceil(part.size * max(density, density ** (max(1, key.round) / (w + 1)))))
    return min(part.size, max(1, math.ceil(meant(density) * part.size)))


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """Indices of the first k in the order (magnitude falling, index rising), ascending: a full sort."""
    return np.sort(np.argsort(-np.abs(x.astype(np.float64)), kind="stable")[:k])


def as_values(x: np.ndarray, values: str) -> np.ndarray:
    """What arrives of ``x`` in a value format: 11 or 8 significant bits, halves to even."""
    if values == "fp16":
        return np.clip(x, F32(-65504), F32(65504)).astype(np.float16).astype(F32)
    if values == "bf16":
        mantissa, exponent = np.frexp(x.astype(np.float64))
        return np.ldexp(np.rint(mantissa * 256.0) / 256.0, exponent).astype(F32)
    if values in ("q8", "q4"):
        return on_levels(x, 127 if values == "q8" else 7)
    if values.startswith("range"):
        return on_range(x, int(values[5:]))
    if values == "q2":
        return on_two_magnitudes(x)
    if values == "sign":
        return np.sign(x) * mean_magnitude(x)
    return x


def on_levels(x: np.ndarray, levels: int) -> np.ndarray:
    """The nearest of so many levels of the largest magnitude of every 256 values."""
    out = np.zeros_like(x)
    for a in range(0, x.size, 256):
        top = float(np.abs(x[a : a + 256]).max())
        if top:
            out[a : a + 256] = [F32(round(v / top * levels) * top / levels) for v in x[a : a + 256].tolist()]
    return out


def on_range(x: np.ndarray, bits: int) -> np.ndarray:
    """The nearest of the numbers that a range of so many codes has, with the mantissa that loses least."""

    def number(cut: int, m: int) -> float:
        return float(struct.unpack("<f", struct.pack("<I", cut << (23 - m)))[0])

    tried = []
    for m in range(max(0, bits - 5), bits - 1):

        def cut(v: float, m: int = m) -> int:
            word = struct.unpack("<I", struct.pack("<f", v))[0]
            return min(int(word / 2 ** (23 - m) + 0.5), (255 << m) - 1)

        sides = [cut(max([0.0, *(s * x).tolist()])) for s in (1, -1)]
        total = 2**bits - 1
        lowest = max(math.ceil((sum(sides) + 2 - total) / 2), max(sides) + 1 - total, 1)
        grids = [[0.0, *(number(q, m) for q in range(lowest, side + 1))] for side in sides]
        # Of two that are equally near the larger.
        got = [math.copysign(min(reversed(grids[v < 0]), key=lambda g: abs(g - abs(v))), v) for v in x.tolist()]
        tried.append((math.fsum((a - b) ** 2 for a, b in zip(got, x.tolist(), strict=True)), m, got))
    return np.array(min(tried)[2], F32) + F32(0.0)


def on_two_magnitudes(x: np.ndarray) -> np.ndarray:
    """Every cut of the sorted magnitudes tried by itself; the one with the smallest error, the first of equals."""
    sizes = np.sort(np.abs(x.astype(np.float64)))
    if not x.size:
        return x
    groups = [(sizes[:cut], sizes[cut:]) for cut in range(1, x.size + 1)]
    kept = [sum(math.fsum(g.tolist()) ** 2 / g.size for g in pair if g.size) for pair in groups]
    low, high = groups[int(np.argmax(np.array(kept) >= max(kept) * (1 - 1e-14)))]
    means = [math.fsum(low.tolist()) / low.size, math.fsum(high.tolist()) / high.size if high.size else 0.0]
    means[1] = means[1] or means[0]
    return np.array([math.copysign(F32(means[2 * abs(v) > means[0] + means[1]]), v) for v in x.tolist()], F32)


def only(x: np.ndarray, indices: np.ndarray, values: str = "float32") -> np.ndarray:
    """``x`` on ``indices`` in a value format, +0.0 elsewhere and where it rounds to zero."""
    out = np.zeros_like(x)
    if values.startswith("float"):
        out[indices] = x[indices]
        return out
    indices = indices[x[indices] != 0]
    out[indices] = as_values(x[indices], values)
    return out + F32(0.0)


def halved(memory: np.ndarray) -> np.ndarray:
    """Round to the nearest float16 once the largest magnitude is between 2**14 and 2**15; value by value."""
    largest = max((abs(float(v)) for v in memory), default=0.0)
    unit = 2.0 ** max(-100, math.floor(math.log2(largest)) - 14) if largest else 1.0
    return F32([struct.unpack("<e", struct.pack("<e", float(v) / unit))[0] * unit for v in memory])


def rest_of(codec: Codec, x: np.ndarray) -> np.ndarray:
    """What arrives of the dense rest."""
    low = getattr(codec, "values", "float32") in ("q8", "q4", "q2", "sign", "range8", "range6")
    rest = getattr(codec, "rest", "auto")
    return as_values(x, ("q8" if low else "float32") if rest == "auto" else rest)


def mean_magnitude(x: np.ndarray) -> np.float32:
    return F32(math.fsum(np.abs(x).tolist()) / x.size) if x.size else F32(0.0)


def deviation(x: np.ndarray) -> float:
    mean = math.fsum(x.tolist()) / x.size
    return math.sqrt(math.fsum((x - mean) ** 2 for x in x.astype(np.float64).tolist()) / x.size)


def splitmix(seed: int, n: int) -> Iterator[int]:
    """The candidates below n of docs/formats/wire.md's stream."""
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    state = mix(seed)
    width = (n - 1).bit_length()
    while True:
        state = state + 0x9E3779B97F4A7C15 & mask
        candidate = mix(state) >> 64 - width if width else 0
        if candidate < n:
            yield candidate


def drawn(codec: RandomK, part: Part, key: Key) -> np.ndarray:
    """The support of random-k or of a random block for a client's key."""
    density = codec.density if part.density is None else part.density
    seed = key.at(layer=part.index, partition=0 if codec.shared else None).u64()
    stream = splitmix(seed, part.size)
    if isinstance(codec, RandomBlock):
        b = max(1, math.floor(meant(density) * part.size))
        start = next(stream) if b < part.size else 0
        return np.sort((start + np.arange(b)) % part.size)
    k = wanted(codec, part)
    chosen: set[int] = set()
    while len(chosen) < min(k, part.size - k):
        chosen.add(next(stream))
    drawn_ = np.array(sorted(chosen), np.int64)
    return drawn_ if 2 * k <= part.size else np.setdiff1d(np.arange(part.size), drawn_)


def randomk(codec: RandomK, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    indices = drawn(codec, part, key)
    out = np.zeros_like(x)
    out[indices] = as_values(x[indices], codec.values)
    return out * F32(x.size / indices.size) if codec.unbiased else out


def fixedpoint(codec: FixedPoint, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    """Of the inner codec's coordinates, the dense rest being one more part; floor(x / step + u) steps, cut before."""
    indices = drawn(codec.codec, part, key)
    draws = key.at(purpose=key.purpose + "/fixedpoint", layer=part.index).uniform(indices.size)
    step = float(F32(codec.clip / codec.levels))
    out = np.zeros(x.size, F32)
    for i, u in zip(indices.tolist(), draws.tolist(), strict=True):
        inside = min(max(float(x[i]) / step, -codec.levels), codec.levels)
        out[i] = F32(math.floor(inside + u)) * F32(step)
    return out + F32(0)


def modular(codec: ModularSum, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    """The same integers by another stream, and the draws, less a half, taken off again."""
    indices = drawn(codec.codec, part, key)
    name = key.at(purpose=key.purpose + "/fixedpoint").u64()
    step = float(F32(codec.clip / codec.levels))
    out = np.zeros(x.size, F32)
    draws = Key(name, "dither", layer=part.index).uniform(indices.size)
    for i, u in zip(indices.tolist(), draws.tolist(), strict=True):
        inside = min(max(float(x[i]) / step, -codec.levels), codec.levels)
        out[i] = F32((min(math.floor(inside + u), codec.levels) - (u - 0.5)) * step)
    return out


def qsgd(codec: QSGD, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    draws = key.at(layer=part.index).uniform(x.size)
    out = np.zeros(x.size, F32)
    for a in range(0, x.size, codec.bucket):
        bucket = x[a : a + codec.bucket].astype(np.float64)
        exact = math.sqrt(math.fsum((bucket**2).tolist()))
        norm = F32(exact)
        norm = float(norm if float(norm) >= exact else np.nextafter(norm, F32(np.inf)))
        for j, v in enumerate(bucket.tolist()):
            level = math.floor(abs(v) / norm * codec.levels + draws[a + j]) if norm else 0
            out[a + j] = F32(math.copysign(norm * min(level, codec.levels) / codec.levels, v)) if level else 0.0
    return out


def signsgd(codec: SignSGD, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    return np.where(np.signbit(x), F32(-1), F32(1)) if x.any() else np.zeros_like(x)


def scaledsign(codec: ScaledSign, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    step = codec.block or x.size
    return np.concatenate(
        [np.where(b < 0, -mean_magnitude(b), mean_magnitude(b)) for b in np.split(x, range(step, x.size, step))]
    )


def normsign(codec: NormSign, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    step = codec.block or x.size
    halves = [F32(max(map(abs, b.tolist())) / 2) for b in np.split(x, range(step, x.size, step))]
    return np.where(x < 0, F32(-1), F32(1)) * np.repeat(np.array(halves), step)[: x.size]


def dithering(codec: Dithering, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    top, norm = 2 ** (codec.bits - 1), float(max(map(abs, x.tolist()))) or 1.0
    draws = key.at(layer=part.index).uniform(x.size)
    levels = [math.floor(abs(float(v)) / norm * top + u) for v, u in zip(x, draws, strict=True)]
    return np.array([F32(math.copysign(norm * s / top, v)) if s else F32(0) for s, v in zip(levels, x, strict=True)])


def terngrad(codec: TernGrad, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    scale = F32(np.abs(x).max())
    if codec.clip and deviation(x):
        scale = F32(min(float(scale), codec.clip * deviation(x)))
    if not scale:
        return np.zeros_like(x)
    sent = key.at(layer=part.index).uniform(x.size) < np.abs(x).astype(np.float64) / float(scale)
    return np.where(sent & (x != 0), np.where(x < 0, -scale, scale), F32(0))


def natural(codec: NaturalCompression, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    mantissa, exponent = np.frexp(np.abs(x.astype(np.float64)))  # in [1/2, 1): twice that is a
    draws = (key.at(layer=part.index).bits(x.size) >> np.uint64(41)).astype(np.float64) * 2.0**-23
    up = (2.0 * mantissa - 1.0) + draws >= 1.0
    # Zeros and subnormal numbers are the business of tests/codecs/test_natural.py; here zeros stay what they are.
    return np.where(x == 0, x, np.copysign(np.ldexp(np.where(up, 1.0, 0.5), exponent), x)).astype(F32)


def stc(codec: STC, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    indices = largest(x, wanted(codec, part))
    indices = indices[x[indices] != 0]
    out = np.zeros_like(x)
    out[indices] = np.sign(x[indices]) * mean_magnitude(x[indices])
    return out


def topk(codec: TopK, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    return only(x, largest(x, wanted(codec, part, key)), codec.values)


def length_of_chunk(codec: ChunkTop1, part: Part) -> int:
    return min(part.size, round(1 / (codec.density if part.density is None else part.density)))


def chunk(codec: ChunkTop1, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    c = length_of_chunk(codec, part)
    chosen = [a + int(np.argmax(np.abs(x[a : a + c]))) for a in range(0, x.size, c)]
    return only(x, np.array([i for i in chosen if x[i] != 0], np.int64), codec.values)


def chunk_topk(codec: ChunkTopK, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    density = codec.density if part.density is None else part.density
    starts = range(0, x.size, codec.chunk)
    chunks = [x[a : a + codec.chunk] for a in starts]
    counts = [max(1, math.ceil(meant(density) * c.size)) for c in chunks]
    chosen = [a + largest(c, k) for a, c, k in zip(starts, chunks, counts, strict=True)]
    return only(x, np.concatenate(chosen), codec.values)


def threshold(codec: Threshold, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    return only(x, np.flatnonzero([abs(v) > codec.level for v in x.tolist()]), codec.values)


def estimate(a: np.ndarray, ratio: float, family: str, stages: int, first: float = 0.25) -> float:
    """SIDCo's peaks over threshold for the non-zero magnitudes ``a``, on copies, in float64."""
    ratios = [ratio]
    if stages > 1 and ratio < first:
        ratios = [first] + [(ratio / first) ** (1 / (stages - 1))] * (stages - 1)
    t = 0.0
    for stage, r in enumerate(ratios):
        e = a[a > t] - t
        if not e.size:
            return t
        mu, v = float(e.mean()), float(e.var())
        if family == "exponential":
            step = -mu * math.log(r)
        elif v == 0.0:
            return t + mu  # nothing lies above
        elif family == "gamma-pareto" and stage == 0:
            from scipy.special import gammaincinv

            s = math.log(mu) - float(np.log(e).mean())
            shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
            step = mu / shape * float(gammaincinv(shape, 1 - r))
        else:
            kappa, alpha = (mu * mu / v - 1) / 2, mu * (mu * mu / v + 1) / 2
            step = alpha * (1 - r**kappa) / kappa
        t = float(F32(t + step))
    return t


def sidco(codec: SIDCo, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    """With the first number of stages: that of the first five rounds."""
    k, a = wanted(codec, part), np.abs(x[x != 0].astype(np.float64))
    fraction = k / x.size
    stages = codec.stages or 2
    if codec.stages is None and codec.family == "exponential":
        stages = 1 if fraction >= 0.1 else 2 if fraction >= 0.01 else 3
    stages = min(stages, max(1, math.ceil(math.log2(x.size / k))))
    if k >= a.size:
        return only(x, np.flatnonzero(x), codec.values)
    chosen = np.flatnonzero(np.abs(x.astype(np.float64)) > estimate(a, k / a.size, codec.family, stages))
    if chosen.size > 2 * k:
        chosen = chosen[largest(x[chosen], k)]
    return only(x, chosen if chosen.size else largest(x, 1), codec.values)


def key_region(codec: KeyRegion, x: np.ndarray, part: Part, key: Key) -> np.ndarray:
    """The first round: regions by energy, fractions by entropy, the exact largest of each region."""
    energy = np.add.reduceat(x.astype(np.float64) ** 2, range(0, x.size, 256))
    size = np.diff(np.append(np.arange(0, x.size, 256), x.size))
    is_key = np.repeat(energy * x.size > codec.kappa * energy.sum() * size, size)
    chosen = set(largest(x, 1).tolist()) if x.any() else set()
    for region, density in ((is_key, codec.key_density), (~is_key, codec.sparse_density)):
        where = np.flatnonzero(region)
        a = np.sort(np.abs(x[where][x[where] != 0].astype(np.float64)))
        if a.size:
            k = math.ceil(density * 2 ** (entropy(a, where.size) - 1) * where.size)
            chosen |= set(where[largest(x[where], k)].tolist())
    indices = np.array(sorted(chosen), np.int64)
    return only(x, indices[x[indices] != 0], codec.values)


def entropy(a: np.ndarray, size: int) -> float:
    """Of the 64 bins of a quarter octave from mean / 128 on, in which the magnitudes ``a`` and the zeros lie; counts of
    the eight bins to an octave of float32 patterns are spread evenly in the logarithm."""
    edges = (np.arange(0, (0x7F800000 >> 20) + 1, dtype=np.int64) << 20).astype(np.int32).view(F32).astype(np.float64)
    below = np.searchsorted(a, edges, "left").astype(np.float64)
    edges[0], edges[-1] = 2.0**-150, 2.0**128
    at = -7.0 + np.arange(65) / 4.0 + math.log2(math.fsum(a.tolist()) / a.size)
    counts = np.interp(at, np.log2(edges), below)
    counts[0], counts[-1] = -(size - a.size), a.size
    share = np.diff(counts)
    share = share[share > 0] / share.sum()
    return float(-(share * np.log(share)).sum()) / math.log(64)


RULES: dict[type[Codec], Callable[..., np.ndarray]] = {
    Identity: lambda codec, x, part, key: x,
    TopK: topk,
    RandomK: randomk,
    RandomBlock: randomk,
    QSGD: qsgd,
    SignSGD: signsgd,
    ScaledSign: scaledsign,
    NormSign: normsign,
    Dithering: dithering,
    TernGrad: terngrad,
    NaturalCompression: natural,
    STC: stc,
    ChunkTopK: chunk_topk,
    ChunkTop1: chunk,
    Threshold: threshold,
    SIDCo: sidco,
    KeyRegion: key_region,
    FixedPoint: fixedpoint,
    ModularSum: modular,
}


def adacomp(codec: AdaComp, g: np.ndarray, residue: np.ndarray, part: Part) -> np.ndarray:
    length = codec.conv_bin if len(part.shape) >= 3 else codec.bin
    total = residue + g
    ahead = total + F32(codec.factor - 1.0) * g
    bins = np.arange(0, g.size, length)
    peaks = np.maximum.reduceat(np.abs(total), bins)
    scale = F32(math.fsum(peaks.tolist()) / bins.size)
    peak = np.repeat(peaks, np.diff(np.append(bins, g.size)))
    sent = (np.abs(ahead) >= peak) & (peak > 0) & (total != 0)
    if codec.guard and float(scale) * sent.sum() > 2.0 * math.fsum(np.abs(total[sent]).tolist()):
        first = [a + int(np.argmax(np.abs(total[a : a + length]))) for a in bins]
        sent = np.isin(np.arange(g.size), first) & (total != 0)
    return np.where(sent, np.sign(total) * scale, F32(0))


@dataclass
class Naive:
    """One client of a codec with all it remembers; :meth:`send` returns what arrives."""

    codec: Codec
    layout: Layout

    def __post_init__(self) -> None:
        self.memory = np.zeros(self.layout.size, F32)
        self.velocity = np.zeros(self.layout.size, F32)

    def send(self, update: Update, key: Key) -> np.ndarray:
        return self._send(self.codec, update.vector, key)

    def _send(self, codec: Codec, g: np.ndarray, key: Key) -> np.ndarray:
        if isinstance(codec, Chain):
            for transform in codec.transforms:
                g = transform.apply(Update(g, self.layout), {}, key)[0].vector
            return self._send(codec.codec, g, key)
        if isinstance(codec, ScaleCom | LGC):
            leader = TopK if codec.selector == "exact" else ChunkTop1
            selector = leader(codec.density, scope=codec.scope, values=codec.values)
            return self._remember(ErrorFeedback(selector, beta=codec.beta), g, key)
        if isinstance(codec, GradiVeQ):
            return self._remember(ErrorFeedback(Identity(), beta=float(codec.memory)), g, key)
        if isinstance(codec, DGC):
            if codec.clip is not None:
                share = Clip(codec.clip / math.sqrt(codec.clients))
                g = share.apply(Update(g, self.layout), {}, key)[0].vector
            inner = TopK(codec.density, codec.scope, codec.values, codec.index, codec.warmup, codec.rest)
            momentum = {"momentum": codec.momentum, "nesterov": codec.nesterov, "masking": codec.masking}
            return self._remember(ErrorFeedback(inner, **momentum), g, key)
        if isinstance(codec, ErrorFeedback):
            return self._remember(codec, g, key)
        if isinstance(codec, AdaComp):
            q = (self.memory + g).copy()
            end = max((part.place.stop for part in parts_of(codec, self.layout)), default=0)
            q[end:] = rest_of(codec, q[end:])
            for part in parts_of(codec, self.layout):
                q[part.place] = adacomp(codec, g[part.place], self.memory[part.place], part)
            self.memory = (self.memory + g) - q
            return q
        return self._once(codec, g, key)

    def _once(self, codec: Codec, x: np.ndarray, key: Key) -> np.ndarray:
        out = x.copy()
        end = max((part.place.stop for part in parts_of(codec, self.layout)), default=0)
        out[end:] = rest_of(codec, x[end:])
        for part in parts_of(codec, self.layout):
            out[part.place] = RULES[type(codec)](codec, x[part.place], part, key)
        return out

    def _remember(self, codec: ErrorFeedback, g: np.ndarray, key: Key) -> np.ndarray:
        mu, beta = F32(codec.momentum), codec.beta
        added = g
        if codec.nesterov:
            self.velocity = (self.velocity + g) * mu
            added = self.velocity + g
        elif codec.momentum:
            added = self.velocity = self.velocity * mu + g
        m = self.memory
        q = self._once(codec.codec, m * F32(codec.decay) + added, key)
        self.memory = (m * F32(codec.decay) + added) - q
        if beta != 1.0:
            self.memory = self.memory * F32(beta) + F32(1.0 - beta) * m
        if codec.norm_guard is not None:
            norms = [math.sqrt(math.fsum((v.astype(np.float64) ** 2).tolist())) for v in (self.memory, g)]
            if 0 < codec.norm_guard * norms[1] < norms[0]:
                self.memory = self.memory * F32(codec.norm_guard * norms[1] / norms[0])
        if codec.memory == "float16":
            self.memory = halved(self.memory)
        if codec.momentum and codec.masking:
            assert isinstance(codec.codec, TopK), "of dense codecs nothing is masked"
            for part in parts_of(codec.codec, self.layout):
                self.velocity[part.place][q[part.place] != 0] = 0.0
        return q
