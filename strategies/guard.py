"""Rejection of outlying updates: a single extreme reply, even a finite one, can ruin a mean.

The guard sees two figures of every reply, the Euclidean norm of its update and its weight, before anything is added
to anything. It bounds how much one reply can do; it does not tell good directions from bad ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from fedcomp.rules import Configured, Int, Real


class MeasuredRound(Protocol):
    """What is known of a round, by node: a :class:`fedcomp.flower.report.Report`."""

    norms: dict[int, float]
    weights: dict[int, float]
    refused: dict[int, str]


@dataclass(frozen=True)
class Norms(Configured):
    """Refuse replies whose norm or weight is many times the usual one.

    The usual value is the median of the round's replies, or that of the last rounds' accepted replies if it is larger.
    Only the past decides for a single reply and for a split round, in which half of the replies are far larger than the
    other half. Without a past, all replies of a split round are refused, because either half may be right.

    Parameters
    ----------
    times_median : float
        How many times the usual norm an update may have; more than 1.
    weight_times_median : float
        How many times the usual weight a reply may have; more than 1. Numbers of examples differ more than norms do.
    window : int
        Number of past rounds considered; at least 1.

    Raises
    ------
    ConfigError
        For values outside of these.

    Notes
    -----
    It does not detect half or more of a round's replies with similar extreme norms, a harmful update within
    the factor, or slow growth, since each accepted norm enters the reference for later ones. Buffers sent as values
    (running statistics) are not part of the norm. In rounds with a single reply, an honest norm that grows by more than
    the factor in one round is refused.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedcomp.codecs import TopK
    >>> from fedcomp.strategies.compressed import Compressed
    >>> strategy = Compressed(FedAvg(), TopK(density=0.01), guard=Norms(times_median=5.0))
    """

    times_median: Annotated[float, Real(above=1.0)] = 10.0
    weight_times_median: Annotated[float, Real(above=1.0)] = 100.0
    window: Annotated[int, Int(1)] = 20

    def outliers(self, report: MeasuredRound, past: Sequence[MeasuredRound]) -> dict[int, str]:
        """Return the nodes whose replies are to be refused, with the reason.

        Parameters
        ----------
        report : MeasuredRound
            Of this round, with norms and weights of all replies that can be used otherwise.
        past : sequence of MeasuredRound
            Of the rounds before it, in their order.
        """
        recent = past[-self.window :]
        found: dict[int, str] = {}
        for what, times, now, before in (
            ("weight", self.weight_times_median, report.weights, [r.weights for r in recent]),
            ("update's norm", self.times_median, report.norms, [r.norms for r in recent]),
        ):
            accepted = [
                value
                for figures, r in zip(before, recent, strict=True)
                for node, value in figures.items()
                # A value that was refused must not raise what is usual.
                if node not in r.refused
            ]
            found |= _outliers(what, times, now, accepted)
        return found


def _outliers(what: str, times: float, figures: Mapping[int, float], past: Sequence[float]) -> dict[int, str]:
    # A reply that changes nothing, or counts for nothing, says nothing about what is usual.
    ordered = sorted(value for value in figures.values() if value > 0)
    if not ordered:
        return {}
    before = sorted(value for value in past if value > 0)
    known = before[len(before) // 2] if before else 0.0
    # The two middle values: equal for an odd number; the lower one is what half of the replies cannot push up.
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    divided = high > times * low
    if divided and not known:
        return {
            node: f"the {what} is {value:.4g}, and half of the round's {len(ordered)} replies are at {high:.4g} and "
            f"more, half at {low:.4g} and less: it is unclear which half is right, and no earlier round decides it"
            for node, value in figures.items()
        }
    # A single reply without a past has nothing to be compared with.
    if not known and len(ordered) == 1:
        return {}
    usual = known if divided or len(ordered) == 1 else max(low, known)
    return {
        node: f"the {what} is {value:.4g}, {value / usual:.3g} times the usual {usual:.4g}; the guard lets "
        f"{times:g} times pass"
        for node, value in figures.items()
        if value > times * usual
    }
