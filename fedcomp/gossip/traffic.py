"""Traffic of a decentralised run, counted on real messages by four separate counters.

* **edge**: every message on every active directed edge. What an algorithm costs when each link carries its own copy,
  and the figure for claims and ratios. An undirected edge used both ways counts twice, a message to three neighbours
  three times.
* **node**: every distinct message once, however many neighbours it goes to: a radio that broadcasts.
* **relay**: what the star really moves: up, each multicast as often as it arrives; down, each message as often as it is
  sent. Never an algorithm's cost.
* **overhead**: what the framework's messages hold beside messages. Filled in by whoever measures serialised messages.

Edge and node bytes know the phase a message belongs to: ``train``; ``dense``, the closing iterations in which models
travel whole; ``resync``, whole estimates for neighbours that had none. Headers are counted apart from bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from fedcomp.errors import ConfigError
from fedcomp.gossip.packet import HEADER_BYTES

Phase = Literal["train", "dense", "resync"]
PHASES: Final[tuple[Phase, ...]] = ("train", "dense", "resync")


@dataclass(slots=True)
class Count:
    """Messages and their bytes."""

    messages: int = 0
    headers: int = 0
    bodies: int = 0

    @property
    def bytes(self) -> int:
        """Headers and bodies."""
        return self.headers + self.bodies

    def __iadd__(self, other: Count) -> Count:
        self.messages += other.messages
        self.headers += other.headers
        self.bodies += other.bodies
        return self

    def add(self, size: int, times: int = 1) -> None:
        """Count a message of ``size`` bytes, header included, ``times`` times."""
        # What comes up is counted before it is checked, and a forged message may be shorter than a header.
        header = min(size, HEADER_BYTES)
        self.messages += times
        self.headers += times * header
        self.bodies += times * (size - header)


def _by_phase() -> dict[str, Count]:
    return {phase: Count() for phase in PHASES}


@dataclass(slots=True)
class GossipTraffic:
    """What a run has sent so far.

    Attributes
    ----------
    edge, node : dict of phase to Count
        See the module.
    undelivered : Count
        Messages counted under ``edge`` that no node took in: they went back to their senders, or were lost with them.
    up, down : Count
        The relay's.
    overhead : int
        Bytes of the framework.
    """

    edge: dict[str, Count] = field(default_factory=_by_phase)
    node: dict[str, Count] = field(default_factory=_by_phase)
    undelivered: Count = field(default_factory=Count)
    up: Count = field(default_factory=Count)
    down: Count = field(default_factory=Count)
    overhead: int = 0

    def add(self, other: GossipTraffic) -> None:
        """Add what ``other`` counted."""
        for phase in PHASES:
            self.edge[phase] += other.edge[phase]
            self.node[phase] += other.node[phase]
        self.undelivered += other.undelivered
        self.up += other.up
        self.down += other.down
        self.overhead += other.overhead

    def count(self, size: int, phases: Mapping[Phase, int]) -> None:
        """Count one message of ``size`` bytes that goes to ``phases[phase]`` neighbours in each phase."""
        for phase, times in phases.items():
            self.edge[phase].add(size, times)
        # To whom it is a whole estimate and to whom not: it is the same message, sent once.
        self.node[min(phases, key=PHASES.index)].add(size)

    @property
    def edge_bytes(self) -> int:
        """All edge bytes, headers included."""
        return sum(count.bytes for count in self.edge.values())

    @property
    def node_bytes(self) -> int:
        """All node bytes, headers included."""
        return sum(count.bytes for count in self.node.values())

    @property
    def relay_bytes(self) -> int:
        """Up and down."""
        return self.up.bytes + self.down.bytes

    @property
    def messages(self) -> int:
        """Messages on directed edges."""
        return sum(count.messages for count in self.edge.values())

    def energy(self, sent: float, received: float) -> float:
        """Return joules: ``8 * (bytes sent * sent + bytes received * received)``.

        Parameters
        ----------
        sent, received : float
            Joules per bit, at least 0. There are no defaults: they belong to a radio.

        Raises
        ------
        ConfigError
            For a negative number.
        """
        if not (0.0 <= sent < float("inf") and 0.0 <= received < float("inf")):
            raise ConfigError(f"joules per bit are {sent}, {received}; expected finite numbers, at least 0")
        # What no node took in was sent, and paid for, but not received.
        return 8.0 * (self.edge_bytes * sent + (self.edge_bytes - self.undelivered.bytes) * received)
