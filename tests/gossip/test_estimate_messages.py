"""The bytes in which estimates travel: their size, golden messages, and what is not a message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from estimate_streams import (
    DITHER,
    IDENTITY,
    RANDOM,
    SIGN,
    SPLIT,
    TOP,
    D,
    comp,
    draw,
    fresh,
    message,
    pair_view,
    write,
)

from fedcomp.gossip.base import GossipMessage, State, View, messages_of
from fedcomp.gossip.errors import MessageError
from fedcomp.gossip.estimates import absorb, along_edge, broadcast, digests, open_estimates, own_key
from fedcomp.gossip.packet import MessageFlag


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_7_17_a_message_has_header_extra_and_sections_and_nothing_else(dtype: str) -> None:
    wide = 8 if dtype == "float64" else 4
    tail = wide * (D - SPLIT)
    bits = (SPLIT - 1).bit_length()
    closed = {
        comp("topk", 4 / SPLIT, index="fixed"): (4 * bits + 7) // 8 + 4 * 4,
        comp("topk", 9 / SPLIT, index="bitmap"): (SPLIT + 7) // 8 + 4 * 9,
        comp("randomk", 5 / SPLIT): 20,
        SIGN: (SPLIT + 7) // 8,
        comp("scaledsign"): 4 + (SPLIT + 7) // 8,
        DITHER: 4 + (3 * SPLIT + 7) // 8,
        IDENTITY: wide * SPLIT,
    }
    for c, section in closed.items():
        state = fresh(dtype)
        sizes = []
        for k, resync in enumerate(((), (), (1,))):
            sent = write(state, k, c, resync=resync, extra=bytes(8), digest_every=2)
            state = sent.state
            sizes.append(len(message(sent).payload))
        plain = 8 + 8 + section + tail
        assert sizes == [plain + 8, plain, plain + 8 + wide * D]


def test_equal_messages_share_a_multicast_and_others_do_not() -> None:
    view = View(0, 0, {4: 0.2, 2: 0.2, 7: 0.2}, {}, seed=1, resync=frozenset({7}))
    sent = write(fresh(), 0, view=view)
    assert [multicast.destinations for multicast in sent.outbox] == [(2, 4), (7,)]
    sent = write(fresh(), 0, view=view, extra={2: b"ab", 4: b"cd", 7: b"ab"})
    assert [multicast.destinations for multicast in sent.outbox] == [(2,), (4,), (7,)]
    done = absorb(fresh(), [message(sent, to=4)], ("z",), TOP, extra=2, complete=False)
    assert done.received[0].extra == b"cd"
    assert write(fresh(), 0, view=replace(view, column={})).outbox == ()


def test_two_names_ride_in_one_message_and_follow_one_stream() -> None:
    names = ("h", "g")
    sender, receiver = fresh(names=names), fresh(names=names)
    for k in range(4):
        targets = {"h": draw("h", 0, k), "g": draw("g", 0, k)}
        sent = broadcast(sender, targets, RANDOM, pair_view(0, k, (1,) if k == 2 else ()), digest_every=1)
        sender = sent.state
        done = absorb(receiver, [message(sent)], names, RANDOM, complete=False)
        receiver = done.state
        for name in names:
            assert receiver[f"{name}/0"].tobytes() == sender[name].tobytes()
            assert done.received[0].deltas[name].dense().tobytes() == sent.deltas[name].dense().tobytes()
    assert sent.deltas["h"].indices is not None
    assert sent.deltas["h"].indices.tolist() != sent.deltas["g"].indices.tolist()  # type: ignore[union-attr]
    assert set(digests(sender, names)) == {"h", "g"}
    assert "g.seq" not in sender


def test_random_supports_are_redrawn_without_the_seed_of_the_run() -> None:
    c = RANDOM
    for edges in (False, True):
        supports = []
        for seed, k, config in ((1, 0, c), (10**30, 0, c), (1, 1, c)):
            sender, view = fresh(edges=edges), pair_view(0, k, seed=seed)
            if edges:
                sender, multicast, deltas = along_edge(sender, {"z": draw("x")}, config, view, 1)
                inbox = messages_of(0, (multicast,))
            else:
                sender, outbox, deltas = broadcast(sender, {"z": draw("x")}, config, view)
                inbox = messages_of(0, outbox)
            done = absorb(fresh(edges=edges), inbox, ("z",), config, complete=False)
            assert done.state["z/0"].tobytes() == sender[own_key("z", 1 if edges else None)].tobytes()
            assert deltas["z"].indices is not None
            supports.append(deltas["z"].indices.tolist())
        assert supports[0] == supports[1] not in supports[2:]
    edges = fresh(edges=True)
    along = [along_edge(edges, {"z": draw("x")}, c, View(0, 0), j)[2]["z"].indices for j in (1, 2)]
    assert along[0] is not None
    assert along[0].tolist() != along[1].tolist()  # type: ignore[union-attr]


def test_messages_of_estimates_are_these_bytes_for_ever() -> None:
    v = np.array([0.25, -3.0, 0.0, 1.0, -0.5, 0.125, 2.0, -0.0, 0.75, -1.5], np.float32)
    c = comp("topk", 2 / 8, index="fixed")

    def opened(*names: str, **options: Any) -> State:
        return open_estimates({}, {name: np.zeros(10, np.float32) for name in names}, 8, **options)

    first = broadcast(opened("z"), {"z": v}, c, pair_view(0, 258), digest_every=0)
    written = {
        "plain": message(first),
        "digest": message(broadcast(opened("z"), {"z": v}, c, pair_view(0, 258))),
        "whole": message(broadcast(first.state, {"z": v}, c, pair_view(0, 259, (1,)), extra=b"ab")),
        "two": message(broadcast(opened("h", "g"), {"h": v, "g": -v}, c, pair_view(0, 258), digest_every=0)),
        "edge": messages_of(
            0,
            (
                along_edge(
                    opened("z", edges=True),
                    {"z": v},
                    comp("randomk", 2 / 8, shared=False),
                    pair_view(0, 258),
                    1,
                    digest_every=0,
                )[1],
            ),
        )[0],
    }
    section = "31" + "000040c0" + "00000040" + "0000403f" + "0000c0bf"
    other = "31" + "00004040" + "000000c0" + "000040bf" + "0000c03f"
    estimate = "00000000" + "000040c0" + 4 * "00000000" + "00000040" + "00000000" + "0000403f" + "0000c0bf"
    assert {kind: one.payload.hex() for kind, one in written.items()} == {
        "plain": "02010000" + "0000" + "00" + "01" + section,
        "digest": "02010000" + "0000" + "02" + "01" + "85b476383a8bba9c" + section,
        "whole": "03010000" + "0100" + "01" + "01" + "6162" + estimate + "23" + "0000803f" + "000000bf" + 8 * "00",
        "two": "02010000" + "0000" + "00" + "01" + "11" + section + other,
        "edge": "02010000" + "0000" + "00" + "01" + "00000000" + "0000003e" + "0000403f" + "0000c0bf",
    }


def test_messages_with_another_model_or_of_the_closing_phase_are_refused() -> None:
    one = message(write(fresh(), 0, IDENTITY))
    with pytest.raises(MessageError, match="at most"):
        absorb(fresh(), [GossipMessage(0, 1, one.payload + bytes(2000))], ("z",), IDENTITY, complete=False)
    with pytest.raises(MessageError, match="float64"):
        absorb(fresh("float32"), [one], ("z",), IDENTITY, complete=False)
    for flag in (MessageFlag.DENSE, MessageFlag.LEAVING):
        other = message(write(fresh(), 0, IDENTITY, flags=flag))
        with pytest.raises(MessageError, match="a change of an estimate was expected"):
            absorb(fresh(), [other], ("z",), IDENTITY, complete=False)
    largest = np.zeros(D)
    largest[0] = np.finfo(np.float64).max
    state = open_estimates({}, {"z": largest}, SPLIT)
    push = broadcast(fresh(), {"z": largest}, IDENTITY, pair_view(0, 0), digest_every=0)
    with pytest.raises(MessageError, match="largest number"):
        absorb(state, [message(push)], ("z",), IDENTITY, complete=False)
