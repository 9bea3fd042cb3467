"""Sums of outer products and the nearest sums of few (the spec's list B7: 3, 4, 5, 8)."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.factors.outer import OuterProducts, Reduction, add_outer, inner
from fedcomp.rng import Key

KEY = Key(3, "outer")


def drawn(n: int, m: int, p: int, decay: float = 0.7, seed: int = 0) -> OuterProducts:
    """Rows whose matrix has singular values that fall by ``decay``."""
    rng = np.random.default_rng(seed)
    left, right = rng.normal(size=(n, m)), rng.normal(size=(n, p))
    return OuterProducts((left * decay ** np.arange(n)[:, None]).astype(np.float32), right.astype(np.float32))


def error(found: OuterProducts, matrix: np.ndarray) -> float:
    return float(np.linalg.norm(found.matrix().astype(np.float64) - matrix))


def best(matrix: np.ndarray, rank: int) -> float:
    sigma = np.linalg.svd(matrix, compute_uv=False)
    return float(np.sqrt((sigma[rank:] ** 2).sum()))


@pytest.mark.parametrize("shape", [(1, 1), (70, 130), (64, 5), (3, 5000)])
def test_products_are_added_with_their_scale_and_nothing_else_is_touched(shape: tuple[int, int]) -> None:
    outer = drawn(17, *shape, decay=1.0)
    out = np.ones(shape, np.float32)
    add_outer(out, outer.left, outer.right, -0.5)
    expected = 1.0 - 0.5 * outer.left.astype(np.float64).T @ outer.right.astype(np.float64)
    assert np.abs(out - expected).max() <= 1e-5 * np.abs(expected).max()
    other = drawn(4, *shape, seed=1)
    assert np.isclose(inner(outer, other), (outer.matrix().astype(float) * other.matrix()).sum(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("solver", ["qr", "power"])
@pytest.mark.parametrize("shape", [(20, 60, 50), (40, 60, 12), (12, 9, 80)])
def test_3_the_error_is_that_of_the_svd_or_little_above_and_never_below(
    solver: str, shape: tuple[int, int, int]
) -> None:
    outer = drawn(*shape)
    matrix = outer.matrix().astype(np.float64)
    for rank in (1, 2, 4, 8):
        found = Reduction(rank, iterations=5, theta=0.0, solver=solver).of(outer, KEY)
        least = best(matrix, rank)
        # Below it is impossible; only float32 of what is kept.
        assert (
            least - 1e-5 * np.linalg.norm(matrix)
            <= error(found, matrix)
            <= 1.05 * least + 1e-5 * np.linalg.norm(matrix)
        )


def test_3_on_a_flat_spectrum_few_iterations_come_within_a_fifth() -> None:
    outer = drawn(32, 256, 128, decay=1.0)
    matrix = outer.matrix().astype(np.float64)
    ratio = [error(Reduction(2, i, 0.0, "power").of(outer, KEY), matrix) / best(matrix, 2) for i in (1, 5)]
    assert 1.0 <= ratio[1] <= ratio[0] <= 1.2


@pytest.mark.parametrize("solver", ["qr", "power"])
def test_4_as_many_are_kept_as_asked_for_or_as_there_are(solver: str) -> None:
    full, flat = drawn(9, 40, 30, decay=0.9), drawn(1, 40, 30)
    # Of rank 3, although it has nine rows; zero; one row; and more rows than one side is long.
    deficient = OuterProducts(np.repeat(full.left[:3], 3, axis=0), np.repeat(full.right[:3], 3, axis=0))
    nothing = OuterProducts(np.zeros((5, 40), np.float32), full.right[:5])
    narrow = drawn(50, 4, 30, decay=1.0)
    for rank in range(1, 12):
        reduction = Reduction(rank, 3, 0.0, solver)
        counts = [reduction.of(outer, KEY).count for outer in (full, deficient, nothing, flat, narrow)]
        assert counts == [min(rank, 9), min(rank, 3), 0, 1, min(rank, 4)]


@pytest.mark.parametrize("solver", ["qr", "power"])
def test_5_what_is_lost_is_what_the_singular_values_lack(solver: str) -> None:
    outer = drawn(25, 80, 60, decay=0.9)
    found = Reduction(6, 2, 0.0, solver).of(outer, KEY)
    sigma = np.linalg.norm(found.left.astype(np.float64), axis=1)
    assert (np.diff(sigma) <= 1e-6 * sigma[0]).all()
    gram = found.left.astype(np.float64) @ found.left.T.astype(np.float64)
    assert np.abs(gram - np.diag(np.diag(gram))).max() <= 1e-4 * sigma[0] ** 2
    assert np.allclose(np.linalg.norm(found.right, axis=1), 1.0, atol=1e-5)
    total = outer.norm() ** 2
    lost = error(found, outer.matrix().astype(np.float64)) ** 2
    assert abs(total - (sigma**2).sum() - lost) <= 1e-4 * total


def test_what_is_below_theta_is_not_kept() -> None:
    outer = drawn(20, 60, 50, decay=0.3)
    sigma = np.linalg.svd(outer.matrix(), compute_uv=False)
    for solver in ("qr", "power"):
        kept = Reduction(20, 6, 0.05, solver).of(outer, KEY).count
        assert kept == int((sigma > 0.05 * sigma[0]).sum())


def test_8_the_same_key_gives_the_same_bytes_and_another_one_another_start() -> None:
    outer = drawn(30, 50, 40, decay=1.0)
    reduction = Reduction(3, 1, solver="power")
    first, again, other = (reduction.of(outer, key) for key in (KEY, KEY, KEY.at(round=2)))
    assert first.left.tobytes() == again.left.tobytes()
    assert first.right.tobytes() == again.right.tobytes()
    assert first.left.tobytes() != other.left.tobytes()


def test_a_matrix_in_full_is_reduced_like_its_factors() -> None:
    outer = drawn(12, 300, 200)
    for solver in ("qr", "power"):
        reduction = Reduction(4, 8, 0.0, solver)
        assert np.allclose(
            reduction.of(outer, KEY).matrix(), reduction.of_matrix(outer.matrix(), KEY).matrix(), atol=2e-2
        )


def test_the_authors_rule_keeps_what_a_small_singular_value_would_end() -> None:
    outer = drawn(10, 60, 50, decay=0.2)
    ours, theirs = (Reduction(10, 8, 0.1, "power", stop).of(outer, KEY).count for stop in ("sigma", "distance"))
    assert ours < theirs


@pytest.mark.parametrize(
    "wrong", [{"rank": 0}, {"iterations": 0}, {"theta": 1.0}, {"theta": -0.1}, {"solver": "svd"}, {"stop": "never"}]
)
def test_wrong_parameters_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        Reduction(**wrong)
