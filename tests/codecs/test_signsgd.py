"""SignSGD: one bit each, majority vote, ties, abstentions, bytes."""

from __future__ import annotations

import numpy as np
import pytest
from codec_examples import model, update

from fedcomp import wire
from fedcomp.codecs import Clip, SignSGD, chain
from fedcomp.layout import Layout, SmallDense, Update
from fedcomp.rng import Key

KEY = Key(5, "codec")
STEP = np.float32(0.25)
CODEC = SignSGD(0.25)


def _frame(x: np.ndarray, layout: Layout | None = None, codec: SignSGD = CODEC) -> bytes:
    return codec.encode(Update(x.astype(np.float32), layout or Layout.flat(x.size)), {}, KEY)[0]


def _sum(frames: list, weights: list[float], layout: Layout, codec: SignSGD = CODEC) -> Update:
    """The weighted sum of votes as a receiver makes it: float32, one frame after the other."""
    out = Update(np.full(layout.size, -0.0, np.float32), layout)
    for frame, weight in zip(frames, weights, strict=True):
        codec.accumulate(frame, weight, out)
    return out


def _vote(updates: np.ndarray, weights: list[float] | None = None) -> np.ndarray:
    layout = Layout.flat(updates.shape[1])
    out = _sum([_frame(x) for x in updates], weights or [1 / len(updates)] * len(updates), layout)
    CODEC.conclude(out)
    return out.vector


@pytest.mark.parametrize("clients", [1, 2, 3, 6, 10, 25])
def test_the_majority_decides_and_negated_updates_give_the_negated_vote(clients: int) -> None:
    """Spec 5: vote(-x) = -vote(x), ties and zeros included. Counting ties as + is not antisymmetric."""
    rng = np.random.default_rng(clients)
    updates = rng.integers(-3, 4, (clients, 500)).astype(np.float32)
    updates[rng.random(updates.shape) < 0.2] = -0.0
    ballots = np.where(np.signbit(updates), -1, 1).sum(axis=0)
    got = _vote(updates)
    np.testing.assert_array_equal(got, STEP * np.sign(ballots))
    np.testing.assert_array_equal(_vote(-updates), -got)
    tied = ballots == 0
    assert tied.any() == (clients % 2 == 0)
    if tied.any():
        upwards, downwards = np.where(ballots >= 0, 1, -1), np.where(-ballots >= 0, 1, -1)
        assert (upwards != -downwards).any()


@pytest.mark.slow
@pytest.mark.parametrize("clients", [6, 20, 101, 999, 3999, 4000])
def test_rounding_decides_no_vote(clients: int) -> None:
    """As many for as against is a tie in any order and one vote more is none, in float32, for up to 4000 clients.

    The sign of the plain float32 sum breaks ties by rounding (some order of six clients already does)."""
    layout = Layout.flat(1)
    plus, minus = (CODEC.open(_frame(np.array([v])), layout) for v in (1.0, -1.0))
    half = clients // 2
    rng = np.random.default_rng(clients)
    broken = 0
    for order in range(10 if clients < 200 else 1):
        ballot = [plus] * half + [minus] * half + [None] * (clients % 2)
        if order:
            ballot = [ballot[i] for i in rng.permutation(clients)]
        share = 1 / clients
        tie = _sum([b for b in ballot if b is not None], [share] * (2 * half), layout)
        broken += bool(np.sign(tie.vector[0]) != 0.0)
        CODEC.conclude(tie)
        assert tie.vector[0] == 0.0
        if clients % 2:
            for odd, sign in ((plus, 1.0), (minus, -1.0)):
                won = _sum([b or odd for b in ballot], [share] * clients, layout)
                CODEC.conclude(won)
                assert won.vector[0] == sign * STEP
    assert broken


def test_sums_up_to_an_8192th_are_ties() -> None:
    edge = np.float32(2.0**-13)
    above = np.nextafter(edge, np.float32(1.0))
    out = Update(np.array([edge, -edge, above, -above, 1.0, -1.0, 0.0, -0.0], np.float32), Layout.flat(8))
    CODEC.conclude(out)
    np.testing.assert_array_equal(out.vector, [0.0, 0.0, STEP, -STEP, STEP, -STEP, 0.0, 0.0])


def test_a_vote_weighs_what_its_update_would() -> None:
    updates = np.array([[1.0, 5.0], [-2.0, -1.0], [-3.0, -1.0]])
    np.testing.assert_array_equal(_vote(updates), [-STEP, -STEP])
    np.testing.assert_array_equal(_vote(updates, [4 / 6, 1 / 6, 1 / 6]), [STEP, STEP])
    np.testing.assert_array_equal(_vote(updates, [3 / 6, 2 / 6, 1 / 6]), [0.0, 0.0])


def test_large_updates_have_no_larger_say() -> None:
    """Two clients of five that send 1e30 do not turn the vote; they would own the mean."""
    x = update(Layout.flat(300)).vector
    hostile = np.where(x > 0, -1e30, 1e30)
    np.testing.assert_array_equal(_vote(np.stack([x, x, x, hostile, hostile])), STEP * np.sign(x))


def test_the_dense_rest_is_averaged() -> None:
    layout = Layout.of(model(), SmallDense(share=1.0))
    updates = [update(layout, seed=s) for s in range(4)]
    weights = [0.5, 0.25, 0.125, 0.125]
    codec = chain(Clip(1e9), SignSGD(0.25, scope="layer"))
    assert codec.votes
    out = _sum([codec.encode(u, codec.init(layout), KEY)[0] for u in updates], weights, layout, codec)
    rest = slice(layout.compressed_size, None)
    mean = sum(np.float32(w) * u.vector[rest] for w, u in zip(weights, updates, strict=True))
    codec.conclude(out)
    np.testing.assert_array_equal(out.vector[rest], mean)
    assert set(np.unique(out.vector[: layout.compressed_size])) <= {-STEP, np.float32(0.0), STEP}


@pytest.mark.parametrize(("scale", "block"), [(2.0, 0), (0.5, 0), (1.0, 10), (1.0, 5)])
def test_nobody_has_more_than_one_vote(scale: float, block: int) -> None:
    layout = Layout.flat(10)
    scales = np.full(-(-10 // block) if block else 1, scale, np.float32)
    frame = wire.encode([wire.Tensor(wire.SignScale(np.zeros(10, bool), scales, block), (10,))])
    with pytest.raises(wire.SchemaMismatch, match="votes of weight 1"):
        CODEC.decode(frame, layout)
