"""The agreement between both sides of a private round, and how a strategy declares its guarantee.

A private strategy puts :data:`PRIVATE` into the training configuration. Clients then send nothing but the update: no
metrics, no number of examples, no statistics of their data (:mod:`fedcomp.clients.private.mod`). Its frame is padded to
a length that follows from codec, layout and policy alone, unless :data:`UNPADDED` says otherwise. Where who takes part
is secret :data:`SECRET` is there, too, for whatever passes the messages on and has a log.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    from flwr.app import RecordDict

    from fedcomp.privacy.ledger import PrivacyLedger
    from fedcomp.privacy.statement import Statement

PRIVATE: Final = "private"
"""Key of the training configuration; True asks clients for the update alone."""

UNPADDED: Final = "private-unpadded"
"""Key of the training configuration; True lets frames be as long as their updates make them."""

SECRET: Final = "private-secret"
"""Key of the training configuration; True where no log may follow who was sent the message."""


@runtime_checkable
class Private(Protocol):
    """A strategy that promises privacy.

    Attributes
    ----------
    privacy : PrivacyLedger
        What was released, and what it cost.

    Notes
    -----
    Three more methods are called where a strategy has them: ``adopt(arrays)`` shows it the model before the first
    round, on whose size a round's cost may depend; ``declare_records(count)`` tells it the public number of records of
    all clients, where records are its units; and ``may_be_coded(construction)`` says whether other clients may hold
    what a client sends, as those of a coded round do.
    """

    privacy: PrivacyLedger

    def declare(self, population: int) -> None:
        """Learn the public number of units N, where the constructor was not told; called before the first round."""

    def open_ledger(self, path: Path) -> None:
        """Keep the ledger in a file from now on; events in it that the ledger lacks were paid and count."""

    def over(self, server_round: int) -> str:
        """Return why round ``server_round`` may not be made, empty when it may."""

    def statement(self) -> Statement:
        """Return what may be said about the run so far."""


def find_private(strategy: Any) -> Private | None:
    """Return the private strategy in ``strategy`` or in what it wraps (its ``inner``), None where there is none."""
    # By identity: a chain of wrappers that leads back into itself has to end.
    seen: set[int] = set()
    while strategy is not None and id(strategy) not in seen:
        # Of its own: a wrapper may hand through the attributes of what it wraps.
        if isinstance(strategy, Private) and getattr_static(strategy, "over", None) is not None:
            return strategy
        seen.add(id(strategy))
        strategy = getattr(strategy, "inner", None)
    return None


def is_padded(config: Mapping[str, Any]) -> bool:
    """Whether a message's configuration asks for an update whose length tells nothing of it."""
    return is_private(config) and config.get(UNPADDED) is not True


def is_secret(content: RecordDict) -> bool:
    """Whether no log may follow who was sent a message with this content."""
    # Of every record: no other kind can hold True.
    return any(record.get(SECRET) is True for record in content.values())


def is_private(config: Mapping[str, Any]) -> bool:
    """Whether a message's configuration asks for the update alone."""
    return config.get(PRIVATE) is True
