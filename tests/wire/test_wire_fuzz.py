"""Mutated frames of every codec: only WireError comes out, with bounded memory and time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from frame_mutants import FuzzResult, Specimen, fuzz, mutants, specimens, values_of

from fedcomp import wire
from fedcomp.rng import Key
from fedcomp.wire.bits import put_varint
from fedcomp.wire.frame import Frame
from fedcomp.wire.index import Indices
from fedcomp.wire.limits import Expected
from fedcomp.wire.section import SECTION_INDEX, Section
from fedcomp.wire.support import seeded_support
from fedcomp.wire.tensor import Tensor


@dataclass(frozen=True)
class SectionSpecimen(Specimen):
    """Honest sections: neither fields of a table nor a checksum, and the first bytes decide what the others mean."""

    section: Section
    known: Indices | None = None

    def open(self, mutant: Frame, with_schema: bool) -> tuple[Tensor, ...]:
        """Return the tensor of a section."""
        return (self.section.read(mutant, self.known),)

    def body(self, frame: Frame) -> tuple[bytearray, int, int]:
        """Return the section and its first bytes."""
        return bytearray(frame), 0, min(4, len(frame))

    def lengthen(self, body: bytearray, head: int, more: int) -> None:
        """Do nothing: no length is written anywhere."""

    def seal(self, body: bytes, checksum: bytes | None) -> Frame:
        """Return the section."""
        return body


def section_specimens(size: int = 300) -> list[SectionSpecimen]:
    """Return honest sections of every way to write a support, and of value codecs of every kind of length, of tensors
    with so many elements; at most a tenth of them is sent where there is a support."""
    key = Key(2024, "fuzz sections")
    most = size // 10
    sign, levels = b"\x00", b"\x00" + put_varint(8) + put_varint(16)
    out = []
    for index, value, params in (
        ("none", "raw", b""),
        ("none", "sign", put_varint(16)),
        ("none", "fixed qsgd", levels),
        ("none", "qsgd", None),
        ("none", "ternary", None),
        ("none", "range-float", None),
        ("known", "fp16", b""),
        ("fixed", "raw", b""),
        ("fixed", "ones", b""),
        ("bitmap", "bf16", b""),
        ("bitmap", "one sign", sign),
        ("rice", "natural", b""),
        ("rice", "codebook", b"\x02"),
        ("auto", "raw", b""),
        ("auto", "unit-sign", b""),
    ):
        frames = []
        support: Indices | None = None
        name = f"{index}+{value}{'' if params is not None else ' and parameters'}"
        for k in (most, most // 3) if index not in ("none", "known") else (size if index == "none" else most,):
            support = None if index == "none" else seeded_support(key.at(round=k).u64(), size, k)
            values = values_of(value, (key.at(purpose=name).uniform(k) - 0.5).astype(np.float32), key)
            section = Section(size, type(values), index, None if index == "none" else most, params=params)
            frames.append(section.write(values, None if index == "known" else support))
        schema = (Expected("w", (size,), max_k=section.most_values),)
        known = support if index == "known" else None
        out.append(SectionSpecimen(name, tuple(frames), schema, {}, section, known))
    return out


SMALL = specimens()
NAMES = [s.name for s in SMALL]
SECTIONS = section_specimens()


def check(result: FuzzResult, specimen: Specimen) -> None:
    assert result.accepted + sum(result.errors.values()) == result.mutants
    # Past the checksum: most mutants are refused for what they say, and some are valid.
    assert result.errors["ChecksumMismatch"] < 0.2 * result.mutants
    assert result.errors["Corrupt"] > 0.1 * result.mutants
    assert result.accepted > 0
    assert result.traced > 0.2 * result.mutants
    # Levels have tables of a fixed size, of probabilities.
    fixed = (1 << 19) * specimen.name.startswith("levels")
    assert result.peak_bytes <= 2 * result.limit_bytes + fixed
    assert result.slowdown <= 10


def test_specimens_cover_every_codec() -> None:
    indices: set[str] = set()
    values: set[str] = set()
    used: set[str] = set()
    algorithms: set[int | None] = set()
    for specimen in SMALL:
        for frame in specimen.frames:
            schema = specimen.schema[: frame[8]]
            bundle = wire.decode(frame, schema, specimen.limits, specimen.supports)
            tensor = bundle[0]
            indices.add(str(tensor.index).partition("(")[0].partition(":")[0])
            algorithms.add(getattr(tensor.index, "algorithm", None))
            values.add(tensor.values.name)
            used |= {t.backend for t in bundle.tensors}
    assert indices >= {*wire.PLAIN, "complement", "bins", "Seeded", "SharedSupport"}
    assert algorithms == {1, 2, None}
    assert values == set(wire.VALUE_BY_NAME)
    assert used == set(wire.available_backends())


def test_mutants_are_reproducible_and_differ_from_the_specimen() -> None:
    first = list(mutants(SMALL[3], SMALL, 500, 7))
    assert first == list(mutants(SMALL[3], SMALL, 500, 7))
    assert first != list(mutants(SMALL[3], SMALL, 500, 8))
    assert len(set(first) - set(SMALL[3].frames)) > 450


@pytest.mark.long
@pytest.mark.parametrize("specimen", SMALL, ids=NAMES)
def test_small_frames(specimen: Specimen) -> None:
    # Values are entropy-coded from some thousand on, of which each takes a step of the portable decoder.
    check(fuzz(specimen, SMALL, 2_048 if len(specimen.frames[0]) < 500 else 512, seed=1), specimen)


@pytest.mark.long
@pytest.mark.parametrize("which", range(len(SMALL)), ids=NAMES)
def test_large_tensors(which: int) -> None:
    large = specimens(120_000)
    check(fuzz(large[which], large, 256, seed=2), large[which])


@pytest.mark.long
@pytest.mark.parametrize("specimen", SECTIONS, ids=[s.name for s in SECTIONS])
def test_sections(specimen: SectionSpecimen) -> None:
    result = fuzz(specimen, SECTIONS, 2_048, seed=1)
    assert result.accepted + sum(result.errors.values()) == result.mutants
    # A section has no checksum: values are anything finite, and what is told by the length is refused.
    assert min(result.accepted, result.mutants - result.accepted) > 0.02 * result.mutants
    assert result.peak_bytes <= 2 * result.limit_bytes
    assert result.slowdown <= 10


def test_sections_cover_every_way_to_write_a_support() -> None:
    assert {s.section.index for s in SECTIONS} == set(SECTION_INDEX)


def at_length(which: int) -> FuzzResult:
    return fuzz(SMALL[which], SMALL, 100_000, seed=3)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[list[Future[FuzzResult]]]:
    """All specimens at length, on two processors where there are two."""
    workers = min(2, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield [pool.submit(at_length, which) for which in range(len(SMALL))]
        pool.shutdown(cancel_futures=True)


@pytest.mark.skipif(  # three minutes of computing for the same frames in every run; 2048 of each are always tried
    os.environ.get("HYPOTHESIS_PROFILE") != "deep",
    reason="a million and a half frames take three minutes of computing, the same ones in every run, and 2048 of each "
    "specimen are always tried: set HYPOTHESIS_PROFILE=deep",
)
@pytest.mark.long
@pytest.mark.parametrize("which", range(len(SMALL)), ids=NAMES)
def test_at_length(which: int, fuzzed: list[Future[FuzzResult]]) -> None:
    check(fuzzed[which].result(), SMALL[which])
