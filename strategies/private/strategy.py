"""Client-level privacy around Flower's weighted means: one bounded contribution each, a sum, noise, and a ledger.

``Compressed(DpFedAvg(FedAvg(fraction_evaluate=0.0), clip=1.0, noise_multiplier=1.0), TopK(density=0.01))`` is the
drop-in pair with a promise. A round goes this way: the budget is asked before any client is; nodes are drawn; each of
them contributes one vector, whose influence the server bounds whatever the client did; the event is written down; noise
is added to the sum; the sum is divided by a public constant; and the inner strategy gets one reply, the noisy mean, so
that FedAdam and the others make their step from it. Everything after the noise is post-processing.

What is never used: the numbers of examples clients report, metrics, and buffers that travel as values (integers,
running statistics): those keep the server's values. A round without contributions releases its noise all the same, and
pays: that nobody came is no public fact.

Subclasses say what a contribution is and what noise it takes: :class:`fedcomp.strategies.private.dp_fedavg.DpFedAvg`
clips vectors, :class:`fedcomp.strategies.private.topagg.TopAgg` verifies votes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcomp.codecs import Codec, params
from fedcomp.errors import ConfigError
from fedcomp.flower.checkpoint import INNER
from fedcomp.flower.logs import log
from fedcomp.flower.payload import take_node
from fedcomp.flower.privacy import LENGTHS, PRIVATE, SECRET, UNPADDED
from fedcomp.flower.records import restore_dtypes, to_arrays, to_record
from fedcomp.flower.report import Report, Reports
from fedcomp.layout import Layout, Vector
from fedcomp.privacy.entropy import Entropy, make_entropy
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.events import Adjacency, Event
from fedcomp.privacy.ledger import Ledger
from fedcomp.privacy.mechanism import Mechanism, PrivateSum
from fedcomp.privacy.sampling import Sampling
from fedcomp.privacy.statement import Statement, make_statement
from fedcomp.rng import Key
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.means import MEANS, aggregate_once, is_mean
from fedcomp.strategies.partitions import Holders
from fedcomp.strategies.private.nodes import Shown, online, unheard
from fedcomp.strategies.replies import Rejected, Sent, match_replies, read_plain
from fedcomp.strategies.round_log import RoundLog

Contribution = NDArray[Any]
Outcome = tuple[ArrayRecord | None, MetricRecord | None]

NOT_COVERED: Final = (
    "the choice of hyper-parameters and of the model, and preprocessing of the data",
    "who takes part, and when",
    "a client that connects anew under another node id, which is counted as another client",
    "the server's own reports and logs (who was refused, and why)",
    "the server's evaluation of released models on data of its own",
)
"""What no statement of these strategies extends to."""


_NOT_FINITE: Final = (
    "the noisy mean is not finite in the model's precision; it is paid for, and the model is kept. Use a wider dtype, "
    "a smaller clip norm or less noise"
)


class PrivateStrategy(Strategy, Stateful):
    """A weighted mean whose every model is released under client-level differential privacy.

    Parameters
    ----------
    inner : Strategy
        One of Flower's weighted means, made with ``fraction_evaluate=0.0``. Its ``fraction_train`` stays at 1: who
        takes part is decided by ``sampling``.
    noise_multiplier : float
        Standard deviation of the noise on the sum over the sensitivity of the sum; 0 promises nothing.
    adjacency : {"zero_out", "add_remove", "replace"}
        What one client may change. Under "zero_out" its contribution is left out of every sum and count, as one that
        was refused is; "replace" doubles the sensitivity.
    delta : float
        Must be below 1 / ``population``.
    population : int
        Public number N of clients that may ever take part. 0: learnt by :meth:`declare`, which whoever runs the rounds
        calls.
    sampling : Sampling, optional
        Who takes part in a round; default everyone, without amplification.
    count : int
        At most so many clients in a round (0: all who may), drawn uniformly; not with Poisson sampling, and not under
        "add_remove", where another client would take the place of a removed one.
    budget : float, optional
        An epsilon at ``delta``; a round that would cross it is not begun.
    noise : {"discrete_gaussian", "skellam", "gaussian"}
    pad : bool
        Let clients fill their frames up to the longest that any update could have (:meth:`Codec.longest`). False saves
        these bytes; whoever sees message lengths then learns about updates what no noise covers: how clustered their
        largest coordinates are, how many are zero, and whether there was anything to send at all.
    insecure_deterministic : bool
        Take noise and samples from ``seed``: for tests and experiments that must repeat. The statement says so.
    seed : int
        Only used with ``insecure_deterministic``.

    Attributes
    ----------
    privacy : Ledger
        What was released, and what it cost.
    reports : Reports
        Per round: who was asked, what arrived, what was refused and why. For the server, not for release.

    Raises
    ------
    ConfigError
        For arguments that cannot keep the promise.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "privacy": nested("privacy"),
        "inner": INNER,
        "reports": Reports,
        "_exhausted": str,
    }

    votes: ClassVar[bool] = False
    """Whether contributions are votes: then, and only then, a codec around this must be one that votes."""

    takes_plain: ClassVar[bool] = True
    """Whether the dense reply of a client without the mod may be added."""

    bounds_updates: ClassVar[bool] = True
    """Whether the sum bounds what a client adds to it, whatever that sends. Then reports name no norms and no guard is
    taken: who is refused for what others sent would break the bound on its influence. False where clients bound and
    noise their updates themselves: the promise is kept by then, but nothing here stops one that does not."""

    peers_may_see: ClassVar[bool] = False
    """Whether other clients may hold what a client sends, as the relays of coded rounds do."""

    def __init__(
        self,
        inner: Strategy,
        *,
        noise_multiplier: float,
        adjacency: Adjacency = "zero_out",
        delta: float = 1e-5,
        population: int = 0,
        sampling: Sampling | None = None,
        count: int = 0,
        budget: float | None = None,
        noise: str = "discrete_gaussian",
        pad: bool = True,
        insecure_deterministic: bool = False,
        seed: int = 0,
    ) -> None:
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
        if sampling is not None and not isinstance(sampling, Sampling):
            raise ConfigError(f"sampling={sampling!r} is not valid: an object, such as Sampling('capped', cap=20)")
        if budget is not None:
            params.positive("budget", budget)
        params.boolean("insecure_deterministic", insecure_deterministic)
        self.pad = params.boolean("pad", pad)
        params.integer("population", population, low=0)
        self.inner = inner
        self.noise_multiplier = noise_multiplier
        self.adjacency: Adjacency = adjacency
        self.noise = noise
        self.delta = delta
        self.sampling = Sampling() if sampling is None else sampling
        params.integer("count", count, low=0)
        self.sampling.check(adjacency, count=count)
        self.count = count
        self.budget = budget
        self.insecure_deterministic = insecure_deterministic
        self.seed = seed
        self.reports = Reports()
        self._log = RoundLog(type(self).__name__)
        self.privacy = Ledger(
            delta=delta, population=population, adjacency=adjacency, sampling=self.sampling, budget=budget
        )
        self._model: dict[str, NDArray[Any]] = {}
        self._record_name = "arrays"
        self._layout: Layout | None = None
        self._open: int | None = None
        self._chosen: list[int] = []
        self._again = 0
        self._exhausted = ""
        self._said: set[str] = set()
        self._sent: list[Sent] = []
        self._holders = Holders()

    # What a subclass says of its mechanism.

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

    def cast(self, update: Vector, layout: Layout, key: Key) -> Vector:
        """Return what a client that sent a dense ``update`` outside of the pair contributes; default the update.

        Parameters
        ----------
        key : Key
            The stream that client would have encoded with.

        Raises
        ------
        Unbounded
            When it contributes nothing.
        """
        return update

    def opened(self, server_round: int, chosen: Sequence[int]) -> None:
        """Prepare for a round in which the nodes ``chosen`` will be asked; called before they are."""

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
        with np.errstate(over="ignore"):
            return (noisy / self.expected).astype(np.float32)

    def describe(self) -> str:
        """Return the subclass's own parameters in a few words, for the log and the statement."""
        return ""

    # What the outside asks.

    def check_codec(self, codec: Codec) -> None:
        """Refuse a codec that does not fit; called by the pair around this strategy.

        Raises
        ------
        ConfigError
        """
        if codec.votes != self.votes:
            takes, sends = (("updates", "votes")[votes] for votes in (self.votes, codec.votes))
            raise ConfigError(f"{type(self).__name__} takes {takes}, but {codec!r} sends {sends}")
        if self.pad and codec.longest(Layout.flat(4096)) is None:
            raise ConfigError(
                f"{codec!r} does not say how long its frames can get (Codec.longest), so their lengths would tell "
                "about updates; use another codec, or accept that with pad=False"
            )

    @property
    def population(self) -> int:
        """Public number of clients; 0 until it is declared."""
        return self.privacy.population

    @property
    def withholds(self) -> bool:
        """Whether what a round costs rests on nobody knowing who took part: then neither log nor reports say."""
        return self.sampling.event_rate < 1.0

    @property
    def expected(self) -> float:
        """Public number of contributions that sums are divided by."""
        return float(self.sampling.expected(self.population, count=self.count))

    def declare(self, population: int) -> None:
        """Learn the public number of clients, unless the constructor was told."""
        if not self.population:
            self.privacy.declare(population)

    def open_ledger(self, path: Path) -> None:
        """Keep the ledger in a file from now on; events in it that the ledger lacks were paid and count."""
        self.privacy.open(Path(path))

    def over(self, server_round: int) -> str:
        """Return why round ``server_round`` may not be made, empty when it may.

        Before the first model is known the budget cannot be asked; the round is then refused when it is configured,
        which is before any client hears of it.
        """
        return self._exhausted or self._unaffordable(server_round)

    def _unaffordable(self, server_round: int) -> str:
        if self._layout is None or self.budget is None:
            return ""
        cost = self.event(self.mechanism(self._layout, server_round), self._layout.size)
        if self.privacy.affords(cost, round=server_round):
            return ""
        return (
            f"the budget of epsilon {self.budget:g} at delta {self.delta:g} allows no further round: "
            f"{self.privacy.epsilon():.4g} is spent"
        )

    def statement(self) -> Statement:
        """Return what may be said about the run so far."""
        self._require_population()
        layout = Layout.flat(1) if self._layout is None else self._layout
        mechanism = self.mechanism(layout, max(self.reports, default=1))
        return make_statement(
            self.privacy,
            mechanism=mechanism,
            **{
                "trust": "the server sees single updates and is trusted; clients and users of the models are not",
                "protects": "every released model, so the final one and all before it",
                "not_covered": NOT_COVERED if self.pad else (*NOT_COVERED, LENGTHS),
                "clip": self.describe(),
                "entropy": self._entropy("statement", 0),
                **self.said(mechanism),
            },
        )

    def said(self, mechanism: Mechanism) -> dict[str, Any]:
        """Return what a subclass says otherwise in the statement, by its fields."""
        return {}

    def summary(self) -> None:
        """Log what is promised, then the inner strategy's own summary."""
        log.info(
            "\t├──> %s: noise multiplier %g (%s), %s, %s",
            type(self).__name__,
            self.noise_multiplier,
            self.noise,
            self.adjacency,
            self.describe(),
        )
        self.inner.summary()

    # Flower's hooks.

    def adopt(self, arrays: ArrayRecord, layout: Layout | None = None) -> None:
        """Take the model of the round to come, and the layout of what is released; default the model's own.

        Called by a wrapper that knows better, before :meth:`configure_train`: the budget is asked for this layout.
        """
        self._model = to_arrays(arrays)
        self._layout = Layout.of(self._model) if layout is None else layout
        if not self._layout.size:
            raise ConfigError(
                "the model has no tensor of finite floats, and nothing else is ever released: integers, buffers and "
                "statistics stay as they are. Give it parameters, or train it without privacy"
            )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the nodes of the round and let the inner strategy ask them; nobody when the run is over.

        Raises
        ------
        ConfigError
            When dense replies, which this would be answered with, are not what this strategy takes.
        """
        if not self.takes_plain:
            raise ConfigError(
                f"{type(self).__name__} takes what its clients' codec privatised, and nothing plain: it stands inside "
                "of Compressed, as local_dp(...) and DistributedDp(...) put it"
            )
        self.adopt(arrays)
        return self.ask(server_round, arrays, config, grid)

    def ask(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Do :meth:`configure_train`'s work for the model and layout that were adopted."""
        self._require_population()
        self._open, self._chosen, self._sent, self._exhausted = None, [], [], ""
        # A round that was paid for and is made again has other contributions: the noise it had would give them away.
        self._again = sum(entry.round == server_round for entry in self.privacy.entries)
        reason = self._unaffordable(server_round)
        if not reason:
            nodes = online(grid, self.inner)
            # Anew: whom earlier rounds prefer would make one client's part in the sum depend on another's.
            self._holders = Holders()
            self._holders.meet(grid)
            reason = self._crowded(len(nodes))
        if not reason:
            entropy = self._entropy("sampling", server_round)
            self._warn_of(self.privacy.surplus(nodes))
            chosen = self.sampling.draw(nodes, self.privacy, server_round, entropy, count=self.count)
            if self.sampling.kind == "capped" and nodes and not chosen:
                self._exhausted = reason = "every client that is online has taken part as often as it may"
        if reason:
            if reason not in self._said:
                log.warning("%s: nobody is asked in round %d: %s", type(self).__name__, server_round, reason)
                self._said.add(reason)
            return []
        config[PRIVATE] = True
        if not self.pad:
            config[UNPADDED] = True
        if self.withholds:
            config[SECRET] = True
        with Shown(grid, chosen).minima(self.inner) as shown, unheard(self.withholds):
            messages = list(self.inner.configure_train(server_round, arrays, config, shown))
        self.opened(server_round, chosen)
        self._open, self._chosen = server_round, chosen
        self._sent = [Sent(message, message.metadata.dst_node_id, 0) for message in messages]
        for record in {id(m.content): m.content for m in messages}.values():
            self._record_name = next(iter(record.array_records), self._record_name)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Outcome:
        """Release the noisy mean of ordinary dense replies."""
        if self._open != server_round:
            return None, None
        report = Report(server_round, asked=len(self._sent))
        layout = Layout.of(self._model)
        outcome = self.aggregate_updates(server_round, self._plain(replies, layout, report), layout, report=report)
        self._conclude(report, outcome)
        return outcome

    def _conclude(self, report: Report, outcome: Outcome) -> None:
        """Log a round whose replies this strategy has read itself; whoever was asked is lost, refused or used."""
        report.used = 0 if outcome[0] is None else report.asked - report.lost - len(report.refused)
        self._log.conclude(report, withheld=self.withholds)

    def _plain(self, replies: Iterable[Message], layout: Layout, report: Report) -> Iterator[tuple[int, NDArray[Any]]]:
        before = layout.flatten(self._model)
        for sent, reply in match_replies(self._sent, replies, report, self._holders):
            try:
                if reply.has_error():
                    raise Rejected(f"error {reply.error.code}: {reply.error.reason}")
                plain = read_plain(reply, layout, self._model)
                with np.errstate(over="ignore", invalid="ignore"):
                    vector = layout.flatten(plain)
                    vector -= before
                key = Key(self.seed, "uplink", report.round, take_node(reply) or 0)
                vector = self.cast(vector, layout, key)
            except (Rejected, Unbounded) as reason:
                report.refuse(sent.node, str(reason))
                continue
            report.plain += 1
            yield sent.node, vector

    def aggregate_updates(
        self,
        server_round: int,
        updates: Iterable[tuple[int, NDArray[Any]]],
        layout: Layout,
        *,
        report: Report | None = None,
        support: NDArray[np.int64] | None = None,
        summed: Layout | None = None,
    ) -> Outcome:
        """Release the noisy sum of ``updates``: the one path by which anything of them becomes public.

        Parameters
        ----------
        updates : iterable of (node id, ndarray of shape (layout.size,))
            Differences to the model, each read and forgotten before the next.
        layout : Layout
            The model's.
        report : Report, optional
            Where refusals are noted; default a new one.
        support : int64 array, optional
            Public coordinates outside of which nothing is summed, released or changed, ascending.
        summed : Layout, optional
            Of the updates, where they are not differences of the model but what :meth:`released` makes one from.

        Returns
        -------
        (ArrayRecord or None, MetricRecord or None)
            None and None when the round was not begun.

        Raises
        ------
        BudgetExceeded, LedgerError
            Nothing was released.
        """
        if self._open != server_round:
            return None, None
        self._open = None
        report = self.reports[server_round] = Report(server_round) if report is None else report
        given_as = layout if summed is None else summed
        kept = given_as if support is None else Layout.flat(int(support.size))
        mechanism = self.mechanism(kept, server_round)
        total = PrivateSum(mechanism, (kept.size,))
        self.begun(server_round)
        asked = frozenset(self._chosen)
        for node, update in updates:
            try:
                if node not in asked:
                    raise Unbounded(f"node {node} was not asked in this round")
                if update.shape != (given_as.size,):
                    raise Unbounded(f"an update has shape {update.shape}, expected ({given_as.size},)")
                given = self.contribution(update if support is None else update[support], kept, server_round)
                total.add(node, given)
            except Unbounded as reason:
                report.refuse(node, str(reason))
                continue
            self.added(given)
        entropy = self._entropy("noise", server_round)
        # A turn is taken by being asked: whoever answers with nothing of use would otherwise be asked again and again,
        # in the place of others.
        noisy = total.release(
            self.privacy,
            round=server_round,
            entropy=entropy,
            event=self.event(mechanism, kept.size),
            participants=self._chosen,
        )
        self.concluded(server_round, entropy)
        step = self.released(noisy, kept, server_round)
        moved = layout.flatten(self._model)
        with np.errstate(over="ignore", invalid="ignore"):
            if support is None:
                moved += step
            else:
                moved[support] += step
        return self._hand_over(server_round, moved, layout, report, sparse=support is not None)

    def _hand_over(
        self, server_round: int, moved: Vector, layout: Layout, report: Report, *, sparse: bool = False
    ) -> Outcome:
        """Let the inner strategy make its step from the noisy mean; buffers keep the server's values."""
        exact = {t.name: self._model[t.name] for t in layout.exact}
        # A round that nobody was drawn for has no message to answer.
        asked = Message(RecordDict(), 1, "train") if not self._sent else self._sent[0].message
        mean = (self._record_name, to_record(layout.unflatten(moved, exact)))
        with np.errstate(over="ignore", invalid="ignore"):
            arrays, _ = aggregate_once(self.inner, server_round, mean, asked, (), sparse=sparse)
        if arrays is None:
            return None, None
        found = to_arrays(restore_dtypes(arrays, self._model, []))
        if not all(np.isfinite(found[t.name]).all() for t in layout.tensors):
            report.notes.append(_NOT_FINITE)
            log.warning("%s, round %d: %s", type(self).__name__, server_round, _NOT_FINITE)
            return None, None
        return to_record(found | exact), MetricRecord()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nobody: metrics of clients would be released without noise."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return nothing."""
        return None

    # What survives.

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

    def describe_settings(self) -> str:
        """Return the subclass's parameters that must not change within a run; default :meth:`describe`."""
        return self.describe()

    def _entropy(self, purpose: str, server_round: int) -> Entropy:
        key = Key(self.seed, f"privacy/{purpose}", server_round, self._again)
        return make_entropy(key, insecure_deterministic=self.insecure_deterministic)

    def _crowded(self, online: int) -> str:
        """Return why a round with so many clients online is not made, empty when it may be.

        Not an error that ends the run: a client that came back may for a while be there under its former id as well.
        """
        if online <= self.population:
            return ""
        return (
            f"{online} clients are online, and the population was given as {self.population}. Delta and the mean's "
            "denominator rest on the number of all that may ever take part: end this run, and begin one that says it"
        )

    def _warn_of(self, surplus: Sequence[int]) -> None:
        """Log once of each node that cannot be another client, since all of them are known."""
        for node in surplus:
            text = (
                f"node {node} is not asked: the {self.population} clients of the population have all taken part, and "
                "under another id one of them would have its turns again"
            )
            if text not in self._said:
                log.warning("%s: %s", type(self).__name__, text)
                self._said.add(text)

    def _require_population(self) -> None:
        if not self.population:
            raise ConfigError(
                "the public number of clients is not known: give population=N, on which delta and the noise's share of "
                "the mean depend; how many are online now is not it"
            )
