"""The simulated SuperNodes of the in-process engine.

Who is there, under which id, with which client state, behind which link.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, RecordDict

from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower import store
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
        The client's context, kept serialised between messages; empty while it is in ``file``.
    free_at : float
        Simulated second at which the node has done all it was given.
    file : Path or None
        Where contexts are kept instead, from the first one that a client leaves.
    lasting : Lasting
        The stored bytes, for a file that the same ones are not written into again.
    """

    id: int
    partition: int
    state: bytes
    free_at: float = 0.0
    file: Path | None = None
    lasting: store.Lasting = field(init=False)

    def __post_init__(self) -> None:
        self._last()

    def _last(self) -> None:
        """Let ``lasting`` read the bytes that are stored now, until they are replaced."""
        # Of the bytes alone: a method of the node would show those that come after.
        state, file = self.state, self.file
        self.lasting = store.Lasting((lambda: state) if state or file is None else file.read_bytes)

    def context(self) -> Context:
        """Return a new context from the stored bytes."""
        if self.state or self.file is None:
            return context_from_bytes(self.state)
        # Mapped: the system's cache is read in place, without a copy of the whole context in between.
        with (
            self.file.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as data,
        ):
            return context_from_bytes(data)

    def stored(self) -> bytes:
        """Return the stored bytes."""
        return self.state if self.state or self.file is None else self.file.read_bytes()

    def commit(self, context: Context) -> None:
        """Keep ``context`` for the next message."""
        self.keep(context_to_bytes(context))

    def keep(self, state: bytes) -> None:
        """Keep a serialised context: the new one whole, or after an error the old one."""
        if self.file is not None:
            partial = self.file.with_suffix(".partial")
            partial.write_bytes(state)
            os.replace(partial, self.file)
            state = b""
        self.state = state
        self._last()


class GridNodes:
    """The nodes of a grid, by id: who is there, with which client state. They join and leave.

    Parameters
    ----------
    count : int
        Nodes at the start, with partition ids 0 to ``count - 1``.
    key : Key
        Run id and node ids are drawn from it: large on purpose, a float cast would damage them.
    run_config : mapping
        Goes into every context.
    node_config : mapping or callable of a partition id, optional
        Added to ``partition-id`` and ``num-partitions``.
    links : Link, sequence or mapping by partition id, optional
        As in :class:`NodeLinks`.
    states : Path, optional
        Folder in which the clients' states lie between messages; default this process's memory.

    Attributes
    ----------
    clock : float
        Simulated seconds since the start.
    run_id : int
        Of the contexts of nodes that join from now on.
    num_partitions : int
        Nodes at the start.
    """

    def __init__(
        self,
        count: int,
        key: Key,
        run_config: Mapping[str, Any],
        node_config: NodeConfig,
        links: Links,
        states: Path | None = None,
    ) -> None:
        self.clock = 0.0
        self.run_id = key.at(purpose="run-id").u64() >> 2
        self.num_partitions = count
        self.links = NodeLinks(links, count)
        self._node_key = key
        self._run_config = dict(run_config)
        self._node_config = node_config
        self._incarnations: Counter[int] = Counter()
        self._nodes: dict[int, Node] = {}
        self._holders: dict[int, int] = {}
        # A folder of its own in it: two grids of one seed have the same node ids.
        self._folder = None if states is None else tempfile.TemporaryDirectory(prefix="states-", dir=states)
        for partition in range(count):
            self.add_node(partition)

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes, in partition order."""
        return [self._holders[partition] for partition in self.partitions]

    @property
    def partitions(self) -> list[int]:
        """Partition ids of all nodes, ascending."""
        return sorted(self._holders)

    def node(self, node: int) -> Node:
        """Return the node with this node id or partition id; ids have 62 bits, so the two cannot clash.

        Raises
        ------
        GridError
            When there is none.
        """
        found = self._nodes.get(self._holders.get(node, node))
        if found is not None:
            return found
        raise GridError(f"no node has the id or holds partition {node}; partitions are {self.partitions}")

    def partition_of(self, node_id: int) -> int | None:
        """Return the partition id of a node, None for an unknown one."""
        node = self._nodes.get(node_id)
        return None if node is None else node.partition

    def node_id_of(self, partition: int) -> int:
        """Return the id of the node that holds ``partition``; raise :class:`GridError` when there is none."""
        return self.node(partition).id

    def context(self, node: int) -> Context:
        """Return a copy of a client's context; ``node`` is a node id or a partition id."""
        return self.node(node).context()

    def wipe(self, node: int) -> None:
        """Empty a client's state, as a restart of its SuperNode does; ``node`` is a node id or a partition id."""
        held = self.node(node)
        context = held.context()
        # The context itself stays: a SuperNode that restarts with its keys has the same id and configuration.
        context.state = RecordDict()
        held.commit(context)

    def add_node(self, partition: int | None = None) -> int:
        """Let a node join with empty state and return its id.

        ``partition`` defaults to the lowest free one. ``num-partitions`` stays what it was at the start, because the
        data were split then. A partition that comes back gets a new node id, as with a SuperNode without keys.

        Raises
        ------
        GridError
            When the partition is taken, or the sequence ``links`` has no entry for it.
        """
        taken = self._holders
        if partition is None:
            partition = next(free for free in range(len(taken) + 1) if free not in taken)
        # Before anything changes: a node without its link would fail in the middle of a push.
        self.links.require([partition])
        if partition in taken:
            raise GridError(f"partition {partition} already has a node; remove it first")
        # Snapshots hold the count, so that a partition that comes back after a resume gets no id it had before.
        key = self._node_key.at(purpose="node-id", partition=partition, layer=self._incarnations[partition])
        # With its highest bit set no id is as small as a partition id, which node() takes as well.
        node_id = (key.u64() >> 2) | (1 << 61)
        self._incarnations[partition] += 1
        extra = self._node_config(partition) if callable(self._node_config) else self._node_config
        config = {"partition-id": partition, "num-partitions": self.num_partitions, **(extra or {})}
        context = Context(self.run_id, node_id, config, RecordDict(), dict(self._run_config))
        # Free from now on: it cannot have been at work before it joined.
        self._nodes[node_id] = self._node(node_id, partition, context_to_bytes(context), self.clock)
        self._holders[partition] = node_id
        return node_id

    def _node(self, node_id: int, partition: int, state: bytes, free_at: float) -> Node:
        # The first state is a few numbers, and most of many nodes may never be asked: no file before there is more.
        file = None if self._folder is None else Path(self._folder.name, f"{node_id:x}")
        return Node(node_id, partition, state, free_at, file)

    def close_states(self) -> None:
        """Remove the files of the clients' states, if there are any; the nodes cannot be asked any more."""
        if self._folder is not None:
            self._folder.cleanup()

    def remove_node(self, node: int) -> None:
        """Let a node leave for good, its state with it; ``node`` is a node id or a partition id."""
        left = self._nodes.pop(self.node(node).id)
        del self._holders[left.partition]
        if left.file is not None:
            left.file.unlink(missing_ok=True)

    def dump_nodes(self) -> dict[str, Any]:
        """Return everything that changes, as plain data; the contexts as lasting values."""
        return {
            "num_partitions": self.num_partitions,
            "incarnations": dict(self._incarnations),
            "nodes": [[n.id, n.partition, n.lasting, n.free_at] for n in self._nodes.values()],
        }

    def load_nodes(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`dump_nodes`' data, as it was stored and read.

        Raises
        ------
        GridError
            When another number of nodes began, or the sequence ``links`` is too short.
        """
        if state["num_partitions"] != self.num_partitions:
            raise GridError(
                f"snapshot is of a grid that began with {state['num_partitions']} nodes, this one with "
                f"{self.num_partitions}; resume with the number the run was started with"
            )
        self.links.require(partition for _, partition, *_ in state["nodes"])
        self._incarnations = Counter(state["incarnations"])
        self._nodes = {fields[0]: self._node(*fields) for fields in state["nodes"]}
        self._holders = {node.partition: node.id for node in self._nodes.values()}
        if self._folder is not None:
            for node in self._nodes.values():
                node.keep(node.state)


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
            # A sequence promises a link for every partition; a mapping may leave some out.
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
        # Partitions may be added that the sequence was never checked for.
        missing = [] if self._listed is None else [p for p in partitions if p >= self._listed]
        if missing:
            raise GridError(f"links has {self._listed} entries, none for partitions {missing}; pass more, or a mapping")
