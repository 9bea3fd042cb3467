"""The client half of a private round: the update leaves, and nothing else of the data.

``ClientApp(mods=[compression(), private()])`` is all a Flower app needs. ``compression()`` alone does the same to what
it compresses, and ``ClientApp(mods=[private()])`` is for apps that are not compressed. A message that does not ask for
privacy passes through untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from numpy.typing import NDArray

from clients.messages import CallNext, Mod, reply_arrays
from fedcomp.errors import LayoutError
from fedcomp.flower.payload import NODE_RECORD, PARTITION_KEY, models
from fedcomp.flower.privacy import is_private
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.layout import Layout


def private() -> Mod:
    """Return the mod that strips the replies to private training messages.

    Put it last in the list, inside of all others, so that they see only what may leave. Metrics, the number of examples
    and every other record are left out; integer buffers and running statistics go back as they came; the reason of an
    error that the app returns stays here. An exception that the app raises is Flower's to report, with its text.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> app = ClientApp(mods=[private()])
    """

    def private_mod(msg: Message, context: Context, call_next: CallNext) -> Message:
        if not wants_private(msg.content) or msg.metadata.message_type.partition(".")[0] != "train":
            return call_next(msg, context)
        found = list(models(msg.content).values())
        if len(found) != 1:
            raise LayoutError(f"a private round's message holds {len(found)} ArrayRecords, expected one, the model")
        # The app may replace what it was given.
        before = to_arrays(found[0])
        reply = call_next(msg, context)
        if reply.has_error():
            return keep_reason(msg, reply)
        reply.content = only_update(reply.content, before, Layout.of(before))
        return reply

    return private_mod


def keep_reason(msg: Message, reply: Message) -> Message:
    """Return an error reply of the app without its words, which could be about the data."""
    return Message(Error(reply.error.code, "the app returned an error; its reason stays on the node"), reply_to=msg)


def wants_private(content: RecordDict) -> bool:
    """Whether a message asks for the update alone."""
    return any(is_private(record) for record in content.values() if isinstance(record, ConfigRecord))


def only_update(content: RecordDict, before: Mapping[str, NDArray[Any]], layout: Layout) -> RecordDict:
    """Return an app's reply without everything but the model, in which buffers are those of the model ``before``.

    Raises
    ------
    fedcomp.errors.ConfigError
        When the reply holds several ArrayRecords.
    LayoutError
        When its tensors are not those of the model.
    """
    name, after = reply_arrays(content)
    layout.check(after)
    out = RecordDict({name: to_record({**after, **{t.name: before[t.name] for t in layout.exact}})})
    node = content.config_records.get(NODE_RECORD)
    if node is not None and PARTITION_KEY in node:
        out[NODE_RECORD] = ConfigRecord({PARTITION_KEY: node[PARTITION_KEY]})
    return out
