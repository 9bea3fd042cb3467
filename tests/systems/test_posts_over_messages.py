"""What clients post to each other, keep, and are asked again: over Flower's messages as on the driver in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from beside_product import LAYOUT, TOY, assert_equal, faults, product, program, some
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg
from plain_grid import Blind
from test_posts import Relayed
from toy import client_app
from toys import Begin, Halving, Passing, SealedPassing

from fedcomp.clients.compressed import compression
from fedcomp.clients.memory import MEMORY
from fedcomp.codecs import ErrorFeedback, TopK
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.records import to_record
from fedcomp.flower.rounds import drive
from fedcomp.program import EVALUATE, HELLO, Answer, Ask, Me, Now, Round, System, Wait
from fedcomp.strategies.cohort import Cohort, CohortSettings
from fedcomp.strategies.links import Links
from fedcomp.strategies.server import Server
from fedcomp.systems import SYSTEMS
from fedcomp.systems.pair import Pair

NODES = 4
SPARSE = ErrorFeedback(TopK(0.05))


def server(system: System, links: Links | None = None) -> Server:
    """Return a server that asks everybody who is there."""
    return Server(system, Cohort(CohortSettings(fraction_evaluate=1.0), 0), links=links)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "kinds"),
    [
        pytest.param(Halving(nodes=NODES), ("train", "train"), id="halving"),
        pytest.param(SealedPassing(SPARSE), ("query", "train"), id="sealed"),
        pytest.param(Relayed(SPARSE), ("train", "query"), id="relayed"),
    ],
)
def test_it_is_the_driver_in_memory_bit_for_bit(system: System, kinds: tuple[str, str]) -> None:
    """With absent nodes, and messages lost or doubled."""
    SYSTEMS.setdefault(system.ID, type(system))
    drawn = faults(0.15)

    def fault(number: int, node: int, kind: str) -> str:
        return "" if kind == HELLO else drawn(number, node, kind)

    how = {"fault": fault, "present": some(NODES, 8)}
    new, driver = program(system, NODES, 8, **how, kinds=kinds)
    strategy = server(system)
    found = product(strategy, compression(), NODES, 8, **how)
    if isinstance(system, Relayed):
        # Each driver packs replies in its own way.
        new, found = ([replace(seen, frames={}) for seen in run] for run in (new, found))
    assert_equal(found, new)
    assert strategy.mailbox.waiting.keys() == driver.mailbox.waiting.keys()
    assert strategy.mailbox.asked.keys() == driver.mailbox.asked.keys()


class Run:
    """A server, with links or without, and its clients in this process; a crash loses the server, not them."""

    def __init__(
        self, system: System, fault: Callable[[Any], Any] | None = None, *, links: Links | None = None
    ) -> None:
        self.system = system
        self.grid = InProcessGrid(client_app([compression()]), NODES, seed=4, fault=fault)
        self.server = server(system, links)
        self.arrays = to_record(LAYOUT.unflatten(LAYOUT.flatten(TOY.start)))

    def step(self, number: int) -> None:
        self.grid.round = number
        found, _ = drive(self.server.round(number, self.arrays, ConfigRecord(), self.grid), self.grid, timeout=9)
        self.arrays = self.arrays if found is None else found

    def crash(self, number: int, exchanges: int) -> None:
        """End the server after so many exchanges of a round, and start it again from what it had saved before."""
        self.grid.round, saved = number, self.server.state_dict()
        opened = self.server.round(number, self.arrays, ConfigRecord(), self.grid)
        pushed = next(opened)
        for exchange in range(exchanges):
            replies = list(self.grid.send_and_receive(list(pushed), timeout=9))
            if exchange < exchanges - 1:
                pushed = opened.send(replies)
        opened.close()
        self.server = server(self.system)
        self.server.load_state_dict(saved)
        self.server.renumber()

    def memories(self) -> dict[int, dict[str, bytes]]:
        states = {p: self.grid.context(self.grid.node_id_of(p)).state.array_records for p in range(NODES)}
        return {p: {k: a.numpy().tobytes() for k, a in s[MEMORY].items()} for p, s in states.items() if MEMORY in s}

    def seen(self) -> tuple[bytes, dict[int, dict[str, bytes]]]:
        """Return the model and all memories."""
        return b"".join(a.numpy().tobytes() for a in self.arrays.values()), self.memories()


@pytest.mark.slow
@pytest.mark.parametrize("exchanges", [1, 2])
@pytest.mark.parametrize(
    "system", [Halving(nodes=NODES), Passing(SPARSE), SealedPassing(SPARSE), Relayed(SPARSE)], ids=lambda s: s.ID
)
def test_a_server_that_starts_again_makes_the_round_again(system: System, exchanges: int) -> None:
    """Nobody trains twice, and what is posted acts once: the run ends as one in which nothing happened."""
    SYSTEMS.setdefault(system.ID, type(system))
    one, other = Run(system), Run(system)
    for number in range(1, 6):
        if number == 3 and not (isinstance(system, Halving) and exchanges > 1):
            other.crash(number, exchanges)
        one.step(number), other.step(number)
        assert other.seen() == one.seen()
    assert one.server.reports[5].refused == {}


def test_keys_are_asked_for_once_and_not_of_apps_that_have_none() -> None:
    greeted: list[tuple[int, int]] = []

    def watch(delivery: Any) -> str | None:
        if delivery.message_type == HELLO:
            greeted.append((delivery.round, delivery.partition))
            return "silent" if (delivery.round, delivery.partition) == (1, 1) else None
        return None

    run = Run(SealedPassing(SPARSE), watch)
    for number in range(1, 4):
        run.step(number)
    # The one whose greeting was lost has said its key with its first answer.
    assert sorted(greeted) == [(1, node) for node in range(NODES)]
    assert all(len(peer.key) == 32 for peer in run.server.roster.peers.values())
    assert "heard" in run.server.state
    deaf = Run(SealedPassing(SPARSE))
    deaf.grid = InProcessGrid(client_app([]), NODES, seed=4, fault=watch)
    greeted.clear()
    strategy = Server(SealedPassing(SPARSE), FedAvg(fraction_evaluate=0.0))
    for number in range(1, 20):
        deaf.grid.round = number
        messages = list(strategy.inner.configure_train(number, deaf.arrays, ConfigRecord(), deaf.grid))
        drive(strategy._greet(number, messages), deaf.grid, timeout=9)
    assert {number for number, node in greeted if node != 1} == {1, 17}


def test_an_ask_that_is_repeated_with_a_lost_blob_is_one_of_its_own_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node loses its state, and with it the blob, while an ask of round 2 waits for its answer."""
    seen: list[tuple[int, int, bytes]] = []

    class Shared(Halving, id="shared-halving"):
        def round(self, now: Now) -> Round:
            yield [Ask(node, say=Begin(True), blobs={"rule": b"rule"}) for node in now.nodes]
            return None

        def client(self, memory: Any, ask: Ask, me: Me) -> tuple[Any, Answer]:
            me.update()
            seen.append((me.node, me.number, bytes(ask.blobs["rule"])))
            return {"mass": np.float64([me.number])}, Answer(me.node, bare=True)

    monkeypatch.setitem(SYSTEMS, "shared-halving", Shared)
    run = Run(
        Shared(nodes=NODES), lambda delivery: "silent" if (delivery.round, delivery.partition) == (2, 1) else None
    )
    run.step(1), run.step(2)
    run.grid.wipe(run.grid.node_id_of(1))
    run.step(3)
    assert run.server.reports[3].refused == {}
    assert [number for node, number, _ in seen if node == 1] == [1, 2]
    assert {rule for _, _, rule in seen} == {b"rule"}


HOSTILE = {
    "to nobody": lambda data: {"fedcomp.post.0/99/number": data},
    "no name": lambda data: {"fedcomp.post.0/1/": data},
    "a long name": lambda data: {"fedcomp.post.0/1/" + "x" * 201: data},
    "no number": lambda data: {"fedcomp.post.x/1/number": data},
    "no node": lambda data: {"fedcomp.post.0//number": data},
    "twice the same number": lambda data: {"fedcomp.post.0/1/a": data, "fedcomp.post.0/2/b": data},
    "from the second on": lambda data: {"fedcomp.post.1/1/a": data},
    "nothing of one": lambda data: {"fedcomp.post.": data},
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_post_refuses_its_sender_alone(how: str) -> None:
    class Lying(InProcessGrid):
        def send_and_receive(self, messages: Any, **options: Any) -> Any:
            replies = list(super().send_and_receive(messages, **options))
            for reply in replies:
                if reply.metadata.src_node_id != self.node_id_of(2):
                    continue
                for config in reply.content.config_records.values():
                    for key in [key for key in config if key.startswith("fedcomp.post.")]:
                        data = config.pop(key)
                        config.update(HOSTILE[how](data))
            return replies

    run = Run(Passing(SPARSE))
    run.grid = Lying(client_app([compression()]), NODES, seed=4)
    run.step(1)
    report = run.server.reports[1]
    assert report.refused.keys() == {run.grid.node_id_of(2)}
    assert run.server.state["heard"] == {"0": [13], "1": [10], "2": [11], "3": []}


@pytest.mark.parametrize("engine", [InProcessGrid, Blind], ids=["known", "by their word"])
def test_a_wait_ends_when_enough_have_answered(engine: type[InProcessGrid], monkeypatch: pytest.MonkeyPatch) -> None:
    """Late answers are not used, and their senders put back what they sent; in the first round, too, in which nodes say
    which partitions they hold."""

    class Hasty(Pair, id="hasty"):
        def round(self, now: Now) -> Round:
            answers = yield Wait([Ask(node) for node in now.nodes], 9.0, lambda found: len(found) >= 3)
            return now.mean_of(self.codec, answers)

    monkeypatch.setitem(SYSTEMS, "hasty", Hasty)
    run = Run(Hasty(SPARSE))
    slow = {"compute_seconds": lambda delivery: float(delivery.partition == 1)}
    run.grid = engine(client_app([compression()]), NODES, seed=4, **slow)
    for number in range(1, 4):
        run.step(number)
        assert run.server.reports[number].used == 3
        assert run.server.reports[number].lost == 1
    late = run.grid.node_id_of(1)
    assert {address for address, peer in run.server.roster.peers.items() if not peer.consumed} == {late}


@pytest.mark.parametrize("hooks", [False, True], ids=["loop", "hooks"])
def test_a_later_exchange_waits_as_long_as_the_program_says(hooks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Brief(Pair, id="brief"):
        def round(self, now: Now) -> Round:
            answers = yield [Ask(node) for node in now.nodes]
            yield Wait([Ask(node, "query") for node in now.nodes], 2.0)
            yield Wait([Ask(node, "query") for node in now.nodes], None, lambda found: len(found) >= 1)
            return now.mean_of(self.codec, answers)

        def client(self, memory: Any, ask: Ask, me: Me) -> tuple[Any, Answer]:
            return (memory, Answer(me.node)) if ask.kind == "query" else super().client(memory, ask, me)

    monkeypatch.setitem(SYSTEMS, "brief", Brief)
    run = Run(Brief(SPARSE))
    slow = {"compute_seconds": lambda delivery: 5.0 * (delivery.exchange == 1 and delivery.partition == 1)}
    run.grid = InProcessGrid(client_app([compression()]), NODES, seed=4, **slow)
    if hooks:
        run.server._timeout = 9.0
        sent = list(run.server.configure_train(1, run.arrays, ConfigRecord(), run.grid))
        run.server.aggregate_train(1, run.grid.send_and_receive(sent, timeout=9))
    else:
        run.step(1)
    assert run.grid.clock == 2.0
    assert run.server.reports[1].used == NODES


def test_evaluation_may_be_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The app evaluates on the model, once the half has read what came for it; nothing is remembered of it."""
    seen: dict[int, list[int]] = {}

    class Asking(Passing, id="asking"):
        def evaluation(self, now: Now) -> Round | None:
            first = yield [Ask(node, "query", model=False) for node in now.nodes]
            yield [Ask(answer.node, EVALUATE, frames={"n": bytes([len(first)])}) for answer in first]
            return None

        def client(self, memory: Any, ask: Ask, me: Me) -> tuple[Any, Answer]:
            if ask.kind == EVALUATE:
                seen.setdefault(me.node, []).append(ask.frames["n"][0])
                return {}, Answer(me.node)
            if ask.say is None and ask.kind == "query":
                return memory, Answer(me.node)
            return super().client(memory, ask, me)

    monkeypatch.setitem(SYSTEMS, "asking", Asking)
    run = Run(Asking(SPARSE))
    run.step(1)
    before = run.seen()
    opened = run.server.evaluate_round(1, run.arrays, ConfigRecord(), run.grid)
    metrics = drive(opened, run.grid, timeout=9)
    assert metrics is not None
    assert seen == {node: [NODES] for node in range(NODES)}
    assert run.seen() == before
    # By Flower's hooks.
    messages = run.server.configure_evaluate(2, run.arrays, ConfigRecord(), run.grid)
    replies = run.grid.send_and_receive(messages, timeout=9)
    again = run.server.aggregate_evaluate(2, replies)
    assert dict(again or {}) == dict(metrics)
    assert seen == {node: [NODES, NODES] for node in range(NODES)}


def test_what_is_kept_outlives_the_session() -> None:
    run = Run(Passing(SPARSE))
    run.step(1)
    run.server = server(run.system)
    run.step(1)
    assert run.server.state["rounds"] == {str(node): 2 for node in range(NODES)}
