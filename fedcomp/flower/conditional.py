"""What the server of conditional rounds and its clients say to each other: whether there is anything to send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from flwr.app import RecordDict

from fedcomp.drift.schedule import DeploymentScheduler, ScheduleSettings
from fedcomp.flower import store
from fedcomp.flower.payload import NODE_RECORD, put_frame, put_node, take_frame
from fedcomp.flower.records import config_in
from fedcomp.flower.schema import Schema
from fedcomp.plain import Count
from fedcomp.rules import Data, Flag, Int
from fedcomp.stateful import Stateful, nested

HEADER: Final = "fedcomp.conditional"
QUERY_TYPE: Final = "query.conditional"
"""Type of the message that asks a node whether it has something to send, without a model."""

MEMORY: Final = "fedcomp.conditional.memory"
"""Where a node's state has what it decides by."""

PRIVATE_REASON: Final = (
    "whether a node answers would follow from its data, and that is not part of what a private round releases and pays "
    "for"
)
"""Why private rounds are not conditional."""


@dataclass(frozen=True)
class Offer(Schema, key=HEADER):
    """What the server says: this node may be quiet, or must not.

    Attributes
    ----------
    session : bytes
        Identifies the server's strategy object, also when it is resumed. Losses of another session do not count.
    round : int
    must : bool
        An update is wanted in any case.
    """

    session: Annotated[bytes, Data(64, least=1)]
    round: Annotated[int, Int()]
    must: Annotated[bool, Flag(absent=False)] = False


@dataclass(frozen=True)
class Status(Schema, key=NODE_RECORD, prefix="conditional-"):
    """What a node answers to a query; beside no update, what it answers to a training message.

    It stands in the record in which a node says who it is: a record of its own would double what it costs.

    Attributes
    ----------
    round : int
    quiet : bool
        It has nothing to send.
    """

    round: Annotated[int, Int()]
    quiet: Annotated[bool, Flag()]

    def write(self, content: RecordDict, partition: int) -> None:
        """Write this into a reply, with the node's partition."""
        put_node(content, partition)
        config_in(content, NODE_RECORD).update(self.check())

    @classmethod
    def read(cls, content: RecordDict) -> Status | None:
        """Return what a reply says; None where it says nothing of the kind.

        Raises
        ------
        SchemaError
            When it is damaged.
        """
        said = config_in(content, NODE_RECORD)
        return cls.of(said) if any(name.startswith(cls.PREFIX) for name in said) else None


class NodeMemory(Stateful):
    """What a node decides by from round to round.

    Attributes
    ----------
    session : bytes
    scheduler : DeploymentScheduler
    round : int
        The last round whose loss was noted: a message that is delivered twice counts once.
    used : list of int
        Windows of sensors that are trained on. They are removed with the next message: only then is it certain that
        this state, which knows of them, was kept.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "session": bytes,
        "scheduler": nested("scheduler"),
        "round": Count,
        "used": list[Count],
    }

    def __init__(self, session: bytes, settings: ScheduleSettings) -> None:
        self.session = session
        self.scheduler = DeploymentScheduler(settings)
        self.round = 0
        self.used: list[int] = []

    @classmethod
    def load(cls, state: RecordDict, session: bytes, settings: ScheduleSettings) -> NodeMemory:
        """Return what a node's state holds, new where it holds nothing of this session.

        Raises
        ------
        StateError, PlainError
            When it was written with other settings, or is damaged.
        """
        memory, data = cls(session, settings), take_frame(state, MEMORY)
        if data is not None:
            memory.load_state_dict(store.loads(data, "conditional"))
        return memory if memory.session == session else cls(session, settings)

    def save(self, state: RecordDict) -> None:
        """Write this into a node's state."""
        put_frame(state, MEMORY, store.dumps(self.state_dict(), "conditional"))
