"""Advice of models of adapters: what may travel, and which half of them is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from advice import Row, quiet, row, trains
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedcomp as fc
from fedcomp.flower.records import to_arrays

Named = dict[str, Any]

A, B = "base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight"
BIAS = "base_model.model.q.lora_B.bias"
START = {A: np.ones((4, 16), np.float32), B: np.zeros((24, 4), np.float32)}
TABLE = {"embed.base_layer.weight": np.ones((65, 16), np.float32)}
OTHERS = {A: START[A], B: START[B] + 1}


def learns(start: Named, returned: Callable[[Named], Named] = lambda arrays: arrays, **options: Any) -> bool:
    """Whether B moves in a run of clients that add one to all but A, and return what a function says."""
    app = ClientApp(mods=[fc.compression()])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        name, record = next(iter(msg.content.array_records.items()))
        arrays = {k: v if "lora_A" in k else v + 1 for k, v in to_arrays(record).items()}
        content = RecordDict({name: fc.record(returned(arrays)), "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=msg)

    with fc.InProcessGrid(app, 3) as grid:
        end: ArrayRecord = fc.Adapters(quiet(), **options).start(grid, fc.record(start), num_rounds=1).arrays
    return bool(any(a.numpy().any() and not np.array_equal(a.numpy(), start[k]) for k, a in end.items() if "B" in k))


def second(arrays: Named) -> Named:
    return {k: v + 1 if k == A else v for k, v in arrays.items()}


ROWS: tuple[Row, ...] = (
    row(
        "send what get_peft_model_state_dict(model) returns",
        lambda: learns({"base_model.model." + name: values for name, values in START.items()}),
        lambda: learns(START),
    ),
    row(
        "is half of an adapter (pairs={}); use",
        lambda: learns(TABLE, also=list(TABLE)),
        lambda: trains(fc.Compressed(quiet())),
    ),
    row(
        "the model lacks the other one, {}; send both, or allow a bias of its own with also=[{}]",
        lambda: learns({**START, BIAS: np.zeros(24, np.float32)}),
        lambda: learns(START) and learns({**START, BIAS: np.zeros(24, np.float32)}, also=[BIAS]),
    ),
    row(
        "allow it with also=[{}]; else leave it out of the state dict",
        lambda: learns({**START, **TABLE}),
        lambda: learns({**START, **TABLE}, also=list(TABLE)) and learns(START),
    ),
    row(
        "and begin with a new one, or continue with the seed of its own run",
        lambda: learns(OTHERS),
        lambda: learns(START) and learns({**OTHERS, A: fc.adapters.draw(3, A, (4, 16), 0.25)}, seed=3),
    ),
    row(
        "return all tensors of it under their own names",
        lambda: learns(START, lambda arrays: {B: arrays[B]}),
        lambda: learns(START),
    ),
    row("fc.freeze(model) before the optimizer is made", lambda: learns(START, second), lambda: learns(START)),
)
