"""How the golden frames were made: ``python tests/wire/make_golden.py > tests/wire/golden.json``.

Run it only to add cases. A change of the bytes of an existing case is a change of the format: old receivers would no
longer understand, so the major version must move instead. Cases with a back-end are decoded for ever but not encoded
again in the test, since compressors may shorten their output from one version to the next.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedcomp import wire

SUPPORTS = {5: np.array([1, 4, 9, 16], np.int64)}
LIMITS = wire.Limits(max_elements=1 << 41, non_finite="allow")


@dataclass
class Case:
    """One golden frame before it is encoded."""

    name: str
    tensors: list[wire.Tensor]
    flags: int = 0
    tlvs: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def stable(self) -> bool:
        """Whether the bytes are the same with every version of every compressor."""
        return all(
            t.backend == "none" and "gap-bytes" not in str(t.index) and t.values.name != "planes" for t in self.tensors
        )

    def encode(self) -> bytes:
        """Return the frame."""
        return wire.encode(self.tensors, flags=self.flags, tlvs=self.tlvs)


def numbers(k: int) -> np.ndarray:
    """Return k float32 values of both signs, exact in binary, none of them zero."""
    i = np.arange(k)
    return ((i * 37 % 101 - 50) / 8 + 1 / 16).astype(np.float32)


def fractions(k: int) -> np.ndarray:
    """Return k fixed numbers in [0, 1) in place of random ones."""
    return (np.arange(k) * 61 % 128) / 128


def every(n: int, step: int) -> np.ndarray:
    """Return ascending indices of range(n) with gaps that vary around ``step``."""
    gaps = 1 + (np.arange(n) * 29 % 17) * step // 8
    indices = np.cumsum(gaps) - 1
    return indices[indices < n].astype(np.int64)


def index_cases() -> list[Case]:
    """Every index codec at the sizes where something happens."""
    cases = []
    for codec in (*wire.PLAIN, "complement:rice", "complement:bitmap"):
        n = 101
        support = every(n, 5)
        if codec.startswith("complement"):
            support = np.setdiff1d(np.arange(n), support)
        cases.append(Case(f"{codec}, odd n", [wire.sparse((n,), support, numbers(support.size), index=codec)]))
    for codec in ("raw", "fixed", "bitmap", "rice", "block-rice", "elias-fano"):
        none = np.zeros(0, np.int64)
        cases.append(Case(f"{codec}, k = 0", [wire.sparse((9,), none, numbers(0), index=codec)]))
        cases.append(Case(f"{codec}, k = 1 = n", [wire.sparse((1,), np.zeros(1, np.int64), numbers(1), index=codec)]))
        cases.append(Case(f"{codec}, k = n", [wire.sparse((3, 4), np.arange(12), numbers(12), index=codec)]))
    wide = np.array([0, 5, 2**32, 2**40 - 1])
    for codec in ("raw", "fixed", "rice", "elias-fano"):
        cases.append(Case(f"{codec}, 64-bit indices", [wire.sparse((2**20, 2**20), wide, numbers(4), index=codec)]))
    many = every(40_000, 4)[:8205]
    signs = wire.SignScale.quantise(numbers(many.size))
    for codec in ("fixed", "rice", "block-rice", "elias-fano"):
        cases.append(Case(f"{codec}, vertical packing", [wire.sparse((40_000,), many, signs, index=codec)]))
    blocks = np.unique(np.concatenate((np.arange(300), every(20_000, 40))))
    one_bit = wire.SignScale.quantise(numbers(blocks.size))
    cases.append(Case("block-rice, unequal blocks", [wire.sparse((20_000,), blocks, one_bit, index="block-rice")]))
    cases.append(Case("auto", [wire.sparse((101,), every(101, 5), numbers(every(101, 5).size))]))
    cases.append(Case("auto above density 0.5", [wire.sparse((50,), np.arange(1, 49), numbers(48))]))
    cases.append(Case("seeded", [wire.seeded((1000,), 2024, 12, numbers(12))]))
    cases.append(Case("seeded, k > n / 2", [wire.seeded((20,), 2024, 15, numbers(15))]))
    cases.append(Case("shared support", [wire.shared((5, 5), 5, numbers(4))]))
    return cases


def bin_cases() -> list[Case]:
    """Bins of both modes, blocks of a seed, and the ones that make a set of indices."""

    def written(name: str, index: str, n: int, indices: np.ndarray) -> Case:
        return Case(name, [wire.sparse((n,), indices, wire.Ones(indices.size), index=index)])

    none = np.zeros(0, np.int64)
    few = np.array([0, 3, 7, 30, 31, 101])
    each = np.arange(0, 102, 8) + np.arange(13) * 5 % 6
    long = np.arange(0, 90_000, 10) + np.arange(9000) * 7 % 10
    return [
        written("bins, one each, a short last bin", "bins:8", 102, each),
        written("bins, one each, one element", "bins:8", 1, np.zeros(1, np.int64)),
        written("bins, one each, no element", "bins:8", 0, none),
        written("bins, one each, length 1", "bins:1", 7, np.arange(7)),
        written("bins, one each, vertical packing", "bins:10", 90_000, long),
        written("bins, several, some empty", "bins:10", 102, few),
        written("bins, length a power of two", "bins:16", 102, few),
        written("bins, length 1 is the bitmap", "bins:1", 102, few),
        written("bins, one bin", "bins:500", 102, few),
        written("bins, k = 0", "bins:10", 102, none),
        written("bins, k = n", "bins:5", 12, np.arange(12)),
        written("bins, vertical packing", "bins:50", 90_000, every(90_000, 7)),
        written("bins, 64-bit indices", f"bins:{2**39}", 2**40, np.array([0, 5, 2**32, 2**40 - 1])),
        written("auto, shorter than bins", "auto+bins:10", 102, few),
        written("bins, shorter than auto", "auto+bins:8", 102, each),
        Case("seeded block", [wire.seeded((1000,), 2024, 12, numbers(12), algorithm=2)]),
        Case("seeded block that goes on at 0", [wire.seeded((20,), 2026, 15, numbers(15), algorithm=2)]),
        Case("ones, dense", [wire.Tensor(wire.Ones(5), (5,))]),
        Case("ones, empty", [wire.Tensor(wire.Ones(0), (0,))]),
        Case("ones, float64", [wire.Tensor(wire.Ones(3), (3,), dtype="float64")]),
        *sign_cases(),
    ]


def sign_cases() -> list[Case]:
    """Votes: unit signs on a support."""
    support = np.array([0, 3, 4, 17, 18, 40, 99])
    votes = wire.UnitSign(np.array([1, 0, 0, 1, 1, 0, 1], np.bool_))
    return [
        Case("unit-sign, dense", [wire.Tensor(votes, (7,))]),
        Case("unit-sign, sparse", [wire.sparse((102,), support, votes)]),
        Case("unit-sign, bitmap", [wire.sparse((102,), support, votes, index="bitmap")]),
        Case("unit-sign, no votes", [wire.sparse((102,), support[:0], wire.UnitSign(votes.negative[:0]))]),
    ]


def value_cases() -> list[Case]:
    """Every value codec, dense and empty."""
    cases = []
    for k in (0, 1, 23):
        x, u = numbers(k), fractions(k)
        few = np.where(np.arange(k) % 11 == 3, np.sign(x), 0)
        for name, values in (
            ("fp16", wire.Fp16(x)),
            ("bf16", wire.Bf16(x)),
            ("uniform, 4 bits", wire.Uniform.quantise(x, 4)),
            ("uniform, 11 bits, blocks, stochastic", wire.Uniform.quantise(x, 11, 8, u)),
            ("sign", wire.SignScale.quantise(x)),
            ("sign, blocks", wire.SignScale.quantise(x, 8)),
            ("ternary, dense", wire.Ternary.quantise(x)),
            ("ternary, mostly zero", wire.Ternary(few, 0.75)),
            (
                "qsgd, fixed width",
                wire.QsgdLevels((np.arange(k) * 7 % 31) - 15, 15, 8, np.ones(-(-k // 8), np.float32)),
            ),
            ("qsgd, Elias-gamma", wire.QsgdLevels.quantise(x, 15, 0, u)),
            ("range float, 8 bits", wire.RangeFloat.quantise(x, 8, 4)),
            ("range float, 10 bits, one side, stochastic", wire.RangeFloat.quantise(np.abs(x), 10, 6, u)),
            ("codebook, two magnitudes", wire.Codebook.quantise(x)),
            (
                "codebook, 5 bits",
                wire.Codebook((np.arange(k) * 7 % 32), (np.arange(16) / 8).astype(np.float32), 5),
            ),
            ("natural", wire.Natural.quantise(x)),
            ("residues, 7 bits", wire.Residues(np.arange(k) * 37 % 111, 111, 0.1)),
            ("residues, 20 bits", wire.Residues(np.arange(k) * 37_037 % 1_000_003, 1_000_003, 0.25)),
            ("natural, stochastic", wire.Natural.quantise(x, u)),
        ):
            cases.append(Case(f"{name}, k = {k}", [wire.Tensor(values, (k,))]))
    i = np.arange(4500)
    levels = np.where(i * 29 % 17 < 13, 0, i * 7 % 31 - 15)
    codes = np.where(levels < 0, 16 - levels, levels)
    for name, values in (
        ("qsgd", wire.QsgdLevels(levels, 15, 0, np.ones(1, np.float32))),
        (
            "codebook",
            wire.Codebook(codes, (np.arange(16) / 8).astype(np.float32), 5),
        ),
        ("range float", wire.RangeFloat(codes, 5, 2, 480, 15)),
        ("natural", wire.Natural(127 + levels + (i % 3 == 0) * 256)),
    ):
        cases.append(Case(f"{name}, entropy-coded", [wire.Tensor(values, (4500,))]))
    for name, words in (
        ("float32", numbers(500)),
        ("float64", numbers(500).astype(np.float64)),
        ("uint16", (numbers(500).view(np.uint32) >> 16).astype(np.uint16)),
        ("uint8", (np.arange(500) % 3).astype(np.uint8)),
        ("float32, short", numbers(9)),
        ("int64, empty", np.zeros(0, np.int64)),
    ):
        cases.append(Case(f"planes, {name}", [wire.Tensor(wire.Planes(words), words.shape, dtype=words.dtype.name)]))
    for dtype in wire.DTYPES.values():
        array = (np.arange(7) % 2 if dtype == "bool" else np.arange(7) * 3).astype(dtype)
        cases.append(Case(f"dense {dtype}", [wire.dense(array, "t")]))
    odd = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38], np.float32)
    cases.append(Case("raw, not finite", [wire.dense(odd)]))
    cases.append(Case("raw, zlib and shuffle", [wire.dense(numbers(200), backend="zlib")]))
    cases.append(Case("raw, zstd and shuffle", [wire.dense(numbers(200), backend="zstd")]))
    return cases


def frame_cases() -> list[Case]:
    """What belongs to the frame and not to a codec."""
    several = [
        wire.dense(numbers(6).reshape(2, 3), "layer.weight"),
        wire.sparse((7,), np.array([0, 6]), wire.Fp16(numbers(2)), "ünïcode"),
        wire.dense(np.array(12, np.int64), "steps"),
    ]
    return [
        Case("no tensors", []),
        Case("0-d", [wire.dense(np.float32(1.5))]),
        Case("empty tensor", [wire.dense(np.zeros((3, 0, 2), np.float32))]),
        Case("eight dimensions", [wire.dense(numbers(4).reshape(1, 2, 1, 1, 2, 1, 1, 1))]),
        Case("several tensors, flags", several, wire.FLAG_DELTA),
        Case(
            "optional fields", several[:1], 0x83, [(wire.BASE_ROUND, b"\x07"), (wire.USER_TAG, b"x" * 200), (99, b"")]
        ),
        Case("coefficients", [wire.Tensor(wire.Raw(numbers(3)), (10, 10), "w", kind=wire.COEFFICIENTS)]),
        Case("aligned payload", [wire.sparse((9,), np.array([4]), numbers(1)), wire.dense(numbers(256))]),
    ]


def cases() -> list[Case]:
    """Return all cases."""
    return index_cases() + value_cases() + frame_cases() + bin_cases()


def digest(array: np.ndarray | None) -> Any:
    """Return a short array as a list of hex words, a long one as its length and SHA-256."""
    if array is None:
        return None
    data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
    return data.hex() if len(data) <= 256 else {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def describe(bundle: wire.Bundle) -> dict[str, Any]:
    """Return what a decoded frame says, JSON-able."""
    return {
        "flags": bundle.flags,
        "tlvs": [[kind, content.hex()] for kind, content in bundle.tlvs],
        "tensors": [
            {
                "name": t.name,
                "shape": list(t.shape),
                "dtype": t.dtype,
                "kind": t.kind.name,
                "index": str(t.index),
                "codec": t.values.name,
                "indices": digest(t.indices),
                "values": digest(t.values.decode()),
            }
            for t in bundle.tensors
        ],
    }


def main() -> None:
    """Print all cases as JSON."""
    out = []
    for case in cases():
        frame = case.encode()
        decoded = describe(wire.decode(frame, limits=LIMITS, supports=SUPPORTS))
        out.append({"name": case.name, "stable": case.stable, "frame": frame.hex(), **decoded})
    print(json.dumps(out, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
