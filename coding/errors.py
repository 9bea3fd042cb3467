"""Errors of the coding package. They derive from the project's one base class, so that one ``except`` catches them all.

What a user chose wrongly is :class:`fedcomp.errors.ConfigError`; what a peer sent wrongly, or cannot be decoded, is one
of these.
"""

from __future__ import annotations

from fedcomp.errors import FedcompError


class CodingError(FedcompError):
    """Base class of what can go wrong with coded data while a run is under way."""


class PacketError(CodingError, ValueError):
    """Bytes are not a packet this receiver accepts; nothing was allocated from what they claim."""


class NotDecodable(CodingError, RuntimeError):
    """What has arrived does not determine what was sent. No numbers are made up for it."""


class IllConditioned(NotDecodable):
    """A real-valued system determines its solution only with errors too large to be used."""


class CorruptGeneration(CodingError, ValueError):
    """Decoded bytes are not the ones that were encoded: the digest differs, or a check symbol is violated."""


class SealError(CodingError, ValueError):
    """A sealed parcel was not made for this receiver and place, or was changed on the way."""


class TransportError(CodingError, OSError):
    """A parcel could not be handed to a peer, or to the store of this one."""
