"""Spent budget from the recorded events of a run: rounds, participations, and epsilon."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from fedcomp.plain import Count
from fedcomp.privacy.accounting import (
    Cost,
    Profile,
    compose_rounds,
    failures,
    grid_of,
    profile,
    total_mu,
    upper_bound,
)
from fedcomp.privacy.events import Adjacency, Event, check_adjacency
from fedcomp.privacy.gaussian import check_delta, lattice_delta
from fedcomp.privacy.sampling import Sampling
from fedcomp.rules import Int, Real, checked


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One call of :meth:`fedcomp.privacy.ledger.PrivacyLedger.record`.

    Attributes
    ----------
    serial : int
        Position in the ledger, from 0.
    attempt : int
        How often the run had been continued, or a round was drawn again. A round that is repeated draws its units and
        its noise again, and is another round.
    round, times : int
        The rounds ``round`` to ``round + times - 1``, each with ``event``.
    participants : tuple of int
        Who took part.
    event : Event
    """

    serial: Count
    attempt: Count
    round: Count
    times: Annotated[int, Int(1)]
    participants: tuple[int, ...]
    event: Event


class Spending:
    """The cost of the events of one run, and what its budget and its participation cap still allow.

    Kept in memory; :class:`fedcomp.privacy.ledger.PrivacyLedger` adds the file and decides what may be recorded.
    The parameters are those of the ledger.

    Attributes
    ----------
    clients : int
        Public number of those who take part, where each holds several units; 0: they are the units.
    """

    per_unit: ClassVar[bool] = False
    """Whether what was spent depends on who took part even without a participation cap."""

    def __init__(
        self, *, delta: float, adjacency: Adjacency, sampling: Sampling, budget: float | None, unit: str
    ) -> None:
        check_adjacency(adjacency)
        sampling.check(adjacency)
        self.delta = check_delta(delta)
        self.population = 0
        self.clients = 0
        self.adjacency: Adjacency = adjacency
        self.sampling = sampling
        self.budget = None if budget is None else checked("budget", budget, Real(above=0.0))
        self.unit = unit
        # Never from a seed: two runs of one seed are two runs, and must not take each other's files for their own.
        self.run = os.urandom(16).hex()
        self._recount([])

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """Every recorded event with its round and participants."""
        return tuple(self._entries)

    @property
    def events(self) -> list[Event]:
        """Every recorded event, in order; one that covers several rounds appears once."""
        return [entry.event for entry in self._entries]

    @property
    def releases(self) -> int:
        """How many noisy sums were paid for."""
        return sum(entry.event.releases * entry.times for entry in self._entries)

    @property
    def rounds(self) -> int:
        """How many rounds they were in."""
        return sum(self._counts.values())

    @property
    def next_round(self) -> int:
        """Number of the round behind the last one that an entry has; 0 where there are no entries."""
        return self._next

    @property
    def participations(self) -> dict[int, int]:
        """The number of rounds each participant was in, by participant."""
        return dict(sorted(self._turns.items()))

    @property
    def failure(self) -> float:
        """Failure probability beside the noise that any one unit may have met; part of delta."""
        return failures(self._counts, self.sampling.cap)

    @property
    def lattice(self) -> float:
        """By what fraction of itself delta may be larger for integers than for the continuous noise they count as.

        Delta is divided by 1 plus this before an epsilon is read off.
        """
        return lattice_of(self._counts, self.delta, cap=self.sampling.cap)

    def cost(self, *, amplified: bool = True) -> Cost:
        """Return what was spent.

        Parameters
        ----------
        amplified : bool
            False: as if every unit had been in every release, without sampling and without a cap.
        """
        return cost_of(self._counts, self.delta, cap=self.sampling.cap, amplified=amplified)

    def epsilon(self, *, amplified: bool = True) -> float:
        """Return the epsilon of :meth:`cost`."""
        return self.cost(amplified=amplified).epsilon

    def affords(self, event: Event | Sequence[Event], times: int = 1, *, round: int | None = None) -> bool:
        """Whether ``times`` more rounds with ``event`` stay within the budget. To be asked before anyone is contacted.

        Parameters
        ----------
        event : Event or sequence of Event
            Of one round.
        times : int
        round : int, optional
            Round of the event, where the round has events already: they are on the same units and cost more together.
        """
        # Of this attempt alone: a round of the same number before a restart was on other units.
        before = self._single.get((self._attempt, round), ()) if round is not None else ()
        counts = _with(self._counts, before, (event,) if isinstance(event, Event) else event, times)
        return within(self.budget, counts, self.delta, cap=self.sampling.cap)

    def may_take_part(self, participant: int) -> bool:
        """Whether the participation cap lets ``participant`` take part in one more round."""
        cap = self.sampling.cap
        return not cap or self._turns[participant] < cap

    @property
    def most(self) -> int:
        """How many different participants there may be."""
        return self.clients or self.population

    def surplus(self, nodes: Sequence[int]) -> list[int]:
        """Return those of ``nodes`` that would be more participants than :attr:`most`; none where nobody is counted.

        A client that connects under another id is another participant. Without a cap that changes nothing of what a
        unit spent; under one it would have as many turns again.
        """
        if not self.per_unit and not self.sampling.cap:
            return []
        return [node for node in nodes if node not in self._taken][max(0, self.most - len(self._taken)) :]

    def _recount(self, entries: Iterable[LedgerEntry]) -> None:
        """Replace the counted entries by ``entries``; events recorded from now on belong to another attempt."""
        self._entries: list[LedgerEntry] = []
        self._counts: Counter[Profile] = Counter()
        self._single: dict[tuple[int, int], tuple[Event, ...]] = {}
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._taken: dict[int, set[tuple[int, int]]] = {}
        self._turns: Counter[int] = Counter()
        self._next = 0
        for entry in entries:
            self._count(entry)
        # Rounds that are made again after this draw other units and other noise, whatever their number is.
        self._attempt = 1 + max((entry.attempt for entry in self._entries), default=-1)

    def _count(self, entry: LedgerEntry) -> None:
        self._entries.append(entry)
        end = entry.round + entry.times
        self._next = max(self._next, end)
        key = (entry.attempt, entry.round)
        before: tuple[Event, ...] = ()
        for node in entry.participants:
            rounds = self._taken.setdefault(node, set())
            # The events of one round are on one draw of the units, and one participation.
            self._turns[node] += 0 if key in rounds and entry.times == 1 else entry.times
            if entry.times == 1:
                rounds.add(key)
        if entry.times == 1:
            before = self._single.get(key, ())
            self._single[key] = (*before, entry.event)
        else:
            # Only the ends are kept: the ledger lets no single event fall within a span of rounds.
            spans = self._spans.setdefault(entry.attempt, [])
            # As one with the span that ends where this begins: every event looks at all spans.
            first = spans.pop()[0] if spans and spans[-1][1] == entry.round else entry.round
            spans.append((first, end))
        self._counts = _with(self._counts, before, (entry.event,), entry.times)


def cost_of(counts: Mapping[Profile, int], delta: float, *, cap: int = 0, amplified: bool = True) -> Cost:
    """Return what rounds cost; not ``amplified``: with every unit in every release, without sampling and cap."""
    if amplified:
        return compose_rounds(counts, delta, cap=cap)
    plain: Counter[Profile] = Counter()
    for (parts, failure), n in counts.items():
        # Sorted again, since the rate is part of the order.
        plain[tuple(sorted(replace(part, rate=1.0) for part in parts)), failure] += n
    return compose_rounds(plain, delta)


def lattice_of(counts: Mapping[Profile, int], delta: float, *, cap: int = 0) -> float:
    """Return :attr:`Spending.lattice` of rounds."""
    left, grid, mu = delta - failures(counts, cap), grid_of(counts), total_mu(counts, cap)
    return left / lattice_delta(mu, left, grid) - 1.0 if grid < math.inf and left > 0.0 else 0.0


def within(budget: float | None, counts: Mapping[Profile, int], delta: float, *, cap: int = 0) -> bool:
    """Whether rounds cost no more than ``budget``; None is no limit."""
    if budget is None:
        return True
    # The quick bound is exact without sampling, and Rényi's with it: most calls of the slow accountant are spared.
    return upper_bound(counts, delta, cap=cap) <= budget or compose_rounds(counts, delta, cap=cap).epsilon <= budget


def _with(
    counts: Mapping[Profile, int], before: Sequence[Event], more: Sequence[Event], times: int
) -> Counter[Profile]:
    """Return ``counts`` after ``times`` rounds of ``more``, the first of them on top of the events ``before``."""
    # Events on one draw of the units are one round: they cost more together than on draws of their own.
    after = Counter(counts)
    if before:
        after[profile(before)] -= 1
        after[profile((*before, *more))] += 1
        times -= 1
    if times > 0:
        after[profile(more)] += times
    # Unary plus drops the kinds of rounds whose count fell to 0.
    return +after
