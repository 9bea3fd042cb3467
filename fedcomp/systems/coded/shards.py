"""Common parts of relayed updates and coded sums: participants, sealed messages, and what a relay stores.

A shard is sealed for its relay, and bound to the run, the round, its source and the relay: it opens nowhere else,
whichever way it travels. Who takes part, with the keys, is one blob, the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, NamedTuple, Self

import numpy as np

from fedcomp.codecs import State
from fedcomp.coding.errors import CodingError
from fedcomp.coding.sealing import KEY_BYTES, PeerIdentity, seal
from fedcomp.layout import Layout, Vector
from fedcomp.program import AnswerError, Ask, KeyPair, Me, Now, Post, System
from fedcomp.rules import TIMEOUT, Inside, Int, Maybe, Real
from fedcomp.wire import Frame

PEERS: Final = "peers"
"""Name of the blob that lists who takes part."""

SHARD: Final = "shard"
"""First part of the name of a post that holds a shard; the round follows, and in a relay's memory the source."""

_NUMBER: Final = 4
"""Bytes of a node's number in the blob."""

MOST: Final = 1 << 20
"""Clients that can take part in a round."""


class Peer(NamedTuple):
    """A client that takes part: its number, and the 32 bytes of the key that shards for it are sealed with."""

    node: int
    key: bytes


def listed(now: Now) -> tuple[list[int], Frame]:
    """Return the nodes of a round that have a key, ascending, and the blob that lists them."""
    nodes = [node for node in now.nodes if node in now.keys]
    return nodes, b"".join(node.to_bytes(_NUMBER, "little") + now.keys[node] for node in nodes)


def counted(now: Now, name: str, more: int) -> None:
    """Add to a figure of a round."""
    told = now.told["coded"]
    told[name] = told.get(name, 0) + more


def peers_of(ask: Ask) -> tuple[list[Peer], int]:
    """Return who takes part, as an ask lists them, and which of them the asked node is.

    Raises
    ------
    AnswerError
        When the list is none, names a client twice, or lacks this one.
    """
    data, size = bytes(ask.blobs.get(PEERS, b"")), _NUMBER + KEY_BYTES
    each = [data[i : i + size] for i in range(0, len(data), size)]
    found = [Peer(int.from_bytes(entry[:_NUMBER], "little"), entry[_NUMBER:]) for entry in each]
    nodes = [peer.node for peer in found]
    if len(data) % size or nodes != sorted(set(nodes)) or ask.node not in nodes:
        raise AnswerError(f"{len(data)} bytes do not list clients of {size} bytes each, this one among them")
    return found, nodes.index(ask.node)


@dataclass
class Relay:
    """One client as a relay: what it keeps for others, in its memory beside what its own system remembers.

    Attributes
    ----------
    me : Me
    own : State
        What its own system remembers.
    sealed : dict of int to bytes
        By source, the shards of this round. Those of former rounds are forgotten.
    """

    me: Me
    own: State
    sealed: dict[int, bytes]

    @classmethod
    def of(cls, memory: State, ask: Ask, me: Me) -> Self:
        """Return what the memory holds, with what came with an ask: of each source the newest shard alone."""
        before = f"{SHARD}/{me.number}/"
        sealed = {int(name.removeprefix(before)): memory[name].tobytes() for name in memory if name.startswith(before)}
        # Opened when somebody asks for it: who posted nonsense has wasted a place of its own.
        sealed |= {post.source: post.data for post in ask.mail if post.name == f"{SHARD}/{me.number}"}
        return cls(me, own_of(memory), sealed)

    def memory(self, own: State | None = None) -> State:
        """Return the memory, by default with what the own system remembered."""
        kept = {
            f"{SHARD}/{self.me.number}/{n}": np.frombuffer(data, np.uint8) for n, data in sorted(self.sealed.items())
        }
        return {**(self.own if own is None else own), **kept}

    def send(self, peers: Sequence[Peer], shards: Sequence[bytes]) -> tuple[Post, ...]:
        """Return the posts that bring shards to ``peers``; the own one is kept.

        A relay whose key is not valid is a lost relay, for which the others stand.
        """
        posts = []
        for peer, shard in zip(peers, shards, strict=True):
            try:
                sealed = seal(shard, peer.key, self._place(self.me.node, peer.node))
            except CodingError:
                continue
            if peer.node == self.me.node:
                self.sealed[peer.node] = sealed
            else:
                posts.append(Post(self.me.node, peer.node, f"{SHARD}/{self.me.number}", sealed))
        return tuple(posts)

    def open(self, source: int) -> bytes:
        """Return the shard of a source; raise :class:`CodingError` where there is none, or it is sealed otherwise."""
        if source not in self.sealed:
            raise CodingError(f"this relay has no shard of client {source}")
        assert self.me.identity is not None
        return self.me.identity.open(self.sealed[source], self._place(source, self.me.node))

    def _place(self, source: int, to: int) -> bytes:
        return self.me.run + b"/%d/%d/%d" % (self.me.number, source, to)


def own_of(memory: State) -> State:
    """Return a memory without the shards that are kept for others."""
    return {name: array for name, array in memory.items() if not name.startswith(SHARD + "/")}


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class Coded(System):
    """A system whose clients hand shards to each other; the memory is that of the system that makes the updates.

    Parameters
    ----------
    symbols : int
        K: pieces of an update; K + ``threshold`` shards decode. 0 chooses it.
    shards : int
        N: shards that are made, one per relay. 0: one for every client of the round, as many as the code has.
    threshold : int
        T: any T relays together learn nothing of an update.
    loss, target : float
        Fraction of relays that is expected to vanish, 0.1 where it is None, and the probability with which decoding
        must still succeed.
    share_timeout, collect_timeout : float, optional
        Seconds for training and sharing, and for each exchange after it; None: the run's own.
    """

    KEYS: ClassVar[type[KeyPair] | None] = PeerIdentity
    SEVERAL: ClassVar[bool] = True

    symbols: Annotated[int, Int()] = 0
    shards: Annotated[int, Int()] = 0
    threshold: Annotated[int, Int()] = 0
    loss: Annotated[float | None, Maybe(Real(least=0.0, below=1.0))] = None
    target: Inside = 0.999
    share_timeout: Annotated[float | None, TIMEOUT] = None
    collect_timeout: Annotated[float | None, TIMEOUT] = None

    @property
    def updates(self) -> System:
        """What makes the updates, and remembers."""
        raise NotImplementedError

    def start(self, layout: Layout) -> State:
        return self.updates.start(layout)

    def rollback(self, memory: State, frame: Frame, layout: Layout) -> State:
        kept = {name: array for name, array in memory.items() if name.startswith(SHARD + "/")}
        return {**self.updates.rollback(own_of(memory), frame, layout), **kept}

    def residual(self, memory: State, layout: Layout) -> Vector | None:
        return self.updates.residual(own_of(memory), layout)
