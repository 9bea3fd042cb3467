"""The privacy ledger: what was released, who took part, and what it cost against the budget.

An event is on the disk before the noisy value it pays for is drawn, so a server that is killed at any point has paid
for everything it released, and perhaps for one thing it did not. Events are never dropped: a checkpoint that is older
than the file is united with it by serial number.

The file holds who took part. Under Poisson sampling that is a secret of the guarantee: the file stays with the server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.logs import log
from fedcomp.plain import PlainError, fields_of, from_plain
from fedcomp.privacy.errors import BudgetExceeded, PrivacyLedgerError
from fedcomp.privacy.events import Adjacency, Event
from fedcomp.privacy.journal import Journal
from fedcomp.privacy.sampling import Sampling
from fedcomp.privacy.spending import LedgerEntry, Spending

UNCOUNTED: Final = (
    "events that were cut off at the end of the ledger's file, which an earlier release began without counting them"
)
"""What is unknown of a run whose file is of version 1."""

FORMAT: Final = "fedcomp.privacy.ledger"
VERSION: Final = 2
"""Of new files, which begin with a head that counts the events. Files of version 1 have none, and are continued so."""


class PrivacyLedger(Spending):
    """The record of a run's releases: each recorded release is charged to the budget, and written to disk if there is a
    file.

    Parameters
    ----------
    delta : float
        Of the guarantee; below 1 / population.
    population : int
        Public number of units N, stable over the run; 0 until :meth:`declare` is called. Nothing can be recorded
        before.
    adjacency : {"zero_out", "add_remove", "replace"}
    sampling : Sampling
    budget : float, optional
        Largest epsilon; default: none, everything is recorded and nothing refused.
    path : Path, optional
        :meth:`open` is called with it.
    unit : str
        The protected unit: "client", "record", "user".

    Attributes
    ----------
    run : str
        Name of the run; a file and a checkpoint belong together if they have the same name.

    Raises
    ------
    ConfigError
        When a figure is out of range, or the sampler cannot be claimed under the adjacency.

    Examples
    --------
    >>> from fedcomp.privacy.events import Event
    >>> from fedcomp.privacy.sampling import Sampling
    >>> ledger = PrivacyLedger(delta=1e-5, population=1000, adjacency="zero_out", sampling=Sampling(), budget=3.0)
    >>> ledger.record(Event("gaussian", noise_multiplier=2.0), round=1, participants=[4, 7])
    >>> round(ledger.epsilon(), 2), ledger.affords(Event("gaussian", noise_multiplier=2.0), times=3)
    (1.99, False)
    """

    def __init__(
        self,
        *,
        delta: float,
        population: int,
        adjacency: Adjacency,
        sampling: Sampling,
        budget: float | None = None,
        path: Path | None = None,
        unit: str = "client",
    ) -> None:
        super().__init__(delta=delta, adjacency=adjacency, sampling=sampling, budget=budget, unit=unit)
        self._journal: Journal | None = None
        self._had_file = False
        if population:
            self.declare(population)
        if path is not None:
            self.open(path)

    def declare(self, population: int) -> None:
        """Learn the public number of units.

        Raises
        ------
        ConfigError
            When another number was declared before, or delta is not below one over it.
        """
        population = params.integer("population", population, low=1)
        if self.population and population != self.population:
            raise ConfigError(
                f"the population was declared as {self.population} and cannot become {population}: it is public and "
                "stable over the run"
            )
        check_population(self.delta, population)
        if not self.population and self._journal is not None:
            raise PrivacyLedgerError(
                "declare the population before the ledger's file is opened; it is part of the header"
            )
        self.population = population

    def drawn(self, round: int) -> None:
        """Take note that the units of ``round`` are drawn now. Events it holds already were on others.

        Without this they would be accounted as events on one sample, which can cost less than two samples do.
        """
        if (self._attempt, round) in self._single:
            self._attempt += 1

    @property
    def counted(self) -> bool:
        """Whether events that were cut off at the end of the file, if there is one, would have been missed."""
        return self._journal is None or self._journal.counted

    @property
    def head(self) -> str:
        """The checksum of the file's last line, which names all it holds; empty where there is no file."""
        return "" if self._journal is None else self._journal.head

    def _check_people(self, entries: Sequence[LedgerEntry]) -> None:
        """Refuse a list of participants that cannot all be distinct units."""
        declared = f"the {'number of clients' if self.clients else 'population'} was declared as {self.most}"
        for entry in entries:
            if len(entry.participants) > self.most:
                raise PrivacyLedgerError(
                    f"round {entry.round} has {len(entry.participants)} participants, {declared}. Declare the "
                    "number of all that may ever take part"
                )
        # Without a cap nothing that was spent depends on who took part, and a node may come back under another id.
        if not self.per_unit and not self.sampling.cap:
            return
        new = {node for entry in entries for node in entry.participants}.difference(self._taken)
        if (people := len(self._taken) + len(new)) > self.most:
            raise PrivacyLedgerError(
                f"{people} different participants, {declared}: a {self.unit} under several ids would be counted "
                "as several, and have spent more than stated. Declare the number of all that may ever take part, and "
                "let them keep their ids"
            )

    def record(self, event: Event, *, round: int, participants: Sequence[int] = (), times: int = 1) -> None:
        """Write down that ``event`` is about to happen. When this returns, it is on the disk if there is a file.

        Parameters
        ----------
        event : Event
        round : int
            Names the units: the events of one round are on the same ones, drawn once. Whoever redraws (the steps of a
            local DP-SGD) counts them as rounds.
        participants : sequence of int
            Who takes part: all who were asked, whatever they answered.
        times : int
            The rounds ``round`` to ``round + times - 1`` at once, each redrawn.

        Raises
        ------
        BudgetExceeded
            When the budget or a participant's cap would be crossed. Nothing was recorded.
        ConfigError
            When the event claims a sampling that the ledger's sampler does not do, or arguments are out of range.
        PrivacyLedgerError
            When there are more participants than the population, or the event could not be written. Nothing may be
            released.
        """
        if not self.population:
            raise ConfigError("the population is not declared; an epsilon needs the public number of units first")
        # An event may claim a larger rate than the sampler's, which costs more, but no smaller one.
        claimed = self.sampling.event_rate
        if event.rate < claimed:
            raise ConfigError(
                f"an event claims rate={event.rate:g}, but every {self.unit} is sampled with probability {claimed:g}"
                + ("" if self.sampling.kind == "poisson" else f": sampling={self.sampling.kind!r} amplifies nothing")
            )
        params.integer("round", round, low=0)
        params.integer("times", times, low=1)
        # Python's integers, since the file is JSON.
        people = tuple(int(node) for node in participants)
        if len(set(people)) != len(people):
            raise ConfigError(f"a participant of round {round} is listed twice")
        entry = LedgerEntry(len(self._entries), self._attempt, int(round), int(times), people, event)
        # All checks before the file: a line that is written counts.
        self._check_room(entry)
        self._check_people([entry])
        cap, key = self.sampling.cap, (entry.attempt, entry.round)
        for node in people if cap else ():
            again = times == 1 and key in self._taken.get(node, ())
            if not again and self._turns[node] + times > cap:
                raise BudgetExceeded(
                    f"participant {node} was in {self._turns[node]} rounds, the cap is {cap}; choose participants by "
                    "Sampling.draw"
                )
        if not self.affords(event, times, round=round if times == 1 else None):
            raise BudgetExceeded(
                f"round {round} would cross the budget epsilon={self.budget:g} (delta={self.delta:g}); spent so far "
                f"{self.epsilon():.4g}. Nothing was released: end the run, or plan it with more noise"
            )
        # First the disk: what could not be written must not be released, and does not count either.
        if self._journal is not None:
            self._journal.append(fields_of(entry))
        self._count(entry)

    # The file, and checkpoints.

    def open(self, path: Path) -> None:
        """Keep the ledger in ``path`` from now on; events the file holds already were paid, and count.

        Raises
        ------
        PrivacyLedgerError
            When the file is damaged, belongs to another run or says something else about this one, is open elsewhere,
            or this run had another file before.
        """
        path = Path(path)
        if self._journal is not None:
            if self._journal.path.absolute() == path.absolute():
                return
            raise PrivacyLedgerError(
                f"the ledger is kept in {self._journal.path}; a run has one ledger, {path} would be a second"
            )
        if not self.population:
            raise ConfigError("declare the population before the ledger's file is opened; it is part of the header")
        journal = Journal(path)
        try:
            self._join(journal)
        # Whatever went wrong: the lock of a file that is not used would keep the repaired run out.
        except BaseException:
            journal.close()
            raise
        self._journal, self._had_file = journal, True

    def close(self) -> None:
        """Give the file back. Nothing can be recorded afterwards."""
        if self._journal is not None:
            self._journal.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger as plain data, for a checkpoint."""
        return {
            "header": self._header(),
            # A run that kept a file has to bring it when it is resumed: it may hold events that no checkpoint does.
            "file": self._had_file,
            "entries": [fields_of(entry) for entry in self._entries],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Unite the ledger with a checkpoint of the same run. Neither's events are dropped.

        Raises
        ------
        PrivacyLedgerError
            When the checkpoint is of another run, or says something else about an event both have.
        """
        try:
            header, had_file, documents = dict(state["header"]), bool(state["file"]), list(state["entries"])
        except (KeyError, TypeError, ValueError) as error:
            raise PrivacyLedgerError(f"the checkpoint's ledger cannot be read: {error!r}") from error
        # A run that is resumed may learn the population from its checkpoint before it meets its clients.
        if not self.population and header.get("population"):
            self.declare(header["population"])
        # Read as a whole before any event is taken over.
        entries = self._numbered(documents, "the checkpoint")
        self._agree(header, "the checkpoint", spent=bool(entries))
        run = str(header["run"])
        # A ledger without events has no history of its own yet, and takes over the name of the run it continues.
        if run != self.run:
            if self._entries or (self._journal is not None and had_file):
                raise PrivacyLedgerError(
                    "the checkpoint and the ledger are of two different runs; resume with the run's own file"
                )
            if self._journal is not None:
                self._journal.clear()
                self.run = run
                self._journal.begin(self._header())
        # The file may be ahead of the checkpoint (a crash) or behind it (an older copy); either way nothing is dropped.
        united = _union(self._entries, entries, "the ledger", "the checkpoint")
        if self._journal is not None:
            for entry in united[len(self._entries) :]:
                self._journal.append(fields_of(entry))
        self.run, self._had_file = run, self._had_file or had_file
        self._recount(united)

    def _header(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "run": self.run,
            "delta": self.delta,
            "population": self.population,
            "adjacency": self.adjacency,
            "sampling": self.sampling.to_json(),
            "budget": self.budget,
            "unit": self.unit,
        }

    def _agree(self, header: Mapping[str, Any], where: str, *, spent: bool) -> None:
        mine = self._header()
        if header.get("format") != FORMAT or not isinstance(header.get("run"), str):
            raise PrivacyLedgerError(f"{where} holds no ledger of this kind")
        if header.get("version") not in range(1, VERSION + 1):
            raise PrivacyLedgerError(
                f"{where} has version {header.get('version')!r} of the format, this release reads 1 to {VERSION}"
            )
        # A budget may be changed when a run is resumed: it says what may still be spent, not what was.
        for name in sorted(set(mine) - {"run", "budget", "version"}):
            if header.get(name) != mine[name]:
                raise PrivacyLedgerError(
                    f"{where} was begun with {name}={header.get(name)!r}, this run says {mine[name]!r}. What was "
                    "promised at the first release stands: continue with the same, or begin a new run"
                )
        if header["version"] == 1 and spent and self.adjacency == "add_remove" and self.sampling.kind != "poisson":
            raise PrivacyLedgerError(
                f"{where} was begun by an earlier release, which drew fixed numbers of {self.unit}s under "
                "adjacency='add_remove' as well. The sum then moves by two bounds and epsilon is larger than it says; "
                "whether it was so here is not written down. Begin a new run, with adjacency='replace' or "
                "sampling='poisson'"
            )

    def _join(self, journal: Journal) -> None:
        """Take over the entries of a file, and write the missing ones into it."""
        if journal.header is None:
            if self._had_file:
                raise PrivacyLedgerError(
                    f"this run kept its ledger in another file than {journal.path}, which is new. What was released "
                    "after the checkpoint would not be counted; put the run's file back"
                )
            journal.begin(self._header())
            entries: list[LedgerEntry] = []
        else:
            self._agree(journal.header, f"the ledger {journal.path}", spent=bool(journal.entries))
            # A file of version 2 always has a head; without it, lines cut off at the end would go unnoticed.
            if journal.counted != (journal.header["version"] > 1):
                raise PrivacyLedgerError(
                    f"the ledger {journal.path} lacks its head, which counts the events. Restore the file from a copy"
                )
            if not journal.counted:
                log.warning("the ledger %s: %s", journal.path, UNCOUNTED)
            # A new ledger takes the name of the file's run; one that has a history must have the same.
            run = journal.header["run"]
            if run != self.run and (self._entries or self._had_file):
                raise PrivacyLedgerError(
                    f"the ledger {journal.path} is of another run; a run has one ledger. Put this run's own file "
                    "there, or begin a new run"
                )
            self.run = run
            entries = self._numbered(journal.entries, f"the ledger {journal.path}")
        united = _union(entries, self._entries, f"the ledger {journal.path}", "the checkpoint")
        # Where the file was an older copy, the checkpoint holds events that it lacks.
        for entry in united[len(entries) :]:
            journal.append(fields_of(entry))
        self._recount(united)

    def _numbered(self, documents: Sequence[Mapping[str, Any]], where: str) -> list[LedgerEntry]:
        try:
            entries = from_plain(list[LedgerEntry], list(documents), f"the events of {where}")
        except PlainError as error:
            raise PrivacyLedgerError(str(error)) from error
        if [entry.serial for entry in entries] != list(range(len(entries))):
            raise PrivacyLedgerError(f"{where} lacks an event, or has one twice: serial numbers are not 0, 1, 2 ...")
        self._check_people(entries)
        return entries

    def _check_room(self, entry: LedgerEntry) -> None:
        """Refuse a span of rounds that overlaps others, because their units would be counted as separate draws."""
        # Usually rounds are numbered on, and a ledger may hold very many.
        if entry.round >= self._ends[entry.attempt]:
            return
        stop = entry.round + entry.times
        met = any(first < stop and entry.round < last for first, last in self._spans.get(entry.attempt, ()))
        if entry.times > 1:
            met = met or any(a == entry.attempt and entry.round <= r < stop for a, r in self._single)
        if met:
            raise ConfigError(f"rounds {entry.round} to {stop - 1} hold events already; number rounds on, never again")


def check_population(delta: float, population: int) -> None:
    """Raise :class:`ConfigError` unless ``delta`` is below one over ``population``."""
    if delta * population >= 1.0:
        raise ConfigError(
            f"delta={delta:g} is not below 1/{population}: releasing one unit's data whole would satisfy it. Use at "
            f"most {10.0 ** math.floor(math.log10(0.1 / population)):.0e}"
        )


def _union(first: list[LedgerEntry], second: list[LedgerEntry], one: str, other: str) -> list[LedgerEntry]:
    """Return the longer of two lists of one run's entries, which agree over the length of the shorter."""
    common = min(len(first), len(second))
    for mine, theirs in zip(first[:common], second[:common], strict=True):
        if mine != theirs:
            raise PrivacyLedgerError(
                f"{one} and {other} say different things about event {mine.serial}; which was paid for?"
            )
    return first + second[common:]
