"""Where the updates of a round go: a mean in one buffer, replies as arrays, or whatever a strategy declares itself.

An :class:`UpdateRule` says what a strategy needs of updates, once for each strategy; :meth:`UpdateRule.begin` opens a
:class:`Sink` for one round. Flower's own strategies get their rule from :func:`rule_of`, which looks at their
aggregation alone; any other strategy may declare one by a method ``update_rule()``, as private strategies do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcomp.codecs import Codec
from fedcomp.errors import ConfigError
from fedcomp.flower.payload import payload_bytes
from fedcomp.flower.protocol import OWN_CONFIG
from fedcomp.flower.records import count_differing, to_record
from fedcomp.flower.report import shorten
from fedcomp.layout import Layout, Update, Vector
from fedcomp.program import Given, Mean, Now, Single, Step
from fedcomp.strategies.adaptive import Outcome, has_moments, step_on_support
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.intake import Intake
from fedcomp.strategies.means import MEANS, aggregate_once, copy_names, is_mean, leave, mean_of_constants
from fedcomp.strategies.pairings import warn_of_pairing
from fedcomp.strategies.private.flower_dp import promises
from fedcomp.strategies.replies import NOT_FINITE, Arrays, Arrival, Rejected, SentMessage, weight_of
from fedcomp.strategies.running import Running
from fedcomp.wire import Bundle, Frame

ReleasedLayout = Callable[[ArrayRecord, int], Layout]
"""Of a model and a round: the layout of what is sent of an update."""


class Sink(ABC):
    """Where the updates of one round go, in partition order; see :meth:`UpdateRule.begin`."""

    def holds(self, arrivals: Sequence[Arrival]) -> bool:
        """Whether exactly ``arrivals`` were added, with the weights that they have among themselves."""
        return False

    @abstractmethod
    def add(self, arrival: Arrival) -> None:
        """Take one update, with its weight.

        Raises
        ------
        FedcompError
            When it cannot be used; the sink is as it was.
        """

    @abstractmethod
    def finish(self) -> Outcome:
        """Let the strategy make its step; return its model and metrics, None and None where it made none."""


class UpdateRule(ABC):
    """What a strategy needs of a round's updates.

    Parameters
    ----------
    strategy : Strategy

    Attributes
    ----------
    kind : type
        Among what a system's contributions may become, :attr:`fedcomp.program.System.RULES`.
    updates_only : bool
        Whether nothing but the update of a reply is read, and one client's part depends on nobody else's: no weights,
        metrics or majorities, and no preference from earlier rounds.
    takes_plain : bool
        Whether the whole model of a client that encoded nothing can be used.
    measured : bool
        Whether reports may name the norms of updates.
    bounded : bool
        Whether every update is bounded, so that no guard is taken.
    withholds : bool
        Whether neither log nor reports may say who took part.
    not_finite : str
        What a report says of an aggregate that cannot be a model.
    """

    kind: ClassVar[type] = Mean
    updates_only: bool = False
    takes_plain: bool = True
    measured: bool = True
    not_finite: ClassVar[str] = NOT_FINITE

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    @property
    def bounded(self) -> bool:
        """Whether every update is bounded, so that no guard is taken."""
        return promises(self.strategy)

    @property
    def withholds(self) -> bool:
        """Whether neither log nor reports may say who took part."""
        return False

    @property
    def mean(self) -> Strategy:
        """The weighted mean that takes a step from a sum that was made elsewhere.

        Raises
        ------
        ConfigError
            When the strategy needs single updates.
        """
        raise ConfigError(
            f"{type(self.strategy).__name__} looks at single updates, of which a coded sum shows none; use one of "
            f"{', '.join(MEANS)}"
        )

    def check(self, codec: Codec, guard: Norms | None) -> None:
        """Refuse a codec or a guard that does not fit.

        Raises
        ------
        ConfigError
        """
        if guard is not None and self.bounded:
            raise ConfigError(
                f"{type(self.strategy).__name__} bounds every update by itself, and a guard would make one client's "
                "part in the private sum depend on the others'; leave guard out"
            )

    def within(self, released: ReleasedLayout) -> None:  # noqa: B027
        """Learn what surrounding compression sends of an update; default: it does not matter."""

    def of_round(self, *, own: bool) -> UpdateRule:
        """Return the rule of one round; ``own`` where some nodes are sent models of their own."""
        return self

    def configure(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Return the messages by which the strategy asks the clients of a round."""
        return list(self.strategy.configure_train(server_round, arrays, config, grid))

    @property
    def takes(self) -> Strategy:
        """The strategy that is handed what :meth:`total` returns."""
        taker: Strategy = self.strategy
        return taker

    @abstractmethod
    def total(self, x: Running, now: Now, codec: Codec, given: Sequence[Given], *, raw: bool = False) -> Step | None:
        """Return what contributions come to; see :meth:`fedcomp.program.Rule.total`."""

    @abstractmethod
    def begin(self, intake: Intake, arrivals: Sequence[Arrival]) -> Sink:
        """Return the sink of a round, to which all of ``arrivals`` will be added in their order."""

    def ahead(self, intake: Intake, replies: Sequence[tuple[SentMessage, Message]]) -> Sink | None:
        """Return a sink to which updates may be added as they are read, while what was parsed of each is at hand.

        Where all of ``replies`` turn out to be usable it is the one of :meth:`begin`; where they do not, it is thrown
        away. Default: None, a sink must know who is in it.
        """
        return None


@runtime_checkable
class Declares(Protocol):
    """A strategy that says itself what it needs of updates."""

    def update_rule(self) -> UpdateRule:
        """Return the rule."""
        ...


def rule_of(strategy: Strategy) -> UpdateRule:
    """Return what a strategy needs: its own word, a mean for Flower's weighted means, else every reply as arrays."""
    if isinstance(strategy, Declares):
        return strategy.update_rule()
    return MeanRule(strategy) if is_mean(strategy) else RepliesRule(strategy)


class RepliesRule(UpdateRule):
    """Every update as an ordinary reply, which any strategy with Flower's hooks understands."""

    def check(self, codec: Codec, guard: Norms | None) -> None:
        """Refuse votes, which are no updates one by one."""
        super().check(codec, guard)
        self._require_updates(codec)
        warn_of_pairing(self.strategy, codec)

    def _require_updates(self, codec: Codec) -> None:
        if codec.votes:
            raise ConfigError(
                f"{codec!r} sends votes, of which only the weighted sum is an update; {type(self.strategy).__name__} "
                f"looks at single updates. Use one of {', '.join(MEANS)}"
            )

    kind: ClassVar[type] = Single

    def total(self, x: Running, now: Now, codec: Codec, given: Sequence[Given], *, raw: bool = False) -> Step | None:
        """Return all updates.

        Raises
        ------
        ConfigError
            When the codec votes, and some nodes got models of their own, or the strategy was not known to look at
            single updates.
        """
        self._require_updates(codec)
        return Single().total(now, codec, given, raw=raw)

    def begin(self, intake: Intake, arrivals: Sequence[Arrival]) -> Sink:
        """Return the sink that decodes replies."""
        return RepliesSink(self.strategy, intake)


class MeanRule(UpdateRule):
    """The weighted mean alone: frames are added to one buffer."""

    @property
    def mean(self) -> Strategy:
        """The strategy itself."""
        mean: Strategy = self.strategy
        return mean

    def check(self, codec: Codec, guard: Norms | None) -> None:
        """Warn of what the codec and the mean spoil for each other."""
        super().check(codec, guard)
        warn_of_pairing(self.strategy, codec)

    def of_round(self, *, own: bool) -> UpdateRule:
        """Return the rule for single updates where models cannot be added as changes of one model, and where an
        ``aggregate_train`` was set on the strategy since, which is to see them."""
        return RepliesRule(self.strategy) if own or not is_mean(self.strategy) else self

    def total(self, x: Running, now: Now, codec: Codec, given: Sequence[Given], *, raw: bool = False) -> Step | None:
        """Return the mean."""
        return Mean().total(now, codec, given, raw=raw)

    def begin(self, intake: Intake, arrivals: Sequence[Arrival]) -> Sink:
        """Return the sink that adds; models of their own for some nodes cannot be added as changes of one model.

        Raises
        ------
        ConfigError
            When an ``aggregate_train`` was set on the strategy since, which is to see single updates, and the codec
            sends votes.
        """
        if not is_mean(self.strategy):
            RepliesRule(self.strategy).check(intake.codec, None)
            return RepliesSink(self.strategy, intake)
        if any(arrival.sent.base is not None for arrival in arrivals):
            return RepliesSink(self.strategy, intake)
        return MeanSink(self.strategy, intake, sum(arrival.weight for arrival in arrivals))

    def ahead(self, intake: Intake, replies: Sequence[tuple[SentMessage, Message]]) -> Sink | None:
        """Return the sink that adds, where nobody has a model of its own: weights can be read before the updates."""
        if not is_mean(self.strategy) or any(sent.base is not None for sent, _ in replies):
            return None
        return MeanSink(self.strategy, intake, sum(_weight(reply, intake.weight_key) for _, reply in replies))


def _weight(reply: Message, key: str | None) -> float:
    """Return a reply's weight, 0 where it has none that can be used: it will be refused when it is read."""
    try:
        return 0.0 if reply.has_error() else weight_of(reply.content, key)[1]
    except Rejected:
        return 0.0


class WeightedSum:
    """A weighted sum of updates in one buffer, whatever their number; with them the buffers that travel as values.

    Attributes
    ----------
    update : Update
    exact : dict of name to ndarray
    """

    def __init__(self, layout: Layout) -> None:
        # -0.0 is the exact identity of addition: the first contribution is stored, not added to +0.0.
        self.update = Update(np.full(layout.size, -0.0, np.float32), layout)
        self.exact: dict[str, NDArray[Any]] = {}

    def add(self, codec: Codec, update: Frame | Bundle | Vector, factor: float, exact: Arrays) -> None:
        """Add ``factor`` times an update, a frame of ``codec`` or a vector that may be overwritten, and its buffers."""
        if isinstance(update, np.ndarray):
            codec.enter(Update(update, self.update.layout))
            update *= np.float32(factor)
            # In place: a sum in a new array would cost a model for each client.
            np.add(self.update.vector, update, out=self.update.vector)
        else:
            codec.gather(update, factor, self.update)
        for name, array in exact.items():
            # numpy's promotion here is Flower's: int64 buffers become float64 means.
            self.exact[name] = self.exact[name] + array * factor if name in self.exact else array * factor


class MeanSink(Sink):
    """Sums frames with Flower's own weights, and hands the mean to the strategy as one reply.

    Aggregation memory is one model, whatever the number of clients.

    Parameters
    ----------
    strategy : Strategy
    intake : Intake
    weight : float
        Of all updates that will be added.
    """

    def __init__(self, strategy: Strategy, intake: Intake, weight: float) -> None:
        self._strategy = strategy
        self._intake = intake
        self._arrivals: list[Arrival] = []
        self._weight = weight
        self._sum = WeightedSum(intake.layout)
        # Of a sum that was begun and thrown away some would be left.
        if intake.captured is not None:
            intake.captured.clear()
        if intake.summands is not None:
            intake.summands.clear()

    def add(self, arrival: Arrival) -> None:
        """Add one update."""
        self._arrivals.append(arrival)
        # The round is given up before finish(); dividing by 0 would make everything NaN.
        if self._weight <= 0:
            return
        intake = self._intake
        codec, factor = arrival.sent.codec(intake.codec), arrival.weight / self._weight
        update: Frame | Bundle | Vector
        if arrival.opened is None:
            assert arrival.plain is not None
            update = intake.placed(arrival.sent, intake.layout.flatten(arrival.plain))
            # A lossless codec sums whole models, plain ones as they are.
            if not codec.lossless:
                update -= intake.start
                scale = intake.scale_of(arrival.sent)
                intake.layout.difference_of_wide(update, arrival.plain, intake.trained(arrival.sent), scale)
        elif codec.lossless and intake.moves(arrival.sent):
            update = intake.placed(arrival.sent, codec.decode(arrival.opened, intake.layout))
        else:
            update = arrival.opened
            factor *= intake.scale_of(arrival.sent) if not codec.lossless else 1.0
            if intake.captured is not None:
                for name, outer in codec.outer(update, intake.layout).items():
                    intake.captured.stack(name, outer.scaled(factor))
            if intake.summands is not None:
                intake.summands.append((update, factor))
        self._sum.add(codec, update, factor, intake.placed_values(arrival))
        arrival.parsed = None

    def holds(self, arrivals: Sequence[Arrival]) -> bool:
        """Compare the updates, and the sum of their weights."""
        same = [id(arrival) for arrival in arrivals] == [id(arrival) for arrival in self._arrivals]
        return same and self._weight == sum(arrival.weight for arrival in arrivals)

    def finish(self) -> Outcome:
        """Return the step from the mean."""
        intake, arrivals, out = self._intake, self._arrivals, self._sum.update
        layout, codec, report = intake.layout, intake.codec, intake.report
        # All replies have the same ones. The strategy sees the mean of the models in their place.
        if unread := sorted(arrivals[0].content.array_records):
            report.notes.append(
                f"replies hold the ArrayRecords {shorten(str(unread))} beside the model, which "
                f"{type(self._strategy).__name__} does not read: they were sent for nothing, "
                "unless its train_metrics_aggr_fn, which is given them, uses them"
            )
        # Votes become a step here: it is the sum that decides, not the single update. A domain is left, once per round.
        codec.conclude(out)
        if not codec.lossless:
            leave(out.vector, layout, frozenset.intersection(*(arrival.unchanged for arrival in arrivals)))
            self._share(out.vector)
        # Counted before the model is added, while zero still means that nothing arrived.
        part = slice(layout.compressed_size)
        report.changed = count_differing(out.vector[part], intake.start[part] if codec.lossless else 0.0)
        changes: dict[str, Vector] = {}
        if not codec.lossless:
            changes = intake.changes_of(out.vector)
            np.add(intake.vector, out.vector, out=out.vector)
        elif intake.start is not intake.vector:
            # Clients sent whole models grown from the reference: add what the reference lacks of the true model.
            np.add(out.vector, intake.vector - intake.start, out=out.vector)
        if intake.compensation:
            step = out.vector - intake.vector
            step *= np.float32(intake.compensation) * step
            moved = intake.vector - intake.start
            np.subtract(out.vector, step * moved, out=out.vector)
            for t in layout.wide:
                if t.name in changes:
                    own = changes[t.name]
                    own -= np.float32(intake.compensation) * own * own * moved[t.slice]
        first = arrivals[0]
        exact = mean_of_constants(self._sum.exact, intake.model)
        return aggregate_once(
            self._strategy,
            report.round,
            (first.record, to_record(layout.added(intake.model, changes, out.vector, exact))),
            first.sent.message,
            # Metrics depend on the data, and a private round has paid for the update alone.
            [] if intake.updates_only else [a.content for a in arrivals],
            metrics_name=first.metrics_name or "metrics",
            received=(len(arrivals), len(report.refused)),
            sparse=codec.sparse(layout),
        )

    def _share(self, step: Vector) -> None:
        """Give tensors that are another name of an earlier one the change of that one, in place."""
        intake, arrivals = self._intake, self._arrivals
        everywhere = set.intersection(*(set(arrival.copies.items()) for arrival in arrivals))
        for arrival in arrivals:
            # Where others send both names, as one does that answers densely, this one's share of the second is added.
            own = dict(set(arrival.copies.items()) - everywhere)
            if own and arrival.opened is not None:
                codec = arrival.sent.codec(intake.codec)
                factor = np.float32(arrival.weight / self._weight * intake.scale_of(arrival.sent))
                change = codec.decode(arrival.opened, intake.layout)
                copy_names(change, intake.start, intake.layout, own)
                for second in own:
                    part = intake.layout.tensors[second].slice
                    step[part] += factor * change[part]
        copy_names(step, intake.vector, intake.layout, dict(everywhere))


class RepliesSink(Sink):
    """Decodes every update into an ordinary reply; memory grows with the number of replies, as in Flower.

    The decoded model is as large as ever. What came is in the reply's ConfigRecord ``"fedcomp"``, under
    ``"payload-bytes"``: a strategy that measures traffic in its own ``aggregate_train`` counts these.
    """

    def __init__(self, strategy: Strategy, intake: Intake) -> None:
        self._strategy = strategy
        self._intake = intake
        self._changed = np.zeros(intake.layout.size, np.bool_)
        self._messages: list[Message] = []

    def add(self, arrival: Arrival) -> None:
        """Decode one update."""
        intake, layout = self._intake, self._intake.layout
        own = arrival.sent.base
        base = intake.vector if own is None else layout.flatten(own)
        if arrival.plain is not None:
            vector = layout.flatten(arrival.plain)
        else:
            assert arrival.opened is not None
            vector = arrival.sent.codec(intake.codec).decode(arrival.opened, layout)
            arrival.parsed = None
            leave(vector, layout, arrival.unchanged)
            if not intake.codec.lossless:
                copy_names(vector, base, layout, arrival.copies)
        scale = intake.scale_of(arrival.sent)
        changes: Mapping[str, NDArray[Any]] = {}
        if arrival.plain is None and not intake.codec.lossless:
            # Before the base is added, as above.
            self._changed |= vector != 0.0
            if scale != 1.0:
                vector *= np.float32(scale)
            changes = intake.changes_of(vector)
            vector += base
        else:
            if own is None:
                vector = intake.placed(arrival.sent, vector)
            self._changed |= vector != (intake.start if own is None else base)
            if intake.start is not intake.vector and own is None:
                # A lossy downlink brought clients another model: what they changed is put on top of the server's own.
                vector += intake.vector - intake.start
            if arrival.plain is not None and not intake.codec.lossless:
                trained, plain = intake.trained(arrival.sent), arrival.plain
                changes = {t.name: (plain[t.name] - trained[t.name]) * (1.0 if own else scale) for t in layout.wide}
        # Of the message as it came, before the decoded model takes the place of its frame.
        came = ConfigRecord({"payload-bytes": payload_bytes(arrival.message)})
        # First, as in the reply of an app that puts other records beside it.
        model = intake.model if own is None else own
        exact = intake.placed_values(arrival)
        decoded = {arrival.record: to_record(layout.added(model, changes, vector, exact))}
        arrival.message.content = RecordDict({**decoded, **arrival.content, OWN_CONFIG: came})
        self._messages.append(arrival.message)

    def finish(self) -> Outcome:
        """Return what the strategy makes of the replies; an adaptive one keeps to what arrived."""
        intake, layout, strategy = self._intake, self._intake.layout, self._strategy
        intake.report.changed = int(np.count_nonzero(self._changed[: layout.compressed_size]))

        def step() -> Outcome:
            return strategy.aggregate_train(intake.report.round, [*self._messages, *intake.errors])

        if has_moments(strategy) and intake.codec.sparse(layout):
            where = {t.name: self._changed[t.slice].reshape(t.shape) for t in layout.tensors}
            # Buffers travel whole in every reply.
            where |= {t.name: np.ones(t.shape, np.bool_) for t in layout.exact}
            return step_on_support(strategy, where, step)
        return step()
