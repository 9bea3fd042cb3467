"""The server half of ScaleCom: a leader chooses the support, everybody sends on it, k values come back down.

A round has two exchanges. In the first all clients train; the leader, whose turn goes round those present, answers with
the support it chose and its values on it, the others answer that they are ready. In the second the others get the
support and answer with their values. When the leader is lost, or its answer cannot be used, the next client that
trained is asked to lead instead. The mean has as many values as the support, and that is what the next round's
messages carry: neither it nor the support grows with the number of clients.

With ``stale_leader`` the support comes from the client that led the round before and rides in the training message, so
that one exchange is enough. That is a variant of ours (derived), not ScaleCom.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedcomp import params
from fedcomp.codecs import get_codec
from fedcomp.codecs.scalecom import ScaleCom, open_support
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower.logs import log
from fedcomp.flower.payload import put_frame
from fedcomp.flower.protocol import SUPPORT, Announcement, announce
from fedcomp.flower.records import restore_dtypes, to_arrays, to_record
from fedcomp.flower.report import Report, shorten
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy
from fedcomp.layout import DensityPolicy, Layout
from fedcomp.rng import Key
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.announcing import Announcer
from fedcomp.strategies.cohort import CohortSettings
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.intake import mean_of_constants
from fedcomp.strategies.parts import CODEC_PREFIX, TASK_PREFIX, Settings, below
from fedcomp.strategies.receiving import Receiving, Reception
from fedcomp.strategies.replies import NOT_FINITE, Peer, SentMessage, strip, weight_of
from fedcomp.strategies.shared_replies import Client, SupportRound
from fedcomp.strategies.sinks import WeightedSum
from fedcomp.strategies.statistics import hold_in_step
from fedcomp.strategies.system import System, arguments, codec_settings, settings_of
from fedcomp.wire import Frame

_CANDIDATES: Final = 4
"""How many clients are asked to lead in one round before it is given up."""


class SharedSupport(Receiving, ExchangeStrategy, Stateful):
    """Average updates on a support that one client chooses for all.

    Parameters
    ----------
    codec : ScaleCom or dict, optional
        Density, low-pass factor, selector, scope, value format; default 1 % with classical memory.
    server_lr : float
        Step size of the server: model += server_lr * mean.
    warmup_rounds : int
        The first rounds are sent at density 1.
    stale_leader : bool
        One exchange per round; see the module.
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
        Partition of the client whose support each round used (of the client that chose it, with ``stale_leader``).

    Examples
    --------
    >>> from fedcomp.codecs import ScaleCom
    >>> strategy = SharedSupport(ScaleCom(density=0.01), warmup_rounds=3, fraction_train=0.5)
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "reception": nested("reception"),
        "announcer": nested("announcer"),
        "_partitions": dict[int, int],
        "_holds": dict[int, int],
        "leaders": dict[int, int],
        "_ahead": tuple[bytes, int] | None,
    }

    def __init__(
        self,
        codec: ScaleCom | dict[str, Any] | None = None,
        *,
        server_lr: float = 1.0,
        warmup_rounds: int = 0,
        stale_leader: bool = False,
        policy: DensityPolicy | None = None,
        guard: Norms | None = None,
        seed: int = 0,
        **cohort: Any,
    ) -> None:
        chosen = ScaleCom() if codec is None else get_codec(codec)
        if not isinstance(chosen, ScaleCom):
            raise ConfigError(f"a shared support needs a ScaleCom codec, got {chosen!r}; Compressed takes the others")
        self.codec = chosen
        self.cohort = CohortSettings(**cohort)
        self.server_lr = params.positive("server_lr", server_lr)
        self.warmup_rounds = params.integer("warmup_rounds", warmup_rounds, low=0)
        self.stale_leader = stale_leader
        self.seed = seed
        self.reception = Reception("SharedSupport", guard=guard)
        self.announcer = Announcer(chosen, policy, self.cohort.arrayrecord_key, seed)
        self.leaders: dict[int, int] = {}
        self._partitions: dict[int, int] = {}
        self._holds: dict[int, int] = {}
        self._ahead: tuple[Frame, int] | None = None

    def identity(self) -> str:
        """Return the codec, which must not change within a run."""
        return repr(self.codec)

    def summary(self) -> None:
        """Log the codec and the variant."""
        variant = ", support of the last leader" if self.stale_leader else ""
        log.info("\t├──> SharedSupport: %r%s", self.codec, variant)

    def round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """Train, agree on a support, gather the values on it; return the new model and the clients' metrics.

        Raises
        ------
        NoUsableReply
            When clients were asked, no reply of theirs can be used, and no earlier round brought an update either.
        """
        model, metrics = yield from self._exchanges(server_round, arrays, config, grid)
        return self.reception.conclude(self.reports[server_round], model), metrics

    def _exchanges(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        warm = server_round > self.warmup_rounds
        report = self.reports.begin(server_round)
        now, nodes = self._begin("train", report, arrays, config, grid)
        if not warm:
            now.codec = replace(self.codec, dense=True)
        now.looks_ahead = self.stale_leader and not now.codec.dense
        # A warm-up round is dense and needs no choice.
        ahead = self._ahead if self.stale_leader and warm else None
        # Used up, whatever becomes of this round: the next one needs a newer choice.
        self._ahead = None
        if ahead is not None:
            try:
                now.supports = open_support(ahead[0], now.codec, now.layout)
                now.block, now.leader = ahead
            except FedcompError as reason:  # the model or the codec was changed since
                report.notes.append(shorten(f"the last leader's support does not fit this round: {reason}"))
        # The turn goes by partition, since node ids are redrawn in every run. Replies say which partition a node holds,
        # so in the first round nobody is appointed, on any engine, and the leader is chosen after training.
        known = [node for node in nodes if node in self._partitions]
        appointed = known[(server_round - 1) % len(known)] if known else None
        extra = {SUPPORT: now.block} if now.supports is not None else {}
        asks = {node: now.asks if node == appointed else 0 for node in nodes}
        sent = self._messages(asks, now, config, "train", extra)
        replies = yield [s.message for s in sent]
        self._take_trained(sent, replies, now, appointed)
        if now.supports is None:
            yield from self._elect(now)
        if now.supports is None:
            report.notes.append("no client could choose a support: the model is unchanged")
            return None, None
        assert now.leader is not None
        self.leaders[server_round] = now.leader
        yield from self._gather(now)
        return self._aggregate(now)

    def evaluate_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[MetricRecord | None]:
        """Evaluate on a fraction of the clients, which get the last step unless they hold the model already."""
        if self.cohort.fraction_evaluate == 0.0:
            return None
        report, weight_key = self.evaluations.begin(server_round), self.cohort.weighted_by_key
        now, nodes = self._begin("evaluate", report, arrays, config, grid)
        sent = self._messages(dict.fromkeys(nodes, 0), now, config, "evaluate")
        replies = yield [s.message for s in sent]
        kept, _ = self.reception.evaluate(report, sent, replies, weight_key, self.announcer.version)
        if not any(weight_of(reply.content, weight_key)[1] for reply in kept):
            if kept:
                report.notes.append("all replies have weight 0: no metrics to average")
            return None
        return self.cohort.evaluate_metrics_aggr_fn([strip(reply.content) for reply in kept], weight_key)

    def _begin(
        self,
        kind: Literal["train", "evaluate"],
        report: Report,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> tuple[SupportRound, list[int]]:
        """Return a round on ``arrays``, and the nodes that take part, in the order of their partitions."""
        self.reception.meet(grid)
        nodes = self.cohort.draw(kind, grid, Key(self.seed, f"cohort/{kind}", report.round), self._partitions)
        report.asked = len(nodes)
        # Where Flower's strategies write it, and apps look for it.
        config["server-round"] = report.round
        self._adopt(arrays)
        now = SupportRound(
            report.round,
            self.codec,
            self.seed,
            self.announcer.layout,
            self.announcer.model,
            report,
            self.reception,
            self.cohort.weighted_by_key,
            self._partitions,
            self.announcer.version,
        )
        return now, nodes

    def _adopt(self, arrays: ArrayRecord) -> None:
        """Take ``arrays`` as the current model: the one that was broadcast last, or another one as a whole."""
        former = self.announcer.layout
        self.announcer.adopt(arrays, self.codec, updates_only=False)
        layout, model, known = self.announcer.layout, self.announcer.model, self.announcer.broadcast
        assert known is not None
        vector = layout.flatten(model)
        exact = {t.name: model[t.name] for t in layout.exact}
        # After a resumption there is no former layout, and the model is that of the last broadcast.
        if former not in (layout, Layout(())) or not known.is_current(vector, exact):
            known.adopt(vector, exact, layout)
            self._holds = {}

    def _messages(
        self,
        asks: Mapping[int, int],
        now: SupportRound,
        config: ConfigRecord,
        kind: str,
        frames: Mapping[str, Frame] | None = None,
    ) -> list[SentMessage]:
        """Return the messages of an exchange by what is asked of each node; all but queries carry the model.

        A node that sent on the last support still holds it; older ones are not kept.
        """
        announcer, broadcast, name = self.announcer, self.announcer.broadcast, self.cohort.arrayrecord_key
        assert broadcast is not None
        # Queries take numbers of their own: their answers hold the values that are to be acknowledged.
        if kind != "evaluate":
            announcer.sequence += 1
        whole = to_record(now.layout.unflatten(broadcast.reference, broadcast.exact)) if kind != "query" else None
        sent = []
        # One message a node: acknowledgement and steps are its own.
        for node, asked in asks.items():
            peer = self.reception.peers.setdefault(node, Peer())
            content = RecordDict({self.cohort.configrecord_key: ConfigRecord(dict(config))})
            fields: dict[str, Any] = {"policy": announcer.policy_fields()}
            if whole is not None:
                fields |= announcer.fill_model(content, name, peer, whole, held=self._holds.get(node, 0))
            if kind == "evaluate":
                fields["downlink"] = now.codec.to_config()
            else:
                fields |= announcer.training_fields(peer, now.codec) | {"support": now.number, "leader": asked}
            for key, frame in (frames or {}).items():
                put_frame(content, key, frame)
            announce(content, Announcement(record=name, round=now.number, seed=self.seed, **fields))
            message = Message(content, node, kind, group_id=str(now.number))
            sent.append(SentMessage(message, node, fields.get("sequence", 0)))
        return sent

    def _take_trained(
        self, sent: list[SentMessage], replies: Iterable[Message], now: SupportRound, appointed: int | None
    ) -> None:
        """Check the answers to training; take the leader's support, or everybody's values where it was known before."""
        known = now.supports is not None

        def read(each: SentMessage, reply: Message) -> tuple[Client, Message]:
            client = now.trained(each, reply)
            if known:
                now.take_values(client, reply)
            return client, reply

        arrived: list[tuple[Client, str, RecordDict]] = []
        for client, reply in self.reception.received(sent, replies, now.report, read):
            # What a leader sent that cannot be used goes back into its memory: it is not acknowledged.
            if client.sent.node != appointed or self._take_lead(client, reply, now):
                arrived.append((client, "", client.content))
        now.clients = self.reception.agreeing(arrived, now.report, lambda client: client.sent.node, "train")

    def _take_lead(self, client: Client, reply: Message, now: SupportRound) -> bool:
        """Take the supports a leader chose; return whether its own values can be used."""
        taken = now.take_lead(client, reply)
        if taken and now.looks_ahead and (block := now.next_support(reply)) is not None:
            self._ahead = (block, client.partition)
        return taken

    def _elect(self, now: SupportRound) -> Exchanges[None]:
        """Ask a few of those that trained, one after the other from the turn on, to lead until one does.

        Each that stays silent costs a timeout; a round in which several in a row do is better given up.
        """
        waiting = [client for client in now.clients if client.values is None]
        waiting.sort(key=lambda client: (client.partition, client.sent.node))
        turn = (now.number - 1) % len(waiting) if waiting else 0
        for client in [*waiting[turn:], *waiting[:turn]][:_CANDIDATES]:
            asked = self._messages({client.sent.node: now.asks}, now, ConfigRecord(), "query")
            # Before the answer: who does not lead now is not asked for values either, which could cost another timeout.
            now.silent.add(client.sent.node)
            replies = yield [each.message for each in asked]

            def check(each: SentMessage, reply: Message, client: Client = client) -> tuple[Client, Message]:
                return now.answered(client, each, reply), reply

            for _, reply in self.reception.received(asked, replies, now.report, check, role="as leader: "):
                self._take_lead(client, reply, now)
            if now.supports is not None:
                return

    def _gather(self, now: SupportRound) -> Exchanges[None]:
        """Send the index block to those that have not sent their values, and take their answers."""
        # The leader's values came with its support.
        waiting = {c.sent.node: c for c in now.clients if c.values is None and c.sent.node not in now.silent}
        if not waiting:
            return
        asked = self._messages(dict.fromkeys(waiting, 0), now, ConfigRecord(), "query", {SUPPORT: now.block})
        replies = yield [each.message for each in asked]

        def read(each: SentMessage, reply: Message) -> None:
            now.take_values(now.answered(waiting[each.node], each, reply), reply)

        for _ in self.reception.received(asked, replies, now.report, read):
            pass

    def _aggregate(self, now: SupportRound) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sum the values in partition order, make the mean the next step, acknowledge what was used."""
        report = now.report
        arrived = now.senders
        for client in arrived:
            assert client.values is not None
            # The norm of the values on the support: a client sends nothing else of its update.
            client.norm = now.fixed.norm(client.values, now.layout)
        senders = self.reception.ordinary(arrived, report)
        total = sum(client.weight for client in senders)
        if total <= 0:
            if senders:
                report.notes.append("all replies have weight 0: nothing to average, the model is unchanged")
            return None, None
        layout, broadcast = now.layout, self.announcer.broadcast
        assert broadcast is not None
        added = WeightedSum(layout)
        out = added.update
        with np.errstate(over="ignore", invalid="ignore"):
            for client in senders:
                assert client.values is not None
                # Divided before it is added, as in Flower's mean: weights may be large, and the sum stays in range.
                added.add(now.fixed, client.values, client.weight / total, client.exact)
            # A product with 1 changes nothing, but takes a pass over the model.
            if self.server_lr != 1.0:
                out.vector[...] *= np.float32(self.server_lr)
            if note := hold_in_step(out.vector, layout, broadcast.reference):
                report.notes.append(note)
            moved = broadcast.reference + out.vector
            layout.round_to_dtypes(moved)  # a finite float32 may be infinite as float16
            finite = bool(np.isfinite(moved).all())
        if not finite:
            report.notes.append(NOT_FINITE)
            return None, None
        assert now.supports is not None
        # Float32 whatever the values came in: rounding the mean once more would be an error nobody remembers.
        mean = now.codec.mean(now.supports, now.number)
        frame, _ = mean.encode(out, {}, Key(self.seed, "downlink", now.number))
        sent = [client.exact for client in senders]
        exact = mean_of_constants(added.exact, now.model)
        exact = to_arrays(restore_dtypes(to_record(exact), now.model, sent)) if exact else {}
        version = broadcast.push(frame, mean, exact, layout, now.block)
        # Only now that their values are in a version of the model.
        now.acknowledge(senders)
        for client in senders:
            self._holds[client.sent.node] = version
        report.used = report.compressed = len(senders)
        report.payload_bytes = sum(client.payload for client in senders)
        report.model_bytes = len(senders) * sum(array.nbytes for array in now.model.values())
        sizes = [client.values.sizes for client in senders if client.values is not None]
        report.account(now.fixed, layout, [found for found in sizes if found is not None])
        report.changed = int(np.count_nonzero(out.vector[: layout.compressed_size]))
        # The reference and not ``moved``: the model is what every replica makes of the frame, bit for bit.
        record = to_record(layout.unflatten(broadcast.reference, broadcast.exact))
        metrics = self.cohort.train_metrics_aggr_fn([client.content for client in senders], self.cohort.weighted_by_key)
        return record, MetricRecord({**metrics, **now.similarity()})


def _build(settings: Settings, seed: int) -> SharedSupport:
    if settings["inner"] != "fedavg":
        raise ConfigError(
            f"inner={settings['inner']!r} does not fit: a shared support is averaged by its own strategy; "
            "use server_lr, or a system of the drop-in pair"
        )
    codec = get_codec({"id": ScaleCom.codec_id, **below(settings, CODEC_PREFIX)})
    # As for inner strategies, the server draws cohorts.
    evaluated = 1.0 if settings["fraction_evaluate"] else 0.0
    own = arguments(SharedSupport, settings, _OWN)
    return SharedSupport(codec.to_config(), fraction_evaluate=evaluated, seed=seed, **own)


_OWN: Final = settings_of(SharedSupport, "server_lr", "warmup_rounds", "stale_leader")

SYSTEM: Final = System(
    "scalecom",
    "ScaleCom",
    "Chen et al. 2020, ScaleCom: scalable sparsified gradient compression for communication-efficient distributed "
    "training",
    "entries that the round's leader chose, the same for all clients, so that their sum is as short as one update; "
    "the rest is remembered",
    _build,
    {**codec_settings(ScaleCom.codec_id, "density", "beta"), **_OWN},
    (TASK_PREFIX, CODEC_PREFIX),
)
