"""How many shards it takes: the formulas against counting, enumeration and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from fedcomp.coding import plan
from fedcomp.coding.stream import SplitMix64
from fedcomp.errors import ConfigError

NEEDED = {
    4: (7, 8, 10, 13, 21),
    8: (12, 13, 17, 21, 33),
    16: (21, 24, 29, 35, 54),
    32: (39, 43, 52, 62, 93),
}


@pytest.mark.parametrize("order", [256, None])
@pytest.mark.parametrize("symbols", NEEDED)
def test_shards_needed_for_loss(symbols: int, order: int | None) -> None:
    """The random code over 256 elements needs as many shards as an MDS code in every case of the table."""
    counts = tuple(plan.shards(symbols, loss, order=order) for loss in (0.05, 0.1, 0.2, 0.3, 0.5))
    assert counts == NEEDED[symbols]
    for loss, count in zip((0.05, 0.1, 0.2, 0.3, 0.5), counts, strict=True):
        assert plan.success(symbols, count, loss, order) >= 0.999
        assert plan.success(symbols, count - 1, loss, order) < 0.999


def test_without_loss_the_random_code_needs_one_shard_more() -> None:
    assert plan.shards(8, 0.0, order=None) == 8
    assert plan.shards(8, 0.0) == 9
    assert plan.shards(8, 0.0, 0.99) == 8
    assert plan.shards(8, 0.0, order=2) > 15


@pytest.mark.parametrize(
    ("order", "failures", "surplus"),
    [
        (2, (0.711, 0.422, 0.230), 1.607),
        (4, (0.311, 0.0819, 0.0207), 0.421),
        (16, (0.0664, 0.00417, 2.6e-4), 0.0708),
        (256, (3.92e-3, 1.53e-5, 6.0e-8), 0.00394),
        (65521, (1.53e-5, 2.3e-10), 1.5e-5),
    ],
)
def test_rates_of_singular_matrices(order: int, failures: tuple[float, ...], surplus: float) -> None:
    for extra, expected in enumerate(failures):
        assert plan.failure(64, extra, order) == pytest.approx(expected, rel=2e-2)
        assert plan.rank_probability(64, extra, order) == pytest.approx(1 - expected, abs=1e-3)
    assert plan.expected_surplus(64, order) == pytest.approx(surplus, rel=2e-2)


def test_rank_probability_is_a_count_of_matrices() -> None:
    """All 2 x 2, 3 x 2 and 2 x 1 matrices over two elements, counted."""
    for rows, columns in ((2, 2), (3, 2), (2, 1), (1, 1)):
        full = 0
        for bits in itertools.product((0, 1), repeat=rows * columns):
            matrix = np.array(bits).reshape(rows, columns)
            spanned = {tuple(np.dot(c, matrix) % 2) for c in itertools.product((0, 1), repeat=rows)}
            full += len(spanned) == 2**columns
        assert plan.rank_probability(columns, rows - columns, 2) == pytest.approx(full / 2 ** (rows * columns))


def test_expected_surplus_is_the_sum_of_the_failures() -> None:
    for order in (2, 16, 256):
        total = math.fsum(plan.failure(6, extra, order) for extra in range(60))
        assert plan.expected_surplus(6, order) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("order", [2, 256, None])
def test_success_is_the_sum_over_all_ways_to_lose_shards(order: int | None) -> None:
    symbols, shards, loss = 3, 6, 0.3
    total = math.fsum(
        math.prod(loss if lost else 1 - loss for lost in pattern)
        * plan.rank_probability(symbols, shards - sum(pattern) - symbols, order)
        for pattern in itertools.product((0, 1), repeat=shards)
    )
    assert plan.success(symbols, shards, loss, order) == pytest.approx(total, rel=1e-12)


def test_success_is_what_receivers_find() -> None:
    """Simulated losses and real coefficient vectors, decoded by rank: the binary case, where vectors do collide."""
    from fedcomp.coding.elimination import rank

    trials, symbols, count, loss = 4000, 4, 8, 0.3
    stream = SplitMix64(1)
    rows = (stream.bytes(trials * count * symbols) & 1).reshape(trials, count, symbols)
    arrived = stream.uniform(trials * count).reshape(trials, count) >= loss
    found = sum(rank(one[kept]) == symbols for one, kept in zip(rows, arrived, strict=True)) / trials
    expected = plan.success(symbols, count, loss, 2)
    assert abs(found - expected) < 4 * math.sqrt(expected * (1 - expected) / trials)
    assert 0.2 < expected < 0.8


@pytest.mark.slow
def test_more_shards_less_loss_and_fewer_symbols_never_hurt() -> None:
    for order in (2, 256, None):
        values = [plan.success(8, count, 0.2, order) for count in range(6, 40)]
        assert all(later >= earlier - 1e-12 for earlier, later in itertools.pairwise(values))
        assert values[0] == 0.0
        assert max(values) <= 1.0
        assert plan.success(8, 14, 0.1, order) > plan.success(8, 14, 0.2, order)
        assert plan.success(7, 14, 0.2, order) > plan.success(8, 14, 0.2, order)
    # Binomial coefficients beyond a double's range; with random symbols each of them has a sum of K terms beside it.
    assert plan.shards(1024, 0.5, order=None) > 2048
    assert plan.shards(550, 0.5) > 1100


def test_too_few_relays_are_refused_with_what_they_reach() -> None:
    assert plan.shards(8, 0.05, most=12) == 12
    with pytest.raises(ConfigError, match=r"11 shards of K = 8 decode with probability 0\.998393"):
        plan.shards(8, 0.05, most=11)
    with pytest.raises(ConfigError, match=r"probability 0\.000000"):
        plan.shards(8, 0.05, most=7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan.shards(8, 1.0), "loss = 1"),
        (lambda: plan.shards(8, -0.1), "loss"),
        (lambda: plan.shards(8, 0.1, 1.0), "target = 1"),
        (lambda: plan.shards(0, 0.1), "symbols = 0"),
        (lambda: plan.success(8, 9, 0.1, 1), "order = 1"),
        (lambda: plan.expected_surplus(0), "symbols = 0"),
    ],
)
def test_what_is_no_probability_or_code_is_refused(call: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()  # type: ignore[operator]


def test_the_command_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(["--measure", "300"])
    printed = capsys.readouterr().out
    assert printed.count("| 16 | 21 | 24 | 29 | 35 | 54 |") == 2
    assert "| 256 | 0.00392 | 1.53e-05 | 5.98e-08 | 0.00394 |" in printed
    assert "measured in 300 trials" in printed


def test_the_command_prints_the_bytes_of_real_packets(capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(["--payload", "61706", "--symbols", "16"])
    printed = capsys.readouterr().out
    assert "1 x 16 symbols of 3904 bytes" in printed
    for line in ("the symbol itself | 3946", "seed (RLNC) | 3952", "Cauchy row (MDS) | 3946", "relay) | 3960"):
        assert line in printed
