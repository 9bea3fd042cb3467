"""A ledger for several parties with disjoint records: the total cost is the largest cost of any party.

A record lies with one party only, so what the others release says nothing about it (parallel composition). Adding up
the parties' epsilons, as is sometimes done, states a guarantee that is worse than the true one by their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import ClassVar

from fedcomp.errors import ConfigError
from fedcomp.privacy.accounting import Cost, Profile, failures, profile
from fedcomp.privacy.events import Event
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.spending import LedgerEntry, cost_of, lattice_of, within


class ParallelLedger(PrivacyLedger):
    """Events at parties that hold disjoint records.

    The ``participants`` of an event are the parties on whose records it was. It is written down by somebody who was
    told of it, after the fact, and so never refused: whether a party may go on is asked with :meth:`allows`. ``rounds``
    and ``releases`` are those of the party that has most.

    Examples
    --------
    >>> from fedcomp.privacy.sampling import Sampling
    >>> ledger = ParallelLedger(delta=1e-5, population=1000, adjacency="zero_out", sampling=Sampling(), unit="record")
    >>> for party in (1, 2):
    ...     ledger.record(Event("gaussian", noise_multiplier=4.0), round=party, participants=[party])
    >>> ledger.releases, ledger.epsilon() == ledger.cost().epsilon
    (1, True)
    """

    per_unit: ClassVar[bool] = True

    def spent(self, party: int) -> dict[Profile, int]:
        """Return how often each event happened at ``party``."""
        return dict(self._parties.get(party, {}))

    def allows(self, party: int, event: Event, times: int) -> bool:
        """Whether ``times`` more of ``event`` at ``party`` stay within the budget."""
        counts = Counter(self._parties.get(party, {}))
        # As rounds of their own: each redraws its records.
        counts[profile(event)] += times
        return within(self.budget, counts, self.delta)

    def affords(self, event: Event | Sequence[Event], times: int = 1, *, round: int | None = None) -> bool:
        """Return True: what happened elsewhere is written down whatever it crosses; see :meth:`allows`."""
        return True

    def record(self, event: Event, *, round: int, participants: Sequence[int] = (), times: int = 1) -> None:
        """Write down that ``event`` happened at ``participants``.

        Raises
        ------
        ConfigError
            When there are none: an event at no party would cost nothing.
        """
        if not participants:
            raise ConfigError(f"round {round}: an event of disjoint parties names those on whose records it was")
        super().record(event, round=round, participants=participants, times=times)

    @property
    def releases(self) -> int:
        """How many noisy sums were paid for, at the party with most of them."""
        return max(self._releases.values(), default=0)

    @property
    def rounds(self) -> int:
        """How many rounds they were in, at the party with most of them."""
        return max((sum(counts.values()) for counts in self._parties.values()), default=0)

    @property
    def failure(self) -> float:
        """Sum of the events' own failure probabilities, at the party where it is largest."""
        return max((failures(counts, 0) for counts in self._parties.values()), default=0.0)

    @property
    def lattice(self) -> float:
        """That of the party where it is largest."""
        return max((lattice_of(counts, self.delta) for counts in self._parties.values()), default=0.0)

    def cost(self, *, amplified: bool = True) -> Cost:
        """Return what the dearest party spent."""
        # Parties that did the same, which is the usual case, are accounted once.
        # Without any party the empty set of rounds is accounted: it costs nothing.
        distinct = {tuple(sorted(counts.items())) for counts in self._parties.values()} or {()}
        return max(
            (cost_of(dict(counts), self.delta, amplified=amplified) for counts in distinct),
            key=lambda cost: cost.epsilon,
        )

    def _recount(self, entries: Iterable[LedgerEntry]) -> None:
        # Before the base class counts, which calls :meth:`_count`.
        self._parties: dict[int, Counter[Profile]] = {}
        self._releases: Counter[int] = Counter()
        super()._recount(entries)

    def _count(self, entry: LedgerEntry) -> None:
        super()._count(entry)
        for party in entry.participants:
            # Every entry drew records of its own, whatever its round is called.
            self._parties.setdefault(party, Counter())[profile(entry.event)] += entry.times
            self._releases[party] += entry.event.releases * entry.times
