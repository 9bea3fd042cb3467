"""Updates to compress: what one client of a CNN, an LSTM and a transformer sends in the second round of a training.

They are trained when they are asked for, from keys, and stored nowhere. Tasks of this package learn: MNIST's CNN, and
on Shakespeare the character LSTM and a small transformer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import nn

from fedcomp.experiments.bench.readpass import Vector
from fedcomp.rng import Key
from fedcomp.tasks import get_task
from fedcomp.tasks.base import Task

CLIENTS: Final = 10
LAYERS: Final = 4
HEADS: Final = 4
SPEAKERS: Final = 20


def _images(_quick: bool) -> tuple[Task, nn.Module]:
    task = get_task("mnist")
    return task, task.model(0)


def _recurrent(quick: bool) -> tuple[Task, nn.Module]:
    task = get_task("tiny-shakespeare", hidden=32 if quick else 256, speakers=SPEAKERS)
    return task, task.model(0)


def _transformer(quick: bool) -> tuple[Task, nn.Module]:
    sizes = {"hidden": 32 if quick else 128, "layers": LAYERS, "heads": HEADS}
    task = get_task("tiny-shakespeare", speakers=SPEAKERS, model="transformer", **sizes)
    return task, task.model(0)


UPDATES: Final[dict[str, tuple[Callable[[bool], tuple[Task, nn.Module]], float]]] = {
    "CNN": (_images, 0.05),
    "LSTM": (_recurrent, 1.0),
    "transformer": (_transformer, 0.1),
}
"""By name: what makes task and model, and the step size."""


def captured(name: str, seed: int = 0, *, quick: bool = False) -> tuple[Vector, str]:
    """Return the update of one client, float32 of shape (n,), and which data it was trained on.

    The client begins with the model that another one has trained, since the initial one gives larger updates than most
    rounds do.

    Parameters
    ----------
    name : str
        One of :data:`UPDATES`.
    seed : int
        Of the batches.
    quick : bool
        Train a smaller model, for two steps instead of an epoch of at most 50.
    """
    make, rate = UPDATES[name]
    task, model = make(quick)
    for client in (0, 1):
        before = _values(model)
        key = Key(seed, "bench peers", 1 + client, client)
        task.train(model, task.client(client, CLIENTS), lr=rate, key=key, max_steps=2 if quick else 50)
    return _values(model) - before, task.data.note


def _values(model: nn.Module) -> Vector:
    with torch.no_grad():
        values: Vector = np.concatenate([parameter.numpy().ravel() for parameter in model.parameters()])
    return values
