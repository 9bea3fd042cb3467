"""TopAgg as a Flower strategy: the noisy count of clients' votes (:mod:`fedcomp.systems.private.ballots`)."""

from __future__ import annotations

from typing import Any

from flwr.serverapp.strategy import Strategy

from fedcomp.codecs import Codec
from fedcomp.layout import DensityPolicy
from fedcomp.privacy.votes import TopkSign
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.strategy import PrivateStrategy
from fedcomp.systems.private.ballots import Ballots


class TopAgg(PrivateStrategy, Ballots):
    """TopAgg: update the model by the noisy count of clients' votes.

    Use it inside ``Compressed`` with the same ballot as codec; :func:`topagg` makes both. A client without the mod
    sends a dense model. The server, which is trusted, then casts the vote that client would have cast: the sum is the
    same, only the bytes differ. A dense reply that is not finite casts none.

    Parameters
    ----------
    inner : Strategy
        One of Flower's weighted means, which gets the model plus ``server_lr`` times the outcome of the vote.
    ballot, server_lr, mode, beta
        As :class:`fedcomp.systems.private.ballots.Ballots`.
    **promise
        As :class:`fedcomp.systems.private.rule.Private`.

    Raises
    ------
    ConfigError
        For arguments that give no valid vote or no guarantee.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> strategy = TopAgg(
    ...     FedAvg(fraction_evaluate=0.0), TopkSign(k=200), server_lr=0.05, noise_multiplier=2.0, population=1000
    ... )
    """

    def __init__(self, inner: Strategy, ballot: TopkSign, **arguments: Any) -> None:
        super().__init__(inner, ballot=ballot, **arguments)
        # A dense reply of a client without the mod is encoded with it: its vote.
        self.encoding = ballot


def topagg(
    inner: Strategy,
    ballot: TopkSign,
    *,
    downlink: Codec | dict[str, Any] | None = None,
    policy: DensityPolicy | None = None,
    seed: int = 0,
    **arguments: Any,
) -> Compressed:
    """Return TopAgg inside the drop-in pair: clients send packed votes, the server may compress what it sends.

    Parameters
    ----------
    inner, ballot, **arguments
        See :class:`TopAgg`.
    downlink, policy, seed
        See :class:`fedcomp.strategies.compressed.Compressed`. A policy's densities are the ballot's, with
        ``scope="layer"``.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> strategy = topagg(
    ...     FedAvg(fraction_evaluate=0.0), TopkSign(k=200), server_lr=0.05, noise_multiplier=2.0, population=1000
    ... )
    """
    return Compressed(
        TopAgg(inner, ballot, seed=seed, **arguments), ballot, downlink, feedback=False, policy=policy, seed=seed
    )
