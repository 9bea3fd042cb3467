"""The table of index codecs by id and name, the complement wrapper, and the automatic choice (``index="auto"``).

The choice compares exact sizes: formulas for every codec that has one, trials for ans-gaps and for gap-bytes with zstd,
which win on the clustered supports that real gradients have. It is never worse than Rice plus one byte.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from fedcomp.errors import ConfigError, nearest
from fedcomp.wire.ans_gaps import AnsGaps
from fedcomp.wire.backends import available_backends, compress
from fedcomp.wire.bins import Bins
from fedcomp.wire.bits import Buffer, packed_size, put_varint
from fedcomp.wire.entropy import CODED_FROM
from fedcomp.wire.errors import Corrupt, UnsupportedCodec
from fedcomp.wire.index import (
    RESERVED_INDEX,
    Bitmap,
    FixedIndex,
    GapBytes,
    IndexCodec,
    Indices,
    NoIndex,
    RawIndex,
    Support,
)
from fedcomp.wire.limits import MAX_SIZE, SHARED
from fedcomp.wire.rice import BlockRice, EliasFano, Rice, best_block_rice, best_rice, elias_fano_size
from fedcomp.wire.support import BLOCK, SCATTERED, Seeded, SharedSupport, complement, drawn_bytes

TRIAL_K: Final = 4096
"""Number of indices from which "auto" also tries zstd on shuffled gaps."""

# Two blocks of 256 gaps: with fewer there is no second parameter that could pay for the table.
_BLOCK_RICE_K = 512


class SeededIndex(IndexCodec):
    """Parameters on the wire: algorithm (1 single indices, 2 a block), seed u64."""

    codec_id = 10
    name = "seeded"
    commutes_with_sum = True
    needs = ("seed",)

    def encode(self, support: Support) -> tuple[bytes, bytes]:
        raise ConfigError("a seeded support is encoded from its seed; pass index=Seeded(seed)")

    def bounds(self, params: bytes, n: int, k: int) -> tuple[int, int]:
        if len(params) != 9:
            raise Corrupt(f"a seeded support needs nine bytes of parameters, found {len(params)}")
        if params[0] not in (SCATTERED, BLOCK):
            known = (str(SCATTERED), str(BLOCK))
            # Not Corrupt: a later version may define another algorithm, and a sender that learns what is known here can
            # adapt.
            raise UnsupportedCodec(
                f"support algorithm {params[0]} is unknown; this receiver has {' and '.join(known)}", known
            )
        return 0, 0

    def source(self, params: bytes) -> Seeded:
        return Seeded(int.from_bytes(params[1:], "little"), params[0])

    def decode(self, params: bytes, section: Buffer, n: int, k: int) -> Indices:
        return self.source(params).indices(n, k)

    def work_bytes(self, params: bytes, n: int, k: int, size: int) -> int:
        return drawn_bytes(params[0], n, k)

    def size_bits(self, n: int, k: int) -> int:
        return 0


class SharedIndex(IndexCodec):
    """Parameters on the wire: support id u64. The receiver looks the support up; it is not decoded here."""

    codec_id = 11
    name = "shared"
    commutes_with_sum = True
    needs = ("support",)
    kinds = frozenset({SHARED})

    def encode(self, support: Support) -> tuple[bytes, bytes]:
        raise ConfigError("a shared support is encoded by its id; pass index=SharedSupport(id)")

    def bounds(self, params: bytes, n: int, k: int) -> tuple[int, int]:
        if len(params) != 8:
            raise Corrupt(f"a shared support needs eight bytes of parameters, found {len(params)}")
        return 0, 0

    def source(self, params: bytes) -> SharedSupport:
        return SharedSupport(int.from_bytes(params, "little"))

    def decode(self, params: bytes, section: Buffer, n: int, k: int) -> Indices:
        raise Corrupt("a shared support has no indices in the frame")

    def work_bytes(self, params: bytes, n: int, k: int, size: int) -> int:
        return 0

    def size_bits(self, n: int, k: int) -> int:
        return 0


class Complement(IndexCodec):
    """Another codec, applied to the absent indices. Parameters on the wire: the other's id, then its parameters."""

    codec_id = 12
    name = "complement"

    def encode(self, support: Support) -> tuple[bytes, bytes]:
        return self.encode_with(support, "rice")

    def encode_with(self, support: Support, inner: str) -> tuple[bytes, bytes]:
        """Encode the absent indices with the codec named ``inner``."""
        codec = INDEX_BY_NAME[inner]
        params, section = codec.encode(support.complement())
        return bytes((codec.codec_id,)) + params, section

    @staticmethod
    def inner(params: bytes) -> IndexCodec:
        """Return the wrapped codec."""
        codec = INDEX_CODECS.get(params[0]) if len(params) else None
        # A complement of a complement would be a second encoding of the support itself, and let the frame choose how
        # deep the decoder goes. A seeded support draws the smaller side on its own.
        if codec is None or codec.name not in PLAIN:
            raise Corrupt(f"a complement wraps one of {', '.join(PLAIN)}; found parameters {params.hex()!r}")
        return codec

    def source(self, params: bytes) -> str:
        return f"{self.name}:{self.inner(params).name}"

    def bounds(self, params: bytes, n: int, k: int) -> tuple[int, int]:
        return self.inner(params).bounds(params[1:], n, n - k)

    def decode(self, params: bytes, section: Buffer, n: int, k: int) -> Indices:
        return complement(self.inner(params).decode(params[1:], section, n, n - k), n)

    def work_bytes(self, params: bytes, n: int, k: int, size: int) -> int:
        # The absent indices, decoded in full, then a byte per element of the tensor, then the indices.
        return self.inner(params).work_bytes(params[1:], n, n - k, size) + n + 8 * k

    def size_bits(self, n: int, k: int) -> int:
        return Rice().size_bits(n, n - k)


INDEX_CODECS: Final[dict[int, IndexCodec]] = {
    c.codec_id: c
    for c in (
        NoIndex(),
        RawIndex(),
        FixedIndex(),
        Bitmap(),
        Rice(),
        BlockRice(),
        EliasFano(),
        GapBytes(),
        AnsGaps(),
        SeededIndex(),
        SharedIndex(),
        Complement(),
        Bins(),
    )
}
INDEX_BY_NAME: Final = {c.name: c for c in INDEX_CODECS.values()}
PLAIN: Final = ("raw", "fixed", "bitmap", "rice", "block-rice", "elias-fano", "gap-bytes", "ans-gaps")
"""Codecs that write any support by themselves."""

# No leading zero, so that a length has one name; 19 digits hold every length up to 2**62.
_BINS = re.compile(r"(auto\+)?bins:([1-9][0-9]{0,18})", re.ASCII)


def index_codec(code: int) -> IndexCodec:
    """Return the index codec with this id; raise UnsupportedCodec when it is reserved or unknown."""
    codec = INDEX_CODECS.get(code)
    if codec is None:
        what = f"({RESERVED_INDEX[code]}) is reserved" if code in RESERVED_INDEX else "is unknown"
        raise UnsupportedCodec(
            f"index codec {code} {what}; this receiver has {', '.join(INDEX_BY_NAME)}", INDEX_BY_NAME
        )
    return codec


def require_index(name: str) -> str:
    """Return ``name`` when it may be asked for as ``index=``; raise ConfigError otherwise."""
    plain = name.removeprefix("complement:")
    if plain in PLAIN or name == "auto":
        return name
    if (found := _BINS.fullmatch(name)) and int(found[2]) <= MAX_SIZE:
        return name
    raise ConfigError(
        f"unknown index codec {name!r}{nearest(plain, (*PLAIN, 'auto'))}; 'complement:<name>' wraps one, "
        "'bins:<length>' writes bins of that many elements, 'auto+bins:<length>' the shorter of these and auto"
    )


def encode_support(support: Support, name: str, backend: str) -> tuple[IndexCodec, bytes, bytes, str, bytes | None]:
    """Encode ``support`` with the named codec or, for "auto", with the one whose section is smallest.

    ``name`` has passed :func:`require_index`.

    Returns
    -------
    codec, params, section, backend, compressed
        ``backend`` is the one to use for the tensor; ``compressed`` the section as the back-end left it, when the
        choice has already been made with it.
    """
    if name != "auto":
        if name.startswith("complement:"):
            wrapper = Complement()
            params, section = wrapper.encode_with(support, name.removeprefix("complement:"))
            return wrapper, params, section, backend, None
        # Only here are bins tried: "auto" alone knows no length for them.
        if binned := _BINS.fullmatch(name):
            bins = Bins(int(binned[2]))
            params, section = bins.encode(support)
            if binned[1]:
                rival = encode_support(support, "auto", backend)
                if _stored_size(rival) <= len(params) + len(section):
                    return rival
            return bins, params, section, backend, None
        codec = INDEX_BY_NAME[name]
        params, section = codec.encode(support)
        return codec, params, section, backend, None
    # Above half of the elements the absent indices are fewer, and cheaper to list.
    if 2 * support.k <= support.n:
        return _smallest(support, backend)
    codec, params, section, chosen, compressed = _smallest(support.complement(), backend)
    b, size = best_rice(support)
    # A dense support with all its gaps at one end is shorter as it is than what is left out.
    if size < len(params) + len(section if compressed is None else compressed):
        rice = Rice()
        return rice, *rice.encode_with(support, b), backend, None
    return Complement(), bytes((codec.codec_id,)) + params, section, chosen, compressed


def _stored_size(encoded: tuple[IndexCodec, bytes, bytes, str, bytes | None]) -> int:
    """Return the bytes of a support; a compressed one also adds two raw lengths to the table."""
    _, params, section, _, compressed = encoded
    return len(params) + (len(section) if compressed is None else len(compressed) + 2 * len(put_varint(len(section))))


def _smallest(support: Support, backend: str) -> tuple[IndexCodec, bytes, bytes, str, bytes | None]:
    n, k = support.n, support.k
    b, size = best_rice(support)
    choice = "rice"
    for name, other in (
        ("elias-fano", elias_fano_size(support)),
        ("fixed", packed_size(k, max(0, n - 1).bit_length())),
        ("bitmap", (n + 7) // 8),
        ("raw", 4 * k if n <= 1 << 32 else 8 * k),
    ):
        # Strictly shorter: on a tie the codec named first stays, so that equal supports have equal bytes everywhere.
        if other < size:
            choice, size = name, other
    table = np.zeros(0, np.uint8)
    if k >= _BLOCK_RICE_K:
        table, other = best_block_rice(support)
        if other < size:
            choice, size = "block-rice", other
    # It takes longer to read than the others, and on uniform supports it gains next to nothing.
    coded = AnsGaps().encode_below(support, size - size // 32) if k >= CODED_FROM else None
    if coded is not None:
        choice, size = "ans-gaps", len(coded)
    # An entry of the table names one back-end for both sections: where zlib was asked for, gaps behind zstd
    # are not possible.
    if k >= TRIAL_K and backend in ("none", "zstd") and "zstd" in available_backends():
        codec = INDEX_BY_NAME["gap-bytes"]
        params, section = codec.encode(support)
        compressed = compress("zstd", section)
        # Two bytes of parameters instead of one, and the two raw lengths a back-end adds to the table.
        if len(compressed) + 8 < size:
            return codec, params, section, "zstd", compressed
    if choice == "rice":
        rice = Rice()
        return rice, *rice.encode_with(support, b), backend, None
    if coded is not None:
        return AnsGaps(), b"", coded, backend, None
    if choice == "block-rice":
        block_rice = BlockRice()
        return block_rice, *block_rice.encode_with(support, table), backend, None
    codec = INDEX_BY_NAME[choice]
    return codec, *codec.encode(support), backend, None
