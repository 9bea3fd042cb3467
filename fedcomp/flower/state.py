"""Client state that survives faults: acknowledged, generation-stamped, rolled back when a reply was lost.

A reply can be lost after the client has updated its memory. Without care the mass of that payload is gone for ever. So
the client keeps its last reply as *pending* until a later message acknowledges its sequence number; a message that does
not is a negative acknowledgement and puts the mass back. A message that arrives twice gets the stored reply again, so
that what the server consumes and what the client remembers are the same frame.

Everything lives in Flower's ``context.state``, is read without being modified, and is written once, as the last act
before a handler returns: an exception in between leaves the state as it was on every engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from numpy.typing import NDArray

from fedcomp.codecs.base import Codec, State
from fedcomp.errors import StateError
from fedcomp.flower.payload import take_frame
from fedcomp.flower.protocol import UPDATE, Announcement
from fedcomp.layout import Layout

_UPLINK: Final = "fedcomp.uplink"
_MEMORY: Final = "fedcomp.uplink.memory"
_PENDING: Final = "fedcomp.uplink.reply/"
_REPLICA: Final = "fedcomp.replica"
_MODEL: Final = "fedcomp.replica.model"


@dataclass
class Uplink:
    """One training message's view of the client's codec memory.

    Attributes
    ----------
    state : State
        The memory to encode with, rolled back when the last reply was not acknowledged.
    generation : int
        The sequence number of the message that created this memory: another number means the memory was lost.
    redelivery : RecordDict or None
        The stored reply when this very message was already answered; it must be sent again as it is.
    rolled_back, fresh : bool
        What happened to the memory, for the reply's header.
    """

    state: State
    generation: int
    redelivery: RecordDict | None = None
    rolled_back: bool = False
    fresh: bool = False

    @classmethod
    def begin(cls, context: Context, announcement: Announcement, codec: Codec, layout: Layout) -> Uplink:
        """Read the memory from ``context`` and settle its pending reply. Modifies nothing."""
        meta = context.state.config_records.get(_UPLINK)
        fresh = cls(codec.init(layout), announcement.sequence, fresh=True)
        if meta is None or meta["layout"] != layout.digest or meta["codec"] != lineage(codec):
            return fresh
        memory = context.state.array_records.get(_MEMORY)
        state: State = {} if memory is None else {k: v.numpy() for k, v in memory.items()}
        generation = _integer(meta, "generation")
        pending = _integer(meta, "pending")
        if pending == 0:
            return cls(state, generation)
        reply = _stored_reply(context)
        if pending == announcement.sequence:
            return cls(state, generation, redelivery=reply)
        if pending == announcement.acknowledged and generation == announcement.generation:
            return cls(state, generation)
        frame = take_frame(reply, UPDATE)
        if frame is None:
            raise StateError("the pending reply in the client's state holds no frame; the node must be restarted")
        return cls(codec.rollback(state, frame, layout), generation, rolled_back=True)

    def commit(
        self,
        context: Context,
        state: State,
        announcement: Announcement,
        codec: Codec,
        layout: Layout,
        reply: RecordDict,
    ) -> None:
        """Write the memory after encoding and keep ``reply`` until it is acknowledged."""
        store = context.state
        for name in [k for k in store if k.startswith(_PENDING)]:
            del store[name]
        store[_MEMORY] = ArrayRecord({k: Array(np.asarray(v)) for k, v in state.items()})
        for name, record in reply.items():
            store[_PENDING + name] = record
        store[_UPLINK] = ConfigRecord(
            {
                "generation": self.generation,
                "pending": announcement.sequence,
                "codec": lineage(codec),
                "layout": layout.digest,
            }
        )


def lineage(codec: Codec) -> str:
    """Return the nested codec ids without parameters.

    Memory outlives a change of parameters (a density that falls over the rounds), but not a change of algorithm.
    """

    def ids(config: Any) -> Any:
        if isinstance(config, dict):
            return {k: ids(v) for k, v in sorted(config.items()) if k == "id" or isinstance(v, dict | list)}
        if isinstance(config, list):
            return [ids(v) for v in config if isinstance(v, dict)]
        return config

    return json.dumps([codec.codec_id, ids(codec.get_config())], separators=(",", ":"))


@dataclass(frozen=True)
class Replica:
    """The model a node holds when the downlink is compressed: its version and its tensors by name, in model order."""

    version: int
    arrays: Mapping[str, NDArray[Any]]

    @classmethod
    def load(cls, context: Context) -> Replica | None:
        """Return the node's replica, or None when it holds none."""
        meta = context.state.config_records.get(_REPLICA)
        model = context.state.array_records.get(_MODEL)
        if meta is None or model is None:
            return None
        return cls(_integer(meta, "version"), {k: v.numpy() for k, v in model.items()})

    def save(self, context: Context) -> None:
        """Write the replica into ``context``."""
        context.state[_MODEL] = ArrayRecord({k: Array(np.asarray(v)) for k, v in self.arrays.items()})
        context.state[_REPLICA] = ConfigRecord({"version": self.version})


def _stored_reply(context: Context) -> RecordDict:
    return RecordDict({k.removeprefix(_PENDING): v for k, v in context.state.items() if k.startswith(_PENDING)})


def _integer(record: ConfigRecord, name: str) -> int:
    value = record[name]
    if not isinstance(value, int):
        raise StateError(f"client state field {name!r} is {value!r}, expected an integer; the node must be restarted")
    return value
