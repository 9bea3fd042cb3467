"""Names shared by the messages of all systems, and error replies."""

from __future__ import annotations

from typing import Final

from flwr.app import Error, Message

PREFIX: Final = "fedcomp."
OWN_CONFIG: Final = "fedcomp"
"""Name of the ConfigRecord that carries the head of an ask when the strategy sends none of its own."""

STALE: Final = "fedcomp.stale"
"""First word of the error reason of a client that was given an older message after a newer one."""

RESYNC: Final = "fedcomp.resync"
"""First word of the error reason of a client whose replica cannot be brought up to date."""

MOD_FAILED_PRECONDITION: Final = 6
APP_RAISED: Final = 2
"""Flower's ErrorCodes of a message that a mod kept from the app, and of an app that raised; the enumeration itself is
private."""


def refusal(message: Message, reason: str) -> Message:
    """Return the error reply of a mod that does not let ``message`` through to the app."""
    return Message(Error(MOD_FAILED_PRECONDITION, reason), reply_to=message)


def app_failure(message: Message, reason: str) -> Message:
    """Return the error reply of an app that raised, and of one whose reply is as good as none."""
    return Message(Error(APP_RAISED, reason), reply_to=message)
