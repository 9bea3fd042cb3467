"""A node's objective is a pure function of arrays and key: exact derivatives, the task's own batches and bits."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from fedcomp.errors import ConfigError, LayoutError
from fedcomp.rng import Key
from fedcomp.tasks import get_task
from fedcomp.tasks.arrays import load_arrays, to_arrays
from fedcomp.tasks.base import EmptyPartition, Task
from fedcomp.tasks.linear import linear_rows
from fedcomp.tasks.local import LocalObjective
from fedcomp.tasks.sources import DataWarning

KEY = Key(5, "gossip/batch", 3, 1)


def _task(name: str = "digits", **options: Any) -> Task:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        return get_task(name, **options)


def _moved(objective: LocalObjective, seed: int = 1, scale: float = 0.05) -> dict[str, np.ndarray]:
    """Return a model that is not the initial one, floats only changed."""
    out = {}
    for layer, (name, array) in enumerate(objective.start().items()):
        noise = scale * (Key(seed, "moved", layer=layer).uniform(array.size) - 0.5).reshape(array.shape)
        out[name] = (array + noise).astype(array.dtype) if array.dtype.kind == "f" else array
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("digits", {"hidden": "32"}),
        ("digits-five", {"l2": 0.1, "partition": "sorted"}),
        ("digits", {"model": "cnn", "batch_norm": True}),
        ("tiny-shakespeare", {}),
    ],
)
@pytest.mark.parametrize("batch_size", [32, 0])
def test_float32_gradients_are_the_tasks_own_bit_for_bit(name: str, options: Any, batch_size: int) -> None:
    task = _task(name, **options)
    if name == "tiny-shakespeare" and not batch_size:
        batch_size = 7
    mine = LocalObjective(task, 1, 8, seed=4, batch_size=batch_size)
    arrays = _moved(mine)
    model = task.model(4)
    load_arrays(model, arrays)
    theirs, _ = task.gradient(model, task.client(1, 8), batch_size=batch_size or None, key=KEY)
    found = mine.gradient(arrays, KEY)
    assert list(found) == list(theirs)
    for label, gradient in theirs.items():
        assert found[label].dtype == np.float32
        assert found[label].tobytes() == gradient.tobytes(), label
    # Running statistics and counters moved as they do in the task's model.
    after = to_arrays(model)
    assert {label: array.tobytes() for label, array in mine.buffers_after().items()} == {
        label: after[label].tobytes() for label in after if label not in theirs
    }


def test_a_whole_number_given_as_a_float_is_that_number() -> None:
    """As settings from a command line or a JSON text may be: batches are sliced by it."""
    whole, same = (LocalObjective(_task(), 0, 8, batch_size=size) for size in (32, 32.0))  # type: ignore[arg-type]
    assert isinstance(same.batch_size, int)
    arrays = whole.start()
    for name, gradient in whole.gradient(arrays, KEY).items():
        np.testing.assert_array_equal(same.gradient(arrays, KEY)[name], gradient)


@pytest.mark.parametrize("size", [1, 5, 179, 180, 181, 1000])
def test_a_batch_is_the_first_of_the_tasks_batches(size: int) -> None:
    task = _task()
    mine = LocalObjective(task, 0, 8, batch_size=size)
    x, y = next(task.client(0, 8).batches(batch_size=size, key=KEY))
    mine_x, mine_y = mine._batch(KEY)
    assert torch.equal(mine_x, x)
    assert torch.equal(mine_y, y)


def test_equal_words_are_taken_in_order_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    task = _task()
    monkeypatch.setattr(Key, "bits", lambda self, count: np.arange(count, dtype=np.uint64) // np.uint64(3) % 7)
    x, _ = next(task.client(0, 8).batches(batch_size=31, key=KEY))
    assert torch.equal(LocalObjective(task, 0, 8, batch_size=31)._batch(KEY)[0], x)


@pytest.mark.parametrize(
    ("name", "options", "batch_size"),
    [
        ("digits", {"hidden": "12"}, 16),
        ("digits-five", {"l2": 0.1}, 0),
        ("breast-cancer", {"l2": 0.05}, 0),
        ("digits", {"model": "cnn", "batch_norm": True}, 8),
    ],
)
def test_float64_gradients_equal_differences_of_the_objective(name: str, options: Any, batch_size: int) -> None:
    task = _task(name, **options)
    mine = LocalObjective(task, 1, 4, seed=2, batch_size=batch_size, dtype="float64")
    arrays = _moved(mine)
    gradient = mine.gradient(arrays, KEY)
    model = task.model(2).double()
    x, y = mine._batch(KEY)
    model.train()

    def value(step: float) -> float:
        load_arrays(model, {n: a + step * direction[n] if n in direction else a for n, a in arrays.items()})
        with torch.no_grad():
            return float(task.objective(model, model(x), y))

    for seed in range(3):
        direction = {
            n: Key(seed, "direction", layer=i).uniform(g.size).reshape(g.shape) - 0.5
            for i, (n, g) in enumerate(gradient.items())
        }
        # Fourth order in the step, which is short: the objectives of networks have kinks.
        h = 1e-6
        slope = (8 * (value(h) - value(-h)) - (value(2 * h) - value(-2 * h))) / (12 * h)
        inner = sum(float((gradient[n] * direction[n]).sum()) for n in gradient)
        assert all(g.dtype == np.float64 for g in gradient.values())
        assert slope == pytest.approx(inner, rel=1e-7, abs=1e-8)


def test_the_hessian_equals_differences_of_the_gradient() -> None:
    mine = LocalObjective(_task("breast-cancer", l2=0.05), 0, 4, batch_size=0, dtype="float64")
    arrays = _moved(mine, scale=1.0)
    hessian = mine.hessian(arrays)
    assert hessian.shape == (31, 31)
    assert hessian.dtype == np.float64
    flat = np.concatenate([a.reshape(-1) for a in arrays.values()])
    sizes = np.cumsum([a.size for a in arrays.values()])[:-1]

    def gradient(vector: np.ndarray) -> np.ndarray:
        parts = np.split(vector, sizes)
        named = {n: p.reshape(a.shape) for (n, a), p in zip(arrays.items(), parts, strict=True)}
        return np.concatenate([g.reshape(-1) for g in mine.gradient(named, KEY).values()])

    for column in (0, 7, 30):
        step = np.zeros(31)
        step[column] = 1e-6
        slope = (gradient(flat + step) - gradient(flat - step)) / 2e-6
        np.testing.assert_allclose(hessian[:, column], slope, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-14)


def test_nothing_but_arrays_and_key_changes_a_result() -> None:
    task = _task(model="cnn", batch_norm=True)
    one, two = (LocalObjective(task, 2, 8, batch_size=8) for _ in range(2))
    arrays = _moved(one)
    kept = {name: array.copy() for name, array in arrays.items()}
    first = one.gradient(arrays, KEY)
    statistics = one.buffers_after()
    # Other calls in between, on one of them, leave no trace; nor did the call on its arguments.
    one.gradient(_moved(one, seed=9), KEY.at(round=8))
    one.evaluate(_moved(one, seed=3))
    one.loss(arrays)
    for objective in (one, two):
        again = objective.gradient(arrays, KEY)
        assert all(again[name].tobytes() == first[name].tobytes() for name in first)
        assert all(objective.buffers_after()[name].tobytes() == a.tobytes() for name, a in statistics.items())
    assert all(arrays[name].tobytes() == kept[name].tobytes() for name in kept)
    assert any((statistics[name] != kept[name]).any() for name in statistics)
    for changed in (KEY.at(round=4), KEY.at(partition=2), KEY.at(purpose="other"), Key(6, KEY.purpose, 3, 1)):
        other = one.gradient(arrays, changed)
        assert any((other[name] != first[name]).any() for name in first)


def test_buffers_that_are_not_given_begin_anew_in_every_call() -> None:
    mine = LocalObjective(_task(model="cnn", batch_norm=True), 0, 8, batch_size=8)
    arrays = mine.start()
    mine.gradient(arrays, KEY)
    expected = mine.buffers_after()
    mine.gradient(_moved(mine), KEY)
    without = {name: array for name, array in arrays.items() if name not in expected}
    mine.gradient(without, KEY)
    assert {n: a.tobytes() for n, a in mine.buffers_after().items()} == {n: a.tobytes() for n, a in expected.items()}
    assert int(mine.buffers_after()["norm1.num_batches_tracked"]) == 1


def test_the_initial_model_is_the_tasks_and_evaluation_covers_the_whole_test_split() -> None:
    task = _task()
    model = task.model(3)
    whole = task.evaluate(model, task.test)
    for dtype in ("float32", "float64"):
        mine = LocalObjective(task, 0, 8, seed=3, dtype=dtype)
        start = mine.start()
        assert all(start[name].dtype == dtype for name in start)
        assert all((start[name] == array).all() for name, array in to_arrays(model).items())
        found = mine.evaluate(start)
        assert found == pytest.approx({"accuracy": whole["accuracy"], "loss": whole["loss"]}, rel=1e-6)
        assert mine.loss(start) == pytest.approx(task.evaluate(model, task.client(0, 8))["loss"], rel=1e-6)


@pytest.mark.slow
def test_the_objective_of_digits_five_is_strongly_convex_in_its_bias_too() -> None:
    task = _task("digits-five", l2=0.1, partition="sorted")
    nodes = [LocalObjective(task, i, 8, batch_size=0, dtype="float64") for i in range(8)]
    start = nodes[0].start()
    assert sum(array.size for array in start.values()) == 65
    # With data of one class only, the direction of the bias is curved by the regulariser alone.
    smallest = [np.linalg.eigvalsh(node.hessian(start))[0] for node in nodes]
    assert min(smallest) >= 0.1 - 1e-12
    # Sorted: every node but one holds rows of one class.
    counts = [np.bincount(node.data.y, minlength=2).tolist() for node in nodes]
    assert counts == [[181, 0], [181, 0], [180, 0], [180, 0], [1, 179], [0, 180], [0, 180], [0, 180]]
    with pytest.raises(ConfigError, match="regularises the bias"):
        linear_rows(task, task.client(0, 8))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": -1}, "batch_size=-1"),
        ({"batch_size": True}, "batch_size=True"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"dtype": "float16"}, "dtype='float16'"),
    ],
)
def test_impossible_options_are_refused(options: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LocalObjective(_task(), 0, 8, **options)


def test_arrays_of_another_model_are_refused() -> None:
    mine = LocalObjective(_task(hidden="32"), 0, 8)
    start = mine.start()
    name = next(iter(start))
    for wrong, match in (
        ({k: v for k, v in start.items() if k != name}, "missing"),
        ({**start, "another": start[name]}, "unexpected"),
        ({**start, name: start[name][:1]}, "the model needs"),
        ({**start, name: start[name].astype(np.float64)}, "float64"),
    ):
        with pytest.raises(LayoutError, match=match):
            mine.gradient(wrong, KEY)


def test_a_node_without_data_is_refused() -> None:
    task = _task("breast-cancer", min_examples=0)
    with pytest.raises(EmptyPartition, match="partition 499 of 500"):
        LocalObjective(task, 499, 500)
