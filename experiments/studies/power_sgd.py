"""The growth of PowerSGD's memories when clients send constant updates."""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np

from fedcomp.codecs import PowerSGD
from fedcomp.codecs.power_sgd import FORMS, MEMORIES
from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.kit import table
from fedcomp.experiments.studies.memories import SEED, memory_norm
from fedcomp.experiments.tables import Found
from fedcomp.layout import Layout, TensorSpec, Vector
from fedcomp.local import Local
from fedcomp.rng import Key
from fedcomp.systems.power_sgd import SharedBasis

SHAPE: Final = (20, 15)
RANK_2: Final = "PowerSGD, rank 2"


def memories(found: Found) -> Studied:
    """Return the final memory of every case in units of updates, and the size of the last downlink at rank 2."""
    rounds = int(found.config.settings["norm_rounds"])
    last = found.say.cell("norms", lambda: memory_norms(rounds))
    # Once every node holds a model, the downlink is a step as long as one client's factors.
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
    )


def memory_norms(rounds: int) -> dict[str, float]:
    """Return ‖memory‖ / ‖update‖ by case, form and memory after a number of rounds, as the mean over clients."""
    layout = Layout((TensorSpec("w", SHAPE, "float32", 0, SHAPE[0] * SHAPE[1]),), (), ("w",))
    key = Key(SEED, "power-sgd/norms")
    unlike = [key.at(partition=c).generator().standard_normal(SHAPE).astype(np.float32) for c in range(4)]
    opposite = np.outer(unlike[0][:, 0], unlike[1][0]).astype(np.float32)
    cases = {"opposite": (1, [opposite, -opposite]), "unlike": (2, unlike)}
    found = {}
    for (name, (rank, matrices)), form, memory in itertools.product(cases.items(), FORMS, MEMORIES):
        system = SharedBasis(PowerSGD(rank, form=form, memory=memory, min_rate=0.0))

        def corrected(local: Local, node: int, codec: PowerSGD = system.codec) -> Vector:
            """The memory at the start of the next round, when the client knows the step."""
            vector: Vector = codec.correct(local.client(node).memory, local.state["last"]["frame"], layout)["memory"]
            return vector

        vectors = [matrix.reshape(-1) for matrix in matrices]
        found[f"{name}, {form}, {memory}"] = memory_norm(system, layout, vectors, rounds, corrected)
    return found
