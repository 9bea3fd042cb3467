"""Phases of a compressor that is fitted during training: one warm-up, then sampling and compression in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from fedcomp.errors import StateError
from fedcomp.rules import Int, checked
from fedcomp.stateful import Stateful

WARM_UP: Final = "warm-up"
SAMPLING: Final = "sampling"
COMPRESSION: Final = "compression"


class Cycle(Stateful):
    """Which phase the next round belongs to. The count is state: a server that restarts goes on where it was.

    Parameters
    ----------
    warm_up : int
        Uncompressed rounds before the first sample, at least 0: the first updates resemble none of the later ones.
    sampling, compression : int
        Rounds of each phase of a cycle, at least 1.

    Examples
    --------
    >>> cycle = Cycle(warm_up=1, sampling=1, compression=2)
    >>> [(cycle.phase, cycle.advance())[0] for _ in range(5)]
    ['warm-up', 'sampling', 'compression', 'compression', 'sampling']
    """

    STATE: ClassVar[Mapping[str, Any]] = {"_done": int}

    def __init__(self, warm_up: int, sampling: int, compression: int) -> None:
        self.warm_up: int = checked("warm_up", warm_up, Int())
        self.sampling: int = checked("sampling", sampling, Int(1))
        self.compression: int = checked("compression", compression, Int(1))
        # Rounds since the current cycle began; negative during the warm-up.
        self._done = -self.warm_up

    def identity(self) -> Any:
        """Return the lengths of the phases: a count of other ones says something else."""
        return [self.warm_up, self.sampling, self.compression]

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Refuse a count outside of a cycle."""
        if not -self.warm_up <= values["_done"] < self.sampling + self.compression:
            raise StateError(f"round {values['_done']} is none of a cycle of {self.identity()}")

    def __repr__(self) -> str:
        return f"{self.warm_up} rounds of warm-up; by turns {self.sampling} sampled, {self.compression} compressed"

    @property
    def phase(self) -> str:
        """The phase of the next round."""
        if self._done < 0:
            return WARM_UP
        return SAMPLING if self._done < self.sampling else COMPRESSION

    def advance(self, *, refit: bool = False) -> None:
        """Count a round; with ``refit`` a new cycle begins where this one was compressing."""
        early = refit and self.phase == COMPRESSION
        self._done = 0 if early else self._done + 1
        if self._done == self.sampling + self.compression:
            self._done = 0

    def restart(self) -> None:
        """Begin a new cycle, unless the warm-up is not over."""
        self._done = min(self._done, 0)

    def average_ratio(self, ratio: float) -> float:
        """Return the compression over a cycle whose compressed rounds save a factor of ``ratio``.

        >>> round(Cycle(0, 100, 400).average_ratio(8), 2)
        3.33
        """
        return (self.sampling + self.compression) / (self.sampling + self.compression / ratio)
