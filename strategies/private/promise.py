"""What private strategies promise, what was spent of it, and what may be said about a run.

:class:`PrivateRun` is what every one of them has: ledger, sampling, randomness. :class:`Promise` is that of a weighted
mean of clients' updates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp.flower.logs import log
from fedcomp.flower.privacy import LENGTHS
from fedcomp.flower.report import Reports
from fedcomp.layout import Layout, Vector
from fedcomp.privacy.entropy import Entropy, make_entropy
from fedcomp.privacy.events import Adjacency, Event
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.mechanism import Mechanism
from fedcomp.privacy.statement import Statement, make_statement
from fedcomp.rng import Key
from fedcomp.rules import Int, checked
from fedcomp.strategies.means import MEANS, is_mean
from fedcomp.strategies.private.release import Release
from fedcomp.strategies.private.settings import PrivacySettings

NOT_COVERED: Final = (
    "the choice of hyper-parameters and of the model, and preprocessing of the data",
    "who takes part, and when",
    "a client that reconnects under another node id, which is counted as another client",
    "the server's own reports and logs (who was refused, and why)",
    "the server's evaluation of released models on data of its own",
)
"""What no statement of these strategies extends to."""


class PrivateRun:
    """The ledger, the sampling and the randomness of one private run.

    Parameters
    ----------
    given : PrivacySettings
    unit : str
        Whose contribution is hidden.

    Attributes
    ----------
    privacy : PrivacyLedger
        What was released, and what it cost.
    exhausted : str
        Why nobody is left who could be asked, empty while somebody is.
    """

    def __init__(self, given: PrivacySettings, *, unit: str = "client") -> None:
        self.noise_multiplier, self.noise, self.pad = given.noise_multiplier, given.noise, given.pad
        self.adjacency: Adjacency = given.adjacency
        self.delta, self.budget, self.sampling = given.delta, given.budget, given.drawn
        self.insecure_deterministic, self.seed = given.insecure_deterministic, given.seed
        self.privacy = PrivacyLedger(
            delta=given.delta,
            population=given.population,
            adjacency=given.adjacency,
            sampling=given.drawn,
            budget=given.budget,
            unit=unit,
        )
        self.exhausted = ""
        self._again = 0
        self._warned: set[str] = set()

    @property
    def withholds(self) -> bool:
        """Whether what a round costs rests on nobody knowing who took part: then neither log nor reports say."""
        return self.sampling.event_rate < 1.0

    def open_ledger(self, path: Path) -> None:
        """Keep the ledger in a file from now on; events in it that the ledger lacks were paid and count."""
        self.privacy.open(Path(path))

    def unaffordable(self, event: Event, server_round: int) -> str:
        """Return why the budget does not allow a round with ``event``, empty when it does."""
        # With the round: events that it holds already are on the same units, and cost more together.
        if self.privacy.affords(event, round=server_round):
            return ""
        return (
            f"the budget of epsilon {self.budget:g} at delta {self.delta:g} allows no further round: "
            f"{self.privacy.epsilon():.4g} is spent"
        )

    def draw(self, nodes: Sequence[int], clients: int, server_round: int, *, count: int = 0) -> tuple[list[int], str]:
        """Return which of the connected ``nodes`` are asked in a round, and why nobody is, empty when somebody may be.

        Parameters
        ----------
        clients : int
            Public number of all that may ever take part.
        count : int
            The most that are drawn; 0 for all who may.
        """
        if len(nodes) > clients:
            # Not an error that ends the run: a client that came back may for a while be there under its former id, too.
            return [], (
                f"{len(nodes)} clients are online, and their number was given as {clients}. What is promised rests on "
                "the number of all that may ever take part: end this run, and begin one that says it"
            )
        for node in self.privacy.surplus(nodes):
            self.warn_once(
                f"node {node} is not asked: the {self.privacy.population} clients of the population have all taken "
                "part, and under another id one of them would have its turns again"
            )
        chosen = self.sampling.draw(
            nodes, self.privacy, server_round, self.entropy("sampling", server_round), count=count
        )
        # An empty Poisson draw is a round like any other; of a cap it means that all turns are taken.
        capped = self.sampling.kind == "capped" and nodes and not chosen
        self.exhausted = "every client that is online has taken part as often as it may" if capped else ""
        return chosen, self.exhausted

    def entropy(self, purpose: str, server_round: int) -> Entropy:
        """Return the source of randomness for one purpose of a round, other than that of the same round made before."""
        # A stream of its own for each: seeded noise must not continue the stream that drew the nodes.
        key = Key(self.seed, f"privacy/{purpose}", server_round, self._again)
        return make_entropy(key, insecure_deterministic=self.insecure_deterministic)

    def warn_once(self, text: str, said: str = "") -> None:
        """Log a warning, ``text`` unless it is ``said`` in other words, the first time only."""
        if text not in self._warned:
            log.warning("%s: %s", type(self).__name__, said or text)
            self._warned.add(text)


class NoClientEvaluation:
    """A strategy that asks no client to evaluate: metrics of clients would be released without noise."""

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nobody."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return nothing."""
        return None


class Promise(PrivateRun, NoClientEvaluation, Release, Strategy):
    """A promise of client-level differential privacy, and its books.

    Parameters
    ----------
    inner : Strategy
        One of Flower's weighted means, made with ``fraction_evaluate=0.0``. Its ``fraction_train`` stays at 1: who
        takes part is decided by ``sampling``.
    count : int
        The most clients of a round (0: all who may), drawn uniformly; not with Poisson sampling, and not under
        "add_remove", where another client would take the place of a removed one.
    **privacy
        See :class:`fedcomp.strategies.private.settings.PrivacySettings`; ``noise_multiplier`` at least.

    Attributes
    ----------
    privacy, exhausted
        Of :class:`PrivateRun`.

    Raises
    ------
    ConfigError
        For arguments that cannot keep the promise.
    """

    chosen: Sequence[int]

    def __init__(self, inner: Strategy, *, count: int = 0, **privacy: Any) -> None:
        if not isinstance(inner, Strategy) or not is_mean(inner):
            raise ConfigError(
                f"{type(inner).__name__} looks at single updates, which a private sum does not show; use one of "
                f"{', '.join(MEANS)}. A codec goes outside: Compressed({type(self).__name__}(...), codec)"
            )
        if getattr(inner, "fraction_evaluate", 0.0) != 0.0:
            raise ConfigError(
                "evaluation on clients would release their metrics without noise; make the inner strategy with "
                "fraction_evaluate=0.0, and evaluate on the server (evaluate_fn)"
            )
        if getattr(inner, "fraction_train", 1.0) != 1.0:
            raise ConfigError(
                f"fraction_train={inner.fraction_train!r} of the inner strategy is a sample nobody accounts for; leave "  # type: ignore[attr-defined]
                "it at 1.0 and give sampling=Sampling(...)"
            )
        given = PrivacySettings(**privacy)
        count = checked("count", count, Int())
        # With the count, which the ledger's own check does not know.
        given.drawn.check(given.adjacency, count=count)
        super().__init__(given)
        self.inner = inner
        self.count = count
        self._layout: Layout | None = None

    @property
    @abstractmethod
    def reports(self) -> Reports:
        """Per round: who was asked, what arrived, what was refused and why."""

    def event(self, mechanism: Mechanism, size: int) -> Event:
        """Return what a round costs; default the mechanism's own event at the sampling's rate."""
        return mechanism.event(rate=self.sampling.event_rate, size=size)

    def released(self, noisy: NDArray[np.float64], layout: Layout, server_round: int) -> Vector:
        """Return the update that the noisy sum stands for, float32 ``(layout.size,)``; default its mean.

        The divisor is a public constant: the number of replies is the adversary's to know or to choose.
        """
        # Too large for float32 becomes infinite here, and is refused with the model's own dtype later.
        with np.errstate(over="ignore"):
            return (noisy / self.expected).astype(np.float32)

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

    def over(self, server_round: int) -> str:
        """Return why round ``server_round`` may not be made, empty when it may.

        Before the first model is known the budget cannot be asked; the round is then refused when it is configured,
        which is before any client is contacted.
        """
        if self.exhausted or self._layout is None or self.budget is None:
            return self.exhausted
        cost = self.event(self.mechanism(self._layout, server_round), self._layout.size)
        return self.unaffordable(cost, server_round)

    def statement(self) -> Statement:
        """Return what may be said about the run so far."""
        self.require_population()
        layout = Layout.flat(1) if self._layout is None else self._layout
        # A clip norm that moves is stated as it is now.
        mechanism = self.mechanism(layout, max(self.reports, default=1))
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

    def require_population(self) -> None:
        """Refuse to go on without the public number of clients.

        Raises
        ------
        ConfigError
        """
        if not self.population:
            raise ConfigError(
                "the public number of clients is not known: give population=N, on which delta and the noise's share of "
                "the mean depend; how many are online now is not it"
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
