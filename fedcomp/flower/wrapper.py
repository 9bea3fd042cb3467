"""A Grid around another one, which does whatever it does not change."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedcomp.errors import ConfigError
from fedcomp.flower._private import Run


class GridWrapper(Grid):
    """Passes everything on to ``inner``; a subclass overrides what it changes.

    Attributes that are not part of Flower's interface (a clock, wiping a node) are those of ``inner``.
    """

    inner: Grid

    def __init__(self, inner: Grid) -> None:
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

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull from the inner grid."""
        return self.inner.pull_messages(message_ids)

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
