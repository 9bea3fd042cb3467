"""The pair by Flower's hooks, for strategies that drive its exchanges themselves and are no programs yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedcomp.codecs import Codec, Identity, Replay, get_codec
from fedcomp.codecs.factors import wanted_by
from fedcomp.errors import ConfigError
from fedcomp.factors.collect import Captured
from fedcomp.flower.checkpoint import INNER
from fedcomp.flower.logs import log
from fedcomp.flower.records import same_model
from fedcomp.flower.rounds import own_loop, planned
from fedcomp.layout import NONE_DENSE, DensityPolicy, Layout, Vector
from fedcomp.rng import Key
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.announcing import Announcer
from fedcomp.strategies.compressed import ANY_LAYOUT, DEFAULT_CODEC, FEW_RETURN, Compressed, remembering
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.intake import Intake
from fedcomp.strategies.means import weight_key_of
from fedcomp.strategies.private.flower_dp import require_clip_holds, require_clip_is_seen
from fedcomp.strategies.receiving import Receiving, Reception
from fedcomp.strategies.replies import SentMessage
from fedcomp.strategies.returning import Returning
from fedcomp.strategies.sinks import rule_of
from fedcomp.strategies.wrapping import loop_of, require_inner, require_uncompressed
from fedcomp.versions import check_codec


class Hooked(Receiving, Strategy, Stateful):
    """The pair by Flower's hooks alone, one exchange a round: what coded and private strategies stand on.

    Parameters
    ----------
    inner, codec, downlink, feedback, policy, guard, record, first_model_at_nodes, seed
        As of :class:`fedcomp.strategies.compressed.Compressed`.

    Attributes
    ----------
    reception : Reception
        What is known of the clients: what was consumed of each, and which model it holds.
    announcer : Announcer
        The session, the versions of the model, and the messages of the current exchange.
    """

    by_hooks: ClassVar[bool] = True

    STATE: ClassVar[Mapping[str, Any]] = {
        "inner": INNER,
        "reception": nested("reception"),
        "announcer": nested("announcer"),
    }

    def __init__(
        self,
        inner: Strategy,
        codec: Codec | dict[str, Any] = DEFAULT_CODEC,
        downlink: Codec | dict[str, Any] | None = None,
        *,
        feedback: bool | None = None,
        policy: DensityPolicy | None = None,
        guard: Norms | None = None,
        record: str | None = None,
        first_model_at_nodes: bool = False,
        seed: int = 0,
    ) -> None:
        require_uncompressed(inner)
        require_inner(inner, "Compressed")
        self._rule = rule_of(inner)
        self.codec = remembering(get_codec(codec), feedback)
        self._rule.check(self.codec, guard)
        self._rule.within(self._released)
        # With the memory around it: it is the memory that lengthens what a client has clipped.
        require_clip_holds(inner, self.codec)
        self.downlink = None if downlink is None else get_codec(downlink)
        if self.downlink is not None and not isinstance(self.downlink, Replay):
            check_codec(self.downlink, ANY_LAYOUT)
        self.guard = guard
        self.record = record
        self.seed = seed
        self.policy = NONE_DENSE if policy is None else policy
        self._first_at_nodes = first_model_at_nodes
        self._name = f"Compressed({type(inner).__name__})"
        self._started, self._ended = False, ArrayRecord()
        self._begin()
        # The last one: from here on what is not an attribute of this strategy is one of the inner's.
        self.inner = inner

    def __repr__(self) -> str:
        down = "" if self.downlink is None else f", downlink={self.downlink!r}"
        return f"{self._name}: {self.codec!r}{down}"

    if not TYPE_CHECKING:  # or no attribute of this class would be checked

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the inner strategy."""
            inner = self.__dict__.get("inner")
            if inner is None or name.startswith("__"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(inner, name)

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute of this strategy here; any other, new ones included, on the inner strategy."""
            inner = self.__dict__.get("inner")
            # The class is asked, too: properties and methods are in no instance's dictionary.
            own = inner is None or name in self.__dict__ or hasattr(type(self), name)
            object.__setattr__(self if own else inner, name, value)

    def _begin(self) -> None:
        """Know nothing of any client: a session of its own begins, in which clients continue no memory."""
        self.reception = Reception(self._name, guard=self.guard)
        self.announcer = Announcer(
            self.downlink, self.policy, self.record, self.seed, first_at_nodes=self._first_at_nodes
        )
        self._returning = Returning()
        self._noted = False

    @property
    def own_loop(self) -> bool:
        """Whether the inner strategy overrides Flower's ``start``, and with it the rounds of this one."""
        return own_loop(self.inner)

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Run the inner strategy's ``start`` with these hooks in place of its own; its arguments, its result.

        Started again with the arrays that it ended with it continues; with others it starts a new training, in which
        neither clients nor server remember anything of the former one.

        Examples
        --------
        >>> from flwr.serverapp.strategy import FedAvg
        >>> from fedcomp.codecs import TopK
        >>> class Saving(FedAvg):
        ...     def start(self, *args, **kwargs):
        ...         result = super().start(*args, **kwargs)
        ...         self.saved = sorted(result.arrays)
        ...         return result
        >>> strategy = Compressed(Saving(), TopK(density=0.01))  # strategy.start(...) saves; strategy.saved says what
        """
        # By Flower's signature: start(grid, initial_arrays, ...).
        initial = kwargs.get("initial_arrays", args[1] if len(args) > 1 else None)
        if self._started and isinstance(initial, ArrayRecord) and not same_model(initial, self._ended):
            log.info("started again, with another model: what was remembered of the former training is dropped")
            self._begin()
        self._started, self._ended = True, ArrayRecord()
        before = self.announcer.sequence
        planned.set(int(kwargs.get("num_rounds", args[2] if len(args) > 2 else 3)))
        with np.errstate(under="ignore"):
            result = loop_of(self.inner, self).start(*args, **kwargs)
        # Each training exchange takes a number, so an unchanged one shows that none was made.
        if self.own_loop and self.announcer.sequence == before:
            log.warning(
                "%s.start called none of this strategy's hooks: if it made rounds, nothing in them was compressed",
                type(self.inner).__name__,
            )
        self._ended = result.arrays
        return result

    @property
    def layout(self) -> Layout:
        """Layout of the round's updates: that of the model the last messages were made from."""
        return self.announcer.layout

    @property
    def sequences(self) -> dict[int, int]:
        """Sequence number of the last message to each node of the current exchange."""
        return {sent.node: sent.sequence for sent in self.announcer.sent}

    @property
    def summing(self) -> Strategy:
        """The weighted mean that takes :meth:`aggregate_sum`.

        Raises
        ------
        ConfigError
            When the inner strategy, or a guard, needs single updates.
        """
        if self.guard is not None:
            raise ConfigError(f"{self.guard!r} judges single updates, of which a coded sum shows none; leave guard out")
        return self._rule.mean

    def summary(self) -> None:
        """Log the codecs, then the inner strategy's own summary."""
        log.info("\t├──> Compressed: uplink %r, downlink %r", self.codec, self.downlink or "dense")
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy configure the round, then announce the codec and compress the model.

        Raises
        ------
        ConfigError
            When one of Flower's privacy wrappers stands around this strategy and its clip would not hold.
        """
        # Here and not in the constructor: only now is the wrapper around this strategy among the callers.
        require_clip_is_seen(self, self.codec)
        sent = self.ask(server_round, arrays, self.chosen(server_round, arrays, config, grid))
        self.announcer.waiting.hold(server_round, sent)
        self._look_for_few(server_round, sent)
        return [each.message for each in sent]

    def _look_for_few(self, server_round: int, sent: Sequence[SentMessage]) -> None:
        """Note in the round's report, once per run, that memories wait at clients of which few return."""
        if not self._noted and self.codec.remembers and self._returning.few(each.node for each in sent):
            self._noted = True
            # What a report notes is logged when the round ends, and forgotten where who took part is secret.
            self.reports.join(server_round).notes.append(FEW_RETURN)

    def chosen(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Return the messages that the inner strategy would send; some or all of them go into :meth:`ask`."""
        self.reception.meet(grid, afresh=self._rule.updates_only)
        # Flower allows a generator here, and the messages are walked through more than once.
        return self._rule.configure(server_round, arrays, config, grid)

    def ask(self, server_round: int, arrays: ArrayRecord, messages: list[Message]) -> list[SentMessage]:
        """Return the messages of a training exchange, which its caller keeps and :meth:`aggregate_exchange` takes."""
        self.announcer.adopt(arrays, self.codec, updates_only=self._rule.updates_only)
        self.announcer.address(messages, arrays, server_round, self.reception.peers, self.codec)
        return self.announcer.sent

    def follow(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> None:
        """Take another model as the one that updates are added to, where it has changed since messages were made.

        The inner strategy is shown it the one way there is, as the model of a round; those messages are not sent.
        """
        self._rule.configure(server_round, arrays, config, grid)
        self.announcer.adopt(arrays, self.codec, updates_only=self._rule.updates_only)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy configure evaluation; nodes that hold the model already get no model bytes."""
        messages = list(self.inner.configure_evaluate(server_round, arrays, config, grid))
        # Nothing is trained, so without a downlink there is nothing to announce.
        if self.downlink is None or not messages:
            return self.announcer.pass_through(messages)
        self.announcer.adopt(arrays, self.codec, updates_only=self._rule.updates_only)
        return self.announcer.address(messages, arrays, server_round, self.reception.peers, None)

    def _released(self, arrays: ArrayRecord, server_round: int) -> Layout:
        """Return the layout of what clients send of an update: all of it, or a support that is drawn for all."""
        layout = self.announcer.layout_of(arrays, self.codec, updates_only=True)
        support = self.codec.common_support(layout, Key(self.seed, "uplink", server_round))
        # Noise is added on the common support alone: the rest of an update is never released.
        return layout if support is None else Layout.flat(int(support.size))

    def _intake(self, server_round: int, sent: Sequence[SentMessage]) -> Intake:
        key, updates_only = weight_key_of(self.inner), self._rule.updates_only
        report = self.reports.join(server_round)
        return self.announcer.intake(report, sent, self.codec, key, updates_only=updates_only)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check and decode the replies in partition order and let the inner strategy aggregate them.

        A reply that cannot be used is reported and left out; its sender is not acknowledged, so that a client with
        memory puts the mass back. Returns ``(None, None)`` when nothing usable came.

        Raises
        ------
        NoUsableReply
            When clients were asked, no reply of theirs can be used, and no earlier round brought an update either.
        """
        outcome = self.aggregate_exchange(server_round, self.announcer.waiting.of(server_round), replies)
        self.announcer.waiting.answer(server_round)
        return outcome

    def aggregate_exchange(
        self,
        server_round: int,
        sent: Sequence[SentMessage],
        replies: Iterable[Message],
        *,
        scales: Mapping[int, float] | None = None,
        compensation: float = 0.0,
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate replies to messages of one exchange or several, as :meth:`aggregate_train` does.

        Updates are what clients made of the models they were sent, and are added to the model that the server has now.

        Parameters
        ----------
        sent : sequence of SentMessage
            One for each node.
        scales : mapping of node to float, optional
            Factors of updates beside their weights; default 1.
        compensation : float
            λ of delay compensation, see :class:`fedcomp.strategies.intake.Intake`; only where the inner strategy is a
            weighted mean.
        """
        intake = self._intake(server_round, sent)
        intake.scales, intake.compensation = scales or {}, compensation
        if self.downlink is not None and (captured := Captured(wanted_by(self.downlink))).useful:
            intake.captured = self.announcer.captured = captured
        if isinstance(self.downlink, Replay):
            intake.summands = self.announcer.summands = []
        return self.reception.aggregate(intake, replies, self._rule)

    def aggregate_sum(
        self,
        server_round: int,
        mean: Vector | None,
        weight: float,
        members: Iterable[tuple[int, int, int]],
        contents: Sequence[RecordDict] = (),
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take an update that was averaged elsewhere, in place of :meth:`aggregate_train`: nobody's own frame is here.

        The inner strategy runs once, on the mean, and the members are acknowledged. Buffers that travel as values keep
        the model's own: there is no sum of them.

        Parameters
        ----------
        mean : float32 array, shape (layout size,), or None
            The mean update, in the order of :attr:`layout`. None gives the round up; whoever does says why.
        weight : float
            The total weight it stands for.
        members : iterable of (node, sequence, generation)
            Whose frames are in it, by the numbers in their headers; a generation of 0 (no memory) acknowledges nothing.
        contents : sequence of RecordDict
            Replies whose metrics are aggregated.

        Raises
        ------
        ConfigError
            When the inner strategy is not a weighted mean: it would need the single updates.
        LayoutError
            When ``mean`` does not have the layout's size and dtype.
        """
        intake, consumed = self._intake(server_round, self.announcer.waiting.of(server_round)), list(members)
        if mean is not None and (not consumed or weight <= 0):
            intake.report.notes.append("all replies have weight 0: nothing to average, the model is unchanged")
            mean = None
        outcome = self.reception.aggregate_mean(intake, mean, consumed, contents, self._rule)
        self.announcer.waiting.answer(server_round)
        return outcome

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Note which versions the nodes hold, leave out replies that cannot be averaged, and let inner aggregate."""
        sent, key = self.announcer.sent, weight_key_of(self.inner)
        report = self.evaluations.begin(server_round)
        kept, errors = self.reception.evaluate(report, sent, replies, key, self.announcer.version)
        return self.inner.aggregate_evaluate(server_round, [*kept, *errors])

    def identity(self) -> dict[str, str]:
        """Return the codecs, which must not change within a run."""
        return {"uplink": repr(self.codec), "downlink": repr(self.downlink)}


def hooked(strategy: Strategy, codec: Codec | None = None) -> Hooked:
    """Return a pair as hooks make it, or any other strategy inside of one.

    Parameters
    ----------
    codec : Codec, optional
        Of a strategy that is no pair; default whole models.
    """
    if isinstance(strategy, Hooked):
        return strategy
    if not isinstance(strategy, Compressed):
        return Hooked(strategy, Identity() if codec is None else codec)
    return Hooked(
        strategy.inner,
        strategy.codec,
        feedback=False,
        first_model_at_nodes=strategy.first_model_at_nodes,
        **strategy.surroundings,
    )
