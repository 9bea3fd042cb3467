"""Prime fields: exact in every range, equal to galois, and never an overflow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedcomp.coding.errors import NotDecodable
from fedcomp.coding.prime import FIELDS, GF251, GF65521, PrimeField, inverse
from fedcomp.coding.stream import SplitMix64
from fedcomp.coding.sumcode import predictable
from fedcomp.errors import ConfigError

ALL = pytest.mark.parametrize("field", [*FIELDS, PrimeField(3), PrimeField(257), PrimeField(1_000_003)], ids=repr)


def elements(field: PrimeField, *shape: int, seed: int = 1) -> np.ndarray:
    return field.random(shape, SplitMix64(seed))


def exact(field: PrimeField, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the product in Python's integers, which have no range."""
    return (a.astype(object) @ b.astype(object)) % field.order


def oracle(field: PrimeField, a: np.ndarray):
    import galois

    return galois.GF(field.order)(a.astype(np.int64))


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS, ids=repr)
def test_products_equal_galois(field: PrimeField) -> None:
    a, b = elements(field, 24, 18), elements(field, 18, 37, seed=2)
    np.testing.assert_array_equal(field.matmul(a, b), np.asarray(oracle(field, a) @ oracle(field, b)))
    np.testing.assert_array_equal(field.multiply(a, a[:1]), np.asarray(oracle(field, a) * oracle(field, a[:1])))
    np.testing.assert_array_equal(field.add(a, a[:1]), np.asarray(oracle(field, a) + oracle(field, a[:1])))
    np.testing.assert_array_equal(field.subtract(a, a[:1]), np.asarray(oracle(field, a) - oracle(field, a[:1])))
    units = a[a != 0]
    np.testing.assert_array_equal(field.reciprocal(units), np.asarray(oracle(field, units) ** -1))


@ALL
@pytest.mark.parametrize("k", [0, 1, 2, 64, 65, 268, 269, 700])
def test_products_of_the_largest_elements_are_exact(field: PrimeField, k: int) -> None:
    """p - 1 everywhere makes the largest sums there are: where a range is overstepped, these show it."""
    a = np.full((3, k), field.order - 1, field.dtype)
    b = np.full((k, 5), field.order - 1, field.dtype)
    np.testing.assert_array_equal(field.matmul(a, b), exact(field, a, b))
    np.testing.assert_array_equal(field.dot(a, b[:, 0].copy()), exact(field, a, b)[:, 0])


@ALL
def test_products_of_views_and_of_many_columns_are_exact(field: PrimeField) -> None:
    """Columns are worked on in blocks of 4096."""
    a, b = elements(field, 7, 22)[::2, ::2], elements(field, 2 * 4097, 11, seed=3).T[:, ::2]
    out = np.empty((4, 4097), field.dtype)
    assert field.matmul(a, b, out) is out
    np.testing.assert_array_equal(out, exact(field, a, b))


def test_single_precision_beyond_its_range_is_wrong() -> None:
    """The bound of 268 terms at p = 251 is needed: float32 sums of twice as many large products round."""
    rng = SplitMix64(5)
    a = (250 - rng.below(8, 20 * 600)).reshape(20, 600).astype(np.uint8)
    b = (250 - rng.below(8, 600)).reshape(600, 1).astype(np.uint8)
    rounded = (a.astype(np.float32) @ b.astype(np.float32)).astype(np.int64)
    assert (rounded != a.astype(np.int64) @ b.astype(np.int64)).any()
    np.testing.assert_array_equal(GF251.matmul(a, b), exact(GF251, a, b))


@pytest.mark.parametrize("field", FIELDS, ids=repr)
def test_inverse_and_solution(field: PrimeField) -> None:
    a, b = elements(field, 9, 9), elements(field, 9, 4, seed=2)
    identity = np.eye(9, dtype=field.dtype)
    np.testing.assert_array_equal(field.matmul(inverse(field, a), a), identity)
    np.testing.assert_array_equal(field.matmul(a, field.matmul(inverse(field, a), b)), b)
    a[4] = field.add(a[0], a[1])
    with pytest.raises(NotDecodable, match="singular"):
        inverse(field, a)
    with pytest.raises(ConfigError, match="square"):
        inverse(field, a[:4])


@ALL
def test_axpy_and_sum(field: PrimeField) -> None:
    x, y = elements(field, 50), elements(field, 50, seed=2)
    expected = (y.astype(object) + (field.order - 1) * x.astype(object)) % field.order
    rows = [np.full(3, field.order - 1, field.dtype)] * 300
    np.testing.assert_array_equal(field.sum(rows), np.full(3, 300 * (field.order - 1) % field.order))
    field.axpy(field.order - 1, x, y)
    np.testing.assert_array_equal(y, expected)
    assert y.dtype == field.dtype
    out = np.empty(50, field.dtype)
    assert field.subtract(y, x, out) is out
    np.testing.assert_array_equal(field.add(out, x), y)


@ALL
def test_integers_come_back_from_their_residues(field: PrimeField) -> None:
    edge = np.array([0, 1, -1, field.half, -field.half])
    np.testing.assert_array_equal(field.lift(field.residues(edge)), edge)
    over = np.array([field.half + 1])
    assert field.lift(field.residues(over)) == -field.half  # one more wraps around


@pytest.mark.parametrize("field", FIELDS, ids=repr)
def test_secrets_are_uniform_and_within_the_field(field: PrimeField) -> None:
    drawn = field.secret((300, 400), predictable(3))
    assert drawn.shape == (300, 400)
    assert field.check(drawn)
    assert not field.check(np.array([field.order], field.dtype))
    cells = np.bincount(drawn.reshape(-1).astype(np.int64) * 251 // field.order, minlength=251)
    expected = drawn.size / 251
    assert ((cells - expected) ** 2 / expected).sum() < 250 + 4 * np.sqrt(2 * 250)
    assert field.secret((0, 4), predictable(3)).shape == (0, 4)


@pytest.mark.parametrize("p", [0, 1, 2, 4, 256, 65537 * 3, 2**31 + 11, 2**61 - 1, True, 251.0, 3215031751])
def test_what_is_no_prime_of_the_range_is_refused(p: object) -> None:
    with pytest.raises(ConfigError, match="prime"):
        PrimeField(p)  # type: ignore[arg-type]


def test_primality_agrees_with_a_sieve() -> None:
    sieve = np.ones(3000, bool)
    sieve[:2] = False
    for n in range(2, 55):
        sieve[n * n :: n] = False
    for n in range(3, 3000):
        try:
            PrimeField(n)
            prime = True
        except ConfigError:
            prime = False
        assert prime == bool(sieve[n]), n


def test_zero_has_no_reciprocal_and_shapes_must_fit() -> None:
    with pytest.raises(ConfigError, match="no reciprocal"):
        GF251.reciprocal(np.array([3, 0]))
    with pytest.raises(ConfigError, match="needs matrices"):
        GF251.matmul(np.ones((2, 3), np.uint8), np.ones((2, 3), np.uint8))
    a = np.ones((3, 3), np.uint16)
    with pytest.raises(ConfigError, match="shares memory"):
        GF65521.matmul(a, a.copy(), a)
    with pytest.raises(ConfigError, match="the product is"):
        GF65521.matmul(a, a, np.empty((3, 3), np.uint8))
    with pytest.raises(ConfigError, match="no shape"):
        GF251.sum([])


@pytest.mark.slow
def test_encoding_needs_no_galois() -> None:
    """Clients only encode; galois costs them a second and compiles."""
    code = """
import sys, numpy as np
from fedcomp.coding.prime import GF65521
from fedcomp.coding.sumcode import SumPlan, contribution, shares
plan = SumPlan(GF65521, 100, 7, 5, 6, 3, 2)
assert shares(plan, contribution(plan, np.arange(100) % 7)).shape == (6, plan.shard_symbols)
heavy = {"galois", "numba", "llvmlite"} & set(sys.modules)
assert not heavy, heavy
"""
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
