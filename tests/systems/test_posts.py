"""What clients post to each other, keep, and are asked again: on the driver in memory, under its faults."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from registry import update
from test_contract import RestartError, altered
from toys import Halving, Passing, SealedPassing

from fedcomp import mailbox
from fedcomp.codecs import ErrorFeedback, TopK
from fedcomp.flower import store
from fedcomp.layout import Layout
from fedcomp.local import Local
from fedcomp.mailbox import MOST_WAITING, Mailbox, PostError
from fedcomp.program import EVALUATE, Answer, AnswerError, Ask, Given, Me, Now, Post, Round, Step, System, Wait
from fedcomp.rng import Key
from fedcomp.systems.pair import Pair

NODES = 5
LAYOUT = Layout.of({"weight": np.zeros((40, 30), np.float32)})
SPARSE = ErrorFeedback(TopK(0.05))


def local(system: System, **options: Any) -> Local:
    """Return a driver from a model of zeros, of clients with weight 1."""
    return Local(
        system,
        LAYOUT,
        np.zeros(LAYOUT.size, np.float32),
        lambda number, node, start: start + update(number, node, LAYOUT.size),
        lambda node: 1.0,
        NODES,
        **options,
    )


@dataclass
class Plan:
    """Draws faults; the server ends once in a round at most."""

    kinds: tuple[str, ...]
    rate: float = 0.3
    until: int = 1000
    ended: set[int] = field(default_factory=set)
    happened: set[str] = field(default_factory=set)

    def __call__(self, number: int, node: int, exchange: int) -> str:
        draw = Key(5, "posts", number, node, exchange).uniform(1)[0]
        which = int(draw / self.rate * len(self.kinds))
        if number > self.until or which >= len(self.kinds):
            return ""
        kind = self.kinds[which]
        if kind == "restart":
            if number in self.ended:
                return ""
            self.ended.add(number)
        self.happened.add(kind)
        if kind == "restart":
            raise RestartError
        return kind


def stepped(driver: Local, number: int, nodes: list[int] | None = None) -> Step | None:
    """Run a round; a server that ended makes it again."""
    try:
        return driver.step(number, nodes)
    except RestartError:
        driver.late = []
        return driver.step(number, nodes)


# Posts


def heard(driver: Local) -> dict[int, list[int]]:
    return {int(node): got for node, got in driver.state["heard"].items()}


def test_what_is_posted_comes_with_the_next_ask() -> None:
    """From whom it is, in the exchange after that in which it was posted."""
    driver = local(Passing(SPARSE))
    for number in (1, 2):
        driver.step(number)
        assert heard(driver) == {node: [10 * number + (node - 1) % NODES] for node in range(NODES)}


def test_mail_for_a_node_that_is_away_waits() -> None:
    """Also where its ask is lost; what it has is not sent to it again."""
    away = {"fault": lambda number, node, x: "silent" if x == 2 and (number, node) == (1, 2) else ""}
    driver = local(Passing(SPARSE), **away)
    driver.step(1)
    assert 2 not in heard(driver)
    assert driver.mailbox.waiting == {2: [Post(1, 2, "number", np.int64([11]).tobytes())]}
    driver.step(2, [0, 1, 3, 4])
    assert heard(driver)[3] == [21]
    driver.step(3)
    assert heard(driver)[2] == [11, 31]
    assert not driver.mailbox.waiting
    driver.step(4)
    assert heard(driver)[2] == [41]


def test_a_client_half_that_breaks_posts_nothing() -> None:
    driver = local(Passing(SPARSE), fault=lambda number, node, x: "crash" if (x, node) == (1, 2) else "")
    driver.step(1)
    assert heard(driver) == {0: [14], 1: [10], 2: [11], 3: [], 4: [13]}
    assert driver.kept.keys() == {0, 1, 3, 4}


@pytest.mark.parametrize("kind", ["twice", "lost", "late"])
def test_posts_count_once_or_not_at_all(kind: str) -> None:
    driver = local(Passing(SPARSE), fault=lambda number, node, x: kind if (x, node) == (1, 2) else "")
    driver.step(1)
    assert heard(driver)[3] == ([12] if kind == "twice" else [])


HOSTILE: dict[str, Callable[[Post], tuple[Post, ...]]] = {
    "nobody": lambda post: (post._replace(to=NODES),),
    "negative": lambda post: (post._replace(to=-1),),
    "nameless": lambda post: (post._replace(name=""),),
    "a long name": lambda post: (post._replace(name="x" * 201),),
    "one of several": lambda post: (post, post._replace(to=77)),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_post_refuses_its_sender_alone(how: str) -> None:
    class Liar(Local):
        def _receive(self, *args: Any, **options: Any) -> Any:
            reply = super()._receive(*args, **options)
            if reply is None or reply.answer.node != 2 or not reply.answer.post:
                return reply
            return reply._replace(answer=reply.answer._replace(post=HOSTILE[how](reply.answer.post[0])))

    driver = local(Passing(SPARSE))
    driver.__class__ = Liar
    driver.step(1)
    (reason,) = driver.refused[1]
    assert reason.startswith("2: PostError")
    assert heard(driver) == {0: [14], 1: [10], 2: [11], 3: [], 4: [13]}
    assert not driver.mailbox.waiting


def test_no_more_waits_for_a_client_than_a_node_may_hold() -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return MOST_WAITING

    box = Mailbox()
    box.require([Post(1, 2, "x", Long())], range(NODES))
    box.put([Post(1, 2, "x", Long())])
    with pytest.raises(PostError, match="bytes wait for node 2"):
        box.require([Post(3, 2, "x", b"1")], range(NODES))
    box.require([Post(3, 1, "x", b"1")], range(NODES))


def test_empty_posts_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "MOST_POSTS", 3)
    box, empty = Mailbox(), Post(1, 2, "x", b"")
    box.require([empty] * 3, range(NODES))
    box.put([empty])
    with pytest.raises(PostError, match="1 posts wait for node 2; 3 more are beyond 3"):
        box.require([empty] * 3, range(NODES))


def test_whoever_posts_is_who_it_is() -> None:
    class Forging(Passing):
        def client(self, memory: Any, ask: Ask, me: Me) -> Any:
            memory, answer = super().client(memory, ask, me)
            return memory, answer._replace(post=tuple(post._replace(source=4) for post in answer.post))

    driver = local(Forging(SPARSE), fault=lambda number, node, x: "silent" if x == 2 else "")
    driver.step(1)
    assert sorted(post.source for posts in driver.mailbox.waiting.values() for post in posts) == [*range(NODES)]


def test_boxes_open_for_whom_they_are_and_in_their_round_alone() -> None:
    driver, plain = local(SealedPassing(SPARSE)), local(Passing(SPARSE))
    for number in (1, 2):
        driver.step(number), plain.step(number)
        assert heard(driver) == heard(plain)
    assert driver.bytes_up == plain.bytes_up + 2 * NODES * 48
    # One of the last round is of no use.
    away = {"fault": lambda number, node, x: "silent" if (number, x, node) == (1, 2, 3) else ""}
    late, plain = local(SealedPassing(SPARSE), **away), local(Passing(SPARSE), **away)
    for driver in (late, plain):
        driver.step(1), driver.step(2)
    assert heard(plain)[3] == [12, 22]
    assert heard(late)[3] == [22]


# What nodes keep


def test_what_is_kept_outlives_memory_and_server() -> None:
    driver = local(Passing(SPARSE), fault=lambda number, node, x: "wiped" if (number, node) == (2, 1) else "")
    for number in (1, 2):
        driver.step(number)
    assert driver.state["rounds"] == {str(node): 2 for node in range(NODES)}
    other = local(Passing(SPARSE), kept=driver.kept)
    other.step(1)
    assert other.state["rounds"] == {str(node): 3 for node in range(NODES)}


# Asks that are repeated


def mass(driver: Local) -> float:
    """Return all mass there is: what nodes hold, and what is on its way to them."""
    posts = [post for waiting in driver.mailbox.waiting.values() for post in waiting]
    for node, stamped in driver.mailbox.asked.items():
        client = driver.clients.get(node)
        # A node that has answered what is repeated has its mail.
        if client is None or client.last is None or client.last.sequence != stamped.number:
            posts += stamped.ask.mail
        else:
            # What it posted has not arrived.
            posts += client.last.answer.post
    held = sum(float(client.memory["mass"]) for client in driver.clients.values() if "mass" in client.memory)
    return held + sum(float(np.frombuffer(post.data, np.float64)[0]) for post in posts)


ALL = float(1 << 40) * 15
REPEATED = ("silent", "lost", "late", "crash", "twice", "stale", "restart")


@pytest.mark.parametrize("kind", [*REPEATED, "all"])
def test_what_is_posted_acts_exactly_once(kind: str) -> None:
    plan = Plan(REPEATED if kind == "all" else (kind,), 0.5)
    driver = local(Halving(), fault=plan)
    plan.until = 20
    for number in range(1, 21):
        stepped(driver, number)
        if sum("mass" in client.memory for client in driver.clients.values()) == NODES:
            assert mass(driver) == ALL
    driver.step(21), driver.step(22)
    assert not driver.mailbox.asked
    assert mass(driver) == ALL
    assert plan.happened == set(plan.kinds)


def test_a_node_does_one_turn_for_each_ask() -> None:
    turns = dict.fromkeys(range(NODES), 0)
    usual = Mailbox.stamp

    def stamp(self: Mailbox, *args: Any, **options: Any) -> Any:
        stamped = usual(self, *args, **options)
        turns[stamped.ask.node] += stamped.times == 1
        return stamped

    plan = Plan(("silent", "lost", "late", "crash", "twice", "stale"), 0.5, until=10)
    driver = local(Halving(), fault=plan)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Mailbox, "stamp", stamp)
        for number in range(1, 13):
            driver.step(number)
    assert {node: int(client.memory["turns"]) for node, client in driver.clients.items()} == turns
    assert all(0 < count < 12 for count in turns.values())


def saved(driver: Local) -> bytes:
    """Return what a server saves."""
    server = {"state": driver.state, "sequence": driver.sequence, "mail": driver.mailbox.to_plain()}
    return store.dumps(server, "a server")


@pytest.mark.parametrize("system", [Halving(), Passing(SPARSE)], ids=["halving", "passing"])
def test_a_server_resumes_from_bytes_at_every_round(system: System) -> None:
    plan = Plan(("silent", "lost", "late", "twice"), 0.5)
    driver, copies = local(system, fault=plan), []
    for number in range(1, 9):
        copies.append((saved(driver), copy.deepcopy(driver.clients), copy.deepcopy(driver.kept), dict(driver.consumed)))
        copies[-1] += (driver.model.copy(), list(driver.late))
        driver.step(number)
    for number, (data, clients, kept, consumed, model, late) in enumerate(copies, 1):
        held = store.loads(data, "a server")
        again = local(system, fault=plan, clients=copy.deepcopy(clients), kept=kept, consumed=consumed, late=late)
        again.held = {node: set() for node in clients}
        again.state, again.sequence, again.model = held["state"], held["sequence"], model
        again.mailbox = Mailbox.of(held["mail"], system.SAYS)
        for later in range(number, 9):
            again.step(later)
        assert saved(again) == saved(driver)
        for node, client in driver.clients.items():
            assert {k: a.tobytes() for k, a in client.memory.items()} == {
                k: a.tobytes() for k, a in again.clients[node].memory.items()
            }


def test_damaged_mail_is_refused() -> None:
    driver = local(Halving(), fault=lambda number, node, x: "silent" if node == 2 else "")
    driver.step(1), driver.step(2)
    plain = driver.mailbox.to_plain()
    assert Mailbox.of(plain, Halving.SAYS) == driver.mailbox
    with pytest.raises(ValueError, match="no words"):
        Mailbox.of(plain, ())
    for wrong in ({}, {**plain, "waiting": [[1, 2]]}, {**plain, "asked": [{}]}):
        with pytest.raises(ValueError, match="mailbox"):
            Mailbox.of(wrong, Halving.SAYS)


def test_a_node_that_is_given_up_leaves_its_mail_to_others() -> None:
    driver = local(Halving(patience=3), fault=lambda number, node, x: "silent" if node == 2 and number > 2 else "")
    for number in range(1, 13):
        driver.step(number)
    lost = float(driver.clients[2].memory["mass"])
    for post in driver.mailbox.waiting.get(2, ()):
        lost += float(np.frombuffer(post.data, np.float64)[0])
    others = sum(float(client.memory["mass"]) for node, client in driver.clients.items() if node != 2)
    waiting = [post for node, posts in driver.mailbox.waiting.items() if node != 2 for post in posts]
    assert others + lost + sum(float(np.frombuffer(p.data, np.float64)[0]) for p in waiting) == ALL
    assert driver.state["out"].count(2) == 1
    assert 2 not in driver.mailbox.asked


# Not waiting for everybody


def test_who_answers_after_enough_is_refused_as_late_and_not_consumed() -> None:
    def round(self: Pair, now: Now) -> Round:
        answers = yield Wait([Ask(node) for node in now.nodes], 9.0, lambda found: len(found) >= 3)
        return now.mean_of(self.codec, answers)

    driver = local(altered(Pair(SPARSE), round=round))
    made = np.zeros(LAYOUT.size)
    for number in range(1, 5):
        before = driver.model.copy()
        assert driver.step(number).consumed == (0, 1, 2)
        assert [reason.partition(":")[0] for reason in driver.refused[number]] == ["3", "4"]
        made += 3.0 * (driver.model - before)
    owed = sum(SPARSE.residual(driver.settled(node)).astype(np.float64) for node in range(NODES))
    learnt = sum(update(t, n, LAYOUT.size).astype(np.float64) for t in range(1, 5) for n in range(NODES))
    np.testing.assert_allclose(made + owed, learnt, atol=1e-2)


# What comes another way


class Relayed(Pair, id="relayed"):
    """The pair, whose replies the next client has: who vanished after it sent is in the mean all the same."""

    def round(self, now: Now) -> Round:
        after = dict(zip(now.nodes, (*now.nodes[1:], *now.nodes[:1]), strict=True))
        yield [Ask(node, frames={"to": bytes([to])}) for node, to in after.items()]
        came = yield [Ask(node, "query", model=False) for node in now.nodes]
        found = []
        for answer in came:
            source = next(node for node, to in after.items() if to == answer.node)
            for data in answer.frames.values():
                try:
                    found.append(now.unpack(source, data))
                except AnswerError as why:
                    now.refuse(answer.node, str(why))
        return now.mean_of(self.codec, sorted(found, key=lambda answer: answer.node))

    def client(self, memory: Any, ask: Ask, me: Me) -> Any:
        if ask.kind == "query":
            return memory, Answer(me.node, frames={str(i): post.data for i, post in enumerate(ask.mail)})
        memory, answer = super().client(memory, ask, me)
        post = Post(me.node, ask.frames["to"][0], "reply", me.pack(answer))
        return memory, Answer(me.node, post=(post,), sent=answer.frames["values"], bare=True)


def test_a_reply_that_came_another_way_is_the_reply() -> None:
    """Whoever sent it is consumed."""
    driver, pair = local(Relayed(SPARSE)), local(Pair(SPARSE))
    for number in range(1, 5):
        step = driver.step(number)
        pair.step(number)
        assert step.consumed == tuple(range(NODES))
        assert driver.model.tobytes() == pair.model.tobytes()
    assert all(driver.acknowledged(node) for node in range(NODES))


def test_what_is_no_packed_reply_is_refused_alone() -> None:
    class Damaging(Relayed):
        def client(self, memory: Any, ask: Ask, me: Me) -> Any:
            memory, answer = super().client(memory, ask, me)
            if ask.kind == "query" and me.node == 2:
                answer = answer._replace(frames={name: data[:-1] for name, data in answer.frames.items()})
            return memory, answer

    driver = local(Damaging(SPARSE))
    assert driver.step(1).consumed == (0, 2, 3, 4)
    assert driver.refused[1] == ["2: not a packed answer: its length is another one"]


def test_a_mark_credits_what_came_in_a_sum() -> None:
    class Summed(Pair):
        def round(self, now: Now) -> Round:
            answers = yield [Ask(node) for node in now.nodes]
            for answer in answers:
                now.credit(answer.node, answer.frames["mark"])
            given = [Given(answer.node, 1.0, answer.frames["hidden"]) for answer in answers]
            return now.total(self.codec, given)

        def client(self, memory: Any, ask: Ask, me: Me) -> Any:
            memory, answer = super().client(memory, ask, me)
            return memory, Answer(
                me.node, frames={"hidden": answer.frames["values"], "mark": me.mark()}, sent=answer.frames["values"]
            )

    driver, pair = local(Summed(SPARSE)), local(Pair(SPARSE))
    for number in range(1, 4):
        driver.step(number), pair.step(number)
    assert driver.model.tobytes() == pair.model.tobytes()
    assert driver.consumed == pair.consumed


# Evaluation


def test_evaluation_may_be_a_conversation_that_changes_nothing() -> None:
    class Asking(Passing):
        def evaluation(self, now: Now) -> Round | None:
            first = yield [Ask(node, "query", model=False) for node in now.nodes]
            yield [Ask(answer.node, EVALUATE, frames={"n": bytes([len(first)])}) for answer in first]
            return None

        def client(self, memory: Any, ask: Ask, me: Me) -> Any:
            if ask.kind == EVALUATE:
                return {}, Answer(me.node, frames={"seen": ask.frames["n"], "model": me.start[:1].tobytes()})
            return memory, Answer(me.node)

    plain = local(Passing(SPARSE))
    plain.step(1)
    assert plain.evaluate(1) == []
    asking = local(Asking(SPARSE))
    asking.model, asking.clients, before = plain.model, plain.clients, copy.deepcopy(plain.clients)
    asking.held = {node: set() for node in asking.clients}
    answers = asking.evaluate(1)[NODES:]
    assert [answer.frames["seen"] for answer in answers] == [bytes([NODES])] * NODES
    assert {answer.frames["model"] for answer in answers} == {plain.model[:1].tobytes()}
    assert {n: c.memory["memory"].tobytes() for n, c in asking.clients.items()} == {
        n: c.memory["memory"].tobytes() for n, c in before.items()
    }
    assert asking.state == {}
