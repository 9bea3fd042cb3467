"""Directions of signs: the estimate's mean and variance, the same bits everywhere, and both tiers of the kernel."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from fedcomp.errors import ConfigError, LayoutError
from fedcomp.forward.directions import Directions, step_scale, variance
from fedcomp.kernels import add_signs
from fedcomp.rng import Key

KEY = Key(5, "forward", round=3, partition=2)
GOLDEN = "be04d37848bd7e32"


def gradient(size: int, seed: int = 0) -> np.ndarray:
    return Key(seed, "forward/test").generator().normal(size=size)


def scalars_of(directions: Directions, g: np.ndarray) -> np.ndarray:
    starts = np.cumsum([0, *directions.sizes])
    return np.array(
        [
            [directions.signs(b, k).astype(np.float64) @ g[starts[b] : starts[b + 1]] for k in range(directions.count)]
            for b in range(len(directions.sizes))
        ]
    )


def estimates(sizes: list[int], count: int, g: np.ndarray, draws: int) -> np.ndarray:
    found = []
    for draw in range(draws):
        directions = Directions(KEY.at(round=draw), sizes, count)
        found.append(directions.combine(scalars_of(directions, g)))
    return np.array(found)


def test_the_mean_of_many_estimates_is_the_gradient_and_their_variance_the_formulas() -> None:
    """2.6, first: cosine above .9 after 4,000 estimates, variance within 10 %."""
    g = gradient(64)
    found = estimates([64], 1, g, 4000)
    mean = found.mean(axis=0)
    assert mean @ g / np.linalg.norm(mean) / np.linalg.norm(g) > 0.9
    spread = np.square(found - g).sum(axis=1).mean()
    assert spread == pytest.approx(variance([64], [np.linalg.norm(g)], 1), rel=0.1)
    # Normal directions would have p + 1 in place of p - 1: at this size the test tells them apart.
    small = gradient(6)
    spread = np.square(estimates([6], 1, small, 6000) - small).sum(axis=1).mean()
    assert spread == pytest.approx(5 * small @ small, rel=0.08)
    assert abs(spread / (7 * small @ small) - 1) > 0.2


@pytest.mark.parametrize(("sizes", "count"), [([64], 8), ([40, 20, 4], 4)])
def test_more_directions_and_blocks_lower_the_variance_as_the_formula_says(sizes: list[int], count: int) -> None:
    g = gradient(64)
    found = estimates(sizes, count, g, 1500)
    ends = np.cumsum([0, *sizes])
    lengths = [np.linalg.norm(g[a:b]) for a, b in itertools.pairwise(ends)]
    spread = np.square(found - g).sum(axis=1).mean()
    assert spread == pytest.approx(variance(sizes, lengths, count), rel=0.1)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, 65 * 64 + 3, 200_000])
@pytest.mark.parametrize("count", [1, 5])
def test_both_tiers_give_the_same_bits_as_adding_in_order(size: int, count: int) -> None:
    words = np.stack([KEY.at(layer=k).bits(-(-size // 64)) for k in range(count)], axis=1)
    scalars = gradient(count, 3) * 10.0 ** np.arange(count)
    start = gradient(size, 4)
    found = {}
    for tier in ("numba", "numpy"):
        found[tier] = start.copy()
        add_signs(found[tier], words, scalars, tier=tier)  # type: ignore[arg-type]
    assert found["numba"].tobytes() == found["numpy"].tobytes()
    oracle = start.copy()
    for k in range(count):
        for i in range(min(size, 3000)):
            oracle[i] += -scalars[k] if int(words[i // 64, k]) >> (i % 64) & 1 else scalars[k]
    assert found["numpy"][: min(size, 3000)].tobytes() == oracle[: min(size, 3000)].tobytes()


def test_drawn_in_other_parts_all_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcomp.forward import directions as module

    directions = Directions(KEY, [5000, 70], 131)
    scalars = np.stack([gradient(131), gradient(131, 3)])
    scalars[0, [0, 64, 130]] = np.nan
    vector = gradient(5070, 4).astype(np.float32)
    found = []
    for words in (256, 7, 1):
        monkeypatch.setattr(module, "_WORDS", words)
        found.append(
            (
                directions.combine(scalars).tobytes(),
                directions.combine(scalars, tier="numpy").tobytes(),
                np.stack(list(directions.each(0))).tobytes(),
                np.stack([directions.signs(0, k) for k in range(131)]).tobytes(),
            )
        )
        # Sums of parts round otherwise.
        np.testing.assert_allclose(
            directions.project(vector)[1], np.stack(list(directions.each(1))) @ vector[5000:].astype(float)
        )
    assert len(set(found)) == 1
    assert found[0][0] == found[0][1]
    assert found[0][2] == found[0][3]


def test_the_stream_of_a_group_holds_its_directions_word_by_word() -> None:
    """What both ends agree on, written down another way."""
    directions = Directions(KEY, [200], 70)
    for k in (0, 63, 64, 69):
        group, place = divmod(k, 64)
        members = min(64, 70 - 64 * group)
        stream = KEY.at(purpose=f"{KEY.purpose}/0", layer=group).bits(4 * members)
        assert directions.words(0, k).tolist() == [int(stream[w * members + place]) for w in range(4)]


def test_every_direction_block_round_and_client_has_a_stream_of_its_own() -> None:
    seen = {
        Directions(KEY.at(round=r, partition=c), [64, 64], 2).words(b, k).tobytes()
        for r in (1, 2)
        for c in (0, 1)
        for b in (0, 1)
        for k in (0, 1)
    }
    assert len(seen) == 16


def test_a_scalar_that_is_missing_lowers_the_number_of_its_block() -> None:
    directions = Directions(KEY, [40, 8], 3)
    scalars = scalars_of(directions, gradient(48))
    scalars[0, 1] = np.nan
    found = directions.combine(scalars)
    expected = sum(scalars[0, k] * directions.signs(0, k).astype(np.float64) for k in (0, 2)) / 2
    np.testing.assert_allclose(found[:40], expected, rtol=1e-12)
    np.testing.assert_allclose(found[40:], Directions(KEY, [40, 8], 3).combine(np.nan_to_num(scalars))[40:])
    assert not Directions(KEY, [8], 2).combine([[np.nan, np.nan]]).any()


def test_known_words_stay() -> None:
    """2.6, last: whatever the seed of this process's hashes."""
    assert Directions(KEY, [64], 1).words(0, 0).tobytes().hex() == GOLDEN


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: Directions(KEY, [0], 1), ConfigError),
        (lambda: Directions(KEY, [4], 0), ConfigError),
        (lambda: Directions(KEY, [4], 2).combine([1.0, 2.0]), LayoutError),
        (lambda: add_signs(np.zeros(4, np.float32), np.zeros((1, 1), np.uint64), np.zeros(1)), LayoutError),
        (lambda: add_signs(np.zeros(65), np.zeros((1, 1), np.uint64), np.zeros(1)), LayoutError),
        (lambda: add_signs(np.zeros(8)[::2], np.zeros((1, 1), np.uint64), np.zeros(1)), LayoutError),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


def test_the_step_shrinks_by_what_the_estimate_is_longer() -> None:
    assert step_scale(1, 5) == 1.0
    g = gradient(64)
    found = np.square(estimates([64], 4, g, 1500)).sum(axis=1).mean()
    assert found * step_scale(64, 4) == pytest.approx(g @ g, rel=0.1)
