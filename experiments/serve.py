"""The server's part of a run, identical on every engine: nodes, model, strategy, rounds, evaluation, records.

An engine brings a Grid and calls :func:`serve`. All that a client has to know is put into the messages, since not every
engine gives clients a run configuration; so the bytes are the same everywhere.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.experiments.federation import Cohorts, wait_for_nodes
from fedcomp.experiments.spec import PRIVACY_FILE, RoundRecord, RunResult, RunSpec, Scalar
from fedcomp.experiments.systems import declare, get_system
from fedcomp.flower import checkpoint as checkpoints
from fedcomp.flower.grid import in_process
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.privacy import Private, find_private
from fedcomp.flower.report import Reports, reports_of
from fedcomp.flower.rounds import RoundOutcome, fit, over
from fedcomp.flower.store import Lasting
from fedcomp.heap import keep_freed_memory
from fedcomp.privacy.errors import PrivacyLedgerError
from fedcomp.strategies.deadlines import Deadline
from fedcomp.strategies.parts import BUDGET, TASK_PREFIX
from fedcomp.strategies.system import TRAINING
from fedcomp.timing import parse_link, simulated_seconds

if TYPE_CHECKING:
    from fedcomp.flower.ledger import TrafficLedger

log = logging.getLogger("flwr")

OnRound = Callable[[RoundRecord], object]


def serve(
    spec: RunSpec,
    grid: Grid,
    *,
    on_round: OnRound | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int | None = None,
    privacy: Path | None = None,
) -> RunResult:
    """Run ``spec`` over ``grid`` and return what came out.

    Parameters
    ----------
    spec : RunSpec
    grid : Grid
        Any engine's, with at least ``spec.clients`` nodes that run :mod:`fedcomp.clients.app`.
    on_round : callable, optional
        Called with each new round's record, round 0 (the initial model) first.
    checkpoint : Path, optional
        A file: the run continues from it when it exists, and replaces it as it goes. The in-process engine's holds the
        clients, too; elsewhere they have to keep their own state (:mod:`fedcomp.clients.kept`).
    checkpoint_every : int, optional
        Rounds between two checkpoints, default 1; there is one after the last round in any case. Where clients keep
        their own state, what they sent in the rounds that are made again is lost if it was acknowledged: only with 1 do
        clients that remember what they did not send go on exactly.
    privacy : Path, optional
        The file in which a private system keeps what it released: an event is in it before its noisy value exists, and
        what is in it already was paid. Default: :data:`fedcomp.experiments.spec.PRIVACY_FILE` beside the checkpoint;
        without a checkpoint there is no file. Other systems leave it alone.

    Raises
    ------
    ConfigError
        When the spec cannot run, the checkpoint belongs to another run, or ``checkpoint_every`` is less than 1.
    NodesMissing
        When fewer nodes than clients are online after the setting ``start_timeout``.
    """
    # In a deployment this is a process of its own.
    keep_freed_memory()
    run = _Run(spec, MeteredGrid(grid), on_round, checkpoint, checkpoint_every, privacy)
    try:
        return run.execute()
    finally:
        run.close()


def client_config(spec: RunSpec, settings: Mapping[str, Scalar]) -> ConfigRecord:
    """Return what every message tells the clients: the task, its options, the split, the seed and how to train."""
    config: dict[str, Any] = {"task": spec.task, "clients": spec.clients, "seed": spec.seed}
    # What is zero is what training does anyway; every message pays for every key.
    config |= {key: settings[key] for key in TRAINING if settings[key]}
    config |= {key: value for key, value in settings.items() if key.startswith(TASK_PREFIX)}
    return ConfigRecord(config)


class _Run:
    """The moving parts of one run; lives as long as :func:`serve`, whose parameters these are."""

    def __init__(
        self,
        spec: RunSpec,
        grid: MeteredGrid,
        on_round: OnRound | None,
        checkpoint: Path | None,
        checkpoint_every: int | None,
        privacy: Path | None,
    ) -> None:
        from fedcomp.tasks import get_task  # brings torch

        self.spec, self.grid, self.on_round, self.checkpoint = spec, grid, on_round, checkpoint
        self.privacy = checkpoint.with_name(PRIVACY_FILE) if privacy is None and checkpoint is not None else privacy
        self._started = time.perf_counter()
        system = get_system(spec.system)
        self.settings = settings = system.resolve(spec.settings)
        options = {k.removeprefix(TASK_PREFIX): v for k, v in settings.items() if k.startswith(TASK_PREFIX)}
        self.task = get_task(spec.task, **options)
        self.strategy = system.build(settings, spec.seed)
        self.every = params.integer("checkpoint_every", 1 if checkpoint_every is None else checkpoint_every, low=1)
        self.records: list[RoundRecord] = []
        self.arrays = ArrayRecord()
        self.seconds_before = 0.0
        self._private = find_private(self.strategy)
        self.withheld = getattr(self._private, "withholds", False) is True
        self._each: dict[str, int] = {}
        self._file: checkpoints.CheckpointFile | None = None
        self._stored: dict[int, tuple[RoundRecord, Lasting]] = {}
        self._reported = 0
        # Simulated seconds are the engine's own virtual clock, where it has one, or the ledger's bytes on the link.
        link = str(settings["link"])
        self._link = parse_link(link) if link else None
        self._own = in_process(grid) is not None
        self._at = 0.0
        adaptive = str(settings["adaptive_deadline"])
        self._config = client_config(spec, settings)
        self._cohorts = Cohorts(
            grid,
            clients=spec.clients,
            seed=spec.seed,
            train=float(settings["fraction"]),
            evaluate=float(settings["fraction_evaluate"]),
            query=self._config,
            deadline=partial(Deadline.parse, adaptive) if adaptive else None,
        )

    @property
    def _reports(self) -> Reports:
        return reports_of(self.strategy, Reports())

    def execute(self) -> RunResult:
        """Run all rounds that are still to do; return what came out."""
        history, first = None, 1
        if self.checkpoint is not None and self.checkpoint.exists():
            history, first = self._restore(self.checkpoint)
        else:
            self.arrays = self._initial_arrays()
        if self._private is not None:
            declare(self._private, self.spec, self.task)
            if self.privacy is not None:
                # After the checkpoint: rounds that were paid for after it was written are in the file alone.
                self._private.open_ledger(self.privacy)
        # The reference point of the first round's duration: waiting for nodes is no part of it.
        if first <= self.spec.rounds:
            wait_for_nodes(self.grid, self.spec.clients, float(self.settings["start_timeout"]))
            self._require_known()
        # A resumed run takes the roll from its checkpoint.
        if first == 1 <= self.spec.rounds:
            self._cohorts.prepare()
        self._mark = time.perf_counter()
        fit(
            self.strategy,
            self._cohorts,
            self.arrays,
            self.spec.rounds,
            start_round=first,
            timeout=float(self.settings["timeout"]),
            # Copies: Flower's strategies write the round number into the record they are given.
            train_config=ConfigRecord(dict(self._config)),
            evaluate_config=ConfigRecord(dict(self._config)),
            evaluate_fn=self._evaluate,
            on_round=self._complete,
            result=history,
        )
        self._report()
        self._end()
        return RunResult(
            spec=self.spec,
            rounds=self.records,
            arrays={name: array.numpy() for name, array in self.arrays.items()},
            # The ledger's rows name the nodes that took part, which a run that withholds them must not give away.
            ledger=type(self.grid.ledger)() if self.withheld else self.grid.ledger,
            notes=self._notes(),
            seconds=self.seconds_before + time.perf_counter() - self._started,
            simulated_seconds=sum(record.simulated_seconds for record in self.records),
        )

    def close(self) -> None:
        """Give the file of the privacy ledger back."""
        if self._private is not None:
            self._private.privacy.close()

    def _require_known(self) -> None:
        """Refuse to go on under a participation cap when those who took part come back under other names.

        Raises
        ------
        PrivacyLedgerError
            When the ledger knows participants, and none of them is online.
        """
        ledger = None if self._private is None else self._private.privacy
        if ledger is None or not ledger.sampling.cap or not ledger.participations:
            return
        # Under the names that a checkpoint knows them by, if there is one.
        if not set(ledger.participations) & set(self._cohorts.there()):
            raise PrivacyLedgerError(
                f"the ledger {self.privacy} counts the rounds of {len(ledger.participations)} nodes, none of which is "
                "online: on this engine nodes get new ids when a run starts again, and a cap on participations cannot "
                "be kept over that; start a new run, with sampling=everyone if it is to go on when nodes come back"
            )

    def _end(self) -> None:
        """Evaluate the last model of a run that ended in a round that was to show no accuracy."""
        last = self.records[-1]
        if last.round == self.spec.rounds or not math.isnan(last.accuracy):
            return
        found, nan = self._measured(self.arrays), float("nan")
        accuracy, loss = found.get(self.task.metric, nan), found.get("loss", nan)
        self.records[-1] = dataclasses.replace(last, accuracy=accuracy, loss=loss)
        if self.on_round is not None:
            # The round's former record counts no longer.
            self.on_round(self.records[-1])

    def _initial_arrays(self) -> ArrayRecord:
        from fedcomp.tasks.arrays import to_arrays

        return ArrayRecord({name: Array(a) for name, a in to_arrays(self.task.model(self.spec.seed)).items()})

    def _evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate on the task's test split in the rounds that are due; round 0 is recorded here."""
        every, last = int(self.settings["evaluate_every"]), self.spec.rounds
        metrics = None
        due = server_round in (0, last) or server_round % every == 0
        # A strategy that stops early, for instance at its budget, still gets its last model evaluated.
        if due or over(self.strategy, server_round + 1):
            metrics = MetricRecord(self._measured(arrays))
        if server_round == 0:
            self._record(0, RoundOutcome(server=metrics))
            self._report()
        return metrics

    def _measured(self, arrays: ArrayRecord) -> dict[str, Any]:
        from fedcomp.tasks.arrays import load_arrays

        model = self.task.model(self.spec.seed)
        load_arrays(model, {name: array.numpy() for name, array in arrays.items()}, cast=True)
        return {key: float(value) for key, value in self.task.evaluate(model, self.task.test).items()}

    def _complete(self, server_round: int, arrays: ArrayRecord, outcome: RoundOutcome) -> None:
        self.arrays = arrays
        self._record(server_round, outcome)
        # Saved before it is reported: a crash in between loses the report, and the checkpoint holds the record.
        last = server_round == self.spec.rounds or over(self.strategy, server_round + 1)
        if self.checkpoint is not None and (last or server_round % self.every == 0):
            self._save(self.checkpoint, server_round)
        # Records whose bytes are not known yet wait for the first that has some: a 0 would say that nobody was drawn.
        if self._each or not self.withheld:
            self._report()

    def _report(self) -> None:
        """Report the records that were not reported yet."""
        waiting, self._reported = self.records[self._reported :], len(self.records)
        if self.on_round is not None:
            for record in waiting:
                self.on_round(record)

    def _record(self, server_round: int, outcome: RoundOutcome) -> None:
        server, nan = dict(outcome.server or {}), float("nan")
        figures = self._expected(server_round) if self.withheld and server_round else self._counted(server_round)
        record = RoundRecord(
            round=server_round,
            accuracy=float(server.get(self.task.metric, nan)),  # type: ignore[arg-type]
            loss=float(server.get("loss", nan)),  # type: ignore[arg-type]
            metrics=self._metrics(server_round, outcome),
            **figures,
        )
        self.records.append(record)

    def _counted(self, server_round: int) -> dict[str, Any]:
        """Return what a round cost."""
        total = partial(self.grid.ledger.total, round=server_round)
        figures: dict[str, Any] = {}
        for value in ("payload", "wire"):
            for way in ("up", "down"):
                figures[f"{way}link_{value}_bytes"] = total(value, direction=way, link="hub")
            figures[f"peer_{value}_bytes"] = total(value, link="peer")
        figures |= {"replies": self._cohorts.replies, "failures": self._cohorts.failures}
        before, self._mark = self._mark, time.perf_counter()
        return {**figures, "simulated_seconds": self._lap(server_round), "wall_seconds": self._mark - before}

    def _expected(self, server_round: int) -> dict[str, Any]:
        """Return what a round cost of which nobody may know who took part, nor how many did.

        Bytes are those of the expected number of clients, a public figure; what a client sends does not depend on what
        it learnt. Rounds that drew nobody before anybody was drawn get theirs from the first that did. Times and
        replies, which follow those who came, are left at 0.
        """
        assert self._private is not None
        expected = self._private.privacy.sampling.rate * self.spec.clients
        unknown = not self._each
        self._see(server_round)
        bytes_of: dict[str, Any] = {name: round(expected * each) for name, each in self._each.items()}
        if unknown:
            # All but round 0, which asks nobody: their bytes were left open.
            self.records[1:] = [dataclasses.replace(record, **bytes_of) for record in self.records[1:]]
        self._lap(server_round)
        return bytes_of

    def _lap(self, server_round: int) -> float:
        """Return the simulated seconds of the round that has just ended, 0 when there is no link."""
        before, self._at = self._at, float(self.grid.clock) if self._own else 0.0
        if self._link is None:
            return 0.0
        return self._at - before if self._own else simulated_seconds(_rows(self.grid.ledger, server_round), self._link)

    def _see(self, server_round: int) -> None:
        """Learn from a round how many bytes a client sends and is sent: the most so far, where anybody was drawn."""
        for way in ("up", "down"):
            for value in ("payload", "wire"):
                name = f"{way}link_{value}_bytes"
                for size in self.grid.ledger.by("node", value, round=server_round, direction=way).values():
                    self._each[name] = max(self._each.get(name, 0), size)

    def _metrics(self, server_round: int, outcome: RoundOutcome) -> dict[str, Any]:
        metrics: dict[str, Any] = dict(outcome.train or {})
        metrics |= {f"clients.{key}": value for key, value in (outcome.evaluate or {}).items()}
        report = self._reports.get(server_round)
        if report is not None:
            metrics |= report.figures()
        elif self._cohorts.reasons:
            metrics["report.errors_because"] = sorted(set(self._cohorts.reasons))
        # By partition: node ids mean nothing after a run.
        found = {"nodes.skipped": self._cohorts.skipped, "nodes.returned": sorted(self._cohorts.returned)}
        metrics |= {name: partitions for name, partitions in found.items() if partitions}
        metrics |= self._gossip(server_round)
        if self._private is None:
            return metrics
        if self.withheld or report is None:
            return dict(outcome.train or {}) | _cost(self._private)
        # The strategy's own figures are part of its promise, and those of clients' evaluations are not.
        if reasons := report.reasons():
            log.warning("round %d, for the server alone: %s", server_round, "; ".join(reasons))
        return dict(outcome.train or {}) | report.figures(public=True) | _cost(self._private)

    def _gossip(self, server_round: int) -> dict[str, Any]:
        """Return what a decentralised round cost beside its gossip messages.

        Gossip messages themselves, on edges, by node and through the server, are in the strategy's own metrics.
        Overhead is all that Flower's messages weigh beyond them and, where a run begins or is joined, the model; equal
        gossip messages in one of Flower's travel once, so that it may be negative.
        """
        if server_round not in self._reports.sections("gossip"):
            return {}
        ledger, where = self.grid.ledger, {"round": server_round, "link": "hub", "message_type": "train"}
        return {
            "gossip.overhead": ledger.total("wire", **where) - ledger.total("payload", **where),
            "gossip.observation": ledger.total("wire", round=server_round, message_type="query.show"),
        }

    def _notes(self) -> dict[str, Any]:
        packages = ("flwr", "torch", "numpy")
        # Of the server's time, by what it was spent on and by round.
        spent: dict[str, dict[str, float]] = {}
        for number, report in sorted(self._reports.items()):
            for name, value in report.times().items():
                spent.setdefault(name, {})[str(number)] = value
        promised: dict[str, Any] = {}
        if self._private is not None:
            # And why it made fewer rounds than asked, if it did.
            made = self.records[-1].round
            ended = over(self.strategy, made + 1) if made < self.spec.rounds else ""
            promised = {"privacy": self._private.statement().to_json(), "ended": ended}
        return {
            "engine": self.spec.engine,
            "task": self.task.record(),
            "settings": dict(self.settings),
            "versions": {name: importlib.metadata.version(name) for name in packages},
            **({"seconds": spent} if spent else {}),
            **promised,
            **({} if self.withheld else self.grid.ledger.summary()),
        }

    def _save(self, path: Path, server_round: int) -> None:
        extra: dict[str, Any] = {
            "spec": self.spec.to_run_config(),
            "records": [self._once(record) for record in self.records],
            "seconds": self.seconds_before + time.perf_counter() - self._started,
            "nodes": self._cohorts.known,
            "times": self._cohorts.times(),
        }
        if self._file is None:
            self._file = checkpoints.CheckpointFile(path)
        self._file.save(
            server_round=server_round,
            arrays=self.arrays,
            strategy=self.strategy,
            grid=self.grid,
            extra=extra,
        )

    def _once(self, record: RoundRecord) -> Lasting:
        """Return a record for the checkpoint's file; the same object for the same record."""
        # Records are frozen, and compared by identity: one that replaces another is written anew.
        found = self._stored.get(record.round)
        if found is None or found[0] is not record:
            found = self._stored[record.round] = (record, Lasting(record.to_json))
        return found[1]

    def _restore(self, path: Path) -> tuple[Any, int]:
        read_checkpoint(path, self.spec)
        found = checkpoints.resume(path, self.strategy, self.grid)
        self.records = [RoundRecord.from_json(record) for record in found.extra["records"]]
        for record in self.records[1:] if self.withheld else ():
            self._see(record.round)
        # Round 0 alone was reported where the bytes of all others are still open.
        self._reported = len(self.records) if self._each or not self.withheld else 1
        self._cohorts.recall(found.extra["nodes"])
        # Checkpoints that were made before there were deadlines lack them.
        self._cohorts.recall_times(found.extra.get("times", {}))
        self.seconds_before = float(found.extra["seconds"])
        self.arrays = found.arrays
        self._at = float(self.grid.clock) if self._own else 0.0
        return found.result, found.server_round + 1


def read_checkpoint(path: Path, spec: RunSpec) -> checkpoints.Checkpoint:
    """Return the checkpoint that a run of ``spec`` left at ``path``.

    Raises
    ------
    CheckpointError
        When it cannot be read.
    ConfigError
        When another run left it.
    """
    found = checkpoints.load(path)
    asked = RunSpec.from_run_config(found.extra["spec"])
    if _lasting(asked) != _lasting(spec):
        raise ConfigError(
            f"the checkpoint {path} was left by {asked.to_run_config()}, not by {spec.to_run_config()}; "
            "resume with the same specification, or remove the file to start again"
        )
    return found


def _lasting(spec: RunSpec) -> RunSpec:
    """Return what of a spec may not change when it is resumed: neither its length, its label nor its budget."""
    settings = {key: value for key, value in spec.settings.items() if key != BUDGET}
    return dataclasses.replace(spec, rounds=0, label="", settings=settings)


def _cost(private: Private) -> dict[str, Any]:
    """Return what the rounds so far cost; what it means is in the statement, without which nobody is shown it."""
    ledger = private.privacy
    return {
        "privacy.epsilon": ledger.epsilon(),
        "privacy.epsilon_unamplified": ledger.epsilon(amplified=False),
        "privacy.releases": ledger.releases,
    }


def _rows(ledger: TrafficLedger, server_round: int) -> list[dict[str, Any]]:
    """Return the ledger's messages of one round as the rows the link model reads: those on the links to the server."""
    columns, tables = ledger.columns(), ledger.tables()
    found = [(i, *tables["kinds"][columns["kind"][i]]) for i in (columns["round"] == server_round).nonzero()[0]]
    return [
        {
            "round": server_round,
            "node": tables["nodes"][columns["node"][i]],
            "direction": direction,
            "message_type": message_type,
            "wire": int(columns["wire"][i]),
        }
        for i, direction, message_type, link in found
        if link == "hub"
    ]
