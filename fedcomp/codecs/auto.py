"""Auto: one step for the whole vector, and a model of rows and columns that codes each value at its own spread.

Coordinates at one step cost bits in proportion to what they save: large ones more, small ones nearly none, which is how
a budget is best divided (reverse water-filling; derived). Rows and columns need no scales: their running means tell the
coder what to expect (:mod:`fedcomp.kernels.portable_contexts`). A construction of this project.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params, wire
from fedcomp.codecs.base import norm
from fedcomp.codecs.eden import EDEN
from fedcomp.codecs.listed import without_densities
from fedcomp.codecs.orthonormal import SHORTEST
from fedcomp.codecs.positional import PositionalCodec, SeededCodec, Stretch, require_values, with_rest
from fedcomp.codecs.ratecontrol import RateControl, bits_of, width
from fedcomp.codecs.topk import TopK
from fedcomp.errors import NonFiniteUpdate
from fedcomp.kernels import contexts
from fedcomp.kernels.contexts import Streams
from fedcomp.layout import Layout, Vector
from fedcomp.logs import log
from fedcomp.rng import Key
from fedcomp.rules import Real, Switch
from fedcomp.wire import DENSE, SPARSE, Bundle, Expected, Frame, LimitExceeded, SchemaMismatch, Tensor
from fedcomp.wire.modelled import (
    DITHERED,
    LEAST_STEP,
    PART,
    ROUNDED,
    Head,
    Levels,
    Shapes,
    Terms,
    parts_of,
    streams_of,
    with_shifts,
)
from fedcomp.wire.support import seeded_support

LEAST_BUDGET: Final = 256
"""Bytes of every update's budget: below, learning the probabilities is most of a frame."""

INNER: Final = 1.0
"""Bits for each value of the columns that travel, where not all do."""

_WHOLE: Final = 0.75
"""Bits from which all columns travel."""

_LARGEST: Final = 2.0**125
_ONE: Final = 256 * 8
"""Of a byte, in 1/256 bit."""

_AROUND: Final = 40
"""Bytes of a frame around one tensor."""

_ATTEMPTS: Final = 8
_OCTAVE: Final = 128
_SPREAD: Final = 3 * 256

_UNFILLED: Final = 80
"""Per cent of a budget below which magnitudes of level 1 are cut rather than all left out."""

_WORST: Final = 16.0
"""ω of a dithered value at 0.75 bit, less what learning costs: equal magnitudes a, in steps, take h(a) + a bits with
the binary entropy h, and have 1/(12 a²); 0.45 bits are a = 0.072."""


@dataclass(frozen=True, slots=True)
class Matrices(Stretch):
    """The compressed part of a vector, and of which matrices it consists.

    Attributes
    ----------
    shapes : tuple of (rows, columns)
        Of tensors that are not empty: the first dimension, and all others; one row where there is one dimension.
    """

    shapes: Shapes = ()


@dataclass(frozen=True, repr=False, eq=False)
class Auto(SeededCodec):
    """Round the whole vector to one step, the shortest whose levels fit the budget, and code them in context.

    ``feedback=False``: unbiased, without memory. A draw of the round's key is added before rounding and subtracted
    after it (subtractive dither), so that errors are uniform and independent of the update, with variance D²/12 at
    step D, and errors of clients are independent of each other. Below 0.75 bit only a part of the columns travels,
    drawn anew in every frame, at one bit a value.

    ``feedback=True``: rounded to the nearest, but to 1 from 0.6 on, and to 0 below. For error feedback, which
    ``Compressed`` puts around it.

    What arrives of an update of equal signs and magnitudes depends on ties: what does not fit is left out by rows.
    Magnitudes below 2^-100 may arrive as zero; values from 2^125 on are refused, dithered ones from 2^119 times the
    part of the columns. Frames of fewer ``bits`` are taken, too. Where neither numba nor the package's compiled file is
    installed, vectors of more than 4096 values travel within the same budget as EDEN of a random part, or as top-k in
    two bits with ``feedback``; every receiver takes both.

    Parameters
    ----------
    bits : float
        For each value of the compressed part, above 0 and at most 16; 256 bytes are allowed in any case. What a frame
        adds around its content, some 60 bytes, is not counted.
    feedback : bool
        Whether the frame is one for error feedback.

    Examples
    --------
    >>> Auto(bits=4.0, feedback=True).preview([0.5, -3.0, 1.0, 0.25]).round(2)
    array([ 0.5 , -3.  ,  1.  ,  0.25], dtype=float32)
    """

    codec_id: ClassVar[str] = "auto"

    bits: Annotated[float, Real(above=0.0, most=16.0)] = 0.5
    feedback: Switch = False

    def __post_init__(self) -> None:
        super().__post_init__()
        params.assign(self, unbiased=not self.feedback)

    def budget(self, size: int) -> int:
        """Return the bytes that ``size`` values may take."""
        return max(LEAST_BUDGET, int(self.bits * size / 8.0))

    def stretches(self, layout: Layout) -> tuple[Stretch, ...]:
        """Return the compressed part as one; densities of single tensors are refused."""
        shapes = tuple(
            (t.shape[0], t.size // t.shape[0]) if len(t.shape) > 1 else (1, t.size) for t in layout.compressed if t.size
        )
        return tuple(
            Matrices(s.index, s.name, s.start, s.stop, shape=s.shape, shapes=shapes)
            for s in without_densities(layout, "global", self)
        )

    def terms(self, stretch: Stretch, seed: int) -> Terms:
        """Return what both ends know of the levels of a stretch."""
        assert isinstance(stretch, Matrices)
        return Terms(stretch.shapes, self.budget(stretch.size), 0 if self.feedback else seed)

    def fields(self, key: Key) -> tuple[tuple[int, bytes], ...]:
        """Return the seed, where something is drawn."""
        return () if self.feedback else super().fields(key)

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        """Return the levels; without compiled code, what stands for them."""
        values = np.ascontiguousarray(values)
        largest = max(float(values.max()), -float(values.min()))
        if largest >= _LARGEST:
            raise NonFiniteUpdate(f"{stretch.name} holds a value of magnitude {largest:g}; levels reach to 2**125")
        if values.size > contexts.PORTABLE_MOST and not contexts.compiled():
            _say_portable()
            return self._portable(values, stretch, key)
        seed = self.seed_of(key)
        terms = self.terms(stretch, seed)
        bits = 8.0 * terms.budget / values.size
        if self.feedback:
            found = _rounded(values, terms, key)
        elif bits >= _WHOLE:
            found = _dithered(values, Head(DITHERED), terms)
        else:
            head = Head(PART, fraction=max(1, int(bits / INNER * 65536.0)))
            kept = [
                values[whole].reshape(-1, columns[0])[:, columns[1]].reshape(-1)
                for whole, _, columns in parts_of(head.fraction, terms)
            ]
            found = _dithered(np.concatenate(kept), head, terms)
        return Tensor(found, (stretch.size,))

    def _portable(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        """Return a tensor of the same budget that takes no compiled code: top-k, or EDEN of a random part."""
        budget, size = self.budget(stretch.size), stretch.size
        if self.feedback:
            # An index takes about log2(n/k) and two bits, a value two; then as many as fit.
            kept = min(size, 8 * budget // 6)
            while True:
                density = kept / size
                tensor = TopK(density=density, values="q2").pack(values, Stretch(0, stretch.name, 0, size), key)
                if len(wire.encode([tensor])) - _AROUND <= budget or kept == 1:
                    return tensor
                kept = max(1, kept * 9 // 10)
        # One block, a power of two; codes are one bit each, and the magnitude is four bytes.
        kept = 1 << (min(size, 8 * (budget - 8)).bit_length() - 1)
        seed = self.seed_of(key)
        part = values[seeded_support(seed, size, kept)] * np.float32(size / kept)
        if not np.isfinite(part).all():
            raise NonFiniteUpdate(f"{stretch.name}: a random part, scaled by {size / kept:g}, overflows float32")
        coded = EDEN().pack(part, Stretch(0, stretch.name, 0, kept), key).values
        return wire.seeded((size,), seed, kept, coded)

    def longest(self, layout: Layout) -> int:
        """Return a number of bytes that no frame of levels for ``layout`` exceeds."""
        parts = self.stretches(layout)
        schema = [replace(e, kinds=frozenset({DENSE})) for e in self.schema(layout)]
        schema[: len(parts)] = [replace(e, value_codecs=frozenset({"levels"})) for e in schema[: len(parts)]]
        forms: list[Mapping[str, int]] = [{"bytes": self.budget(s.size)} for s in parts]
        forms += [self.rest_form.form] * (len(schema) - len(forms))
        fields = sum(2 + len(content) for _, content in self.fields(Key(0)))
        return fields + wire.longest(tuple(schema), self.index, *forms)

    def expect(self, stretch: Stretch) -> Expected:
        """Return the stretch's shape: levels, or what stands for them."""
        return Expected(
            "",
            (stretch.size,),
            "float32",
            max_k=min(stretch.size, 8 * self.budget(stretch.size)),
            kinds=frozenset({DENSE, SPARSE}),
            index_codecs=frozenset((*wire.PLAIN, "complement") if self.feedback else ("seeded",)),
            value_codecs=frozenset({"levels", "codebook"}),
        )

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        """Require levels of the own form within the budget, or what stands for them."""
        values = tensor.values
        if isinstance(values, Levels):
            require_values(tensor, Levels, sparse=False)
            if (values.head.form == ROUNDED) != self.feedback:
                raise SchemaMismatch(f"{stretch.name}: levels of form {values.head.form}, expected {self!r}")
            return
        require_values(tensor, wire.Codebook, sparse=True)
        assert isinstance(values, wire.Codebook)
        bits = 2 if self.feedback else 1
        if values.bits != bits or (not self.feedback and (values.k < SHORTEST or values.k & values.k - 1)):
            raise SchemaMismatch(f"{stretch.name}: {values.k} codes of {values.bits} bits do not stand for levels")
        if values.k * bits > 8 * self.budget(stretch.size):
            raise LimitExceeded(f"{stretch.name}: {values.k} codes of {bits} bits exceed the budget")

    def open(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        """Parse and check ``frame``, and decode its levels: a frame that passes was written by an encoder."""
        bundle = PositionalCodec.open(self, frame, layout) if self.feedback else super().open(frame, layout)
        seed = self.seed_in(bundle)
        tensors = list(bundle.tensors)
        for stretch in self.stretches(layout):
            tensor = tensors[stretch.index]
            if isinstance(tensor.values, Levels):
                opened = tensor.values.opened(self.terms(stretch, seed))
                if opened is not tensor.values:
                    tensors[stretch.index] = replace(tensor, values=opened)
        return replace(bundle, tensors=tuple(tensors)) if tensors != list(bundle.tensors) else bundle

    def verify(self, frame: Frame | Bundle, layout: Layout, key: Key) -> Bundle:
        """Open, and require the seed that ``key`` gives, where there is one."""
        return self.open(frame, layout) if self.feedback else super().verify(frame, layout, key)

    def placed(self, bundle: Bundle, layout: Layout) -> Iterator[tuple[Tensor, slice]]:
        """Yield the frame's tensors with their places; values of a random part are turned back."""
        for tensor, where in super().placed(bundle, layout):
            if not self.feedback and isinstance(tensor.values, wire.Codebook):
                tensor = replace(tensor, values=wire.Raw(_turned_back(tensor, bundle)))
            yield tensor, where

    def norm(self, frame: Frame | Bundle, layout: Layout) -> float:
        """Return the Euclidean norm of what is decoded."""
        bundle = self.open(frame, layout)
        each = (tensor.values.decoded(keep=True) for tensor, _ in self.placed(bundle, layout))
        return math.hypot(*(norm(values) for values in each))

    def contraction(self, layout: Layout) -> float | None:
        """Return δ of ``feedback=True``: 5/(9 n), of one nonzero level (derived; k of them give 5 k/(9 n)).

        What is 0.6 steps and more is off by 4/9 of its square at most, where levels stand for themselves; the shifts,
        their means, are nearer. What is less stays as it is, and the largest is never less.
        """
        if not self.feedback:
            return None
        return with_rest(self, [5.0 / (9.0 * s.size) * (1.0 - 2.0**-20) for s in self.stretches(layout)], layout)

    def variance(self, layout: Layout) -> float | None:
        """Return ω of ``feedback=False``: of equal magnitudes, which are the worst (derived); (1 + 16)/f - 1 of a part.

        Updates are far from it: .05 to .4 at one bit for five tasks, 1.05 for normal values (measured).
        """
        if self.feedback:
            return None
        worst = 0.0
        for stretch in self.stretches(layout):
            bits = 8.0 * self.budget(stretch.size) / stretch.size
            worst = _WORST if bits >= _WHOLE else (1.0 + _WORST) / (int(bits / INNER * 65536.0) / 65536.0) - 1.0
        return worst


def _rounded(values: Vector, terms: Terms, key: Key) -> Levels:
    """Return rounded levels within the budget."""
    if not values.any():
        return Levels.coded(Head(ROUNDED), np.zeros(values.size, np.int32), terms)
    control = RateControl(values, terms.shapes, dithered=False, seed=0)
    goal = _goal(terms, values.size)
    for _ in range(_ATTEMPTS):
        step, over, fits = control.search(goal)
        levels = control.levels(step)
        while step < control.high and control.decisions * 5 > terms.most(values.size) * 4:
            if _workable(levels, terms):
                break
            step = min(step + _OCTAVE, control.high)
            levels = control.levels(step)
        found = _levels(values, step, levels, terms)
        if not fits or (_UNFILLED * terms.budget > 100 * found.nbytes and over >= control.low):
            # Equal magnitudes: no step sends some of them.
            cut = control.cut(over, goal, key)
            fuller = _levels(values, over, cut, terms)
            if fuller.nbytes <= terms.budget < found.nbytes or found.nbytes < fuller.nbytes <= terms.budget:
                found = fuller if _workable(cut, terms) else found
        if found.nbytes <= terms.budget:
            return found
        # What coding adds to the cost is half a per cent and a few bytes.
        goal -= goal // 50
    # Not even one value: of rows that are too long for a flag each zero takes a two-thousandth of a bit.
    return Levels.coded(Head(ROUNDED), np.zeros(values.size, np.int32), terms)


def _levels(values: Vector, step: int, levels: NDArray[np.int32], terms: Terms) -> Levels:
    top = bits_of(levels)
    head = with_shifts(Head(ROUNDED, top, step), values, levels) if top else Head(ROUNDED)
    return Levels.coded(head, levels, terms)


def _dithered(values: Vector, head: Head, terms: Terms) -> Levels:
    """Return dithered levels of what travels, within the budget."""
    streams = streams_of(head, terms)
    largest = max(float(values.max(initial=0.0)), -float(values.min(initial=0.0)))
    if largest < width(LEAST_STEP):
        return Levels.coded(head, np.zeros(values.size, np.int32), terms)
    if largest * 65536.0 / head.fraction >= _LARGEST / 64.0:
        raise NonFiniteUpdate(f"a value of magnitude {largest:g} and its dither, scaled, may overflow float32")
    control = RateControl(values, streams.shapes, dithered=True, seed=terms.seed)
    # What one draw takes is spread by .2 to 1.1 bits times the root of the number (measured), a trial's as well.
    step, _, _ = control.search(_goal(terms, values.size) - _SPREAD * math.isqrt(values.size))
    while True:
        levels = control.levels(step, trial=False)
        workable = control.decisions * 5 <= terms.most(values.size) * 4 or _workable(levels, terms, streams)
        if workable or step >= control.high:
            found = Levels.coded(replace(head, top=bits_of(levels), step=step), levels, terms)
            if found.nbytes <= terms.budget or step >= control.high:
                return found
        step = min(step + (2 if workable else _OCTAVE), control.high)


def _goal(terms: Terms, size: int) -> int:
    """Return what levels may cost beside parameters and the lengths of streams, in 1/256 bit."""
    return _ONE * (terms.budget - 8 - 4 * (size >> 22).bit_length() ** 2)


def _workable(levels: NDArray[np.int32], terms: Terms, streams: Streams | None = None) -> bool:
    """Whether a reader takes the decisions of these levels."""
    streams = streams or Streams(terms.shapes)
    return streams.cost(levels, bits_of(levels))[1] <= terms.most(streams.size)


def _turned_back(tensor: Tensor, bundle: Bundle) -> Vector:
    """Return the values of a random part that EDEN has rotated."""
    inner = replace(bundle, tensors=(Tensor(tensor.values, (tensor.values.k,)),))
    return next(EDEN().placed(inner, Layout.flat(tensor.values.k)))[0].values.decode()


@functools.cache
def _say_portable() -> None:
    log.warning(
        "Auto: neither numba nor the compiled file of fedcomp is installed, so updates travel as top-k or EDEN of the "
        "same number of bytes, which loses more; install fedcomp[fast]"
    )
