"""Distributed noise over messages: the sum has the promised noise, is paid for first, and void below its number."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from coded_runs import Tap, tapped, word_of
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from toy import client_app, fedavg, model, stack

from fedcomp.clients.compressed import compression
from fedcomp.clients.private.mod import STAYS
from fedcomp.codecs import FixedPoint, RandomK, TopK, fixed_point_of
from fedcomp.errors import ConfigError, NoUsableReply
from fedcomp.flower import asks
from fedcomp.flower.checkpoint import capture_strategy, restore_strategy
from fedcomp.flower.faults import Delivery
from fedcomp.flower.payload import FRAME, POST
from fedcomp.flower.privacy import find_private
from fedcomp.flower.rounds import fit
from fedcomp.layout import NONE_DENSE, Layout
from fedcomp.local import Local
from fedcomp.privacy.bounded import BoundedFixedPoint
from fedcomp.privacy.sampling import Sampling
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.distributed_dp import DistributedDp, NoisyMean
from fedcomp.strategies.private.settings import ShareSettings
from fedcomp.systems.coded import sums
from fedcomp.systems.coded.relay import CodedRelay
from fedcomp.systems.pair import Pair
from fedcomp.systems.private.distributed import NoisySum, shared_only

NODES = 6
CLIP = 500.0
BOUNDED = BoundedFixedPoint(RandomK(1.0), clip=CLIP, levels=1000, scale=128, sigma=50.0, least=4)


LAYOUT = Layout.of({name: array.numpy() for name, array in model().items()}, NONE_DENSE)
SIZE = LAYOUT.size


def grid_of(**options: Any) -> Tap:
    return tapped(NODES, **options)


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], list[np.ndarray]]:
    """What clients rounded, before any noise, by round and partition; in a list, as messages may come twice."""
    found: dict[tuple[int, int], list[np.ndarray]] = {}
    given = NoisySum.integers

    def integers(self: NoisySum, integers: np.ndarray, plan: Any, say: Any, me: Any) -> Any:
        found.setdefault((me.number, me.node), []).append(np.array(integers))
        return given(self, integers, plan, say, me)

    monkeypatch.setattr(NoisySum, "integers", integers)
    return found


@pytest.fixture
def noised(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[np.ndarray]]:
    """What clients share, with the noise in it, by the plan's seed."""
    made: dict[int, list[np.ndarray]] = {}
    given = sums.contribution

    def contribution(plan: Any, integers: np.ndarray, *rest: Any) -> Any:
        made.setdefault(plan.seed, []).append(np.array(integers))
        return given(plan, integers, *rest)

    monkeypatch.setattr(sums, "contribution", contribution)
    return made


def included(strategy: DistributedDp, number: int = 1) -> list[int]:
    return strategy.reports[number].coded.partitions


def distributed(inner=None, **options) -> DistributedDp:
    given = {"clip": CLIP, "noise_multiplier": 1.0, "tolerated": 2, "population": NODES, "delta": 1e-3}
    around = fedavg(fraction_evaluate=0.0) if inner is None else inner
    given |= options
    shares = {field.name: given.pop(field.name) for field in dataclasses.fields(ShareSettings) if field.name in given}
    return DistributedDp(around, ShareSettings(**shares), **given)


def run(strategy: DistributedDp, grid: Tap, rounds: int = 1):
    return strategy.start(grid, model(), num_rounds=rounds, timeout=9)


def at(exchange: int, *partitions: int, fault: str = "silent") -> Any:
    """Return the plan in which these partitions fail in an exchange of each round: 1 shares, 2 reports, 3 adds."""
    exchanges: list[tuple[int, int]] = []

    def plan(delivery: Delivery) -> str | None:
        if delivery.message_type == "query.hello":
            return None
        if (delivery.round, delivery.exchange) not in exchanges:
            exchanges.append((delivery.round, delivery.exchange))
        of_round = [number for round_, number in exchanges if round_ == delivery.round]
        hit = of_round.index(delivery.exchange) == exchange - 1 and delivery.partition in partitions
        return fault if hit else None

    return plan


def in_steps(strategy: DistributedDp, arrays: ArrayRecord) -> np.ndarray:
    """Return n times the model, in steps: the sum that was decoded."""
    codec = fixed_point_of(strategy.codec)
    return stack(arrays) * NODES / codec.step


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"codec": RandomK(0.4)}], ids=str)
def test_without_noise_the_model_is_the_plain_sum_bit_for_bit(options, rounded) -> None:
    grid, strategy = grid_of(), distributed(noise_multiplier=0.0, **options)
    result = run(strategy, grid)
    codec = fixed_point_of(strategy.codec)
    total = sum(rounded[1, p][0] for p in range(NODES))
    expected = codec.place(total, float(NODES), LAYOUT, Key(0, "uplink", 1))
    in_order = np.concatenate([v.reshape(-1) for v in LAYOUT.unflatten(expected).values()])
    np.testing.assert_array_equal(stack(result.arrays), in_order)
    assert included(strategy) == list(range(NODES))


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["discrete_gaussian", "skellam"])
@pytest.mark.parametrize("gone", [(), (1, 4)])
def test_audit_B_the_decoded_sum_has_the_promised_noise_also_at_the_tolerated_losses(noise, gone, rounded) -> None:
    grid, strategy = grid_of(fault=at(1, *gone)), distributed(noise=noise)
    result = run(strategy, grid)
    left = [p for p in range(NODES) if p not in gone]
    assert included(strategy) == left
    plain = LAYOUT.unflatten(sum(rounded[1, p][0] for p in left).astype(np.float32))
    residual = in_steps(strategy, result.arrays) - np.concatenate([v.reshape(-1) for v in plain.values()])
    mechanism = find_private(strategy).mechanism(strategy.layout, 1)
    # Four shares make up the promised noise; six are half as many again.
    deviation = mechanism.grid_sigma * math.sqrt(len(left) / 4)
    z = (float(np.sum((residual / deviation) ** 2)) - SIZE) / math.sqrt(2 * SIZE)
    assert abs(z) < 4.9
    # Float32 holds the mean; the sum is whole up to that.
    assert float(np.abs(residual - np.rint(residual)).max()) < 0.01


def test_beyond_the_tolerated_losses_the_round_is_void_and_free() -> None:
    grid, strategy = grid_of(fault=at(1, 0, 1, 2)), distributed()
    with pytest.raises(NoUsableReply, match="learnt nothing"):
        run(strategy, grid, 2)
    assert strategy.reports[1].coded.included == []
    why = "3 of 6 clients answered, 4 are needed (symbols + threshold)"
    assert any(why in note for note in strategy.reports[1].notes)
    assert not grid.asked("AddUp")
    assert find_private(strategy).privacy.releases == 0


def test_fewer_connected_clients_than_a_sum_needs_end_the_run_before_anybody_is_asked() -> None:
    grid, strategy = grid_of(), distributed()
    for partition in (0, 1, 2):
        grid.inner.remove_node(partition)
    with pytest.raises(NoUsableReply, match="3 clients are connected, a sum needs 4 of the 6"):
        run(strategy, grid, 2)
    assert not grid.asked("ShareUp")


def test_the_event_is_recorded_before_any_sum_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, strategy = grid_of(), distributed()
    private = find_private(strategy)
    seen = []
    send = Tap.send_and_receive

    def watched(self, messages, **options):
        batch = list(messages)
        seen.append((word_of(batch[0]) if batch else "", private.privacy.releases))
        return send(self, batch, **options)

    monkeypatch.setattr(Tap, "send_and_receive", watched)
    run(strategy, grid)
    assert [releases for kind, releases in seen if kind == "AddUp"] == [1]
    assert [releases for kind, releases in seen if kind in ("ShareUp", "Report")] == [0, 0]
    (event,) = private.privacy.events
    assert event.noise_multiplier == 1.0
    assert sorted(private.privacy.participations) == sorted(grid.get_node_ids())


@pytest.mark.slow
def test_the_budget_is_asked_before_any_client_is() -> None:
    grid, strategy = grid_of(), distributed(budget=3.5, noise_multiplier=1.5)
    result = run(strategy, grid, 4)
    private = find_private(strategy)
    assert 0 < private.privacy.releases < 4
    assert private.privacy.epsilon() <= 3.5
    assert "allows no further round" in private.over(4)
    trained = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert len(trained) == NODES * private.privacy.releases
    assert stack(result.arrays).any()


@pytest.mark.slow
def test_a_message_that_comes_twice_is_answered_with_the_same_noise(noised) -> None:
    grid, strategy = grid_of(fault=at(1, 2, fault="duplicate")), distributed()
    run(strategy, grid, 2)
    for contributions in noised.values():
        assert len({c.tobytes() for c in contributions}) == NODES
    assert included(strategy) == list(range(NODES))
    one, other = noised.values()
    assert not {c.tobytes() for c in one} & {c.tobytes() for c in other}


@pytest.mark.parametrize("feedback", [True, False])
def test_a_round_that_a_restarted_server_makes_again_has_the_same_noise(feedback: bool, noised) -> None:
    """The update of before is shared again; with noise of its own each time, the mean of both would show it."""
    strategy, grid = distributed(feedback=feedback), grid_of()
    saved = capture_strategy(strategy)
    run(strategy, grid)
    again = distributed(feedback=feedback)
    restore_strategy(again, saved)
    again.renumber()
    # No relay answers twice, so this run has no sum.
    with pytest.raises(NoUsableReply, match="learnt nothing"):
        fit(again, grid, model(), 1, timeout=9)
    (contributions,) = noised.values()
    assert len(contributions) == 2 * NODES
    assert len({c.tobytes() for c in contributions}) == NODES


@pytest.mark.slow
@pytest.mark.parametrize("feedback", [False, True])
def test_replies_hold_shards_and_nothing_else(feedback: bool) -> None:
    grid, strategy = grid_of(), distributed(feedback=feedback)
    run(strategy, grid)
    replies = grid.answered("Tagged")
    assert len(replies) == NODES
    for reply in replies:
        assert not asks.data_in(reply.content, FRAME)
        assert not reply.content.metric_records
        head = asks.find_answer(reply.content)
        assert head.bare
        assert head.memory == -1.0
        assert len(asks.data_in(reply.content, POST)) == NODES - 1
    (asked, *_) = grid.asked("ShareUp")
    plan = sums.plan_of(asks.say_of(asked.content, asks.find_ask(asked.content), strategy.system).plan)
    assert (plan.extras, plan.max_weight, plan.least) == ((), 1, 4)


@pytest.mark.slow
def test_feedback_sends_later_what_the_clip_cut_and_never_the_noise(rounded) -> None:
    grid, strategy = grid_of(), distributed(feedback=True, noise_multiplier=3.0)
    run(strategy, grid, 2)
    codec = fixed_point_of(strategy.codec)
    for p in range(NODES):
        state = grid.inner.context(p).state.array_records
        done = state["toy.sum"]["sum"].numpy()
        sent = sum(rounded[number, p][0] * codec.step for number in (1, 2))
        memory = state["fedcomp.memory"]["memory"].numpy()
        total = np.concatenate([v.reshape(-1) for v in LAYOUT.unflatten((memory + sent).astype(np.float32)).values()])
        np.testing.assert_allclose(total, done, atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"extras": (10,)}, "counts beside the sum"),
        ({"max_weight": 2}, "weights"),
        ({"least": 2}, "made for 4"),
        ({"threshold": 0}, "no random pieces"),
    ],
)
def test_clients_refuse_what_would_show_more(change, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = NoisySum.plan
    monkeypatch.setattr(NoisySum, "plan", lambda self, *asked: replace(given(self, *asked), **change))
    system, said = NoisySum(codec=BOUNDED, threshold=1, contributors=NODES, min_contributors=4), []
    driver = Local(
        system, LAYOUT, np.zeros(SIZE, np.float32), lambda number, node, start: start + 1.0, lambda node: 1.0, NODES
    )
    assert driver.step(1) is None
    said = driver.refused[1]
    assert len(said) >= NODES
    # The driver in memory shows the words that over messages stay with the node.
    assert sum(why in reason for reason in said) == NODES


def test_a_bare_request_for_such_an_update_is_refused() -> None:
    from fedcomp.strategies.compressed import Compressed

    codec = BoundedFixedPoint(RandomK(1.0), clip=CLIP, levels=1000, scale=128, sigma=50.0)
    grid = grid_of()
    strategy = Compressed(fedavg(fraction_evaluate=0.0), codec, feedback=False)
    with pytest.raises(NoUsableReply, match="not sent outside one"):
        strategy.start(grid, model(), num_rounds=1, timeout=9)
    assert len(grid.received) == NODES
    assert all(m.has_error() and "not sent outside one" in m.error.reason for m in grid.received)


def test_only_a_noisy_sum_may_ask_for_what_gets_its_noise_on_the_way() -> None:
    """Wherever in a system the codec stands; a private half refuses what would show it without."""
    sum_of = NoisySum(codec=BOUNDED, threshold=1, contributors=NODES, min_contributors=4)
    assert not shared_only(sum_of.to_config())
    for system in (Pair(BOUNDED), CodedRelay(inner=Pair(BOUNDED), symbols=2)):
        assert shared_only(system.to_config())
    assert not any(map(shared_only, (Pair(RandomK(1.0)).to_config(), "no system", None)))


def test_the_statement_says_who_is_trusted_and_what_losses_do() -> None:
    grid, strategy = grid_of(), distributed(tolerated=2, insecure_deterministic=True)
    run(strategy, grid)
    statement = find_private(strategy).statement()
    assert statement.mechanism == "DistributedSum"
    assert not statement.secure
    assert "of 4 of 6 clients" in statement.dropouts
    assert "follows the protocol" in statement.trust
    assert "of 0 of 6 clients is taken to be known" in statement.trust
    assert "knows its own noise, faces 0.866 times" in statement.trust, "three shares of four"
    assert 1.0 < statement.epsilon < 10.0
    assert statement.delta == 1e-3
    assert statement.sensitivity == pytest.approx(CLIP, rel=0.02)


@pytest.mark.slow
def test_a_seed_repeats_a_run_and_says_so_the_default_does_not() -> None:
    runs = [stack(run(distributed(insecure_deterministic=flag), grid_of()).arrays) for flag in (True, True, False)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"sampling": Sampling("poisson", rate=0.5)}, "Poisson"),
        ({"adjacency": "add_remove"}, "adds no noise"),
        ({"tolerated": 6}, "nobody's is left"),
        ({"honest": 0.6, "tolerated": 3}, "nobody's is left"),
        ({"codec": RandomK(0.1, shared=False)}, "every client"),
    ],
)
def test_promises_that_cannot_be_kept_are_refused(options, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        distributed(**options)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"honest": 0.5, "tolerated": 1}, "threshold=3 keeps"),
        ({"tolerated": 3, "threshold": 3}, "too few to keep a sum"),
        ({"population": 0}, "population=N"),
        ({"noise_multiplier": 500.0}, "32767"),
    ],
)
def test_what_depends_on_model_and_population_is_refused_before_the_first_message(options, why: str) -> None:
    grid, strategy = grid_of(), distributed(**options)
    with pytest.raises(ConfigError, match=why):
        run(strategy, grid)
    assert not grid.asked("ShareUp")


def test_buffers_are_refused() -> None:
    strategy = distributed()
    with pytest.raises(ConfigError, match=r"buffer.*group or layer normalisation\)$"):
        strategy.start(grid_of(), model(counter=True), num_rounds=1, timeout=9)
    assert find_private(strategy).privacy.releases == 0


def test_the_private_half_alone_asks_nobody_for_an_update_the_server_could_read() -> None:
    shares = ShareSettings(clip=CLIP, tolerated=2)
    noisy = NoisyMean(fedavg(fraction_evaluate=0.0), shares, noise_multiplier=1.0, population=NODES, delta=1e-3)
    with pytest.raises(ConfigError, match="DistributedDp"):
        noisy.configure_train(1, model(), ConfigRecord(), grid_of())
    for codec in (FixedPoint(RandomK(1.0), clip=1.0), TopK(0.5)):
        with pytest.raises(ConfigError, match="single updates"):
            Compressed(noisy, codec)


def test_a9_clients_of_a_noisy_sum_tell_nothing_of_why_they_failed(caplog: pytest.LogCaptureFixture) -> None:
    def change(msg: Message, context: Context, call_next) -> Message:
        if context.node_config["partition-id"] == 3:
            raise ValueError("patient 4711 has a broken record")
        return call_next(msg, context)

    strategy = distributed()
    with caplog.at_level(logging.INFO, "flwr.fedcomp"):
        run(strategy, grid_of(client=client_app([compression(), change])))
    told = repr(strategy.state_dict()) + repr(strategy.reports)
    assert STAYS in told
    assert "4711" not in told
    assert "4711" in caplog.text
