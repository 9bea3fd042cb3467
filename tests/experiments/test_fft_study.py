"""What ``fft`` measures: complex bins as published, errors of what arrives, the schedule."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.experiments.studies.fft import (
    BUDGETS,
    COMPLEX,
    COSINES,
    GIVEN,
    NOISE,
    ORDERED,
    TOPK,
    WAVES,
    complex_bins,
    errors,
    noise,
    rising,
    rounding,
)


def test_of_the_rising_row_half_of_the_numbers_go_in_the_third_quarter_and_all_in_the_last() -> None:
    assert rising(0.15, "HWDF", 40).codec.schedule == ((21, 0.5), (31, 1.0))
    assert rising(0.15, "HWDF", 1).codec.schedule == ((1, 1.0),)


@pytest.mark.parametrize("n", [64, 65])
def test_complex_bins_are_those_of_the_paper(n: int) -> None:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    np.testing.assert_allclose(complex_bins(x, 1.1), x, atol=1e-6)
    wave = np.cos(2 * np.pi * 5 * np.arange(n) / n).astype(np.float32)
    np.testing.assert_allclose(complex_bins(wave, 2 / n), wave, atol=1e-6)
    # One bin is two numbers.
    kept = np.fft.rfft(complex_bins(x, 10 / n))
    assert np.count_nonzero(np.abs(kept) > 1e-4) == 5


def test_errors_are_of_what_arrives_and_fall_with_the_budget() -> None:
    rng = np.random.default_rng(3)
    smooth = np.cumsum(rng.standard_normal(8 * 8 * 9)).reshape(3, 3, 8, 8).transpose(3, 2, 0, 1)
    found = {budget: errors(np.ascontiguousarray(smooth, np.float32), budget) for budget in BUDGETS}
    for name in (TOPK, GIVEN, WAVES, COMPLEX, COSINES, ORDERED):
        assert found[0.05][name] > found[0.1][name] > found[0.3][name] > 0
    assert found[0.05][WAVES] < 0.1 < 0.5 < found[0.05][TOPK]
    heavy = noise(NOISE[1], 0)
    assert errors(heavy, 0.1)[WAVES] > 1.2 * errors(heavy, 0.1)[TOPK]
    forms = rounding(heavy.reshape(-1))
    assert forms["uniform"] > 2 * forms["range"] > 0


def test_noise_is_the_same_for_a_seed() -> None:
    for name in NOISE:
        assert noise(name, 1).tobytes() == noise(name, 1).tobytes() != noise(name, 2).tobytes()
        assert noise(name, 1).shape == (32, 16, 3, 3)
