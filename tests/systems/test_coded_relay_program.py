"""What the contract does not say of relayed updates: who may vanish when, who may lie about what, and what travels."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from registry import ENTRIES, Entry
from test_contract import Books, altered, local, run

from fedcomp.codecs import QSGD, ErrorFeedback, TopK
from fedcomp.coding.packet import Packet, PacketLimits
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.mailbox import Post
from fedcomp.program import Answer, Ask, Me
from fedcomp.systems.coded.relay import CodedRelay, Collect, Share, Shared
from fedcomp.systems.pair import Pair

CODEC = ErrorFeedback(TopK(0.05))


def relayed(
    nodes: int = 10, *, rounds: int = 2, fault: Any = lambda number, node, exchange: "", **options: Any
) -> Books:
    """Run relays of top-k; K = 7 unless another one is given."""
    given = {"inner": Pair(CODEC), "code": "mds", "symbols": 7, **options}
    return run(local(Entry(CodedRelay(**given)), nodes=nodes, fault=fault), rounds)


def plain(nodes: int = 10, rounds: int = 2, without: tuple[int, ...] = ()) -> bytes:
    """Return the pair's model, some clients being away."""
    away = lambda number, node, exchange: "silent" if node in without else ""  # noqa: E731
    return run(local(Entry(Pair(CODEC)), nodes=nodes, fault=away), rounds).model.tobytes()


def gone(*nodes: int, kind: str = "silent", since: int = 2) -> Any:
    """Return the plan in which nodes fail from an exchange of each round on."""
    return lambda number, node, exchange: kind if node in nodes and exchange >= since else ""


# Who vanishes.


@pytest.mark.parametrize("code", ["mds", "rlnc"])
def test_three_of_ten_that_vanish_after_sharing_are_in_the_model(code: str) -> None:
    """Every sixth of the 120 ways; with a random code 7 shards depend on each other in 0.4 % of all cases."""
    expected = plain(rounds=1)
    for dead in list(combinations(range(10), 3))[:: 6 if code == "mds" else 24]:
        driver = relayed(rounds=1, fault=gone(*dead), code=code, symbols=7 if code == "mds" else 6)
        assert driver.model.tobytes() == expected, dead
        assert not any(driver.refused.values())
        assert 2 <= driver.told["coded"]["waves"] <= 4


def test_relays_that_answer_when_they_are_asked_once_more_complete_a_source() -> None:
    fault = lambda number, node, exchange: "lost" if node < 4 and exchange == 2 else ""  # noqa: E731
    driver = relayed(fault=fault)
    assert driver.model.tobytes() == plain()
    assert driver.told["coded"]["recollects"] == 10
    assert relayed().told["coded"]["recollects"] == 0


def test_with_four_of_ten_gone_nothing_is_decoded_and_nobody_is_acknowledged() -> None:
    driver = relayed(fault=lambda number, node, exchange: "silent" if number == 2 and node < 4 and exchange > 1 else "")
    assert driver.model.tobytes() == plain(rounds=1)
    assert len(driver.told["coded"]["left_out"]) == 10
    assert all("independent shards" in reason for reason in driver.told["coded"]["left_out"].values())
    assert driver.refused[2] == []
    assert set(driver.consumed.values()) == {(1, 1)}
    driver.fault = gone()
    assert driver.step(3).consumed == tuple(range(10))


def test_who_vanishes_before_sharing_is_not_in_the_model() -> None:
    assert relayed(fault=gone(2, 5, since=1)).model.tobytes() == plain(without=(2, 5))


@pytest.mark.parametrize("options", [{"symbols": 7}, {"symbols": 2, "shards": 9}, {"symbols": 4, "loss": 0.3}])
def test_too_few_clients_skip_the_round_before_anybody_trains(options: dict[str, Any]) -> None:
    driver = local(Entry(CodedRelay(inner=Pair(CODEC), code="mds", **options)), nodes=4)
    notes: list[str] = []
    make = driver._now
    driver._now = lambda *args: replace(make(*args), note=notes.append)
    assert driver.step(1) is None
    assert not driver.passed
    (note,) = notes
    assert note == f"the round is skipped, the model is unchanged: {driver.told['too_few']}"
    assert "4 clients take part, the code needs " in note


def test_fewer_shards_than_clients_go_to_those_that_follow() -> None:
    driver = relayed(rounds=1, symbols=2, shards=3)
    to = {reply.answer.node: [post.to for post in reply.answer.post] for _, reply in driver.passed if reply.answer.post}
    assert to == {node: [(node + i) % 10 for i in (1, 2, 3)] for node in range(10)}
    assert driver.model.tobytes() == plain(rounds=1)


def test_private_shards_say_nothing_below_the_threshold_and_survive_what_is_left() -> None:
    """T = 2 of K + T = 5: equal updates give other packets each time."""
    options = {"symbols": 3, "threshold": 2, "fault": gone(0, 3, 4, 8, 9)}
    one, two = relayed(**options), relayed(**options)
    assert one.model.tobytes() == two.model.tobytes() == plain()
    said = [
        [reply.answer.say.hashes for _, reply in driver.passed if isinstance(reply.answer.say, Shared)]
        for driver in (one, two)
    ]
    assert all(a != b for a, b in zip(*said, strict=True))


# What travels.


def test_what_passes_the_server_is_sealed_and_small() -> None:
    """No post can be read as a packet; a packet has a K-th of the reply, and the server gets K of each."""
    driver = relayed(rounds=1)
    posts = [post for _, reply in driver.passed for post in reply.answer.post]
    assert len(posts) == 10 * 9
    for post in posts:
        # Two bytes of a sealed post may be a packet's first ones by chance, all of its header and its checksum not.
        with pytest.raises(FedcompError):
            Packet.from_bytes(post.data, PacketLimits())
    came = [frame for _, reply in driver.passed for frame in reply.answer.frames.values()]
    assert len(came) == 10 * 7
    assert {len(post.data) - len(came[0]) for post in posts} <= {44, 45, 46, 47, 48, 49, 50, 51, 52}
    payload = next(reply.answer.say.payload for _, reply in driver.passed if isinstance(reply.answer.say, Shared))
    assert sum(map(len, came)) < 10 * (payload + 7 * 128)
    for frame in came:
        assert Packet.from_bytes(frame, PacketLimits()).symbols == 7


def test_the_list_of_peers_is_sent_once_while_they_stay() -> None:
    driver = local(Entry(CodedRelay(inner=Pair(CODEC), code="mds", symbols=2)))
    driver.step(1)
    first = driver.bytes_down
    driver.step(2)
    # Beside the posts, which are as long in each round.
    assert first - (driver.bytes_down - first) == 5 * 5 * 36


def test_shards_of_a_former_round_are_forgotten() -> None:
    driver = relayed(5, rounds=3, symbols=2)
    for client in driver.clients.values():
        kept = [name for name in client.memory if name.startswith("shard/")]
        assert len(kept) == 5
        assert all(name.startswith("shard/3/") for name in kept)


def test_a_post_of_another_name_is_no_shard() -> None:
    system = CodedRelay(inner=Pair(CODEC), code="mds", symbols=2)

    def client(self: CodedRelay, memory: Any, ask: Ask, me: Me) -> Any:
        memory, answer = system.client(memory, ask, me)
        return memory, answer._replace(post=(*answer.post, Post(me.node, (me.node + 1) % 5, "other", b"x")))

    driver = local(Entry(system))
    driver.system = altered(system, client=client)
    assert run(driver, 2).model.tobytes() == run(local(Entry(Pair(CODEC))), 2).model.tobytes()


# Who lies.


def lying(change: Any, liar: int = 2) -> Books:
    """Return relays, K = 3 of 6, of which one's answers are changed."""
    system = CodedRelay(inner=Pair(CODEC), code="mds", symbols=3)

    def client(self: CodedRelay, memory: Any, ask: Ask, me: Me) -> Any:
        memory, answer = system.client(memory, ask, me)
        return memory, change(ask, answer) if me.node == liar else answer

    driver = local(Entry(system), nodes=6)
    driver.system = altered(system, client=client)
    return run(driver, 2)


def forged(frame: bytes) -> bytes:
    """Return a packet of the same payload with other symbols: anybody who holds one can make it."""
    packet = Packet.from_bytes(frame, PacketLimits())
    data = bytearray(packet.to_bytes())
    data[-1] ^= 1
    return bytes(data)


RELAYS = {
    "noise": lambda ask, answer: answer._replace(frames={k: bytes(range(200)) for k in answer.frames}),
    "a flipped symbol": lambda ask, answer: answer._replace(frames={k: forged(v) for k, v in answer.frames.items()}),
    "one source's for all": lambda ask, answer: answer._replace(
        frames=dict.fromkeys(answer.frames, next(iter(answer.frames.values()), b""))
    ),
    "a flood": lambda ask, answer: answer._replace(
        frames={**answer.frames, **{f"more.{i}": b"x" * 100 for i in range(300)}} if answer.frames else {}
    ),
    "nothing": lambda ask, answer: answer._replace(frames={}),
}


@pytest.mark.parametrize("how", RELAYS)
def test_one_lying_relay_changes_nothing(how: str) -> None:
    assert lying(RELAYS[how]).model.tobytes() == plain(6)


CONTRIBUTORS = {
    "another digest": lambda say: Shared(say.payload, say.digest[::-1], say.hashes),
    "another length": lambda say: Shared(say.payload + 1, say.digest, say.hashes),
    "too long": lambda say: Shared(1 << 60, say.digest, say.hashes),
    "other hashes": lambda say: Shared(say.payload, say.digest, say.hashes[::-1]),
    "too few hashes": lambda say: Shared(say.payload, say.digest, say.hashes[8:]),
}


@pytest.mark.parametrize("how", CONTRIBUTORS)
def test_one_lying_contributor_costs_its_own_update_alone(how: str) -> None:
    change = CONTRIBUTORS[how]

    def said(ask: Ask, answer: Answer) -> Answer:
        return answer._replace(say=change(answer.say)) if isinstance(answer.say, Shared) else answer

    driver = lying(said)
    assert all(reason.startswith("2: ") for number in (1, 2) for reason in driver.refused[number])
    assert driver.model.tobytes() == plain(6, without=(2,))


def test_a_key_that_is_none_costs_one_relay() -> None:
    driver = local(Entry(CodedRelay(inner=Pair(CODEC), code="mds", symbols=3)), nodes=6)
    make = driver._now

    def substituted(*args: Any) -> Any:
        now = make(*args)
        # A point of small order, with which nobody agrees on a secret.
        now.keys[4] = bytes(32)
        return now

    driver._now = substituted
    assert run(driver, 2).model.tobytes() == plain(6)


def test_an_ask_of_another_list_plan_or_kind_is_refused_before_the_app_trains() -> None:
    trained: list[int] = []
    system = CodedRelay(inner=Pair(CODEC), code="mds", symbols=2)
    driver = local(Entry(system))
    driver.step(1)
    ask, me = next((ask, ask.node) for ask, _ in driver.passed if isinstance(ask.say, Share))
    learn = lambda whole, collect: trained.append(me)  # noqa: E731
    asked = Me(me, 2, 0, driver.layout, lambda: driver.model, learn, run=b"x", identity=driver.identity(me))
    said = ask.say
    for wrong in (
        ask._replace(blobs={}),
        ask._replace(blobs={"peers": ask.blobs["peers"][36:]}),
        ask._replace(blobs={"peers": ask.blobs["peers"] * 2}),
        ask._replace(kind="query"),
        ask._replace(say=Share("mds", 100, 200, 100, 0, 1)),
        ask._replace(say=Share("rlnc", said.symbols, said.shards, 1, 0, said.longest)),
        ask._replace(say=Shared(1, bytes(8), b"")),
    ):
        with pytest.raises((ConfigError, ValueError)):
            system.client({}, wrong, asked)
    assert not trained


def test_a_reply_longer_than_the_round_accepts_is_never_sent() -> None:
    system = CodedRelay(inner=Pair(QSGD(levels=127)), code="mds", symbols=2)
    driver = local(Entry(system))

    def client(self: CodedRelay, memory: Any, ask: Ask, me: Me) -> Any:
        if isinstance(ask.say, Share):
            ask = ask._replace(say=Share("mds", 2, 5, 0, 0, 100))
        return system.client(memory, ask, me)

    driver.system = altered(system, client=client)
    assert driver.step(1) is None
    assert all("more than the 100 this round accepts" in reason for reason in driver.refused[1])


# What is refused at once.


def test_what_can_never_work_is_refused_at_once() -> None:
    inner = Pair(CODEC)
    for options, reason in (
        ({"symbols": 7, "shards": 6}, "fewer than the 7"),
        ({"threshold": 1}, "needs code='mds'"),
        ({"inner": ENTRIES["power-sgd-two"].system}, "several exchanges"),
    ):
        with pytest.raises(ConfigError, match=reason):
            CodedRelay(**{"inner": inner, **options})


def test_a_shard_opens_for_its_relay_its_round_and_its_run_alone() -> None:
    driver = relayed(5, rounds=1, symbols=2)
    memory = driver.clients[1].memory
    name = "shard/1/0"
    for run_name, number, node in ((b"local", 1, 1), (b"other", 1, 1), (b"local", 2, 1), (b"local", 1, 2)):
        me = Me(node, number, 0, driver.layout, lambda: driver.model, lambda whole, collect: None, run=run_name)
        me = Me(**{**vars(me), "identity": driver.identity(node)})
        held = {name.replace("/1/", f"/{number}/"): memory[name]}
        _, answer = driver.system.client(held, Ask(node, "query", Collect((0,))), me)
        assert len(answer.frames) == (run_name == b"local" and number == 1 and node == 1)
