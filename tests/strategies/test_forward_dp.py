"""Forward gradients with noise in rounds: nothing but noisy scalars comes up, is booked, and is replayed to the bit."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from test_forward import NODES, P, Point, fedavg, point, start
from torch import Tensor

from fedcomp.clients.client import HALVES, client, in_order
from fedcomp.clients.compressed import compression
from fedcomp.clients.forward import forward_gradients
from fedcomp.clients.half import ClientHalf
from fedcomp.clients.private.dpsgd import Trainee, record_dp
from fedcomp.clients.private.topagg import votes_only
from fedcomp.codecs import TopK
from fedcomp.errors import ConfigError, NoUsableReply
from fedcomp.flower.faults import ScriptedFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import NODE_RECORD, take_frame
from fedcomp.flower.protocol import UPDATE
from fedcomp.flower.record_dp import RECORD_DP, DpSgdPlan
from fedcomp.flower.records import to_arrays
from fedcomp.flower.rounds import fit
from fedcomp.layout import NONE_DENSE, Layout
from fedcomp.privacy.accounting import compose
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.forward import ForwardGradients
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.private.record_dp import RecordDp
from fedcomp.tasks.base import Split

M, RECORDS, CLIP, STEP = 16, 25, 3.0, 0.05
PLAN = DpSgdPlan(method="forward", noise_multiplier=2.0, clip=CLIP, rate=0.4, steps=1, delta=1e-3, insecure=True)
STATE = "fedcomp.record-dp"


def trainee(msg: Message, context: Context, silent: bool = False) -> Trainee:
    """Half the squared distance to a record; ``silent`` by a loss that nothing changes."""
    (record,) = msg.content.array_records.values()
    module = Point(record["w"].numpy().size)
    module.load_state_dict({name: torch.from_numpy(a.numpy().copy()) for name, a in record.items()})
    partition, round_ = int(context.node_config["partition-id"]), int(msg.content["config"]["server-round"])
    x = Key(2, "records", partition=partition).uniform(RECORDS * P).reshape(RECORDS, P).astype(np.float32)

    def objective(model: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.mean()

    def outputs(model: Any, goals: Tensor) -> Tensor:
        w, b = model()
        distance = (w - goals).square().sum(dim=1) + b.square().sum()
        return 0.0 * distance if silent else 0.5 * distance

    task: Any = SimpleNamespace(name="point", options={}, objective=objective, outputs=outputs)
    data = Split(x, np.zeros(RECORDS, np.float32))
    return Trainee("arrays", module, task, data, partition, Key(0, "batches", round_, partition))


def app(*halves: ClientHalf, silent: bool = False, **options: Any) -> ClientApp:
    plain = ClientApp()

    @plain.train()
    def train(msg: Message, context: Context) -> Message:
        raise AssertionError("nobody trains in a round of forward gradients")

    half = forward_gradients(records=lambda msg, context: trainee(msg, context, silent), at_once=8, **options)
    return client(plain, half, *halves)


def made(plan: DpSgdPlan = PLAN, inner: Any = None, **options: Any) -> RecordDp:
    options = {"directions": M, "lr": STEP, "lr_scale": 1.0, **options}
    return RecordDp(ForwardGradients(inner or fedavg(fraction_evaluate=0.0), **options), plan, records=NODES * RECORDS)


def run(
    strategy: Any, made_app: ClientApp | None = None, rounds: int = 3, fault: Any = None
) -> tuple[dict[str, np.ndarray], MeteredGrid, list[Message], list[Context]]:
    """Return the model, the grid, the replies that came, and what nodes kept."""
    replies: list[Message] = []
    with InProcessGrid(made_app or app(), NODES, seed=4, fault=fault) as inner:
        real = inner.send_and_receive

        def heard(messages: Any, **rest: Any) -> Any:
            found = list(real(messages, **rest))
            # Before the strategy takes them apart.
            replies.extend(Message(RecordDict(dict(r.content)), reply_to=r) for r in found if not r.has_error())
            return found

        inner.send_and_receive = heard  # type: ignore[method-assign]
        grid = MeteredGrid(inner)
        found = to_arrays(fit(strategy, grid, start(), rounds).arrays)
        kept = [inner.context(inner.node_id_of(p)) for p in range(NODES)]
    return found, grid, replies, kept


def layout() -> Layout:
    return Layout.of(to_arrays(start()), NONE_DENSE)


def partition(reply: Message) -> int:
    return int(reply.content[NODE_RECORD]["partition-id"])


def frames(replies: list[Message], strategy: RecordDp) -> list[np.ndarray]:
    """The updates that the replies stand for."""
    codec = strategy.inner.projection  # type: ignore[attr-defined]
    return [codec.decode(take_frame(reply.content, UPDATE), layout()) for reply in replies]


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_the_server_adds_noisy_scalars_and_everybody_replays_them_to_the_bit(scope: str) -> None:
    strategy = made(scope=scope)
    found, grid, replies, _ = run(strategy)
    vector, codec = layout().flatten(to_arrays(start())), strategy.inner.projection  # type: ignore[attr-defined]
    for r in range(3):
        total = np.full(layout().size, -0.0, np.float32)
        by_partition = sorted(replies[NODES * r : NODES * (r + 1)], key=partition)
        for update in frames(by_partition, strategy):
            # All replies weigh the same.
            total += np.float32(1 / NODES) * update
        vector = vector + total
    np.testing.assert_array_equal(layout().flatten(found), vector)
    assert [report.used for report in strategy.reports.values()] == [NODES] * 3
    numbers = strategy.inner.slopes(start())  # type: ignore[attr-defined]
    assert numbers == (M if scope == "global" else M + 4)
    # Up and down; nobody had to be sent the model again.
    assert grid.ledger.total("payload", round=3, direction="up") <= NODES * (4 * numbers + 100)
    assert grid.ledger.total("payload", round=3, direction="down") <= NODES * (NODES * (4 * numbers + 16) + 200)
    assert sum(map(codec.count, codec.stretches(layout()))) == numbers


def test_nothing_leaves_beside_the_noisy_scalars() -> None:
    """No loss, no number of examples, no counts; the rest of a reply is the same whatever the records are."""
    beside = []
    for silent in (False, True):
        _, _, replies, _ = run(made(), app(silent=silent))
        said = []
        for reply in sorted(replies, key=lambda m: (m.content[NODE_RECORD]["sequence"], partition(m))):
            assert set(reply.content) == {NODE_RECORD, RECORD_DP}
            header = {k: v for k, v in reply.content[NODE_RECORD].items() if k != UPDATE}
            assert set(header) == {"partition-id", "version", "record", "sequence", "forward-round"}
            account = dict(reply.content[RECORD_DP])
            assert set(account) == {"run", "now", "total"}
            frame = take_frame(reply.content, UPDATE)
            assert frame is not None
            said.append((header, account["now"], account["total"], len(frame)))
        beside.append(said)
    assert beside[0] == beside[1]


def test_the_noise_on_the_wire_is_the_mechanisms_and_the_estimates_that_of_dense_noise() -> None:
    """Chi-square on the scalars as they travel; and the length of what they add up to."""
    strategy = made()
    _, _, replies, _ = run(strategy, app(silent=True), rounds=60)
    codec, sigma = strategy.inner.projection, PLAN.noise_multiplier * CLIP  # type: ignore[attr-defined]
    batch = PLAN.rate * RECORDS
    scalars = [codec.open(take_frame(r.content, UPDATE), layout()).tensors[0].values.decode() for r in replies]
    draws = np.concatenate(scalars).astype(np.float64) / STEP * batch
    ratio, off = np.square(draws).mean() / sigma**2, 4 * (2 / draws.size) ** 0.5
    assert draws.size == 60 * NODES * M
    assert abs(ratio - 1) < off
    # Noise for a bound on each scalar, sqrt(m) times as long, would be seen; so would that of one for its share.
    assert not abs(ratio * M - 1) < off
    assert not abs(ratio / M - 1) < off
    # Derived: p sigma^2 / (m batch^2), which is p coordinates of DP-SGD's noise at a clip of C / sqrt(m).
    lengths = np.mean([np.square(update.astype(np.float64)).sum() for update in frames(replies, strategy)]) / STEP**2
    dense = (P + 4) * (PLAN.noise_multiplier * CLIP / M**0.5 / batch) ** 2
    assert lengths == pytest.approx(dense, rel=0.1)


def test_server_and_clients_book_the_same() -> None:
    strategy = made(scope="layer")
    _, _, _, kept = run(strategy)
    assert strategy.privacy.participations == {0: 3, 1: 3, 2: 3}
    assert strategy.privacy.epsilon() == pytest.approx(compose([PLAN.event(M + 4)] * 3, PLAN.delta).epsilon)
    for context in kept:
        ledger = PLAN.ledger(RECORDS)
        ledger.load_state_dict(json.loads(str(context.state.config_records[STATE]["ledger"])))
        assert {e.event for e in ledger.entries} == {e.event for e in strategy.privacy.entries} == {PLAN.event(M + 4)}
        assert ledger.epsilon() == strategy.privacy.epsilon()


@pytest.mark.parametrize("replay", [True, False])
def test_a_message_that_comes_twice_is_two_releases_paid_twice(replay: bool) -> None:
    """Each draws records and noise of its own, as trainings do; the same noise on other records would show them."""
    strategy = made(replay=replay)
    run(strategy, fault=ScriptedFaults({(2, 1): "duplicate"}))
    assert strategy.privacy.participations == {0: 3, 1: 4, 2: 3}
    # The same reply, delivered again, is one release.
    strategy = made(replay=replay)
    run(strategy, fault=ScriptedFaults({(2, 1): "duplicate_reply"}))
    assert strategy.privacy.participations == {0: 3, 1: 3, 2: 3}


def test_a_release_whose_reply_was_lost_has_cost_what_it_cost() -> None:
    strategy = made()
    found, *_ = run(strategy, fault=ScriptedFaults({(1, 1): "lost_reply", (2, 1): "lost_reply"}))
    assert strategy.privacy.participations == {0: 3, 1: 3, 2: 3}
    assert [report.used for report in strategy.reports.values()] == [2, 2, 3]
    assert np.isfinite(found["w"]).all()


def test_the_run_ends_when_nobody_can_afford_another_round() -> None:
    strategy = made(dataclasses.replace(PLAN, budget=compose([PLAN.event(M)] * 2, PLAN.delta).epsilon + 1e-6))
    run(strategy, rounds=9)
    assert list(strategy.reports) == [1, 2]
    assert strategy.privacy.epsilon() <= strategy.plan.budget
    assert "allows no client a further training" in strategy.over(3)


def refused(strategy: Any, made_app: ClientApp) -> str:
    with pytest.raises(NoUsableReply) as caught:
        run(strategy, made_app, rounds=1)
    assert not strategy.reports[1].weights
    return str(caught.value)


def test_clients_that_cannot_add_noise_to_slopes_are_refused() -> None:
    """Without the half, without records for it, with the half that trains alone, without an account."""
    plain = ClientApp()

    @plain.train()
    def train(msg: Message, context: Context) -> Message:
        (name,) = msg.content.array_records
        return Message(
            RecordDict({name: msg.content[name], "metrics": MetricRecord({"num-examples": 1})}), reply_to=msg
        )

    assert "Account" in refused(made(), client(plain))
    assert "has none" in refused(made(), client(ClientApp(), forward_gradients(point)))
    strategy = made()
    assert "this node's app trains" in refused(strategy, client(ClientApp(), record_dp(trainee)))
    assert not strategy.privacy.participations

    def forgets(msg: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(msg, context)
        del reply.content[RECORD_DP]
        return reply

    silent = ClientHalf("forgets", forgets, outside=("forward_gradients",))
    assert "Account" in refused(made(), app(silent))


def test_both_halves_of_records_stand_in_one_app() -> None:
    """In whichever order they are named; the one that trains is not asked."""
    half = record_dp(trainee)
    found, *_ = run(made(), app(half))
    np.testing.assert_array_equal(found["w"], run(made())[0]["w"])
    # Slopes under the plan of a training, and slopes without noise from a node that has no objective for them.
    training = ForwardGradients(fedavg(fraction_evaluate=0.0), M)

    def plans(msg: Message, context: Context, call_next: Any) -> Message:
        msg.content["config"][RECORD_DP] = dataclasses.replace(PLAN, method="dp-sgd").to_text()
        return call_next(msg, context)

    planned = ClientHalf("plans", plans, outside=("forward_gradients",))
    assert "plan is for a training" in refused(training, app(planned))
    training = ForwardGradients(fedavg(fraction_evaluate=0.0), M)
    assert "with noise alone" in refused(training, app())
    with pytest.raises(ConfigError, match="nothing to measure"):
        forward_gradients()


def test_guards_of_a_node_stand_outside() -> None:
    """Before, the half answered before a guard had seen the message."""
    half = forward_gradients(point, records=trainee)
    guards = {"votes_only": votes_only(), **{name: make() for name, make in HALVES.items()}}
    for named in ({half.name: half, **guards}, {**guards, half.name: half}):
        order = [each.name for each in in_order(named)]
        assert order.index("forward_gradients") > max(map(order.index, ("votes_only", "coded", "local_privacy")))
    guarded = client(ClientApp(), half, votes_only())
    assert "casts private votes" in refused(ForwardGradients(fedavg(fraction_evaluate=0.0), M), guarded)
    with pytest.raises(ConfigError, match="no order of these halves is right"):
        client(
            ClientApp(),
            half,
            ClientHalf("x", half.mod, outside=("forward_gradients",), inside=("record_dp",)),
            record_dp(trainee),
        )


def test_what_the_strategy_refuses() -> None:
    slopes, mean = ForwardGradients(fedavg(fraction_evaluate=0.0), M), fedavg(fraction_evaluate=0.0)
    for inner, plan, words in (
        (mean, PLAN, "all others train"),
        (Compressed(mean, TopK(0.1)), PLAN, "all others train"),
        (slopes, dataclasses.replace(PLAN, method="dp-sgd"), "measure slopes"),
        (slopes, dataclasses.replace(PLAN, steps=2), "steps=2 of method='forward'"),
        (ForwardGradients(FedAvg(), M), PLAN, "fraction_evaluate=0.0"),
        (slopes, dataclasses.replace(PLAN, clip=0.0), "clip"),
    ):
        with pytest.raises(ConfigError, match=words):
            RecordDp(inner, plan, records=100)
    private = DpFedAvg(mean, clip=1.0, noise_multiplier=1.0, delta=1e-5, population=NODES)
    for inner in (private, RecordDp(fedavg(fraction_evaluate=0.0), dataclasses.replace(PLAN, method="dp-sgd"))):
        with pytest.raises(ConfigError, match=r"RecordDp\(ForwardGradients"):
            ForwardGradients(inner, M)


def test_the_statement_says_what_is_bounded() -> None:
    strategy = made()
    run(strategy, rounds=1)
    said = strategy.statement()
    assert "each record's slopes along public directions clipped together to L2 norm 3" in said.clip
    assert (said.unit, said.population, said.rate) == ("record", NODES * RECORDS, 0.4)
    assert said.sigma == pytest.approx(6.0)
    assert said.epsilon == strategy.privacy.epsilon()


def test_whatever_breaks_on_a_node_stays_there() -> None:
    def broken(msg: Message, context: Context) -> Trainee:
        found = trainee(msg, context)

        def outputs(model: Any, goals: Tensor) -> Tensor:
            raise ValueError("record 7 says: secret diagnosis")

        found.task.outputs = outputs  # type: ignore[method-assign]
        return found

    said = refused(made(), client(ClientApp(), compression(), forward_gradients(records=broken)))
    assert "secret" not in said
    assert "stays on the node" in said
