"""Entropy-coded gaps: an index codec for clustered supports of any kind.

The class of a gap (its exponent and the two bits below the leading one, see
:meth:`fedcomp.kernels.interface.Codes.classes`) goes into a stream of rANS with a table of its own, the bits below
travel as they are. Uniform supports take about as much as in Rice code; those of error feedback, whose gaps are mostly
short and sometimes long, a third less, and 8 % less than bytes of gaps behind zstd (measured).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcomp.kernels import portable, tiers
from fedcomp.wire.bits import Buffer, pack, packed_size, put_varint, take_varint, unpack
from fedcomp.wire.errors import Corrupt
from fedcomp.wire.index import IndexCodec, Indices, Support, indices_from_gaps, no_params
from fedcomp.wire.rans import lanes, least_bytes, pack_rans, unpack_rans


def _width(symbols: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Return the number of raw bits of a gap, by class."""
    return np.maximum((symbols >> 2).astype(np.int16) - 1, 0).astype(np.uint8)


class AnsGaps(IndexCodec):
    """Classes of gaps in a stream of rANS, and the bits that a class leaves open.

    No parameters on the wire. Section: length of the stream, varint; the stream of all classes; for each width from 1
    on the open bits of all gaps of that width, packed together. Empty for no indices.
    """

    codec_id = 9
    name = "ans-gaps"

    def encode(self, support: Support) -> tuple[bytes, bytes]:
        section = self.encode_below(support, self._most(support.n, support.k) + 1)
        assert section is not None
        return b"", section

    def encode_below(self, support: Support, worth: int) -> bytes | None:
        """Return the section if it has less than ``worth`` bytes; what takes more is noticed before it is coded."""
        if support.k == 0:
            return b"" if worth else None
        symbols = tiers.ops("auto", support.k).classes(support.gaps)
        found = np.bincount(symbols)
        # Four classes have one width each.
        counts = np.bincount(_width(np.arange(found.size, dtype=np.uint16)), weights=found).astype(np.int64)
        open_bytes = sum(packed_size(int(count), width) for width, count in enumerate(counts))
        stream = pack_rans(symbols, worth - open_bytes, found)
        if stream is None:
            return None
        ordered = support.gaps[np.argsort(_width(symbols), kind="stable")]
        parts, at = [put_varint(len(stream)), stream], 0
        for width, count in enumerate(counts.tolist()):
            parts.append(pack(ordered[at : at + count], width))
            at += count
        section = b"".join(parts)
        return section if len(section) < worth else None

    @staticmethod
    def _most(n: int, k: int) -> int:
        # A class takes twelve bits at most and so a word, a frequency less than four bytes; every width may end in a
        # byte of its own.
        classes_of_n = 4 * n.bit_length()
        return 32 + 4 * classes_of_n + 4 * lanes(k) + 2 * k + packed_size(k, n.bit_length()) + 64

    def bounds(self, params: bytes, n: int, k: int) -> tuple[int, int]:
        no_params(self.name, params)
        return (1 + least_bytes(k), self._most(n, k)) if k else (0, 0)

    def decode(self, params: bytes, section: Buffer, n: int, k: int) -> Indices:
        if k == 0:
            return np.zeros(0, np.int64)
        length, start = take_varint(section, 0, len(section))
        split = start + length
        if split > len(section):
            raise Corrupt(f"a stream of {length} bytes does not fit a section of {len(section)}")
        symbols = unpack_rans(section[start:split], k)
        # Before anything is shifted by what a class says.
        if int(symbols.max()) > int(portable.classes(np.array([max(n - 1, 0)], np.uint64))[0]):
            raise Corrupt(f"a gap reaches beyond the {n} elements of the tensor")
        widths = _width(symbols)
        counts = np.bincount(widths)
        sizes = [packed_size(int(count), width) for width, count in enumerate(counts)]
        if split + sum(sizes) != len(section):
            raise Corrupt(f"the classes of {k} gaps leave {sum(sizes)} bytes open, found {len(section) - split}")
        low, at = np.empty(k, np.int64), 0
        for width, (count, size) in enumerate(zip(counts.tolist(), sizes, strict=True)):
            low[at : at + count] = unpack(section[split : split + size], count, width, np.int64)
            at, split = at + count, split + size
        gaps = np.where(symbols < 4, symbols, 4 | (symbols & 3)).astype(np.int64)
        gaps <<= widths
        # The sections are in the order of the widths, and within one in that of the gaps.
        gaps[np.argsort(widths, kind="stable")] |= low
        return indices_from_gaps(gaps, n)

    def work_bytes(self, params: bytes, n: int, k: int, size: int) -> int:
        return 40 * k + 3 * size

    def size_bits(self, n: int, k: int) -> int:
        return 8 * self._most(n, k) if k else 0
