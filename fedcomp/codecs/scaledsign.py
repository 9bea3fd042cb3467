"""Scaled sign: signs times the mean magnitude, the compressor of EF-signSGD (Karimireddy et al. 2019; recalled).

S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes", ICML 2019, arXiv:1901.09847. ``ErrorFeedback(ScaledSign())`` is EF-signSGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.codecs.forms import narrowed
from fedcomp.codecs.positional import (
    SCOPES,
    PositionalCodec,
    Stretch,
)
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.rules import Int, OneOf
from fedcomp.wire import SchemaMismatch, Tensor

_BLOCK = 1 << 16


@dataclass(frozen=True, repr=False, eq=False)
class ScaledSign(PositionalCodec):
    """Send ``(‖x‖₁ / n) sign(x)``: one bit per coordinate and one float32 per stretch, or per block.

    Every coordinate arrives as plus or minus the mean magnitude; the sign of 0 is +, that of -0.0, too. The mean is the
    least-squares scale, and the error is ``‖x‖² - ‖x‖₁² / n`` per stretch, zeros included (derived). Rounding the scale
    to float32 adds at most 2⁻⁴⁸ ‖x‖₁² / n to that where the mean is a normal number. A mean below 1.2e-38 keeps fewer
    bits, and one below 7e-46 rounds to zero; the mean never overflows.

    Under error feedback a coordinate waits until it was sent often enough at the mean's size. Memory of a constant t(4)
    update of 5000 values after 2000 rounds, in lengths of that update: 168 with one scale, and still growing, 79 with
    blocks of 512, 16 with blocks of 64, which cost half a bit more per coordinate (measured).

    Parameters
    ----------
    scope : {"layer", "global"}
        One scale per tensor, or for the whole model: its tensors differ in magnitude, so that one scale fits few.
    block : int
        Coordinates that share a scale within a stretch, at least 2; 0 for one scale per stretch.

    Examples
    --------
    >>> ScaledSign().preview([0.5, -3.0, 1.0, 0.25])
    array([ 1.1875, -1.1875,  1.1875,  1.1875], dtype=float32)
    """

    codec_id: ClassVar[str] = "scaledsign"
    never_enlarges = True
    wide = True
    complete = wire.SignScale
    takes_densities = False

    scope: Annotated[str, OneOf(*SCOPES)] = "layer"
    block: Annotated[int, Int(0, 1 << 24)] = 0

    def conflict(self) -> str:
        if self.block != 1:
            return ""
        return (
            "block=1 is not valid: a scale for every coordinate makes frames longer than the float32 values, which "
            "receivers refuse; block must be 0 or at least 2"
        )

    def pack(self, values: NDArray[Any], stretch: Stretch, key: Key) -> Tensor:
        coded = wire.SignScale(values < 0.0, self.scales(values), self.block)
        return Tensor(coded, (stretch.size,))

    def scales(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Return the magnitude that the coordinates of each block, or all of them, get."""
        return _means(values, self.block)

    def form(self) -> dict[str, int]:
        return {"block": self.block}

    def check(self, tensor: Tensor, stretch: Stretch) -> None:
        super().check(tensor, stretch)
        coded = tensor.values
        assert isinstance(coded, wire.SignScale)
        if coded.block != self.block:
            raise SchemaMismatch(
                f"{stretch.name}: expected signs in blocks of {self.block}, got blocks of {coded.block} (0: one scale)"
            )

    def contraction(self, layout: Layout) -> float:
        """Return ``1/n`` of the largest stretch or block: ‖x‖₁ >= ‖x‖, with equality for a spike (derived).

        Dense vectors do far better: ‖x‖₁² / (n‖x‖²), 2/π for normal values. The factor 1 - 2⁻⁴⁸ is the scale's
        rounding; vectors whose mean magnitude is below 1.2e-38 are excepted.
        """
        longest = max((s.size for s in self.stretches(layout)), default=1)
        return (1.0 - 2.0**-48) / (min(longest, self.block) if self.block else longest)


@dataclass(frozen=True, repr=False, eq=False)
class NormSign(ScaledSign):
    """Send ``(‖x‖∞ / 2) sign(x)``: one bit per coordinate and one float32 per stretch, or per block.

    Halves every box around zero, but is not a contraction in the Euclidean norm for four or more coordinates: of a
    spike of length 1 it leaves ``n / 4`` (derived). The one-bit quantiser of Dyna-COLD with its scale on the wire.

    Parameters
    ----------
    scope, block
        As :class:`ScaledSign`.

    Examples
    --------
    >>> NormSign().preview([0.5, -3.0, 1.0, 0.25])
    array([ 1.5, -1.5,  1.5,  1.5], dtype=float32)
    """

    codec_id: ClassVar[str] = "normsign"
    never_enlarges = False

    def scales(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Return half the largest magnitude of each block."""
        starts = np.arange(0, values.size, self.block or values.size)
        return narrowed(np.maximum.reduceat(np.abs(values), starts).astype(np.float64) / 2.0)

    def contraction(self, layout: Layout) -> float | None:  # type: ignore[override]  # the mean's always is one
        """Return ``1 - n/4`` of a longest stretch or block of up to three elements (derived), else None."""
        longest = max((s.size for s in self.stretches(layout)), default=1)
        n = min(longest, self.block) if self.block else longest
        return (1.0 - n / 4.0) * (1.0 - 2.0**-20) if n < 4 else None


def _means(values: NDArray[Any], block: int) -> NDArray[np.float32]:
    """Return the mean magnitude of every block (0: of all), summed in float64 without a float64 copy of the vector."""
    if block == 0:
        parts = (np.abs(values[i : i + _BLOCK]).sum(dtype=np.float64) for i in range(0, values.size, _BLOCK))
        return narrowed(np.full(1, float(sum(parts)) / values.size))
    # Whole blocks at a time: one that is cut in two would get two means.
    step = max(1, _BLOCK // block) * block
    parts = (wire.SignScale.quantise(values[i : i + step], block).scales for i in range(0, values.size, step))
    return np.concatenate(list(parts))
