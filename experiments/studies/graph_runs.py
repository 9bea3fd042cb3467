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
    """Return the results of the run ``specs[label]`` with a seed; see :func:`outcome`.

    A random graph (with ``task.graph_seed`` in the settings) differs for each seed.
    """
    from fedcomp.experiments import engines
    from fedcomp.flower.offline import go_offline

    # Before the first import of Flower, which may be in a separate process here.
    go_offline()
    settings = dict(specs[label].settings)
    if "task.graph_seed" in settings:
        settings["task.graph_seed"] = seed
    with quiet():
        return outcome(engines.run(replace(specs[label], seed=seed, engine="inprocess", settings=settings)))


def outcome(result: RunResult) -> dict[str, Any]:
    """Return the results of a finished run as the fields of a record.

    Bytes are those of frames over the whole run, unless stated otherwise.

    Returns
    -------
    dict
        ``accuracy`` of the last model on the test nodes, with all neighbours, on the server's copy of the graph;
        ``per_batch``, mean number of remote input nodes of a sampled batch; ``batches``.

        Sums over rounds of the figures of :class:`fedcomp.strategies.gcn.report.FetchTraffic` with these names;
        ``evaluate_...`` is the traffic of evaluation on the clients, which no other figure contains.

        ``local_mass`` and ``scale``, means over rounds of lambda and s.

        ``query_wire``, ``train_wire``, ``wire``: whole serialised messages in both directions: plans and requests to
        owners, training (models and rows to clients), and all messages. ``model_bytes``: tensors of models and updates
        in the training messages, both directions.

        ``gap_asked``, ``gap_link``: distance of the strategy's figures from the ledger's payloads, in bytes: for all
        messages with plans and owners, with the rows to the server; and for rows on both links.

        ``points``: round, accuracy and link bytes of features so far, for every evaluation. ``task``: its record.
    """
    from flwr.app import Array

    def total(record: RoundRecord, figure: str) -> int:
        # The traffic of evaluation on clients is stored with their metrics.
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
    # In messages to clients that train or evaluate, everything except the model is rows.
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
    """Return the accuracy of a run after a number of rounds; NaN if there was no evaluation then."""
    return next((accuracy for x, accuracy, _ in run.points if x == rounds), math.nan)
