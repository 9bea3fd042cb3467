"""The roster: each node's address, partition, last reply used, and model version. One register for all systems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fedcomp.flower.asks import BLOBS_KEPT
from fedcomp.flower.payload import PARTITIONS
from fedcomp.flower.protocol import APP_RAISED
from fedcomp.strategies.partitions import Holders


@dataclass
class Peer:
    """What the server knows of one node, by its address.

    Attributes
    ----------
    consumed : int
        Sequence of its last frame that is in the model; 0: none.
    generation : int
        Of the memory that frame came from.
    version : int
        Of the model that the node is known to hold; 0: unknown.
    blobs : list of str
        Digests of the blobs that it holds, the newest last.
    key : bytes
        Its public key; empty: unknown.
    address, signature : str, bytes
        Where others reach it, and by what they know that the key is its own.
    greet : int
        Round before which it is not asked for its key again, since it has none.
    plain : bool
        Whether it could not read a packed model, so that models go to it as they are.
    """

    consumed: int = 0
    generation: int = 0
    version: int = 0
    blobs: list[str] = field(default_factory=list)
    key: bytes = b""
    address: str = ""
    signature: bytes = b""
    greet: int = 0
    plain: bool = False

    def take(self, digests: Iterable[str]) -> None:
        """Note which blobs the node has now."""
        for digest in digests:
            if digest in self.blobs:
                self.blobs.remove(digest)
            self.blobs.append(digest)
        del self.blobs[:-BLOBS_KEPT]

    def forget(self) -> None:
        """Take nothing for granted: the next message brings the model whole, with all that it needs."""
        self.version, self.blobs = 0, []


class Roster(Holders):
    """All nodes of a run.

    Parameters
    ----------
    version : int
        Of the model that a node holds which was never asked; 0: unknown.

    Attributes
    ----------
    peers : dict of int to Peer
        By address: a device that takes another one's partition has a memory of its own.
    declared : dict of int to int
        By address: the partition that a node answered for first, which holds for good. By other words it could move
        itself to where its turn comes next.
    """

    STATE: ClassVar[Mapping[str, Any]] = {"peers": dict[int, Peer], "declared": dict[int, int]}

    def __init__(self, version: int = 0) -> None:
        super().__init__()
        self._version = version
        self.peers: dict[int, Peer] = {}
        self.declared: dict[int, int] = {}

    def peer(self, address: int) -> Peer:
        """Return what is known of a node."""
        return self.peers.setdefault(address, Peer(version=self._version))

    def unread(self, address: int, code: int) -> str:
        """Note that an error came back for a packed model; return what a report says of it, empty where the node can
        read one."""
        # An app that raised, of a node that has never answered: other errors are this project's, or the engine's.
        if code != APP_RAISED or address in self.declared:
            return ""
        self.peer(address).plain = True
        return "; a client without fedcomp cannot read packed models, so this node's next message has a plain one"

    def reached(self) -> dict[int, Peer]:
        """Return the nodes that have said a public key, by partition: of several that declare one, its holder."""
        found = {p: self.peers.get(a) for a, p in self.claims.items() if self.held.get(p, a) == a}
        return {partition: peer for partition, peer in sorted(found.items()) if peer is not None and peer.key}

    def release(self) -> None:
        """Forget who held which partition before, and who was silent."""
        self.held, self.silent, self.former, self.claims = {}, set(), {}, dict(self.known)

    def numbered(self, addresses: Iterable[int]) -> dict[int, int]:
        """Return nodes by their numbers, ascending: a node's partition, where it holds one.

        For a node that has not said yet which partition it holds, or declares another one's, the remainder stands that
        nodes without a configured partition draw themselves.
        """
        found: dict[int, int] = {}
        others = []
        for address in sorted(addresses):
            partition = self.claims.get(address)
            holder = None if partition is None else self.held.get(partition)
            # One that is gone or silent holds it no longer.
            rival = holder not in (None, address) and holder in self.claims and holder not in self.silent
            if partition is None or partition in found or rival:
                others.append(address)
            else:
                found[partition] = address
        for address in others:
            number = address % PARTITIONS
            while number in found:
                number = (number + 1) % PARTITIONS
            found[number] = address
        return dict(sorted(found.items()))

    def renumber(self) -> None:
        """Forget which model the nodes hold: they may have got later ones. The next message brings it whole."""
        super().renumber()
        for peer in self.peers.values():
            peer.version = 0
