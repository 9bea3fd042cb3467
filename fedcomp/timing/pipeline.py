"""Several rounds in flight: the time they save, and the stability that their delay costs.

Li, Yu, Li, Avestimehr, Kim, Schwing, "Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net
Training", NeurIPS 2018, arXiv:1811.03619 (abstract read, the body recalled). The law of the period for one processor
and one link is derived here, and tested against the discrete events that :func:`simulate` plays. All seconds are
*simulated*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.rng import Key
from fedcomp.rules import Configured, Int, NotNegative, Real, checked
from fedcomp.timing.collectives import Coding, Network

__all__ = ["Pipeline", "layered", "log_normal", "simulate", "stable_step", "star"]


@dataclass(frozen=True, slots=True)
class Pipeline(Configured):
    """Iterations of which ``width`` may be in flight, on one processor and one link.

    Parameters
    ----------
    compute : float
        Seconds of one iteration's work: forward, backward, the optimizer's step.
    communicate : float
        Seconds of one iteration's collective.
    width : int
        1 is synchronous training; with K the gradient that is applied is K - 1 steps old.

    Examples
    --------
    >>> Pipeline(1.0, 0.5, width=2).period, Pipeline(1.0, 0.5, width=1).period
    (1.0, 1.5)
    """

    compute: NotNegative
    communicate: NotNegative
    width: Annotated[int, Int(1)] = 2

    @property
    def period(self) -> float:
        """Seconds per iteration in the long run: max(a, b, (a + b) / K) (derived).

        Where times are constant more than two in flight gain nothing: (a + b) / 2 is at most the longer of both.
        """
        both = self.compute + self.communicate
        return max(self.compute, self.communicate, both / self.width)

    @property
    def speed_up(self) -> float:
        """How many times faster than synchronous training, at most 2 for the same collective (derived)."""
        both = self.compute + self.communicate
        return both / self.period if both else 1.0

    def coded(self, network: Network, nbytes: float, coding: Coding) -> Pipeline:
        """Return the pipeline whose ring carries ``nbytes`` compressed: coding is work of the processor.

        Of the collective only what depends on bytes shrinks (derived).
        """
        encode = nbytes * (coding.encode_per_byte + coding.decode_per_byte)
        return Pipeline(self.compute + encode, network.ring(nbytes / coding.ratio), self.width)


def star(down: ArrayLike, compute: ArrayLike, up: ArrayLike, server: float) -> float:
    """Return the seconds of a synchronous round of unequal clients around a server (derived).

    Parameters
    ----------
    down, compute, up : array_like, shape (clients,)
        Seconds of each client's own download, work and upload.
    server : float
        Seconds that the server's link takes for the bytes of all clients.
    """
    slowest = np.asarray(down, float) + np.asarray(compute, float) + np.asarray(up, float)
    return max(float(slowest.max(initial=0.0)), float(server))


def simulate(compute: ArrayLike, communicate: ArrayLike, width: int) -> NDArray[np.float64]:
    """Return when each iteration's collective ends, by playing the events.

    Work t begins when work t - 1 and collective t - ``width`` have ended, collective t when work t and collective t - 1
    have.

    Parameters
    ----------
    compute, communicate : array_like, shape (iterations,)
        Seconds.

    Raises
    ------
    ConfigError
        When there are not as many of one as of the other.
    """
    works, transfers = np.asarray(compute, float), np.asarray(communicate, float)
    if works.shape != transfers.shape or works.ndim != 1:
        raise ConfigError(f"{works.shape} times of work and {transfers.shape} of collectives; expected as many of both")
    width = params.integer("width", width, low=1)
    ends = np.zeros(works.size)
    worked = 0.0
    for t, (work, transfer) in enumerate(zip(works, transfers, strict=True)):
        worked = max(worked, ends[t - width] if t >= width else 0.0) + work
        ends[t] = max(worked, ends[t - 1] if t else 0.0) + transfer
    return ends


def layered(work: ArrayLike, transfer: ArrayLike, latency: float, *, during: bool = False) -> tuple[float, float]:
    """Return the seconds until all layers of a gradient are at the server: one exchange for each, and one for all.

    Each exchange is a question and an answer, which arrives when its bytes do. (derived)

    Parameters
    ----------
    work : array_like, shape (layers,)
        Seconds of back-propagation through each layer, the last layer first.
    transfer : array_like, shape (layers,)
        Seconds of each layer's bytes.
    latency : float
        Seconds of a message in one direction.
    during : bool
        Whether a layer leaves while the others are still computed, as where a client answers several questions at a
        time. A Flower client answers the first question when all of its work is done.

    Examples
    --------
    >>> layered([1.0, 1.0], [1.0, 1.0], 0.1), layered([1.0, 1.0], [1.0, 1.0], 0.1, during=True)
    ((4.4, 4.2), (3.4, 4.2))
    """
    works, transfers = np.asarray(work, float), np.asarray(transfer, float)
    if works.shape != transfers.shape or works.ndim != 1:
        raise ConfigError(f"{works.shape} times of work and {transfers.shape} of transfers; expected as many of both")
    total = float(works.sum())
    worked, end = 0.0, 0.0
    for seconds, sending in zip(works, transfers, strict=True):
        worked += float(seconds)
        # The question leaves when the answer before it has come.
        ready = max(end + latency, latency + (worked if during else total))
        end = ready + latency + float(sending)
    return round(end, 12), round(2 * latency + total + float(transfers.sum()), 12)


def log_normal(mean: float, variation: float, count: int, key: Key) -> NDArray[np.float64]:
    """Return durations that are log-normal with a mean and a coefficient of variation, float64 of shape (count,)."""
    mean = params.positive("mean", mean)
    spread = math.log1p(checked("variation", variation, Real(least=0.0, below=100.0)) ** 2)
    drawn = key.generator().standard_normal(count)
    return mean * np.exp(math.sqrt(spread) * drawn - spread / 2.0)


def stable_step(delay: int) -> float:
    """Return the largest stable step size times curvature of gradient descent on a quadratic, for gradients that are
    ``delay`` steps old: 2 sin(pi / (2 (2 delay + 1))) (derived, checked by bisection).

    Examples
    --------
    >>> [round(stable_step(delay), 3) for delay in (0, 1, 2, 3)]
    [2.0, 1.0, 0.618, 0.445]
    """
    return 2.0 * math.sin(math.pi / (2.0 * (2.0 * params.integer("delay", delay, low=0) + 1.0)))
