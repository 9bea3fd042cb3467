"""Auto: one quantisation step for the whole vector, entropy-coded with a model of the scales of rows and columns.

Coordinates at one step cost bits in proportion to what they save: large ones more, small ones nearly none, which is how
a budget is best divided (reverse water-filling; derived). Rows and columns need no scales: their running means tell the
coder what to expect (:mod:`fedcomp.kernels.portable_contexts`). A construction of this project.
"""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import params, wire
from fedcomp.codecs.base import Codec
from fedcomp.codecs.eden import EDEN, rotation_of
from fedcomp.codecs.orthonormal import rotate
from fedcomp.codecs.positional import (
    PositionalCodec,
    SeededCodec,
    Stretch,
    require_values,
    with_rest,
    without_densities,
)
from fedcomp.codecs.ratecontrol import RateControl, bits_of, largest_of
from fedcomp.codecs.topk import TopK
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.kernels import contexts
from fedcomp.layout import Layout, Vector
from fedcomp.logs import log
from fedcomp.rng import Key
from fedcomp.rules import Flag, Maybe, Real, Size
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
    width,
    with_shifts,
)
from fedcomp.wire.support import seeded_support

LEAST_BUDGET: Final = 256
"""Bytes of every update's budget: below, learning the probabilities is most of a frame."""

INNER: Final = 1.0
"""Bits for each value of the columns that travel, where not all do."""

_WHOLE: Final = 0.75
"""Number of bits from which all columns are sent."""

_LARGEST: Final = 2.0**125
_TURNED: Final = 1024
"""Minimum number of values that are rotated together; the mean of shorter blocks has a larger error (:class:`EDEN`)."""

AUTO: Final = "auto"

_USUAL: Final = 0.5
"""Number of bits if nothing is known. With this many, no round is lost for any number of replies (measured on three
tasks, and derived: :meth:`Auto.settled`)."""

_MOST_BY_LINK: Final = 2.0
"""Number of bits above which a fast link gives no gain (measured)."""

_FEWEST: Final = 1e-3

_SHARE_OF_TRAINING: Final = 0.2
"""Seconds on the link for each second of training: the sum of both times the rounds that are needed is within a tenth
of its least from half to twice as many (derived from three tasks)."""

_NOISE_AT_ONE: Final = 0.3
"""ω of a dithered value at one bit: .05 to .39 for updates of five tasks (measured)."""

_UNFILLED: Final = 80
"""If less than this percentage of a budget is used, magnitudes of level 1 are cut instead of all being left out."""

_WORST: Final = 16.0
"""ω of a dithered value at 0.75 bit, less what learning costs: equal magnitudes a, in steps, take h(a) + a bits with
the binary entropy h, and have 1/(12 a²); 0.45 bits are a = 0.072."""

_LEARNT: Final = 0.6
"""The part of the bits that is left for the values."""

_LONGEST_STEP: Final = 65.0
"""The longest step of dithered levels is 64 times the largest magnitude, whose lower half is not counted."""


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
    """Quantise the whole vector with one step, the smallest whose entropy-coded levels fit the byte budget.

    ``feedback=False``: unbiased, without memory. A draw of the round's key is added before rounding and subtracted
    after it (subtractive dither), so that errors are uniform and independent of the update, with variance D²/12 at step
    D, and errors of clients are independent of each other. Below 0.75 bit only a part of the columns is sent, redrawn
    in every frame, at one bit a value. Values without structure, such as normally distributed ones, have less error as
    :class:`EDEN` signs of a random part in the same bytes; the sender then sends these. It does so, too, where matrices
    have so few columns that a draw may hold more than the budget takes.

    ``feedback=True``: rounded to the nearest level, except that magnitudes below 0.6 steps become 0. For use under
    error feedback, which ``Compressed`` adds.

    In an update of equal signs and magnitudes, ties decide what is sent: values that do not fit are left out in pieces
    of 64. Magnitudes below 2^-100 may arrive as zero; values from 2^125 on are refused, dithered ones from 2^119 times
    the part of the columns. Frames of fewer ``bits`` are accepted, too. Where neither numba nor the package's compiled
    file is installed, vectors of more than 4096 values travel within the same budget as such signs, or as top-k in two
    bits with ``feedback``; every receiver takes both.

    Parameters
    ----------
    bits : float or "auto"
        Bits per value of the compressed part, above 0 and at most 16; at least 256 bytes are always allowed. The
        frame's own overhead, some 60 bytes, is not counted. "auto" is half a bit, or less where a node's configuration
        states the rate of its ``uplink`` ("1mbit"): the node then spends a fifth of its training time on sending, but
        never goes below ``least`` bits.
    feedback : bool or "auto"
        Whether frames are made for error feedback. "auto": unbiased, unless ``Compressed`` finds in its first round
        that there are too few replies for so few bits (:meth:`settled`).
    bytes : int or str, optional
        The budget itself, such as 20_000 or "20 kB" (of 1000 bytes), at least 256; in place of ``bits``.
    seconds : float, optional
        Seconds that an upload may take on each client's own ``uplink``, at most two bits a value; half a bit if a node
        does not know its uplink. In place of ``bits``.
    least : float
        The fewest bits a value that any client uses on a slow link; ``Compressed`` sets it if it is 0.

    Raises
    ------
    ConfigError
        For other values, and where two of ``bits``, ``bytes`` and ``seconds`` are given.

    Examples
    --------
    >>> Auto(bits=4.0, feedback=True).preview([0.5, -3.0, 1.0, 0.25]).round(2)
    array([ 0.5 , -3.  ,  1.  ,  0.25], dtype=float32)
    >>> Auto(bytes="20 kB").budget(1_000_000), Auto(seconds=2).budget(1_000_000), Auto().budget(1_000_000)
    (20000, 250000, 62500)
    """

    codec_id: ClassVar[str] = "auto"

    bits: Annotated[float | str, Maybe(Real(above=0.0, most=16.0), AUTO)] = AUTO
    feedback: Annotated[bool | str, Maybe(Flag(), AUTO)] = AUTO
    bytes: Annotated[int | None, Maybe(Size(LEAST_BUDGET))] = None
    seconds: Annotated[float | None, Maybe(Real(above=0.0))] = None
    least: Annotated[float, Real(least=0.0, most=16.0)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("bits", "bytes", "seconds") if getattr(self, name) not in (AUTO, None)]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} of Auto both set the budget; give one of them")
        params.assign(self, unbiased=not self.rounded)

    @property
    def rounded(self) -> bool:
        """Whether frames are for error feedback; what is not decided is unbiased."""
        return self.feedback is True

    def budget(self, size: int) -> int:
        """Return the bytes that ``size`` values may take."""
        if self.bytes is not None:
            return min(self.bytes, max(LEAST_BUDGET, 2 * size))
        bits = _MOST_BY_LINK if self.seconds is not None else _USUAL if self.bits == AUTO else float(self.bits)
        return max(LEAST_BUDGET, int(bits * size / 8.0))

    def settled(self, size: int, replies: int, returning: bool) -> Auto:
        """Return the codec with its form decided, for rounds of ``replies`` updates of ``size`` values.

        Unbiased from 1.3/(2 replies + 1) bits on: there the noise of the mean is about twice its signal, and training
        follows that without compression (measured on three tasks). Below, rounded: with a memory where the same clients
        answer in every round (``returning``), else without. With ``bits="auto"`` and ``seconds`` clients whose links
        are slow keep to twice those bits, so that the form does not depend on links.

        Parameters
        ----------
        size : int
        replies : int
            At least 1.
        returning : bool
        """
        floor = (1.0 + _NOISE_AT_ONE) / (2.0 * replies + 1.0)
        bits = 8.0 * self.budget(size) / max(1, size)
        feedback = self.feedback
        if feedback == AUTO:
            feedback = bits < floor and not self._by_link
        least = self.least or (0.0 if feedback else min(2.0 * floor, bits))
        return replace(self, feedback=feedback, least=least if self._by_link else 0.0)

    def fixed(self, size: int, *, single: bool) -> Auto:
        """Return the codec for rounds that a link must not shorten, or that look at every update by itself.

        With ``single`` it takes a bit a value where nothing is said: an update of fewer is mostly noise, or zeros, and
        a median of such is no median of the updates (derived).
        """
        if single and not self._by_link and 8 * self.budget(size) < size:
            log.warning("Auto: the strategy looks at single updates, and less than a bit a value tells it little")
        bits: float | str = self.bits
        if self._by_link:
            bits = INNER if single else _USUAL
        return replace(self, bits=bits, seconds=None, feedback=self.rounded)

    def downwards(self) -> Auto:
        """Return the codec for the way down, where every error is sent later: one bit where nothing is said."""
        bits = INNER if self._by_link else self.bits
        return replace(self, bits=bits, seconds=None, feedback=True if self.feedback == AUTO else self.feedback)

    def described(self, size: int, replies: int) -> str:
        """Return what was decided, in a line for the log."""
        form = "rounded, for error feedback" if self.rounded else "unbiased, without memory"
        more = ""
        if self.rounded:
            more = "; under error feedback a longer server step is worth a try: 2 at .5 bit, 3 at .1, 4 at .02"
        elif self._by_link:
            more = f"; from {self.least:.2g} bits where an uplink is slow"
        bits = 8.0 * self.budget(size) / max(1, size)
        return f"{bits:.3g} bits a value, {form}, for {replies} updates a round{more}"

    @property
    def _by_link(self) -> bool:
        return self.seconds is not None or (self.bits == AUTO and self.bytes is None)

    def at_link(self, size: int, uplink: float, spent: float) -> Auto:
        """Return the codec with the budget of one client's link.

        Parameters
        ----------
        size : int
            Values of the compressed part.
        uplink : float
            Bytes a second; 0 where that is not known.
        spent : float
            Seconds that the app has trained.
        """
        if not self._by_link:
            return self
        if not uplink:
            if self.seconds is not None:
                _say_unknown(self.seconds)
            bits = _USUAL
        else:
            seconds = _SHARE_OF_TRAINING * spent if self.seconds is None else self.seconds
            bits = 8.0 * seconds * uplink / max(1, size)
        most = 8.0 * self.budget(size) / max(1, size)
        return replace(self, bits=min(16.0, max(min(bits, most), self.least, _FEWEST)), seconds=None)

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
        return Terms(stretch.shapes, self.budget(stretch.size), 0 if self.rounded else seed)

    def fields(self, key: Key) -> tuple[tuple[int, builtins.bytes], ...]:
        """Return the seed, where something is drawn."""
        return () if self.rounded else super().fields(key)

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        """Return the levels; without compiled code, what stands for them."""
        values = np.ascontiguousarray(values)
        largest = largest_of(values)
        if largest >= _LARGEST:
            raise NonFiniteUpdate(f"{stretch.name} holds a value of magnitude {largest:g}; levels reach to 2**125")
        if values.size > contexts.PORTABLE_MOST and not contexts.compiled():
            _say_portable()
            return self._portable(values, stretch, key)
        terms = self.terms(stretch, self.seed_of(key))
        if self.rounded:
            return Tensor(_rounded(values, terms, key), (stretch.size,))
        found = _dithered(values, terms)
        return self.signs(values, stretch, key) if found is None else Tensor(found, (stretch.size,))

    def _portable(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        """Return a tensor of the same budget that needs no compiled code."""
        if not self.rounded:
            return self.signs(values, stretch, key)
        # An index takes about log2(n/k) and two bits, a value two; then as many as fit.
        size, budget = stretch.size, self.budget(stretch.size)
        kept = min(size, 8 * budget // 6)
        while True:
            tensor = TopK(density=kept / size, values="q2").pack(values, Stretch(0, stretch.name, 0, size), key)
            if len(wire.encode([tensor])) <= budget or kept == 1:
                return tensor
            kept = max(1, kept * 9 // 10)

    def signs(self, values: Vector, stretch: Stretch, key: Key) -> Tensor:
        """Return a random part of ``values``, float32 of the stretch's size, at least 1024, in blocks of which EDEN
        sends signs and a length each.

        Raises
        ------
        NonFiniteUpdate
            Where the part, scaled and turned, overflows float32.
        """
        size, seed = stretch.size, self.seed_of(key)
        kept, block = _blocks(size, self.budget(size))
        part = values[seeded_support(seed, size, kept)] * np.float32(size / kept)
        if not np.isfinite(part).all():
            raise NonFiniteUpdate(f"{stretch.name}: a random part, scaled by {size / kept:g}, overflows float32")
        codes, lengths = np.empty(kept, np.bool_), []
        for index, at in enumerate(range(0, kept, block)):
            found = EDEN().pack(part[at : at + block], Stretch(index, stretch.name, at, min(at + block, kept)), key)
            assert isinstance(found.values, wire.Codebook)
            codes[at : at + block] = found.values.codes
            lengths.append(found.values.magnitudes)
        return wire.seeded((size,), seed, kept, wire.SignScale(codes, np.concatenate(lengths), block))

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
            index_codecs=frozenset((*wire.PLAIN, "complement") if self.rounded else ("seeded",)),
            value_codecs=frozenset({"levels", "codebook" if self.rounded else "sign"}),
        )

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        """Require levels of the own form within the budget, or what stands for them."""
        values = tensor.values
        if isinstance(values, Levels):
            require_values(tensor, Levels, sparse=False)
            if (values.head.form == ROUNDED) != self.rounded:
                raise SchemaMismatch(f"{stretch.name}: levels of form {values.head.form}, expected {self!r}")
            return
        k, most = values.k, 8 * self.budget(stretch.size)
        if isinstance(values, wire.SignScale):
            blocks = {values.block, k % values.block or values.block} if values.block else {0}
            if tensor.indices is None or any(size < _TURNED or size & size - 1 for size in blocks):
                raise SchemaMismatch(f"{stretch.name}: {k} signs in blocks of {values.block} do not encode levels")
            taken = k + 32 * values.scales.size
        else:
            require_values(tensor, wire.Codebook, sparse=True)
            assert isinstance(values, wire.Codebook)
            if values.bits != 2:
                raise SchemaMismatch(f"{stretch.name}: codes of {values.bits} bits do not encode levels")
            taken = 2 * k
        if taken > most:
            raise LimitExceeded(f"{stretch.name}: {k} values in {taken} bits exceed the budget of {most}")

    def open(self, frame: Frame | Bundle, layout: Layout) -> Bundle:
        """Parse and check ``frame``, and decode its levels: a frame that passes was written by an encoder."""
        bundle = PositionalCodec.open(self, frame, layout) if self.rounded else super().open(frame, layout)
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
        return self.open(frame, layout) if self.rounded else super().verify(frame, layout, key)

    def placed(self, bundle: Bundle, layout: Layout) -> Iterator[tuple[Tensor, slice]]:
        """Yield the frame's tensors with their places; values of a random part are turned back."""
        for tensor, where in super().placed(bundle, layout):
            if isinstance(tensor.values, wire.SignScale):
                tensor = replace(tensor, values=wire.Raw(_turned_back(tensor.values, self.seed_in(bundle))))
            yield tensor, where

    def figures(self, frame: Frame | Bundle, layout: Layout, length: float) -> Mapping[str, float]:
        """Return ``"bits"``, for each value, and of an unbiased frame ``"noise"``: the energy of its error for each
        unit of the update's, as it follows from the step and from ``length``; nothing of the latter where that is all
        noise."""
        found: dict[str, float] = {}
        bundle = self.open(frame, layout)
        for stretch in self.stretches(layout):
            tensor = bundle.tensors[stretch.index]
            values = tensor.values
            if isinstance(values, Levels):
                head, found["bits"] = values.head, 8.0 * values.nbytes / stretch.size
                part = head.fraction / 65536.0
                noise = values.levels.size * float(width(head.step)) ** 2 / 12.0
                energy = (part * length) ** 2 - noise
                alone = noise / energy if energy > 0.0 else math.inf
            else:
                if isinstance(values, wire.SignScale):
                    taken = values.k + 32 * values.scales.size
                else:
                    taken = 8 * len(wire.encode([tensor]))
                found["bits"] = taken / stretch.size
                part, alone = values.k / stretch.size, math.pi / 2.0 - 1.0
            if not self.rounded and alone < math.inf:
                found["noise"] = (1.0 + alone) / part - 1.0
        return found

    def contraction(self, layout: Layout) -> float | None:
        """Return δ of ``feedback=True``: 5/(9 n), of one nonzero level (derived; k of them give 5 k/(9 n)).

        What is 0.6 steps and more is off by 4/9 of its square at most, where levels stand for themselves; the shifts,
        their means, are nearer. What is less stays as it is, and the largest is never less.
        """
        if not self.rounded:
            return None
        return with_rest(self, [5.0 / (9.0 * s.size) * (1.0 - 2.0**-20) for s in self.stretches(layout)], layout)

    def variance(self, layout: Layout) -> float | None:
        """Return ω of ``feedback=False``: of levels of equal magnitudes, which are the worst (derived), (1 + 16)/f - 1
        of a part, more where columns are so few that a draw may leave less than 0.75 bit; of k signs 3 n/k - 1.

        Updates are far from it: .05 to .4 at one bit for five tasks, .58 for normal values (measured).
        """
        if self.rounded:
            return None
        worst = 0.0
        for stretch in self.stretches(layout):
            terms = self.terms(stretch, 0)
            head = _head_of(terms)
            if _fits(head, terms):
                worst = max(worst, (1.0 + _worst_of(head, terms)) * 65536.0 / head.fraction - 1.0)
            if kept := _blocks(terms.size, terms.budget)[0]:
                worst = max(worst, 3.0 * terms.size / kept - 1.0)
        return worst


def _head_of(terms: Terms) -> Head:
    """Return the form of dithered levels and the fraction of the columns that a budget allows."""
    bits = 8.0 * terms.budget / terms.size
    return Head(DITHERED) if bits >= _WHOLE else Head(PART, fraction=max(1, int(bits / INNER * 65536.0)))


def _most_sent(head: Head, terms: Terms) -> int:
    """Return the number of values that travel, at most, over all draws of columns."""
    return sum(rows * -(-head.fraction * columns >> 16) for rows, columns in terms.shapes)


def _fits(head: Head, terms: Terms) -> bool:
    """Whether levels of the longest step fit the budget for every vector and every draw of columns.

    They take 0.14 bit a value, and some 30 bytes (measured for equal magnitudes, which take most).
    """
    return terms.budget >= 32 + _most_sent(head, terms) // 50


def _worst_of(head: Head, terms: Terms) -> float:
    """Return ω of a dithered value in the worst draw of columns: :data:`_WORST`, or that of as few bits as are left."""
    bits = 8.0 * terms.budget / max(1, _most_sent(head, terms))
    if bits >= _WHOLE:
        return _WORST
    small, large = 1.0 / _LONGEST_STEP, 0.5
    for _ in range(40):
        a = (small + large) / 2.0
        taken = a - a * math.log2(a) - (1.0 - a) * math.log2(1.0 - a)
        small, large = (a, large) if taken <= _LEARNT * bits else (small, a)
    return max(_WORST, 1.0 / (12.0 * small**2))


def _blocks(size: int, budget: int) -> tuple[int, int]:
    """Return the number of signs that fit a budget with a length for each block, and the number of values in a block.
    The last block may be shorter; all are powers of two."""
    best = 0, 0
    for bits in range(_TURNED.bit_length() - 1, size.bit_length()):
        block = 1 << bits
        count = min(size // block, budget // (block // 8 + 4))
        more = min(size - count * block, 8 * (budget - count * (block // 8 + 4) - 4))
        best = max(best, (count * block + (1 << more.bit_length() - 1 if more >= _TURNED else 0), block))
    return best


def _rounded(values: Vector, terms: Terms, key: Key) -> Levels:
    """Return rounded levels within the budget."""
    # Not even one value may fit: of rows that are too long for a flag each zero takes a two-thousandth of a bit.
    best = Levels.coded(Head(ROUNDED), np.zeros(values.size, np.int32), terms)
    if not values.any():
        return best

    def cost(step: int, levels: NDArray[np.int32]) -> int:
        nonlocal best
        top = bits_of(levels)
        found = Levels.coded(Head(ROUNDED, top, step if top else 0), levels, terms)
        if best.nbytes < found.nbytes and found.taken <= goal:
            best = found
        return found.taken

    control, goal = RateControl(values, terms.shapes, dithered=False, seed=0), terms.budget
    over, _ = control.search(goal, cost)
    if 100 * best.nbytes < _UNFILLED * terms.budget and over >= control.low:
        # Equal magnitudes: no step sends some of them.
        control.cut(over, goal, key, cost)
    if best.head.top:
        best.head = with_shifts(best.head, values, best.levels)
    return best


def _dithered(values: Vector, terms: Terms) -> Levels | None:
    """Return dithered levels within the budget; None where signs of a random part, turned, are nearer.

    The error of levels is known by their step, n D²/12, before they are sent. What is sent has no part in the choice,
    or the mean of what arrives would not be the vector: the step is that of other draws and, of a part, of other
    columns.
    """
    head, (kept, block) = _head_of(terms), _blocks(terms.size, terms.budget)
    largest = largest_of(values)
    if largest * 65536.0 / head.fraction >= _LARGEST / 64.0:
        raise NonFiniteUpdate(f"a value of magnitude {largest:g} and its dither, scaled, may overflow float32")
    # By the shapes alone: what the draw itself has decided would turn the mean.
    if not _fits(head, terms):
        return None
    limit = math.inf
    # Blocks that could overflow are left to levels.
    if kept and largest * terms.size / kept * math.sqrt(block) < _LARGEST:
        # Of normal values, which turned ones are, signs keep 2/π of the square.
        limit = math.pi / 2.0 * terms.size / kept * head.fraction / 65536.0 - 1.0
    if head.form == PART:
        other = replace(terms, seed=Key(terms.seed, "trial").u64())
        trial = _control(values, head, other)
        # Contexts make steps shorter; to work them out takes as long as to code.
        if trial and trial.error(trial.guess(terms.budget)) > limit and _trial(trial, head, other)[1] > limit:
            return None
    control = _control(values, head, terms)
    if control is None:
        return Levels.coded(head, np.zeros(streams_of(head, terms).size, np.int32), terms)
    step, error = _trial(control, head, terms)
    if head.form == DITHERED and error > limit:
        return None
    longer = 2
    while True:
        levels = control.levels(step, trial=False)
        found = Levels.coded(replace(head, top=bits_of(levels), step=step), levels, terms)
        if found.taken <= terms.budget or step == control.high:
            return found
        step, longer = min(step + longer, control.high), 2 * longer


def _control(values: Vector, head: Head, terms: Terms) -> RateControl | None:
    """Return the search for the step of the sent part of ``values``; None if nothing is sent."""
    if head.form == PART:
        parts = parts_of(head.fraction, terms)
        values = np.concatenate(
            [values[at].reshape(-1, columns)[:, kept].reshape(-1) for at, _, (columns, kept) in parts]
        )
    if largest_of(values) < width(LEAST_STEP):
        return None
    return RateControl(values, streams_of(head, terms).shapes, dithered=True, seed=terms.seed)


def _trial(control: RateControl, head: Head, terms: Terms) -> tuple[int, float]:
    """Return the smallest step whose dithered levels fit the budget, for draws that are not sent, and their error."""

    def cost(step: int, levels: NDArray[np.int32]) -> int:
        return Levels.coded(replace(head, top=bits_of(levels), step=step), levels, terms).taken

    # What one draw takes is spread by .2 to 1.1 bits times the root of the number (measured), a trial's as well: three.
    _, step = control.search(terms.budget - math.isqrt(9 * control.values.size) // 8, cost)
    step = min(step, control.high)
    return step, control.error(step)


def _turned_back(values: wire.SignScale, seed: int) -> Vector:
    """Return the values of a random part whose blocks EDEN has rotated."""
    found = values.decode()
    for index, at in enumerate(range(0, found.size, values.block)):
        with np.errstate(over="ignore", invalid="ignore"):  # of a hostile frame; receivers look at their sums
            rotate(found[at : at + values.block], rotation_of(seed, index), inverse=True, beside=found.size)
    # Signs make -0.0 of zeros.
    found += np.float32(0.0)
    return found


def at_link(codec: Codec, size: int, uplink: Callable[[], float], spent: Callable[[], float]) -> Codec:
    """Return a codec with the budget of one client's link: of :class:`Auto`, in error feedback or not, others as they
    are; see :meth:`Auto.at_link`."""
    if isinstance(codec, Auto):
        return codec.at_link(size, uplink(), spent())
    inner = getattr(codec, "codec", None)
    return replace(codec, codec=at_link(inner, size, uplink, spent)) if isinstance(inner, Auto) else codec  # type: ignore[type-var]


@functools.cache
def _say_unknown(seconds: float) -> None:
    log.warning(
        "Auto(seconds=%g): this node does not know the rate of its uplink, so it sends half a bit a value; state the "
        "rate in its configuration: --node-config 'uplink=\"1mbit\"'",
        seconds,
    )


@functools.cache
def _say_portable() -> None:
    log.warning(
        "Auto: neither numba nor the compiled file of fedcomp is installed, so updates are sent as top-k or EDEN "
        "with the same number of bytes, which loses more; install fedcomp[fast]"
    )
