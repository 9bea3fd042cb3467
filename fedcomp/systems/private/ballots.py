"""Sums of votes: clients vote on the signs of their largest coordinates, and the server adds noise to the counts.

B. Wang et al., "DataLens", CCS 2021, arXiv:2103.11109 (abstract): TopAgg was published for gradients of a generator,
and in one sentence for DP-SGD. This client-level form for models is derived here: a client's whole local update votes.
See :mod:`fedcomp.privacy.votes` for what a vote is.

What is bounded is counted, not clipped: a frame that holds anything but -1 and +1, or more than k of them, is refused
by the codec before it is decoded, and once more by the mechanism before it is added. So there is no clip norm to
choose, and a vote costs about ``log2 C(d, k) + k`` bits. What it costs beside that is accuracy: noise reaches all d
coordinates, and magnitudes are lost.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Vector
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.mechanism import Votes
from fedcomp.privacy.votes import TopkSign, threshold
from fedcomp.rules import OneOf, Real, checked
from fedcomp.systems.private.rule import Private

MODES: Final = ("mean", "threshold")
"""What a noisy sum of votes becomes: the sum over the public number of clients, or the signs that pass a threshold."""


class Ballots(Private):
    """The noisy count of votes as the update of the model.

    The guarantee does not depend on who answers: the noise is fixed, and a client that is lost or refused only leaves
    its vote out.

    Parameters
    ----------
    ballot : TopkSign
        How clients vote; its total k for the model bounds the L2 norm of a contribution by sqrt(k).
    server_lr : float
        What an outcome of 1 moves a coordinate by.
    mode : {"mean", "threshold"}
        ``V / n`` or ``sign(V)`` where ``|V| > beta n``, of the noisy sum V and the *expected* number of clients n. Both
        are post-processing: they cost nothing.
    beta : float
        The threshold as a fraction of the expected number of clients, in [0, 1]; of "threshold" only.
    **promise
        As :class:`fedcomp.systems.private.rule.Private`.

    Raises
    ------
    ConfigError
        For arguments that do not make a vote or a promise.
    """

    votes: ClassVar[bool] = True

    def __init__(
        self, ballot: TopkSign, *, server_lr: float, mode: str = "mean", beta: float = 0.0, **promise: Any
    ) -> None:
        if not isinstance(ballot, TopkSign):
            raise ConfigError(f"the ballot must be a TopkSign, got {ballot!r}")
        self.ballot = ballot
        self.server_lr: float = checked("server_lr", server_lr, Real(above=0.0))
        self.mode: str = checked("mode", mode, OneOf(*MODES))
        self.beta: float = checked("beta", beta, Real(least=0.0, most=1.0))
        if self.beta and self.mode != "threshold":
            raise ConfigError(f"beta={beta!r} is a threshold, which mode={mode!r} does not have; use mode='threshold'")
        super().__init__(**promise)

    def mechanism(self, layout: Layout, server_round: int) -> Votes:
        """Return the noisy sum of votes, of which each client has the ballot's k."""
        if not layout.size:
            raise ConfigError("the model has no floating-point parameters to vote on")
        return Votes(
            noise_multiplier=self.noise_multiplier,
            adjacency=self.adjacency,
            noise=self.noise,
            # Of the whole model: shares of single tensors do not matter for the bound.
            k=self.ballot.total(layout),
            shape=(layout.size,),
        )

    def contribution(self, update: Vector, layout: Layout, server_round: int) -> NDArray[np.int8]:
        """Return decoded votes as the integers they are.

        Raises
        ------
        Unbounded
            When a value is not -1, 0 or 1.
        """
        # The cast warns of NaN and of what int8 cannot hold; both are found below.
        with np.errstate(invalid="ignore"):
            votes = update.astype(np.int8)
        # Only -1, 0 and 1 equal their own sign. NaN equals nothing, and what int8 cannot hold comes back as another.
        if not np.array_equal(votes, update) or not np.array_equal(votes, np.sign(votes)):
            raise Unbounded("a vote is not -1, 0 or 1")
        return votes

    def released(self, noisy: NDArray[np.float64], layout: Layout, server_round: int) -> Vector:
        """Return the step that the noisy sum of votes stands for, float32 ``(layout.size,)``."""
        if self.mode == "threshold":
            passed = threshold(noisy, self.beta * self.expected)
            return passed.astype(np.float32) * np.float32(self.server_lr)
        return (noisy * (self.server_lr / self.expected)).astype(np.float32)

    def describe(self) -> str:
        """Return the ballot and what becomes of the sum."""
        rule = f"threshold {self.beta:g} n" if self.mode == "threshold" else "mean"
        return f"votes of {self.ballot!r}, {rule}, server learning rate {self.server_lr:g}"
