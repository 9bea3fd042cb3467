"""Forward gradients compared with rivals at equal bytes, and six gradient estimators for one model on MNIST."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean, spread
from fedcomp.experiments.kit import Records, repetitions, table
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.tables import TUNING_SEED, Found, Training, by_messages
from fedcomp.rng import Key

if TYPE_CHECKING:
    from torch import nn

OURS: Final = "32 directions"

MATCHES: Final = "activities"
LOCAL: Final = "local losses, activities"
EXACT: Final = "back-propagation"
WEIGHTS: Final = "weights, one direction for all"
TENSOR_WEIGHTS: Final = "weights, one for each tensor"
LOCAL_EXACT: Final = "local losses, back-propagation"
ESTIMATES: Final = (EXACT, WEIGHTS, TENSOR_WEIGHTS, MATCHES, LOCAL_EXACT, LOCAL)
"""Estimates of the gradient that train one model without messages."""

MNIST: Final = "mnist"
PASSES: Final = 18
"""Forward passes per step, the same for every estimate."""

UP: Final = 2
BOTH: Final = 3
"""Columns of a training's points: bytes up, and bytes both ways."""


def train(spec: RunSpec, training: Training) -> dict[str, Any]:
    """Train a row through Flower's messages, half as long when step sizes are compared."""
    halved = max(1, spec.rounds // 2) if spec.settings["task.validation"] else spec.rounds
    return by_messages(replace(spec, rounds=halved), training)


def equal_bytes(found: Found, rivals: Sequence[str]) -> Studied:
    """Compare accuracies within the bytes that 32 directions send, up and both ways, and estimates on MNIST."""
    most = {UP: found.mean(OURS, "uplink"), BOTH: found.mean(OURS, "uplink") + found.mean(OURS, "downlink")}
    names = {UP: "uplink bytes", BOTH: "bytes both ways"}
    quantities: dict[Any, float] = {}
    for column, name in names.items():
        at = {row: mean(reached(run.points, column, most[column]) for run in found.groups[row]) for row in found.rows}
        quantities |= {(row, f"test, % in as many {name}"): round(value, 1) for row, value in at.items()}
        quantities[f"points ahead of the best rival in as many {name}"] = at[OURS] - max(at[row] for row in rivals)
    images = _mnist(found)
    absent = "set FEDCOMP_DATA to a folder with MNIST's files"
    served = "'served': 'mnist'" in images[EXACT][0].record
    exact = mean(images[EXACT].each("accuracy"))
    behind = {
        f"MNIST: points behind back-propagation, {row}": exact - mean(group.each("accuracy"))
        for row, group in images.items()
    }
    rows = {
        "estimate": lambda row: row,
        "step size": lambda row: images[row][0].lr,
        "test, %": lambda row: round(mean(images[row].each("accuracy")), 1),
        "±": lambda row: round(spread(images[row].each("accuracy")), 1),
        "parameters": lambda row: images[row][0].parameters,
    }
    return Studied(
        quantities=quantities | behind,
        skipped={} if served else dict.fromkeys(behind, absent),
        tables=[
            table(
                "Estimates of the gradient on MNIST",
                rows,
                images,
                f"{found.config.settings['mnist_steps']} steps of 128 images, one model, no messages. Every estimate "
                f"takes about {PASSES} forward passes a step, and its step size is chosen in the same way. Perturbed "
                "activities and local losses are options of a client's own training, because a server cannot build "
                "their estimate from scalars." + ("" if served else f" Not MNIST: {absent}."),
            )
        ],
    )


def reached(line: Sequence[Sequence[float]], column: int, most: float) -> float:
    """Return the accuracy within a budget of bytes: the mean of up to five rounds that end with the last within it."""
    within = [point[1] for point in line if point[column] <= most]
    return mean(within[-5:]) if within else 0.0


def _mnist(found: Found) -> dict[str, Records]:
    """Return the trainings by estimate, each at the best step size on a validation split."""
    config = found.config
    steps, width = int(config.settings["mnist_steps"]), int(config.settings["mnist_hidden"])
    grid = [0.03, 0.1, 0.3, 1.0, 10.0, 30.0, 100.0]
    axes: dict[str, Any] = {"row": ESTIMATES, "lr": grid, "seed": [config.seed + TUNING_SEED]}
    tried = found.sweep(estimate, axes, "tuning on MNIST", steps=max(1, steps // 4), tuning=True, width=width)
    best = {row: max(group, key=lambda r: r.accuracy).lr for row, group in tried.groups("row").items()}
    cells = [{"row": row, "lr": best[row], "seed": seed} for row in ESTIMATES for seed in repetitions(config)]
    return found.sweep(estimate, cells, "MNIST", steps=steps, tuning=False, width=width).groups("row")


def network(inputs: int, width: int, *, local: bool, key: Key) -> nn.Module:
    """Return two fully connected blocks, with one head at the end or one on each block.

    With a head on each block, no gradient passes between blocks; each block learns from the loss of its own head.
    """
    import torch
    from torch import Tensor, nn

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(inputs, width), nn.Linear(width, width)])
            self.heads = nn.ModuleList([nn.Linear(width, 10) for _ in range(2 if local else 1)])
            generator = torch.Generator().manual_seed(key.u64() >> 1)
            with torch.no_grad():
                for layer in (*self.blocks, *self.heads):
                    assert isinstance(layer, nn.Linear)
                    bound = (1.0 / layer.in_features) ** 0.5
                    layer.weight.uniform_(-bound, bound, generator=generator)
                    layer.bias.zero_()

        def forward(self, x: Tensor) -> list[Tensor]:
            """Return the outputs of all heads; the last head gives the model's output."""
            out, x = [], x.flatten(1)
            for place, block in enumerate(self.blocks):
                x = torch.relu(block(x.detach() if local else x))
                if local:
                    out.append(self.heads[place](x))
            return out or [self.heads[0](x)]

    return Blocks()


def estimate(row: str, lr: float, seed: int, *, steps: int, tuning: bool, width: int) -> dict[str, Any]:
    """Train one model on MNIST with an estimate of the gradient, on the in-memory driver; return its accuracy."""
    import numpy as np
    import torch
    from torch import Tensor, nn

    from fedcomp.codecs import Identity
    from fedcomp.forward.activity import activity_gradients
    from fedcomp.forward.directions import Directions, step_scale
    from fedcomp.forward.evaluate import Objective, slopes
    from fedcomp.layout import NONE_DENSE, Layout, Vector
    from fedcomp.local import Local
    from fedcomp.systems.pair import Pair
    from fedcomp.tasks import get_task
    from fedcomp.tasks.base import single_thread

    task = get_task(MNIST).validating() if tuning else get_task(MNIST)
    data, key = task.client(0, 1), Key(seed, "measuring")
    inputs = int(np.prod(data.x.shape[1:]))
    module = network(inputs, width, local=row in (LOCAL, LOCAL_EXACT), key=key.at(purpose="model"))
    named = dict(module.named_parameters())
    layout = Layout.of({name: p.detach().numpy() for name, p in named.items()}, NONE_DENSE)
    sizes = [layout.size] if row == WEIGHTS else [t.size for t in layout.tensors]
    step = lr * step_scale(max(sizes), PASSES // len(sizes)) if row in (WEIGHTS, TENSOR_WEIGHTS) else lr
    batches = data.batches(batch_size=128, key=key.at(purpose="batches"), epochs=None, max_steps=steps)

    def losses(model: Any, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each example, summed over the heads."""
        return torch.stack([nn.functional.cross_entropy(found, y, reduction="none") for found in model(x)]).sum(0)

    def along_weights(x: Tensor, y: Tensor, signs: Key) -> dict[str, Any]:
        directions, ends = Directions(signs, sizes, PASSES // len(sizes)), np.cumsum(sizes)

        def vectors() -> Iterator[Vector]:
            for block, end in enumerate(ends):
                for part in directions.each(block):
                    out = np.zeros(layout.size, np.float32)
                    out[end - sizes[block] : end] = part
                    yield out

        objective = Objective(module, lambda model: losses(model, x, y).mean(), len(y))
        _, found = slopes(objective, map(layout.unflatten, vectors()), at_once=6)
        return layout.unflatten(directions.combine(found.reshape(len(sizes), -1)).astype(np.float32))

    def gradient(x: Tensor, y: Tensor, signs: Key) -> Mapping[str, Any]:
        if row in (EXACT, LOCAL_EXACT):
            found = torch.autograd.grad(losses(module, x, y).mean(), list(named.values()))
            return {name: each.numpy() for name, each in zip(named, found, strict=True)}
        if row in (WEIGHTS, TENSOR_WEIGHTS):
            return along_weights(x, y, signs)
        layers = sum(isinstance(layer, nn.Linear) for layer in module.modules())
        return activity_gradients(module, lambda m: losses(m, x, y), signs, count=PASSES // layers).gradients()

    def train(number: int, node: int, start: Vector) -> Vector:
        found = gradient(*next(batches), key.at(purpose="signs", round=number - 1))
        with torch.no_grad():
            for name, each in found.items():
                named[name].sub_(torch.from_numpy(each), alpha=step)
        return layout.flatten({name: p.detach().numpy() for name, p in named.items()})

    with single_thread():
        start = layout.flatten({name: p.detach().numpy() for name, p in named.items()})
        local = Local(Pair(Identity()), layout, start, train, lambda node: 1.0, 1)
        for number in range(1, steps + 1):
            local.step(number)
        x, y = task.test.tensors
        with torch.no_grad():
            outputs = module(x)[-1]
        right = 100.0 * float((outputs.argmax(1) == y).float().mean()) if torch.isfinite(outputs).all() else 0.0
    return {"accuracy": right, "parameters": layout.size, "record": str(task.record())}
