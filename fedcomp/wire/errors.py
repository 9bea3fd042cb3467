"""Errors caused by bytes from a peer. Nothing else leaves :func:`fedcomp.wire.decode`."""

from __future__ import annotations

from collections.abc import Iterable

from fedcomp.errors import FedcompError


class WireError(FedcompError, ValueError):
    """A frame cannot be accepted; the receiver's state is untouched."""


class Truncated(WireError):
    """The bytes end before something they announced."""


class BadMagic(WireError):
    """The bytes are not an FCW1 frame at all."""


class UnsupportedVersion(WireError):
    """The frame needs something a newer version defined.

    Attributes
    ----------
    theirs, ours : int
        Major version of the frame and of this receiver.
    """

    def __init__(self, message: str, theirs: int, ours: int) -> None:
        super().__init__(message)
        self.theirs = theirs
        self.ours = ours


class UnsupportedCodec(WireError):
    """A codec or back-end is unknown here, reserved, not installed, or not allowed by the receiver's limits.

    Attributes
    ----------
    available : tuple of str
        What this receiver does accept in its place.
    """

    def __init__(self, message: str, available: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.available = tuple(available)


class ChecksumMismatch(WireError):
    """The frame was damaged on its way (CRC-32 differs). Integrity only: anyone can compute a CRC."""


class LimitExceeded(WireError):
    """The frame is well-formed so far, but larger than the receiver agreed to handle."""


class Corrupt(WireError):
    """The frame contradicts itself or the format."""


class SchemaMismatch(WireError):
    """The frame holds other tensors than the receiver expects."""


class NonFinite(WireError):
    """A value or a parameter of a value codec is NaN or infinite."""
