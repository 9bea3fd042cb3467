"""Runs of graph learning: one training as a cell of a sweep, and what rows, bytes and accuracy it came to.

A cell is an ordinary run of the system ``skewed-gcn`` on the in-process engine, every message serialised and counted;
there is no second implementation of training. :func:`outcome` reads a finished run, whether it was a row of an
experiment or a cell in another process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import Record
from fedcomp.experiments.spec import RoundRecord, RunResult, RunSpec
from fedcomp.flower.logs import quiet

if TYPE_CHECKING:
    # Listing the experiments needs no Flower: it is imported when one is run.
    from fedcomp.flower.ledger import TrafficLedger

SYSTEM: Final = "skewed-gcn"

_QUERY: Final = "query"
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
    "evaluate_setup_bytes",
    "evaluate_structure_bytes",
)


def train(label: str, seed: int, specs: Mapping[str, RunSpec]) -> dict[str, Any]:
    """Return what the run ``specs[label]`` comes to with a seed; see :func:`outcome`.

    A graph that is drawn (``task.graph_seed`` is among the settings) is another one for each seed.
    """
    from fedcomp.experiments import engines
    from fedcomp.flower.offline import go_offline

    # Before Flower is imported for the first time, which here may be in a process of its own.
    go_offline()
    settings = dict(specs[label].settings)
    if "task.graph_seed" in settings:
        settings["task.graph_seed"] = seed
    with quiet():
        return outcome(engines.run(replace(specs[label], seed=seed, engine="inprocess", settings=settings)))


def outcome(result: RunResult) -> dict[str, Any]:
    """Return what a finished run of the system came to, as the fields of a record.

    Bytes are of the whole run and of frames, unless it is said otherwise.

    Returns
    -------
    dict
        ``accuracy`` and ``loss`` of the last model on the test nodes, with all neighbours, on the server's own copy of
        the graph; ``per_batch``, remote input nodes of a sampled batch, mean; ``batches``.

        Sums over rounds of the figures of :class:`fedcomp.strategies.gcn.report.FetchTraffic` of these names;
        ``evaluate_...`` is what evaluation on the clients fetched, in nothing above.

        ``local_mass`` and ``scale``, means over rounds of lambda and s.

        ``query_wire``, ``train_wire``, ``wire``: whole serialised messages, both directions, of plans and of what
        owners are asked for, of training (models and rows to clients), and all there are. ``model_bytes``: tensors of
        models and updates in the training messages, both directions.

        ``gap_asked``, ``gap_link``: how far the strategy's figures are from the ledger's payloads, in bytes: of all
        that plans and owners say and are told, rows to the server among it; and of rows over both legs.

        ``points``: round, accuracy, and link bytes of features so far, of every evaluation. ``task``: its record.
    """
    # Round 0 is the evaluation of the initial model.
    trained = [record for record in result.rounds if record.round > 0]
    sums = {name: sum(_figure(record, name) for record in trained) for name in _SUMMED}
    steps = int(result.notes["settings"]["local_steps"])
    batches = steps * sum(int(record.metrics["gcn.clients"]) for record in trained)
    points, sent = [], 0
    for record in result.rounds:
        sent += int(record.metrics.get("gcn.feature_bytes_link", 0))
        if not math.isnan(record.accuracy):
            points.append((float(record.round), record.accuracy, float(sent)))
    ledger = result.ledger
    wires = {"query_wire": _QUERY, "train_wire": _TRAIN}
    return {
        "accuracy": result.accuracy,
        "loss": next(r.loss for r in reversed(result.rounds) if not math.isnan(r.accuracy)),
        "batches": batches,
        "per_batch": sums["remote_inputs"] / batches if batches else math.nan,
        **sums,
        **{name: mean(float(r.metrics[f"gcn.{name}"]) for r in trained) for name in ("local_mass", "scale")},
        **{name: ledger.total("wire", message_type=kind) for name, kind in wires.items()},
        "wire": ledger.total("wire", link="hub"),
        **_against_ledger(result, ledger, sums),
        "points": points,
        "task": result.notes["task"],
    }


def after(run: Record, rounds: int) -> float:
    """Return the accuracy of a run after so many rounds; NaN where it was not evaluated then."""
    return next((accuracy for x, accuracy, _ in run.points if x == rounds), math.nan)


def _figure(record: RoundRecord, name: str) -> int:
    # What clients' evaluation came to is kept beside their metrics.
    where = "clients.gcn." if name.startswith("evaluate_") else "gcn."
    return int(record.metrics.get(where + name, 0))


def _against_ledger(result: RunResult, ledger: TrafficLedger, sums: Mapping[str, int]) -> dict[str, Any]:
    """Compare the strategy's own figures with the payloads of the messages, which the ledger took when they were sent.

    What is left of the messages to those who train or evaluate when the model is taken out are rows.
    """
    from flwr.app import Array

    model = sum(len(Array(array).data) for array in result.arrays.values())
    asked = ledger.total("messages", message_type=(_TRAIN, _EVALUATE), direction="down")
    down = ledger.total("payload", message_type=(_TRAIN, _EVALUATE), direction="down") - model * asked
    figures = ("feature_bytes_logical", "feature_bytes_link", "id_bytes", "setup_bytes", "structure_bytes")
    logical, link, *others = (sums[name] + sums[f"evaluate_{name}"] for name in figures)
    trained = ledger.total("payload", message_type=_TRAIN)
    return {
        "model_bytes": trained - (sums["feature_bytes_link"] - sums["feature_bytes_logical"]),
        "gap_asked": abs(ledger.total("payload", message_type=_QUERY) - logical - sum(others)),
        "gap_link": abs(logical + down - link),
    }
