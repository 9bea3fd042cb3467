"""GF(2^8): element by element, matrices, and the way from a packet's number to the field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from galois_oracle import gf256

from fedcomp.coding.errors import NotDecodable
from fedcomp.coding.field import GF256
from fedcomp.coding.stream import SplitMix64
from fedcomp.errors import ConfigError

FIELD = GF256()


def drawn(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_elementwise_operations_equal_galois() -> None:
    x, y = (grid.astype(np.uint8) for grid in np.meshgrid(np.arange(256), np.arange(256)))
    np.testing.assert_array_equal(FIELD.add(x, y), gf256(x) + gf256(y))
    np.testing.assert_array_equal(FIELD.subtract(x, y), gf256(x) - gf256(y))
    np.testing.assert_array_equal(FIELD.multiply(x, y), gf256(x) * gf256(y))
    np.testing.assert_array_equal(FIELD.reciprocal(x[:, 1:]), gf256(1) / gf256(x[:, 1:]))


def test_operands_broadcast_and_out_is_used() -> None:
    a, b = drawn(1, 5, 1), drawn(2, 7)
    out = np.empty((5, 7), np.uint8)
    for operation in (FIELD.multiply, FIELD.add):
        expected = operation(np.broadcast_to(a, (5, 7)), np.broadcast_to(b, (5, 7)))
        assert operation(a, b, out) is out
        np.testing.assert_array_equal(out, expected)
    line = np.empty(7, np.uint8)
    np.testing.assert_array_equal(FIELD.multiply(3, b, line), gf256(3) * gf256(b))
    np.testing.assert_array_equal(FIELD.multiply(b, 3), line)
    assert FIELD.multiply(3, 7) == 9
    assert FIELD.multiply(255, 255) == 226


def test_what_is_no_element_is_refused() -> None:
    for wrong in (256, -1, 1.0, np.array([1, 300]), np.array([0.5])):
        with pytest.raises(ConfigError, match="elements"):
            FIELD.multiply(wrong, 1)
    with pytest.raises(ConfigError, match="not an element"):
        FIELD.axpy(256, drawn(1, 3), drawn(2, 3))
    with pytest.raises(ConfigError, match="equal"):
        FIELD.axpy(1, drawn(1, 3), drawn(2, 4))


def test_zero_has_no_reciprocal() -> None:
    with pytest.raises(ConfigError, match="zero"):
        FIELD.reciprocal(np.array([1, 0, 2], np.uint8))


@pytest.mark.parametrize("c", [0, 1, 2, 133, 255])
@pytest.mark.parametrize("shape", [(0,), (301,), (3, 50), (2, 3, 4)])
def test_axpy_adds_a_multiple_in_place(c: int, shape: tuple[int, ...]) -> None:
    x, y = drawn(1, *shape), drawn(2, *shape)
    expected = gf256(y) + gf256(c) * gf256(x)
    FIELD.axpy(c, x, y)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 7, 16, 33, 64, 100, 128])
def test_the_inverse_equals_that_of_galois(n: int) -> None:
    a = drawn(n, n, n)
    while np.linalg.matrix_rank(gf256(a)) < n:
        a = drawn(int(a[0, 0]) + 1000 * n, n, n)
    before = a.copy()
    inverse = FIELD.inverse(a)
    np.testing.assert_array_equal(inverse, np.linalg.inv(gf256(a)))
    np.testing.assert_array_equal(FIELD.matmul(a, inverse), np.eye(n))
    np.testing.assert_array_equal(a, before)


def test_singular_matrices_give_an_error_and_no_numbers() -> None:
    a = drawn(1, 6, 6)
    a[5] = FIELD.add(a[0], FIELD.multiply(7, a[3]))
    with pytest.raises(NotDecodable, match="rank 5"):
        FIELD.inverse(a)
    with pytest.raises(NotDecodable, match="rank 0"):
        FIELD.inverse(np.zeros((3, 3), np.uint8))
    with pytest.raises(ConfigError, match="square"):
        FIELD.inverse(drawn(1, 3, 4))
    assert FIELD.inverse(np.zeros((0, 0), np.uint8)).shape == (0, 0)


@pytest.mark.parametrize(("n", "k", "rank"), [(5, 9, 3), (9, 5, 5), (20, 20, 0), (40, 30, 17), (3, 0, 0), (0, 3, 0)])
def test_the_rank_of_a_product_is_its_inner_dimension(n: int, k: int, rank: int) -> None:
    left, right = np.zeros((n, rank), np.uint8), np.zeros((rank, k), np.uint8)
    left[:rank] = np.eye(rank)
    left[rank:] = drawn(1, max(0, n - rank), rank)
    right[:, :rank] = np.eye(rank)
    right[:, rank:] = drawn(2, rank, max(0, k - rank))
    matrix = FIELD.matmul(left, right)
    before = matrix.copy()
    assert FIELD.rank(matrix) == rank
    np.testing.assert_array_equal(matrix, before)


def test_random_elements_are_the_bytes_of_the_stream() -> None:
    assert FIELD.random((2, 8), SplitMix64(0)).tobytes().hex() == "afcd1d7b39a820e2f465b9a16a9e786e"
    assert FIELD.random(5, SplitMix64(1)).shape == (5,)
    assert FIELD.random((), SplitMix64(1)).shape == ()


def test_axpy_takes_elements_only() -> None:
    """A negative number would otherwise count from the table's end, and give the product with another element."""
    y = drawn(5, 4)
    before = y.copy()
    wrongs: list[Any] = [np.array([-1, 0, 1, 2]), np.array([0, 1, 2, 256]), np.ones(4)]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="elements of GF"):
            FIELD.axpy(3, wrong, y)
    np.testing.assert_array_equal(y, before)
    FIELD.axpy(3, np.array([1, 2, 3, 4], np.int64).astype(np.uint8), y)
    np.testing.assert_array_equal(y, before ^ np.array([3, 6, 5, 12], np.uint8))
