"""The simulated SuperNodes of the in-process engine.

Who is there, under which id, with which client state, behind which link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Context, RecordDict

from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower._private import context_from_bytes, context_to_bytes
from fedcomp.rng import Key
from fedcomp.timing.links import Link

NodeConfig = Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None
Links = Link | Sequence[Link] | Mapping[int, Link] | None


class GridError(FedcompError, ValueError):
    """The grid was asked for something no engine could do."""


@dataclass(slots=True)
class Node:
    """One simulated SuperNode.

    Attributes
    ----------
    id, partition : int
        Node id (62 bits) and partition id.
    state : bytes
        The client's context, kept serialised between messages.
    free_at : float
        Simulated second at which the node has done all it was given.
    """

    id: int
    partition: int
    state: bytes
    free_at: float = 0.0

    def context(self) -> Context:
        """Return a new context from the stored bytes."""
        return context_from_bytes(self.state)

    def commit(self, context: Context) -> None:
        """Keep ``context`` for the next message."""
        self.state = context_to_bytes(context)


class GridNodes:
    """All nodes of a grid, by id; they join and leave.

    Parameters
    ----------
    count : int
        Nodes at the start, with partition ids 0 to ``count - 1``.
    run_id : int
        Goes into every context.
    key : Key
        Node ids are drawn from it: large on purpose, a float cast would damage them.
    run_config : mapping
        Goes into every context.
    node_config : mapping or callable of a partition id, optional
        Added to ``partition-id`` and ``num-partitions``.

    Attributes
    ----------
    run_id : int
        Run id of the contexts of nodes that join from now on.
    num_partitions : int
        Nodes at the start.
    """

    def __init__(
        self, count: int, run_id: int, key: Key, run_config: Mapping[str, Any], node_config: NodeConfig
    ) -> None:
        if count < 0:
            raise ConfigError(f"num_nodes is {count}, expected 0 or more")
        self._key = key
        self.run_id = run_id
        self._run_config = dict(run_config)
        self._node_config = node_config
        self.num_partitions = count
        self._incarnations: Counter[int] = Counter()
        self._nodes: dict[int, Node] = {}
        for partition in range(count):
            self.add(partition, 0.0)

    def get(self, node_id: int) -> Node | None:
        """Return the node with this id, None if there is none."""
        return self._nodes.get(node_id)

    def find(self, node: int) -> Node:
        """Return the node with this node id or partition id; ids have 62 bits, so the two cannot clash.

        Raises
        ------
        GridError
            When there is none.
        """
        if node in self._nodes:
            return self._nodes[node]
        for candidate in self._nodes.values():
            if candidate.partition == node:
                return candidate
        raise GridError(f"no node has the id or holds partition {node}; partitions are {self.partitions}")

    @property
    def ids(self) -> list[int]:
        """All node ids, in partition order."""
        return [node.id for node in sorted(self._nodes.values(), key=lambda node: node.partition)]

    @property
    def partitions(self) -> list[int]:
        """All partition ids, ascending."""
        return sorted(node.partition for node in self._nodes.values())

    def free_partition(self) -> int:
        """Return the lowest partition id that no node holds."""
        taken = set(self.partitions)
        return next(partition for partition in range(len(taken) + 1) if partition not in taken)

    def add(self, partition: int, now: float) -> int:
        """Let a node join with empty state; see :meth:`fedcomp.flower.grid.InProcessGrid.add_node`."""
        if partition in self.partitions:
            raise GridError(f"partition {partition} already has a node; remove it first")
        key = self._key.at(purpose="node-id", partition=partition, layer=self._incarnations[partition])
        node_id = (key.u64() >> 2) | (1 << 61)
        self._incarnations[partition] += 1
        extra = self._node_config(partition) if callable(self._node_config) else self._node_config
        config = {"partition-id": partition, "num-partitions": self.num_partitions, **(extra or {})}
        context = Context(self.run_id, node_id, config, RecordDict(), dict(self._run_config))
        self._nodes[node_id] = Node(node_id, partition, context_to_bytes(context), now)
        return node_id

    def remove(self, node: int) -> None:
        """Let a node leave, its state with it."""
        del self._nodes[self.find(node).id]

    def wipe(self, node: int) -> None:
        """Empty a client's state."""
        held = self.find(node)
        context = held.context()
        context.state = RecordDict()
        held.commit(context)

    def dump(self) -> dict[str, Any]:
        """Return everything that changes, as plain data."""
        return {
            "num_partitions": self.num_partitions,
            "incarnations": dict(self._incarnations),
            "nodes": [[n.id, n.partition, n.state, n.free_at] for n in self._nodes.values()],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`dump`'s data."""
        self.num_partitions = state["num_partitions"]
        self._incarnations = Counter(state["incarnations"])
        self._nodes = {fields[0]: Node(*fields) for fields in state["nodes"]}


class NodeLinks:
    """The link of every partition.

    Parameters
    ----------
    links : Link, sequence or mapping by partition id, optional
        One link for all, or one each. A mapping may leave nodes out: they have none.
    count : int
        Nodes at the start; a sequence needs an entry for each.

    Raises
    ------
    ConfigError
        When an entry is missing or is no Link, or a key no partition id. Found later, it would end a run in the middle
        of a push.
    """

    def __init__(self, links: Links, count: int) -> None:
        self._all = links if isinstance(links, Link) else None
        self._listed: int | None = None
        self._each: dict[int, Link] = {}
        if links is None or isinstance(links, Link):
            return
        if isinstance(links, Mapping):
            self._each = dict(links)
        elif isinstance(links, Sequence):
            self._each = dict(enumerate(links))
            self._listed = len(links)
            if len(links) < count:
                raise ConfigError(
                    f"links has {len(links)} entries for {count} nodes, expected one each; a mapping may leave some out"
                )
        else:
            raise ConfigError(f"links is a {type(links).__name__}, expected a Link, a sequence or a mapping of them")
        for partition, link in self._each.items():
            if not isinstance(partition, int | np.integer) or isinstance(partition, bool) or partition < 0:
                raise ConfigError(f"links has the key {partition!r}, expected partition ids: integers from 0")
            if not isinstance(link, Link):
                raise ConfigError(f"links has a {type(link).__name__} for partition {partition}, expected a Link")

    def of(self, partition: int) -> Link | None:
        """Return the link of ``partition``, None where transfers take no time."""
        return self._each.get(partition, self._all)

    def require(self, partitions: Iterable[int]) -> None:
        """Check that nodes with ``partitions`` can join.

        Raises
        ------
        GridError
            When the links were given one by one and there is none for one of them.
        """
        missing = [] if self._listed is None else [p for p in partitions if p >= self._listed]
        if missing:
            raise GridError(f"links has {self._listed} entries, none for partitions {missing}; pass more, or a mapping")
