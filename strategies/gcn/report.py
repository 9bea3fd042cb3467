"""The section of a round's report for graph runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedcomp.flower.report import ReportSection, figure, shorten
from fedcomp.systems.graphs.conversation import Conversation
from fedcomp.systems.graphs.traffic import FetchTraffic


@dataclass
class Fetching(ReportSection, name="gcn"):
    """What a round of a graph run fetched.

    Attributes
    ----------
    method : str
        What the round's training is equivalent to.
    train, evaluate : FetchTraffic
    absent : dict of int to str
        Owners that the round went on without, with the reason.
    lost : dict of int to str
        Clients of the round whose update is not in the model, or whose evaluation is missing, with the reason.
    """

    method: str = figure("", show="none")
    train: FetchTraffic = field(default_factory=FetchTraffic)
    evaluate: FetchTraffic = field(default_factory=FetchTraffic)
    absent: dict[int, str] = figure(dict, unit="owners", show="none")
    lost: dict[int, str] = figure(dict, unit="clients", show="reasons")

    def take(self, turn: Conversation) -> None:
        """Note what a turn came to; of several reasons the first counts."""
        setattr(self, turn.purpose, turn.traffic)
        for noted, found in ((self.absent, turn.absent), (self.lost, turn.lost)):
            for part, reason in found.items():
                noted.setdefault(part, shorten(reason))

    def figures(self, *, public: bool = False) -> dict[str, Any]:
        """Return what a run's record shows, the traffic of training included; that of evaluation is in its metrics."""
        return super().figures(public=public) | ({} if public else self.train.metrics("gcn."))

    def line(self) -> str:
        """Return what fetching rows cost, in words."""
        return f"{self.train.rows_fetched} rows fetched, {self.train.feature_bytes_link:,} bytes"
