"""What the two sides of a coded round say to each other: names of records and message types, fields, bundles.

Every message of a coded round carries one ConfigRecord under :data:`CODED`: from the server the plan, from a client its
header. Coded bytes ride as *bundles*, length-prefixed byte strings in one frame, since every Array of its own would
cost about 600 bytes and a request. What is coded is the whole content of the reply the app and the other mods made,
serialised by :func:`pack_content`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

from flwr.app import ConfigRecord, RecordDict

from fedcomp.errors import StateError
from fedcomp.flower._private import content_from_bytes, content_to_bytes
from fedcomp.flower.payload import PayloadError, put_frame, take_frame

CODED: Final = "fedcomp.coded"
"""Key of the ConfigRecord with the plan or the header. Records with the prefix ``fedcomp.`` are never the app's."""

PARCELS: Final = "fedcomp.coded.parcels"
"""Key of the frame that holds a bundle of parcels or packets."""

PROTOCOL: Final = 1
"""Version of the fields below; a peer with another one is treated as a peer without the mod."""

HELLO: Final = "query.coded_hello"
PUT: Final = "query.coded_put"
COLLECT: Final = "query.coded_collect"
SUM: Final = "query.coded_sum"
MORE: Final = "query.coded_more"

MEMBER: Final = 2
"""Kind of a parcel that holds one member's whole reply, for the aggregator of its group."""

MIXED: Final = 3
"""Kind of a parcel that holds one client's whole reply as a symbol of a mixture."""

SHARD: Final = 1
"""Kind of a parcel that holds one shard of one contributor's payload. Other constructions number their own from 16."""

SUM_SHARD: Final = 16
"""Kind of a parcel that holds one shard of a contributor's integers, to be added to others'."""

MASKED_UPDATE: Final = "fedcomp.coded.masked"
"""Key of the frame with a contributor's masked integers, where masks are what is coded."""

PER_SOURCE: Final = 4
"""How many packets of one source a relay hands out at most: between peers others may have forged some."""

NO_HANDLER: Final = "function registered with name"
"""Part of Flower's error text for a message whose action the app does not have."""

_LENGTH: Final = struct.Struct("<I")


class Fields:
    """Typed reading of a plan or header.

    Parameters
    ----------
    record : mapping
        The ConfigRecord's entries.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record

    def __contains__(self, name: str) -> bool:
        return name in self._record

    def integer(self, name: str, default: int | None = None, *, least: int = 0, most: int = 2**63 - 1) -> int:
        """Return an integer between ``least`` and ``most``, both included; raise :class:`StateError` otherwise."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise StateError(f"field {name!r} is {value!r}, expected a whole number from {least} to {most}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise StateError(f"field {name!r} is {value!r}, expected true or false")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a float that is not NaN."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise StateError(f"field {name!r} is {value!r}, expected a number")
        return float(value)

    def text(self, name: str, default: str | None = None, *, longest: int = 512) -> str:
        """Return a string of at most ``longest`` characters."""
        value = self._get(name, default)
        if not isinstance(value, str) or len(value) > longest:
            raise StateError(f"field {name!r} is {str(value)[:80]!r}, expected a text of at most {longest} characters")
        return value

    def data(self, name: str, default: bytes | None = None, *, length: int | None = None) -> bytes:
        """Return bytes, of exactly ``length`` if given."""
        value = self._get(name, default)
        if not isinstance(value, bytes) or (length is not None and len(value) != length):
            expected = "bytes" if length is None else f"{length} bytes"
            raise StateError(
                f"field {name!r} is a {type(value).__name__} of another length or kind, expected {expected}"
            )
        return value

    def integers(self, name: str, *, least: int = 0, most: int = 2**63 - 1, longest: int = 1 << 20) -> list[int]:
        """Return a list of integers between ``least`` and ``most``; an absent field is the empty list."""
        value = self._record.get(name, [])
        if not isinstance(value, list) or len(value) > longest:
            raise StateError(f"field {name!r} is no list of at most {longest} whole numbers")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not least <= item <= most:
                raise StateError(f"field {name!r} holds {item!r}, expected whole numbers from {least} to {most}")
        return value

    def texts(self, name: str, *, longest: int = 1 << 16) -> list[str]:
        """Return a list of strings of at most 512 characters; an absent field is the empty list."""
        value = self._record.get(name, [])
        if not isinstance(value, list) or len(value) > longest:
            raise StateError(f"field {name!r} is no list of at most {longest} texts")
        if not all(isinstance(item, str) and len(item) <= 512 for item in value):
            raise StateError(f"field {name!r} holds something else than texts of at most 512 characters")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self._record.get(name, default)
        if value is None:
            raise StateError(f"field {name!r} is missing: the other side speaks another version of this protocol")
        return value


def put_fields(content: RecordDict, fields: Mapping[str, Any]) -> None:
    """Put ``fields`` into ``content`` as its plan or header. None and what is empty are left out: Flower's own
    ``count_bytes()`` raises on empty values."""
    kept = {k: v for k, v in fields.items() if v is not None and v not in ("", b"", [])}
    content[CODED] = ConfigRecord({"protocol": PROTOCOL, **kept})


def fields_of(content: RecordDict) -> Fields | None:
    """Return the plan or header in ``content``; None without one of this protocol."""
    record = content.get(CODED)
    return Fields(record) if isinstance(record, ConfigRecord) and record.get("protocol") == PROTOCOL else None


def put_bundle(content: RecordDict, items: Iterable[bytes], key: str = PARCELS) -> int:
    """Put byte strings into ``content`` as one frame; return the sum of their lengths."""
    held = list(items)
    put_frame(content, key, b"".join(part for item in held for part in (_LENGTH.pack(len(item)), item)))
    return sum(map(len, held))


def take_bundle(content: RecordDict, *, most: int, longest: int, key: str = PARCELS) -> list[bytes]:
    """Return what :func:`put_bundle` put, the empty list when there is none.

    Parameters
    ----------
    most : int
        How many items are accepted.
    longest : int
        How many bytes each of them may have.

    Raises
    ------
    PayloadError
        When the frame is no bundle, or one beyond these limits.
    """
    frame = take_frame(content, key)
    items: list[bytes] = []
    position = 0
    while frame is not None and position < len(frame):
        if position + _LENGTH.size > len(frame):
            raise PayloadError(f"a bundle of {len(frame)} bytes ends in the middle of a length")
        (length,) = _LENGTH.unpack_from(frame, position)
        position += _LENGTH.size
        if length > longest:
            raise PayloadError(f"item {len(items)} of a bundle has {length} bytes, at most {longest} are accepted")
        if position + length > len(frame):
            raise PayloadError(
                f"item {len(items)} of a bundle has {length} bytes, only {len(frame) - position} are left"
            )
        if len(items) == most:
            raise PayloadError(f"a bundle has more than {most} items")
        items.append(frame[position : position + length])
        position += length
    return items


def pack_content(content: RecordDict) -> bytes:
    """Return a reply's content as the bytes that are coded; equal content gives equal bytes."""
    return content_to_bytes(content)


def open_content(data: bytes) -> RecordDict:
    """Return the content :func:`pack_content` serialised.

    Raises
    ------
    PayloadError
        When the bytes are none.
    """
    try:
        return content_from_bytes(data)
    except ValueError as error:
        raise PayloadError(str(error)) from error
