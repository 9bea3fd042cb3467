"""Sums that are wrong: one relay of many, and contributors that share what no update within the bounds holds."""

from __future__ import annotations

import numpy as np
import pytest
from field_sums import added, coded, plan_of, vectors

from fedcomp.coding.errors import CorruptGeneration
from fedcomp.coding.prime import FIELDS
from fedcomp.coding.sumcode import (
    SumPlan,
    contribution,
    decode,
    predictable,
    shares,
)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [0, 7, 8, 15, 16, 19])
def test_any_one_wrong_relay_of_twenty_is_found(wrong: int) -> None:
    """Also one behind those that are left out first; a relay that was not needed is named as well."""
    plan = plan_of(relays=20, symbols=12, threshold=4)
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


@pytest.mark.slow
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
