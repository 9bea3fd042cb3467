"""Advice of samplers, plans, row codecs and caches of graphs, and of runs over a graph that several owners hold."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from advice import KEY, Row, row
from graph_federation import PARTS, graph, grid, initial, reports, run, strategy
from graph_toys import toy_adjacency, toy_parts
from toy import with_halves

from fedcomp.clients.compressed import compression
from fedcomp.experiments import engines
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.systems import check
from fedcomp.graphs.adjacency import HaloStructure
from fedcomp.graphs.base import Conditions, GraphPart, UnknownStructure
from fedcomp.graphs.cache import noisy_rows
from fedcomp.graphs.plan import plan_round, plan_step
from fedcomp.graphs.rowcodecs import get_row_codec
from fedcomp.graphs.settings import RoundSettings, RowSettings, SamplerSettings
from fedcomp.layout import Layout, Update
from fedcomp.program import Answer, Ask, Me
from fedcomp.systems.graphs.system import Graphs
from fedcomp.systems.graphs.words import Fetch, Needs, Plan, Turn, by_part

NODES, OWNERS = 40, 4  # of toy_parts
FULL = SamplerSettings(sampler="full")
P = toy_adjacency(NODES, OWNERS, 5.0)
HALO = toy_parts(structure="halo")
PART = toy_parts()[0]
MANY = 1 << 18
USUAL = Conditions()


def drawn(part: GraphPart = PART, batch: Any = None, conditions: Conditions = USUAL, **settings: Any) -> np.ndarray:
    """Return what a plan makes of P's rows of a batch: its matrices from the output layer to the input layer."""
    given = SamplerSettings(**{"layers": 1, **settings})
    plan = plan_step(part, part.ids if batch is None else batch, given, KEY, conditions)
    product: Any = None
    for layer in reversed(plan.layers):
        matrix = np.zeros((len(layer.rows), NODES))
        rows = np.repeat(np.arange(len(layer.rows)), np.diff(layer.indptr))
        matrix[rows, layer.columns[layer.positions]] = layer.values
        product = matrix if product is None else product[:, layer.rows] @ matrix
    return np.asarray(product)


def estimated(*arguments: Any, layers: int = 1, **options: Any) -> bool:
    """Whether that is what all neighbours would give."""
    whole = np.zeros((NODES, NODES))
    whole[np.repeat(np.arange(NODES), np.diff(P.indptr)), P.columns] = P.values
    exact = np.linalg.matrix_power(whole, layers)[PART.ids]
    return float(np.abs(drawn(*arguments, layers=layers, **options) - exact).max()) < 0.05


def steps(most: int, **options: Any) -> int:
    """Return how many entries the plans of some steps have, where so many are allowed."""
    given = {"steps": 100, "batch_size": 0, "settings": FULL, **options}
    settings = given.pop("settings")
    with patch("fedcomp.graphs.plan.MOST_ENTRIES", most):
        plans = plan_round(PART, settings, seed=0, round=1, **given)
    assert len(plans) == given["steps"]
    return sum(len(layer.values) for plan in plans for layer in plan.layers)


def planned(part: GraphPart) -> Any:
    return plan_round(part, FULL, seed=0, round=1, steps=2, batch_size=3)


def taught() -> bool:
    """Whether an owner that asks for the rows it lacks, and plans again, plans as one that knows all edges."""
    part = HALO[0]
    while True:
        try:
            plans = planned(part)
        except UnknownStructure as unknown:
            owners = part.structure.owner_of(unknown.ids)
            for owner in np.unique(owners):
                rows = HALO[owner].structure.rows(unknown.ids[owners == owner])
                assert isinstance(part.structure, HaloStructure)
                learnt = part.structure.learn(rows, HALO[owner].structure.owner_of(rows.columns))
                part = replace(part, structure=learnt)
        else:
            return all(np.array_equal(one.inputs, two.inputs) for one, two in zip(plans, planned(PART), strict=True))


def owned(index: int, ids: Any) -> bool:
    part = toy_parts()[index]
    return np.array_equal(part.ids[part.positions(ids)], ids)


def noise(secret: bytes) -> bool:
    """Whether the noise of a row is what it should be, and the same each time."""
    rows = np.zeros((200, 50), np.float32)
    one, two = (noisy_rows(rows, np.arange(200), 2.0, secret) for _ in range(2))
    return bool(np.array_equal(one, two) and 1.9 < one.std() < 2.1)


def coded(name: str, rows: Any, dtype: Any = None, within: float = 0.0) -> bool:
    """Whether rows come out as they went in, up to a part of the largest value."""
    given, codec = np.asarray(rows), get_row_codec(name)
    ids = np.arange(len(given))
    _, found = codec.decode(codec.encode(ids, given), features=given.shape[1], dtype=dtype or given.dtype)
    return bool(np.abs(found - given).max() <= within * np.abs(given).max())


SINGLES = np.array([[0.0, 2.0, 2.0], [0.5, 0.0, 0.0]])
SEVERAL = np.array([[0.0, 2.0, 3.0], [0.5, 0.0, 0.1]])


PLANS = (
    row(
        "ask their owner",
        lambda: owned(0, HALO[1].ids),
        lambda: owned(int(PART.structure.owner_of(HALO[1].ids)[0]), HALO[1].ids),
    ),
    row(
        "has repeats; give every node once",
        lambda: drawn(batch=PART.ids[[0, 1, 1]]),
        lambda: estimated(batch=np.unique(PART.ids), sampler="full"),
    ),
    row(
        "give one mapping per layer",
        lambda: drawn(layers=2, mode="measured", conditions=Conditions(norms=[{}])),
        lambda: estimated(
            layers=2, mode="measured", estimator="multinomial", n=MANY, conditions=Conditions(norms=[{}, {0: 3.0}])
        ),
    ),
    row(
        "take fewer steps per round, smaller batches, or fewer columns per layer",
        lambda: steps(4000),
        lambda: (
            0 < steps(4000, steps=3) <= 4000
            and 0 < steps(4000, batch_size=1) <= 4000
            and 0 < steps(4000, settings=SamplerSettings(n=2)) <= 4000
        ),
    ),
    row("ask their owners for them and plan again", lambda: planned(HALO[0]), taught),
    row(
        "use structure 'full', or another sampler",
        lambda: drawn(HALO[0], sampler="fastgcn"),
        lambda: estimated(sampler="fastgcn", n=MANY) and estimated(HALO[0], estimator="multinomial", n=MANY),
    ),
    row(
        "Lower n or fanout",
        lambda: drawn(estimator="multinomial", n=1 << 25),
        lambda: (
            estimated(estimator="multinomial", n=MANY)
            and estimated(sampler="node", estimator="multinomial", fanout=1 << 15)
        ),
    ),
    row("or more from os.urandom", lambda: noise(b"secret"), lambda: noise(os.urandom(16)) and noise(os.urandom(40))),
)


ROW_CODECS = (
    row(
        "take float32 or float64, as the features are",
        lambda: coded("dense-f16", SINGLES, dtype=np.float16),
        lambda: coded("dense-f16", SINGLES, dtype=np.float32) and coded("dense-f16", SINGLES, dtype=np.float64),
    ),
    row(
        "cannot; scale the features or take another codec than {}",
        lambda: coded("dense-f16", SINGLES * 1e5),
        lambda: coded("dense-f16", SINGLES * 1e5 / 1e5) and coded("dense-f32", SINGLES * 1e5),
    ),
    row(
        "are; scale the features or take another codec",
        lambda: coded("int8", SINGLES * 1e300),
        lambda: coded("int8", SINGLES * 1e300 / 1e300, within=0.01) and coded("dense-f64", SINGLES * 1e300),
    ),
    row(
        "has different values beside 0, which {} cannot hold; take 'csr' or 'auto'",
        lambda: coded("binary-rice", SEVERAL),
        lambda: coded("csr", SEVERAL, within=1e-6) and coded("auto", SEVERAL) and coded("binary-rice", SINGLES),
    ),
)


EXACT = RowSettings(codec="dense-f64", cache="all")
SOME = Graphs(sampler=SamplerSettings(n=12), rows=EXACT, rounds=RoundSettings(batch_size=4))
MEASURED = replace(SOME, sampler=SamplerSettings(n=8, mode="measured"))
EMPTY_LAYOUT = Layout.flat(1)


class Held:
    """An app that owns a part, and notes its steps."""

    seen = ()

    def __init__(self, part: GraphPart) -> None:
        self.part = part
        self.steps: Any = None

    def load(self, steps: Any) -> None:
        self.steps = steps


def told(system: Graphs, part: GraphPart, say: Any, frames: Any, kept: dict[str, bytes]) -> tuple[Answer, Any]:
    """Ask an owner; return its answer, and the steps that it would compute."""
    app = Held(part)
    ask = Ask(part.index, "train" if type(say) is Turn else "query", say, frames)
    made = Update(np.zeros(1, np.float32), EMPTY_LAYOUT)
    _, answer = system.client(
        {}, ask, Me(part.index, 1, 3, EMPTY_LAYOUT, lambda: made.vector, lambda *_: made, app, kept=dict(kept))
    )
    kept.update(answer.keep)
    return answer, app.steps


def fetched(system: Graphs, parts: list[GraphPart], index: int, kept: dict[str, bytes]) -> dict[str, bytes]:
    """Let an owner plan, with all it needs on the way; return the rows that it wants."""
    brought: dict[str, bytes] = {}
    while True:
        answer, _ = told(system, parts[index], Plan("train"), brought, kept)
        kind = answer.say.kind if isinstance(answer.say, Needs) else "rows"
        brought = {}
        for owner, ids in by_part(answer.frames, len(parts), "ids")["ids"].items():
            fetch = Fetch(kind, kind == "structure" and system.sampler.measures)
            got, _ = told(system, parts[owner], fetch, {f"ids/{index}": ids}, {})
            brought[f"{kind}/{owner}"] = got.frames[f"{kind}/{index}"]
        if kind == "rows":
            return brought


def interrupted(again: bool, system: Graphs = SOME, structure: str = "full") -> bool:
    """Whether a node that loses its state between plan and training, and plans again, takes the steps of one that kept
    it."""
    parts, taken = toy_parts(structure=structure), []
    for lost in (False, True):
        kept: dict[str, bytes] = {}
        rows = fetched(system, parts, 1, kept)
        if lost:
            kept.clear()
            rows = fetched(system, parts, 1, kept) if again else rows
        _, steps = told(system, parts[1], Turn("train"), rows, kept)
        taken.append(steps.plans[0].inputs.tolist())
    return taken[0] == taken[1]


def without_rows(again: bool) -> bool:
    """Whether a node learns that lacks rows it wants; ``again``: that plans and fetches before."""
    parts, kept = toy_parts(), dict[str, bytes]()
    rows = fetched(SOME, parts, 1, kept)
    _, steps = told(SOME, parts[1], Turn("train"), rows if again else {}, kept)
    return len(steps.plans) == 1


def learns_from_nothing() -> Any:
    return told(SOME, nothing_to_learn_from(1)[1], Turn("train"), {}, {})


def nothing_to_learn_from(index: int) -> list[GraphPart]:
    return [replace(part, train=part.train[: 0 if part.index == index else None]) for part in graph()]


def trains(of: Any, parts: Any, clients: int = PARTS) -> bool:
    """Whether so many clients train in each of two rounds, and the model moves."""
    after = run(of, grid(parts), 2)
    moved = any(not np.array_equal(after[name], value) for name, value in initial().items())
    return moved and [report.train.clients for report in reports(of)] == [clients] * 2


def spec(task: str = "karate", clients: int = 2, **settings: Any) -> RunSpec:
    return RunSpec("skewed-gcn", task=task, rounds=2, clients=clients, settings={"n": "8", "batch_size": 4, **settings})


def learns(*arguments: Any, **settings: Any) -> bool:
    result = engines.run(spec(*arguments, **settings))
    return bool(result.final.loss < result.rounds[0].loss)


RUNS = (
    row(
        "has no node to learn from; use fewer parts, or skip the client",
        learns_from_nothing,
        lambda: trains(strategy(), nothing_to_learn_from(1), PARTS - 1) and trains(strategy(), graph(2), 2),
    ),
    row(
        "this node no longer has the adjacency rows it planned with ({}); let it plan again",
        lambda: interrupted(False, replace(SOME, structure="halo"), "halo"),
        lambda: interrupted(True, replace(SOME, structure="halo"), "halo"),
    ),
    row("planned with; let it plan again", lambda: interrupted(False, MEASURED), lambda: interrupted(True, MEASURED)),
    row("of node {}; let this node plan again", lambda: without_rows(again=False), lambda: without_rows(again=True)),
    row(
        "wrap it with fedcomp.client(app, graph_owner(...))",
        lambda: run(strategy(), grid(graph(), with_halves([compression()])), 1),
        lambda: trains(strategy(), graph()),
    ),
    row(
        "Give all of them the same task, options and seed",
        lambda: trains(strategy(), [*graph()[:2], *graph(seed=4)[2:]]),
        lambda: trains(strategy(), graph()),
    ),
    row(
        "set structure={}, or the task's option to {}",
        lambda: trains(strategy(), graph(structure="halo")),
        lambda: trains(strategy(structure="halo"), graph(structure="halo")) and trains(strategy(), graph()),
    ),
    row(
        "use structure='full', or another sampler",
        lambda: strategy(sampler="fastgcn", structure="halo"),
        lambda: (
            trains(strategy(sampler="fastgcn"), graph()) and trains(strategy(structure="halo"), graph(structure="halo"))
        ),
    ),
    row(
        "cannot hold rows with noise on them; use a dense row codec or noise=0",
        lambda: check(spec(row_codec="binary-rice", noise=0.1)),
        lambda: learns(row_codec="dense-f32", noise=0.1) and learns(row_codec="binary-rice", noise=0.0),
    ),
    row("and the sampler should make {}; set layers={}", lambda: check(spec(layers=3)), lambda: learns(layers=2)),
)


ROWS: tuple[Row, ...] = (*PLANS, *ROW_CODECS, *RUNS)
