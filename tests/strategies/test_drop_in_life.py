"""What befalls a strategy around its rounds: weights of zero, hooks set on it, a second start, nodes that miss."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    Bulyan,
    FedAdam,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    Krum,
    MultiKrum,
    strategy_utils,
)
from toy import client_app, fedavg, model, stack, with_halves

from fedcomp.clients.compressed import compression
from fedcomp.codecs import QSGD, SignSGD, TopK
from fedcomp.errors import ConfigError
from fedcomp.flower import grid as grids
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.nodes import GridError
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.overlap import PipelinedStrategy

KEYS = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}


class Saving(FedAvg):
    """As users save models: the mean is asked for by super()."""

    def aggregate_train(self, server_round, replies):
        return super().aggregate_train(server_round, list(replies))


RULES = {
    "mean": lambda: FedAvg(**KEYS),
    "moments": lambda: FedAdam(**KEYS),
    "median": lambda: FedMedian(**KEYS),
    "trimmed": lambda: FedTrimmedAvg(**KEYS),
    "Krum": lambda: Krum(num_malicious_nodes=0, **KEYS),
    "MultiKrum": lambda: MultiKrum(num_malicious_nodes=0, num_nodes_to_select=2, **KEYS),
    "Bulyan": lambda: Bulyan(num_malicious_nodes=0, **KEYS),
    "subclass": lambda: Saving(**KEYS),
}


def idle_in(round_: int):
    """Return an app whose clients train on no examples, and evaluate on none, in one round."""
    app = with_halves([compression()])

    def examples(msg: Message) -> int:
        config = next(iter(msg.content.config_records.values()))
        return 0 if int(config["server-round"]) == round_ else 7

    @app.train()
    def train(msg, context):
        name, record = next(iter(msg.content.array_records.items()))
        arrays = ArrayRecord({k: Array(np.asarray(a.numpy() + np.float32(1))) for k, a in record.items()})
        metrics = MetricRecord({"num-examples": examples(msg), "loss": 1.0})
        return Message(RecordDict({name: arrays, "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        metrics = MetricRecord({"num-examples": examples(msg), "loss": 1.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    return app


@pytest.mark.parametrize("rule", RULES)
def test_a_round_in_which_nobody_has_examples_changes_nothing_and_ends_nothing(rule: str) -> None:
    strategy = Compressed(RULES[rule](), QSGD(levels=127))
    with InProcessGrid(idle_in(2), 5, seed=3) as grid:
        result = strategy.start(grid, model(), num_rounds=3)
    assert [strategy.reports[r].used for r in (1, 2, 3)] == [5, 0, 5]
    assert all("weight 0" in reason for reason in strategy.reports[2].refused.values())
    assert len(strategy.reports[2].refused) == 5
    assert np.isfinite(stack(result.arrays)).all()
    assert sorted(result.evaluate_metrics_clientapp) == [1, 3]
    assert len(strategy.evaluations[2].refused) == 5


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_set_on_the_instance_sees_every_reply(late: bool) -> None:
    inner, seen = fedavg(), []
    own = inner.aggregate_train

    def counting(server_round, replies):
        replies = list(replies)
        seen.append([stack(message.content["arrays"]) for message in replies])
        return own(server_round, replies)

    if not late:
        inner.aggregate_train = counting
    strategy = Compressed(inner, TopK(density=1.0))
    inner.aggregate_train = counting
    with InProcessGrid(client_app([compression()]), 4, seed=3) as grid:
        result = strategy.start(grid, model(), num_rounds=1)
    assert [len(each) for each in seen] == [4]
    assert len({each.tobytes() for each in seen[0]}) == 4
    with InProcessGrid(client_app([compression()]), 4, seed=3) as grid:
        plain = Compressed(fedavg(), TopK(density=1.0)).start(grid, model(), num_rounds=1)
    np.testing.assert_allclose(stack(result.arrays), stack(plain.arrays), rtol=1e-6)


def test_a_hook_that_is_to_see_votes_one_by_one_is_refused() -> None:
    inner = fedavg()
    own = inner.aggregate_train
    inner.aggregate_train = lambda server_round, replies: own(server_round, replies)
    with pytest.raises(ConfigError, match="votes"):
        Compressed(inner, SignSGD(step=0.01))


def test_models_in_evaluation_replies_are_named_with_their_bytes() -> None:
    app = client_app([compression()])
    evaluating = with_halves([compression()])

    @evaluating.evaluate()
    def evaluate(msg, context):
        metrics = MetricRecord({"num-examples": 1, "loss": 1.0})
        return Message(RecordDict({"arrays": model(), "metrics": metrics}), reply_to=msg)

    def both(msg: Message, context):
        return (app if msg.metadata.message_type == "train" else evaluating)(msg, context)

    strategy = Compressed(FedAvg(), TopK(density=0.05))
    with InProcessGrid(both, 4, seed=3) as grid:
        strategy.start(grid, model(), num_rounds=1)
    (note,) = strategy.evaluations[1].notes
    sent = strategy.evaluations[1].payload_bytes
    assert sent >= 4 * 4 * stack(model()).size
    assert "['arrays']" in note
    assert f"{sent:,} bytes" in note
    assert strategy.reports[1].payload_bytes < sent / 5


@pytest.mark.parametrize("around", [lambda inner: inner, lambda inner: Compressed(inner, TopK(0.1))])
def test_rounds_that_only_evaluate_give_what_flower_gives(around) -> None:
    inner = FedAvg(fraction_train=0.0, **(KEYS | {"min_train_nodes": 0}))
    with InProcessGrid(idle_in(0), 3) as grid:
        result = around(inner).start(grid, model(), num_rounds=2)
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2]
    assert not result.train_metrics_clientapp
    assert not result.arrays


def test_a_system_with_exchanges_of_its_own_is_not_started_again_with_another_model() -> None:
    strategy = PipelinedStrategy(Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.1)), 1)
    with InProcessGrid(client_app([compression()]), 4, seed=3) as grid:
        ended = strategy.start(grid, model(), num_rounds=2)
        with pytest.raises(ConfigError, match="was started before"):
            strategy.start(grid, model(), num_rounds=1)
        strategy.start(grid, ended.arrays, num_rounds=1)
    assert strategy.reports[1].used == 4


@pytest.mark.parametrize("rule", [{"min_available_nodes": 5}, {"min_train_nodes": 5, "min_available_nodes": 2}])
@pytest.mark.parametrize("compressed", [False, True])
def test_too_few_nodes_in_one_process_are_an_error(monkeypatch, rule: dict[str, int], compressed: bool) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        assert now[0] < 60, "it waits for ever"

    monkeypatch.setattr(strategy_utils, "sleep", sleep)
    monkeypatch.setattr(grids.time, "monotonic", lambda: now[0])
    inner = FedAvg(fraction_evaluate=0.0, **rule)
    strategy = Compressed(inner, TopK(density=0.1)) if compressed else inner
    with InProcessGrid(client_app([compression()]), 3, seed=3) as grid, pytest.raises(GridError, match="than the 3 of"):
        strategy.start(grid, model(), num_rounds=1)


def test_nodes_may_be_listed_as_often_as_one_likes() -> None:
    with InProcessGrid(client_app([compression()]), 3, seed=3) as grid:
        assert [len(grid.get_node_ids()) for _ in range(50)] == [3] * 50


def test_numbers_that_underflow_end_nothing_and_change_no_bit(caplog) -> None:
    """An application may have numpy raise at everything, to find its own faults."""
    app = with_halves([compression()])

    @app.train()
    def train(msg, context):
        assert np.geterr()["over"] == "raise", "the app's own setting"
        name, record = next(iter(msg.content.array_records.items()))
        rng = np.random.default_rng(context.node_config["partition-id"])
        scale = 10.0 ** rng.integers(-44, 0, 1200)
        out = {k: Array((rng.standard_normal(a.shape) * scale[: a.numpy().size].reshape(a.shape)).astype(np.float32))
               for k, a in record.items()}  # fmt: skip
        return Message(RecordDict({name: ArrayRecord(out), "metrics": MetricRecord({"num-examples": 3})}), reply_to=msg)

    def run() -> np.ndarray:
        with InProcessGrid(app, 4, seed=3) as grid, caplog.at_level(logging.ERROR):
            return stack(Compressed(fedavg(), QSGD(levels=7)).start(grid, model(), num_rounds=2).arrays)

    with np.errstate(all="raise", under="ignore"):
        usual = run()
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(run(), usual)
