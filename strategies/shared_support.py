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

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from fedcomp.codecs import get_codec
from fedcomp.codecs.scalecom import ScaleCom, open_support
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower.logs import log
from fedcomp.flower.payload import NODE_RECORD, payload_bytes, put_frame, take_node
from fedcomp.flower.protocol import (
    LEADS,
    LOOKS_AHEAD,
    NEXT_SUPPORT,
    PREFIX,
    STEP,
    SUPPORT,
    UPDATE,
    Announcement,
    announce,
)
from fedcomp.flower.records import restore_dtypes, to_arrays, to_record
from fedcomp.flower.report import Report, Reports, shorten
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy
from fedcomp.layout import DensityPolicy, Layout, policy_config
from fedcomp.plain import Count
from fedcomp.rng import Key
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.cohort import draw_cohort
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.intake import mean_of_constants
from fedcomp.strategies.parts import CODEC_PREFIX, TASK_PREFIX, Settings, below
from fedcomp.strategies.receiving import Reception
from fedcomp.strategies.replies import (
    NOT_FINITE,
    Peer,
    Rejected,
    SentMessage,
    integer,
    strip,
    text,
    weight_of,
)
from fedcomp.strategies.shared_replies import Client, SupportRound
from fedcomp.strategies.sinks import WeightedSum
from fedcomp.strategies.statistics import hold_in_step, warn_of_missing_names
from fedcomp.strategies.system import System, arguments, codec_settings, settings_of
from fedcomp.versions import Broadcast
from fedcomp.wire import Frame

Named = dict[str, NDArray[Any]]
MetricsAggregation = Callable[[list[RecordDict], str], MetricRecord]

_NO_LAYOUT: Final = Layout(())
_CANDIDATES: Final = 4
"""How many clients are asked to lead in one round before it is given up."""


class SharedSupport(ExchangeStrategy, Stateful):
    """Average updates on a support that one client chooses for all.

    Parameters
    ----------
    codec : ScaleCom or dict, optional
        Density, low-pass factor, selector, scope, value format; default 1 % with classical memory.
    fraction_train, fraction_evaluate : float
        Share of the connected nodes that trains, and that evaluates (0: none), in a round.
    min_train_nodes, min_evaluate_nodes : int
        Fewer than these are never asked, unless fewer are connected.
    min_available_nodes : int
        A round begins when so many nodes are connected.
    server_lr : float
        Step size of the server: model += server_lr * mean.
    warmup_rounds : int
        The first rounds are sent at density 1.
    stale_leader : bool
        One exchange per round; see the module.
    weighted_by_key : str
        The metric by which clients are weighed.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : callable, optional
        As in Flower's FedAvg.
    policy : DensityPolicy, optional
        Per tensor: what travels dense, and which density the others have; default
        :class:`fedcomp.layout.SmallDense`.
    guard : Norms, optional
        Refuses values that are far larger, or weigh far more, than is usual; default nobody does.
    seed : int
        Seed of the random streams.

    Attributes
    ----------
    reports : Reports
    leaders : dict of int to int
        Partition of the client whose support each round used (of the client that chose it, with ``stale_leader``).
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "reception": nested("reception"),
        "_broadcast": nested("_broadcast"),
        "_session": bytes,
        "_sequence": Count,
        "_partitions": dict[int, int],
        "_holds": dict[int, int],
        "leaders": dict[int, int],
        "_ahead": tuple[bytes, int] | None,
    }

    def __init__(
        self,
        codec: ScaleCom | dict[str, Any] | None = None,
        *,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 0.0,
        min_train_nodes: int = 1,
        min_evaluate_nodes: int = 1,
        min_available_nodes: int = 1,
        server_lr: float = 1.0,
        warmup_rounds: int = 0,
        stale_leader: bool = False,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsAggregation | None = None,
        evaluate_metrics_aggr_fn: MetricsAggregation | None = None,
        policy: DensityPolicy | None = None,
        guard: Norms | None = None,
        seed: int = 0,
    ) -> None:
        self.reception = Reception("SharedSupport", guard=guard)
        chosen = ScaleCom() if codec is None else get_codec(codec)
        if not isinstance(chosen, ScaleCom):
            raise ConfigError(f"a shared support needs a ScaleCom codec, got {chosen!r}; Compressed takes the others")
        for name, value, least in (
            ("fraction_train", fraction_train, False),
            ("fraction_evaluate", fraction_evaluate, True),
        ):
            if not (0.0 < value <= 1.0 or (least and value == 0.0)):
                raise ConfigError(f"{name}={value!r} is not a share of the nodes; give a number in (0, 1]")
        if not 0.0 < server_lr < float("inf"):
            raise ConfigError(f"server_lr={server_lr!r} is not valid: it must be a positive finite number")
        for name, count, low in (
            ("warmup_rounds", warmup_rounds, 0),
            ("min_train_nodes", min_train_nodes, 1),
            ("min_evaluate_nodes", min_evaluate_nodes, 1),
            ("min_available_nodes", min_available_nodes, 1),
        ):
            if isinstance(count, bool) or not isinstance(count, int) or count < low:
                raise ConfigError(f"{name}={count!r} is not valid: it must be a whole number >= {low}")
        defaults = FedAvg()
        self.codec = chosen
        self.fraction_train, self.fraction_evaluate = fraction_train, fraction_evaluate
        self.min_train_nodes, self.min_evaluate_nodes = min_train_nodes, min_evaluate_nodes
        self.min_available_nodes = min_available_nodes
        self.server_lr = server_lr
        self.warmup_rounds = warmup_rounds
        self.stale_leader = stale_leader
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key, self.configrecord_key = arrayrecord_key, configrecord_key
        self.train_metrics_aggr_fn = train_metrics_aggr_fn or defaults.train_metrics_aggr_fn
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn or defaults.evaluate_metrics_aggr_fn
        self.policy = policy
        self.seed = seed
        self.leaders: dict[int, int] = {}
        self._session = secrets.token_bytes(8)
        self._sequence = 0
        self._partitions: dict[int, int] = {}
        self._holds: dict[int, int] = {}
        self._ahead: tuple[Frame, int] | None = None
        self._broadcast = Broadcast(chosen)
        self._layout = _NO_LAYOUT
        self._model: Named = {}

    @property
    def reports(self) -> Reports:
        """Per training round: who was asked, what arrived, what was refused and why."""
        return self.reception.reports

    @property
    def evaluations(self) -> Reports:
        """The same for client evaluation."""
        return self.reception.evaluations

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
        nodes = self._nodes(grid, "train", self.fraction_train, self.min_train_nodes, server_round)
        warm = server_round > self.warmup_rounds
        report = self.reports.begin(server_round)
        report.asked = len(nodes)
        config["server-round"] = server_round
        self._adopt(arrays)
        now = self._round(report, self.codec if warm else replace(self.codec, dense=True))
        ahead = self._ahead if self.stale_leader and warm else None
        self._ahead = None
        if ahead is not None:
            try:
                now.supports = open_support(ahead[0], now.codec, self._layout)
                now.block = ahead[0]
                self.leaders[server_round] = ahead[1]
            except FedcompError as reason:  # the model or the codec was changed since
                report.notes.append(shorten(f"the last leader's support does not fit this round: {reason}"))
        appointed = self._appoint(nodes, server_round)
        extra = {SUPPORT: now.block} if now.supports is not None else {}
        sent = [
            self._message(n, now, config, "train", leader=self._asks(now) if n == appointed else 0, frames=extra)
            for n in nodes
        ]
        replies = yield [s.message for s in sent]
        self._take_trained(sent, replies, now, appointed)
        if now.supports is None:
            yield from self._elect(now)
        if now.supports is None:
            report.notes.append("no client could choose a support: the model is unchanged")
            return None, None
        yield from self._gather(now)
        return self._aggregate(now)

    def evaluate_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[MetricRecord | None]:
        """Evaluate on a share of the clients, which get the last step unless they hold the model already."""
        if self.fraction_evaluate == 0.0:
            return None
        config["server-round"] = server_round
        self._adopt(arrays)
        report = self.evaluations.begin(server_round)
        now = self._round(report, self.codec)
        nodes = self._nodes(grid, "evaluate", self.fraction_evaluate, self.min_evaluate_nodes, server_round)
        sent = [self._message(node, now, config, "evaluate") for node in nodes]
        report.asked = len(sent)
        replies = yield [s.message for s in sent]
        kept, _ = self.reception.evaluate(report, sent, replies, self.weighted_by_key, self._broadcast.version)
        if not any(weight_of(reply.content, self.weighted_by_key)[1] for reply in kept):
            if kept:
                report.notes.append("all replies have weight 0: no metrics to average")
            return None
        return self.evaluate_metrics_aggr_fn([strip(reply.content) for reply in kept], self.weighted_by_key)

    def _round(self, report: Report, codec: ScaleCom) -> SupportRound:
        return SupportRound(report.round, codec, self.seed, self._layout, self._model, report)

    def _nodes(self, grid: Grid, kind: str, fraction: float, least: int, server_round: int) -> list[int]:
        """Return the nodes that take part, in the order of their partitions."""
        self.reception.meet(grid)
        return draw_cohort(
            grid,
            Key(self.seed, f"cohort/{kind}", server_round),
            fraction=fraction,
            least=least,
            available=self.min_available_nodes,
            partitions=self._partitions,
        )

    def _appoint(self, nodes: list[int], server_round: int) -> int | None:
        """Return the node whose turn it is to lead among those whose partition is known, None when none is.

        The turn goes by partition, since node ids are drawn anew in every run. Replies say which partition a node
        holds, so in the first round nobody is appointed, on any engine, and the leader is chosen after training. The
        first partition a node declares holds for good: who could change it would lead whenever it likes.
        """
        known = [node for node in nodes if node in self._partitions]
        return known[(server_round - 1) % len(known)] if known else None

    def _adopt(self, arrays: ArrayRecord) -> None:
        """Take ``arrays`` as the current model: the one that was broadcast last, or another one as a whole."""
        self._model = to_arrays(arrays)
        layout = Layout.of(self._model, self.policy)
        vector = layout.flatten(self._model)
        exact = {t.name: self._model[t.name] for t in layout.exact}
        known = self._broadcast
        same = (
            known.version > 0
            and self._layout in (layout, _NO_LAYOUT)  # the latter after a resumption
            and np.array_equal(vector, known.reference)
            and exact.keys() == known.exact.keys()
            and all(np.array_equal(exact[n], known.exact[n], equal_nan=exact[n].dtype.kind == "f") for n in exact)
        )
        if layout.order != self._layout.order:
            warn_of_missing_names(layout)
        self._layout = layout
        if not same:
            known.adopt(vector, exact, layout)
            self._holds = {}

    def _asks(self, now: SupportRound) -> int:
        """Return what is asked of the leader: this round's support unless it is known, and the next one's.

        A dense round leaves nothing in the memory to choose the next support from.
        """
        ahead = self.stale_leader and not now.codec.dense
        return (LEADS if now.supports is None else 0) | (LOOKS_AHEAD if ahead else 0)

    def _message(
        self,
        node: int,
        now: SupportRound,
        config: ConfigRecord,
        kind: str,
        *,
        leader: int = 0,
        frames: Mapping[str, Frame] | None = None,
    ) -> SentMessage:
        """Return one message with its announcement; training and evaluation carry the model as steps or whole."""
        peer = self.reception.peers.setdefault(node, Peer())
        content = RecordDict({self.configrecord_key: ConfigRecord(dict(config))})
        fields: dict[str, Any] = {"policy": policy_config(self.policy, self._layout)}
        if kind != "query":
            fields |= self._fill_model(content, node, peer)
        if kind == "evaluate":
            fields["downlink"] = now.codec.to_config()
        else:
            self._sequence += 1
            fields |= {
                "codec": now.codec.to_config(),
                "session": self._session,
                "sequence": self._sequence,
                "acknowledged": peer.acknowledged,
                "generation": peer.generation,
                "support": now.number,
                "leader": leader,
            }
        for key, frame in (frames or {}).items():
            put_frame(content, key, frame)
        announce(content, Announcement(record=self.arrayrecord_key, round=now.number, seed=self.seed, **fields))
        message = Message(content, node, kind, group_id=str(now.number))
        return SentMessage(message, node, fields.get("sequence", 0))

    def _fill_model(self, content: RecordDict, node: int, peer: Peer) -> dict[str, Any]:
        broadcast = self._broadcast
        steps = broadcast.steps_from(peer.version)
        if steps is None:
            content[self.arrayrecord_key] = to_record(self._layout.unflatten(broadcast.reference, broadcast.exact))
        else:
            newest = steps[-1].version if steps else 0
            for step in steps:
                # Whoever sent on the last support still holds it; older ones are not kept.
                held = step.version == newest and self._holds.get(node) == step.version
                parts = {"": step.frame, ".exact": step.exact, ".support": None if held else step.support}
                for suffix, part in parts.items():
                    if part is not None:
                        put_frame(content, f"{STEP}.{step.version}{suffix}", part)
        base = 0 if steps is None else peer.version
        return {"version": broadcast.version, "base": base, "digest": broadcast.digest}

    def _take_trained(
        self, sent: list[SentMessage], replies: Iterable[Message], now: SupportRound, appointed: int | None
    ) -> None:
        """Check the answers to training; take the leader's support, or everybody's values where it was known before."""
        known = now.supports is not None

        def read(each: SentMessage, reply: Message) -> tuple[Client, Message]:
            client = self._trained(each, reply, now)
            if known:
                now.take_values(client, reply)
            return client, reply

        arrived: list[tuple[Client, str, RecordDict]] = []
        for client, reply in self.reception.received(sent, replies, now.report, read):
            # What a leader sent that cannot be used goes back into its memory: it is not acknowledged.
            if client.sent.node != appointed or self._take_lead(client, reply, now):
                arrived.append((client, "", client.content))
        now.clients = self.reception.agreeing(arrived, now.report, lambda client: client.sent.node, "train")

    def _trained(self, sent: SentMessage, reply: Message, now: SupportRound) -> Client:
        """Return what a client says after training.

        Raises
        ------
        Rejected
            When the reply cannot be used.
        """
        header = reply.content.config_records.get(NODE_RECORD, ConfigRecord())
        if any(not name.startswith(PREFIX) for name in reply.content.array_records):
            said = header.get("unsupported")
            why = said if isinstance(said, str) else "is it the first of its mods, and does it accept 'scalecom'?"
            raise Rejected(f"the client answered with a model: its app lacks the half shared_support() ({why})")
        if integer(header, "sequence") != sent.sequence:
            raise Rejected(f"the reply answers message {header['sequence']!r}, expected {sent.sequence}: a stale reply")
        _, weight = weight_of(reply.content, self.weighted_by_key)
        text(header, "record")
        partition = take_node(reply)
        if partition is None:
            raise Rejected("the reply does not say which partition it comes from")
        partition = self._partitions.setdefault(sent.node, partition)
        payload = payload_bytes(reply)
        client = Client(sent, strip(reply.content), weight, integer(header, "generation"), partition, payload=payload)
        client.sample = now.sample_in(reply)
        self.reception.note_version(sent, reply, self._broadcast.version)
        self._note_header(client, reply, now)
        if client.generation == sent.sequence:
            now.report.fresh.append(sent.node)
        if UPDATE not in reply.content:
            # A reply without values takes nothing from the memory: it may be acknowledged at once.
            self._acknowledge([client])
        return client

    def _note_header(self, client: Client, reply: Message, now: SupportRound) -> None:
        header = reply.content.config_records[NODE_RECORD]
        node = client.sent.node
        if header.get("rolled-back") is True and node not in now.report.rolled_back:
            now.report.rolled_back.append(node)
        ratio = header.get("memory")
        if isinstance(ratio, float) and 0.0 <= ratio < float("inf"):
            now.report.memory[node] = ratio

    def _take_lead(self, client: Client, reply: Message, now: SupportRound) -> bool:
        """Take the supports a leader chose, for this round unless it is known, and for the next with ``stale_leader``.

        Return whether the client's own values can be used; what cannot is reported.
        """
        try:
            if now.supports is None:
                now.supports, now.block = now.support_in(reply, SUPPORT)
                try:
                    now.take_values(client, reply)
                except FedcompError:
                    now.supports = None
                    raise
                self.leaders[now.number] = client.partition
        except FedcompError as reason:
            now.report.refuse(client.sent.node, f"as leader: {reason}")
            return False
        if self._asks(now) & LOOKS_AHEAD:
            try:
                supports, block = now.support_in(reply, NEXT_SUPPORT)
                if supports and not any(s.size for s in supports):
                    raise Rejected("nothing is left in the leader's memory")
                self._ahead = (block, client.partition)
            except FedcompError as reason:
                text = f"no support for the next round, which will have two exchanges: {reason}"
                now.report.notes.append(shorten(text))
        return True

    def _elect(self, now: SupportRound) -> Exchanges[None]:
        """Ask a few of those that trained, one after the other from the turn on, to lead until one does.

        Each that stays silent costs a timeout; a round in which several in a row do is better given up.
        """
        waiting = [client for client in now.clients if client.frame is None]
        waiting.sort(key=lambda client: (client.partition, client.sent.node))
        turn = (now.number - 1) % len(waiting) if waiting else 0
        for client in [*waiting[turn:], *waiting[:turn]][:_CANDIDATES]:
            asked = self._query(client, now, leader=True)
            now.silent.add(client.sent.node)
            replies = yield [asked.message]
            check = partial(self._checked, now, {client.sent.node: client})
            for _, reply in self.reception.received([asked], replies, now.report, check, role="as leader: "):
                self._take_lead(client, reply, now)
            if now.supports is not None:
                return

    def _gather(self, now: SupportRound) -> Exchanges[None]:
        """Send the index block to those that have not sent their values, and take their answers."""
        waiting = {c.sent.node: c for c in now.clients if c.frame is None and c.sent.node not in now.silent}
        if not waiting:
            return
        asked = [self._query(client, now, leader=False) for client in waiting.values()]
        replies = yield [each.message for each in asked]

        def read(each: SentMessage, reply: Message) -> None:
            client, _ = self._checked(now, waiting, each, reply)
            now.take_values(client, reply)

        for _ in self.reception.received(asked, replies, now.report, read):
            pass

    def _query(self, client: Client, now: SupportRound, *, leader: bool) -> SentMessage:
        frames = {} if leader else {SUPPORT: now.block}
        asks = self._asks(now) if leader else 0
        return self._message(client.sent.node, now, ConfigRecord(), "query", leader=asks, frames=frames)

    def _checked(
        self, now: SupportRound, clients: Mapping[int, Client], asked: SentMessage, reply: Message
    ) -> tuple[Client, Message]:
        """Check the header of an answer to a query; from now on the client's sequence is the query's."""
        client = clients[asked.node]
        header = reply.content.config_records.get(NODE_RECORD, ConfigRecord())
        if integer(header, "sequence") != asked.sequence:
            raise Rejected(
                f"the reply answers message {header['sequence']!r}, expected {asked.sequence}: a stale reply"
            )
        if integer(header, "generation") != client.generation:
            raise Rejected("the client's memory is not the one it trained with")
        client.sent = asked
        client.payload += payload_bytes(reply)
        self._note_header(client, reply, now)
        return client, reply

    def _aggregate(self, now: SupportRound) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sum the values in partition order, make the mean the next step, acknowledge what was used."""
        report = now.report
        arrived = now.senders
        for client in arrived:
            assert client.frame is not None
            client.norm = now.fixed.norm(client.frame, self._layout)
        senders = self.reception.ordinary(arrived, report)
        total = sum(client.weight for client in senders)
        if total <= 0:
            if senders:
                report.notes.append("all replies have weight 0: nothing to average, the model is unchanged")
            return None, None
        layout = self._layout
        added = WeightedSum(layout)
        out = added.update
        with np.errstate(over="ignore", invalid="ignore"):
            for client in senders:
                assert client.frame is not None
                added.add(now.fixed, client.frame, client.weight / total, client.exact)
            if self.server_lr != 1.0:
                out.vector[...] *= np.float32(self.server_lr)
            if note := hold_in_step(out.vector, layout, self._broadcast.reference):
                report.notes.append(note)
            moved = self._broadcast.reference + out.vector
            layout.round_to_dtypes(moved)  # a finite float32 may be infinite as float16
            finite = bool(np.isfinite(moved).all())
        if not finite:
            report.notes.append(NOT_FINITE)
            return None, None
        assert now.supports is not None
        mean = now.codec.mean(now.supports, now.number)
        frame, _ = mean.encode(out, {}, Key(self.seed, "downlink", now.number))
        sent = [client.exact for client in senders]
        exact = mean_of_constants(added.exact, self._model)
        exact = to_arrays(restore_dtypes(to_record(exact), self._model, sent)) if exact else {}
        version = self._broadcast.push(frame, mean, exact, layout, now.block)
        self._acknowledge(senders)
        for client in senders:
            self._holds[client.sent.node] = version
        report.used = report.compressed = len(senders)
        report.payload_bytes = sum(client.payload for client in senders)
        report.model_bytes = len(senders) * sum(array.nbytes for array in self._model.values())
        report.account(now.fixed, layout, [client.frame for client in senders if client.frame is not None])
        report.changed = int(np.count_nonzero(out.vector[: layout.compressed_size]))
        record = to_record(layout.unflatten(self._broadcast.reference, self._broadcast.exact))
        metrics = self.train_metrics_aggr_fn([client.content for client in senders], self.weighted_by_key)
        return record, MetricRecord({**metrics, **now.similarity()})

    def _acknowledge(self, clients: Iterable[Client]) -> None:
        self.reception.acknowledge((c.sent.node, c.sequence, c.generation) for c in clients)

    def identity(self) -> str:
        """Return the codec, which must not change within a run."""
        return repr(self.codec)

    def restored(self) -> None:
        """Take the layout from the next model."""
        self._layout = _NO_LAYOUT


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
