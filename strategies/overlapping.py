"""What strategies share whose exchanges overlap: messages under way, late replies, and what a checkpoint keeps of them.

An update is what a client made of the model it was sent; it is added to the model that the server has when it arrives.
Averaging whole models instead would split a pipeline of width two into two trainings that never see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.codecs import Identity
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower._private import set_message_id
from fedcomp.flower.logs import log, unsampled
from fedcomp.flower.pipeline import Await, NodesShown, arrived, now
from fedcomp.flower.privacy import find_private
from fedcomp.flower.records import to_record
from fedcomp.flower.report import Report
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy, own_loop
from fedcomp.layout import Vector
from fedcomp.plain import Count, from_plain, to_plain
from fedcomp.stateful import Stateful, StatePart, nested
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.deadlines import Deadline
from fedcomp.strategies.overlap import Overlap
from fedcomp.strategies.private.flower_dp import promises
from fedcomp.strategies.receiving import Receiving, Reception
from fedcomp.strategies.replies import Origin, SentMessage
from fedcomp.strategies.wrapping import require_inner

Outcome = tuple[ArrayRecord | None, MetricRecord | None]


@dataclass(frozen=True, eq=False)
class UnderWay:
    """One message under way.

    Attributes
    ----------
    sent : SentMessage
    round, step : int
        Server round that sent it, and how many steps the model had made.
    began, deadline : float
        Seconds of the grid's clock.
    """

    sent: SentMessage
    round: int
    step: int
    began: float
    deadline: float


@dataclass(frozen=True)
class SavedOrigin:
    """An :class:`Origin` as a checkpoint keeps it; layout and codec follow from the strategy."""

    round: int
    version: int
    model: dict[str, NDArray[Any]]
    reference: Vector | None


@dataclass(frozen=True)
class SavedMessage:
    """A :class:`UnderWay` as a checkpoint keeps it: its origin by number, of the message what a reply is joined by."""

    origin: Count
    node: int
    sequence: int
    message_id: str
    message_type: str
    record: str
    round: int
    step: int
    began: float
    deadline: float


@dataclass(frozen=True)
class SavedUnderWay:
    """All messages under way; those of one exchange share their origin."""

    origins: list[SavedOrigin]
    messages: list[SavedMessage]


def _save(owner: Overlapping) -> Any:
    origins: list[Origin] = []
    messages = []
    for each in owner.pending:
        origin, message = each.sent.origin, each.sent.message.metadata
        assert origin is not None
        if each.sent.base is not None:
            raise StateError("a message under way holds a model of its node's own, which a checkpoint does not keep")
        place = next((i for i, known in enumerate(origins) if known is origin), len(origins))
        if place == len(origins):
            origins.append(origin)
        messages.append(
            SavedMessage(
                place,
                each.sent.node,
                each.sent.sequence,
                message.message_id,
                message.message_type,
                each.sent.record,
                each.round,
                each.step,
                each.began,
                each.deadline,
            )
        )
    kept = [SavedOrigin(o.round, o.version, dict(o.model), o.reference) for o in origins]
    return to_plain(SavedUnderWay(kept, messages))


def _load(owner: Overlapping, state: Any) -> None:
    saved = from_plain(SavedUnderWay, state, "pending")
    origins = [owner.origin(each) for each in saved.origins]
    owner.pending = []
    for each in saved.messages:
        message = Message(RecordDict(), each.node, each.message_type)
        set_message_id(message, each.message_id)
        sent = SentMessage(message, each.node, each.sequence, None, each.record, origins[each.origin])
        owner.pending.append(UnderWay(sent, each.round, each.step, each.began, each.deadline))


def _drop(owner: Overlapping) -> None:
    # They were of another run of the engine, which knows them no longer; their updates stay in the clients' memories.
    owner.pending = []


class Overlapping(ExchangeStrategy, Receiving, Stateful):
    """Base of strategies whose exchanges overlap.

    Parameters
    ----------
    inner : Strategy
        A :class:`Compressed`, or any strategy that one can stand around: its clients then send whole models.
    timeout : float
        Seconds after which a message is given up.
    deadline : Deadline, optional
        Gives them up earlier, by the clients' own past times.

    Attributes
    ----------
    pending : list of UnderWay
        Messages under way, the oldest first.
    given_up : list of UnderWay
        Those whose replies came too late, or have not come yet. Their nodes are sent no other message until the reply
        is there or ``timeout`` has passed once more: a node that is slow is not given two at a time.
    steps : int
        Steps that the model has made.

    Raises
    ------
    ConfigError
        For an inner strategy that Compressed cannot stand around, one with a loop of its own, and a private one: how
        often a client takes part in what is released is not what its promise assumes.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "inner": nested("inner"),
        "deadline": nested("deadline"),
        "steps": Count,
        "_seen": list[int],
        "_run": int,
        "pending": StatePart(_save, _load, _drop),
    }

    def __init__(self, inner: Strategy, *, timeout: float, deadline: Deadline | None) -> None:
        name = type(self).__name__
        require_inner(inner, name)
        if own_loop(inner):
            raise ConfigError(f"{type(inner).__name__} runs a loop of its own, which {name} would pass by")
        if find_private(inner) is not None or promises(inner):
            raise ConfigError(
                f"{type(inner).__name__} keeps a promise of privacy, which is not shown for overlapping rounds; run it "
                f"without {name}"
            )
        # Whole models in the format's frames, where clients have the mod; as they are, where they do not.
        self.inner = inner if isinstance(inner, Compressed) else Compressed(inner, Identity())
        self.timeout = params.positive("timeout", timeout)
        self.deadline = deadline
        self.pending: list[UnderWay] = []
        self.given_up: list[UnderWay] = []
        self.steps = 0
        self._seen: list[int] = []
        self._run = 0
        self._shown: ArrayRecord | None = None
        self._config: dict[str, Any] = {}
        self._late = 0
        self._idle = 0.0
        self._stepped: float | None = None

    @property
    def reception(self) -> Reception:  # type: ignore[override]
        """That of the inner strategy."""
        return self.inner.reception

    def summary(self) -> None:
        """Log the strategy, then what is inside."""
        super().summary()
        self.inner.summary()

    def identity(self) -> dict[str, Any]:
        """Return the settings, which must not change within a run."""
        return {"timeout": self.timeout}

    def restored(self) -> None:
        """Forget what was shown to the inner strategy, and who is late: both are found out again."""
        self.given_up, self._shown, self._stepped = [], None, None

    def origin(self, saved: SavedOrigin) -> Origin:
        """Return an exchange's origin as it was before it was saved."""
        codec, announcer = self.inner.codec, self.inner.announcer
        layout = announcer.layout_of(to_record(saved.model), codec, updates_only=False)
        return Origin.of(saved.round, saved.model, saved.reference, saved.version, layout, codec)

    def _resumed(self, grid: Grid) -> list[UnderWay]:
        """Return the messages that an earlier run had under way: its nodes' replies cannot be had in this one."""
        run, self._run = self._run, grid.run.run_id
        if run in (0, self._run) or not self.pending:
            return []
        lost, self.pending = self.pending, []
        log.warning(
            "%s: %d messages were under way when the run was interrupted, and their replies are lost with it",
            type(self).__name__,
            len(lost),
        )
        return lost

    def _ask(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
        nodes: Callable[[], Iterable[int]],
        among: Callable[[list[Message]], list[Message]],
    ) -> list[UnderWay]:
        """Return messages to some of ``nodes()``, which are under way from now on."""
        view = NodesShown(grid, nodes)
        messages = among(self.inner.chosen(server_round, arrays, config, view))
        sent = self.inner.ask(server_round, arrays, messages)
        self._seen = view.shown
        self._shown, self._config = arrays, dict(config)
        began = now(grid)
        limit = self.timeout
        if self.deadline is not None:
            limit = self.deadline.seconds([each.node for each in sent], self.timeout)
        pending = [UnderWay(each, server_round, self.steps, began, began + limit) for each in sent]
        self.pending += pending
        return pending

    @property
    def busy(self) -> set[int]:
        """Nodes that have a message already."""
        return {each.sent.node for each in (*self.pending, *self.given_up)}

    def _collect(
        self, waited: Sequence[UnderWay], until: float, grid: Grid, enough: Callable[[Sequence[Message]], bool] | None
    ) -> Exchanges[list[Message]]:
        """Wait for replies; take those messages off the list that were answered, and give up those that are too old."""
        began = now(grid)
        replies = yield Await([each.sent.message for each in waited], until, enough)
        self._idle += now(grid) - began
        by_id = {each.sent.message.metadata.message_id: each for each in waited}
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        for reply in replies:
            self._time(by_id[reply.metadata.reply_to_message_id], reply, grid)
        self.pending = [each for each in self.pending if each.sent.message.metadata.message_id not in answered]
        return replies

    def _time(self, pending: UnderWay, reply: Message, grid: Grid) -> None:
        # An error may come at once, and says nothing of how long training takes.
        if self.deadline is not None and not reply.has_error():
            self.deadline.note(pending.sent.node, arrived(grid, reply) - pending.began)

    def _give_up(self, lost: Collection[UnderWay]) -> None:
        self.pending = [each for each in self.pending if each not in lost]
        self.given_up += lost

    def _drop_late(self, grid: Grid) -> Exchanges[None]:
        """Take the replies to messages that were given up, and drop them; forget those that are long overdue."""
        if not self.given_up:
            return
        by_id = {each.sent.message.metadata.message_id: each for each in self.given_up}
        for reply in (yield Await([each.sent.message for each in self.given_up], until=now(grid))):
            found = by_id.pop(reply.metadata.reply_to_message_id)
            self._time(found, reply, grid)
            self._late += 1
        self.given_up = [each for each in by_id.values() if now(grid) < each.deadline + self.timeout]

    def _step(
        self,
        server_round: int,
        arrays: ArrayRecord,
        grid: Grid,
        arrivals: Sequence[UnderWay],
        replies: Sequence[Message],
        **options: Any,
    ) -> Outcome:
        """Let the inner strategy make a step from replies to ``arrivals``, on top of ``arrays``."""
        if self._shown is not arrays:
            # The nodes that the strategy saw last: what it makes for them is not sent.
            view = NodesShown(grid, lambda: self._seen)
            with unsampled():
                self.inner.follow(server_round, arrays, ConfigRecord(self._config), view)
            self._shown = arrays
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        came = [each for each in arrivals if each.sent.message.metadata.message_id in answered]
        self._note(self.reports.join(server_round), came, grid)
        model, metrics = self.inner.aggregate_exchange(
            server_round, [each.sent for each in arrivals], replies, **options
        )
        self.steps += model is not None
        return model, metrics

    def _note(self, report: Report, arrivals: Sequence[UnderWay], grid: Grid) -> None:
        said, at = report.section(Overlap), now(grid)
        said.staleness = {each.sent.node: self.steps - each.step for each in arrivals}
        said.step, said.under_way, said.late = self.steps, len(self.pending), self._late
        said.idle, said.period = self._idle, 0.0 if self._stepped is None else at - self._stepped
        self._late = 0
        self._idle, self._stepped = 0.0, at
