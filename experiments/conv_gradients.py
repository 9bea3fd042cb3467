"""Gradients of a small convolutional network on the digits, as the transform compressors are studied on.

Three convolutions of 16, 32 and 64 filters and one linear layer, 29,066 weights, on 8x8 digits enlarged to 12x12; SGD
with momentum 0.9 on the mean gradient of four workers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


class Training:
    """The training, step by step: every worker's gradient, then a step along a mean that the caller made of them.

    Parameters
    ----------
    seed : int
        Of the initial weights, the batches and the split.
    rate : float
        Step size.
    held_out : {"nothing", "test", "validation"}
        What is kept for :meth:`accuracy`: a fifth of the digits, or a fifth of those that are not in the test split.
    """

    def __init__(self, seed: int = 0, *, rate: float = RATE, held_out: str = "nothing") -> None:
        import torch
        from sklearn.datasets import load_digits
        from torch.nn import functional

        from fedcomp.rng import Key

        digits = load_digits()
        images = torch.tensor(digits.images / 16.0, dtype=torch.float32)[:, None]
        images = functional.interpolate(images, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        labels = torch.tensor(digits.target)
        # The test split is the same for all seeds: no row may meet it in its tuning.
        order = torch.from_numpy(Key(0, "convolution gradients/test").generator().permutation(len(labels)))
        fifth = len(labels) // 5
        parts: dict[str, tuple[Any, Any]] = {
            "nothing": (slice(None), slice(0)),
            "test": (order[fifth:], order[:fifth]),
            "validation": (order[2 * fifth :], order[fifth : 2 * fifth]),
        }
        train, held = parts[held_out]
        self._images, self._labels = images[train], labels[train]
        self._held = images[held], labels[held]
        self._rate = rate
        self._model = _network(seed)
        self._named = list(self._model.named_parameters())
        self._velocity = [torch.zeros_like(p) for _, p in self._named]
        self._draws = Key(seed, "convolution gradients").generator()
        self.losses: list[float] = []

    def workers(self) -> list[Gradient]:
        """Return every worker's gradient on a batch of its own; notes their mean loss in :attr:`losses`."""
        import torch
        from torch.nn import functional

        found, losses = [], []
        for _ in range(WORKERS):
            batch = torch.from_numpy(self._draws.integers(0, len(self._labels), BATCH))
            loss = functional.cross_entropy(self._model(self._images[batch]), self._labels[batch])
            each = torch.autograd.grad(loss, [p for _, p in self._named])
            found.append({_name(name): g.numpy().copy() for (name, _), g in zip(self._named, each, strict=True)})
            losses.append(loss.item())
        self.losses.append(sum(losses) / WORKERS)
        return found

    def move(self, mean: Gradient) -> None:
        """Take a step along ``mean``."""
        import torch

        with torch.no_grad():
            for i, (name, weights) in enumerate(self._named):
                self._velocity[i] = MOMENTUM * self._velocity[i] + torch.from_numpy(mean[_name(name)])
                weights -= self._rate * self._velocity[i]

    def accuracy(self) -> float:
        """Return the share of the held-out digits that the model knows."""
        import torch

        images, labels = self._held
        with torch.no_grad():
            return float((self._model(images).argmax(1) == labels).float().mean())


def mean_of(workers: Sequence[Gradient]) -> Gradient:
    """Return the plain mean of the workers' gradients."""
    return {name: np.divide(sum(each[name] for each in workers), np.float32(len(workers))) for name in workers[0]}


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
    training = Training(seed)
    found: dict[int, list[Gradient]] = {}
    for step in range(1, max(steps) + 1):
        workers = training.workers()
        if step in steps:
            found[step] = workers
        training.move(mean_of(workers))
    return found


def _name(name: str) -> str:
    layer, _, kind = name.partition(".")
    return NAMES[layer] + (".bias" if kind == "bias" else "")
