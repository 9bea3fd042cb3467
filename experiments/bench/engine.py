"""The in-process engine against Flower's simulation on Ray: time and memory per client-round, and memory of
aggregation.

Every measurement is a process of its own, started in the same way, so that imports and Ray's start-up and shutdown
count on both sides. Both engines run the same ClientApp (next to no work on a float32 model of 1 MB), the same FedAvg
and the same round loop; only the in-process engine meters its traffic, which is in its disfavour.

With many clients the client next to does nothing, so that what is measured is the engine: top-k with error feedback on
a model of 64 kB, drawn cohorts, metered messages; processor time of one thread.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
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
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedcomp.clients.compressed import compression
from fedcomp.codecs import ErrorFeedback, TopK
from fedcomp.errors import why_missing
from fedcomp.experiments.bench.readpass import BenchError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.logs import quiet
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.offline import OFFLINE_ENVIRONMENT
from fedcomp.flower.payload import payload_bytes, put_node
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.flower.rounds import fit
from fedcomp.measuring import Bound, Case, Found, Row, traced
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed

if TYPE_CHECKING:
    from flwr.serverapp import Grid

ROOT: Final = Path(__file__).parents[2]
LARGE: Final = 1 << 18
SMALL: Final = 1 << 14
"""Elements of the models, each one tensor of float32: 1 MB, and 64 kB with many clients."""
DENSITY: Final = 0.01

FEW: Final = "100 of 100"
COHORTS: Final = {FEW: (100, 100, 12), "1,000 of 1,000": (1000, 1000, 3), "100 of 10,000": (10000, 100, 12)}
QUICK: Final = {FEW: (4, 4, 2), "1,000 of 1,000": (8, 8, 2), "100 of 10,000": (12, 4, 2)}
"""Clients, how many of them train in a round, and rounds that are measured."""

GOAL: Final = "goal of this project, on the same machine; depends on its load and number of cores"


def cases(quick: bool) -> Iterator[Case]:
    """Yield both engines, the server's memory, and what a client-round and a client's state cost."""
    short, steady = (4, 8) if quick else (10, 50)
    missing = why_missing("ray")
    if missing:
        yield Case(f"{missing}; what is compared with it is not measured")
    for nodes in (short, steady):
        yield _engines(nodes, 3 if quick else 10, 1 if quick else 3, ray=not missing)

    def of_ray(text: str, column: str, clients: int, bound: str, *, gate: bool = True) -> Bound:
        of, to = ({"engine": engine, "clients": clients} for engine in ("ray", "in-process"))
        return Bound(f"{text}: Ray / in process", (column, of, to), bound, GOAL, gate, skipped=missing)

    yield Case(
        bounds=[
            # On a short run start and shutdown decide, which the in-process engine spares.
            of_ray(f"short run, {short} clients", "run_s", short, ">= 20"),
            of_ray("the same with all imports", "process_s", short, ">= 20", gate=False),
            of_ray(f"later round, {steady} clients", "later_round_ms", steady, ">= 3", gate=False),
        ]
    )
    few, more = (4, 20) if quick else (10, 200)
    for nodes in (few, more):
        yield _alone(f"memory of aggregation, {nodes} clients", "memory", {}, aggregation_memory, nodes=nodes)
    grown = partial(_grown, "memory", few, more)
    text = f"aggregation memory beside the frames: {more} clients / {few} clients"
    derived = "one buffer of the model's size whatever the number (derived)"
    yield Case(bounds=[Bound(text, lambda f: grown(f)[0], "<= 1.2", derived)])
    how: dict[str, Any] = {"clients": 2 if quick else 20, "rounds": 2 if quick else 15}
    yield _alone(f"client-round, {how}", "client-round", {}, digits, **how)
    for case, (clients, sampled, rounds) in (QUICK if quick else COHORTS).items():
        how = {"clients": clients, "sampled": sampled, "rounds": rounds}
        yield _alone(f"many clients, {how}", "many clients", {"case": case}, rounds_of_many, **how)
    for memory, files in (("float32", False), ("float16", False), ("float32", True)):
        columns = {"memory": memory, "kept_in": "files" if files else "memory"}
        how = {"memory": memory, "files": files, "clients": 2 if quick else 20}
        yield _alone(f"client state, {how}", "client state", columns, remembered, **how)
    few, more = (4, 8) if quick else (100, 1000)
    for nodes in (few, more):
        text = f"memory of aggregation, {nodes} clients, 64 kB"
        yield _alone(text, "memory, many", {}, aggregation_memory, nodes=nodes, elements=SMALL)
    each = partial(_grown, "memory, many", few, more)
    text = f"aggregation memory for one client more / a model of 64 kB, {few} to {more} clients"
    derived = "a reply is noted, and its frame added to the one sum (derived)"
    yield Case(bounds=[Bound(text, lambda f: each(f)[1], "<= 0.05", derived), *bounds()])


def bounds() -> list[Bound]:
    """Return what is claimed of client-rounds and of what clients remember."""
    half, files = {"memory": "float16", "kept_in": "memory"}, {"memory": "float32", "kept_in": "files"}
    flat = "one client after the other, whoever else there is (derived)"
    before = "goal, in one run; 4.4 when models, codecs and records were made anew for each message (measured)"
    over = "digits: overhead of a client-round"
    state, halved = "client state, memory as float16 / as float32", "half of the memory, and the last reply (derived)"
    held = "client state in files: of it in memory, kB"
    return [
        Bound(f"{over}, ms", ("overhead_ms", {}), "<= 4", "goal", gate=False),
        Bound(f"{over} / its training", lambda f: f.of("overhead_ms") / f.of("training_ms"), "<= 3", before),
        *(
            Bound(f"client-round, {c} clients / {FEW}", ("client_round_ms", {"case": c}, {"case": FEW}), "<= 1.3", flat)
            for c in COHORTS
            if c != FEW
        ),
        Bound(state, ("state_kb", half, {**half, "memory": "float32"}), "<= 0.6", halved, sure=True),
        Bound(held, ("of_it_in_memory_kb", files), "<= 0", "by construction", sure=True),
    ]


def _grown(measure: str, few: int, more: int, found: Found) -> tuple[float, float]:
    """Return how memory grew: over that of few clients, and for one client more, in models."""
    of, to = ({"measure": measure, "clients": clients} for clients in (more, few))
    peaks = [found.of("aggregation_peak_mb", **at) for at in (of, to)]
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

    def row(engine: str, measured: list[dict[str, Any]]) -> Row:
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

    def rows(found: Found) -> list[Row]:
        # In turns, so that a change of the machine's load meets both.
        taken = [
            [in_a_process(run_engine, engine=e, nodes=nodes, rounds=rounds) for e in names] for _ in range(repetitions)
        ]
        return [row(engine, list(each)) for engine, each in zip(names, zip(*taken, strict=True), strict=True)]

    return Case(f"{' and '.join(names)}, {nodes} clients, {rounds} rounds, {repetitions} times", rows)


def in_a_process(measure: Callable[..., dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Call a function of this module in a fresh interpreter; return its result and the process's whole duration."""
    with tempfile.TemporaryDirectory(prefix="fedcomp-bench-") as scratch:
        target = Path(scratch, "result.json")
        # A Flower home of its own, and no telemetry: neither side may find state of an earlier run, or talk to anybody.
        environment = {**os.environ, **OFFLINE_ENVIRONMENT, "FLWR_HOME": scratch, "RAY_USAGE_STATS_ENABLED": "0"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        code = (
            f"import json, pathlib; from {__name__} import {measure.__name__} as measure\n"
            f"pathlib.Path({str(target)!r}).write_text(json.dumps(measure(**{options!r})))"
        )
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        seconds = time.perf_counter() - start
        if done.returncode or not target.exists():
            failed = f"measuring {measure.__name__} with {options} failed with exit code {done.returncode}"
            raise BenchError(f"{failed}: {done.stderr[-1500:]}")
        return {**json.loads(target.read_text()), "process_s": seconds}


# What is measured, each in a process of its own.


def run_engine(engine: str, nodes: int, rounds: int) -> dict[str, Any]:
    """Run FedAvg for ``rounds`` rounds; return the seconds each took, and the engine's from start to shutdown."""
    client, strategy, arrays = app(), _fedavg(nodes), model(LARGE)
    marks: list[float] = []
    start = time.perf_counter()

    def serve(grid: Grid) -> None:
        marks.append(time.perf_counter())
        fit(strategy, grid, arrays, rounds, on_round=lambda *_: marks.append(time.perf_counter()))

    if engine == "in-process":
        with InProcessGrid(client, nodes) as inner:
            serve(MeteredGrid(inner))
    else:
        from flwr.serverapp import ServerApp
        from flwr.simulation import run_simulation

        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            serve(grid)

        resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server, client, num_supernodes=nodes, backend_config=resources)
    # An engine that loses rounds would look fast.
    if len(marks) != rounds + 1:
        raise BenchError(f"{engine} finished {len(marks) - 1} of {rounds} rounds")
    return {"rounds": np.diff(marks).tolist(), "run_s": time.perf_counter() - start}


def aggregation_memory(nodes: int, elements: int = LARGE) -> dict[str, Any]:
    """Return what top-k's ``aggregate_train`` allocates at its peak beside the replies it is given.

    The replies of a second round are made by real clients beforehand; only allocations during aggregation are traced,
    so that neither the simulated clients nor the replies count.
    """
    server, arrays = Compressed(_fedavg(nodes), TopK(density=DENSITY)), model(elements)
    with InProcessGrid(app(compression()), nodes) as inner:
        grid = MeteredGrid(inner)
        for server_round in (1, 2):
            replies = grid.send_and_receive(list(server.configure_train(server_round, arrays, ConfigRecord(), grid)))
            # The first aggregation warms caches and compiles kernels; the second is measured.
            done = traced(partial(server.aggregate_train, server_round, replies))
            if done.result[0] is None:
                raise BenchError(f"nothing was aggregated from {nodes} clients")
            arrays = done.result[0]
    frames = sum(payload_bytes(reply) for reply in replies)
    sizes = {"model_mb": 4 * elements / 1e6, "replies_mb": frames / 1e6, "aggregation_peak_mb": done.peak / 1e6}
    return {"clients": nodes, **sizes}


def digits(clients: int, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a client-round on digits: in the engine, of it in training, and in the bare loop.

    Training is timed where it happens, within the engine: alone it would find its data in the processor's caches.
    """
    from fedcomp.experiments import engines
    from fedcomp.experiments.central import Plan, simulate
    from fedcomp.experiments.spec import RunSpec
    from fedcomp.tasks import get_task

    settings = {"feedback": True, "codec.density": DENSITY, "evaluate_every": rounds}
    spec = RunSpec("topk", rounds=rounds, clients=clients, settings=settings)
    task, training = get_task("digits"), 0.0
    train = task.train

    def timed(*arguments: Any, **options: Any) -> dict[str, float]:
        nonlocal training
        start = time.process_time()
        try:
            return train(*arguments, **options)
        finally:
            training += time.process_time() - start

    found: list[tuple[float, float, float]] = []
    with quiet():
        for _ in range(4):
            training, start = 0.0, time.process_time()
            # The client app asks for the task by its name, and is given this very one.
            task.train = timed  # type: ignore[method-assign]
            try:
                engines.run(spec)
            finally:
                del task.train
            whole = time.process_time() - start
            start = time.process_time()
            simulate(*Plan.of(spec))
            found.append((whole - training, training, time.process_time() - start))
    # The first builds tables and warms caches.
    overhead, inside, bare = (1e3 * value / (clients * rounds) for value in min(found[1:]))
    if not inside:
        raise RuntimeError("the run did not train on the task that is timed")
    taken = {"engine_ms": overhead + inside, "training_ms": inside, "overhead_ms": overhead, "bare_loop_ms": bare}
    return {"clients": clients, "rounds": rounds, **taken}


def rounds_of_many(clients: int, sampled: int, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a client-round once a run is under way, of the roll call, and the process's peak."""
    from fedcomp.experiments.federation import Cohorts

    seconds: list[float] = []
    with InProcessGrid(app(compression()), clients) as inner, quiet():
        query = ConfigRecord({"x": 1})
        grid = Cohorts(MeteredGrid(inner), clients=clients, seed=0, train=sampled / clients, evaluate=0.0, query=query)
        began = time.process_time()
        grid.prepare()
        called = time.process_time() - began
        # One round more, whose end is the start of the measurement.
        marked: Any = lambda *_: seconds.append(time.process_time())  # noqa: E731
        fit(_with_memory("float32"), grid, model(SMALL), rounds + 1, on_round=marked)
    each = median(b - a for a, b in itertools.pairwise(seconds)) / sampled
    return {
        "client_round_ms": 1e3 * each,
        "roll_call_ms": 1e3 * called / clients,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


def remembered(memory: str, files: bool, clients: int) -> dict[str, Any]:
    """Return what a client's state takes, as a whole and of this process's memory."""
    with tempfile.TemporaryDirectory() as scratch:
        states = Path(scratch) if files else None
        with InProcessGrid(app(compression()), clients, states=states) as inner, quiet():
            fit(_with_memory(memory), MeteredGrid(inner), model(SMALL), 2)
            nodes = [inner.node(partition) for partition in range(clients)]
            whole, held = (sum(map(len, each)) for each in ([n.stored() for n in nodes], [n.state for n in nodes]))
    return {"state_kb": whole / clients / 1e3, "of_it_in_memory_kb": held / clients / 1e3}


def _fedavg(nodes: int) -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)


def _with_memory(memory: str) -> Compressed:
    return Compressed(FedAvg(fraction_evaluate=0.0), ErrorFeedback(TopK(DENSITY), memory=memory))


def model(elements: int) -> ArrayRecord:
    """Return a model of one float32 tensor."""
    # Random content: equal chunks would be sent once only.
    return to_record({"weight": Key(0, "bench-model").uniform(elements).astype(np.float32)})


def app(*mods: Any) -> ClientApp:
    """Return the client that does next to nothing, and says which partition it has."""
    found = ClientApp(mods=list(mods))
    found.train()(_step)
    found.query()(lambda message, context: _answer(message, context, RecordDict()))
    return found


def _step(message: Message, context: Context) -> Message:
    """Reply with a model some noise away, another one for each partition."""
    arrays = to_arrays(message.content["arrays"])  # type: ignore[arg-type]
    # Of the model's own values, so that no time is spent on drawing others.
    shift = int(context.node_config["partition-id"]) + 1
    arrays["weight"] += np.float32(0.01) * np.roll(arrays["weight"], shift)
    content = RecordDict({"arrays": to_record(arrays), "metrics": MetricRecord({"num-examples": 1})})
    return _answer(message, context, content)


def _answer(message: Message, context: Context, content: RecordDict) -> Message:
    put_node(content, int(context.node_config["partition-id"]))
    return Message(content, reply_to=message)
