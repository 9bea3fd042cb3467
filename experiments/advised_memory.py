"""The grid of a trial of ``fedcomp advise``: it counts the memory of the server and of the clients apart."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from collections.abc import Collection, Iterable, Iterator

from flwr.app import Context, Message

from fedcomp.experiments.advised_client import trial_client
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import payload_bytes
from fedcomp.flower.wrapper import Enough


class CountingGrid(InProcessGrid):
    """An in-process grid whose clients train on noise.

    Both sides run in one process, so bytes go to the side whose code runs. What Python and numpy allocate is counted;
    a compiled kernel's own buffers are not.

    Parameters
    ----------
    nodes : int

    Attributes
    ----------
    client : int
        Bytes of a client at its peak: its state, the message, the trained model, and what its half of the system
        allocates. Training itself is left out.
    server : int
        Bytes of the server at its peak, with the models it keeps, the messages it sends and the replies it reads.
    """

    def __init__(self, nodes: int) -> None:
        super().__init__(self._answered, nodes, shuffle_replies=False)
        self._app = trial_client(self._training)
        self.client = self.server = 0
        self._before = self._highest = 0
        self._counted: set[int] = set()

    def start(self) -> None:
        """Count from now on. What was allocated before, and is kept, is not seen."""
        gc.collect()
        tracemalloc.start()

    def close(self) -> None:
        """Stop counting, and close the grid."""
        tracemalloc.stop()
        super().close()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver: what that allocates is neither side's."""
        with self._delivering():
            return super().push_messages(messages)

    def receive(
        self, message_ids: Collection[str], *, timeout: float | None = None, enough: Enough | None = None
    ) -> list[Message]:
        """Deliver: what that allocates is neither side's, but the replies are the server's."""
        with self._delivering():
            return super().receive(message_ids, timeout=timeout, enough=enough)

    @contextlib.contextmanager
    def _delivering(self) -> Iterator[None]:
        self.served()
        yield
        # What earlier rounds left behind would be counted, or not, as the collector likes.
        gc.collect()
        tracemalloc.reset_peak()

    def served(self) -> None:
        """Note what the server's code has allocated at its peak since the last delivery."""
        # The states of clients lie in this process, too; what was kept before the count began is not in it.
        stored = sum(len(self.node(partition).stored()) for partition in self._counted)
        self.server = max(self.server, tracemalloc.get_traced_memory()[1] - stored)

    def _answered(self, message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        held = payload_bytes(message) + len(self.node(partition).stored())
        if tracemalloc.is_tracing():
            self._counted.add(partition)
        tracemalloc.reset_peak()
        self._before, self._highest = tracemalloc.get_traced_memory()
        reply = self._app(message, context)
        self._highest = max(self._highest, tracemalloc.get_traced_memory()[1])
        self.client = max(self.client, held + self._highest - self._before)
        return reply

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        """Leave out what is allocated at the peak of a training; what it returns stays."""
        self._highest = max(self._highest, tracemalloc.get_traced_memory()[1])
        yield
        tracemalloc.reset_peak()
