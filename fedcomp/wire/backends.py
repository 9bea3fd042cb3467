"""Byte compressors for sections, and safe decompression of untrusted input."""

from __future__ import annotations

import importlib.util
import zlib
from functools import cache
from typing import Any, Final

from fedcomp.errors import ConfigError, nearest
from fedcomp.wire.bits import Buffer
from fedcomp.wire.errors import Corrupt, LimitExceeded, UnsupportedCodec

BACKENDS: Final = {0: "none", 1: "zlib", 2: "zstd"}
BACKEND_IDS: Final = {name: code for code, name in BACKENDS.items()}
RESERVED: Final = {3: "lz4"}

MAX_WINDOW: Final = 8 << 20
"""Largest zstd window a receiver accepts, bytes."""

_ZLIB_LEVEL = 6
_ZSTD_LEVEL = 3
_ZSTD_BLOCK = 128 << 10


@cache
def available_backends() -> tuple[str, ...]:
    """Return the back-ends this installation can open, for capability negotiation; "none" and "zlib" always are."""
    has_zstd = importlib.util.find_spec("zstandard") is not None
    return ("none", "zlib", "zstd") if has_zstd else ("none", "zlib")


def require_backend(name: str) -> str:
    """Return the back-end to compress with; "auto" becomes the best one installed.

    Raises
    ------
    ConfigError
        When it is unknown or not installed.
    """
    have = available_backends()
    if name == "auto":
        return have[-1]
    if name not in BACKEND_IDS:
        raise ConfigError(f"unknown back-end {name!r}{nearest(name, (*BACKEND_IDS, 'auto'))}")
    if name not in have:
        raise ConfigError(f"back-end {name!r} is not installed (pip install zstandard); available: {', '.join(have)}")
    return name


def backend_name(code: int) -> str:
    """Return the name of back-end ``code`` of a frame; raise UnsupportedCodec when this receiver cannot open it."""
    have = available_backends()
    name = BACKENDS.get(code)
    if name is None or name not in have:
        what = name or RESERVED.get(code)
        reason = "is reserved" if code in RESERVED else "is not installed here" if name else "is unknown"
        raise UnsupportedCodec(
            f"back-end {code}{f' ({what})' if what else ''} {reason}; this receiver opens {', '.join(have)}; "
            "negotiate with available_backends()",
            have,
        )
    return name


def compress(name: str, data: Buffer) -> bytes:
    """Compress ``data``; deterministic for one version of the compressor."""
    if name == "zlib":
        return zlib.compress(data, _ZLIB_LEVEL)
    import zstandard

    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True).compress(data)


def decompress(name: str, data: Buffer, size: int) -> bytes:
    """Decompress ``data`` to exactly ``size`` bytes, which the caller has checked against its own limits.

    Never produces more than ``size + 1`` bytes, whatever the data claims.

    Raises
    ------
    Corrupt
        When the data is damaged, has another length, or has trailing bytes.
    LimitExceeded
        When a zstd frame asks for a window above :data:`MAX_WINDOW`.
    """
    return _inflate(data, size) if name == "zlib" else _unzstd(data, size)


def _inflate(data: Buffer, size: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        # One byte beyond the declared size shows a bomb and costs nothing. A limit of 0 would mean "no limit" to zlib:
        # size + 1 never is.
        out = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise Corrupt(f"zlib section is damaged: {error}") from None
    if len(out) != size or not stream.eof or stream.unused_data or stream.unconsumed_tail:
        raise Corrupt(f"zlib section does not hold exactly the declared {size} bytes")
    return out


def _unzstd(data: Buffer, size: int) -> bytes:
    import zstandard

    try:
        header = zstandard.get_frame_parameters(data)
        # A zstd frame that hides its size reports 2**64 - 1, which no table can declare.
        if header.content_size != size:
            raise Corrupt(f"zstd section declares {header.content_size} bytes of content, the table {size}")
        if header.window_size > MAX_WINDOW:
            raise LimitExceeded(f"zstd section needs a window of {header.window_size} bytes; at most {MAX_WINDOW}")
        if header.dict_id:
            raise Corrupt("zstd section refers to a dictionary; the format has none")
        _check_blocks(data, zstandard.frame_header_size(data), header, size)
        # `decompress(max_output_size=)` protects nothing when the frame embeds its size (measured, python-zstandard
        # 0.25), so the output is read as a stream and cut one byte after the declared end.
        with zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(data) as reader:
            out: bytes = reader.read(size + 1)
    except zstandard.ZstdError as error:
        raise Corrupt(f"zstd section is damaged: {error}") from None
    if len(out) != size:
        raise Corrupt(f"zstd section does not hold exactly the declared {size} bytes")
    return out


def _check_blocks(data: Buffer, pos: int, header: Any, size: int) -> None:
    """Walk the block headers (RFC 8878, 3.1.1.2): one frame, no trailing bytes, no more output than declared."""
    least = 0
    while True:
        if pos + 3 > len(data):
            raise Corrupt("zstd section ends inside its blocks")
        word = data[pos] | data[pos + 1] << 8 | data[pos + 2] << 16
        last, kind, length = word & 1, word >> 1 & 3, word >> 3
        if length > _ZSTD_BLOCK or kind == 3:
            raise Corrupt("zstd section has an impossible block header")
        # Raw and run-length blocks say how much they expand to, compressed ones do not: the stream's limit stops those.
        if kind < 2:
            least += length
            if least > size:
                raise Corrupt(f"zstd section expands beyond the declared {size} bytes")
        pos += 3 + (1 if kind == 1 else length)
        if last:
            break
    # The stream reader stops at the end of the first frame and ignores what follows: it would travel unchecked.
    if pos + 4 * bool(header.has_checksum) != len(data):
        raise Corrupt("zstd section does not end with its frame")
