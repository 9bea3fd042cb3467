"""Stored frames decode for ever, to the same values, and the encoder still makes the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import make_golden
import pytest

from fedcomp import wire

STORED = json.loads((Path(__file__).parent / "golden.json").read_text())
CASES = {case.name: case for case in make_golden.cases()}
NAMES = [entry["name"] for entry in STORED]


def needs_zstd(entry: dict) -> bool:
    return "zstd" in entry["name"] or "gap-bytes" in entry["name"]


@pytest.mark.slow
@pytest.mark.parametrize("entry", STORED, ids=NAMES)
def test_stored_frame_decodes_to_the_stored_values(entry: dict) -> None:
    if needs_zstd(entry):
        pytest.importorskip("zstandard")
    bundle = wire.decode(bytes.fromhex(entry["frame"]), limits=make_golden.LIMITS, supports=make_golden.SUPPORTS)
    assert make_golden.describe(bundle) == {k: entry[k] for k in ("flags", "tlvs", "tensors")}


@pytest.mark.slow
@pytest.mark.parametrize("entry", [e for e in STORED if e["stable"]], ids=[e["name"] for e in STORED if e["stable"]])
def test_encoder_still_makes_the_stored_bytes(entry: dict) -> None:
    assert CASES[entry["name"]].encode().hex() == entry["frame"]


@pytest.mark.slow
@pytest.mark.parametrize("entry", STORED, ids=NAMES)
def test_decoded_values_are_the_ones_that_were_encoded(entry: dict) -> None:
    case = CASES[entry["name"]]
    if needs_zstd(entry):
        pytest.importorskip("zstandard")
    bundle = wire.decode(bytes.fromhex(entry["frame"]), limits=make_golden.LIMITS, supports=make_golden.SUPPORTS)
    for sent, got in zip(case.tensors, bundle.tensors, strict=True):
        assert got.values.decode().tobytes() == sent.values.decode().tobytes()
        if sent.indices is not None:
            assert got.indices is not None
            assert got.indices.tolist() == sent.indices.tolist()


def test_every_codec_and_dtype_has_a_golden_frame() -> None:
    tensors = [t for entry in STORED for t in entry["tensors"]]
    # Levels are values for a receiver with shapes: tests/codecs/golden.json has frames, tests/kernels their bytes.
    assert {t["codec"] for t in tensors} == set(wire.VALUE_BY_NAME) - {"levels"}
    assert {t["dtype"] for t in tensors} == set(wire.DTYPES.values())
    assert {t["kind"] for t in tensors} == {"DENSE", "SPARSE", "COEFFICIENTS", "SHARED"}
    indices = " ".join(t["index"] for t in tensors)
    assert all(word in indices for word in (*wire.PLAIN, "complement", "bins:", "Seeded", "SharedSupport"))
    assert len(STORED) >= 40
    assert list(CASES) == NAMES
