"""Layouts: where every tensor lies, what travels dense, what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fedcomp.errors import ConfigError, LayoutError
from fedcomp.layout import DENSE, EXACT, Layout, SmallDense, TensorSpec, Update, policy_config, policy_from_config


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


def test_a_model_is_added_to_a_change_as_its_vector_is() -> None:
    draw = np.random.Generator(np.random.PCG64(5))
    model = {
        "wide": draw.standard_normal((300, 7)),
        "half": draw.standard_normal(2000).astype(np.float16),
        "large": draw.standard_normal((300, 400)).astype(np.float32),
        "turned": draw.standard_normal((40, 30)).astype(np.float32).T,
        "scalar": np.array(0.3, np.float32),
        "steps": np.array(3),
        "bias": draw.standard_normal(5).astype(np.float32),
    }
    layout = Layout.of(model, SmallDense(min_size=6))
    change = np.where(draw.random(layout.size) < 0.1, draw.standard_normal(layout.size), -0.0).astype(np.float32)
    moved = change.copy()
    assert layout.add_model(model, moved) == np.count_nonzero(change[: layout.compressed_size])
    assert layout.compressed_size < layout.size
    assert moved.tobytes() == (layout.flatten(model) + change).tobytes()


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
    policy = SmallDense(share=1.0)
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
        SmallDense(share=0.5),
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


@pytest.mark.parametrize(
    "config", [{"size": 3}, {"min_size": 3, "patterns": [], "share": 2}, {"table": 5}, {"table": {"w": "all"}}]
)
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


def test_equal_models_have_one_layout_and_others_their_own() -> None:
    def arrays(value: float = 1.0) -> dict[str, np.ndarray]:
        return {"w": np.full((3, 4), value, np.float32), "b": np.full(3, value, np.float32)}

    layout = Layout.of(arrays())
    assert Layout.of(arrays(2.0)) is layout
    assert Layout.of({"b": arrays()["b"], "w": arrays()["w"]}) != layout
    # By the values, too: what is infinite travels beside the vector.
    assert [t.name for t in Layout.of({**arrays(), "b": np.full(3, np.inf, np.float32)}).exact] == ["b"]
    # A policy is asked every time, whatever it answered before.
    densities = iter([None, None, 1.0, 1.0])
    first, second = (Layout.of(arrays(), lambda *_: next(densities)) for _ in range(2))
    assert (first.compressed_size, second.compressed_size) == (15, 0)


@pytest.mark.parametrize("dtype", ["U3", "S3", "complex64", [("a", "f4")], object, "uint16", "M8[s]"])
def test_what_cannot_travel_is_refused_by_name(dtype: Any) -> None:
    """Of some of them numpy cannot read the name that it gives, which the policy that decides about sizes asked for."""
    with pytest.raises(ConfigError, match="tensor 'b' is"):
        Layout.of({"a": np.zeros(3, np.float32), "b": np.zeros(3, dtype)})


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


def zeros(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def test_b4_many_small_tensors_are_compressed_when_they_are_the_model() -> None:
    """48 adapters of 768 values each travelled dense; beside a large model they still do."""
    adapters = {f"lora.{i}": np.zeros((4, 192), np.float32) for i in range(48)}
    assert Layout.of(adapters).dense_size == 0
    beside = adapters | zeros(base=(4000, 1000))
    assert Layout.of(beside).dense_size == 48 * 768


def test_b4_the_smallest_tensors_up_to_a_share_travel_dense_all_of_one_size_or_none() -> None:
    lenet = zeros(c1=(6, 3, 5, 5), b1=(6,), c2=(16, 6, 5, 5), b2=(16,), f1=(120, 400), b3=(120,), f2=(84, 120))
    lenet |= zeros(b4=(84,), f3=(10, 84), b5=(10,))
    layout = Layout.of(lenet)
    assert sorted(t.name for t in layout.tensors if t.is_dense) == ["b1", "b2", "b3", "b4", "b5"]
    assert layout.dense_size <= 0.01 * layout.size < layout.dense_size + 450
    # Two of 6 values fit into 1 % of 1112, the third of that size does not: none of them is dense.
    three = Layout.of(zeros(w=(1094,), a=(6,), b=(6,), c=(6,)))
    assert three.dense_size == 0
    assert Layout.of(zeros(w=(2000,), a=(6,), b=(6,), c=(6,))).dense_size == 18
    # Never a tensor of min_size, however large the rest, and no limit by share when none is wanted.
    assert Layout.of(zeros(w=(10**6,), a=(1024,))).dense_size == 0
    assert Layout.of(zeros(w=(1200,), a=(30,)), SmallDense(share=1.0)).dense_size == 30


def test_b4_statistics_do_not_count_towards_the_share() -> None:
    model = zeros(w=(990,), bias=(10,), **{"n.running_mean": (5000,), "n.running_var": (5000,)})
    assert [t.name for t in Layout.of(model).tensors if t.is_dense] == ["bias"]
    assert Layout.of(model | zeros(other=(1,))).dense_size == 1


@pytest.mark.parametrize("name", ["bn/moving_mean:0", "bn/moving_variance:0", "batch_stats/bn/var", "bn1._variance"])
def test_b3_statistics_of_other_frameworks_are_known_by_name(name: str) -> None:
    name = name.removesuffix(":0")
    assert [t.name for t in Layout.of(zeros(w=(64, 64), **{name: (2048,)})).exact] == [name]


def test_b3_torch_statistics_are_known_by_shape_where_names_say_nothing() -> None:
    conv, width = (64, 3, 3, 3), (2048,)
    shapes = [conv, width, width, width, width, (), (10, 2048), (10,)]
    values = [np.zeros(s, np.float32 if s else np.int64) for s in shapes]
    unnamed = {str(i): value for i, value in enumerate(values)}
    assert [t.name for t in Layout.of(unnamed).exact] == ["3", "4", "5"]
    # With names of their own, equal vectors before a counter are no statistics.
    named = {f"layer.{i}": value for i, value in enumerate(values)}
    assert [t.name for t in Layout.of(named).exact] == ["layer.5"]
    # Without the counter (Keras, or a list without buffers) nothing tells them apart.
    assert not Layout.of({n: v for n, v in unnamed.items() if n != "5"}).exact


def test_a_layout_is_recreated_from_its_text() -> None:
    model = {
        "mask": np.array([0.0, -np.inf], np.float32),
        "weight": np.ones((300, 300), np.float64),
        "bias": np.zeros(300, np.float32),
        "scale": np.ones((), np.float16),
        "steps": np.array(3),
    }
    for layout in (Layout.of(model), Layout.of(model, cast_floats=False), Layout.of({})):
        again = Layout.from_text(layout.text)
        assert again == layout
        assert again.digest == layout.digest


def test_a_difference_is_formed_in_each_tensors_own_dtype_whatever_the_app_returns() -> None:
    before = {"a": np.float32([1, 2]), "b": np.float64([[1e9 + 0.25]]), "c": np.float16(0.1), "d": np.float32([0.1])}
    after = {"a": np.array([3, 5]), "b": np.float64([[1e9 + 0.5]]), "c": np.float16(0.3), "d": np.float64([0.3])}
    layout = Layout.of(before, policy=lambda name, shape, dtype: None)
    found = layout.view(layout.difference(after, before), "b")
    np.testing.assert_array_equal(found, [[0.25]])
    vector = layout.difference(after, before)
    np.testing.assert_array_equal(layout.view(vector, "a"), [2, 3])
    assert layout.view(vector, "c") == np.float32(np.float16(0.3)) - np.float32(np.float16(0.1))
    assert layout.view(vector, "d") == np.float32(0.3) - np.float32(0.1)


def test_named_tensors_are_told_from_buffers_without_comparing_each_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of thousands of normalisation layers has as many buffers, and is unflattened in every message."""
    model: dict[str, np.ndarray] = {}
    for i in range(50):
        model |= {f"{i}.weight": np.ones(4, np.float32), f"{i}.running_mean": np.ones(4, np.float32)}
    layout = Layout.of(model)
    compared = []
    equal = TensorSpec.__eq__
    monkeypatch.setattr(TensorSpec, "__eq__", lambda a, b: compared.append(a) or equal(a, b))
    found = layout.unflatten(layout.flatten(model), {t.name: model[t.name] for t in layout.exact})
    assert list(found) == list(model)
    assert len(compared) <= len(model)
