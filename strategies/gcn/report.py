"""What a graph run reports of a round; all byte counts are lengths of frames that were really sent.

The frames of one exchange go over one link; feature rows that travel from their owner through the server to a requester
are counted once as *logical* bytes, and on both links as *link* bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from flwr.app import Message, RecordDict

from fedcomp.flower.gcn import FEATURES, HEADER, Figures
from fedcomp.flower.payload import frames
from fedcomp.flower.report import EventSection, figure, shorten


@dataclass
class FetchTraffic:
    """What fetching rows cost, for one round's training or for its evaluation.

    Attributes
    ----------
    remote_inputs : int
        Input nodes that other owners have, summed over clients and steps: those of the plans that were carried out,
        cached ones included.
    rows_fetched : int
        Feature rows in the owners' replies.
    feature_bytes_logical : int
        Bytes of those replies.
    feature_bytes_link : int
        The same and the rows in the messages to requesters: both links of a fetch through the server.
    id_bytes : int
        Lists of ids: who wants which feature rows, and who is asked for them.
    setup_bytes : int
        Feature norms of boundary nodes, and the lists of ids they were asked for with.
    structure_bytes : int
        Rows of the adjacency, and the lists of ids they were asked for with.
    local_mass, scale, lost_mass : float
        lambda, s and the share of the base weight on nodes of absent owners, means over clients.
    absent : int
        Owners that the round went on without.
    replans : int
        Plans that were made again without an owner.
    trips : int
        Exchanges: pushes of messages and the wait for their replies.
    clients : int
        Clients whose replies arrived.
    rows_sent, rows_received : dict of int to int
        Feature rows by the owner that sent them, and by the requester whose messages held them.
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
            Which figure the frames of a kind count towards; "" for all kinds that are not named.
        """
        for message in messages:
            # An error reply has none, and asking for it would raise.
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
        # Metrics are numbers alone: rows by part stay in the report.
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {f"{prefix}{name}": value for name, value in found.items() if isinstance(value, int | float)}


@dataclass
class Fetching(EventSection, name="gcn"):
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

    def miss(self, part: int, reason: str) -> None:
        """Record why the round goes on without the owner of ``part``; the first reason counts."""
        self.absent.setdefault(part, shorten(reason))

    def lose(self, part: int, reason: str) -> None:
        """Record why the client of ``part`` does not contribute to the result; the first reason counts."""
        self.lost.setdefault(part, shorten(reason))

    def figures(self, *, public: bool = False) -> dict[str, Any]:
        """Return what a run's record shows, the traffic of training included; that of evaluation is in its metrics."""
        return super().figures(public=public) | ({} if public else self.train.metrics("gcn."))

    def line(self) -> str:
        """Return what fetching rows cost, in words."""
        return f"{self.train.rows_fetched} rows fetched, {self.train.feature_bytes_link:,} bytes"


def frame_sizes(content: RecordDict) -> list[tuple[str, int]]:
    """Return kind and length of every frame of a graph run in a message."""
    found = []
    for name, data in frames(content).items():
        # A frame is called HEADER/kind/place, the record of scalars HEADER alone.
        head, slash, rest = name.partition("/")
        if head == HEADER and slash:
            found.append((rest.partition("/")[0], len(data)))
    return found


def feature_bytes(content: RecordDict) -> int:
    """Return how many bytes of feature rows a message holds."""
    return sum(size for kind, size in frame_sizes(content) if kind == FEATURES)
