"""The server's fixed cost of a round: the step from the mean, the checkpoint, new arrays.

Each row has two ways of the same thing, one after the other in one process, and their ratio; system calls included.
*Step*: Flower's FedAvg takes the mean as it is, against a FedAvg that has to be run on it as on a reply. *Checkpoint*:
what has changed is written, against all of it, in a run of the in-process engine on digits, with top-k and error
feedback; and what part of the round it is. *Arrays*: passes over new arrays in a process that keeps freed memory,
against one that does not (:mod:`fedcomp.heap`), a process each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.serverapp.strategy import FedAvg

from fedcomp import heap
from fedcomp.codecs import TopK
from fedcomp.experiments import engines
from fedcomp.experiments.bench.readpass import layered
from fedcomp.experiments.bench.server import aggregated, frames_of
from fedcomp.experiments.spec import RunSpec
from fedcomp.flower import checkpoint
from fedcomp.flower._private import acting_as
from fedcomp.flower.logs import quiet
from fedcomp.layout import Layout, Update
from fedcomp.measuring import Bound, Case, Row

STEPS: Final = ((1_000_000, 10), (1_000_000, 1000), (25_000_000, 10))
"""Parameters and clients."""

RUNS: Final = ((10, 10, 40), (1000, 100, 12), (1000, 1000, 4))
"""Clients, how many of them train in a round, and rounds."""

_ARRAYS: Final = """
import json, sys, time
import numpy as np
from fedcomp.heap import keep_freed_memory
keep, size = sys.argv[1] == "True", int(sys.argv[2])
assert not keep or keep_freed_memory()
first, second, seconds = np.ones(size, np.float32), np.ones(size, np.float32), []
for _ in range(12):
    start = time.process_time()
    copy = np.frombuffer((first + second).tobytes(), np.float32) * np.float32(2)
    del copy
    seconds.append(time.process_time() - start)
# Not getrusage(): what it says of a child process begins with its parent's.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([sorted(seconds)[6], 1024 * int(peak.split()[1])]))
"""


class Run(FedAvg):
    """A FedAvg that has to be run on a mean, since a method of its aggregation is its own."""

    def _check_and_log_replies(self, *args: Any, **options: Any) -> Any:
        return super()._check_and_log_replies(*args, **options)


def cases(quick: bool) -> Iterator[Case]:
    """Yield all three."""
    for size, clients in ((20_000, 3),) if quick else STEPS:
        yield _cheaper(
            f"step, {size} parameters, {clients} clients", "step", size, clients, partial(step, size, clients)
        )
    runs = ((4, 4, 3), (12, 3, 4)) if quick else RUNS
    for clients, sampled, rounds in runs:
        text = f"checkpoint, {sampled} of {clients} clients"
        yield Case(text, lambda found, how=(clients, sampled, rounds): [saved(*how)])  # type: ignore[misc]
    if heap.is_glibc():
        for size in (100_000,) if quick else (1_000_000, 25_000_000):
            yield _cheaper(f"arrays of {size}", "arrays", size, 1, partial(arrays, size, 1 if quick else 3))
    part, column = "checkpoint: part of a round, %, at most", "% of a round"
    yield Case(
        bounds=[Bound(part, lambda found: max(row.get(column, 0.0) for row in found.rows), "<= 5", "goal", gate=False)]
    )


def _cheaper(text: str, what: str, size: int, clients: int, measure: Any) -> Case:
    head = {"what": what, "parameters": size, "clients": clients}
    name = f"{what}, {size} parameters, {clients} clients: cost without it"
    source = "nothing is done that was not done before"
    bound = Bound(name, ("ratio", head), ">= 1", source, gate=False)
    return Case(text, lambda found: [{**head, **measure()}], [bound])


def step(size: int, clients: int, repetitions: int = 5) -> Row:
    """Return what ``aggregate_train`` costs with FedAvg, and with one that is run on the mean."""
    updates = [Update(1e-3 * layered(size, seed), Layout.flat(size)) for seed in range(min(clients, 4))]
    frames = frames_of(TopK(0.01), updates, clients)
    kinds: tuple[type[FedAvg], ...] = (FedAvg, Run)
    with quiet(), acting_as(1, 0):
        turns = [[aggregated(TopK(0.01), frames, updates, clients, kind) for kind in kinds] for _ in range(repetitions)]
        peaks = [aggregated(TopK(0.01), frames, updates, clients, kind, memory=True) / (4 * size) for kind in kinds]
    new, old = np.median(turns, axis=0).tolist()
    return {
        "ms": 1e3 * new,
        "run on it, ms": 1e3 * old,
        "ratio": old / new,
        "peak in models": peaks[0],
        "run on it, peak": peaks[1],
    }


def saved(clients: int, sampled: int, rounds: int) -> Row:
    """Return what a checkpoint costs in a run on digits: of what has changed, and of everything, after each round."""
    settings = {"feedback": True, "codec.density": 0.01, "evaluate_every": rounds, "fraction": sampled / clients}
    spec = RunSpec("topk", rounds=rounds, clients=clients, settings=settings)
    save, marks = checkpoint.CheckpointFile.save, [[time.process_time()]]

    with tempfile.TemporaryDirectory() as scratch, quiet():
        path = Path(scratch, "everything")

        def timed(file: checkpoint.CheckpointFile, **state: Any) -> None:
            marks[-1].append(time.process_time())
            save(file, **state)
            marks[-1].append(time.process_time())
            checkpoint.save(path, **state)
            marks[-1].append(time.process_time())
            marks.append([time.process_time()])

        # The run makes its own checkpoints; here each is measured where it is made.
        checkpoint.CheckpointFile.save = timed  # type: ignore[method-assign, assignment]
        try:
            engines.run(spec, checkpoint=Path(scratch, "changed"))
        finally:
            checkpoint.CheckpointFile.save = save  # type: ignore[method-assign]
        held = path.stat().st_size
    # All but the first, which writes everything; now and then a later one does, too, as part of what it costs.
    each, new, everything = np.diff(marks[1:-1], axis=1).mean(axis=0).tolist()
    return {
        "what": "checkpoint",
        "clients": clients,
        "of them in a round": sampled,
        "MB": held / 1e6,
        "round, ms": 1e3 * each,
        "ms": 1e3 * new,
        "of everything, ms": 1e3 * everything,
        "ratio": everything / new,
        "% of a round": 100 * new / each,
        "of everything, %": 100 * everything / each,
    }


def arrays(size: int, repetitions: int) -> Row:
    """Return what a few passes over new arrays cost in a process that keeps freed memory, and in one that does not."""
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    clean = {name: value for name, value in os.environ.items() if name not in heap.ENVIRONMENT}
    for _ in range(repetitions):
        for keep, measured in found.items():
            command = [sys.executable, "-c", _ARRAYS, str(keep), str(size)]
            out = subprocess.run(command, env=clean, capture_output=True, text=True, check=True)
            measured.append(tuple(json.loads(out.stdout)))
    (new, peak), (old, before) = (np.median(found[keep], axis=0).tolist() for keep in (True, False))
    return {
        "ms": 1e3 * new,
        "given back, ms": 1e3 * old,
        "ratio": old / new,
        "most memory, MB": peak / 1e6,
        "given back, MB": before / 1e6,
    }
