"""The example on tuning adapters: a tracker that counts what is sent, and the flow itself."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedcomp as fc
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lora_transformers"
MISSING = [name for name in ("torch", "transformers", "peft") if importlib.util.find_spec(name) is None]


def strategy_module() -> Any:
    """Return the example's strategy, which needs Flower alone."""
    path = EXAMPLE / "compressed" / "tuning" / "strategy.py"
    spec = importlib.util.spec_from_file_location("tuning_strategy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LAYERS = [f"base_model.model.model.layers.{i}.{part}" for i in (0, 1) for part in ("self_attn.q_proj", "mlp.up_proj")]
RANK, WIDTH, CLIENTS, ROUNDS = 8, 48, 4, 6


def first_model() -> ArrayRecord:
    """Return what get_peft_model_state_dict names: A random, B zero."""
    random = np.random.default_rng(0)
    arrays = {}
    for layer in LAYERS:
        arrays[f"{layer}.lora_A.weight"] = random.uniform(-0.1, 0.1, (RANK, WIDTH)).astype(np.float32)
        arrays[f"{layer}.lora_B.weight"] = np.zeros((2 * WIDTH, RANK), np.float32)
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def target(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).standard_normal((2 * WIDTH, RANK)).astype(np.float32)


def tuned(mods: list[Any], strategy: Any) -> tuple[Any, MeteredGrid]:
    """Run the app's flow with a client that pulls every B towards a target, each with an error of its own."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        arrays = {name: array.numpy().copy() for name, array in msg.content["arrays"].items()}
        shift = int(context.node_config["partition-id"]) - (CLIENTS - 1) / 2
        for name in arrays:
            if ".lora_B" in name:
                arrays[name] += np.float32(0.5) * (target(name) + np.float32(0.1 * shift) - arrays[name])
        record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        return Message(RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 8})}), reply_to=msg)

    with InProcessGrid(app, CLIENTS) as inner:
        grid = MeteredGrid(inner)
        result = strategy.start(
            grid,
            first_model(),
            num_rounds=ROUNDS,
            train_config=ConfigRecord({}),
            evaluate_fn=lambda server_round, arrays: MetricRecord({"tensors": len(arrays)}),
        )
    return result, grid


def test_the_flow_with_peft_named_tensors_and_neither_library() -> None:
    module = strategy_module()
    plain, compressed = module.TrackedFedAvg(), fc.Adapters(module.TrackedFedAvg())
    rows = [tuned([], plain), tuned([fc.compression()], compressed)]
    for strategy, (result, grid) in zip((plain, compressed), rows, strict=True):
        found, sent = grid.ledger.summary(), strategy.tracker.sent
        # What the tracker counts is what travels: arrays and frames, and what names and headers take beside them.
        for way in ("up", "down"):
            assert 0 < found[f"payload_{way}"] <= sent[way] < found[f"payload_{way}"] + 2000 * CLIENTS * ROUNDS
        # The inner loop's model and its evaluation have both halves, whatever travelled.
        assert list(result.arrays) == list(first_model())
        assert result.evaluate_metrics_serverapp[ROUNDS]["tensors"] == 2 * len(LAYERS)
    (dense, _), (half, _) = rows
    errors = []
    for result in (dense, half):
        names = [name for name in result.arrays if ".lora_B" in name]
        gaps = [np.linalg.norm(result.arrays[n].numpy() - target(n)) / np.linalg.norm(target(n)) for n in names]
        errors.append(float(np.mean(gaps)))
    # (1 - 1/2)^6 of the way is left without compression.
    assert errors[0] == pytest.approx(0.5**ROUNDS, rel=0.1)
    assert errors[1] < 0.35
    assert plain.tracker.sent["up"] > 30 * compressed.tracker.sent["up"]
    # All of the first model's B goes down once.
    assert plain.tracker.sent["down"] > 6 * compressed.tracker.sent["down"]


@pytest.mark.long
@pytest.mark.skipif(bool(MISSING), reason=f"extras of this example alone are not installed: {', '.join(MISSING)}")
def test_both_apps_tune_and_the_compressed_one_sends_a_fraction() -> None:
    command = [sys.executable, str(EXAMPLE / "compare.py"), "--rounds", "3", "--clients", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(found) for found in re.findall(r"loss (\S+);", done.stdout)]
    counts = re.findall(r"bytes up (\S+), down (\S+)", done.stdout)
    tracked, whole, half, serialised = [[int(word.replace(",", "")) for word in pair] for pair in counts]
    # Without tuning it is that of 32 words that are equally likely, 3.47.
    assert max(losses) < 3.4
    assert tracked[0] > 30 * half[0]
    for tracker, wire in ((tracked, whole), (half, serialised)):
        assert all(abs(a - b) < 0.25 * b + 6 * 1500 for a, b in zip(tracker, wire, strict=True))
