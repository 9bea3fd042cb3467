"""Numbers of gradient coding: sums of rows come out as the sums of what went in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.coding.errors import CodingError
from fedcomp.coding.gradvalues import SCALAR_STEP, PrimeArithmetic, RealArithmetic, combine, solve_consistent, values_of
from fedcomp.coding.prime import GF31, GF251, GF65521, PrimeField
from fedcomp.coding.stream import SplitMix64
from fedcomp.errors import ConfigError

FIELDS = [GF65521, GF31]


def added(values: PrimeArithmetic, rows: list[np.ndarray]) -> np.ndarray:
    return combine(np.ones(len(rows), values.dtype), rows, values.field)


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
@given(data=st.data())
def test_a_sum_in_a_field_is_the_sum_of_the_rounded_numbers(field: PrimeField, data) -> None:
    parts = data.draw(st.integers(1, 40))
    values = PrimeArithmetic(field, parts, 8.0)
    number = st.floats(-8, 8)
    heads = np.array(data.draw(st.lists(st.tuples(number, number), min_size=parts, max_size=parts)))
    tails = np.array(data.draw(st.lists(st.floats(-1e6, 1e6), min_size=parts, max_size=parts)))[:, None]
    total = added(values, [values.pack(h, t) for h, t in zip(heads, tails, strict=True)])
    vector, scalars = values.unpack(total, 2)
    assert np.array_equal(vector, np.rint(heads / values.step).sum(axis=0) * values.step)
    assert np.array_equal(scalars, np.rint(tails / SCALAR_STEP).sum(axis=0) * SCALAR_STEP)
    assert np.max(np.abs(vector - heads.sum(axis=0))) <= parts * values.step / 2 * (1 + 1e-9)


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
@pytest.mark.parametrize("parts", [1, 2, 3, 10, 100])
def test_the_largest_numbers_of_all_parts_do_not_wrap(field: PrimeField, parts: int) -> None:
    values = PrimeArithmetic(field, parts, 3.0)
    for sign in (-1.0, 1.0):
        total = added(values, [values.pack(np.array([3.0 * sign]), np.array([7.0 * sign]))] * parts)
        vector, scalars = values.unpack(total, 1)
        assert vector[0] == pytest.approx(3.0 * sign * parts, rel=parts * values.step)
        assert scalars[0] == 7.0 * sign * parts


def test_whole_weights_are_exact() -> None:
    values = PrimeArithmetic(GF65521, 3, 1.0)
    weights = [1.0, 123_456_789.0, 2.0**40]
    total = added(values, [values.pack(np.zeros(0), np.array([w])) for w in weights])
    assert values.unpack(total, 0)[1].tolist() == [sum(weights)]


def test_the_step_is_the_smallest_power_of_two_that_leaves_room() -> None:
    for limit in (1.0, 5.0, 100.0):
        values = PrimeArithmetic(GF31, 10, limit)
        assert limit / values.step * 10 <= GF31.half < 2 * limit / values.step * 10 * (1 + 1e-6)
        assert np.log2(values.step) == int(np.log2(values.step))


def test_numbers_without_room_are_refused_not_wrapped() -> None:
    values = PrimeArithmetic(GF65521, 4, 2.0)
    with pytest.raises(CodingError, match=r"reaches 2\.01"):
        values.pack(np.array([0.0, -2.01]), np.zeros(1))
    with pytest.raises(CodingError, match="weight or metric"):
        values.pack(np.zeros(1), np.array([2.0**43]))
    for kind in (values, RealArithmetic()):
        with pytest.raises(CodingError, match="NaN"):
            kind.pack(np.array([np.nan]), np.zeros(1))
        with pytest.raises(CodingError, match="NaN"):
            kind.pack(np.zeros(1), np.array([np.inf]))


def test_impossible_numbers_are_refused() -> None:
    for kind in (RealArithmetic(), PrimeArithmetic(GF31, 2, 1.0)):
        row = kind.pack(np.array([0.5, -0.25]), np.array([3.0]))
        assert len(row) == kind.size(2, 1)
        assert kind.require(row) is row
    with pytest.raises(CodingError, match="NaN"):
        RealArithmetic().require(np.array([np.inf]))
    with pytest.raises(CodingError, match="not an element"):
        PrimeArithmetic(GF65521, 2, 1.0).require(np.array([65521], "<u2"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: values_of("float32", 2, 1.0), "did you mean 'float64'"),
        (lambda: values_of("gf31", 2, 0.0), "limit"),
        (lambda: values_of("gf31", 2, float("inf")), "limit"),
        (lambda: PrimeArithmetic(GF251, 20, 1.0), "no room"),
        (lambda: PrimeArithmetic(GF31, 0, 1.0), "no room"),
        (lambda: combine(np.ones(0), []), "one each"),
    ],
)
def test_wrong_arguments_are_refused(make, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()


def test_a_consistent_system_is_solved_and_an_inconsistent_one_is_not() -> None:
    field = GF65521
    a = field.random((4, 3), SplitMix64(5))
    x = field.random((3, 1), SplitMix64(6))
    b = field.matmul(a, x)
    assert np.array_equal(solve_consistent(np.concatenate([a, b], axis=1), field), x[:, 0])
    b[3] = field.add(b[3], 1)
    assert solve_consistent(np.concatenate([a, b], axis=1), field) is None
