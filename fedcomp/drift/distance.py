"""The distance of a window of statistics from a reference: the two-sample Kolmogorov-Smirnov test and its threshold.

FLARE (Chow, Raza, Mavromatis, Khan, "FLARE: Detection and Mitigation of Concept Drift for Federated Learning based IoT
Deployments", arXiv:2305.08504) compares the confidences of a deployed model with those that it had on held-out data.
That is known from the abstract; that the comparison is this distance is recalled, and the sketch, the calibration and
all constants are derived here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.logs import log
from fedcomp.rng import Key

QUANTILES: Final = 65
"""Numbers in a sketch: the quantiles of 0, 1/64, ... 1."""

_LEAST: Final = 0.1
_MARGIN: Final = 1.3
_QUANTILE: Final = 0.995


def ks_distance(a: ArrayLike, b: ArrayLike) -> float:
    """Return the largest distance of the empirical distribution functions of two samples.

    Functions are right-continuous, so that ties, within a sample or between the two, count as one step.

    Raises
    ------
    ConfigError
        When a sample is empty or holds NaN.

    Examples
    --------
    >>> ks_distance([1.0, 2.0], [3.0, 4.0])
    1.0
    >>> ks_distance([1.0, 1.0, 2.0], [2.0, 1.0, 1.0])
    0.0
    """
    first, second = _sample(a), _sample(b)
    points = np.concatenate([first, second])
    steps = [np.searchsorted(sample, points, side="right") / sample.size for sample in (first, second)]
    return float(np.abs(steps[0] - steps[1]).max())


def _sample(values: ArrayLike) -> NDArray[np.floating[Any]]:
    sample = np.sort(np.asarray(values), axis=None)
    if not sample.size or np.isnan(sample[-1]):
        raise ConfigError(
            f"a sample of {sample.size} figures that is empty or holds NaN has no distance; leave out what cannot be "
            "measured, or count it as drift"
        )
    return sample


@dataclass(frozen=True, eq=False)
class QuantileSketch:
    """A sample in 65 numbers: its quantiles of 0, 1/64, ... 1.

    Attributes
    ----------
    quantiles : float32 array, shape (65,), in ascending order
        Values of the sample itself. Taken for a sample, their distribution function is nowhere further than 1/65 from
        that of the sample in float32, whatever its ties (derived).

    Examples
    --------
    >>> sketch = QuantileSketch.of(range(1000))
    >>> sketch.distance(range(1000)) <= 1 / 65
    True
    >>> sketch.distance(range(2000, 3000))
    1.0
    """

    quantiles: NDArray[np.float32]

    def __post_init__(self) -> None:
        found = np.asarray(self.quantiles)
        if found.shape != (QUANTILES,) or found.dtype != np.float32 or not np.all(found[1:] >= found[:-1]):
            raise ConfigError(f"a sketch holds {QUANTILES} float32 in ascending order, got {found.dtype}{found.shape}")

    @classmethod
    def of(cls, sample: ArrayLike) -> Self:
        """Return the sketch of a sample.

        Raises
        ------
        ConfigError
            When it is empty or holds NaN.
        """
        # Quantiles that are in the sample: one between two of its values would split their atoms.
        places = np.quantile(_sample(sample), np.linspace(0.0, 1.0, QUANTILES), method="inverted_cdf")
        return cls(places.astype(np.float32))

    @property
    def constant(self) -> bool:
        """Whether all figures are the same: confidences that are all 1, for one, tell nothing of drift."""
        return bool(self.quantiles[0] == self.quantiles[-1])

    def distance(self, window: ArrayLike) -> float:
        """Return the Kolmogorov-Smirnov distance of a window, compared in float32; 1.0 when it holds NaN.

        A model that has no confidence at all in an input has never seen such a one.
        """
        figures = np.asarray(window, np.float32)
        return 1.0 if np.isnan(figures).any() else ks_distance(self.quantiles, figures)


def calibrated(reference: ArrayLike, window: int, key: Key, *, splits: int = 200) -> float:
    """Return the distance above which a window is unlike the reference.

    Windows are drawn from the reference and compared with a sketch of the rest, as many figures in a row as well as
    figures from anywhere: inputs of a stream come in runs, and a window of them differs more from all of the stream
    than as many independent ones. The threshold is 1.3 times the 99.5 % quantile of those distances, of the one kind or
    the other, and never below 0.1 (derived). The level of the textbook's test is not met here: window after window is
    compared with one finite reference, and half of its deviation is the same each time.

    Parameters
    ----------
    reference : array-like
        Figures of held-out data that the model did not learn from, in the order in which the stream brought them: runs
        that it does not hold, or only once, are not calibrated for.
    window : int
        Figures in a window.
    key : Key
        Names the draws.
    splits : int
        How many windows of each kind are drawn.

    Raises
    ------
    ConfigError
        When the reference holds NaN, or fewer than two windows.
    """
    sample = _sample(reference)
    window = params.integer("window", window, low=1)
    splits = params.integer("splits", splits, low=1)
    if sample.size < 2 * window:
        raise ConfigError(
            f"the reference holds {sample.size} figures, too few for windows of {window}: give at least {2 * window}, "
            "or make the window smaller"
        )
    if sample[0] == sample[-1]:
        log.warning("all %d figures of the reference are %g: they cannot show drift", sample.size, sample[0])
    stream = np.asarray(reference).reshape(-1)
    apart, together = [], []
    for split in range(splits):
        order = key.at(purpose=f"{key.purpose}/split/{split}").uniform(sample.size).argsort()
        apart.append(QuantileSketch.of(sample[order[window:]]).distance(sample[order[:window]]))
        start = (sample.size - window) * split // max(1, splits - 1)
        rest = np.delete(stream, slice(start, start + window))
        together.append(QuantileSketch.of(rest).distance(stream[start : start + window]))
    largest = max(float(np.quantile(distances, _QUANTILE)) for distances in (apart, together))
    return min(1.0, max(_LEAST, _MARGIN * largest))
