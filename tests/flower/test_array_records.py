"""Tensors out of ArrayRecords: read without numpy's parser where they are plain, and by it in every other case; and
records in messages, whose ids are worked out once."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.flower._private import Packer, acting_as, unpack
from fedcomp.flower.records import Place, to_arrays, to_record

GOOD = Array(np.arange(4.0)).data
LARGE = 1 << 21


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3), np.float32),
        np.array(3.5),
        np.arange(12.0).reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(3, dtype=">i4"),
        np.ones(5, dtype=bool),
        np.array(["ab", "c"]),
    ],
)
def test_tensors_are_those_that_flower_reads_and_may_be_written_to(array: NDArray[np.generic]) -> None:
    record = ArrayRecord({"a": Array(array)})
    sent = record["a"].data
    found, plain = to_arrays(record)["a"], record["a"].numpy()
    assert (found.dtype, found.shape, found.tobytes()) == (plain.dtype, plain.shape, plain.tobytes())
    assert found.flags.f_contiguous == plain.flags.f_contiguous
    assert found.flags.writeable
    view = to_arrays(record, copy=False)["a"]
    assert (view.dtype, view.shape, view.tobytes()) == (plain.dtype, plain.shape, plain.tobytes())
    # Where nothing is copied nothing can be written to, or the record would change.
    assert view.base is None or not view.flags.writeable or not np.shares_memory(view, np.frombuffer(sent, np.uint8))
    if found.size:
        found.fill(0)
        assert record["a"].data == sent
        assert to_arrays(record)["a"].tobytes() == plain.tobytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GOOD[:8],
        GOOD[:-1],
        GOOD.replace(b"(4,)", b"(9,)"),
        GOOD.replace(b"(4,)", b"(-1)"),
        GOOD.replace(b"<f8", b"|O8"),
        GOOD.replace(b"descr", b"other"),
        GOOD[:8] + b"\xff\xff" + GOOD[10:],
    ],
)
def test_what_numpy_refuses_is_refused_in_its_words(data: bytes) -> None:
    array = Array("float64", (4,), "numpy.ndarray", data)
    with pytest.raises((ValueError, EOFError)) as theirs:
        array.numpy()
    with pytest.raises(type(theirs.value)) as ours:
        to_arrays(ArrayRecord({"a": array}))
    assert str(ours.value) == str(theirs.value)


def test_what_changed_since_it_was_packed_is_packed_anew_though_others_have_its_old_content() -> None:
    first, second = ConfigRecord({"x": 1}), ConfigRecord({"x": 1})
    model = ArrayRecord({"w": Array(np.ones(3)), "v": Array(np.ones(3))})
    with acting_as(1, 1):
        message = Message(RecordDict({"a": first, "b": second, "m": model}), dst_node_id=1, message_type="train")
    before = Packer().pack(message)
    first["x"], model["w"] = 2, Array(np.zeros(3))
    packer = Packer()
    after = packer.pack(message)
    assert packer.pack(message) == after
    assert after.root != before.root
    content = unpack(after).content
    assert (content["a"]["x"], content["b"]["x"]) == (2, 1)
    read = to_arrays(content.array_records["m"])
    assert (read["w"].tolist(), read["v"].tolist()) == ([0.0] * 3, [1.0] * 3)


def large(dtype: str = "float32") -> NDArray[np.generic]:
    return np.arange(LARGE).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", ">i4"])
def test_large_arrays_are_written_as_flower_writes_them(dtype: str) -> None:
    values = large(dtype).reshape(2, -1)
    made, expected = to_record({"a": values})["a"], Array(values)
    assert (made.dtype, made.shape, made.stype) == (expected.dtype, expected.shape, expected.stype)
    assert made.data == expected.data
    assert type(made.data) is bytes


def test_a_place_becomes_an_array_without_a_copy_and_is_closed() -> None:
    place = Place((LARGE,), np.float32)
    place.values[...] = large()
    record = to_record({"own": place.values, "other": large()}, [place])
    own = record["own"]
    assert own.data == record["other"].data
    view = np.frombuffer(own.data, np.float32, offset=len(own.data) - 4 * LARGE)
    assert np.shares_memory(view, place.values)
    with pytest.raises(ValueError, match="read-only"):
        place.values[0] = 1.0


def test_the_values_of_a_place_outlive_it() -> None:
    values = Place((LARGE,), np.float32).values
    values[...] = large()
    # What would be put in its place.
    others = [Place((LARGE,), np.float32) for _ in range(3)]
    for other in others:
        other.values[...] = -1.0
    assert np.array_equal(values, large())
