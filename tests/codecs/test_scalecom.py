"""ScaleCom's mathematics on vectors: what waits, index blocks, names of supports. One support for all, its memory and
conservation: test_sparsification_limits.py and test_sparsification_deterministic.py."""

from __future__ import annotations

import numpy as np
import pytest
from codec_examples import LAYOUTS
from codec_examples import update as an_update

from fedcomp import wire
from fedcomp.codecs import ScaleCom, TopK
from fedcomp.codecs.scalecom import FixedSupport, held_support, open_support, support_frame
from fedcomp.errors import ConfigError, NonFiniteUpdate, StateError
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

KEY = Key(3, "scalecom", round=1)
LAYOUT = LAYOUTS["model"]


def gradient(client: int, step: int, layout: Layout = LAYOUT) -> Update:
    return an_update(layout, seed=1000 * client + step)


def clt_round(codec: ScaleCom, states: list, updates: list[Update], leader: int, number: int = 1):
    """One round of N clients; return their decoded vectors, new states and the support."""
    layout = updates[0].layout
    waiting = [codec.begin(u, s, KEY) for u, s in zip(updates, states, strict=True)]
    supports = codec.choose(waiting[leader], layout, KEY)
    done = [codec.send(w, supports, number, layout, KEY) for w in waiting]
    fixed = codec.on(supports, number)
    return [fixed.decode(frame, layout) for frame, _ in done], [state for _, state in done], supports


def test_an_update_without_a_support_joins_the_memory() -> None:
    """(1 - beta) m + beta p, dense tensors included; what waited is gone after that and is not counted twice."""
    for beta in (1.0, 0.4):
        codec = ScaleCom(0.05, beta=beta)
        state = codec.begin(gradient(0, 0), codec.init(LAYOUT), KEY)
        assert "update" in state
        settled = codec.settle(state, LAYOUT)
        np.testing.assert_allclose(settled["memory"], np.float32(beta) * gradient(0, 0).vector, rtol=1e-6)
        assert "update" not in settled
        again = codec.settle(settled, LAYOUT)
        np.testing.assert_array_equal(again["memory"], settled["memory"])
        begun = codec.begin(gradient(0, 1), state, KEY)
        np.testing.assert_array_equal(begun["memory"], settled["memory"])


def test_rollback_puts_the_values_back() -> None:
    codec = ScaleCom(0.05)
    layout = LAYOUT
    whole = Update(np.round(64 * gradient(0, 0).vector).astype(np.float32), layout)
    waiting = codec.begin(whole, codec.init(layout), KEY)
    supports = codec.choose(waiting, layout, KEY)
    frame, after = codec.send(waiting, supports, 9, layout, KEY)
    assert held_support(after)[0] == 9
    back = codec.rollback(after, frame, layout)
    np.testing.assert_array_equal(back["memory"], whole.vector)
    assert held_support(back) is None
    # Also after the codec's density was changed by the server.
    np.testing.assert_array_equal(ScaleCom(0.001).rollback(after, frame, layout)["memory"], whole.vector)


def test_no_memory_forgets() -> None:
    codec = ScaleCom(0.05, memory=False)
    state = codec.init(LAYOUT)
    for t in range(3):
        _, states, _ = clt_round(codec, [state], [gradient(0, t)], 0)
        state = states[0]
        assert not state["memory"].any()
    waiting = codec.begin(gradient(0, 4), state, KEY)
    assert not codec.settle(waiting, LAYOUT)["memory"].any()


def test_what_overflows_and_what_is_zero() -> None:
    """Spec 7.1.9: a sum that overflows is refused; a zero leader makes an empty support."""
    codec = ScaleCom(0.05)
    memory = np.full(LAYOUT.size, 3e38, np.float32)
    with pytest.raises(NonFiniteUpdate, match="overflows"):
        codec.begin(Update(memory.copy(), LAYOUT), {"memory": memory}, KEY)
    assert (memory == np.float32(3e38)).all()
    zero = codec.begin(Update(np.zeros(LAYOUT.size, np.float32), LAYOUT), codec.init(LAYOUT), KEY)
    supports = codec.choose(zero, LAYOUT, KEY)
    assert all(s.size == 0 for s in supports)
    frame, after = codec.send(zero, supports, 1, LAYOUT, KEY)
    assert not codec.on(supports, 1).decode(frame, LAYOUT).any()
    assert not after["memory"].any()


def test_foreign_states_are_refused() -> None:
    codec = ScaleCom(0.05)
    for state in ({}, {"memory": np.zeros(3, np.float32)}, {"memory": np.zeros(LAYOUT.size)}):
        with pytest.raises(StateError):
            codec.begin(gradient(0, 0), state, KEY)
    with pytest.raises(StateError, match="train first"):
        codec.send(codec.init(LAYOUT), (np.zeros(0, np.int64),) * 2, 1, LAYOUT, KEY)
    waiting = codec.begin(gradient(0, 0), codec.init(LAYOUT), KEY)
    with pytest.raises(StateError, match="same model"):
        codec.send(waiting, (np.zeros(0, np.int64),), 1, LAYOUT, KEY)


def test_index_blocks_cost_indices_only() -> None:
    """Spec 1.4: a block is the indices, values are the values: together as long as a sparse frame of both."""
    layout = Layout.flat(100_000)
    codec = ScaleCom(0.01)
    waiting = codec.begin(an_update(layout), codec.init(layout), KEY)
    supports = codec.choose(waiting, layout, KEY)
    block = support_frame(supports, codec, layout)
    values, _ = codec.send(waiting, supports, 1, layout, KEY)
    both, _ = TopK(0.01, scope="layer").encode(an_update(layout), {}, KEY)
    assert len(values) <= 4 * 1000 + 64
    assert abs(len(block) + len(values) - len(both)) <= 64
    for found, chosen in zip(open_support(block, codec, layout), supports, strict=True):
        np.testing.assert_array_equal(found, chosen)
    with pytest.raises(wire.WireError):
        open_support(block, ScaleCom(0.005), layout)  # twice as many as this density allows
    assert open_support(block, ScaleCom(0.005, dense=True), layout)[0].size == 1000


def test_means_name_their_support() -> None:
    codec = ScaleCom(0.05)
    waiting = codec.begin(gradient(0, 0), codec.init(LAYOUT), KEY)
    supports = codec.choose(waiting, LAYOUT, KEY)
    mean = codec.mean(supports, 77)
    frame, _ = mean.encode(gradient(0, 0), {}, KEY)
    with pytest.raises(wire.WireError):
        codec.mean(supports, 78).decode(frame, LAYOUT)


def test_layer_densities_of_a_policy_are_honoured() -> None:
    arrays = {"a": np.zeros((50, 40), np.float32), "b": np.zeros((50, 40), np.float32)}
    layout = Layout.of(arrays, lambda name, shape, dtype: 0.1 if name == "a" else 0.01)
    codec = ScaleCom(0.5)
    supports = codec.choose(codec.begin(an_update(layout), codec.init(layout), KEY), layout, KEY)
    assert [s.size for s in supports] == [200, 20]
    with pytest.raises(ConfigError, match="scope"):
        ScaleCom(0.5, scope="global").init(layout)


def test_configuration() -> None:
    for wrong in ({"beta": 0.0}, {"beta": 1.1}, {"selector": "best"}, {"norm_guard": -1.0}):
        with pytest.raises(ConfigError):
            ScaleCom(0.1, **wrong)
    with pytest.raises(ConfigError, match="memory=False"):
        ScaleCom(0.1, memory=False, beta=0.5)
    assert ScaleCom(0.1).phases == 2
    with pytest.raises(ConfigError, match="index block"):
        FixedSupport((), 1).to_config()
