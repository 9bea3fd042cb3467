"""The nodes of a run: waiting for them and reproducible sampling; identities are in the roll.

Flower's strategies sample nodes with the process's global random generator from ids that are new in every run. Here the
server decides who takes part, by partition, and shows a strategy only those nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from fedcomp.errors import ConfigError, FedcompError
from fedcomp.experiments.roll import Roll
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.pipeline import arrived, now
from fedcomp.flower.privacy import is_secret
from fedcomp.flower.wrapper import Enough
from fedcomp.rng import Key
from fedcomp.strategies.deadlines import Deadline

POLL_SECONDS: Final = 0.2


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


class Cohorts(Roll):
    """A roll that shows a strategy only the nodes that take part in the current exchange.

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
    deadline : callable, optional
        Makes a :class:`Deadline` for each type of message: exchanges then end by the clients' own past times. Those of
        a client whose reply did not come are forgotten, so that the timeout counts again when more than half did not.
        Not in rounds whose participants are secret.

    Attributes
    ----------
    replies, failures : int
        Of the current round's training messages: replies with content; errors and messages without a reply.
    reasons : list of str
        Of the current round: what the error replies said, and why newcomers were not taken in.
    skipped, returned, known
        See :class:`~fedcomp.experiments.roll.Roll`.

    Notes
    -----
    The client of partition p takes part in round t when the 64-bit word of the key (seed, purpose, t, p) is among the
    smallest, so a cohort depends on nothing but these numbers and on who is online. Partition ids are learnt by a roll
    call of ``query`` messages, which the ledger counts like any other; with everybody taking part none is needed.
    """

    def __init__(
        self,
        grid: MeteredGrid,
        *,
        clients: int,
        seed: int,
        train: float,
        evaluate: float,
        query: ConfigRecord,
        deadline: Callable[[], Deadline] | None = None,
    ) -> None:
        super().__init__(grid, clients=clients, query=query)
        self.replies = self.failures = 0
        self._seed = seed
        self._shares = {"train": train, "evaluate": evaluate}
        self._phase = "train"
        self._words: tuple[Key, dict[int, int]] = Key(seed), {}
        self._deadline = deadline
        self._deadlines: dict[str, Deadline] = {}

    def prepare(self) -> None:
        """Call the roll if cohorts will be drawn, or more nodes are online than there are partitions.

        Raises
        ------
        ConfigError
            When two nodes hold the same partition.
        """
        online = list(self.inner.get_node_ids())
        if self._draws() or len(online) > self._clients:
            self.called = True
            taken, self.reasons = self._call_roll(online), []
            if taken:
                raise ConfigError(
                    f"two nodes hold partition {taken[0]}; start each node with a partition-id of its own"
                )

    def times(self) -> dict[str, Any]:
        """Return what the deadlines know, as plain data."""
        return {kind: deadline.state_dict() for kind, deadline in self._deadlines.items()}

    def recall_times(self, times: dict[str, Any]) -> None:
        """Continue from :meth:`times`."""
        for kind, state in times.items() if self._deadline is not None else ():
            self._deadline_of(kind).load_state_dict(state)

    def _begin(self, value: int) -> None:
        self._phase = "train"
        self.replies = self.failures = 0
        super()._begin(value)

    def get_node_ids(self) -> list[int]:
        """Return the nodes of the current cohort, in partition order."""
        online = self.there(partitions=self._draws())
        if not self._draws():
            return online
        present = {partition: n for n in online if (partition := self.partition_of(n)) is not None}
        # A share of all clients: a cohort keeps its size while some nodes are away.
        size = max(1, int(self._clients * self._shares[self._phase]))
        words = self._drawn(present)
        drawn = sorted(present, key=words.__getitem__)[:size]
        return [present[partition] for partition in sorted(drawn)]

    def _drawn(self, partitions: Iterable[int]) -> dict[int, int]:
        """Return the random words by which clients are drawn in this round and phase, by partition."""
        key = Key(self._seed, f"cohort/{self._phase}", self.round)
        # A strategy asks for its nodes several times a round.
        if self._words[0] != key:
            self._words = key, {}
        words = self._words[1]
        words |= key.u64_of(partition for partition in partitions if partition not in words)
        return words

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None, enough: Enough | None = None
    ) -> list[Message]:
        """Send to the nodes and count what came of training messages; after them the evaluation cohort is shown."""
        batch = list(messages)
        replies = self._timed(batch, timeout, enough)
        trained = sum(message.metadata.message_type.partition(".")[0] == "train" for message in batch)
        if trained:
            good = sum(not reply.has_error() for reply in replies)
            self.reasons += [str(reply.error.reason) for reply in replies if reply.has_error()]
            self.replies += good
            self.failures += trained - good
            self._phase = "evaluate"
        return replies

    def _timed(self, batch: list[Message], timeout: float | None, enough: Enough | None) -> list[Message]:
        """Send, and wait for no longer than the clients' own past times let expect; learn from what they take now."""
        if self._deadline is None or timeout is None or any(is_secret(message.content) for message in batch):
            return super().send_and_receive(batch, timeout=timeout, enough=enough)
        kinds = sorted({message.metadata.message_type for message in batch})
        nodes = {kind: [m.metadata.dst_node_id for m in batch if m.metadata.message_type == kind] for kind in kinds}
        limit = max((self._deadline_of(kind).seconds(nodes[kind], timeout) for kind in kinds), default=timeout)
        began = now(self)
        replies = super().send_and_receive(batch, timeout=limit, enough=enough)
        took = {r.metadata.reply_to_message_id: arrived(self, r) - began for r in replies if not r.has_error()}
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        for message in batch:
            meta = message.metadata
            deadline = self._deadline_of(meta.message_type)
            if meta.message_id in took:
                deadline.note(meta.dst_node_id, took[meta.message_id])
            # An error may come at once, and says nothing of how long training takes; nor does a wait cut short.
            elif meta.message_id not in answered and enough is None:
                deadline.forget(meta.dst_node_id)
        return replies

    def _deadline_of(self, kind: str) -> Deadline:
        assert self._deadline is not None
        return self._deadlines.setdefault(kind, self._deadline())

    def _draws(self) -> bool:
        return any(0.0 < share < 1.0 for share in self._shares.values())
