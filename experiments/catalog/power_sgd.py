"""PowerSGD: how short are updates in both directions, what does it cost in accuracy, and what stays in the memories?"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from fedcomp.codecs import PowerSGD
from fedcomp.codecs.lowrank import Basis
from fedcomp.codecs.power_sgd import FORMS, MEMORIES
from fedcomp.experiments.experiment import Experiment, no_rows
from fedcomp.experiments.findings import Findings, Say, mean, spread
from fedcomp.experiments.kit import Records, Sweep, claim, curves, learning_line, over_seeds, points, repetitions, table
from fedcomp.experiments.options import TEXT, Config, Option, numbers
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.layout import Layout, TensorSpec, Update
from fedcomp.rng import Key
from fedcomp.rules import Int
from fedcomp.wire import Frame

TASK: Final = "digits"
FEDAVG: Final = "FedAvg"
LAST: Final = 5
"""Rounds over which accuracies are the mean."""

TUNING_SEED: Final = 2**32
"""Added to the seed of the trainings by which step sizes are chosen."""

OPTIONS = {
    "seeds": Option(3, Int(1, 100), "trainings per row, with the seeds from --seed on"),
    "workers": 1,
    "task.partition": Option("dirichlet:0.5", TEXT, "how examples are spread: iid, dirichlet:ALPHA, shards:COUNT"),
    "task.hidden": Option("256,256", TEXT, "widths of the model's hidden layers"),
    "steps": Option(
        "0.2,0.3,0.5,0.8",
        TEXT,
        "step sizes of the clients' SGD; each row takes the one that does best on a validation split",
        check=numbers,
    ),
    "batch_size": Option(64, Int(1), "examples per step; a client makes one pass over its data a round"),
    "norm_rounds": Option(200, Int(10), "rounds of the memory-norm measurement"),
}

_SHARED = ("task.", "batch_size")


def _power(rank: int, **more: Any) -> tuple[str, dict[str, Any]]:
    return "power-sgd", {"codec.rank": rank, **{f"codec.{name}": value for name, value in more.items()}}


def _topk(density: float) -> tuple[str, dict[str, Any]]:
    down = {"downlink": "topk", "downlink.density": density, "downlink.values": "q8"}
    return "topk", {"feedback": True, "codec.density": density, "codec.values": "q8", **down}


RANK_2: Final = "PowerSGD, rank 2"
RANK_4: Final = "PowerSGD, rank 4"
TWICE: Final = "PowerSGD, rank 2, two exchanges"
RIVALS: Final = {RANK_2: "top-k 4.5 %, q8", RANK_4: "top-k 8.5 %, q8"}
"""By row: the simple codec of as many bytes at least, up and down."""

ROWS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    FEDAVG: ("fedavg", {}),
    "PowerSGD, rank 1": _power(1),
    RANK_2: _power(2),
    RANK_4: _power(4),
    TWICE: _power(2, form="two-exchange"),
    "rank 2, aggregated memory": _power(2, memory="aggregated"),
    "rank 2, no warm start": _power(2, warm_start=False),
    "rank 4, q8 up": _power(4, values="q8"),
    RIVALS[RANK_2]: _topk(0.045),
    RIVALS[RANK_4]: _topk(0.085),
    "EDEN, 1 bit, whole models down": ("eden", {"feedback": False, "codec.bits": 1}),
}
"""System and settings by label, in order."""

CURVES: Final = (FEDAVG, "PowerSGD, rank 1", RANK_2, TWICE, RANK_4, *RIVALS.values(), "EDEN, 1 bit, whole models down")


def spec_of(label: str, lr: float, seed: int, config: Config, *, tuning: bool = False) -> RunSpec:
    """Return the run of a row; on the validation split if ``tuning``."""
    system, settings = ROWS[label]
    every: dict[str, Any] = {"lr": lr, "evaluate_every": 1, "epochs": 1, "task.validation": tuning}
    made = config.spec(system, label, TASK, take=_SHARED, **settings, **every)
    return replace(made, seed=seed + tuning * TUNING_SEED)


def train(label: str, lr: float, seed: int, *, config: Config, tuning: bool = False) -> dict[str, Any]:
    """Train a row through Flower's messages and return its accuracies and real bytes."""
    from fedcomp.experiments.engines import inprocess
    from fedcomp.flower.logs import quiet

    with quiet():
        result = inprocess.run(spec_of(label, lr, seed, config, tuning=tuning))
    # What a round takes once every node holds a model.
    late = result.rounds[-1] if result.rounds else None
    return {
        "points": learning_line(result, down=True),
        "settled": points(result),
        "uplink": result.uplink_payload_bytes,
        "downlink": result.downlink_payload_bytes,
        "late": 0 if late is None else late.downlink_payload_bytes,
        "wire": result.uplink_wire_bytes + result.downlink_wire_bytes,
    }


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Choose every row's step size on a validation split, train it with several seeds, and compare with FedAvg."""
    processes, shared = int(config.settings["workers"]), {"config": config}
    rounds = int(config.settings["norm_rounds"])
    norms = say.cell("norms", lambda: memory_norms(rounds))
    steps = numbers(str(config.settings["steps"]))
    tuned: dict[str, Any] = {"label": list(ROWS), "lr": list(steps), "seed": [config.seed]}
    tried = Sweep(train, tuned, "tuning", {**shared, "tuning": True})(say, processes)
    best = {label: max(group, key=lambda r: r.settled).lr for label, group in tried.groups("label").items()}
    cells = [{"label": label, "lr": best[label], "seed": seed} for label in ROWS for seed in repetitions(config)]
    groups: dict[str, Records] = Sweep(train, cells, shared=shared)(say, processes).groups("label")
    dense = groups[FEDAVG]

    def lost(label: str, against: str = FEDAVG) -> float:
        return mean(groups[against].each("settled")) - mean(groups[label].each("settled"))

    def times(label: str, field: str) -> float:
        return mean(dense.each(field)) / mean(groups[label].each(field))

    def both(label: str) -> float:
        return mean(groups[label].each("uplink")) + mean(groups[label].each("downlink"))

    clients = config.clients * config.rounds
    columns: dict[str, Any] = {
        "row": lambda label: label,
        "step size": lambda label: best[label],
        "test, %": lambda label: round(mean(groups[label].each("settled")), 1),
        "±": lambda label: round(spread(groups[label].each("settled")), 1),
        "points lost": lambda label: round(lost(label), 1),
        "uplink, bytes": lambda label: round(mean(groups[label].each("uplink")) / clients),
        "downlink, bytes": lambda label: round(mean(groups[label].each("downlink")) / clients),
        "downlink of the last round, bytes": lambda label: round(mean(groups[label].each("late")) / config.clients),
        "times fewer up": lambda label: round(times(label, "uplink"), 1),
        "both ways, as messages": lambda label: round(times(label, "wire"), 2),
    }
    last = {name: series[-1] for name, series in norms["ratios"].items()}
    return Findings(
        tables=[
            table(
                "Ranks and accuracy",
                columns,
                ROWS,
                f"Means over seeds; test accuracy is the mean of the last {LAST} rounds, ± half the range over seeds. "
                "The step size is the one of the grid that did best on a validation split of the training images, for "
                "every row by itself. Bytes of payload are per client and round; downlinks include the whole model "
                "that each node is sent once. Both ways counts serialised messages, with Flower's own fields.",
            ),
            table(
                "Memory after all rounds, in updates",
                {"case": lambda name: name, "‖memory‖ / ‖update‖": lambda name: round(last[name], 1)},
                last,
                f"After {rounds} rounds with constant updates. Opposite: two clients with A and -A of rank 1, codec of "
                "rank 1. Unlike: four clients with Gaussian 20 x 15 matrices, codec of rank 2.",
            ),
        ],
        figures=[
            curves(
                "Test accuracy against bytes in both directions",
                [groups[label] for label in CURVES],
                lambda group: over_seeds(group, 2),
                lambda group: over_seeds(group, 1),
                lambda group: group[0].label,
                x_label="payload so far, up and down, all clients",
                y_label="test accuracy, %",
                log_x=True,
                x_bytes=True,
            ),
            curves(
                "Memory against update",
                norms["ratios"].items(),
                lambda line: norms["rounds"],
                lambda line: line[1],
                lambda line: line[0],
                x_label="round",
                y_label="‖memory‖ / ‖update‖, mean",
                log_x=True,
                log_y=True,
            ),
        ],
        # Bounds of norms are those of long measurements: after fewer rounds they are still on their way.
        claims=[
            # Gates are what was reached. That one exchange of rank 2 is as good was the goal, and is shown as missed.
            *(
                claim(f"{label}: points of accuracy lost against FedAvg", lost(label), "<= 1.0", "goal", gate=gate)
                for label, gate in ((RANK_2, False), (TWICE, True), (RANK_4, True))
            ),
            *(
                made
                for label, rival in RIVALS.items()
                for made in (
                    # A comparison is worth nothing if the rival had fewer bytes.
                    claim(
                        f"{label}: its bytes over those of {rival}, up and down",
                        both(label) / both(rival),
                        "<= 1.0",
                        "the rival's density was chosen for it",
                    ),
                    claim(
                        f"{label}: points lost against {rival}",
                        lost(label, rival),
                        "<= 0.0",
                        "a goal: the same accuracy as the strongest simple rival of as many bytes",
                        gate=False,
                    ),
                )
            ),
            *(
                claim(f"{label}: times fewer uplink payload bytes", times(label, "uplink"), bound, source)
                for label, (bound, source) in TIMES.items()
            ),
            claim(
                f"{RANK_2}: downlink of the last round over its uplink",
                mean(groups[RANK_2].each("late")) * config.rounds / mean(groups[RANK_2].each("uplink")),
                "<= 1.5",
                "derived: one step is as long as one client's factors; the sides of matrices take turns",
            ),
            *(
                claim(f"memory after {rounds} rounds, in updates: {name}", last[name], bound, source)
                for name, (bound, source) in (NORMS.items() if rounds >= 200 else ())
            ),
        ],
        answer="; ".join(
            f"{label}: {times(label, 'uplink'):.0f} times fewer uplink bytes, {times(label, 'wire'):.1f} times fewer "
            f"in all messages, {lost(label):.1f} points lost"
            for label in (TWICE, RANK_4)
        )
        + f" (against FedAvg, mean of the last {LAST} rounds and of {len(dense)} seeds, both tuned alike).",
    )


TIMES: Final = {
    RANK_2: (">= 50.0", "derived: 6.6 kB of 341 kB"),
    TWICE: (">= 25.0", "derived: 13.2 kB of 341 kB"),
    RANK_4: (">= 30.0", "derived: 11.0 kB of 341 kB"),
}
"""By row: bound and source of the claim on its uplink."""


NORMS: Final = {
    "opposite, alternating, aggregated": (">= 199.0", "derived: t updates after t rounds"),
    "opposite, alternating, local": (
        "<= 40.0",
        "measured 22: random directions are sent, and taken out",
    ),
    "unlike, two-exchange, local": (">= 40.0", "measured 83: what cancels in the mean is in no basis"),
    "unlike, alternating, aggregated": (">= 100.0", "measured 175"),
    "unlike, alternating, local": ("<= 15.0", "measured 7: the one form that stays short"),
}
"""By case: bound on the memory after 200 rounds, and its source."""


def memory_norms(rounds: int) -> dict[str, Any]:
    """Return ‖memory‖ / ‖update‖, mean over clients, over the rounds in which clients send constant updates."""
    key = Key(5, "power-sgd/norms")

    def drawn(count: int, m: int, p: int) -> list[np.ndarray]:
        return [key.at(partition=c).generator().standard_normal((m, p)).astype(np.float32) for c in range(count)]

    (u, v), unlike = drawn(2, 20, 15), drawn(4, 20, 15)
    opposite = np.outer(u[:, 0], v[0]).astype(np.float32)
    cases = {"opposite": (1, [opposite, -opposite]), "unlike": (2, unlike)}
    marks = sorted({int(m) for m in np.geomspace(1, rounds, 30)} | {rounds})
    ratios: dict[str, list[float]] = {}
    for name, (rank, matrices) in cases.items():
        for form, memory in itertools.product(FORMS, MEMORIES):
            series = _norms(PowerSGD(rank, form=form, memory=memory, min_rate=0.0), matrices, rounds)
            ratios[f"{name}, {form}, {memory}"] = [series[mark - 1] for mark in marks]
    return {"rounds": marks, "ratios": ratios}


def _norms(codec: PowerSGD, matrices: list[np.ndarray], rounds: int) -> list[float]:
    size = matrices[0].size
    layout = Layout((TensorSpec("w", matrices[0].shape, "float32", 0, size),), (), ("w",))
    updates = [Update(matrix.reshape(-1).copy(), layout) for matrix in matrices]
    states, last, out = [codec.init(layout) for _ in updates], None, []
    for t in range(1, rounds + 1):
        key = Key(5, "uplink", t)
        basis = codec.start(last, layout, Key(5, "power-sgd", t))
        waiting = [codec.begin(update, state, key) for update, state in zip(updates, states, strict=True)]
        if codec.two_exchanges:
            firsts = _sum(codec, basis, [codec.first(state, basis, layout, key) for state in waiting], layout)
            basis = codec.between(codec.mean(basis).coefficients(firsts, layout), layout, key)
        sent = [codec.send(state, basis, layout, key) for state in waiting]
        step = _sum(codec, basis, [frame for frame, _ in sent], layout)
        states = [codec.correct(state, step, layout) for _, state in sent]
        last = basis, codec.mean(basis).coefficients(step, layout)
        pairs = zip(states, updates, strict=True)
        out.append(mean(float(np.linalg.norm(s["memory"]) / np.linalg.norm(u.vector)) for s, u in pairs))
    return out


def _sum(codec: PowerSGD, basis: Basis, frames: list[Frame], layout: Layout) -> Frame:
    total = Update(np.zeros(layout.size, np.float32), layout)
    for frame in frames:
        codec.mean(basis).gather(frame, 1.0 / len(frames), total)
    return codec.mean(basis).sum_frame(total)


EXPERIMENT = Experiment(
    name="power_sgd",
    question="What does one low-rank basis for all clients save in both directions, and what does it cost?",
    # Every training has a step size of its own, which is found first.
    rows=no_rows,
    measure=measure,
    options=OPTIONS,
    rounds=40,
    clients=10,
    minutes=6.0,
    quick=(
        "rounds=2",
        "clients=3",
        "seeds=1",
        "steps=0.3",
        "task.hidden=32",
        "norm_rounds=10",
    ),
    notes=(
        "The task of the quickstart: each client holds its own mixture of the ten digits (Dirichlet, alpha 0.5) and "
        "makes one pass over about 144 images a round. The model has 85 002 parameters in three matrices and three "
        "biases, which travel whole. The test split has 355 images, so that one image makes 0.28 points.\n\n"
        "PowerSGD is the alternating form with the local memory unless a row says otherwise. Its server sends float32 "
        "factors. Top-k sends 127 levels in both directions, with error feedback on the clients and difference coding "
        "on the server; EDEN compresses one direction only."
    ),
)
