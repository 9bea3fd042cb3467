"""Coded sums for tests: plans, integers over their whole range, and the shares of every contributor."""

from __future__ import annotations

import numpy as np

from fedcomp.coding.prime import GF65521
from fedcomp.coding.stream import SplitMix64
from fedcomp.coding.sumcode import SumPlan, contribution, predictable, shares

LEVELS = {251: 6, 65521: 127, 2**31 - 1: 32767}


def plan_of(field=GF65521, **changes) -> SumPlan:
    given = {"size": 101, "bound": LEVELS[field.order], "contributors": 6, "relays": 7, "symbols": 3, "threshold": 2}
    return SumPlan(field, **{**given, "seed": 11, **changes})


def vectors(plan: SumPlan, count: int | None = None) -> np.ndarray:
    """Return integers over the whole range of the plan, the bounds among them."""
    count = plan.contributors if count is None else count
    drawn = SplitMix64(4).below(2 * plan.bound + 1, count * plan.size).reshape(count, -1) - plan.bound
    drawn[:, 0], drawn[:, 1] = plan.bound, -plan.bound
    return drawn


def coded(plan: SumPlan, integers: np.ndarray, weights: list[int] | None = None) -> list[np.ndarray]:
    weights = [1] * len(integers) if weights is None else weights
    made = [contribution(plan, q, w) for q, w in zip(integers, weights, strict=True)]
    return [shares(plan, vector, predictable(i)) for i, vector in enumerate(made)]


def added(plan: SumPlan, made: list[np.ndarray], chosen, relays) -> dict[int, np.ndarray]:
    return {relay: plan.field.sum([made[c][relay] for c in chosen]) for relay in relays}
