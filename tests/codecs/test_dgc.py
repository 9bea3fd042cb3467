"""Deep gradient compression: exact limits, warm-up, clipping; for the rest it is error feedback with momentum.

The published lines: test_sparsification_deterministic.py, 7.1.3. Absence, rollback, the fused path: test_feedback.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcomp import params, wire
from fedcomp.codecs import DGC, Codec, ErrorFeedback, TopK
from fedcomp.layout import Layout, SmallDense, Update
from fedcomp.rng import Key

LAYOUT = Layout.of({"w": np.zeros((60, 40), np.float32), "b": np.zeros(40, np.float32)}, SmallDense(share=1.0))
PART = slice(0, LAYOUT.compressed_size)
KEY = Key(5, "codec", partition=1)


def gradients(rounds: int, layout: Layout = LAYOUT, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(4, (rounds, layout.size)).astype(np.float32)


def run(codec: Codec, updates: np.ndarray, layout: Layout = LAYOUT, first: int = 1):
    """Return the decoded frames, the last state and the frames of consecutive rounds."""
    state, sent, frames = codec.init(layout), [], []
    for t, g in enumerate(updates):
        frame, state = codec.encode(Update(g, layout), state, KEY.at(round=first + t))
        sent.append(codec.decode(frame, layout))
        frames.append(frame)
    return np.array(sent), state, frames


def torch_sgd(updates: np.ndarray, **options) -> np.ndarray:
    """Return the weights after each of torch's own SGD steps from zero, learning rate 1."""
    weight = torch.zeros(updates.shape[1], requires_grad=True)
    optimiser = torch.optim.SGD([weight], lr=1.0, **options)
    out = []
    for g in updates:
        weight.grad = torch.from_numpy(g.copy())
        optimiser.step()
        out.append(weight.detach().numpy().copy())
    return np.array(out)


def weights(sent: np.ndarray) -> np.ndarray:
    """Return what a server that subtracts every frame holds after each round, in float32."""
    w = np.zeros(sent.shape[1], np.float32)
    return np.array([w := w - q for q in sent])


@pytest.mark.parametrize("momentum", [0.9, 0.5])
def test_density_one_without_masking_is_momentum_sgd_bit_for_bit(momentum: float) -> None:
    updates = gradients(20)
    codec = DGC(1.0, momentum=momentum, masking=False)
    reference = torch_sgd(updates, momentum=momentum)
    np.testing.assert_array_equal(weights(run(codec, updates)[0]), reference)
    masked = weights(run(DGC(1.0, momentum=momentum), updates)[0])
    assert np.abs(masked - reference)[:, PART].max() > 1.0, "with masking it is another algorithm"


def test_density_one_with_masking_is_plain_sgd_bit_for_bit() -> None:
    """On the compressed part; what travels dense keeps its momentum, as in the authors' code."""
    updates = gradients(20)
    found = weights(run(DGC(1.0), updates)[0])
    np.testing.assert_array_equal(found[:, PART], torch_sgd(updates)[:, PART])
    np.testing.assert_array_equal(found[:, PART.stop :], torch_sgd(updates, momentum=0.9)[:, PART.stop :])


def test_nesterov_is_torchs() -> None:
    """u = mu (u + g), v += u + g is Nesterov's form; with mu = 1/2 both round the same way."""
    updates = gradients(20)
    found = weights(run(DGC(1.0, momentum=0.5, nesterov=True, masking=False), updates)[0])
    np.testing.assert_array_equal(found, torch_sgd(updates, momentum=0.5, nesterov=True))


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"masking": False, "max_age": 3}], ids=str)
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_it_is_error_feedback_with_momentum_around_top_k(scope: str, options: dict) -> None:
    """Frames and states, after rounds that were missed and a frame that was taken back."""
    codecs = (
        DGC(0.05, momentum=0.5, scope=scope, warmup=2, **options),
        ErrorFeedback(TopK(0.05, scope, warmup=2), momentum=0.5, **options),
    )
    found = []
    for codec in codecs:
        state, frames = codec.init(LAYOUT), []
        for t, g in zip((1, 2, 4, 9), gradients(4), strict=True):
            frame, state = codec.encode(Update(g, LAYOUT), state, KEY.at(round=t))
            if t == 4:
                state = codec.rollback(state, frame, LAYOUT)
            frames.append((frame, {name: array.tobytes() for name, array in state.items()}))
        found.append(frames)
    assert found[0] == found[1]


def test_the_warm_up_falls_as_published() -> None:
    """75, 93.75, 98.44, 99.6, 99.9 % left out in five rounds, and 99.9 % for good."""
    layout = Layout.flat(100_000)
    codec = DGC(0.001)
    _, _, frames = run(codec, gradients(7, layout), layout, first=0)
    kept = [codec.support(frame, layout).size for frame in frames]
    # Rounds 0 and 1 are both the first: Flower counts from 1, a bare loop may count from 0.
    assert kept == [25_119, 25_119, 6_310, 1_585, 399, 100, 100]
    assert [round(1 - k / layout.size, 3) for k in kept[1:6]] == [0.749, 0.937, 0.984, 0.996, 0.999]


def test_the_warm_up_of_topk() -> None:
    (stretch,) = TopK(0.01).stretches(Layout.flat(10_000))
    codec = TopK(0.01, warmup=1)
    assert [codec.count(stretch, KEY.at(round=r)) for r in (0, 1, 2, 3, 1000)] == [1000, 1000, 100, 100, 100]
    assert (codec.count(stretch), codec.most(stretch)) == (100, 1000)
    assert [TopK(0.01).count(stretch, KEY.at(round=r)) for r in (0, 1, 2)] == [100] * 3
    # Each tensor of a density of its own warms up to that one; what is dense stays so.
    layout = Layout.of({"a": np.zeros(10_000, np.float32), "b": np.zeros(10_000, np.float32)}, policy_of(a=0.04))
    counts = [codec.count(s, KEY.at(round=1)) for s in TopK(0.01, scope="layer", warmup=1).stretches(layout)]
    assert counts == [2000, 1000]


def policy_of(**densities: float):
    return lambda name, shape, dtype: densities.get(name)


def test_both_ends_agree_on_the_density_to_the_last_place() -> None:
    """0.001 ** (1/3) is a little above 0.1 or not, by the machine's pow; the schedule says 0.1 everywhere."""
    (stretch,) = TopK(0.001).stretches(Layout.flat(10))
    assert pytest.approx(0.1) == 0.001 ** (1 / 3)
    assert params.count(np.nextafter(0.1, 1.0), 10) == 2, "one place more is one coordinate more"
    assert TopK(0.001, warmup=2).count(stretch, KEY.at(round=1)) == 1


@pytest.mark.parametrize("codec", [TopK(0.01, warmup=3), ErrorFeedback(TopK(0.01, warmup=3)), DGC(0.01, warmup=3)])
def test_a_late_round_takes_no_more_than_its_own_values(codec: Codec) -> None:
    """What the first round may send is refused in the fifth, although it opens."""
    layout = Layout.flat(1000)
    frame, _ = codec.encode(Update(gradients(1, layout)[0], layout), codec.init(layout), KEY.at(round=1))
    assert codec.support(frame, layout).size == 317
    codec.verify(frame, layout, KEY.at(round=1))
    for late in (2, 4, 5, 100):
        with pytest.raises(wire.LimitExceeded, match=f"round {late} allows"):
            codec.verify(frame, layout, KEY.at(round=late))
    more = wire.encode([wire.sparse((1000,), np.arange(318), np.ones(318, np.float32))])
    with pytest.raises(wire.LimitExceeded):
        codec.open(more, layout)


def test_clipping_comes_before_anything_is_accumulated() -> None:
    """‖g‖ <= clip / sqrt(N), on the whole update at once; a short one is not touched."""
    layout = Layout.flat(2000)
    g = gradients(1, layout)[0]
    codec = DGC(1.0, momentum=0.0, clip=4.0, clients=16)
    sent, state, _ = run(codec, np.array([g]), layout)
    assert np.linalg.norm(sent[0].astype(np.float64)) == pytest.approx(1.0, rel=1e-6)
    np.testing.assert_allclose(sent[0] / np.linalg.norm(sent[0]), g / np.linalg.norm(g), rtol=1e-4, atol=1e-7)
    assert not state["memory"].any(), "what was clipped is gone, not remembered"
    short = g * np.float32(0.5 / np.linalg.norm(g))
    np.testing.assert_array_equal(run(codec, np.array([short]), layout)[0][0], short)
    per_element = np.clip(g, -1.0, 1.0)
    assert np.linalg.norm(per_element) > 10.0, "clipping each element at the norm would have done nothing"


def test_the_state_outlives_a_change_of_parameters() -> None:
    """Another density, warm-up, scope or clip goes on with the same memory; without momentum it is ignored."""
    updates = gradients(4)
    _, state, _ = run(DGC(0.01, warmup=0), updates[:3])
    given = Update(updates[3], LAYOUT)
    u = np.float32(0.9) * state["momentum"] + updates[3]
    v = state["memory"] + u
    for other in (DGC(0.2), DGC(0.2, warmup=9, scope="layer"), DGC(0.2, clip=1e9, clients=3), DGC(0.2, values="bf16")):
        frame, after = other.encode(given, state, KEY.at(round=4))
        np.testing.assert_allclose(other.decode(frame, LAYOUT) + after["memory"], v, rtol=1e-5, atol=1e-5)
    frame, after = DGC(0.2, momentum=0.0).encode(given, state, KEY.at(round=4))
    np.testing.assert_array_equal(DGC(0.2).decode(frame, LAYOUT) + after["memory"], state["memory"] + updates[3])


def test_one_dimensional_tensors_travel_dense_when_the_policy_says_so() -> None:
    """As in the paper: with the same momentum, unmasked, and nothing left behind."""
    tensors = {"w": np.zeros((50, 40), np.float32), "scale": np.zeros(3000, np.float32)}
    layout = Layout.of(tensors, lambda name, shape, dtype: 1.0 if len(shape) < 2 else None)
    updates = gradients(6, layout)
    sent, state, _ = run(DGC(0.01), updates, layout)
    rest = slice(layout.compressed_size, None)
    np.testing.assert_array_equal(weights(sent)[:, rest], torch_sgd(updates, momentum=0.9)[:, rest])
    assert not state["memory"][rest].any()
    assert Layout.of(tensors, SmallDense()).dense_size == 0
