"""A client's whole reply as bytes for another route, and common fields of messages about links between clients."""

from __future__ import annotations

from typing import Final

from flwr.app import RecordDict

from fedcomp.flower._private import content_from_bytes, content_to_bytes
from fedcomp.flower.payload import PayloadError

# Flower has no error code of its own for this: the text is all there is to recognise it by.
NO_HANDLER: Final = "function registered with name"
"""Part of Flower's error text for a message whose action the app does not have."""

MAX_STORE_BYTES: Final = 64 * 1024 * 1024
"""What a client keeps for others unless one of the two sides says otherwise."""


def pack_content(content: RecordDict) -> bytes:
    """Return a reply's content as bytes; equal content gives equal bytes."""
    return content_to_bytes(content)


def open_content(data: bytes) -> RecordDict:
    """Return the content :func:`pack_content` serialised.

    Raises
    ------
    PayloadError
        When the bytes are not the content of a message.
    """
    try:
        return content_from_bytes(data)
    except ValueError as error:
        raise PayloadError(str(error)) from error
