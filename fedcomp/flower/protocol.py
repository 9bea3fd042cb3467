"""What the drop-in pair says to each other beside the frames: field names, the announcement, the reply header.

The announcement is merged into the one ConfigRecord a strategy already sends, under prefixed keys, instead of being a
record of its own: a client without the mod sees an ordinary message (Flower's own DP mods insist on exactly one
ConfigRecord), and a record more would cost about 240 bytes on the wire.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from flwr.app import ConfigRecord, RecordDict

from fedcomp.errors import StateError

PROTOCOL: Final = 1
"""Version of these fields. A peer that speaks another one is treated as a peer without the mod, and reported."""

PREFIX: Final = "fedcomp."
UPDATE: Final = "fedcomp.update"
EXACT: Final = "fedcomp.exact"
STEP: Final = "fedcomp.step"
SUPPORT: Final = "fedcomp.support"
NEXT_SUPPORT: Final = "fedcomp.next-support"
PROBE: Final = "fedcomp.probe"
"""Keys of frames: a client's update, its exact buffers, the downlink's steps (``fedcomp.step.<version>``), the index
block of a support all clients share, and samples of a client's memory for similarity figures."""

OWN_FRAMES: Final = (UPDATE, EXACT, STEP, SUPPORT, NEXT_SUPPORT, PROBE)
"""All of them; a dot and more may follow."""

LEADS: Final = 1
LOOKS_AHEAD: Final = 2
"""Bits of :attr:`Announcement.leader`: choose this round's support; choose the next round's from what is left."""

OWN_CONFIG: Final = "fedcomp"
"""Name of the ConfigRecord that carries the announcement when the strategy sends none of its own."""

STALE: Final = "fedcomp.stale"
"""First word of the error reason of a client that was given an older message after a newer one."""

RESYNC: Final = "fedcomp.resync"
"""First word of the error reason of a client whose replica cannot be brought up to date."""


@dataclass(frozen=True)
class Announcement:
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
    support : int
        In an exchange about a shared support: the support's id; 0 when none is meant.
    leader : int
        What a client that leads is asked for: :data:`LEADS`, :data:`LOOKS_AHEAD` or both.
    """

    record: str
    round: int
    seed: int
    codec: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    session: bytes = b""
    sequence: int = 0
    acknowledged: int = 0
    generation: int = 0
    downlink: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    base: int = 0
    digest: bytes = b""
    support: int = 0
    leader: int = 0
    protocol: int = PROTOCOL

    def write(self, config: ConfigRecord) -> None:
        """Add the announcement's fields to ``config``. Fields at their default are left out."""
        put: dict[str, int | str | bytes] = {
            "protocol": self.protocol,
            "record": self.record,
            "round": self.round,
            "seed": self.seed,
            "codec": _to_json(self.codec),
            "policy": _to_json(self.policy),
            "session": self.session,
            "sequence": self.sequence,
            "acknowledged": self.acknowledged,
            "generation": self.generation,
            "downlink": _to_json(self.downlink),
            "version": self.version,
            "base": self.base,
            "digest": self.digest,
            "support": self.support,
            "leader": self.leader,
        }
        for name, value in put.items():
            if value not in (0, "", b""):
                config[PREFIX + name] = value

    @classmethod
    def read(cls, config: ConfigRecord) -> Announcement | None:
        """Return the announcement in ``config``, or None when there is none.

        Of another protocol version only the version itself is read: its fields may mean something else.

        Raises
        ------
        StateError
            When the fields are there but damaged.
        """
        if PREFIX + "protocol" not in config:
            return None

        def get(name: str, default: Any) -> Any:
            value = config.get(PREFIX + name, default)
            if type(value) is not type(default):
                raise StateError(
                    f"announcement field {name!r} is {type(value).__name__}, expected {type(default).__name__}"
                )
            return value

        protocol = config[PREFIX + "protocol"]
        if protocol != PROTOCOL:
            return cls("", 0, 0, protocol=protocol if isinstance(protocol, int) else -1)
        return cls(
            record=get("record", ""),
            round=get("round", 0),
            seed=get("seed", 0),
            codec=_from_json(get("codec", "")),
            policy=_from_json(get("policy", "")),
            session=get("session", b""),
            sequence=get("sequence", 0),
            acknowledged=get("acknowledged", 0),
            generation=get("generation", 0),
            downlink=_from_json(get("downlink", "")),
            version=get("version", 0),
            base=get("base", 0),
            digest=get("digest", b""),
            support=get("support", 0),
            leader=get("leader", 0),
        )

    @staticmethod
    def erase(config: ConfigRecord) -> None:
        """Remove every announcement field from ``config``, so that the app sees its own configuration only."""
        for name in [k for k in config if k.startswith(PREFIX)]:
            del config[name]


def is_own(name: str) -> bool:
    """Whether a record is between the two halves of the pair alone; everything else is the app's, whoever sent it."""
    return any(name == own or name.startswith(f"{own}.") for own in OWN_FRAMES)


def announce(content: RecordDict, announcement: Announcement) -> None:
    """Merge the announcement into the message's only ConfigRecord, or into one of its own."""
    configs = {k: v for k, v in content.items() if isinstance(v, ConfigRecord) and not k.startswith(PREFIX)}
    name = next(iter(configs)) if configs else OWN_CONFIG
    config = ConfigRecord(dict(configs.get(name, {})))
    announcement.write(config)
    content[name] = config


def _to_json(config: dict[str, Any]) -> str:
    return json.dumps(config, separators=(",", ":"), sort_keys=True) if config else ""


def _from_json(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise StateError(f"announcement holds a configuration that is not JSON: {text[:80]!r}") from error
    if not isinstance(value, dict):
        raise StateError(f"announcement holds a configuration that is no dictionary: {text[:80]!r}")
    return value
