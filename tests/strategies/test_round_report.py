"""What a round's report says beside who replied: gradient build-up, bytes per tensor, memory ratios."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedMedian
from toy import client_app, fedavg, model, sent_frame, update, with_halves

from fedcomp.clients.compressed import compression
from fedcomp.codecs import Identity, RandomK, TopK
from fedcomp.experiments import engines
from fedcomp.experiments.spec import RunSpec
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.report import Report
from fedcomp.layout import SmallDense
from fedcomp.strategies.compressed import Compressed

ONE = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
INNER = {"mean": lambda: fedavg(fraction_evaluate=0.0), "dense": lambda: FedMedian(**ONE, fraction_evaluate=0.0)}


def run(strategy, evil=None, *, nodes=4, rounds=2, mods=True, initial=None, frames=None):
    """Run; ``evil`` changes the reply content of partition 1, ``frames`` collects every frame's bytes."""
    honest = client_app([compression()] if mods else [])

    def app(msg: Message, context: Context) -> Message:
        reply = honest(msg, context)
        if frames is not None and (frame := sent_frame(reply.content)) is not None:
            frames.append(frame)
        if evil is not None and context.node_config["partition-id"] == 1:
            reply.content = evil(reply.content) or reply.content
        return reply

    grid = MeteredGrid(InProcessGrid(app, nodes, seed=4), TrafficLedger())
    return strategy.start(grid, initial or model(), num_rounds=rounds, timeout=9)


@pytest.mark.parametrize("inner", INNER)
def test_changed_is_the_union_of_what_was_sent(inner: str) -> None:
    """Top-k of each client: the union of four supports; a shared random support: one. The dense rest does not count."""
    strategy = Compressed(INNER[inner](), TopK(0.05), feedback=False, policy=SmallDense())
    run(strategy, rounds=1)
    chosen = [set(np.argsort(-np.abs(update(1, p, (1200,))), kind="stable")[:60].tolist()) for p in range(4)]
    union = set().union(*chosen)
    assert 120 < len(union) <= 240, "the clients agree about little"
    assert strategy.reports[1].changed == len(union)
    shared = Compressed(INNER[inner](), RandomK(0.05), feedback=False, policy=SmallDense())
    run(shared, rounds=1)
    assert 60 - 4 <= shared.reports[1].changed <= 60


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("mods", [True, False])
def test_changed_of_whole_models_is_counted_against_the_model(inner: str, mods: bool) -> None:
    """A lossless codec, and clients without the mod, send models instead of changes."""
    app = with_halves([compression()] if mods else [])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        arrays = {k: v.numpy() for k, v in msg.content["arrays"].items()}
        first = 5 * int(context.node_config["partition-id"])
        arrays["weight"] = arrays["weight"].copy()
        arrays["weight"][first : first + 10] += 1.0  # ten rows of 30; the next client's overlap by five
        record = ArrayRecord({k: Array(v) for k, v in arrays.items()})
        return Message(RecordDict({"arrays": record, "m": MetricRecord({"num-examples": 1})}), reply_to=msg)

    strategy = Compressed(INNER[inner](), Identity() if mods else TopK(0.05))
    grid = MeteredGrid(InProcessGrid(app, 2, seed=4), TrafficLedger())
    strategy.start(grid, model(3.0), num_rounds=1, timeout=9)
    assert (strategy.reports[1].compressed, strategy.reports[1].plain) == ((2, 0) if mods else (0, 2))
    assert strategy.reports[1].changed == 15 * 30


@pytest.mark.slow
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(
    ("scope", "names"), [("global", ["the compressed part", "the dense rest"]), ("layer", ["weight", "the dense rest"])]
)
def test_bytes_per_tensor_add_up_to_the_frames(inner: str, scope: str, names: list[str]) -> None:
    frames: list[bytes] = []
    strategy = Compressed(INNER[inner](), TopK(0.05, scope=scope), policy=SmallDense())
    run(strategy, frames=frames, rounds=1)
    found = strategy.reports[1].tensor_bytes
    assert list(found) == names
    assert sum(found.values()) == sum(len(f) - 21 for f in frames)  # header, end mark and checksum
    assert found["the dense rest"] == 4 * (48 + 13)
    assert found[names[0]] > 4 * 60 * 4


def test_what_was_refused_is_not_counted() -> None:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05))
    frames: list[bytes] = []
    run(strategy, lambda content: RecordDict({k: v for k, v in content.items() if k != "metrics"}), frames=frames)
    assert [r.compressed for r in strategy.reports.values()] == [3, 3]
    assert sum(strategy.reports[1].tensor_bytes.values()) < sum(len(f) - 21 for f in frames[:4])
    nobody = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05))
    run(nobody, mods=False)
    assert all(r.tensor_bytes == {} and r.plain == 4 for r in nobody.reports.values())


def declare(value):
    def evil(content: RecordDict) -> None:
        content["fedcomp.node"]["memory"] = value

    return evil


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, 0.5, 1e300])
def test_a_memory_ratio_is_reported_by_node(value: float) -> None:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05))
    run(strategy, declare(value))
    assert value in strategy.reports[2].memory.values()
    assert not strategy.reports[2].notes


def test_reports_survive_json() -> None:
    strategy = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05, scope="layer"), policy=SmallDense())
    numeric = ArrayRecord({"0": Array(np.zeros((40, 30), np.float32)), "1": Array(np.zeros(12, np.float32))})
    run(strategy, declare(0.5), initial=numeric)
    for report in strategy.reports.values():
        again = Report.from_json(json.loads(json.dumps(report.to_json())))
        assert again == report
        assert list(again.tensor_bytes) == ["0", "the dense rest"], "names of tensors stay names, also when digits"
        assert all(isinstance(node, int) for node in again.memory)
        assert again.changed > 60
    fresh, state = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.05, scope="layer")), strategy.state_dict()
    fresh.load_state_dict(state)
    assert fresh.reports == strategy.reports


@pytest.mark.slow
def test_a_run_records_them_per_round(tmp_path) -> None:
    settings = {"task.hidden": "32", "codec.density": 0.1, "codec.scope": "layer", "policy.share": 0.01}
    result = engines.run(RunSpec("topk", rounds=2, clients=3, settings=settings), checkpoint=tmp_path / "c")
    again = engines.run(RunSpec("topk", rounds=2, clients=3, settings=settings), checkpoint=tmp_path / "c")
    for record in (*result.rounds[1:], *again.rounds[1:]):
        metrics = json.loads(json.dumps(record.to_json()))["metrics"]
        sizes = metrics["report.tensor_bytes"]
        assert "the dense rest" in sizes
        assert len(sizes) == 4
        assert 0 < sum(sizes.values()) < record.uplink_payload_bytes
        assert 0.1 * 2048 < metrics["report.changed"] < 2410
    assert [r.metrics for r in again] == [r.metrics for r in result]
