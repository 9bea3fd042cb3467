"""The small convolutional network on digits that the pages ``fft``, ``gradiveq`` and ``lgc`` train.

Three convolutions of 16, 32 and 64 filters and one linear layer, 29,066 weights, on 8x8 digits enlarged to 12x12; SGD
with momentum 0.9 on the mean gradient of four workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import NonFiniteUpdate
from fedcomp.experiments.findings import mean
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.tables import Training, rival
from fedcomp.layout import Layout
from fedcomp.local import Local
from fedcomp.rng import Key

if TYPE_CHECKING:
    from fedcomp.experiments.central import Cost, Sending

WORKERS: Final = 4
BATCH: Final = 32
RATE: Final = 0.02
MOMENTUM: Final = 0.9
SIDE: Final = 12
EVALUATIONS: Final = 25

PAGE: Final[Mapping[str, Any]] = {
    "task": "digits",
    "tune": {"lr": "steps"},
    "tunes_without_messages": False,
    "last": 1,
    "title": "Training",
    "rounds": 500,
    "clients": WORKERS,
}
"""Options that these experiments share; a round is a step."""

NOTES: Final = (
    "Four workers train a network of three convolutions, 16, 32 and 64 filters, on the digits enlarged to 12 x 12, "
    "with momentum .9; every step goes along the mean gradient, and each row has its own step size. Training runs "
    "without messages but with real frames. The test split has 359 images, so one image is worth .28 points."
)

Gradient = dict[str, NDArray[np.float32]]
"""The shapes by tensor: "conv1" to "conv3" of shape (F, D, 3, 3), "linear", and the biases as "conv1.bias" and so
on."""


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


class Descent:
    """The training, step by step: every worker's gradient, then a step along a mean that the caller computed.

    Parameters
    ----------
    seed : int
        Seed of the initial weights, the batches and the split.
    rate : float
        Step size.
    held_out : {"nothing", "test", "validation"}
        Data held out for :meth:`accuracy`: a fifth of the digits, or a fifth of those that are not in the test split.
    """

    def __init__(self, seed: int = 0, *, rate: float = RATE, held_out: str = "nothing") -> None:
        import torch
        from sklearn.datasets import load_digits
        from torch.nn import functional

        digits = load_digits()
        images = torch.tensor(digits.images / 16.0, dtype=torch.float32)[:, None]
        images = functional.interpolate(images, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        labels = torch.tensor(digits.target)
        # The test split is the same for all seeds, so no row can see it during tuning.
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
        self._weights = {
            NAMES[name[0]] + name[1:].removesuffix(".weight"): p for name, p in self._model.named_parameters()
        }
        self._velocity = {name: torch.zeros_like(p) for name, p in self._weights.items()}
        self._draws = Key(seed, "convolution gradients").generator()
        self.losses: list[float] = []

    @property
    def weights(self) -> Gradient:
        """The model's tensors."""
        return {name: p.detach().numpy() for name, p in self._weights.items()}

    def workers(self) -> list[Gradient]:
        """Return every worker's gradient on its own batch, and add their mean loss to :attr:`losses`."""
        import torch
        from torch.nn import functional

        found, losses = [], []
        for _ in range(WORKERS):
            batch = torch.from_numpy(self._draws.integers(0, len(self._labels), BATCH))
            loss = functional.cross_entropy(self._model(self._images[batch]), self._labels[batch])
            each = torch.autograd.grad(loss, list(self._weights.values()))
            found.append({name: g.numpy().copy() for name, g in zip(self._weights, each, strict=True)})
            losses.append(loss.item())
        self.losses.append(sum(losses) / WORKERS)
        return found

    def move(self, mean: Gradient) -> None:
        """Take a step along ``mean``."""
        import torch

        with torch.no_grad():
            for name, weights in self._weights.items():
                self._velocity[name] = MOMENTUM * self._velocity[name] + torch.from_numpy(mean[name])
                weights -= self._rate * self._velocity[name]

    def accuracy(self) -> float:
        """Return the accuracy on the held-out digits, in per cent."""
        import torch

        images, labels = self._held
        with torch.no_grad():
            return 100.0 * float((self._model(images).argmax(1) == labels).float().mean())


def mean_of(workers: Sequence[Gradient]) -> Gradient:
    """Return the plain mean of the workers' gradients."""
    return {name: np.divide(sum(each[name] for each in workers), np.float32(len(workers))) for name in workers[0]}


def gradients(seed: int, steps: int) -> Iterator[tuple[int, list[Gradient]]]:
    """Yield the number of each step of a training, from 1, and every worker's gradient in it."""
    descent = Descent(seed)
    for number in range(1, steps + 1):
        workers = descent.workers()
        yield number, workers
        descent.move(mean_of(workers))


def train(
    spec: RunSpec,
    training: Training,
    layout_of: Callable[[Gradient], Layout],
    sent: Callable[[Local, Cost], int] = lambda local, cost: cost.uplink,
) -> tuple[dict[str, Any], Sending]:
    """Train with the gradients that arrive when a system of the experiment's ``rivals`` sends them.

    Parameters
    ----------
    layout_of : callable
        From the model's tensors to the layout of those that the system sends; the others are sent uncompressed and not
        counted.
    sent : callable
        From the driver after a step and the step's cost to the uplink bytes.

    Returns
    -------
    dict, Sending
        The measurements of :meth:`~fedcomp.experiments.tables.Training.run`, with ``dense``, bytes of the gradients as
        float32, and ``last``, uplink bytes of the last step; and the driver of the last step.
    """
    # This imports Flower.
    from fedcomp.experiments.central import Sending

    tuning = bool(spec.settings["task.validation"])
    descent = Descent(spec.seed, rate=float(spec.settings["lr"]), held_out="validation" if tuning else "test")
    layout = layout_of(descent.weights)
    # While a step size is chosen, codecs use the same random draws in all trainings.
    sending = Sending(rival(spec, training), layout, WORKERS, training.config.seed if tuning else spec.seed)
    every, points, uplink, diverged = max(1, spec.rounds // EVALUATIONS), [], [0], None
    for number in range(1, spec.rounds + 1):
        gradients = descent.workers()
        vectors = [layout.flatten({name: gradient[name] for name in layout.by_name}) for gradient in gradients]
        try:
            arrived, cost = sending.send(number, vectors)
        except NonFiniteUpdate:
            diverged = number
            break
        uplink.append(sent(sending.local, cost))
        descent.move({**mean_of(gradients), **layout.unflatten(arrived)})
        if number % every == 0 or number == spec.rounds:
            points.append([float(number), descent.accuracy(), float(sum(uplink))])
    score, loss = (points[-1][1] if diverged is None else 0.0), mean(descent.losses[-50:])
    return {
        "points": points,
        "score": score,
        # Between equal accuracies, which are frequent with a few hundred images, the smaller loss decides.
        "tie": -loss,
        "loss": loss,
        "diverged": diverged,
        "uplink": sum(uplink),
        "last": uplink[-1],
        "dense": spec.rounds * WORKERS * 4 * layout.size,
    }, sending
