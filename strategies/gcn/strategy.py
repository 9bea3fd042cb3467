"""A graph that several owners hold: the server half of training a GCN on sampled neighbours, owned ones favoured.

Sampler after Jiang and Rumi (arXiv 2101.07706, abstract); budget rule derived by us. The clients decide which nodes a
step uses (:mod:`fedcomp.graphs`). They cannot reach each other over Flower, so feature rows travel through the server.
A round is

    setup      who holds which part; asked of nodes that are new or were silent
    plan       which rows of other owners do your next steps use
    rows       from their owners; no exchange where nobody needs any
    train      the inner strategy's own messages, with the rows in them

and the inner strategy aggregates what comes back: FedAvg, a server optimiser, or the drop-in pair around either. With
one step per round and updates weighted by the sizes of the batches this is synchronous data-parallel SGD on the union
of the batches; with more steps it is local SGD, and the report says so.

A client does without the rows of an absent owner, except those in its cache; the report says which share of the base
weight was lost. No exchange lasts longer than the timeout.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcomp.codecs import Identity
from fedcomp.errors import ConfigError
from fedcomp.flower.checkpoint import INNER
from fedcomp.flower.gcn import EVALUATE_TYPE, FEATURES, TRAIN_TYPE, PlanRequest, put_frames
from fedcomp.flower.logs import log
from fedcomp.flower.payload import models, payload_bytes
from fedcomp.flower.privacy import find_private
from fedcomp.flower.records import to_arrays
from fedcomp.flower.report import Report, Reports, reports_of
from fedcomp.flower.rounds import Exchanges, ExchangeStrategy, own_loop
from fedcomp.graphs.rowcodecs import get_row_codec
from fedcomp.graphs.scale import AdaptiveScale
from fedcomp.graphs.settings import RoundSettings, RowSettings, SamplerSettings
from fedcomp.layout import NONE_DENSE, Layout
from fedcomp.privacy.local import asks_for_noise
from fedcomp.rng import Key
from fedcomp.rules import LARGEST, Int, OneOf, checked
from fedcomp.stateful import Stateful, each, nested
from fedcomp.strategies.gcn.owners import Owners, Talk, sent
from fedcomp.strategies.gcn.report import Fetching, FetchTraffic, feature_bytes
from fedcomp.strategies.gcn.rows import Requester, Turn
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.intake import Intake
from fedcomp.strategies.means import weight_key_of
from fedcomp.strategies.private.flower_dp import promises
from fedcomp.strategies.receiving import Reception
from fedcomp.strategies.replies import SentMessage, note_arrivals
from fedcomp.strategies.round_log import RoundLog
from fedcomp.strategies.sinks import rule_of
from fedcomp.strategies.wrapping import require_inner

__all__ = ["FetchTraffic", "Fetching", "RoundSettings", "RowSettings", "SamplerSettings", "SkewedGCN"]


STRUCTURES: Final = ("full", "halo")

_ADAPTIVE_CAP: Final = 8.0
"""Default cap of :class:`~fedcomp.graphs.scale.AdaptiveScale`; a lower ``s_max`` of the sampler holds as well."""

_TYPES: Final = {"train": TRAIN_TYPE, "evaluate": EVALUATE_TYPE}
_ROWS: Final = {"": "feature_bytes_link"}


class SkewedGCN(ExchangeStrategy, Stateful):
    """Train a GCN on a graph whose nodes, features and labels several owners hold.

    The clients need the half :func:`fedcomp.clients.gcn.graph_owner`; :mod:`fedcomp.clients.app` has it. The
    node of partition i owns part i. Nodes outside the inner strategy's cohort do not train, but still hand out their
    rows.

    Parameters
    ----------
    inner : Strategy
        Any Flower strategy that works through hooks, such as :class:`fedcomp.strategies.compressed.Compressed`. A
        private one is refused: feature rows leave their owners in the clear.
    sampler : SamplerSettings
        Which neighbours a step uses. Its ``layers`` are those of the model.
    rows : RowSettings
        How feature rows travel, and which of them clients keep.
    rounds : RoundSettings
        What a round asks of a client: steps, batch size, evaluation, timeout.
    structure : {"full", "halo"}
        What clients know of the edges: all of them, or those of their own nodes. It has to match their task's option.
    guard : Norms, optional
        Refuses replies that are far out of the ordinary; default none is. An inner strategy that checks replies by
        itself, as :class:`~fedcomp.strategies.compressed.Compressed` does, has its own.
    seed : int
        Of batches and samples.
    configrecord_key : str
        Name of the record with the run's configuration.

    Attributes
    ----------
    reports, evaluations : Reports
        Those of the inner strategy, where it keeps any.

    Raises
    ------
    ConfigError
        For an inner strategy that has its own loop, is private or measures slopes, an unknown structure, a sampler that
        needs to know more of the edges, or a guard beside an inner strategy that has its own.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> strategy = SkewedGCN(
    ...     FedAvg(fraction_evaluate=0.0),
    ...     SamplerSettings(n=256, budget=1.5),
    ...     rows=RowSettings(codec="auto", cache="all"),
    ...     rounds=RoundSettings(batch_size=64),
    ... )
    >>> strategy.method
    'synchronous data-parallel SGD'
    """

    TOGETHER: ClassVar[str] = (
        "a run over a graph has features, plans and caches at their owners: a server that is set back alone would ask "
        "for turns that they have passed. Only the in-process engine stores both"
    )

    STATE: ClassVar[Mapping[str, Any]] = {
        "_owners": nested("_owners"),
        "_scales": each("_scales", lambda strategy, part: strategy._search(part)),
        "inner": INNER,
        "_session": str,
        "_epochs": dict[int, tuple[int, int, int]],
        "_reports": Reports,
    }

    def __init__(
        self,
        inner: Strategy,
        sampler: SamplerSettings = SamplerSettings(),  # noqa: B008 - immutable
        *,
        rows: RowSettings = RowSettings(),  # noqa: B008 - immutable
        rounds: RoundSettings = RoundSettings(),  # noqa: B008 - immutable
        structure: str = "full",
        guard: Norms | None = None,
        seed: int = 0,
        configrecord_key: str = "config",
    ) -> None:
        _check_inner(inner)
        checked("seed", seed, Int(-LARGEST - 1))
        checked("structure", structure, OneOf(*STRUCTURES))
        if sampler.sampler == "fastgcn" and structure != "full":
            raise ConfigError(
                f"sampler 'fastgcn' draws by column norms of all of P, which structure={structure!r} does not show; "
                "use structure='full', or another sampler"
            )
        self.inner = inner
        self.sampler, self.rows, self.rounds = sampler, rows, rounds
        self.structure, self.seed = structure, seed
        self.codec = get_row_codec(rows.codec)
        self._reports = Reports()
        self._log = RoundLog(f"SkewedGCN({type(inner).__name__})")
        # An inner strategy of Flower's own would take replies as they come.
        checks = isinstance(getattr(inner, "reports", None), Reports)
        if checks and guard is not None:
            raise ConfigError(f"{type(inner).__name__} checks replies by itself: give it the guard, not SkewedGCN")
        self._reception = None if checks else Reception(f"SkewedGCN({type(inner).__name__})", guard=guard)
        self._key = configrecord_key
        # Clients keep norms of hidden layers per session: a second run on the same nodes must not find the first one's.
        self._session = secrets.token_hex(8)
        self._norms = self.sampler.skews and self.sampler.mode == "measured"
        self._adaptive = self.sampler.skews and self.sampler.mode == "adaptive"
        self._owners = Owners(structure, norms=self._norms, layers=self.sampler.layers)
        self._scales: dict[int, AdaptiveScale] = {}
        self._epochs: dict[int, tuple[int, int, int]] = {}

    @property
    def reports(self) -> Reports:
        """Training reports: the inner strategy's where it makes any, with the section ``gcn``."""
        return reports_of(self.inner, self._reports)

    @property
    def evaluations(self) -> Reports:
        """Evaluation reports: the inner strategy's where it makes any."""
        own = Reports() if self._reception is None else self._reception.evaluations
        return reports_of(self.inner, own, "evaluations")

    @property
    def method(self) -> str:
        """What training is equivalent to."""
        return self.rounds.method

    @property
    def scales(self) -> dict[int, float]:
        """Scale of each part's next round, where the server decides it (mode "adaptive")."""
        return {part: search.s for part, search in sorted(self._scales.items())}

    def summary(self) -> None:
        """Log the sampler, then the inner strategy's own summary."""
        log.info("\t├──> SkewedGCN: %s; %r", self.method, self.sampler)
        if self.sampler.biased:
            log.info("\t│\t└──biased: %s", self.sampler.biased)
        self.inner.summary()

    # A round.

    def round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """Find out which rows are needed, fetch them, and train on them."""
        whole = self.reports.begin(server_round)
        report = whole.section(Fetching)
        report.method = self.method
        config["server-round"] = server_round
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        talk = self._talk(report, report.train, config, grid)
        self._owners.dropped = set()
        replies = yield from self._carry_out("train", messages, talk)
        if self._reception is None:
            outcome, metrics = self.inner.aggregate_train(server_round, replies)
        else:
            outcome, metrics = self._checked(self._reception, whole, arrays, messages, replies)
        if not whole.concluded:  # by an inner strategy that reports
            whole.asked, whole.used = len(messages), 0 if outcome is None else report.train.clients
            self._log.conclude(whole)
        return outcome, MetricRecord({**(metrics or {}), **report.train.metrics("gcn.")})

    def evaluate_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[MetricRecord | None]:
        """Evaluate on the clients, if the inner strategy does; the rows fetched for it are counted separately."""
        whole = self.reports.get(server_round) or self.reports.begin(server_round)
        report = whole.section(Fetching)
        config["server-round"] = server_round
        messages = list(self.inner.configure_evaluate(server_round, arrays, config, grid))
        if not messages:
            return None
        talk = self._talk(report, report.evaluate, config, grid)
        replies = yield from self._carry_out("evaluate", messages, talk)
        if self._reception is not None:
            # A report of its own: that of the round is about training.
            own, sent = Report(server_round), _sent_messages(messages)
            kept, errors = self._reception.evaluate(own, sent, replies, weight_key_of(self.inner), 0)
            replies = [*kept, *errors]
        metrics = self.inner.aggregate_evaluate(server_round, replies)
        return MetricRecord({**(metrics or {}), **report.evaluate.metrics("gcn.evaluate_")})

    def _checked(
        self,
        reception: Reception,
        report: Report,
        arrays: ArrayRecord,
        messages: Sequence[Message],
        replies: Sequence[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the inner strategy aggregate the replies that can be used, as they are; report and leave out the others.

        Raises
        ------
        NoUsableReply
            When clients replied, no reply of theirs can be used, and no earlier round brought an update either.
        """
        reception.reports = self._reports
        model, rule, sent = to_arrays(arrays), rule_of(self.inner), _sent_messages(messages)
        # All floats are part of an update's norm, whatever their type; nothing is encoded.
        layout = Layout.of(model, NONE_DENSE, cast_floats=True)
        key = Key(self.seed, "uplink", report.round)
        intake = Intake(report, sent, layout, model, Identity(), key, weight_key_of(self.inner), models_asked=True)
        report.asked = len(messages)
        arrivals = list(reception.received(sent, replies, report, intake.read, intake.errors))
        arrivals = reception.agreeing(
            [(a, a.record, a.content) for a in arrivals], report, lambda a: a.sent.node, "train"
        )
        arrivals = reception.ordinary(arrivals, report)
        note_arrivals(arrivals, report, models_asked=True)
        kept = [arrival.message for arrival in arrivals]
        with np.errstate(over="ignore", invalid="ignore"):
            outcome, metrics = self.inner.aggregate_train(report.round, [*kept, *intake.errors])
        if outcome is not None:
            consumed = [(a.sent.node, 0, 0) for a in arrivals]
            outcome = reception.accept(intake, rule, outcome, consumed, [a.exact for a in arrivals])
        return reception.conclude(report, outcome, rule), None if outcome is None else metrics

    def _talk(self, report: Fetching, traffic: FetchTraffic, config: ConfigRecord, grid: Grid) -> Talk:
        silent = self._owners.silent
        return Talk(self._session, self._key, config, grid, self.rounds.timeout, report, traffic, silent)

    def _carry_out(self, purpose: str, messages: list[Message], talk: Talk) -> Exchanges[list[Message]]:
        """Let the clients of ``messages`` plan, fetch, and do what the messages ask; return their replies."""
        nodes = [message.metadata.dst_node_id for message in messages]
        # A turn knows a client by its part, and each part has one plan.
        if len(set(nodes)) < len(nodes):
            raise ConfigError(f"{type(self.inner).__name__} sends a node two messages at once; one can have a plan")
        yield from self._owners.meet(talk)
        by_part: dict[int, Message] = {}
        for node, message in zip(nodes, messages, strict=True):
            part = self._owners.part_of(node)
            if part is None:
                talk.report.note("unknown", "a node of the cohort holds no part of this run's graph")
            else:
                by_part[part] = message
        if purpose == "train":
            # Lost as a client only: as an owner it goes on handing out rows.
            for part in [part for part in by_part if not self._owners.hello(part).train]:
                talk.report.lose(part, "its part has no node to learn from")
                del by_part[part]
        turn = Turn(talk, self._owners, self.rows, self._norms, self.sampler.layers)
        ready = yield from turn.run({part: self._ask(purpose, part, talk.report.round) for part in by_part})
        self._owners.dropped = set(self._owners.silent)
        pushed = {part: _loaded(by_part[part], requester, purpose) for part, requester in ready.items()}
        answers = yield from talk.ask(pushed)
        # After the push: only messages that the engine took have an id, and only they are counted.
        _count(talk.traffic, pushed, ready)
        for part, failure in answers.failures.items():
            talk.report.lose(part, failure.reason)
        talk.traffic.clients = len(answers.found)
        if purpose == "train" and self._adaptive:
            self._observe(ready, pushed, answers.found)
        # Errors among them: what to make of a failed client is the inner strategy's decision, as without this one.
        return answers.replies

    def _ask(self, purpose: str, part: int, server_round: int) -> PlanRequest:
        train = purpose == "train"
        sampler = self.sampler
        # The same settings otherwise: layers have to fit the model in evaluation, too.
        if not train and self.rounds.evaluate == "full":
            sampler = replace(sampler, sampler="full")
        return PlanRequest(
            session=self._session,
            seed=self.seed,
            round=server_round,
            purpose=purpose,
            steps=self.rounds.local_steps if train else 1,
            batch_size=self.rounds.batch_size if train else 0,
            sampler=json.dumps(sampler.to_config(), separators=(",", ":")),
            row_codec=self.rows.codec,
            cache=self.rows.cache,
            cache_bytes=self.rows.limit,
            noise=self.rows.noise,
            scale=self._search(part).s if self._adaptive else 0.0,
            norms=self._owners.norms_of(part),
        )

    # The scale, where the server searches it.

    def _search(self, part: int) -> AdaptiveScale:
        if part not in self._scales:
            self._scales[part] = AdaptiveScale(cap=min(_ADAPTIVE_CAP, self.sampler.s_max))
        return self._scales[part]

    def _observe(
        self, ready: Mapping[int, Requester], pushed: Mapping[int, Message], replies: Mapping[int, Message]
    ) -> None:
        """Tell each search, once an epoch, which share of its client's bytes was spent on fetching.

        Bytes, not seconds of this machine: the same run then searches the same way on every machine. An epoch of a part
        lasts until it has learnt from as many nodes as it has for training; rounds whose reply was lost do not count.
        """
        for part, reply in replies.items():
            rows = feature_bytes(pushed[part].content)
            moved = ready[part].moved + rows
            trained = payload_bytes(pushed[part]) - rows + payload_bytes(reply)
            nodes = self._owners.hello(part).train
            # A batch size of 0 is all training nodes, and no batch is larger than that.
            learnt = self.rounds.local_steps * min(self.rounds.batch_size or nodes, nodes)
            before = self._epochs.pop(part, (0, 0, 0))
            epoch = (before[0] + learnt, before[1] + moved, before[2] + moved + trained)
            if epoch[0] < nodes:
                self._epochs[part] = epoch
            # An epoch in which no byte moved has no share to tell.
            elif epoch[2]:
                self._search(part).observe(epoch[1], epoch[2])

    # Resuming.

    def identity(self) -> dict[str, Any]:
        """Return what must not change within a run."""
        rounds = asdict(self.rounds)
        # How long to wait may change from one process to the next.
        del rounds["timeout"]
        return {
            "sampler": self.sampler.to_config(),
            "rows": asdict(self.rows),
            "rounds": rounds,
            "structure": self.structure,
            "seed": self.seed,
        }


def _sent_messages(messages: Sequence[Message]) -> list[SentMessage]:
    return [
        SentMessage(message, message.metadata.dst_node_id, 0, record=next(iter(models(message.content)), ""))
        for message in messages
    ]


def _loaded(message: Message, requester: Requester, purpose: str) -> Message:
    """Return the inner strategy's message with plan and rows in it: the same object, which it knows by its id."""
    # Flower's strategies give all their messages one content.
    content = RecordDict(dict(message.content.items()))
    requester.ask.put(content)
    put_frames(content, FEATURES, requester.rows)
    message.content = content
    message.metadata.message_type = _TYPES[purpose]
    return message


def _count(traffic: FetchTraffic, pushed: Mapping[int, Message], ready: Mapping[int, Requester]) -> None:
    taken = {part: message for part, message in pushed.items() if sent([message])}
    for message in taken.values():
        traffic.feature_bytes_link += feature_bytes(message.content)
    for part in taken:
        rows = sum(len(ids) for ids in ready[part].wants.values())
        traffic.rows_received[part] = rows
    traffic.plan(figures for part in taken if (figures := ready[part].figures) is not None)


def _check_inner(inner: Strategy) -> None:
    require_inner(inner, "SkewedGCN")
    if own_loop(inner):
        raise ConfigError(
            f"{type(inner).__name__} runs its own loop (it overrides start); SkewedGCN stands around strategies that "
            "work through configure_train and aggregate_train"
        )
    if find_private(inner) is not None or promises(inner):
        raise ConfigError(
            f"{type(inner).__name__} promises privacy, and feature rows leave their owners in the clear: the promise "
            "would not hold. Use an inner strategy without one"
        )
    if (codec := getattr(inner, "codec", None)) is not None and asks_for_noise(codec.to_config()):
        raise ConfigError(
            f"{codec!r} makes updates private on the clients, and their feature rows leave them in the clear: the "
            "promise would not hold. Use a codec that does not privatise"
        )
