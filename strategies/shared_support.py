"""The server half of ScaleCom: a leader chooses the support, everybody sends on it, k values come back down.

A round has two exchanges. In the first all clients train; the leader, whose turn goes round those present, answers with
the support it chose and its values on it, the others answer that they are ready. In the second the others get the
support and answer with their values. When the leader is lost, or its answer cannot be used, the next client that
trained is asked to lead instead. The mean has as many values as the support, and that is what the next round's
messages carry: neither it nor the support grows with the number of clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedcomp.codecs.scalecom import LeaderSelected, ScaleCom
from fedcomp.flower.rounds import Exchanges
from fedcomp.layout import DensityPolicy
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.replies import SentMessage
from fedcomp.strategies.shared_replies import Client, SupportRound
from fedcomp.strategies.waiting import WaitingStrategy, waiting_system

_CANDIDATES: Final = 4
"""How many clients are asked to lead in one round before it is given up."""


S = TypeVar("S", bound="SupportRound[Any]")


class LeaderStrategy(WaitingStrategy[S]):
    """Base of strategies in which one client selects the support of all.

    Parameters
    ----------
    codec : LeaderSelected or dict, optional
        Of the class :attr:`CODEC`; default one with its own defaults.
    server_lr, warmup_rounds, policy, guard, seed, **cohort
        As of :class:`SharedSupport`.

    Attributes
    ----------
    leaders : dict of int to int
        Partition of the client whose support each round used.
    """

    STATE: ClassVar[Mapping[str, Any]] = {**WaitingStrategy.STATE, "leaders": dict[int, int]}

    def __init__(
        self,
        codec: LeaderSelected | Mapping[str, Any] | None = None,
        *,
        server_lr: float = 1.0,
        warmup_rounds: int = 0,
        policy: DensityPolicy | None = None,
        guard: Norms | None = None,
        seed: int = 0,
        **cohort: Any,
    ) -> None:
        super().__init__(
            codec,
            server_lr=server_lr,
            warmup_rounds=warmup_rounds,
            policy=policy,
            guard=guard,
            seed=seed,
            **cohort,
        )
        self.leaders: dict[int, int] = {}

    def _exchanges(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        report = self.reports.begin(server_round)
        now, nodes = self._begin("train", report, arrays, config, grid)
        now.codec = self._stage(now)
        # The turn goes by partition, since node ids are redrawn in every run. Replies say which partition a node holds,
        # so in the first round nobody is appointed, on any engine, and the leader is chosen after training.
        known = [node for node in nodes if node in self._partitions]
        appointed = known[self._turn(now, len(known))] if known else None
        sent = self._messages({node: int(node == appointed) for node in nodes}, now, config, "train")
        replies = yield [s.message for s in sent]
        self._take_trained(sent, replies, now, appointed)
        if now.supports is None:
            yield from self._elect(now)
        if now.supports is None:
            report.notes.append("no client could choose a support: the model is unchanged")
            return None, None
        assert now.leader is not None
        self.leaders[server_round] = now.leader
        yield from self._gather(now, now.frames)
        return self._aggregate(now)

    def _stage(self, now: S) -> Any:
        """Return the codec of the round."""
        return replace(self.codec, dense=True) if now.number <= self.warmup_rounds else self.codec

    def _turn(self, now: S, candidates: int) -> int:
        """Return which of the candidates, in the order of their partitions, is the first to be asked."""
        return (now.number - 1) % candidates

    def _take_trained(self, sent: list[SentMessage], replies: Iterable[Message], now: S, appointed: int | None) -> None:
        """Check the answers to training; take the leader's support."""

        def read(each: SentMessage, reply: Message) -> tuple[Client, Message]:
            return now.trained(each, reply), reply

        arrived: list[tuple[Client, str, RecordDict]] = []
        for client, reply in self.reception.received(sent, replies, now.report, read):
            # What a leader sent that cannot be used goes back into its memory: it is not acknowledged.
            # One that lacks what it needs waits like the others, and is sent it when it is asked again.
            leads = client.sent.node == appointed and appointed not in now.lacking
            if not leads or now.take_lead(client, reply):
                arrived.append((client, "", client.content))
        now.clients = self.reception.agreeing(arrived, now.report, lambda client: client.sent.node, "train")

    def _elect(self, now: S) -> Exchanges[None]:
        """Ask a few of those that trained, one after the other from the turn on, to lead until one does.

        Each that stays silent costs a timeout; a round in which several in a row do is better given up.
        """
        waiting = [client for client in now.clients if client.values is None]
        waiting.sort(key=lambda client: (client.partition, client.sent.node))
        turn = self._turn(now, len(waiting)) if waiting else 0
        for client in [*waiting[turn:], *waiting[:turn]][:_CANDIDATES]:
            asked = self._messages({client.sent.node: 1}, now, ConfigRecord(), "query")
            # Before the answer: who does not lead now is not asked for values either, which could cost another timeout.
            now.silent.add(client.sent.node)
            replies = yield [each.message for each in asked]

            def check(each: SentMessage, reply: Message, client: Client = client) -> tuple[Client, Message]:
                return now.answered(client, each, reply), reply

            for _, reply in self.reception.received(asked, replies, now.report, check, role="as leader: "):
                now.take_lead(client, reply)
            if now.supports is not None:
                return


class SharedSupport(LeaderStrategy[SupportRound[ScaleCom]]):
    """Average updates on a support that one client chooses for all.

    Parameters
    ----------
    codec : ScaleCom or dict, optional
        Density, low-pass factor, selector, scope, value format; default 1 % with classical memory.
    server_lr : float
        Step size of the server: model += server_lr * mean.
    warmup_rounds : int
        The first rounds are sent at density 1.
    policy : DensityPolicy, optional
        Per tensor: what travels dense, and which density the others have; default
        :class:`fedcomp.layout.SmallDense`.
    guard : Norms, optional
        Refuses values that are far larger, or weigh far more, than is usual; default nobody does.
    seed : int
        Seed of the random streams.
    **cohort
        Who takes part and how metrics are averaged, as in :class:`fedcomp.strategies.cohort.CohortSettings`:
        ``fraction_train=0.5, fraction_evaluate=1.0``.

    Attributes
    ----------
    reception : Reception
        What is known of the clients.
    announcer : Announcer
        The session, and the versions of the model.
    leaders : dict of int to int
        Partition of the client whose support each round used.

    Examples
    --------
    >>> from fedcomp.codecs import ScaleCom
    >>> strategy = SharedSupport(ScaleCom(density=0.01), warmup_rounds=3, fraction_train=0.5)
    """

    CODEC = ScaleCom
    ROUND = SupportRound[ScaleCom]


SYSTEM: Final = waiting_system(
    "scalecom",
    "ScaleCom",
    "Chen et al. 2020, ScaleCom: scalable sparsified gradient compression for communication-efficient distributed "
    "training",
    "entries that the round's leader chose, the same for all clients, so that their sum is as short as one update; "
    "the rest is remembered",
    SharedSupport,
    ("density", "beta"),
)
