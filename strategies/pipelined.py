"""Pipe-SGD on a server: several rounds in flight, each update applied a fixed number of steps late.

Li, Yu, Li, Avestimehr, Kim, Schwing, "Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net
Training", NeurIPS 2018, arXiv:1811.03619 (abstract read, the body recalled; warm-up, drain and delay compensation as in
a production optimizer whose source was read). The mapping to rounds, cohorts and client memory is derived here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.flower.logs import log
from fedcomp.flower.pipeline import Send
from fedcomp.flower.records import to_record
from fedcomp.flower.rounds import Exchanges
from fedcomp.strategies.deadlines import Deadline
from fedcomp.strategies.means import MEANS, is_mean
from fedcomp.strategies.overlapping import Outcome, Overlap, Overlapping

MODES: Final = ("cohort", "node")


class PipelinedStrategy(Overlapping):
    """Keep several rounds in flight; with ``width`` K an update is applied K - 1 steps late, and never lost.

    While one cohort trains, the replies of another travel and are aggregated, and the server evaluates. Near-constant
    times gain at most a factor of two, and that with K = 2 (:class:`fedcomp.timing.pipeline.Pipeline`). **The price is
    the step size**: on a quadratic the largest stable one is halved by one step of delay
    (:func:`fedcomp.timing.pipeline.stable_step`), and momentum narrows the margin further.

    Parameters
    ----------
    inner : Strategy
        A :class:`Compressed`, with any codec, or any strategy that one can stand around.
    width : int
        Rounds in flight; 1 is the inner strategy's own loop, bit for bit.
    warmup_rounds : int
        First rounds that run one at a time.
    mode : {"cohort", "node"}
        "cohort": the nodes are split in ``width`` fixed cohorts that take turns, so that no node ever has two messages
        and clients may keep memory. An inner strategy's minimum numbers of nodes are then those of a cohort. "node":
        every round asks all nodes, which is Pipe-SGD's own recursion; two messages of a node may run at the same time,
        so that neither the codec nor the app may keep anything between them.
    stateless_clients : bool
        The promise, needed for mode "node", that the app keeps nothing in its context.
    timeout : float
        Seconds after which a round goes on without the replies that are missing.
    deadline : Deadline, optional
        Ends rounds earlier, by the clients' own past times; with ``width=1`` that is synchronous training with an
        adaptive deadline.
    compensation : float
        λ of delay compensation, 0 for none: ``u - λ u² (now - then)`` takes the place of the mean update ``u``, where
        ``then`` is the model that it was made from. λ of the papers is for gradients, which for a client of step size η
        is η times this one. Only where the inner strategy is a weighted mean.
    evaluate_every : int
        Clients evaluate after every so many rounds, for which the pipe is drained; 0: never.

    Raises
    ------
    ConfigError
        For values that do not fit.

    Notes
    -----
    Client evaluation would stall the pipe, hence ``evaluate_every``; evaluate on the server, which is hidden. Metrics
    of a round are those of the exchange that it applied; :attr:`reports` are by the round that sent it, with the
    staleness of each update in ``report.overlap``. Private strategies are refused.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedcomp.codecs import TopK
    >>> from fedcomp.strategies.compressed import Compressed
    >>> strategy = PipelinedStrategy(Compressed(FedAvg(), TopK(density=0.01)), width=2, warmup_rounds=5)
    >>> strategy.width
    2
    """

    STATE: ClassVar[Mapping[str, Any]] = {"cohorts": dict[int, int], "rounds": list[int]}

    def __init__(
        self,
        inner: Strategy,
        width: int = 2,
        *,
        warmup_rounds: int = 0,
        mode: str = "cohort",
        stateless_clients: bool = False,
        timeout: float = 3600.0,
        deadline: Deadline | None = None,
        compensation: float = 0.0,
        evaluate_every: int = 0,
    ) -> None:
        super().__init__(inner, timeout=timeout, deadline=deadline)
        self.width = params.integer("width", width, low=1)
        self.warmup_rounds = params.integer("warmup_rounds", warmup_rounds, low=0)
        self.mode = params.choice("mode", mode, MODES)
        self.compensation = params.number(
            "compensation", compensation, rule="a finite number >= 0", ok=lambda v: 0.0 <= v < float("inf")
        )
        self.evaluate_every = params.integer("evaluate_every", evaluate_every, low=0)
        # Of every node its cohort, and of every round in flight its number, the oldest first.
        self.cohorts: dict[int, int] = {}
        self.rounds: list[int] = []
        if mode == "node" and not stateless_clients:
            raise ConfigError(
                'mode="node" gives a node several messages at a time, whose changes to its context may be lost: say '
                'stateless_clients=True if the app keeps nothing there, or use mode="cohort"'
            )
        if mode == "node" and (self.inner.codec.remembers or self.inner.downlink is not None):
            raise ConfigError(
                f"{self.inner.codec!r} with downlink {self.inner.downlink!r} keeps memory on the clients, which "
                'mode="node" would mix up; use Compressed(..., feedback=False) without downlink, or mode="cohort"'
            )
        if self.compensation and not is_mean(self.inner.inner):
            raise ConfigError(
                f"compensation is for the mean update, and {type(self.inner.inner).__name__} looks at single ones; "
                f"use one of {', '.join(MEANS)}"
            )

    def summary(self) -> None:
        """Log the pipe, then what is inside."""
        super().summary()
        log.info("\t├──> width %d after %d rounds, by %s", self.width, self.warmup_rounds, self.mode)
        if not self.evaluate_every:
            log.info("\t├──> clients do not evaluate (evaluate_every=0)")

    def identity(self) -> dict[str, Any]:
        """Return the settings, which must not change within a run."""
        return {**super().identity(), "width": self.width, "warmup": self.warmup_rounds, "mode": self.mode}

    def round(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Exchanges[Outcome]:
        """Send a round; where the pipe is full then, apply the oldest one.

        Raises
        ------
        NoUsableReply
            When clients were asked, no reply of theirs can be used, and no earlier round brought an update either.
        """
        yield from self._send_again(config, grid)
        yield from self._drop_late(grid)
        yield from self._send(server_round, arrays, config, grid)
        if len(self.rounds) < (1 if server_round <= self.warmup_rounds else self.width):
            return None, None
        return (yield from self._apply_oldest(arrays, grid))

    def close_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, *, last: bool
    ) -> Exchanges[Outcome]:
        """Drain the pipe after the last round, and before clients evaluate."""
        model, metrics = None, None
        while self.rounds and (last or self._evaluates(server_round)):
            stepped, said = yield from self._apply_oldest(arrays if model is None else model, grid)
            model, metrics = (model, metrics) if stepped is None else (stepped, said)
        return model, metrics

    def evaluate_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[MetricRecord | None]:
        """Let all nodes evaluate, every :attr:`evaluate_every` rounds."""
        if not self._evaluates(server_round):
            return None
        replies = yield list(self.inner.configure_evaluate(server_round, arrays, config, grid))
        return self.inner.aggregate_evaluate(server_round, replies)

    def _evaluates(self, server_round: int) -> bool:
        return bool(self.evaluate_every) and server_round % self.evaluate_every == 0

    def _send(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Exchanges[None]:
        def choose(messages: list[Message]) -> list[Message]:
            # Two at a time are what the other mode is for.
            busy = set() if self.mode == "node" else self.busy
            kept = [message for message in messages if message.metadata.dst_node_id not in busy]
            self.reports.join(server_round).section(Overlap).held_back += len(messages) - len(kept)
            return kept

        there = len(self._turn(server_round, grid))
        if there < (least := getattr(self.inner.inner, "min_available_nodes", 0)):
            log.warning(
                "round %d: %d nodes are online whose turn it is, and %s waits for %d; with width=%d as many have to be "
                "in every cohort: start more nodes, or lower its min_available_nodes",
                server_round,
                there,
                type(self.inner.inner).__name__,
                least,
                self.width,
            )
        pending = self._ask(server_round, arrays, config, grid, lambda: self._turn(server_round, grid), choose)
        if self.mode == "node" and pending and self.inner.codec.init(self.inner.layout):
            raise ConfigError(f'{self.inner.codec!r} keeps memory on the clients; use mode="cohort"')
        self.rounds.append(server_round)
        yield Send([each.sent.message for each in pending])

    def _turn(self, server_round: int, grid: Grid) -> list[int]:
        """Return the nodes whose turn it is; newcomers join the cohort that has fewest nodes online."""
        online = list(grid.get_node_ids())
        if self.mode == "node":
            return online
        sizes = [0] * self.width
        for node in online:
            if node in self.cohorts:
                sizes[self.cohorts[node]] += 1
        for node in online:
            if node not in self.cohorts:
                self.cohorts[node] = sizes.index(min(sizes))
                sizes[self.cohorts[node]] += 1
        return [node for node in online if self.cohorts[node] == (server_round - 1) % self.width]

    def _apply_oldest(self, arrays: ArrayRecord, grid: Grid) -> Exchanges[Outcome]:
        """Wait for the oldest round, and make its step on top of ``arrays``."""
        oldest = self.rounds.pop(0)
        waited = [each for each in self.pending if each.round == oldest]
        replies: list[Message] = []
        if waited:
            replies = yield from self._collect(waited, max(each.deadline for each in waited), grid, None)
        self._give_up([each for each in self.pending if each.round == oldest])
        return self._step(oldest, arrays, grid, waited, replies, compensation=self.compensation)

    def _send_again(self, config: ConfigRecord, grid: Grid) -> Exchanges[None]:
        """Send the rounds of an interrupted run again, each with the model that it was sent with."""
        lost = self._resumed(grid)
        if not lost:
            return
        rounds, self.rounds = self.rounds, []
        for server_round in rounds:
            former = [each for each in lost if each.round == server_round]
            if not former or former[0].sent.origin is None:
                continue
            yield from self._send(server_round, to_record(former[0].sent.origin.model), config, grid)
            # As stale as they would have been.
            self.pending = [
                replace(each, step=former[0].step) if each.round == server_round else each for each in self.pending
            ]
