"""Distributed noise over messages: the sum has the promised noise, is paid for first, and void below its number."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import ClassVar

import numpy as np
import pytest
from coded_sum_runs import LAYOUT, SIZE, Recorder, Tap, after_restart, included, json_of, train_replies
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedMedian
from message_examples import fields_of
from toy import client_app, fedavg, model, stack

from fedcomp.clients.coded import sums as coded_sum_client
from fedcomp.clients.coded.mod import coded
from fedcomp.clients.compressed import compression
from fedcomp.clients.private.mod import STAYS
from fedcomp.codecs import FixedPoint, RandomK, TopK, fixed_point_of
from fedcomp.coding.sumcode import SumPlan
from fedcomp.errors import ConfigError, NoUsableReply
from fedcomp.flower.checkpoint import capture_strategy, restore_strategy
from fedcomp.flower.coded import CODED, SUM
from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.payload import take_frame
from fedcomp.flower.privacy import find_private
from fedcomp.flower.protocol import UPDATE
from fedcomp.privacy.bounded import BoundedFixedPoint
from fedcomp.privacy.errors import BudgetExceeded
from fedcomp.privacy.sampling import Sampling
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.distributed_dp import DistributedDp, NoisyMean, NoisySum
from fedcomp.strategies.private.settings import ShareSettings

NODES = 6
CLIP = 500.0


def grid_of(*, recorder=None, fault=None, client=None, nodes: int = NODES) -> Tap:
    mods = [coded(), *([recorder] if recorder else []), compression()]
    return Tap(InProcessGrid(client or client_app(mods), nodes, seed=4, fault=fault), TrafficLedger())


def distributed(inner=None, **options) -> DistributedDp:
    given = {"clip": CLIP, "noise_multiplier": 1.0, "tolerated": 2, "population": NODES, "delta": 1e-3}
    around = fedavg(fraction_evaluate=0.0) if inner is None else inner
    given |= options
    shares = {field.name: given.pop(field.name) for field in dataclasses.fields(ShareSettings) if field.name in given}
    return DistributedDp(around, ShareSettings(**shares), **given)


def run(strategy: DistributedDp, grid: Tap, rounds: int = 1):
    return strategy.start(grid, model(), num_rounds=rounds, timeout=9)


def at(kind: str, *partitions: int, fault: str = "silent"):
    def plan(delivery: Delivery) -> str | None:
        return fault if delivery.message_type == kind and delivery.partition in partitions else None

    return plan


def plain_sum(strategy: DistributedDp, recorder: Recorder, partitions, round_: int = 1) -> np.ndarray:
    """Return the sum of what the clients rounded, in steps, before any noise."""
    codec = fixed_point_of(strategy.inner.codec)
    return sum(codec.grid.integers(codec.open(recorder.frames[round_, p][0], LAYOUT)) for p in partitions)


def in_steps(strategy: DistributedDp, arrays: ArrayRecord) -> np.ndarray:
    """Return n times the model, in steps: the sum that was decoded."""
    codec = fixed_point_of(strategy.inner.codec)
    return stack(arrays) * NODES / codec.step


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"codec": RandomK(0.4)}, {"transport": "peers"}], ids=str)
def test_without_noise_the_model_is_the_plain_sum_bit_for_bit(options) -> None:
    recorder = Recorder()
    grid, strategy = grid_of(recorder=recorder), distributed(noise_multiplier=0.0, **options)
    result = run(strategy, grid)
    codec = fixed_point_of(strategy.inner.codec)
    decoded = sum(codec.decode(recorder.frames[1, p][0], LAYOUT).astype(np.float64) for p in range(NODES))
    np.testing.assert_array_equal(stack(result.arrays), (decoded / NODES).astype(np.float32))
    assert included(strategy, grid) == list(range(NODES))


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["discrete_gaussian", "skellam"])
@pytest.mark.parametrize("gone", [(), (1, 4)])
def test_audit_B_the_decoded_sum_has_the_promised_noise_also_at_the_tolerated_losses(noise: str, gone) -> None:
    recorder = Recorder()
    grid = grid_of(recorder=recorder, fault=at("train", *gone))
    strategy = distributed(noise=noise)
    result = run(strategy, grid)
    left = [p for p in range(NODES) if p not in gone]
    assert included(strategy, grid) == left
    residual = in_steps(strategy, result.arrays) - plain_sum(strategy, recorder, left)
    mechanism = strategy.construction.noisy.mechanism(strategy.inner.layout, 1)
    # Four shares make up the promised noise; six are half as many again.
    deviation = mechanism.grid_sigma * math.sqrt(len(left) / 4)
    z = (float(np.sum((residual / deviation) ** 2)) - SIZE) / math.sqrt(2 * SIZE)
    assert abs(z) < 4.9
    # Float32 holds the mean; the sum is whole up to that.
    assert float(np.abs(residual - np.rint(residual)).max()) < 0.01


def test_a_lost_sum_is_made_up_for_by_other_relays() -> None:
    grid = grid_of(fault=at(SUM, 0, 3))
    strategy = distributed(noise_multiplier=0.0)
    run(strategy, grid)
    assert included(strategy, grid) == list(range(NODES))
    assert strategy.reports[1].coded.asked > 4


def test_beyond_the_tolerated_losses_the_round_is_void_and_free() -> None:
    grid, strategy = grid_of(fault=at("train", 0, 1, 2)), distributed()
    result = run(strategy, grid, 2)
    assert not stack(result.arrays).any()
    assert strategy.reports[1].coded.included == []
    assert any("at least 4 are needed" in note for note in strategy.reports[1].coded.notes)
    assert not [m for m in grid.sent if m.metadata.message_type == SUM]
    assert find_private(strategy).privacy.releases == 0


def test_the_event_is_recorded_before_any_sum_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, strategy = grid_of(), distributed()
    private = find_private(strategy)
    seen = []
    send = Tap.send_and_receive

    def watched(self, messages, **options):
        batch = list(messages)
        seen.append((batch[0].metadata.message_type if batch else "", private.privacy.releases))
        return send(self, batch, **options)

    monkeypatch.setattr(Tap, "send_and_receive", watched)
    run(strategy, grid)
    assert [releases for kind, releases in seen if kind == SUM] == [1]
    assert all(releases == 0 for kind, releases in seen if kind in ("train", "query.coded_put"))
    (event,) = private.privacy.events
    assert event.noise_multiplier == 1.0
    assert sorted(private.privacy.participations) == sorted(grid.get_node_ids())


def test_without_a_record_no_sum_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, strategy = grid_of(), distributed()

    def refuse(*args, **options) -> None:
        raise BudgetExceeded("over")

    monkeypatch.setattr(find_private(strategy).privacy, "record", refuse)
    with pytest.raises(BudgetExceeded):
        run(strategy, grid)
    assert not [m for m in grid.sent if m.metadata.message_type == SUM]


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
def test_a_message_that_comes_twice_is_answered_with_the_same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[int, list[np.ndarray]] = {}
    given = coded_sum_client.contribution

    def kept(plan: SumPlan, integers, *rest):
        made.setdefault(plan.seed, []).append(np.array(integers))
        return given(plan, integers, *rest)

    monkeypatch.setattr(coded_sum_client, "contribution", kept)
    grid, strategy = grid_of(fault=at("train", 2, fault="duplicate")), distributed()
    run(strategy, grid, 2)
    # Two deliveries of a round give seven contributions, of which two are equal.
    for contributions in made.values():
        assert len(contributions) == NODES + 1
        assert len({c.tobytes() for c in contributions}) == NODES
    assert included(strategy, grid) == list(range(NODES))
    one, other = made.values()
    assert not {c.tobytes() for c in one} & {c.tobytes() for c in other}


@pytest.mark.slow
@pytest.mark.parametrize("feedback", [True, False])
def test_an_update_asked_for_by_a_restarted_server_has_the_same_noise(
    feedback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update of before is sent again; with noise of its own each time, the mean of the answers would show it."""
    made: list[bytes] = []
    given = coded_sum_client.contribution

    def kept(plan: SumPlan, integers, *rest):
        made.append(np.array(integers).tobytes())
        return given(plan, integers, *rest)

    grid, strategy = grid_of(), distributed(feedback=feedback)
    run(strategy, grid)
    asked = next(m for m in grid.sent if m.metadata.message_type == "train")
    monkeypatch.setattr(coded_sum_client, "contribution", kept)
    for restarts in (0, 1, 2):
        content = after_restart(asked, restarts)
        content[CODED] = asked.content[CODED]
        (reply,) = grid.send_and_receive([Message(content, asked.metadata.dst_node_id, "train")], timeout=9)
        assert not reply.has_error()
    assert len(made) == 3
    assert len(set(made)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("feedback", [False, True])
def test_replies_hold_shards_and_nothing_else(feedback: bool) -> None:
    grid, strategy = grid_of(), distributed(feedback=feedback)
    run(strategy, grid)
    replies = train_replies(grid)
    assert len(replies) == NODES
    for reply in replies:
        assert take_frame(reply.content, UPDATE) is None
        assert not reply.content.metric_records
        fields = fields_of(reply.content)
        assert "memory" not in fields
    plan = next(json_of(fields_of(m.content)) for m in grid.sent if m.metadata.message_type == "train")
    assert plan["extras"] == []
    assert plan["max_weight"] == 1
    assert plan["least"] == 4


@pytest.mark.slow
def test_feedback_sends_later_what_the_clip_cut_and_never_the_noise() -> None:
    recorder = Recorder()
    grid = grid_of(recorder=recorder)
    strategy = distributed(feedback=True, noise_multiplier=3.0)
    run(strategy, grid, 2)
    codec = fixed_point_of(strategy.inner.codec)
    for p in range(NODES):
        state = grid.inner.context(p).state.array_records
        done = state["toy.sum"]["sum"].numpy()
        sent = sum(codec.decode(recorder.frames[r, p][0], LAYOUT).astype(float) for r in (1, 2))
        memory = next(a.numpy() for record in state.values() for k, a in record.items() if k.endswith("memory"))
        total = np.concatenate([v.reshape(-1) for v in LAYOUT.unflatten((memory + sent).astype(np.float32)).values()])
        np.testing.assert_allclose(total, done, atol=0.01)


class Asks(NoisySum):
    """A server that asks for more than a noisy sum."""

    change: ClassVar[dict] = {}

    def plan(self, clients: int, number: int) -> SumPlan:
        return SumPlan.from_config({**super().plan(clients, number).config(), **self.change})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"extras": [10]}, "counts beside the sum"),
        ({"max_weight": 2}, "weights"),
        ({"least": 2}, "made for 4"),
        ({"private": 0}, "are sealed"),
    ],
)
def test_clients_refuse_what_would_show_more(change, why: str) -> None:
    grid, strategy = grid_of(), distributed()
    strategy.construction = type("Asking", (Asks,), {"change": change})(strategy.construction.settings, strategy.inner)
    result = run(strategy, grid)
    assert not stack(result.arrays).any()
    assert all(why in reason for reason in strategy.reports[1].coded.excluded.values())
    assert find_private(strategy).privacy.releases == 0


def test_clients_refuse_to_share_in_the_clear() -> None:
    grid, strategy = grid_of(), distributed()
    strategy.construction.seal = False
    run(strategy, grid)
    assert all("are sealed" in reason for reason in strategy.reports[1].coded.excluded.values())
    assert len(strategy.reports[1].coded.excluded) == NODES


def test_a_bare_request_for_such_an_update_is_refused() -> None:
    from fedcomp.strategies.compressed import Compressed

    codec = BoundedFixedPoint(RandomK(1.0), clip=CLIP, levels=1000, scale=128, sigma=50.0)
    grid = grid_of()
    strategy = Compressed(fedavg(fraction_evaluate=0.0), codec, feedback=False)
    with pytest.raises(NoUsableReply, match="not sent without one"):
        strategy.start(grid, model(), num_rounds=1, timeout=9)
    assert len(grid.received) == NODES
    assert all(m.has_error() and "not sent without one" in m.error.reason for m in grid.received)


def test_the_statement_says_who_is_trusted_and_what_losses_do() -> None:
    grid, strategy = grid_of(), distributed(tolerated=2, insecure_deterministic=True)
    run(strategy, grid)
    statement = find_private(strategy).statement()
    assert statement.mechanism == "DistributedSum"
    assert not statement.secure
    assert "of 4 of 6 clients" in statement.dropouts
    assert "follows the protocol" in statement.trust
    assert "of 0 of 6 clients is taken to be known" in statement.trust
    assert "knows its own, faces 0.866 times" in statement.trust, "three shares of four"
    assert 1.0 < statement.epsilon < 10.0
    assert statement.delta == 1e-3
    assert statement.sensitivity == pytest.approx(CLIP, rel=0.02)


@pytest.mark.slow
def test_a_seed_repeats_a_run_and_says_so_the_default_does_not() -> None:
    runs = [stack(run(distributed(insecure_deterministic=flag), grid_of()).arrays) for flag in (True, True, False)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_the_ledger_is_part_of_the_state() -> None:
    strategy = distributed()
    run(strategy, grid_of())
    other = distributed()
    restore_strategy(other, capture_strategy(strategy))
    assert find_private(other).privacy.epsilon() == find_private(strategy).privacy.epsilon() > 0.0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"sampling": Sampling("poisson", rate=0.5)}, "Poisson"),
        ({"adjacency": "add_remove"}, "brings no noise"),
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
        ({"tolerated": 3, "threshold": 3}, "too few for a sum"),
        ({"population": 0}, "population=N"),
        ({"noise_multiplier": 500.0}, "32767"),
    ],
)
def test_what_depends_on_model_and_population_is_refused_before_the_first_message(options, why: str) -> None:
    grid, strategy = grid_of(), distributed(**options)
    with pytest.raises(ConfigError, match=why):
        run(strategy, grid)
    assert not [m for m in grid.sent if m.metadata.message_type != "query.coded_hello"]


def test_inner_strategies_that_look_at_single_updates_and_buffers_are_refused() -> None:
    with pytest.raises(ConfigError, match="FedMedian"):
        distributed(FedMedian(fraction_evaluate=0.0))
    strategy = distributed()
    with pytest.raises(ConfigError, match="buffer"):
        strategy.start(grid_of(), model(counter=True), num_rounds=1, timeout=9)
    assert find_private(strategy).privacy.releases == 0


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_a_loss() -> None:
    app = client_app([coded(), compression(), poison])
    grid, strategy = grid_of(client=app), distributed(noise_multiplier=0.0)
    run(strategy, grid)
    assert included(strategy, grid) == [0, 1, 2, 4, 5]
    assert np.isfinite(stack(run(distributed(), grid_of(client=app)).arrays)).all()


def poison(msg, context, call_next):
    """Spoil what partition 3 learnt."""
    reply = call_next(msg, context)
    if int(context.node_config["partition-id"]) == 3 and msg.metadata.message_type == "train":
        content = RecordDict(dict(reply.content.items()))
        for name, record in reply.content.array_records.items():
            arrays = {k: np.full_like(a.numpy(), np.nan) for k, a in record.items()}
            content[name] = ArrayRecord({k: type(record[k])(v) for k, v in arrays.items()})
        reply.content = content
    return reply


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
        run(strategy, grid_of(client=client_app([coded(), compression(), change])))
    told = repr(strategy.state_dict()) + repr(strategy.reports)
    assert STAYS in told
    assert "4711" not in told
    assert "4711" in caplog.text
