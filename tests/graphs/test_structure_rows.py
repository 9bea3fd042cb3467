"""Adjacency rows as bytes: exact, with one owner per node, and refused when they contradict themselves."""

from __future__ import annotations

from dataclasses import replace

import graph_frames as damage
import numpy as np
import pytest
from graph_toys import toy_adjacency, toy_owner

from fedcomp import wire
from fedcomp.graphs.adjacency import Adjacency, check_rows
from fedcomp.graphs.base import AdjacencyRows, GraphError
from fedcomp.graphs.ids import put_ids
from fedcomp.graphs.structure_rows import decode_structure, encode_structure
from fedcomp.rng import Key
from fedcomp.wire.section import Section, put_block

GRAPHS = [("sym", 0), ("mean", 0), ("mean", 40)]
GOLDEN_ROWS = AdjacencyRows(
    np.array([2, 5, 9]), np.array([0, 2, 2, 5]), np.array([2, 130, 5, 9, 130]), np.array([0.5, 0.25, 0.1, 0.5, 0.1])
)
GOLDEN_OWNERS = np.array([1, 3, 0, 1, 3])
GOLDEN = {
    False: (
        "4643470204030302020304040202037802d1040205090e02039a9999999999b93f000000000000d03f000000000000e0"
        "3f860000a2e4dfdd"
    ),
    True: (
        "4643470204030302020304040202037802d1040205090e02039a9999999999b93f000000000000d03f000000000000e0"
        "3f8600010000003f000000000000004071d96469"
    ),
}


def graph(kind: str, isolated: int) -> tuple[Adjacency, np.ndarray]:
    return toy_adjacency(400, 4, 6.0, kind=kind, isolated=isolated), toy_owner(400, 4)


def same(a: AdjacencyRows, b: AdjacencyRows) -> bool:
    return all(getattr(a, n).tobytes() == getattr(b, n).tobytes() for n in ("ids", "indptr", "columns", "values"))


def golden(norms: bool) -> bytes:
    return encode_structure(GOLDEN_ROWS, GOLDEN_OWNERS, np.array([0.5, 0, 2]) if norms else None)


@pytest.mark.parametrize("norms", [False, True])
def test_golden_bytes(norms: bool) -> None:
    assert golden(norms).hex() == GOLDEN[norms]
    rows, owners, found = decode_structure(bytes.fromhex(GOLDEN[norms]), nodes=131, parts=4, limit=3)
    assert same(rows, GOLDEN_ROWS)
    assert owners.tolist() == GOLDEN_OWNERS.tolist()
    assert (None if found is None else found.tolist()) == ([0.5, 0, 2] if norms else None)


@pytest.mark.parametrize(("kind", "isolated"), GRAPHS)
def test_rows_come_out_bit_for_bit(kind: str, isolated: int) -> None:
    adjacency, owner = graph(kind, isolated)
    for ids in (np.arange(0, 400, 7), np.arange(350, 400), np.arange(0), np.arange(400)):
        rows = adjacency.rows(ids)
        owners = owner[rows.columns]
        norms = Key(1, "norms").uniform(ids.size).astype(np.float32)
        found, whose, sent = decode_structure(encode_structure(rows, owners, norms), nodes=400, parts=4)
        assert found.ids.tolist() == ids.tolist()
        assert found.indptr.tolist() == rows.indptr.tolist()
        assert found.columns.tolist() == rows.columns.tolist()
        assert found.values.tobytes() == rows.values.tobytes()
        assert whose.dtype == np.int32
        assert whose.tolist() == owners.tolist()
        assert sent is not None
        assert sent.tolist() == norms.tolist()


@pytest.mark.parametrize(("kind", "isolated"), GRAPHS)
def test_rows_are_shorter_than_plain_arrays(kind: str, isolated: int) -> None:
    """Than 4 + 8 + 4 bytes for column, value and owner of an entry: less than a third of that here."""
    adjacency, owner = graph(kind, isolated)
    rows = adjacency.rows(np.arange(0, 400, 3))
    assert len(encode_structure(rows, owner[rows.columns])) < 16 * rows.columns.size / 3


def test_values_take_the_shortest_of_three_forms() -> None:
    ids, indptr, columns = np.arange(10), np.arange(0, 401, 40), np.tile(np.arange(40), 10)
    owners, draws = np.zeros(400, np.int32), Key(3, "values").uniform(400)
    sizes = {}
    for name, values in {
        "wide": draws,
        "narrow": draws.astype(np.float32).astype(np.float64),
        "few": np.floor(draws * 5 + 1) / 10,
        "one": np.full(400, 1 / 3),
    }.items():
        rows = AdjacencyRows(ids, indptr, columns, values)
        frame = encode_structure(rows, owners)
        assert decode_structure(frame)[0].values.tobytes() == values.tobytes()
        sizes[name] = len(frame)
    rest = sizes["wide"] - 3200
    assert sizes == {"wide": rest + 3200, "narrow": rest + 1600, "few": rest + 1 + 40 + 150, "one": rest + 1 + 8}


@pytest.mark.parametrize(
    ("change", "owners", "why"),
    [
        ({"ids": np.array([2, 9, 5])}, GOLDEN_OWNERS, "ascending"),
        ({"columns": np.array([130, 2, 5, 9, 130])}, GOLDEN_OWNERS, "ascending"),
        ({"columns": np.array([2, 2, 5, 9, 130])}, GOLDEN_OWNERS, "ascending"),
        ({"columns": np.array([-2, 130, 5, 9, 130])}, GOLDEN_OWNERS, "columns from -2"),
        ({"indptr": np.array([0, 2, 5])}, GOLDEN_OWNERS, "indptr has 3"),
        ({"indptr": np.array([0, 3, 2, 5])}, GOLDEN_OWNERS, "goes down"),
        ({"values": np.ones(4)}, GOLDEN_OWNERS, "5 columns and 4 values"),
        ({"values": np.array([1, 1, 1, np.nan, 1])}, GOLDEN_OWNERS, "finite"),
        ({"values": np.array([1, 1, 0, 1, 1])}, GOLDEN_OWNERS, "not 0"),
        ({}, GOLDEN_OWNERS[:4], "one integer per 5 entries"),
        ({}, np.array([1, 3, 0, 1, 2]), "different owners"),
        ({}, -GOLDEN_OWNERS, "owners run from -3"),
        ({}, GOLDEN_OWNERS + (1 << 31), "numbered from 0"),
        ({}, GOLDEN_OWNERS + 0.5, "one integer per 5 entries"),
    ],
)
def test_what_is_not_rows_is_refused(change: dict, owners: np.ndarray, why: str) -> None:
    with pytest.raises(GraphError, match=why):
        encode_structure(replace(GOLDEN_ROWS, **change), owners)


def test_rows_beyond_what_was_agreed_are_refused() -> None:
    frame = golden(True)
    decode_structure(frame, nodes=131, parts=4, limit=3, max_entries=5)
    for limits, error in (
        ({"nodes": 130}, wire.Corrupt),
        ({"parts": 3}, wire.Corrupt),
        ({"limit": 2}, wire.LimitExceeded),
        ({"max_entries": 4}, wire.LimitExceeded),
    ):
        with pytest.raises(error):
            decode_structure(frame, **limits)


ONE = np.ones(1)
ONE_TWO = np.float32([1, 2]).tobytes()


def framed(*, columns: tuple = (3, 4), owners: bytes = b"\x00", places: tuple = (0, 1), rest: bytes) -> bytes:
    """Return the frame of one row, node 7, put together from its sections."""
    where = Section(len(columns), wire.Ones, "rice").write(wire.Ones(len(places)), np.array(places))
    body = put_ids(np.array([7])) + put_ids(np.array(columns)) + owners + put_block(where)
    return damage.sealed(b"FCG\x02\x04" + body + rest)


@pytest.mark.parametrize(
    ("parts", "error", "why"),
    [
        ({"rest": b"\x03\x00"}, wire.Corrupt, "form 3"),
        ({"rest": b"\x01" + np.float32([1, np.nan]).tobytes() + b"\x00"}, wire.NonFinite, "NaN"),
        ({"rest": b"\x01" + np.float32([1, 0]).tobytes() + b"\x00"}, wire.Corrupt, "a zero"),
        ({"rest": b"\x01" + ONE_TWO + b"\x02"}, wire.Corrupt, "found 2"),
        ({"rest": b"\x01" + np.float32([1]).tobytes()}, wire.Truncated, "values"),
        ({"rest": b"\x02\x03" + bytes(24) + b"\x0c\x00"}, wire.LimitExceeded, "table of 3"),
        ({"rest": b"\x02\x00\x00"}, wire.Corrupt, "refers to value"),
        ({"rest": b"\x02\x02" + np.float64([2, 1]).tobytes() + b"\x01\x00"}, wire.Corrupt, "does not ascend"),
        ({"rest": b"\x02\x02" + np.float64([1, 1]).tobytes() + b"\x02\x00"}, wire.Corrupt, "does not ascend"),
        ({"rest": b"\x02\x02" + np.float64([1, 2]).tobytes() + b"\x00\x00"}, wire.Corrupt, "no entry has"),
        ({"rest": b"\x01" + ONE_TWO + b"\x00", "owners": b"\x20" + bytes(8)}, wire.Corrupt, "32 bits"),
        ({"rest": b"\x01" + ONE_TWO + b"\x00", "owners": b"\x02\x05"}, wire.Corrupt, "2 bits each; expected 1"),
        ({"rest": b"\x01" + ONE_TWO[:4] + b"\x00", "places": (0,)}, wire.Corrupt, "in none of them"),
        ({"rest": b"\x01" + ONE_TWO + b"\x00\x00"}, wire.Corrupt, "after its last"),
    ],
)
def test_contradictions_are_found(parts: dict, error: type[Exception], why: str) -> None:
    assert decode_structure(framed(rest=b"\x01" + ONE_TWO + b"\x00"))[0].columns.tolist() == [3, 4]
    assert decode_structure(framed(rest=b"\x02\x01" + ONE.tobytes() + b"\x00"))[0].values.tolist() == [1, 1]
    with pytest.raises(error, match=why):
        decode_structure(framed(**parts))


@pytest.mark.filterwarnings("error")
def test_a_nan_that_signals_is_refused_without_a_warning() -> None:
    signalling = b"\x01\x00\xa0\x7f"
    with pytest.raises(wire.NonFinite):
        decode_structure(framed(rest=b"\x01" + ONE_TWO[:4] + signalling + b"\x00"))
    with pytest.raises(wire.NonFinite):
        decode_structure(framed(rest=b"\x01" + ONE_TWO + b"\x01" + signalling))


def test_damaged_frames_are_refused() -> None:
    for norms in (False, True):
        damage.refuses_every_truncation_and_flip(decode_structure, golden(norms))
        damage.refuses_every_sealed_truncation(decode_structure, golden(norms))


@pytest.mark.slow
def test_fuzzed_frames_give_rows_or_wire_errors() -> None:
    adjacency, owner = graph("sym", 0)
    rows = adjacency.rows(np.arange(0, 400, 20))

    def decode(frame: bytes) -> None:
        found, owners, norms = decode_structure(frame, nodes=400, parts=8, limit=20)
        assert owners.size == found.columns.size == found.values.size == found.indptr[-1]
        assert np.isfinite(found.values).all()
        assert norms is None or (norms >= 0).all()
        # A structure takes whatever comes out, and nothing is written in two ways.
        check_rows(found, 400)
        assert encode_structure(found, owners, norms) == frame

    frames = [encode_structure(rows, owner[rows.columns]), golden(True), golden(False)]
    damage.survives_mutants(decode, frames, 600, seed=5, most=200_000)


def test_claims_allocate_nothing() -> None:
    head = b"FCG\x02\x04" + put_ids(np.array([7])) + put_ids(np.arange(9)) + b"\x00"
    claim = damage.sealed(head + b"\xff\xff\xff\xff\x0f" + b"\x20\x00" + b"\xff" * 32 + bytes(40))
    assert damage.memory_of(lambda: decode_structure(claim)) < 30_000
    # One bit per entry on the wire, and a table of one value: entries are limited for themselves.
    dense = encode_structure(
        AdjacencyRows(np.arange(100), np.arange(0, 100_001, 1000), np.tile(np.arange(1000), 100), np.ones(100_000)),
        np.zeros(100_000, np.int32),
    )
    assert len(dense) < 14_000
    assert damage.memory_of(lambda: decode_structure(dense, max_entries=99_999)) < 300_000
