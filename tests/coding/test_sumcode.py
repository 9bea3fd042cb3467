"""The shard of the sum is the sum of the shards: exact over every set, silent about single vectors, loud when relays
added different sets."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from field_sums import added, coded, plan_of, vectors
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.coding.errors import CodingError, CorruptGeneration, NotDecodable, PacketError
from fedcomp.coding.prime import FIELDS, GF31, GF251, GF65521, inverse
from fedcomp.coding.stream import SplitMix64
from fedcomp.coding.sumcode import (
    SumPlan,
    choose_set,
    contribution,
    decode,
    mask,
    predictable,
    prime_for,
    shares,
)
from fedcomp.coding.sumshards import (
    HEADER_BYTES,
    MASKED,
    SHARE,
    SUM,
    AnsweredSets,
    HeldTags,
    Shard,
    make_tag,
    read_tag,
    set_digest,
)
from fedcomp.errors import ConfigError


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS, ids=repr)
def test_the_sum_over_every_set_is_the_integer_sum(field) -> None:
    plan = plan_of(field)
    integers = vectors(plan)
    made = coded(plan, integers)
    sets = [c for size in range(1, 7) for c in itertools.combinations(range(6), size)]
    assert len(sets) == 63
    for chosen in sets:
        result = decode(plan, added(plan, made, chosen, range(5)))
        np.testing.assert_array_equal(result.integers, integers[list(chosen)].sum(axis=0))
        assert result.weight == len(chosen)
        assert result.left_out == ()


@pytest.mark.parametrize("field", FIELDS, ids=repr)
def test_any_relays_decode_and_one_fewer_do_not(field) -> None:
    plan = plan_of(field)
    integers = vectors(plan)
    sums = added(plan, coded(plan, integers), range(6), range(7))
    for relays in itertools.combinations(range(7), 5):
        result = decode(plan, {r: sums[r] for r in relays})
        np.testing.assert_array_equal(result.integers, integers.sum(axis=0))
    for relays in itertools.combinations(range(7), 4):
        with pytest.raises(NotDecodable, match="4 of the 5"):
            decode(plan, {r: sums[r] for r in relays})


@pytest.mark.slow
@given(st.integers(0, 40), st.integers(1, 6), st.integers(0, 3), st.integers(0, 2), st.sampled_from(FIELDS))
def test_every_length_and_every_remainder(size: int, symbols: int, threshold: int, spare: int, field) -> None:
    plan = plan_of(field, size=size, symbols=symbols, threshold=threshold, relays=symbols + threshold + spare)
    integers = SplitMix64(size).below(2 * plan.bound + 1, 2 * size).reshape(2, size) - plan.bound
    made = coded(plan, integers)
    result = decode(plan, added(plan, made, (0, 1), range(spare, spare + plan.needed)))
    np.testing.assert_array_equal(result.integers, integers.sum(axis=0))


@pytest.mark.slow
def test_every_square_of_rows_is_invertible() -> None:
    """Any K + T rows decode, and any T rows of the random columns hide: no square is singular in either."""
    plan = plan_of(GF251, relays=9, symbols=3, threshold=2)
    code = plan.matrix()
    for rows in itertools.combinations(range(9), 5):
        inverse(GF251, code[list(rows)])
    for rows in itertools.combinations(range(9), 2):
        inverse(GF251, code[list(rows), 3:])


def test_twenty_clients_two_of_them_left_out() -> None:
    """The size of an ordinary round: 20 clients and relays, 12 pieces, 4 random ones."""
    plan = plan_of(contributors=20, relays=20, symbols=12, threshold=4, size=10_001)
    integers = vectors(plan)
    chosen = [c for c in range(20) if c not in (3, 17)]
    result = decode(plan, added(plan, coded(plan, integers), chosen, range(2, 18)))
    np.testing.assert_array_equal(result.integers, integers[chosen].sum(axis=0))


def test_weights_and_further_numbers_are_summed_exactly() -> None:
    plan = plan_of(GF31, max_weight=1000, extras=(10, 0, 500))
    integers, weights = vectors(plan), [0, 1, 7, 1000, 999, 1000]
    extras = [(i, 0, 100 * (i % 6)) for i in range(6)]
    made = [
        shares(plan, contribution(plan, q, w, e), predictable(i))
        for i, (q, w, e) in enumerate(zip(integers, weights, extras, strict=True))
    ]
    result = decode(plan, added(plan, made, range(6), (0, 2, 3, 4, 6)))
    np.testing.assert_array_equal(result.integers, np.array(weights) @ integers)
    assert result.weight == sum(weights)
    assert result.extras == (15, 0, 1500)


# Plans that cannot work.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "bound", "most"),
    [(GF251, 1, 125), (GF251, 3, 41), (GF251, 7, 17), (GF65521, 127, 257), (GF65521, 7, 4680), (GF31, 32767, 32769)],
)
def test_the_largest_federation_of_each_prime(field, bound: int, most: int) -> None:
    plan = plan_of(field, bound=bound, contributors=most, size=3)
    assert most * bound <= field.half
    full = np.full((1, 3), bound)
    total = added(plan, [s * 1 for s in coded(plan, full) * most], range(most), range(5))
    np.testing.assert_array_equal(decode(plan, total).integers, full[0] * most)
    with pytest.raises(ConfigError, match=rf"{(most + 1) * bound}, beyond {field.half}.*allows {most} contributors"):
        plan_of(field, bound=bound, contributors=most + 1)


def test_a_sum_beyond_the_bound_wraps_around() -> None:
    """Why the plan is refused: one contributor more, and the largest sum comes out negative; its weight says so."""
    plan = plan_of(GF251, bound=7, contributors=17, size=3)
    made = coded(plan, np.full((1, 3), 7)) * 18
    assert (GF251.lift(GF251.residues(np.full(3, 18 * 7))) == 18 * 7 - 251).all()
    with pytest.raises(CorruptGeneration, match="the weights sum to 18, 17 of up to 1 cannot"):
        decode(plan, added(plan, made, range(18), range(5)))


def test_the_prime_follows_from_clients_weights_and_levels() -> None:
    assert prime_for(17, 7) == GF251
    assert prime_for(18, 7) == GF65521
    assert prime_for(20, 127) == GF65521
    assert prime_for(20, 127, max_weight=100) == GF31
    with pytest.raises(ConfigError, match="wrap around"):
        prime_for(100, 32767, max_weight=1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"symbols": 6}, "need 8 relays to decode, the plan has 7"),
        ({"symbols": 0}, "symbols=0"),
        ({"threshold": -1}, "threshold=-1"),
        ({"contributors": True}, "contributors=True"),
        ({"max_weight": 43}, "wrap around"),
        ({"extras": (5461,)}, "6 numbers of up to 5461"),
        ({"mode": "both"}, "mode='both'"),
        ({"relays": 65521}, "different rows"),
    ],
)
def test_plans_that_do_not_hold_together_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(**changes)


def test_numbers_outside_the_plan_are_refused() -> None:
    plan = plan_of()
    fits = np.zeros(101, np.int64)
    for integers, weight, extras, message in (
        (np.full(101, 128), 1, (), "magnitude 128 exceeds"),
        (np.full(101, -128), 1, (), "magnitude 128 exceeds"),
        (np.zeros(100, np.int64), 1, (), r"int64\(100,\)"),
        (np.zeros(101), 1, (), r"float64\(101,\)"),
        (fits, 2, (), "weight 2 is not within"),
        (fits, -1, (), "weight -1"),
        (fits, 1, (3,), "beside the vector"),
    ):
        with pytest.raises(ConfigError, match=message):
            contribution(plan, integers, weight, extras)


@pytest.mark.parametrize("field", FIELDS, ids=repr)
def test_a_plan_travels(field) -> None:
    plan = plan_of(field, extras=(3, 4), mode="mask", least=3)
    again = SumPlan.from_config(plan.config())
    assert again == plan
    assert again.digest == plan.digest
    assert replace(plan, seed=12).digest != plan.digest
    for damage in ({"p": 257}, {"relays": "7"}, {"extras": None}, {"unknown": 1}):
        with pytest.raises(ConfigError):
            SumPlan.from_config({**plan.config(), **damage})
    with pytest.raises(ConfigError):
        SumPlan.from_config({k: v for k, v in plan.config().items() if k != "size"})


# Relays that added different sets.


@pytest.mark.parametrize("field", FIELDS, ids=repr)
@pytest.mark.parametrize("relay", range(5))
def test_one_relay_without_one_contributor_is_noticed(field, relay: int) -> None:
    """Without the check every coordinate is noise, and nothing says so."""
    plan = plan_of(field)
    integers = vectors(plan)
    made = coded(plan, integers)
    sums = added(plan, made, range(6), range(5))
    sums[relay] = plan.field.sum([made[c][relay] for c in range(5)])
    with pytest.raises(CorruptGeneration, match="did not add the same contributions"):
        decode(plan, sums)


def test_a_surplus_relay_saves_the_round_and_the_wrong_one_is_named() -> None:
    plan = plan_of()
    integers = vectors(plan)
    made = coded(plan, integers)
    for wrong in range(6):
        sums = added(plan, made, range(6), range(6))
        sums[wrong] = plan.field.sum([made[c][wrong] for c in range(5)])
        result = decode(plan, sums)
        np.testing.assert_array_equal(result.integers, integers.sum(axis=0))
        assert result.left_out == (wrong,)


def missed(checks: int, rounds: int) -> float:
    """Return the share of rounds at p = 251 in which a missing contributor went unnoticed."""
    count = 0
    # The inverse is the same for every round.
    solving = inverse(GF251, plan_of(GF251, size=12, threshold=1, relays=4).matrix())
    for number in range(rounds):
        plan = plan_of(GF251, size=12, checks=checks, seed=number, threshold=1, relays=4, contributors=3, bound=20)
        vector = SplitMix64(number).below(41, 36).reshape(3, 12) - 20
        made = [shares(plan, contribution(plan, q), predictable(number * 3 + i)) for i, q in enumerate(vector)]
        sums = added(plan, made, range(3), range(4))
        sums[number % 4] = GF251.sum([made[0][number % 4], made[1][number % 4]])
        pieces = GF251.matmul(solving[:3], np.stack([sums[r] for r in range(4)])).reshape(-1)
        data, found = pieces[:13], pieces[13 : 13 + checks]
        count += np.array_equal(GF251.dot(plan.challenge(), data), found)
    return count / rounds


@pytest.mark.slow
def test_how_often_an_accident_is_missed() -> None:
    """One check symbol over GF(251) misses 1/251 of them, three 1/251^3."""
    rounds = 2500
    expected = 1 / 251
    assert missed(1, rounds) == pytest.approx(expected, abs=4 * (expected / rounds) ** 0.5)
    assert missed(3, rounds) == 0.0
    assert plan_of(GF251).checks == 3
    assert plan_of(GF65521).checks == plan_of(GF31).checks == 1


def test_powers_of_one_point_miss_what_full_vectors_find() -> None:
    """x^250 = 1 for every x but 0 in GF(251): with 300 coefficients the error x^250 - 1 passes at every point."""
    error = np.zeros(300, np.int64)
    error[0], error[250] = -1, 1
    error = GF251.residues(error)
    points = np.arange(1, 251, dtype=np.int64)
    powers = np.ones((250, 300), np.int64)
    for j in range(1, 300):
        powers[:, j] = powers[:, j - 1] * points % 251
    assert not GF251.dot(powers.astype(np.uint8), error).any()
    challenges = np.concatenate([plan_of(GF251, size=299, seed=s).challenge() for s in range(100)])
    assert challenges.shape == (300, 300)
    assert (GF251.dot(challenges, error) == 0).sum() <= 8


# What T shards say.


def shard_counts(vector: np.ndarray, relays: tuple[int, ...], plan: SumPlan) -> np.ndarray:
    """Return how often each value was seen by the relays together, over independent encodings."""
    seen = [shares(plan, vector, predictable(i))[list(relays)].reshape(-1) for i in range(60)]
    return np.bincount(np.concatenate(seen), minlength=251)


def chi_square(a: np.ndarray, b: np.ndarray) -> float:
    """Return the two-sample statistic, about 250 +- 22 when both come from one distribution over 251 values."""
    pooled = (a + b) / 2
    return float((((a - pooled) ** 2 + (b - pooled) ** 2)[pooled > 0] / pooled[pooled > 0]).sum())


@pytest.mark.parametrize("relays", [(0,), (6,), (0, 1), (2, 5)])
def test_t_shards_of_two_inputs_cannot_be_told_apart(relays: tuple[int, ...]) -> None:
    plan = plan_of(GF251, size=600, checks=3)
    zeros = contribution(plan, np.zeros(600, np.int64), 1)
    full = contribution(plan, np.full(600, 6), 1)
    assert chi_square(shard_counts(zeros, relays, plan), shard_counts(full, relays, plan)) < 250 + 5 * 22.4
    bare = replace(plan, threshold=0)
    assert chi_square(shard_counts(zeros, relays, bare), shard_counts(full, relays, bare)) > 10_000


def test_two_shards_together_are_jointly_uniform() -> None:
    """One relay's shard is uniform in any case with T >= 1; T = 2 means that pairs are, too."""

    def pairs(threshold: int) -> float:
        plan = plan_of(GF251, size=600, threshold=threshold)
        vector = contribution(plan, np.full(600, 6), 1)
        cells = np.zeros((25, 25))
        for i in range(60):
            made = shares(plan, vector, predictable(i)).astype(np.int64)
            np.add.at(cells, (made[0] * 25 // 251, made[1] * 25 // 251), 1)
        rows = np.bincount(np.arange(251) * 25 // 251) / 251
        expected = cells.sum() * np.outer(rows, rows)
        return float(((cells - expected) ** 2 / expected).sum())

    assert pairs(2) < 624 + 5 * 35.3
    assert pairs(1) > 10_000


def test_shards_are_random_without_a_seed() -> None:
    plan = plan_of()
    vector = contribution(plan, vectors(plan, 1)[0])
    assert not np.array_equal(shares(plan, vector), shares(plan, vector))
    assert np.array_equal(shares(plan, vector, predictable(1)), shares(plan, vector, predictable(1)))


# The set.


@pytest.mark.slow
@given(
    st.integers(1, 6), st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n)))
)
def test_a_chosen_set_is_held_in_full_by_enough_relays(needed: int, held: list[list[bool]]) -> None:
    matrix = np.array(held, bool).reshape(len(held), -1) if held else np.zeros((0, 3), bool)
    sources, relays = choose_set(matrix, needed)
    if sources:
        assert len(relays) >= needed
        assert matrix[np.ix_(relays, sources)].all()
        assert relays == tuple(np.flatnonzero(matrix[:, sources].all(axis=1)))
    elif matrix.size:
        assert not (matrix.sum(axis=0) >= needed).any()


def test_the_set_follows_the_rule() -> None:
    everything = np.ones((5, 4), bool)
    assert choose_set(everything, 3) == ((0, 1, 2, 3), (0, 1, 2, 3, 4))
    one_short = everything.copy()
    one_short[0, 2] = False  # the relay is dropped, not the source
    assert choose_set(one_short, 3) == ((0, 1, 2, 3), (1, 2, 3, 4))
    late = everything.copy()
    late[2:, 1] = False  # held by two relays only: the source is dropped
    assert choose_set(late, 3) == ((0, 2, 3), (0, 1, 2, 3, 4))
    spread = everything.copy()
    spread[0, 0] = spread[1, 1] = spread[2, 1] = False  # too few complete relays: the most missed source goes
    assert choose_set(spread, 3) == ((0, 2, 3), (1, 2, 3, 4))
    equal = everything.copy()
    equal[0, 0] = equal[1, 1] = equal[2, 2] = False
    assert choose_set(equal, 4) == ((0, 3), (1, 2, 3, 4))  # of equals the last goes
    assert choose_set(np.zeros((0, 4), bool), 3) == ((), ())
    assert choose_set(np.zeros((3, 0), bool), 3) == ((), ())


# What relays do.


def shards_for(plan: SumPlan, relay: int, made: list[np.ndarray]) -> dict[int, Shard]:
    return {c: Shard(SHARE, relay, c, bytes([c]) * 24, made[c][relay]) for c in range(len(made))}


def test_a_relay_answers_for_one_set_a_round() -> None:
    plan = plan_of()
    held = shards_for(plan, 2, coded(plan, vectors(plan)))
    chosen = {c: bytes([c]) * 24 for c in range(5)}
    relay = AnsweredSets()
    first = relay.add_up(plan, 1, chosen, held)
    assert (first.relay, first.source, first.kind, first.tag) == (2, 5, SUM, set_digest(plan, 1, chosen))
    np.testing.assert_array_equal(relay.add_up(plan, 1, chosen, held).body, first.body)
    other = {**chosen, 5: bytes([5]) * 24}
    with pytest.raises(CodingError, match="another set of contributors in round 1"):
        relay.add_up(plan, 1, other, held)
    again = AnsweredSets(relay.answered)  # after a restart
    with pytest.raises(CodingError, match="another set"):
        again.add_up(plan, 1, other, held)
    assert again.add_up(plan, 2, other, held).source == 6


def test_a_relay_never_adds_what_it_does_not_have() -> None:
    plan = plan_of()
    held = shards_for(plan, 2, coded(plan, vectors(plan)))
    chosen = {c: bytes([c]) * 24 for c in range(3)}
    relay = AnsweredSets()
    with pytest.raises(NotDecodable, match=r"lacks the shards of 1 contributor\(s\), first 1"):
        relay.add_up(plan, 1, chosen, {c: s for c, s in held.items() if c != 1})
    with pytest.raises(NotDecodable, match="lacks"):  # the shard of another encoding
        relay.add_up(plan, 1, {**chosen, 1: b"x" * 24}, held)
    with pytest.raises(CodingError, match="different relays"):
        relay.add_up(plan, 1, chosen, {**held, 1: replace(held[1], relay=3)})
    with pytest.raises(CodingError, match=r"1 contributor\(s\) was asked for; this relay adds 2"):
        relay.add_up(plan, 1, {0: chosen[0]}, held)
    assert relay.answered == {}


def test_shards_of_two_encodings_do_not_mix() -> None:
    """Each encoding has random pieces of its own; that is what the tag is for."""
    plan = plan_of()
    vector = contribution(plan, vectors(plan, 1)[0])
    one, two = shares(plan, vector, predictable(1)), shares(plan, vector, predictable(2))
    with pytest.raises(CorruptGeneration):
        decode(plan, {r: (one if r < 3 else two)[r] for r in range(5)})


def test_a_relay_reports_one_bit_for_what_the_server_knows() -> None:
    plan = plan_of(contributors=11)
    known = {c: bytes([c]) * 24 for c in range(11)}
    plain = HeldTags.of(plan, {c: [known[c]] for c in (0, 3, 10)})
    assert (len(plain.bitmap), len(plain.digest), plain.details) == (2, 8, ())
    assert plain.tags(plan, known) == {c: (known[c],) for c in (0, 3, 10)}
    other = b"y" * 24
    mixed = HeldTags.of(plan, {0: [known[0]], 3: [known[3], other], 7: [other]}, unknown=[7])
    assert mixed.details == ((3, known[3]), (3, other), (7, other))
    without = {c: tag for c, tag in known.items() if c != 7}
    assert mixed.tags(plan, without) == {0: (known[0],), 3: (known[3], other), 7: (other,)}
    assert HeldTags.of(plan, {}).tags(plan, {}) == {}


def test_reports_of_other_encodings_than_were_announced_are_refused() -> None:
    plan = plan_of(contributors=11)
    known = {c: bytes([c]) * 24 for c in range(11)}
    report = HeldTags.of(plan, {0: [known[0]], 3: [b"y" * 24]})
    with pytest.raises(PacketError, match="other encodings"):
        report.tags(plan, known)
    with pytest.raises(PacketError, match="unknown tags"):
        report.tags(plan, {0: known[0]})
    for bitmap in (b"", b"\x80", b"\x80\x01", b"\x80\x00\x00"):
        with pytest.raises(PacketError, match="does not fit 11"):
            replace(report, bitmap=bitmap).tags(plan, known)
    with pytest.raises(PacketError, match="unknown tags"):
        replace(report, details=((11, known[0]),)).tags(plan, known)


def test_a_tag_carries_the_numbers_of_the_message_it_answers() -> None:
    assert read_tag(make_tag(2**40 + 1, 7)) == (2**40 + 1, 7)
    assert make_tag(1, 1) != make_tag(1, 1)


# LightSecAgg: the mask is coded.


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS, ids=repr)
def test_masks_decode_to_the_sum_of_what_they_hide(field) -> None:
    """Seven clients, one random piece, five of seven relays, and two clients that vanish after their upload."""
    plan = plan_of(field, mode="mask", symbols=4, threshold=1, relays=7)
    integers = vectors(plan)
    own = [contribution(plan, q) for q in integers]
    masks = [mask(plan, predictable(100 + c)) for c in range(6)]
    made = [shares(plan, z, predictable(c)) for c, z in enumerate(masks)]
    uploads = [field.add(x, z) for x, z in zip(own, masks, strict=True)]
    for chosen in itertools.combinations(range(6), 4):
        total = field.sum([uploads[c] for c in chosen])
        result = decode(plan, added(plan, made, chosen, (0, 2, 3, 5, 6)), total)
        np.testing.assert_array_equal(result.integers, integers[list(chosen)].sum(axis=0))
        wrong = field.sum([uploads[c] for c in (*chosen[:-1], (set(range(6)) - set(chosen)).pop())])
        with pytest.raises(CorruptGeneration):
            decode(plan, added(plan, made, chosen, range(5)), wrong)


def test_a_masked_vector_says_nothing() -> None:
    plan = plan_of(GF251, mode="mask", size=600)
    zeros, full = (contribution(plan, np.full(600, level)) for level in (0, 6))
    uploads = [
        np.bincount(np.concatenate([GF251.add(x, mask(plan, predictable(seed + i))) for i in range(60)]), minlength=251)
        for seed, x in ((0, zeros), (1000, full))
    ]
    assert chi_square(*uploads) < 250 + 5 * 22.4


def test_modes_are_not_mixed_up() -> None:
    plan = plan_of()
    sums = added(plan, coded(plan, vectors(plan)), range(6), range(5))
    with pytest.raises(ConfigError, match="masked vectors is extra"):
        decode(plan, sums, np.zeros(plan.length, np.uint16))
    with pytest.raises(ConfigError, match="masked vectors is missing"):
        decode(replace(plan, mode="mask"), sums)


# What travels.


@pytest.mark.parametrize("field", FIELDS, ids=repr)
def test_a_shard_travels_in_as_many_bytes_as_symbols_take(field) -> None:
    plan = plan_of(field)
    shard = Shard(SHARE, 3, 70_000, bytes(range(24)), field.random(plan.shard_symbols, SplitMix64(1)))
    data = shard.to_bytes(plan)
    assert HEADER_BYTES == 48
    assert len(data) == 48 + plan.shard_symbols * field.symbol_bytes
    back = Shard.from_bytes(data, plan)
    assert (back.kind, back.relay, back.source, back.tag) == (SHARE, 3, 70_000, bytes(range(24)))
    np.testing.assert_array_equal(back.body, shard.body)
    whole = Shard(MASKED, 0, 1, bytes(24), field.random(plan.length, SplitMix64(1)))
    np.testing.assert_array_equal(Shard.from_bytes(whole.to_bytes(plan), plan).body, whole.body)


def test_golden_bytes() -> None:
    """The format for ever: header, plan digest, checksum, little-endian symbols."""
    plan = SumPlan(GF65521, 3, 7, 4, 3, 2, 1, seed=1)
    vector = contribution(plan, np.array([7, -7, 1]))
    np.testing.assert_array_equal(vector[:4], [7, 65514, 1, 1])
    made = Shard(SHARE, 2, 5, bytes(range(24)), shares(plan, vector, predictable(9))[2])
    assert made.to_bytes(plan).hex() == GOLDEN


GOLDEN = "4653010200000200050000008b475fbbe3bf96fd000102030405060708090a0b0c0d0e0f101112131415161725ee32d474a042901c98"


@pytest.mark.parametrize("cut", [0, 1, 47, 48, 49, -1, -2])
def test_truncated_shards_are_refused(cut: int) -> None:
    plan = plan_of()
    data = Shard(SHARE, 3, 1, bytes(24), np.zeros(plan.shard_symbols, np.uint16)).to_bytes(plan)
    with pytest.raises(PacketError):
        Shard.from_bytes(data[:cut], plan)
    with pytest.raises(PacketError):
        Shard.from_bytes(data + b"\0", plan)


def test_every_flipped_bit_is_noticed() -> None:
    plan = plan_of(GF251, size=9)
    data = bytearray(Shard(SHARE, 3, 1, bytes(24), np.arange(plan.shard_symbols, dtype=np.uint8)).to_bytes(plan))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PacketError):
            Shard.from_bytes(bytes(data), plan)
        data[bit // 8] ^= 1 << bit % 8
    assert Shard.from_bytes(bytes(data), plan).relay == 3


def test_shards_of_another_plan_are_refused() -> None:
    """Of another round above all: its check symbols come from another seed."""
    plan = plan_of()
    shard = Shard(SHARE, 3, 1, bytes(24), np.zeros(plan.shard_symbols, np.uint16))
    with pytest.raises(PacketError, match="another plan"):
        Shard.from_bytes(shard.to_bytes(replace(plan, seed=12)), plan)
    beyond = replace(shard, body=np.full(plan.shard_symbols, 65521, np.uint16))
    with pytest.raises(PacketError, match="not elements of GF"):
        Shard.from_bytes(beyond.to_bytes(plan), plan)
    with pytest.raises(PacketError, match="relay 7 of 7"):
        Shard.from_bytes(replace(shard, relay=7).to_bytes(plan), plan)


def test_a_million_coordinates_take_bounded_memory() -> None:
    """Encoding works on blocks: shards and a few vectors of the size, not a float64 copy of everything."""
    import tracemalloc

    plan = plan_of(size=1_000_000, contributors=20, relays=20, symbols=16)
    integers = SplitMix64(1).below(255, plan.size) - 127
    tracemalloc.start()
    made = shares(plan, contribution(plan, integers), predictable(1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made.nbytes == 20 * plan.shard_symbols * plan.field.symbol_bytes
    assert peak < 60e6
