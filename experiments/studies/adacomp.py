"""AdaComp's layers: bytes in the frames, values sent per bin, and training losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import Curves, Series, mean
from fedcomp.experiments.kit import Record, Records, running_mean, table, train_losses
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RunResult
from fedcomp.experiments.tables import Found
from fedcomp.layout import Layout, TensorSpec
from fedcomp.strategies.parts import TASK_PREFIX, below, policy

if TYPE_CHECKING:
    from fedcomp.codecs import AdaComp
    from fedcomp.experiments.central import Seen

DENSE = "FedAvg"
ADACOMP = "AdaComp"
HARD = "AdaComp, factor 1"
TOPK = "top-k with feedback"
KEPT = "AdaComp, small layers dense"
SPARSE = (ADACOMP, HARD, TOPK, KEPT)

CONV, FULL = "convolutional", "fully connected"
BIN = {CONV: "codec.conv_bin", FULL: "codec.bin"}
"""By kind of layer, the setting that holds the length of its bins."""

PART = 10
"""The comparison is between the first and the last rounds, this fraction of all rounds each."""
WINDOW = 5
"""Rounds over which curves are averaged."""
JUDGED_BINS = 20
"""Claims leave out layers with fewer bins, which are only in tables. The output layer, 640 weights, has two."""


def study(found: Found) -> Studied:
    """Return train losses and bytes of each layer, and from a run without messages what every bin sent."""
    from fedcomp.tasks import get_task

    config, results, say = found.config, found.results, found.say
    task = get_task(found.experiment.task, **below(config.settings, TASK_PREFIX))
    loss = train_losses(task, results, say)
    say("AdaComp again without messages, to inspect its frames")
    seen = say.cell("bins", lambda: watch(results[ADACOMP]))
    records = layer_records(results, seen)
    kinds = {record.layer: record.kind for record in records}
    # Under the policy of all rows except one.
    left = [t for t in Layout.of(results[DENSE].arrays).tensors if t.is_dense]
    by_layer: dict[str, Any] = {
        "layer": "layer",
        "row": "row",
        "bytes per reply": lambda r: mean(r.bytes),
        "times fewer": lambda r: fewer(r, mean(r.bytes)),
        "first rounds": lambda r: fewer(r, ends(r.bytes)[0]),
        "last rounds": lambda r: fewer(r, ends(r.bytes)[1]),
        "sent per bin, first rounds": lambda r: ends(r.per_bin)[0] if r.per_bin else None,
        "sent per bin, last rounds": lambda r: ends(r.per_bin)[1] if r.per_bin else None,
    }
    return Studied(
        {
            **{(label, "train loss, nats"): each for label, each in loss.items()},
            **{(label, "train loss over that of dense averaging"): each / loss[DENSE] for label, each in loss.items()},
            **quantities(config, records),
            (ADACOMP, "weights of the run without messages that differ from the run with them"): seen["differs"],
        },
        tables=[
            table(
                "Encoded bytes by layer",
                by_layer,
                records,
                f"{', '.join(f'{name} is {kind}' for name, kind in kinds.items())}. Times fewer: four bytes per "
                "element over the bytes of its entry (indices and values) in the frames, for the whole run and for "
                "the first and the last tenth of its rounds. Elements sent per bin: means over the same tenths. "
                f"{sum(t.size for t in left)} elements travel dense, those of the smallest tensors, together at most "
                f"1 % of the model: {', '.join(t.name for t in left)}.",
            ),
        ],
        figures=[
            _over_rounds("AdaComp: elements sent per bin", records, "per_bin"),
            _over_rounds(
                "AdaComp: cosine of residue and update",
                records,
                "cosine",
                "If the update agrees with the residue, the look-ahead lifts more elements above the bin's maximum.",
            ),
        ],
        tasks=[task.record()],
    )


def compressed_layers(result: RunResult) -> tuple[TensorSpec, ...]:
    """Return the tensors that a row compresses. The smallest, such as the first convolution, travel dense."""
    return Layout.of(result.arrays, policy(result.spec.settings)).compressed


def layer_records(results: Mapping[str, RunResult], seen: Mapping[str, Mapping[str, list[float]]]) -> Records:
    """Return a record for each layer of the model and each row that compresses it.

    ``bytes`` are per reply, for each round with replies. ``per_bin`` and ``cosine`` cover every round, and are empty
    for rows whose frames were not inspected.
    """
    found = []
    for layer in compressed_layers(results[DENSE]):
        for label in SPARSE:
            if layer.name not in {own.name for own in compressed_layers(results[label])}:
                continue
            # Per reply: rounds may have fewer replies than clients.
            sent = [
                r.metrics["report.tensor_bytes"][layer.name] / r.replies
                for r in results[label].rounds
                if r.replies and layer.name in r.metrics.get("report.tensor_bytes", {})
            ]
            looked = {name: seen[name][layer.name] if label == ADACOMP else [] for name in ("per_bin", "cosine")}
            # AdaComp treats tensors of three or more dimensions as convolutional.
            named = {"layer": layer.name, "kind": CONV if len(layer.shape) >= 3 else FULL, "size": layer.size}
            found.append(Record({**named, "row": label, "bytes": sent, **looked}))
    return Records(found)


def fewer(record: Record, size: float) -> float:
    """Return how many times fewer than four bytes per element ``size`` bytes are."""
    return 4 * record.size / size


def ends(series: Sequence[float]) -> tuple[float, float]:
    """Return the means over the first and the last tenth of a series; NaN for an empty one."""
    part = max(1, len(series) // PART)
    return mean(series[:part]), mean(series[-part:])


def watched(codec: AdaComp, seen: Seen) -> dict[str, tuple[float, float]]:
    """Return by tensor the elements sent per bin and the cosine of residue and update, means over the clients."""
    layout = seen.updates[0].layout
    counts = [codec.per_bin(answer.frames["values"], layout) for answer in seen.answers]
    pairs = [(seen.memories[node]["memory"], update.vector) for node, update in seen.updates.items()]
    return {
        t.name: (
            mean(count[t.name] for count in counts),
            mean(cosine(memory[t.slice], vector[t.slice]) for memory, vector in pairs),
        )
        for t in layout.compressed
    }


def cosine(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Return the cosine of the angle between two vectors, 0 when one is zero."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else 0.0


def watch(result: RunResult) -> dict[str, Any]:
    """Run AdaComp's row without messages; return the contents of its frames and the difference of its final model."""
    from fedcomp.codecs import AdaComp
    from fedcomp.experiments.central import Plan, simulate
    from fedcomp.systems.pair import Pair

    plan, system = Plan.of(result.spec)
    assert isinstance(system, Pair)
    assert isinstance(system.codec, AdaComp)
    codec, rounds = system.codec, list[dict[str, tuple[float, float]]]()
    # No evaluations, because the row has them.
    outcome = simulate(replace(plan, every=0), system, look=lambda seen: rounds.append(watched(codec, seen)))
    # This proves that the watched run equals the row.
    differs = sum(int(np.count_nonzero(outcome.arrays[name] != array)) for name, array in result.arrays.items())
    names = rounds[0] if rounds else {}
    return {
        "per_bin": {name: [each[name][0] for each in rounds] for name in names},
        # In the first round the residue is empty and the cosine meaningless.
        "cosine": {name: [math.nan, *(each[name][1] for each in rounds[1:])] for name in names},
        "differs": differs,
    }


def _over_rounds(title: str, found: Records, name: str, caption: str = "") -> Curves:
    """Return the running means of the observations in the layers of AdaComp's row."""
    drawn = [
        Series(f"{r.layer} ({r.kind})", *running_mean(range(1, len(r[name]) + 1), r[name], WINDOW))
        for r in found.where(row=ADACOMP)
    ]
    return Curves(title, "round", f"mean of {WINDOW} rounds", drawn, caption=caption)


def judged(config: Config, found: Records, row: str, kind: str) -> Records:
    """Return a row's records of the layers in claims: those with many bins, because only these show a ratio per bin."""
    least = JUDGED_BINS * int(config.settings[BIN[kind]])
    return Records(r for r in found.where(row=row, kind=kind) if r.size >= least)


def ratio(config: Config, found: Records, kind: str) -> float:
    """Return how many times fewer bytes AdaComp sends for a kind of layer: the smallest ratio of all judged layers."""
    # The smallest ratio counts, so one good layer cannot hide the others.
    return min((fewer(r, mean(r.bytes)) for r in judged(config, found, ADACOMP, kind)), default=math.nan)


def quantities(config: Config, found: Records) -> dict[Any, float]:
    """Return the quantities about layers: times fewer bytes, and the change from the first rounds to the last."""
    # The smallest of the first list counts and the largest of the second: no layer may fail to adapt, and none may
    # change without the look-ahead.
    change = [first / last for first, last in (ends(r.per_bin) for r in judged(config, found, ADACOMP, FULL))]
    fixed = [first / last for first, last in (ends(r.bytes) for r in judged(config, found, HARD, FULL))]
    over = "of fully connected layers, first tenth over last"
    return {
        **{(ADACOMP, f"times fewer encoded bytes in {kind} layers"): ratio(config, found, kind) for kind in BIN},
        (ADACOMP, f"elements sent per bin {over}"): min(change, default=math.nan),
        (HARD, f"bytes {over}"): max(fixed, default=math.nan),
    }
