"""The client half of a private round: only the update leaves the node.

``compression()`` alone does the same to what it compresses; ``private()`` does it for apps that are not compressed, and
stays inside of all other halves, so that they see only what may leave. A message that does not ask for privacy passes
through untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from flwr.app import ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.clients.half import CallNext, ClientHalf
from fedcomp.clients.messages import NOT_WITHOUT_NOISE, reply_arrays
from fedcomp.errors import ConfigError, FedcompError, LayoutError, StateError
from fedcomp.flower.logs import log
from fedcomp.flower.payload import PayloadError, keep_node, models
from fedcomp.flower.privacy import is_padded, is_private
from fedcomp.flower.protocol import MOD_FAILED_PRECONDITION, RESYNC, STALE, app_failure
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.layout import Layout
from fedcomp.privacy.errors import BudgetExceeded, PrivacyLedgerError

STAYS: Final = "the client could not answer; its reason stays on the node"
"""All that a server is told of a private round that failed on a client."""

ABOUT_SETTINGS: Final = (ConfigError, BudgetExceeded, PrivacyLedgerError, StateError, LayoutError, PayloadError)
"""Errors of this project that are about settings, budgets, models and messages alone: no text of theirs holds a figure
that was worked out from records, as those about a contribution do (its norm, how many of its values are finite)."""

_BEFORE_THE_APP: Final = (RESYNC, STALE, NOT_WITHOUT_NOISE)
"""How the reasons begin for which our other mods refuse a message before the app has seen it."""


def private() -> ClientHalf:
    """Return the half that strips the replies to private training messages.

    Metrics, the number of examples and every other record are left out; integer buffers and running statistics go back
    as they came. What goes wrong after the message was read is in this node's log alone: the server gets an error with
    the text :data:`STAYS`, whether the app raised, with whichever words, or returned an error, or its update could not
    be sent.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> app = client(ClientApp(), only=["compression", private()])
    """

    def private_mod(msg: Message, context: Context, call_next: CallNext) -> Message:
        if msg.metadata.message_type.partition(".")[0] != "train":
            return call_next(msg, context)
        if not wants_private(msg.content):
            return call_next(msg, context)
        # Against which of several models the reply's buffers would be checked is not defined.
        found = list(models(msg.content).values())
        if len(found) != 1:
            raise LayoutError(f"a private round's message holds {len(found)} ArrayRecords, expected one, the model")
        # The app may replace what it was given.
        before = to_arrays(found[0])

        def update() -> Message:
            reply = call_next(msg, context)
            if not reply.has_error():
                reply.content = only_update(reply.content, before, Layout.of(before))
            return reply

        return discreet(msg, update)

    return ClientHalf("private", private_mod)


def discreet(msg: Message, run: Callable[[], Message], passing: tuple[type[FedcompError], ...] = ()) -> Message:
    """Return what ``run`` answers to ``msg``; of what goes wrong in it nothing but that it did.

    Which exception it is, which words it has and whether it was raised or returned could all depend on the data.

    Parameters
    ----------
    passing : tuple of types
        Exceptions that are raised all the same.
    """
    try:
        reply = run()
    except passing:
        raise
    except Exception:
        log.exception("this client failed in a private round; the server learns only that it failed")
    else:
        if not reply.has_error():
            return reply
        code, reason = reply.error.code, reply.error.reason or ""
        if code == MOD_FAILED_PRECONDITION and reason.startswith(_BEFORE_THE_APP):
            return reply
        log.error("the app answered a private round with an error, kept on this node: %s", reason)
    return app_failure(msg, STAYS)


def wants_private(content: RecordDict) -> bool:
    """Whether a message asks for the update alone."""
    return any(is_private(record) for record in content.values() if isinstance(record, ConfigRecord))


def wants_padding(content: RecordDict) -> bool:
    """Whether a message asks for frames whose length tells nothing of the update."""
    return any(is_padded(record) for record in content.values() if isinstance(record, ConfigRecord))


def only_update(content: RecordDict, before: Mapping[str, NDArray[Any]], layout: Layout) -> RecordDict:
    """Return an app's reply without everything but the model, in which buffers are those of the model ``before``.

    Raises
    ------
    fedcomp.errors.ConfigError
        When the reply holds several ArrayRecords.
    LayoutError
        When its tensors are not those of the model.
    """
    name, after = reply_arrays(content, before)
    layout.check(after)
    # Integers take no noise, and running statistics are made of records: both go back as they came.
    out = RecordDict({name: to_record({**after, **{t.name: before[t.name] for t in layout.exact}})})
    keep_node(content, out)
    return out
