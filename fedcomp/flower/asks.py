"""Asks and answers of programs as Flower messages: a header, plain values, and frames. Here alone are their names.

Head, words and small frames are entries of one ConfigRecord, which travels anyhow: of the strategy's own in an ask, of
the one by which a reply says who it is in an answer. A record of their own would cost about 240 bytes each.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple, Self

from flwr.app import ConfigRecord, RecordDict

from fedcomp.asks import NO_FRAMES, AnswerError, Frames, Post, Said
from fedcomp.flower.payload import (
    BYTES,
    INLINE_LIMIT,
    MAIL,
    NODE_RECORD,
    is_frame,
    put_frame,
    take_frame,
)
from fedcomp.flower.protocol import OWN_CONFIG, PREFIX
from fedcomp.flower.schema import Document, OtherVersion, Schema, SchemaError, Version
from fedcomp.program import System
from fedcomp.rules import Data, Flag, Int, Many, OneOf, Real, Text
from fedcomp.wire import Frame

ASKS: Final = 4
"""Version of the heads; messages of other ones are refused by name. The drop-in pair's own messages have the first two
versions."""

BLOBS_KEPT: Final = 8
"""Blobs that a node keeps, the newest; one that was dropped is asked for again, which costs an exchange."""

SAY: Final = PREFIX + "say."
"""Before every word's entry."""

Number = Annotated[int, Int(absent=0)]
Session = Annotated[bytes, Data(8, 8)]
Description = Annotated[dict[str, Any], Document(1 << 20, sort=True)]
Digests = Annotated[tuple[str, ...], Many(Text(128, least=1), 64)]


@dataclass(frozen=True)
class AskHead(Schema, key=OWN_CONFIG, prefix=PREFIX):
    """What comes with every message of a system; a client needs no configuration of its own.

    Attributes
    ----------
    number : int
        Of the round.
    seed : int
        Of the random streams.
    session : bytes
        Of the server's run: memory of another one is not continued.
    sequence : int
        Of this exchange, the same for all nodes; 0 where nothing is to be acknowledged (evaluation).
    consumed, generation : int
        Sequence of the node's last frame that is in the model, and generation of the memory that it came from.
    system : dict
        :meth:`fedcomp.program.System.to_config`; empty in evaluation without a downlink of the system's own.
    policy : dict
        Of the densities.
    model : str
        Name of the record that is the model; empty where the model is not sent and not meant.
    downlink : dict
        The codec of the model's steps; empty where the model is not followed by versions.
    version, base : int
        Of the model, and the version from which the steps lead; base 0: the message holds the model whole.
    digest : bytes
        Of the model.
    blobs : tuple of str
        "name:digest" of each blob of the ask.
    steps : tuple of str
        What reads a step that is the program's own: :class:`OwnStep`.
    say : str
        Id of what is said in words.
    cast : bool
        Whether floats of other sizes are in the vector, as changes; else they travel as values, beside it.
    needs_model : bool
        :attr:`fedcomp.asks.Ask.model`.
    oldest : int
        The first of the rounds of which posts that links have brought may still be asked for.
    drawn : dict
        :meth:`fedcomp.adapters.Halves.to_config` of an adapter's halves that the app's model has and that never travel;
        empty where all of it does.
    """

    protocol: Annotated[int, Version(ASKS)] = field(default=ASKS, kw_only=True)
    number: Number
    seed: Annotated[int, Int(least=-(2**63), absent=0)]
    session: Session
    sequence: Number = 0
    consumed: Number = 0
    generation: Number = 0
    system: Description = field(default_factory=dict)
    policy: Description = field(default_factory=dict)
    model: Annotated[str, Text()] = ""
    downlink: Description = field(default_factory=dict)
    version: Number = 0
    base: Number = 0
    digest: Annotated[bytes, Data(64)] = b""
    blobs: Digests = ()
    steps: Annotated[tuple[str, ...], Many(Text(4096, least=1), 4096)] = ()
    say: Annotated[str, Text(64)] = ""
    cast: Annotated[bool, Flag(absent=True)] = True
    needs_model: Annotated[bool, Flag(absent=True)] = True
    oldest: Number = 0
    drawn: Description = field(default_factory=dict)

    def conflict(self) -> str:
        """Return why fields that are each in range contradict each other; empty when they do not."""
        if self.base > self.version:
            return f"its steps lead from version {self.base} to version {self.version}"
        if self.consumed >= self.sequence > 0:
            return f"message {self.sequence} says that the answer to message {self.consumed} was used"
        return ""


@dataclass(frozen=True)
class AnswerHead(Schema, key=NODE_RECORD, separator="-"):
    """What comes with every answer.

    Attributes
    ----------
    partition_id : int
    sequence : int
        Of the message that is answered.
    generation : int
        Sequence of the message with which this memory began; 0: the system keeps none.
    version : int
        Of the model that the node holds; 0: of none.
    say : str
        Id of what is said in words.
    lacks : tuple of str
        Digests of blobs that the node was not sent and has not: the ask has to come again with them.
    record : str
        Name of the app's record that is the model; empty where the app has not trained.
    state : str
        What became of the node's memory.
    memory : float
        ‖memory‖ / ‖update‖ after sending; -1 where there is none.
    remark : str
        What the client says of its update, for the round's report.
    unchanged : tuple of int
        Numbers of the tensors of which there was nothing to send.
    copies : tuple of int
        Pairs: number of a tensor that is another name of an earlier one, and that one's number.
    unsupported : str
        Why the client could not do what it was asked for: its reply is the app's own, with nothing of the system's.
    bare : bool
        Whether nothing of the app's reply is here, though it may have trained.
    sent : bool
        Whether mass left the memory with this answer, and not in a frame of it (:attr:`fedcomp.asks.Answer.sent`).
    key : bytes
        The node's public key, where the server cannot know it yet.
    address, signature : str, bytes
        Where others reach it, and its signature of the key by the one that is pinned for it.
    handed, parcels : int
        Bytes that its links were given with this answer, and of how many posts.
    missed : tuple of str
        "node reason" of each link that failed.
    """

    partition_id: Annotated[int, Int(0, 2**31 - 1)]
    sequence: Number = 0
    generation: Number = 0
    version: Number = 0
    say: Annotated[str, Text(64)] = ""
    lacks: Digests = ()
    record: Annotated[str, Text()] = ""
    state: Annotated[str, OneOf("", "begun", "rolled back", "repeated")] = ""
    memory: Annotated[float, Real(least=0.0, absent=-1.0)] = -1.0
    remark: Annotated[str, Text(4096)] = ""
    unchanged: Annotated[tuple[int, ...], Many(Int(), 1 << 20, ascending=True)] = ()
    copies: Annotated[tuple[int, ...], Many(Int(), 1 << 20)] = ()
    unsupported: Annotated[str, Text(4096)] = ""
    bare: Annotated[bool, Flag(absent=False)] = False
    sent: Annotated[bool, Flag(absent=False)] = False
    key: Annotated[bytes, Data(32)] = b""
    address: Annotated[str, Text(300)] = ""
    signature: Annotated[bytes, Data(144)] = b""
    handed: Number = 0
    parcels: Number = 0
    missed: Annotated[tuple[str, ...], Many(Text(300, least=1), 65_536)] = ()

    def conflict(self) -> str:
        """Return why fields that are each in range contradict each other; empty when they do not."""
        return f"{len(self.copies)} numbers are not pairs of copies" if len(self.copies) % 2 else ""


class OwnStep(NamedTuple):
    """A step of the model that a system reads (:meth:`fedcomp.program.System.reads`), as a text of :class:`AskHead`.

    Attributes
    ----------
    version : int
        To which it leads.
    number : int
        Of the round that made it.
    blobs : mapping of str to str
        Digests by name of what reads it.
    """

    version: int
    number: int
    blobs: Mapping[str, str]

    def to_text(self) -> str:
        """Return the text."""
        return " ".join([str(self.version), str(self.number), *named(self.blobs)])

    @classmethod
    def of(cls, text: str) -> Self:
        """Return what a text says; raise :class:`~fedcomp.flower.schema.SchemaError` for any other one."""
        version, _, rest = text.partition(" ")
        number, *blobs = rest.split(" ")
        if not (version.isdecimal() and number.isdecimal() and len(version) < 20 and len(number) < 20):
            raise SchemaError(
                f"{text[:80]!r} is not a step of a model: expected version, round and name:digest", "steps"
            )
        return cls(int(version), int(number), digests_of(tuple(blobs)))


def named(digests: Mapping[str, str]) -> tuple[str, ...]:
    """Return digests by name as texts, "name:digest" each; see :func:`digests_of`."""
    return tuple(f"{name}:{digest}" for name, digest in digests.items())


def digests_of(texts: tuple[str, ...]) -> dict[str, str]:
    """Return digests by name; raise :class:`~fedcomp.flower.schema.SchemaError` where a text is none."""
    found = {}
    for text in texts:
        name, _, digest = text.rpartition(":")
        if not name or len(digest) != 32 or name in found:
            raise SchemaError(f"{text[:80]!r} is not the name:digest of a blob, or names one twice", "blobs")
        found[name] = digest
    return found


def digest_of(blob: Frame) -> str:
    """Return what names a blob: 32 hexadecimal digits."""
    return hashlib.blake2b(blob, digest_size=16).hexdigest()


def put(content: RecordDict, head: Schema, say: Said | None = None, data: Frames = NO_FRAMES) -> None:
    """Write a head, with what goes with it, into a message's content.

    Parameters
    ----------
    head : AskHead or AnswerHead
        An ask's goes into the strategy's only ConfigRecord; its field ``say`` has to be :func:`id_of` the words.
    say : Said, optional
    data : mapping of str to bytes
        By their names in messages: :data:`~fedcomp.flower.payload.FRAME` and so on.

    Raises
    ------
    SchemaError
        When the head is not what a reader would take.
    """
    key = NODE_RECORD if isinstance(head, AnswerHead) else _config_of(content)
    # A copy: strategies put one record into all their messages.
    held = content.get(key)
    config = held.copy() if isinstance(held, ConfigRecord) else ConfigRecord()
    config.update(head.check())
    if say is not None:
        config.update({SAY + name: value for name, value in say.entries().items()})
    for name, each in data.items():
        # What Flower cannot measure (nothing) or does not cut into chunks (much) is a record.
        if 0 < len(each) <= INLINE_LIMIT:
            config[name] = each
        else:
            put_frame(content, name, each)
    content[key] = config


def find_ask(content: RecordDict) -> AskHead | None:
    """Return the head of an ask, None where there is none.

    Raises
    ------
    OtherVersion
        Where it is of another version; the drop-in pair's own messages are, too.
    SchemaError
        Where it is damaged.
    """
    for config in content.values():
        if isinstance(config, ConfigRecord) and PREFIX + "protocol" in config:
            return AskHead.of(_entries(config))
    return None


def system_asked(content: RecordDict) -> str:
    """Return the id of the system that a message asks for; empty for none, and where it is of another version.

    Raises
    ------
    SchemaError
        Where it is damaged.
    """
    try:
        head = find_ask(content)
    except OtherVersion:
        return ""
    return "" if head is None else str(head.system.get("id", ""))


def find_answer(content: RecordDict) -> AnswerHead | None:
    """Return the head of an answer, None where there is none; raise :class:`SchemaError` where it is damaged."""
    config = content.get(NODE_RECORD)
    return AnswerHead.of(_entries(config)) if isinstance(config, ConfigRecord) else None


def say_of(content: RecordDict, head: AskHead | AnswerHead, system: System) -> Said | None:
    """Return what a message says in words.

    Raises
    ------
    FedcompError
        When the system has no such words, or they break a rule.
    """
    if not head.say:
        return None
    kind = next((each for each in system.SAYS if each.__name__ == head.say), None)
    if kind is None:
        raise AnswerError(f"{type(system).__name__} has no words {head.say!r}")
    entries = {
        name.removeprefix(SAY): value
        for config in content.values()
        if isinstance(config, ConfigRecord)
        for name, value in config.items()
        if name.startswith(SAY)
    }
    return kind.of(entries)


def id_of(say: Said | None) -> str:
    """Return the id by which words travel; empty for none."""
    return "" if say is None else type(say).__name__


def data_in(content: RecordDict, kind: str) -> dict[str, Frame]:
    """Return the bytes of one kind (:data:`~fedcomp.flower.payload.FRAME` and so on) in a message, by the rest of their
    names.

    Raises
    ------
    PayloadError
        When what is called so is not bytes.
    """
    found: dict[str, Frame] = {}
    for key, holder in content.items():
        if key.startswith(kind) and (data := take_frame(content, key)) is not None:
            found[key.removeprefix(kind)] = data
        elif isinstance(holder, ConfigRecord):
            for name, value in holder.items():
                if name.startswith(kind) and isinstance(value, bytes):
                    found[name.removeprefix(kind)] = value
    return found


def named_posts(posts: Iterable[Post], kind: str) -> dict[str, Frame]:
    """Return posts as bytes by their names in a message: of kind :data:`~fedcomp.flower.payload.MAIL` by who sent them,
    else by whom they are for. Neighbours in the list with one name and the same bytes, a message to several, are one
    entry: its bytes travel once."""
    found: dict[str, Frame] = {}
    for number, ((name, data), same) in enumerate(itertools.groupby(posts, key=lambda post: (post.name, post.data))):
        others = ",".join(str(post.source if kind == MAIL else post.to) for post in same)
        found[f"{kind}{number}/{others}/{name}"] = data
    return found


def posts_in(content: RecordDict, kind: str, node: int) -> tuple[Post, ...]:
    """Return the posts in a message from or for ``node``, in their order.

    Raises
    ------
    SchemaError
        When what is called like one has no name of a post, or they are not numbered from 0.
    """
    found: dict[int, list[Post]] = {}
    data = data_in(content, kind)
    for text, each in data.items():
        number, _, rest = text.partition("/")
        others, slash, name = rest.partition("/")
        nodes = others.split(",")
        if not (slash and all(part.isdecimal() and len(part) < 11 for part in (number, *nodes))):
            raise SchemaError(f"{text[:80]!r} is not the name of a post, which has a number, nodes and a name", kind)
        ends = ((int(other), node) if kind == MAIL else (node, int(other)) for other in nodes)
        found[int(number)] = [Post(source, to, name, each) for source, to in ends]
    if sorted(found) != [*range(len(data))]:
        raise SchemaError(f"{len(data)} posts are not numbered from 0", kind)
    return tuple(post for number in range(len(data)) for post in found[number])


def without(content: RecordDict) -> RecordDict:
    """Return the content of an ask as the app would see it without this project; records are copied where changed."""
    out = RecordDict()
    for name, value in content.items():
        if name.startswith(BYTES) and is_frame(value):
            continue
        if isinstance(value, ConfigRecord) and PREFIX + "protocol" in value:
            value = ConfigRecord({key: entry for key, entry in value.items() if not key.startswith(PREFIX)})
            if name == OWN_CONFIG and not value:
                continue
        out[name] = value
    return out


def _config_of(content: RecordDict) -> str:
    """Return the name of the strategy's only ConfigRecord, or otherwise a name of this project."""
    names = (name for name, value in content.items() if isinstance(value, ConfigRecord) and not is_frame(value))
    return next((name for name in names if not name.startswith(PREFIX)), OWN_CONFIG)


def _entries(config: ConfigRecord) -> dict[str, Any]:
    """Return the entries of a header, without words and frames."""
    return {name: value for name, value in config.items() if not name.startswith((SAY, *BYTES))}
