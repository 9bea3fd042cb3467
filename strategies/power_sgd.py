"""PowerSGD over Flower's messages: :class:`fedcomp.systems.power_sgd.SharedBasis` with a cohort of its own."""

from __future__ import annotations

from typing import Final

from fedcomp.codecs.power_sgd import PowerSGD
from fedcomp.strategies.averaging import Averaging, averaging_system
from fedcomp.systems import power_sgd


class SharedBasis(Averaging):
    """PowerSGD: average updates in a low-rank basis shared by all clients.

    Parameters
    ----------
    codec : PowerSGD or dict, optional
        Rank, form, memory; default rank 2, one exchange.
    server_lr, warmup_rounds, policy, guard, seed, **cohort
        As of :class:`~fedcomp.strategies.averaging.Averaging`. The step size must be 1 with the aggregated memory,
        which treats the step as the mean.

    Examples
    --------
    >>> from fedcomp.codecs import PowerSGD
    >>> strategy = SharedBasis(PowerSGD(rank=4), warmup_rounds=1, fraction_train=0.5)
    """

    CODEC = PowerSGD
    SYSTEM = power_sgd.SharedBasis


SYSTEM: Final = averaging_system(
    "power-sgd",
    "PowerSGD",
    "Vogels et al. 2019, PowerSGD: practical low-rank gradient compression for distributed optimization",
    "one low-rank factor per matrix, in a basis that all clients share and a power iteration improves, so that the sum "
    "is as short as one update; the rest is remembered",
    SharedBasis,
    ("rank", "form"),
)
