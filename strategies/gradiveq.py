"""GradiVeQ over Flower's messages: :class:`fedcomp.systems.gradiveq.FittedBasis` with a cohort of its own."""

from __future__ import annotations

from typing import Any, Final

from fedcomp.codecs.gradiveq import GradiVeQ
from fedcomp.strategies.averaging import Averaging, averaging_system
from fedcomp.systems import gradiveq


class FittedBasis(Averaging):
    """GradiVeQ: average updates in a basis fitted to earlier averages.

    Parameters
    ----------
    codec : GradiVeQ or dict, optional
        Slices, basis, form of the coefficients; default slices of 512 and one basis for all slices of a tensor.
    sampling, compression : int
        Rounds of each phase; with ``server_lr`` and ``warmup_rounds`` as of
        :class:`fedcomp.systems.gradiveq.FittedBasis`.
    **options
        As of :class:`~fedcomp.strategies.averaging.Averaging`.

    Examples
    --------
    >>> from fedcomp.codecs import GradiVeQ
    >>> strategy = FittedBasis(GradiVeQ(width=256), sampling=10, compression=40, fraction_train=0.5)
    """

    CODEC = GradiVeQ
    SYSTEM = gradiveq.FittedBasis

    def __init__(
        self,
        codec: GradiVeQ | dict[str, Any] | None = None,
        *,
        sampling: int = 20,
        compression: int = 130,
        **options: Any,
    ) -> None:
        super().__init__(codec, sampling=sampling, compression=compression, **options)


SYSTEM: Final = averaging_system(
    "gradiveq",
    "GradiVeQ",
    "Yu et al. 2018, GradiVeQ: vector quantization for bandwidth-efficient gradient aggregation in distributed CNN "
    "training",
    "slices of convolutions in a basis that the server fitted to former averages, so that the sum is as short as one "
    "update",
    FittedBasis,
    ("width", "loss"),
    ("sampling", "compression"),
)
