"""The in-process engine against Flower's simulation on Ray, what aggregation costs the server in memory, and what a
client-round costs beside training, with many clients (:mod:`fedcomp.experiments.bench.many`).

Every measurement is a process of its own, started in the same way, so that imports and Ray's start-up and shutdown
count on both sides. Both engines run the same ClientApp (adds one to a float32 model of 1 MB), the same FedAvg and
the same round loop; only the in-process engine meters its traffic, which is in its disfavour.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.errors import FedcompError, why_missing
from fedcomp.experiments.bench import many as of_many
from fedcomp.experiments.findings import Claim
from fedcomp.flower.offline import go_offline

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

ROOT: Final = Path(__file__).parents[2]
ELEMENTS: Final = 1 << 18
"""Elements of the model: 1 MB of float32, in one tensor."""
DENSITY: Final = 0.01
_MB: Final = 1e6


class BenchError(FedcompError, RuntimeError):
    """A measurement has no result: its process ended without one, or left out what was to be measured."""


def run(*, quick: bool = False, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Measure both engines and the server's memory.

    Returns
    -------
    dict
        ``rows``: one per engine and number of clients (seconds of the whole process, of the run without the imports
        both sides share, of the first round, milliseconds of a later round, client rounds per second) and one per
        strategy and number of clients (megabytes), and those of :mod:`fedcomp.experiments.bench.many`.
        ``claims``: the ratios and the growth of memory.
    """
    say = progress or (lambda _line: None)
    short, steady = (4, 8) if quick else (10, 50)
    rounds, repetitions = (3, 1) if quick else (10, 3)
    rows: list[dict[str, Any]] = []
    engines = ["in-process", "ray"]
    if missing := why_missing("ray"):
        say(f"{missing}; what is compared with it is not measured")
        engines.remove("ray")
    for nodes in (short, steady):
        measured: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
        for repetition in range(repetitions):
            # In turns, so that a change of the machine's load meets both.
            for engine, results in measured.items():
                say(f"{engine}, {nodes} clients, {rounds} rounds, {repetition + 1} of {repetitions}")
                results.append(_measure("run", engine=engine, nodes=nodes, rounds=rounds))
        rows += [_engine_row(engine, nodes, rounds, results) for engine, results in measured.items()]
    few, many = (4, 20) if quick else (10, 200)
    for strategy in ("compressed", "fedavg"):
        for nodes in (few, many):
            say(f"memory of {strategy} aggregation, {nodes} clients")
            measurement = _measure("memory", strategy=strategy, nodes=nodes)
            # The duration of the whole process says nothing about memory.
            del measurement["process_s"]
            rows.append({"measure": "memory", **measurement})
    rows += _many(say, quick)
    return {"rows": rows, "claims": _claims(rows, short, steady, few, many, quick)}


def _many(say: Callable[[str], None], quick: bool) -> list[dict[str, Any]]:
    """Return the rows of :mod:`fedcomp.experiments.bench.many`, and the memory of aggregation at its sizes."""
    say("a client-round on digits")
    rows = [{"measure": "client-round", **_measure("digits", clients=2 if quick else 20, rounds=2 if quick else 15)}]
    for case, (clients, sampled, rounds) in (of_many.QUICK if quick else of_many.CASES).items():
        say(f"{case} clients, {rounds} rounds")
        measured = _measure("many", clients=clients, sampled=sampled, rounds=rounds)
        rows.append({"measure": "many clients", "case": case, **measured})
    for memory, files in (("float32", False), ("float16", False), ("float32", True)):
        measured = _measure("state", memory=memory, files=files, clients=2 if quick else 20)
        rows.append(
            {"measure": "client state", "memory": memory, "kept_in": "files" if files else "memory", **measured}
        )
    for nodes in (4, 8) if quick else (100, 1000):
        say(f"memory of compressed aggregation, {nodes} clients, 64 kB")
        measured = _measure("memory", strategy="compressed", nodes=nodes, elements=of_many.ELEMENTS)
        rows.append({"measure": "memory, many", **measured})
    for row in rows:
        # The duration of the whole process says nothing of these.
        del row["process_s"]
    return rows


def _engine_row(engine: str, nodes: int, rounds: int, measured: list[dict[str, Any]]) -> dict[str, Any]:
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


def _claims(rows: list[dict[str, Any]], short: int, steady: int, few: int, many: int, quick: bool) -> list[Claim]:
    engines = {(row["engine"], row["clients"]): row for row in rows if row["measure"] == "engine"}
    memory = {(row["strategy"], row["clients"]): row for row in rows if row["measure"] == "memory"}

    missing = why_missing("ray")

    def ratio(column: str, clients: int) -> float:
        return math.nan if missing else float(engines["ray", clients][column] / engines["in-process", clients][column])

    growth = memory["compressed", many]["aggregation_peak_mb"] / memory["compressed", few]["aggregation_peak_mb"]
    goal = "goal of this project, on the same machine; depends on its load and number of cores"
    of_ray = (
        # On a short run start and shutdown decide, which the in-process engine spares.
        (f"short run, {short} clients: Ray / in process", ratio("run_s", short), 20.0, not quick),
        ("the same with all imports: Ray / in process", ratio("process_s", short), 20.0, False),
        (f"later round, {steady} clients: Ray / in process", ratio("later_round_ms", steady), 3.0, False),
    )
    return [
        *[Claim(name, value, ">=", bound, goal, gate, missing) for name, value, bound, gate in of_ray],
        Claim(
            f"aggregation memory beside the frames: {many} clients / {few} clients",
            growth,
            "<=",
            1.2,
            "one buffer of the model's size whatever the number of clients (derived)",
            gate=not quick,
        ),
        _flat(rows, quick),
        *of_many.claims(rows, quick=quick),
    ]


def _flat(rows: list[dict[str, Any]], quick: bool) -> Claim:
    few, many = (row for row in rows if row["measure"] == "memory, many")
    grown = (many["aggregation_peak_mb"] - few["aggregation_peak_mb"]) / (many["clients"] - few["clients"])
    return Claim(
        f"aggregation memory for one client more / a model of 64 kB, {few['clients']} to {many['clients']} clients",
        grown / many["model_mb"],
        "<=",
        0.05,
        "a reply is noted, and its frame added to the one sum (derived)",
        gate=not quick,
    )


def _measure(what: str, **options: Any) -> dict[str, Any]:
    """Run one measurement in a fresh interpreter and return what it wrote, with the process's whole duration."""
    with tempfile.TemporaryDirectory(prefix="fedcomp-bench-") as scratch:
        target = Path(scratch, "result.json")
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # A Flower home of its own, and no telemetry: neither side may find state of an earlier run, or talk to anybody.
        environment = {**os.environ, "PYTHONPATH": path, "FLWR_HOME": scratch, "RAY_USAGE_STATS_ENABLED": "0"}
        code = f"from fedcomp.experiments.bench.engine import worker; worker({what!r}, {str(target)!r}, **{options!r})"
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        seconds = time.perf_counter() - start
        if done.returncode or not target.exists():
            raise BenchError(
                f"measuring {what} with {options} failed with exit code {done.returncode}: {done.stderr[-1500:]}"
            )
        return {**json.loads(target.read_text()), "process_s": seconds}


def worker(what: str, target: str, **options: Any) -> None:
    """Take one measurement in this process and write it to ``target`` as JSON."""
    go_offline()
    measures: dict[str, Callable[..., dict[str, Any]]] = {
        "run": _run_engine,
        "memory": _aggregation_memory,
        "digits": of_many.digits,
        "many": of_many.rounds_of_many,
        "state": of_many.remembered,
    }
    measurement = measures[what](**options)
    Path(target).write_text(json.dumps(measurement))


def _run_engine(engine: str, nodes: int, rounds: int) -> dict[str, Any]:
    """Run FedAvg for ``rounds`` rounds; return the seconds each took, and the engine's from start to shutdown."""
    app = _adding_app()
    strategy, arrays = _fedavg(nodes), _model()
    seconds: list[float] = []
    start = time.perf_counter()

    def serve(grid: Grid) -> None:
        from fedcomp.flower.rounds import fit

        last = time.perf_counter()

        def note(_round: int, _arrays: ArrayRecord, _outcome: object) -> None:
            nonlocal last
            now = time.perf_counter()
            seconds.append(now - last)
            last = now

        fit(strategy, grid, arrays, rounds, on_round=note)

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

        run_simulation(
            server, app, num_supernodes=nodes, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        )
    # An engine that loses rounds would look fast.
    if len(seconds) != rounds:
        raise BenchError(f"{engine} finished {len(seconds)} of {rounds} rounds")
    return {"rounds": seconds, "run_s": time.perf_counter() - start}


def _aggregation_memory(strategy: str, nodes: int, elements: int = ELEMENTS) -> dict[str, Any]:
    """Return what ``aggregate_train`` allocates at its peak beside the replies it is given.

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

    compressed = strategy == "compressed"
    server = Compressed(_fedavg(nodes), TopK(density=DENSITY)) if compressed else _fedavg(nodes)
    app = _adding_app([compression()] if compressed else [])
    arrays = _model(elements)
    with InProcessGrid(app, nodes) as inner:
        grid = MeteredGrid(inner)
        for server_round in (1, 2):
            replies = grid.send_and_receive(list(server.configure_train(server_round, arrays, ConfigRecord(), grid)))
            if server_round == 2:
                # The first aggregation warmed caches and compiled kernels; this one is measured.
                tracemalloc.start()
            aggregated, _ = server.aggregate_train(server_round, replies)
            if aggregated is None:
                raise BenchError(f"{strategy} aggregated nothing from {nodes} clients")
            arrays = aggregated
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    frames = sum(payload_bytes(reply) for reply in replies)
    return {
        "strategy": strategy,
        "clients": nodes,
        "model_mb": 4 * elements / _MB,
        "replies_mb": frames / _MB,
        "aggregation_peak_mb": peak / _MB,
    }


def _fedavg(nodes: int) -> Any:
    from flwr.serverapp.strategy import FedAvg

    return FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)


def _model(elements: int = ELEMENTS) -> ArrayRecord:
    from flwr.app import Array, ArrayRecord

    from fedcomp.rng import Key

    # Random content: equal chunks would be sent once only.
    return ArrayRecord({"weight": Array(Key(0, "bench-model").uniform(elements).astype(np.float32))})


def _adding_app(mods: list[Any] | None = None) -> ClientApp:
    """Return the client that does next to nothing: adds a constant to the model."""
    from flwr.clientapp import ClientApp

    app = ClientApp(mods=mods or [])
    app.train()(_add)
    return app


def _add(message: Message, context: Context) -> Message:
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

    model = message.content["arrays"]["weight"].numpy()  # type: ignore[union-attr]
    # A difference that a codec has to send: an unchanged model would compress to nothing.
    model += np.float32(0.5)
    content = RecordDict({"arrays": ArrayRecord({"weight": Array(model)})})
    content["metrics"] = MetricRecord({"num-examples": 1})
    return Message(content, reply_to=message)
