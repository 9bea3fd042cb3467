"""SGD of several workers in one process with delayed gradients, to measure the effect on accuracy.

A perceptron on digits in numpy, float32; the mean of the workers' gradients makes the step of the server, with momentum
if asked for. All differences between rows are the delay's, since nothing is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.rng import Key

WORKERS: Final = 4
HIDDEN: Final = 64
BATCH: Final = 32

Weights = list[NDArray[np.float32]]


def perceptron(seed: int, sizes: Sequence[int]) -> Weights:
    """Return matrices and biases of a perceptron with one hidden layer, scaled as He et al. do."""
    drawn = Key(seed, "delayed/model").generator()
    first, hidden, last = sizes
    shapes = [(first, hidden), (hidden, last)]
    matrices = [(drawn.standard_normal(shape) * np.sqrt(2.0 / shape[0])).astype(np.float32) for shape in shapes]
    return [matrices[0], np.zeros(hidden, np.float32), matrices[1], np.zeros(last, np.float32)]


def gradient(weights: Weights, x: NDArray[np.float32], y: NDArray[Any]) -> Weights:
    """Return the gradient of the mean cross-entropy of a batch."""
    first, bias, second, offset = weights
    hidden = np.maximum(x @ first + bias, 0)
    scores = hidden @ second + offset
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(y)), y] -= 1
    shares /= np.float32(len(y))
    back = (shares @ second.T) * (hidden > 0)
    return [x.T @ back, back.sum(axis=0), hidden.T @ shares, shares.sum(axis=0)]


def accuracy(weights: Weights, x: NDArray[np.float32], y: NDArray[Any]) -> float:
    """Return the percentage of examples that are recognised; of weights that are not finite, that of class 0."""
    if not all(np.isfinite(each).all() for each in weights):
        return 100.0 * float(np.mean(y == 0))
    first, bias, second, offset = weights
    # Weights that diverge are finite for a while, and scores are not: their accuracy says so.
    with np.errstate(over="ignore", invalid="ignore"):
        scores = np.maximum(x @ first + bias, 0) @ second + offset
    return 100.0 * float(np.mean(scores.argmax(axis=1) == y))


def train(rate: float, momentum: float, delay: int, warmup: int, seed: int, *, steps: int) -> dict[str, Any]:
    """Return the test accuracy after ``steps`` updates, all of which are applied, the last ones in the drain.

    Parameters
    ----------
    delay : int
        Steps that a gradient is old when it is applied.
    warmup : int
        First steps without delay.
    """
    shards, (x, y), sizes = _digits()
    weights = perceptron(seed, sizes)
    velocity = [np.zeros_like(each) for each in weights]
    under_way: deque[Weights] = deque()

    def apply() -> None:
        for value, moved, change in zip(weights, velocity, under_way.popleft(), strict=True):
            moved *= np.float32(momentum)
            moved += change
            value -= np.float32(rate) * moved

    with np.errstate(all="ignore"):
        for step in range(steps):
            total = [np.zeros_like(each) for each in weights]
            for worker, (inputs, classes) in enumerate(shards):
                rows = Key(seed, "delayed/batch", step, worker).generator().integers(0, len(classes), BATCH)
                for into, part in zip(total, gradient(weights, inputs[rows], classes[rows]), strict=True):
                    into += part / np.float32(WORKERS)
            under_way.append(total)
            while len(under_way) > (0 if step < warmup else delay):
                apply()
        while under_way:
            apply()
    return {"accuracy": accuracy(weights, x, y)}


@cache
def _digits() -> tuple[list[tuple[Any, Any]], tuple[Any, Any], tuple[int, int, int]]:
    from fedcomp.tasks import get_task

    task = get_task("digits")
    shards = [(data.x, data.y) for data in (task.client(worker, WORKERS) for worker in range(WORKERS))]
    return shards, (task.test.x, task.test.y), (shards[0][0].shape[1], HIDDEN, 10)


def largest_stable(delay: int) -> float:
    """Return the largest step size times curvature of which gradient descent with this delay does not blow up.

    By bisection of a recursion on one parabola.
    """

    def stays(step: float) -> bool:
        values = [1.0] * (delay + 1)
        for _ in range(3000):
            values.append(values[-1] - step * values[-1 - delay])
        return abs(values[-1]) <= 1.0

    low, high = 0.0, 2.5
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if stays(middle) else (low, middle)
    return low
