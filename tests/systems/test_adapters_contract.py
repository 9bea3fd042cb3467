"""Every system trains adapters as it trains any model: as the one of the halves that travel, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from beside_product import WORDS, faults
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from test_over_messages import PLAIN, QUICK
from toy import update

from fedcomp.adapters import AdapterNames, draw
from fedcomp.clients.client import client
from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.program import System
from fedcomp.strategies.cohort import Cohort, CohortSettings
from fedcomp.strategies.server import Server

A, B = "layer.lora_A.weight", "layer.lora_B.weight"
NODES, ROUNDS = 4, 6
HALVES = {B: np.zeros((40, 30), np.float32), "bias": np.zeros(12, np.float32)}
WHOLE = {A: np.ones((30, 7), np.float32), **HALVES}


def app(seen: list[list[str]]) -> ClientApp:
    """Return an app that adds integers to all it has but A."""
    found = ClientApp()

    @found.train()
    def train(msg: Message, context: Context) -> Message:
        name, record = next(iter(msg.content.array_records.items()))
        number = int(next(iter(msg.content.config_records.values()))["server-round"])
        node = int(context.node_config["partition-id"])
        seen.append(list(record))
        arrays = to_arrays(record)
        for layer, key in enumerate(HALVES):
            arrays[key] = arrays[key] + update(number, node, arrays[key].shape, layer)
        content = RecordDict({name: to_record(arrays), "metrics": MetricRecord({"num-examples": 10 * (node + 1)})})
        return Message(content, reply_to=msg)

    return client(found)


def run(system: System, *, whole: bool) -> tuple[list[dict[str, bytes]], list[int], list[list[str]]]:
    """Return the models after each round, what replies took, and which tensors apps had."""
    fate, models, seen = faults(0.15), list[dict[str, bytes]](), list[list[str]]()

    def plan(delivery: Delivery) -> str | None:
        return WORDS[fate(delivery.round, delivery.partition, delivery.message_type.partition(".")[0])]

    server = Server(
        system,
        Cohort(CohortSettings(fraction_evaluate=0.0), 0),
        downlink=system.codec if system.makes_steps else None,
        adapters=AdapterNames(also=("bias",)) if whole else None,
    )
    with InProcessGrid(app(seen), NODES, seed=4, fault=plan) as grid:

        def note(number: int, arrays: ArrayRecord) -> None:
            models.append({name: array.numpy().tobytes() for name, array in arrays.items()})

        server.start(grid, to_record(WHOLE if whole else HALVES), ROUNDS, timeout=9.0, evaluate_fn=note)
    return models, [server.reports[n].payload_bytes for n in sorted(server.reports)], seen


@pytest.mark.slow
# Without the slowest, which trains a model of its own.
@pytest.mark.parametrize("name", QUICK[:-1])
def test_adapters_are_trained_as_their_halves_alone(name: str) -> None:
    """With messages lost, doubled and late; what goes up is what goes up of the halves."""
    halves, expected, _ = run(PLAIN[name].system, whole=False)
    whole, payload, seen = run(PLAIN[name].system, whole=True)
    assert {tuple(each) for each in seen} == {(A, B, "bias")}
    drawn = draw(0, A, (30, 7), 1 / np.sqrt(7)).tobytes()
    assert {each[A] for each in whole if each[B] != halves[0][B]} == {drawn}
    assert [{k: v for k, v in each.items() if k != A} for each in whole] == halves
    assert payload == expected
    assert any(each[B] != halves[0][B] for each in halves)
