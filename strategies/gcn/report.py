"""What a graph run tells of itself: one report per round, every byte of it the length of a frame that was really sent.

The frames of one exchange go over one link; feature rows that travel from their owner through the server to a requester
are counted once as *logical* bytes, and with both legs as *link* bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from flwr.app import Message, MetricRecord, RecordDict

from fedcomp.flower.gcn import FEATURES, HEADER, Figures
from fedcomp.flower.payload import frames
from fedcomp.flower.report import shorten

_BY_PART: Final = ("rows_sent", "rows_received")
_COUNTED: Final = (
    "remote_inputs",
    "rows_fetched",
    "feature_bytes_logical",
    "feature_bytes_link",
    "id_bytes",
    "setup_bytes",
    "structure_bytes",
    "local_mass",
    "scale",
    "lost_mass",
    "absent",
    "replans",
    "trips",
    "clients",
)
_MOST_REASONS: Final = 100
"""How many reasons of one kind a report keeps."""


@dataclass
class Traffic:
    """What fetching rows came to, for one round's training or for its evaluation.

    Attributes
    ----------
    remote_inputs : int
        Input nodes that other owners have, summed over clients and steps: those of the plans that were carried out,
        cached ones among them.
    rows_fetched : int
        Feature rows in the owners' replies.
    feature_bytes_logical : int
        Bytes of those replies.
    feature_bytes_link : int
        The same, and the rows in the messages to requesters: both legs of a fetch through the server.
    id_bytes : int
        Lists of ids: who wants which feature rows, and who is asked for them.
    setup_bytes : int
        Feature norms of boundary nodes, and the lists of ids they were asked for with.
    structure_bytes : int
        Rows of the adjacency, and the lists of ids they were asked for with.
    local_mass, scale, lost_mass : float
        lambda, s and the share of the base weight on nodes of absent owners, means over clients.
    absent : int
        Owners that were done without.
    replans : int
        Plans that were made again without an owner.
    trips : int
        Exchanges: pushes of messages and the wait for their replies.
    clients : int
        Clients whose replies arrived.
    rows_sent, rows_received : dict of int to int
        Feature rows by the owner that sent them, and by the requester in whose messages they stood.
    """

    remote_inputs: int = 0
    rows_fetched: int = 0
    feature_bytes_logical: int = 0
    feature_bytes_link: int = 0
    id_bytes: int = 0
    setup_bytes: int = 0
    structure_bytes: int = 0
    local_mass: float = 0.0
    scale: float = 0.0
    lost_mass: float = 0.0
    absent: int = 0
    replans: int = 0
    trips: int = 0
    clients: int = 0
    rows_sent: dict[int, int] = field(default_factory=dict)
    rows_received: dict[int, int] = field(default_factory=dict)

    def count_frames(self, messages: Iterable[Message], fields: Mapping[str, str]) -> None:
        """Add the lengths of all frames of messages that were sent, or of replies that came.

        Parameters
        ----------
        fields : mapping of kind to str
            Which figure the frames of a kind count for; "" for those of kinds that nobody expects.
        """
        for message in messages:
            if not message.has_content():
                continue
            for kind, size in frame_sizes(message.content):
                name = fields.get(kind, fields[""])
                setattr(self, name, getattr(self, name) + size)

    def plan(self, figures: Iterable[Figures]) -> None:
        """Take the figures of the plans that were carried out, one per client."""
        found = list(figures)
        self.remote_inputs = sum(plan.remote_inputs for plan in found)
        if found:
            self.local_mass = sum(plan.local_mass for plan in found) / len(found)
            self.scale = sum(plan.scale for plan in found) / len(found)
            self.lost_mass = sum(plan.lost_mass for plan in found) / len(found)

    def metrics(self, prefix: str) -> dict[str, int | float]:
        """Return the figures under names that begin with ``prefix``."""
        return {f"{prefix}{name}": getattr(self, name) for name in _COUNTED}


@dataclass
class GraphReport:
    """One round of a graph run.

    Attributes
    ----------
    round : int
    method : str
        What the round's training amounts to.
    train, evaluate : Traffic
    absent : dict of int to str
        Owners that were done without, with the reason.
    lost : dict of int to str
        Clients of the round whose update is not in the model, or whose evaluation is missing, with the reason.
    events : dict of str to list of str
        What else happened, by kind.
    """

    round: int
    method: str = ""
    train: Traffic = field(default_factory=Traffic)
    evaluate: Traffic = field(default_factory=Traffic)
    absent: dict[int, str] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    events: dict[str, list[str]] = field(default_factory=dict)

    def note(self, kind: str, reason: str) -> None:
        """Add an event; a flood of one kind is cut."""
        reasons = self.events.setdefault(kind, [])
        if len(reasons) < _MOST_REASONS:
            reasons.append(shorten(reason))

    def miss(self, part: int, reason: str) -> None:
        """Record why the owner of ``part`` is done without; the first reason counts."""
        self.absent.setdefault(part, shorten(reason))

    def lose(self, part: int, reason: str) -> None:
        """Record why the client of ``part`` has no share in the result."""
        self.lost.setdefault(part, shorten(reason))

    def metrics(self, purpose: str = "") -> MetricRecord:
        """Return the figures: those of ``"train"``, those of ``"evaluate"``, or all."""
        found: dict[str, int | float] = {}
        if purpose != "evaluate":
            found |= self.train.metrics("gcn.")
        if purpose != "train":
            found |= self.evaluate.metrics("gcn.evaluate_")
        return MetricRecord(dict(found))

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-able dictionary; part numbers become strings, as JSON keys are."""
        out = asdict(self)
        for name in ("absent", "lost"):
            out[name] = _named(out[name])
        for traffic in (out["train"], out["evaluate"]):
            for name in _BY_PART:
                traffic[name] = _named(traffic[name])
        return out

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> GraphReport:
        """Restore what :meth:`to_json` returned."""
        fields = dict(value)
        for name in ("absent", "lost"):
            fields[name] = _numbered(fields[name])
        for purpose in ("train", "evaluate"):
            traffic: dict[str, Any] = {k: _numbered(v) if k in _BY_PART else v for k, v in fields[purpose].items()}
            fields[purpose] = Traffic(**traffic)
        return cls(**fields)


def frame_sizes(content: RecordDict) -> list[tuple[str, int]]:
    """Return kind and length of every frame of a graph run in a message."""
    found = []
    for name, data in frames(content).items():
        head, slash, rest = name.partition("/")
        if head == HEADER and slash:
            found.append((rest.partition("/")[0], len(data)))
    return found


def feature_bytes(content: RecordDict) -> int:
    """Return how many bytes of feature rows a message holds."""
    return sum(size for kind, size in frame_sizes(content) if kind == FEATURES)


def _named(by_part: Mapping[int, Any]) -> dict[str, Any]:
    return {str(part): value for part, value in by_part.items()}


def _numbered(by_part: Mapping[str, Any]) -> dict[int, Any]:
    return {int(part): value for part, value in by_part.items()}
