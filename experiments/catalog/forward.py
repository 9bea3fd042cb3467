"""Scalars in place of vectors: forward gradients beside back-propagation, top-k and EDEN at equal rounds and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from fedcomp.experiments.experiment import Experiment, no_rows
from fedcomp.experiments.findings import Findings, Say, mean, spread
from fedcomp.experiments.kit import Records, Sweep, claim, curves, learning_line, over_seeds, points, repetitions, table
from fedcomp.experiments.options import TEXT, Config, Option, numbers
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.rng import Key
from fedcomp.rules import Int

if TYPE_CHECKING:
    from torch import nn

TASK: Final = "digits"
BACKPROP: Final = "back-propagation"
OURS: Final = "32 directions"
FEW: Final = "8 directions"
SHARED: Final = "8 directions, the same for all"
TENSORS: Final = "8 directions of each tensor"
SPARSE: Final = "top-k 1 %"
BOTH: Final = "top-k 1 %, both ways"
BITS: Final = "EDEN, 1 bit"
PROJECTED: Final = "32 projections of a gradient"
PASS: Final = "top-k 1 %, a pass of each client"

STEP: Final = {"max_steps": 1}
"""Settings of a client that sends one gradient, of one batch."""

ROWS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    BACKPROP: ("fedavg", STEP),
    OURS: ("forward", {"directions": 32}),
    FEW: ("forward", {"directions": 8}),
    SHARED: ("forward", {"directions": 8, "shared": True}),
    TENSORS: ("forward", {"directions": 8, "scope": "layer"}),
    "1 direction": ("forward", {"directions": 1}),
    PROJECTED: ("projection", {**STEP, "feedback": False, "codec.scale": "unbiased"}),
    SPARSE: ("topk", {**STEP, "codec.density": 0.01}),
    BOTH: ("topk", {**STEP, "codec.density": 0.01, "downlink": "topk", "downlink.density": 0.04}),
    BITS: ("eden", {**STEP, "codec.bits": 1}),
    # What a sceptic would name: clients that train between two messages.
    PASS: ("topk", {"epochs": 1, "codec.density": 0.01}),
}
"""System and settings by label, in order."""

RIVALS: Final = (PROJECTED, SPARSE, BOTH, BITS, PASS)

MATCHES: Final = "activities"
LOCAL: Final = "local losses, activities"
EXACT: Final = "back-propagation"
WEIGHTS: Final = "weights, one direction for all"
TENSOR_WEIGHTS: Final = "weights, one for each tensor"
LOCAL_EXACT: Final = "local losses, back-propagation"
ESTIMATES: Final = (EXACT, WEIGHTS, TENSOR_WEIGHTS, MATCHES, LOCAL_EXACT, LOCAL)
"""Estimates of the gradient by which one model is trained, without messages."""

MNIST: Final = "mnist"
PASSES: Final = 18
"""Forward passes of a step, of every estimate."""

OPTIONS = {
    "seeds": Option(2, Int(1, 100), "trainings per row, with the seeds from --seed on"),
    "workers": 2,
    "task.hidden": Option("32", TEXT, "widths of the model's hidden layers"),
    "task.partition": Option("iid", TEXT, "how examples are spread: iid, dirichlet:ALPHA, shards:COUNT"),
    "batch_size": Option(64, Int(1), "examples of a step"),
    "steps": Option(
        "0.1,0.3,1,3,10,30",
        TEXT,
        "step sizes; each row takes the one that does best on a validation split, of exact gradients",
        check=numbers,
    ),
    "mnist_steps": Option(500, Int(1), "steps of each estimate on MNIST"),
    "mnist_hidden": Option(64, Int(1), "width of both hidden layers there"),
}

_SHARED = ("task.", "batch_size")


def spec_of(label: str, lr: float, seed: int, config: Config, *, tuning: bool = False) -> RunSpec:
    """Return the run of a row; half of it, on the validation split, if ``tuning``."""
    system, settings = ROWS[label]
    own: dict[str, Any] = {"lr": lr, "evaluate_every": 1, "task.validation": tuning}
    made = config.spec(system, label, TASK, take=_SHARED, **{**settings, **own})
    return replace(made, seed=seed, rounds=max(1, config.rounds // 2) if tuning else config.rounds)


def train(label: str, lr: float, seed: int, *, config: Config, tuning: bool = False) -> dict[str, Any]:
    """Train a row through Flower's messages."""
    from fedcomp.experiments.engines import inprocess
    from fedcomp.flower.logs import quiet

    with quiet():
        result = inprocess.run(spec_of(label, lr, seed, config, tuning=tuning))
    settled = points(result)
    return {
        "settled": settled if settled == settled else 0.0,
        "points": learning_line(result),
        "both": learning_line(result, down=True),
        "up": result.uplink_payload_bytes,
        "down": result.downlink_payload_bytes,
    }


def network(inputs: int, width: int, *, local: bool, key: Key) -> nn.Module:
    """Return two fully connected blocks and heads: one at the end, or one on each block.

    With a head on each block nothing comes back from a block to the one before: each learns by its own head's loss.
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
            """Return the outputs of all heads; the last one's are the model's."""
            out, x = [], x.flatten(1)
            for place, block in enumerate(self.blocks):
                x = torch.relu(block(x.detach() if local else x))
                if local:
                    out.append(self.heads[place](x))
            return out or [self.heads[0](x)]

    return Blocks()


def estimate(row: str, lr: float, seed: int, *, steps: int, tuning: bool, width: int) -> dict[str, Any]:
    """Train one model on MNIST by an estimate of the gradient, on the driver in memory; return its accuracy."""
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
        """Return the loss of each example: the sum over the heads."""
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


def reached(line: list[list[float]], bytes_: float) -> float:
    """Return the accuracy of the last round within a budget of bytes, the mean of up to five before it."""
    within = [accuracy for _, accuracy, sent in line if sent <= bytes_]
    return mean(within[-5:]) if within else 0.0


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Choose every row's step size on a validation split, train it with several seeds, and compare."""
    processes, seeds = int(config.settings["workers"]), repetitions(config)
    grid = numbers(str(config.settings["steps"]))
    tuned = Sweep(
        train,
        {"label": list(ROWS), "lr": list(grid), "seed": [config.seed + 2**32]},
        "tuning",
        {"config": config, "tuning": True},
    )(say, processes)
    best = {label: max(group, key=lambda r: r.settled).lr for label, group in tuned.groups("label").items()}
    cells = [{"label": label, "lr": best[label], "seed": seed} for label in ROWS for seed in seeds]
    groups = Sweep(train, cells, shared={"config": config})(say, processes).groups("label")
    images, model = _mnist(config, say, processes)

    def settled(label: str) -> float:
        return mean(groups[label].each("settled"))

    def bytes_of(label: str, *fields: str) -> float:
        return sum(mean(groups[label].each(field)) for field in fields)

    budget, total = bytes_of(OURS, "up"), bytes_of(OURS, "up", "down")

    def at_equal(label: str, points: str, most: float) -> float:
        return mean([reached(run[points], most) for run in groups[label]])

    ahead = at_equal(OURS, "points", budget) - max(at_equal(label, "points", budget) for label in RIVALS)
    ahead_both = at_equal(OURS, "both", total) - max(at_equal(label, "both", total) for label in RIVALS)
    absent = "" if "'served': 'mnist'" in model["record"] else "set FEDCOMP_DATA to a folder with MNIST's files"
    exchanged = config.clients * config.rounds
    columns: dict[str, Any] = {
        "row": lambda label: label,
        "step size": lambda label: best[label],
        "test, %": lambda label: round(settled(label), 1),
        "±": lambda label: round(spread(groups[label].each("settled")), 1),
        "uplink, bytes": lambda label: round(bytes_of(label, "up") / exchanged),
        "downlink, bytes": lambda label: round(bytes_of(label, "down") / exchanged),
        "times fewer up": lambda label: round(bytes_of(BACKPROP, "up") / bytes_of(label, "up"), 1),
        "both ways": lambda label: round(bytes_of(BACKPROP, "up", "down") / bytes_of(label, "up", "down"), 1),
        f"test, % at {budget / 1e3:.0f} KB up": lambda label: round(at_equal(label, "points", budget), 1),
        f"at {total / 1e6:.2f} MB both ways": lambda label: round(at_equal(label, "both", total), 1),
    }
    rows = {
        "estimate": lambda row: row,
        "step size": lambda row: images[row][0].lr,
        "test, %": lambda row: round(mean(images[row].each("accuracy")), 1),
        "±": lambda row: round(spread(images[row].each("accuracy")), 1),
        "parameters": lambda row: images[row][0].parameters,
    }

    def behind(row: str) -> float:
        return mean(images[EXACT].each("accuracy")) - mean(images[row].each("accuracy"))

    return Findings(
        tables=[
            table(
                "Directions, bytes and accuracy",
                columns,
                ROWS,
                f"{config.clients} clients, {config.rounds} rounds; test accuracy is the mean of the last 5 of them "
                "and over seeds, ± half the range over seeds. Every row takes the step size of the grid that did best "
                "on a validation split; forward gradients scale it by themselves. Bytes of payload are per client and "
                "round. The last two columns are accuracies when a row has sent as many bytes as 32 directions do in "
                "all rounds; a row that has not sent as many by the end is taken at its end.",
            ),
            table(
                "Estimates of the gradient on MNIST",
                rows,
                images,
                f"{config.settings['mnist_steps']} steps of 128 images, one model, no messages; every estimate takes "
                "about 18 forward passes a step, and a step size chosen in the same way. Perturbed activities and "
                "local losses are options of a client's own training: their estimate cannot be made of scalars on a "
                "server." + (f" Not MNIST: {absent}." if absent else ""),
            ),
        ],
        figures=[
            curves(
                "Test accuracy against uplink bytes",
                [groups[label] for label in ROWS],
                lambda group: over_seeds(group, 2),
                lambda group: over_seeds(group, 1),
                lambda group: group[0].label,
                x_label="uplink payload so far, all clients",
                y_label="test accuracy, %",
                log_x=True,
                x_bytes=True,
            )
        ],
        claims=[
            claim(
                f"{OURS}: points of accuracy lost against back-propagation in as many rounds",
                settled(BACKPROP) - settled(OURS),
                "<= 2.0",
                "spec: 1.2, measured",
            ),
            claim(
                f"{OURS}: times fewer uplink bytes",
                bytes_of(BACKPROP, "up") / budget,
                ">= 50.0",
                "4 p bytes against 4 m, and a frame's head; spec: 75 without one",
            ),
            claim(
                f"{OURS}: times fewer bytes both ways",
                bytes_of(BACKPROP, "up", "down") / total,
                ">= 20.0",
                "derived: 4 m C bytes go down in place of the model",
            ),
            claim(
                "points gained by directions of each client's own",
                settled(FEW) - settled(SHARED),
                ">= 0.0",
                "theory: variance over m C and not over m",
            ),
            claim(
                "points ahead of the best rival in as many uplink bytes",
                ahead,
                ">= 0.0",
                "goal: scalars against sparse or few-bit gradients",
                gate=False,
            ),
            claim(
                "points ahead of the best rival in as many bytes both ways",
                ahead_both,
                ">= 0.0",
                "goal",
                gate=False,
            ),
            *(
                claim(
                    f"MNIST: points behind back-propagation, {row}",
                    behind(row),
                    bound,
                    source,
                    gate=gate,
                    skipped=absent,
                )
                for row, bound, source, gate in (
                    (LOCAL, "<= 1.0", "goal: the abstract's forward gradients match back-propagation on MNIST", False),
                    (MATCHES, "<= 10.0", "measured here before", True),
                    (WEIGHTS, "<= 1.0", "goal: the same, of weights", False),
                )
            ),
        ],
        answer=f"{OURS} of each client: {bytes_of(BACKPROP, 'up') / budget:.0f} times fewer bytes up and "
        f"{bytes_of(BACKPROP, 'up', 'down') / total:.0f} times fewer both ways, "
        f"{settled(BACKPROP) - settled(OURS):.1f} points lost in as many rounds; in as many uplink bytes "
        f"{abs(ahead):.1f} points "
        f"{'ahead of' if ahead >= 0 else 'behind'} the best rival.",
    )


def _mnist(config: Config, say: Say, processes: int) -> tuple[dict[str, Records], Any]:
    """Return the trainings by estimate, and one of them."""
    steps, width = int(config.settings["mnist_steps"]), int(config.settings["mnist_hidden"])
    grid = [0.03, 0.1, 0.3, 1.0, 10.0, 30.0, 100.0]
    shared = {"steps": max(1, steps // 4), "tuning": True, "width": width}
    axes: dict[str, list[Any]] = {"row": list(ESTIMATES), "lr": grid, "seed": [config.seed + 2**32]}
    tried = Sweep(estimate, axes, "tuning on MNIST", shared)(say, processes)
    best = {row: max(group, key=lambda r: r.accuracy).lr for row, group in tried.groups("row").items()}
    cells = [{"row": row, "lr": best[row], "seed": seed} for row in ESTIMATES for seed in repetitions(config)]
    found = Sweep(estimate, cells, "MNIST", {"steps": steps, "tuning": False, "width": width})(say, processes)
    return found.groups("row"), found[0]


EXPERIMENT = Experiment(
    name="forward",
    question="What do a few directional derivatives buy in place of a gradient?",
    # Every training has a step size of its own, which is found first.
    rows=no_rows,
    measure=measure,
    options=OPTIONS,
    rounds=180,
    clients=4,
    minutes=5.0,
    quick=(
        "rounds=3",
        "clients=2",
        "seeds=1",
        "steps=0.3",
        "task.hidden=4",
        "mnist_steps=4",
        "mnist_hidden=4",
    ),
    notes=(
        "Digits of 8x8 pixels, spread evenly over the clients, a model of 2410 parameters; every client's message is "
        "about one batch, or in one row about a pass over its data. Forward gradients measure how the loss of the "
        "batch changes along random directions of signs, without back-propagation; the server makes the estimate of "
        "these numbers and the directions, and sends the numbers of all clients down in place of the model.\n\n"
        "Rivals back-propagate and send the same number of projections (FedMPDD), the largest hundredth of the "
        "gradient with error feedback, with the model or with compressed steps down, or one bit per coordinate."
    ),
)
