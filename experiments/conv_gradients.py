"""Gradients of a small convolutional network on the digits, as the transform compressors are studied on.

Three convolutions of 16, 32 and 64 filters and one linear layer, 29,066 weights, on 8x8 digits enlarged to 12x12; SGD
with momentum 0.9 on the mean gradient of four workers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

WORKERS: Final = 4
BATCH: Final = 32
RATE: Final = 0.02
MOMENTUM: Final = 0.9
SIDE: Final = 12

Gradient = dict[str, NDArray[np.float32]]


def _network(seed: int) -> Any:
    from torch import nn

    from fedcomp.tasks.models import build

    def layers() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (SIDE // 4) ** 2, 10),
        )

    return build(layers, seed)


NAMES: Final = {"0": "conv1", "2": "conv2", "5": "conv3", "9": "linear"}


def gradients(steps: Collection[int], seed: int = 0) -> dict[int, list[Gradient]]:
    """Return every worker's gradient at these steps of one training, counted from 1.

    Parameters
    ----------
    steps : collection of int
    seed : int
        Of the initial weights and of the batches.

    Returns
    -------
    dict of step to list of dict
        By worker the gradient of each tensor: "conv1" to "conv3" of shape (F, D, 3, 3), "linear", and the biases as
        "conv1.bias" and so on.
    """
    import torch
    from sklearn.datasets import load_digits
    from torch.nn import functional

    from fedcomp.rng import Key

    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32)[:, None]
    images = functional.interpolate(images, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    labels = torch.tensor(digits.target)
    model = _network(seed)
    named = list(model.named_parameters())
    velocity = [torch.zeros_like(p) for _, p in named]
    found: dict[int, list[Gradient]] = {}
    draws = Key(seed, "convolution gradients").generator()
    for step in range(1, max(steps) + 1):
        workers = []
        for _ in range(WORKERS):
            batch = torch.from_numpy(draws.integers(0, len(labels), BATCH))
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            workers.append(torch.autograd.grad(loss, [p for _, p in named]))
        if step in steps:
            found[step] = [
                {_name(name): g.numpy().copy() for (name, _), g in zip(named, each, strict=True)} for each in workers
            ]
        with torch.no_grad():
            for i, (_, weights) in enumerate(named):
                velocity[i] = MOMENTUM * velocity[i] + sum(each[i] for each in workers) / WORKERS
                weights -= RATE * velocity[i]
    return found


def _name(name: str) -> str:
    layer, _, kind = name.partition(".")
    return NAMES[layer] + (".bias" if kind == "bias" else "")
