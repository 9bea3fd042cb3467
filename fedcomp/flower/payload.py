"""Frames in messages: where the compressed bytes are, and how many of a message's bytes are payload.

Flower sends every Array as several objects, one request each. A small frame is cheaper as one ``bytes`` value of a
ConfigRecord (435 bytes and two requests less, measured); a large one has to be an Array, because only Arrays are cut
into chunks. Both carry the type name ``fedcomp.fcw1``, so that a dense aggregator that meets a frame fails loudly
instead of averaging packed bytes. Small frames of a reply are entries of its header: a record each would cost another
235 bytes and a request (measured).
"""

from __future__ import annotations

from typing import Final

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedcomp.errors import FedcompError

STYPE: Final = "fedcomp.fcw1"
"""Serialisation type of an Array that holds a frame, and name of the ConfigRecord entry that holds one."""

INLINE_LIMIT: Final = 64 * 1024
"""Largest frame, in bytes, that rides in a ConfigRecord."""

NODE_RECORD: Final = "fedcomp.node"
"""Key of the ConfigRecord in which a client says who it is."""

PARTITION_KEY: Final = "partition-id"
"""Entry of the node record that holds the partition id (int)."""

PARTITIONS: Final = 2**31
"""Partition ids are 0 to this number, exclusive: far above any federation, far below node ids (62 bits and more)."""

FRAME: Final = "fedcomp.frame."
BLOB: Final = "fedcomp.blob."
STEP: Final = "fedcomp.step."
EXACT: Final = "fedcomp.exact"
MAIL: Final = "fedcomp.mail."
POST: Final = "fedcomp.post."
"""Names of a program's bytes in messages: a frame by its name, a blob by its digest (those that read steps, too), a
step of the model by its version (``.exact`` follows for its buffers), exact buffers; what other clients sent this one,
and what it sends them, by number, the other one's node and name."""

BYTES: Final = (FRAME, BLOB, STEP, EXACT, MAIL, POST)
"""With these begin the names of entries that hold such bytes, in any ConfigRecord."""


class PayloadError(FedcompError, ValueError):
    """A message holds something else where a frame was expected."""


def put_frame(record: RecordDict, key: str, frame: bytes) -> None:
    """Store ``frame`` under ``key`` of ``record``, replacing what was there.

    Frames of 1 to 65 536 bytes become a ConfigRecord, larger ones one Array. The empty frame is an Array too:
    Flower's ``ConfigRecord.count_bytes()`` raises on an empty value, and with it every mod that measures messages.

    Raises
    ------
    PayloadError
        When ``frame`` is not bytes.
    """
    if not isinstance(frame, bytes | bytearray | memoryview):
        raise PayloadError(f"frame for {key!r} is {type(frame).__name__}, expected bytes")
    data = frame if isinstance(frame, bytes) else bytes(frame)
    # Overwriting a record by one of another type makes Flower warn; this replacement is meant.
    if key in record:
        del record[key]
    header = _header(record)
    if header is not None and key in header:
        # A new one: others may hold the same header, as a node's state does that of its last reply.
        record[NODE_RECORD] = ConfigRecord({name: value for name, value in header.items() if name != key})
    if 0 < len(data) <= INLINE_LIMIT:
        record[key] = ConfigRecord({STYPE: data})
    else:
        record[key] = ArrayRecord({STYPE: Array("uint8", (len(data),), STYPE, data)})


def take_frame(record: RecordDict, key: str) -> bytes | None:
    """Return the frame under ``key`` of ``record`` or of the node record in it, or None when there is no such key.

    Raises
    ------
    PayloadError
        When the record or entry under ``key`` holds anything but one frame.
    """
    holder = record.get(key)
    if holder is None:
        header = _header(record)
        entry = None if header is None else header.get(key)
        if entry is None or isinstance(entry, bytes):
            return entry
        raise PayloadError(
            f"entry {key!r} of {NODE_RECORD!r} is a {type(entry).__name__}, not a frame: expected bytes. The sender "
            "does not use this codec's message layout"
        )
    frame = _frame_in(holder)
    if frame is not None:
        return frame
    raise PayloadError(
        f"record {key!r} is a {type(holder).__name__} with entries {list(holder)[:3]}, not a frame: expected one entry "
        f"{STYPE!r} made by put_frame(). The sender does not use this codec's message layout"
    )


def frames(record: RecordDict) -> dict[str, bytes]:
    """Return all frames in ``record`` by key; records that hold anything else are left out.

    That includes records that only look like one (the entry ``fedcomp.fcw1`` in a MetricRecord, beside other entries,
    or with other contents): whoever needs the frame under a certain key asks :func:`take_frame`, which refuses them.
    """
    found = {key: _frame_in(holder) for key, holder in record.items()}
    header, entries = _header(record), _frames_of_header(record)
    for holder in record.values():
        if isinstance(holder, ConfigRecord) and holder is not header:
            entries |= {key: data for key, data in holder.items() if key.startswith(BYTES) and isinstance(data, bytes)}
    return {key: frame for key, frame in found.items() if frame is not None} | entries


def models(record: RecordDict) -> dict[str, ArrayRecord]:
    """Return the ArrayRecords that hold arrays of a model, by name: those that are no frames.

    Told apart by what is in them, not by their names: a frame too large for a ConfigRecord rides in an ArrayRecord.
    """
    return {k: holder for k, holder in record.items() if isinstance(holder, ArrayRecord) and not is_frame(holder)}


def is_frame(holder: object) -> bool:
    """Whether a record is there for a frame, well made or not."""
    return isinstance(holder, ConfigRecord | ArrayRecord) and list(holder) == [STYPE]


def _header(record: RecordDict) -> ConfigRecord | None:
    """Return the record that identifies a client."""
    header = record.get(NODE_RECORD)
    return header if isinstance(header, ConfigRecord) else None


def _frames_of_header(record: RecordDict) -> dict[str, bytes]:
    """Return the frames in the header: bytes under the key of a record of this project."""
    entries = dict(_header(record) or ConfigRecord())
    return {key: data for key, data in entries.items() if key.startswith("fedcomp.") and isinstance(data, bytes)}


def _frame_in(holder: object) -> bytes | None:
    """Return the frame if it is the only content of a record, otherwise None."""
    if isinstance(holder, ConfigRecord) and list(holder) == [STYPE]:
        data = holder[STYPE]
        return data if isinstance(data, bytes) else None
    if isinstance(holder, ArrayRecord) and list(holder) == [STYPE]:
        array = holder[STYPE]
        # Anybody may name an entry so; the type and the shape have to be those that put_frame() writes.
        return array.data if array.stype == STYPE and array.shape == (len(array.data),) else None
    return None


def payload_bytes(message: Message) -> int:
    """Return the packed payload of ``message`` in bytes.

    Counted are frames and the data of all Arrays (for a plain numpy Array that includes the 128-byte npy header,
    which travels too). Metrics, configuration and Flower's own framing are not payload; they are in the wire bytes.
    """
    if not message.has_content():
        return 0
    header, total = _header(message.content), sum(map(len, _frames_of_header(message.content).values()))
    for holder in message.content.values():
        if isinstance(holder, ArrayRecord):
            total += sum(len(array.data) for array in holder.values())
        elif isinstance(holder, ConfigRecord):
            # Whatever else is in the record: a malformed frame has cost its bytes all the same.
            data = holder.get(STYPE)
            total += len(data) if isinstance(data, bytes) else 0
            if holder is not header:
                total += sum(len(v) for k, v in holder.items() if k.startswith(BYTES) and isinstance(v, bytes))
    return total


def put_node(record: RecordDict, partition: int) -> None:
    """Let a reply say which partition it comes from; the server sorts and seeds by it.

    Raises
    ------
    PayloadError
        When ``partition`` is not between 0 and 2**31 - 1.
    """
    if not 0 <= partition < PARTITIONS:
        raise PayloadError(f"partition is {partition}, expected 0 to {PARTITIONS - 1}; check the node's partition-id")
    record[NODE_RECORD] = ConfigRecord({PARTITION_KEY: int(partition)})


def keep_node(reply: RecordDict, content: RecordDict) -> None:
    """Let ``content`` say which partition it comes from, as the app's own ``reply`` does, and nothing else it says."""
    node = reply.get(NODE_RECORD)
    if isinstance(node, ConfigRecord) and PARTITION_KEY in node:
        content[NODE_RECORD] = ConfigRecord({PARTITION_KEY: node[PARTITION_KEY]})


def take_node(message: Message) -> int | None:
    """Return the partition id a reply declares, or None when it declares none between 0 and 2**31 - 1.

    It is the client's own word: two nodes may declare the same one.
    """
    if not message.has_content():
        return None
    holder = message.content.get(NODE_RECORD)
    partition = holder.get(PARTITION_KEY) if isinstance(holder, ConfigRecord) else None
    # A ConfigRecord takes True for an integer, and it would pass for partition 1.
    if not isinstance(partition, int) or isinstance(partition, bool):
        return None
    return partition if 0 <= partition < PARTITIONS else None


def round_of(message: Message) -> int | None:
    """Return the server round that ``message`` declares (``server-round`` in a ConfigRecord), or None."""
    if not message.has_content():
        return None
    for holder in message.content.values():
        declared = holder.get("server-round") if isinstance(holder, ConfigRecord) else None
        if isinstance(declared, int) and not isinstance(declared, bool):
            return declared
    return None
