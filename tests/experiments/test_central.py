"""The simulation without messages: the same bits and bytes as with them, and the methods that cannot be sent."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from fedcomp.codecs import Identity, TopK, get_codec
from fedcomp.codecs.scalecom import ScaleCom
from fedcomp.errors import ConfigError
from fedcomp.experiments import engines
from fedcomp.experiments.central import Cost, Plan, Sending, measured, overlap, program_of, simulate, sum_frame
from fedcomp.experiments.findings import different_bytes
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.studies.scalecom import Oracle
from fedcomp.layout import Layout, Update
from fedcomp.program import System
from fedcomp.rng import Key
from fedcomp.systems.pair import Pair
from fedcomp.systems.shared_support import SharedSupport
from fedcomp.tasks import get_task
from fedcomp.tasks.arrays import load_arrays

SMALL = {"task.hidden": "32", "lr": 0.2, "batch_size": 16}
ONE_STEP = SMALL | {"max_steps": 1}
LAYOUT = Layout.flat(2000)
LATENTS = ONE_STEP | {"warmup_rounds": 1, "training_rounds": 1, "codec.density": 0.05, "codec.raw": 0}
"""Everything travels in round 1, values in round 2, latents in rounds 3 and 4."""


def updates(clients: int, round_: int = 1, size: int = 2000) -> list[Update]:
    drawn = [Key(5, "central", round_, i).uniform(size) - 0.5 for i in range(clients)]
    return [Update(values.astype(np.float32), Layout.flat(size)) for values in drawn]


class Exchanges(Sending):
    """Rounds of given updates, with their overlap."""

    def __init__(self, system: System, clients: int) -> None:
        super().__init__(system, LAYOUT, clients, 0, lambda node: 2.0)

    def __call__(self, given: list[Update], number: int = 1) -> tuple[np.ndarray, Cost]:
        """Return the mean, and what the round cost."""
        mean, cost = self.send(number, [update.vector for update in given])
        system = self.local.system
        if isinstance(system, SharedSupport):
            cost = dataclasses.replace(cost, overlap=overlap(system, self.seen(number), [2.0] * len(given)))
        return mean, cost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "settings"),
    [
        ("fedavg", ONE_STEP),
        ("identity", SMALL | {"epochs": 2, "momentum": 0.5}),
        ("topk", ONE_STEP | {"feedback": True, "task.partition": "dirichlet:0.5"}),
        ("topk", SMALL | {"feedback": False, "codec.scope": "layer", "weight_decay": 0.01}),
        ("randomk", ONE_STEP),
        ("qsgd", ONE_STEP),
        ("signsgd", ONE_STEP | {"codec.step": 0.001}),
        ("sidco", ONE_STEP),
        ("adacomp", ONE_STEP),
        ("scalecom", ONE_STEP | {"codec.beta": 0.3}),
        ("scalecom", ONE_STEP | {"warmup_rounds": 2, "server_lr": 0.5}),
        ("power-sgd", ONE_STEP | {"codec.rank": 3, "warmup_rounds": 1}),
        ("power-sgd", ONE_STEP | {"codec.form": "two-exchange", "codec.memory": "aggregated"}),
        ("power-sgd", ONE_STEP | {"codec.memory": "aggregated", "codec.values": "q8", "codec.warm_start": False}),
        ("gradiveq", ONE_STEP),
        ("lgc", LATENTS | {"codec.ef": "decoded"}),
        ("lgc", LATENTS | {"codec.instance": "server", "codec.ef": "decoded", "codec.values": "q8"}),
        ("lgc", LATENTS | {"codec.instance": "server", "warmup_rounds": 0, "common": "first"}),
        ("topk", SMALL | {"feedback": True, "inner": "fedadam", "inner.eta": 0.03}),
        ("qsgd", SMALL | {"inner": "fedyogi"}),
        ("topk", SMALL | {"inner": "fedavgm", "inner.server_momentum": 0.5}),
    ],
)
def test_a_system_ends_in_the_same_model_and_bytes_as_with_messages(system: str, settings: dict) -> None:
    spec = RunSpec(system, rounds=4, clients=3, seed=2, settings=settings)
    sent = engines.run(spec)
    out = simulate(*Plan.of(spec))
    assert different_bytes(sent.arrays, out.arrays) == 0
    assert out.final.accuracy == sent.accuracy
    if system != "fedavg":  # whose tensors travel as .npy files, not as frames
        assert [e.uplink for e in out.exchanges] == [r.uplink_payload_bytes for r in sent.rounds[1:]]


@pytest.mark.slow
def test_the_downlink_of_a_shared_support_is_what_its_strategy_sends() -> None:
    spec = RunSpec("scalecom", rounds=4, clients=3, settings=ONE_STEP)
    sent, out = engines.run(spec), simulate(*Plan.of(spec))
    # The first round's message holds the whole model. Each later one brings the mean of the round before it, which the
    # last round's does not: so the blocks of a round and the means of the one before it come together.
    messages = [r.downlink_payload_bytes for r in sent.rounds[2:]]
    assert sum(messages) == pytest.approx(sum(e.downlink for e in out.exchanges[1:]), abs=16)


@pytest.mark.slow
def test_a_shared_basis_starts_afresh_with_every_run_and_its_step_is_as_long_as_one_update() -> None:
    spec = RunSpec("power-sgd", rounds=4, clients=3, settings=ONE_STEP)
    plan, system = Plan.of(spec)
    first, again = simulate(plan, system), simulate(plan, system)
    assert different_bytes(first.arrays, again.arrays) == 0
    for exchange in first.exchanges:
        # Factors on either side differ in length, but client's and server's of a round are on the same one.
        assert exchange.downlink == exchange.uplink
        assert len(set(exchange.kept)) == 1
        assert exchange.seconds > 0.0


def test_losses_are_those_of_the_test_split_where_the_plan_says_so() -> None:
    plan, system = Plan.of(RunSpec("topk", rounds=2, clients=2, settings=ONE_STEP))
    seen, held = simulate(plan, system), simulate(dataclasses.replace(plan, held_out=True), system)
    assert different_bytes(seen.arrays, held.arrays) == 0
    assert [p.accuracy for p in seen.points] == [p.accuracy for p in held.points]
    model = plan.task.model(0)
    load_arrays(model, held.arrays)
    for out, split in ((seen, plan.task.train_split), (held, plan.task.test)):
        assert out.final.loss == plan.task.evaluate(model, split)["loss"]


def test_the_last_rounds_are_evaluated_as_often_as_the_plan_says() -> None:
    plan, system = Plan.of(RunSpec("topk", rounds=6, clients=2, settings=ONE_STEP | {"evaluate_every": 4}))
    for last, rounds in ((1, [0, 4, 6]), (3, [0, 4, 5, 6]), (9, [0, 1, 2, 3, 4, 5, 6])):
        out = simulate(dataclasses.replace(plan, last=last), system)
        assert [point.round for point in out.points] == rounds


def test_what_only_messages_can_do_is_refused() -> None:
    for settings, word in (
        ({"fraction": 0.5}, "fraction"),
        ({"downlink": "topk", "downlink.density": 0.1}, "downlink"),
        ({"inner": "fedmedian"}, "inner"),
    ):
        with pytest.raises(ConfigError, match=word):
            simulate(*Plan.of(RunSpec("topk", rounds=1, clients=3, settings=SMALL | settings)))
    shown = {"codec.mode": "dad", "codec.i_know_inputs_are_visible": True}
    with pytest.raises(ConfigError, match="captured"):
        simulate(*Plan.of(RunSpec("factors", rounds=1, clients=3, settings=SMALL | shown)))
    with pytest.raises(ConfigError, match="buffers"):
        simulate(Plan(get_task("digits", model="cnn", batch_norm=True), 2, 1), Pair(Identity()))


@pytest.mark.slow
def test_b6_without_support_wise_moments_the_server_steps_where_nothing_arrived() -> None:
    spec = RunSpec("topk", rounds=8, clients=3, settings=SMALL | {"feedback": True, "inner": "fedadam"})
    plan, system = Plan.of(spec)
    kept, left = simulate(plan, system), simulate(dataclasses.replace(plan, everywhere=True), system)
    assert kept.steps == [0.0] * 8
    assert left.steps[0] == 0.0
    assert left.steps[-1] > 0.25


@pytest.mark.slow
@pytest.mark.parametrize(("beta", "kind"), [(1.0, SharedSupport), (0.3, SharedSupport), (1.0, Oracle)])
def test_nothing_is_lost_on_a_shared_support(beta: float, kind: type[SharedSupport]) -> None:
    exchanges = Exchanges(kind(ScaleCom(0.05, beta=beta, scope="global")), 3)
    total, sent = np.zeros(2000), np.zeros(2000)
    for number in range(1, 30):
        plain = updates(3, number)
        total += np.mean([u.vector for u in plain], axis=0, dtype=np.float64)
        mean, cost = exchanges(plain, number)
        sent += mean
        assert cost.union == 100
        assert cost.kept == [100, 100, 100]
    local = exchanges.local
    memory = np.mean(
        [local.system.residual(c.memory, LAYOUT) for c in local.clients.values()], axis=0, dtype=np.float64
    )
    np.testing.assert_allclose(sent + memory, total, atol=1e-5)


def test_the_oracle_keeps_more_of_the_mean_than_any_leader() -> None:
    plain = updates(4)
    mean = np.mean([u.vector for u in plain], axis=0, dtype=np.float64)
    best = np.sort(np.argsort(-np.abs(mean.astype(np.float32)), kind="stable")[:20])
    codec = ScaleCom(0.01, scope="global")
    seen, most = Exchanges(Oracle(codec), 4)(plain)
    guessed, some = Exchanges(SharedSupport(codec), 4)(plain)
    assert np.array_equal(np.flatnonzero(seen), best)
    assert most.overlap == 1.0
    assert some.overlap == np.intersect1d(np.flatnonzero(guessed), best).size / 20 < 1.0
    assert np.linalg.norm(seen) > np.linalg.norm(guessed)
    # The index block once, and the values of all: as if the leader had known. Blocks of other choices differ in length.
    assert abs(most.uplink - some.uplink) < 20


def test_a_shared_support_is_cheaper_both_ways_and_the_bytes_are_those_of_frames() -> None:
    plain, key = updates(8), Key(0, "uplink", 1)
    _, apart = Exchanges(Pair(TopK(0.01)), 8)(plain)
    _, together = Exchanges(SharedSupport(ScaleCom(0.01, scope="global", memory=False)), 8)(plain)
    assert apart.uplink == sum(len(TopK(0.01).encode(u, {}, key)[0]) for u in plain)
    assert together.uplink < apart.uplink
    assert together.downlink < apart.downlink
    assert together.union == 20
    assert 100 < apart.union <= 160
    # Seeds stand for shared random supports; for individual ones the union has to be listed.
    pairs = (Pair(get_codec({"id": "randomk", "density": 0.01, "shared": shared})) for shared in (True, False))
    costs = [Exchanges(pair, 8)(plain)[1] for pair in pairs]
    assert costs[0].uplink == costs[1].uplink == costs[0].downlink < costs[1].downlink / 4


def test_the_frame_of_a_sum_is_dense_only_where_that_is_shorter() -> None:
    few, many = np.zeros(2000, np.float32), np.ones(2000, np.float32)
    few[::100] = 1.0
    many[:4] = 0.0
    lengths = [len(sum_frame(Update(v, LAYOUT))) for v in (few, many)]
    assert lengths[0] < 20 * 4 + 20 * 2 + 60
    assert 8000 < lengths[1] < 8060
    assert TopK(0.01).decode(sum_frame(Update(few, LAYOUT)), LAYOUT).tobytes() == few.tobytes()


def test_points_are_taken_when_due_and_a_run_that_diverges_says_so() -> None:
    task = get_task("digits", hidden="16")
    plan = Plan(task, 2, 5, 0, {"lr": 0.1, "max_steps": 1}, every=2)
    out = simulate(plan, Pair(Identity()))
    assert [p.round for p in out.points] == [0, 2, 4, 5]
    assert out.points[-1].loss < out.points[0].loss
    assert out.points[-1].uplink == out.uplink
    wild = Plan(task, 2, 50, 0, {"lr": 1e30, "max_steps": 1})
    with np.errstate(over="ignore", invalid="ignore"):
        lost = simulate(wild, Pair(TopK(0.1)))
    assert lost.diverged is not None
    assert lost.final.loss == np.inf
    assert len(lost.exchanges) == lost.diverged - 1
    assert all(np.isfinite(array).all() for array in lost.arrays.values()), "the last model that was one is kept"


def test_other_models_than_the_shared_one_are_not_touched() -> None:
    task = get_task("digits", hidden="16")
    before = {name: tensor.clone() for name, tensor in task.model(0).state_dict().items()}
    plan = Plan(task, 2, 2, 0, {"lr": 0.1, "max_steps": 1})
    first = simulate(plan, Pair(TopK(0.1)))
    assert different_bytes(first.arrays, simulate(plan, Pair(TopK(0.1))).arrays) == 0
    assert all(np.array_equal(tensor, before[name]) for name, tensor in task.model(0).state_dict().items())


def test_codecs_of_exchanges_that_are_not_made_here_name_an_engine() -> None:
    with pytest.raises(ConfigError, match="2 exchanges"):
        program_of(get_codec({"id": "gradiveq"}))


@pytest.mark.parametrize(
    "system",
    [
        *("dpsgd", "coded-linear", "conditional", "relay-mds", "sumcode", "gradient-code"),
        *("lsg", "distributed-dp", "record-dp", "datalens"),
    ],
)
def test_systems_that_are_not_written_here_name_an_engine(system: str) -> None:
    """Decentralised, private and coded runs were averaged as FedAvg's before, without noise and with its bytes."""
    with pytest.raises(ConfigError, match=r"without messages .*; run it on an engine$"):
        Plan.of(RunSpec(system, rounds=1, clients=5))


@pytest.mark.slow
def test_a_run_as_plain_data_says_what_it_came_to() -> None:
    def found(codec: dict[str, Any] | System, rounds: int = 3, lr: float = 0.1) -> dict[str, Any]:
        plan = Plan(get_task("digits", hidden="32"), 2, rounds, 0, {"lr": lr, "max_steps": 1}, every=2)
        return measured(plan, program_of(get_codec(codec)) if isinstance(codec, dict) else codec)

    top, led = {"id": "feedback", "codec": {"id": "topk", "density": 0.05}}, {"id": "scalecom", "density": 0.05}
    dense, sparse, clt, best = found({"id": "identity"}), found(top), found(led), found(Oracle(ScaleCom(0.05)))
    assert json.loads(json.dumps(sparse | {"overlap": 0.0}))["loss"] == sparse["loss"]
    assert [p[0] for p in dense["points"]] == [0.0, 2.0, 3.0]
    assert dense["kept"] == dense["union"] == 64 * 32 + 32 + 10 * 32
    assert sparse["uplink"] < dense["uplink"] / 4
    assert sparse["build_up"] > 1.2
    assert clt["build_up"] == best["build_up"] == 1.0
    assert best["overlap"] == 1.0 > clt["overlap"]
    assert math.isnan(sparse["overlap"])
    wild = found(top, rounds=50, lr=1e30)
    assert wild["diverged"]
    assert wild["loss"] == math.inf == wild["points"][-1][1]
