"""The server's deadline for a round, from the durations of earlier rounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.stateful import Stateful


class Deadline(Stateful):
    """An adaptive deadline: a quantile of the asked clients' past durations, times a slack factor.

    A client's duration is the median of its last ones. Replies that arrive too late to be used are timed as well, so
    that a client that became slower is noticed.

    Parameters
    ----------
    quantile : float
        Fraction of the asked clients expected in time, in (0, 1].
    slack : float
        Factor on that time, at least 1, to allow for variation between rounds.
    history : int
        Number of durations stored per client.

    Raises
    ------
    ConfigError
        For other values.

    Examples
    --------
    >>> deadline = Deadline(quantile=0.5, slack=2.0)
    >>> deadline.seconds([1, 2], most=60.0)
    60.0
    >>> for node, took in ((1, 3.0), (2, 5.0)):
    ...     deadline.note(node, took)
    >>> deadline.seconds([1, 2], most=60.0)
    8.0
    """

    STATE: ClassVar[Mapping[str, Any]] = {"_times": dict[int, list[float]]}

    def __init__(self, quantile: float = 0.8, slack: float = 1.5, history: int = 8) -> None:
        self.quantile = params.number("quantile", quantile, rule="a number in (0, 1]", ok=lambda v: 0.0 < v <= 1.0)
        self.slack = params.number("slack", slack, rule="a finite number >= 1", ok=lambda v: 1.0 <= v < float("inf"))
        self.history = params.integer("history", history, low=1)
        self._times: dict[int, list[float]] = {}

    @classmethod
    def parse(cls, text: str) -> Deadline:
        """Return what a setting says: ``auto``, or ``auto:QUANTILE`` or ``auto:QUANTILE:SLACK``.

        Raises
        ------
        ConfigError
            When it says something else.

        Examples
        --------
        >>> Deadline.parse("auto:1:2").identity()
        {'quantile': 1.0, 'slack': 2.0, 'history': 8}
        """
        word, *numbers = text.split(":")
        try:
            if word != "auto" or len(numbers) > 2:
                raise ValueError
            given = dict(zip(("quantile", "slack"), map(float, numbers), strict=False))
        except ValueError as error:
            raise ConfigError(
                f"a deadline of {text!r} is not valid: write 'auto', or with a quantile and slack 'auto:0.9:2'"
            ) from error
        return cls(**given)  # type: ignore[arg-type]

    def note(self, node: int, seconds: float) -> None:
        """Remember what a client took, from the message being sent to the reply being there."""
        self._times[node] = [*self._times.get(node, []), seconds][-self.history :]

    def forget(self, node: int) -> None:
        """Forget what a client took before: it was waited for longer, in vain, and that is no guide any more."""
        self._times.pop(node, None)

    def seconds(self, nodes: Collection[int], most: float) -> float:
        """Return how long to wait for ``nodes``: ``most`` as long as half of them are unknown, and never more."""
        known = [float(np.median(self._times[node])) for node in nodes if node in self._times]
        if 2 * len(known) <= len(nodes):
            return most
        return min(most, self.slack * float(np.quantile(known, self.quantile)))

    def identity(self) -> dict[str, Any]:
        """Return the settings, which must not change within a run."""
        return {"quantile": self.quantile, "slack": self.slack, "history": self.history}
