"""A fleet on one machine: fifty edge nodes with the processes of a real device, in one training.

Memory is proportional (PSS): a page that fifty nodes share counts in each for a fiftieth, so that the sum is what the
machine holds. Processor time is that of all processes of a node, from ``/proc``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, Final

from fedcomp.experiments.bench.node import DIFFER, Meter, family, proportional_bytes
from fedcomp.experiments.engines import run as run_engine
from fedcomp.experiments.engines.processes import sigterm_raises
from fedcomp.experiments.engines.superlink import TASK_POLL, Deployment
from fedcomp.experiments.findings import different_bytes
from fedcomp.experiments.spec import ROUNDS_FILE, RunResult, RunSpec
from fedcomp.measuring import Bound, Case, Row

FAILED: Final = "messages that failed"

TRAINING: Final = RunSpec(
    "topk", task="digits", engine="superlink", rounds=5, clients=50, settings={"codec.density": 0.05}
)


def cases(quick: bool) -> Iterator[Case]:
    """Yield a training over all nodes."""
    spec = replace(TRAINING, clients=3, rounds=2) if quick else TRAINING
    text = f"{spec.clients} nodes, {spec.rounds} rounds of {spec.system} on {spec.task}, and the same in one process"
    yield Case(text, partial(_fleet, spec), bounds(spec))


def bounds(spec: RunSpec) -> list[Bound]:
    """Return what is claimed of the one row."""
    lost, asked = "updates that did not arrive, of all that were asked for", spec.clients * spec.rounds
    return [
        Bound(lost, lambda found: asked - found.of("replies"), "== 0", "chosen", sure=True),
        Bound(FAILED, (FAILED, {}), "== 0", "chosen: nobody is killed", sure=True),
        Bound(DIFFER, (DIFFER, {}), "== 0", "theory: the same code", sure=True),
    ]


def _fleet(spec: RunSpec, _: Any) -> list[Row]:
    began = time.perf_counter()
    # Flower's own pause between two looks for a message; and each loads its libraries, which share the processors.
    with (
        sigterm_raises(),
        Deployment(spec.clients, preload=("torch",), settings={TASK_POLL: "1"}, limit=600.0) as fleet,
    ):
        started = time.perf_counter() - began
        out, nodes = fleet.home("out"), [[child.pid] for child in fleet.children[1:]]
        meter = Meter(nodes, out / ROUNDS_FILE)
        fleet.run_app({**spec.to_run_config(), "out": str(out)}, limit=600 + 120 * spec.rounds, watch=meter)
        meter()
        trained = RunResult.load(out)
        held = [sum(map(proportional_bytes, family(node))) for node in nodes]
    here = run_engine(replace(spec, engine="inprocess"))
    # Between the first line, the evaluation of the first model, and the last.
    spent = [(last - first) / spec.rounds for first, last in zip(meter.marks[1], meter.marks[-1], strict=True)]
    return [row_of(started, spent, held, trained, different_bytes(trained.arrays, here.arrays))]


def row_of(started: float, spent: Sequence[float], held: Sequence[int], trained: RunResult, differ: int) -> Row:
    """Return the row of what was measured.

    Parameters
    ----------
    started : float
        Seconds until every node ran.
    spent, held : sequence of float and of int
        Processor seconds a round, and bytes of memory after the last, by node.
    differ : int
        Bytes of the model that differ from the training in one process.
    """
    rounds, nodes = [found for found in trained.rounds if found.round], len(spent)
    return {
        "nodes": nodes,
        "rounds": len(rounds),
        "replies": sum(found.replies for found in rounds),
        "start, s": round(started, 1),
        "first round, s": round(rounds[0].wall_seconds, 1),
        "a later round, s": round(median(found.wall_seconds for found in rounds[1:]), 1),
        "CPU s a node and round": round(median(spent), 2),
        "memory of a node, MB (PSS)": round(median(held) / 1e6, 1),
        "of all, GB": round(sum(held) / 1e9, 2),
        "KB up a node and round": round(sum(f.uplink_wire_bytes for f in rounds) / 1e3 / nodes / len(rounds), 1),
        FAILED: sum(found.failures for found in rounds),
        DIFFER: differ,
    }
