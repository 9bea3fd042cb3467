"""TopAgg's votes: what is cast, how long the frames are, what is refused, and how far one voter moves the sum."""

from __future__ import annotations

import math

import numpy as np
import pytest
from frame_mutants import seal
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp import wire
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.layout import DENSE, Layout, Update
from fedcomp.privacy.votes import (
    ORDER,
    TopkSign,
    decode_rows,
    encode_rows,
    entropy_bits,
    pass_probability,
    repeated_votes,
    threshold,
    topk_stochastic_sign,
)
from fedcomp.rng import Key

KEY = Key(31, "uplink", round=3, partition=5)
NAMED = ("raw", "fixed", "bitmap", "rice", "elias-fano", "complement:rice", "complement:bitmap")
SIZES = ((784, 200), (784, 300), (12288, 700), (61706, 1000), (10**6, 10**4))
"""Coordinates and votes of the published settings, of a small convolutional network, and of a larger model."""


def gradient(d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, d]).standard_t(3, d).astype(np.float32)


def cast(codec: TopkSign, vector: np.ndarray, layout: Layout | None = None, key: Key = KEY) -> bytes:
    chosen = layout or Layout.flat(vector.size)
    return codec.encode(Update(vector.astype(np.float32), chosen), codec.init(chosen), key)[0]


def test_1_11_b_the_expected_vote_is_the_clipped_ratio_on_the_support() -> None:
    """E[v] = clip(g / b, -1, 1) on the k largest, exactly 0 outside; b is the maximum or the saturation."""
    g = np.array([0.3, -2.0, 0.05, 1.0, 0.0, -0.5, 1.6, 0.2])
    draws = 40_000
    for saturation, scale in ((None, 2.0), (1.25, 1.25), (50.0, 2.0)):
        votes = topk_stochastic_sign(np.tile(g, (draws, 1)), 5, saturation=saturation, uniforms=KEY)
        kept = np.array([1, 3, 5, 6, 0])
        rest = np.setdiff1d(np.arange(g.size), kept)
        assert not votes[:, rest].any()
        assert (np.abs(votes[:, kept]) == 1).all()
        expected = np.clip(g[kept] / scale, -1.0, 1.0)
        error = 5.0 * np.sqrt((1.0 - expected**2) / draws)
        assert (np.abs(votes[:, kept].mean(axis=0) - expected) <= error).all()
    # A tiny saturation makes the vote the plain sign.
    plain = topk_stochastic_sign(g, 5, stochastic=False)
    np.testing.assert_array_equal(topk_stochastic_sign(g, 5, saturation=1e-9, uniforms=KEY), plain)
    np.testing.assert_array_equal(plain, [1, -1, 0, 1, 0, -1, 1, 0])


@settings(max_examples=40, deadline=None)
@given(
    g=st.lists(st.integers(-50, 50), min_size=1, max_size=12),
    k=st.integers(1, 14),
    power=st.integers(-20, 20),
    seed=st.integers(0, 99),
)
def test_1_11_f_votes_do_not_see_the_scale_nor_the_order(g: list[int], k: int, power: int, seed: int) -> None:
    """vote(λ g) = vote(g) for the same draws; permuted distinct magnitudes are permuted plain votes."""
    x = np.array(g, np.float64)
    once = topk_stochastic_sign(x, k, uniforms=Key(seed))
    np.testing.assert_array_equal(topk_stochastic_sign(x * 2.0**power, k, uniforms=Key(seed)), once)
    np.testing.assert_array_equal(topk_stochastic_sign(-x, k, stochastic=False), -plain_votes(x, k))
    assert np.count_nonzero(once) == min(k, np.count_nonzero(x))
    distinct = x + np.arange(x.size) / 64.0 * np.where(x < 0, -1, 1)
    if np.unique(np.abs(distinct)).size == x.size:
        order = np.random.default_rng(seed).permutation(x.size)
        np.testing.assert_array_equal(plain_votes(distinct[order], k), plain_votes(distinct, k)[order])


def plain_votes(x: np.ndarray, k: int) -> np.ndarray:
    return topk_stochastic_sign(x, k, stochastic=False)


def test_1_11_g_a_zero_or_non_finite_row_casts_no_vote() -> None:
    """In the function; the codec raises, as all do, and the client's absence is the same to the sum."""
    rows = np.random.default_rng(0).normal(size=(5, 9))
    rows[1] = 0.0
    rows[2, 4] = np.nan
    rows[3, 0] = -np.inf
    for stochastic in (True, False):
        votes = topk_stochastic_sign(rows, 4, stochastic=stochastic, uniforms=KEY)
        assert np.count_nonzero(votes, axis=1).tolist() == [4, 0, 0, 0, 4]
    assert not topk_stochastic_sign(np.zeros(7), 7, uniforms=KEY).any()
    codec = TopkSign(k=4)
    assert not codec.ballot(cast(codec, np.zeros(9)), Layout.flat(9)).any()
    for bad in (np.nan, np.inf):
        with pytest.raises(NonFiniteUpdate):
            cast(codec, np.array([1.0, bad, 2.0]))


def test_exact_zeros_abstain_and_ties_go_to_the_lowest_index() -> None:
    votes = topk_stochastic_sign(np.array([0.0, 1.0, -0.0, -1.0, 1.0]), 5, uniforms=KEY)
    assert np.flatnonzero(votes).tolist() == [1, 3, 4]
    assert np.flatnonzero(plain_votes(np.array([1.0, -1.0, 1.0, 1.0]), 2)).tolist() == [0, 1]
    rows = np.array([[1.0, 2.0, 2.0, 2.0], [3.0, 1.0, 2.0, 5.0]])
    np.testing.assert_array_equal(plain_votes(rows, 2), [[0, 1, 1, 0], [1, 0, 0, 1]])


@settings(max_examples=30, deadline=None)
@given(d=st.integers(1, 400), k=st.integers(1, 500), seed=st.integers(0, 10**6), stochastic=st.booleans())
def test_1_11_k_a_packed_vote_decodes_exactly(d: int, k: int, seed: int, stochastic: bool) -> None:
    """The codec's frame, the function with the same key, and the frame of several rows say the same votes."""
    x = np.random.default_rng(seed).integers(-6, 7, d).astype(np.float32)
    codec = TopkSign(k=k, stochastic=stochastic)
    votes = codec.ballot(cast(codec, x), Layout.flat(d))
    want = topk_stochastic_sign(x, k, stochastic=stochastic, uniforms=KEY.at(layer=0))
    np.testing.assert_array_equal(votes, want)
    rows = topk_stochastic_sign(np.stack([x, x[::-1], 0 * x]), k, stochastic=stochastic, uniforms=KEY)
    np.testing.assert_array_equal(decode_rows(encode_rows(rows), 3, d, k), rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "k"), [pytest.param(*size, marks=pytest.mark.long if size[0] == 61706 else ()) for size in SIZES]
)
def test_1_11_k_bytes_are_within_five_per_cent_of_the_entropy(d: int, k: int) -> None:
    """len(frame) of votes on uniform supports, against log2 C(d, k) + k bits plus the frame of an empty vote."""
    codec = TopkSign(k=k)
    layout = Layout.flat(d)
    header = len(cast(codec, np.zeros(d), layout))
    assert header < 40
    for seed in range(3 if d > 10**5 else 20):
        frame = cast(codec, np.random.default_rng(seed).normal(size=d), layout, Key(seed))
        assert len(frame) <= 1.05 * entropy_bits(d, k) / 8 + header
        assert np.count_nonzero(codec.ballot(frame, layout)) == k


def test_1_11_k_the_entropy_bound_is_that_of_the_published_settings() -> None:
    """log2 C(d, k), whose rounded values are known, and against exact integers."""
    known_bits = (637, 747, 3868, 7372, 80785)
    assert [round(entropy_bits(d, k) - k) for d, k in SIZES] == list(known_bits)
    assert entropy_bits(40, 7) == pytest.approx(math.log2(math.comb(40, 7)) + 7, abs=1e-9)
    assert entropy_bits(9, 20, rows=3) == pytest.approx(27, abs=1e-9)


def test_the_shortest_index_codec_is_chosen_per_message() -> None:
    """Against every codec asked for by name, the bitmap among them; a batch costs one header."""
    layout, chosen = Layout.flat(4096), set()
    for k in (40, 1500, 2048, 4000):
        codec = TopkSign(k=k)
        frame = cast(codec, gradient(4096, 1), layout)
        tensor = codec.open(frame, layout).tensors[0]
        chosen.add(tensor.index)
        named = (wire.sparse((4096,), tensor.indices, tensor.values, index=name) for name in NAMED)
        assert len(frame) <= min(len(wire.encode([other])) for other in named) + 1
        assert len(frame) <= 1.05 * entropy_bits(4096, k) / 8 + len(cast(codec, np.zeros(4096), layout))
    assert chosen == {"rice", "complement:rice"}
    votes = topk_stochastic_sign(np.random.default_rng(0).normal(size=(15, 784)), 200, uniforms=KEY)
    data = encode_rows(votes)
    assert len(data) <= 1.05 * entropy_bits(784, 200, rows=15) / 8 + len(encode_rows(0 * votes))
    assert len(data) < 15 * (len(cast(TopkSign(k=200), gradient(784))) - 30)


def test_periodic_and_clustered_supports_cost_no_more_than_uniform_ones() -> None:
    """Dead inputs of a dense layer leave every sixth column empty; votes of a trained layer stand in runs."""
    rng = np.random.default_rng(4)
    periodic = rng.normal(size=(32, 75)) * (np.arange(75) % 6 > 1)
    clustered = rng.normal(size=2400) * np.repeat(rng.random(100) < 0.4, 24)
    for vector, k in ((periodic.reshape(-1), 480), (periodic.reshape(-1), 240), (clustered, 300)):
        codec, layout = TopkSign(k=k), Layout.flat(2400)
        frame = cast(codec, vector)
        assert len(frame) <= 1.05 * entropy_bits(2400, k) / 8 + len(cast(codec, np.zeros(2400)))
        want = topk_stochastic_sign(vector.astype(np.float32), k, uniforms=KEY.at(layer=0))
        np.testing.assert_array_equal(codec.ballot(frame, layout), want)
        assert (np.diff(codec.support(frame, layout)) > 0).all()


def test_all_orders_are_used_and_other_flags_are_refused() -> None:
    codec, layout, orders = TopkSign(k=100), Layout.flat(2000), set()
    for seed in range(24):
        frame = cast(codec, gradient(2000, seed))
        orders.add(codec.open(frame, layout).flags)
        if seed == 0:
            for flags in (1, 2, 16, 32, 64, 128, 4 | 16):
                forged = frame[:6] + bytes((flags, 0)) + frame[8:-4]
                with pytest.raises(wire.WireError, match="flags"):
                    codec.ballot(seal(forged), layout)
    assert orders == {0, 4, 8, ORDER}
    periodic = np.random.default_rng(1).normal(size=(6, 90)) * (np.arange(90) % 3 > 0)
    rows = topk_stochastic_sign(periodic, 20, uniforms=KEY)
    data = encode_rows(rows)
    np.testing.assert_array_equal(decode_rows(data, 6, 90, 20), rows)
    with pytest.raises(wire.WireError, match="flags"):
        decode_rows(seal(data[:6] + b"\x01\0" + data[8:-4]), 6, 90, 20)


GOLDEN = (
    "4643573101000000010000002000000000000002020501050401000d0000020136020a9b6a59fc",
    "4643573101000c00010000002000000000000002020501050401000d00000101ec0c97242a6a",
)
"""One batch in its own order and scattered, which is shorter."""


def test_golden_bytes_of_a_batch() -> None:
    """What was once sent is decoded for ever, and this encoder still sends it."""
    votes = np.array([[0, 1, -1, 0, 1], [-1, 0, 0, 0, 1]], np.int8)
    assert encode_rows(votes).hex() == GOLDEN[1]
    for sent in GOLDEN:
        np.testing.assert_array_equal(decode_rows(bytes.fromhex(sent), 2, 5, 3), votes)


def sparse_votes(d: int, indices: list[int], values: wire.Values) -> wire.Tensor:
    return wire.sparse((d,), np.array(indices), values)


SIGNS = wire.UnitSign(np.array([True, False, True]))
FORGED = {
    "one vote more": sparse_votes(20, [0, 3, 4, 9], wire.UnitSign(np.zeros(4, np.bool_))),
    "a value of 2": sparse_votes(20, [0, 3, 4], wire.Raw(np.float32([1, 2, -1]))),
    "a value of NaN": sparse_votes(20, [0, 3, 4], wire.Raw(np.float32([1, np.nan, -1]))),
    "a scale of 3": sparse_votes(20, [0, 3, 4], wire.SignScale(SIGNS.negative, np.float32([3.0]))),
    "a scale of 1": sparse_votes(20, [0, 3, 4], wire.SignScale(SIGNS.negative, np.float32([1.0]))),
    "another shape": sparse_votes(21, [0, 3, 4], SIGNS),
    "dense": wire.Tensor(wire.UnitSign(np.zeros(20, np.bool_)), (20,)),
    "a support of a seed": wire.seeded((20,), 7, 3, SIGNS),
    "float64": wire.sparse((20,), np.array([0, 3, 4]), SIGNS, dtype="float64"),
}


@pytest.mark.parametrize("forged", FORGED, ids=str)
def test_1_11_h_a_forged_vote_is_refused_before_it_is_added(forged: str) -> None:
    codec, layout = TopkSign(k=3), Layout.flat(20)
    assert codec.open(wire.encode([sparse_votes(20, [0, 3, 4], SIGNS)]), layout)
    out = Update(np.zeros(20, np.float32), layout)
    with pytest.raises(wire.WireError):
        codec.accumulate(wire.encode([FORGED[forged]]), 1.0, out)
    assert not out.vector.any()


def test_1_11_h_every_value_a_frame_can_hold_is_a_vote() -> None:
    """No bit of the section says anything but -1 or +1; padding is checked."""
    codec, layout = TopkSign(k=3), Layout.flat(20)
    frame = bytearray(wire.encode([sparse_votes(20, [0, 3, 4], SIGNS)]))
    for at in range(16, len(frame) - 4):
        for bit in range(8):
            forged = bytearray(frame[:-4])
            forged[at] ^= 1 << bit
            try:
                votes = codec.ballot(seal(bytes(forged)), layout)
            except wire.WireError:
                continue
            assert np.isin(votes, (-1, 0, 1)).all()
            assert np.count_nonzero(votes) <= 3


@pytest.mark.parametrize(
    "votes",
    [np.eye(4, dtype=np.int8)[:3] * 2, np.ones((3, 4), np.int8), np.ones((3, 4), np.float32), np.ones(12, np.int8)],
    ids=["value 2", "four of two", "floats", "one row"],
)
def test_rows_that_are_no_votes_are_refused(votes: np.ndarray) -> None:
    try:
        data = encode_rows(votes)
    except ConfigError:
        return
    with pytest.raises(wire.WireError):
        decode_rows(data, 3, 4, 2)


def test_rows_share_no_votes() -> None:
    """k is the bound of each row: votes that one row did not cast cannot be cast by another."""
    votes = np.zeros((3, 6), np.int8)
    votes[1, :3] = 1
    assert np.count_nonzero(decode_rows(encode_rows(votes), 3, 6, 3)) == 3
    with pytest.raises(wire.SchemaMismatch, match="row 1 holds 3 votes"):
        decode_rows(encode_rows(votes), 3, 6, 2)
    for rows, d in ((2, 6), (3, 5), (6, 3)):
        with pytest.raises(wire.WireError):
            decode_rows(encode_rows(votes), rows, d, 3)
    assert decode_rows(encode_rows(votes[:0]), 0, 6, 3).shape == (0, 6)


def test_everything_of_the_model_votes() -> None:
    """A small tensor that a policy sends dense would have no bound: it is ranked with the others."""
    arrays = {"weight": np.zeros((80, 40), np.float32), "bias": np.zeros(30, np.float32), "steps": np.array(3)}
    layout = Layout.of(arrays)
    assert layout.dense_size == 30
    vector = gradient(layout.size)
    layout.view(vector, "bias")[:] = 100.0
    codec = TopkSign(k=25)
    votes = codec.ballot(cast(codec, vector, layout), layout)
    assert np.count_nonzero(votes) == np.count_nonzero(layout.view(votes.astype(np.float32), "bias")) == 25
    assert [e.shape for e in codec.schema(layout)] == [(layout.size,)]


@pytest.mark.parametrize("k", [3, 10, 77, 500, 1229, 1230, 5000])
def test_layers_share_exactly_k_votes(k: int) -> None:
    arrays = {"a": np.zeros((40, 30), np.float32), "b": np.zeros(20, np.float32), "c": np.zeros(10, np.float32)}
    layout = Layout.of(arrays, lambda *_: None)
    codec = TopkSign(k=k, scope="layer")
    counts = [codec.count(s) for s in codec.stretches(layout)]
    assert sum(counts) == codec.total(layout) == min(k, 1230)
    assert all(1 <= count <= size for count, size in zip(counts, (1200, 20, 10), strict=True))
    votes = codec.ballot(cast(codec, gradient(1230), layout), layout)
    assert np.linalg.norm(votes.astype(float)) == pytest.approx(math.sqrt(min(k, 1230)))
    got = [np.count_nonzero(votes[s.slice]) for s in codec.stretches(layout)]
    assert got == counts


def test_policy_densities_decide_the_layers_votes() -> None:
    """With a density of the codec they stand as they are; with k they are proportions of it."""
    arrays = {"a": np.zeros(1000, np.float32), "b": np.zeros(1000, np.float32), "c": np.zeros(50, np.float32)}
    densities = {"a": 0.05, "b": 0.2, "c": DENSE}
    layout = Layout.of(arrays, lambda name, *_: densities[name])
    spelt = TopkSign(density=0.1, scope="layer")
    assert [spelt.count(s) for s in spelt.stretches(layout)] == [50, 200, 5]
    shared = TopkSign(k=100, scope="layer")
    a, b, c = (shared.count(s) for s in shared.stretches(layout))
    assert a + b + c == 100
    assert (b, c) == (4 * a, 1) or abs(b - 4 * a) <= 3
    with pytest.raises(ConfigError, match="scope='layer'"):
        TopkSign(k=100).init(layout)
    with pytest.raises(ConfigError, match="at least one each"):
        TopkSign(k=2, scope="layer").init(layout)


def test_a_layer_cannot_cast_the_votes_of_another() -> None:
    arrays = {"a": np.zeros(100, np.float32), "b": np.zeros(100, np.float32)}
    layout = Layout.of(arrays, lambda *_: None)
    codec = TopkSign(k=20, scope="layer")
    tensors = list(codec.open(cast(codec, gradient(200), layout), layout).tensors)
    signs = wire.UnitSign(np.zeros(11, np.bool_))
    forged = [
        wire.sparse((100,), np.arange(11), signs),
        wire.sparse((100,), np.arange(9), wire.UnitSign(signs.negative[:9])),
    ]
    assert codec.open(wire.encode(tensors), layout)
    with pytest.raises(wire.WireError):
        codec.open(wire.encode(forged), layout)


def test_arguments_are_checked() -> None:
    for build in (
        lambda: TopkSign(),
        lambda: TopkSign(k=3, density=0.1),
        lambda: TopkSign(k=0),
        lambda: TopkSign(k=2.5),  # type: ignore[arg-type]
        lambda: TopkSign(density=0.0),
        lambda: TopkSign(k=3, saturation=0.0),
        lambda: TopkSign(k=3, scope="row"),
        lambda: TopkSign(k=3, stochastic=1),  # type: ignore[arg-type]
        lambda: ErrorFeedback(TopkSign(k=3)),
        lambda: topk_stochastic_sign(np.ones(4), 0, uniforms=KEY),
        lambda: topk_stochastic_sign(np.ones(4), 2),
        lambda: topk_stochastic_sign(np.ones(4), 2, uniforms=np.zeros(3)),
        lambda: topk_stochastic_sign(np.ones((2, 2, 2)), 2, uniforms=KEY),
        lambda: topk_stochastic_sign(np.ones(4), 2, saturation=-1.0, uniforms=KEY),
        lambda: threshold(np.ones(3), -0.5),
        lambda: threshold(np.ones(3), math.nan),
        lambda: pass_probability(3.0, -1.0, 0.0),
        lambda: pass_probability(math.nan, 1.0, 0.0),
    ):
        with pytest.raises(ConfigError):
            build()


def test_threshold_is_strict_and_odd() -> None:
    total = np.array([-3.0, -2.0, -1.9, 0.0, 1.0, 2.0, 2.1])
    assert threshold(total, 2.0).tolist() == [-1, 0, 0, 0, 0, 0, 1]
    assert threshold(total, 0.0).tolist() == [-1, -1, -1, 0, 1, 1, 1]
    np.testing.assert_array_equal(threshold(-total, 1.5), -threshold(total, 1.5))


@pytest.mark.parametrize(
    ("n", "sigma", "beta", "noise_passes", "unanimous_passes"),
    [
        (4000, 5000, 0.7, 0.58, 0.59),
        (6000, 9000, 0.85, 0.57, 0.54),
        (4000, 800, 0.2, 0.32, 1.0),
        (6000, 700, 0.12, 0.30, 1.0),
    ],
)
def test_1_6_4_pass_probabilities_of_the_published_settings(
    n: int, sigma: float, beta: float, noise_passes: float, unanimous_passes: float
) -> None:
    """The closed form, against what is known of the published settings and against draws."""
    quiet = sum(pass_probability(0.0, sigma, beta * n))
    right, wrong = pass_probability(n, sigma, beta * n)
    assert quiet == pytest.approx(noise_passes, abs=0.02)
    assert right == pytest.approx(unanimous_passes, abs=0.02)
    draws = np.random.default_rng(n).normal(n, sigma, 20_000)
    passed = threshold(draws, beta * n)
    assert (passed == 1).mean() == pytest.approx(right, abs=0.02)
    assert (passed == -1).mean() == pytest.approx(wrong, abs=0.02)
    assert pass_probability(-n, sigma, beta * n) == (right, wrong)
    assert pass_probability(5, 0.0, 4.0) == (1.0, 0.0)
    assert pass_probability(5, 0.0, 5.0) == (0.0, 0.0)


@pytest.mark.slow
def test_f_repeated_votes_are_those_of_the_rows_with_coins_of_their_own() -> None:
    rows = Key(11, "rows").uniform(6 * 40).reshape(6, 40).astype(np.float32) - np.float32(0.5)
    rows[1], rows[2, 3] = 0.0, np.nan
    plain = repeated_votes(rows, 9, 3, stochastic=False)
    assert plain.shape == (6, 3, 40)
    for draw in range(3):
        assert np.array_equal(plain[:, draw], topk_stochastic_sign(rows, 9, stochastic=False))
    assert not plain[1:3].any()
    coins = Key(12, "coins")
    once = repeated_votes(rows, 9, 1, uniforms=coins)
    assert np.array_equal(once[:, 0], topk_stochastic_sign(rows, 9, uniforms=coins))
    # A positive factor changes nothing, and every draw is another one with the right mean: clip(g / b, -1, 1).
    many = repeated_votes(rows * np.float32(4.0), 9, 4000, uniforms=coins)
    assert np.array_equal(np.abs(many), np.abs(many[:, :1]).repeat(4000, axis=1))
    wanted = np.where(plain[:, 0] != 0, rows / np.abs(rows).max(axis=1, keepdims=True).clip(1e-9), 0.0)
    assert np.allclose(many[[0, 3, 4, 5]].mean(axis=1), wanted[[0, 3, 4, 5]], atol=0.08)
    for wrong in ((rows, 0, 1), (rows, 3, 0), (rows[0], 3, 1), (plain[:, 0], 3, 1)):
        with pytest.raises(ConfigError):
            repeated_votes(*wrong, stochastic=False)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="uniforms"):
        repeated_votes(rows, 3, 1)
