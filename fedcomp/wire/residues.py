"""Residues: integers modulo M as multiples of one step, so that sections can be added without decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.wire.bits import Buffer, pack, packed_size, put_varint, unpack
from fedcomp.wire.errors import Corrupt, NonFinite
from fedcomp.wire.quantised import require, take_param, take_scales
from fedcomp.wire.values import Values

MAX_MODULUS: Final = 1 << 32
_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)


class Residues(Values):
    """``step`` times the integer of [-M/2, M/2) that has this residue modulo M.

    Parameters
    ----------
    residues : ndarray of int, shape (k,)
        ``0 <= residue < modulus``.
    modulus : int
        M, 2 to 2**32.
    step : float
        A float32, finite and not negative.

    Parameters on the wire: M varint. Section: step f32 where k > 0, then residues as fields of ceil(log2 M) bits.

    Examples
    --------
    >>> Residues(np.array([0, 1, 6, 3]), 7, 0.5).decode()
    array([ 0. ,  0.5, -0.5,  1.5], dtype=float32)
    """

    codec_id = 14
    name = "residues"
    unbiased = True

    def __init__(self, residues: NDArray[Any], modulus: int, step: float) -> None:
        require(2 <= modulus <= MAX_MODULUS, f"a modulus is 2 to 2**32, got {modulus}")
        require(0.0 <= step * (modulus // 2) <= _FLOAT32_MAX, f"step {step} times {modulus // 2} is not a float32")
        residues = np.asarray(residues).reshape(-1)
        require(
            not residues.size or (residues.min() >= 0 and residues.max() < modulus),
            f"residues modulo {modulus} are 0..{modulus - 1}",
        )
        self.residues = residues.astype(np.uint32)
        self.modulus, self.step = int(modulus), float(np.float32(step))

    @property
    def bits(self) -> int:
        """Bits of one residue."""
        return (self.modulus - 1).bit_length()

    @property
    def k(self) -> int:
        return int(self.residues.size)

    def centred(self) -> NDArray[np.int64]:
        """Return the integers of [-M/2, M/2), shape (k,)."""
        found = self.residues.astype(np.int64)
        found[found >= self.modulus - self.modulus // 2] -= self.modulus
        return found

    def decode(self) -> NDArray[Any]:
        # By way of float64, where integers of 32 bits are exact: a product and a rounding, the same everywhere.
        return (self.centred() * self.step).astype(np.float32)

    def pack(self, shuffled: bool = False) -> tuple[bytes, Buffer]:
        step = np.full(min(1, self.k), self.step, "<f4").tobytes()
        return put_varint(self.modulus), step + pack(self.residues, self.bits)

    @classmethod
    def agreed(cls, form: Mapping[str, int]) -> bytes | None:
        return put_varint(form["modulus"])

    @staticmethod
    def _params(params: bytes) -> int:
        modulus, end = take_param(params, 0, "residues")
        if end != len(params) or not 2 <= modulus <= MAX_MODULUS:
            raise Corrupt(f"residues have impossible parameters {params.hex()!r}")
        return modulus

    @classmethod
    def bounds(cls, params: bytes, k: int, dtype: str) -> tuple[int, int]:
        size = 4 * min(1, k) + packed_size(k, (cls._params(params) - 1).bit_length())
        return size, size

    @classmethod
    def unpack(cls, params: bytes, section: Buffer, k: int, dtype: str) -> Residues:
        modulus, count = cls._params(params), min(1, k)
        steps = take_scales(section, count, "step")
        step = float(steps[0]) if count else 0.0
        if step * (modulus // 2) > _FLOAT32_MAX:
            raise NonFinite("a step is so large that its integers overflow float32")
        found = unpack(section[4 * count :], k, (modulus - 1).bit_length(), np.uint32)
        if k and int(found.max()) >= modulus:
            raise Corrupt(f"a residue modulo {modulus} is {int(found.max())}")
        return cls(found, modulus, step)

    @classmethod
    def work_bytes(cls, params: bytes, k: int, size: int, dtype: str) -> int:
        return 32 * k
