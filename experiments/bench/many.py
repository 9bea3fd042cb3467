"""What a client-round costs the in-process engine: beside training, with many clients, and in what clients remember.

Processor time of one thread, each case in a process of its own. With many clients the client next to does nothing, so
that what is measured is the engine: top-k with error feedback on a model of 64 kB, drawn cohorts, metered messages.
"""

from __future__ import annotations

import itertools
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.measuring import Bound

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message
    from flwr.clientapp import ClientApp

ELEMENTS: Final = 1 << 14
DENSITY: Final = 0.01
FEW: Final = "100 of 100"
CASES: Final = {FEW: (100, 100, 12), "1,000 of 1,000": (1000, 1000, 3), "100 of 10,000": (10000, 100, 12)}
QUICK: Final = {FEW: (4, 4, 2), "1,000 of 1,000": (8, 8, 2), "100 of 10,000": (12, 4, 2)}
"""Clients, how many of them train in a round, and rounds that are measured."""


def digits(clients: int, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a client-round on digits: in the engine, of it in training, and in the bare loop.

    Training is timed where it happens, within the engine: alone it would find its data in the processor's caches.
    """
    from fedcomp.experiments import engines
    from fedcomp.experiments.central import Plan, simulate
    from fedcomp.experiments.spec import RunSpec
    from fedcomp.flower.logs import quiet
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
    return {
        "clients": clients,
        "rounds": rounds,
        "engine_ms": overhead + inside,
        "training_ms": inside,
        "overhead_ms": overhead,
        "bare_loop_ms": bare,
    }


def rounds_of_many(clients: int, sampled: int, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a client-round once a run is under way, of the roll call, and the process's peak."""
    from flwr.app import ConfigRecord

    from fedcomp.experiments.federation import Cohorts
    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.logs import quiet
    from fedcomp.flower.metered import MeteredGrid
    from fedcomp.flower.rounds import fit

    seconds: list[float] = []

    def note(_round: int, _arrays: ArrayRecord, _outcome: object) -> None:
        seconds.append(time.process_time())

    with InProcessGrid(_compressed(), clients) as inner, quiet():
        query = ConfigRecord({"x": 1})
        grid = Cohorts(MeteredGrid(inner), clients=clients, seed=0, train=sampled / clients, evaluate=0.0, query=query)
        began = time.process_time()
        grid.prepare()
        called = time.process_time() - began
        # One round more, whose end is the start of the measurement.
        fit(_strategy("float32"), grid, model(), rounds + 1, on_round=note)
    each = median(b - a for a, b in itertools.pairwise(seconds)) / sampled
    return {
        "client_round_ms": 1e3 * each,
        "roll_call_ms": 1e3 * called / clients,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


def remembered(memory: str, files: bool, clients: int) -> dict[str, Any]:
    """Return what a client's state takes, as a whole and of this process's memory."""
    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.logs import quiet
    from fedcomp.flower.metered import MeteredGrid
    from fedcomp.flower.rounds import fit

    with tempfile.TemporaryDirectory() as scratch:
        states = Path(scratch) if files else None
        with InProcessGrid(_compressed(), clients, states=states) as inner, quiet():
            fit(_strategy(memory), MeteredGrid(inner), model(), 2)
            nodes = [inner.node(partition) for partition in range(clients)]
            whole, held = (sum(map(len, each)) for each in ([n.stored() for n in nodes], [n.state for n in nodes]))
    return {"state_kb": whole / clients / 1e3, "of_it_in_memory_kb": held / clients / 1e3}


def measures(quick: bool) -> Iterator[tuple[str, dict[str, Any], Callable[..., dict[str, Any]], dict[str, Any]]]:
    """Yield what is measured: its name, columns that say which case it is, the function and its arguments."""
    yield "client-round", {}, digits, {"clients": 2 if quick else 20, "rounds": 2 if quick else 15}
    for case, (clients, sampled, rounds) in (QUICK if quick else CASES).items():
        yield "many clients", {"case": case}, rounds_of_many, {"clients": clients, "sampled": sampled, "rounds": rounds}
    for memory, files in (("float32", False), ("float16", False), ("float32", True)):
        columns = {"memory": memory, "kept_in": "files" if files else "memory"}
        yield "client state", columns, remembered, {"memory": memory, "files": files, "clients": 2 if quick else 20}


def bounds() -> list[Bound]:
    """Return what is claimed of the rows of these measurements."""
    half, files = {"memory": "float16", "kept_in": "memory"}, {"memory": "float32", "kept_in": "files"}
    flat = "one client after the other, whoever else there is (derived)"
    before = "goal, in one run; 4.4 when models, codecs and records were made anew for each message (measured)"
    over = "digits: overhead of a client-round"
    by_construction = Bound(
        "client state in files: of it in memory, kB",
        ("of_it_in_memory_kb", files),
        "<= 0",
        "by construction",
        sure=True,
    )
    return [
        Bound(f"{over}, ms", ("overhead_ms", {}), "<= 4", "goal", gate=False),
        Bound(f"{over} / its training", lambda f: f.of("overhead_ms") / f.of("training_ms"), "<= 3", before),
        *(
            Bound(f"client-round, {c} clients / {FEW}", ("client_round_ms", {"case": c}, {"case": FEW}), "<= 1.3", flat)
            for c in CASES
            if c != FEW
        ),
        Bound(
            "client state, memory as float16 / as float32",
            ("state_kb", half, {**half, "memory": "float32"}),
            "<= 0.6",
            "half of the memory, and the last reply (derived)",
            sure=True,
        ),
        by_construction,
    ]


def _strategy(memory: str) -> Any:
    from flwr.serverapp.strategy import FedAvg

    from fedcomp.codecs import ErrorFeedback, TopK
    from fedcomp.strategies.compressed import Compressed

    return Compressed(FedAvg(fraction_evaluate=0.0), ErrorFeedback(TopK(DENSITY), memory=memory))


def model(elements: int = ELEMENTS) -> ArrayRecord:
    """Return a model of one float32 tensor."""
    from fedcomp.flower.records import to_record
    from fedcomp.rng import Key

    # Random content: equal chunks would be sent once only.
    return to_record({"weight": Key(0, "bench-model").uniform(elements).astype(np.float32)})


def app(mods: list[Any]) -> ClientApp:
    """Return the client that does next to nothing, and says which partition it has."""
    from flwr.clientapp import ClientApp

    found = ClientApp(mods=mods)
    found.train()(_step)
    found.query()(_who)
    return found


def _compressed() -> ClientApp:
    from fedcomp.clients.compressed import compression

    return app([compression()])


def _who(message: Message, context: Context) -> Message:
    from flwr.app import Message, RecordDict

    from fedcomp.flower.payload import put_node

    content = RecordDict()
    put_node(content, int(context.node_config["partition-id"]))
    return Message(content, reply_to=message)


def _step(message: Message, context: Context) -> Message:
    """Reply with a model some noise away, another one for each partition."""
    from flwr.app import Message, MetricRecord, RecordDict

    from fedcomp.flower.payload import put_node
    from fedcomp.flower.records import to_arrays, to_record

    partition = int(context.node_config["partition-id"])
    arrays = to_arrays(message.content["arrays"])  # type: ignore[arg-type]
    # Of the model's own values, so that no time is spent on drawing others.
    arrays["weight"] += np.float32(0.01) * np.roll(arrays["weight"], partition + 1)
    content = RecordDict({"arrays": to_record(arrays), "metrics": MetricRecord({"num-examples": 1})})
    put_node(content, partition)
    return Message(content, reply_to=message)
