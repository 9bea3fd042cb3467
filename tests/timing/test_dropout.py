"""Devices that vanish inside a round: hand-computed small cases, the limits of the model, and what must be monotone."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.errors import ConfigError
from fedcomp.rng import Key
from fedcomp.timing import Link
from fedcomp.timing.dropout import (
    ALWAYS,
    NEVER,
    Compute,
    Fate,
    OnOff,
    Presence,
    Situation,
    Trace,
    World,
    in_turn,
    plain,
    relay,
)

SLOW = Link(800.0, 8000.0)  # 100 bytes a second up, 1000 down
FAST = Link(8000.0, 8000.0)  # 1000 bytes a second
INSTANT = Link(math.inf, math.inf)
KEY = Key(3, "dropout")


def until(*ends: float) -> list[Presence]:
    return [Presence(((0.0, end),)) for end in ends]


def made(presence: list[Presence], ready: float = 1.0, **changed: object) -> Situation:
    fields = {"server": SLOW, "peer": FAST, "share_by": 10.0, "end": 100.0, **changed}
    return Situation(presence, [ready] * len(presence), **fields)  # type: ignore[arg-type]


def turning(clients: int, count: int):
    """Holders of a contributor's shards: itself first, then those after it."""
    return lambda client: [(client + i) % clients for i in range(count)]


def relayed(round: Situation, shard: int, symbols: int, count: int | None = None, **changed: object) -> Fate:
    clients = len(round.presence)
    options = {"patience": 20.0, **changed}
    return relay(round, shard, symbols, turning(clients, count or clients), in_turn, **options)  # type: ignore[arg-type]


def test_a_transfer_that_breaks_off_begins_anew_and_pieces_go_on() -> None:
    presence = Presence(((0.0, 3.0), (5.0, 7.0), (10.0, 20.0)))
    assert presence.whole(0.0, 3.0) == 3.0
    assert presence.whole(1.0, 2.5) == 12.5
    assert presence.whole(4.0, 2.0) == 7.0
    assert presence.whole(11.0, 10.0) == NEVER
    # One second at a time: 1 to 3, 5 to 7, then the fifth.
    assert presence.pieces(1.0, [1.0] * 5) == 11.0
    assert presence.pieces(1.0, [4.0]) == 14.0
    assert presence.pieces(1.0, []) == 1.0
    assert presence.busy(1.0, 11.0) == 2.0 + 2.0 + 1.0
    assert [presence.here(at) for at in (0.0, 3.0, 4.0, 20.0, 20.5)] == [True, True, False, True, False]
    assert [presence.next(at) for at in (1.0, 4.0, 21.0)] == [1.0, 5.0, NEVER]


@pytest.mark.parametrize(
    "intervals", [((0.0, 0.0),), ((1.0, 0.5),), ((0.0, 2.0), (1.0, 3.0)), ((0.0, 2.0), (2.0, 3.0))]
)
def test_overlapping_stays_are_refused(intervals: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ConfigError, match="ascending"):
        Presence(intervals)


def test_a_plain_upload_by_hand() -> None:
    # Ready at 1, 300 bytes at 100 a second: over at 4.
    fate = plain(made(until(4.0, 3.9, 0.5)), 300)
    assert fate.known == (4.0, NEVER, NEVER)
    assert fate.fraction == pytest.approx(1 / 3)
    # Somebody is missing: the server waits until the end.
    assert fate.seconds == 100.0
    assert plain(made(until(4.0, 9.0)), 300).seconds == 4.0
    assert plain(made(until(4.0), end=3.9, share_by=1.0), 300).known == (NEVER,)
    late = Link(800.0, 8000.0, 0.25)
    assert plain(made(until(4.0), server=late), 300).known == (4.25,)


def test_resume_keeps_whole_chunks_only() -> None:
    there = [Presence(((0.0, 2.5), (10.0, 12.0), (20.0, 30.0)))]
    # Ready at 1: one chunk of 100 bytes until 2, the next breaks off at 2.5; two from 10 on; the rest of 50 from 20 on.
    assert plain(made(there), 350, chunk=100).known == (20.5,)
    assert plain(made(there), 350).known == (23.5,)
    assert plain(made(there, end=20.0), 350, chunk=100).known == (NEVER,)


def test_the_bytes_that_left_are_those_of_the_time_a_device_was_there() -> None:
    found = made([Presence(((0.0, 2.5), (10.0, 12.0)))])
    assert found.spent(0, 1.0, 1000) == 350.0
    assert found.spent(0, 1.0, 100) == 100.0
    assert found.spent(0, 1.0, 1000, until=2.0) == 100.0
    assert found.spent(0, NEVER, 1000) == 0.0


def test_shards_by_hand() -> None:
    # 500 bytes take half a second: client 0's leave at 1.5 and 2, its own is there at once.
    found = made(until(1.9, 9.0, 9.0))
    assert found.share(0, 1.0, [(0, 500), (1, 500), (2, 500)]) == ([1.0, 1.5, NEVER], NEVER)
    assert found.share(1, 1.0, [(1, 500), (2, 500), (0, 500)]) == ([1.0, 1.5, NEVER], 2.0)
    # A holder that is away misses it; the sender goes on.
    away = made([ALWAYS, Presence(((0.0, 1.2), (1.7, 9.0))), ALWAYS])
    assert away.share(0, 1.0, [(1, 500), (2, 500)]) == ([NEVER, 2.0], 2.0)
    # After the deadline of sharing it is too late.
    assert made(until(9.0, 9.0), share_by=1.4).share(0, 1.0, [(0, 500), (1, 500)])[0] == [1.0, NEVER]


def test_a_contributor_may_vanish_once_its_shards_have_landed() -> None:
    # Two symbols of 100 bytes. Client 0 keeps one shard, sends the others until 1.1 and 1.2, and dies at 1.25.
    fate = relayed(made(until(1.25, 50.0, 50.0)), 100, 2, 3)
    assert fate.fraction == 1.0
    # The server collects from 1.2 on. Relay 0 is silent for 20 s; then relay 2 sends its shard of 0 in one more.
    assert fate.waves == 2
    assert fate.known[0] == pytest.approx(22.2)
    # With words of some weight it dies before it has said that it shared. The server waits for it until 10 and then
    # asks the two others only, for three shards each.
    assert relayed(made(until(1.25, 50.0, 50.0)), 100, 2, 3, reply=10).known[0] == pytest.approx(13.1)
    # With one shard only, nobody else can help.
    assert relayed(made(until(1.05, 50.0, 50.0)), 100, 2, 3).known[0] == NEVER
    # Without coding it would not have had the time, and with it the others lose none.
    assert plain(made(until(1.25, 50.0, 50.0)), 200).fraction == pytest.approx(2 / 3)


def test_collecting_by_hand() -> None:
    # All there: sharing is over when the last says so, at 1.2. Each relay sends 2 shards of 100 bytes until 3.2.
    fate = relayed(made(until(50.0, 50.0, 50.0)), 100, 2, 3)
    assert fate.known == pytest.approx((3.2, 3.2, 3.2))
    assert fate.seconds == pytest.approx(3.2)
    assert fate.waves == 1
    # Three relays with one survivor too few: everybody is given up, nobody is asked again.
    gone = relayed(made(until(2.0, 2.0, 50.0)), 100, 2, 3)
    assert gone.fraction == 0.0
    assert gone.waves == 1


def test_a_relay_that_was_silent_is_not_asked_again_and_one_that_answered_is() -> None:
    def ask(unasked, needed, silent):
        asked.append((list(needed), set(silent)))
        return in_turn(unasked, needed, silent)

    asked: list[tuple[list[int], set[int]]] = []
    found = made(until(50.0, 2.0, 50.0, 50.0))
    relay(found, 100, 2, turning(4, 4), ask, patience=5.0)
    # Relay 1 held the first shards of 0 and 1; what is missing of them is asked of others.
    assert asked[0] == ([2, 2, 2, 2], set())
    assert asked[1] == ([1, 1, 0, 0], {1})
    assert asked[-1][0] == [0, 0, 0, 0]


def test_without_failures_everybody_contributes_in_every_scheme() -> None:
    found = World(OnOff(math.inf), Compute(2.0, 0.5), SLOW, FAST, 20.0, 1e6).situation(8, 1, model=100)
    for fate in (plain(found, 300), plain(found, 300, chunk=64), relayed(found, 30, 4), relayed(found, 300, 1, 2)):
        assert fate.fraction == 1.0
        assert fate.waves <= 1


def test_with_free_sharing_a_relay_contributes_if_it_is_alive_after_training_and_enough_survive() -> None:
    symbols, clients = 3, 6
    lives = OnOff(40.0, key=KEY)
    for server_round in range(1, 40):
        found = World(lives, Compute(2.0), SLOW, INSTANT, 2.0, 1e6).situation(clients, server_round)
        alive = [presence.here(2.0) for presence in found.presence]
        # Answers take no time and silence is noticed at once: nobody dies while the server collects.
        fate = relayed(replace(found, server=INSTANT), 0, symbols, patience=1e-9)
        expected = [here and sum(alive) >= symbols for here in alive]
        assert [math.isfinite(at) for at in fate.known] == expected


@pytest.mark.slow
def test_plain_upload_survives_with_the_probability_of_the_exponential() -> None:
    clients, rounds, mean = 50, 80, 10.0
    there = World(OnOff(mean, key=KEY), Compute(1.0), SLOW, FAST, 50.0, 50.0)
    found = [there.situation(clients, r) for r in range(rounds)]
    share = sum(plain(one, 300).fraction for one in found) / rounds
    expected = math.exp(-(1.0 + 3.0) / mean)
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / (clients * rounds))


def test_every_scheme_meets_the_same_failures() -> None:
    lives = OnOff(5.0, 3.0, KEY, horizon=60.0)
    assert lives(4, 2) == OnOff(5.0, 3.0, KEY, horizon=60.0)(4, 2)
    assert len({lives(r, c) for r in range(5) for c in range(5)}) == 25
    assert lives(4, 2).intervals[0][0] == 0.0
    # A longer horizon only adds stays.
    longer = OnOff(5.0, 3.0, KEY, horizon=2000.0)(4, 2).intervals
    assert longer[: len(lives(4, 2).intervals)] == lives(4, 2).intervals
    assert longer[-1][1] > 1500.0
    # Devices that never come back live as long as the first stay of those that do.
    assert OnOff(5.0, math.inf, KEY)(4, 2).intervals == (lives(4, 2).intervals[0],)


def test_stays_and_absences_have_the_means_that_were_asked_for() -> None:
    stays = [p for r in range(30) for p in [OnOff(4.0, 2.0, KEY, horizon=600.0)(r, 0)]]
    on = [end - begin for presence in stays for begin, end in presence.intervals]
    off = [b[0] - a[1] for presence in stays for a, b in pairwise(presence.intervals)]
    assert abs(sum(on) / len(on) - 4.0) < 4 * 4.0 / math.sqrt(len(on))
    assert abs(sum(off) / len(off) - 2.0) < 4 * 2.0 / math.sqrt(len(off))


def test_training_time_spreads_evenly_and_is_drawn_again_alike() -> None:
    compute = Compute(10.0, 0.3, KEY)
    times = [compute(r, c) for r in range(20) for c in range(20)]
    assert 7.0 <= min(times) < 7.5
    assert 12.5 < max(times) <= 13.0
    assert Compute(10.0, 0.3, KEY)(3, 4) == compute(3, 4)
    assert Compute(10.0)(1, 1) == 10.0


def test_a_trace_is_read_per_round() -> None:
    trace = Trace.parse("# client,from,until\n0,0,15\n0,18,40\n\n1,12,13\n", period=10.0)
    assert trace(1, 0) == Presence(((0.0, 15.0), (18.0, 40.0)))
    assert trace(2, 0) == Presence(((0.0, 5.0), (8.0, 30.0)))
    assert trace(2, 1) == Presence(((2.0, 3.0),))
    assert trace(1, 7) == trace(3, 1) == Presence(())
    assert not trace(1, 7).here(0.0)
    with pytest.raises(ConfigError, match="line 2 of the trace"):
        Trace.parse("0,0,15\n0;18;40", period=10.0)
    with pytest.raises(ConfigError, match="ascending"):
        Trace.parse("0,0,15\n0,14,40", period=10.0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: OnOff(1.0, 1.0), "horizon"),
        (lambda: Situation(until(1.0), [], SLOW, FAST, 1.0, 2.0), "1 clients"),
        (lambda: made(until(1.0), share_by=3.0, end=2.0), "out of order"),
        (lambda: made(until(1.0)).upload(0, 0.0, -1), "impossible"),
        (lambda: relayed(made(until(1.0)), 10, 0), "0 symbols"),
    ],
)
def test_what_cannot_be_is_refused(make, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.slow
@given(
    st.lists(st.floats(0.1, 60.0), min_size=3, max_size=8),
    st.integers(1, 3),
    st.integers(0, 400),
    st.floats(0.0, 30.0),
)
def test_who_lives_longer_or_sends_less_is_in_the_sum_no_less(
    ends: list[float], symbols: int, shard: int, more: float
) -> None:
    found = made(until(*ends))
    longer = made(until(*(end + more for end in ends)))
    for scheme in (lambda s, n: plain(s, n), lambda s, n: plain(s, n, chunk=32)):
        assert set(where(scheme(found, shard))) <= set(where(scheme(longer, shard)))
        assert set(where(scheme(found, 2 * shard))) <= set(where(scheme(found, shard)))
    # More copies lose nobody, nor does needing fewer shards; as long as that takes no time in which others die.
    instant = made(until(*ends), server=INSTANT, peer=INSTANT)
    copies = [where(relayed(instant, shard, 1, count, patience=1e-9)) for count in (2, 3)]
    assert set(copies[0]) <= set(copies[1])
    needs = [where(relayed(instant, shard, k, patience=1e-9)) for k in (min(symbols + 1, len(ends)), symbols)]
    assert set(needs[0]) <= set(needs[1])


def where(fate: Fate) -> list[int]:
    return [client for client, at in enumerate(fate.known) if math.isfinite(at)]
