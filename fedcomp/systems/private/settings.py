"""Settings of a private run: its guarantee and its cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fedcomp import params
from fedcomp.privacy.events import Adjacency, Noise
from fedcomp.privacy.sampling import Sampling
from fedcomp.rules import Configured, Inside, Int, Maybe, NotNegative, Real, Seed, Switch


@dataclass(frozen=True, kw_only=True)
class PrivacySettings(Configured):
    """The promise of a private strategy, and what it costs.

    Strategies take these as keyword arguments: ``DpFedAvg(inner, clip=1.0, noise_multiplier=2.0, budget=8.0)``.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise on the sum over the sensitivity of the sum; 0 promises nothing.
    adjacency : {"zero_out", "add_remove", "replace"}
        What one client may change. Under "zero_out" its contribution is left out of every sum and count, as one that
        was refused is; "replace" doubles the sensitivity.
    delta : float
        Must be below 1 / ``population``.
    population : int
        Public number N of units (clients, or records) that may ever take part. 0: learnt by ``declare``, which whoever
        runs the rounds calls.
    sampling : Sampling, optional
        Who takes part in a round; default everyone, without amplification.
    budget : float, optional
        An epsilon at ``delta``; a round that would cross it is not begun.
    noise : {"discrete_gaussian", "skellam", "gaussian"}
    pad : bool
        Let clients fill what they send up to the longest that it could be (:meth:`Codec.longest`). False saves these
        bytes; whoever sees message lengths then learns about updates what no noise covers: how clustered their largest
        coordinates are, how many are zero, and whether there was anything to send at all.
    insecure_deterministic : bool
        Take noise and samples from ``seed``: for tests and experiments that must repeat. The statement says so.
    seed : int
        Of everything that is public; of noise and samples only with ``insecure_deterministic``.

    Raises
    ------
    ConfigError
        For values that are not valid by themselves. Mechanism and ledger check what they are together.
    """

    noise_multiplier: NotNegative
    adjacency: Adjacency = "zero_out"
    delta: Inside = 1e-5
    population: Annotated[int, Int()] = 0
    sampling: Sampling | None = None
    budget: Annotated[float | None, Maybe(Real(above=0.0))] = None
    noise: Noise = "discrete_gaussian"
    pad: Switch = True
    insecure_deterministic: Switch = False
    seed: Seed = 0
    drawn: Sampling = field(init=False)
    """Who takes part, where that is not said, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        params.assign(self, drawn=Sampling() if self.sampling is None else self.sampling)

    def conflict(self) -> str:
        """A name alone would leave rate and cap open."""
        if self.sampling is None or isinstance(self.sampling, Sampling):
            return ""
        return f"sampling={self.sampling!r} is not valid: an object, such as Sampling('capped', cap=20)"
