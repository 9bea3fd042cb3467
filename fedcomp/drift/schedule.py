"""The edge's schedule: when it deploys a model to its sensors, and when it reports to the server.

Both follow from the losses that the models of the rounds have on the edge's own held-out data (FLARE, see
:mod:`fedcomp.drift.distance`: that the loss has to be stable is recalled, the rule and its constants are derived).

A loss that hardly changes from round to round is not yet stable: it may fall slowly, a training may begin on a plateau
that it has not left, and where clients are unlike it is the updates of all of them that hold the model where it is. So
the best loss counts as well, for how many models nothing was better; and what was tried: an edge whose own training
still lowers its own loss has something to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import numpy as np

from fedcomp.plain import Count
from fedcomp.rules import Configured, Int, Maybe, NotNegative, Positive, Real
from fedcomp.stateful import Stateful

_EPSILON: Final = 1e-12


@dataclass(frozen=True, repr=False, eq=False)
class ScheduleSettings(Configured):
    """What counts as stable.

    Parameters
    ----------
    window : int
        Losses that are looked at, at least 2.
    low : float
        Relative spread (standard deviation over mean) at or below which losses are stable.
    high : float, optional
        Spread at or above which they no longer are, and the fraction by which a loss must be lower than the best one to
        end stability; default twice ``low``. Between the two nothing changes.
    consecutive : int
        Losses in a row whose window has to be stable.
    patience : int
        Losses in a row of which none may be lower than the best before them by more than a twentieth of ``low`` of it,
        which a slow fall adds up to; three times as many while none was ever lower than the first by more than ``low``
        of it. And as many trainings in a row that lowered the loss by no more
        than ``low`` of it, where trainings are noted.
    tolerance : float
        How much larger the loss of a model may be than that of the deployed one.

    Raises
    ------
    ConfigError
        For a value out of range, or ``high`` below ``low``.
    """

    window: Annotated[int, Int(2)] = 5
    low: Positive = 0.02
    high: Annotated[float | None, Maybe(Real(above=0.0))] = None
    consecutive: Annotated[int, Int(1)] = 2
    patience: Annotated[int, Int()] = 20
    tolerance: NotNegative = 0.0

    def conflict(self) -> str:
        wrong = self.high is not None and self.high < self.low
        return f"high={self.high} is not valid: high must be a number >= low={self.low:g}" if wrong else ""

    @property
    def upper(self) -> float:
        """``high``, or its default."""
        return 2.0 * self.low if self.high is None else self.high


class DeploymentScheduler(Stateful):
    """Decides by the losses of successive models whether the present one is deployed.

    The first one is, whatever its loss. After that a model is deployed when losses become stable, unless its own is
    worse than the deployed one's.

    Parameters
    ----------
    settings : ScheduleSettings, optional

    Attributes
    ----------
    stable : bool
        Whether losses have settled, and no drift was reported since.
    spread : float
        Relative spread of the last window of losses; NaN before there is one.

    Examples
    --------
    >>> scheduler = DeploymentScheduler(ScheduleSettings(window=2, low=0.05, consecutive=1, patience=0))
    >>> [scheduler.note(loss) for loss in (2.0, 1.0, 0.5, 0.49, 0.49)]
    [True, False, False, True, False]
    >>> scheduler.stable
    True
    >>> scheduler.drifted()
    >>> scheduler.stable
    False
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "stable": bool,
        "_losses": list[float],
        "_settled": Count,
        "_first": float | None,
        "_best": float | None,
        "_waited": Count,
        "_fallen": bool,
        "_idle": Count | None,
        "_begun": bool,
        "_deployed": float | None,
    }

    def __init__(self, settings: ScheduleSettings | None = None) -> None:
        self.settings = ScheduleSettings() if settings is None else settings
        self.stable = False
        self.spread = math.nan
        self._losses: list[float] = []
        self._settled = 0
        self._first: float | None = None
        self._best: float | None = None
        self._waited = 0
        self._fallen = False
        self._idle: int | None = None
        self._begun = False
        self._deployed: float | None = None

    def identity(self) -> dict[str, Any]:
        return self.settings.get_config()

    def note(self, loss: float) -> bool:
        """Take the loss of a round's model on the edge's held-out data; return whether to deploy that model.

        A loss that is NaN or infinite is the opposite of stable, and such a model is never deployed.
        """
        if not math.isfinite(loss):
            self.stable, self._settled, self._losses = False, 0, []
            return False
        s = self.settings
        self._follow(float(loss), s)
        self._losses = [*self._losses, float(loss)][-s.window :]
        turned = self._turn(s) if len(self._losses) == s.window else False
        first, self._begun = not self._begun, True
        worse = self._deployed is not None and loss > self._deployed + s.tolerance
        if not first and (not turned or worse):
            return False
        self._deployed = float(loss)
        return True

    def tried(self, before: float, after: float) -> None:
        """Take the loss of a round's model, and that of what the edge's own training has made of it."""
        s = self.settings
        gain = before - after if math.isfinite(before - after) else math.inf
        self._idle = 0 if gain > s.low * abs(before) else (self._idle or 0) + 1
        if gain > s.upper * abs(before):
            self.stable, self._settled = False, 0

    def drifted(self) -> None:
        """Learn that sensors saw something new: losses have to settle again, on data that include it.

        The deployed model's loss is forgotten. It was measured on data without the drift, and no model could beat it on
        data that have it; the sensors would keep the old model for good.
        """
        self.stable, self._settled, self._losses, self._deployed = False, 0, [], None
        self._first, self._best, self._waited = None, None, 0

    def _follow(self, loss: float, s: ScheduleSettings) -> None:
        """Count the losses that are not lower than the best one; a far lower loss ends stability."""
        if self._first is None or self._best is None:
            self._first, self._best = loss, loss
        elif loss < self._best - (s.upper if self.stable else s.low / 20.0) * abs(self._best):
            self._best, self._waited = loss, 0
            self.stable, self._settled = False, 0
            self._fallen = self._fallen or loss < self._first - s.low * abs(self._first)
        else:
            self._waited += 1

    def _turn(self, s: ScheduleSettings) -> bool:
        """Add the last window; return whether losses became stable with it."""
        self.spread = float(np.std(self._losses) / (abs(np.mean(self._losses)) + _EPSILON))
        self._settled = self._settled + 1 if self.spread <= s.low else 0
        if self.stable:
            self.stable = self.spread < s.upper
            return False
        patience = s.patience if self._fallen else 3 * s.patience
        idle = self._idle is None or self._idle >= s.patience
        self.stable = self._settled >= s.consecutive and self._waited >= patience and idle
        return self.stable
