"""Layouts: where every tensor lies, what travels dense, what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedcomp.errors import ConfigError, LayoutError
from fedcomp.layout import DENSE, EXACT, Layout, SmallDense, Update, policy_config, policy_from_config


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a.bias": rng.normal(size=8).astype(np.float32),
        "a.weight": rng.normal(size=(40, 30)).astype(np.float32),
        "n.running_mean": rng.normal(size=2000).astype(np.float32),
        "n.num_batches_tracked": np.array(3),
        "h.weight": rng.normal(size=(2000,)).astype(np.float16),
        "mask": np.array([True, False]),
        "d.weight": rng.normal(size=(1100,)),
    }


def test_compressed_tensors_come_first_in_model_order() -> None:
    layout = Layout.of(arrays())
    assert [t.name for t in layout.compressed] == ["a.weight", "h.weight", "d.weight"]
    assert [t.name for t in layout.tensors if t.is_dense] == ["a.bias"]
    assert layout.compressed_size == 1200 + 2000 + 1100
    assert layout.dense_size == 8
    assert layout.order == tuple(arrays())
    ends = [0, *(t.offset + t.size for t in layout.tensors)]
    assert [t.offset for t in layout.tensors] == ends[:-1]
    assert layout.size == ends[-1]
    assert list(layout.dense_names()) == ["a.bias"]


def test_round_trip_keeps_values_shapes_and_dtypes() -> None:
    given = arrays()
    layout = Layout.of(given)
    vector = layout.flatten(given)
    assert vector.dtype == np.float32
    back = layout.unflatten(vector, {t.name: given[t.name] for t in layout.exact})
    assert list(back) == list(given)
    for name, array in given.items():
        assert back[name].dtype == array.dtype
        assert back[name].shape == array.shape
        np.testing.assert_array_equal(back[name], array.astype(np.float32).astype(array.dtype))
    assert "mask" not in layout.unflatten(vector)


def test_exact_buffers_are_not_in_the_vector() -> None:
    """Integers, booleans and statistics travel beside the vector; without casting, all but float32 does."""
    assert [t.name for t in Layout.of(arrays()).exact] == ["n.running_mean", "n.num_batches_tracked", "mask"]
    lossless = Layout.of(arrays(), cast_floats=False)
    beside = [t.name for t in lossless.exact]
    assert beside == ["n.running_mean", "n.num_batches_tracked", "h.weight", "mask", "d.weight"]


def test_views_are_slices() -> None:
    given = arrays()
    layout = Layout.of(given)
    vector = layout.flatten(given)
    layout.view(vector, "a.weight")[0, 0] = 99.0
    assert vector[layout.by_name["a.weight"].offset] == 99.0
    assert layout.unflatten(vector)["a.weight"].base is not None
    with pytest.raises(LayoutError, match=r"did you mean 'a\.weight'"):
        layout.view(vector, "a.weigth")


def test_flatten_into_a_buffer() -> None:
    given = arrays()
    layout = Layout.of(given)
    out = np.zeros(layout.size, np.float32)
    assert layout.flatten(given, out) is out
    np.testing.assert_array_equal(out, layout.flatten(given))


def test_changed_models_are_refused() -> None:
    layout = Layout.of(arrays())
    missing = arrays()
    del missing["a.bias"]
    with pytest.raises(LayoutError, match=r"missing \['a\.bias'\]"):
        layout.flatten(missing)
    with pytest.raises(LayoutError, match=r"unexpected \['new'\]"):
        layout.flatten({**arrays(), "new": np.zeros(1)})
    with pytest.raises(LayoutError, match="shape"):
        layout.flatten({**arrays(), "a.bias": np.zeros(9, np.float32)})
    with pytest.raises(LayoutError, match="shape"):
        layout.unflatten(np.zeros(layout.size + 1, np.float32))


def test_policy_decides_per_tensor() -> None:
    given = {name: array for name, array in arrays().items() if array.dtype == np.float32}
    layout = Layout.of(given, lambda name, shape, dtype: 0.5 if name == "a.weight" else None)
    assert layout.by_name["a.weight"].density == 0.5
    assert layout.dense_size == 0
    for wrong in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="density policy returned"):
            Layout.of(given, lambda *_, wrong=wrong: wrong)


def test_small_dense_is_the_default() -> None:
    policy = SmallDense()
    assert policy("w", (1024,), "float32") is None
    assert policy("w", (1023,), "float32") == DENSE
    assert policy("bn.running_var", (5000,), "float32") == EXACT
    assert policy("bn.running_var", (5,), "float32") == EXACT


@pytest.mark.parametrize(
    "policy",
    [
        None,
        SmallDense(),
        SmallDense(min_size=10, patterns=("*bias",)),
        lambda name, shape, dtype: {"a.weight": 0.5, "a.bias": DENSE, "n.running_mean": EXACT}.get(name),
    ],
)
def test_policies_travel(policy: object) -> None:
    """The receiver of a policy's JSON form lays the same model out alike."""
    given = arrays()
    layout = Layout.of(given, policy)  # type: ignore[arg-type]
    config = json.loads(json.dumps(policy_config(policy, layout)))  # type: ignore[arg-type]
    again = Layout.of(given, policy_from_config(config))
    assert again == layout
    assert again.digest == layout.digest


@pytest.mark.parametrize("config", [{"min_size": 3}, {"table": 5}, {"table": {"w": "all"}}])
def test_unreadable_policies_are_refused(config: dict) -> None:
    with pytest.raises(ConfigError, match="cannot read a density policy"):
        policy_from_config(config)


def test_digest_tells_layouts_apart() -> None:
    base = {"w": np.zeros((3, 4), np.float32)}
    same = Layout.of(base).digest
    assert len(same) == 8
    assert Layout.of(base).digest == same
    others = [
        Layout.of({"v": np.zeros((3, 4), np.float32)}),
        Layout.of({"w": np.zeros((4, 3), np.float32)}),
        Layout.of({"w": np.zeros((3, 4), np.float16)}),
        Layout.of(base, lambda *_: 0.5),
    ]
    assert len({same, *(layout.digest for layout in others)}) == 5


def test_flat_and_empty_layouts() -> None:
    layout = Layout.flat(10)
    assert (layout.size, layout.compressed_size, layout.dense_size) == (10, 10, 0)
    assert Layout.flat(10, density=1.0).compressed_size == 0
    empty = Layout.of({})
    assert empty.size == 0
    assert empty.unflatten(np.zeros(0, np.float32)) == {}


def test_update_checks_dtype_and_shape() -> None:
    for wrong in (np.zeros(3), np.zeros(4, np.float32), np.zeros((3, 1), np.float32)):
        with pytest.raises(LayoutError, match="the layout needs"):
            Update(wrong, Layout.flat(3))  # type: ignore[arg-type]
