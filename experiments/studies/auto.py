"""Auto against FedAvg and its rivals: five tasks, several cohorts and bits, at a user's step size and at tuned ones."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np

from fedcomp import wire
from fedcomp.codecs import Auto, get_codec
from fedcomp.codecs.positional import Stretch
from fedcomp.experiments.experiment import Rows, Studied
from fedcomp.experiments.findings import Curves, Table, largest, mean, spread
from fedcomp.experiments.kit import Records, curves, repetitions, table
from fedcomp.experiments.options import Config, numbers
from fedcomp.experiments.spec import RunSpec, parse_settings
from fedcomp.experiments.studies.readme import names
from fedcomp.experiments.tables import Found, Training, fields_of, planned, trained
from fedcomp.layout import NONE_DENSE, Update, Vector
from fedcomp.program import System
from fedcomp.rng import Key
from fedcomp.strategies.parts import TASK_PREFIX, below
from fedcomp.systems.pair import Pair

FEDAVG: Final = "FedAvg"
DEFAULT: Final = "Auto, 0.5 bits up, 1 down"
QUARTER: Final = "Auto, 0.25 bits up, 1 down"
MEMORY: Final = "Auto with feedback, 0.1 bits up"
TOPK: Final = "top-k q2, 0.1 bits up"

_DOWN: Final = "downlink=auto downlink.bits=1 downlink.feedback=true"
_UNBIASED: Final = "auto codec.feedback=false codec.bits="
_ROUNDED: Final = "auto codec.feedback=true codec.bits="

ROWS: Final[Rows] = {
    FEDAVG: "fedavg",
    DEFAULT: f"{_UNBIASED}0.5 {_DOWN}",
    QUARTER: f"{_UNBIASED}0.25 {_DOWN}",
    MEMORY: f"{_ROUNDED}0.1",
    # As many bytes as the previous row, and some more.
    TOPK: "topk codec.density=0.0106 codec.values=q2",
    "EDEN, 1 bit up": "eden codec.bits=1",
}
"""The rows of every task: system and settings by label."""

RIVALS: Final[Rows] = {
    "top-k q4, 0.1 bits up": "topk codec.density=0.0088 codec.values=q4",
    "EDEN of a random part, 0.1 bits up": "eden-part codec.bits=0.1",
    "QSGD, 1 level": "qsgd codec.levels=1",
    "FedPAQ, 8 bits": "qsgd codec.levels=127",
    "FedAvg, float16 up": "topk feedback=false codec.density=1.0 codec.values=fp16",
}
"""Further rows of the first task."""

_IMAGES: Final = "clients={clients} task.partition=dirichlet:0.5"
_TEXT: Final = "clients={clients} task=tiny-shakespeare max_steps=4 task.seq_len=16 task.speakers={clients}"

TASKS: Final[Mapping[str, str]] = {
    "digits": f"task=digits lr=0.4 batch_size=16 max_steps=10 {_IMAGES}",
    "mnist": f"task=mnist lr=0.1 batch_size=8 max_steps=4 task.train_examples=12000 task.test_examples=2000 {_IMAGES}",
    "cifar10-subset": f"task=cifar10-subset lr=0.05 momentum=0.9 batch_size=16 max_steps=8 {_IMAGES}",
    "lstm": f"{_TEXT} lr=10 batch_size=16 task.hidden=96",
    "transformer": f"{_TEXT} lr=1 batch_size=8 task.model=transformer task.hidden=48 task.layers=2",
}
"""By task, what is learnt and how a client trains in a round, at FedAvg's best step size."""

TUNABLE: Final = {task: TASKS[task] for task in ("digits", "mnist", "cifar10-subset")}
"""Tasks for which a part of the training examples can replace the test split."""

COHORTS: Final[Mapping[str, tuple[int, str]]] = {
    "5 of 50": (50, "fraction=0.1"),
    "1 client": (1, ""),
    "3 clients": (3, ""),
    "FedAdam": (0, "inner=fedadam inner.eta=0.01"),
}
"""By the label of a cohort, its number of clients (0 for the run's own) and its settings."""

EARLY: Final = "lost from round 5 on, in tolerances"
LATE: Final = "lost from round 10 on, in tolerances"
ABOVE: Final = "loss above that of top-k q2 and the noise, rounds 5 and 10"
BETTER: Final = "part of the tasks on which feedback ends below top-k q2"
BYTES: Final = "bytes up over those of top-k q2 on the wire, largest"
NOISE: Final = "N x NMSE of form U at {} bits, largest of the tasks"
WITHIN: Final = "places where the default keeps the tolerance from round {} on"
PLACES: Final = "places"

_LARGE: Final = 1_000_000
"""Number of values; it is large, so the minimum size of a frame does not matter."""

LOOKED: Final = 8
ENCODINGS: Final = 10
"""The round whose update is captured, and how many encodings of it are averaged."""


class RandomPart(Auto):
    """EDEN with one bit for as many random coordinates as fit into the budget, in blocks of powers of two."""

    codec_id: ClassVar[str] = "eden-part"

    def pack(self, values: Vector, stretch: Stretch, key: Key) -> wire.Tensor:
        """Return EDEN's encoding of the drawn and scaled values."""
        return self.signs(values, stretch, key)


def random_part(bits: float) -> System:
    """Return the program of this rival."""
    return Pair(RandomPart(bits))


def settings_of(task: str, clients: int) -> str:
    """Return the settings that train a task with this number of clients."""
    return TASKS[task].format(clients=clients)


def places(config: Config) -> dict[str, str]:
    """Return the places where rows are compared, with their settings: every task, and cohorts of the first."""
    tasks = names(str(config.settings["tasks"]), TASKS)
    found = {task: settings_of(task, config.clients) for task in tasks}
    for cohort in names(str(config.settings["cohorts"]), COHORTS):
        clients, own = COHORTS[cohort]
        found[f"{tasks[0]}, {cohort}"] = f"{settings_of(tasks[0], clients or config.clients)} {own}"
    return found


def rows(config: Config) -> Rows:
    """Return the rows at a user's own step size, by ``"place: row"``."""
    found: dict[str, str] = {}
    for number, (place, settings) in enumerate(places(config).items()):
        here = dict(ROWS) if place in TASKS else {row: ROWS[row] for row in (FEDAVG, DEFAULT, QUARTER)}
        if number == 0:
            here |= RIVALS
            for bits in numbers(str(config.settings["bits"])):
                # With fewer bits the noise of the mean is more than twice its signal, so such rows are useless.
                if not Auto(bits=bits).settled(_LARGE, config.clients, returning=True).rounded:
                    here[f"Auto, {bits:g} bits up"] = f"{_UNBIASED}{bits:g}"
                here[f"Auto with feedback, {bits:g} bits up"] = f"{_ROUNDED}{bits:g}"
        found |= {f"{place}: {row}": f"{system} {settings}" for row, system in here.items()}
    return found


def train(spec: RunSpec, training: Training) -> dict[str, Any]:
    """Train a row, over messages if possible. ``path`` holds the round, the accuracy in percent and the loss on the
    test split for every evaluation. Between step sizes of equal accuracy the loss decides."""
    from fedcomp.experiments.central import simulate
    from fedcomp.experiments.engines import inprocess
    from fedcomp.flower.logs import quiet

    with quiet():
        if spec.system not in training.rivals:
            result = inprocess.run(spec)
            seen = [r for r in result.rounds if r.accuracy == r.accuracy]
            path = [(r.round, 100 * r.accuracy, r.loss) for r in seen]
            return fields_of(result, training.last) | {"path": path, "tie": -path[-1][2]}
        plan, system = planned(spec, training)
        out = simulate(replace(plan, policy=NONE_DENSE, held_out=True), system)
    path = [(point.round, 100 * point.accuracy, point.loss) for point in out.points]
    score = mean(accuracy for _, accuracy, _ in path[-training.last :])
    sent = {"uplink": out.uplink, "wire_up": None, "wire_down": None}
    return {**sent, "score": score, "path": path, "tie": -path[-1][2]}


def at(group: Records, number: int, column: int) -> list[float]:
    """Return accuracies (1) or losses (2) after a round, or the last evaluation before it, by seed."""
    return [[point[column] for point in path if point[0] <= number][-1] for path in group.each("path")]


def moments(config: Config) -> list[int]:
    """Return the rounds at which rows are compared: 5, 10 and the last."""
    return sorted({min(number, config.rounds) for number in (5, 10, config.rounds)})


def lost(dense: Records, row: Records, rounds: Sequence[int]) -> float:
    """Return how far a row is behind after the worst of some rounds, in half points or in 0.02 of loss, whichever is
    less."""

    def behind(number: int) -> float:
        points = mean(at(dense, number, 1)) - mean(at(row, number, 1))
        losses = mean(at(row, number, 2)) - mean(at(dense, number, 2))
        return min(points / 0.5, losses / 0.02)

    return largest(map(behind, rounds))


def above(row: Records, rival: Records, rounds: Sequence[int]) -> float:
    """Return how far a row's loss is above a rival's after the worst of some rounds, minus half the range of the
    difference over seeds."""
    differences = [
        [own - other for own, other in zip(at(row, number, 2), at(rival, number, 2), strict=True)] for number in rounds
    ]
    return largest(mean(each) - spread(each) for each in differences)


@functools.cache
def captured(task: str, clients: int, number: int, seed: int) -> Update:
    """Return the update of the first client in a round of FedAvg."""
    from fedcomp.experiments.central import Plan, simulate

    settings = parse_settings(settings_of(task, clients))
    named = {key: settings.pop(key) for key in ("task", "clients")}
    spec = RunSpec("identity", "", str(named["task"]), "inprocess", number, clients, seed, settings)
    seen: list[Update] = []
    simulate(*Plan.of(spec), look=lambda each: seen.append(each.updates[0]))
    return seen[-1]


def noise(task: str, codec: str, bits: int, *, config: Config) -> dict[str, float]:
    """Return the squared error of the mean of some encodings of one update over its square, times their number."""
    update = captured(task, config.clients, min(LOOKED, config.rounds), config.seed)
    made, layout = get_codec({"id": codec, "bits": bits}), update.layout
    keys = [Key(config.seed, "uplink", 1, number) for number in range(ENCODINGS)]
    found = np.mean([made.decode(made.encode(update, made.init(layout), key)[0], layout) for key in keys], axis=0)
    error, whole = (float(np.square(each, dtype=np.float64).sum()) for each in (found - update.vector, update.vector))
    return {"noise": ENCODINGS * error / whole}


def claimed(groups: Mapping[str, Mapping[str, Records]], config: Config) -> dict[Any, Any]:
    """Return the results of the rows in each place, by ``("place: row", quantity)`` or by quantity."""
    rounds, early = moments(config), sorted({min(number, config.rounds) for number in (5, 10)})
    made: dict[Any, Any] = {}
    for place, here in groups.items():
        for row in (row for row in (DEFAULT, QUARTER) if row in here):
            made[f"{place}: {row}", EARLY] = lost(here[FEDAVG], here[row], rounds)
        late = [number for number in rounds if number >= early[-1]]
        made[f"{place}: {DEFAULT}", LATE] = lost(here[FEDAVG], here[DEFAULT], late)
        if MEMORY in here:
            made[f"{place}: {MEMORY}", ABOVE] = above(here[MEMORY], here[TOPK], early)
    pairs = {place: (here[MEMORY], here[TOPK]) for place, here in groups.items() if MEMORY in here}
    made[BYTES] = largest(mean(own.each("wire_up")) / mean(rival.each("wire_up")) for own, rival in pairs.values())
    ends = [[mean(at(group, config.rounds, 2)) for group in pairs[place]] for place in pairs if place in TASKS]
    made[BETTER] = sum(own < rival for own, rival in ends) / len(ends)
    made[PLACES] = len(groups)
    for first, name in ((5, EARLY), (10, LATE)):
        made[WITHIN.format(first)] = sum(made[f"{place}: {DEFAULT}", name] <= 1.0 for place in groups)
    return made


def study(found: Found) -> Studied:
    """Compare the rows of each place, tune those of some tasks, and measure the noise of unbiased codecs."""
    from fedcomp.tasks import get_task

    config, groups = found.config, dict[str, dict[str, Records]]()
    for label, group in found.groups.items():
        place, _, row = label.partition(": ")
        groups.setdefault(place, {})[row] = group
    for number, task in enumerate(names(str(config.settings["tuned"]), TUNABLE)):
        few = {row: ROWS[row] for row in (FEDAVG, DEFAULT, MEMORY, TOPK)}
        groups[f"{task}, tuned"] = _tuned(found, task, few if number else {**ROWS, **RIVALS})
    tasks = names(str(config.settings["tasks"]), TASKS)
    records = found.sweep(noise, {"task": tasks, "codec": ["auto", "eden"], "bits": [1, 2]}, "noise", config=config)
    noises = {NOISE.format(bits): largest(records.where(codec="auto", bits=bits).each("noise")) for bits in (1, 2)}
    settings = [parse_settings(settings_of(task, config.clients)) for task in tasks]
    return Studied(
        claimed(groups, config) | noises,
        [*(_table(place, here, config) for place, here in groups.items()), _noises(records, tasks)],
        [_figure(task, groups[task]) for task in tasks],
        [get_task(str(each["task"]), **below(each, TASK_PREFIX)).record() for each in settings],
    )


def _tuned(found: Found, task: str, rows: Rows) -> dict[str, Records]:
    settings = settings_of(task, found.config.clients)
    usual = float(parse_settings(settings)["lr"])
    steps = [usual * times for times in numbers(str(found.config.settings["steps"]))]
    labelled = {f"{task}, tuned: {row}": f"{system} {settings}" for row, system in rows.items()}
    experiment = replace(found.experiment, rows=labelled)
    groups, _ = trained(found, experiment, repetitions(found.config), {"lr": steps})
    return dict(zip(rows, groups.values(), strict=True))


def _table(place: str, here: Mapping[str, Records], config: Config) -> Table:
    def of(row: str, name: str) -> float | None:
        values = here[row].each(name)
        return None if None in values else mean(values)

    def fewer(row: str, name: str) -> float | None:
        own, dense = of(row, name), of(FEDAVG, name)
        return None if own is None or dense is None else round(dense / own, 1)

    def after(row: str, number: int, column: int) -> str:
        values, digits = at(here[row], number, column), 1 if column == 1 else 3
        return f"{mean(values):.{digits}f}±{spread(values):.{digits}f}"

    columns: dict[str, Any] = {
        "row": str,
        "step size": lambda row: here[row][0].get("lr"),
        "bits up": lambda row: round(32 * (of(row, "uplink") or 0.0) / (of(FEDAVG, "uplink") or 1.0), 3),
        "times fewer up": partial(fewer, name="wire_up"),
        "times fewer down": partial(fewer, name="wire_down"),
    }
    for number in moments(config):
        columns[f"after {number}, %"] = partial(after, number=number, column=1)
        columns[f"loss after {number}"] = partial(after, number=number, column=2)
    caption = (
        "Test accuracy and loss are means of seeds ± half their range. Bits are payload bits per value, where FedAvg "
        "has 32; times fewer counts all serialised messages of the run."
    )
    return table(place, columns, here, caption, optional=["step size"])


def _noises(records: Records, tasks: Sequence[str]) -> Table:
    def of(task: str, codec: str, bits: int) -> float:
        return float(f"{records.one(task=task, codec=codec, bits=bits).noise:.3g}")

    columns: dict[str, Any] = {"task": str}
    for bits in (1, 2):
        for codec, title in (("auto", "Auto"), ("eden", "EDEN")):
            columns[f"{title}, {bits} bits"] = partial(of, codec=codec, bits=bits)
    caption = f"Of the first client's update of round {LOOKED} of FedAvg: squared error of the mean of {ENCODINGS} "
    return table("Noise", columns, tasks, caption + "encodings over its square, times their number.")


def _figure(task: str, here: Mapping[str, Records]) -> Curves:
    chosen = {row: here[row] for row in ROWS}
    line = [[point[0] for point in group[0].path] for group in chosen.values()]
    losses = [[mean(at(group, number, 2)) for number in x] for x, group in zip(line, chosen.values(), strict=True)]
    cells = [{"row": row, "x": x, "y": y} for row, x, y in zip(chosen, line, losses, strict=True)]
    return curves(f"Loss: {task}", cells, "x", "y", "row", x_label="round", y_label="test loss, nats", log_y=True)
