"""TopAgg as a strategy: what the model becomes, what the promise rests on, and hostile voters."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from private_runs import forged
from topagg_runs import BALLOT, HALVES, LR, NODES, SIZE, app, ballots, inner, learnt, run, shifted, strategy
from toy import by_partition, client_app, fedavg, model, put_sent_frame

from fedcomp import wire
from fedcomp.clients.compressed import compression
from fedcomp.codecs import SignSGD, TopK
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import FRAME, NODE_RECORD
from fedcomp.flower.privacy import find_private
from fedcomp.layout import Layout
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.mechanism import PrivateSum
from fedcomp.privacy.votes import TopkSign, topk_stochastic_sign
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.private.topagg import TopAgg

FULL = TopkSign(k=SIZE, stochastic=False)


def equal_weights(msg: Message, context: Context, call_next) -> Message:
    reply = call_next(msg, context)
    reply.content["metrics"]["num-examples"] = 1
    return reply


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [5, 6])
def test_1_11_c_noiseless_whole_and_unthresholded_it_is_majority_vote_signsgd(nodes: int) -> None:
    """k = d, plain signs, beta = 0, no noise: bit for bit what SignSGD in the drop-in pair learns, ties included."""
    step = 0.1
    ours, *_ = run(
        strategy(FULL, mode="threshold", server_lr=step, population=nodes),
        nodes=nodes,
        rounds=3,
        client=client_app([*HALVES, shifted]),
    )
    majority = Compressed(inner(), SignSGD(step), policy=lambda *_: None)
    theirs, *_ = run(majority, nodes=nodes, rounds=3, client=client_app([compression(), equal_weights, shifted]))
    assert ours.tobytes() == theirs.tobytes()
    plain = sum(np.sign(sum(np.sign(learnt(r, p) + 0.5) for p in range(nodes))) for r in (1, 2, 3))
    np.testing.assert_allclose(ours, step * plain, rtol=1e-6, atol=1e-7)
    assert (plain == 0).any() or nodes % 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mean", "threshold"])
def test_the_model_moves_by_what_the_votes_say(mode: str) -> None:
    """From the definition: sums of the clients' votes, over the expected number or through the threshold."""
    beta = 0.125 if mode == "threshold" else 0.0
    moved, result, _ = run(strategy(mode=mode, beta=beta), rounds=2)
    expected = np.zeros(SIZE, np.float32)
    for server_round in (1, 2):
        total = ballots(server_round).sum(axis=0)
        passed = np.sign(total) * (np.abs(total) > beta * NODES) if mode == "threshold" else total / NODES
        expected += np.float32(LR) * passed.astype(np.float32)
    np.testing.assert_array_equal(moved, expected)
    assert expected.any()
    # Nobody's loss, weight or number of examples is there to be aggregated.
    assert not any(len(record) for record in result.train_metrics_clientapp.values())


def test_the_threshold_counts_the_clients_expected_not_those_that_came() -> None:
    """Half the clients are gone: 2 of 4 votes pass a quarter of those that came, not a quarter of all."""
    gone = range(4, NODES)
    moved, *_ = run(strategy(mode="threshold", beta=0.25), fault=lambda d: "silent" if d.partition in gone else None)
    total = ballots(1, range(4)).sum(axis=0)
    by_expected = np.sign(total) * (np.abs(total) > 2)
    by_arrived = np.sign(total) * (np.abs(total) > 1)
    np.testing.assert_array_equal(moved, LR * by_expected)
    assert (by_expected != by_arrived).any()


@pytest.mark.slow
@pytest.mark.parametrize("pair", [True, False], ids=["in the pair", "alone"])
def test_a_client_without_the_mods_has_the_vote_it_would_have_cast(pair: bool) -> None:
    """The server casts it, with the same draws: the same bits of model, whoever packs the votes."""
    modded, _, packed = run(strategy(noise_multiplier=1.0), rounds=2)
    plain, with_mods = client_app(), app()
    some = {1, 4} if pair else set(range(NODES))
    mixed = by_partition(lambda partition: plain if partition in some else with_mods)
    chosen = strategy(noise_multiplier=1.0, pair=pair)
    voted, _, dense = run(chosen, rounds=2, client=mixed)
    assert voted.tobytes() == modded.tobytes()
    assert [report.plain for report in chosen.reports.values()] == [len(some)] * 2
    assert dense.ledger.summary()["payload_up"] > 2 * packed.ledger.summary()["payload_up"]


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", ["zero_out", "replace"])
def test_noise_has_the_scale_that_is_accounted_for(adjacency: str) -> None:
    """Residuals of three rounds: variance (z sqrt(k))^2, or four times that for exchanged clients, within 5 sigma."""
    chosen = strategy(noise_multiplier=3.0, adjacency=adjacency, server_lr=1.0)
    moved, *_ = run(chosen, rounds=3)
    votes = sum(ballots(r).sum(axis=0) for r in (1, 2, 3))
    residual = moved.astype(np.float64) * NODES - votes
    sigma = 3.0 * math.sqrt(BALLOT.k) * (2.0 if adjacency == "replace" else 1.0)
    assert chosen.inner.mechanism(Layout.flat(SIZE), 1).sigma == pytest.approx(sigma)
    assert residual.var() / (3 * sigma**2) == pytest.approx(1.0, abs=5 * math.sqrt(2 / SIZE))
    assert abs(residual.mean()) < 5 * math.sqrt(3 / SIZE) * sigma
    events = chosen.inner.privacy.events
    assert [event.noise_multiplier for event in events] == [3.0] * 3
    assert {event.releases for event in events} == {1}


def test_layers_vote_as_the_policy_says() -> None:
    """Per-layer k: the total bounds the norm, and each tensor has its own share, small ones that would go dense too."""
    ballot = TopkSign(k=57, scope="layer")
    chosen = strategy(ballot, policy=lambda name, *_: 0.04 if name == "weight" else 0.75)
    moved, *_ = run(chosen)
    layout = chosen.layout
    shares = [ballot.count(s) for s in ballot.stretches(layout)]
    assert sum(shares) == 57 == chosen.inner.mechanism(layout, 1).k
    assert shares == [48, 9]
    votes = np.zeros(SIZE)
    for p in range(NODES):
        parts = (slice(0, 1200), slice(1200, SIZE))
        for layer, (part, share) in enumerate(zip(parts, shares, strict=True)):
            key = Key(7, "uplink", 1, p, layer)
            votes[part] += topk_stochastic_sign(learnt(1, p)[part], share, uniforms=key)
    np.testing.assert_array_equal(moved, LR * votes / NODES)


@pytest.mark.slow
def test_the_budget_ends_the_run_before_it_is_crossed_and_the_statement_says_votes() -> None:
    chosen = strategy(noise_multiplier=20.0, budget=0.5)
    run(chosen, rounds=40)
    private = find_private(chosen)
    assert private is chosen.inner
    made = len(chosen.reports)
    assert 0 < made < 40
    assert private.privacy.epsilon() <= 0.5
    assert "budget" in private.over(made + 1)
    statement = private.statement()
    assert statement.bound == pytest.approx(math.sqrt(BALLOT.k))
    assert statement.epsilon == private.privacy.epsilon()
    for words in ("votes of TopkSign(k=50)", "INSECURE", "client"):
        assert words in statement.prose()


@pytest.mark.slow
def test_the_state_of_another_ballot_is_refused() -> None:
    settings = {"noise_multiplier": 1.0, "mode": "threshold", "beta": 0.1}
    state = strategy(**settings).state_dict()
    strategy(**settings).load_state_dict(state)
    for ballot, changed in ((TopkSign(k=51), {}), (BALLOT, {"beta": 0.2}), (BALLOT, {"server_lr": 0.5})):
        with pytest.raises(StateError):
            strategy(ballot, **settings | changed).load_state_dict(state)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: TopAgg(inner(), TopK(0.1), server_lr=1.0, noise_multiplier=1.0), "TopkSign"),
        (lambda: TopAgg(inner(), BALLOT, server_lr=0.0, noise_multiplier=1.0), "server_lr"),
        (lambda: strategy(mode="median"), "mode"),
        (lambda: strategy(mode="threshold", beta=1.5), "beta"),
        (lambda: Compressed(DpFedAvg(inner(), clip=1.0, noise_multiplier=1.0), BALLOT), "votes"),
    ],
)
def test_what_cannot_be_a_private_vote_is_refused(build, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build()


def test_a_codec_with_more_votes_than_the_ballot_is_refused_reply_by_reply() -> None:
    """The promise stands on the ballot of the mechanism, whatever codec was announced."""
    loose = Compressed(strategy(pair=False), TopkSign(k=51))
    moved, *_ = run(loose)
    assert len(loose.reports[1].refused) == NODES
    assert "at most 50" in next(iter(loose.reports[1].refused.values()))
    assert not moved.any()


def test_a_plain_weighted_mean_learns_the_mean_vote() -> None:
    """Outside of privacy: the votes' mean is the update, and the server's learning rate gives it a length."""
    app_equal = client_app([compression(), equal_weights])
    moved, *_ = run(Compressed(inner(), TopkSign(k=40), seed=7), client=app_equal)
    np.testing.assert_allclose(moved, ballots(1, k=40).mean(axis=0), atol=1e-6)


def test_a_zero_update_abstains_and_a_broken_one_is_an_absent_vote() -> None:
    """Zeros cast no vote; NaN makes the client answer with an error, and the others' sum is untouched."""

    def spoilt(value: float):
        def mod(msg: Message, context: Context, call_next) -> Message:
            before = {k: v.numpy().copy() for k, v in msg.content["arrays"].items()}
            reply = call_next(msg, context)
            if context.node_config["partition-id"] == 2:
                filled = {k: Array(v * np.float32(value) + v if np.isnan(value) else v) for k, v in before.items()}
                reply.content["arrays"] = ArrayRecord(filled)
            return reply

        return mod

    others = ballots(1, [p for p in range(NODES) if p != 2]).sum(axis=0)
    for value, refused in ((0.0, 0), (math.nan, 1)):
        chosen = strategy()
        moved, *_ = run(chosen, client=client_app([*HALVES, spoilt(value)]))
        np.testing.assert_array_equal(moved * NODES, LR * others)
        assert len(chosen.reports[1].refused) == refused


CULPRIT = 3
K = BALLOT.k
SETTINGS = {"noise_multiplier": 2.0, "server_lr": 1.0}
Evil = Callable[[RecordDict], RecordDict | None]


def forger(evil: Evil) -> Callable[[Message, Context], Message]:
    """Return the app with one client whose reply ``evil`` changes."""
    return forged(app(), evil, CULPRIT)


def frame(*tensors: wire.Tensor) -> Evil:
    def evil(content: RecordDict) -> None:
        put_sent_frame(content, wire.encode(list(tensors)))

    return evil


def signs(count: int) -> wire.UnitSign:
    return wire.UnitSign(np.zeros(count, np.bool_))


def listed(values: wire.Values, size: int = SIZE, indices: np.ndarray | None = None) -> wire.Tensor:
    return wire.sparse((size,), np.arange(values.k) if indices is None else indices, values)


def overflowing(content: RecordDict) -> RecordDict:
    """Reply as a client without the mods, with doubles that the model's floats cannot hold."""
    tensors = {"weight": np.zeros((40, 30)), "bias": np.full(12, 1e300)}
    return RecordDict({"arrays": ArrayRecord({name: Array(values) for name, values in tensors.items()})})


BAD: dict[str, Evil] = {
    "k + 1 votes": frame(listed(signs(K + 1))),
    "values of 2": frame(listed(wire.Raw(np.full(K, 2, np.float32)))),
    "a dense rest beside the votes": frame(listed(signs(K)), wire.dense(np.ones(12, np.float32))),
    "a dense model that overflows": overflowing,
}
"""What no frame of votes is: tests/privacy/test_topagg_votes.py."""


@pytest.fixture(scope="module")
def without() -> tuple[np.ndarray, list]:
    """The model of a round whose culprit never answers, and what it costs."""
    chosen = strategy(**SETTINGS)
    moved, *_ = run(chosen, fault=lambda d: "silent" if d.partition == CULPRIT else None)
    return moved, chosen.inner.privacy.events


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_1_11_h_a_forged_vote_costs_nobody_but_its_sender(name: str, without: tuple[np.ndarray, list]) -> None:
    """Refused and reported; event, noise and the sum of the others are bit for bit those of its absence."""
    chosen = strategy(**SETTINGS)
    moved, *_ = run(chosen, client=forger(BAD[name]))
    report, ledger = chosen.reports[1], chosen.inner.privacy
    assert len(report.refused) == 1
    assert report.compressed == NODES - 1
    assert moved.tobytes() == without[0].tobytes()
    assert ledger.events == without[1]
    assert [event.noise_multiplier for event in ledger.events] == [2.0]
    assert len(ledger.participations) == NODES, "who was asked took part"


def test_no_vector_that_is_no_vote_passes_the_strategy() -> None:
    """The mechanism's own door, without any codec before it: floats that look like votes, and those that do not."""
    private = strategy(pair=False, noise_multiplier=1.0)
    layout = Layout.flat(SIZE)
    votes = np.zeros(SIZE, np.float32)
    votes[:K] = np.sign(learnt(1, 0)[:K] + 0.5)
    total = PrivateSum(private.mechanism(layout, 1), (SIZE,))
    total.add(1, private.contribution(votes, layout, 1))
    for at, value in ((0, 2.0), (0, 0.5), (0, np.nan), (0, np.inf), (0, -128.0), (0, 256.0), (0, 1e9), (K, 1.0)):
        forged = votes.copy()
        forged[at] = value
        with pytest.raises(Unbounded):
            total.add(2, private.contribution(forged, layout, 1))
    with pytest.raises(Unbounded, match="already"):
        total.add(1, private.contribution(votes, layout, 1))
    with pytest.raises(Unbounded):
        total.add(3, private.contribution(votes[:-1], layout, 1))
    assert total.participants == [1]


# TopAgg's client half: the order of the mods, what leaves, and what is refused before the app sees it.


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
        (lambda: inner(), "no codec is announced"),
        (lambda: Compressed(inner(), TopK(0.1)), "codec announced is 'feedback'"),
        (lambda: Compressed(inner(), SignSGD(0.1)), "codec announced is 'signsgd'"),
        (lambda: Compressed(inner(), BALLOT), "not private"),
        (lambda: strategy(pair=False, noise_multiplier=1.0), "no codec is announced"),
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
    mixed = by_partition(lambda partition: plain if partition else guarded)
    chosen = DpFedAvg(
        inner(), clip=1.0, noise_multiplier=1.0, population=NODES, delta=1e-3, insecure_deterministic=True
    )
    moved, *_ = run(chosen, client=mixed)
    assert len(chosen.reports[1].refused) == 1
    assert chosen.privacy.releases == 1
    assert np.isfinite(moved).all()
