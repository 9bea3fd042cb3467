"""The frame: layout by hand, kinds, names, optional fields, alignment, overhead, schema."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp import wire
from fedcomp.errors import ConfigError


def test_a_small_frame_byte_by_byte() -> None:
    body = (
        b"FCW1\x01\x00"  # magic, version 1.0
        + struct.pack("<HII", 1, 1, 34)  # flags, one tensor, payload at byte 34
        + b"\x02\x01\x07"  # base_round, one byte, 7
        + b"\x00"  # end of the optional fields
        + b"\x01w\x02\x01\x04"  # name "w", float16, one dimension of 4
        + b"\x01\x02"  # sparse, two values
        + b"\x02\x00"  # fixed width, no parameters
        + b"\x00\x00\x00"  # raw values, no parameters, no back-end
        + b"\x01\x04"  # one byte of indices, four of values
        + b"\x0d"  # indices 1 and 3 in two bits each
        + b"\x00\x3c\x00\xc0"  # 1.0 and -2.0
    )
    tensor = wire.sparse((4,), np.array([1, 3]), np.float16([1, -2]), "w", "fixed")
    frame = wire.encode([tensor], flags=wire.FLAG_DELTA, tlvs=[(wire.BASE_ROUND, b"\x07")])
    assert frame == body + zlib.crc32(body).to_bytes(4, "little")
    bundle = wire.decode(frame)
    assert bundle[0].dense().tolist() == [0, 1, 0, -2]
    assert bundle[0].dense().dtype == np.float16
    assert (bundle.flags, bundle.tlv(wire.BASE_ROUND), bundle.tlv(wire.SEED)) == (1, b"\x07", None)


@st.composite
def tensors(draw: st.DrawFn) -> wire.Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    size = int(np.prod(shape))
    name = draw(st.text(max_size=12))
    dtype = draw(st.sampled_from(list(wire.DTYPES.values())))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    backend = draw(st.sampled_from(["none", "zlib", "auto"]))
    if draw(st.booleans()):
        return wire.dense(rng.integers(0, 2, shape).astype(dtype), name, backend=backend)
    k = draw(st.integers(0, size))
    support = np.sort(rng.choice(size, k, replace=False)) if size else np.zeros(0, np.int64)
    return wire.sparse(shape, support, rng.integers(0, 2, k).astype(dtype), name, backend=backend)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(tensors(), max_size=4), st.integers(0, 255))
def test_round_trip_of_whole_frames(sent: list[wire.Tensor], flags: int) -> None:
    names = [t.name for t in sent if t.name]
    if len(set(names)) < len(names):
        with pytest.raises(ConfigError, match="unique"):
            wire.encode(sent)
        return
    frame = wire.encode(sent, flags=flags)
    schema = tuple(wire.Expected(t.name or "unnamed", t.shape, t.dtype) for t in sent)
    bundle = wire.decode(frame, schema)
    assert len(bundle) == len(sent)
    assert bundle.flags == flags
    for before, after in zip(sent, bundle.tensors, strict=True):
        assert (after.shape, after.dtype, after.kind) == (before.shape, before.dtype, before.kind)
        assert np.array_equal(after.dense(), before.dense())
        assert after.dense().dtype == before.dense().dtype
    assert wire.encode(sent, flags=flags) == frame


def test_every_kind_survives() -> None:
    values = np.float32([1, 2, 3])
    support = {9: np.array([0, 5, 24])}
    sent = [
        wire.Tensor(wire.Raw(values), (5, 5), "c", kind=wire.COEFFICIENTS),
        wire.seeded((5, 5), 42, 3, values, "r"),
        wire.shared((5, 5), 9, values, "s"),
    ]
    c, r, s = wire.decode(wire.encode(sent), supports=support).tensors
    assert c.values.decode().tolist() == [1, 2, 3]
    assert np.flatnonzero(r.dense()).tolist() == wire.seeded_support(42, 25, 3).tolist()
    assert r.dense().tolist() == sent[1].dense().tolist()
    assert s.dense().reshape(-1)[[0, 5, 24]].tolist() == [1, 2, 3]
    with pytest.raises(ConfigError, match="basis"):
        c.dense()
    unresolved = wire.decode(wire.encode(sent)).tensors[2]
    assert unresolved.indices is None
    assert unresolved.values.decode().tolist() == [1, 2, 3]
    with pytest.raises(ConfigError, match="supports="):
        unresolved.dense()


def test_dense_raw_values_are_aligned_read_only_views_of_the_frame() -> None:
    array = np.arange(5000, dtype=np.float32)
    for extra in range(9):
        first = wire.sparse((300,), np.arange(extra + 1) * 7, np.ones(extra + 1, np.int8))
        frame = wire.encode([first, wire.dense(array)])
        got = wire.decode(frame)[1].dense()
        start = np.frombuffer(frame, np.uint8).__array_interface__["data"][0]
        place = got.__array_interface__["data"][0]
        assert start <= place < start + len(frame)
        assert got.flags.aligned
        assert not got.flags.writeable
        assert np.array_equal(got, array)
        sparse_values = wire.decode(frame)[0].values.decode()
        assert sparse_values.flags.aligned


def test_a_writable_buffer_still_gives_read_only_tensors() -> None:
    frame = bytearray(wire.encode([wire.dense(np.arange(4000.0))]))
    assert not wire.decode(frame)[0].dense().flags.writeable
    assert np.array_equal(wire.decode(memoryview(frame))[0].dense(), np.arange(4000.0))


def test_overhead_of_one_tensor_and_of_further_ones() -> None:
    def sparse(shape: tuple[int, ...], k: int) -> wire.Tensor:
        n = int(np.prod(shape))
        return wire.sparse(shape, wire.seeded_support(1, n, k), np.ones(k, np.float32), index="rice")

    one = sparse((1000, 1000), 10_000)
    payload = len(wire.INDEX_BY_NAME["rice"].encode(wire.Support(one.indices, one.size))[1]) + 40_000
    assert len(wire.encode([one])) - payload <= 64
    assert len(wire.encode([wire.sparse((10**6,), np.zeros(0, np.int64), np.zeros(0, np.float32))])) <= 64
    for further in (
        sparse((256, 256, 3, 3), 5898),
        sparse((4096, 1024), 40_000),
        wire.dense(np.ones(64, np.float32)),
    ):
        alone = len(wire.encode([further], flags=0)) - len(wire.encode([]))
        both = len(wire.encode([one, further])) - len(wire.encode([one]))
        content = further.values.k * 4
        if further.indices is not None:
            content += len(wire.INDEX_BY_NAME["rice"].encode(wire.Support(further.indices, further.size))[1])
        assert both - content <= 24
        assert alone == both


def test_names_are_optional_on_the_wire_and_checked_when_given() -> None:
    schema = (wire.Expected("w", (2,)), wire.Expected("b", (1,)))
    positional = [wire.dense(np.ones(2, np.float32)), wire.dense(np.ones(1, np.float32))]
    assert [t.name for t in wire.decode(wire.encode(positional), schema).tensors] == ["w", "b"]
    named = [wire.dense(np.ones(2, np.float32), "w"), wire.dense(np.ones(1, np.float32), "c")]
    with pytest.raises(wire.SchemaMismatch, match="'c'"):
        wire.decode(wire.encode(named), schema)


def test_unknown_optional_fields_below_128_are_passed_over() -> None:
    frame = wire.encode([], tlvs=[(100, b"future"), (wire.USER_TAG, b"mine")])
    assert wire.decode(frame).tlv(wire.USER_TAG) == b"mine"
    assert wire.decode(frame).tlv(100) == b"future"


@pytest.mark.parametrize(
    "build",
    [
        lambda: wire.encode([], flags=0x100),
        lambda: wire.encode([], tlvs=[(0, b"")]),
        lambda: wire.encode([], tlvs=[(127, b"")]),
        lambda: wire.encode([], tlvs=[(6, b"")] * 62),
        lambda: wire.dense(np.ones((1,) * 9)),
        lambda: wire.dense(np.ones(1), "n" * 256),
        lambda: wire.dense(np.ones(1), backend="brotli"),
        lambda: wire.Tensor(wire.Raw(np.ones(3)), (3,)),
        lambda: wire.Tensor(wire.Fp16(np.ones(3)), (3,), dtype="int32"),
        lambda: wire.Tensor(wire.Raw(np.ones(3, np.float32)), (4,)),
        lambda: wire.sparse((3,), np.arange(2), np.ones(1)),
        lambda: wire.sparse((3,), np.arange(1), np.ones(1), index="ryce"),
        lambda: wire.sparse((1,), np.arange(2), np.ones(2)),
        lambda: wire.seeded((9,), 1, 4, np.ones(3)),
        lambda: wire.shared((9,), 1 << 64, np.ones(3)),
        lambda: wire.Tensor(wire.Raw(np.ones(3, np.float32)), (3,), kind=wire.SHARED),
        lambda: wire.Tensor(wire.Raw(np.ones(3, np.float32)), (3,), index=wire.SharedSupport(1)),
        lambda: wire.Tensor(wire.Raw(np.ones(3, np.float32)), (3,), indices=np.arange(3)),
        lambda: wire.Seeded(-1),
        lambda: wire.Expected("x", (2,), "complex64"),
        lambda: wire.Expected("x", (-2,)),
        lambda: wire.Limits(non_finite="drop"),
        lambda: wire.Limits(max_abs=float("nan")),
    ],
)
def test_the_encoder_refuses_what_it_cannot_say(build: object) -> None:
    with pytest.raises(ConfigError):
        build()  # type: ignore[operator]


def test_frames_are_contiguous_bytes() -> None:
    with pytest.raises(ConfigError, match="contiguous"):
        wire.decode(memoryview(np.zeros((4, 8), np.uint8)))
