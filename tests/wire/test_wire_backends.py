"""Opening compressed sections from anyone: bombs, lies about sizes, trailing bytes, windows."""

from __future__ import annotations

import tracemalloc
import zlib

import numpy as np
import pytest

from fedcomp import wire
from fedcomp.errors import ConfigError
from fedcomp.wire import backends, frame
from fedcomp.wire.backends import compress, decompress

zstandard = pytest.importorskip("zstandard")

BOMB = 50_000_000


def framed(backend: int, stored: bytes, raw: int, n: int) -> bytes:
    """Return a sealed frame of one dense uint8 tensor whose value section is ``stored``."""
    from frame_mutants import seal

    from fedcomp.wire.bits import put_varint

    table = b"\x00\x07\x01" + put_varint(n) + b"\x00" + put_varint(n) + b"\x00\x00\x00\x00" + bytes((backend,))
    table += put_varint(0) + put_varint(len(stored)) + put_varint(0) + put_varint(raw)
    head = frame.HEADER.pack(b"FCW1", 1, 0, 0, 1, frame.HEADER.size + 1 + len(table)) + b"\x00"
    return seal(head + table + stored)


def peak_of_refusing(data: bytes, limits: wire.Limits) -> int:
    """Return the extra memory of a decode that must fail."""
    tracemalloc.start()
    try:
        with pytest.raises(wire.WireError):
            wire.decode(data, limits=limits)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["zlib", "zstd"])
@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_round_trip(name: str, size: int) -> None:
    data = (np.arange(size) % 251).astype(np.uint8).tobytes()
    assert decompress(name, compress(name, data), size) == data
    for wrong in (size - 1, size + 1):
        with pytest.raises(wire.Corrupt):
            decompress(name, compress(name, data), wrong)


@pytest.mark.slow
@pytest.mark.parametrize("claim", [1000, 200_000, BOMB])
@pytest.mark.parametrize("name", ["zlib", "zstd"])
def test_a_bomb_is_refused_without_unpacking_it(name: str, claim: int) -> None:
    bomb = compress(name, bytes(BOMB))
    assert name == "zlib" or len(bomb) < 2000
    limits = wire.Limits(max_elements=200_000, max_bytes_out=800_000)
    assert peak_of_refusing(framed(backends.BACKEND_IDS[name], bomb, claim, claim), limits) < 1 << 20


def test_a_zstd_frame_that_expands_beyond_its_header_is_refused() -> None:
    # The header says 1000 bytes; 400 run-length blocks of 128 KiB follow.
    header = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(1000))[:7]
    assert zstandard.get_frame_parameters(header).content_size == 1000
    blocks = b"".join(((131072 << 3) | 2 | (i == 399)).to_bytes(3, "little") + b"\0" for i in range(400))
    bomb = header[: zstandard.frame_header_size(header)] + blocks
    limits = wire.Limits(max_elements=1000, max_bytes_out=8000)
    assert peak_of_refusing(framed(2, bomb, 1000, 1000), limits) < 1 << 20
    with pytest.raises(wire.Corrupt, match="expands"):
        decompress("zstd", bomb, 1000)


def test_zstd_needs_a_content_size_a_small_window_and_an_end() -> None:
    data = bytes(range(256)) * 40
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(data)
    with pytest.raises(wire.Corrupt, match="declares"):
        decompress("zstd", unsized, len(data))
    wide = zstandard.ZstdCompressionParameters(window_log=24, write_content_size=1)
    stream = zstandard.ZstdCompressor(compression_params=wide).compressobj(size=BOMB)
    with pytest.raises(wire.LimitExceeded, match="window"):
        decompress("zstd", stream.compress(bytes(BOMB)) + stream.flush(), BOMB)
    good = compress("zstd", data)
    for bad in (good + b"\0", good + good, good[:-1], b"\x28\xb5\x2f\xfd", b"", bytes(20)):
        with pytest.raises(wire.Corrupt):
            decompress("zstd", bad, len(data))


def test_zstd_frames_with_a_checksum_are_fine_and_dictionaries_are_not() -> None:
    data = bytes(range(256)) * 40
    checked = zstandard.ZstdCompressor(write_checksum=True).compress(data)
    assert decompress("zstd", checked, len(data)) == data
    with pytest.raises(wire.Corrupt):
        decompress("zstd", checked[:-1] + bytes((checked[-1] ^ 1,)), len(data))
    samples = [bytes((i * 7 + j) % 256 for j in range(200)) for i in range(100)]
    dictionary = zstandard.train_dictionary(1024, samples)
    with pytest.raises(wire.Corrupt, match="dictionary"):
        decompress("zstd", zstandard.ZstdCompressor(dict_data=dictionary).compress(data), len(data))


def test_zlib_streams_end_where_they_say() -> None:
    data = bytes(5000)
    good = zlib.compress(data)
    for bad in (good + b"\0", good[:-1], b"", b"\x78\x9c", bytes(9)):
        with pytest.raises(wire.Corrupt):
            decompress("zlib", bad, len(data))


def test_equal_lengths_mean_stored() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 999, dtype=np.uint8)
    sent = wire.encode([wire.dense(noise, backend="zstd")])
    assert len(sent) < 999 + 64
    assert wire.decode(sent)[0].backend == "none"
    mixed = wire.encode([wire.Tensor(wire.Raw(noise), (999,), dtype="uint8", backend="none")])
    assert mixed == sent


@pytest.mark.parametrize("backend", ["zlib", "zstd", "auto"])
def test_back_ends_shorten_what_can_be_shortened(backend: str) -> None:
    smooth = np.cumsum(np.random.default_rng(0).standard_normal(3000)).astype(np.float32)
    sent = wire.encode([wire.dense(smooth, backend=backend)])
    assert len(sent) < 0.95 * smooth.nbytes
    got = wire.decode(sent)[0]
    assert np.array_equal(got.dense(), smooth)
    assert got.backend == ("zstd" if backend == "auto" else backend)


def test_available_back_ends_are_listed_and_others_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wire.available_backends() == ("none", "zlib", "zstd")
    monkeypatch.setattr(backends, "available_backends", lambda: ("none", "zlib"))
    assert backends.require_backend("auto") == "zlib"
    with pytest.raises(ConfigError, match="pip install zstandard"):
        wire.encode([wire.dense(np.zeros(4), backend="zstd")])


def test_auto_works_without_zstd(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcomp.wire import choose

    monkeypatch.setattr(choose, "available_backends", lambda: ("none", "zlib"))
    support = np.arange(0, 60_000, 10)
    sent = wire.encode([wire.sparse((10**6,), support, np.zeros(6000, np.int8))])
    assert wire.decode(sent)[0].index in ("rice", "block-rice", "ans-gaps")
