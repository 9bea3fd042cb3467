"""Formats of selected values: float32, 16 bits, or 8 to 1 bits with a scale.

A form says how values are written, which parameters a receiver requires of them, and how much of their energy is sure
to arrive. Codecs name a form by a string: ``TopK(0.01, values="q2")``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.layout import Vector
from fedcomp.wire import SchemaMismatch, Values
from fedcomp.wire.rangefloat import least_mantissa

BLOCK: Final = 256
"""Values that share a scale in the forms "q8" and "q4"."""


def narrowed(values: NDArray[Any]) -> Vector:
    """Return finite ``values`` in float32; what lies beyond its largest number becomes that number."""
    if values.dtype == np.float32:
        return values
    # Cut before the conversion, which would make infinity of it: no receiver takes that.
    largest = float(np.finfo(np.float32).max)
    return np.clip(values, -largest, largest).astype(np.float32)


class ValueForm(ABC):
    """One way to write values.

    Attributes
    ----------
    values : type of Values
        The wire's value codec.
    form : mapping of str to int
        What lengths and parameters follow from, as :func:`fedcomp.wire.longest` takes it.
    never_enlarges : bool
        Whether what arrives is never longer than what was written.
    exact : bool
        Whether float32 values arrive bit for bit.
    alone : bool
        Whether every value is written by itself, without a scale that it shares.
    relative : bool
        Whether every value keeps its relative precision, however much smaller than others it is.
    """

    values: ClassVar[type[Values]]
    form: Mapping[str, int] = {}  # never written to
    never_enlarges: bool = False
    exact: bool = False
    alone: bool = False
    relative: bool = False

    @abstractmethod
    def code(self, chosen: NDArray[Any]) -> Values:
        """Return ``chosen``, finite floats of shape (k,), as they travel; each keeps its sign or becomes 0."""

    def check(self, values: Values, where: str) -> None:  # noqa: B027  # most forms have no parameters
        """Raise SchemaMismatch when ``values``, of class :attr:`values`, have other parameters than this form's.

        ``where`` names the tensor in the message.
        """

    @abstractmethod
    def kept(self, k: int) -> float | None:
        """Return a fraction of the energy of any k values by which their squared error is at least below it.

        ``‖v - C(v)‖² <= (1 - kept) ‖v‖²`` for every v of at most k values; None where no such fraction is above 0.
        """

    def kept_of_top(self, k: int, n: int) -> float | None:
        """Return the same fraction of the energy of n values of which the k largest are written."""
        # The k largest hold at least k/n of the energy, with equality for equal magnitudes.
        return None if (kept := self.kept(k)) is None else kept * k / n

    def kept_of_largest(self, k: int) -> float | None:
        """Return the same fraction of the largest value's square alone."""
        # The energy of all is at least the largest square.
        return self.kept(k)


class _Raw(ValueForm):
    values = wire.Raw
    alone = True
    relative = True
    never_enlarges = True
    exact = True

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def code(self, chosen: NDArray[Any]) -> Values:
        return wire.Raw(narrowed(chosen) if self.dtype == "float32" else chosen)

    def kept(self, k: int) -> float:
        return 1.0


class _Half(ValueForm):
    values = wire.Fp16
    alone = True

    def code(self, chosen: NDArray[Any]) -> Values:
        # Fp16 cuts at its own largest number.
        return wire.Fp16(chosen)

    def kept(self, k: int) -> None:
        """No bound: small numbers are lost completely and large ones are cut."""
        return


class _Brain(ValueForm):
    values = wire.Bf16
    alone = True
    relative = True

    def code(self, chosen: NDArray[Any]) -> Values:
        return wire.Bf16(narrowed(chosen))

    def kept(self, k: int) -> float:
        """The relative rounding error of normal numbers is below 2⁻⁸."""
        return 1.0 - 2.0**-16


class _Levels(ValueForm):
    """Symmetric levels of the largest magnitude in every block of 256 values, rounded to the nearest."""

    values = wire.QsgdLevels

    def __init__(self, levels: int) -> None:
        self.levels = levels
        self.form = {"levels": levels, "bucket": BLOCK}

    def code(self, chosen: NDArray[Any]) -> Values:
        return wire.QsgdLevels.nearest(narrowed(chosen), self.levels, BLOCK)

    def check(self, values: Values, where: str) -> None:
        assert isinstance(values, wire.QsgdLevels)
        if (values.s, values.bucket) != (self.levels, BLOCK):
            raise SchemaMismatch(
                f"{where}: expected {self.levels} levels in blocks of {BLOCK}, got {values.s} in {values.bucket}"
            )

    def kept(self, k: int) -> float:
        """s² / (s² + (B - 1)/4) with blocks of B (derived).

        With step Δ the largest of a block, s Δ, arrives exactly, and no error exceeds Δ/2 or the value: the ratio of
        errors to energy is largest when all others are Δ/2.
        """
        others = (min(max(k, 1), BLOCK) - 1) / 4.0
        # Rounding in float32 costs next to nothing; the factor covers it.
        return self.levels**2 / (self.levels**2 + others) * (1.0 - 2.0**-20)

    def kept_of_largest(self, k: int) -> float:
        """The largest value is the largest of its block and arrives exactly. No other error exceeds its value."""
        return 1.0 - 2.0**-20


class _Range(ValueForm):
    """Floats of N bits over the range of all values of the tensor."""

    values = wire.RangeFloat

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.form = {"bits": bits}

    def code(self, chosen: NDArray[Any]) -> Values:
        x = narrowed(chosen)
        coded = wire.RangeFloat.quantise(x, self.bits)
        # What was chosen by a sample may miss what the sample has not; eight octaves keep what is promised.
        error = coded.decode().astype(np.float64) - x
        energy = np.square(x.astype(np.float64)).sum()
        if float(error @ error) > (1.0 - self.kept(x.size)) * float(energy):
            coded = wire.RangeFloat.quantise(x, self.bits, self._safe)
        return coded

    def check(self, values: Values, where: str) -> None:
        assert isinstance(values, wire.RangeFloat)
        if values.bits != self.bits:
            raise SchemaMismatch(f"{where}: expected range floats of {self.bits} bits, got {values.bits}")

    @property
    def _safe(self) -> int:
        return max(0, self.bits - 4)

    def kept(self, k: int) -> float:
        """(1 - δ²) / (1 + (k - 1) r²/4) with δ = 1/(2^(m+1) + 1) and r = (1 + δ)(1 + 2^-m) / 2⁸, m = N - 4 (derived).

        Half of the codes or more are those of the sign that reaches further: eight octaves, less a step. Numbers within
        them are off by δ of themselves at most, the others by half the smallest, r times the largest, and by no more
        than themselves: the ratio of errors to energy is largest when all but one are that half.
        """
        off = self._off(self._safe)
        ratio = (1.0 + off) * (1.0 + 2.0**-self._safe) * 2.0**-8
        return (1.0 - off**2) / (1.0 + max(0, k - 1) * ratio**2 / 4.0) * (1.0 - 2.0**-20)

    def kept_of_largest(self, k: int) -> float:
        """1 - δ² for the smallest possible mantissa; no other error exceeds its value."""
        return (1.0 - self._off(least_mantissa(self.bits)) ** 2) * (1.0 - 2.0**-20)

    @staticmethod
    def _off(mantissa: int) -> float:
        """Return the largest relative error of a number with this many mantissa bits, halfway between 1 and its
        neighbour."""
        return 1.0 / (2.0 ** (mantissa + 1) + 1.0)


class _TwoMagnitudes(ValueForm):
    """A sign and one of two magnitudes; these have the smallest squared error over all values of the tensor."""

    values = wire.Codebook
    form: Mapping[str, int] = {"bits": 2}
    never_enlarges = True

    def code(self, chosen: NDArray[Any]) -> Values:
        return wire.Codebook.quantise(narrowed(chosen))

    def check(self, values: Values, where: str) -> None:
        assert isinstance(values, wire.Codebook)
        if values.bits != 2:
            raise SchemaMismatch(f"{where}: expected a sign and one of two magnitudes, got codes of {values.bits} bits")

    def kept(self, k: int) -> float:
        """1/H_k with the harmonic number H_k <= 1 + ln k (derived).

        Two magnitudes do no worse than one for the a largest values and 0 for the others, whatever a: they keep at
        least C = max_a S_a²/a, where S_a is the sum of the a largest. Since the a-th largest is at most S_a/a, its
        square is at most C/a, and all squares add up to at most C H_k.
        """
        k = max(k, 1)
        harmonic = float(np.sum(1.0 / np.arange(1, k + 1))) if k < 1000 else 1.0 + float(np.log(k))
        return (1.0 - 2.0**-20) / harmonic

    def kept_of_top(self, k: int, n: int) -> float:
        """Two magnitudes are never worse than one."""
        return max(self.kept(k) * k / n, _kept_by_one_magnitude(k, n))


class _Signs(ValueForm):
    """Signs and the mean magnitude of all values of the tensor, as in sparse ternary compression."""

    values = wire.SignScale
    form: Mapping[str, int] = {"block": 0}
    never_enlarges = True

    def code(self, chosen: NDArray[Any]) -> Values:
        return wire.SignScale.quantise(narrowed(chosen))

    def check(self, values: Values, where: str) -> None:
        assert isinstance(values, wire.SignScale)
        if values.block:
            raise SchemaMismatch(
                f"{where}: expected one magnitude for all signs, the frame has one for every {values.block}"
            )

    def kept(self, k: int) -> float:
        """1/k: what arrives is ‖v‖₁²/k >= ‖v‖²/k, with equality for a spike (derived)."""
        return (1.0 - 2.0**-48) / max(k, 1)

    def kept_of_top(self, k: int, n: int) -> float:
        """min(k/n, 1/k): see :class:`~fedcomp.codecs.STC`."""
        return _kept_by_one_magnitude(k, n)


def _kept_by_one_magnitude(k: int, n: int) -> float:
    # Why is said at :meth:`fedcomp.codecs.STC.contraction`.
    return (1.0 - 2.0**-48) * min(k / n, 1.0 / k)


FORMS: Final[Mapping[str, ValueForm]] = {
    "float32": _Raw("float32"),
    "fp16": _Half(),
    "bf16": _Brain(),
    "q8": _Levels(127),
    "q4": _Levels(7),
    "q2": _TwoMagnitudes(),
    "range10": _Range(10),
    "range8": _Range(8),
    "range6": _Range(6),
    "range4": _Range(4),
    "sign": _Signs(),
    "float64": _Raw("float64"),
}
"""By name. "float64" is as values are: updates are float32, vectors of gossip nodes may be float64."""

LOW_BITS: Final = frozenset({"q8", "q4", "q2", "range8", "range6", "range4", "sign"})

RESTS: Final = ("auto", "float32", "bf16", "q8")
"""How the dense rest may travel; "auto": "q8" beside values of 8 bits and fewer, else "float32"."""


def rest_form(values: str, rest: str = "auto") -> ValueForm:
    """Return the form of the dense rest beside chosen ``values``."""
    if rest == "auto":
        rest = "q8" if values in LOW_BITS else "float32"
    return FORMS[rest]
