"""Chains: order of execution, state per stage, rollback through all stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from codec_examples import LAYOUTS, update

from fedcomp.codecs import Chain, Clip, Identity, TopK, Transform, chain
from fedcomp.codecs.base import State
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError, NonFiniteUpdate, StateError
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

KEY = Key(1, "codec")


@dataclass(frozen=True, repr=False)
class Counting(Transform):
    """Adds the number of updates so far; counts in its state."""

    transform_id: ClassVar[str] = "counting"

    step: float = 1.0

    def init(self, layout: Layout) -> State:
        return {"count": np.asarray(0, np.int64)}

    def apply(self, update: Update, state: State, key: Key) -> tuple[Update, State]:
        count = int(state["count"]) + 1
        shifted = update.vector + np.float32(self.step * count)
        return Update(shifted, update.layout), {"count": np.asarray(count, np.int64)}

    def rollback(self, state: State) -> State:
        return {"count": state["count"] - 1}


def test_clip_scales_long_updates_only() -> None:
    layout = Layout.flat(1000)
    given = update(layout)
    length = float(np.linalg.norm(given.vector))
    same, _ = Clip(length * 1.01).apply(given, {}, KEY)
    assert same is given
    shorter, _ = Clip(0.5).apply(given, {}, KEY)
    assert np.linalg.norm(shorter.vector) == pytest.approx(0.5, rel=1e-6)
    np.testing.assert_allclose(shorter.vector * length / 0.5, given.vector, rtol=1e-5)
    zero = Update(np.zeros(1000, np.float32), layout)
    assert Clip(0.5).apply(zero, {}, KEY)[0] is zero


@pytest.mark.parametrize("max_norm", [1.0, 0.1, 3.7, 1e-30, 1e-42, 1e30])
def test_clip_never_exceeds_its_bound(max_norm: float) -> None:
    """A sensitivity must hold without a last-place excess: Gaussian vectors, some with subnormal products."""
    rng = np.random.default_rng(0)
    scales = [1.0] * 200 + [1e-25, 1e-3, 1e10, 1e30]
    for scale in scales:
        x = (rng.normal(size=1000) * scale).astype(np.float32)
        clipped, _ = Clip(max_norm).apply(Update(x, Layout.flat(1000)), {}, KEY)
        length = np.linalg.norm(clipped.vector.astype(np.float64))
        assert length <= max_norm
        if np.linalg.norm(x.astype(np.float64)) > max_norm > 1e-35:
            assert length == pytest.approx(max_norm, rel=1e-6)


def test_clip_refuses_infinity() -> None:
    layout = Layout.flat(3)
    with pytest.raises(NonFiniteUpdate):
        Clip(1.0).apply(Update(np.array([1, np.inf, 0], np.float32), layout), {}, KEY)


def test_stages_run_in_the_order_written() -> None:
    """Clip then shift leaves the shift whole; shift then clip does not."""
    layout = Layout.flat(4)
    given = Update(np.array([3, 0, 4, 0], np.float32), layout)

    def through(codec: Chain) -> np.ndarray:
        return codec.decode(codec.encode(given, codec.init(layout), KEY)[0], layout)

    np.testing.assert_allclose(through(chain(Clip(1.0), Counting(), Identity())), [1.6, 1.0, 1.8, 1.0], rtol=1e-6)
    assert np.linalg.norm(through(chain(Counting(), Clip(1.0), Identity()))) == pytest.approx(1.0, rel=1e-6)


def test_clip_before_feedback_bounds_what_enters_the_memory() -> None:
    """Clipped mass is gone on purpose; unsent mass is not: Σ sent + m equals the clipped updates."""
    layout = LAYOUTS["model"]
    codec = chain(Clip(1.0), ErrorFeedback(TopK(0.05)))
    state = codec.init(layout)
    total, sent = np.zeros(layout.size), np.zeros(layout.size)
    for t in range(6):
        given = update(layout, seed=t)
        total += Clip(1.0).apply(given, {}, KEY)[0].vector
        frame, state = codec.encode(given, state, KEY.at(round=t))
        sent += codec.decode(frame, layout)
    np.testing.assert_allclose(sent + state["1.memory"], total, atol=1e-5)


def test_states_of_stages_stay_apart() -> None:
    """Two equal transforms count separately, and none sees the codec's keys."""
    layout = Layout.flat(50)
    codec = chain(Counting(), Counting(), ErrorFeedback(TopK(0.1)))
    state = codec.init(layout)
    assert set(state) == {"0.count", "1.count", "2.memory"}
    for t in range(3):
        _, state = codec.encode(update(layout, seed=t), state, KEY.at(round=t))
    assert int(state["0.count"]) == int(state["1.count"]) == 3


def test_rollback_reaches_every_stage() -> None:
    layout = Layout.flat(50)
    codec = chain(Counting(0.0), ErrorFeedback(TopK(0.1)))
    first, state = codec.encode(update(layout), codec.init(layout), KEY)
    _, again = codec.encode(update(layout, seed=1), state, KEY.at(round=1))
    assert int(again["0.count"]) == 2
    back = codec.rollback(state, first, layout)
    assert int(back["0.count"]) == 0
    np.testing.assert_array_equal(back["1.memory"], update(layout).vector)


@pytest.mark.parametrize("name", ["x", "7.memory", "-1.memory", "2.memory", "1", "1.", ".memory", "².memory", ""])
def test_foreign_states_are_refused(name: str) -> None:
    layout = Layout.flat(4)
    codec = chain(Clip(1.0), ErrorFeedback(TopK(0.5)))
    frame, state = codec.encode(update(layout), codec.init(layout), KEY)
    foreign = state | {name: np.zeros(4, np.float32)}
    with pytest.raises(StateError, match="another codec's state"):
        codec.encode(update(layout), foreign, KEY)
    with pytest.raises(StateError, match="another codec's state"):
        codec.rollback(foreign, frame, layout)


def test_chains_flatten() -> None:
    inner = chain(Clip(2.0), TopK(0.1))
    assert chain(Clip(1.0), inner) == Chain([Clip(1.0), Clip(2.0)], TopK(0.1))
    assert repr(chain(Clip(1.0), inner)) == "chain(Clip(max_norm=1.0), Clip(max_norm=2.0), TopK(density=0.1))"


def test_only_a_codec_ends_a_chain() -> None:
    for stages in ((), (Clip(1.0),), (TopK(0.1), Clip(1.0))):
        with pytest.raises(ConfigError, match="ends with a codec"):
            chain(*stages)
    with pytest.raises(ConfigError, match="not a transform"):
        chain(TopK(0.1), TopK(0.1))


def test_declarations_pass_only_through_an_empty_chain() -> None:
    assert chain(Identity()).lossless
    assert not chain(Clip(1.0), Identity()).lossless
    assert chain(TopK(0.1)).contraction(Layout.flat(10)) == 0.1
    assert chain(Clip(1.0), TopK(0.1)).contraction(Layout.flat(10)) is None
    assert chain(Clip(1.0), ErrorFeedback(TopK(0.1))).remembers
