"""Settings of a decentralised run, apart from its algorithm and its graph."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from fedcomp.flower.coded import MAX_STORE_BYTES
from fedcomp.gossip.tuning import Observer
from fedcomp.rules import TIMEOUT, Configured, Int, Maybe, NotNegative, OneOf, Seed, Switch, Text


@dataclass(frozen=True, kw_only=True)
class GossipSettings(Configured):
    """How :class:`fedcomp.strategies.gossip.strategy.GossipRelay` runs its rounds.

    Parameters
    ----------
    skew_rounds : int or "auto"
        Iterations after the last round in which models travel whole and nothing is learnt (push-sum algorithms only);
        "auto": as many as the graph needs to average.
    patience : int
        A node that does not answer this many exchanges in a row is given up. With a synchronous algorithm these follow
        each other in one round, since nobody can go on without it; with an asynchronous one it is one in every round.
    timeout : float, optional
        Seconds for the replies of each exchange; default: the driver's timeout alone.
    wait : float
        Seconds to wait before an exchange for a vertex of which no node is online.
    observe_every : int
        Rounds between two observations; the last round always is one.
    dtype : str
        "float32" or "float64": of the vectors on the nodes. Models with float64 tensors need "float64".
    dense_below : int
        Tensors with fewer elements, and vectors, travel whole.
    buffers : str
        "dense" mixes running statistics of normalisation layers, "local" leaves them to each node.
    watch : Observer or bool
        Gets the nodes' figures after every iteration and may end the run; True is
        :class:`fedcomp.gossip.tuning.DivergenceWatch`.
    transport : {"hub", "peers"}
        Messages travel through the server, or from node to node, and the server has references to them.
    seal : bool
        With ``peers``: messages are encrypted for their receivers, on a link and through the server.
    max_store_bytes : int
        With ``peers``: what a node may be asked to keep for others.
    spool : path, optional
        With ``peers``: folder of the simulated links between nodes of one machine that have no address of their own.
        Default: one that is removed with the strategy. An empty text: none, such a node is reached through the server.
    seed : int
        Of everything random in the algorithm, and of a random graph.
    configrecord_key : str
        Name of the training configuration in messages.

    Raises
    ------
    ConfigError
        For a value out of range.

    Examples
    --------
    >>> GossipSettings(patience=3, timeout=30.0).skew_rounds
    0
    """

    skew_rounds: Annotated[int | Literal["auto"], Maybe(Int(), "auto")] = 0
    patience: Annotated[int, Int(1)] = 5
    timeout: Annotated[float | None, TIMEOUT] = None
    wait: NotNegative = 0.0
    observe_every: Annotated[int, Int(1)] = 1
    dtype: Annotated[str, OneOf("float32", "float64")] = "float32"
    dense_below: Annotated[int, Int()] = 64
    buffers: Annotated[str, OneOf("dense", "local")] = "dense"
    watch: Observer | bool = True
    transport: Annotated[str, OneOf("hub", "peers")] = "hub"
    seal: Switch = True
    max_store_bytes: Annotated[int, Int(1)] = MAX_STORE_BYTES
    spool: str | os.PathLike[str] | None = None
    seed: Seed = 0
    configrecord_key: Annotated[str, Text()] = "config"

    def conflict(self) -> str:
        """Only peers have simulated links, and only what can be called can watch."""
        if self.spool is not None and self.transport != "peers":
            return "spool is the folder of simulated links between peers; it needs transport='peers'"
        if not (isinstance(self.watch, bool) or callable(self.watch)):
            return f"watch={self.watch!r} is not valid: True, False, or a callable for every iteration"
        return ""
