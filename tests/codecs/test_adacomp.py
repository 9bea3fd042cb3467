"""AdaComp: its guard, its counts, zeros, extremes and foreign frames.

The published rule bit by bit and conservation: test_sparsification_deterministic.py; its error:
test_sparsification_limits.py; its adaptivity: test_sparsification_statistical.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from codec_examples import model, update
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp import wire
from fedcomp.codecs import AdaComp
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError, NonFiniteUpdate, StateError
from fedcomp.layout import Layout, SmallDense, Update
from fedcomp.rng import Key

KEY = Key(7, "codec", partition=1)
LAYOUT = Layout.of(
    {
        "conv.weight": np.zeros((8, 20, 3, 3), np.float32),
        "fc.weight": np.zeros((40, 30), np.float32),
        "fc.bias": np.zeros(40, np.float32),
        "time.weight": np.zeros((11, 10, 10), np.float32),
    },
    SmallDense(share=1.0),
)


def ours(residue: np.ndarray, dw: np.ndarray, length: int, factor: float, guard: bool = False):
    """The same by the codec: through a frame, on a tensor of its own."""
    codec = AdaComp(bin=length, factor=factor, guard=guard)
    layout = Layout.flat(dw.size)
    frame, state = codec.encode(Update(dw, layout), {"memory": residue}, KEY)
    return codec.decode(frame, layout), state["memory"]


def gradients(rounds: int, size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(4, (rounds, size)).astype(np.float32)


def spike() -> np.ndarray:
    """Spec 2.3: twenty bins of fifty, one with a spike of 10, everything else 0.001."""
    g = np.full(1000, 1e-3, np.float32)
    g[123] = 10.0
    return g


def test_it_is_no_contraction() -> None:
    """Spec 2.3 and 0.7: an error of 3.28 ‖G‖². So it declares none, and error feedback is not put around it."""
    g = spike()
    layout = Layout.flat(1000)
    q, _ = ours(np.zeros_like(g), g, 50, 2.0)
    assert ((g - q) ** 2).sum() / (g**2).sum() == pytest.approx(3.28, abs=0.005)
    assert AdaComp().contraction(layout) is None
    assert AdaComp(guard=True).contraction(layout) is None
    with pytest.raises(ConfigError, match="memory of its own"):
        ErrorFeedback(AdaComp())


def test_guard_sends_one_element_per_bin_instead() -> None:
    g = spike()
    q, residue = ours(np.zeros_like(g), g, 50, 2.0, guard=True)
    scale = np.float32((10 + 19 * np.float64(np.float32(1e-3))) / 20)
    expected = [123 if b == 2 else 50 * b for b in range(20)]
    np.testing.assert_array_equal(np.flatnonzero(q), expected)
    np.testing.assert_array_equal(q[expected], scale)
    np.testing.assert_array_equal(residue, g - q)
    energy = float((g.astype(np.float64) ** 2).sum())
    assert ((g - q).astype(np.float64) ** 2).sum() == pytest.approx(energy - 20 * float(scale) ** 2, rel=1e-6)


@pytest.mark.parametrize(("small", "guarded"), [(0.8, True), (0.87, True), (0.98, False), (1.5, False)])
def test_guard_acts_where_the_error_would_exceed_the_energy(small: float, guarded: bool) -> None:
    """One bin with a single 4, one of ten equal elements: 11 s > 2 Σ |G| up to elements of 0.9655."""
    g = np.zeros(20, np.float32)
    g[3], g[10:] = 4.0, small
    q, left = ours(np.zeros_like(g), g, 10, 2.0, guard=True)
    assert np.count_nonzero(q) == (2 if guarded else 11)
    unguarded = g - ours(np.zeros_like(g), g, 10, 2.0)[0]
    assert ((unguarded**2).sum() > (g**2).sum()) == guarded
    assert (left**2).sum() <= (g**2).sum()


def test_guard_leaves_bins_of_zeros_empty() -> None:
    g = spike()
    g[200:300] = 0.0
    q, _ = ours(np.zeros_like(g), g, 50, 2.0, guard=True)
    assert np.count_nonzero(q) == 18
    assert not q[200:300].any()


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 300), st.sampled_from([1, 4, 50]), st.floats(1.0, 8.0))
def test_guarded_error_never_exceeds_the_energy(seed: int, n: int, length: int, factor: float) -> None:
    rng = np.random.default_rng(seed)
    dw, residue = (10.0 ** rng.uniform(-4, 2, (2, n)) * rng.choice([-1, 0, 1], (2, n))).astype(np.float32)
    q, left = ours(residue, dw, length, factor, guard=True)
    total = (residue + dw).astype(np.float64)
    assert ((total - q) ** 2).sum() <= (total**2).sum() * (1 + 1e-6)
    np.testing.assert_allclose(q + left, total, rtol=1e-6, atol=1e-6 * np.abs(total).max())


def test_guard_changes_nothing_where_it_is_not_needed() -> None:
    # With a large residue and a small step several elements pass now and then, but none far from the scale.
    residue, dw = gradients(1, 1000, seed=4)[0], 0.02 * gradients(1, 1000, seed=5)[0]
    plain, guarded = (ours(residue, dw, 50, 2.0, guard=g) for g in (False, True))
    np.testing.assert_array_equal(plain[0], guarded[0])
    np.testing.assert_array_equal(plain[1], guarded[1])
    assert np.count_nonzero(plain[0]) > 0


def test_without_look_ahead_one_element_per_bin_travels() -> None:
    """f = 1: H = G. Only ties of the largest magnitude can add to one per bin (0.97 on digits with empty bins)."""
    frame, _ = AdaComp(factor=1.0, bin=30, conv_bin=9).encode(update(LAYOUT), AdaComp().init(LAYOUT), KEY)
    counts = AdaComp(factor=1.0, bin=30, conv_bin=9).per_bin(frame, LAYOUT)
    assert counts == {"conv.weight": 1.0, "fc.weight": 1.0, "time.weight": 1.0}


def test_per_bin_tells_layers_apart() -> None:
    given = update(LAYOUT)
    LAYOUT.view(given.vector, "fc.weight")[:] = 0.0
    codec = AdaComp()
    frame, _ = codec.encode(given, codec.init(LAYOUT), KEY)
    counts = codec.per_bin(frame, LAYOUT)
    assert counts["fc.weight"] == 0.0
    sent = np.count_nonzero(LAYOUT.view(codec.decode(frame, LAYOUT), "conv.weight"))
    # 8 x 20 x 3 x 3 = 1440 elements are 29 bins of 50.
    assert counts["conv.weight"] == sent / 29 > 0
    assert codec.per_bin(codec.open(frame, LAYOUT), LAYOUT) == counts


def test_bins_by_kind_of_layer() -> None:
    """50 for three and more dimensions, 500 for matrices and vectors, each configurable."""
    parts = {s.name: s for s in AdaComp().stretches(LAYOUT)}
    assert {n: AdaComp().length(s) for n, s in parts.items()} == {
        "conv.weight": 50,
        "fc.weight": 500,
        "time.weight": 50,
    }
    assert AdaComp(bin=8, conv_bin=4).length(parts["fc.weight"]) == 8
    assert AdaComp(bin=8, conv_bin=4).length(parts["conv.weight"]) == 4
    everything = Layout.of(model(), SmallDense(min_size=1))
    assert {AdaComp().length(s) for s in AdaComp().stretches(everything)} == {500}


@pytest.mark.parametrize("factor", [1.0, 1.2, 2.0, 4.0])
def test_support_is_written_in_the_shorter_form(factor: float) -> None:
    """Packed offsets or whatever "auto" takes, by the bytes: Rice where many bins are empty or crowded."""
    layout = Layout.flat(20_000)
    residue = gradients(1, layout.size, seed=8)[0]
    for step in (0.05, 1.0):
        given_ = Update(np.float32(step) * gradients(1, layout.size, seed=9)[0], layout)
        codec = AdaComp(bin=50, factor=factor)
        frame, _ = codec.encode(given_, {"memory": residue}, KEY)
        (tensor,) = codec.open(frame, layout).tensors
        sizes = {
            index: len(wire.encode([wire.sparse((layout.size,), tensor.indices, tensor.values, index=index)]))
            for index in ("auto", "bins:50")
        }
        assert len(frame) == min(sizes.values())
    assert len(frame) < 0.1 * 4 * layout.size


def test_opposed_bins_send_nothing() -> None:
    """Spec 2.2: a bin is empty when its largest element's update opposes it."""
    layout = Layout.flat(12)
    codec = AdaComp(bin=4)
    residue = np.float32([9, 1, 1, 1, 0, 0, 0, 0, 2, 1, 0, 0])
    dw = np.float32([-2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0])
    # G = 7 1 1 1 | 0 | 3 1 0 0 and H = 5 1 1 1 | 0 | 4 1 0 0: only the last bin sends, with s = (7 + 0 + 3) / 3.
    frame, state = codec.encode(Update(dw, layout), {"memory": residue}, KEY)
    scale = np.float32(10 / 3)
    np.testing.assert_array_equal(codec.decode(frame, layout), np.eye(12, dtype=np.float32)[8] * scale)
    np.testing.assert_array_equal(codec.support(frame, layout), [8])
    np.testing.assert_array_equal(state["memory"], [7, 1, 1, 1, 0, 0, 0, 0, np.float32(3) - scale, 1, 0, 0])


def test_an_element_whose_sum_is_zero_is_not_sent() -> None:
    """Spec 2.2: |H| can reach the bin's largest |G| where G itself is 0; there is no sign to send then."""
    layout = Layout.flat(3)
    codec = AdaComp()
    frame, state = codec.encode(
        Update(np.float32([5, 1, -5]), layout), {"memory": np.float32([-5, 0, 5])}, KEY
    )  # G = 0 1 0, H = 5 2 -5
    np.testing.assert_array_equal(codec.support(frame, layout), [1])
    np.testing.assert_array_equal(state["memory"], [0, 0, 0])


def test_bins_longer_than_the_tensor_are_one_bin() -> None:
    layout = Layout.flat(7)
    frame, _ = AdaComp(bin=2**62).encode(update(layout), AdaComp().init(layout), KEY)
    same, _ = AdaComp(bin=7).encode(update(layout), AdaComp().init(layout), KEY)
    assert frame == same
    assert AdaComp(bin=2**62).per_bin(frame, layout).popitem()[1] == np.count_nonzero(AdaComp().decode(frame, layout))


def test_a_scale_below_the_smallest_float_sends_nothing() -> None:
    """The mean over all bins can round to 0 although one of them holds something: nothing would be delivered."""
    layout = Layout.flat(8)
    tiny = np.zeros(8, np.float32)
    tiny[3] = 1e-45
    codec = AdaComp(bin=2)
    frame, state = codec.encode(Update(tiny, layout), codec.init(layout), KEY)
    assert codec.open(frame, layout)[0].values.k == 0
    np.testing.assert_array_equal(state["memory"], tiny)


def test_what_cannot_be_encoded_is_refused_and_the_state_untouched() -> None:
    layout = Layout.of(model(), SmallDense(share=1.0))
    codec = AdaComp()
    huge = Update(np.full(layout.size, 3e38, np.float32), layout)
    held = np.full(layout.size, 3e38, np.float32)
    for where in (slice(None), slice(layout.compressed_size, None)):  # in a compressed tensor, in the dense rest
        memory = np.zeros(layout.size, np.float32)
        memory[where] = held[where]
        kept = memory.copy()
        with pytest.raises(NonFiniteUpdate, match="overflows"):
            codec.encode(huge, {"memory": memory}, KEY)
        np.testing.assert_array_equal(memory, kept)
        memory[-1 if where.start else 0] = np.nan
        with pytest.raises(StateError, match="damaged"):
            codec.encode(update(layout), {"memory": memory}, KEY)
    for bad in ({}, {"memory": held[:-1]}, {"memory": held.astype(np.float64)}, {"memory": [0.0]}):
        with pytest.raises(StateError, match="start from init"):
            codec.encode(update(layout), bad, KEY)
        with pytest.raises(StateError, match="start from init"):
            codec.rollback(bad, b"", layout)


def test_other_forms_are_refused() -> None:
    """A scale for every block, a drawn support, a dense tensor: none is what the codec makes."""
    layout = Layout.flat(1000)
    some = np.arange(0, 1000, 100)
    values = gradients(1, 10)[0]
    others = [
        wire.sparse((1000,), some, wire.SignScale.quantise(values, 5)),
        wire.sparse((1000,), some, wire.SignScale.quantise(values, 10)),
        wire.seeded((1000,), 3, 10, wire.SignScale.quantise(values)),
        wire.Tensor(wire.SignScale.quantise(gradients(1, 1000)[0]), (1000,)),
    ]
    for tensor in others:
        with pytest.raises(wire.WireError):
            AdaComp().decode(wire.encode([tensor]), layout)
        with pytest.raises(wire.WireError):
            AdaComp().decode(wire.decode(wire.encode([tensor])), layout)
    AdaComp().decode(wire.encode([wire.sparse((1000,), some, wire.SignScale.quantise(values))]), layout)
