"""Frames survive a Message bit for bit, and the bytes counted are the bytes sent."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedcomp.flower import _private, protocol
from fedcomp.flower._private import ErrorCode, Packer, acting_as, set_message_id, unpack
from fedcomp.flower.ledger import wire_bytes
from fedcomp.flower.payload import (
    INLINE_LIMIT,
    NODE_RECORD,
    PARTITION_KEY,
    STYPE,
    PayloadError,
    frames,
    keep_node,
    payload_bytes,
    put_frame,
    put_node,
    round_of,
    take_frame,
    take_node,
)
from fedcomp.flower.records import Place, to_arrays, to_record
from fedcomp.rng import Key


def message(content: RecordDict) -> Message:
    with acting_as(1, 1):
        return Message(content, 7, "train")


def random_bytes(count: int, seed: int = 0) -> bytes:
    return Key(seed, "bytes").bits(count // 8 + 1).tobytes()[:count]


@pytest.mark.parametrize("size", [0, 1, 7, 1000, INLINE_LIMIT, INLINE_LIMIT + 1, 5 * 2**20, 5 * 2**20 + 3, 11 * 2**20])
def test_a_frame_survives_serialisation(size: int) -> None:
    frame = random_bytes(size)
    record = RecordDict()
    put_frame(record, "update", frame)
    sent = message(record)
    assert payload_bytes(sent) == size
    for holder in sent.content.values():
        # Flower's own accounting must not fall over a frame, the empty one included.
        assert size <= holder.count_bytes() <= size + len(STYPE)
    received = unpack(Packer().pack(sent))
    assert take_frame(received.content, "update") == frame
    assert payload_bytes(received) == size


def test_plain_arrays_survive_with_their_odd_values() -> None:
    arrays = {
        "zero-d": np.array(-0.0, np.float32),
        "nan": np.array([np.nan, np.inf, -np.inf], np.float64),
        "empty": np.empty((0, 3), np.float32),
        "counter": np.array([2**62], np.int64),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    }
    sent = message(RecordDict({"a": ArrayRecord({k: Array(v) for k, v in arrays.items()})}))
    received = unpack(Packer().pack(sent)).content["a"]
    for name, array in arrays.items():
        back = received[name].numpy()
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert back.tobytes() == array.tobytes()


def test_small_frames_ride_in_a_config_record_and_large_ones_in_an_array() -> None:
    record = RecordDict()
    put_frame(record, "small", random_bytes(INLINE_LIMIT))
    put_frame(record, "large", random_bytes(INLINE_LIMIT + 1))
    assert isinstance(record["small"], ConfigRecord)
    array = record["large"][STYPE]
    assert (array.dtype, array.shape, array.stype) == ("uint8", (INLINE_LIMIT + 1,), STYPE)
    with pytest.raises(TypeError):
        array.numpy()


def test_replacing_a_frame_changes_its_holder() -> None:
    record = RecordDict()
    put_frame(record, "f", random_bytes(INLINE_LIMIT + 1))
    put_frame(record, "f", b"abc")
    assert take_frame(record, "f") == b"abc"
    assert list(record) == ["f"]


def test_frames_are_found_among_other_records() -> None:
    record = RecordDict({"metrics": MetricRecord({"loss": 1.0})})
    put_frame(record, "a", b"one")
    put_frame(record, "b", random_bytes(INLINE_LIMIT + 5))
    assert {k: len(v) for k, v in frames(record).items()} == {"a": 3, "b": INLINE_LIMIT + 5}


def test_absent_is_none_and_what_is_foreign_or_only_looks_like_a_frame_is_an_error_and_left_out() -> None:
    hostile = {
        "plain metrics": MetricRecord({"loss": 1.0}),
        "config": ConfigRecord({"lr": 0.1}),
        "model": ArrayRecord({"w": Array(np.zeros(3, np.float32))}),
        "metrics": MetricRecord({STYPE: 1.0}),
        "arrays": ArrayRecord({STYPE: Array(np.zeros(3, np.float32))}),
        "lies": ArrayRecord({STYPE: Array("uint8", (5,), STYPE, b"abc")}),
        "text": ConfigRecord({STYPE: "not bytes"}),
        "list": ConfigRecord({STYPE: [b"a", b"b"]}),
        "two": ConfigRecord({STYPE: b"x", "more": 1}),
    }
    record = RecordDict(dict(hostile))
    put_frame(record, "good", b"frame")
    received = unpack(Packer().pack(message(record))).content
    assert frames(received) == {"good": b"frame"}
    assert take_frame(received, "nothing") is None
    with pytest.raises(PayloadError, match="str"):
        put_frame(record, "f", "text")  # type: ignore[arg-type]
    for key in hostile:
        with pytest.raises(PayloadError, match=key):
            take_frame(received, key)
    assert payload_bytes(message(received)) >= len(b"frame")


def test_payload_of_a_plain_message_is_the_array_data() -> None:
    model = {"w": np.zeros((10, 10), np.float32), "b": np.zeros(10, np.float64)}
    record = RecordDict(
        {
            "arrays": ArrayRecord({k: Array(v) for k, v in model.items()}),
            "config": ConfigRecord({"note": b"not a frame"}),
            "metrics": MetricRecord({"loss": 0.5}),
        }
    )
    assert payload_bytes(message(record)) == (400 + 128) + (80 + 128)


def test_node_and_round_are_read_back() -> None:
    record = RecordDict()
    put_node(record, 12)
    assert take_node(message(record)) == 12
    assert take_node(message(RecordDict())) is None
    assert take_node(message(RecordDict({"fedcomp.node": ConfigRecord({"partition-id": "12"})}))) is None
    assert round_of(message(RecordDict({"config": ConfigRecord({"server-round": 4})}))) == 4
    assert round_of(message(record)) is None


@pytest.mark.parametrize("partition", [True, -1, -(2**62), 2**31, 2**62, 1.0, [1], b"1"])
def test_a_partition_out_of_range_is_no_partition(partition: object) -> None:
    claim = RecordDict({NODE_RECORD: ConfigRecord({PARTITION_KEY: partition})})  # type: ignore[dict-item]
    assert take_node(unpack(Packer().pack(message(claim)))) is None


def test_only_a_config_record_says_who_a_node_is() -> None:
    for holder in (MetricRecord({PARTITION_KEY: 1}), ArrayRecord({PARTITION_KEY: Array(np.zeros(1))})):
        assert take_node(message(RecordDict({NODE_RECORD: holder}))) is None


def test_the_largest_partition_is_put_and_taken_and_no_larger_one() -> None:
    record = RecordDict()
    put_node(record, 2**31 - 1)
    assert take_node(message(record)) == 2**31 - 1
    for partition in (-1, 2**31):
        with pytest.raises(PayloadError, match="partition-id"):
            put_node(record, partition)


@pytest.mark.parametrize(("low", "high"), [(1, INLINE_LIMIT), (INLINE_LIMIT + 1, 5 * 2**20 - 1)])
def test_the_overhead_on_the_wire_does_not_depend_on_the_size(low: int, high: int) -> None:
    overheads = []
    for size in (low, (low + high) // 3, high):
        record = RecordDict({"metrics": MetricRecord({"num-examples": 3, "loss": 0.5})})
        put_frame(record, "update", random_bytes(size, seed=size))
        sent = message(record)
        overheads.append(wire_bytes(sent) - payload_bytes(sent))
    assert max(overheads) - min(overheads) <= 16
    assert 600 < min(overheads) < 1600


def test_wire_bytes_agree_with_flowers_own_walk_over_the_objects() -> None:
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import message_to_proto
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

    shared = Array(np.arange(300_000, dtype=np.float64))
    record = RecordDict(
        {
            # Equal arrays are one object, and equal 5 MiB chunks of one array are one chunk.
            "arrays": ArrayRecord({"a": shared, "b": Array(np.arange(300_000, dtype=np.float64))}),
            "zeros": ArrayRecord({"z": Array("uint8", (11 * 2**20,), STYPE, bytes(11 * 2**20))}),
            "config": ConfigRecord({"k": [1, 2], "s": "text"}),
            # A tree of more than 2**14 bytes, whose length takes three bytes itself.
            "many": ArrayRecord({str(i): Array(np.array(i)) for i in range(150)}),
        }
    )
    sent = message(record)
    ours = wire_bytes(sent)
    sent.metadata.__dict__["_message_id"] = sent.object_id
    objects = get_all_nested_objects(sent)
    theirs = sum(len(o.deflate()) for o in objects.values())
    theirs += get_object_tree(sent).ByteSize() + message_to_proto(remove_content_from_message(sent)).ByteSize()
    assert ours == theirs
    assert ours < 2.4e6 + 5.3e6 + 1.1e6


def plain_records() -> RecordDict:
    values: dict[str, Any] = {
        "flag": True,
        "number": -3,
        "large": 2**64 - 1,
        "real": -0.0,
        "numpy": np.float64(0.5),
        "text": "é",
        "bytes": b"\x00\xff",
        "flags": [True, False],
        "numbers": [1, 2**64 - 1],
        "reals": [0.5],
        "texts": ["a", ""],
        "none": [],
    }
    return RecordDict(
        {
            "config": ConfigRecord(values),
            "same": ConfigRecord(values),
            "empty": ConfigRecord(),
            "metrics": MetricRecord({"loss": 0.25, "count": 2**63, "all": [1, 2]}),
            "model": ArrayRecord({"a": Array(np.eye(3)), "b": Array(np.eye(3)), "c": Array(np.array(1.5))}),
            "nothing": ArrayRecord(),
        }
    )


def test_messages_and_states_are_written_as_flower_writes_them() -> None:
    from flwr.common.serde import context_to_proto, recorddict_to_proto
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    asked = message(plain_records())
    set_message_id(asked, asked.object_id)
    sent = [asked, Message(RecordDict(), reply_to=asked), Message(Error(2, "why"), reply_to=asked)]
    for each in sent:
        objects = get_all_nested_objects(each)
        packed = Packer().pack(each)
        assert packed.contents == {object_id: item.deflate() for object_id, item in objects.items()}
        assert packed.root == each.object_id
        back = unpack(packed)
        assert back.object_id == packed.root
        assert back.has_content() == each.has_content()
        assert not back.has_content() or back.content == each.content

    context = Context(2**63, 2**62, {"partition-id": 3, "x": 0.5}, plain_records(), {"lr": 0.1, "s": "t", "f": True})
    data = _private.context_to_bytes(context)
    assert data == context_to_proto(context).SerializeToString()
    assert _private.context_from_bytes(data) == context
    content = _private.content_to_bytes(context.state)
    assert content == recorddict_to_proto(context.state).SerializeToString(deterministic=True)
    # What Flower refuses is refused, although nothing is checked twice.
    wrong = RecordDict({"c": ConfigRecord()})
    wrong["c"].__dict__["_data"]["x"] = {1}
    with pytest.raises(TypeError):
        _private.content_to_bytes(wrong)


def test_objects_are_not_written_down() -> None:
    with pytest.raises(ValueError, match="allow_pickle"):
        to_record({"a": np.array([object()])})


@pytest.mark.slow
def test_messages_are_rebuilt_exactly_as_flower_would() -> None:
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    data = Key(0, "big").bits(1_500_000).tobytes()
    record = RecordDict(
        {
            "big": ArrayRecord({"three chunks": Array("uint8", (len(data),), STYPE, data)}),
            "small": ArrayRecord({"w": Array(np.eye(3)), "empty": Array("uint8", (0,), STYPE, b"")}),
            "zeros": ArrayRecord({"equal chunks": Array("uint8", (11 * 2**20,), STYPE, bytes(11 * 2**20))}),
        }
    )
    packed = Packer().pack(message(record))
    unpacker = _private.Unpacker()
    first, second = unpacker.unpack(packed), unpacker.unpack(packed)
    theirs = inflate_object_from_contents(packed.root, dict(packed.contents))
    for mine in (first, second):
        assert mine.content == theirs.content == record
        assert mine.object_id == theirs.object_id == packed.root
    for name in record:
        for key in record[name]:
            assert first.content[name][key] is not second.content[name][key]


@pytest.mark.slow
def test_flower_pulls_a_large_model_in_pieces_and_repeats_only_those_that_failed() -> None:
    """What docs/reference/limits.md says of a first model whose transfer breaks off."""
    from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, pull_objects

    data = Key(0, "model").bits(1_500_000).tobytes()
    contents = dict(
        Packer().pack(message(RecordDict({"arrays": ArrayRecord({"w": Array(np.frombuffer(data))})}))).contents
    )
    large = [name for name, content in contents.items() if len(content) > 1 << 20]
    assert len(large) == 3
    assert max(len(contents[name]) for name in large) < 1.01 * 5 * 2**20
    asked: list[str] = []

    def pull(name: str) -> bytes:
        asked.append(name)
        if name == large[1] and asked.count(name) < 3:
            raise ObjectUnavailableError(name)
        return contents[name]

    assert pull_objects(list(contents), pull, initial_backoff=0.001) == contents
    assert {name: asked.count(name) for name in contents} == {name: 3 if name == large[1] else 1 for name in contents}


def test_weighing_leaves_nothing_behind_that_would_travel() -> None:
    record = RecordDict({"a": ArrayRecord({"w": Array(np.zeros(100_000))})})
    sent = message(record)
    before = len(pickle.dumps(sent))
    wire_bytes(sent)
    assert len(pickle.dumps(sent)) - before < 500


def test_a_changed_record_is_weighed_anew() -> None:
    record = RecordDict({"c": ConfigRecord({"x": 1}), "a": ArrayRecord({"w": Array(np.zeros(4, np.float32))})})
    sent = message(record)
    before = wire_bytes(sent)
    record["c"]["longer"] = "x" * 100
    record["a"]["w"].data = record["a"]["w"].data + b"\x00" * 50
    after = wire_bytes(sent)
    assert 150 <= after - before <= 180
    assert wire_bytes(sent) == after


def test_error_codes_are_flowers_own() -> None:
    """They are written down, since the enumeration is private and clients do not import what is."""
    assert protocol.MOD_FAILED_PRECONDITION == ErrorCode.MOD_FAILED_PRECONDITION
    assert protocol.APP_RAISED == ErrorCode.CLIENT_APP_RAISED_EXCEPTION


def test_of_an_apps_reply_only_its_partition_is_kept() -> None:
    reply, kept = RecordDict({NODE_RECORD: ConfigRecord({"partition-id": 3, "loss": 0.5})}), RecordDict()
    keep_node(reply, kept)
    assert dict(kept.config_records[NODE_RECORD]) == {"partition-id": 3}
    keep_node(RecordDict(), empty := RecordDict())
    assert not empty


def reply_with(put: Any, *frames_of: tuple[str, bytes]) -> RecordDict:
    """Return a reply with a header, metrics and frames that ``put`` stored."""
    record = RecordDict({"metrics": MetricRecord({"num-examples": 10, "loss": 0.5})})
    put_node(record, 3)
    for key, frame in frames_of:
        put(record, key, frame)
    return record


@pytest.mark.parametrize("value", [1, 0.5, "text", True, [b"a"], [1]], ids=repr)
def test_an_entry_of_a_header_that_is_no_frame_is_an_error(value: Any) -> None:
    record = reply_with(put_frame)
    record.config_records[NODE_RECORD]["fedcomp.update"] = value
    with pytest.raises(PayloadError, match=r"entry 'fedcomp.update' of 'fedcomp.node' is a .*, not a frame"):
        take_frame(record, "fedcomp.update")
    assert frames(record) == {}
    assert payload_bytes(message(record)) == 0


def test_a_header_that_says_only_who_answers_says_nothing_else() -> None:
    """Private halves pass on the partition of a reply alone: no frame leaves with it."""
    out = RecordDict()
    record = reply_with(put_frame)
    record.config_records[NODE_RECORD]["fedcomp.frame.values"] = b"frame"
    assert frames(record)
    keep_node(record, out)
    assert frames(out) == {}
    assert dict(out.config_records[NODE_RECORD]) == {PARTITION_KEY: 3}


# Tensors out of ArrayRecords: read without numpy's parser where they are plain, and by it in every other case; and

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
        np.arange(12.0)[::2],
        np.zeros(2, [("a", "<f4"), ("b", "<i8")]),
    ],
)
def test_tensors_are_those_that_flower_reads_and_may_be_written_to(array: NDArray[np.generic]) -> None:
    record = ArrayRecord({"a": Array(array)})
    ours, theirs = to_record({"a": array})["a"], record["a"]
    assert (ours.dtype, ours.shape, ours.stype, ours.data) == (theirs.dtype, theirs.shape, theirs.stype, theirs.data)
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
