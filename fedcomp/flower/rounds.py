"""Rounds as generators of exchanges, and the loop that drives them.

    replies = yield messages
    replies = yield Push(messages, timeout=5.0)
    yield Send(messages); ...; replies = yield Await(messages)

An exchange is one push of messages and the replies that came back. A strategy that needs several per round (gossip,
PowerSGD, support agreement) reads as straight-line code, and one driver sends, joins, times out and counts for all
of them. Flower's own strategies, with their four hooks, are adapted to the same form.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import getattr_static
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedcomp.errors import ConfigError
from fedcomp.flower.logs import log
from fedcomp.flower.metered import addressed, join, partition_lookup
from fedcomp.flower.pipeline import Await, Send, collect
from fedcomp.flower.privacy import find_private
from fedcomp.flower.records import same_model
from fedcomp.flower.wrapper import Enough, push
from fedcomp.rules import TIMEOUT, Configured

T = TypeVar("T")

Exchanges = Generator[Iterable[Message] | Send | Await, list[Message], T]
"""Yields the messages of an exchange, receives its replies in partition order, returns what the round came to."""

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

planned: ContextVar[int] = ContextVar("planned", default=0)
"""The number of the last round of the training under way; 0 where nobody has said it."""


@dataclass(frozen=True, slots=True)
class Push(Configured):
    """An exchange with a deadline of its own, for a round whose exchanges do not all last as long as training.

    Parameters
    ----------
    messages : iterable of Message
    timeout : float, optional
        Seconds to wait for the replies. The driver's own timeout holds as well: the shorter one counts. None leaves it
        to the driver.
    enough : callable, optional
        ``(replies so far) -> bool``: when true no more replies are waited for. Of several rounds driven side by side,
        and on a grid that cannot stop early, all replies are waited for.

    Raises
    ------
    ConfigError
        When ``timeout`` is not a positive number.
    """

    messages: Iterable[Message]
    timeout: Annotated[float | None, TIMEOUT] = None
    enough: Enough | None = None

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What one round came to; None where a step gave nothing.

    Attributes
    ----------
    arrays : ArrayRecord or None
        The new model; None keeps the former one.
    train, evaluate, server : MetricRecord or None
        Metrics aggregated over training replies, over evaluation replies, and of the server's own evaluation.
    """

    arrays: ArrayRecord | None = None
    train: MetricRecord | None = None
    evaluate: MetricRecord | None = None
    server: MetricRecord | None = None


OnRound = Callable[[int, ArrayRecord, RoundOutcome], None]

evaluated: ContextVar[RoundOutcome | None] = ContextVar("evaluated", default=None)
"""What the round came to whose model ``evaluate_fn`` is called with; None in other loops than :func:`fit`'s."""


def drive(round: Exchanges[T], grid: Grid, *, timeout: float | None = None) -> T:
    """Run one round to its end and return its value.

    Parameters
    ----------
    round : generator
        Yields messages, receives replies.
    grid : Grid
        Any engine.
    timeout : float, optional
        Seconds to wait for the replies of each exchange.

    Raises
    ------
    ConfigError
        When the generator yields something other than messages.
    """
    return drive_many([round], grid, timeout=timeout)[0]


def drive_many(rounds: Sequence[Exchanges[T]], grid: Grid, *, timeout: float | None = None) -> list[T]:
    """Run several rounds side by side, one exchange of each at a time in one push; return their values in order.

    An exchange with no messages is answered with no replies, without asking the engine. Exchanges that share a push
    wait together: as long as the one among them that waits longest. Whatever happens, every generator is closed at the
    end, so that its ``finally`` blocks run.

    Raises
    ------
    ConfigError
        When two rounds address the same node in one push: engines may run the two messages at the same time on the
        same client state, and one of the changes is lost. Also when a generator yields no messages but something else.
    """
    partition_of = partition_lookup(grid)
    values: dict[int, T] = {}
    waiting: dict[int, list[Message]] = {}
    collecting: dict[int, Await] = {}
    limits: dict[int, float | None] = {}
    enough: dict[int, Enough | None] = {}

    def advance(index: int, replies: list[Message] | None) -> None:
        try:
            # send(None) starts a generator; after that every send carries the replies.
            pushed = rounds[index].send(cast(Any, replies))
            while isinstance(pushed, Send):
                if batch := _as_messages(pushed.messages):
                    push(grid, batch)
                pushed = rounds[index].send([])
            collecting.pop(index, None)
            if isinstance(pushed, Await):
                waiting.pop(index, None)
                collecting[index] = pushed
                return
            waiting[index] = _as_messages(pushed)
            limits[index] = _shorter(timeout, pushed.timeout if isinstance(pushed, Push) else None)
            enough[index] = pushed.enough if isinstance(pushed, Push) else None
        except StopIteration as stop:
            waiting.pop(index, None)
            collecting.pop(index, None)
            # A generator's return value arrives as the value of the exception that ends it.
            values[index] = stop.value

    try:
        for index in range(len(rounds)):
            advance(index, None)
        while waiting or collecting:
            for index, wanted in list(collecting.items()):
                advance(index, collect(grid, wanted, timeout))
            if not waiting:
                continue
            _refuse_shared_nodes(waiting.values())
            batch = [message for messages in waiting.values() for message in messages]
            # An exchange without messages waits for nobody, so its limit does not count.
            longest = _longest(limits[index] for index, messages in waiting.items() if messages)
            # ``enough`` of one round says nothing about the replies of another that shares its push.
            alone = enough[next(iter(waiting))] if len(waiting) == 1 else None
            replies = _exchange(grid, batch, longest, alone) if batch else []
            # A copy of the items: advance() changes the dictionary.
            for index, messages in list(waiting.items()):
                advance(index, join(addressed(messages), replies, partition_of))
    finally:
        for generator in rounds:
            generator.close()
    return [values[index] for index in range(len(rounds))]


def _exchange(grid: Grid, batch: list[Message], timeout: float | None, enough: Enough | None) -> list[Message]:
    # Flower's own grids wait for all replies; those of this project can stop at enough of them.
    if enough is None or "enough" not in inspect.signature(grid.send_and_receive).parameters:
        return list(grid.send_and_receive(batch, timeout=timeout))
    return list(cast(Any, grid).send_and_receive(batch, timeout=timeout, enough=enough))


def _shorter(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else min(a, b)


def _longest(limits: Iterable[float | None]) -> float | None:
    """Return the longest of ``limits``; None means no limit and is longer than any number."""
    found = list(limits)
    return None if None in found else max((limit for limit in found if limit is not None), default=None)


def _as_messages(yielded: object) -> list[Message]:
    messages: list[Message] = []
    for item in yielded if isinstance(yielded, Iterable) else [yielded]:
        if not isinstance(item, Message):
            raise ConfigError(f"a round yielded {type(item).__name__}; expected an iterable of Messages")
        messages.append(item)
    return messages


def _refuse_shared_nodes(batches: Iterable[Sequence[Message]]) -> None:
    # Within one round several messages to a node are the strategy's own affair.
    taken: set[int] = set()
    for messages in batches:
        nodes = {message.metadata.dst_node_id for message in messages}
        if taken & nodes:
            raise ConfigError(
                f"two rounds address node {min(taken & nodes)} in the same exchange; give every node to one of them"
            )
        taken |= nodes


def hooks_round(
    strategy: Strategy,
    server_round: int,
    arrays: ArrayRecord,
    train_config: ConfigRecord,
    evaluate_config: ConfigRecord,
    grid: Grid,
) -> Exchanges[RoundOutcome]:
    """One round of any Flower strategy: its train hooks, then its evaluate hooks, as Flower's own loop calls them."""
    replies = yield list(strategy.configure_train(server_round, arrays, train_config, grid))
    aggregated, train = strategy.aggregate_train(server_round, replies)
    current = arrays if aggregated is None else aggregated
    replies = yield list(strategy.configure_evaluate(server_round, current, evaluate_config, grid))
    evaluate = strategy.aggregate_evaluate(server_round, replies)
    return RoundOutcome(aggregated, train, evaluate)


@runtime_checkable
class HasRound(Protocol):
    """A strategy that writes its round as a generator of exchanges."""

    def round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """Train once; return the new arrays and metrics, None where there are none."""
        ...


def exchanges_of(
    strategy: Strategy | HasRound,
    server_round: int,
    arrays: ArrayRecord,
    train_config: ConfigRecord,
    evaluate_config: ConfigRecord,
    grid: Grid,
    *,
    last: bool = False,
) -> Exchanges[RoundOutcome]:
    """One round of ``strategy``: its own generator if it has one, Flower's hooks otherwise.

    Of an :class:`ExchangeStrategy` what :meth:`ExchangeStrategy.close_round` returns takes the place of the round's
    arrays, and its metrics join the round's. ``last`` says that no round will follow; of a private strategy it is also
    the round after which its promise allows no other.
    """
    # Of its own: a wrapper may hand through the attributes of what it wraps.
    if not (isinstance(strategy, HasRound) and getattr_static(strategy, "round", None)):
        return (
            yield from hooks_round(cast(Strategy, strategy), server_round, arrays, train_config, evaluate_config, grid)
        )
    aggregated, train = yield from strategy.round(server_round, arrays, train_config, grid)
    if not isinstance(strategy, ExchangeStrategy):
        return RoundOutcome(aggregated, train, None)
    current = arrays if aggregated is None else aggregated
    # A private run whose budget is spent after this round has no other one in which to collect models.
    ends = last or bool(over(strategy, server_round + 1))
    closed, more = yield from strategy.close_round(server_round, current, train_config, grid, last=ends)
    if closed is not None:
        aggregated = current = closed
    if more is not None:
        train = MetricRecord({**(train or {}), **more})
    evaluate = yield from strategy.evaluate_round(server_round, current, evaluate_config, grid)
    return RoundOutcome(aggregated, train, evaluate)


def own_loop(strategy: Any) -> bool:
    """Whether a strategy overrides Flower's ``start``: its rounds are then more than its hooks.

    A wrapper that runs the loop of what it wraps says so by an attribute ``own_loop`` of its own.
    """
    # Static, as above: a plain look-up would find the attribute of what a wrapper holds.
    if getattr_static(strategy, "own_loop", None) is None:
        return type(strategy).start is not Strategy.start
    return bool(strategy.own_loop)


def over(strategy: Any, server_round: int) -> str:
    """Return why a strategy's promise of privacy allows no round ``server_round``; empty when it does, or it has none.

    The promise may be that of a strategy inside of this one.
    """
    private = find_private(strategy)
    return "" if private is None else private.over(server_round)


class ExchangeStrategy(Strategy):
    """Base class of strategies with more than one exchange per round.

    A subclass writes :meth:`round` as a generator and gets a :meth:`start` with Flower's signature. Flower's four
    hooks cannot express such a round; calling them is refused.
    """

    by_hooks: ClassVar[bool] = False
    """Whether a round is one exchange, so that Flower's hooks say all of it and others can stand around them."""

    _started = False
    _ended: ArrayRecord | None = None

    @abstractmethod
    def round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """Train once: ``replies = yield messages`` for every exchange; return new arrays and metrics (or None)."""

    def close_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, *, last: bool
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """Exchanges after a round's training and before its evaluation, as a generator; by default none.

        For a model that is on the nodes: here it is collected, in the rounds that show it, and here, when ``last`` says
        that no round will follow, whatever is still under way is brought home. Takes and returns what :meth:`round`
        does; None leaves the round's own arrays and metrics as they are.
        """
        return None, None
        # Never reached: it makes this function a generator.
        yield

    def evaluate_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[MetricRecord | None]:
        """Evaluate on the clients after a round, as a generator of exchanges; by default not at all."""
        return None
        # Never reached, as above.
        yield

    def finish(self) -> None:
        """Called after the last round of a run; by default nothing. A run that was in vain is refused here."""
        return

    def summary(self) -> None:
        """Log the strategy's name; subclasses add their parameters."""
        log.info("%s", type(self).__name__)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run ``num_rounds`` rounds; same meaning as Flower's ``Strategy.start``, by way of :func:`fit`.

        Raises
        ------
        ConfigError
            When it was started before, and not ended with ``initial_arrays``: what this strategy and the clients
            remember belongs to the model that it ended with.
        """
        if self._started and (self._ended is None or not same_model(self._ended, initial_arrays)):
            raise ConfigError(
                f"this {type(self).__name__} was started before: what it and its clients remember belongs to that "
                "training. Make a new one for another training; to continue, start it with the arrays it ended with"
            )
        self.summary()
        self._started, self._ended = True, None
        result = fit(
            self,
            grid,
            initial_arrays,
            num_rounds,
            timeout=timeout,
            train_config=train_config,
            evaluate_config=evaluate_config,
            evaluate_fn=evaluate_fn,
        )
        self._ended = result.arrays
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refused: the round does not fit one exchange."""
        raise self._no_hooks()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refused: the round does not fit one exchange."""
        raise self._no_hooks()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refused: the round does not fit one exchange."""
        raise self._no_hooks()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Refused: the round does not fit one exchange."""
        raise self._no_hooks()

    def _no_hooks(self) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__} needs several exchanges per round and has no configure/aggregate hooks; run it "
            "with its start() or with fedcomp.flower.rounds.fit(), and not inside a wrapper that calls hooks"
        )


def fit(
    strategy: Strategy | HasRound,
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int,
    *,
    start_round: int = 1,
    timeout: float | None = 3600,
    train_config: ConfigRecord | None = None,
    evaluate_config: ConfigRecord | None = None,
    evaluate_fn: EvaluateFn | None = None,
    on_round: OnRound | None = None,
    result: Result | None = None,
) -> Result:
    """Run rounds ``start_round`` to ``num_rounds`` of a strategy of either kind.

    A private strategy that is :func:`over` ends the run before the round it refuses: nobody is asked in vain.

    Parameters
    ----------
    strategy : Strategy
        A Flower strategy, or one whose ``round`` is a generator of exchanges.
    grid : Grid
        Any engine. If it has a ``round`` attribute, that is set for each round.
    initial_arrays : ArrayRecord
        The model before round ``start_round``.
    num_rounds : int
        Number of the last round.
    start_round : int
        Number of the first round; larger than 1 when a run is resumed.
    timeout : float, optional
        Seconds to wait for the replies of each exchange.
    train_config, evaluate_config : ConfigRecord, optional
        Passed to the strategy each round, which may write to them (Flower's write ``server-round``).
    evaluate_fn : callable, optional
        ``(round, arrays) -> MetricRecord | None``; also called for round 0 when ``start_round`` is 1.
    on_round : callable, optional
        ``(round, arrays, outcome)``, called after each round: progress, checkpoints. An exception in it ends the run.
    result : Result, optional
        History of the rounds before ``start_round``; continued in place.

    Returns
    -------
    Result
        Metrics by round, and the final arrays. Unlike Flower's loop, these are the last arrays there were when rounds
        (or all of them) brought nothing, and ``initial_arrays`` when there were no rounds.

    Raises
    ------
    ConfigError
        When ``start_round`` is less than 1, or the strategy overrides Flower's ``start``.
    """
    if start_round < 1:
        raise ConfigError(f"start_round is {start_round}; rounds are numbered from 1")
    planned.set(num_rounds)
    # The start of an ExchangeStrategy is this function, where it does not say that it runs another one's.
    said = not isinstance(strategy, ExchangeStrategy) or getattr_static(strategy, "own_loop", None) is not None
    if isinstance(strategy, Strategy) and said and own_loop(strategy):
        raise ConfigError(
            f"{type(strategy).__name__} runs its own loop (start is overridden), which fit() would bypass; call its "
            "start()"
        )
    train_config = ConfigRecord() if train_config is None else train_config
    evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
    result = Result() if result is None else result
    arrays = initial_arrays
    # Already here: a run of no rounds, or one that ends before its first, returns the model it was given.
    result.arrays = arrays
    if evaluate_fn is not None and start_round == 1:
        _keep(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, arrays))
    private = find_private(strategy)
    if private is not None and hasattr(private, "adopt"):
        # What a round costs may depend on the model's size, and nobody has shown it the model yet.
        private.adopt(arrays)
    for server_round in range(start_round, num_rounds + 1):
        if refused := over(strategy, server_round):
            log.info("ended before round %d of %d: %s", server_round, num_rounds, refused)
            break
        last = server_round == num_rounds
        exchanges = exchanges_of(strategy, server_round, arrays, train_config, evaluate_config, grid, last=last)
        # Too small a number is zero, also where an application has numpy raise at that.
        with _numbered(grid, server_round), np.errstate(under="ignore"):
            outcome = drive(exchanges, grid, timeout=timeout)
        if outcome.arrays is not None:
            arrays = outcome.arrays
            result.arrays = arrays
        server = None
        if evaluate_fn is not None:
            before = evaluated.set(outcome)
            try:
                server = evaluate_fn(server_round, arrays)
            finally:
                evaluated.reset(before)
        _keep(result.train_metrics_clientapp, server_round, outcome.train)
        _keep(result.evaluate_metrics_clientapp, server_round, outcome.evaluate)
        _keep(result.evaluate_metrics_serverapp, server_round, server)
        if on_round is not None:
            # Last of all: a checkpoint made here holds the whole round.
            on_round(server_round, arrays, RoundOutcome(outcome.arrays, outcome.train, outcome.evaluate, server))
    if isinstance(strategy, ExchangeStrategy):
        strategy.finish()
    return result


@contextmanager
def _numbered(grid: Grid, server_round: int) -> Iterator[None]:
    """Tell a grid that has a ``round`` the number of this one; where it was None, it is None again afterwards."""
    if not hasattr(grid, "round"):
        yield
        return
    # Fault plans and the ledger go by it; messages need not say which round they belong to.
    before, grid.round = grid.round, server_round
    try:
        yield
    finally:
        if before is None:
            # Another loop's messages, such as those of Flower's own, say their rounds themselves.
            grid.round = None


def _keep(history: dict[int, MetricRecord], server_round: int, metrics: MetricRecord | None) -> None:
    if metrics is not None:
        history[server_round] = metrics
