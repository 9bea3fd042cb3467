"""The settings of a decentralised run beside its algorithm and its graph."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.flower.coded import MAX_STORE_BYTES
from fedcomp.gossip.run import Observer


@dataclass(frozen=True, kw_only=True)
class GossipSettings:
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
        For a value out of range; ``dtype``, ``dense_below`` and ``buffers`` are checked by
        :class:`fedcomp.flower.gossip.GossipSetup`, which announces them to the nodes.

    Examples
    --------
    >>> GossipSettings(patience=3, timeout=30.0).skew_rounds
    0
    """

    skew_rounds: int | Literal["auto"] = 0
    patience: int = 5
    timeout: float | None = None
    wait: float = 0.0
    observe_every: int = 1
    dtype: str = "float32"
    dense_below: int = 64
    buffers: str = "dense"
    watch: Observer | bool = True
    transport: str = "hub"
    seal: bool = True
    max_store_bytes: int = MAX_STORE_BYTES
    spool: str | os.PathLike[str] | None = None
    seed: int = 0
    configrecord_key: str = "config"

    def __post_init__(self) -> None:
        seed = params.seed(self.seed)
        least_one = ("patience", "observe_every", "max_store_bytes")
        counts = {name: params.integer(name, getattr(self, name), low=1) for name in least_one}
        params.assign(self, seed=seed, **counts)
        if self.skew_rounds != "auto":
            params.assign(self, skew_rounds=params.integer("skew_rounds", self.skew_rounds, low=0))
        if self.timeout is not None:
            params.number("timeout", self.timeout, rule="seconds > 0, or None", ok=lambda v: v > 0)
        params.number("wait", self.wait, rule="seconds, at least 0", ok=lambda v: 0 <= v < float("inf"))
        params.choice("transport", self.transport, ("hub", "peers"))
        params.boolean("seal", self.seal)
        if self.spool is not None and self.transport != "peers":
            raise ConfigError("spool is the folder of simulated links between peers; it needs transport='peers'")
        if not (isinstance(self.watch, bool) or callable(self.watch)):
            raise ConfigError(f"watch={self.watch!r} is not valid: True, False, or a callable for every iteration")
