"""What stands for a message that travels from node to node, beside the relay: 24 bytes that name it.

The relay then decides over references what it decides over messages otherwise: who gets which, once; what goes back to
its sender; what a new epoch forgets. A message is whatever fits its reference, so that nothing else a peer delivers can
take its place. What no link took follows its reference and passes the relay, as the body of it::

    iteration  u32   in which the message was written
    length     u32   of the message
    digest     16    BLAKE2b of the message
    body             to the end; empty where the message took its link
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

from fedcomp.gossip.errors import MessageError, NodeAnswerError
from fedcomp.gossip.protocol import Instruction, NodeAnswer

_HEAD: Final = struct.Struct("<II16s")
REFERENCE_BYTES: Final = _HEAD.size
MOST_BESIDE: Final = 128
"""Bytes by which what passes the relay may be longer than the message: the reference, and what a seal adds."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Which message it is.

    Attributes
    ----------
    iteration : int
        In which it was written.
    length : int
        Bytes of the message.
    digest : bytes
        16 bytes.

    Examples
    --------
    >>> reference = Reference.to(7, b"a message")
    >>> len(reference.to_bytes()), reference.fits(b"a message"), reference.fits(b"another")
    (24, True, False)
    """

    iteration: int
    length: int
    digest: bytes

    @classmethod
    def to(cls, iteration: int, payload: bytes) -> Reference:
        """Return the reference to a message of an iteration."""
        return cls(iteration, len(payload), hashlib.blake2b(payload, digest_size=16).digest())

    def to_bytes(self) -> bytes:
        """Return the 24 bytes."""
        return _HEAD.pack(self.iteration, self.length, self.digest)

    @classmethod
    def split(cls, data: bytes) -> tuple[Reference, bytes]:
        """Return the reference in front of ``data``, and the body behind it.

        Raises
        ------
        MessageError
            When ``data`` is shorter than a reference.
        """
        if len(data) < REFERENCE_BYTES:
            raise MessageError(f"a reference to a message has {len(data)} bytes, expected at least {REFERENCE_BYTES}")
        return cls(*_HEAD.unpack_from(data)), data[REFERENCE_BYTES:]

    def fits(self, payload: bytes) -> bool:
        """Whether ``payload`` is the message."""
        return self == Reference.to(self.iteration, payload)


def check_references(instruction: Instruction, answer: NodeAnswer, largest: int) -> None:
    """Refuse an answer whose messages are no references, or to what the node cannot have written now.

    Raises
    ------
    NodeAnswerError
    """
    for multicast in answer.multicasts:
        try:
            reference, _ = Reference.split(multicast.payload)
        except MessageError as error:
            raise NodeAnswerError(str(error)) from error
        # By the lowest iteration under way nodes know what they may forget: one in the past would hold everything.
        if reference.iteration != instruction.iteration:
            raise NodeAnswerError(f"a message of iteration {reference.iteration} in one of {instruction.iteration}")
        if reference.length > largest:
            raise NodeAnswerError(f"a message of {reference.length} bytes; the largest this run has is {largest}")
