"""What every private strategy keeps: sums over a public number, noise in every round, budget, cap and ledger."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM
from private_runs import Room, arrays_of, asked, federation, inner, play, server
from toy import model, put_sent_frame, stack

from fedcomp import wire
from fedcomp.clients.compressed import compression
from fedcomp.clients.private.mod import private
from fedcomp.codecs import Identity, TopK
from fedcomp.errors import ConfigError, NoUsableReply, StateError
from fedcomp.flower.privacy import PRIVATE, Private, find_private
from fedcomp.layout import Layout, SmallDense
from fedcomp.privacy.accounting import gaussian_epsilon
from fedcomp.privacy.errors import BudgetExceeded, PrivacyLedgerError
from fedcomp.privacy.sampling import Sampling
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg

BASIC = {"clip": 1.0, "noise_multiplier": 0.0, "population": 10, "delta": 1e-3}
SEEDED = {**BASIC, "noise_multiplier": 1.0, "insecure_deterministic": True}


def vectors(count: int, size: int = 4) -> dict[int, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(5))
    return {100 + i: rng.normal(size=size).astype(np.float32) for i in range(count)}


def test_arrival_order_changes_no_bit() -> None:
    given = vectors(50)
    forward = play(DpFedAvg(inner(), **{**SEEDED, "population": 50}), list(given.items()))
    backward = play(DpFedAvg(inner(), **{**SEEDED, "population": 50}), list(given.items())[::-1])
    np.testing.assert_array_equal(forward, backward)

    def naive(order):
        total = np.zeros(4, np.float32)
        for vector in order:
            total += vector / np.float32(max(1.0, float(np.linalg.norm(vector))))
        return total

    assert (naive(given.values()) != naive(list(given.values())[::-1])).any()


def test_the_divisor_is_the_public_number_and_not_that_of_the_replies() -> None:
    one = np.float32([1, 0, 0, 0])
    for came in (1, 3, 10):
        out = play(DpFedAvg(inner(), **BASIC), {i + 1: one for i in range(came)})
        np.testing.assert_allclose(out, one * came / 10)
    poisson = DpFedAvg(inner(), **{**BASIC, "sampling": Sampling("poisson", rate=0.5)})
    assert poisson.expected == 5.0
    assert DpFedAvg(inner(), **{**BASIC, "count": 4}).expected == 4.0


@pytest.mark.parametrize("sampling", [None, Sampling("poisson", rate=1e-9), Sampling("capped", cap=9)], ids=str)
def test_a_round_without_contributions_releases_noise_and_pays(sampling) -> None:
    strategy = DpFedAvg(inner(), **{**SEEDED, "sampling": sampling})
    residuals = []
    for r in range(1, 9):
        out = play(strategy, [], server_round=r, nodes=range(1, 11), size=64)
        residuals.append(out * strategy.expected)
    noise = np.concatenate(residuals)
    # Discrete Gaussian noise of standard deviation z C = 1 on 512 coordinates: chi-squared, 6 standard deviations.
    assert abs(np.sum(noise**2) - 512) < 6 * math.sqrt(2 * 512)
    assert len(strategy.privacy.events) == 8


def test_secure_noise_differs_from_round_to_round_and_heeds_no_global_seed() -> None:
    drawn = []
    for _ in range(2):
        np.random.seed(0)  # noqa: NPY002  # the point of the test
        strategy = DpFedAvg(inner(), **{**BASIC, "noise_multiplier": 1.0})
        drawn += [play(strategy, [], server_round=r, nodes=[1], size=64) for r in (1, 2)]
    for i, a in enumerate(drawn):
        for b in drawn[i + 1 :]:
            assert (a != b).any()
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.6
    seeded = [play(DpFedAvg(inner(), **SEEDED), [], nodes=[1], size=64) for _ in range(2)]
    np.testing.assert_array_equal(*seeded)
    assert "INSECURE" in DpFedAvg(inner(), **SEEDED).statement().prose()
    assert "INSECURE" not in strategy.statement().prose()


def test_a_round_that_is_made_again_has_other_noise_also_from_a_seed(tmp_path: Path) -> None:
    # Killed after the release, before the model was kept: the run begins again with the ledger's file alone.
    def released(value: float, path: Path) -> np.ndarray:
        strategy = DpFedAvg(inner(), **SEEDED)
        strategy.open_ledger(path)
        out = play(strategy, dict.fromkeys(range(3), np.full(4, value, np.float32)))
        strategy.privacy.close()
        return out

    first, again = (released(value, tmp_path / "ledger") for value in (0.25, 0.5))
    shift = released(0.5, tmp_path / "one") - released(0.25, tmp_path / "other")
    # With the same noise the difference of both releases is that of the updates, to the last bit but one.
    assert np.ptp(shift) < 1e-6
    assert np.ptp(again - first) > 1e-2


def test_the_event_is_written_before_noise_is_drawn(monkeypatch, tmp_path: Path) -> None:
    strategy = DpFedAvg(inner(), **{**BASIC, "noise_multiplier": 1.0})
    strategy.open_ledger(tmp_path / "privacy.jsonl")
    seen = []

    def draw(noise, sigma, count, entropy):
        seen.append(len((tmp_path / "privacy.jsonl").read_text().splitlines()))
        return np.zeros(count, np.int64)

    monkeypatch.setattr("fedcomp.privacy.mechanism.draw", draw)
    play(strategy, vectors(3))
    play(strategy, vectors(3), server_round=2)
    assert seen == [3, 4]  # head, header and one event, then one more
    strategy.privacy.close()
    with pytest.raises(PrivacyLedgerError):
        play(strategy, vectors(3), server_round=3)
    assert seen == [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("codec", [None, TopK(density=0.1)], ids=["dense", "topk"])
def test_over_budget_nobody_is_asked_and_it_is_said_once(caplog, codec) -> None:
    budget = 0.5 * sum(gaussian_epsilon(math.sqrt(rounds), 1e-3) for rounds in (2, 3))
    strategy = DpFedAvg(inner(), **{**SEEDED, "budget": budget})
    outer = strategy if codec is None else Compressed(strategy, codec)
    grid = federation([compression(), private()], 4)
    with caplog.at_level(logging.INFO, "flwr.fedcomp"):
        result = outer.start(grid, model(), num_rounds=5, timeout=9)
    assert 2 == len(strategy.privacy.events) == len(strategy.reports)
    assert strategy.privacy.epsilon() <= budget
    assert "budget" in strategy.over(3)
    assert [r for r in range(1, 6) if grid.ledger.total("wire", round=r)] == [1, 2]
    assert sum("allows no further round" in record.message for record in caplog.records) == 1
    assert result.arrays is not None


def test_a_release_that_the_ledger_refuses_draws_nothing(monkeypatch) -> None:
    strategy = DpFedAvg(inner(), **{**SEEDED, "budget": 3.5})
    monkeypatch.setattr(strategy, "over", lambda server_round: "")
    play(strategy, vectors(2))
    monkeypatch.setattr("fedcomp.privacy.mechanism.draw", lambda *a: pytest.fail("noise was drawn"))
    with pytest.raises(BudgetExceeded):
        play(strategy, vectors(2), server_round=2)


def test_a_client_beyond_its_cap_is_never_asked() -> None:
    strategy = DpFedAvg(inner(), **{**SEEDED, "sampling": Sampling("capped", cap=2), "count": 4})
    taken = dict.fromkeys(range(1, 11), 0)
    for r in range(1, 12):
        nodes = asked(strategy, range(1, 11), r)
        for node in nodes:
            taken[node] += 1
        play(strategy, {n: np.ones(4, np.float32) for n in nodes}, server_round=r, nodes=nodes or [1], size=4)
        if strategy.over(r + 1):
            break
    assert set(taken.values()) == {2}
    assert "as often as it may" in strategy.over(r + 1)
    assert asked(strategy, range(1, 11), r + 1) == []
    # The price is that of two rounds, however many were made.
    assert strategy.privacy.rounds == 5
    assert strategy.privacy.epsilon() == pytest.approx(gaussian_epsilon(math.sqrt(2.0), 1e-3), abs=1e-4)
    # All ten of the population have had their turns: whoever comes under another id is one of them.
    assert asked(strategy, range(3, 13), r + 2) == []


def test_a5_under_a_cap_no_more_node_ids_are_asked_than_there_are_clients(caplog) -> None:
    strategy = DpFedAvg(inner(), **{**SEEDED, "population": 4, "sampling": Sampling("capped", cap=2)})
    play(strategy, vectors(0), nodes=[1, 2, 3], size=4)
    # A client came back as 7, then as 8: one more id is possible, a fifth is not.
    assert asked(strategy, [1, 2, 7], 2) == [1, 2, 7]
    play(strategy, vectors(0), server_round=2, nodes=[1, 2, 7], size=4)
    with caplog.at_level(logging.INFO, "flwr.fedcomp"):
        assert asked(strategy, [1, 2, 3, 8], 3) == [3]
    assert [r.message for r in caplog.records if "node 8 is not asked" in r.message]
    assert set(strategy.privacy.participations) == {1, 2, 3, 7}


def test_a3_who_was_asked_took_part_whether_the_reply_came_or_not() -> None:
    strategy = DpFedAvg(inner(), **{**SEEDED, "sampling": Sampling("capped", cap=1)})
    play(strategy, {1: np.ones(4, np.float32)}, nodes=[1, 2])
    assert strategy.privacy.participations == {1: 1, 2: 1}
    assert asked(strategy, [1, 2, 3], 2) == [3]
    assert strategy.privacy.rounds == 1


def test_a_round_is_released_once_and_only_if_it_was_begun() -> None:
    strategy = DpFedAvg(inner(), **SEEDED)
    layout = Layout.of({"w": np.zeros(4, np.float32)})
    assert strategy.aggregate_updates(1, iter([(1, np.ones(4, np.float32))]), layout) == (None, None)
    play(strategy, {1: np.ones(4, np.float32)})
    assert strategy.aggregate_updates(1, iter([(1, np.ones(4, np.float32))]), layout) == (None, None)
    assert strategy.aggregate_train(1, []) == (None, None)
    assert len(strategy.privacy.events) == 1


def test_who_is_in_the_sum_twice_counts_once() -> None:
    strategy = DpFedAvg(inner(), **BASIC)
    one = np.float32([1, 0, 0, 0])
    out = play(strategy, [(1, one), (1, one), (2, one)], nodes=[1, 2])
    np.testing.assert_allclose(out, one * 0.2)
    assert "one contribution each" in strategy.reports[1].refused[1]


def test_poisson_takes_part_with_its_rate_and_claims_it() -> None:
    strategy = DpFedAvg(inner(), **{**SEEDED, "population": 100, "sampling": Sampling("poisson", rate=0.3)})
    sizes = [len(asked(strategy, range(1, 101), r)) for r in range(1, 41)]
    assert abs(np.mean(sizes) - 30) < 6 * math.sqrt(100 * 0.3 * 0.7 / 40)
    assert len(set(sizes)) > 3
    play(strategy, [], server_round=41, nodes=range(1, 101), size=4)
    assert strategy.privacy.events[0].rate == 0.3
    with pytest.raises(ConfigError, match="replace"):
        DpFedAvg(inner(), **{**SEEDED, "adjacency": "replace", "sampling": Sampling("poisson", rate=0.3)})


@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_few_nodes_do_not_make_flower_wait(nodes) -> None:
    # Flower's default is at least two of two nodes; a view of one would be waited on for ever.
    strategy = DpFedAvg(FedAvg(fraction_evaluate=0.0, min_available_nodes=1), **SEEDED)
    assert asked(strategy, range(1, nodes + 1)) == list(range(1, nodes + 1))
    assert (strategy.inner.min_train_nodes, strategy.inner.min_available_nodes) == (2, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: inner(),
        lambda: FedAvgM(server_momentum=0.9, server_learning_rate=0.5, fraction_evaluate=0.0, min_available_nodes=1),
        lambda: FedAdam(fraction_evaluate=0.0, min_available_nodes=1),
    ],
    ids=["fedavg", "momentum", "adam"],
)
def test_the_inner_strategy_makes_its_step_from_the_noisy_mean(make) -> None:
    plain, composed = DpFedAvg(inner(), **SEEDED), DpFedAvg(make(), **SEEDED)
    reference = make()
    for r in (1, 2):
        given = vectors(6)
        noisy = play(plain, given, server_round=r)
        out = play(composed, given, server_round=r)
        reference.min_train_nodes = 1
        content = RecordDict({"arrays": arrays_of(noisy), "metrics": MetricRecord({"num-examples": 1})})
        with server():
            [asking] = reference.configure_train(r, arrays_of(np.zeros(4)), ConfigRecord(), Room([1]))
            expected, _ = reference.aggregate_train(r, [Message(content, reply_to=asking)])
        np.testing.assert_allclose(out, expected["w"].numpy(), rtol=1e-6)


def test_clients_are_told_and_evaluation_asks_nobody() -> None:
    strategy = DpFedAvg(inner(), **SEEDED)
    config = ConfigRecord()
    with server():
        [message] = strategy.configure_train(1, arrays_of(np.zeros(4)), config, Room([1]))
    assert message.content["config"][PRIVATE] is True
    assert list(strategy.configure_evaluate(1, arrays_of(np.zeros(4)), config, Room([1]))) == []
    assert strategy.aggregate_evaluate(1, []) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"population": 1000}, "not below 1/1000"),
        ({"count": -2}, "count=-2"),
        ({"sampling": "poisson"}, "an object, such as Sampling"),
        ({"clip": 0.0}, "clip"),
    ],
)
def test_what_cannot_keep_the_promise_is_refused(change, said) -> None:
    with pytest.raises(ConfigError, match=said):
        DpFedAvg(inner(), **{**BASIC, **change})


def test_the_population_is_declared_before_the_first_round() -> None:
    strategy = DpFedAvg(inner(), **{**SEEDED, "population": 0})
    assert isinstance(strategy, Private)
    assert find_private(Compressed(strategy, TopK(density=0.5))) is strategy
    for call in (lambda: asked(strategy, [1]), strategy.statement, lambda: strategy.open_ledger(Path("never"))):
        with pytest.raises(ConfigError, match="population"):
            call()
    strategy.declare(10)
    strategy.declare(99)  # whoever runs the rounds says so each time; the first word counts
    assert strategy.population == 10
    assert asked(strategy, [1]) == [1]


def test_more_clients_than_the_population_are_not_asked_and_the_run_can_go_on(caplog) -> None:
    strategy = DpFedAvg(inner(), **SEEDED)
    with caplog.at_level(logging.INFO, "flwr.fedcomp"):
        assert play(strategy, vectors(11)) is None
        assert play(strategy, vectors(11), server_round=2) is None
    assert [r.message for r in caplog.records if "11 clients are online, and their number was given as 10" in r.message]
    assert strategy.privacy.releases == 0
    # Whoever was there twice, under a former id, is so for a while only.
    assert not strategy.over(3)
    assert play(strategy, vectors(10), server_round=3) is not None


@pytest.mark.parametrize("pair", [False, True])
def test_a_model_without_floats_is_refused_in_words(pair) -> None:
    strategy = DpFedAvg(inner(), **SEEDED)
    outer = Compressed(strategy, TopK(density=0.5)) if pair else strategy
    buffers = {"steps": np.arange(4), "mask": np.float32([0, -np.inf])}
    arrays = ArrayRecord({name: Array(a) for name, a in buffers.items()})
    with pytest.raises(ConfigError, match="no tensor of finite floats"), server():
        outer.configure_train(1, arrays, ConfigRecord(), Room(range(3)))


def test_a_mean_that_does_not_fit_the_model_is_said_and_paid_for(caplog) -> None:
    strategy = DpFedAvg(inner(), **{**BASIC, "clip": 1e38, "noise_multiplier": 1e6})
    with caplog.at_level(logging.INFO, "flwr.fedcomp"):
        assert play(strategy, vectors(2)) is None
    assert any("not finite" in r.message for r in caplog.records)
    assert strategy.privacy.releases == 1


@pytest.mark.parametrize("outside", [lambda s: s, lambda s: Compressed(s, TopK(density=1.0))], ids=["alone", "pair"])
def test_a_run_that_ended_as_nobody_online_had_turns_goes_on_with_who_has(outside) -> None:
    capped = {**SEEDED, "sampling": Sampling("capped", cap=1)}
    private_one = DpFedAvg(inner(), **capped)
    strategy = outside(private_one)
    play(private_one, vectors(2))
    assert asked(private_one, list(vectors(2)), 2) == []
    assert private_one.over(3)
    resumed = DpFedAvg(inner(), **capped)
    outside(resumed).load_state_dict(strategy.state_dict())
    assert not resumed.over(3)
    play(resumed, {7: np.ones(4, np.float32)}, server_round=3, nodes=[*vectors(2), 7])
    assert resumed.chosen == [7]
    assert asked(resumed, [*vectors(2), 7], 4) == []
    assert resumed.over(5)


def test_the_statement_names_what_was_done() -> None:
    strategy = DpFedAvg(inner(), **{**SEEDED, "sampling": Sampling("capped", cap=3), "insecure_deterministic": False})
    play(strategy, vectors(3))
    told = strategy.statement()
    assert (told.bound, told.sensitivity, told.sigma, told.noise_multiplier) == (1.0, 1.0, 1.0, 1.0)
    assert (told.rounds, told.participation_cap, told.population, told.adjacency) == (1, 3, 10, "zero_out")
    assert told.epsilon == strategy.privacy.epsilon() > 0
    assert any("logs" in line for line in told.not_covered)
    assert "clipped to L2 norm 1" in told.prose()
    replaced = DpFedAvg(inner(), **{**SEEDED, "adjacency": "replace"}).statement()
    assert (replaced.sensitivity, replaced.sigma) == (2.0, 2.0)
    assert DpFedAvg(inner(), **BASIC).statement().epsilon == 0.0  # nothing was released yet


def test_without_noise_the_statement_says_that_nothing_is_protected() -> None:
    strategy = DpFedAvg(inner(), **BASIC)
    play(strategy, vectors(3))
    assert strategy.privacy.epsilon() == math.inf
    assert strategy.statement().prose().startswith("NOT PRIVATE")


def test_a_checkpoint_of_other_settings_is_refused() -> None:
    state = DpFedAvg(inner(), **SEEDED).state_dict()
    for change in ({"clip": 2.0}, {"noise_multiplier": 2.0}, {"noise": "gaussian"}, {"count": 3}):
        with pytest.raises(StateError, match="same"):
            DpFedAvg(inner(), **{**SEEDED, **change}).load_state_dict(state)


# One client, whatever it sends, moves a private sum by its bound at most, and costs nobody else a contribution.

NODES = 4
CLIP = 1e5


def run(codec, change=None, *, fault=None, clip=CLIP, metered=True):
    """Return model, report and strategy after a round without noise in which ``change`` alters one reply."""
    strategy = DpFedAvg(inner(), clip=clip, noise_multiplier=0.0, population=NODES, delta=1e-3)
    # The bias travels dense: an update has both parts.
    outer = strategy if codec is None else Compressed(strategy, codec, policy=SmallDense())
    grid = federation([compression(), private()], NODES, change=change, fault=fault, metered=metered)
    result = outer.start(grid, model(), num_rounds=1, timeout=9)
    return stack(result.arrays), outer.reports[1], strategy


def silent(delivery):
    return "silent" if delivery.partition == 1 else None


def plain(weight, bias=None):
    """Answer with a dense model."""

    def change(content: RecordDict) -> RecordDict:
        arrays = {
            "weight": Array(np.asarray(weight)),
            "bias": Array(np.zeros(12, np.float32) if bias is None else bias),
        }
        return RecordDict({"arrays": ArrayRecord(arrays)})

    return change


def framed(*tensors: wire.Tensor):
    def change(content: RecordDict) -> None:
        put_sent_frame(content, wire.encode(list(tensors)))

    return change


def header(**fields):
    def change(content: RecordDict) -> None:
        for name, value in fields.items():
            content["fedcomp.node"][name.replace("_", "-")] = value

    return change


def weights(value) -> np.ndarray:
    return np.full((40, 30), value, np.float32)


REST = wire.dense(np.zeros(12, np.float32))

REFUSED = {
    "two models": lambda c: RecordDict({"arrays": model(), "more": model()}),
    "a frame of another size": framed(wire.sparse((1201,), np.array([0]), np.float32([1])), REST),
    "more coordinates than allowed": framed(wire.sparse((1200,), np.arange(900), np.ones(900, np.float32)), REST),
    "a value that is not finite": framed(wire.sparse((1200,), np.array([0]), np.float32([np.inf])), REST),
    "no record": header(record=""),
    "a memory that is no number": header(memory=float("nan")),
    "the partition of another": header(partition_id=0),
    "no partition": header(partition_id=-1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_bounded_is_left_out_and_costs_nobody_else(name) -> None:
    without, _, _ = run(TopK(density=0.5), fault=silent)
    out, report, strategy = run(TopK(density=0.5), REFUSED[name])
    np.testing.assert_array_equal(out, without)
    assert len(report.refused) == 1
    assert len(strategy.privacy.entries[0].participants) == NODES, "who was asked took part"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "change"),
    [
        (None, plain(weights(1e30))),
        (None, plain(weights(-3e38))),
        (Identity(), framed(wire.dense(np.full(1212, 3e38, np.float32)))),
        (TopK(density=0.5), framed(wire.sparse((1200,), np.array([3]), np.float32([3e38])), REST)),
        (TopK(density=0.5), plain(weights(3e38), np.full(12, -3e38, np.float32))),
    ],
    ids=["dense", "negative", "identity", "topk", "dense among frames"],
)
def test_huge_updates_are_clipped_by_the_server(codec, change) -> None:
    clip = 1e3
    without, _, _ = run(codec, fault=silent, clip=clip)
    out, report, _ = run(codec, change, clip=clip)
    assert not report.refused
    moved = np.linalg.norm(out - without)
    assert 0.98 * clip / NODES < moved <= clip / NODES * (1 + 1e-5)


INNOCENT = {
    "metrics and a huge weight": lambda c: RecordDict({**c, "metrics": MetricRecord({"num-examples": 10**15})}),
    "a weight that is no number": lambda c: RecordDict({**c, "metrics": MetricRecord({"num-examples": float("nan")})}),
    "two metric records": lambda c: RecordDict({**c, "a": MetricRecord({"x": 1}), "b": MetricRecord({"y": 2.0})}),
    "a record of its own name": header(record="evil"),
    "buffers it was not asked for": lambda c: RecordDict({**c, "fedcomp.exact": ConfigRecord({"fedcomp.fcw1": b"x"})}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INNOCENT)
def test_what_a_reply_says_beside_the_update_decides_nothing(name) -> None:
    # In a round without privacy most of these cost the sender or, by their weight, all others.
    honest, _, _ = run(TopK(density=0.5))
    out, report, _ = run(TopK(density=0.5), INNOCENT[name])
    np.testing.assert_array_equal(out, honest)
    assert report.refused == {}
    assert report.compressed == NODES


def test_one_client_cannot_evict_another_by_its_form() -> None:
    # Two clients, two forms: where the usual form is put to a vote nobody has a majority, and both are left out.
    strategy = DpFedAvg(inner(), clip=CLIP, noise_multiplier=0.0, population=NODES, delta=1e-3)
    pair = Compressed(strategy, TopK(density=0.5))
    change = header(record="first")
    pair.start(federation([compression(), private()], 2, change=change, culprit=0), model(), num_rounds=1, timeout=9)
    assert pair.reports[1].refused == {}
    open_pair = Compressed(inner(), TopK(density=0.5))
    with pytest.raises(NoUsableReply, match="equally frequent"):
        open_pair.start(federation([compression()], 2, change=change, culprit=0), model(), num_rounds=1, timeout=9)


def test_updates_that_did_nothing_are_contributions() -> None:
    out, report, strategy = run(None, plain(weights(0.0)))
    without, _, _ = run(None, fault=silent)
    np.testing.assert_array_equal(out, without)
    assert report.refused == {}
    assert len(strategy.privacy.entries[0].participants) == NODES


def test_noise_from_the_same_round_does_not_depend_on_what_came() -> None:
    # What is left of two noisy runs without the honest sum is the same noise: the draw has nothing to do with replies.
    def noise(change, fault=None):
        strategy = DpFedAvg(
            inner(), clip=10.0, noise_multiplier=1.0, population=NODES, delta=1e-3, insecure_deterministic=True
        )
        grid = federation([private()], NODES, change=change, fault=fault)
        noisy = stack(strategy.start(grid, model(), num_rounds=1, timeout=9).arrays)
        exact, _, _ = run(None, change, fault=fault, clip=10.0)
        return noisy - exact

    np.testing.assert_allclose(noise(plain(weights(1e9))), noise(None, lambda d: "silent"), atol=1e-5)
