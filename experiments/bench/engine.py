"""The in-process engine against Flower's simulation on Ray, what aggregation costs the server in memory, and what a
client-round costs beside training, with many clients (:mod:`fedcomp.experiments.bench.many`).

Every measurement is a process of its own, started in the same way, so that imports and Ray's start-up and shutdown
count on both sides. Both engines run the same ClientApp (next to no work on a float32 model of 1 MB), the same FedAvg
and the same round loop; only the in-process engine meters its traffic, which is in its disfavour.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.errors import why_missing
from fedcomp.experiments.bench import many
from fedcomp.experiments.bench.readpass import BenchError
from fedcomp.flower.offline import go_offline
from fedcomp.measuring import Bound, Case, Found, Row, traced

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid

ROOT: Final = Path(__file__).parents[2]
ELEMENTS: Final = 1 << 18
"""Elements of the model: 1 MB of float32, in one tensor."""
PEAK: Final = "aggregation_peak_mb"
GOAL: Final = "goal of this project, on the same machine; depends on its load and number of cores"


def cases(quick: bool) -> Iterator[Case]:
    """Yield both engines, the server's memory, and the cases of :mod:`fedcomp.experiments.bench.many`."""
    short, steady = (4, 8) if quick else (10, 50)
    missing = why_missing("ray")
    if missing:
        yield Case(f"{missing}; what is compared with it is not measured")
    for nodes in (short, steady):
        yield _engines(nodes, 3 if quick else 10, 1 if quick else 3, ray=not missing)
    yield Case(
        bounds=[
            # On a short run start and shutdown decide, which the in-process engine spares.
            _of_ray(f"short run, {short} clients", "run_s", short, ">= 20", missing),
            _of_ray("the same with all imports", "process_s", short, ">= 20", missing, gate=False),
            _of_ray(f"later round, {steady} clients", "later_round_ms", steady, ">= 3", missing, gate=False),
        ]
    )
    few, more = (4, 20) if quick else (10, 200)
    for nodes in (few, more):
        yield _alone(f"memory of aggregation, {nodes} clients", "memory", {}, aggregation_memory, nodes=nodes)
    grown = partial(_grown, "memory", few, more)
    text, derived = (
        "aggregation memory beside the frames",
        "one buffer of the model's size whatever the number (derived)",
    )
    yield Case(bounds=[Bound(f"{text}: {more} clients / {few} clients", lambda f: grown(f)[0], "<= 1.2", derived)])
    for what, columns, measure, options in many.measures(quick):
        yield _alone(f"{what}, {options}", what, columns, measure, **options)
    few, more = (4, 8) if quick else (100, 1000)
    for nodes in (few, more):
        text, how = f"memory of aggregation, {nodes} clients, 64 kB", {"nodes": nodes, "elements": many.ELEMENTS}
        yield _alone(text, "memory, many", {}, aggregation_memory, **how)
    each = partial(_grown, "memory, many", few, more)
    text = f"aggregation memory for one client more / a model of 64 kB, {few} to {more} clients"
    derived = "a reply is noted, and its frame added to the one sum (derived)"
    yield Case(bounds=[Bound(text, lambda f: each(f)[1], "<= 0.05", derived), *many.bounds()])


def _of_ray(text: str, column: str, clients: int, bound: str, missing: str, *, gate: bool = True) -> Bound:
    of, to = ({"engine": engine, "clients": clients} for engine in ("ray", "in-process"))
    name = f"{text}: Ray / in process"
    return Bound(name, (column, of, to), bound, GOAL, gate, skipped=missing)


def _grown(measure: str, few: int, more: int, found: Found) -> tuple[float, float]:
    """Return how memory grew: over that of few clients, and for one client more, in models."""
    of, to = ({"measure": measure, "clients": clients} for clients in (more, few))
    peaks = [found.of(PEAK, **at) for at in (of, to)]
    return peaks[0] / peaks[1], (peaks[0] - peaks[1]) / (more - few) / found.of("model_mb", **of)


def _alone(text: str, what: str, columns: Row, measure: Callable[..., dict[str, Any]], **options: Any) -> Case:
    """Return the case of one measurement in a process of its own, whose duration says nothing of it."""

    def rows(found: Found) -> list[Row]:
        taken = in_a_process(measure, **options)
        del taken["process_s"]
        return [{"measure": what, **columns, **taken}]

    return Case(text, rows)


def _engines(nodes: int, rounds: int, repetitions: int, *, ray: bool) -> Case:
    names = ("in-process", "ray") if ray else ("in-process",)

    def rows(found: Found) -> list[Row]:
        # In turns, so that a change of the machine's load meets both.
        taken = [
            [in_a_process(run_engine, engine=e, nodes=nodes, rounds=rounds) for e in names] for _ in range(repetitions)
        ]
        return [_engine_row(engine, nodes, rounds, [turn[i] for turn in taken]) for i, engine in enumerate(names)]

    return Case(f"{' and '.join(names)}, {nodes} clients, {rounds} rounds, {repetitions} times", rows)


def _engine_row(engine: str, nodes: int, rounds: int, measured: list[dict[str, Any]]) -> Row:
    # The best of the repetitions: what other processes take away is not the engine's.
    later = min(median(m["rounds"][1:]) for m in measured)
    return {
        "measure": "engine",
        "engine": engine,
        "clients": nodes,
        "rounds": rounds,
        "process_s": min(m["process_s"] for m in measured),
        "run_s": min(m["run_s"] for m in measured),
        "first_round_s": min(m["rounds"][0] for m in measured),
        "later_round_ms": 1e3 * later,
        "client_rounds_per_s": nodes / later,
    }


def in_a_process(measure: Callable[..., dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Call a function of a module in a fresh interpreter; return its result and the process's whole duration."""
    with tempfile.TemporaryDirectory(prefix="fedcomp-bench-") as scratch:
        target = Path(scratch, "result.json")
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # A Flower home of its own, and no telemetry: neither side may find state of an earlier run, or talk to anybody.
        environment = {**os.environ, "PYTHONPATH": path, "FLWR_HOME": scratch, "RAY_USAGE_STATS_ENABLED": "0"}
        where = f"{measure.__module__!r}, {measure.__name__!r}, {str(target)!r}"
        code = f"from fedcomp.experiments.bench.engine import worker; worker({where}, **{options!r})"
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        seconds = time.perf_counter() - start
        if done.returncode or not target.exists():
            failed = f"measuring {measure.__name__} with {options} failed with exit code {done.returncode}"
            raise BenchError(f"{failed}: {done.stderr[-1500:]}")
        return {**json.loads(target.read_text()), "process_s": seconds}


def worker(module: str, name: str, target: str, **options: Any) -> None:
    """Take one measurement in this process and write it to ``target`` as JSON."""
    go_offline()
    measured = getattr(sys.modules.get(module) or __import__(module, fromlist=[name]), name)(**options)
    Path(target).write_text(json.dumps(measured))


def run_engine(engine: str, nodes: int, rounds: int) -> dict[str, Any]:
    """Run FedAvg for ``rounds`` rounds; return the seconds each took, and the engine's from start to shutdown."""
    app, strategy, arrays = many.app([]), _fedavg(nodes), many.model(ELEMENTS)
    marks: list[float] = []
    start = time.perf_counter()

    def serve(grid: Grid) -> None:
        from fedcomp.flower.rounds import fit

        marks.append(time.perf_counter())
        fit(strategy, grid, arrays, rounds, on_round=lambda *_: marks.append(time.perf_counter()))

    if engine == "in-process":
        from fedcomp.flower.grid import InProcessGrid
        from fedcomp.flower.metered import MeteredGrid

        with InProcessGrid(app, nodes) as inner:
            serve(MeteredGrid(inner))
    else:
        from flwr.serverapp import ServerApp
        from flwr.simulation import run_simulation

        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            serve(grid)

        resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server, app, num_supernodes=nodes, backend_config=resources)
    # An engine that loses rounds would look fast.
    if len(marks) != rounds + 1:
        raise BenchError(f"{engine} finished {len(marks) - 1} of {rounds} rounds")
    return {"rounds": np.diff(marks).tolist(), "run_s": time.perf_counter() - start}


def aggregation_memory(nodes: int, elements: int = ELEMENTS) -> dict[str, Any]:
    """Return what top-k's ``aggregate_train`` allocates at its peak beside the replies it is given.

    The replies of a second round are made by real clients beforehand; only allocations during aggregation are traced,
    so that neither the simulated clients nor the replies count.
    """
    from flwr.app import ConfigRecord

    from fedcomp.clients.compressed import compression
    from fedcomp.codecs import TopK
    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.metered import MeteredGrid
    from fedcomp.flower.payload import payload_bytes
    from fedcomp.strategies.compressed import Compressed

    server, arrays = Compressed(_fedavg(nodes), TopK(density=0.01)), many.model(elements)
    with InProcessGrid(many.app([compression()]), nodes) as inner:
        grid = MeteredGrid(inner)
        for server_round in (1, 2):
            replies = grid.send_and_receive(list(server.configure_train(server_round, arrays, ConfigRecord(), grid)))
            # The first aggregation warms caches and compiles kernels; the second is measured.
            done = traced(partial(server.aggregate_train, server_round, replies))
            if done.result[0] is None:
                raise BenchError(f"nothing was aggregated from {nodes} clients")
            arrays = done.result[0]
    frames = sum(payload_bytes(reply) for reply in replies)
    sizes = {"model_mb": 4 * elements / 1e6, "replies_mb": frames / 1e6, PEAK: done.peak / 1e6}
    return {"clients": nodes, **sizes}


def _fedavg(nodes: int) -> Any:
    from flwr.serverapp.strategy import FedAvg

    return FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
