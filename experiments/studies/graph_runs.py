"""Runs of graph learning: one training per cell of a sweep, with its rows, bytes and accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import Record
from fedcomp.experiments.spec import RoundRecord, RunResult, RunSpec
from fedcomp.flower.logs import quiet

SYSTEM: Final = "skewed-gcn"

_QUERY, _TRAIN, _EVALUATE = "query", "train.gcn", "evaluate.gcn"
_COUNTED: Final = ("feature_bytes_logical", "feature_bytes_link", "id_bytes", "setup_bytes", "structure_bytes")


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
        ``accuracy`` of the last model on the test nodes, with all neighbours, on the server's own copy of the graph;
        ``per_batch``, remote input nodes of a sampled batch, mean; ``batches``.

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
    from flwr.app import Array

    def total(record: RoundRecord, figure: str) -> int:
        # What clients' evaluation came to is kept beside their metrics.
        return int(record.metrics.get(f"{'clients.' * figure.startswith('evaluate_')}gcn.{figure}", 0))

    # Round 0 is the evaluation of the initial model.
    trained = [record for record in result.rounds if record.round > 0]
    summed = ("remote_inputs", "rows_fetched", *_COUNTED, *(f"evaluate_{figure}" for figure in _COUNTED))
    sums = {figure: sum(total(record, figure) for record in trained) for figure in summed}
    steps = int(result.notes["settings"]["local_steps"])
    batches = steps * sum(int(record.metrics["gcn.clients"]) for record in trained)
    points, sent = [], 0
    for record in result.rounds:
        sent += total(record, "feature_bytes_link")
        if not math.isnan(record.accuracy):
            points.append((float(record.round), record.accuracy, float(sent)))
    ledger = result.ledger
    logical, link, *others = (sums[figure] + sums[f"evaluate_{figure}"] for figure in _COUNTED)
    # What is left of the messages to those who train or evaluate when the model is taken out are rows.
    model = sum(len(Array(array).data) for array in result.arrays.values())
    to_clients: dict[str, Any] = {"message_type": (_TRAIN, _EVALUATE), "direction": "down"}
    down = ledger.total("payload", **to_clients) - model * ledger.total("messages", **to_clients)
    rows_sent = sums["feature_bytes_link"] - sums["feature_bytes_logical"]
    return {
        "accuracy": result.accuracy,
        "batches": batches,
        "per_batch": sums["remote_inputs"] / batches if batches else math.nan,
        **sums,
        **{figure: mean(float(r.metrics[f"gcn.{figure}"]) for r in trained) for figure in ("local_mass", "scale")},
        "query_wire": ledger.total("wire", message_type=_QUERY),
        "train_wire": ledger.total("wire", message_type=_TRAIN),
        "wire": ledger.total("wire", link="hub"),
        "model_bytes": ledger.total("payload", message_type=_TRAIN) - rows_sent,
        "gap_asked": abs(ledger.total("payload", message_type=_QUERY) - logical - sum(others)),
        "gap_link": abs(logical + down - link),
        "points": points,
        "task": result.notes["task"],
    }


def after(run: Record, rounds: int) -> float:
    """Return the accuracy of a run after so many rounds; NaN where it was not evaluated then."""
    return next((accuracy for x, accuracy, _ in run.points if x == rounds), math.nan)
