"""What the drop-in pair exchanges beside the frames: field names, the announcement, the reply header.

The announcement is merged into the one ConfigRecord a strategy already sends, under prefixed keys, instead of being a
record of its own: a client without the mod sees an ordinary message (Flower's own DP mods insist on exactly one
ConfigRecord), and a record more would cost about 240 bytes on the wire.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from flwr.app import ConfigRecord, Error, Message, RecordDict

from fedcomp.flower.schema import Document, OtherVersion, Schema, Version
from fedcomp.rules import Data, Int, Text

PROTOCOL: Final = 2
"""Version of these fields, and of where the frames of a reply lie: since 2 in its header. A peer that speaks another
one is treated as a peer without the mod, and reported."""

PREFIX: Final = "fedcomp."
UPDATE: Final = "fedcomp.update"
EXACT: Final = "fedcomp.exact"
STEP: Final = "fedcomp.step"
"""Keys of frames: a client's update, its exact buffers, the downlink's steps (``fedcomp.step.<version>``)."""

OWN_FRAMES: Final = (UPDATE, EXACT, STEP)
"""All of them; a dot and more may follow."""

OWN_CONFIG: Final = "fedcomp"
"""Name of the ConfigRecord that carries the announcement when the strategy sends none of its own."""

Number = Annotated[int, Int(absent=0)]
Name = Annotated[bytes, Data(64)]
# Sorted, so that equal descriptions are equal bytes, however they were built.
Description = Annotated[dict[str, Any], Document(1 << 20, sort=True)]

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


@dataclass(frozen=True)
class Announcement(Schema, key=OWN_CONFIG, prefix=PREFIX):
    """What the server tells a client with each message; clients need no configuration of their own.

    Attributes
    ----------
    record : str
        Name of the message's ArrayRecord, needed when the model itself is not in the message.
    round, seed : int
        Coordinates of the random streams.
    codec, policy : dict
        The uplink codec and the density policy; an empty codec means "reply as you are" (evaluation).
    session : bytes
        Identifies the server's strategy object, also when it is resumed. Memory of another session is not continued:
        what became of its last frame is unknown.
    sequence : int
        Identifies this node's message; increasing within a session, and the same for all nodes of a round, so that it
        does not count them. 0: nothing to acknowledge (evaluation).
    acknowledged, generation : int
        The last sequence number consumed from this node, and the generation of its memory as the server knows it.
    downlink : dict
        The downlink codec; empty when the downlink is not compressed.
    version, base : int
        The model's version and the version its steps start from; base 0 means the message holds the full model.
    digest : bytes
        Names the model of ``version`` (:func:`fedcomp.versions.digest`).
    """

    protocol: Annotated[int, Version(PROTOCOL)] = field(default=PROTOCOL, kw_only=True)
    record: Annotated[str, Text()]
    round: Number
    seed: Annotated[int, Int(least=-(2**63), absent=0)]
    codec: Description = field(default_factory=dict)
    policy: Description = field(default_factory=dict)
    session: Name = b""
    sequence: Number = 0
    acknowledged: Number = 0
    generation: Number = 0
    downlink: Description = field(default_factory=dict)
    version: Number = 0
    base: Number = 0
    digest: Name = b""

    def write(self, config: ConfigRecord) -> None:
        """Add the announcement's fields to ``config``. Fields at their default are left out.

        Raises
        ------
        SchemaError
            When a field is not what a client would take.
        """
        config.update(self.check())

    @classmethod
    def read(cls, config: ConfigRecord) -> Announcement | None:
        """Return the announcement in ``config``, or None when there is none.

        Of another protocol version only the version itself is read: its fields may mean something else.

        Raises
        ------
        SchemaError
            When the fields are there but damaged.
        """
        if PREFIX + "protocol" not in config:
            return None
        said = tuple((name, type(value), value) for name, value in config.items() if name.startswith(PREFIX))
        try:
            # A list, which no field is, has no hash.
            return cls.of(config) if any(kind is list for _, kind, _ in said) else _announced(said)
        # Returned, not raised: the client answers as one without the mod would, and says why.
        except OtherVersion as error:
            return cls("", 0, 0, protocol=error.version)

    @staticmethod
    def erase(config: ConfigRecord) -> None:
        """Remove every announcement field from ``config``, so that the app sees its own configuration only."""
        # Over a list: the record loses entries on the way.
        for name in [k for k in config if k.startswith(PREFIX)]:
            del config[name]


# Every mod reads the announcement, and in one process every client one that differs from the last in a few numbers at
# most. The types, because True is equal to 1 and no number of a protocol.
@functools.lru_cache(4)
def _announced(said: tuple[tuple[str, type, Any], ...]) -> Announcement:
    return Announcement.of({name: value for name, _, value in said})


def is_own(name: str) -> bool:
    """Whether a record is between the two halves of the pair alone; everything else is the app's, whoever sent it."""
    return any(name == own or name.startswith(f"{own}.") for own in OWN_FRAMES)


def announce(content: RecordDict, announcement: Announcement) -> None:
    """Merge the announcement into the message's only ConfigRecord, or into one of its own."""
    configs = {k: v for k, v in content.items() if isinstance(v, ConfigRecord) and not k.startswith(PREFIX)}
    name = next(iter(configs)) if configs else OWN_CONFIG
    # A copy: strategies put one ConfigRecord into all their messages, and each node's announcement is its own.
    config = configs[name].copy() if name in configs else ConfigRecord()
    announcement.write(config)
    content[name] = config
