"""The private mean: a mechanism, who is sampled, what a round costs, and what is released.

A program does not know of it. :class:`Private` is the rule that contributions are handed to in place of a mean:

1. :meth:`Private.draw` asks the budget, then draws who takes part;
2. :meth:`Private.open` begins the round, before anybody is asked;
3. :meth:`Private.total` closes it, so that what is aggregated twice is released once; bounds or verifies each
   contribution by itself; has the event on the disk before any noise exists; and returns the noisy sum over a public
   number. Everything after the noise is post-processing.

Subclasses say what a contribution is, what noise it takes and what the noisy sum becomes:
:class:`~fedcomp.systems.private.clipped.Clipped` clips vectors, :class:`~fedcomp.systems.private.ballots.Ballots`
verifies votes. What else of a round may be known (names, counts, lengths, errors) is the driver's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp.codecs import Codec
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.layout import Layout, Update, Vector
from fedcomp.privacy.entropy import Entropy
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.events import Event
from fedcomp.privacy.mechanism import Mechanism, PrivateSum
from fedcomp.privacy.statement import Statement, make_statement
from fedcomp.program import Given, Now, Released, Step
from fedcomp.rng import Key
from fedcomp.rules import Int, checked
from fedcomp.systems.private.books import LENGTHS, NOT_COVERED, Books
from fedcomp.systems.private.settings import PrivacySettings

Contribution = NDArray[Any]

Read = Callable[[], NDArray[Any]]
"""Returns the update of one client, or raises a FedcompError."""


class Private(Books, Released, ABC):
    """A promise of client-level differential privacy: the rule of its rounds, and its books.

    Parameters
    ----------
    count : int
        The most clients of a round (0: all who may), drawn uniformly; not with Poisson sampling, and not under
        "add_remove", where another client would take the place of a removed one.
    unit : str
        Whose contribution is hidden.
    **privacy
        See :class:`fedcomp.systems.private.settings.PrivacySettings`; ``noise_multiplier`` at least.

    Attributes
    ----------
    privacy, exhausted
        Of :class:`Books`.
    chosen : list of int
        The units that were asked in the current round.

    Raises
    ------
    ConfigError
        For arguments that cannot keep the promise.
    """

    votes: ClassVar[bool] = False
    """Whether contributions are votes: then, and only then, the codec must be one that votes."""

    def __init__(self, *, count: int = 0, unit: str = "client", **privacy: Any) -> None:
        given = PrivacySettings(**privacy)
        count = checked("count", count, Int())
        # With the count, which the ledger's own check does not know.
        given.drawn.check(given.adjacency, count=count)
        super().__init__(given, unit=unit)
        self.count = count
        self.chosen: list[int] = []
        self._layout: Layout | None = None
        # The round that was opened and not released yet.
        self._open: int | None = None

    # What a subclass says of one release.

    @abstractmethod
    def mechanism(self, layout: Layout, server_round: int) -> Mechanism:
        """Return the mechanism of a round.

        Parameters
        ----------
        layout : Layout
            Of what is released: the model's, or a flat one of the coordinates that a support shared by all keeps.
        """

    def contribution(self, update: Vector, layout: Layout, server_round: int) -> Contribution:
        """Return what the mechanism is given for one client's ``update``; default the update.

        With one axis more than the sum it is that of several units, each of which is bounded by itself; all or none.

        Parameters
        ----------
        update : ndarray, (layout.size,)
            What was decoded from the client's reply; nothing about it is known.

        Raises
        ------
        Unbounded
            When the client is to be left out.
        """
        return update

    def shape(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape of a sum; default that of a vector."""
        return (layout.size,)

    def opened(self, server_round: int, chosen: Sequence[int]) -> None:
        """Prepare for a round in which the units ``chosen`` will be asked; called before they are."""

    def begun(self, server_round: int) -> None:
        """Prepare for the contributions of a round; called once, before the first of them."""

    def added(self, contribution: Contribution) -> None:
        """Note one contribution that is in the sum; called once for each."""

    def event(self, mechanism: Mechanism, size: int) -> Event:
        """Return what a round costs; default the mechanism's own event at the sampling's rate."""
        return mechanism.event(rate=self.sampling.event_rate, size=size)

    def concluded(self, server_round: int, entropy: Entropy) -> None:
        """Release what the round's event pays for beside the sum; called after the sum was released."""

    def released(self, noisy: NDArray[np.float64], layout: Layout, server_round: int) -> Vector:
        """Return the update that the noisy sum stands for, float32 ``(layout.size,)``; default its mean.

        The divisor is a public constant: the number of replies is the adversary's to know or to choose.
        """
        # Too large for float32 becomes infinite here, and is refused with the model's own dtype later.
        with np.errstate(over="ignore"):
            return (noisy / self.expected).astype(np.float32)

    def describe(self) -> str:
        """Return the subclass's own parameters in a few words, for the log and the statement."""
        return ""

    def describe_settings(self) -> str:
        """Return the subclass's parameters that must not change within a run; default :meth:`describe`."""
        return self.describe()

    def said(self, mechanism: Mechanism) -> dict[str, Any]:
        """Return what a subclass says otherwise in the statement, by its fields."""
        return {}

    # A round.

    def check_codec(self, codec: Codec) -> None:
        """Refuse a codec that does not fit.

        Raises
        ------
        ConfigError
        """
        # Votes have no magnitude: taken for updates, each would move its coordinate by 1.
        if codec.votes != self.votes:
            takes, sends = (("updates", "votes")[votes] for votes in (self.votes, codec.votes))
            raise ConfigError(f"{type(self).__name__} takes {takes}, but {codec!r} sends {sends}")
        if self.pad and codec.longest(Layout.flat(4096)) is None:
            raise ConfigError(
                f"{codec!r} does not say how long its frames can get (Codec.longest), so their lengths would reveal "
                "something about updates; use another codec, or accept that with pad=False"
            )

    def draw(
        self, nodes: Callable[[], Sequence[int]], layout: Layout, server_round: int, *, clients: int = 0
    ) -> tuple[list[int], str]:
        """Return who is asked, and why nobody is, empty when somebody may be. No round is open.

        Parameters
        ----------
        nodes : callable
            Returns who is there; only called where the budget allows the round.
        layout : Layout
            Of what will be released: the budget is asked for it, before anybody is drawn.
        clients : int
            Public number of all that may ever take part; default the population, whose units they are.

        Raises
        ------
        ConfigError
            When the public number of clients is not known.
        """
        self.require_population()
        self._layout, self._open, self.chosen, self.exhausted = layout, None, [], ""
        # A round that was paid for and is made again has other contributions: the noise it had would give them away.
        self._again = sum(entry.round == server_round for entry in self.privacy.entries)
        if reason := self.over(server_round):
            return [], reason
        return self.sample(nodes(), clients or self.population, server_round, count=self.count)

    def open(self, server_round: int, chosen: Sequence[int]) -> None:
        """Begin the round in which ``chosen`` are about to be asked, possibly nobody."""
        # What is recorded here is on the disk before any client is contacted.
        self.opened(server_round, chosen)
        self._open, self.chosen = server_round, list(chosen)

    def close(self, server_round: int) -> bool:
        """Return whether the round is open; it no longer is."""
        found, self._open = self._open == server_round, None
        return found

    def total(
        self,
        now: Now,
        codec: Codec,
        given: Sequence[Given],
        *,
        raw: bool = False,
        unit: Callable[[int], int] = int,
    ) -> Step | None:
        """Return the noisy mean, which is released, and paid for, also where nobody contributed.

        What cannot be bounded is refused by itself. None, without a price, of a round that is not open.

        Parameters
        ----------
        unit : callable
            From a node to whom the ledger charges for it.

        Raises
        ------
        BudgetExceeded, PrivacyLedgerError
            Nothing was released.
        """
        # Before anything is paid for.
        return self.noisy(now, codec, given, unit=unit) if self.close(now.number) else None

    def noisy(self, now: Now, codec: Codec, given: Sequence[Given], *, unit: Callable[[int], int] = int) -> Step | None:
        """Return :meth:`total` of a round that was open, and is closed."""
        support = codec.common_support(now.layout, Key(now.seed, "uplink", now.number))
        reads = ((g.node, unit(g.node), partial(_update, now, codec, g, support is not None)) for g in given)
        return self.release(now.number, now.layout, support, reads, now.refuse)

    def release(
        self,
        server_round: int,
        layout: Layout,
        support: NDArray[np.int64] | None,
        given: Iterable[tuple[int, int, Read]],
        refuse: Callable[[int, str], None],
    ) -> Step | None:
        """Bound and add what is given, write the event down, add the noise.

        A turn is taken by being asked: whoever answers with nothing of use would otherwise be asked again and again, in
        the place of others.

        Parameters
        ----------
        support : int64 array, optional
            Public coordinates outside of which nothing is summed or released, ascending.
        given : iterable of (node, unit, callable)
            Each is read and forgotten before the next.
        """
        kept = layout if support is None else Layout.flat(int(support.size))
        mechanism = self.mechanism(kept, server_round)
        shape = self.shape(kept)
        total = PrivateSum(mechanism, shape)
        self.begun(server_round)
        used, chosen = [], frozenset(self.chosen)
        for node, unit, read in given:
            try:
                # Only who was asked is recorded as a participant: anybody else's part would be charged to nobody.
                if unit not in chosen:
                    raise Unbounded(f"node {unit} was not asked in this round")
                update = read()
                if support is not None and update.shape != (layout.size,):
                    raise Unbounded(f"an update has shape {update.shape}, expected ({layout.size},)")
                contribution = self.contribution(update if support is None else update[support], kept, server_round)
                total.add_all(unit, contribution if contribution.ndim > len(shape) else contribution[None])
                self.added(contribution)
                used.append(node)
            except FedcompError as why:
                refuse(node, str(why))
        # One source for the sum and for what the same event pays for beside it.
        entropy, cost = self.entropy("noise", server_round), self.event(mechanism, kept.size)
        noisy = total.release(self.privacy, round=server_round, entropy=entropy, event=cost, participants=self.chosen)
        self.concluded(server_round, entropy)
        step = self.released(noisy, kept, server_round)
        if support is None:
            return Step(tuple(used), change=step)
        change = np.zeros(layout.size, np.float32)
        change[support] = step
        return Step(tuple(used), change=change, support=True)

    # The run.

    @property
    def population(self) -> int:
        """Public number of clients; 0 until it is declared."""
        return self.privacy.population

    @property
    def expected(self) -> float:
        """Public number of contributions that sums are divided by."""
        return float(self.sampling.expected(self.population, count=self.count))

    def declare(self, population: int) -> None:
        """Learn the public number of clients, unless the constructor was told."""
        if not self.population:
            self.privacy.declare(population)

    def require_population(self) -> None:
        """Refuse to go on without the public number of clients.

        Raises
        ------
        ConfigError
        """
        if not self.population:
            raise ConfigError(
                "the public number of clients is not known: give population=N, on which delta and the noise of the "
                "mean depend; the number online now does not count"
            )

    def over(self, server_round: int) -> str:
        """Return why round ``server_round`` may not be made, empty when it may.

        Before the first model is known the budget cannot be asked; the round is then refused when it is drawn, which is
        before any client is contacted.
        """
        if self.exhausted or self._layout is None or self.budget is None:
            return self.exhausted
        cost = self.event(self.mechanism(self._layout, server_round), self._layout.size)
        return self.unaffordable(cost)

    def statement(self) -> Statement:
        """Return what may be said about the run so far."""
        self.require_population()
        layout = Layout.flat(1) if self._layout is None else self._layout
        # A clip norm that moves is stated as it is now.
        mechanism = self.mechanism(layout, 1)
        return make_statement(
            self.privacy,
            mechanism=mechanism,
            **{
                "trust": "the server sees single updates and is trusted; clients and users of the models are not",
                "protects": "every released model, so the final one and all before it",
                "not_covered": NOT_COVERED if self.pad else (*NOT_COVERED, LENGTHS),
                "clip": self.describe(),
                "entropy": self.entropy("statement", 0),
                **self.said(mechanism),
            },
        )

    def identity(self) -> dict[str, Any]:
        """Return what must not change within a run; the ledger adds what it was begun with."""
        return {
            "noise_multiplier": float(self.noise_multiplier),
            "adjacency": self.adjacency,
            "noise": self.noise,
            "count": self.count,
            "insecure_deterministic": self.insecure_deterministic,
            "parameters": self.describe_settings(),
        }


def _update(now: Now, codec: Codec, given: Given, shared: bool) -> Vector:
    """Return the change of a client, as others can see it from a support that all share."""
    frame, update = given.frame, given.update
    if update is not None:
        if not shared:
            return update
        # What others send of the support is made of this one, too.
        part = Update(update, now.layout)
        frame, _ = codec.encode(part, codec.init(now.layout), now.key("uplink", given.node))
    vector = codec.decode(frame, now.layout)
    return vector - now.model if codec.lossless else vector
