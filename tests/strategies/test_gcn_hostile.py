"""Owners and clients that answer with anything: one costs its own share of a round, never anybody else's or the run."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from graph_federation import (
    ENOUGH,
    FEATURES,
    NODES,
    PARTS,
    Meddler,
    averaging,
    client,
    graph,
    grid,
    reports,
    run,
    strategy,
)

from fedcomp.codecs import TopK
from fedcomp.errors import ConfigError
from fedcomp.flower.gcn import (
    FEATURES as ROWS_KIND,
)
from fedcomp.flower.gcn import (
    HEADER,
    PLAN_TYPE,
    ROWS_TYPE,
    SETUP_TYPE,
    TRAIN_TYPE,
    Needs,
    Refused,
    put_frames,
    take_frames,
)
from fedcomp.flower.payload import frames, put_frame
from fedcomp.graphs.ids import decode_ids, encode_ids, encode_norms
from fedcomp.graphs.rowcodecs import get_row_codec
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.gcn.strategy import SkewedGCN
from fedcomp.strategies.guard import Norms

LIAR, OTHERS = 1, [0, 2, 3]
CODEC = get_row_codec("dense-f64")

Change = Callable[[Message, Message], None]


def everything(**options: Any) -> SkewedGCN:
    return strategy(**{"n": ENOUGH, "batch_size": 0, **options})


def meddled(kind: str, change: Change, of: SkewedGCN, structure: str = "full", rounds: int = 3) -> dict[str, Any]:
    """Run with the liar's replies of one type changed in round 2."""
    app = Meddler(client(parts := graph(structure=structure)))
    app.after[2, LIAR, kind] = change
    return run(of, grid(parts, app), rounds)


def each(kind: str, make: Callable[[np.ndarray, bytes], bytes]) -> Change:
    """Change every frame of a kind; ``make`` is given the ids that were asked for, and the frame."""

    def change(message: Message, reply: Message) -> None:
        asked = take_frames(message, PARTS, "ids")["ids"]
        for place, data in take_frames(reply, PARTS, kind)[kind].items():
            put_frames(reply.content, kind, {place: make(decode_ids(asked[place]), data)})

    return change


def rows(count: int, width: int = FEATURES) -> np.ndarray:
    return np.ones((count, width))


def flipped(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 16]) + data[-8:]


def infinite(ids: np.ndarray, data: bytes) -> bytes:
    """Return a frame with a good checksum around a value that is not finite."""
    broken = data[:-12] + np.array([np.inf], "<f8").tobytes()
    return broken + zlib.crc32(broken).to_bytes(4, "little")


def without(message: Message, reply: Message) -> None:
    for name in [name for name in reply.content if name.startswith(f"{HEADER}/")]:
        del reply.content[name]


def elsewhere(message: Message, reply: Message) -> None:
    put_frames(reply.content, ROWS_KIND, {LIAR: CODEC.encode(np.array([0]), rows(1))})


def model_in(message: Message, reply: Message) -> None:
    name = next(name for name in reply.content if name.startswith(f"{HEADER}/"))
    del reply.content[name]
    reply.content[name] = ArrayRecord({"w": Array(np.zeros(3))})


WRONG_ROWS = {
    "damaged": (each(ROWS_KIND, lambda ids, data: flipped(data)), "ChecksumMismatch"),
    "not finite": (each(ROWS_KIND, infinite), "NonFinite"),
    "too large": (each(ROWS_KIND, lambda ids, _: CODEC.encode(ids, 1e300 * rows(len(ids)))), "too large for float32"),
    "nothing": (each(ROWS_KIND, lambda ids, data: b""), "Truncated"),
    "ids for rows": (each(ROWS_KIND, lambda ids, data: encode_ids(ids)), "expected rows"),
    "other nodes": (each(ROWS_KIND, lambda ids, _: CODEC.encode(ids + 1, rows(len(ids)))), "were asked for"),
    "fewer nodes": (each(ROWS_KIND, lambda ids, _: CODEC.encode(ids[:-1], rows(len(ids) - 1))), "were asked for"),
    "more nodes": (
        each(ROWS_KIND, lambda ids, _: CODEC.encode(np.arange(len(ids) + 1), rows(len(ids) + 1))),
        "LimitExceeded",
    ),
    "another width": (each(ROWS_KIND, lambda ids, _: CODEC.encode(ids, rows(len(ids), 99))), "SchemaMismatch"),
    "another codec": (
        each(ROWS_KIND, lambda ids, _: get_row_codec("int8").encode(ids, rows(len(ids)))),
        "UnsupportedCodec",
    ),
    "no frames": (without, "are missing"),
    "one more": (elsewhere, "were not asked for"),
    "no frame": (model_in, "not a frame"),
    "another kind": (lambda m, r: put_frames(r.content, "norms", {0: b"x"}), "expected were rows"),
    "not a place": (lambda m, r: put_frame(r.content, f"{HEADER}/rows/x", b"x"), "no number"),
    "not a refusal": (
        lambda m, r: r.content.update({HEADER: ConfigRecord({"a": 1})}),
        "unknown entries",
    ),
}


def lied(kind: str, changes: Iterable[Change], of: SkewedGCN, structure: str = "full") -> dict[str, Any]:
    """Run one round for each change of the liar's replies of one type, and an honest one before and after them."""
    app = Meddler(client(parts := graph(structure=structure)))
    app.after = {(number, LIAR, kind): change for number, change in enumerate(changes, 2)}
    return run(of, grid(parts, app), len(app.after) + 2)


@pytest.mark.slow
def test_an_owner_with_wrong_rows_is_absent_for_that_round_and_trains_all_the_same() -> None:
    of = everything()
    found = lied(ROWS_TYPE, (change for change, _ in WRONG_ROWS.values()), of)
    first, *wrong, last = reports(of)
    for (name, (_, said)), report in zip(WRONG_ROWS.items(), wrong, strict=True):
        assert list(report.absent) == [LIAR], name
        assert said in report.absent[LIAR], name
        assert (report.lost, report.train.clients) == ({}, PARTS), name
        assert LIAR not in report.train.rows_sent, name
        assert report.train.rows_received[LIAR] > 0, name
        assert report.train.lost_mass > 0, name
    for honest in (first, last):
        assert (honest.absent, honest.train.lost_mass) == ({}, 0.0)
    assert last.train.rows_sent == first.train.rows_sent
    assert all(np.isfinite(value).all() for value in found.values())


@pytest.mark.slow
def test_rows_of_the_adjacency_are_looked_at_too() -> None:
    structure = graph()[0].structure

    def other(ids: np.ndarray, data: bytes) -> bytes:
        from fedcomp.graphs.structure_rows import encode_structure

        found = structure.rows(ids[:-1])
        return encode_structure(found, structure.owner_of(found.columns))

    of = everything(structure="halo")
    makes = {"ChecksumMismatch": lambda ids, data: flipped(data), "were asked for": other}
    lied(ROWS_TYPE, (each("structure", make) for make in makes.values()), of, structure="halo")
    _, *wrong, last = reports(of)
    for said, report in zip(makes, wrong, strict=True):
        assert said in report.absent[LIAR]
        assert report.train.clients == PARTS
    assert last.absent == {}


# Clients that want what they cannot want.


def wants(frames: dict[int, Any]) -> Change:
    """Return the change by which a plan wants these ids, or names them with these bytes."""

    def change(message: Message, reply: Message) -> None:
        without(message, reply)
        made = {owner: ids if isinstance(ids, bytes) else encode_ids(np.array(ids)) for owner, ids in frames.items()}
        put_frames(reply.content, "ids", made)

    return change


def structure_please(message: Message, reply: Message) -> None:
    without(message, reply)
    Needs("structure", 0).put(reply.content)


def figures(**values: Any) -> Change:
    def change(message: Message, reply: Message) -> None:
        reply.content["metrics"] = MetricRecord({**reply.content["metrics"], **values})

    return change


WRONG_PLANS = {
    "its own rows": (wants({LIAR: [13]}), "its own"),
    "no list": (wants({0: b"FCG"}), "Truncated|shortest"),
    "nodes beyond the graph": (wants({0: [NODES]}), "beyond|nodes of the graph"),
    "more than there are": (wants({0: list(range(13))}), "at most 12"),
    "structure without a name": (structure_please, "does not say which"),
    "not a number": (figures(lost_mass=float("nan")), "'lost_mass'"),
    "no header": (lambda m, r: r.content.pop(HEADER), "nothing under"),
    "another kind": (lambda m, r: put_frames(r.content, "rows", {0: b"x"}), "expected were ids"),
    "not a part": (lambda m, r: put_frame(r.content, f"{HEADER}/ids/4", b"x"), "there are 4 parts"),
}


@pytest.mark.slow
def test_a_client_with_an_impossible_plan_is_lost_for_that_round_and_serves_its_rows() -> None:
    of = everything()
    lied(PLAN_TYPE, (change for change, _ in WRONG_PLANS.values()), of)
    _, *wrong, last = reports(of)
    for (name, (_, said)), report in zip(WRONG_PLANS.items(), wrong, strict=True):
        assert list(report.lost) == [LIAR], name
        assert re.search(said, report.lost[LIAR]), (name, report.lost)
        assert (report.absent, report.train.clients) == ({}, PARTS - 1), name
        assert report.train.rows_sent[LIAR] > 0, name
        assert report.train.lost_mass == 0.0, name
    assert last.lost == {}


@pytest.mark.slow
@pytest.mark.parametrize("dedupe", [False, True])
def test_a_list_of_nodes_that_its_owner_has_not_costs_the_others_nothing(dedupe: bool) -> None:
    """Part 0 is asked for node 40, which is part 3's; whose list it is is found out where one stands for many."""
    foreign = wants({0: [40], 2: [24, 25], 3: [36, 37]})
    of = everything(dedupe=dedupe)
    meddled(PLAN_TYPE, foreign, of, rounds=2)
    honest, report = reports(of)
    assert report.absent == {}
    assert "part 0 gives part 1 no rows" in report.events["refused"][0]
    for part in OTHERS:
        assert report.train.rows_received[part] == honest.train.rows_received[part] > 0
    assert report.train.replans == 1
    assert report.train.trips == 4 + dedupe
    # Its plan without part 0 wants rows of part 0 again, which ends it.
    assert report.train.clients == PARTS - 1


@pytest.mark.slow
def test_one_that_asks_for_structure_for_ever_is_given_up() -> None:
    part = graph()[LIAR]
    near = np.unique(part.structure.rows(part.ids).columns)
    theirs = near[part.structure.owner_of(near) == 0]

    def again(message: Message, reply: Message) -> None:
        without(message, reply)
        Needs("structure", 0).put(reply.content)
        put_frames(reply.content, "ids", {0: encode_ids(theirs[:1])})

    of = everything(structure="halo")
    meddled(PLAN_TYPE, again, of, structure="halo", rounds=2)
    report = of.reports[2].gcn
    assert report.lost == {LIAR: "it was asked for a plan 4 times and has none"}
    assert report.train.clients == PARTS - 1
    assert report.train.trips <= of.reports[1].gcn.train.trips + 5


@pytest.mark.slow
def test_an_owner_that_refuses_an_honest_client_is_absent_for_it_alone() -> None:
    def refuse(message: Message, reply: Message) -> None:
        name = f"{HEADER}/rows/0"
        del reply.content[name]
        Refused((0,), "I do not like it").put(reply.content)

    of = everything()
    meddled(ROWS_TYPE, refuse, of)
    before, report, after = reports(of)
    assert report.events["refused"] == ["part 1 gives part 0 no rows: I do not like it"]
    assert (report.absent, report.lost, report.train.clients) == ({}, {}, PARTS)
    assert report.train.replans == 1
    assert report.train.rows_received[0] < before.train.rows_received[0]
    assert report.train.rows_received[2] == before.train.rows_received[2]
    assert after.train.rows_received == before.train.rows_received


# Who is who.


HELLOS: dict[str, tuple[Change, str]] = {
    "no hello": (lambda m, r: r.content.pop(HEADER), "nothing under"),
    "of another part": (lambda m, r: r.content[HEADER].update({"index": 2}), "says it holds part 2"),
    "of more than there is": (lambda m, r: r.content[HEADER].update({"owned": NODES + 1}), "nodes of a graph of"),
    "not a list": (lambda m, r: put_frames(r.content, "ids", {0: b"x"}), "shortest"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HELLOS)
def test_a_node_that_says_nonsense_of_itself_is_left_out_and_the_others_go_on(name: str) -> None:
    change, said = HELLOS[name]
    app = Meddler(client(parts := graph()))
    app.after[1, LIAR, SETUP_TYPE] = change
    of = everything()
    run(of, grid(parts, app), 2)
    for report in reports(of):
        assert report.train.clients == PARTS - 1
        assert report.absent == {LIAR: "no node of this part is online"}
    assert said in of.reports[1].gcn.events["refused"][0]
    assert of.reports[1].gcn.events["unknown"] == ["a node of the cohort holds no part of this run's graph"]


@pytest.mark.slow
def test_norms_that_are_wrong_are_not_passed_on_and_asked_for_again() -> None:
    def other(ids: np.ndarray, data: bytes) -> bytes:
        return encode_norms(ids[:-1], np.ones(len(ids) - 1))

    def change(message: Message, reply: Message) -> None:
        if any("/norms/" in name for name in frames(reply.content)):
            each("norms", other)(message, reply)

    app = Meddler(client(parts := graph()))
    app.after[1, LIAR, SETUP_TYPE] = change
    of = strategy(mode="measured")
    run(of, grid(parts, app), 3)
    (noted,) = of.reports[1].gcn.events["norms"]
    assert noted.startswith("part 1 sent no norms, and is asked again in the next round")
    assert re.search(r"not of the \d+ nodes that were asked for", noted)
    assert all(report.train.clients == PARTS for report in reports(of))
    # They are there in the second round, and for good.
    assert of.reports[2].gcn.train.setup_bytes > 0 == of.reports[3].gcn.train.setup_bytes
    assert "norms" not in of.reports[2].gcn.events


def absurd(message: Message, reply: Message) -> None:
    for record in reply.content.array_records.values():
        for name in list(record):
            record[name] = Array(np.full_like(record[name].numpy(), 1e30))


@pytest.mark.slow
def test_a_guard_refuses_and_names_an_absurd_model_around_flowers_own_strategy() -> None:
    """Without one its norm is in the report, as in every system."""
    for guard in (Norms(), None):
        of = everything(guard=guard)
        model = meddled(TRAIN_TYPE, absurd, of)
        report = of.reports[2]
        node = max(report.norms, key=lambda node: report.norms[node])
        assert report.norms[node] > 1e29
        assert (max(np.abs(array).max() for array in model.values()) < 10.0) == (guard is not None)
        assert ("times the usual" in report.refused.get(node, "")) == (guard is not None)
        assert report.used == PARTS - (guard is not None)
    with pytest.raises(ConfigError, match="give it the guard, not SkewedGCN"):
        strategy(Compressed(averaging(), TopK(density=0.5), feedback=False), guard=Norms())


@pytest.mark.slow
def test_a_client_that_fails_is_lost_and_the_others_train() -> None:
    def nothing(message: Message, reply: Message) -> None:
        raise RuntimeError("broken")

    of = everything()
    meddled(TRAIN_TYPE, nothing, of, rounds=2)
    assert "broken" in of.reports[2].gcn.lost[LIAR]
    assert of.reports[2].gcn.train.clients == PARTS - 1
