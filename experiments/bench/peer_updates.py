"""Updates to compress: what one client of a CNN, an LSTM and a transformer sends in the second round of a training.

They are trained when they are asked for, from keys, and stored nowhere. Tasks of this package learn: MNIST's CNN, the
character LSTM on Shakespeare, and on the same windows a small transformer, which no task has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcomp.experiments.bench.readpass import Vector
from fedcomp.rng import Key
from fedcomp.tasks import get_task
from fedcomp.tasks.base import Task

CLIENTS: Final = 10
LAYERS: Final = 4
HEADS: Final = 4
SPEAKERS: Final = 20


class Block(nn.Module):
    """Causal self-attention and a layer of four times the width, each added to its input after normalising it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape, ``(B, T, width)``."""
        batch, length, width = x.shape
        # Normalised without gains and offsets, for which the tasks' initialisation has no rule.
        parts = self.attention(functional.layer_norm(x, (width,))).reshape(batch, length, 3, HEADS, width // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(functional.layer_norm(x, (width,)))))


class CharTransformer(nn.Module):
    """Next-character model: embeddings of characters and places, :data:`LAYERS` blocks, linear read-out."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(LAYERS)])
        self.output = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape ``(B, T, vocabulary)`` for characters ``x`` of shape ``(B, T)``, int64."""
        # Embeddings begin with standard normal values, which would drown what the blocks add.
        both = (self.characters(x) + self.places.weight[: x.shape[1]]) / math.sqrt(2.0)
        features = self.blocks(both)
        return self.output(functional.layer_norm(features, features.shape[-1:]))


def _images(_quick: bool) -> tuple[Task, nn.Module]:
    task = get_task("mnist")
    return task, task.model(0)


def _recurrent(quick: bool) -> tuple[Task, nn.Module]:
    task = get_task("tiny-shakespeare", hidden=32 if quick else 256, speakers=SPEAKERS)
    return task, task.model(0)


def _transformer(quick: bool) -> tuple[Task, nn.Module]:
    from fedcomp.tasks.models import build

    task: Any = get_task("tiny-shakespeare", speakers=SPEAKERS)
    width = 32 if quick else 128
    return task, build(lambda: CharTransformer(task.classes, task.options["seq_len"], width), 0)


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
