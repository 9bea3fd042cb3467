"""Graph learning at growing size: time and memory of a step and a round, and the sampler against plain scipy.

A step looks at the rows it samples and at nothing else: neither its time nor its memory may grow with the graph. That
is measured on planted graphs of mean degree 20 up to 200 000 nodes and 2 000 000 undirected edges (4 200 000 entries of
P): with eight parts, whose size grows along, and with as many as keep their size. Ratios gate; times are reported only,
they say more about the machine.
"""

from __future__ import annotations

import gc
import itertools
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.measuring import Bound, Calls, Case, Prepared, Row, Times, traced
from fedcomp.rng import Key

if TYPE_CHECKING:
    from fedcomp.graphs.base import Ids, StepPlan
    from fedcomp.tasks.graph import GraphTask

PARTS: Final = 8
DEGREE: Final = 20
BATCH: Final = 128
KEPT: Final = 512
SIZES: Final = (25_000, 50_000, 100_000, 200_000)
QUICK: Final = (400, 800)

GOAL: Final = "goal: a step does not know how large the graph is"


def cases(quick: bool) -> Iterator[Case]:
    """Yield, by number of nodes, a client's step, two layers of this sampler and of a LADIES-style one in plain scipy,
    and a round of eight clients with all their messages; steps of parts that keep their size.

    Times are milliseconds of processor time, medians; memory is the peak of what numpy allocates.
    """
    sizes, steps, rounds = (QUICK, 2, 2) if quick else (SIZES, 40, 6)
    owned = sizes[0] // PARTS
    for nodes in sizes:
        yield Case(f"a graph of {nodes} nodes, {PARTS} parts", partial(_graph, nodes, PARTS, steps, rounds))
    # The smallest graph has parts of that size already: it is the first of both series.
    for nodes in sizes[1:]:
        parts = nodes // owned
        yield Case(f"a graph of {nodes} nodes, {parts} parts", partial(_graph, nodes, parts, steps, 0))
    few, many = sizes[0], sizes[-1]

    def growth(what: str, parts: Mapping[int, int], column: str, *, gate: bool = True) -> Bound:
        # Room for caches, and for fewer neighbours that sampled rows share.
        unit, limit = ("memory", 1.2) if column.endswith("kb") else ("time", 1.5)
        of, to = ({"nodes": nodes, **({"parts": parts[nodes]} if parts else {})} for nodes in (many, few))
        name = f"{unit} of {what}: {many} nodes / {few}"
        return Bound(name, (column, of, to), f"<= {limit}", GOAL, gate)

    eight, alike = {few: PARTS, many: PARTS}, {few: PARTS, many: many // owned}
    yield Case(
        bounds=[
            growth(f"a step, {PARTS} parts", eight, "step_ms"),
            growth(f"a step, parts of {owned} nodes", alike, "step_ms"),
            growth(f"a step, parts of {owned} nodes", alike, "step_kb"),
            # In a larger part fewer of the sampled rows share neighbours, until none do: a goal beside it.
            growth(f"a step, {PARTS} parts", eight, "step_kb", gate=False),
            growth(f"a round of {PARTS} clients", {}, "round_ms"),
            growth(f"a round of {PARTS} clients", {}, "round_kb"),
        ]
    )


def _graph(nodes: int, parts: int, steps: int, rounds: int, _: Any) -> list[Row]:
    """Return a step of the first owner, and where there are ``rounds`` the sampler's and a round's figures."""
    from fedcomp.tasks import get_task

    begin = time.perf_counter()
    task: Any = get_task("synthetic-graph", nodes=nodes, degree=DEGREE, parts=parts, columns=64)
    part = task.shared(parts).part(0)
    about = {
        "nodes": nodes,
        "edges": task.neighbours.edges,
        "entries": len(task.adjacency.values),
        "parts": parts,
        "owned": len(part.ids),
        "build_s": time.perf_counter() - begin,
    }
    rows: list[Row] = [{**about, **_step(task, part, steps)}]
    if rounds:
        rows += [{"nodes": nodes, **_samplers(task, part, steps)}, {"nodes": nodes, **_round(task, rounds)}]
    return rows


def _step(task: GraphTask, part: Any, steps: int) -> dict[str, float]:
    """Return processor time of planning, gathering and training, and the peak of what numpy allocates meanwhile.

    Rows of other owners are at hand, as they are when a training message is handled.
    """
    import torch

    from fedcomp.graphs.layers import gather, operators_of
    from fedcomp.tasks.base import single_thread
    from fedcomp.tasks.sgd import Sgd

    model, numbers = task.model(0), itertools.count()
    descent = Sgd(model.parameters(), lr=0.1)
    held: dict[str, Any] = {}

    def ready() -> int:
        # The remote rows have to be at hand; the timed plan is the same.
        number = next(numbers)
        remote = _plan(part, number).remote
        held["rows"] = (remote, task.graph.features[remote])
        return number

    def plan(number: int) -> None:
        held["plan"] = _plan(part, number)

    def gathered() -> None:
        made = held["plan"]
        x = gather(part, made, [held["rows"]])
        held["x"] = x, operators_of(made, x.dtype), torch.from_numpy(part.labels[part.positions(made.batch)])

    def train() -> None:
        x, operators, labels = held["x"]
        descent.step(task.objective(model, model(x, operators), labels))

    with single_thread():
        times = Times({"plan": Prepared(ready, plan), "gather": gathered, "train": train}, steps)
        peaks = []
        for _ in range(min(steps, 5)):
            number = ready()
            peaks.append(traced(lambda n=number: (plan(n), gathered(), train())).peak)  # type: ignore[misc,func-returns-value]
    taken = {f"{name}_ms": 1e3 * times.median(name) for name in times.seconds}
    candidates = sum(layer.candidates for layer in _plan(part, 1).layers)
    return {"candidates": candidates, "step_ms": sum(taken.values()), **taken, "step_kb": max(peaks) / 1e3}


def _plan(part: Any, number: int) -> StepPlan:
    from fedcomp.graphs.plan import plan_round
    from fedcomp.graphs.settings import SamplerSettings

    settings = SamplerSettings(n=KEPT)
    (plan,) = plan_round(part, settings, seed=0, round=number, steps=1, batch_size=BATCH)
    return plan


def _samplers(task: GraphTask, part: Any, steps: int) -> dict[str, float]:
    """Return milliseconds of processor time of two sampled layers, ours and the reference's, for the same batches."""
    from scipy.sparse import csr_matrix

    adjacency = task.adjacency
    matrix = csr_matrix((adjacency.values, adjacency.columns, adjacency.indptr), (task.nodes, task.nodes))
    key, numbers = Key(0, "bench-graphs/ladies"), itertools.count(1)
    batches = iter([(i, _plan(part, i).batch) for i in range(steps + 1)])

    def reference(given: tuple[int, Ids]) -> object:
        return ladies(matrix, given[1], KEPT, 2, key.at(round=given[0]).generator())

    calls: Calls = {"ours": lambda: _plan(part, next(numbers)), "theirs": Prepared(lambda: next(batches), reference)}
    times = Times(calls, steps)
    ours, theirs = times.median("ours"), times.median("theirs")
    return {"sampler_ms": 1e3 * ours, "scipy_ladies_ms": 1e3 * theirs, "times_faster": theirs / ours}


def ladies(matrix: Any, batch: Ids, n: int, layers: int, rng: np.random.Generator) -> list[Any]:
    """Return the operators of a LADIES-style sampler, written here in plain scipy: the usual way to slice and draw.

    Column norms are taken over all nodes, and nodes are drawn from an array as long as the graph: a step costs time and
    memory in proportion to N.
    """
    rows, operators = batch, []
    for _ in range(layers):
        chosen = matrix[rows, :]
        p = np.asarray(chosen.multiply(chosen).sum(axis=0)).ravel()
        p /= p.sum()
        kept = rng.choice(len(p), min(n, int(np.count_nonzero(p))), replace=False, p=p)
        operators.append(chosen[:, kept].multiply(1.0 / (n * p[kept])).tocsr())
        rows = kept
    return operators[::-1]


def _round(task: GraphTask, rounds: int) -> dict[str, float]:
    """Return processor time of a round of all clients, their messages serialised, and the peak of what it allocates."""
    from flwr.app import Array, ArrayRecord, ConfigRecord
    from flwr.serverapp.strategy import FedAvg

    from fedcomp.clients.app import app
    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.logs import quiet
    from fedcomp.flower.rounds import fit
    from fedcomp.strategies.gcn.report import Fetching
    from fedcomp.strategies.gcn.strategy import RoundSettings, SamplerSettings, SkewedGCN
    from fedcomp.tasks.arrays import to_arrays

    options = {key: task.options[key] for key in ("nodes", "degree", "parts", "columns")}
    config: dict[str, Any] = {"task": task.name, "clients": PARTS, "seed": 0, "lr": 0.1}
    config |= {f"task.{key}": value for key, value in options.items()}
    marks: list[float] = []
    peaks: list[float] = []
    start = ArrayRecord({name: Array(array) for name, array in to_arrays(task.model(0)).items()})

    def mark(number: int, *_: object) -> None:
        marks.append(time.process_time())
        if number == rounds:
            # The last round alone is traced, which slows it down: its time is left out.
            gc.collect()
            tracemalloc.start()
        elif number == rounds + 1:
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

    with quiet(), InProcessGrid(app, PARTS, seed=0) as grid:
        # No evaluation: it uses all neighbours, and its cost does grow with the graph.
        inner = FedAvg(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)
        strategy = SkewedGCN(inner, SamplerSettings(n=KEPT), rounds=RoundSettings(batch_size=BATCH))
        # One round more than is timed, for the memory.
        fit(strategy, grid, start, rounds + 1, train_config=ConfigRecord(config), on_round=mark)
    # The first round sets up.
    spent = np.diff(marks[:rounds]).tolist()
    report = strategy.reports[rounds].section(Fetching)
    return {
        "round_ms": 1e3 * median(spent),
        "round_kb": peaks[0] / 1e3,
        "remote_inputs": report.train.remote_inputs,
        "link_bytes": report.train.feature_bytes_link,
    }
