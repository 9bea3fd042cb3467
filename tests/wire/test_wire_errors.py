"""Every refusal of the decoder, provoked; and the order in which checks come."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from frame_mutants import seal

from fedcomp import wire
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.wire.bits import put_varint

ONE = wire.encode([wire.sparse((100,), np.array([5, 50]), np.float32([1, 2]), index="rice")])
TABLE = 17
"""Where the tensor table starts when there are no optional fields."""


def edited(frame: bytes, at: int, new: bytes) -> bytes:
    """Overwrite bytes and seal the frame again."""
    return seal(frame[:at] + new + frame[at + len(new) : -4])


def spliced(frame: bytes, at: int, cut: int, new: bytes) -> bytes:
    """Replace ``cut`` bytes of the head by others; fix the payload's offset."""
    head = int.from_bytes(frame[12:16], "little") + len(new) - cut
    return edited(seal(frame[:at] + new + frame[at + cut : -4]), 12, head.to_bytes(4, "little"))


def test_layout_of_the_specimen() -> None:
    # name, dtype, ndim, dim, kind, k, index codec + 1 parameter, value codec, back-end, two lengths.
    assert ONE[TABLE : TABLE + 14] == b"\x00\x00\x01\x64\x01\x02\x04\x01\x03\x00\x00\x00\x02\x08"


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (b"", wire.Truncated),
        (b"FCW1", wire.Truncated),
        (b"FCW1" + bytes(15), wire.Truncated),
        (b"PK\x03\x04" + bytes(30), wire.BadMagic),
        (b"x", wire.BadMagic),
        (edited(ONE, 4, b"\x02"), wire.UnsupportedVersion),
        (edited(ONE, 7, b"\x01"), wire.UnsupportedVersion),
        (ONE[:-1] + bytes((ONE[-1] ^ 1,)), wire.ChecksumMismatch),
        (ONE[:-1], wire.ChecksumMismatch),
        (edited(ONE, 12, b"\xff\xff"), wire.Truncated),
        (edited(ONE, 12, b"\x05\x00"), wire.Corrupt),
        (edited(ONE, 8, b"\x02"), wire.Truncated),
        (edited(ONE, 8, b"\x00"), wire.Corrupt),
        (edited(ONE, 10, b"\xff"), wire.LimitExceeded),
        (edited(ONE, TABLE - 1, b"\x80"), wire.UnsupportedVersion),
        (edited(ONE, TABLE, b"\x05"), wire.Corrupt),
        (spliced(ONE, TABLE, 1, b"\x01\xff"), wire.Corrupt),
        (spliced(ONE, TABLE, 1, b"\x80\x02"), wire.Corrupt),
        (edited(ONE, TABLE + 1, b"\x63"), wire.UnsupportedCodec),
        (edited(ONE, TABLE + 2, b"\x09"), wire.Corrupt),
        (spliced(ONE, TABLE + 3, 1, b"\x80" * 8 + b"\x40"), wire.LimitExceeded),
        (spliced(ONE, TABLE + 2, 2, b"\x08" + (b"\xff" * 8 + b"\x7f") * 8), wire.LimitExceeded),
        (edited(ONE, TABLE + 4, b"\x04"), wire.Corrupt),
        (edited(ONE, TABLE + 4, b"\x00"), wire.Corrupt),
        (edited(ONE, TABLE + 4, b"\x03"), wire.Corrupt),
        (edited(ONE, TABLE + 5, b"\x65"), wire.Corrupt),
        (edited(ONE, TABLE + 5, b"\x03"), wire.Corrupt),
        (edited(ONE, TABLE + 7, b"\x21"), wire.Corrupt),
        (edited(ONE, TABLE + 8, b"\x3f"), wire.Corrupt),
        (edited(ONE, TABLE + 10, b"\x41"), wire.Corrupt),
        (edited(ONE, TABLE + 12, b"\x03"), wire.Truncated),
        (seal(ONE[:-4] + b"\0"), wire.Corrupt),
        (seal(ONE[:-5]), wire.Truncated),
    ],
)
def test_malformed_frames(frame: bytes, error: type[wire.WireError]) -> None:
    with pytest.raises(error):
        wire.decode(frame)


def test_errors_carry_what_a_caller_needs() -> None:
    with pytest.raises(wire.UnsupportedVersion) as version:
        wire.decode(edited(ONE, 4, b"\x07"))
    assert (version.value.theirs, version.value.ours) == (7, 1)
    with pytest.raises(wire.UnsupportedCodec) as codec:
        wire.decode(edited(ONE, TABLE + 6, b"\x08"))
    assert "rice" in codec.value.available
    assert issubclass(wire.WireError, FedcompError)


@pytest.mark.parametrize(
    ("at", "code", "name"), [(6, 8, "elias-gamma"), (9, 9, "pca-coefficients"), (9, 10, "spectrum")]
)
def test_reserved_codecs_of_indices_and_values_are_named(at: int, code: int, name: str) -> None:
    with pytest.raises(wire.UnsupportedCodec, match=f"{name}.*reserved"):
        wire.decode(edited(ONE, TABLE + at, bytes((code,))))


def test_reserved_and_unknown_back_ends_say_what_is_available() -> None:
    with pytest.raises(wire.UnsupportedCodec, match=r"lz4.*reserved.*none, zlib") as reserved:
        wire.decode(edited(ONE, TABLE + 11, b"\x03"))
    assert reserved.value.available == wire.available_backends()
    with pytest.raises(wire.UnsupportedCodec, match="unknown"):
        wire.decode(edited(ONE, TABLE + 11, b"\x09"))


@pytest.mark.parametrize(
    "schema",
    [
        (),
        (wire.Expected("w", (101,)),),
        (wire.Expected("w", (10, 10)),),
        (wire.Expected("w", (100,), "float64"),),
        (wire.Expected("w", (100,)), wire.Expected("b", (1,))),
    ],
)
def test_frames_of_other_tensors_do_not_match_the_schema(schema: wire.Schema) -> None:
    with pytest.raises(wire.SchemaMismatch):
        wire.decode(ONE, schema)


def test_shared_supports_must_be_held_and_fit() -> None:
    frame = wire.encode([wire.shared((100,), 3, np.float32([1, 2]))])
    with pytest.raises(wire.SchemaMismatch, match="does not hold"):
        wire.decode(frame, supports={})
    for wrong in (np.array([1]), np.array([1, 100])):
        with pytest.raises(wire.SchemaMismatch, match="support 3"):
            wire.decode(frame, supports={3: wrong})


@pytest.mark.parametrize(
    "limits",
    [
        wire.Limits(max_bytes_in=len(ONE) - 1),
        wire.Limits(max_elements=99),
        wire.Limits(max_bytes_out=59),
        wire.Limits(max_tensors=0),
        wire.Limits(max_abs=1.5),
    ],
)
def test_limits_are_kept(limits: wire.Limits) -> None:
    with pytest.raises(wire.LimitExceeded):
        wire.decode(ONE, limits=limits)
    # Two values of at most 10 bytes, two indices of 16, and the eight bits of the unary stream as bytes.
    exact = wire.Limits(len(ONE), 100, 60, 1, frozenset({"rice"}), frozenset({"raw"}), frozenset(), max_abs=2.0)
    assert wire.decode(ONE, limits=exact)[0].values.decode().tolist() == [1, 2]


def test_a_schema_may_cap_k() -> None:
    assert wire.decode(ONE, (wire.Expected("w", (100,), max_k=2),))[0].values.k == 2
    with pytest.raises(wire.LimitExceeded, match="at most 1"):
        wire.decode(ONE, (wire.Expected("w", (100,), max_k=1),))


def test_codecs_can_be_disallowed() -> None:
    compressed = wire.encode([wire.dense(np.zeros(500, np.float32), backend="zlib")])
    dense_support = np.arange(1, 100)
    wrapped = wire.encode([wire.sparse((100,), dense_support, np.zeros(99, np.float32), index="complement:rice")])
    for frame, limits in (
        (ONE, wire.Limits(index_codecs=frozenset({"fixed"}))),
        (ONE, wire.Limits(value_codecs=frozenset({"fp16"}))),
        (compressed, wire.Limits(backends=frozenset({"zstd"}))),
        (wrapped, wire.Limits(index_codecs=frozenset({"complement", "fixed"}))),
    ):
        with pytest.raises(wire.UnsupportedCodec, match="not allowed"):
            wire.decode(frame, limits=limits)


def test_a_receiver_without_zstd_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zstandard")
    from fedcomp.wire import backends

    frame = wire.encode([wire.dense(np.zeros(500, np.float32), backend="zstd")])
    monkeypatch.setattr(backends, "available_backends", lambda: ("none", "zlib"))
    with pytest.raises(wire.UnsupportedCodec, match=r"not installed here.*none, zlib") as error:
        wire.decode(frame)
    assert error.value.available == ("none", "zlib")


def test_non_finite_policies() -> None:
    frame = wire.encode([wire.dense(np.float32([1, np.nan, -np.inf]), "w")])
    with pytest.raises(wire.NonFinite, match="2 NaN or infinite"):
        wire.decode(frame)
    bundle = wire.decode(frame, limits=wire.Limits(non_finite="zero"))
    assert (bundle[0].dense().tolist(), bundle.non_finite) == ([1, 0, 0], 2)
    kept = wire.decode(frame, limits=wire.Limits(non_finite="allow"))[0].dense()
    assert np.isnan(kept[1])
    assert kept[2] == -np.inf
    with pytest.raises(wire.LimitExceeded):
        wire.decode(frame, limits=wire.Limits(non_finite="allow", max_abs=1e30))


def test_integers_are_never_non_finite() -> None:
    frame = wire.encode([wire.dense(np.array([0x7F800000, -1], np.int32))])
    assert wire.decode(frame)[0].dense().tolist() == [0x7F800000, -1]


def test_nothing_is_allocated_for_what_a_field_merely_claims() -> None:
    # A kilobyte at most, claiming four dimensions of 2**15, 2**40 values, and sections to match.
    claims = [
        spliced(ONE, TABLE + 2, 2, b"\x04" + b"\x80\x80\x02" * 4),
        spliced(ONE, TABLE + 5, 1, b"\xff" * 5 + b"\x7f"),
        spliced(ONE, TABLE + 12, 1, b"\xff" * 5 + b"\x7f"),
        edited(ONE, 8, b"\xff\xff\x00\x00"),
        spliced(ONE, TABLE - 1, 1, b"\x06\xff\xff\xff\x7f"),
    ]
    for frame in claims:
        with pytest.raises(wire.WireError):
            wire.decode(frame)
        tracemalloc.start()
        with pytest.raises(wire.WireError):
            wire.decode(frame, limits=wire.Limits(max_tensors=1 << 20, max_elements=1 << 40))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 60_000, frame.hex()


def test_many_empty_optional_fields_are_refused() -> None:
    with pytest.raises(wire.LimitExceeded, match="optional"):
        wire.decode(spliced(ONE, TABLE - 1, 1, b"\x63\x00" * 5000 + b"\x00"))


@pytest.mark.parametrize(
    ("tensor", "kinds", "names"),
    [
        (wire.Tensor(wire.Raw(np.float32([7])), (100,), kind=wire.COEFFICIENTS), {wire.DENSE}, "coefficients.*dense"),
        (wire.shared((100,), 5, np.float32([7])), {wire.SPARSE, wire.DENSE}, "shared.*dense or sparse"),
        (wire.dense(np.zeros(100, np.float32)), {wire.SPARSE}, "dense.*sparse"),
        (wire.sparse((100,), np.array([3]), np.float32([1])), {wire.DENSE}, "sparse.*dense"),
    ],
)
def test_a_schema_may_name_the_kinds(tensor: wire.Tensor, kinds: set[wire.Kind], names: str) -> None:
    frame = wire.encode([tensor])
    wire.decode(frame, (wire.Expected("", (100,)),))
    wire.decode(frame, (wire.Expected("", (100,), kinds=frozenset({tensor.kind})),))
    with pytest.raises(wire.SchemaMismatch, match=names):
        wire.decode(frame, (wire.Expected("", (100,), kinds=frozenset(kinds)),))


def test_a_schema_may_name_the_codecs_of_one_tensor() -> None:
    pair = wire.encode([wire.sparse((100,), np.array([3]), np.float32([1]), index="rice"), wire.dense(np.zeros(3))])
    rest = wire.Expected("", (3,), "float64")
    fits = wire.Expected("", (100,), index_codecs=frozenset({"rice"}), value_codecs=frozenset({"raw"}))
    wire.decode(pair, (fits, rest))
    for wrong in (
        wire.Expected("", (100,), index_codecs=frozenset({"seeded"})),
        wire.Expected("", (100,), value_codecs=frozenset({"fp16"})),
    ):
        with pytest.raises(wire.UnsupportedCodec, match="not allowed"):
            wire.decode(pair, (wrong, rest))


@pytest.mark.parametrize("field", ["kinds", "index_codecs", "value_codecs"])
def test_sets_that_allow_nothing_are_configuration_errors(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        wire.Expected("w", (1,), **{field: frozenset()})
    with pytest.raises(ConfigError):
        wire.Expected("w", (1,), kinds=frozenset({9}))  # type: ignore[arg-type]


NARROW = [
    wire.Bf16(np.float32([1, 1e30, -1e30])),
    wire.QsgdLevels(np.array([0, 1, -1]), 1, 0, np.float32([1e30])),
    wire.SignScale(np.array([False, True, True]), np.float32([7e4]), 0),
    wire.Natural.quantise(np.float32([1, 65536, -1e9])),
]


@pytest.mark.parametrize("values", NARROW, ids=lambda v: v.name)
def test_values_that_overflow_the_tensors_dtype_are_not_finite(values: wire.Values) -> None:
    frame = wire.encode([wire.Tensor(values, (3,), dtype="float16")])
    with np.errstate(over="ignore"):
        infinite = np.isinf(values.decode().astype(np.float16))
    with pytest.raises(wire.NonFinite, match=f"{infinite.sum()} NaN or infinite"):
        wire.decode(frame)
    bundle = wire.decode(frame, limits=wire.Limits(non_finite="zero"))
    assert bundle.non_finite == infinite.sum()
    assert np.array_equal(bundle[0].dense() == 0, infinite | (values.decode() == 0))
    assert np.array_equal(np.isinf(wire.decode(frame, limits=wire.Limits(non_finite="allow"))[0].dense()), infinite)
    # The same values are finite in a tensor that can hold them.
    assert np.isfinite(wire.decode(wire.encode([wire.Tensor(values, (3,))]))[0].dense()).all()


def test_the_largest_float16_is_finite() -> None:
    frame = wire.encode([wire.Tensor(wire.Bf16(np.float32([65280, -65280])), (2,), dtype="float16")])
    assert wire.decode(frame)[0].dense().tolist() == [65280, -65280]


@pytest.mark.parametrize("shape", [(0, 2**63 - 1), (0, 2**62, 2**62), (2**62, 0, 2**62), (0, 2**60)])
def test_empty_tensors_no_array_can_have_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="larger than any array"):
        wire.Tensor(wire.Raw(np.zeros(0)), shape, dtype="float64")
    with pytest.raises(ConfigError, match="larger than any array"):
        wire.Expected("w", shape)
    empty = wire.encode([wire.dense(np.zeros((0, 1)))])
    dims = b"".join(put_varint(d) for d in shape)
    with pytest.raises(wire.LimitExceeded, match="larger than any array"):
        wire.decode(spliced(empty, TABLE + 2, 3, bytes((len(shape),)) + dims))


@pytest.mark.parametrize("shape", [(0, 2**59), (2**40, 0, 2**19), (0,), (3, 0)])
def test_every_other_empty_tensor_can_be_dense(shape: tuple[int, ...]) -> None:
    frame = wire.encode([wire.Tensor(wire.Raw(np.zeros(0)), shape, dtype="float64")])
    assert wire.decode(frame)[0].dense().shape == shape


def test_a_sparse_tensor_too_large_for_an_array_says_so() -> None:
    frame = wire.encode([wire.sparse((2**62,), np.array([2**62 - 1]), np.float32([1]), index="raw")])
    tensor = wire.decode(frame, limits=wire.Limits(max_elements=1 << 62))[0]
    with pytest.raises(ConfigError, match="too large to be dense"):
        tensor.dense()
