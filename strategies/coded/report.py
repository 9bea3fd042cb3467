"""The section ``report.coded`` that all coded rounds add to a round's report."""

from __future__ import annotations

from dataclasses import dataclass

from fedcomp.flower.logs import log
from fedcomp.flower.report import MAX_REASONS, ReportSection, figure, shorten


@dataclass
class CodingReport(ReportSection, name="coded"):
    """What was coded in one round, by node id.

    Attributes
    ----------
    planned, relays, symbols, shards, threshold : int
        Contributors and relays of the plan; data symbols K, shards N, and T, the relays that together learn nothing.
    included : list of int
        Nodes whose update is in the result, in source order.
    partitions : list of int
        The partitions they hold, in order.
    excluded : dict
        Nodes whose update is not, with the reason. Their weight is not in the result either.
    direct : dict
        Nodes that answered without coding (their app lacks the mod), with the reason; they are in the result, too, as
        far as the inner strategy accepts them.
    refused : list of str
        Coded bytes that were thrown away, with the reason.
    received, innovative, dependent : int
        Packets that came to the server, those that added to what it knew, and those that did not.
    waves, asked : int
        Exchanges of the collection, and relays asked in them.
    recollects : int
        Sources for which the last exchange asked again: silent relays, and the contributor itself.
    payload_bytes : dict
        Coded bytes by link: ``hub_up`` and ``hub_down`` in messages, ``peer`` between clients. Sums of ``len()`` of
        what was handed over; Flower's framing is in the ledger, not here.
    residual : float
        Of a decoding that was accepted as an approximation, see :class:`fedcomp.coding.gradcode.Decoding`; 0.0
        otherwise.
    """

    planned: int = figure(unit="nodes", public=True)
    relays: int = figure(unit="nodes", public=True)
    symbols: int = figure(unit="packets", public=True)
    shards: int = figure(unit="packets", public=True)
    threshold: int = figure(unit="packets", show="none")
    included: list[int] = figure(list, unit="nodes", public=True, show="count")
    partitions: list[int] = figure(list, public=True)
    excluded: dict[int, str] = figure(dict, unit="nodes", public=True, show="reasons")
    direct: dict[int, str] = figure(dict, unit="nodes", show="none")
    refused: list[str] = figure(list, show="reasons")
    received: int = figure(unit="packets", public=True)
    innovative: int = figure(unit="packets", public=True)
    dependent: int = figure(unit="packets", public=True)
    waves: int = figure(unit="exchanges", public=True)
    asked: int = figure(unit="nodes", public=True)
    recollects: int = figure(unit="nodes", public=True)
    payload_bytes: dict[str, int] = figure(dict, unit="bytes", public=True, show="table")
    residual: float = figure(0.0)
    notes: list[str] = figure(list, show="texts")

    def exclude(self, node: int, reason: str) -> None:
        """Record that the update of ``node`` is not in the result."""
        self.excluded[node] = shorten(reason)

    def refuse(self, reason: str) -> None:
        """Record that coded bytes were thrown away; a flood of them is cut."""
        if len(self.refused) < MAX_REASONS:
            self.refused.append(shorten(reason))

    def note(self, reason: str) -> None:
        """Record and log what concerns the whole round."""
        self.notes.append(shorten(reason))
        log.warning("coded round %d: %s", self.round, reason)

    def count(self, link: str, size: int) -> None:
        """Add ``size`` coded bytes on ``link``."""
        self.payload_bytes[link] = self.payload_bytes.get(link, 0) + size

    def line(self) -> str:
        """Return how many contributors are in the result, and what that took."""
        return f"{len(self.included)} of {self.planned} coded updates in {self.waves} exchanges"
