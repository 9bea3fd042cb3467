"""A node's objective on the flat vector: the named gradient in its place, statistics beside it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from fedcomp.errors import LayoutError
from fedcomp.gossip.local import FlatObjective
from fedcomp.gossip.vector import GossipPolicy
from fedcomp.layout import Layout
from fedcomp.rng import Key

KEY = Key(1, "gradient", 2, 0)
MODEL = {
    "weight": np.arange(80.0).reshape(8, 10),
    "norm.running_mean": np.zeros(3),
    "norm.num_batches_tracked": np.zeros((), np.int64),
    "bias": np.ones(8),
}


class Toy:
    """Gradient 2 x of every parameter; the statistics become half of what they were, plus one; the counter counts."""

    def __init__(self) -> None:
        self.seen: dict[str, np.ndarray] = {}

    def gradient(self, arrays: Mapping[str, np.ndarray], key: Key) -> dict[str, np.ndarray]:
        self.seen = {name: np.array(array) for name, array in arrays.items()}
        return {name: 2 * arrays[name] for name in ("bias", "weight")}

    def buffers_after(self) -> dict[str, np.ndarray]:
        given = self.seen.get("norm.num_batches_tracked", MODEL["norm.num_batches_tracked"])
        mean = self.seen.get("norm.running_mean", MODEL["norm.running_mean"])
        return {"norm.running_mean": mean / 2 + 1, "norm.num_batches_tracked": given + 1}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_lie_where_the_layout_puts_the_tensors(dtype: str) -> None:
    layout = Layout.of(MODEL, GossipPolicy())
    flat = FlatObjective(Toy(), layout)
    z = flat.flatten(MODEL, dtype)
    z[layout.by_name["norm.running_mean"].slice] = 6.0
    before = z.copy()
    gradient = flat.gradient(z, KEY)
    assert gradient.dtype == z.dtype == dtype
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(layout.view(gradient, name), 2 * MODEL[name])
    assert not layout.view(gradient, "norm.running_mean").any()
    change = flat.change()
    assert change is not None
    np.testing.assert_array_equal(layout.view(change, "norm.running_mean"), -2.0)
    assert np.count_nonzero(change) == 3
    np.testing.assert_array_equal(z, before)


def test_what_stays_at_home_is_given_and_taken_beside_the_vector() -> None:
    layout = Layout.of(MODEL, GossipPolicy(buffers="local"))
    home = {"norm.running_mean": np.full(3, 4.0), "norm.num_batches_tracked": np.array(7)}
    toy = Toy()
    flat = FlatObjective(toy, layout, home)
    assert layout.size == 88
    flat.gradient(np.zeros(88), KEY)
    assert flat.change() is None
    assert toy.seen["norm.num_batches_tracked"] == 7
    after = flat.at_home()
    assert sorted(after) == sorted(home)
    np.testing.assert_array_equal(after["norm.running_mean"], 3.0)
    assert after["norm.num_batches_tracked"] == 8
    # The next gradient goes on with them, so that a run without messages counts as one with messages does.
    flat.gradient(np.zeros(88), KEY)
    assert toy.seen["norm.num_batches_tracked"] == 8
    assert home["norm.num_batches_tracked"] == 7


def test_another_models_arrays_are_refused() -> None:
    flat = FlatObjective(Toy(), Layout.of(MODEL, GossipPolicy()))
    with pytest.raises(LayoutError, match="missing"):
        flat.flatten({name: array for name, array in MODEL.items() if name != "bias"})


class Given(Toy):
    """Returns the gradients it was made with."""

    def __init__(self, **gradients: np.ndarray) -> None:
        super().__init__()
        self.gradients = gradients

    def gradient(self, arrays: Mapping[str, np.ndarray], key: Key) -> dict[str, np.ndarray]:
        super().gradient(arrays, key)
        return self.gradients


WRONG = {
    "a wrapper's prefix": ({"_module.bias": MODEL["bias"]}, "gradients of ['_module.bias']"),
    "nothing": ({}, "no tensor has a gradient"),
    "another shape": ({"bias": np.zeros(1), "weight": MODEL["weight"]}, "the gradient of 'bias' has shape (1,)"),
}


@pytest.mark.parametrize("what", WRONG)
def test_gradients_that_are_not_the_model_s_are_refused(what: str) -> None:
    gradients, message = WRONG[what]
    flat = FlatObjective(Given(**gradients), Layout.of(MODEL, GossipPolicy()))
    with pytest.raises(LayoutError) as error:
        flat.gradient(flat.flatten(MODEL), KEY)
    assert message in str(error.value)


def test_tensors_without_a_gradient_are_named_and_stay() -> None:
    flat = FlatObjective(Given(weight=MODEL["weight"]), Layout.of(MODEL, GossipPolicy()))
    gradient = flat.gradient(flat.flatten(MODEL), KEY)
    assert flat.untrained == ["bias"], "statistics, which follow no gradient, move by themselves"
    assert not flat.layout.view(gradient, "bias").any()
