"""What happened in one coded round: the report all constructions write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from fedcomp.flower.logs import log
from fedcomp.strategies.replies import shorten

_MAX_REFUSED: Final = 100
"""How many reasons for thrown-away bytes a report keeps."""


@dataclass
class CodedReport:
    """What happened in one coded round, by node id.

    Attributes
    ----------
    planned, relays, symbols, shards, private : int
        Contributors and relays of the plan; symbols that are needed, shards that were made, random symbols among those.
    included : list of int
        Nodes whose update is in the result, in source order; with groups, members of every group that was decoded.
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
    decode_seconds : float
        Time the server took to decode.
    residual : float
        Of a decoding that was accepted as an approximation, see :class:`fedcomp.coding.gradcode.Decoding`; 0.0
        otherwise.
    """

    round: int
    planned: int = 0
    relays: int = 0
    symbols: int = 0
    shards: int = 0
    private: int = 0
    included: list[int] = field(default_factory=list)
    excluded: dict[int, str] = field(default_factory=dict)
    direct: dict[int, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    received: int = 0
    innovative: int = 0
    dependent: int = 0
    waves: int = 0
    asked: int = 0
    recollects: int = 0
    payload_bytes: dict[str, int] = field(default_factory=dict)
    decode_seconds: float = 0.0
    residual: float = 0.0
    notes: list[str] = field(default_factory=list)

    def exclude(self, node: int, reason: str) -> None:
        """Record that the update of ``node`` is not in the result."""
        self.excluded[node] = shorten(reason)

    def refuse(self, reason: str) -> None:
        """Record that coded bytes were thrown away; a flood of them is cut."""
        if len(self.refused) < _MAX_REFUSED:
            self.refused.append(shorten(reason))

    def note(self, reason: str) -> None:
        """Record and log what concerns the whole round."""
        self.notes.append(shorten(reason))
        log.warning("coded round %d: %s", self.round, reason)

    def count(self, link: str, size: int) -> None:
        """Add ``size`` coded bytes on ``link``."""
        self.payload_bytes[link] = self.payload_bytes.get(link, 0) + size

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-able dictionary; node ids become strings, as JSON keys are."""
        by_node = ("excluded", "direct")
        return {k: {str(n): r for n, r in v.items()} if k in by_node else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CodedReport:
        """Restore what :meth:`to_json` returned."""
        by_node = ("excluded", "direct")
        fields: dict[str, Any] = {k: {int(n): r for n, r in v.items()} if k in by_node else v for k, v in value.items()}
        return cls(**fields)
