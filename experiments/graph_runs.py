"""Runs of graph learning as plain data: one cell each, and what rows, bytes and accuracy they came to.

A cell is an ordinary run of the system ``skewed-gcn`` on the in-process engine, every message serialised and counted;
there is no second implementation of training. :func:`outcome` reads a finished run, whether it was a row of an
experiment or a cell in another process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.findings import mean
from fedcomp.experiments.private_central import quiet
from fedcomp.experiments.spec import RoundRecord, RunResult, RunSpec

if TYPE_CHECKING:
    # Listing the experiments needs no Flower: it is imported when one is run.
    from fedcomp.flower.ledger import Ledger

SYSTEM: Final = "skewed-gcn"

_NUMBERS: Final = ("accuracy", "local_mass", "scale", "gap_rows", "gap_link", "gap_ids")

_PLAN: Final = "query.gcn_plan"
_ROWS: Final = "query.gcn_rows"
_TRAIN: Final = "train.gcn"
_EVALUATE: Final = "evaluate.gcn"
_SUMMED: Final = (
    "remote_inputs",
    "rows_fetched",
    "feature_bytes_logical",
    "feature_bytes_link",
    "id_bytes",
    "setup_bytes",
    "structure_bytes",
    "evaluate_feature_bytes_logical",
    "evaluate_feature_bytes_link",
    "evaluate_id_bytes",
)


@dataclass(frozen=True)
class GraphCell:
    """One training, for :func:`fedcomp.experiments.grid.run_cells`.

    Attributes
    ----------
    name : str
        Unique within the run.
    task : str
    clients, rounds, seed : int
    settings : mapping
        As of a :class:`~fedcomp.experiments.spec.RunSpec`.
    """

    name: str
    task: str
    clients: int
    rounds: int
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: RunSpec) -> GraphCell:
        """Return the cell that runs ``spec``, named by its label."""
        return cls(spec.name, spec.task, spec.clients, spec.rounds, spec.seed, dict(spec.settings))

    def spec(self) -> RunSpec:
        """Return the run."""
        return RunSpec(
            system=SYSTEM,
            label=self.name,
            task=self.task,
            engine="inprocess",
            rounds=self.rounds,
            clients=self.clients,
            seed=self.seed,
            settings=dict(self.settings),
        )

    def run(self) -> GraphRun:
        """Train."""
        from fedcomp.experiments import engines
        from fedcomp.flower.offline import go_offline

        # Before Flower is imported for the first time, which here may be in a process of its own.
        go_offline()
        with quiet():
            return outcome(engines.run(self.spec()))

    def read(self, document: Mapping[str, Any]) -> GraphRun:
        """Read what was kept of this cell."""
        return GraphRun.from_json(document)


@dataclass(frozen=True)
class GraphRun:
    """What a run came to. Bytes are of the whole run and of frames, unless it is said otherwise.

    Attributes
    ----------
    accuracy, loss : float
        Of the last model on the test nodes, with all neighbours, on the server's own copy of the graph.
    batches : int
        Sampled batches: rounds, times clients, times steps.
    remote_inputs : int
        Input nodes that other owners have, over all batches.
    rows_fetched : int
        Feature rows that owners sent.
    feature_bytes_logical, feature_bytes_link : int
        Of those rows: once, and over both legs of the way through the server.
    id_bytes, setup_bytes, structure_bytes : int
        Lists of ids of wanted rows; norms and their ids; adjacency rows and their ids.
    evaluate_feature_bytes_logical, evaluate_feature_bytes_link, evaluate_id_bytes : int
        What evaluation on the clients fetched; in nothing above.
    local_mass, scale : float
        Means over rounds of lambda and s.
    plan_wire, rows_wire, train_wire, wire : int
        Whole serialised messages, both directions: of plans, of rows to the server, of training (models and rows to
        clients), and all there are.
    model_bytes : int
        Tensors of models and updates in the training messages, both directions.
    gap_rows, gap_link, gap_ids : float
        How far the strategy's figures are from the ledger's payloads, in bytes: of rows to the server, of rows over
        both legs, of lists of ids. NaN where adjacency rows travelled in the same messages.
    points : list
        Round, accuracy, and link bytes of features so far, of every evaluation.
    task : mapping
        The task's record.
    """

    accuracy: float
    loss: float
    batches: int
    remote_inputs: int
    rows_fetched: int
    feature_bytes_logical: int
    feature_bytes_link: int
    id_bytes: int
    setup_bytes: int
    structure_bytes: int
    evaluate_feature_bytes_logical: int
    evaluate_feature_bytes_link: int
    evaluate_id_bytes: int
    local_mass: float
    scale: float
    plan_wire: int
    rows_wire: int
    train_wire: int
    wire: int
    model_bytes: int
    gap_rows: float
    gap_link: float
    gap_ids: float
    points: Sequence[tuple[float, float, float]]
    task: Mapping[str, Any] = field(default_factory=dict)

    @property
    def per_batch(self) -> float:
        """Remote input nodes of a batch, mean; NaN without rounds."""
        return self.remote_inputs / self.batches if self.batches else math.nan

    def after(self, rounds: int) -> float:
        """Return the accuracy after so many rounds; NaN where it was not evaluated then."""
        return next((accuracy for x, accuracy, _ in self.points if x == rounds), math.nan)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> GraphRun:
        """Read what a kept cell holds."""
        values = {f.name: document[f.name] for f in fields(cls)}
        values |= {name: math.nan for name in _NUMBERS if values[name] is None}
        values["loss"] = math.inf if values["loss"] is None else values["loss"]
        values["points"] = [(x, math.nan if y is None else y, sent) for x, y, sent in values["points"]]
        return cls(**values)


def outcome(result: RunResult) -> GraphRun:
    """Return what a finished run of the system came to."""
    trained = [record for record in result.rounds if record.round > 0]
    sums = {name: sum(_figure(record, name) for record in trained) for name in _SUMMED}
    steps = int(result.notes["settings"]["local_steps"])
    clients = sum(int(record.metrics["gcn.clients"]) for record in trained)
    points, sent = [], 0
    for record in result.rounds:
        sent += int(record.metrics.get("gcn.feature_bytes_link", 0))
        if not math.isnan(record.accuracy):
            points.append((float(record.round), record.accuracy, float(sent)))
    last = next(record for record in reversed(result.rounds) if not math.isnan(record.accuracy))
    ledger = result.ledger
    return GraphRun(
        accuracy=result.accuracy,
        loss=last.loss,
        batches=clients * steps,
        **sums,
        local_mass=mean(float(record.metrics["gcn.local_mass"]) for record in trained),
        scale=mean(float(record.metrics["gcn.scale"]) for record in trained),
        plan_wire=ledger.total("wire", message_type=_PLAN),
        rows_wire=ledger.total("wire", message_type=_ROWS),
        train_wire=ledger.total("wire", message_type=_TRAIN),
        wire=ledger.total("wire", link="hub"),
        **_against_ledger(result, ledger, sums),
        points=points,
        task=result.notes["task"],
    )


def _figure(record: RoundRecord, name: str) -> int:
    # What clients' evaluation came to stands beside their metrics.
    where = "clients.gcn." if name.startswith("evaluate_") else "gcn."
    return int(record.metrics.get(where + name, 0))


def _against_ledger(result: RunResult, ledger: Ledger, sums: Mapping[str, int]) -> dict[str, Any]:
    """Compare the strategy's own figures with the payloads of the messages, which the ledger took when they were sent.

    What is left of the messages to those who train or evaluate when the model is taken out are rows. Where adjacency
    rows travel too the ledger cannot tell them apart.
    """
    from flwr.app import Array

    model = sum(len(Array(array).data) for array in result.arrays.values())
    asked = ledger.total("messages", message_type=(_TRAIN, _EVALUATE), direction="down")
    down = ledger.total("payload", message_type=(_TRAIN, _EVALUATE), direction="down") - model * asked
    rows_up = ledger.total("payload", message_type=_ROWS, direction="up")
    ids = ledger.total("payload", message_type=_PLAN, direction="up")
    ids += ledger.total("payload", message_type=_ROWS, direction="down")
    logical, link, lists = (
        sums[name] + sums[f"evaluate_{name}"] for name in ("feature_bytes_logical", "feature_bytes_link", "id_bytes")
    )
    trained = ledger.total("payload", message_type=_TRAIN)
    gaps = {"gap_rows": rows_up - logical, "gap_link": rows_up + down - link, "gap_ids": ids - lists}
    return {
        "model_bytes": trained - (sums["feature_bytes_link"] - sums["feature_bytes_logical"]),
        **{name: math.nan if sums["structure_bytes"] else abs(gap) for name, gap in gaps.items()},
    }
