"""Estimates that both ends hold: bit for bit the same, every message once and in order, or a typed error."""

from __future__ import annotations

import numpy as np
import pytest
from estimate_streams import (
    DITHER,
    EVERY,
    RANDOM,
    SIGN,
    SPLIT,
    TOP,
    D,
    N,
    draw,
    fresh,
    frozen,
    message,
    pair_view,
    ring_view,
    stored,
    write,
)

from fedcomp.errors import ConfigError, NonFiniteUpdate, StateError
from fedcomp.gossip.base import GossipMessage, State, View, messages_of
from fedcomp.gossip.compressor import Compressor
from fedcomp.gossip.errors import MessageError, OutOfStep
from fedcomp.gossip.estimates import (
    WrittenMessages,
    absorb,
    along_edge,
    broadcast,
    copy_key,
    digests,
    disagreement,
    mixed,
    open_estimates,
    own_key,
    retract,
)
from fedcomp.gossip.packet import MessageFlag, MessageHeader, peek
from fedcomp.rng import Key


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("c", EVERY, ids=repr)
def test_7_15_digests_are_equal_at_both_ends_in_every_iteration(c: Compressor, dtype: str) -> None:
    states = [fresh(dtype) for _ in range(N)]
    for k in range(12):
        outboxes = []
        for i in range(N):
            sent = broadcast(states[i], {"z": draw("x", i, k, dtype)}, c, ring_view(i, k), digest_every=1)
            states[i] = sent.state
            outboxes.append(messages_of(i, sent.outbox))
        for i in range(N):
            inbox = [one for box in outboxes for one in box if one.destination == i]
            done = absorb(states[i], inbox, ("z",), c)
            states[i] = stored(done.state) if k % 5 == 2 else done.state
            assert all(peek(one.payload).flags == MessageFlag.DIGEST for one in inbox)
        found = [digests(state, ("z",)) for state in states]
        for i in range(N):
            for j in ((i - 1) % N, (i + 1) % N):
                assert found[i]["z"] == found[j][f"z/{i}"]
                assert states[i]["z"].tobytes() == states[j][copy_key("z", i)].tobytes()
        assert states[0]["z"].dtype == dtype
    assert len({found[i]["z"] for i in range(N)}) == N


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_7_15_digests_are_equal_on_edges_that_rest_and_come_back(dtype: str) -> None:
    out, back = fresh(dtype, edges=True), {j: fresh(dtype, edges=True) for j in (1, 2)}
    for k in range(20):
        active = [j for j in (1, 2) if (k // j) % 2 == 0]
        view = View(0, k, dict.fromkeys(active, 0.25), {}, seed=11)
        for j in active:
            out, multicast, _ = along_edge(out, {"z": draw("x", 0, k, dtype)}, RANDOM, view, j, digest_every=1)
            inbox = messages_of(0, (multicast,))
            back[j] = absorb(stored(back[j]), inbox, ("z",), RANDOM, complete=False).state
            assert digests(out, ("z",))[f"z>{j}"] == digests(back[j], ("z",))["z/0"]
            assert not peek(multicast.payload).flags & MessageFlag.RESYNC
    assert digests(out, ("z",))["z>1"] != digests(out, ("z",))["z>2"]
    assert own_key("z", 1) in out
    assert "z" not in out


@pytest.mark.slow
def test_a_silent_loss_of_one_percent_is_noticed_at_the_next_message_and_mended() -> None:
    lost = Key(8, "loss").uniform(4000)
    states = [fresh() for _ in range(N)]
    resync: list[set[int]] = [set() for _ in range(N)]
    open_gaps: set[tuple[int, int]] = set()
    drops = noticed = 0
    sources: set[tuple[int, int]] = set()
    for k in range(150):
        boxes = []
        for i in range(N):
            sent = broadcast(states[i], {"z": draw("x", i, k)}, TOP, ring_view(i, k, resync=resync[i]))
            states[i], resync[i] = sent.state, set()
            boxes += messages_of(i, sent.outbox)
        for at, one in enumerate(boxes):
            edge = (one.source, one.destination)
            if k < 149 and lost[(k * len(boxes) + at) % 4000] < 0.01:
                drops += edge not in open_gaps
                open_gaps.add(edge)
                continue
            before = frozen(states[one.destination])
            try:
                states[one.destination] = absorb(states[one.destination], [one], ("z",), TOP, complete=False).state
                open_gaps.discard(edge)
            except OutOfStep as error:
                sources.add((error.source, one.source))
                assert edge in open_gaps
                assert frozen(states[one.destination]) == before
                noticed += 1
                resync[one.source].add(one.destination)
            assert edge not in open_gaps or resync[one.source]
    assert drops >= 8
    assert all(said == real for said, real in sources)
    assert noticed >= drops
    for i in range(N):
        for j in ((i - 1) % N, (i + 1) % N):
            assert (j, i) in open_gaps or digests(states[i], ("z",))[f"z/{j}"] == digests(states[j], ("z",))["z"]
    assert not open_gaps


def test_duplicates_are_ignored_wherever_they_come() -> None:
    sender, receiver = fresh(), fresh()
    seen = []
    for k in range(4):
        sent = write(sender, k)
        sender = sent.state
        seen.append(message(sent))
        done = absorb(receiver, [seen[-1], *seen], ("z",), TOP, complete=False)
        assert [r.header.iteration for r in done.received] == [k]
        receiver = done.state
        assert digests(receiver, ("z",))["z/0"] == digests(sender, ("z",))["z"]
    again = absorb(receiver, seen, ("z",), TOP, complete=False)
    assert again.received == ()
    assert frozen(again.state) == frozen(receiver)


def test_a_gap_is_refused_until_the_whole_estimate_comes() -> None:
    sender, receiver = fresh(), fresh()
    sent = [write(sender, 0)]
    for k in (1, 2):
        sent.append(write(sent[-1].state, k))
    receiver = absorb(receiver, [message(sent[0])], ("z",), TOP, complete=False).state
    before = frozen(receiver)
    with pytest.raises(OutOfStep, match="does not follow") as caught:
        absorb(receiver, [message(sent[2])], ("z",), TOP, complete=False)
    assert caught.value.source == 0
    assert frozen(receiver) == before
    whole = write(sent[2].state, 3, resync=(1,))
    assert peek(message(whole).payload).flags & MessageFlag.RESYNC
    receiver = absorb(receiver, [message(whole)], ("z",), TOP, complete=False).state
    assert digests(receiver, ("z",))["z/0"] == digests(whole.state, ("z",))["z"]
    # A message from before the whole one was never applied: it is no duplicate, and what it carries must not vanish.
    with pytest.raises(OutOfStep):
        absorb(receiver, [message(sent[1])], ("z",), TOP, complete=False)
    following = write(whole.state, 4)
    assert not peek(message(following).payload).flags & MessageFlag.RESYNC
    receiver = absorb(receiver, [message(whole), message(following)], ("z",), TOP, complete=False).state
    assert digests(receiver, ("z",))["z/0"] == digests(following.state, ("z",))["z"]


def test_a_sender_that_restarts_is_not_taken_for_a_duplicate() -> None:
    receiver = absorb(fresh(), [message(write(fresh(), 0))], ("z",), TOP, complete=False).state
    with pytest.raises(OutOfStep):
        absorb(receiver, [message(write(fresh(), 5))], ("z",), TOP, complete=False)
    whole = write(fresh(), 5, resync=(1,))
    receiver = absorb(receiver, [message(whole)], ("z",), TOP, complete=False).state
    assert digests(receiver, ("z",))["z/0"] == digests(whole.state, ("z",))["z"]


def test_messages_are_counted_beyond_65536() -> None:
    first = write(fresh(), 7)
    sender = {**first.state, "z.seq": np.array(65533), "z.sent/1": np.array(65533)}
    receiver = absorb(fresh(), [message(first)], ("z",), TOP, complete=False).state
    receiver["z.seq/0"] = np.array([65533, 7, 65533])
    sent = []
    for k in range(8, 14):
        sent.append(write(sender, k, digest_every=1))
        sender = sent[-1].state
        done = absorb(receiver, [message(one) for one in sent], ("z",), TOP, complete=False)
        assert [r.header.iteration for r in done.received] == [k]
        receiver = done.state
    assert [peek(message(one).payload).seq for one in sent] == [65533, 65534, 65535, 0, 1, 2]
    with pytest.raises(OutOfStep):
        absorb(receiver, [message(write(write(sender, 14).state, 15))], ("z",), TOP, complete=False)


def test_the_digest_finds_an_estimate_that_is_off_by_one_bit() -> None:
    sender, receiver = fresh(), fresh()
    for k in range(9):
        sent = write(sender, k, digest_every=5)
        sender = sent.state
        if k == 6:
            word = receiver["z/0"].view(np.uint64).copy()
            word[3] ^= np.uint64(1)
            receiver = {**receiver, "z/0": word.view(np.float64)}
        receiver = absorb(receiver, [message(sent)], ("z",), TOP, complete=False).state
    sent = write(write(sender, 9, digest_every=5).state, 10, digest_every=5)
    nine = write(sender, 9, digest_every=5)
    receiver = absorb(receiver, [message(nine)], ("z",), TOP, complete=False).state
    with pytest.raises(OutOfStep, match="digests of message 10") as caught:
        absorb(receiver, [message(sent)], ("z",), TOP, complete=False)
    assert caught.value.source == 0


def test_different_beginnings_show_in_the_first_message() -> None:
    other = open_estimates({}, {"z": np.ones(D)}, SPLIT)
    with pytest.raises(OutOfStep, match="digests"):
        absorb(other, [message(write(fresh(), 0))], ("z",), TOP, complete=False)
    whole = write(fresh(), 0, resync=(1,))
    done = absorb(other, [message(whole)], ("z",), TOP, complete=False)
    assert digests(done.state, ("z",))["z/0"] == digests(whole.state, ("z",))["z"]


def test_a_neighbour_that_missed_messages_of_a_broadcast_gets_the_whole_estimate() -> None:
    sender = fresh()
    copies = {j: fresh() for j in (1, 2, 3)}
    kinds: dict[int, list[bool]] = {1: [], 2: [], 3: []}
    for k in range(6):
        active = [1] + [2] * (k != 2) + [3] * (k >= 4)
        sent = write(sender, k, view=View(0, k, dict.fromkeys(active, 0.2), {}, seed=11), digest_every=1)
        sender = sent.state
        for one in messages_of(0, sent.outbox):
            j = one.destination
            kinds[j].append(bool(peek(one.payload).flags & MessageFlag.RESYNC))
            copies[j] = absorb(copies[j], [one], ("z",), TOP, complete=False).state
            assert digests(copies[j], ("z",))["z/0"] == digests(sender, ("z",))["z"]
    assert kinds == {1: [False] * 6, 2: [False, False, True, False, False], 3: [True, False]}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_alpha_scales_what_both_ends_add_and_not_what_they_see(dtype: str) -> None:
    sender, receiver = fresh(dtype), fresh(dtype)
    before = sender["z"]
    sent = write(sender, 0, DITHER, alpha=0.3)
    done = absorb(receiver, [message(sent)], ("z",), DITHER, alpha=0.3, complete=False)
    assert done.state["z/0"].tobytes() == sent.state["z"].tobytes()
    q = sent.deltas["z"].dense()
    assert np.array_equal(sent.state["z"], before + np.asarray(0.3, dtype) * q)
    assert np.array_equal(done.received[0].deltas["z"].dense(), q)


def test_a_compressor_may_depend_on_sender_and_message() -> None:
    asked = []

    def scaled(source: int, header: MessageHeader) -> Compressor:
        asked.append((source, header.iteration, header.flags))
        return SIGN.scaled(1.0 if header.flags & MessageFlag.ZOOM else 0.5)

    one = write(fresh(), 0, SIGN.scaled(1.0), flags=MessageFlag.ZOOM)
    two = write(one.state, 1, SIGN.scaled(0.5))
    done = absorb(fresh(), [message(one), message(one), message(two)], ("z",), scaled, complete=False)
    assert done.state["z/0"].tobytes() == two.state["z"].tobytes()
    assert asked == [(0, 0, MessageFlag.ZOOM | MessageFlag.DIGEST), (0, 1, MessageFlag(0))]


def test_estimates_of_received_messages_are_those_right_after_each() -> None:
    one = write(fresh(), 0)
    two = write(one.state, 1)
    done = absorb(fresh(), [message(one), message(two)], ("z",), TOP, complete=False)
    assert [r.estimates["z"].tobytes() for r in done.received] == [one.state["z"].tobytes(), two.state["z"].tobytes()]


def test_a_synchronous_iteration_takes_exactly_the_messages_it_needs() -> None:
    def node(i: int, k: int, state: State) -> WrittenMessages:
        return broadcast(state, {"z": draw("x", i, k)}, TOP, ring_view(i, k))

    first = [node(i, 0, fresh()) for i in range(N)]
    at = first[0].state
    left, right = message(first[4], 4, 0), message(first[1], 1, 0)
    with pytest.raises(MessageError, match=r"no message of iteration 0 arrived from nodes \[4\]"):
        absorb(at, [right], ("z",), TOP)
    with pytest.raises(MessageError, match="expected one of each"):
        absorb(at, [right, GossipMessage(2, 0, message(first[2], 2, 1).payload), left], ("z",), TOP)
    done = absorb(at, [right, left], ("z",), TOP)
    assert [r.source for r in done.received] == [1, 4]
    assert absorb(done.state, [], ("z",), TOP).state is done.state  # finished: nothing is due any more
    with pytest.raises(MessageError, match="no started iteration needs"):
        absorb(done.state, [right], ("z",), TOP)
    second = node(1, 1, absorb(first[1].state, [message(first[0]), message(first[2], 2, 1)], ("z",), TOP).state)
    ahead = node(0, 1, done.state).state
    fourth = absorb(first[4].state, [message(first[0], 0, 4), message(first[3], 3, 4)], ("z",), TOP).state
    inbox = [message(second, 1, 0), right, message(node(4, 1, fourth), 4, 0)]
    assert len(absorb(ahead, inbox, ("z",), TOP).received) == 2
    with pytest.raises(MessageError, match="iteration 1"):
        absorb(node(0, 7, done.state).state, [message(second, 1, 0)], ("z",), TOP)


def test_disagreement_is_the_weighted_difference_of_estimates() -> None:
    weights = {1: 0.5, 4: 0.125}
    state = fresh()
    assert not disagreement(state, "z").any()
    state = write(state, 0, view=View(0, 0, weights, weights, seed=1)).state
    with pytest.raises(StateError, match="nothing was received from node 1"):
        disagreement(state, "z")
    inbox = []
    for j in weights:
        view = View(j, 0, {0: 0.5}, {0: 0.5}, seed=1)
        inbox += messages_of(j, broadcast(fresh(), {"z": draw("x", j)}, TOP, view).outbox)
    state = absorb(state, inbox, ("z",), TOP).state
    own, a, b = state["z"], state["z/1"], state["z/4"]
    assert np.allclose(disagreement(state, "z"), 0.5 * (a - own) + 0.125 * (b - own), rtol=0.0, atol=1e-15)
    assert np.allclose(mixed(state, "z"), 0.5 * a + 0.125 * b, rtol=0.0, atol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize(("start", "whole"), [(0.0, True), (0.7, True), (0.7, False)])
def test_the_sum_alone_gives_the_same_and_refuses_a_changed_graph(start: float, whole: bool) -> None:
    begin = {"z": np.full(D, start)}
    kept = [open_estimates({}, begin, SPLIT) for _ in range(N)]
    lean = [open_estimates({}, begin, SPLIT, copies=False) for _ in range(N)]
    for k in range(8):
        boxes: list[list[GossipMessage]] = []
        for states in (kept, lean):
            box = []
            for i in range(N):
                first = range(N) if k == 0 and whole else ()
                sent = broadcast(states[i], {"z": draw("x", i, k)}, TOP, ring_view(i, k, resync=first), digest_every=0)
                states[i] = sent.state
                box += messages_of(i, sent.outbox)
            boxes.append(box)
            for i in range(N):
                states[i] = absorb(states[i], [one for one in box if one.destination == i], ("z",), TOP).state
        assert boxes[0] == boxes[1]
        for i in range(N):
            assert np.allclose(disagreement(kept[i], "z"), disagreement(lean[i], "z"), rtol=0.0, atol=1e-13)
            assert not [key for key in lean[i] if key.startswith("z/")]
    for row in ({1: 0.3, 4: 1.0 / 3.0}, {1: 1.0 / 3.0}, {1: 1.0 / 3.0, 3: 1.0 / 3.0}):
        with pytest.raises(StateError, match="neighbours or weights changed"):
            write(lean[0], 8, view=View(0, 8, row, row, seed=11))
    sent = write(lean[0], 8, view=ring_view(0, 8, resync=(1,)))
    with pytest.raises(OutOfStep, match="part of a sum"):
        absorb(lean[1], [message(sent)], ("z",), TOP, complete=False)
    with pytest.raises(MessageError, match="has no weight"):
        absorb(lean[3], [message(write(fresh(), 8, digest_every=0))], ("z",), TOP, complete=False)
    with pytest.raises(MessageError, match="digest"):
        absorb(lean[1], [message(write(kept[0], 8, view=ring_view(0, 8), digest_every=1))], ("z",), TOP, complete=False)
    with pytest.raises(ConfigError, match="copies=False"):
        open_estimates({}, begin, SPLIT, copies=False, edges=True)


def test_messages_of_an_edge_that_come_back_are_undone_newest_first() -> None:
    state, receiver = fresh(edges=True), fresh(edges=True)
    sent, after = [], []
    for k in range(4):
        state, multicast, _ = along_edge(state, {"z": draw("x", 0, k)}, TOP, pair_view(0, k), 1, extra=bytes((k, 7)))
        sent += messages_of(0, (multicast,))
        after.append(state["z>1"])
        state, _, _ = along_edge(state, {"z": draw("x", 0, k)}, TOP, View(0, k, {2: 0.5}, {}, seed=11), 2)
    receiver = absorb(receiver, sent[:1], ("z",), TOP, extra=2, complete=False).state
    with pytest.raises(OutOfStep, match="the last ones come back first"):
        retract(state, sent[1:3], ("z",), TOP, extra=2)
    back = retract(state, sent[1:], ("z",), TOP, extra=2)
    assert [(r.source, r.header.iteration, r.extra) for r in back.received] == [
        (1, 3, b"\x03\x07"),
        (1, 2, b"\x02\x07"),
        (1, 1, b"\x01\x07"),
    ]
    for r, expected in zip(back.received, after[:0:-1], strict=True):
        assert np.allclose(r.estimates["z"], expected, rtol=0.0, atol=1e-14)
    assert back.received[0].estimates["z"].tobytes() == after[3].tobytes()
    assert np.allclose(back.state["z>1"], after[0], rtol=0.0, atol=1e-14)
    assert back.state["z>2"].tobytes() == state["z>2"].tobytes()
    # One after the other is the same.
    single = retract(retract(state, sent[3:], ("z",), TOP, extra=2).state, sent[1:3], ("z",), TOP, extra=2)
    assert frozen(single.state) == frozen(back.state)
    state, multicast, _ = along_edge(back.state, {"z": draw("x", 0, 9)}, TOP, pair_view(0, 9), 1, extra=b"ab")
    assert peek(multicast.payload).flags & MessageFlag.RESYNC
    receiver = absorb(receiver, messages_of(0, (multicast,)), ("z",), TOP, extra=2, complete=False).state
    assert digests(receiver, ("z",))["z/0"] == digests(state, ("z",))["z>1"]
    state, multicast, _ = along_edge(state, {"z": draw("x", 0, 10)}, TOP, pair_view(0, 10), 1, extra=b"ab")
    assert not peek(multicast.payload).flags & MessageFlag.RESYNC


def test_a_whole_message_that_comes_back_is_undone_exactly() -> None:
    state, _, _ = along_edge(fresh(edges=True), {"z": draw("x", 0, 0)}, TOP, pair_view(0, 0), 1)
    after, multicast, _ = along_edge(state, {"z": draw("x", 0, 1)}, TOP, pair_view(0, 1, (1,)), 1)
    back = retract(after, messages_of(0, (multicast,)), ("z",), TOP)
    assert back.state["z>1"].tobytes() == state["z>1"].tobytes()


def test_what_cannot_be_sent_changes_nothing() -> None:
    state = fresh()
    before = frozen(state)
    for bad in (np.nan, np.inf):
        target = draw("x")
        target[5] = bad
        with pytest.raises(NonFiniteUpdate):
            broadcast(state, {"z": target}, TOP, pair_view(0, 0))
    with pytest.raises(StateError, match="float32"):
        broadcast(state, {"z": draw("x", dtype="float32")}, TOP, pair_view(0, 0))
    with pytest.raises(ConfigError):
        open_estimates({}, {"h": np.zeros(4), "g": np.zeros(5)}, 2)
    assert frozen(state) == before


def test_opening_again_forgets_the_former_stream_and_nothing_else() -> None:
    state = {**write(fresh(), 0).state, "x": np.ones(3), "zz": np.ones(2)}
    again = open_estimates(state, {"z": np.zeros(D)}, SPLIT)
    assert set(again) == {"x", "zz", *fresh()}


def test_estimates_that_were_not_opened_or_are_of_the_other_kind_are_refused() -> None:
    target = {"z": draw("x")}
    for state in ({}, fresh("float64", edges=True)):
        with pytest.raises(StateError, match="no estimate 'z' was opened"):
            broadcast(state, target, TOP, pair_view(0, 0))
    for state in ({}, fresh("float64")):
        with pytest.raises(StateError, match="no estimate 'z>1' was opened"):
            along_edge(state, target, TOP, pair_view(0, 0), 1)
