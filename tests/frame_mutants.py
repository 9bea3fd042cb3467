"""Seeded fuzzing of the decoder: samples of every codec are mutated, decoded and measured. Tests and benchmark share
it.

Most mutants get a correct checksum, since anyone can compute one; otherwise only the checksum would be tested.
"""

from __future__ import annotations

import contextlib
import heapq
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.rng import Key
from fedcomp.wire.backends import available_backends
from fedcomp.wire.codebook import Codebook
from fedcomp.wire.decode import decode
from fedcomp.wire.entropy import CODED_FROM
from fedcomp.wire.errors import WireError
from fedcomp.wire.frame import HEADER, USER_TAG, Frame, encode
from fedcomp.wire.index import Indices
from fedcomp.wire.levels import QsgdLevels, Ternary
from fedcomp.wire.limits import COEFFICIENTS, SHARED, SPARSE, Expected, Limits, Schema
from fedcomp.wire.modelled import DITHERED, PART, ROUNDED, Head, Levels, Terms, streams_of
from fedcomp.wire.planes import Planes
from fedcomp.wire.quantised import Ones, SignScale, Uniform, UnitSign
from fedcomp.wire.rangefloat import RangeFloat
from fedcomp.wire.residues import Residues
from fedcomp.wire.support import BLOCK, SCATTERED, SharedSupport, seeded_support
from fedcomp.wire.tensor import Tensor, dense, seeded
from fedcomp.wire.values import Bf16, Fp16, Natural, Raw, Values

SHARED_ID: Final = 7
_BATCH = 4096
# The edges: nothing, one, a varint's longest byte and its first continuation, all but one, all.
_BYTES = (0x00, 0x01, 0x7F, 0x80, 0xFE, 0xFF)
_SLOWEST = 8
_TRACE_BLOCK = 256


@dataclass(frozen=True)
class Specimen:
    """Honest frames of one pair of codecs, and what their receiver expects."""

    name: str
    frames: tuple[Frame, ...]
    schema: Schema
    supports: dict[int, Indices]

    @property
    def limits(self) -> Limits:
        """The limits the receiver derives from its schema."""
        return Limits.for_schema(self.schema)

    def open(self, mutant: Frame, with_schema: bool) -> tuple[Tensor, ...]:
        """Return what the receiver makes of a frame, with the schema or without."""
        return decode(mutant, self._expected(mutant) if with_schema else None, self.limits, self.supports).tensors

    def body(self, frame: Frame) -> tuple[bytearray, int, int]:
        """Return what of an honest frame is mutated, and where in it the fields begin and end that decide the rest."""
        return bytearray(frame[:-4]), HEADER.size, int.from_bytes(frame[12:16], "little")

    def lengthen(self, body: bytearray, head: int, more: int) -> None:
        """Make it known that the fields, which ended at ``head``, are ``more`` bytes longer."""
        body[12:16] = (head + more).to_bytes(4, "little")

    def seal(self, body: bytes, checksum: bytes | None) -> Frame:
        """Return the frame of ``body``, with ``checksum`` in place of the correct one if given."""
        return seal(body) if checksum is None else body + checksum

    def _expected(self, mutant: Frame) -> Schema:
        """Return the schema with as many tensors as the frame claims, so that fewer mutants fail at this check."""
        return self.schema if mutant[8:9] == b"\x02" else self.schema[:1]


@dataclass(frozen=True)
class LevelsSpecimen(Specimen):
    """Honest frames of levels, whose receiver knows of which matrices the vector consists."""

    terms: Terms | None = None

    def open(self, mutant: Frame, with_schema: bool) -> tuple[Tensor, ...]:
        """Return the tensors, levels decoded."""
        found = super().open(mutant, with_schema)
        terms = self.terms
        assert terms is not None
        return tuple(replace(t, values=t.values.opened(terms)) if isinstance(t.values, Levels) else t for t in found)


@dataclass
class FuzzResult:
    """What one run of :func:`fuzz` saw.

    Attributes
    ----------
    mutants, accepted : int
        Frames decoded, and how many of them were still valid.
    errors : Counter of str
        Rejections by error type.
    traced : int
        Calls whose memory was measured.
    peak_bytes, limit_bytes : int
        Largest extra memory of one of them, and the sum of the receiver's limits on bytes in and out.
    slowdown : float
        Slowest call (its best of three repetitions) over the honest decode of the same specimen.
    """

    mutants: int = 0
    accepted: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    traced: int = 0
    peak_bytes: int = 0
    limit_bytes: int = 0
    slowdown: float = 0.0


def specimens(size: int = 300) -> list[Specimen]:
    """Return honest frames that cover every index codec, value codec and installed back-end.

    Parameters
    ----------
    size : int
        Elements of the sparse tensor; a twelfth of them is sent, nine tenths in the first complement. The other
        complements are ones "auto" would not choose.
    """
    key = Key(2024, "fuzz specimens")
    zstd = available_backends()[-1]
    out = []
    for name, k, backend in (
        ("raw+raw", size // 12, "none"),
        ("fixed+fp16", size // 12, "none"),
        ("bitmap+bf16", size // 12, "none"),
        ("rice+uniform", size // 12, "none"),
        ("block-rice+sign", size // 12, "none"),
        ("elias-fano+ternary", size // 12, "none"),
        ("gap-bytes+qsgd", size // 12, zstd),
        ("seeded+natural", size // 12, "none"),
        ("shared+qsgd", size // 12, "none"),
        ("complement:rice+ternary", size * 9 // 10, "zlib"),
        ("complement:rice+raw", size // 12, "none"),
        ("complement:bitmap+unit-sign", size // 12, zstd),
        ("bins:24+sign", size // 12, "none"),
        ("one in bins:12+ones", size // 12, "none"),
        ("seeded block+natural", size // 12, "none"),
        ("rice+codebook", size // 12, "none"),
        ("rice+range-float", size // 12, "none"),
        ("ans-gaps+unit-sign", size // 12, "none"),
        ("rice+residues", size // 12, "none"),
        ("rice+planes", size // 12, "none"),
        # Enough values of a tensor of their own that they are entropy-coded.
        ("seeded+entropy-coded qsgd", max(CODED_FROM, size // 12), "none"),
        ("seeded+entropy-coded natural", max(CODED_FROM, size // 12), "none"),
        ("seeded+entropy-coded codebook", max(CODED_FROM, size // 12), "none"),
        ("seeded+entropy-coded range-float", max(CODED_FROM, size // 12), "none"),
        ("seeded+entropy-coded planes", max(CODED_FROM, size // 12), "none"),
    ):
        index, _, value = name.partition("+")
        n = max(size, k)
        support = seeded_support(key.u64(), n, k)
        if index.startswith("one in "):
            support = np.arange(k) * 12 + key.at(purpose=index).bits(k).astype(np.int64) % 12
        x = (key.at(purpose=name).uniform(k) - 0.5).astype(np.float32)
        values = values_of(value, x, key)
        main = _tensor(index, n, support, values, backend)
        rest = dense(np.arange(24, dtype=np.int64), backend=backend)
        frames = (
            encode([main]),
            encode([main, rest], flags=1, tlvs=[(USER_TAG, b"specimen")]),
        )
        schema = (Expected("w", (n,)), Expected("steps", (24,), "int64"))
        supports = {SHARED_ID: seeded_support(key.u64(), n, k)}
        out.append(Specimen(name, frames, schema, supports))
    return [*out, *_levels_specimens(size, key)]


def _levels_specimens(size: int, key: Key) -> list[LevelsSpecimen]:
    """Return honest frames of levels of each form, of two matrices and a vector."""
    columns = max(8, size // 40)
    shapes = ((20, columns), (12, 5), (1, max(1, size - 20 * columns - 60)))
    terms = Terms(shapes, budget=256 + size // 2, seed=4)
    schema = (Expected("w", (terms.size,)), Expected("steps", (24,), "int64"))
    found = []
    for form in (ROUNDED, DITHERED, PART):
        head = Head(form, 3, 0x3C80, (0, 5, 0) if form == ROUNDED else (0, 0, 0), 30_000 if form == PART else 1 << 16)
        count = streams_of(head, terms).size
        u = key.at(purpose="levels", layer=form).uniform(count)
        levels = np.where(u < 0.7, 0, np.rint(20.0 * (u - 0.85))).astype(np.int32)
        levels[0], levels[1] = 4, 2
        main = Tensor(Levels.coded(head, levels, terms), (terms.size,))
        frames = (encode([main]), encode([main, dense(np.arange(24, dtype=np.int64))], flags=1))
        found.append(LevelsSpecimen(f"levels of form {form}", frames, schema, {}, terms))
    return found


def values_of(name: str, x: NDArray[np.float32], key: Key) -> Values:
    """Return float32 values of shape (k,) by the name that they have in a specimen's."""
    if name.startswith("entropy-coded "):
        # Small ones are more frequent, so that there is something to gain.
        return values_of(name.removeprefix("entropy-coded "), x**5, key)
    uniforms = key.uniform(x.size)
    qsgd = QsgdLevels.quantise(x, 8, 16, uniforms)
    made: dict[str, Values] = {
        "raw": Raw(x),
        "fp16": Fp16(x),
        "bf16": Bf16(x),
        "uniform": Uniform.quantise(x, 5, 16),
        "sign": SignScale.quantise(x, 16),
        "one sign": SignScale.quantise(x),
        "ternary": Ternary(np.where(np.abs(x) > 0.45, np.sign(x), 0), 0.5),
        "qsgd": qsgd,
        "fixed qsgd": QsgdLevels(qsgd.levels, 8, 16, qsgd.norms, fixed=True),
        "range-float": RangeFloat.quantise(x, 6),
        "codebook": Codebook.quantise(x),
        "natural": Natural.quantise(x, uniforms),
        "ones": Ones(x.size),
        "unit-sign": UnitSign(np.signbit(x)),
        "planes": Planes(x),
        "residues": Residues((uniforms * 1000).astype(int), 1000, 0.25),
    }
    return made[name]


def _tensor(index: str, size: int, support: Indices, values: Values, backend: str) -> Tensor:
    if index.startswith("seeded"):
        algorithm = BLOCK if index.endswith("block") else SCATTERED
        return seeded((size,), 99, values.k, values, backend=backend, algorithm=algorithm)
    if index == "shared":
        return Tensor(values, (size,), kind=SHARED, index=SharedSupport(SHARED_ID), backend=backend)
    written = index.removeprefix("one in ")
    return Tensor(values, (size,), kind=SPARSE, indices=support, index=written, backend=backend)


def seal(body: bytes) -> Frame:
    """Return ``body`` with a correct checksum after it."""
    return body + zlib.crc32(body).to_bytes(4, "little")


def mutants(specimen: Specimen, others: Sequence[Specimen], count: int, seed: int) -> Iterator[Frame]:
    """Yield ``count`` mutated frames: bit flips, edited bytes and lengths, truncations, insertions, splices.

    Seven of eight are sealed with a correct checksum, where there is one.
    """
    made = 0
    batch = 0
    foreign = [frame for other in others for frame in other.frames]
    while made < count:
        words = Key(seed, f"mutants of {specimen.name}", batch).bits(_BATCH * 6).tolist()
        for i in range(0, len(words), 6):
            body = _mutate(specimen, foreign, words[i : i + 6])
            yield specimen.seal(body, words[i].to_bytes(8, "little")[:4] if words[i] % 8 == 0 else None)
            made += 1
            if made == count:
                return
        batch += 1


def _mutate(specimen: Specimen, foreign: list[Frame], words: list[int]) -> bytes:
    pick, a, b, c, d, e = words
    body, first, head = specimen.body(specimen.frames[(pick >> 8) % len(specimen.frames)])
    size = len(body)
    action = (pick >> 16) % 8
    if action == 0:
        for word in (a, b, c)[: 1 + d % 3]:
            body[(word >> 8) % size] ^= 1 << word % 8
    elif action == 1:
        # One byte of the table: lengths, counts, ids and parameters are all there.
        body[first + a % (head - first)] = _BYTES[b % 6] if c & 1 else b & 0xFF
    elif action == 2:
        place = first + a % (head - first)
        body[place] = (body[place] + (1 if b & 1 else -1)) & 0xFF
    elif action == 3:
        del body[a % size :]
    elif action == 4:
        # A section of another length: bytes go or come inside the payload, and half of the time the table says so.
        place = head + a % max(1, size - head)
        if b & 1:
            del body[place : place + 1 + c % 4]
        else:
            body[place:place] = d.to_bytes(8, "little")[: 1 + c % 4]
        if e & 1:
            spot = head - 1 - e % 4
            body[spot] = (body[spot] + (len(body) - size)) & 0x7F
    elif action == 5:
        other = foreign[a % len(foreign)]
        cut = b % size
        body = body[:cut] + other[(c % len(other) if d & 1 else min(cut, len(other))) : -4]
    elif action == 6:
        # A huge variable-length integer in place of whatever stood there.
        place = first + a % (head - first)
        run = 1 + b % 10
        body[place : place + 1] = b"\xff" * (run - 1) + bytes((c & 0x7F,))
        specimen.lengthen(body, head, run - 1)
    else:
        place = head + a % max(1, size - head)
        body[place : place + 8] = b.to_bytes(8, "little")[: len(body[place : place + 8])]
    return bytes(body)


def fuzz(specimen: Specimen, others: Sequence[Specimen], count: int, seed: int = 0) -> FuzzResult:
    """Decode ``count`` mutants of ``specimen``, half of them without a schema; measure time and memory.

    The processor time of every call is taken, the memory of every fourth (tracing slows Python down fivefold).

    Raises
    ------
    AssertionError
        Naming the mutant that raised anything but a :class:`~fedcomp.wire.WireError`.
    """
    limits = specimen.limits
    result = FuzzResult(limit_bytes=limits.max_bytes_in + limits.max_bytes_out)
    slow: list[tuple[float, int, Frame]] = []
    honest = max(_best_time(specimen, f, False) for f in specimen.frames)
    for i, mutant in enumerate(mutants(specimen, others, count, seed)):
        # In blocks, since starting the tracer costs more than decoding a mutant.
        traced = i // _TRACE_BLOCK % 4 == 0
        if i % _TRACE_BLOCK == 0:
            (tracemalloc.start if traced else tracemalloc.stop)()
        before = 0
        if traced:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
        start = time.thread_time()
        try:
            tensors = specimen.open(mutant, bool(i & 1))
            result.accepted += 1
        except WireError as error:
            tensors = ()
            result.errors[type(error).__name__] += 1
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} from {specimen.name} mutant {mutant.hex()}") from error
        spent = time.thread_time() - start
        if traced:
            result.peak_bytes = max(result.peak_bytes, tracemalloc.get_traced_memory()[1] - before)
            result.traced += 1
        _check_dense(tensors, specimen, mutant)
        if traced:
            continue
        # Only the slowest few are kept, to be timed again: one slow call may be the machine's doing.
        if len(slow) < _SLOWEST:
            heapq.heappush(slow, (spent, i, mutant))
        elif spent > slow[0][0]:
            heapq.heapreplace(slow, (spent, i, mutant))
    tracemalloc.stop()
    result.mutants = count
    result.slowdown = max((_best_time(specimen, f, bool(i & 1)) / honest for _, i, f in slow), default=0.0)
    return result


def _check_dense(tensors: tuple[Tensor, ...], specimen: Specimen, mutant: Frame) -> None:
    """Require that every tensor of an accepted mutant can be made dense, and that levels are written as they came.

    Coefficients need their basis for the first, and levels the shapes of their matrices.
    """
    for tensor in tensors:
        values = tensor.values
        unopened = isinstance(values, Levels) and values.terms is None
        if isinstance(values, Levels) and values.terms is not None:
            again = Levels.coded(values.head, values.levels.astype(np.int32), values.terms)
            if bytes(again.section) != bytes(values.section):
                raise AssertionError(f"{specimen.name} mutant {mutant.hex()} is not written again as it came")
        if tensor.kind is COEFFICIENTS or (tensor.kind is SHARED and tensor.indices is None) or unopened:
            continue
        try:
            out = tensor.dense()
        except Exception as error:
            raise AssertionError(
                f"{type(error).__name__} from dense() of {specimen.name} mutant {mutant.hex()}"
            ) from error
        if out.shape != tensor.shape or out.dtype.name != tensor.dtype:
            raise AssertionError(f"dense() of {specimen.name} mutant {mutant.hex()} is {out.dtype}{out.shape}")


def _best_time(specimen: Specimen, frame: Frame, with_schema: bool) -> float:
    """Return the smallest processor time of several decodes of ``frame``, accepted or not, in seconds."""
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()
        with contextlib.suppress(WireError):
            specimen.open(frame, with_schema)
        best = min(best, time.thread_time() - start)
    return best
