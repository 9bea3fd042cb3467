"""Graph learning over Flower's messages: :class:`fedcomp.systems.graphs.system.Graphs` around any inner strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcomp.codecs import Identity
from fedcomp.errors import ConfigError
from fedcomp.flower.logs import log
from fedcomp.flower.privacy import find_private
from fedcomp.flower.report import Report
from fedcomp.flower.rounds import Exchanges, own_loop
from fedcomp.graphs.settings import RoundSettings, RowSettings, SamplerSettings
from fedcomp.layout import NONE_DENSE
from fedcomp.privacy.local import asks_for_noise
from fedcomp.program import Answer, Now, Step
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.gcn.report import Fetching
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.private.flower_dp import promises
from fedcomp.strategies.round_log import RoundLog
from fedcomp.strategies.running import Exchange, Pushes, Running
from fedcomp.strategies.server import Server
from fedcomp.strategies.wrapping import require_inner
from fedcomp.systems.graphs.conversation import OTHERS, THERE, Conversation
from fedcomp.systems.graphs.system import Graphs
from fedcomp.systems.graphs.traffic import FetchTraffic
from fedcomp.systems.graphs.words import EVALUATE_TYPE, TRAIN_TYPE

__all__ = ["FetchTraffic", "Fetching", "RoundSettings", "RowSettings", "SamplerSettings", "SkewedGCN"]


class SkewedGCN(Server):
    """Train a GCN on a graph whose nodes, features and labels belong to several owners.

    The clients need the half :func:`fedcomp.clients.gcn.graph_owner`; :mod:`fedcomp.clients.app` has it. The node of
    partition i owns part i. Nodes outside the inner strategy's cohort do not train, but still provide their rows.

    Parameters
    ----------
    inner : Strategy
        Any Flower strategy that works through hooks, or :class:`fedcomp.strategies.compressed.Compressed` around one.
        A private one is refused: feature rows leave their owners in the clear.
    sampler : SamplerSettings
        Which neighbours a step uses. Its ``layers`` are those of the model.
    rows : RowSettings
        How feature rows travel, and which of them clients keep.
    rounds : RoundSettings
        What a round asks of a client: steps, batch size, evaluation, timeout.
    structure : {"full", "halo"}
        The edges that clients know: all of them, or those of their own nodes. It must match their task's option.
    guard : Norms, optional
        Refuses outlying replies; by default none is refused. A :class:`~fedcomp.strategies.compressed.Compressed` has
        its own.
    seed : int
        Of batches and samples, and of what the codec draws.

    Attributes
    ----------
    reports, evaluations, roster
        Of :class:`fedcomp.strategies.server.Server`; reports have the section ``gcn``.

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

    system: Graphs

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
    ) -> None:
        _check_inner(inner)
        around: dict[str, Any] = {"policy": NONE_DENSE, "guard": guard}
        pair = inner if isinstance(inner, Compressed) else None
        if pair is not None:
            if guard is not None:
                raise ConfigError("Compressed checks replies by itself: give it the guard, not SkewedGCN")
            around = pair.surroundings
        system = Graphs(Identity() if pair is None else pair.codec, sampler, rows, rounds, structure)
        super().__init__(system, inner if pair is None else pair.inner, **{**around, "seed": seed})

    @property
    def method(self) -> str:
        """What training is equivalent to."""
        return self.system.rounds.method

    def summary(self) -> None:
        """Log the sampler, then the inner strategy's own summary."""
        sampler = self.system.sampler
        log.info("\t├──> SkewedGCN: %s; %r", self.method, sampler)
        if sampler.biased:
            log.info("\t│\t└──biased: %s", sampler.biased)
        self.inner.summary()

    def identity(self) -> dict[str, str]:
        """Return what must not change within a run; how long to wait may, from one process to the next."""
        system = replace(self.system, rounds=replace(self.system.rounds, timeout=None))
        return {**super().identity(), "system": repr(system)}

    # A round.

    def _begin(self) -> None:
        super()._begin()
        self._log = RoundLog(f"{self._name}({type(self.inner).__name__})", self.system.APP)
        self._online: list[int] = []
        self._asked: tuple[Running, Now] | None = None

    def round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Exchanges[tuple[ArrayRecord | None, MetricRecord | None]]:
        """Find out which rows are needed, fetch them, and train on them."""
        self._online = list(grid.get_node_ids())
        return (yield from super().round(server_round, arrays, config, grid))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Open an evaluation, if the inner strategy makes one; the rows fetched for it are counted by themselves."""
        self._online = list(grid.get_node_ids())
        return super().configure_evaluate(server_round, arrays, config, grid)

    def _begun(self, report: Report, arrays: ArrayRecord, messages: Sequence[Message]) -> Running:
        for message in messages:
            # Types of their own: an app may have other handlers for trainings without a graph.
            kind = message.metadata.message_type.partition(".")[0]
            message.metadata.message_type = EVALUATE_TYPE if kind == "evaluate" else TRAIN_TYPE
        return super()._begun(report, arrays, messages)

    def _now(self, x: Running, *args: Any, **more: Any) -> Now:
        now = super()._now(x, *args, **more)
        base, taken = next(iter(x.base.values()), None), set(x.addresses.values())
        others = {
            node: address
            for node, address in self.roster.numbered(self._online).items()
            if address not in taken and node not in x.addresses
        }
        content = RecordDict()
        if base is not None:
            content.update({k: v for k, v in base.content.items() if isinstance(v, ConfigRecord)})
        x.base |= {node: Message(content.copy(), address, TRAIN_TYPE) for node, address in others.items()}
        x.addresses |= others
        now.state[OTHERS] = sorted(others)
        strangers = {node for node, address in others.items() if address not in self.roster.declared}
        self._asked = x, now
        return replace(now, strangers=now.strangers | strangers)

    def _exchanged(self, x: Running, now: Now, exchange: Exchange, began: float) -> Pushes[list[Answer]]:
        answers = yield from super()._exchanged(x, now, exchange, began)
        now.state[THERE] = sorted(n for n, address in x.addresses.items() if address not in self.roster.silent)
        return answers

    def _take(self, x: Running, now: Now, step: Step | None) -> Outcome:
        section = x.report.section(Fetching)
        section.method = self.method
        section.take(now.told["graph"])
        self._asked = None
        return super()._take(x, now, step)

    def _evaluated(self, report: Report, replies: Iterable[Message]) -> MetricRecord | None:
        replies, sent = list(replies), {each.node for each in self._evaluating}
        metrics = super()._evaluated(report, replies)
        x, now = self._asked or (None, None)
        turn: Conversation | None = None if now is None else now.told.get("graph")
        if x is None or turn is None or turn.purpose != "evaluate":
            # Nobody was asked to evaluate.
            return metrics
        lost = [part for part in turn.requesters if x.addresses[part] in report.refused]
        turn.lost |= {part: report.refused[x.addresses[part]] for part in lost}
        # Not what was asked less what was lost, which counts the messages of all exchanges.
        came = sent.intersection(reply.metadata.src_node_id for reply in replies)
        turn.traffic.clients = len(came - report.refused.keys())
        whole = self.reports.get(report.round) or self.reports.begin(report.round)
        whole.section(Fetching).take(turn)
        return MetricRecord({**(metrics or {}), **turn.traffic.metrics("gcn.evaluate_")})


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
