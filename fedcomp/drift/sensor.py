"""The sensor's state machine: when an inference-only device sends its window.

A sensor keeps the figures of its last inferences, and the inputs they were made of. While they look like the reference
of the model it runs it sends nothing; when they do not, several times in a row, it sends the window and starts again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcomp import params
from fedcomp.drift.distance import QuantileSketch
from fedcomp.errors import ConfigError, StateError
from fedcomp.plain import Count
from fedcomp.rules import Configured, Int, Maybe
from fedcomp.stateful import Stateful


@dataclass(frozen=True, repr=False, eq=False)
class SensorSettings(Configured):
    """How a sensor decides.

    Parameters
    ----------
    window : int
        Inferences that are compared with the reference.
    consecutive : int
        Ticks in a row whose window has to be too far from it.
    cooldown : int, optional
        Inferences after an upload in which nothing is sent; default a window.

    Raises
    ------
    ConfigError
        For a number below 1, or a negative ``cooldown``.
    """

    window: Annotated[int, Int(1)] = 100
    consecutive: Annotated[int, Int(1)] = 2
    cooldown: Annotated[int | None, Maybe(Int())] = None


@dataclass(frozen=True, eq=False)
class Upload:
    """What a sensor sends of a window.

    Attributes
    ----------
    version : int
        Of the model it ran; 0 when it had none.
    samples : float32 array, shape (window, ...)
    labels : int64 array, shape (window,) or (0,)
        Empty where they are not known.
    sketch : QuantileSketch or None
        Of the window's figures; None when one of them was NaN.
    distance : float
        From the reference; NaN without one.
    """

    version: int
    samples: NDArray[np.float32]
    labels: NDArray[np.int64]
    sketch: QuantileSketch | None
    distance: float = math.nan


class Sensor(Stateful):
    """Watches the figures of a deployed model.

    Parameters
    ----------
    settings : SensorSettings, optional

    Attributes
    ----------
    version : int
        Of the model that runs; 0 before the first one.
    sketch : QuantileSketch or None
        What its figures are compared with. Without one every full window is sent, so that the edge learns what there
        is.
    threshold : float
    distance : float
        Of the last window that was compared; NaN before.

    Examples
    --------
    >>> import numpy as np
    >>> sensor = Sensor(SensorSettings(window=4, consecutive=2))
    >>> sensor.deploy(1, QuantileSketch.of(np.linspace(0.8, 1.0, 50)), threshold=0.6)
    >>> inputs = np.zeros((4, 3), np.float32)
    >>> sensor.observe([0.9, 0.8, 1.0, 0.85], inputs) is None
    True
    >>> sensor.observe([0.2, 0.3, 0.3, 0.2], inputs) is None  # once is not enough
    True
    >>> sensor.observe([0.2, 0.3, 0.3, 0.2], inputs).distance
    1.0
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "version": Count,
        "threshold": float,
        "_quantiles": NDArray[np.float32],
        "_figures": NDArray[np.float32],
        "_samples": NDArray[np.float32],
        "_labels": NDArray[np.int64],
        "_hits": Count,
        "_cooling": Count,
    }

    def __init__(self, settings: SensorSettings | None = None) -> None:
        self.settings = SensorSettings() if settings is None else settings
        self.version = 0
        self.sketch: QuantileSketch | None = None
        self.threshold = 1.0
        self.distance = math.nan
        self._quantiles = np.empty(0, np.float32)
        self._hits = self._cooling = 0
        self._figures: NDArray[np.float32] = np.empty(0, np.float32)
        self._samples: NDArray[np.float32] = np.empty((0, 0), np.float32)
        self._labels: NDArray[np.int64] = np.empty(0, np.int64)

    def identity(self) -> dict[str, Any]:
        return self.settings.get_config()

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Refuse windows whose parts differ in length."""
        lengths = {len(values["_figures"]), len(values["_samples"])}
        if len(lengths) > 1 or len(values["_labels"]) not in (0, *lengths):
            raise StateError("figures, samples and labels of a sensor's window differ in number; the state is damaged")

    def restored(self) -> None:
        self.sketch = QuantileSketch(self._quantiles) if self._quantiles.size else None
        self.distance = math.nan

    def deploy(self, version: int, sketch: QuantileSketch | None, threshold: float) -> None:
        """Go on with another model: figures of the former one are forgotten, since its reference goes, too."""
        self.version = params.integer("version", version, low=0)
        self.threshold = params.unit("threshold", threshold)
        self.sketch = sketch
        self._quantiles = np.empty(0, np.float32) if sketch is None else sketch.quantiles
        self._hits = 0
        self._clear()

    def observe(self, figures: ArrayLike, samples: ArrayLike, labels: ArrayLike | None = None) -> Upload | None:
        """Take the inferences of one tick; return the window when it has to be sent.

        Parameters
        ----------
        figures : array-like, shape (inferences,)
            One figure of each; NaN counts as drift.
        samples : array-like, shape (inferences, ...)
            What they were made of.
        labels : array-like, shape (inferences,), optional
            Where they are known.

        Raises
        ------
        ConfigError
            When they differ in number, or from tick to tick in shape or in whether there are labels.
        """
        self._take(np.asarray(figures, np.float32), np.asarray(samples, np.float32), labels)
        if len(self._figures) < self.settings.window or self._cooling:
            return None
        if self.sketch is None:
            return self._sent(math.nan)
        self.distance = self.sketch.distance(self._figures)
        self._hits = self._hits + 1 if self.distance > self.threshold else 0
        return self._sent(self.distance) if self._hits >= self.settings.consecutive else None

    def _take(self, figures: NDArray[np.float32], samples: NDArray[np.float32], labels: ArrayLike | None) -> None:
        known = np.empty(0, np.int64) if labels is None else np.asarray(labels, np.int64)
        if figures.ndim != 1 or len(samples) != len(figures) or (labels is not None and known.shape != figures.shape):
            raise ConfigError(
                f"figures {figures.shape}, samples {samples.shape} and labels {known.shape} are not of one number of "
                "inferences"
            )
        held = len(self._figures)
        if held and (samples.shape[1:] != self._samples.shape[1:] or (labels is not None) != bool(self._labels.size)):
            raise ConfigError(
                f"this tick has samples of shape {samples.shape[1:]} and {'' if known.size else 'no '}labels, the "
                "window does not; a sensor's ticks are all alike"
            )
        # What is older than a window is nobody's business: neither memory nor what is sent may grow.
        kept = slice(-self.settings.window, None)
        self._figures = np.concatenate([self._figures, figures])[kept]
        self._samples = np.concatenate([self._samples.reshape(held, *samples.shape[1:]), samples])[kept]
        self._labels = np.concatenate([self._labels, known])[kept]
        self._cooling = max(0, self._cooling - len(figures))

    def _sent(self, distance: float) -> Upload:
        sketch = None if np.isnan(self._figures).any() else QuantileSketch.of(self._figures)
        upload = Upload(self.version, self._samples, self._labels, sketch, distance)
        cooldown = self.settings.cooldown
        self._cooling = self.settings.window if cooldown is None else cooldown
        self._hits = 0
        self._clear()
        return upload

    def _clear(self) -> None:
        self._figures, self._samples, self._labels = self._figures[:0], self._samples[:0], self._labels[:0]
