"""A part of the experiment ``forward``: one model trained by estimates of its gradient, of few or many directions.

No messages are sent: what is compared is how near each estimate comes to back-propagation in as many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcomp.forward.activity import activity_gradients
from fedcomp.forward.directions import Directions, step_scale
from fedcomp.forward.evaluate import Objective, Tangent, slopes
from fedcomp.rng import Key
from fedcomp.tasks import get_task
from fedcomp.tasks.base import Split

TASK: Final = "mnist"
PASSES: Final = 18
"""Forward passes of a step, of every estimate."""


class Blocks(nn.Module):
    """Fully connected blocks, one after the other, and heads: one at the end, or one on each block.

    With a head on each block nothing comes back from a block to the one before: each learns by its own head's loss.
    """

    def __init__(self, inputs: int, widths: tuple[int, ...], classes: int, *, local: bool, key: Key) -> None:
        super().__init__()
        sizes = (inputs, *widths)
        self.local = local
        self.blocks = nn.ModuleList([nn.Linear(a, b) for a, b in zip(sizes, widths, strict=False)])
        self.heads = nn.ModuleList([nn.Linear(width, classes) for width in (widths if local else widths[-1:])])
        generator = torch.Generator().manual_seed(key.u64() >> 1)
        with torch.no_grad():
            for layer in (*self.blocks, *self.heads):
                assert isinstance(layer, nn.Linear)
                bound = (1.0 / layer.in_features) ** 0.5
                layer.weight.uniform_(-bound, bound, generator=generator)
                layer.bias.zero_()

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the outputs of all heads; the last one's are the model's."""
        out, x = [], x.flatten(1)
        for place, block in enumerate(self.blocks):
            x = torch.relu(block(x.detach() if self.local else x))
            if self.local:
                out.append(self.heads[place](x))
        return out or [self.heads[0](x)]


def losses(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each example: the sum over the heads."""
    return torch.stack([nn.functional.cross_entropy(found, y, reduction="none") for found in model(x)]).sum(0)


Estimate = Callable[[Blocks, Tensor, Tensor, Key], Mapping[str, NDArray[np.float32]]]


def backprop(module: Blocks, x: Tensor, y: Tensor, key: Key) -> Mapping[str, NDArray[np.float32]]:
    """Return the gradient."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(losses(module, x, y).mean(), parameters)
    return {name: gradient.numpy() for name, gradient in zip(names, found, strict=True)}


def along_weights(*, blocks: bool) -> Estimate:
    """Return the estimate along directions of the weights: one for all of them, or one for each tensor."""

    def estimate(module: Blocks, x: Tensor, y: Tensor, key: Key) -> Mapping[str, NDArray[np.float32]]:
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        directions = Directions(key, sizes if blocks else [sum(sizes)], PASSES // len(sizes) if blocks else PASSES)
        objective = Objective(module, lambda model: losses(model, x, y).mean(), len(y))
        _, found = slopes(objective, _tangents(directions, shapes, blocks=blocks), at_once=6)
        vector = directions.combine(found.reshape(len(directions.sizes), directions.count)).astype(np.float32)
        parts = np.split(vector, np.cumsum(sizes)[:-1])
        return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    return estimate


def _tangents(directions: Directions, shapes: Mapping[str, tuple[int, ...]], *, blocks: bool) -> Iterator[Tangent]:
    names, ends = list(shapes), np.cumsum([int(np.prod(shape)) for shape in shapes.values()])[:-1]
    for block in range(len(directions.sizes)):
        for k in range(directions.count):
            signs = directions.signs(block, k)
            if blocks:
                # Zeros for the others, so that passes of different tensors may be made at once.
                parts = [np.zeros(shapes[name], np.float32) for name in names]
                parts[block] = signs.reshape(shapes[names[block]])
                yield dict(zip(names, parts, strict=True))
            else:
                yield {n: p.reshape(shapes[n]) for n, p in zip(names, np.split(signs, ends), strict=True)}


def along_activities(module: Blocks, x: Tensor, y: Tensor, key: Key) -> Mapping[str, NDArray[np.float32]]:
    """Return the estimate along directions of the layers' outputs, in about as many passes."""
    layers = len(module.blocks) + len(module.heads)
    return activity_gradients(module, lambda model: losses(model, x, y), key, count=PASSES // layers).gradients()


@dataclass(frozen=True)
class Row:
    """One way to train."""

    estimate: Estimate
    local: bool = False
    directions: str = ""
    """Whose largest part the step has to be scaled by: "all", "blocks", or nothing."""


ROWS: Final[Mapping[str, Row]] = {
    "back-propagation": Row(backprop),
    "weights, one direction for all": Row(along_weights(blocks=False), directions="all"),
    "weights, one for each tensor": Row(along_weights(blocks=True), directions="blocks"),
    "activities": Row(along_activities),
    "local losses, back-propagation": Row(backprop, local=True),
    "local losses, activities": Row(along_activities, local=True),
}


def run(row: str, lr: float, seed: int, *, steps: int, tuning: bool, widths: tuple[int, ...]) -> dict[str, Any]:
    """Train, and return the accuracy in percent; on a validation split of the training images if ``tuning``."""
    made, task = ROWS[row], get_task(TASK)
    if tuning:
        task = task.validating()
    data, test = task.client(0, 1), task.test
    key = Key(seed, "measuring")
    module = Blocks(int(np.prod(data.x.shape[1:])), widths, 10, local=made.local, key=key.at(purpose="model"))
    sizes = [p.numel() for p in module.parameters()]
    scale = {"all": step_scale(sum(sizes), PASSES), "blocks": step_scale(max(sizes), PASSES // len(sizes)), "": 1.0}
    step = lr * scale[made.directions]
    batches = data.batches(batch_size=128, key=key.at(purpose="batches"), epochs=None, max_steps=steps)
    parameters = dict(module.named_parameters())
    for number, (x, y) in enumerate(batches):
        found = made.estimate(module, x, y, key.at(purpose="signs", round=number))
        with torch.no_grad():
            for name, gradient in found.items():
                parameters[name].sub_(torch.from_numpy(gradient), alpha=step)
    return {"accuracy": accuracy(module, test), "parameters": sum(sizes), "record": str(task.record())}


def accuracy(module: Blocks, split: Split) -> float:
    """Return the percentage of examples that the last head is right about; 0 when it has no numbers."""
    x, y = split.tensors
    with torch.no_grad():
        outputs = module(x)[-1]
    return 100.0 * float((outputs.argmax(1) == y).float().mean()) if torch.isfinite(outputs).all() else 0.0
