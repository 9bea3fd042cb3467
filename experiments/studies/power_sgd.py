"""How long PowerSGD's memories become when clients send constant updates."""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np

from fedcomp.codecs import PowerSGD
from fedcomp.codecs.lowrank import Basis
from fedcomp.codecs.power_sgd import FORMS, MEMORIES
from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import curves, table
from fedcomp.experiments.tables import Found
from fedcomp.layout import Layout, TensorSpec, Update
from fedcomp.rng import Key
from fedcomp.wire import Frame

RANK_2: Final = "PowerSGD, rank 2"


def memories(found: Found) -> Studied:
    """Return the last memory of every case in updates, and how long the last downlink of rank 2 is."""
    rounds = int(found.config.settings["norm_rounds"])
    norms = found.say.cell("norms", lambda: memory_norms(rounds))
    last = {name: series[-1] for name, series in norms["ratios"].items()}
    # Once every node holds a model, a step goes down that is as long as one client's factors.
    late = found.mean(RANK_2, "late") * found.config.rounds / found.mean(RANK_2, "uplink")
    return Studied(
        quantities={f"memory in updates, {name}": value for name, value in last.items()}
        | {(RANK_2, "downlink of the last round over its uplink"): late},
        tables=[
            table(
                "Memory after all rounds, in updates",
                {"case": lambda name: name, "‖memory‖ / ‖update‖": lambda name: round(last[name], 1)},
                last,
                f"After {rounds} rounds with constant updates. Opposite: two clients with A and -A of rank 1, codec of "
                "rank 1. Unlike: four clients with Gaussian 20 x 15 matrices, codec of rank 2.",
            )
        ],
        figures=[
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
            )
        ],
    )


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
