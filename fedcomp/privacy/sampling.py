"""Sampling of the units in a private round, and the amplification that an accountant may claim for it.

Three samplers. ``capped`` lets a unit take part a limited number of times and needs no secret: it is what claims are
made with by default. ``poisson`` draws every unit independently with the same probability, from private randomness;
the amplification it buys holds only while nobody learns who took part, and only where neighbouring data sets differ by
one unit that is there or not. ``everyone`` takes whoever is connected. Drawing a fixed number without replacement,
which is what Flower's own strategies do, amplifies nothing here: the known bounds are for exchanged units, at half the
noise, and mostly worse than none. It does not fit ``add_remove`` either: where one unit is removed another one takes
its place in the sample, and the sum moves by two bounds instead of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.privacy.entropy import Entropy
from fedcomp.privacy.events import Adjacency, check_adjacency
from fedcomp.rules import AboveZero, Configured, Int, OneOf, Switch

KINDS: Final = ("everyone", "poisson", "capped")

Kind = Annotated[Literal["everyone", "poisson", "capped"], OneOf(*KINDS)]


class Participations(Protocol):
    """Whoever knows who may still take part: a ledger."""

    adjacency: Adjacency

    def may_take_part(self, participant: int) -> bool:
        """Say whether one more round stays within the cap."""
        ...

    def surplus(self, nodes: Sequence[int]) -> list[int]:
        """Return those of ``nodes`` who would be more units than there are."""
        ...

    def drawn(self, round: int) -> None:
        """Take note that the units of ``round`` are drawn now."""


@dataclass(frozen=True, slots=True)
class Sampling(Configured):
    """Who takes part.

    Parameters
    ----------
    kind : {"capped", "poisson", "everyone"}
    rate : float
        Probability with which each unit takes part, independently of all others; 1 unless ``kind`` is "poisson".
    cap : int
        Rounds one unit takes part in, at most; for "capped" only.
    reveal_participation : bool
        Let reports, records and logs say who took part, how many did and what that cost; for "poisson" only. A unit
        that everybody knows was drawn is not hidden by the draw: such rounds are accounted without amplification.

    Raises
    ------
    ConfigError
        When a figure is out of range or belongs to another kind.

    Examples
    --------
    >>> Sampling("poisson", rate=0.01)
    Sampling(kind='poisson', rate=0.01, cap=0, reveal_participation=False)
    """

    kind: Kind = "everyone"
    rate: AboveZero = 1.0
    cap: Annotated[int, Int()] = 0
    reveal_participation: Switch = False

    def conflict(self) -> str:
        """Rate and secret are Poisson sampling's, the cap is that of "capped"."""
        if self.kind != "poisson" and self.rate != 1.0:
            return (
                f"rate={self.rate!r} does nothing under sampling={self.kind!r}; amplification by sampling holds for "
                "units drawn independently: say sampling='poisson', or leave the rate out"
            )
        if self.kind == "capped" and not self.cap:
            return "sampling='capped' needs cap >= 1, the rounds one unit may take part in"
        if self.kind != "capped" and self.cap:
            return f"cap={self.cap} does nothing under sampling={self.kind!r}; say sampling='capped'"
        if self.kind != "poisson" and self.reveal_participation:
            return (
                f"reveal_participation=True is not valid under sampling={self.kind!r}: only Poisson sampling keeps "
                "participation secret in the first place"
            )
        return ""

    def check(self, adjacency: Adjacency, *, count: int = 0) -> None:
        """Refuse what cannot be claimed.

        Parameters
        ----------
        adjacency : {"zero_out", "add_remove", "replace"}
        count : int
            The most units of a round, drawn without replacement; 0 for no limit.

        Raises
        ------
        ConfigError
            For Poisson sampling under ``replace`` adjacency: the accountants' amplification is for a unit that is there
            or not, and an exchanged one costs more (2.84 instead of 1.84 at rate 0.01, z = 1, 1000 rounds). For a
            fixed number under ``add_remove``: 9 of 10 at z = 1 would be stated as 4.38 and cost 9.84 (derived: the
            curve of a sampled Gaussian of twice the sensitivity).
        """
        check_adjacency(adjacency)
        params.integer("count", count, low=0)
        if count and self.kind == "poisson":
            raise ConfigError(f"count={count} does not fit Poisson sampling, whose rounds vary in size; use its rate")
        if count and adjacency == "add_remove":
            raise ConfigError(
                f"count={count} does not fit adjacency='add_remove': where one unit is removed another one takes its "
                "place, so the sum moves by two bounds and epsilon would be too small. Use "
                "sampling='poisson' with rate = count / population, or adjacency='replace'"
            )
        if self.event_rate < 1.0 and adjacency == "replace":
            raise ConfigError(
                "Poisson sampling amplifies under zero_out and add_remove adjacency; under replace the cost differs "
                "and is not computed here. Specify adjacency='zero_out', or sampling='capped'"
            )

    @property
    def event_rate(self) -> float:
        """The rate an event of this sampler claims: below 1 for independent draws only, as long as they are secret."""
        return self.rate if self.kind == "poisson" and not self.reveal_participation else 1.0

    def draw(
        self, nodes: Sequence[int], ledger: Participations, round: int, entropy: Entropy, *, count: int = 0
    ) -> list[int]:
        """Return who takes part in round ``round``, in the order of ``nodes``; possibly nobody.

        Parameters
        ----------
        nodes : sequence of int
            Who could.
        ledger : Participations
            Knows who may still take part, and under which adjacency; is told that the round's units are drawn.
        round : int
            What is recorded for it from now on is on these units; the draw itself comes from ``entropy`` alone.
        entropy : Entropy
            Private: with Poisson sampling the guarantee is gone once the draw is known. Draws are consumed in the order
            of ``nodes``, so a seeded run repeats only with the same order.
        count : int
            At most this many (0: all who may), drawn uniformly without replacement. Not under Poisson sampling, where
            the number is random by nature.

        Raises
        ------
        ConfigError
            When a node is listed twice, or :meth:`check` refuses ``count`` under the ledger's adjacency.
        """
        if len(set(nodes)) != len(nodes):
            raise ConfigError(f"round {round}: a node is listed twice; each may be drawn once")
        self.check(ledger.adjacency, count=count)
        # Before the draw: whatever the ledger holds under this number already was on other units.
        ledger.drawn(round)
        if self.kind == "poisson":
            if self.rate == 1.0:
                return list(nodes)
            return [node for node, taking in zip(nodes, poisson(len(nodes), self.rate, entropy), strict=True) if taking]
        # An id beyond the declared population would be one more unit, with as many turns as the cap allows.
        surplus = frozenset(ledger.surplus(nodes))
        # In the order of ``nodes``, so that a seeded draw repeats.
        able = [node for node in nodes if ledger.may_take_part(node) and node not in surplus]
        if count and count < len(able):
            # The places of the smallest of independent words are a uniform sample without replacement.
            chosen = np.sort(np.argsort(entropy.words(len(able)), kind="stable")[:count])
            return [able[i] for i in chosen]
        return able

    def expected(self, population: int, *, count: int = 0) -> float:
        """Return the public number a sum is divided by: rate times population, or ``count`` where that is smaller.

        It is never the number that answered: dividing by that moves all other contributions when one comes or goes,
        which doubles the sensitivity of the mean.
        """
        params.integer("population", population, low=1)
        # The rate as given, also where participation is revealed: it is how many come, not what is claimed of it.
        expected = float(self.rate) * population
        return min(expected, float(count)) if count and self.kind != "poisson" else expected

    def describe(self, unit: str = "client") -> str:
        """Return the sampler and what its claim rests on, as a clause of a sentence."""
        if self.event_rate < 1.0:
            return (
                f"every {unit} is drawn independently with probability {self.rate:g} from private randomness; "
                f"amplification assumes that nobody learns who took part in a round, nor how many {unit}s did, and "
                f"that the number of {unit}s is stable"
            )
        if self.kind == "capped":
            return f"at most {self.cap} rounds of each {unit}, enforced; no secrecy of who took part is assumed"
        return f"every {unit} may be in every round; no amplification is claimed and no secrecy assumed"

    def to_json(self) -> dict[str, Any]:
        """Return the parameters as JSON-able data; files that are older than ``reveal_participation`` lack it."""
        # Left out while it is False: a ledger compares this with the header of its file, which may be from before it
        # existed.
        found = asdict(self)
        if not self.reveal_participation:
            del found["reveal_participation"]
        return found


def poisson(count: int, rate: float, entropy: Entropy) -> NDArray[np.bool_]:
    """Return which of ``count`` units take part, each independently with probability ``rate``. Shape (count,)."""
    # Rounded down: nobody takes part with a larger probability than the accountant was told.
    return (entropy.words(count) >> np.uint64(11)) < np.uint64(int(rate * 2**53))
