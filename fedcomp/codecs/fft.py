"""Sparse spectra: the largest coefficients of each tensor's Fourier transform, as range floats.

L. Wang, W. Wu, J. Zhang, H. Liu, G. Bosilca, M. Herlihy, R. Fonseca, "FFT-based Gradient Sparsification for the
Distributed Training of Deep Neural Networks", HPDC 2020 (abstract read; pipeline and range float recalled, construction
derived). A real transform with orthonormal coordinates takes the place of complex bins with weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

import numpy as np

from fedcomp import params
from fedcomp.codecs.axes import NATURAL, ORDERS, order_conflict
from fedcomp.codecs.base import State
from fedcomp.codecs.domain import Domain
from fedcomp.codecs.forms import FORMS, RESTS
from fedcomp.codecs.listed import INDICES
from fedcomp.codecs.orthonormal import Orthonormal, bases
from fedcomp.codecs.positional import SCOPES
from fedcomp.codecs.topk import Schedule, TopK, checked_schedule
from fedcomp.codecs.wrapper import Wrapper
from fedcomp.layout import Layout, Update, Vector
from fedcomp.rng import Key
from fedcomp.rules import Density, Made, OneOf
from fedcomp.wire import Frame

_ROOT: Final = math.sqrt(2.0)


@bases.register
@dataclass(frozen=True, repr=False, eq=False)
class DFT(Orthonormal):
    """The orthonormal real Fourier transform of a vector of any length.

    Coordinate 0 is the mean times √n, 2j - 1 and 2j are √2 times the real and the imaginary part of frequency j, and of
    an even length the last one is the highest frequency, whose imaginary part is 0. So all coordinates are alike:
    squares add up to the vector's, and the largest are the best to keep.

    numpy's transform in float64, rounded to float32 once. Two builds of numpy may differ in the last bit of a float64,
    which changes a rounded coordinate about once in 10⁸: a version of the model that is broadcast in this domain is
    checked by its digest, as all are. About 24 bytes of memory per element of the longest vector.

    Parameters
    ----------
    scope : {"layer", "global"}
        Transform every tensor by itself, or the whole model as one vector.
    order : str
        A permutation of "FDHW", the order in which a convolution's elements are read, the slowest axis first. "HWDF"
        and "HWFD" put together what filters and channels do at one place of the kernel. With ``scope="layer"`` only.

    Examples
    --------
    >>> from fedcomp.layout import Layout
    >>> wave = np.cos(2 * np.pi * np.arange(8) / 8).astype(np.float32)
    >>> DFT().apply(wave, Layout.flat(8))
    >>> np.abs(wave.round(3))
    array([0., 2., 0., 0., 0., 0., 0., 0.], dtype=float32)
    """

    basis_id: ClassVar[str] = "dft"

    scope: Annotated[str, OneOf(*SCOPES)] = "layer"
    order: Annotated[str, OneOf(*ORDERS)] = NATURAL

    def conflict(self) -> str:
        return order_conflict(self.order, self.scope)

    def turn(self, values: Vector, layer: int, *, inverse: bool = False) -> None:
        n, inner = values.size, (values.size - 1) // 2
        if inverse:
            spectrum = np.zeros(n // 2 + 1, np.complex128)
            spectrum[0] = values[0]
            pairs = spectrum[1 : inner + 1].view(np.float64)
            pairs[...] = values[1 : 2 * inner + 1]
            pairs /= _ROOT
            if n % 2 == 0:
                spectrum[-1] = values[-1]
            values[...] = np.fft.irfft(spectrum, n, norm="ortho")
            return
        spectrum = np.fft.rfft(values.astype(np.float64), norm="ortho")
        values[0] = spectrum[0].real
        pairs = spectrum[1 : inner + 1].view(np.float64)
        pairs *= _ROOT
        values[1 : 2 * inner + 1] = pairs
        if n % 2 == 0:
            values[-1] = spectrum[-1].real
        # The transform of zeros has zeros of both signs, and -0.0 would travel where 0.0 does not.
        values += np.float32(0.0)


@dataclass(frozen=True, repr=False, eq=False)
class FFT(Wrapper):
    """Send the largest coefficients of each tensor's Fourier transform; the server adds spectra and inverts the sum
    once.

    ``Domain(DFT(order=order), TopK(density, "layer", values, index, schedule=schedule, rest=rest))`` under one name and
    with the paper's defaults. The paper has no memory; put :class:`~fedcomp.codecs.ErrorFeedback` around it for one.

    Parameters
    ----------
    density : float
        Fraction of the coefficients of a tensor that travels, 1 - θ of the paper (0.15, recalled), in (0, 1].
    values, index, rest :
        As for :class:`~fedcomp.codecs.TopK`; "range8" and "range10" are the paper's range-based floats.
    order : str
        As for :class:`DFT`.
    schedule : sequence of (int, float)
        Pairs of a first round and the density from it on, in place of ``density``; see :class:`~fedcomp.codecs.TopK`
        and :func:`diminishing`.

    Notes
    -----
    For weights that vary smoothly along some order of their axes, a few coefficients hold nearly all of the
    energy. For white noise they hold less than the same number of largest elements.

    Examples
    --------
    >>> slow = np.cos(np.arange(64) * 0.2)
    >>> float(np.linalg.norm(FFT(density=0.2).preview(slow) - slow) / np.linalg.norm(slow)) < 0.2
    True
    """

    codec_id: ClassVar[str] = "fft"

    density: Density = 0.15
    values: Annotated[str, OneOf(*FORMS)] = "range8"
    order: Annotated[str, OneOf(*ORDERS)] = NATURAL
    index: Annotated[str, OneOf(*INDICES)] = "auto"
    schedule: Annotated[Schedule, Made(checked_schedule)] = ()
    rest: Annotated[str, OneOf(*RESTS)] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        topk = TopK(self.density, "layer", self.values, self.index, rest=self.rest, schedule=self.schedule)
        domain = Domain(DFT(order=self.order), topk)
        params.assign(self, codec=domain, never_enlarges=domain.never_enlarges)

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        """Transform, select, round; see :meth:`fedcomp.codecs.base.Codec.encode`. The round is the key's."""
        return self.codec.encode(update, state, key)

    def contraction(self, layout: Layout) -> float | None:
        """Return that of :class:`~fedcomp.codecs.TopK`: an orthonormal transform changes no error."""
        return self.codec.contraction(layout)
