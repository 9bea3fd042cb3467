"""KeyRegion: achieved against stated fractions, its regions, bytes on concentrated gradients, bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from codec_examples import update
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp import wire
from fedcomp.codecs import KeyRegion, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.keyregion import BLOCK, COUNTERS, _entropy, _quantile
from fedcomp.errors import ConfigError, StateError
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

KEY = Key(3, "codec", round=1, partition=2)
BLOCKS = 200


def draw(name: str, rng: np.random.Generator, n: int = BLOCKS * BLOCK) -> np.ndarray:
    """One update: independent values; in the mixture a fixed tenth of the blocks is ten times as large."""
    if name == "mixture":
        scale = np.where(np.arange(-(-n // BLOCK)) % 10 == 3, 10.0, 1.0).repeat(BLOCK)[:n]
        return (scale * rng.normal(size=n)).astype(np.float32)
    return {"normal": rng.normal, "laplace": rng.laplace}[name](size=n).astype(np.float32)


def wanted_of(state: dict) -> dict[str, tuple[int, ...]]:
    """Return what the fractions of key and sparse region came to in the last round, by the index of the stretch."""
    return {name.split(".")[-2]: tuple(array.tolist()) for name, array in state.items() if name.endswith(".wanted")}


def sent(codec: KeyRegion, vector: np.ndarray, state: dict | None = None) -> tuple[np.ndarray, dict, bytes]:
    """Return the indices that travelled, the state, and the frame."""
    layout = Layout.flat(vector.size)
    frame, after = codec.encode(Update(vector, layout), codec.init(layout) if state is None else state, KEY)
    return wire.decode(frame).tensors[0].indices, after, frame


@pytest.mark.parametrize("name", ["normal", "laplace", "mixture"])
def test_the_achieved_density_is_the_stated_one(name: str) -> None:
    """Spec 4.2: within 30 % from the sixth round on, in each region by itself.

    One histogram for both regions, as the spec has it, would send 6.2 times the stated fraction of the mixture's key
    blocks (measured): they hold the largest magnitudes of all.
    """
    codec = KeyRegion()
    rng = np.random.default_rng(1)
    state = None
    for r in range(10):
        x = draw(name, rng)
        indices, state, _ = sent(codec, x, state)
        stated = wanted_of(state)["0"]
        key = codec.key_blocks(x)[indices // BLOCK]
        assert (stated[0] > 0) == (name == "mixture")
        if r >= 5:
            for count, wanted in zip((key.sum(), (~key).sum()), stated, strict=True):
                assert wanted < 50 or 0.7 * wanted <= count <= 1.3 * wanted
            assert 0.7 <= indices.size / sum(stated) <= 1.3


class WithoutGain(KeyRegion):
    """The histograms alone, without the correction by what they led to."""

    def pack_next(self, values, stretch, state, key):  # type: ignore[no-untyped-def]
        return super().pack_next(values, stretch, {**state, "gains": np.ones(2)}, key)


@pytest.mark.slow
def test_the_stated_density_holds_under_error_feedback_because_of_the_gain() -> None:
    """What error feedback leaves has no tail, and the faded histograms still have one: they alone send a third."""
    layout = Layout.flat(100 * BLOCK)
    base = draw("normal", np.random.default_rng(99), layout.size) / 2
    mean = {}
    for codec in (KeyRegion(), WithoutGain()):
        rng = np.random.default_rng(0)
        outer = ErrorFeedback(codec)
        state = outer.init(layout)
        ratios = []
        for r in range(60):
            g = draw("normal", rng, layout.size) + base
            frame, state = outer.encode(Update(g, layout), state, KEY.at(round=r))
            ratios.append(wire.decode(frame).tensors[0].values.k / sum(wanted_of(state)["0"]))
        mean[type(codec)] = np.mean(ratios[5:])
    assert 0.85 <= mean[KeyRegion] <= 1.15
    assert mean[WithoutGain] < 0.6


def test_key_blocks_by_hand() -> None:
    """Energy share above twice the share of the elements; the short last block counts by its own length."""
    x = np.ones(4 * BLOCK + 64, np.float32)
    x[BLOCK : 2 * BLOCK] = 3.0  # 9 / 12.25 of the energy, 4 / 17 of the elements
    assert KeyRegion().key_blocks(x).tolist() == [False, True, False, False, False]
    assert not KeyRegion(kappa=3.2).key_blocks(x).any()
    x[BLOCK : 2 * BLOCK] = 1.0
    x[-64:] = 3.0  # 9 / 25 of the energy, 1 / 17 of the elements
    assert KeyRegion().key_blocks(x).tolist() == [False, False, False, False, True]
    assert not KeyRegion(kappa=6.2).key_blocks(x).any()
    assert KeyRegion().key_blocks(np.ones(100, np.float32)).tolist() == [False]
    assert not KeyRegion(kappa=1.0).key_blocks(np.ones(2 * BLOCK, np.float32)).any(), "a share above, not at"


def test_the_fraction_follows_the_entropy() -> None:
    """One magnitude: H = 0, half of the density. The wider magnitudes spread, the nearer all of it."""
    rng, n = np.random.default_rng(0), 200 * BLOCK
    even = np.full(n, 0.5, np.float32)
    assert wanted_of(sent(KeyRegion(), even)[1])["0"] == (0, math.ceil(0.005 * n / 2))
    wanted = [
        wanted_of(sent(KeyRegion(kappa=1e6), x.astype(np.float32))[1])["0"][1]
        for x in (draw("normal", rng, n), 2.0 ** rng.uniform(-8, 3, n))
    ]
    assert 0.7 * 0.005 * n < wanted[0] < wanted[1] <= math.ceil(0.005 * n)


def test_scale_does_not_matter_even_when_it_changes() -> None:
    """Histograms are relative to the round's mean: a gradient that shrinks a thousandfold is treated as before."""
    rng = np.random.default_rng(2)
    plain = scaled = None
    for r in range(8):
        x = draw("mixture", rng)
        a, plain, _ = sent(KeyRegion(), x, plain)
        b, scaled, _ = sent(KeyRegion(), x * np.float32(2.0 ** (-10 * (r % 3))), scaled)
        np.testing.assert_array_equal(a, b)


def test_quantiles_of_a_histogram_by_hand() -> None:
    """Bin i begins at i/4 - 7. In the last occupied bin the number above falls linearly, before it exponentially."""
    alone, pair = np.zeros(COUNTERS), np.zeros(COUNTERS)
    alone[40] = 8.0
    pair[40], pair[41] = 75.0, 25.0
    for histogram, fraction, place in ((alone, 1.0, 0.0), (alone, 0.25, 0.75), (pair, 0.5, 0.5), (pair, 0.25, 1.0)):
        assert _quantile(histogram, fraction) == pytest.approx(3.0 + place / 4, abs=1e-12)
    assert _quantile(pair, 0.05) == pytest.approx(3.25 + 0.8 / 4, abs=1e-12)
    lowest = np.eye(1, COUNTERS)[0]
    assert _quantile(lowest, 0.5) == -6.75, "its upper edge: what lies below is not resolved"


@pytest.mark.slow
def test_counters_that_fade_away_do_no_harm() -> None:
    """A bin that is never met again fades below the smallest float64: after 320 rounds of decay 0.1, 7000 of 0.9."""
    rng = np.random.default_rng(0)
    state = None
    for r in range(400):
        x = (10.0 ** rng.uniform(-6, 3, 300)).astype(np.float32) if r == 0 else np.ones(300, np.float32)
        with np.errstate(all="raise"):
            indices, state, _ = sent(KeyRegion(decay=0.1), x, state)
        assert indices.size > 0
    assert np.count_nonzero(state["0.histograms"]) == 1


def test_the_smallest_densities_send_the_largest_element() -> None:
    """Fractions that underflow: of equal magnitudes half of 5e-324."""
    for x in (draw("normal", np.random.default_rng(0), 3000), np.ones(700, np.float32), np.float32([1, -1, 0, 1])):
        state = None
        for _ in range(4):
            with np.errstate(all="raise", under="ignore"):
                indices, state, _ = sent(KeyRegion(5e-324, 5e-324), x, state)
            assert np.argmax(np.abs(x)) in indices
            assert indices.size <= 3


def test_the_largest_is_sent_where_its_region_chose_nothing_and_the_other_began() -> None:
    """A threshold of spread magnitudes lies above equal ones; the region that begins chooses exactly beside it."""
    spread, equal = np.zeros(4 * BLOCK, np.float32), np.full(4 * BLOCK, 1e-3, np.float32)
    spread[:BLOCK] = 2.0 ** -(np.arange(BLOCK) % 9.0)
    equal[:BLOCK] = 1.0
    _, state, _ = sent(KeyRegion(), spread)
    indices, _, _ = sent(KeyRegion(), equal, state)
    assert indices[0] == 0
    assert (indices[1:] >= BLOCK).all()
    assert indices.size > 1


def test_the_last_place_of_a_logarithm_decides_nothing() -> None:
    """64 equal shares have the entropy 1, whatever they are in binary: 1 + 2e-16 can mean a coordinate more."""
    for share in (0.1, 0.3, 1 / 3, 7.0, 1e9 / 7):
        assert _entropy(np.full(COUNTERS, share)) == 1.0
    assert _entropy(np.eye(1, COUNTERS, 3)[0]) == 0.0
    assert _entropy(np.repeat([0.2, 0.0], 32)) == pytest.approx(5 / 6, abs=1e-12)


@pytest.mark.parametrize("ratio", [1e6, 1e20])
def test_quiet_blocks_send_their_largest_next_to_huge_ones(ratio: float) -> None:
    """The sum of the quiet magnitudes is not what is left of the sum of all: at 1e20 nothing is left of it."""
    x = draw("normal", np.random.default_rng(0), 40 * BLOCK)
    x[: 2 * BLOCK] *= np.float32(ratio)
    state = None
    for _ in range(6):
        indices, state, _ = sent(KeyRegion(), x, state)
    wanted = wanted_of(state)["0"]
    assert wanted[1] > 30
    assert 0.7 * wanted[1] <= (indices >= 2 * BLOCK).sum() <= 1.3 * wanted[1]


def test_exact_zeros_are_elements_of_their_region() -> None:
    """Half of the elements are 0.0: the fraction is of all, and so is what is found."""
    rng = np.random.default_rng(4)
    state = None
    for _ in range(8):
        x = draw("laplace", rng) * (rng.random(BLOCKS * BLOCK) < 0.3)
        before = None if state is None else state["0.gains"].copy()
        indices, state, _ = sent(KeyRegion(sparse_density=0.02), x.astype(np.float32), state)
    wanted = wanted_of(state)["0"]
    assert 0.85 <= indices.size / sum(wanted) <= 1.15
    assert 0.8 <= before[1] <= 1.25, "without much correction"


def test_gains_stay_within_their_range() -> None:
    """Ties: nothing or twice the fraction is found, so that the gain is pushed round after round."""
    x = np.where(np.arange(40 * BLOCK) % 2, 1.0, 0.5).astype(np.float32)
    state = None
    seen = []
    for _ in range(60):
        _, state, _ = sent(KeyRegion(sparse_density=0.1, decay=1.0), x, state)
        seen.append(float(state["0.gains"][1]))
    assert all(1 / 8 <= gain <= 8 for gain in seen)
    assert min(seen) == 1 / 8 or max(seen) == 8
    for gain in (0.0, -1.0, 1e300):
        assert sent(KeyRegion(), x, {**state, "0.gains": np.full(2, gain)})[0].size > 0


def test_a_zero_tensor_is_an_empty_frame_and_teaches_nothing() -> None:
    _, state, _ = sent(KeyRegion(), draw("normal", np.random.default_rng(0)))
    indices, after, frame = sent(KeyRegion(), np.zeros(BLOCKS * BLOCK, np.float32), state)
    assert indices.size == 0
    assert len(frame) < 60
    assert wanted_of(after) == {"0": (0, 0)}
    np.testing.assert_array_equal(after["0.histograms"], state["0.histograms"])


def test_small_tensors_and_lone_values() -> None:
    for n, at, value in ((1, 0, -2.0), (100, 57, 1e-42), (5000, 4999, 3e38)):
        x = np.zeros(n, np.float32)
        x[at] = value
        state = None
        for _ in range(3):
            indices, state, _ = sent(KeyRegion(), x, state)
            assert indices.tolist() == [at]
    indices, _, _ = sent(KeyRegion(), draw("normal", np.random.default_rng(0), 100))
    assert indices.size == 1


def concentrated(seed: int) -> np.ndarray:
    """90 % of the energy in 5 % of the blocks."""
    rng = np.random.default_rng(seed)
    inside = (np.arange(400) % 20 == 7).repeat(BLOCK)
    return (np.where(inside, math.sqrt(0.9 / 0.05), math.sqrt(0.1 / 0.95)) * rng.normal(size=inside.size)).astype(
        np.float32
    )


def test_the_wire_needs_no_format_of_its_own() -> None:
    """The spec's index block, one bit per block and eight per index, cannot be decoded: nothing says where a block's
    list ends. What it would cost is met within 2 %, and with the missing bit per index it is beaten."""
    for seed in range(3):
        indices, _, frame = sent(KeyRegion(), concentrated(seed))
        k, n = indices.size, 400 * BLOCK
        header = len(wire.encode([wire.sparse((n,), indices[:0], np.zeros(0, np.float32), index="rice")]))
        index_bytes = len(frame) - 4 * k - header
        assert index_bytes <= 1.02 * (400 / 8 + k)
        assert index_bytes < 400 / 8 + 9 * k / 8


def test_bytes_against_top_k_at_equal_energy() -> None:
    """The spec's claim, fewer bytes than global top-k at equal energy, holds for the key region and 32-bit indices.

    It is the index code that does it: with the one this package chooses, top-k is as small for the key region alone,
    and smaller for all, because nothing reaches an energy with fewer values than top-k.
    """
    for seed in range(3):
        x = concentrated(seed)
        layout = Layout.flat(x.size)
        energy = np.cumsum(np.sort(x.astype(np.float64) ** 2)[::-1])
        for codec, smaller_than_auto in ((KeyRegion(sparse_density=1e-9), False), (KeyRegion(), False)):
            indices, _, frame = sent(codec, x)
            k = int(np.searchsorted(energy, (x[indices].astype(np.float64) ** 2).sum() * (1 - 1e-12))) + 1
            size = {
                index: len(TopK(k / x.size, index=index).encode(Update(x, layout), {}, KEY)[0])
                for index in ("raw", "fixed", "auto")
            }
            if codec.sparse_density < 1e-3:
                assert len(frame) < 0.7 * size["raw"]
                assert len(frame) < 0.9 * size["fixed"]
            assert (len(frame) < size["auto"]) == smaller_than_auto


@pytest.mark.slow
@pytest.mark.parametrize("steady", [False, True])
def test_the_residual_stays_bounded(steady: bool) -> None:
    """Spec 4.2: over 500 steps; it stays within a third of what exact top-k of the same density leaves."""
    layout = Layout.flat(8 * BLOCK + 100)
    norms = {}
    for codec in (KeyRegion(sparse_density=0.02), TopK(0.017)):
        rng = np.random.default_rng(0)
        g = rng.normal(size=layout.size).astype(np.float32)
        outer = ErrorFeedback(codec)
        state = outer.init(layout)
        norms[type(codec)] = []
        for r in range(500):
            if not steady:
                g = rng.normal(size=layout.size).astype(np.float32)
            _, state = outer.encode(Update(g, layout), state, KEY.at(round=r))
            norms[type(codec)].append(np.linalg.norm(state["memory"]) / np.linalg.norm(g))
    ours = norms[KeyRegion]
    assert max(ours[250:]) <= 1.15 * max(ours[:250])
    assert max(ours) <= 1.34 * max(norms[TopK])


@pytest.mark.slow
@settings(max_examples=80)
@given(
    n=st.integers(1, 3000),
    seed=st.integers(0, 2**32 - 1),
    kappa=st.sampled_from([1.0, 1.5, 2.0, 10.0]),
    densities=st.sampled_from([(0.1, 0.005), (0.005, 0.1), (1.0, 0.5), (1e-6, 1e-6)]),
    decay=st.sampled_from([0.0, 0.9, 1.0]),
)
def test_no_frame_holds_more_than_the_receiver_takes(
    n: int, seed: int, kappa: float, densities: tuple[float, float], decay: float
) -> None:
    """Rounds that have nothing to do with each other: ties, spikes, zeros, other tails, other key blocks.

    At most twice what was stated, and the largest of all.
    """
    rng = np.random.default_rng(seed)
    codec = KeyRegion(*densities, kappa=kappa, decay=decay)
    layout = Layout.flat(n)
    most = codec.most(codec.stretches(layout)[0])
    state = codec.init(layout)
    for _ in range(5):
        scale = (10.0 ** rng.uniform(-3, 3, -(-n // BLOCK))).repeat(BLOCK)[:n]
        kinds = (
            lambda s=scale: rng.integers(-2, 3, n) * s,
            lambda s=scale: rng.standard_cauchy(n) * s,
            lambda: np.ones(n),
            lambda: (rng.random(n) < 0.01) * rng.normal(size=n),
            lambda: 1e-44 * rng.integers(-9, 9, n),
        )
        x = Update(kinds[rng.integers(len(kinds))]().astype(np.float32), layout)
        frame, state = codec.encode(x, state, KEY)
        k = codec.open(frame, layout).tensors[0].values.k
        assert k <= min(most, 2 * sum(wanted_of(state)["0"]) + 1)
        assert (k > 0) == bool(x.vector.any())
        if k:
            assert np.abs(codec.decode(frame, layout)).max() == np.abs(x.vector).max()


def test_a_receiver_refuses_more() -> None:
    layout = Layout.flat(10_001)
    most = KeyRegion().most(KeyRegion().stretches(layout)[0])
    assert most == 2 * math.ceil(10_001 * (0.5 * 0.1 + 0.5 * 0.005)) + 3
    for k in (most, most + 1):
        frame = wire.encode([wire.sparse((10_001,), np.arange(k), np.ones(k, np.float32))])
        if k == most:
            assert KeyRegion().decode(frame, layout).sum() == k
        else:
            with pytest.raises(wire.WireError):
                KeyRegion().decode(frame, layout)


def test_foreign_states_are_refused() -> None:
    layout = Layout.flat(1500)
    codec = KeyRegion()
    good = codec.init(layout)
    for name in good:
        wrong = good[name].astype(np.float32)
        for state in ({k: v for k, v in good.items() if k != name}, {**good, name: wrong}):
            with pytest.raises(StateError, match=r"init\(layout\)"):
                codec.encode(update(layout), state, KEY)


@pytest.mark.parametrize(
    "options",
    [
        {"key_density": 0.0},
        {"sparse_density": 1.5},
        {"kappa": 0.5},
        {"kappa": math.inf},
        {"decay": 1.5},
        {"values": "q3"},
        {"scope": "tensor"},
    ],
    ids=str,
)
def test_parameters_that_cannot_be(options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        KeyRegion(**options)
