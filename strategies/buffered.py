"""Buffered asynchronous rounds: the server steps when enough updates have arrived, whoever sent them.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, "Federated learning with buffered asynchronous aggregation"
(FedBuff), AISTATS 2022 (recalled). What client memory needs of it, and what becomes of updates that are too old, is
derived here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.flower.logs import log, unsampled
from fedcomp.flower.pipeline import Send, now
from fedcomp.flower.protocol import app_failure
from fedcomp.flower.rounds import Exchanges
from fedcomp.plain import Count
from fedcomp.rng import Key
from fedcomp.strategies.overlapping import Outcome, Overlapping, UnderWay

WEIGHTS: Final[Mapping[str, Callable[[int], float]]] = MappingProxyType(
    {"1/sqrt": lambda staleness: 1.0 / math.sqrt(1.0 + staleness), "constant": lambda staleness: 1.0}
)
"""By how much an update counts less that is so many steps old."""


class Buffered(Overlapping):
    """Keep some clients busy, and step whenever enough of their updates have arrived.

    ``θ += η mean(s(τ) δ)``, where δ is what a client made of the model it was sent, τ the steps the model has made
    since and s its weight. A slow client delays nobody; its update counts less. A round of this strategy is one step.

    Parameters
    ----------
    inner : Strategy
        A :class:`Compressed`, with any codec but those that vote, or any strategy that one can stand around. It weighs
        updates against each other as ever, FedAvg by examples, and its optimiser makes the step.
    concurrency : int
        Clients that are kept busy. A client whose update waits in the buffer is not asked again before the step that
        decides whether it is used, so that its memory is right; with fewer than ``concurrency + buffer - 1`` nodes
        online fewer are busy.
    buffer : int
        Updates that make a step; those that have arrived by then as well are taken along.
    max_staleness : int
        Steps after which an update is refused. Its client, which is not acknowledged, puts it back into its memory.
    weight : {"1/sqrt", "constant"}
        s(τ): 1/sqrt(1 + τ), or 1.
    server_lr : float
        η.
    timeout : float
        Seconds after which a message is given up and another client is asked.
    seed : int
        Seeds the draw of clients.

    Raises
    ------
    ConfigError
        For values that do not fit, and a codec of votes, which cannot be scaled.

    Notes
    -----
    Of the clients that the inner strategy samples the idle ones are asked; leave ``fraction_train`` at 1. Clients do
    not evaluate, which would have them do two things at a time. What is under way when the run ends is not waited for.

    Fast clients are in more updates than slow ones: the model leans towards their data. The reports name the nodes of
    every step (``report.overlap.staleness``).

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedcomp.codecs import TopK
    >>> from fedcomp.strategies.compressed import Compressed
    >>> strategy = Buffered(Compressed(FedAvg(), TopK(density=0.01)), concurrency=20, buffer=5)
    >>> strategy.max_staleness
    10
    """

    STATE: ClassVar[Mapping[str, Any]] = {"_draws": Count}

    def __init__(
        self,
        inner: Strategy,
        concurrency: int,
        buffer: int,
        *,
        max_staleness: int = 10,
        weight: str = "1/sqrt",
        server_lr: float = 1.0,
        timeout: float = 3600.0,
        seed: int = 0,
    ) -> None:
        super().__init__(inner, timeout=timeout, deadline=None)
        self.concurrency = params.integer("concurrency", concurrency, low=1)
        self.buffer = params.integer("buffer", buffer, low=1)
        self.max_staleness = params.integer("max_staleness", max_staleness, low=0)
        self.weight = params.choice("weight", weight, WEIGHTS)
        self.server_lr = params.positive("server_lr", server_lr)
        self.seed = params.seed(seed)
        self._draws = 0
        if self.inner.codec.votes:
            raise ConfigError(
                f"{self.inner.codec!r} sends votes, which cannot count less for their age; use a codec without votes, "
                "or PipelinedStrategy"
            )

    def summary(self) -> None:
        """Log the buffer, then what is inside."""
        super().summary()
        log.info(
            "\t├──> steps of %d updates, %d clients busy, s = %s up to %d steps; clients do not evaluate",
            self.buffer,
            self.concurrency,
            self.weight,
            self.max_staleness,
        )

    def identity(self) -> dict[str, Any]:
        """Return the settings, which must not change within a run."""
        own = ("concurrency", "buffer", "max_staleness", "weight", "server_lr", "seed")
        return {**super().identity(), **{name: getattr(self, name) for name in own}}

    def round(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Exchanges[Outcome]:
        """Await updates until there are enough, asking another client for every reply; then step.

        Raises
        ------
        NoUsableReply
            When clients were asked, no reply of theirs can be used, and no earlier round brought an update either.
        """
        if lost := self._resumed(grid):
            self.reports.join(server_round).notes.append(f"{len(lost)} updates were under way when the run stopped")
        yield from self._drop_late(grid)
        filled: dict[int, tuple[UnderWay, Message | None]] = {}
        updates = 0
        while updates < self.buffer:
            yield from self._fill(server_round, arrays, config, grid, set(filled))
            # A node that left before it could be sent anything has no message that could be waited for.
            unsent = [each for each in self.pending if not each.sent.message.metadata.message_id]
            self.pending = [each for each in self.pending if each not in unsent]
            filled |= {each.sent.node: (each, None) for each in unsent}
            if not self.pending:
                self._note_short(server_round, updates, "no other client is there to be asked")
                break
            waited = list(self.pending)
            until = min(each.deadline for each in waited)
            # One is enough, as another client is asked in its place at once; all that are there are taken.
            for reply in (yield from self._collect(waited, until, grid, lambda replies: True)):
                found = _asked(waited, reply)
                aged = self._aged(found, reply)
                filled[found.sent.node] = found, aged
                updates += not aged.has_error()
            overdue = [each for each in self.pending if each.deadline <= now(grid)]
            self._give_up(overdue)
            filled |= {each.sent.node: (each, None) for each in overdue}
            # Where everybody fails this would go on for ever.
            if len(filled) - updates >= self.concurrency + self.buffer:
                self._note_short(server_round, updates, f"{len(filled) - updates} clients failed")
                break
        arrivals = [found for found, _ in filled.values()]
        replies = [reply for _, reply in filled.values() if reply is not None]
        weigh = WEIGHTS[self.weight]
        scales = {each.sent.node: self.server_lr * weigh(self.steps - each.step) for each in arrivals}
        return self._step(server_round, arrays, grid, arrivals, replies, scales=scales)

    def close_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, *, last: bool
    ) -> Exchanges[Outcome]:
        """Say what is left under way when the run ends."""
        if last and self.pending:
            log.info("%d updates were under way when the run ended; nobody waits for them", len(self.pending))
        return None, None
        # Never reached: it makes this function a generator.
        yield Send([])

    def _fill(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, waiting: set[int]
    ) -> Exchanges[None]:
        """Ask idle clients until enough are busy."""
        wanted = self.concurrency - len(self.pending)
        if wanted <= 0:
            return
        taken = self.busy | waiting

        def draw(messages: list[Message]) -> list[Message]:
            idle = [message for message in messages if message.metadata.dst_node_id not in taken]
            self._draws += 1
            key = Key(self.seed, "buffered", self._draws)
            words = {id(m): key.at(purpose=f"buffered/{m.metadata.dst_node_id}").u64() for m in idle}
            return sorted(idle, key=lambda message: words[id(message)])[:wanted]

        # Flower's line would tell of all nodes, of which one or two are asked.
        with unsampled():
            pending = self._ask(server_round, arrays, config, grid, grid.get_node_ids, draw)
        if pending:
            yield Send([each.sent.message for each in pending])

    def _aged(self, pending: UnderWay, reply: Message) -> Message:
        """Return a reply, or in place of one that is too old what stands for it."""
        staleness = self.steps - pending.step
        if reply.has_error() or staleness <= self.max_staleness:
            return reply
        return app_failure(
            pending.sent.message,
            f"its update is {staleness} steps old, more than max_staleness={self.max_staleness}; a client with memory "
            "puts it back",
        )

    def _note_short(self, server_round: int, updates: int, reason: str) -> None:
        self.reports.join(server_round).notes.append(f"a step of {updates} instead of {self.buffer} updates: {reason}")


def _asked(waited: list[UnderWay], reply: Message) -> UnderWay:
    """Return the message that a reply answers."""
    return next(each for each in waited if each.sent.message.metadata.message_id == reply.metadata.reply_to_message_id)
