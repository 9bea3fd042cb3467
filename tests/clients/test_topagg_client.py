"""TopAgg's client half: the order of the mods, what leaves, and what is refused before the app sees it."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from topagg_runs import BALLOT, HALVES, NODES, inner, run, strategy
from toy import client_app, fedavg, model

from fedcomp.codecs import SignSGD, TopK
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import FRAME, NODE_RECORD
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg


def spied(only: bool = True):
    """Return an app with TopAgg's mods, what its training saw, and what left the node."""
    seen: list[str] = []
    left: list[RecordDict] = []

    def spy(msg: Message, context: Context, call_next) -> Message:
        seen.append(msg.metadata.message_type)
        return call_next(msg, context)

    inside = client_app([*(HALVES if only else HALVES[1:]), spy])

    def outside(msg: Message, context: Context) -> Message:
        reply = inside(msg, context)
        if not reply.has_error():
            left.append(reply.content)
        return reply

    return outside, seen, left


def test_a_private_vote_leaves_a_frame_and_a_header_and_nothing_else() -> None:
    app, seen, left = spied()
    chosen = strategy(noise_multiplier=1.0)
    run(chosen, client=app)
    assert seen == ["train"] * NODES
    assert chosen.reports[1].compressed == NODES
    for content in left:
        assert set(content) == {NODE_RECORD}
        assert set(content[NODE_RECORD]) == {FRAME + "values", "partition-id", "record", "sequence"}


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (lambda: inner(), "nothing is announced"),
        (lambda: Compressed(inner(), TopK(0.1)), "codec announced is 'feedback'"),
        (lambda: Compressed(inner(), SignSGD(0.1)), "codec announced is 'signsgd'"),
        (lambda: Compressed(inner(), BALLOT), "not private"),
        (lambda: strategy(pair=False, noise_multiplier=1.0), "nothing is announced"),
        (
            lambda: Compressed(
                DpFedAvg(inner(), clip=1.0, noise_multiplier=1.0, population=NODES, delta=1e-3),
                TopK(0.1),
                feedback=False,
            ),
            "codec announced is 'topk'",
        ),
    ],
    ids=["dense", "topk", "signsgd", "votes without privacy", "private and dense", "dp-fedavg"],
)
def test_whatever_is_no_private_vote_is_refused_before_the_app_sees_it(server, words: str) -> None:
    app, seen, left = spied()
    replies = messages(server(), app)
    assert all(reply.has_error() and words in reply.error.reason for reply in replies)
    assert not seen
    assert not left


def messages(chosen, app) -> list[Message]:
    """Return the replies to one configured round."""
    with InProcessGrid(app, NODES, seed=3) as grid:
        sent = list(chosen.configure_train(1, model(), ConfigRecord({"server-round": 1}), grid))
        return list(grid.send_and_receive(sent, timeout=9))


def test_evaluation_is_refused_and_queries_pass() -> None:
    app = client_app(HALVES)

    @app.query()
    def query(msg: Message, context: Context) -> Message:
        return Message(RecordDict({"answer": ConfigRecord({"partition-id": 0})}), reply_to=msg)

    content = RecordDict({"arrays": model(), "config": ConfigRecord({"server-round": 1, "private": True})})
    with InProcessGrid(app, 1, seed=3) as grid:
        (node,) = grid.get_node_ids()
        (refused,) = grid.send_and_receive([Message(content, node, "evaluate")], timeout=9)
        (answer,) = grid.send_and_receive([Message(content, node, "query")], timeout=9)
    assert "type 'evaluate'" in refused.error.reason
    assert "answer" in answer.content


def test_only_false_leaves_the_choice_to_the_server() -> None:
    app, seen, left = spied(only=False)
    with InProcessGrid(app, NODES, seed=3) as grid:
        fedavg(fraction_evaluate=0.0).start(grid, model(), num_rounds=1, timeout=9)
    assert seen == ["train"] * NODES
    assert all(any(isinstance(v, ArrayRecord) for v in content.values()) for content in left)


def test_a_refusal_costs_a_private_round_nothing_but_that_vote() -> None:
    """A client that votes for nobody else beside clients that take what they are asked: DP-FedAvg goes on without."""
    guarded, _, _ = spied()
    plain = client_app()

    def mixed(msg: Message, context: Context) -> Message:
        return (guarded if context.node_config["partition-id"] == 0 else plain)(msg, context)

    chosen = DpFedAvg(
        inner(), clip=1.0, noise_multiplier=1.0, population=NODES, delta=1e-3, insecure_deterministic=True
    )
    moved, *_ = run(chosen, client=mixed)
    assert len(chosen.reports[1].refused) == 1
    assert chosen.privacy.releases == 1
    assert np.isfinite(moved).all()
