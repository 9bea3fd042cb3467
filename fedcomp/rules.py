"""Field rules: each field is declared once, and constructors and messages follow from it.

A rule is part of a field's annotation::

    @dataclass(frozen=True, repr=False, eq=False)
    class Rounding(Configured):
        levels: Annotated[int, Int(1, 32_767)] = 127
        scale: Annotated[str, OneOf("least", "unbiased")] = "unbiased"

        def conflict(self) -> str: ...  # why fields that are each in range contradict each other

It reads a value in three places: from a caller in Python (:meth:`Rule.take`, numbers of numpy are welcome), from a text
that somebody typed (:meth:`Rule.parse`), and from a message (:meth:`Rule.read`, where types are exact, nothing is
converted and every length is bounded). The words of a refusal are ``str(rule)``, everywhere.
"""

from __future__ import annotations

import functools
import itertools
import math
import numbers
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from typing import Annotated, Any, Final, Self, TypeVar, get_args, get_origin, get_type_hints

from fedcomp.errors import ConfigError
from fedcomp.params import shown, similar, to_float

T = TypeVar("T", int, float)

REQUIRED: Final = object()
"""A field without a value that stands for its absence."""

LARGEST: Final = 2**63 - 1
"""Largest integer that a message can hold."""

_WORDS: Final = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


class Rule:
    """What a field's value may be. ``str()`` states the rule."""

    @property
    def missing(self) -> Any:
        """What an entry of a message that is not there stands for; :data:`REQUIRED` where it has to be there."""
        return REQUIRED

    def read(self, value: Any) -> Any:
        """Return the field's value for an entry of a message; raise ``ValueError`` for one that breaks the rule."""
        raise NotImplementedError

    def take(self, value: Any) -> Any:
        """Return what a caller means by ``value``; raise ``ValueError``, its text is advice, for the others."""
        return self.read(value)

    def parse(self, text: str) -> Any:
        """Return what a person means by ``text``; raise ``ValueError`` as :meth:`take` does."""
        return self.take(text)

    def write(self, value: Any) -> Any:
        """Return the entry for a field's value: plain data."""
        return value


@dataclass(frozen=True)
class Number(Rule):
    """A number or flag; ``absent`` is the value that is not written, for one that most messages have."""

    absent: Any = field(default=REQUIRED, kw_only=True)

    @property
    def missing(self) -> Any:
        return self.absent


@dataclass(frozen=True)
class Int(Number):
    """An integer from ``least`` to ``most``, both included."""

    least: int = 0
    most: int = LARGEST

    def __str__(self) -> str:
        if self.most < LARGEST:
            return f"an integer in [{self.least}, {self.most}]"
        return f"an integer >= {self.least}" if self.least >= -LARGEST else "an integer"

    def read(self, value: Any) -> int:
        # type() and not isinstance(): True is an int.
        if type(value) is not int or not self.least <= value <= self.most:
            raise ValueError
        return value

    def take(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or value % 1 != 0:
            raise ValueError
        return self.read(int(value))  # type: ignore[call-overload]  # every real number of Python has it

    def parse(self, text: str) -> int:
        return self.read(_written(int, text))


@dataclass(frozen=True)
class Size(Int):
    """A number of bytes; a caller may write "20 kB", a unit being 1000 of the one before."""

    def __str__(self) -> str:
        return f"{super().__str__()}, or a text such as '20 kB'"

    def take(self, value: Any) -> int:
        return self.parse(value) if isinstance(value, str) else super().take(value)

    def parse(self, text: str) -> int:
        found = re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?)\s*([kMG]?)B?", text.strip())
        if found is None:
            raise ValueError
        return self.read(round(Fraction(found[1]) * {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}[found[2]]))


@dataclass(frozen=True)
class Real(Number):
    """A number from ``least`` to ``most``, both included, greater than ``above`` and less than ``below``.

    Infinity and NaN are refused, unless ``finite`` is False: then any float will do. ``infinite``: infinity will do.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    finite: bool = True
    infinite: bool = False

    def __str__(self) -> str:
        if not self.finite:
            return "a number"
        kind = "number" if self.infinite else "finite number"
        low = f"({self.above:g}" if self.above > -math.inf else f"[{self.least:g}" if self.least > -math.inf else ""
        high = f"{self.below:g})" if self.below < math.inf else f"{self.most:g}]" if self.most < math.inf else ""
        if low and high:
            return f"a number in {low}, {high}"
        if self.above == 0.0:
            return f"a positive {kind}"
        low = low.replace("(", " > ").replace("[", " >= ")
        high = f" < {high[:-1]}" if high.endswith(")") else f" <= {high[:-1]}" if high else ""
        return f"a {kind}{low}{high}"

    def read(self, value: Any) -> float:
        # JSON has integers of any length, and float() of a very long one raises OverflowError.
        if type(value) is int and abs(value) <= LARGEST:
            value = float(value)
        if type(value) is not float:
            raise ValueError
        if not self.finite or (self.infinite and value == math.inf):
            return value
        # Every comparison with NaN is false.
        if not (math.isfinite(value) and self.least <= value <= self.most and self.above < value < self.below):
            raise ValueError
        return value

    def take(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError
        try:
            return self.read(to_float(value))
        except OverflowError as error:
            raise ValueError from error

    def parse(self, text: str) -> float:
        return self.read(_written(float, text))


@dataclass(frozen=True)
class Flag(Number):
    """True or False."""

    def __str__(self) -> str:
        return "True or False"

    def read(self, value: Any) -> bool:
        if type(value) is not bool:
            raise ValueError
        return value

    def parse(self, text: str) -> bool:
        word = text.strip().lower()
        if word not in _WORDS:
            raise ValueError
        return _WORDS[word]


class OneOf(Rule):
    """One of some texts; where the empty text is one of them, it is what an absent entry stands for."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    @property
    def missing(self) -> Any:
        return "" if "" in self.choices else REQUIRED

    def __str__(self) -> str:
        return f"one of {', '.join(map(repr, self.choices))}"

    def read(self, value: Any) -> str:
        if type(value) is not str or value not in self.choices:
            raise ValueError
        return value

    def take(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.choices:
            raise ValueError(similar(value, self.choices) if isinstance(value, str) else "")
        # The text of the list: one of numpy's is equal to it, but has another repr.
        return self.choices[self.choices.index(value)]


@dataclass(frozen=True)
class Text(Rule):
    """A text of ``least`` to ``most`` characters."""

    most: int = 512
    least: int = 0

    @property
    def missing(self) -> Any:
        return REQUIRED if self.least else ""

    def __str__(self) -> str:
        return f"a text of {self.least} to {self.most} characters"

    def read(self, value: Any) -> str:
        if type(value) is not str or not self.least <= len(value) <= self.most:
            raise ValueError
        return value


@dataclass(frozen=True)
class Data(Rule):
    """From ``least`` to ``most`` bytes."""

    most: int
    least: int = 0

    @property
    def missing(self) -> Any:
        return REQUIRED if self.least else b""

    def __str__(self) -> str:
        return f"{self.most} bytes" if self.least == self.most else f"{self.least} to {self.most} bytes"

    def read(self, value: Any) -> bytes:
        if type(value) is not bytes or not self.least <= len(value) <= self.most:
            raise ValueError
        return value


@dataclass(frozen=True)
class Many(Rule):
    """A list of ``least`` to ``most`` values that follow a rule; a tuple in the dataclass.

    Parameters
    ----------
    each : Rule
    ascending : bool
        No value is smaller than, or the same as, the one before it.
    """

    each: Rule
    most: int
    least: int = 0
    ascending: bool = False

    @property
    def missing(self) -> Any:
        return REQUIRED if self.least else ()

    def __str__(self) -> str:
        order = " in ascending order, none twice" if self.ascending else ""
        return f"a list of {self.least} to {self.most} values{order}, each {self.each}"

    def read(self, value: Any) -> tuple[Any, ...]:
        return self._all(value, self.each.read)

    def take(self, value: Any) -> tuple[Any, ...]:
        return self._all(value, self.each.take)

    def parse(self, text: str) -> tuple[Any, ...]:
        """Return the values between commas; nothing between two is no value."""
        return self._all([part.strip() for part in text.split(",") if part.strip()], self.each.parse)

    def _all(self, value: Any, of: Callable[[Any], Any]) -> tuple[Any, ...]:
        # Only after the length was checked: this is where a list costs memory.
        if not isinstance(value, list | tuple) or not self.least <= len(value) <= self.most:
            raise ValueError
        found = tuple(map(of, value))
        if self.ascending and any(a >= b for a, b in itertools.pairwise(found)):
            raise ValueError
        return found

    def write(self, value: Any) -> list[Any]:
        return list(map(self.each.write, value))


@dataclass(frozen=True)
class Options(Rule):
    """A dictionary of at most ``most`` names with plain values (texts, numbers, flags)."""

    most: int

    def __str__(self) -> str:
        return f"at most {self.most} names with plain values"

    def read(self, value: Any) -> Any:
        if type(value) is not dict or len(value) > self.most:
            raise ValueError
        # JSON as Python reads it has NaN and infinity.
        if not all(type(item) in (str, int, bool) or Real().read(item) is not None for item in value.values()):
            raise ValueError
        return value

    def take(self, value: Any) -> Any:
        return self.read(dict(value) if isinstance(value, Mapping) else value)

    def write(self, value: Any) -> Any:
        return dict(value)


@dataclass(frozen=True)
class Maybe(Rule):
    """A value that follows a rule, or what stands for its choice: None, or a word such as "auto"."""

    rule: Rule
    unset: str | None = None

    def __str__(self) -> str:
        return f"{self.rule} or {self.unset!r}"

    def read(self, value: Any) -> Any:
        return self.unset if self._unset(value) else self.rule.read(value)

    def take(self, value: Any) -> Any:
        return self.unset if self._unset(value) else self.rule.take(value)

    def parse(self, text: str) -> Any:
        return self.unset if text == (self.unset or "") else self.rule.parse(text)

    def write(self, value: Any) -> Any:
        return value if self._unset(value) else self.rule.write(value)

    def _unset(self, value: Any) -> bool:
        # The type first: an array compares with a text element by element.
        return isinstance(value, type(self.unset)) and value == self.unset


@dataclass(frozen=True)
class Made(Rule):
    """The object that a function makes from an object, its configuration or its name; the function's own errors
    propagate."""

    make: Callable[[Any], Any]

    def take(self, value: Any) -> Any:
        return self.make(value)

    def write(self, value: Any) -> Any:
        return value.to_config() if hasattr(value, "to_config") else [v.to_config() for v in value]


def _written(kind: type[T], text: str) -> T:
    try:
        return kind(text)
    except ValueError:
        # Without the words of Python: the rule's own say what is expected.
        raise ValueError from None


Density = Annotated[float, Real(above=0.0, most=1.0)]
"""The fraction of coordinates that travels."""

AboveZero = Annotated[float, Real(above=0.0, most=1.0)]
"""A number from 0 to 1, without 0."""

Share = Annotated[float, Real(least=0.0, most=1.0)]

BelowOne = Annotated[float, Real(least=0.0, below=1.0)]
"""A number from 0 to 1, without 1."""

Inside = Annotated[float, Real(above=0.0, below=1.0)]
"""A number between 0 and 1, without them."""

Positive = Annotated[float, Real(above=0.0)]

NotNegative = Annotated[float, Real(least=0.0)]

TIMEOUT: Final = Maybe(Real(above=0.0, infinite=True))
"""Seconds to wait for replies; None: the run's own timeout."""

Switch = Annotated[bool, Flag()]

Seed = Annotated[int, Int(-LARGEST - 1)]
"""An integer of 64 bits with sign, as messages can hold it."""


@functools.cache
def rules_of(kind: Any) -> dict[str, Rule]:
    """Return the rules of a dataclass's fields by name, in order; of those that are annotated with one.

    Raises
    ------
    TypeError
        When a field has several.
    """
    found: dict[str, Rule] = {}
    # Annotations are strings in these modules; resolving them takes longer than checking an object.
    for name, hint in get_type_hints(kind, include_extras=True).items():
        rules = [extra for extra in get_args(hint)[1:] if isinstance(extra, Rule) and get_origin(hint) is Annotated]
        if len(rules) > 1:
            raise TypeError(f"field {name!r} of {kind.__name__} has {len(rules)} rules; annotate it with one")
        if rules:
            found[name] = rules[0]
    return {each.name: found[each.name] for each in fields(kind) if each.name in found}


def checked(name: str, value: Any, rule: Rule, *, text: bool = False) -> Any:
    """Return what a caller means by ``value`` of the parameter ``name``; with ``text`` it may be written out.

    Raises
    ------
    ConfigError
        Naming the parameter, the value and the rule.
    """
    try:
        return rule.parse(value) if text and isinstance(value, str) else rule.take(value)
    except ConfigError:
        raise
    except ValueError as why:
        raise ConfigError(f"{name}={shown(value)} is not valid: {name} must be {rule}{why}") from None


class Configured:
    """A dataclass whose fields have rules, and that its parameters recreate: with equal ones two objects are equal."""

    def __post_init__(self) -> None:
        """Check the fields, in order, then that they do not contradict each other.

        Raises
        ------
        ConfigError
            Naming the field, its value and its rule.
        """
        kind: Any = type(self)
        for name, rule in rules_of(kind).items():
            object.__setattr__(self, name, checked(name, getattr(self, name), rule))
        if reason := self.conflict():
            raise ConfigError(reason)

    def conflict(self) -> str:
        """Return why fields that are each in range contradict each other; empty when they do not."""
        return ""

    def get_config(self) -> dict[str, Any]:
        """Return the JSON-able parameters that recreate this object."""

        def plain(value: Any) -> Any:
            if isinstance(value, tuple):
                return [plain(v) for v in value]
            return value.to_config() if hasattr(value, "to_config") else value

        return {f.name: plain(getattr(self, f.name)) for f in fields(self) if f.init}  # type: ignore[arg-type]

    def to_config(self) -> dict[str, Any]:
        """Return :meth:`get_config`'s dictionary; with a name, where one is needed to find the class."""
        return self.get_config()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Create the object from :meth:`get_config`'s dictionary."""
        return cls(**config)

    @classmethod
    def made(cls, given: Any) -> Self:
        """Return ``given`` where it is such an object, or the one of its dictionary.

        Raises
        ------
        ConfigError
            For anything else.
        """
        if isinstance(given, cls):
            return given
        try:
            return cls.from_config(given)
        except TypeError as error:
            raise ConfigError(f"{shown(given)} is not valid: a {cls.__name__} ({error})") from error

    def __repr__(self) -> str:
        """Return ``Name(field=value, ...)`` without the fields at their defaults; ``eval`` gives an equal object."""
        given = [(f, getattr(self, f.name)) for f in fields(self) if f.init]  # type: ignore[arg-type]
        args = ", ".join(f"{f.name}={value!r}" for f, value in given if f.default is MISSING or value != f.default)
        return f"{type(self).__name__}({args})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Configured) and self.get_config() == other.get_config()

    def __hash__(self) -> int:
        # By the repr, because configurations hold lists and dictionaries, which have no hash.
        return hash(repr(self))
