"""What a node does with a turn, and what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gossip_faults import Quadratic, vectors

from fedcomp.gossip import get_algorithm
from fedcomp.gossip.base import Algorithm, GossipMessage, Real, View
from fedcomp.gossip.topology import topology_of
from fedcomp.layout import Layout
from fedcomp.mailbox import Post
from fedcomp.program import Answer, Ask, Me
from fedcomp.rng import Key
from fedcomp.systems.gossip import RETURNED, Arrays, Done, Gossip, Learnt, NodeData, Turn, state_of

D = 12
LAYOUT = Layout.flat(D)
START = vectors(1, D)[0]
SGP = get_algorithm({"name": "sgp"})


class Here:
    """What a node brings: a start, and gradients of a quadratic."""

    def __init__(self, local: Quadratic | None = None) -> None:
        self.local, self.learns = local, local is not None

    def start(self, me: Me, dtype: str) -> tuple[Real, Arrays]:
        return START, {}

    def learn(self, me: Me, z: Real, own: Arrays, key: Key) -> Learnt:
        assert self.local is not None
        return Learnt(self.local.gradient(z, key), self.local.change())

    def evaluate(self, me: Me, z: Real, own: Arrays) -> dict[str, float]:
        return {"size": float(z.size)}


def turned(
    memory: Any, turn: Turn, *mail: Post, algorithm: Algorithm = SGP, local: Quadratic | None = None, node: int = 0
) -> tuple[Any, Answer]:
    """Let a node carry out a turn."""
    data: NodeData = Here(local)
    system = Gossip(algorithm, topology_of("ring", 4), "float64")
    me = Me(node, 1, 3, LAYOUT, lambda: np.zeros(D, np.float32), lambda *_: None, data)  # type: ignore[arg-type]
    return system.client(dict(memory), Ask(node, say=turn, mail=mail), me)


def turn(number: int, start: str = "", do: str = "step", **changes: Any) -> Turn:
    """Return a turn of node 0, which pushes to node 1."""
    given = {"out": (1,), "shares": (0.5,), "into": (1,), "weights": (0.5,), **changes}
    return Turn(do, number, number, start=start, **given)


def message_to_0(value: float = 1.0, source: int = 1) -> Post:
    """Return what a node would send: half of (value, 1)."""
    _, outbox = SGP.send(SGP.init(np.full(D, value), LAYOUT), None, View(source, 1, {0: 0.5}))
    return Post(source, 0, "0/0/9", outbox[0].payload)


def test_a_node_that_cannot_go_on_says_so_and_does_nothing() -> None:
    memory, _ = turned({}, turn(1, "common"))
    local = Quadratic(START)
    wrong = (({}, turn(2)), ({}, turn(1)), (memory, turn(1)), (memory, turn(3)), (memory, turn(2, epoch=1)))
    for held, asked in wrong:
        after, answer = turned(held, asked, local=local)
        assert answer.say == Done(fresh=True)
        assert after == held
        assert not answer.post
    assert not local.calls
    for held in ({}, memory):
        after, answer = turned(held, turn(5, "common"), local=local)
        assert not answer.say.fresh
        assert float(state_of(after)["w"]) == 0.5


def test_what_came_back_and_what_arrived_is_counted_before_sending() -> None:
    memory, first = turned({}, turn(1, "common"))
    own = Post(1, 0, RETURNED + "0/0/9", first.post[0].data)
    after, answer = turned(memory, turn(2), message_to_0(3.0), own)
    # 0.5 kept + 0.5 back + 0.5 of node 1, of which one half is pushed again.
    assert float(state_of(after)["w"]) == 0.75
    np.testing.assert_allclose(state_of(after)["x"], (START + 0.5 * 3.0) / 2.0, rtol=1e-14)
    assert [post[:3] for post in answer.post] == [(0, 1, "0/0/112")]


def test_messages_that_cannot_be_read_are_named_and_the_others_count() -> None:
    memory, _ = turned({}, turn(1, "common"))
    mail = message_to_0(), Post(2, 0, "0/0/9", b"nonsense"), message_to_0(source=3)
    after, answer = turned(memory, turn(2, do="finish"), *mail)
    assert float(state_of(after)["w"]) == 1.5
    assert answer.say.needs == (2,)
    assert "message" in answer.say.reasons[0]


def test_of_a_synchronous_iteration_nothing_counts_when_one_message_cannot_be_read() -> None:
    algorithm = get_algorithm({"name": "dpsgd"})
    memory, _ = turned({}, turn(1, "common"), algorithm=algorithm)
    after, answer = turned(memory, turn(2), Post(1, 0, "0/0/9", b"nonsense"), algorithm=algorithm)
    assert all(state_of(after)[name] is array for name, array in state_of(memory).items())
    assert answer.say.needs == (1,)
    assert not answer.post
    # A new epoch without messages: the iteration is dropped.
    after, answer = turned(after, turn(3, "reset", epoch=1), algorithm=algorithm)
    assert answer.post
    assert not answer.say.needs


def test_the_gradient_is_drawn_by_iteration_and_node_and_rests_in_the_closing_phase() -> None:
    class Keys(Quadratic):
        def gradient(self, z: Real, key: Key) -> Real:
            seen.append((key.seed, key.purpose, key.round, key.partition))
            return super().gradient(z, key)

    seen: list[tuple[int, str, int, int]] = []
    memory, _ = turned({}, turn(1, "common"), local=Keys(START))
    memory, _ = turned(memory, turn(2, dense=True), local=Keys(START))
    turned(memory, turn(3, do="finish"), local=Keys(START))
    assert seen == [(3, "gossip/gradient", 1, 0)]


@pytest.mark.parametrize("name", ["sgp", "dpsgd", "nids"])
def test_running_statistics_move_the_model_once_when_the_iteration_is_finished(name: str) -> None:
    """Of a synchronous algorithm the model is replaced on the way: a change applied earlier would be lost."""
    algorithm, drift, ends = get_algorithm({"name": name}), np.zeros(D), []
    drift[-1] = 0.25
    alone = {"out": (), "shares": (), "into": (), "weights": ()}
    for local in (Quadratic(START), Quadratic(START, drift=drift)):
        memory, _ = turned({}, turn(1, "common", **alone), algorithm=algorithm, local=local)
        same, answer = turned(memory, Turn("show", 1), algorithm=algorithm, local=local)
        assert same == memory
        ends.append(np.frombuffer(answer.frames["model"]))
        assert dict(zip(answer.say.figures, answer.say.measured, strict=True)) == {"size": D}
        memory, _ = turned(memory, turn(2, do="finish"), algorithm=algorithm, local=local)
        ends.append(algorithm.model(state_of(memory)))
    assert ends[0].tobytes() == ends[1].tobytes()
    assert ends[2].tobytes() == ends[3].tobytes()
    np.testing.assert_allclose(ends[2] - ends[0], drift, atol=1e-15)


def test_leaving_sends_everything_and_leaves_nothing() -> None:
    memory, _ = turned({}, turn(1, "common"))
    memory, answer = turned(memory, turn(2, do="leave"), message_to_0())
    assert float(state_of(memory)["w"]) == 0.0
    assert not state_of(memory)["x"].any()
    receiver = SGP.receive(SGP.join(START, LAYOUT), [GossipMessage(0, 1, answer.post[0].data)])
    assert float(receiver["w"]) == 1.0
    # What could not be delivered comes back, and leaves again.
    back = Post(1, 0, RETURNED + "0/0/9", answer.post[0].data)
    memory, answer = turned(memory, turn(3, do="leave", out=(2,)), back)
    receiver = SGP.receive(SGP.join(START, LAYOUT), [GossipMessage(0, 2, answer.post[0].data)])
    assert float(receiver["w"]) == 1.0
    assert [post.to for post in answer.post] == [2]
