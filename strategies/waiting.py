"""Rounds of two exchanges: clients train, and send once they know on what. What is common to all such strategies.

In the first exchange all clients train; an update that cannot leave yet waits in its client's state. In the second
those that wait are sent what is missing and answer with their values. The mean, as short as one client's values, is
the step that the next round's messages carry.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedcomp.codecs import get_codec
from fedcomp.codecs.base import all_finite
from fedcomp.codecs.waiting import Waiting
from fedcomp.errors import ConfigError
from fedcomp.flower.logs import log
from fedcomp.flower.payload import put_frame
from fedcomp.flower.protocol import Announcement, announce
from fedcomp.flower.records import count_differing, restore_dtypes, to_arrays, to_record
from fedcomp.flower.report import Report
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy
from fedcomp.layout import DensityPolicy, Layout, hold_in_step, note_of_held
from fedcomp.rng import Key
from fedcomp.rules import Int, Real, checked
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.announcing import Announcer
from fedcomp.strategies.averaging import Averaging
from fedcomp.strategies.cohort import CohortSettings
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.means import mean_of_constants, not_held
from fedcomp.strategies.parts import CODEC_PREFIX, TASK_PREFIX, Settings, below
from fedcomp.strategies.receiving import Receiving, Reception
from fedcomp.strategies.replies import NOT_FINITE, Peer, SentMessage, strip
from fedcomp.strategies.shared_replies import WaitingRound
from fedcomp.strategies.sinks import WeightedSum
from fedcomp.strategies.system import System, arguments, codec_settings, settings_of
from fedcomp.wire import Frame

R = TypeVar("R", bound=WaitingRound)


class WaitingStrategy(Receiving, ExchangeStrategy, Stateful, Generic[R]):
    """Base of strategies whose rounds have two exchanges.

    Parameters
    ----------
    codec : Waiting or dict, optional
        Of the class :attr:`CODEC`; default one with its own defaults.
    server_lr : float
        Step size of the server: model += server_lr * mean.
    warmup_rounds : int
        The first rounds are sent dense.
    policy, guard, seed, **cohort
        As the strategies document them.

    Attributes
    ----------
    reception : Reception
        What is known of the clients.
    announcer : Announcer
        The session, and the versions of the model.

    Raises
    ------
    ConfigError
        For a codec of another class.
    """

    ROUND: type[R]

    CODEC: ClassVar[type[Waiting]]

    STATE: ClassVar[Mapping[str, Any]] = {
        "reception": nested("reception"),
        "announcer": nested("announcer"),
        "_partitions": dict[int, int],
        "_holds": dict[int, int],
    }

    def __init__(
        self,
        codec: Waiting | Mapping[str, Any] | None = None,
        *,
        server_lr: float = 1.0,
        warmup_rounds: int = 0,
        policy: DensityPolicy | None = None,
        guard: Norms | None = None,
        seed: int = 0,
        **cohort: Any,
    ) -> None:
        chosen = self.CODEC() if codec is None else get_codec(codec)
        if not isinstance(chosen, self.CODEC):
            raise ConfigError(
                f"{type(self).__name__} needs a codec of the class {self.CODEC.__name__}, got {chosen!r}; Compressed "
                "takes the others"
            )
        self.codec: Any = chosen
        self.cohort = CohortSettings(**cohort)
        self.server_lr: float = checked("server_lr", server_lr, Real(above=0.0))
        self.warmup_rounds: int = checked("warmup_rounds", warmup_rounds, Int())
        self.seed = seed
        self.reception = Reception(type(self).__name__, guard=guard)
        self.announcer = Announcer(chosen, policy, self.cohort.arrayrecord_key, seed)
        self._partitions: dict[int, int] = {}
        self._holds: dict[int, int] = {}

    def summary(self) -> None:
        """Log the codec."""
        log.info("\t├──> %s: %r", type(self).__name__, self.codec)

    def identity(self) -> str:
        """Return the codec, which must not change within a run."""
        return repr(self.codec)

    def round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """Train, gather the values; return the new model and the clients' metrics.

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
        """Write the exchanges of a training round; return model and metrics, None without a step."""
        raise NotImplementedError

    def _beside(self, node: int, content: RecordDict, fields: dict[str, Any], now: R) -> None:
        """Add to a message to ``node``, and to what is announced with it, what a strategy needs there."""

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
        if not kept:
            return None
        return self.cohort.evaluate_metrics_aggr_fn([strip(reply.content) for reply in kept], weight_key)

    def _begin(
        self,
        kind: Literal["train", "evaluate"],
        report: Report,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> tuple[R, list[int]]:
        """Return a round on ``arrays``, and the nodes that take part, in the order of their partitions."""
        self.reception.meet(grid)
        nodes = self.cohort.draw(kind, grid, Key(self.seed, f"cohort/{kind}", report.round), self._partitions)
        report.asked = len(nodes)
        # Where Flower's strategies write it, and apps look for it.
        config["server-round"] = report.round
        self._adopt(arrays)
        now = self.ROUND(
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
        leads: Mapping[int, int],
        now: R,
        config: ConfigRecord,
        kind: str,
        frames: Mapping[str, Frame] | None = None,
    ) -> list[SentMessage]:
        """Return the messages of an exchange; all but queries carry the model.

        ``leads`` has 1 for a node that is asked to choose the round's support, and 0 for the others.

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
        for node, asked in leads.items():
            peer = self.reception.peers.setdefault(node, Peer())
            content = RecordDict({self.cohort.configrecord_key: ConfigRecord(dict(config))})
            fields: dict[str, Any] = {"policy": announcer.policy_fields()}
            if whole is not None:
                fields |= announcer.fill_model(content, name, peer, whole, held=self._holds.get(node, 0))
            if kind == "evaluate":
                fields["downlink"] = now.codec.to_config()
            else:
                fields |= announcer.training_fields(peer, now.codec) | {"support": now.name_of_block, "leader": asked}
            self._beside(node, content, fields, now)
            for key, frame in (frames or {}).items():
                put_frame(content, key, frame)
            announce(content, Announcement(record=name, round=now.number, seed=self.seed, **fields))
            message = Message(content, node, kind, group_id=str(now.number))
            sent.append(SentMessage(message, node, fields.get("sequence", 0)))
        return sent

    def _gather(self, now: R, frames: Mapping[str, Frame]) -> Exchanges[None]:
        """Send ``frames`` to those that have not sent their values, and take their answers."""
        waiting = {c.sent.node: c for c in now.clients if c.values is None and c.sent.node not in now.silent}
        if not waiting:
            return
        asked = self._messages(dict.fromkeys(waiting, 0), now, ConfigRecord(), "query", frames)
        replies = yield [each.message for each in asked]

        def read(each: SentMessage, reply: Message) -> None:
            now.take_values(now.answered(waiting[each.node], each, reply), reply)

        for _ in self.reception.received(asked, replies, now.report, read):
            pass

    def _aggregate(self, now: R) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sum the values in partition order, make the mean the next step, acknowledge what was used."""
        report = now.report
        arrived = now.senders
        for client in arrived:
            client.norm = now.norm_of(client)
        senders = now.usable(self.reception.ordinary(arrived, report))
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
            now.gathered(out, {client.sent.node: client.weight / total for client in senders})
            # A product with 1 changes nothing, but takes a pass over the model.
            if self.server_lr != 1.0:
                out.vector[...] *= np.float32(self.server_lr)
            if held := hold_in_step(out.vector, layout, broadcast.reference):
                report.notes.append(note_of_held(held))
            # Before it is encoded, which takes finite values only.
            finite = all_finite(out.vector)
            if finite:
                frame, mean = now.step(out)
                moved = broadcast.reference + out.vector
                layout.round_to_dtypes(moved)  # a finite float32 may be infinite as float16
                finite = bool(np.isfinite(moved).all())
                if lost := not_held(layout, broadcast.reference, out.vector, moved):
                    report.notes.append(lost)
        if not finite:
            report.notes.append(NOT_FINITE)
            return None, None
        sent = [client.exact for client in senders]
        exact = mean_of_constants(added.exact, now.model)
        exact = to_arrays(restore_dtypes(to_record(exact), now.model, sent)) if exact else {}
        former = {t.name: broadcast.reference[t.slice].copy() for t in layout.wide}
        version = broadcast.push(frame, mean, exact, layout, now.block or None)
        # Only now that their values are in a version of the model.
        now.acknowledge(senders)
        for client in senders if now.senders_hold else ():
            self._holds[client.sent.node] = version
        report.used = report.compressed = len(senders)
        report.payload_bytes = sum(client.payload for client in senders)
        report.model_bytes = len(senders) * sum(array.nbytes for array in now.model.values())
        sizes = [client.values.sizes for client in senders if client.values is not None]
        report.account(now.fixed, layout, [found for found in sizes if found is not None])
        report.changed = count_differing(out.vector[: layout.compressed_size], 0.0)
        # The reference and not ``moved``: the model is what every replica makes of the frame, bit for bit.
        arrays = layout.unflatten(broadcast.reference, broadcast.exact)
        for t in layout.wide:
            # What did not move keeps the digits that replicas do not have.
            stood = (broadcast.reference[t.slice] == former[t.name]).reshape(t.shape)
            arrays[t.name] = np.where(stood, now.model[t.name], arrays[t.name])
        record = to_record(arrays)
        metrics = self.cohort.train_metrics_aggr_fn([client.content for client in senders], self.cohort.weighted_by_key)
        return record, MetricRecord({**metrics, **now.metrics()})


def waiting_system(
    name: str,
    title: str,
    paper: str,
    summary: str,
    strategy: type[WaitingStrategy[Any]] | type[Averaging],
    codec: Sequence[str],
    own: Sequence[str] = (),
) -> System:
    """Return the declaration of a system that such a strategy makes whole.

    Parameters
    ----------
    name, title, paper, summary
        As of :class:`fedcomp.strategies.system.System`.
    codec : sequence of str
        Parameters of the codec that are settings by name; all others can be set below its prefix.
    own : sequence of str
        The strategy's, beside the step size and the rounds before compression starts.
    """
    codec_id = strategy.CODEC.codec_id
    # Of a constructor that passes on what it does not name, the next one names it.
    makers = {
        name: next(kind for kind in strategy.__mro__ if name in inspect.signature(kind).parameters)
        for name in ("server_lr", "warmup_rounds", *own)
    }
    defaults = {name: value for name, kind in makers.items() for value in settings_of(kind, name).values()}

    def build(settings: Settings, seed: int) -> WaitingStrategy[Any] | Averaging:
        if settings["inner"] != "fedavg":
            raise ConfigError(
                f"inner={settings['inner']!r} does not fit: {strategy.__name__} averages by itself; use server_lr, or "
                "a system of the drop-in pair"
            )
        # As for inner strategies, the server draws cohorts.
        evaluated = 1.0 if settings["fraction_evaluate"] else 0.0
        chosen = {"id": codec_id, **below(settings, CODEC_PREFIX)}
        given = {name: arguments(kind, settings, (name,))[name] for name, kind in makers.items()}
        return strategy(chosen, fraction_evaluate=evaluated, seed=seed, **given)

    return System(
        name,
        title,
        paper,
        summary,
        build,
        {**codec_settings(codec_id, *codec), **defaults},
        (TASK_PREFIX, CODEC_PREFIX),
    )
