"""DP-FedAvg as a Flower strategy: the noisy mean of clipped updates (:mod:`fedcomp.systems.private.clipped`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from flwr.serverapp.strategy import Strategy

from fedcomp.privacy.adaptive import AdaptiveClip
from fedcomp.strategies.private.strategy import PrivateStrategy
from fedcomp.systems.private.clipped import Clipped


class DpFedAvg(PrivateStrategy, Clipped):
    """DP-FedAvg: federated averaging of clipped updates, with noise on the sum.

    Parameters
    ----------
    inner : Strategy
        One of Flower's weighted means, with ``fraction_evaluate=0.0``; it gets the noisy mean.
    clip : float or AdaptiveClip
        Largest L2 norm of one client's update, all tensors together, in the units of the update; or an adaptive rule
        for it.
    noise_multiplier : float
        Standard deviation of the noise on the sum over its sensitivity (``clip``; twice that with "replace").
    **promise
        As :class:`fedcomp.systems.private.rule.Private`: adjacency, delta, population, sampling, count, budget, noise,
        insecure_deterministic, seed.

    Attributes
    ----------
    clip, clips
        Of :class:`fedcomp.systems.private.clipped.Clipped`.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedcomp.codecs import TopK
    >>> from fedcomp.strategies.compressed import Compressed
    >>> strategy = DpFedAvg(FedAvg(fraction_evaluate=0.0), clip=1.0, noise_multiplier=1.0, population=1000)
    >>> strategy = Compressed(strategy, TopK(density=0.01))
    """

    STATE: ClassVar[Mapping[str, Any]] = {"clip": float, "clips": dict[int, float]}

    def __init__(self, inner: Strategy, *, clip: float | AdaptiveClip, noise_multiplier: float, **promise: Any) -> None:
        super().__init__(inner, clip=clip, noise_multiplier=noise_multiplier, **promise)
