"""What the two sides of record-level privacy say to each other: how to train, and what was spent by it.

A client protects its own records: it adds the noise, keeps the ledger, and refuses to go on. The server is told what
was spent, since only whoever knows all clients can say what the run as a whole promises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

from flwr.app import ConfigRecord, RecordDict

from fedcomp.errors import FedcompError
from fedcomp.flower.schema import Options, Schema, TextSchema
from fedcomp.plain import fields_of
from fedcomp.privacy.events import NOISES, Adjacency, Event
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.sampling import Sampling
from fedcomp.rules import Flag, Int, OneOf, Real, Text

if TYPE_CHECKING:
    from fedcomp.privacy.mechanism import Mechanism

RECORD_DP: Final = "record-dp"
"""Key of the training configuration (a plan), and name of the record in the reply (what was spent)."""

METHODS: Final = ("dp-sgd", "topagg", "random-mask", "lsg")
"""Ways to train with noise."""

MOST_STEPS: Final = 1 << 20
"""Of one training: each is a pass over a batch with a gradient for every record."""

MAX_STEPS: Final = 1 << 40
"""Steps that a client says it took."""


class WrongAccount(FedcompError):
    """What a client says it spent cannot be true."""


@dataclass(frozen=True, kw_only=True)
class DpSgdPlan(TextSchema, key=RECORD_DP):
    """How every client trains.

    Attributes
    ----------
    method : str
        One of :data:`METHODS`.
    noise_multiplier, clip : float
        Of every step; ``clip`` is the largest L2 norm of one record's gradient, and unused by votes.
    rate : float
        Probability with which a record is in a step's batch (Poisson). Public, and the same for all clients.
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
        Of the method: ``k``; ``keep``; ``rank``.

    Examples
    --------
    >>> plan = DpSgdPlan(noise_multiplier=2.0, rate=0.1, steps=20, delta=1e-5, budget=3.0)
    >>> DpSgdPlan.from_text(plan.to_text()) == plan
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

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> DpSgdPlan | None:
        """Return the plan of a training configuration, None where there is none.

        Raises
        ------
        SchemaError
            When it cannot be read: a client that cannot tell what is asked does not train without noise.
        """
        text = config.get(RECORD_DP)
        return None if text is None else cls.from_text(text)

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


@dataclass(frozen=True)
class Account(Schema, key=RECORD_DP):
    """What a client spent, in steps of the plan.

    Attributes
    ----------
    run : str
        Names the client's ledger; another one means that the client forgot what it spent before.
    now, total : int
        Of the training that this comes with; of all trainings, this one included, whatever became of their replies.
    """

    run: Annotated[str, Text(64, least=1)]
    now: Annotated[int, Int(1, MAX_STEPS)]
    total: Annotated[int, Int(1, MAX_STEPS)]

    def conflict(self) -> str:
        return f"{self.now} of {self.total} steps" if self.now > self.total else ""


def plan_in(content: RecordDict) -> DpSgdPlan | None:
    """Return the plan in a message, None where there is none.

    Raises
    ------
    SchemaError
        When it cannot be read: a client that cannot tell what is asked does nothing without noise.
    """
    plans = [DpSgdPlan.read(r) for r in content.values() if isinstance(r, ConfigRecord) and RECORD_DP in r]
    return plans[0] if plans else None


def steps_in(ledger: PrivacyLedger) -> int:
    """Return how many steps ``ledger`` holds."""
    return sum(entry.times for entry in ledger.entries)


def compact(ledger: PrivacyLedger) -> dict[str, Any]:
    """Return ``ledger.state_dict()`` with equal events in a row as one entry, so that it does not grow with steps."""
    state = ledger.state_dict()
    merged: list[tuple[dict[str, Any], int]] = []
    for entry in ledger.entries:
        event = fields_of(entry.event)
        # Neighbours only, so that the entries keep the order in which they were spent.
        if merged and merged[-1][0] == event:
            merged[-1] = (event, merged[-1][1] + entry.times)
        else:
            merged.append((event, entry.times))
    state["entries"] = [
        # Each merged entry is an attempt of its own: its rounds 0 to times - 1 do not meet those of another.
        {"serial": i, "attempt": i, "round": 0, "times": times, "participants": [], "event": event}
        for i, (event, times) in enumerate(merged)
    ]
    return state
