"""Operations that no private strategy allows, and the log line that says so once."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedcomp.flower.logs import log


class NoClientEvaluation:
    """A strategy that asks no client to evaluate: metrics of clients would be released without noise."""

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nobody."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return nothing."""
        return None


class Once:
    """Warnings that are logged the first time only.

    Parameters
    ----------
    name : str
        The strategy's, before each.
    """

    def __init__(self, name: str) -> None:
        self._name, self._warned = name, set[str]()

    def warn(self, text: str, said: str = "") -> None:
        """Log a warning, ``text`` unless it is ``said`` in other words."""
        if text not in self._warned:
            log.warning("%s: %s", self._name, said or text)
            self._warned.add(text)
