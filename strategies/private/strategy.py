"""Client-level privacy around Flower's weighted means: one bounded contribution each, a sum, noise, and a ledger.

``Compressed(DpFedAvg(FedAvg(fraction_evaluate=0.0), clip=1.0, noise_multiplier=1.0), TopK(density=0.01))`` is the
drop-in pair with a promise. A round goes this way: the budget is asked before any client is; nodes are drawn; each of
them contributes one vector, whose influence the server bounds whatever the client did; the event is written down; noise
is added to the sum; the sum is divided by a public constant; and the inner strategy gets one reply, the noisy mean, so
that FedAdam and the others make their step from it. Everything after the noise is post-processing.

What is never used: the numbers of examples clients report, metrics, and buffers that travel as values (integers,
running statistics): those keep the server's values. A round without contributions still releases its noise, which is
charged to the budget: that nobody came is not public.

Subclasses say what a contribution is and what noise it takes: :class:`fedcomp.strategies.private.dp_fedavg.DpFedAvg`
clips vectors, :class:`fedcomp.strategies.private.topagg.TopAgg` verifies votes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcomp.codecs import Codec, Identity
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower.checkpoint import INNER
from fedcomp.flower.logs import log
from fedcomp.flower.privacy import PRIVATE, SECRET, UNPADDED
from fedcomp.flower.records import to_arrays
from fedcomp.flower.report import Report, Reports
from fedcomp.layout import Layout, Update
from fedcomp.program import Given, Now, Released, Step
from fedcomp.rng import Key
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.intake import Intake
from fedcomp.strategies.private.nodes import Shown, muted, online
from fedcomp.strategies.private.promise import NOT_COVERED, Promise
from fedcomp.strategies.private.release import Contribution
from fedcomp.strategies.private.sums import Nothing, PrivateSink
from fedcomp.strategies.receiving import Reception
from fedcomp.strategies.replies import Arrival, SentMessage
from fedcomp.strategies.running import Running
from fedcomp.strategies.sinks import ReleasedLayout, UpdateRule
from fedcomp.wire import FILLED

__all__ = ["NOT_COVERED", "Contribution", "Outcome", "PrivateStrategy"]


class PrivateStrategy(Promise, Stateful):
    """A weighted mean whose every model is released under client-level differential privacy.

    Parameters
    ----------
    inner : Strategy
        One of Flower's weighted means, made with ``fraction_evaluate=0.0``.
    **promise
        As :class:`fedcomp.strategies.private.promise.Promise`.

    Attributes
    ----------
    chosen : list of int
        The nodes that were asked in the current round.

    Raises
    ------
    ConfigError
        For arguments that cannot keep the promise.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "privacy": nested("privacy"),
        "inner": INNER,
        "_reception": nested("_reception"),
        "exhausted": str,
    }

    votes: ClassVar[bool] = False
    """Whether contributions are votes: then, and only then, a codec around this must be one that votes."""

    takes_plain: ClassVar[bool] = True
    """Whether the dense reply of a client without the mod may be added."""

    bounds_updates: ClassVar[bool] = True
    """Whether the sum bounds what a client adds to it, whatever that sends. Then reports name no norms and no guard is
    taken: who is refused for what others sent would break the bound on its influence. False where clients bound and
    noise their updates themselves: the promise is kept by then, but nothing here stops one that does not."""

    encoding: Codec = Identity()
    """What is used as the codec where clients answer with whole models."""

    def __init__(self, inner: Strategy, **promise: Any) -> None:
        super().__init__(inner, **promise)
        self.chosen: list[int] = []
        self._reception = Reception(type(self).__name__)
        self._released: ReleasedLayout | None = None
        self._model: dict[str, NDArray[Any]] = {}
        self._record_name = "arrays"
        # The round that was configured and not released yet: whatever is aggregated twice is released once.
        self._open: int | None = None
        self._sent: list[SentMessage] = []

    @property
    def reports(self) -> Reports:
        """Per round: who was asked, what arrived, what was refused and why. For the server, not for release."""
        return self._reception.reports

    def update_rule(self) -> PrivateRule:
        """Return what this strategy needs of a round's updates: each alone, bounded."""
        return PrivateRule(self)

    def within(self, released: ReleasedLayout) -> None:
        """Learn what surrounding compression sends of an update."""
        self._released = released

    def may_be_coded(self, construction: str) -> bool:
        """Whether other clients may hold what a client sends, as those of a coded round's construction do."""
        return False

    def check_codec(self, codec: Codec) -> None:
        """Refuse a codec that does not fit; called by the pair around this strategy.

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
                f"{codec!r} does not say how long its frames can get (Codec.longest), so their lengths would tell "
                "about updates; use another codec, or accept that with pad=False"
            )

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
            When dense replies, which this would be answered with, are not what this strategy takes, and when messages
            hold more than the model.
        """
        if not self.takes_plain and self._released is None:
            raise ConfigError(
                f"{type(self).__name__} takes what its clients' codec privatised, and nothing plain: it stands inside "
                "of Compressed, as local_dp(...) and DistributedDp(...) put it"
            )
        # What is released may be less than the model (a support that all share, kept coordinates): noise and price are
        # for that.
        self.adopt(arrays, None if self._released is None else self._released(arrays, server_round))
        self.require_population()
        self._open, self.chosen, self._sent, self.exhausted = None, [], [], ""
        # A round that was paid for and is made again has other contributions: the noise it had would give them away.
        self._again = sum(entry.round == server_round for entry in self.privacy.entries)
        self._reception.meet(grid, afresh=True)
        chosen: list[int] = []
        if not (reason := self.over(server_round)):
            chosen, reason = self.draw(online(grid, self.inner), self.population, server_round, count=self.count)
        if reason:
            self.warn_once(reason, f"nobody is asked in round {server_round}: {reason}")
            return []
        config[PRIVATE] = True
        if not self.pad:
            config[UNPADDED] = True
        if self.withholds:
            config[SECRET] = True
        # Flower's strategies sample among the nodes they see: they see those that were drawn, and ask all of them.
        with Shown(grid, chosen).minima(self.inner) as shown, muted(self.withholds):
            messages = list(self.inner.configure_train(server_round, arrays, config, shown))
        # The messages are made and not sent: what is recorded here is on the disk before any client is contacted.
        self.opened(server_round, chosen)
        self._open, self.chosen = server_round, chosen
        # Messages of a round share their content.
        for record in {id(m.content): m.content for m in messages}.values():
            if len(record.array_records) > 1:
                raise ConfigError(
                    f"messages of {type(self).__name__} hold {len(record.array_records)} ArrayRecords "
                    f"{sorted(record.array_records)}; a private round exchanges the model and nothing else"
                )
            self._record_name = next(iter(record.array_records), self._record_name)
        self._sent = [
            SentMessage(message, message.metadata.dst_node_id, 0, record=self._record_name) for message in messages
        ]
        return messages

    def closing(self, report: Report) -> bool:
        """Whether a round was opened and not closed yet; it is now, and ``report`` is the round's."""
        opened = self._open == report.round
        if opened:
            self._open = None
            self.reports[report.round] = report
        return opened

    def _intake(self, server_round: int, layout: Layout) -> Intake:
        report, key = self.reports.join(server_round), Key(self.seed, "uplink", server_round)
        report.asked = len(self._sent)
        intake = Intake(report, self._sent, layout, self._model, self.encoding, key, record=self._record_name)
        intake.updates_only = intake.models_asked = True
        return intake

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Outcome:
        """Release the noisy mean of ordinary dense replies."""
        # Nobody was asked: there is neither noise nor a price.
        if self._open != server_round:
            return None, None
        intake = self._intake(server_round, Layout.of(self._model))
        return self._reception.aggregate(intake, replies, self.update_rule())

    def aggregate_updates(
        self,
        server_round: int,
        updates: Iterable[tuple[int, NDArray[Any]]],
        layout: Layout,
        *,
        support: NDArray[np.int64] | None = None,
    ) -> Outcome:
        """Release the noisy sum of updates that came as vectors, as audits give them.

        Parameters
        ----------
        updates : iterable of (node id, ndarray of shape (layout.size,))
            Differences to the model, each read and forgotten before the next.
        layout : Layout
            The model's.
        support : int64 array, optional
            Public coordinates outside of which nothing is summed, released or changed, ascending.

        Returns
        -------
        (ArrayRecord or None, MetricRecord or None)
            None and None when the round was not begun.

        Raises
        ------
        BudgetExceeded, PrivacyLedgerError
            Nothing was released.
        """
        intake = self._intake(server_round, layout)
        intake.support = support
        rule = self.update_rule()
        # Of clients' values: what overflows is refused later, as not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            sink = rule.begin(intake, ())
            for node, update in updates:
                try:
                    sink.contribute(node, update)
                except FedcompError as reason:
                    intake.report.refuse(node, str(reason))
            arrays, metrics = sink.finish()
        model = None if arrays is None else self._reception.accept(intake, rule, arrays, [], [])
        for note in intake.report.notes:
            log.warning("%s, round %d: %s", type(self).__name__, server_round, note)
        return model, None if model is None else metrics


class PrivateRule(UpdateRule):
    """What every private strategy needs: the update alone, bounded.

    Parameters
    ----------
    strategy : PrivateStrategy
    sink : type of PrivateSink
        Made for each round.
    """

    updates_only: bool = True
    not_finite: ClassVar[str] = (
        "the noisy mean is not finite in the model's precision; it is paid for, and the model is kept. Use a wider "
        "dtype, a smaller clip norm or less noise"
    )
    strategy: PrivateStrategy

    def __init__(self, strategy: PrivateStrategy, sink: type[PrivateSink] = PrivateSink) -> None:
        super().__init__(strategy)
        self._sink = sink
        self.takes_plain = strategy.takes_plain
        self.measured = not strategy.bounds_updates

    @property
    def bounded(self) -> bool:
        """Whether the sum bounds what a client adds to it, whatever that sends."""
        return self.strategy.bounds_updates

    @property
    def withholds(self) -> bool:
        """Whether what a round costs rests on nobody knowing who took part."""
        return self.strategy.withholds

    def check(self, codec: Codec, guard: Norms | None) -> None:
        """Refuse what the strategy cannot keep its promise with."""
        super().check(codec, guard)
        self.strategy.check_codec(codec)

    def within(self, released: ReleasedLayout) -> None:
        """Tell the strategy of what noise is needed: of what is sent alone."""
        self.strategy.within(released)

    kind: ClassVar[type] = Released

    @property
    def takes(self) -> Strategy:
        """The weighted mean inside, which gets the noisy one."""
        return self.strategy.inner

    def total(self, x: Running, now: Now, codec: Codec, given: Sequence[Given], *, raw: bool = False) -> Step | None:
        """Return the noisy mean, which is released, and paid for, also where nobody contributed."""
        layout, key = x.layout, Key(now.seed, "uplink", now.number)
        sink = self.begin(Intake(x.report, (), layout, x.model, codec, key, record=x.record, updates_only=True), ())
        used = []
        for each in given:
            try:
                update, frame = each.update, each.frame
                if update is not None and sink.support is not None:
                    # What others send of a support that all share is made of this one, too.
                    uplink = now.key("uplink", each.node)
                    frame, update = codec.encode(Update(update, layout), codec.init(layout), uplink)[0], None
                if update is None:
                    update = codec.decode(frame, layout)
                sink.contribute(x.addresses[each.node], update - now.model if codec.lossless else update)
                used.append(each.node)
            except FedcompError as why:
                now.refuse(each.node, str(why))
        step = sink.step()
        if step is None:
            return None
        change = step
        if sink.support is not None:
            change = np.zeros(layout.size, np.float32)
            change[sink.support] = step
        return Step(tuple(used), change=change, support=sink.support is not None)

    def begin(self, intake: Intake, arrivals: Sequence[Arrival]) -> PrivateSink:
        """Return the sink of a round that was opened, once."""
        if not self.strategy.closing(intake.report):
            return Nothing(self.strategy, intake)
        # Dense models are equally long by themselves; frames alone need a filler.
        frames = not intake.models_asked
        if self.strategy.pad and frames and (longest := intake.codec.longest(intake.layout)) is not None:
            intake.report.padded_bytes = longest + FILLED
        return self._sink(self.strategy, intake)
