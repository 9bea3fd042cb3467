"""The study ``pipe_sgd``: its recursions and its laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedcomp.experiments import delayed, slept
from fedcomp.experiments.studies import pipe_sgd as study


def test_trainings_over_messages_are_their_recursions_and_nothing_else() -> None:
    found = study.recursions(9, 3)
    assert max(found[f"width {w}"] for w in (1, 2, 3)) < 1e-6
    assert min(found["width 2 against no delay"], found["averaged models against width 2"]) > 1e-3


def test_the_recursion_applies_every_update_once_and_late() -> None:
    """By hand: the first rounds of all cohorts, which are as large, use the first model."""
    zero = np.zeros(slept.SIZE)
    first = slept.recursion(3, range(6), 1, 1) - zero
    np.testing.assert_allclose(slept.recursion(3, range(6), 2, 2), 2 * first, rtol=1e-12)
    np.testing.assert_allclose(slept.recursion(3, range(6), 3, 3), 3 * first, rtol=1e-12)


def test_cohorts_step_as_often_as_the_law_says() -> None:
    for each in study.laws(3):
        if each["kind"] == "clock":
            assert each["found"] == pytest.approx(each["law"]), each


def test_a_delayed_training_applies_its_gradients_in_the_drain() -> None:
    """With as many steps of delay as there are steps, all gradients are of the first model."""
    whole = delayed.train(0.05, 0.0, 8, 0, 1, steps=8)
    assert 10.0 < whole["accuracy"] < 100.0
    plain = delayed.train(0.05, 0.0, 0, 0, 1, steps=8)
    warm = delayed.train(0.05, 0.0, 8, 8, 1, steps=8)
    assert warm == plain


def test_a_gradient_of_the_perceptron_is_that_of_finite_differences() -> None:
    drawn = np.random.default_rng(3)
    weights = [w.astype(np.float64) for w in delayed.perceptron(3, (5, 4, 3))]
    x, y = drawn.standard_normal((6, 5)), drawn.integers(0, 3, 6)

    def loss(at: Any) -> float:
        scores = np.maximum(x @ at[0] + at[1], 0) @ at[2] + at[3]
        return float(np.mean(np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(6), y]))

    found = delayed.gradient(weights, x, y)  # type: ignore[arg-type]
    for place, part in enumerate(found):
        for index in np.ndindex(part.shape):
            moved = [w.copy() for w in weights]
            moved[place][index] += 1e-6
            assert part[index] == pytest.approx((loss(moved) - loss(weights)) / 1e-6, abs=1e-4)


def test_what_diverged_recognises_one_class() -> None:
    found = delayed.train(5.0, 0.9, 4, 0, 1, steps=60)
    assert found["accuracy"] < 30.0
