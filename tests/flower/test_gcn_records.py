"""What a graph run's messages say, and what a client keeps: read by name and type, refused in any other form."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from graph_toys import toy_parts

from fedcomp.errors import StateError
from fedcomp.flower import gcn, gcn_state, store
from fedcomp.flower._private import adopt_identity
from fedcomp.flower.gcn import Figures, PlanRequest, expect, put_frames, take_frames
from fedcomp.flower.gcn_state import NodeValues, OwnerState, PastTurn, keep_secret, own_secret
from fedcomp.flower.payload import INLINE_LIMIT, STYPE, PayloadError, is_frame, models, put_frame, take_frame
from fedcomp.flower.protocol import OWN_FRAMES, is_own
from fedcomp.graphs.base import Operator, StepPlan
from fedcomp.graphs.rowcodecs import get_row_codec

ASK = PlanRequest("s", -3, 1, "train", 2, 8, "{}", "dense-f64", "lru", 4096, 0.5, (0, 3), 2.0, 1)


@pytest.fixture(autouse=True)
def identity() -> None:
    adopt_identity((1, 1, 1))


def test_turns_are_ordered_as_a_session_has_them() -> None:
    turns = [replace(ASK, round=r, purpose=p).turn for r in (1, 2) for p in ("train", "evaluate")]
    assert turns == sorted(set(turns))


def framed(**frames: Any) -> Message:
    content = RecordDict({"config": ConfigRecord({"a": 1}), "arrays": ArrayRecord({"w": Array(np.zeros(2))})})
    content[gcn.HEADER] = ConfigRecord({"session": "s"})
    for kind, by_place in frames.items():
        put_frames(content, kind, by_place)
    return Message(content, 2, gcn.TRAIN_TYPE)


def test_frames_of_any_size_come_back_by_kind_and_place() -> None:
    large = bytes(range(256)) * (INLINE_LIMIT // 256 + 1)
    message = framed(rows={2: large, 0: b"", 1: b"x"}, norms={3: b"n"})
    found = take_frames(message, 4, gcn.FEATURES, gcn.NORMS, gcn.IDS)
    assert found == {"rows": {0: b"", 1: b"x", 2: large}, "norms": {3: b"n"}, "ids": {}}
    assert list(found["rows"]) == [0, 1, 2]
    assert list(models(message.content)) == ["arrays"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ids/0", "expected were rows, norms"),
        ("rows", "at a place that is no number"),
        ("rows/", "at a place that is no number"),
        ("rows/01", "at a place that is no number"),
        ("rows/+1", "at a place that is no number"),
        ("rows/-1", "at a place that is no number"),
        ("rows/1 ", "at a place that is no number"),
        ("rows/²", "at a place that is no number"),
        ("rows/1/1", "at a place that is no number"),
        ("rows/4", "there are 4 parts"),
        ("rows/99999999999999999999", "no number"),
        ("else/0", "expected were rows, norms"),
    ],
)
def test_a_frame_of_another_kind_or_at_another_place_is_refused(name: str, said: str) -> None:
    message = framed(rows={1: b"x"})
    put_frame(message.content, f"{gcn.HEADER}/{name}", b"y")
    with pytest.raises(PayloadError, match=said):
        take_frames(message, 4, gcn.FEATURES, gcn.NORMS)


def test_what_is_no_frame_and_what_cannot_be_one_are_refused() -> None:
    message = framed()
    message.content[f"{gcn.HEADER}/rows/1"] = MetricRecord({"x": 1})
    with pytest.raises(PayloadError, match="not a frame"):
        take_frames(message, 4, gcn.FEATURES)
    for kind, place in (("row", 0), (gcn.IDS, -1), (gcn.IDS, gcn.MOST_PARTS)):
        with pytest.raises(PayloadError):
            put_frames(RecordDict(), kind, {place: b"x"})


def test_frames_are_expected_at_certain_places_and_no_others() -> None:
    expect({1: b"", 3: b""}, (3, 1), gcn.FEATURES)
    with pytest.raises(PayloadError, match=r"\[2\] are missing, \[3\] were not asked for"):
        expect({1: b"", 3: b""}, (1, 2), gcn.FEATURES)


def layer(candidates: int, lam: float, s: float, expected: float, lost: float, columns: int) -> Operator:
    ids, nothing = np.arange(columns), np.zeros(0, np.int64)
    return Operator(nothing, ids, nothing, nothing, np.zeros(0), candidates, lam, s, expected, lost)


def test_figures_are_sums_over_steps_and_means_over_what_there_was() -> None:
    steps = [
        StepPlan(np.arange(3), (layer(10, 0.5, 2.0, 1.5, 0.2, 6), layer(4, 0.7, 4.0, 9.0, 0.1, 4)), np.arange(2), None),
        StepPlan(
            np.arange(2), (layer(0, math.nan, 1.0, 0.0, 0.0, 0), layer(6, 0.9, 3.0, 9.0, 0.0, 4)), np.arange(0), None
        ),
    ]
    found = Figures.of_plans(steps, 7)
    assert found == Figures(2, 5, 6, 2, 7, 20, 1.5, pytest.approx(0.7), 3.0, pytest.approx(0.1))
    content = RecordDict()
    found.put(content)
    assert Figures.take(Message(content, 2, gcn.PLAN_TYPE)) == found
    none = Figures.of_plans([], 0)
    assert (none.local_mass, none.scale, none.lost_mass) == (0.0, 1.0, 0.0)


def test_models_are_told_from_frames_by_what_they_hold() -> None:
    content = RecordDict(
        {"arrays": ArrayRecord({"w": Array(np.zeros(2))}), "fedcomp.x": ArrayRecord({"w": Array(np.ones(2))})}
    )
    put_frame(content, "arrays-too", bytes(INLINE_LIMIT + 1))
    put_frame(content, "small", b"x")
    assert list(models(content)) == ["arrays", "fedcomp.x"]
    assert is_frame(content["arrays-too"])
    assert is_frame(content["small"])
    # One that is not well made is a frame still: nobody takes its bytes for a model.
    content["odd"] = ArrayRecord({STYPE: Array(np.zeros(3))})
    assert "odd" not in models(content)


def test_the_drop_in_pair_takes_its_own_records_and_leaves_the_others() -> None:
    assert all(is_own(name) and is_own(f"{name}.3.exact") for name in OWN_FRAMES)
    assert not any(
        is_own(n) for n in ("arrays", "fedcomp", "fedcomp.node", gcn.HEADER, f"{gcn.HEADER}/rows/1", "fedcomp.steps")
    )


PART = toy_parts()[1]
CODEC = get_row_codec("dense-f64")


def read(frame: bytes) -> Any:
    return CODEC.decode(frame, features=6, dtype=np.float64)


def rows(*ids: int) -> bytes:
    values = np.arange(6.0)[None] + np.array(ids, float)[:, None]
    return CODEC.encode(np.array(ids), values)


def holding(context: Context, ask: PlanRequest) -> OwnerState:
    return OwnerState.load(context, ask, PART, read)


def ids_of(*ids: int) -> Any:
    return np.array(ids, np.int64)


def turn(
    ask: PlanRequest, kept: OwnerState, *frames: bytes, used: Any = (), seen: tuple[NodeValues, ...] = ()
) -> PastTurn:
    by_owner = dict(enumerate(frames))
    return PastTurn(ask.session, ask.turn, kept.rows_of, by_owner, ids_of(*used), seen)


def test_rows_of_a_turn_join_the_cache_when_another_one_begins() -> None:
    context, first = Context(1, 1, {}, RecordDict(), {}), replace(ASK, cache="all", absent=())
    kept = holding(context, first)
    assert not len(kept.cache)
    assert not kept.stored
    seen = (NodeValues(ids_of(1, 2), np.array([0.5, 0.25])),)
    replace(kept, last=turn(first, kept, rows(20, 22), rows(30), seen=seen)).save(context)
    again = holding(context, first)
    assert not len(again.cache)
    assert again.last is not None
    assert not again.hidden
    later = holding(context, replace(first, round=2))
    assert later.cache.ids.tolist() == [20, 22, 30]
    assert later.last is None
    assert later.cache.get(ids_of(22)).tolist() == [[22.0 + i for i in range(6)]]
    assert later.hidden[0].ids.tolist() == [1, 2]
    assert later.hidden[0].values.tolist() == [0.5, 0.25]
    # Loading has changed nothing: the first turn still finds what it found.
    assert not len(holding(context, first).cache)
    later.save(context)
    assert holding(context, first).cache.ids.tolist() == [20, 22, 30]
    assert holding(context, replace(first, round=3)).stored


def test_norms_of_hidden_layers_are_of_one_session_and_cached_rows_of_the_graph() -> None:
    context, first = Context(1, 1, {}, RecordDict(), {}), replace(ASK, cache="all", absent=())
    kept = holding(context, first).received(first, NodeValues(ids_of(35), np.array([2.0])), [(0, b"frame")])
    seen = (NodeValues(ids_of(1), np.array([0.5])),)
    replace(kept, last=turn(first, kept, rows(20), seen=seen)).save(context)
    other = holding(context, replace(first, session="t"))
    assert other.cache.ids.tolist() == [20]
    assert other.norms.ids.tolist() == [35]
    assert not other.hidden
    assert holding(context, first).structure_at(first) == ((0, b"frame"),)
    assert other.structure_at(replace(first, session="t")) == ()
    assert not len(holding(context, replace(first, round=2, noise=0.0)).cache)
    assert not len(holding(context, replace(first, round=2, row_codec="csr")).cache)
    moved = OwnerState.load(context, replace(first, round=2), replace(PART, digest="other"), read)
    assert not len(moved.cache)
    assert not len(moved.norms.ids)


def test_a_limit_is_kept_to_by_use() -> None:
    context = Context(1, 1, {}, RecordDict(), {})
    # Two rows of 49 + 12 bytes fit.
    ask = replace(ASK, cache="lru", cache_bytes=125, absent=())
    kept = holding(context, ask)
    replace(kept, last=turn(ask, kept, rows(20, 22))).save(context)
    ask = replace(ask, round=2)
    kept = holding(context, ask)
    replace(kept, last=turn(ask, kept, rows(30), used=[20])).save(context)
    assert holding(context, replace(ask, round=3)).cache.ids.tolist() == [20, 30]
    # A lower limit from now on: what no longer fits is not there, and using it is not asked for.
    assert holding(context, replace(ask, round=3, cache_bytes=65)).cache.ids.tolist() == [30]
    assert not len(holding(context, replace(ask, round=3, cache="none")).cache)


def test_rows_of_the_adjacency_that_come_twice_are_kept_once() -> None:
    ask = replace(ASK, absent=())
    kept = holding(Context(1, 1, {}, RecordDict(), {}), ask)
    for _ in range(2):
        kept = kept.received(ask, NodeValues(), [(0, b"a"), (2, b"b")])
    assert kept.structure_at(ask) == ((0, b"a"), (2, b"b"))
    assert kept.received(replace(ask, round=2), NodeValues(), [(0, b"c")]).structure == ((0, b"c"),)


def test_of_two_numbers_for_a_node_the_later_one_counts() -> None:
    old, new = NodeValues(ids_of(1, 3), np.array([1.0, 3.0])), NodeValues(ids_of(2, 3), np.array([20.0, 30.0]))
    both = old.updated(new)
    assert both.ids.tolist() == [1, 2, 3]
    assert both.values.tolist() == [1.0, 20.0, 30.0]
    assert old.updated(NodeValues()) is old


def test_a_state_with_a_hole_in_it_is_not_used() -> None:
    context, ask = Context(1, 1, {}, RecordDict(), {}), replace(ASK, cache="all", absent=())
    kept = holding(context, ask)
    replace(kept, last=turn(ask, kept, rows(20), rows(30))).save(context)
    whole, data = dict(context.state.items()), take_frame(context.state, gcn_state.KEPT)
    assert data is not None
    named = store.loads(data, gcn_state.KEPT)
    lacking = [store.dumps({k: v for k, v in named.items() if k != name}, gcn_state.KEPT) for name in named]
    holes = [data[:-1], data[: len(data) // 2], b"", *lacking]
    assert len(holes) == 3 + len(fields(gcn_state.StoredState))
    for hole in holes:
        context.state = RecordDict(dict(whole))
        put_frame(context.state, gcn_state.KEPT, hole)
        with pytest.raises(StateError, match="restart the node"):
            holding(context, replace(ask, round=2))
    assert whole.keys() == {gcn_state.KEPT, gcn_state.KEPT_CACHE}
    context.state = RecordDict({gcn_state.KEPT: whole[gcn_state.KEPT]})
    with pytest.raises(StateError, match="restart the node"):
        holding(context, replace(ask, round=2))


def test_an_owner_has_one_secret_for_ever() -> None:
    context = Context(1, 1, {}, RecordDict(), {})
    secret, fresh = own_secret(context)
    assert fresh
    assert len(secret) == 32
    assert own_secret(context)[0] != secret
    keep_secret(context, secret)
    assert own_secret(context) == (secret, False)
    context.state[gcn_state.SECRET] = ConfigRecord({"secret": b"short"})
    with pytest.raises(StateError, match="damaged"):
        own_secret(context)
