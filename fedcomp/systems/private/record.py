"""Record-level privacy: every client trains with DP-SGD on its own records and reports the cost.

M. Abadi, A. Chu, I. Goodfellow, H. B. McMahan, I. Mironov, K. Talwar, L. Zhang, "Deep learning with differential
privacy", CCS 2016, arXiv:1607.00133 (recalled).

A client bounds each of its records, draws batches and noise itself, keeps its ledger, and refuses to go on. Whatever
becomes of the noisy update afterwards, a codec's memory included, is post-processing. What was spent goes with every
update, since only whoever knows all clients can say what the run as a whole promises: clients hold disjoint records, so
it costs what its dearest client spent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import numpy as np

from fedcomp.asks import Frames
from fedcomp.codecs import Codec, Identity, State, get_codec
from fedcomp.codecs.factors import at_model, wanted_by
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Update
from fedcomp.privacy.events import NOISES, Adjacency, Event
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.lsg import MASKS, SCHEDULES
from fedcomp.privacy.sampling import Sampling
from fedcomp.program import Answer, Ask, Encoded, Me, Mean, Now, Round, Said
from fedcomp.rules import Configured, Flag, Int, Made, OneOf, Options, Real, Rule, Text, checked

if TYPE_CHECKING:
    from fedcomp.privacy.mechanism import Mechanism

_MASKED: Final[Mapping[str, Rule]] = {
    "keep": Real(above=0.0, most=1.0),
    "schedule": OneOf(*SCHEDULES),
    "schedule_steps": Int(1),
    "schedule_start": Int(),
    "mask": OneOf(*MASKS),
}
OPTIONS: Final[Mapping[str, Mapping[str, Rule]]] = {
    "dp-sgd": {},
    "topagg": {"k": Int(1), "saturation": Real(above=0.0), "stochastic": Flag(), "threshold": Real(least=0.0)},
    "random-mask": _MASKED,
    "lsg": {"rank": Int(), **_MASKED, "history": Int(), "refresh": Int(1)},
}
"""Options of each method; the first one has to be given."""

METHODS: Final = tuple(OPTIONS)
"""Ways to train with noise."""

MOST_STEPS: Final = 1 << 20
"""Of one training: each is a pass over a batch with a gradient for every record."""

MAX_STEPS: Final = 1 << 40
"""Steps that a client says it took."""

_TRAININGS: Final = "trainings"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class DpSgdPlan(Configured):
    """The DP-SGD training that every client runs.

    Parameters
    ----------
    method : str
        One of :data:`METHODS`.
    noise_multiplier, clip : float
        Of every step; ``clip`` is the largest L2 norm of one record's gradient, and unused by votes.
    rate : float
        Probability that a record is in a step's batch (Poisson sampling). Public, and the same for all clients.
    steps : int
        Of one training.
    delta : float
    adjacency : {"zero_out", "add_remove"}
    budget : float
        Largest epsilon of any client, 0 for none.
    noise : str
    insecure : bool
        Noise and batches come from the run's seed.
    options : mapping
        Of the method (:data:`OPTIONS`): ``k``; ``keep``; ``rank``.

    Raises
    ------
    ConfigError
        For a value out of range, and options that the method does not have, or lacks.

    Examples
    --------
    >>> plan = DpSgdPlan(noise_multiplier=2.0, rate=0.1, steps=20, delta=1e-5, budget=3.0)
    >>> DpSgdPlan.from_config(plan.to_config()) == plan
    True
    """

    method: Annotated[str, OneOf(*METHODS)] = "dp-sgd"
    noise_multiplier: Annotated[float, Real(least=0.0)]
    clip: Annotated[float, Real(least=0.0)] = 1.0
    rate: Annotated[float, Real(above=0.0, most=1.0)]
    steps: Annotated[int, Int(1, MOST_STEPS)]
    delta: Annotated[float, Real(least=0.0, most=1.0)]
    adjacency: Adjacency = "add_remove"
    budget: Annotated[float, Real(least=0.0)] = 0.0
    noise: Annotated[str, OneOf(*NOISES)] = "discrete_gaussian"
    insecure: Annotated[bool, Flag()] = False
    options: Annotated[Mapping[str, Any], Options(16)] = field(default_factory=dict)

    def conflict(self) -> str:
        """Here, since clients would keep what is wrong with them to themselves."""
        known = OPTIONS[self.method]
        for name, value in self.options.items():
            if name not in known:
                return f"method {self.method!r} has no option {name!r}; it has {', '.join(known) or 'none'}"
            checked(name, value, known[name])
        needed = next(iter(known), None)
        return "" if needed in {None, *self.options} else f"method {self.method!r} needs options={{{needed!r}: ...}}"

    def ledger(self, records: int) -> PrivacyLedger:
        """Return an empty ledger of somebody with ``records`` records.

        Raises
        ------
        ConfigError
            When delta is not below 1 / ``records``.
        """
        return PrivacyLedger(
            delta=self.delta,
            population=records,
            adjacency=self.adjacency,
            sampling=self.sampling,
            budget=self.budget or None,
            unit="record",
        )

    @property
    def sampling(self) -> Sampling:
        """Of records, in every step."""
        return Sampling("poisson", rate=self.rate)

    def mechanism(self, size: int) -> Mechanism:
        """Return what bounds a record's contribution to a step that releases ``size`` coordinates."""
        from fedcomp.privacy.mechanism import GridGaussian, Votes

        common: dict[str, Any] = {
            "noise_multiplier": self.noise_multiplier,
            "adjacency": self.adjacency,
            "noise": self.noise,
        }
        if self.method == "topagg":
            # A small model may have fewer coordinates than votes were asked for.
            return Votes(k=min(int(self.options["k"]), size), shape=(size,), **common)
        return GridGaussian(clip=self.clip, size=size, **common)

    def event(self, size: int) -> Event:
        """Return what one step costs that releases ``size`` coordinates."""
        return self.mechanism(size).event(rate=self.rate, size=size, label="gradient")


@dataclass(frozen=True, repr=False, eq=False)
class Account(Said):
    """What a client spent, in steps of the plan.

    Attributes
    ----------
    run : str
        Names the client's ledger; another one means that the client forgot what it spent before.
    now, total : int
        Of the training that this comes with; of all trainings, this one included, whatever became of their replies.
    head : str
        Names what the ledger holds after it, and all that it held before: the last checksum of a chain.
    """

    run: Annotated[str, Text(64, least=1)]
    now: Annotated[int, Int(1, MAX_STEPS)]
    total: Annotated[int, Int(1, MAX_STEPS)]
    head: Annotated[str, Text(64)] = ""

    def conflict(self) -> str:
        return f"{self.now} of {self.total} steps" if self.now > self.total else ""


Noised = Callable[[Me, DpSgdPlan, Callable[[], Update]], tuple[Update, Account, Frames]]
"""What an app brings: ``noised(me, plan, learn)`` lets ``learn()`` train on the node's records as the plan says, and
returns the update, what it cost, and what the node keeps of its ledger; it raises where it refuses."""


@dataclass(frozen=True, repr=False, eq=False)
class Records(Encoded, id="record-dp"):
    """Clients train on their records with noise, and send their updates encoded by ``codec``.

    Parameters
    ----------
    plan : DpSgdPlan or dict
    codec : Codec or dict
        With the memory that it needs; default whole models.
    """

    APP: ClassVar[str] = "app = fc.client(app, fc.record_dp(...))"
    SAYS: ClassVar[tuple[type[Said], ...]] = (Account,)
    RULES: ClassVar[tuple[type, ...]] = (Mean,)
    BESIDE: ClassVar[tuple[str, ...]] = (_TRAININGS,)

    plan: Annotated[DpSgdPlan, Made(DpSgdPlan.made)]
    codec: Annotated[Codec, Made(get_codec)] = field(default_factory=Identity)

    @property
    def whole(self) -> bool:
        return self.codec.lossless

    def start(self, layout: Layout) -> State:
        # Whoever remembers something answers a message that comes twice with what left before: it is one training.
        return {**self.codec.init(layout), _TRAININGS: np.asarray(0, np.int64)}

    def round(self, now: Now) -> Round:
        answers = yield [Ask(node, expects=Account) for node in now.nodes]
        codec = at_model(self.codec, lambda: now.layout.unflatten(now.model))
        return now.mean_of(codec, answers)

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        if me.data is None:
            raise ConfigError(
                "this app does not say what its records are, and trains on none without noise: "
                "client(app, record_dp(trainee))"
            )
        noised: Noised = me.data
        update, account, keep = noised(
            me, self.plan, lambda: me.update(whole=self.whole, collect=wanted_by(self.codec))
        )
        codec = at_model(self.codec, lambda: me.layout.unflatten(me.start))
        frame, after = codec.encode(update, self.own(memory), me.key)
        after[_TRAININGS] = memory[_TRAININGS] + 1
        return after, Answer(me.node, say=account, frames={"values": frame}, keep=keep)
