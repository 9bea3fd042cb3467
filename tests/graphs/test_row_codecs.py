"""Feature rows as bytes: what each codec keeps, what it costs, how rows are taken out of frames, what is refused."""

from __future__ import annotations

from functools import cache

import graph_frames as damage
import numpy as np
import pytest

from fedcomp import wire
from fedcomp.errors import ConfigError
from fedcomp.graphs.base import GraphError, MissingRows
from fedcomp.graphs.ids import put_ids
from fedcomp.graphs.rowcodecs import ROW_CODECS, codec_of, get_row_codec
from fedcomp.rng import Key
from fedcomp.wire.bits import put_varint
from fedcomp.wire.section import Section

CODECS = tuple(name for name in ROW_CODECS if name != "auto")
VALUE = {"dense-f32": 4, "dense-f16": 2, "dense-f64": 8, "csr": 4, "csr-f16": 2, "csr-f64": 8}

GOLDEN_IDS = np.array([3, 130, 131])
GOLDEN_ROWS = np.array([[0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0.5, 0, 0, 0.5, 0]], np.float32)
GOLDEN = {
    "dense-f32": (
        "464347020201050303037e00000000000000803f00000000000000000000803f00000000000000000000000000000000"
        "000000000000003f00000000000000000000003f0000000076e8a86a"
    ),
    "dense-f16": ("464347020202050303037e000000003c00000000003c0000000000000000000000380000000000380000288fc26e"),
    "dense-f64": (
        "464347020203050303037e000000000000000000000000000000f03f0000000000000000000000000000000000000000"
        "0000f03f0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "0000e03f00000000000000000000000000000000000000000000e03f0000000000000000cf745871"
    ),
    "int8": (
        "464347020204050303037e008180803b0000000000ff0000ff000000000000000000000000008180003b00000000ff0000ff00e758fbb8"
    ),
    "csr": "464347020205050303037e00020412240000803f0000803f0000003f0000003f1a84cbdc",
    "csr-f16": "464347020206050303037e0002041224003c003c00380038f0d8a35d",
    "csr-f64": (
        "464347020207050303037e0002041224000000000000f03f000000000000f03f000000000000e03f000000000000e03ff3145f0f"
    ),
    "binary-rice": "464347020208050303037e00030000803f000000000000003f02041224e01e4704",
    "auto": "464347020206050303037e0002041224003c003c00380038f0d8a35d",
}


def uniforms(name: str, *shape: int) -> np.ndarray:
    return Key(7, f"rows/{name}").uniform(int(np.prod(shape))).reshape(shape)


def words(rows: int, features: int = 1433, density: float = 18.2 / 1433) -> np.ndarray:
    """Return rows of word occurrences: zeros and ones."""
    return (uniforms("words", rows, features) < density).astype(np.float32)


@cache
def matrices() -> dict[str, np.ndarray]:
    """Rows of every kind, by name."""
    rng = uniforms("dense", 12, 40) - 0.5
    bag = words(12, 300, 0.06)
    bag[5] = 0
    counts = np.maximum(bag.sum(axis=1, keepdims=True), 1)
    half = np.round(rng * 64) / 32
    zeros = np.zeros((12, 40))
    signed = np.where(uniforms("signs", 12, 40) < 0.2, -0.0, 0.0)
    signed[3, 4] = 2.5
    wide = np.zeros((12, 70_000), np.float32)
    wide[uniforms("wide", 12, 70_000) < 3e-5] = 1.5
    wide[0, -1] = 2
    return {
        "dense": rng.astype(np.float32),
        "dense64": rng,
        "halves": half.astype(np.float32),
        "halves64": half,
        "words": bag,
        "words64": bag.astype(np.float64),
        "normalised": (bag / counts).astype(np.float32),
        "normalised64": bag.astype(np.float64) / counts,
        "scaled": (bag * (1 + uniforms("scales", 12, 1))).astype(np.float32),
        "scaled64": bag * (1 + uniforms("scales", 12, 1)),
        "counts": (bag * np.ceil(9 * uniforms("counts", 12, 300))).astype(np.float32),
        "sparse64": bag * uniforms("sparse", 12, 300),
        "sparse": (bag * uniforms("sparse", 12, 300)).astype(np.float32),
        "one word": np.float32(np.arange(200) == 150)[None],
        "zeros": zeros.astype(np.float32),
        "ones64": zeros + 1,
        "signed zeros": signed.astype(np.float32),
        "one feature": rng[:, :1].astype(np.float32),
        "256": words(12, 256, 0.05),
        "257": words(12, 257, 0.05),
        "wide": wide,
        # Half of the values are there: with their columns they are as long as all, and all need padding.
        "half empty": np.where(np.arange(600) % 2, 0, np.arange(1, 601)).astype(np.float32)[None],
        "none": np.zeros((0, 17), np.float32),
        "small": np.float32([[1e-9, 2, -1e-9], [1e-9, 1e-9, 0], [0, 1, 1e-9]]),
        "small64": np.array([[1e-60, 2, -1e-60], [1e-60, 1e-60, 0], [0, 1, 1e-60]]),
        "tiny": np.float32([[1e-45, 0, -3e-45, 1e-39], [3.4e38, -3.4e38, 0, 1], [7, 7, 7, 7]]),
    }


def ids_of(rows: np.ndarray) -> np.ndarray:
    return 5 + 300 * np.arange(rows.shape[0])


def bits(rows: np.ndarray) -> bytes:
    return np.ascontiguousarray(rows).tobytes()


def encoded(codec: str, name: str) -> bytes | None:
    """Return the frame of a matrix, or None when the codec refuses it."""
    rows = matrices()[name]
    try:
        return get_row_codec(codec).encode(ids_of(rows), rows)
    except GraphError:
        return None


def decoded(frame: bytes, rows: np.ndarray, codec: str) -> np.ndarray:
    ids, found = get_row_codec(codec).decode(frame, features=rows.shape[1], dtype=rows.dtype, limit=rows.shape[0])
    assert ids.tolist() == ids_of(rows).tolist()
    assert found.shape == rows.shape
    assert found.dtype == rows.dtype
    return found


@pytest.mark.parametrize("codec", [*CODECS, "auto"])
def test_golden_bytes(codec: str) -> None:
    frame = get_row_codec(codec).encode(GOLDEN_IDS, GOLDEN_ROWS)
    assert frame.hex() == GOLDEN[codec]
    ids, rows = get_row_codec(codec).decode(bytes.fromhex(GOLDEN[codec]), features=5)
    assert ids.tolist() == GOLDEN_IDS.tolist()
    assert np.abs(rows - GOLDEN_ROWS).max() <= (1e-7 if codec == "int8" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [*CODECS, "auto"])
def test_rows_come_out_as_they_went_in(codec: str) -> None:
    """Bit for bit where the codec is exact, else as the dtype it rounds to holds them."""
    form = get_row_codec(codec)
    seen = 0
    for name, rows in matrices().items():
        frame = encoded(codec, name)
        if frame is None:
            assert codec == "binary-rice" or name == "tiny" or codec == "int8", (codec, name)
            continue
        seen += 1
        found = decoded(frame, rows, codec)
        if form.exact_for(rows.dtype):
            assert bits(found) == bits(rows), name
        elif codec != "int8":
            assert form.dtype is not None
            assert bits(found) == bits(rows.astype(form.dtype).astype(rows.dtype)), name
    assert seen >= (11 if codec == "binary-rice" else 20)


def test_exact_is_said_of_those_that_are() -> None:
    exact = {d: {n for n, c in ROW_CODECS.items() if c.exact_for(d)} for d in (np.float32, np.float64)}
    assert exact[np.float64] == {"dense-f64", "csr-f64", "binary-rice", "auto"}
    assert exact[np.float32] == exact[np.float64] | {"dense-f32", "csr"}


@pytest.mark.slow
@pytest.mark.parametrize("codec", [*CODECS, "auto"])
def test_selected_rows_are_the_bytes_of_encoding_them_alone(codec: str) -> None:
    form = get_row_codec(codec)
    for name, rows in matrices().items():
        frame = encoded(codec, name)
        if frame is None:
            continue
        ids, n = ids_of(rows), rows.shape[0]
        for keep in (np.arange(n), np.arange(0), np.arange(n)[5:6], np.flatnonzero(uniforms("keep", n) < 0.4)):
            assert form.select(frame, ids[keep]) == form.encode(ids[keep], rows[keep]), (name, keep)


def test_selecting_rows_that_are_not_there_names_them() -> None:
    frame = get_row_codec("csr").encode(GOLDEN_IDS, GOLDEN_ROWS)
    for ids, absent in (([3, 4, 131], [4]), ([2], [2]), ([131, 500], [500])):
        with pytest.raises(MissingRows) as caught:
            get_row_codec("csr").select(frame, ids)
        assert caught.value.ids.tolist() == absent
    with pytest.raises(GraphError, match="ascending"):
        get_row_codec("csr").select(frame, [131, 3])


def test_sizes_are_those_of_the_table() -> None:
    """Beside ids and a header of at most 21 bytes: of words as in Cora, 5 732 bytes dense, 6 and 2 per non-zero."""
    rows, d = words(200), 1433
    ids = np.arange(0, 2600, 13)
    nnz = int(np.count_nonzero(rows))
    assert 17.5 < nnz / 200 < 19
    head = 10 + len(put_varint(d)) + len(put_ids(ids))
    sizes = {name: len(get_row_codec(name).encode(ids, rows)) - head for name in ROW_CODECS}
    assert len(put_ids(ids)) < 2 * 200
    for name, width in (("dense-f32", 4), ("dense-f16", 2), ("dense-f64", 8)):
        assert width * d * 200 <= sizes[name] <= width * d * 200 + 7
    assert sizes["int8"] == (d + 8) * 200
    for name, width in (("csr", 4), ("csr-f16", 2), ("csr-f64", 8)):
        assert sizes[name] == nnz * width + sizes["binary-rice"] - 1  # which has a mode
    # All places are one support of 200 d with nnz elements: within 3 % of the entropy of a random one.
    density = nnz / (200 * d)
    entropy = 200 * d * -(density * np.log2(density) + (1 - density) * np.log2(1 - density)) / 8
    assert entropy < sizes["binary-rice"] < 1.03 * entropy + 8
    assert sizes["auto"] == sizes["binary-rice"]
    # Never longer than columns in whole bytes, a count per row and the length of these, as one would write them.
    for name in ("256", "257", "wide", "words", "counts", "signed zeros", "dense", "none"):
        m = matrices()[name]
        width = 1 if m.shape[1] <= 256 else 2 if m.shape[1] <= 65_536 else 4
        rest = 10 + len(put_varint(m.shape[1])) + len(put_ids(ids_of(m)))
        entries = int((np.ascontiguousarray(m).view(np.uint32) != 0).sum())
        assert len(encoded("csr", name) or b"") <= rest + 1 + m.shape[0] + entries * (width + 4)


def test_auto_is_the_shortest_that_is_exact() -> None:
    chosen = set()
    for name, rows in matrices().items():
        frame = encoded("auto", name)
        assert frame is not None
        exact = {}
        for codec in CODECS:
            other = encoded(codec, name)
            if other is not None and codec != "int8" and bits(decoded(other, rows, codec)) == bits(rows):
                exact[codec] = len(other)
        assert codec_of(frame) in exact, name
        assert len(frame) == min(exact.values()), name
        chosen.add(codec_of(frame))
    assert chosen == set(CODECS) - {"int8"}


def test_binary_rows_may_have_one_value_each() -> None:
    """Ones and normalised rows cost nothing more; others one float per row."""
    rows = matrices()["words"]
    plain = len(encoded("binary-rice", "words") or b"")
    for name, more in (("words64", 0), ("normalised", 0), ("normalised64", 0), ("scaled", 48), ("scaled64", 96)):
        assert len(encoded("binary-rice", name) or b"") == plain + more, name
    mixed = rows.copy()
    mixed[4, np.flatnonzero(mixed[4])[1]] = 2
    with pytest.raises(GraphError, match=f"node {ids_of(rows)[4]} has different values"):
        get_row_codec("binary-rice").encode(ids_of(rows), mixed)


@pytest.mark.parametrize("codec", ["dense-f16", "csr-f16"])
def test_a_value_beyond_float16_is_refused_and_its_row_named(codec: str) -> None:
    rows = np.zeros((4, 3), np.float32)
    rows[1, 2] = 65519  # the largest that rounds to 65504
    form = get_row_codec(codec)
    assert form.decode(form.encode([1, 2, 3, 9], rows), features=3)[1][1, 2] == 65504
    rows[2, 0] = -65520
    with pytest.raises(GraphError, match="node 3 holds -65520, which float16 cannot"):
        form.encode([1, 2, 3, 9], rows)


def test_a_value_beyond_float32_is_refused() -> None:
    rows = np.array([[1.0, 2.0], [1e39, 0.0]])
    for codec in ("dense-f32", "csr"):
        with pytest.raises(GraphError, match="node 8"):
            get_row_codec(codec).encode([7, 8], rows)
    for codec in ("dense-f64", "csr-f64", "auto"):
        form = get_row_codec(codec)
        frame = form.encode([7, 8], rows)
        assert form.decode(frame, features=2, dtype=np.float64)[1].tolist() == rows.tolist()
        # A receiver of float32 rows cannot take it either.
        with pytest.raises(wire.NonFinite):
            form.decode(frame, features=2)
    # A level between -1e39 and 1e39 is a float32, the ends are not; nor is an offset of -1e40.
    form = get_row_codec("int8")
    frame = form.encode([7, 8], rows)
    assert form.decode(frame, features=2, dtype=np.float64)[1][1, 0] == pytest.approx(1e39, rel=1e-6)
    with pytest.raises(wire.NonFinite):
        form.decode(frame, features=2)
    with pytest.raises(GraphError, match="node 8"):
        form.encode([7, 8], -10 * rows)


@pytest.mark.parametrize("codec", [*CODECS, "auto"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_refused_at_the_sender(codec: str, bad: float) -> None:
    rows = np.zeros((3, 5), np.float32)
    rows[2, 3] = bad
    with pytest.raises(GraphError, match="node 6 holds NaN or infinity"):
        get_row_codec(codec).encode([1, 4, 6], rows)


@pytest.mark.parametrize("codec", [c for c in CODECS if c != "binary-rice"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_refused_at_the_receiver(codec: str, bad: float) -> None:
    """Whatever the sender says: the pattern of a finite value is replaced by that of NaN or infinity."""
    form = get_row_codec(codec)
    frame = form.encode([1], np.float32([[0, 1.5]]))
    kind = np.dtype(np.float32) if codec == "int8" else np.dtype(f"f{VALUE[codec]}")
    value = np.float32(1.5 / 255) if codec == "int8" else 1.5
    good = np.array(value, kind).tobytes()
    if codec == "int8":
        good = frame[-14:-10]
    assert frame.count(good) == 1
    with pytest.raises(wire.NonFinite):
        form.decode(damage.sealed(frame[:-4].replace(good, np.array(bad, kind).tobytes())), features=2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("codec", ["dense-f32", "dense-f16", "csr", "csr-f16", "int8", "binary-rice"])
def test_a_nan_that_signals_is_refused_without_a_warning(codec: str) -> None:
    """Also where rows are selected of such a frame, which does not look at values: their receiver does."""
    form = get_row_codec(codec)
    frame = form.encode([1, 2], np.float32([[0, 0, 1.5], [0, 2.5, 0]]))
    half = codec.endswith("f16")
    good = np.float16(1.5).tobytes() if half else frame[-26:-22] if codec == "int8" else np.float32(1.5).tobytes()
    assert frame.count(good) == 1
    damaged = damage.sealed(frame[:-4].replace(good, b"\x01\x7d" if half else b"\x01\x00\xa0\x7f"))
    for dtype in (np.float32, np.float64):
        with pytest.raises(wire.NonFinite):
            form.decode(damaged, features=3, dtype=dtype)
    for other in (form, *([] if codec == "int8" else [get_row_codec("auto")])):
        with pytest.raises(wire.NonFinite):
            other.decode(other.select(damaged, [1]), features=3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_int8_errs_by_at_most_half_a_level(dtype: type) -> None:
    form = get_row_codec("int8")
    scales = 10.0 ** np.arange(-12, 12, 2)
    rows = ((uniforms("int8", 12, 900) - 0.3) * scales[:, None] + 3 * scales[:, None]).astype(dtype)
    frame = form.encode(np.arange(12), rows)
    found = form.decode(frame, features=900, dtype=dtype)[1]
    spread = np.ptp(rows, axis=1)
    error = np.abs(found.astype(np.float64) - rows).max(axis=1)
    # Half a level; scale, offset and, here, the result are rounded to float32.
    rounding = 2 * np.finfo(np.float32).eps * np.abs(rows).max(axis=1)
    assert (error <= spread / 510 + rounding).all()
    # No coarser grid would do: the bound is used to a good part.
    assert (error > 0.9 * spread / 510).all()
    assert form.encode(np.arange(12), rows) == frame
    assert len(frame) == 12 * 908 + 10 + 2 + 2 + 12


def test_int8_is_exact_for_constant_rows_and_holds_extremes() -> None:
    form = get_row_codec("int8")
    rows = np.repeat(np.float32([[7.3], [0], [-1e-45], [3.4028235e38], [1e-40]]), 6, axis=1)
    assert form.decode(form.encode(np.arange(5), rows), features=6)[1].tolist() == rows.tolist()
    # Full range, subnormal numbers, one step of the float grid: at most half a level off, and never infinite.
    for row in ([-3.4028235e38, 3.4028235e38, 0], [0, 1e-45, 3e-45], [0, 5.5e-43, 3e-43], [1, 1.0000001, 1]):
        rows = np.float32([row])
        found = form.decode(form.encode([0], rows), features=3)[1]
        wide = rows.astype(np.float64)
        level = max(np.ptp(wide) / 255, 1.5e-45)
        assert np.abs(found.astype(np.float64) - wide).max() <= level / 2 * (1 + 1e-6) + np.abs(wide).max() * 1.2e-7


def test_int8_of_a_constant_float64_row_is_its_nearest_float32() -> None:
    form = get_row_codec("int8")
    rows = np.full((2, 4), 0.1)
    rows[1] = 0.3
    found = form.decode(form.encode([0, 1], rows), features=4, dtype=np.float64)[1]
    assert np.abs(found - rows).max() <= 2e-8
    # The nearest offset is above all of the row: no level below 0 there.
    rows = np.array([[16777219, 16777219.5], [16777219, 16777222]])
    found = form.decode(form.encode([0, 1], rows), features=2, dtype=np.float64)[1]
    assert np.abs(found - rows).max() <= 1


def test_dense_rows_are_used_in_place() -> None:
    rows = (uniforms("place", 30, 50) - 0.5).astype(np.float32)
    frame = get_row_codec("dense-f32").encode(np.arange(30), rows)
    found = get_row_codec("dense-f32").decode(frame, features=50)[1]
    assert np.shares_memory(found, np.frombuffer(frame, np.uint8))
    assert found.flags.aligned
    assert not found.flags.writeable


def test_padding_of_dense_rows_is_zero() -> None:
    """Of 1024 bytes or more, which begin at a multiple of eight; shorter ones have none."""
    for codec, width in (("dense-f32", 4), ("dense-f16", 2), ("dense-f64", 8)):
        form = get_row_codec(codec)
        for count in (1, 8):
            rows = np.zeros((count, 1024 // width // 8), np.float32)
            frame = form.encode(np.arange(count), rows)
            start = len(frame) - 4 - rows.size * width
            pad = start - (6 + len(put_varint(rows.shape[1])) + len(put_ids(np.arange(count))))
            assert (start % 8 == 0 and 0 < pad < 8) if count == 8 else pad == 0
            if pad:
                with pytest.raises(wire.Corrupt, match="padding"):
                    form.decode(damage.sealed(frame[: start - 1] + b"\x01" + frame[start:-4]), features=rows.shape[1])


def test_any_memory_order_gives_the_same_frame() -> None:
    rows = matrices()["counts"]
    for codec in ("dense-f32", "csr", "int8", "auto"):
        form = get_row_codec(codec)
        assert form.encode(ids_of(rows), np.asfortranarray(rows)) == form.encode(ids_of(rows), rows)


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        ([1, 2], np.zeros((3, 4), np.float32)),
        ([1], np.zeros((1, 0), np.float32)),
        ([1], np.zeros((1, 4), np.int64)),
        ([1], np.zeros((1, 4), np.float16)),
        ([1], np.zeros(1, np.float32)),
        ([2, 1], np.zeros((2, 4), np.float32)),
        ([1, 1], np.zeros((2, 4), np.float32)),
    ],
)
def test_what_is_not_rows_is_refused(ids: list, rows: np.ndarray) -> None:
    for codec in ROW_CODECS.values():
        with pytest.raises(GraphError):
            codec.encode(ids, rows)


def test_unknown_names_are_refused_with_the_nearest_known() -> None:
    with pytest.raises(ConfigError, match="did you mean 'binary-rice'"):
        get_row_codec("binary-csr")
    with pytest.raises(ConfigError, match="float32 or float64"):
        get_row_codec("csr").decode(b"", features=3, dtype=np.int32)
    assert list(ROW_CODECS) == [*CODECS, "auto"]
    assert [c.name for c in ROW_CODECS.values()] == list(ROW_CODECS)


def test_a_frame_of_another_codec_is_refused() -> None:
    frames = {c: get_row_codec(c).encode(GOLDEN_IDS, GOLDEN_ROWS) for c in CODECS}
    for codec, frame in frames.items():
        assert codec_of(frame) == codec
        for other in {*CODECS} - {codec}:
            with pytest.raises(wire.UnsupportedCodec, match=other):
                get_row_codec(other).decode(frame, features=5)
    with pytest.raises(wire.UnsupportedCodec):
        get_row_codec("auto").decode(frames["int8"], features=5)
    strange = damage.sealed(frames["csr"][:5] + b"\x63" + frames["csr"][6:-4])
    with pytest.raises(wire.UnsupportedCodec, match="unknown codec 99"):
        codec_of(strange)


def test_rows_of_other_nodes_or_lengths_than_agreed_are_refused() -> None:
    for codec in ROW_CODECS.values():
        frame = codec.encode(GOLDEN_IDS, GOLDEN_ROWS)
        codec.decode(frame, features=5, nodes=132, limit=3, max_bytes=60)
        with pytest.raises(wire.SchemaMismatch, match="5 features, expected 6"):
            codec.decode(frame, features=6)
        with pytest.raises(wire.Corrupt):
            codec.decode(frame, features=5, nodes=131)
        with pytest.raises(wire.LimitExceeded):
            codec.decode(frame, features=5, limit=2)
        with pytest.raises(wire.LimitExceeded):
            codec.decode(frame, features=5, max_bytes=59)
        codec.decode(frame, features=5, dtype=np.float64, max_bytes=120)
        with pytest.raises(wire.LimitExceeded):
            codec.decode(frame, features=5, dtype=np.float64, max_bytes=119)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [*CODECS, "auto"])
def test_damaged_frames_are_refused(codec: str) -> None:
    form = get_row_codec(codec)
    frame = form.encode(GOLDEN_IDS, GOLDEN_ROWS)
    damage.refuses_every_truncation_and_flip(lambda f: form.decode(f, features=5), frame)
    # Without the section of non-zeros it is the frame of rows of zeros.
    body = 6 + len(put_varint(5)) + len(put_ids(GOLDEN_IDS))
    but = body if codec_of(frame).startswith("csr") else -1
    if but > 0:
        assert not form.decode(damage.sealed(frame[:body]), features=5)[1].any()
    damage.refuses_every_sealed_truncation(lambda f: form.decode(f, features=5), frame, but)
    damage.refuses_every_sealed_truncation(lambda f: form.select(f, GOLDEN_IDS[:1]), frame, but)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [*CODECS, "auto"])
def test_fuzzed_frames_give_finite_rows_or_wire_errors(codec: str) -> None:
    form = get_row_codec(codec)
    names = ("words", "normalised", "scaled64") if codec in ("binary-rice", "auto") else ("words", "counts", "sparse64")
    frames = [form.encode(ids_of(m), m) for m in (matrices()[n] for n in names)]

    def decode(frame: bytes) -> None:
        ids, rows = form.decode(frame, features=300, dtype=np.float64, nodes=5000, limit=12)
        assert rows.shape == (ids.size, 300)
        assert np.isfinite(rows).all()
        assert (np.diff(ids) > 0).all()
        # Nothing is written in two ways; but int8's levels of rows that were levels need not be the same.
        assert codec == "int8" or form.encode(ids, rows) == frame

    damage.survives_mutants(decode, frames, 150, seed=2, most=400_000)

    def select(frame: bytes) -> None:
        try:
            form.select(frame, [5, 605])
        except MissingRows:
            raise wire.Corrupt("as good as refused") from None

    damage.survives_mutants(select, frames, 80, seed=3, most=400_000)


def at(*places: int, values: tuple = ()) -> bytes:
    """Return the section of one row of 300 features."""
    held = wire.Raw(np.float32(values)) if values else wire.Ones(len(places))
    return Section(300, type(held), "rice").write(held, np.array(places, np.int64))


@pytest.mark.parametrize(
    ("codec", "body", "why"),
    [
        ("csr", at(7, 8, values=(1, 0)), "zero is among"),
        ("csr", at(7, 8, values=(1, 2)) + b"\x00", "unary stream"),
        ("csr", b"\x06\xad\x02" + b"\xff" * 16, "301 values"),
        ("binary-rice", b"\x05" + at(7), "mode 5"),
        ("binary-rice", b"\x03" + np.float32([0]).tobytes() + at(7), "is 0 although"),
        ("binary-rice", b"\x03" + np.float32([2]).tobytes(), "is 0 although"),
        ("binary-rice", b"\x00" + at(7) + b"\x00", "unary stream"),
        ("binary-rice", b"\x01" + at(7), "mode 1, and mode 0 holds"),
        ("binary-rice", b"\x02" + at(7, 8), "mode 2, and mode 1 holds"),
        ("binary-rice", b"\x03" + np.float32([1 / 3]).tobytes() + at(7, 8, 9), "mode 3, and mode 1"),
        ("binary-rice", b"\x04" + np.float64([2]).tobytes() + at(7), "mode 4, and mode 3 holds"),
        ("int8", np.float32([-1, 0]).tobytes() + bytes(300), "negative"),
        ("int8", np.float32([-0.0, 0]).tobytes() + bytes(300), "negative"),
        ("int8", np.float32([0, 1]).tobytes() + bytes(299) + b"\x01", "levels are not"),
    ],
)
def test_contradictions_in_a_body_are_found(codec: str, body: bytes, why: str) -> None:
    form = get_row_codec(codec)
    frame = damage.sealed(b"FCG\x02\x02" + bytes((form.codec_id,)) + put_varint(300) + b"\x01\x01\x05" + body)
    with pytest.raises((wire.Corrupt, wire.LimitExceeded), match=why):
        form.decode(frame, features=300)


def test_claims_allocate_nothing() -> None:
    """Rows without non-zeros are one byte on the wire and any number in memory: limits speak first."""
    count, d = 40_000, 1 << 20
    empty = b"FCG\x02\x02\x05" + put_varint(d) + put_ids(np.arange(count))
    bomb = damage.sealed(empty)
    form = get_row_codec("csr")
    with pytest.raises(wire.LimitExceeded):
        form.decode(bomb, features=d)
    assert damage.memory_of(lambda: form.decode(bomb, features=d)) < 40 * len(bomb)
    assert damage.memory_of(lambda: form.decode(bomb, features=d, limit=10)) < 20_000
    # Taking rows out of it does not make them dense.
    assert damage.memory_of(lambda: form.select(bomb, np.arange(0, count, 2))) < 80 * len(bomb)
    assert damage.memory_of(lambda: get_row_codec("auto").select(bomb, np.arange(0, count, 2))) < 80 * len(bomb)
    for codec in (get_row_codec(name) for name in CODECS):
        head = b"FCG\x02\x02" + bytes((codec.codec_id,)) + put_varint(1 << 31)
        claim = head + b"\x01\x01\x05" + b"\xff" * 7 + b"\x0f" * 60
        assert damage.memory_of(lambda c=codec, f=claim: c.decode(damage.sealed(f), features=1 << 31)) < 50_000
        assert damage.memory_of(lambda c=codec, f=claim: c.select(damage.sealed(f), [5])) < 50_000
