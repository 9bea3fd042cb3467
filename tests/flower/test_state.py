"""Transactional client state, one transaction at a time (flower spec 7.3)."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, RecordDict

from fedcomp.codecs import QSGD, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError
from fedcomp.flower import state
from fedcomp.flower.payload import put_frame, take_frame
from fedcomp.flower.protocol import PROTOCOL, UPDATE, Announcement
from fedcomp.flower.schema import SchemaError
from fedcomp.flower.state import Replica, StaleMessage, Uplink, asked_of, lineage
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

LAYOUT = Layout.flat(2000)
CODEC = ErrorFeedback(TopK(density=0.01))


def context() -> Context:
    return Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})


def say(sequence: int, acknowledged: int = 0, generation: int = 0) -> Announcement:
    return Announcement(
        "arrays",
        1,
        0,
        session=b"session!",
        sequence=sequence,
        acknowledged=acknowledged,
        generation=generation,
    )


def vector(seed: int) -> np.ndarray:
    words = Key(seed, "state-test").bits(2000) % np.uint64(201)
    return (words.astype(np.int64) - 100).astype(np.float32)


def answer(ctx: Context, announcement: Announcement, seed: int, codec=CODEC) -> bytes:
    """Go through one transaction as the mod does; return the frame."""
    uplink = Uplink.begin(ctx, announcement, codec, LAYOUT)
    assert uplink.redelivery is None
    frame, state = codec.encode(Update(vector(seed), LAYOUT), uplink.state, Key(0))
    reply = RecordDict({"fedcomp.node": ConfigRecord({"sequence": announcement.sequence})})
    put_frame(reply, UPDATE, frame)
    uplink.commit(ctx, state, announcement, codec, LAYOUT, reply)
    return frame


def total(ctx: Context, announcement: Announcement, codec=CODEC) -> np.ndarray:
    """Return what the client owes as a later message finds it."""
    state = Uplink.begin(ctx, announcement, codec, LAYOUT).state
    return next(v for v in state.values() if v.shape == (2000,)).astype(np.float64)


def test_an_acknowledged_frame_stays_sent() -> None:
    ctx = context()
    frame = answer(ctx, say(5), 1)
    owed = total(ctx, say(6, acknowledged=5, generation=5))
    np.testing.assert_array_equal(owed + CODEC.decode(frame, LAYOUT), vector(1))


def elsewhere(ctx: Context, node: int) -> Context:
    return Context(run_id=1, node_id=node, node_config={}, state=ctx.state.copy(), run_config={})


def test_a_node_under_another_id_does_not_send_again_what_may_have_arrived() -> None:
    ctx = context()
    frame = answer(ctx, say(5), 1)
    found = Uplink.begin(elsewhere(ctx, 3), say(6), CODEC, LAYOUT)
    assert (found.unsettled, found.rolled_back, found.fresh) == (True, False, False)
    owed = next(v for v in found.state.values() if v.shape == (2000,))
    np.testing.assert_array_equal(owed + CODEC.decode(frame, LAYOUT), vector(1))
    # Under its own id the server knew it, and said that nothing had arrived.
    found = Uplink.begin(ctx, say(6), CODEC, LAYOUT)
    assert (found.unsettled, found.rolled_back) == (False, True)


def test_a_node_under_another_id_that_the_server_knows_goes_on_as_it_is_told() -> None:
    """Strategies that know nodes by partition acknowledge across ids; another frame was lost on the way."""
    ctx = context()
    answer(ctx, say(5), 1)
    answer(ctx, say(6, acknowledged=5, generation=5), 2)
    other = elsewhere(ctx, 3)
    assert Uplink.begin(other, say(7, acknowledged=5, generation=5), CODEC, LAYOUT).rolled_back
    answer(other, say(7, acknowledged=6, generation=5), 3)
    # From here on it is known by its new id.
    found = Uplink.begin(other, say(8), CODEC, LAYOUT)
    assert (found.unsettled, found.rolled_back) == (False, True)


def test_an_older_copy_of_the_memory_sends_nothing_twice() -> None:
    """The server consumed frame 6, then the node came back with what it held after frame 5, which was consumed too."""
    ctx = context()
    answer(ctx, say(5), 1)
    found = Uplink.begin(ctx, say(7, acknowledged=6, generation=5), CODEC, LAYOUT)
    assert found.fresh
    assert not found.rolled_back
    assert not any(v.any() for v in found.state.values()), "neither frame 5 nor what was left of it is sent again"
    # Of a memory that began later: this one was lost before, and its last frame may have been consumed long ago.
    later = Uplink.begin(ctx, say(9, acknowledged=8, generation=7), CODEC, LAYOUT)
    assert later.fresh
    assert not later.rolled_back
    # An acknowledgement of an earlier generation's frame says nothing about this memory.
    assert Uplink.begin(ctx, say(7, acknowledged=6, generation=4), CODEC, LAYOUT).rolled_back


def test_a_lost_frame_comes_back() -> None:
    ctx = context()
    answer(ctx, say(5), 1)
    np.testing.assert_array_equal(total(ctx, say(6)), vector(1))


def test_an_acknowledgement_of_another_generation_is_none() -> None:
    """The server speaks of a memory this node no longer has (or never had)."""
    ctx = context()
    answer(ctx, say(5), 1)
    np.testing.assert_array_equal(total(ctx, say(6, acknowledged=5, generation=4)), vector(1))


def test_the_same_message_gets_the_same_reply() -> None:
    ctx = context()
    frame = answer(ctx, say(5), 1)
    again = Uplink.begin(ctx, say(5), CODEC, LAYOUT)
    assert again.redelivery is not None
    from fedcomp.flower.payload import take_frame

    assert take_frame(again.redelivery, UPDATE) == frame
    assert again.redelivery.config_records["fedcomp.node"]["sequence"] == 5


def test_begin_modifies_nothing_so_that_a_crash_costs_nothing() -> None:
    ctx = context()
    answer(ctx, say(5), 1)
    before = dict(ctx.state.items())
    Uplink.begin(ctx, say(6), CODEC, LAYOUT)
    Uplink.begin(ctx, say(7, 5, 5), CODEC, LAYOUT)
    assert dict(ctx.state.items()) == before
    np.testing.assert_array_equal(total(ctx, say(8)), vector(1))


def test_losing_many_replies_in_a_row_loses_nothing() -> None:
    ctx = context()
    for sequence in range(1, 11):
        answer(ctx, say(sequence), sequence)
    expected = sum(vector(s).astype(np.float64) for s in range(1, 11))
    np.testing.assert_array_equal(total(ctx, say(11)), expected)


def test_memory_survives_a_change_of_density_but_not_of_model_or_algorithm() -> None:
    ctx = context()
    answer(ctx, say(5), 1)
    warmer = ErrorFeedback(TopK(density=0.5))
    np.testing.assert_array_equal(total(ctx, say(6), warmer), vector(1))
    assert Uplink.begin(ctx, say(6), warmer, Layout.flat(2001)).fresh
    assert Uplink.begin(ctx, say(6), ErrorFeedback(QSGD(levels=4)), LAYOUT).fresh
    same, warm, other = (lineage(codec.to_config()) for codec in (CODEC, warmer, ErrorFeedback(QSGD(levels=4))))
    assert same == warm != other
    assert lineage(ErrorFeedback(TopK(density=0.1, schedule=((1, 0.2), (5, 0.3)))).to_config()) == same
    assert same == '["feedback",{"codec":{"id":"topk"}}]'


def test_generation_is_the_message_that_created_the_memory() -> None:
    ctx = context()
    assert Uplink.begin(ctx, say(9), CODEC, LAYOUT).generation == 9
    answer(ctx, say(9), 1)
    assert Uplink.begin(ctx, say(12, 9, 9), CODEC, LAYOUT).generation == 9
    assert Uplink.begin(context(), say(12, 9, 9), CODEC, LAYOUT).generation == 12


def test_memory_of_another_session_is_not_continued() -> None:
    """What became of its last frame is unknown: replaying it could count an update twice."""
    ctx = context()
    answer(ctx, say(5), 1)
    other = Announcement("arrays", 1, 0, session=b"other", sequence=5, acknowledged=5, generation=5)
    again = Uplink.begin(ctx, other, CODEC, LAYOUT)
    assert again.fresh
    assert again.redelivery is None


def test_an_older_message_of_the_session_is_refused() -> None:
    ctx = context()
    answer(ctx, say(5), 1)
    with pytest.raises(StaleMessage, match="message 4 came too late"):
        Uplink.begin(ctx, say(4), CODEC, LAYOUT)


def test_another_protocol_version_is_not_read_any_further() -> None:
    config = ConfigRecord({"fedcomp.protocol": PROTOCOL + 1, "fedcomp.codec": 17, "fedcomp.round": "x"})
    found = Announcement.read(config)
    assert found is not None
    assert found.protocol == PROTOCOL + 1


@pytest.mark.parametrize("wrong", [True, 1.0, [1], "1"])
def test_a_value_is_read_by_its_type_whatever_was_read_before(wrong: object) -> None:
    config = ConfigRecord({"fedcomp.protocol": PROTOCOL, "fedcomp.record": "arrays", "fedcomp.sequence": 1})
    assert Announcement.read(config) == Announcement("arrays", 0, 0, sequence=1)
    with pytest.raises(SchemaError, match="sequence"):
        Announcement.read(ConfigRecord({**config, "fedcomp.sequence": wrong}))
    assert Announcement.read(ConfigRecord({**config, "lr": [1.0]})) == Announcement("arrays", 0, 0, sequence=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generation", "pending", "session", "codec", "lineage", "layout"])
@pytest.mark.parametrize("value", [None, "x", 7, b"x", [1]], ids=repr)
def test_d5_a_damaged_description_restarts_the_memory(name: str, value) -> None:
    """Before, a KeyError or a JSON error in every later round of that node."""
    ctx = context()
    answer(ctx, say(1), 1)
    record = ctx.state["fedcomp.uplink"]
    if value is None:
        del record[name]
    elif type(record[name]) is type(value):
        record[name] = value if name != "codec" else "{"
        if name not in ("codec", "session", "lineage", "layout"):
            return
    else:
        record[name] = value
    # The first frame was not acknowledged: what described it is needed to put it back.
    assert Uplink.begin(ctx, say(9), CODEC, LAYOUT).fresh
    del ctx.state["fedcomp.uplink"]
    ctx.state["fedcomp.replica"] = ConfigRecord({})
    assert Replica.load(ctx) is None


def test_replica_round_trip() -> None:
    ctx = context()
    assert Replica.load(ctx) is None
    Replica(7, {"w": np.arange(4, dtype=np.float32), "n": np.array(3)}).save(ctx)
    held = Replica.load(ctx)
    assert held is not None
    assert held.version == 7
    assert list(held.arrays) == ["w", "n"]
    assert held.arrays["n"].dtype == np.int64


def test_announcement_round_trip_and_erase() -> None:
    config = ConfigRecord({"server-round": 3, "lr": 0.1})
    full = Announcement(
        "arrays",
        round=3,
        seed=1,
        codec={"id": "topk", "density": 0.1},
        policy={"min_size": 3, "patterns": []},
        session=b"session!",
        sequence=9,
        acknowledged=8,
        generation=7,
        downlink={"id": "topk"},
        version=4,
        base=3,
        digest=b"d",
    )
    full.write(config)
    assert Announcement.read(config) == full
    assert full.protocol == PROTOCOL
    Announcement.erase(config)
    assert dict(config) == {"server-round": 3, "lr": 0.1}
    assert Announcement.read(config) is None


def test_a_restarted_server_gets_the_answer_to_the_round_that_it_makes_again() -> None:
    """Under the new number; and nothing of the memory moves, which training again would add to."""
    after = 1 << 32
    model = {"a": np.arange(3, dtype=np.float32), "b": np.zeros((), np.int64)}
    asked = asked_of(say(6), model)
    ctx = context()
    answer(ctx, say(5), 1)
    second = say(6, acknowledged=5, generation=5)
    uplink = Uplink.begin(ctx, second, CODEC, LAYOUT, asked)
    frame, state = CODEC.encode(Update(vector(2), LAYOUT), uplink.state, Key(0))
    reply = RecordDict({"fedcomp.node": ConfigRecord({"sequence": 6, "version": 1})})
    put_frame(reply, UPDATE, frame)
    uplink.commit(ctx, state, second, CODEC, LAYOUT, reply, asked)

    again = say(after + 1, acknowledged=5, generation=5)
    # Another round, another model, another number of the same server's: each puts the update back as ever.
    other = asked_of(say(6), {**model, "a": np.nextafter(model["a"], 9)})
    for message, name in ((again, other), (again, b""), (say(7, acknowledged=5, generation=5), asked)):
        found = Uplink.begin(ctx, message, CODEC, LAYOUT, name)
        assert (found.redelivery, found.repeated, found.rolled_back) == (None, False, True)
    found = Uplink.begin(ctx, again, CODEC, LAYOUT, asked)
    assert found.repeated
    content = found.repeat(ctx, again, Replica(after + 3, {}))
    header = content["fedcomp.node"]
    assert (header["sequence"], header["version"]) == (after + 1, after + 3)
    assert take_frame(content, UPDATE) == frame
    # The same message again is answered as any that comes twice, and its acknowledgement settles it.
    twice = Uplink.begin(ctx, again, CODEC, LAYOUT, asked)
    assert (twice.redelivery, twice.repeated) == (content, False)
    settled = Uplink.begin(ctx, say(after + 2, acknowledged=after + 1, generation=5), CODEC, LAYOUT)
    assert not settled.rolled_back
    assert {k: v.tobytes() for k, v in settled.state.items()} == {k: v.tobytes() for k, v in state.items()}


def test_a_model_that_was_checked_is_named_by_its_digest() -> None:
    model = {"a": np.arange(3, dtype=np.float32)}
    first, second = replace(say(6), digest=b"1" * 16), replace(say(6), digest=b"2" * 16)
    assert asked_of(first, model, checked=True) == asked_of(first, {}, checked=True)
    assert asked_of(first, model, checked=True) != asked_of(second, model, checked=True)
    assert asked_of(first, model) == asked_of(second, model)
    # The order of values counts, their bits do, and their shape.
    others = [model["a"][::-1], -model["a"], model["a"].reshape(3, 1), model["a"].astype(np.float64)]
    assert len({asked_of(first, {"a": each}) for each in [model["a"], *others]}) == 5


@pytest.mark.parametrize(
    ("downlink", "most", "told"), [({}, 8100, True), ({}, 8200, False), ({"id": "topk"}, 16000, True)]
)
def test_a_memory_larger_than_a_state_can_be_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch, downlink: dict, most: int, told: bool
) -> None:
    monkeypatch.setattr(state, "MOST_BYTES", most)
    asked = replace(say(1), downlink=downlink)
    with pytest.raises(ConfigError, match="would remember") if told else contextlib.nullcontext():
        Uplink.begin(context(), asked, CODEC, LAYOUT)
