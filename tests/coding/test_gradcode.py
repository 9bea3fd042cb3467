"""Gradient codes: every surviving set gives the sum, too many losses are noticed, and what is wrong does not pass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from fedcomp.coding.errors import CodingError, NotDecodable
from fedcomp.coding.gradcode import Assignment, Cyclic, FractionalRepetition, assignment
from fedcomp.coding.gradvalues import combine
from fedcomp.coding.prime import GF31, GF65521
from fedcomp.coding.stream import SplitMix64
from fedcomp.errors import ConfigError

SIZES = [(n, s) for n in range(1, 8) for s in range(n)] + [(8, 3), (9, 2), (10, 1), (10, 3)]
FIELDS = [GF65521, GF31]


def gradients(n: int, d: int = 5) -> list[np.ndarray]:
    return list(SplitMix64(n).normal(n * d).reshape(n, d))


def residues(n: int, field, d: int = 6) -> tuple[list[np.ndarray], np.ndarray]:
    """Return signed integers as residues, and their sum, which stays within half the field."""
    numbers = SplitMix64(n + 1).below(2 * (field.half // n), n * d).reshape(n, d) - field.half // n
    return [field.residues(row) for row in numbers], numbers.sum(axis=0)


def answers(code: Assignment, vectors: list[np.ndarray]) -> dict[int, np.ndarray]:
    return {i: code.combine(i, [vectors[j] for j in code.partitions(i)]) for i in range(code.n)}


def kept(n: int, lost: int) -> Iterator[tuple[int, ...]]:
    return itertools.combinations(range(n), n - lost)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "s"), SIZES)
def test_every_surviving_set_of_a_cyclic_code_gives_the_sum(n: int, s: int) -> None:
    code, vectors = Cyclic(n, s, seed=4), gradients(n)
    sent, wanted = answers(code, vectors), np.sum(vectors, axis=0)
    scale = np.max(np.abs(vectors))
    for lost in range(s + 1):
        for survivors in kept(n, lost):
            total = code.decode({i: sent[i] for i in survivors})
            assert np.max(np.abs(total - wanted)) < 1e-9 * scale


@pytest.mark.parametrize(("n", "s"), [(n, s) for n, s in SIZES if n % (s + 1) == 0])
def test_fractional_repetition_gives_the_same_bits_whoever_survives(n: int, s: int) -> None:
    code, vectors = FractionalRepetition(n, s), gradients(n)
    sent = answers(code, vectors)
    groups = [sum(vectors[g + 1 : g + s + 1], vectors[g]) for g in range(0, n, s + 1)]
    wanted = sum(groups[1:], groups[0])
    for lost in range(s + 1):
        for survivors in kept(n, lost):
            assert code.decode({i: sent[i] for i in survivors}).tobytes() == wanted.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_a_cyclic_code_over_a_field_is_exact_for_all_120_sets(field) -> None:
    code = Cyclic(10, 3, seed=1, field=field)
    vectors, wanted = residues(10, field)
    sent = answers(code, vectors)
    found = [field.lift(code.decode({i: sent[i] for i in survivors})) for survivors in kept(10, 3)]
    assert len(found) == 120
    assert all(np.array_equal(total, wanted) for total in found)


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_fractional_repetition_over_a_field_is_exact(field) -> None:
    code = FractionalRepetition(6, 1, field)
    vectors, wanted = residues(6, field)
    sent = answers(code, vectors)
    for survivors in kept(6, 1):
        assert np.array_equal(field.lift(code.decode({i: sent[i] for i in survivors})), wanted)


@pytest.mark.parametrize(("n", "s"), [(5, 0), (5, 1), (7, 2), (10, 3), (6, 4)])
def test_one_loss_too_many_of_a_cyclic_code_is_noticed(n: int, s: int) -> None:
    code = Cyclic(n, s)
    sent = answers(code, gradients(n))
    for survivors in kept(n, s + 1):
        assert not code.can_decode_sum(survivors)
        with pytest.raises(NotDecodable, match=f"{s + 1} of {n}"):
            code.decode({i: sent[i] for i in survivors})


def test_a_field_notices_one_loss_too_many() -> None:
    code = Cyclic(7, 2, field=GF65521)
    assert not any(code.can_decode_sum(survivors) for survivors in kept(7, 3))


def test_fractional_repetition_fails_exactly_when_a_whole_group_is_lost() -> None:
    code = FractionalRepetition(6, 1)
    for lost in range(7):
        for survivors in kept(6, lost):
            whole = {i // 2 for i in survivors} == {0, 1, 2}
            assert code.can_decode_sum(survivors) is whole


@pytest.mark.parametrize("field", [None, GF31], ids=["float64", "gf31"])
@pytest.mark.parametrize(("n", "s"), [(1, 0), (6, 1), (7, 3), (5, 4)])
def test_the_support_is_cyclic_of_width_s_plus_one(n: int, s: int, field) -> None:
    code = Cyclic(n, s, field=field)
    for i, row in enumerate(code.matrix):
        assert row[i] == 1
        assert set(np.flatnonzero(row).tolist()) == {(i + k) % n for k in range(s + 1)} == set(code.partitions(i))
    assert all(len(code.holders(j)) == s + 1 for j in range(n))


def test_every_partition_is_held_by_s_plus_one_devices_of_one_group() -> None:
    code = FractionalRepetition(6, 2)
    assert [code.holders(j) for j in range(6)] == [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3


def test_no_losses_means_no_coding_and_all_but_one_means_all_data_everywhere() -> None:
    assert np.array_equal(Cyclic(4, 0).matrix, np.eye(4))
    everything = Cyclic(5, 4)
    vectors = gradients(5)
    sent = answers(everything, vectors)
    for i in range(5):
        assert sorted(everything.partitions(i)) == list(range(5))
        assert np.allclose(everything.decode({i: sent[i]}), np.sum(vectors, axis=0), rtol=0, atol=1e-9)


def test_the_same_seed_draws_the_same_code_and_another_seed_another() -> None:
    assert np.array_equal(Cyclic(7, 2, 3).matrix, Cyclic(7, 2, 3).matrix)
    assert not np.allclose(Cyclic(7, 2, 3).matrix, Cyclic(7, 2, 4).matrix)


def test_auto_takes_fractional_repetition_where_it_fits() -> None:
    assert [assignment(n, s).scheme for n, s in [(6, 1), (6, 2), (7, 2), (10, 3), (5, 4)]] == [
        "fractional",
        "fractional",
        "cyclic",
        "cyclic",
        "fractional",
    ]


# Noise.


def amplification(code: Cyclic) -> float:
    sizes = np.max(np.abs(code.matrix), axis=1)
    return max(float(np.max(np.abs(code.decoding(s).coefficients) * sizes)) for s in kept(code.n, code.s))


@pytest.mark.slow
def test_codes_are_redrawn_until_no_set_amplifies_rounding_by_a_thousand() -> None:
    careless = [Cyclic(10, 3, seed, max_amplification=math.inf) for seed in range(12)]
    careful = [Cyclic(10, 3, seed) for seed in range(12)]
    assert max(map(amplification, careless)) > 1e3
    assert max(map(amplification, careful)) <= 1e3
    assert any(code.redraws for code in careful)
    assert not any(code.redraws for code in careless)


def test_rounding_answers_to_float32_costs_what_the_coefficients_amplify() -> None:
    code, vectors = Cyclic(10, 3, seed=2), gradients(10, 200)
    sent, wanted = answers(code, vectors), np.sum(vectors, axis=0)
    rounded = {i: v.astype(np.float32).astype(np.float64) for i, v in sent.items()}
    errors, predicted = [], []
    for survivors in kept(10, 3):
        weights = code.decoding(survivors).coefficients
        errors.append(np.max(np.abs(code.decode({i: rounded[i] for i in survivors}) - wanted)))
        predicted.append(sum(abs(weights[i]) * np.max(np.abs(sent[i])) for i in survivors) * 2.0**-24)
    assert all(e <= p * (1 + 1e-6) for e, p in zip(errors, predicted, strict=True))
    assert max(errors) > 1e3 * max(
        np.max(np.abs(code.decode({i: sent[i] for i in survivors}) - wanted)) for survivors in kept(10, 3)
    )
    assert np.corrcoef(np.log(errors), np.log(predicted))[0, 1] > 0.9


def test_more_answers_than_needed_amplify_less() -> None:
    code = Cyclic(10, 3)
    needed = [np.linalg.norm(code.decoding(s).coefficients) for s in kept(10, 3)]
    assert np.linalg.norm(code.decoding(range(10)).coefficients) <= min(needed)


def test_a_code_that_cannot_be_drawn_is_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match="multiple of 5 for fractional"):
        Cyclic(12, 4, max_amplification=1.5)


# Approximation.


def test_an_approximation_is_the_least_squares_one_and_says_how_far_off_it_is() -> None:
    code, vectors = Cyclic(7, 2), gradients(7)
    sent = answers(code, vectors)
    survivors = (0, 2, 3, 6)
    decoding = code.decoding(survivors, approximate=True)
    part = code.matrix[list(survivors)]
    best = np.linalg.lstsq(part.T, np.ones(7), rcond=None)[0]
    assert decoding.residual == pytest.approx(np.linalg.norm(part.T @ best - 1))
    assert not decoding.exact
    total = code.decode({i: sent[i] for i in survivors}, approximate=True)
    assert np.allclose(total, sum(b * sent[i] for b, i in zip(best, survivors, strict=True)))
    assert not np.allclose(total, np.sum(vectors, axis=0), atol=1e-3)


def test_a_set_that_decodes_is_exact_also_when_an_approximation_would_do() -> None:
    code = Cyclic(7, 2)
    decoding = code.decoding(range(5), approximate=True)
    assert decoding.exact
    assert decoding.residual == 0.0


def test_a_lost_group_is_what_an_approximation_of_fractional_repetition_lacks() -> None:
    code, vectors = FractionalRepetition(6, 2), gradients(6)
    sent = answers(code, vectors)
    assert code.decoding([4], approximate=True).residual == pytest.approx(math.sqrt(3))
    assert np.allclose(code.decode({4: sent[4]}, approximate=True), np.sum(vectors[3:], axis=0))


def test_nothing_at_all_is_never_a_sum() -> None:
    assert Cyclic(4, 1).decoding([], approximate=True).residual == pytest.approx(2.0)
    for code in (Cyclic(4, 1), FractionalRepetition(4, 1)):
        with pytest.raises(NotDecodable):
            code.decode({})
        with pytest.raises(NotDecodable):
            code.decoding([])


def test_a_field_has_no_least_squares() -> None:
    with pytest.raises(ConfigError, match="least squares do not exist"):
        Cyclic(5, 1, field=GF31).decoding([0, 1], approximate=True)


# Solved when it occurs, and kept.


@pytest.mark.slow
def test_a_pattern_is_solved_once_and_only_the_last_256_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    code = Cyclic(12, 4, seed=1)
    solved: list[int] = []
    original = Cyclic._solve
    monkeypatch.setattr(Cyclic, "_solve", lambda self, d, a: solved.append(1) or original(self, d, a))
    first = (0, 1, 2, 3, 4, 5, 6, 7)
    assert code.decoding(first) is code.decoding(reversed(first))
    assert len(solved) == 1
    for survivors in itertools.islice(itertools.combinations(range(12), 8), 1, 258):
        code.decoding(survivors)
    assert len(code._kept) == 256
    code.decoding(first)
    assert len(solved) == 1 + 257 + 1


# What peers may send.


def test_answers_that_are_no_rows_of_numbers_are_refused() -> None:
    code = Cyclic(3, 1)
    sent = answers(code, gradients(3))
    for wrong, reason in [
        (sent[1][:-1], "numbers"),
        (sent[1].astype(np.float32), "float32"),
        (sent[1].reshape(1, -1), "one row"),
        (np.full(5, np.nan), "NaN"),
    ]:
        with pytest.raises(CodingError, match=reason):
            code.decode({0: sent[0], 1: wrong})
    over = Cyclic(3, 1, field=GF65521)
    with pytest.raises(CodingError, match="not an element"):
        over.decode({0: np.zeros(2, np.uint16), 1: np.full(2, 65521, np.uint16)})


def test_redundant_answers_show_that_one_of_them_is_wrong() -> None:
    for code in (Cyclic(6, 1), FractionalRepetition(6, 1)):
        sent = answers(code, gradients(6))
        assert code.disagreement(sent) < 1e-12
        assert code.disagreement({i: sent[i] for i in (0, 2, 4)}) < 1e-12
        forged = {**sent, 3: sent[3] + 1e-3}
        assert code.disagreement(forged) > 1e-5
    over = Cyclic(6, 2, field=GF31)
    vectors, _ = residues(6, GF31)
    honest = answers(over, vectors)
    assert over.disagreement(honest) == 0.0
    assert over.disagreement({**honest, 5: over.field.add(honest[5], 1)}) > 0.0


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Cyclic(0, 0), "at least one"),
        (lambda: Cyclic(4, 4), "0 to 3"),
        (lambda: Cyclic(4, -1), "0 to 3"),
        (lambda: Cyclic(True, 0), "whole number"),
        (lambda: FractionalRepetition(5, 1), "not a multiple"),
        (lambda: assignment(5, 1, scheme="fractional"), "not a multiple"),
        (lambda: assignment(5, 1, scheme="circular"), "unknown scheme"),
        (lambda: Cyclic(4, 1).partitions(4), "does not exist"),
        (lambda: FractionalRepetition(4, 1).partitions(-1), "does not exist"),
        (lambda: Cyclic(4, 1).decoding([7]), "does not exist"),
        (lambda: Cyclic(4, 1).combine(0, [np.zeros(3)]), "one each"),
        (lambda: Cyclic(4, 1).combine(0, [np.zeros(3), np.zeros(2)]), "expected"),
        (lambda: Cyclic(4, 1).combine(0, [np.zeros(3), np.zeros(3, np.float32)]), "expected"),
    ],
)
def test_wrong_arguments_are_refused(make, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()


def test_wrong_decoding_coefficients_of_another_set_give_another_number() -> None:
    code, vectors = Cyclic(7, 2), gradients(7)
    sent = answers(code, vectors)
    stale = code.decoding(range(5)).coefficients
    survivors = (1, 3, 4, 5, 6)
    mixed = combine(stale[list(survivors)], [sent[i] for i in survivors])
    assert not np.allclose(mixed, np.sum(vectors, axis=0), atol=1e-3)
