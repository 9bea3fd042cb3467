"""A fleet on one machine: fifty of this project's nodes, each what a device would run, and one training over all.

Memory is proportional (PSS): a page that fifty nodes share counts in each for a fiftieth, so that the sum is what the
machine holds. Processor time is that of all processes of a node, from ``/proc``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final

from fedcomp.experiments.bench.node import cpu_seconds, family, proportional_bytes
from fedcomp.experiments.engines import run as run_engine
from fedcomp.experiments.engines.processes import sigterm_raises
from fedcomp.experiments.engines.superlink import TASK_POLL, Deployment
from fedcomp.experiments.findings import Claim, different_bytes
from fedcomp.experiments.spec import ROUNDS_FILE, RunResult, RunSpec

TRAINING: Final = RunSpec(
    "topk", task="digits", engine="superlink", rounds=5, clients=50, settings={"codec.density": 0.05}
)


class Fleet(Deployment):
    """A deployment of this project's nodes."""

    # Each loads its libraries, and all of them share the processors.
    START_LIMIT = 600.0

    def node_command(self, arguments: list[str]) -> list[str]:
        """Return the command line of a node with these arguments."""
        return [sys.executable, "-m", "fedcomp.clients.edge", *arguments, "--preload", "torch"]

    def env(self, name: str) -> dict[str, str]:
        """Return the environment of a process, with Flower's own pause between two looks for a message."""
        return {**super().env(name), TASK_POLL: "1"}

    def leaders(self) -> list[list[int]]:
        """Return the process of each node that all others of it were started by."""
        return [[child.pid] for child in self.children[1:]]


def run(*, quick: bool = False, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Train over all nodes; return rows and claims."""
    say = progress or (lambda text: None)
    spec = replace(TRAINING, clients=3, rounds=2) if quick else TRAINING
    say(f"{spec.clients} nodes start")
    began = time.perf_counter()
    with sigterm_raises(), Fleet(spec.clients) as fleet:
        started = time.perf_counter() - began
        out = fleet.home("out")
        marks: list[list[float]] = []

        def watch() -> None:
            file = out / ROUNDS_FILE
            lines = len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0
            if lines > len(marks):
                marks.append([cpu_seconds(node) for node in fleet.leaders()])

        say(f"{spec.rounds} rounds of {spec.system} on {spec.task}")
        fleet.run_app({**spec.to_run_config(), "out": str(out)}, limit=600 + 120 * spec.rounds, watch=watch)
        watch()
        trained = RunResult.load(out)
        say("what they hold")
        held = [sum(map(proportional_bytes, family(node))) for node in fleet.leaders()]
    say("the same training in one process")
    here = run_engine(replace(spec, engine="inprocess"))
    # Between the first line, the evaluation of the first model, and the last.
    spent = [(last - first) / spec.rounds for first, last in zip(marks[0], marks[-1], strict=True)]
    return findings(spec, started, spent, held, trained, different_bytes(trained.arrays, here.arrays))


def findings(
    spec: RunSpec, started: float, spent: Sequence[float], held: Sequence[int], trained: RunResult, differ: int
) -> dict[str, Any]:
    """Return rows and claims of what was measured.

    Parameters
    ----------
    started : float
        Seconds until every node ran.
    spent, held : sequence of float and of int
        Processor seconds a round, and bytes of memory after the last, by node.
    differ : int
        Bytes of the model that differ from the training in one process.
    """
    rounds = [found for found in trained.rounds if found.round]
    nodes = spec.clients
    rows = [
        {
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
        }
    ]
    asked = nodes * spec.rounds
    claims = [
        Claim("updates that did not arrive, of all that were asked for", asked - rows[0]["replies"], "==", 0, "chosen"),
        Claim("messages that failed", sum(found.failures for found in rounds), "==", 0, "chosen: nobody is killed"),
        Claim("bytes of the model that differ from the run in one process", differ, "==", 0, "theory: the same code"),
    ]
    return {"rows": rows, "claims": claims}
