"""Sums that are wrong: one relay of many, and contributors that share what no update within the bounds holds."""

from __future__ import annotations

import numpy as np
import pytest

from coding.errors import CorruptGeneration
from coding.prime import FIELDS, GF65521
from coding.stream import SplitMix64
from coding.sumcode import (
    SumPlan,
    contribution,
    decode,
    predictable,
    shares,
)

LEVELS = {251: 6, 65521: 127, 2**31 - 1: 32767}


def plan_of(field=GF65521, **changes) -> SumPlan:
    given = {"size": 101, "bound": LEVELS[field.order], "contributors": 6, "relays": 7, "symbols": 3, "private": 2}
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


@pytest.mark.parametrize("wrong", [0, 7, 8, 15, 16, 19])
def test_any_one_wrong_relay_of_twenty_is_found(wrong: int) -> None:
    """Also one behind those that are left out first; a relay that was not needed is named as well."""
    plan = plan_of(relays=20, symbols=12, private=4)
    integers = vectors(plan)
    sums = added(plan, coded(plan, integers), range(6), range(20))
    sums[wrong] = plan.field.add(sums[wrong], 1)
    result = decode(plan, sums)
    np.testing.assert_array_equal(result.integers, integers.sum(axis=0))
    assert result.left_out == (wrong,)


def forged(plan: SumPlan, place: int | slice, number: int) -> np.ndarray:
    """Return what a contributor shares that puts in any number, and makes the check symbols true for it."""
    vector = contribution(plan, np.zeros(plan.size, np.int64), extras=[0] * len(plan.extras))
    data = vector[: plan.length - plan.checks]
    data[place] = plan.field.residues(np.array(number))
    vector[plan.length - plan.checks :] = plan.field.dot(plan.challenge(), data)
    return shares(plan, vector, predictable(99))


@pytest.mark.parametrize("field", FIELDS, ids=repr)
@pytest.mark.parametrize(
    ("place", "number", "message"),
    [
        (3, "half", "an integer of"),
        (slice(5), "-half", "an integer of"),
        (101, "-3", "the weights sum to -1"),
        (101, "61", "the weights sum to 63, 3 of up to 20 cannot"),
        (102, "-1", "numbers of up to 4 sum to -1"),
        (102, "13", "numbers of up to 4 sum to 13"),
    ],
)
def test_a_sum_that_nobody_honest_can_have_is_refused(field, place, number: str, message: str) -> None:
    """Check symbols can be made true for anything: without this one contributor moves a mean by (p - 1) / 2 steps."""
    plan = plan_of(field, bound=1, max_weight=20, contributors=6, extras=(4,))
    liar = forged(plan, place, {"half": field.half, "-half": -field.half}.get(number) or int(number))
    honest = [shares(plan, contribution(plan, q, 1, (0,))) for q in vectors(plan, 2)]
    for relays in (range(5), range(7)):  # relays to spare are no help: none of them is to blame
        with pytest.raises(CorruptGeneration, match=message):
            decode(plan, added(plan, [*honest, liar], range(3), relays), contributors=3)
