"""Traffic of fetching rows, counted as lengths of the frames that were sent.

The frames of one exchange go over one link; feature rows that travel from their owner through the server to a requester
are counted once as *logical* bytes, and on both links as *link* bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from fedcomp.program import Frames
from fedcomp.systems.graphs.words import Planned


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
        Feature norms of other owners' nodes, and the lists of ids they were asked for with.
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

    def count(self, frames: Frames, figure: str) -> int:
        """Add the lengths of frames to a figure; return their sum."""
        size = sum(map(len, frames.values()))
        setattr(self, figure, getattr(self, figure) + size)
        return size

    def carried_out(self, plans: Iterable[Planned]) -> None:
        """Take the figures of the plans that were carried out, one per client."""
        found = list(plans)
        self.remote_inputs = sum(plan.remote_inputs for plan in found)
        if found:
            self.local_mass = sum(plan.local_mass for plan in found) / len(found)
            self.scale = sum(plan.scale for plan in found) / len(found)
            self.lost_mass = sum(plan.lost_mass for plan in found) / len(found)

    def metrics(self, prefix: str) -> dict[str, int | float]:
        """Return the figures under names that begin with ``prefix``."""
        # Metrics are numbers alone: rows by part stay in the report.
        found: Mapping[str, object] = {each.name: getattr(self, each.name) for each in fields(self)}
        return {f"{prefix}{name}": value for name, value in found.items() if isinstance(value, int | float)}
