"""How the private rows of the table are run small, for tests that go through all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.systems import SYSTEMS

NAMES = tuple(name for name, system in SYSTEMS.items() if system.private)

SMALL = {"task.hidden": "16", "max_steps": 2, "insecure_deterministic": True, "noise_multiplier": 2.0}

OWN: Mapping[str, Mapping[str, Any]] = {
    "datalens": {
        "insecure_deterministic": True,
        "noise_multiplier": 2.0,
        "pretrain": 1,
        "images": 2,
        "teacher_steps": 1,
    },
}
"""Settings of rows that are not trained as the others are."""

TASKS = {"datalens": "digits-generator"}


def small(name: str, *, engine: str = "inprocess", rounds: int = 2, clients: int = 3, **settings: Any) -> RunSpec:
    """Return a small run of a private row."""
    chosen = {**OWN.get(name, SMALL), **settings}
    return RunSpec(
        name, task=TASKS.get(name, "digits"), rounds=rounds, clients=clients, seed=3, engine=engine, settings=chosen
    )
