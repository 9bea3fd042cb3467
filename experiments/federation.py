"""The nodes of a run: waiting for them, calling the roll, and drawing cohorts that can be drawn again.

Flower's strategies sample nodes with the process's global random generator from ids that are new in every run. Here the
server decides who takes part, by partition, and shows a strategy only those nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower.metered import MeteredGrid, addressed
from fedcomp.flower.payload import take_node
from fedcomp.flower.wrapper import GridWrapper
from fedcomp.rng import Key

POLL_SECONDS: Final = 0.2
ROLL_CALL_SECONDS: Final = 120.0


class NodesMissing(FedcompError, RuntimeError):
    """Fewer nodes are online than the run has clients."""


def wait_for_nodes(grid: Grid, count: int, limit: float) -> list[int]:
    """Return the ids of the nodes online as soon as there are at least ``count``.

    Raises
    ------
    NodesMissing
        When there are fewer after ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    while len(nodes := list(grid.get_node_ids())) < count:
        if time.monotonic() > deadline:
            raise NodesMissing(
                f"{len(nodes)} of {count} nodes are online after {limit:g} s; start the others, "
                f"set clients={len(nodes)}, or raise the setting start_timeout (flwr run simulates "
                f'as many as --federation-config "num-supernodes={count}" says)'
            )
        time.sleep(POLL_SECONDS)
    return nodes


class Cohorts(GridWrapper):
    """A view of a grid that shows a strategy only the nodes that take part in the current exchange.

    Parameters
    ----------
    grid : MeteredGrid
    clients : int
        Number of partitions; nodes that hold none of them are not shown.
    seed : int
    train, evaluate : float
        Shares of the clients that train and that evaluate in a round, rounded down, at least one.
    query : ConfigRecord
        Configuration sent with the roll call.

    Attributes
    ----------
    replies, failures : int
        Of the current round's training messages: replies with content; errors and messages without a reply.
    reasons : list of str
        Of the current round: what the error replies said, and why newcomers were not taken in.

    Notes
    -----
    The client of partition p takes part in round t when the 64-bit word of the key (seed, purpose, t, p) is among the
    smallest, so a cohort depends on nothing but these numbers and on who is online. Partition ids are learnt by a roll
    call of ``query`` messages, which the ledger counts like any other; with everybody taking part none is needed.

    Once a run has begun no newcomer can end it: one that claims a partition which a node online holds, or none of the
    run's, is not shown.
    """

    inner: MeteredGrid

    def __init__(
        self,
        grid: MeteredGrid,
        *,
        clients: int,
        seed: int,
        train: float,
        evaluate: float,
        query: ConfigRecord,
    ) -> None:
        super().__init__(grid)
        self.replies = 0
        self.failures = 0
        self.reasons: list[str] = []
        self._clients = clients
        self._seed = seed
        self._shares = {"train": train, "evaluate": evaluate}
        self._query = query
        self._partitions: dict[int, int] = {}
        self._asked: dict[int, int] = {}
        self._round = 0
        self._phase = "train"
        self._words: tuple[Key, dict[int, int]] = Key(seed), {}

    def prepare(self) -> None:
        """Call the roll if cohorts will be drawn, or more nodes are online than there are partitions.

        Raises
        ------
        ConfigError
            When two nodes hold the same partition.
        """
        online = list(self.inner.get_node_ids())
        if self._draws() or len(online) > self._clients:
            taken = self._call_roll(online)
            if taken:
                raise ConfigError(
                    f"two nodes hold partition {taken[0]}; start each node with a partition-id of its own"
                )
            self.reasons = []

    @property
    def known(self) -> list[tuple[int, int]]:
        """The nodes the roll call found, as pairs of node id and partition: what a checkpoint has to keep."""
        return list(self._partitions.items())

    def recall(self, known: Iterable[tuple[int, int]]) -> None:
        """Take over :attr:`known` of an interrupted run instead of calling the roll again."""
        self._partitions = {int(node): int(partition) for node, partition in known}

    @property
    def round(self) -> int:
        """The current round; setting it begins the round's training exchange."""
        return self._round

    @round.setter
    def round(self, value: int) -> None:
        self._round = value
        self._phase = "train"
        self.replies = self.failures = 0
        self.reasons = []
        self.inner.round = value

    def get_node_ids(self) -> list[int]:
        """Return the nodes of the current cohort, in partition order."""
        online = list(self.inner.get_node_ids())
        if not self._draws() and not self._partitions and len(online) <= self._clients:
            return online
        # A node that joined, came back or could not answer is asked once a round who it is.
        unknown = [n for n in online if n not in self._partitions and self._asked.get(n) != self._round]
        taken = self._call_roll(unknown)
        self.reasons += [f"a node claims partition {partition}, which another node holds" for partition in taken]
        present = {self._partitions[n]: n for n in online if n in self._partitions}
        # A share of all clients: a cohort keeps its size while some nodes are away.
        size = max(1, int(self._clients * self._shares[self._phase]))
        words = self._drawn(present)
        drawn = sorted(present, key=words.__getitem__)[:size]
        return [present[partition] for partition in sorted(drawn)]

    def _drawn(self, partitions: Iterable[int]) -> dict[int, int]:
        """Return the random words by which clients are drawn in this round and phase, by partition."""
        key = Key(self._seed, f"cohort/{self._phase}", self._round)
        # A strategy asks for its nodes several times a round.
        if self._words[0] != key:
            self._words = key, {}
        words = self._words[1]
        words |= key.u64_of(partition for partition in partitions if partition not in words)
        return words

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,
        enough: Callable[[Sequence[Message]], bool] | None = None,
    ) -> list[Message]:
        """Send to the nodes and count what came of training messages; after them the evaluation cohort is shown."""
        batch = list(messages)
        replies = list(self.inner.send_and_receive(batch, timeout=timeout, enough=enough))
        trained = sum(message.metadata.message_type.partition(".")[0] == "train" for message in batch)
        if trained:
            good = sum(not reply.has_error() for reply in replies)
            self.reasons += [str(reply.error.reason) for reply in replies if reply.has_error()]
            self.replies += good
            self.failures += trained - good
            self._phase = "evaluate"
        return replies

    def partition_of(self, node_id: int) -> int | None:
        """Return the partition of a node as far as it is known."""
        known = self.inner.partition_of(node_id)
        return self._partitions.get(node_id) if known is None else known

    def _draws(self) -> bool:
        return any(0.0 < share < 1.0 for share in self._shares.values())

    def _call_roll(self, nodes: list[int]) -> list[int]:
        """Ask ``nodes`` for their partitions, remember the answers, and return the partitions that were taken already.

        Who is believed is the meter's decision: an engine that knows its nodes' partitions is asked, not they.
        """
        taken: list[int] = []
        if not nodes:
            return taken
        content = RecordDict({"config": self._query})
        messages = [Message(content, node, "query") for node in nodes]
        self._asked |= dict.fromkeys(nodes, self._round)
        replies = list(self.inner.send_and_receive(messages, timeout=ROLL_CALL_SECONDS))
        asked, online = dict(addressed(messages)), set(self.inner.get_node_ids())
        holders = {partition: node for node, partition in self._partitions.items()}
        for reply in replies:
            node = asked[reply.metadata.reply_to_message_id]
            known = self.inner.partition_of(node)
            partition = take_node(reply) if known is None else known
            # Node ids are redrawn in every run, so the reasons do not name them.
            if reply.has_error():
                self.reasons.append(f"a node could not answer the roll call: {reply.error.reason}")
            elif partition is None:
                self.reasons.append("a node does not say which partition it holds")
            elif partition >= self._clients:
                self.reasons.append(f"a node holds partition {partition} of a run with {self._clients} clients")
            else:
                other = holders.get(partition)
                holder = None if other == node else other
                if known is None or holder in online:
                    taken.append(partition)
                else:
                    if holder is not None:
                        del self._partitions[holder]
                    # Where the node was known under another partition that one is free now.
                    if (former := self._partitions.get(node)) is not None:
                        holders.pop(former, None)
                    self._partitions[node] = partition
                    holders[partition] = node
        return taken
