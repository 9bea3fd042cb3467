"""Part of the experiment ``flare``: an edge, its sensor, and changing surroundings, tick by tick."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcomp.codecs import Codec, TopK
from fedcomp.drift.distance import QuantileSketch, calibrated
from fedcomp.drift.edge import Deployments, Edge, SensorEndpoint, local_link
from fedcomp.drift.sensor import Sensor, SensorSettings
from fedcomp.drift.statistics import STATISTICS
from fedcomp.experiments.findings import mean
from fedcomp.rng import Key

if TYPE_CHECKING:
    from fedcomp.tasks.base import Split, Task

WINDOW: Final = 100
TICK: Final = 20
FOLDS: Final = 5
EPOCHS: Final = 5
NOISE: Final = 0.5
"""Standard deviation of the digits' drift, where pixels are 0 to 1."""

DBM: Final = 6.0
"""Shift of the drifted Wi-Fi strengths, as of another phone's antenna."""

Change = Callable[[NDArray[Any], NDArray[Any], Key], tuple[NDArray[Any], NDArray[Any]]]
"""``change(inputs, labels, key)``: what the sensor sees after the drift, and what it means."""


def nominal_threshold(reference: int, window: int, level: float) -> float:
    """Return the textbook's threshold of the two-sample Kolmogorov-Smirnov test.

    Its level is that of one comparison of two fresh samples. A deployed sensor compares window after window with one
    and the same finite reference; false alarms then follow how lucky that reference was.
    """
    return math.sqrt(-math.log(level / 2) / 2) * math.sqrt((reference + window) / (reference * window))


@dataclass(frozen=True)
class Means:
    """The simple rival: how far the mean of a window is from the reference's."""

    mean: float

    def distance(self, window: ArrayLike) -> float:
        """Return the distance of the means."""
        return abs(float(np.mean(np.asarray(window, np.float64))) - self.mean)


def mean_threshold(reference: NDArray[Any], window: int, key: Key) -> float:
    """Return the rival's threshold by the same rule as ours: 1.3 times the 99.5 % quantile over 200 splits."""
    found = []
    for split in range(200):
        order = key.at(purpose=f"{key.purpose}/split/{split}").uniform(len(reference)).argsort()
        found.append(Means(float(reference[order[window:]].mean())).distance(reference[order[:window]]))
    return 1.3 * float(np.quantile(found, 0.995))


def noisy(x: NDArray[Any], y: NDArray[Any], key: Key) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return images with noise."""
    from fedcomp.tasks import get_task

    # Pixels are standardised alike: from white to black it is the largest difference that there is.
    shades = get_task("digits").train_split.x
    scale = NOISE * float(shades.max() - shades.min())
    return (x + key.generator().normal(0.0, scale, x.shape)).astype(np.float32), y


def swapped(x: NDArray[Any], y: NDArray[Any], key: Key) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the same inputs, of which the first two classes have changed their meaning."""
    return x, np.where(y < 2, 1 - y, y)


def shifted(task: Task) -> Change:
    """Return the shift of all strengths by :data:`DBM`, in the units of the standardised data."""
    x = task.train_split.x.astype(np.float64)
    # Strengths are whole dBm: the smallest step of a column is one of them.
    steps = []
    for column in x.T:
        apart = np.diff(np.unique(np.round(column, 5)))
        steps.append(apart[apart > 1e-4].min())
    shift = (DBM * np.array(steps)).astype(np.float32)
    return lambda x, y, key: (x - shift, y)


DATA: Final = {"digits, noise": "digits", "Wi-Fi, another antenna": "wifi", "digits, labels swapped": "digits"}
"""The task of every kind of drift."""


def change_of(drift: str, task: Task) -> Change:
    """Return what a kind of drift does."""
    return {"digits, noise": noisy, "digits, labels swapped": swapped}.get(drift) or shifted(task)


@dataclass
class Site:
    """One edge: its data, its model, and what it learnt of its sensor.

    Parameters
    ----------
    task : Task
    seed : int
    statistic : str
        The sensors'.
    calibrates : bool
        Whether the sensor is given a reference; without one it collects.
    """

    task: Task
    seed: int
    statistic: str = "confidence"
    calibrates: bool = True
    absorbed: list[Split] = field(default_factory=list)

    def __post_init__(self) -> None:
        from fedcomp.tasks.base import Split

        whole, key = self.task.train_split, Key(self.seed, "flare/split")
        order = key.uniform(len(whole)).argsort()
        train, hold = len(whole) * 45 // 100, len(whole) * 75 // 100
        self.train, self.held, self.pool = (
            Split(whole.x[rows], whole.y[rows]) for rows in (order[:train], order[train:hold], order[hold:])
        )
        self.model = self.task.model(self.seed)
        self.fit(self.model, self.train, 60, "first")

    def fit(self, model: Any, data: Split, epochs: int, purpose: str) -> None:
        """Train a model on data in place."""
        key = Key(self.seed, f"flare/{purpose}", len(self.absorbed))
        lr = 0.1 if purpose == "first" else 0.02
        self.task.train(model, data, lr=lr, momentum=0.9, epochs=epochs, batch_size=32, key=key)

    def figures(self, model: Any, data: Split) -> NDArray[np.float64]:
        """Return the statistic of each example."""
        return STATISTICS[self.statistic](logits(self.task, model, data.x), data.y)

    def learn(self) -> None:
        """Train on, with what the sensor sent beside the former data."""
        self.fit(self.model, self.beside(joined(self.absorbed)), EPOCHS, "again")

    def beside(self, windows: Split) -> Split:
        """Return former data and windows, in equal parts: a hundred examples among six hundred teach little."""
        return joined([self.train] + [windows] * max(1, round(len(self.train) / len(windows))))

    def measure(self, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float64] | None:
        """Return figures of a deployed model on data that it did not learn from: those before, or those after drift.

        What the sensor sent is too little to set apart. So each fifth of it is measured with a model that was trained
        as this one was, without that fifth.
        """
        from fedcomp.tasks.arrays import load_arrays
        from fedcomp.tasks.base import Split

        if not self.calibrates:
            return None
        if not self.absorbed:
            return self.figures(loaded(self.task, arrays), self.held)
        seen = joined(self.absorbed)
        if len(seen) < 2 * WINDOW:
            return None
        found = []
        for fold in range(FOLDS):
            out = np.arange(len(seen)) % FOLDS == fold
            model = loaded(self.task, arrays)
            # As many steps as the deployed one made, from the model before it.
            load_arrays(model, self.before, cast=True)
            self.fit(model, self.beside(Split(seen.x[~out], seen.y[~out])), EPOCHS, "again")
            found.append(self.figures(model, Split(seen.x[out], seen.y[out])))
        return np.concatenate(found)

    def absorb(self, window: Split) -> None:
        """Take a window, and train on; the former model is kept for :meth:`measure`."""
        from fedcomp.tasks.arrays import to_arrays

        self.before = to_arrays(self.model)
        self.absorbed.append(window)
        self.learn()


def logits(task: Task, model: Any, x: NDArray[Any]) -> NDArray[np.float64]:
    """Return a model's outputs."""
    import torch

    from fedcomp.tasks.base import evaluating

    with evaluating(model):
        return np.asarray(task.outputs(model, torch.from_numpy(np.array(x))).numpy(), np.float64)


def loaded(task: Task, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Return a model with these arrays."""
    from fedcomp.tasks.arrays import load_arrays

    model = task.blank()
    load_arrays(model, arrays, cast=True)
    return model


def joined(parts: Sequence[Split]) -> Split:
    """Return the examples of all parts."""
    from fedcomp.tasks.base import Split

    return Split(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))


SCHEDULERS: Final[Mapping[str, str]] = {
    "fixed, every 50 ticks": "the last window after every 50 ticks; the edge trains on it and deploys, each time",
    "fixed, every 10 ticks": "the same, every 10",
    "conditional": "the window when its confidences are unlike the reference, twice in a row",
    "conditional, 10 % steps": "the same; models go down as top-k steps of a tenth of their weights",
    "conditional, by mean": "the same, by the distance of mean confidences: the simple rival",
    "conditional, by loss": "the same as conditional, by the losses of labelled examples",
}
"""What each row does."""


def run(scheduler: str, drift: str, seed: int, *, ticks: int, first: int, last: int) -> dict[str, Any]:
    """Run a sensor for some ticks of which one, between ``first`` and ``last``, begins the drift; return what came."""
    from fedcomp.tasks import get_task
    from fedcomp.tasks.arrays import to_arrays
    from fedcomp.tasks.base import Split

    task = get_task(DATA[drift], hidden="64")
    fixed = scheduler.startswith("fixed")
    interval = int(scheduler.split()[2]) if fixed else 0
    site = Site(task, seed, "loss" if "loss" in scheduler else "confidence", calibrates=not fixed)
    codec: Codec | None = TopK(density=0.1) if "steps" in scheduler else None
    arrays = to_arrays(site.model)
    here, there = local_link()
    edge = Edge(Deployments(arrays, codec, window=WINDOW, seed=seed))
    settings = SensorSettings(WINDOW, cooldown=interval * TICK if fixed else None)
    endpoint = SensorEndpoint(1, arrays, there, codec=codec, statistic=site.statistic, settings=settings)

    def deploy() -> None:
        edge.deploy(to_arrays(site.model), site.measure)
        edge.serve(here)
        edge.push(1, here)
        endpoint.update()
        if "mean" in scheduler and endpoint.sensor.sketch is not None:
            # In the sketch's place; measured once more, since a sketch does not hold the mean.
            reference = site.measure(endpoint.arrays)
            assert reference is not None
            endpoint.sensor.sketch = Means(float(reference.mean()))  # type: ignore[assignment]
            endpoint.sensor.threshold = mean_threshold(reference, WINDOW, Key(seed, "flare/mean"))

    endpoint.heartbeat()
    edge.serve(here)
    deploy()
    rng = Key(seed, "flare/stream").generator()
    begin = first + int(rng.integers(last - first + 1))
    change = change_of(drift, task)
    judged = Split(*change(task.test.x, task.test.y, Key(seed, "flare/judged")))
    uploads: list[int] = []
    right: list[float] = []
    deployed, accuracy, version = loaded(task, endpoint.arrays), 0.0, 0
    for tick in range(ticks):
        rows = rng.integers(len(site.pool), size=TICK)
        x, y = site.pool.x[rows], site.pool.y[rows]
        if tick >= begin:
            x, y = change(x, y, Key(seed, "flare/drift", tick))
        if endpoint.observe(logits(task, deployed, x), x, y):
            uploads.append(tick)
            edge.serve(here)
            windows = edge.windows()
            for window in windows.values():
                site.absorb(Split(window.samples, window.labels))
            edge.forget(windows)
            deploy()
            deployed = loaded(task, endpoint.arrays)
        if tick >= begin:
            if endpoint.sensor.version != version:
                version = endpoint.sensor.version
                accuracy = task.evaluate(deployed, judged)["accuracy"]
            right.append(accuracy)
    found = [tick - begin for tick in uploads if tick >= begin]
    return {
        "latency": found[0] if found else None,
        "uploads": len(uploads),
        "false": len(uploads) - len(found),
        "bytes": there.traffic.sent + there.traffic.received,
        "accuracy": 100 * mean(right),
        "before": 100 * task.evaluate(loaded(task, arrays), task.test)["accuracy"],
        "unadapted": 100 * task.evaluate(loaded(task, arrays), judged)["accuracy"],
    }


def quiet(window: int, seed: int, *, ticks: int, level: float) -> dict[str, Any]:
    """Return how many windows of ticks without drift are above the calibrated and above the textbook's threshold."""
    from fedcomp.tasks import get_task

    site = Site(get_task("digits", hidden="64"), seed)
    reference = site.figures(site.model, site.held)
    thresholds = {
        "calibrated": calibrated(reference, window, Key(seed, "flare/quiet")),
        "textbook": nominal_threshold(len(reference), window, level),
    }
    found: dict[str, Any] = {}
    stream = site.figures(site.model, site.pool)
    for name, threshold in thresholds.items():
        sensor = Sensor(SensorSettings(window))
        sensor.deploy(1, QuantileSketch.of(reference), min(1.0, threshold))
        rng, above, compared, uploads = Key(seed, "flare/quiet/stream").generator(), 0, 0, 0
        for _ in range(ticks):
            # A sensor that compares nothing, as after it has sent a window, keeps its last distance.
            sensor.distance = math.nan
            uploads += sensor.observe(rng.choice(stream, TICK), np.zeros((TICK, 1), np.float32)) is not None
            if math.isfinite(sensor.distance):
                compared += 1
                above += sensor.distance > sensor.threshold
        found |= {f"{name}_above": above / compared, f"{name}_uploads": uploads}
    return found
