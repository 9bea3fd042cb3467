"""A Grid that wraps another one and delegates everything it does not override."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedcomp.errors import ConfigError
from fedcomp.flower._private import set_message_id
from fedcomp.flower.privacy import is_secret
from fedcomp.logs import log

if TYPE_CHECKING:
    from fedcomp.flower._private import Run

Enough = Callable[[Sequence[Message]], bool]
"""Whether the replies that have come are all that is needed."""


class GridWrapper(Grid):
    """Passes everything on to ``inner``; a subclass overrides what it changes.

    Attributes that are not part of Flower's interface (a clock, wiping a node) are those of ``inner``.
    """

    inner: Grid

    def __init__(self, inner: Grid) -> None:
        # By what a grid does: Flower's own, and those of tests, need not share a base class.
        if not hasattr(inner, "push_messages"):
            raise ConfigError(f"inner={inner!r} is not valid: a Grid, such as the one that a ServerApp is given")
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        # Before __init__ there is no inner grid: looking it up here would not end.
        if name.startswith("_") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def set_run(self, run: Run) -> None:
        """Set the run of the inner grid."""
        self.inner.set_run(run)

    @property
    def run(self) -> Run:
        """The inner grid's run."""
        return self.inner.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message the inner grid's way."""
        return self.inner.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the inner grid's node ids."""
        return self.inner.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push to the inner grid."""
        return self.inner.push_messages(messages)

    def pull_messages(  # type: ignore[override]  # as Flower 1.43 has it; earlier ones name the first otherwise
        self, reply_to_message_ids: Iterable[str] | None = None, *, message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        """Pull from the inner grid; arguments as for :func:`awaited_ids`."""
        # By position, which Flower's grids of both signatures take.
        return cast(Any, self.inner).pull_messages(awaited_ids(reply_to_message_ids, message_ids))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send over the inner grid."""
        return self.inner.send_and_receive(messages, timeout=timeout)


def as_batch(messages: Iterable[Message]) -> list[Message]:
    """Return ``messages`` as a list.

    Raises
    ------
    ConfigError
        When they are a generator: a deployment iterates it twice and would send nothing.
    """
    # Refused on every engine alike, so that what runs in one process runs in a deployment.
    if not isinstance(messages, Collection):
        raise ConfigError(
            f"messages is a {type(messages).__name__}; pass a list. A deployment iterates it twice, so a generator "
            "would send an empty batch there"
        )
    return list(messages)


def awaited_ids(reply_to_message_ids: Iterable[str] | None, message_ids: Iterable[str] | None) -> list[str] | None:
    """Return the ids of the messages whose replies are pulled, under either of Flower's two names for them.

    Parameters
    ----------
    reply_to_message_ids : iterable of str or None
        The first argument of ``Grid.pull_messages``. None pulls every reply that is there.
    message_ids : iterable of str or None
        The same by the name that the argument had up to Flower 1.42.

    Raises
    ------
    TypeError
        When both are given.
    """
    if reply_to_message_ids is not None and message_ids is not None:
        raise TypeError("pull_messages takes reply_to_message_ids or message_ids, not both")
    ids = reply_to_message_ids if message_ids is None else message_ids
    return None if ids is None else list(ids)


def push(grid: Grid, batch: Sequence[Message]) -> list[str]:
    """Push ``batch`` and return the ids of the messages that were pushed.

    A grid answers with ``""`` (or None) for a message that was not pushed, or leaves it out, and may have named the
    message all the same. Here such a message loses its id, so that nobody waits for a reply to it.
    """
    pushed = [message_id for message_id in grid.push_messages(batch) if message_id]
    known = set(pushed)
    refused = [message for message in batch if message.metadata.message_id not in known]
    # The in-process engine names none that it does not push, and has said so.
    named = [message for message in refused if message.metadata.message_id]
    for message in named:
        set_message_id(message, "")
    # The line would follow who was drawn for a secret round.
    if named and not any(is_secret(message.content) for message in batch if message.has_content()):
        log.warning("%d of %d messages were not pushed: they are lost, and not waited for", len(named), len(batch))
    return pushed
