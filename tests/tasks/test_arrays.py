"""Model <-> arrays: exact round trip with buffers, strict about names, shapes and dtypes."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.errors import LayoutError
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.tasks import get_task
from fedcomp.tasks.arrays import load_arrays, to_arrays


def _trained() -> tuple[object, dict[str, np.ndarray]]:
    task = get_task("digits", model="cnn", batch_norm=True)
    model = task.model(0)
    task.train(model, task.client(0, 10), lr=0.1, batch_size=16, max_steps=3, key=Key(0, "batches"))
    return task.model(1), to_arrays(model)


def test_round_trip_with_batch_norm_counters() -> None:
    other, arrays = _trained()
    counter = arrays["norm1.num_batches_tracked"]
    assert (counter.dtype, counter.shape, int(counter)) == (np.dtype(np.int64), (), 3)
    for array in arrays.values():
        array.flags.writeable = False
    load_arrays(other, arrays)  # type: ignore[arg-type]
    again = to_arrays(other)  # type: ignore[arg-type]
    assert list(again) == list(arrays)
    for name, array in arrays.items():
        assert array.dtype == again[name].dtype
        np.testing.assert_array_equal(array, again[name])


def test_arrays_are_copies() -> None:
    other, _ = _trained()
    arrays = to_arrays(other)  # type: ignore[arg-type]
    arrays["output.weight"][:] = 9
    assert not np.any(to_arrays(other)["output.weight"] == 9)  # type: ignore[arg-type]


def test_layout_carries_counters_and_statistics_exactly() -> None:
    _, arrays = _trained()
    layout = Layout.of(arrays)
    buffers = ("num_batches_tracked", "running_mean", "running_var")
    assert {t.name for t in layout.exact} == {f"norm{i}.{b}" for i in (1, 2) for b in buffers}
    exact = {t.name: arrays[t.name] for t in layout.exact}
    again = layout.unflatten(layout.flatten(arrays), exact)
    assert list(again) == list(arrays)


def test_cast_takes_what_flowers_averages_return() -> None:
    other, arrays = _trained()
    averaged = {name: array.astype(np.float64) for name, array in arrays.items()}
    # The mean of three clients' counters 3, 3 and 2; counters are rounded, not cut off.
    averaged["norm1.num_batches_tracked"] = np.array(8 / 3)
    averaged["norm2.num_batches_tracked"] = np.array(7 / 3)
    averaged["output.bias"] = averaged["output.bias"].astype(np.float16)
    averaged["hidden.bias"] = np.arange(len(arrays["hidden.bias"]))
    load_arrays(other, averaged, cast=True)  # type: ignore[arg-type]
    loaded = to_arrays(other)  # type: ignore[arg-type]
    assert {name: a.dtype for name, a in loaded.items()} == {name: a.dtype for name, a in arrays.items()}
    assert int(loaded["norm1.num_batches_tracked"]) == 3
    assert int(loaded["norm2.num_batches_tracked"]) == 2
    np.testing.assert_array_equal(loaded["conv1.weight"], arrays["conv1.weight"])
    np.testing.assert_array_equal(loaded["output.bias"], arrays["output.bias"].astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(loaded["hidden.bias"], np.arange(len(arrays["hidden.bias"]), dtype=np.float32))


@pytest.mark.parametrize("dtype", [bool, complex, "U1", object])
def test_cast_converts_numbers_only_and_changes_nothing_else(dtype: object) -> None:
    other, arrays = _trained()
    before = to_arrays(other)  # type: ignore[arg-type]
    arrays["output.bias"] = np.ones(10).astype(dtype)  # type: ignore[call-overload]
    with pytest.raises(LayoutError, match="dtype"):
        load_arrays(other, arrays, cast=True)  # type: ignore[arg-type]
    for name, array in to_arrays(other).items():  # type: ignore[arg-type]
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: a.pop("output.bias"), "missing"),
        (lambda a: a.update(extra=np.zeros(1)), "unexpected"),
        (lambda a: a.update({"output.bias": np.zeros(11, np.float32)}), "shape"),
        (lambda a: a.update({"output.bias": a["output.bias"].astype(np.float64)}), "dtype"),
        (lambda a: a.update({"norm1.num_batches_tracked": np.float32(3)}), "dtype"),
    ],
)
def test_misfits_are_refused_and_change_nothing(change: object, match: str) -> None:
    other, arrays = _trained()
    before = to_arrays(other)  # type: ignore[arg-type]
    change(arrays)  # type: ignore[operator]
    with pytest.raises(LayoutError, match=match):
        load_arrays(other, arrays)  # type: ignore[arg-type]
    for name, array in to_arrays(other).items():  # type: ignore[arg-type]
        np.testing.assert_array_equal(array, before[name])
