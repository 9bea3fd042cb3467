"""Message schemas: frozen dataclasses with a rule for each field, one writer and one reader.

A record is described once, by annotations (:mod:`fedcomp.rules`)::

    Name = Annotated[str, Text(256, least=1)]

    @dataclass(frozen=True)
    class Fetch(Schema, key="fedcomp.gcn"):
        session: Name
        kind: Annotated[str, OneOf("rows", "structure")]
        noise: Annotated[float, Real(least=0.0)] = 0.0
        absent: Annotated[tuple[int, ...], Many(Int(most=65_535), 65_536)] = ()

:meth:`Schema.put` writes the fields in this order. :meth:`Schema.take` reads them and refuses, as :class:`SchemaError`,
whatever another release, a damaged link or a hostile peer makes of them: fields that are missing or unknown, of another
type, out of range or too long, and fields that contradict each other (:meth:`Schema.conflict`). Reading is bounded:
every text, list and nested document has a longest form.

Flower cannot measure a record with an empty value in it, so empty texts, bytes and lists are left out and read as
empty; a number or flag is left out where its rule names the value that stands for absence.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

from flwr.app import ConfigRecord, Message, RecordDict

from fedcomp.flower.payload import PayloadError
from fedcomp.params import shown
from fedcomp.rules import REQUIRED, Rule, rules_of

# Without spaces: documents are sent with every message. By whether keys are sorted; json.dumps() would make an encoder
# for each text.
_COMPACT: Final = {sort: json.JSONEncoder(separators=(",", ":"), sort_keys=sort).encode for sort in (False, True)}

_DEEPEST: Final = 32
"""Maximum nesting depth of a document."""

_REMEDY: Final = "run the same release on both sides; if they are the same, the sender or the link is faulty"


class SchemaError(PayloadError):
    """A record does not say what its schema asks for.

    Attributes
    ----------
    field : str
        The entry at fault; empty when the record as a whole is.
    """

    def __init__(self, what: str, field: str = "") -> None:
        super().__init__(f"{what}; {_REMEDY}")
        self.field = field


class OtherVersion(SchemaError):
    """A record is of another version of its protocol; nothing else in it was read.

    Attributes
    ----------
    version : int
        Which one; -1 where that is not a number.
    """

    version: int = -1


@dataclass(frozen=True)
class Version(Rule):
    """The version of a protocol. It is read before anything else: fields of another version may mean something else."""

    number: int

    def __str__(self) -> str:
        return f"version {self.number}"

    def read(self, value: Any) -> Any:
        if type(value) is not int or value != self.number:
            raise ValueError
        return value


@dataclass(frozen=True)
class Document(Rule):
    """A small dictionary (the description of a codec) as JSON of at most ``most`` characters; {} travels as nothing.

    Parameters
    ----------
    sort : bool
        Write keys in alphabetical order.
    """

    most: int
    sort: bool = False

    @property
    def missing(self) -> Any:
        return {}

    def __str__(self) -> str:
        return f"a JSON object of at most {self.most} characters and {_DEEPEST} levels"

    def read(self, value: Any) -> Any:
        if type(value) is not str or len(value) > self.most:
            raise ValueError
        if not value:
            return {}
        # The length is bounded, so is the work; what is no JSON raises ValueError by itself.
        try:
            found = json.loads(value)
        except RecursionError as error:
            raise ValueError from error
        # A document that json reads may still be too deep for whoever walks it by recursion.
        if not isinstance(found, dict) or _depth(found) > _DEEPEST:
            raise ValueError
        return found

    def write(self, value: Any) -> Any:
        return _COMPACT[self.sort](dict(value)) if value else ""


@dataclass(frozen=True)
class Field:
    """A field of a schema and the entry that holds it.

    Attributes
    ----------
    field, name : str
        Of the dataclass; in the record.
    rule : Rule
    """

    field: str
    name: str
    rule: Rule


class Schema:
    """Base of the dataclasses that are one record; see the module for how a field is described.

    Class parameters
    ----------------
    key : str
        Name of the record.
    prefix : str
        Before every entry's name, in a record that holds other things, too: those are left alone.
    separator : str
        Stands for the ``_`` of field names in entries; a ``_`` at the end of a field's name, which keeps it from being
        a Python keyword, is left out.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    KEY: ClassVar[str] = ""
    PREFIX: ClassVar[str] = ""
    SEPARATOR: ClassVar[str] = "_"

    def __init_subclass__(
        cls,
        *,
        key: str | None = None,
        prefix: str | None = None,
        separator: str | None = None,
    ) -> None:
        super().__init_subclass__()
        given = {"KEY": key, "PREFIX": prefix, "SEPARATOR": separator}
        for name, value in given.items():
            if value is not None:
                setattr(cls, name, value)

    @classmethod
    # Annotations are strings in these modules; resolving them takes longer than reading a record.
    @functools.cache
    def entries(cls) -> tuple[Field, ...]:
        """Return the fields with their rules, in the order in which they are written."""
        kind: Any = cls
        rules = rules_of(kind)
        if bare := [f.name for f in dataclasses.fields(cls) if f.name not in rules]:
            raise TypeError(f"fields {bare} of {cls.__name__} have no rule; annotate each with one")
        return tuple(
            Field(f.name, cls.PREFIX + f.name.rstrip("_").replace("_", cls.SEPARATOR), rules[f.name])
            for f in dataclasses.fields(cls)
        )

    def conflict(self) -> str:
        """Return why fields that are each in range contradict each other; empty when they do not."""
        return ""

    # Writing.

    def values(self) -> dict[str, Any]:
        """Return the entries of the record."""
        found: dict[str, Any] = {}
        for entry in self.entries():
            value = getattr(self, entry.field)
            # A reader fills in what is missing, so a message pays only for what is unusual.
            if value != entry.rule.missing:
                found[entry.name] = entry.rule.write(value)
        return found

    def check(self) -> dict[str, Any]:
        """Return :meth:`values`, and refuse what no reader would take.

        Raises
        ------
        SchemaError
            When a field breaks its rule, or fields contradict each other.
        """
        found: dict[str, Any] = {}
        for entry in self.entries():
            value, rule = getattr(self, entry.field), entry.rule
            try:
                # The value that stands for absence may break the rule: Int(least=1, absent=0).
                if value != rule.missing:
                    found[entry.name] = rule.write(value)
                    # What was written, so that exactly what travels is what is checked.
                    rule.read(found[entry.name])
            except ValueError:
                what = f"field {entry.field!r} of {type(self).__name__} is {shown(value)}, expected {rule}"
                raise SchemaError(what, entry.name) from None
        if reason := self.conflict():
            raise SchemaError(f"not a valid {type(self).__name__}: {reason}")
        return found

    def put(self, content: RecordDict, key: str | None = None) -> None:
        """Write this into ``content``, under ``key`` or the schema's own; what was said there before is replaced.

        Raises
        ------
        SchemaError
            As :meth:`check`: what a reader would refuse is never written.
        """
        content[self.KEY if key is None else key] = ConfigRecord(self.check())

    # Reading.

    @classmethod
    def take(cls, source: Message | RecordDict, key: str | None = None) -> Self:
        """Return what a message, or a client's state, says.

        Raises
        ------
        SchemaError
            When it says nothing of the kind, or something that breaks a rule.
        """
        content = source if isinstance(source, RecordDict) else source.content if source.has_content() else RecordDict()
        key = cls.KEY if key is None else key
        found = content.get(key)
        if not isinstance(found, ConfigRecord):
            held = "nothing" if found is None else f"a {type(found).__name__}"
            raise SchemaError(f"there is {held} under {key!r}, expected a ConfigRecord ({cls.__name__})")
        return cls.of(dict(found), key)

    @classmethod
    def find(cls, source: Message | RecordDict, key: str | None = None) -> Self | None:
        """Return what :meth:`take` returns, None where there is no record of that name."""
        content = source if isinstance(source, RecordDict) else source.content if source.has_content() else RecordDict()
        return cls.take(source, key) if (cls.KEY if key is None else key) in content else None

    @classmethod
    def of(cls, values: Mapping[str, Any], key: str | None = None) -> Self:
        """Return what the entries of a record say; see :meth:`take`."""
        where = repr(cls.KEY if key is None else key)
        for entry in cls.entries():
            # Before all other entries: of another version they may mean something else, and be wrong by these rules.
            if isinstance(entry.rule, Version):
                _require_version(entry, values.get(entry.name), where)
        known = {entry.name for entry in cls.entries()}
        # A record may be shared with the app's own entries; those below the prefix are this schema's alone.
        unknown = sorted(name for name in values if name.startswith(cls.PREFIX) and name not in known)
        if unknown:
            raise SchemaError(f"record {where} ({cls.__name__}) has unknown entries {unknown[:5]}", unknown[0])
        made = cls(**{entry.field: _read(entry, values, where) for entry in cls.entries()})
        if reason := made.conflict():
            raise SchemaError(f"record {where} is not a valid {cls.__name__}: {reason}")
        return made


def _read(entry: Field, values: Mapping[str, Any], where: str) -> Any:
    if entry.name not in values:
        if entry.rule.missing is REQUIRED:
            raise SchemaError(f"field {entry.name!r} of record {where} is missing, expected {entry.rule}", entry.name)
        return entry.rule.missing
    value = values[entry.name]
    try:
        return entry.rule.read(value)
    except ValueError as error:
        raise SchemaError(
            f"field {entry.name!r} of record {where} is {shown(value)}, expected {entry.rule}", entry.name
        ) from error


def _require_version(entry: Field, value: Any, where: str) -> None:
    try:
        entry.rule.read(value)
    except ValueError as error:
        what = f"field {entry.name!r} of record {where} is {shown(value)}, expected {entry.rule}"
        other = OtherVersion(what, entry.name)
        # A peer may put anything here, and True equals 1.
        other.version = value if type(value) is int else -1
        raise other from error


def _depth(value: Any) -> int:
    """Return the nesting depth of a JSON value; counting stops beyond the limit."""
    # Level by level: recursion is what a deep document would break.
    level, depth = [value], 0
    while level and depth <= _DEEPEST:
        level = [
            below
            for item in level
            if isinstance(item, dict | list)
            for below in (item.values() if isinstance(item, dict) else item)
        ]
        depth += 1
    return depth
