"""The settings of private strategies, in groups: the promise, LSG, shares of noise, how teachers vote and learn."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.flower.datalens import SENDS
from fedcomp.privacy.events import Adjacency
from fedcomp.privacy.lsg import check_fraction, check_mask
from fedcomp.privacy.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
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
        For values that are not valid by themselves. Mechanism and ledger check the others.
    """

    noise_multiplier: float
    adjacency: Adjacency = "zero_out"
    delta: float = 1e-5
    population: int = 0
    sampling: Sampling | None = None
    budget: float | None = None
    noise: str = "discrete_gaussian"
    pad: bool = True
    insecure_deterministic: bool = False
    seed: int = 0
    drawn: Sampling = field(init=False)
    """Who takes part, where that is not said, too."""

    def __post_init__(self) -> None:
        # A name alone would leave rate and cap open.
        if self.sampling is not None and not isinstance(self.sampling, Sampling):
            raise ConfigError(f"sampling={self.sampling!r} is not valid: an object, such as Sampling('capped', cap=20)")
        if self.budget is not None:
            params.positive("budget", self.budget)
        params.boolean("insecure_deterministic", self.insecure_deterministic)
        params.boolean("pad", self.pad)
        params.assign(self, seed=params.seed(self.seed))
        params.assign(self, population=params.integer("population", self.population, low=0))
        params.assign(self, drawn=Sampling() if self.sampling is None else self.sampling)


@dataclass(frozen=True, kw_only=True)
class LsgSettings:
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

    clip: float
    rank: int
    keep: float = 1.0
    schedule: str = "constant"
    schedule_rounds: int = 0
    mask: str = "random"
    whole: str = ""
    history: int = 0

    def __post_init__(self) -> None:
        # Schedules and masks are checked by the core: DP-SGD on records takes the same.
        check_fraction(self.schedule, self.schedule_rounds, self.keep)
        check_mask(self.mask)
        params.assign(
            self,
            clip=params.positive("clip", self.clip),
            rank=params.integer("rank", self.rank, low=0),
            keep=float(self.keep),
            history=params.integer("history", self.history, low=0),
        )


@dataclass(frozen=True, kw_only=True)
class ShareSettings:
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
        For a clip norm that is not positive; the mechanism checks the other values.

    Examples
    --------
    >>> ShareSettings(clip=1.0, tolerated=2).honest
    1.0
    """

    clip: float
    tolerated: int = 0
    honest: float = 1.0
    threshold: int = 1
    scale: int = 0
    rotate: bool = False

    def __post_init__(self) -> None:
        # The mechanism checks the others, together with the number of clients.
        params.assign(self, clip=params.positive("clip", self.clip))


@dataclass(frozen=True, kw_only=True)
class VoteSettings:
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

    k: int
    images: int = 15
    eta: float = 1e-3
    beta: float = 0.2
    saturation: float | None = None
    stochastic: bool = True

    def __post_init__(self) -> None:
        k, images = params.integer("k", self.k, low=1), params.integer("images", self.images, low=1)
        params.assign(self, k=k, images=images)
        params.positive("eta", self.eta)
        params.number("beta", self.beta, rule="a finite number >= 0", ok=lambda v: 0.0 <= v < math.inf)
        # Here and not by the clients, which would refuse every request.
        if self.saturation is not None:
            params.positive("saturation", self.saturation)
        params.boolean("stochastic", self.stochastic)


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
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

    teachers: int = 1
    teacher_lr: float = 1e-3
    decay: float = 0.5
    pretrain: int = 10
    steps: int = 2
    batch: int = 30
    send: str = "generator"

    def __post_init__(self) -> None:
        for name, low in {"teachers": 1, "batch": 1, "pretrain": 0, "steps": 0}.items():
            params.assign(self, **{name: params.integer(name, getattr(self, name), low=low)})
        params.positive("teacher_lr", self.teacher_lr)
        params.number("decay", self.decay, rule="a number in [0, 1)", ok=lambda v: 0.0 <= v < 1.0)
        params.choice("send", self.send, SENDS)
