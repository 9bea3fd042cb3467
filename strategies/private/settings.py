"""The settings of private strategies, in groups: the promise, LSG, shares of noise, how teachers vote and learn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fedcomp import params
from fedcomp.flower.datalens import SENDS
from fedcomp.privacy.events import Adjacency, Noise
from fedcomp.privacy.lsg import MASKS, SCHEDULES
from fedcomp.privacy.sampling import Sampling
from fedcomp.rules import (
    AboveZero,
    BelowOne,
    Configured,
    Inside,
    Int,
    Maybe,
    NotNegative,
    OneOf,
    Positive,
    Real,
    Seed,
    Switch,
)


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


@dataclass(frozen=True, kw_only=True)
class LsgSettings(Configured):
    """How updates are shortened before noise.

    Parameters
    ----------
    clip : float
        Largest L2 norm of one client's kept coordinates, over all tensors and both products.
    rank : int
        Of the carriers; 0 factors nothing.
    keep : float
        Fraction of the coordinates that is kept, at the end of the schedule.
    schedule : {"constant", "linear", "cosine"}
    schedule_rounds : int
        Rounds that the schedule runs over; not needed for "constant".
    mask : {"random", "noisy_magnitude"}
        By the seed alone, or half of them where former noisy updates were large; which those are then travels down.
    whole : str
        Patterns of names of tensors that stay whole, separated by spaces: the last layer, for one.
    history : int
        After this many rounds the carriers follow the way the model went since round 1; 0: always the model itself.

    Raises
    ------
    ConfigError
        For a value out of range.

    Examples
    --------
    >>> LsgSettings(clip=1.0, rank=8, keep=0.5).schedule
    'constant'
    """

    clip: Positive
    rank: Annotated[int, Int()]
    keep: AboveZero = 1.0
    schedule: Annotated[str, OneOf(*SCHEDULES)] = "constant"
    schedule_rounds: Annotated[int, Int()] = 0
    mask: Annotated[str, OneOf(*MASKS)] = "random"
    whole: str = ""
    history: Annotated[int, Int()] = 0

    def conflict(self) -> str:
        """A schedule has to end."""
        if self.schedule == "constant" or self.schedule_rounds:
            return ""
        return f"schedule={self.schedule!r} needs schedule_rounds >= 1, the rounds that it runs over"


@dataclass(frozen=True, kw_only=True)
class ShareSettings(Configured):
    """How clients bound their updates and share the noise of a sum.

    Parameters
    ----------
    clip : float
        Largest L2 norm of one client's update, in the units of the update.
    tolerated : int
        Clients of a round that may vanish. Each client's share is sigma^2 / (floor(honest n) - tolerated).
    honest : float
        Share of clients whose noise the adversary does not know. 1 counts on everybody's, which is right for somebody
        who takes no part: a client knows its own.
    threshold : int
        T: any T clients together learn nothing of others from the shards they hold for them. At least the number that
        is not honest.
    scale : int
        Grid steps of the clip norm; 0 chooses, see :class:`fedcomp.privacy.distributed.DistributedSum`.
    rotate : bool
        Turn updates by a public rotation first, so that less room is needed for single large coordinates.

    Raises
    ------
    ConfigError
        For a value out of range; the mechanism checks them together with the number of clients.

    Examples
    --------
    >>> ShareSettings(clip=1.0, tolerated=2).honest
    1.0
    """

    clip: Positive
    tolerated: Annotated[int, Int()] = 0
    honest: AboveZero = 1.0
    threshold: Annotated[int, Int()] = 1
    scale: Annotated[int, Int()] = 0
    rotate: Switch = False


@dataclass(frozen=True, kw_only=True)
class VoteSettings(Configured):
    """What teachers vote on, and how far a generator follows.

    Parameters
    ----------
    k : int
        Votes of a teacher on an image; all pixels where there are fewer.
    images : int
        B, generated images of a round.
    eta : float
        Length of a target's step per pixel.
    beta : float
        Threshold, as a fraction of the expected number of teachers.
    saturation : float, optional
        Magnitudes above it vote with certainty (the published code's max_grad).
    stochastic : bool
        False casts the plain signs.

    Raises
    ------
    ConfigError
        For a value out of range.
    """

    k: Annotated[int, Int(1)]
    images: Annotated[int, Int(1)] = 15
    eta: Positive = 1e-3
    beta: NotNegative = 0.2
    saturation: Annotated[float | None, Maybe(Real(above=0.0))] = None
    stochastic: Switch = True


@dataclass(frozen=True, kw_only=True)
class TeacherSettings(Configured):
    """How many teachers a client has, and how they learn.

    Parameters
    ----------
    teachers : int
        Of each client. With more than one, what is protected is a teacher's share of the records and not a client.
    teacher_lr, decay : float
        Step size of the discriminators' Adam, and the decay rate of its first moment, in [0, 1).
    pretrain, steps : int
        Discriminator steps before a client's first votes, beside the ``steps`` before each of its votes.
    batch : int
        Records of a discriminator's step.
    send : {"generator", "images"}
        What goes down. With the generator's weights teachers make images of their own records' labels to learn from, as
        the published code does; with images they learn from those they vote on.

    Raises
    ------
    ConfigError
        For a value out of range.
    """

    teachers: Annotated[int, Int(1)] = 1
    teacher_lr: Positive = 1e-3
    decay: BelowOne = 0.5
    pretrain: Annotated[int, Int()] = 10
    steps: Annotated[int, Int()] = 2
    batch: Annotated[int, Int(1)] = 30
    send: Annotated[str, OneOf(*SENDS)] = "generator"
