"""Adapters: what travels, what is drawn at both ends, what is refused by name; the mean is the mean of the products."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian
from numpy.typing import NDArray
from toy import in_bfloat16

import fedcomp as fc
from fedcomp.adapters import AdapterNames, Halves, draw, nearest, partner_of, returned
from fedcomp.errors import LayoutError
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.records import completed, to_arrays, to_record, without
from fedcomp.rng import Key
from fedcomp.strategies.server import Server
from fedcomp.wire import Bf16

Named = dict[str, NDArray[Any]]

RANK, NODES = 8, 4
LAYERS = {"q_proj": (24, 16), "v_proj": (12, 16), "up": (32, 32)}
PREFIX = "base_model.model.model.layers.0."
EVERYBODY = {"fraction_evaluate": 1.0, "min_train_nodes": NODES, "min_available_nodes": NODES, "min_evaluate_nodes": 1}


def adapters(spelling: str = ".{}.weight", rank: int = RANK) -> Named:
    """Return what PEFT begins with: A random, B zero."""
    rng = Key(3, "start").generator()
    found: Named = {}
    for layer, (out, inputs) in LAYERS.items():
        found[PREFIX + layer + spelling.format("lora_A")] = rng.standard_normal((rank, inputs)).astype(np.float32)
        found[PREFIX + layer + spelling.format("lora_B")] = np.zeros((out, rank), np.float32)
    return found


def is_a(name: str) -> bool:
    return "lora_A" in name


class App:
    """An app that adds to B what a function says, in float32, and keeps what it was given."""

    def __init__(self, change: Callable[[int, int, str, tuple[int, ...]], Any], *, mods: Any = None) -> None:
        self.given: dict[tuple[int, int], Named] = {}
        self.evaluated: list[Named] = []
        self.answer: Callable[[Named], Mapping[str, Any]] = lambda arrays: arrays
        self.app = found = ClientApp(mods=[fc.compression()] if mods is None else mods)

        @found.train()
        def train(msg: Message, context: Context) -> Message:
            name, record = next(iter(msg.content.array_records.items()))
            number = int(next(iter(msg.content.config_records.values()))["server-round"])
            node = int(context.node_config["partition-id"])
            arrays = to_arrays(record)
            self.given[number, node] = {k: v.copy() for k, v in arrays.items()}
            for key in arrays:
                if not is_a(key):
                    arrays[key] = arrays[key] + change(number, node, key, arrays[key].shape)
            content = RecordDict({name: fc.record(self.answer(arrays))})
            content["metrics"] = MetricRecord({"num-examples": node + 1})
            return Message(content, reply_to=msg)

        @found.evaluate()
        def evaluate(msg: Message, context: Context) -> Message:
            self.evaluated.append(to_arrays(next(iter(msg.content.array_records.values()))))
            return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "loss": 0.5})}), reply_to=msg)

    def run(
        self, strategy: Any, start: Named | ArrayRecord | None = None, rounds: int = 2, nodes: int = NODES
    ) -> tuple[Named, TrafficLedger]:
        ledger = TrafficLedger()
        grid = MeteredGrid(InProcessGrid(self.app, nodes), ledger)
        record = start if isinstance(start, ArrayRecord) else fc.record(adapters() if start is None else start)
        return to_arrays(strategy.start(grid, record, num_rounds=rounds).arrays), ledger


def change(number: int, node: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    drawn = Key(5, name, number, node).uniform(int(np.prod(shape))).reshape(shape)
    return (drawn - 0.5).astype(np.float32)


def product(model: Named, layer: str) -> NDArray[np.float64]:
    a, b = (next(v for k, v in model.items() if layer in k and word in k) for word in ("lora_A", "lora_B"))
    return b.astype(np.float64) @ a.astype(np.float64)


def exact(inner: Any = None, **options: Any) -> fc.Adapters:
    return fc.Adapters(FedAvg(**EVERYBODY) if inner is None else inner, fc.Identity(), None, **options)


# What travels.


@pytest.mark.parametrize("downlink", [None, fc.Identity(), fc.EDEN(4, scale="least")])
def test_the_app_has_the_whole_model_in_its_own_order_and_the_first_half_never_travels(downlink: Any) -> None:
    app, start = App(change), adapters()
    seen: list[list[str]] = []

    class Watching(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            seen.append(list(arrays))
            return super().configure_train(server_round, arrays, config, grid)

    end, _ = app.run(fc.Adapters(Watching(**EVERYBODY), fc.Identity(), downlink), start)
    drawn = {name: draw(0, name, start[name].shape, 1 / np.sqrt(start[name].shape[1])) for name in start if is_a(name)}
    for model in (end, *app.given.values(), *app.evaluated):
        assert list(model) == list(start)
        for name, values in drawn.items():
            np.testing.assert_array_equal(model[name], values)
    assert seen == [[name for name in start if not is_a(name)]] * 2
    assert len(app.given) == 2 * NODES
    assert len(app.evaluated) == 2 * NODES
    # Not what the app began with: that would have to be sent.
    assert not any(np.array_equal(start[name], values) for name, values in drawn.items())


def test_messages_hold_half_of_the_model_and_with_one_bit_a_thirtieth() -> None:
    sizes = {}
    start = {k: np.repeat(v, 40, axis=0 if not is_a(k) else 1) for k, v in adapters().items()}
    plain = sum(v.nbytes for v in start.values())
    for label, strategy in {"half": exact(), "bits": fc.Adapters(FedAvg(**EVERYBODY))}.items():
        app = App(change)
        app.run(strategy, start, rounds=2)
        sizes[label] = strategy.reports[2].payload_bytes / NODES
    halves = sum(v.nbytes for k, v in start.items() if not is_a(k))
    assert sizes["half"] == pytest.approx(halves, rel=0.02)
    assert sizes["bits"] < halves / 25
    assert halves < plain
