"""MDS: systematic Cauchy Reed-Solomon with the interface of RLNC. Any K of its packets decode, always.

The generator is the identity over a Cauchy matrix, whose square submatrices are all invertible (Blömer and others, "An
XOR-based erasure-resilient coding scheme", ICSI TR-95-048, 1995; recalled). Powers 2^(ij) under an identity do not have
that property, although they are often used. The field has 256 points, so symbols and parities together are at most 256.

With ``threshold=T`` the T last symbols are uniformly random and every packet is a Cauchy row over all K + T. In any T
packets the random part is a T by T Cauchy submatrix, invertible, times uniform symbols: uniform, and independent of the
payload (derived). This hides bodies, not headers: length, round and source are readable.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.code import CodeName, Encoder, EncoderMode, PacketPlace, check_mode
from fedcomp.coding.packet import Mode, cauchy_rows


class MdsEncoder(Encoder):
    """Systematic Cauchy code, or its Cauchy rows alone; see :func:`fedcomp.coding.encoder.encoder`."""

    code: ClassVar[CodeName] = "mds"

    def __init__(
        self, payload: bytes | memoryview, place: PacketPlace, *, mode: EncoderMode = "systematic", **common: Any
    ) -> None:
        check_mode("mds", mode, ("systematic", "cauchy"))
        # A systematic packet would be a piece of the payload in the clear.
        self.systematic = mode == "systematic" and not common.get("threshold")
        super().__init__(payload, place, **common)

    def _most_shards(self) -> int:
        # A Cauchy row takes a point of the field beside those of the K columns; a systematic packet takes none.
        return 256 if self.systematic else 256 - self.symbols

    def _name(self, index: int) -> tuple[Mode, int]:
        if not self.systematic:
            return Mode.CAUCHY, index
        return (Mode.SYSTEMATIC, index) if index < self.symbols else (Mode.CAUCHY, index - self.symbols)

    def _rows(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        if not self.systematic:
            return cauchy_rows(indices, self.symbols)
        rows = np.zeros((indices.size, self.symbols), np.uint8)
        unit = indices < self.symbols
        rows[unit, indices[unit]] = 1
        rows[~unit] = cauchy_rows(indices[~unit] - self.symbols, self.symbols)
        return rows
