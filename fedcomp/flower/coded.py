"""What the two sides of a coded round exchange: names of records and message types, plans and headers, bundles.

Every message of a coded round carries one ConfigRecord under :data:`CODED`: from the server the plan, from a client its
header. Coded bytes ride as *bundles*, length-prefixed byte strings in one frame, since every Array of its own would
cost about 600 bytes and a request. What is coded is the whole content of the reply the app and the other mods made,
serialised by :func:`pack_content`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final

from flwr.app import ConfigRecord, RecordDict

from fedcomp.flower._private import content_from_bytes, content_to_bytes
from fedcomp.flower.payload import PARTITIONS, PayloadError, put_frame, take_frame
from fedcomp.flower.schema import Document, Schema, Version
from fedcomp.rules import Data, Flag, Int, Many, OneOf, Text

CODED: Final = "fedcomp.coded"
"""Key of the ConfigRecord with the plan or the header. Records with the prefix ``fedcomp.`` are never the app's."""

BUNDLE: Final = "fedcomp.coded.parcels"
"""Key of the frame that holds a bundle of parcels or packets."""

PROTOCOL: Final = 1
"""Version of the fields below; a peer with another one is treated as a peer without the mod."""

HELLO: Final = "query.coded_hello"
PUT: Final = "query.coded_put"
COLLECT: Final = "query.coded_collect"
SUM: Final = "query.coded_sum"
MORE: Final = "query.coded_more"

SHARD: Final = 1
"""Kind of a parcel that holds one shard of one contributor's payload. Other constructions number their own from 16."""

SUM_SHARD: Final = 16
"""Kind of a parcel that holds one shard of a contributor's integers, to be added to others'."""

MASKED_UPDATE: Final = "fedcomp.coded.masked"
"""Key of the frame with a contributor's masked integers, where masks are what is coded."""

PER_SOURCE: Final = 4
"""How many packets of one source a relay hands out at most: between peers others may have forged some."""

MOST_REASONS: Final = 16
"""Reasons that one answer of a relay lists."""

# Flower has no error code of its own for this: the text is all there is to recognise it by.
NO_HANDLER: Final = "function registered with name"
"""Part of Flower's error text for a message whose action the app does not have."""

MAX_STORE_BYTES: Final = 64 * 1024 * 1024
"""What a client keeps for others unless one of the two sides says otherwise."""

_LENGTH: Final = struct.Struct("<I")


KEY: Final = 32
DIGEST: Final = 8
TAG: Final = 24
"""Bytes of a public key, of the digest of a payload or packet, and of the tag of an encoding."""

SIGNATURE: Final = 144
"""Most bytes of a signature over a public key."""

MOST_SHARDS: Final = 1024
"""Shards of one payload."""

NO_ADDRESS: Final = "no address"
"""Why something did not go over a link of which the server gave no address; the server knows why."""

THROUGH_SERVER: Final = "hub:"
"""Address of a client that nobody but the server reaches: it has no listener, and no simulated link."""

# Bounds are far beyond any federation: they keep nonsense from costing memory or time.
Index = Annotated[int, Int(most=2**32 - 1)]
Indices = Annotated[tuple[int, ...], Many(Int(most=2**32 - 1), 1 << 20)]
Reasons = Annotated[tuple[str, ...], Many(Text(), 1 << 16)]
Sizes = Annotated[tuple[int, ...], Many(Int(most=1 << 40), 1 << 20)]
Signed = Annotated[int, Int(least=-(2**63))]
Addresses = Annotated[tuple[str, ...], Many(Text(), MOST_SHARDS)]
Partitions = Annotated[tuple[int, ...], Many(Int(most=PARTITIONS - 1), MOST_SHARDS)]
Signature = Annotated[bytes, Data(SIGNATURE)]
Signatures = Annotated[tuple[bytes, ...], Many(Data(SIGNATURE), MOST_SHARDS)]
Metric = Annotated[str, Text()]
Missed = Annotated[tuple[int, ...], Many(Int(most=2**32 - 1), MOST_SHARDS)]
Switch = Annotated[bool, Flag()]
SumDocument = Annotated[dict[str, Any], Document(4096)]
Row = Annotated[int, Int(most=2**16 - 1)]


@dataclass(frozen=True, kw_only=True)
class Query(Schema, key=CODED, separator="-"):
    """What every message of the server says; all there is to say in a hello.

    Attributes
    ----------
    construction : str
        Whose client half answers.
    run : bytes
        Names the strategy object, also when it is resumed.
    transport : {"hub", "peers"}
        Shards travel through the server, or from client to client.
    max_store : int
        What a client may be asked to keep for others, in bytes.
    spool : str
        Folder of simulated links, empty where there are none.
    round : int
    """

    protocol: Annotated[int, Version(PROTOCOL)] = PROTOCOL
    construction: Annotated[str, Text(64, least=1)]
    run: Annotated[bytes, Data(8, least=8)]
    transport: Annotated[str, OneOf("hub", "peers")]
    max_store: Annotated[int, Int()]
    spool: Annotated[str, Text(4096)] = ""
    round: Index


@dataclass(frozen=True, kw_only=True)
class Indexed(Query):
    """A message for the member of this number."""

    index: Index


@dataclass(frozen=True, kw_only=True)
class Hello(Schema, key=CODED, separator="-"):
    """Who a client is: its partition, its public key with its node's signature, and where peers reach it."""

    protocol: Annotated[int, Version(PROTOCOL)] = PROTOCOL
    partition: Annotated[int, Int(most=PARTITIONS - 1)]
    public: Annotated[bytes, Data(KEY, least=KEY)]
    address: Annotated[str, Text()] = ""
    signature: Signature = b""


@dataclass(frozen=True, kw_only=True)
class Header(Schema, key=CODED, separator="-"):
    """What every other answer of a client says."""

    protocol: Annotated[int, Version(PROTOCOL)] = PROTOCOL
    round: Index


# Relayed shards.


@dataclass(frozen=True, kw_only=True)
class _Code(Schema):
    """How a payload is cut into shards; see :class:`fedcomp.coding.relay.RelayPlan`."""

    code: Annotated[str, OneOf("rlnc", "mds")]
    symbols: Annotated[int, Int(1, MOST_SHARDS)]
    shards: Annotated[int, Int(1, MOST_SHARDS)]
    # The plan's threshold. The entry keeps its name from before the setting was called that, and so its bytes.
    private: Annotated[int, Int(most=255)]
    seed: Signed
    max_payload: Annotated[int, Int(1, 2**32 - 1)]


@dataclass(frozen=True, kw_only=True)
class RelayTraining(_Code, Indexed):
    """Train, and share the reply among relays.

    Of the shards of ``source``: the members that keep them, their keys where shards are sealed, their addresses as
    peers. Where nodes sign their keys, ``partitions`` and ``signatures`` say whose these are and prove it.
    """

    source: Index
    relays: Annotated[tuple[int, ...], Many(Int(most=2**32 - 1), MOST_SHARDS, least=1)]
    keys: Annotated[bytes, Data(KEY * MOST_SHARDS)] = b""
    addresses: Addresses = ()
    partitions: Partitions = ()
    signatures: Signatures = ()

    def conflict(self) -> str:
        if len(set(self.relays)) != self.shards or len(self.relays) != self.shards:
            return f"{len(set(self.relays))} relays for {self.shards} shards"
        return _odd_peers(self)


@dataclass(frozen=True, kw_only=True)
class Collect(Query):
    """Hand out the packets of ``sources``; ``hashes`` say which ones they announced, zeros where they did not.

    ``seal``: they are sealed for the relay that is asked.
    """

    seal: Switch
    index: Index
    sources: Indices = ()
    hashes: Annotated[bytes, Data(DIGEST << 20)] = b""

    def conflict(self) -> str:
        wrong = len(self.hashes) not in (0, DIGEST * len(self.sources))
        return f"{len(self.hashes)} bytes of hashes for {len(self.sources)} sources, {DIGEST} each" if wrong else ""


@dataclass(frozen=True, kw_only=True)
class CollectFresh(_Code, Collect):
    """Collect, and make ``fresh`` more packets of what this node shared as ``source``."""

    source: Index
    fresh: Annotated[int, Int(1, MOST_SHARDS)]


@dataclass(frozen=True, kw_only=True)
class Shared(Header):
    """What a contributor shared.

    Attributes
    ----------
    public, address, signature
        By these a client that lost its state, and with it its key, introduces itself again.
    sent, failed : tuple of int, tuple of str
        Between peers the bytes that each relay was handed; why shards were not.
    missed, causes : tuple of int, tuple of str
        Destinations of parcels that no link took, and why.
    hashes : bytes
        Between peers, those of its packets.
    payload, digest
        Length and digest of the payload.
    """

    public: Annotated[bytes, Data(KEY)] = b""
    address: Annotated[str, Text()] = ""
    signature: Signature = b""
    sent: Sizes = ()
    failed: Reasons = ()
    missed: Missed = ()
    causes: Reasons = ()
    hashes: Annotated[bytes, Data(DIGEST * MOST_SHARDS)] = b""
    payload: Index
    digest: Annotated[bytes, Data(DIGEST, least=DIGEST)]

    def conflict(self) -> str:
        return _odd_news(self)


@dataclass(frozen=True, kw_only=True)
class Kept(Header):
    """How many parcels a relay keeps of those that were forwarded to it, and why not the others."""

    kept: Annotated[int, Int()]
    refused: Reasons = ()


@dataclass(frozen=True, kw_only=True)
class Collected(Header):
    """How many packets of the bundle are fresh, the last ones, and what the relay left out.

    Between peers also what lies in its store: source and bytes in turn.
    """

    fresh: Annotated[int, Int(most=MOST_SHARDS)]
    refused: Reasons = ()
    held: Annotated[tuple[int, ...], Many(Int(), 1 << 20)] = ()


# Coded sums.


@dataclass(frozen=True, kw_only=True)
class SumTraining(Indexed):
    """Train and share the update among relays.

    Attributes
    ----------
    plan : dict
        :class:`fedcomp.coding.sumcode.SumPlan` as plain data.
    seal : bool
        Shards are encrypted for their relays, with these ``keys``.
    relays : tuple of int
        Members that keep shard 0, 1, ...
    weight : str
        The metric that weighs an update; empty: all count the same.
    metrics : bool
        Metrics come along in the clear.
    keys, addresses, partitions, signatures
        Of the relays, as for relayed shards.
    """

    plan: SumDocument
    seal: Switch
    relays: Annotated[tuple[int, ...], Many(Int(most=2**32 - 1), MOST_SHARDS)]
    weight: Metric = ""
    metrics: Switch
    keys: Annotated[bytes, Data(KEY * MOST_SHARDS)] = b""
    addresses: Addresses = ()
    partitions: Partitions = ()
    signatures: Signatures = ()

    def conflict(self) -> str:
        return _odd_peers(self)


@dataclass(frozen=True, kw_only=True)
class SumReport(Query):
    """Say what you hold of this round, as relay ``row``; shards of ``unknown`` contributors in detail."""

    plan: SumDocument
    seal: Switch
    row: Row
    unknown: Indices = ()


@dataclass(frozen=True, kw_only=True)
class SumQuestion(Query):
    """Add up the frozen set.

    Attributes
    ----------
    chosen : bytes
        A bit for each contributor.
    set : bytes
        The set's digest.
    named, tags : tuple of int, bytes
        Contributors of which more than one encoding is about, and the tags of those that are meant.
    """

    plan: SumDocument
    seal: Switch
    chosen: Annotated[bytes, Data(1 << 17, least=1)]
    set: Annotated[bytes, Data(TAG, least=TAG)]
    named: Indices = ()
    tags: Annotated[bytes, Data(TAG << 20)] = b""
    row: Row

    def conflict(self) -> str:
        wrong = len(self.tags) != TAG * len(self.named)
        return f"{len(self.tags)} bytes of tags for {len(self.named)} contributors" if wrong else ""


@dataclass(frozen=True, kw_only=True)
class SumShared(Header):
    """What a contributor to a sum shared: the tag of the encoding, what it handed to peers, and what failed."""

    tag: Annotated[bytes, Data(TAG, least=TAG)]
    public: Annotated[bytes, Data(KEY)] = b""
    address: Annotated[str, Text()] = ""
    sent: Sizes = ()
    failed: Reasons = ()
    missed: Missed = ()
    causes: Reasons = ()
    signature: Signature = b""

    def conflict(self) -> str:
        return _odd_news(self)


@dataclass(frozen=True, kw_only=True)
class SumHeld(Header):
    """What a relay holds.

    Attributes
    ----------
    bitmap, digest : bytes
        Contributors with one encoding, and the digest of their tags.
    sources, tags : tuple of int, bytes
        All other encodings.
    refused : tuple of str
        Why other shards are of no use.
    sizes : tuple of int
        Between peers, the bytes of each of ``sources``.
    """

    bitmap: Annotated[bytes, Data(1 << 17)] = b""
    digest: Annotated[bytes, Data(DIGEST, least=DIGEST)]
    sources: Indices = ()
    tags: Annotated[bytes, Data(TAG << 20)] = b""
    refused: Reasons = ()
    sizes: Sizes = ()

    def conflict(self) -> str:
        wrong = len(self.tags) != TAG * len(self.sources)
        return f"{len(self.tags)} bytes of tags for {len(self.sources)} sources" if wrong else ""


def speaks(content: RecordDict) -> bool:
    """Whether there is a plan or header of this version of the protocol in ``content``."""
    # Only the version is looked at: in another one the fields may mean something else, and its sender then finds a
    # client without coding instead of an error.
    record = content.get(CODED)
    return isinstance(record, ConfigRecord) and record.get("protocol") == PROTOCOL


def _odd_peers(asked: RelayTraining | SumTraining) -> str:
    count = len(asked.relays)
    if len(asked.keys) not in (0, KEY * count):
        return f"{len(asked.keys)} bytes of keys for {count} relays, {KEY} each"
    # Through the server nobody needs the others' addresses, and nobody is told them.
    if len(asked.addresses) != count * (asked.transport == "peers"):
        return f"{len(asked.addresses)} addresses for {count} relays"
    # Each once: what is in the hands of one node only must not pass for what several keep.
    if len(set(asked.partitions)) not in (0, count) or len(asked.partitions) not in (0, count):
        return f"{len(set(asked.partitions))} partitions for {count} relays"
    if len(asked.signatures) not in (0, len(asked.partitions)):
        return f"{len(asked.signatures)} signatures for {len(asked.partitions)} partitions"
    return ""


def _odd_news(said: Shared | SumShared) -> str:
    # Empty from a client that still has the key which the server knows.
    if len(said.public) not in (0, KEY):
        return f"a public key of {len(said.public)} bytes, expected {KEY}"
    if len(set(said.missed)) == len(said.missed) == len(said.causes):
        return ""
    return f"{len(said.causes)} causes for {len(set(said.missed))} parcels that no link took"


def put_bundle(content: RecordDict, items: Iterable[bytes], key: str = BUNDLE) -> int:
    """Put byte strings into ``content`` as one frame; return the sum of their lengths."""
    held = list(items)
    put_frame(content, key, b"".join(part for item in held for part in (_LENGTH.pack(len(item)), item)))
    return sum(map(len, held))


def take_bundle(content: RecordDict, *, most: int, longest: int, key: str = BUNDLE) -> list[bytes]:
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
        # Before the item is cut out: what is copied is bounded by the receiver's limits, not by the sender's lengths.
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
        When the bytes are not the content of a message.
    """
    try:
        return content_from_bytes(data)
    except ValueError as error:
        raise PayloadError(str(error)) from error
