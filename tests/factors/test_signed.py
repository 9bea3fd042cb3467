"""Left sides that are slopes times signs: drawn again to the bit, row after row, and never the same signs twice."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.factors.collect import Captured
from fedcomp.factors.outer import OuterProducts
from fedcomp.factors.signed import SignedRows
from fedcomp.rng import Key


def rows(n: int = 5, passes: int = 3, width: int = 70, **options) -> SignedRows:
    slopes = Key(1, "slopes", n, passes).uniform(n * passes).reshape(n, passes).astype(np.float32)
    return SignedRows(slopes, **({"seed": 9, "name": "w", "width": width} | options))


def test_rows_are_the_mean_over_the_passes_of_slopes_times_signs() -> None:
    """The sum, or signs of another stream, is something else."""
    given = rows()
    mean = SignedRows(given.slopes / np.float32(3), given.seed, given.name, given.width).matrix()
    products = [given.slopes[:, k, None].astype(np.float64) * given.signs(k) for k in range(3)]
    assert np.allclose(mean, np.mean(products, axis=0), rtol=1e-6, atol=1e-7)
    assert not np.allclose(given.matrix(), np.mean(products, axis=0), rtol=0.1)
    for other in ({"seed": 10}, {"name": "v"}, {"start": 1}):
        signs = rows(**other).signs(0)
        assert 0.3 < np.mean(signs == given.signs(0)) < 0.7
    assert not np.array_equal(given.signs(0), given.signs(1))


def test_known_signs_stay() -> None:
    """What was sent is drawn again by other versions."""
    signs = SignedRows(np.zeros((2, 2), np.float32), 2026, "0.weight", 8, start=3).signs(1)
    assert signs.tolist() == [[-1, 1, 1, -1, -1, -1, -1, -1], [1, 1, -1, -1, -1, 1, -1, -1]]


@pytest.mark.parametrize("width", [1, 64, 65])
def test_rows_drawn_together_are_those_drawn_one_after_the_other(width: int) -> None:
    whole = rows(7, width=width)
    parts = [
        SignedRows(whole.slopes[part], whole.seed, whole.name, width, part.start) for part in (slice(0, 3), slice(3, 7))
    ]
    assert np.concatenate([part.matrix() for part in parts]).tobytes() == whole.matrix().tobytes()
    joined = parts[0].followed_by(parts[1])
    assert joined is not None
    assert joined.slopes.tobytes() == whole.slopes.tobytes()
    assert parts[1].followed_by(parts[0]) is None
    assert parts[0].followed_by(rows(4, passes=2, width=width, start=3)) is None
    assert parts[0].followed_by(rows(4, width=width, start=3, seed=8)) is None


def test_a_multiple_has_the_slopes_of_the_multiple() -> None:
    """A left side that is scaled beside slopes that are not would be another one at the server."""
    right = Key(2, "right").uniform(5 * 4).reshape(5, 4).astype(np.float32)
    outer = OuterProducts.of_signed(rows(), right).scaled(-0.1)
    assert outer.signed is not None
    assert outer.left.tobytes() == outer.signed.matrix().tobytes()
    wrong = OuterProducts(outer.left, right, signed=rows())
    assert wrong.left.tobytes() != wrong.signed.matrix().tobytes()  # type: ignore[union-attr]


def test_steps_are_stacked_as_long_as_one_stream_goes_on() -> None:
    collected = Captured(lambda *_: True, seed=9)
    assert [collected.more_rows("w", n) for n in (3, 4)] == [0, 3]
    assert collected.more_rows("v", 2) == 0
    steps = [rows(3), rows(4, start=3), rows(4, start=3)]
    right = np.ones((4, 6), np.float32)
    for step, signed in zip(steps, (True, True, False), strict=True):
        collected.stack("w", OuterProducts.of_signed(step, right[: len(step.slopes)]))
        found = collected.outer["w"]
        assert (found.signed is not None) == signed
        if found.signed is not None:
            assert found.signed.matrix().tobytes() == found.left.tobytes()
    total = sum(OuterProducts.of_signed(step, right[: len(step.slopes)]).matrix().astype(np.float64) for step in steps)
    assert np.allclose(collected.outer["w"].matrix(), total, atol=1e-5)


def test_whoever_is_asked_is_told_that_slopes_stand_for_left_sides() -> None:
    asked: list[tuple[int, ...]] = []

    def wanted(*sizes: int) -> bool:
        asked.append(sizes)
        return True

    collected = Captured(wanted)
    right = np.ones((5, 6), np.float32)
    collected.stack("w", OuterProducts.of_signed(rows(), right))
    collected.stack("v", OuterProducts(rows().matrix(), right))
    assert asked == [(5, 70, 6, 3), (5, 70, 6, 0)]
