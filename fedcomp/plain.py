"""Conversion of typed values to plain data and back, for reports, states and files.

Plain data are numbers, strings, lists and dictionaries with string keys, which JSON holds, and beside them bytes,
arrays and Flower's records, which :mod:`fedcomp.flower.store` holds. The type says how to read them back: keys that are
numbers, sets, tuples and dataclasses return as they were. What is read may be damaged or forged; one error says where
and how.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from fedcomp.errors import FedcompError
from fedcomp.rules import Int, Rule

T = TypeVar("T")

_SHOWN: Final = 60
"""Number of characters of a wrong value in an error."""


class PlainError(FedcompError, ValueError):
    """Plain data are not what the declared type says; the message names where."""


@dataclass(frozen=True)
class Keys(Rule):
    """The rule for a mapping that has these keys and no others."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"the keys {list(self.names)}"

    def read(self, value: Any) -> Any:
        """Return a mapping with these keys; raise ``ValueError`` for another."""
        if set(value) != set(self.names):
            raise ValueError
        return value


@dataclass(frozen=True)
class Null(Rule):
    """The rule for a number that JSON has no word for: NaN and infinity are null in a document, or ``word``.

    Fields of dataclasses that are annotated so are written as such (:func:`fields_of`).
    """

    value: float
    word: str | None = None

    def __str__(self) -> str:
        return f"a number or {self.word or 'null'}"

    def read(self, value: Any) -> Any:
        """Return any value that is there."""
        return value


Count = Annotated[int, Int(most=2**64 - 1)]
"""An integer that cannot be negative. Files hold hashes as such, of all 64 bits, which messages could not."""

OrInfinite = Annotated[float, Null(math.inf)]
"""A number that is null in a document when it is infinite."""


def to_plain(value: Any) -> Any:
    """Return ``value`` as plain data.

    Dataclasses become dictionaries of their fields, or what their own ``to_json()`` returns; keys become strings, sets
    sorted lists, tuples lists, numpy's scalars numbers. Anything else is returned as it is.

    Examples
    --------
    >>> to_plain({3: {"b", "a"}, 1: (2.0, None)})
    {'3': ['a', 'b'], '1': [2.0, None]}
    """
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value) and not isinstance(value, type):
        return fields_of(value)
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(to_plain(item) for item in value)
    return value.item() if isinstance(value, np.generic) else value


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as plain data, those it is made from (``init=True``)."""
    found = {each.name: to_plain(getattr(value, each.name)) for each in fields(value) if each.init}
    for name, rule in _nulls(type(value)).items():  # type: ignore[arg-type]  # a class can be hashed
        # NaN equals nothing, not even itself.
        if name in found and (found[name] == rule.value or (found[name] != found[name] and math.isnan(rule.value))):
            found[name] = rule.word
    return found


@cache
def _nulls(kind: type) -> dict[str, Null]:
    """Return the fields of a dataclass that are null in a document."""
    return {name: rule for name, hint in _hints(kind).items() for rule in get_args(hint)[1:] if isinstance(rule, Null)}


def from_plain(kind: Any, value: Any, where: str = "value") -> Any:
    """Return the value of type ``kind`` that :func:`to_plain` wrote.

    Parameters
    ----------
    kind : type
        A class or annotation: bool, int, float, str, bytes, None, Any, Literal, unions, lists, tuples, sets, mappings
        with keys that are int or str, ``Annotated`` ones with a :class:`~fedcomp.rules.Rule`, arrays
        (``NDArray[np.float32]`` of that dtype alone), dataclasses with such fields, and classes with a ``from_json`` of
        their own. Of any other class the value has to be an instance.
    where : str
        What errors call the value.

    Raises
    ------
    PlainError
        When the value is not what ``kind`` says: of another type, outside of its range, with unknown or missing fields.

    Examples
    --------
    >>> from_plain(dict[int, set[str]], {"3": ["a", "b"]}) == {3: {"a", "b"}}
    True
    >>> from_plain(dict[int, Count], {"3": -1}, "clips")
    Traceback (most recent call last):
    ...
    fedcomp.plain.PlainError: clips['3'] is -1 (int), expected an integer >= 0
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        for rule in args[1:]:
            if isinstance(rule, Null) and value == rule.word:
                return rule.value
        found = from_plain(args[0], value, where)
        for rule in args[1:]:
            try:
                found = rule.read(found)
            except ValueError as error:
                raise _wrong(value, where, str(rule)) from error
        return found
    if origin in (Union, types.UnionType):
        return _one_of(args, value, where)
    if origin is Literal:
        if not any(type(value) is type(each) and value == each for each in args):
            raise _wrong(value, where, f"one of {list(args)}")
        return value
    if kind is None or kind is type(None):
        return _exactly(type(None), value, where)
    if origin is np.ndarray or kind is np.ndarray:
        return _array(args, value, where)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(args, value, where)
    if origin is tuple and args[-1] is not Ellipsis:
        found = _exactly(list, value, where)
        if len(found) != len(args):
            raise _wrong(value, where, f"{len(args)} entries")
        return tuple(from_plain(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, found, strict=True)))
    if origin is not None and issubclass(origin, Sequence | Set):
        items = [from_plain(args[0], item, f"{where}[{i}]") for i, item in enumerate(_exactly(list, value, where))]
        make: type = origin if origin in (list, tuple, set, frozenset) else list
        return make(items)
    if kind is float:
        # Not bool, which is a number to Python; a whole number is what a file makes of 2.0 sometimes.
        if type(value) not in (int, float):
            raise _wrong(value, where, "a number")
        return float(value)
    if kind in (bool, int, str, bytes, dict, list):
        return _exactly(kind, value, where)
    if hasattr(kind, "from_json"):
        return kind.from_json(_exactly(dict, value, where))
    if isinstance(kind, type) and is_dataclass(kind):
        return from_fields(kind, value, where)
    if not isinstance(value, kind):
        raise _wrong(value, where, kind.__name__)
    return value


def from_fields(kind: type[T], value: Any, where: str = "value") -> T:
    """Return the dataclass whose fields :func:`fields_of` wrote.

    Raises
    ------
    PlainError
        When a field is unknown, missing or wrong, or the class refuses its values.
    """
    given = _exactly(dict, value, where)
    known = {each.name: each for each in fields(kind) if each.init}  # type: ignore[arg-type]
    if unknown := sorted(map(str, set(given) - set(known))):
        raise PlainError(f"{where} has unknown fields {unknown[:5]}; {kind.__name__} has {sorted(known)}")
    if missing := sorted(set(known) - set(given)):
        raise PlainError(f"{where} lacks the fields {missing} of {kind.__name__}")
    hints = _hints(kind)  # type: ignore[arg-type]  # a class can be hashed
    values = {name: from_plain(hints[name], item, f"{where}.{name}") for name, item in given.items()}
    try:
        return kind(**values)
    except (FedcompError, ValueError, TypeError) as error:
        raise PlainError(f"{where} is not a valid {kind.__name__}: {error}") from error


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _wrong(value: Any, where: str, expected: str) -> PlainError:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return PlainError(f"{where} is {shown} ({type(value).__name__}), expected {expected}")


def _exactly(kind: type[T], value: Any, where: str) -> T:
    # Not isinstance, for which True is an int.
    if type(value) is not kind:
        raise _wrong(value, where, kind.__name__)
    return value


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """Return ``value`` as the first of several types that accepts it; its own type comes first."""
    for kind in sorted(kinds, key=lambda kind: kind is not type(value)):
        try:
            return from_plain(kind, value, where)
        except PlainError:
            continue
    raise _wrong(value, where, " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds))


def _mapping(args: tuple[Any, ...], value: Any, where: str) -> dict[Any, Any]:
    out = {}
    for key, item in _exactly(dict, value, where).items():
        at = f"{where}[{key!r}]"
        out[_key(args[0], key, at)] = from_plain(args[1], item, at)
    if len(out) < len(value):
        raise PlainError(f"{where} has one key twice")
    return out


def _key(kind: Any, key: Any, where: str) -> Any:
    text = _exactly(str, key, where)
    if kind is str:
        return text
    try:
        number = int(text)
    except ValueError as error:
        raise PlainError(f"{where} has a key that is not a whole number") from error
    return from_plain(kind, number, where)


def _array(args: tuple[Any, ...], value: Any, where: str) -> Any:
    """Return a copy of a numeric array, in the dtype of the annotation if there is one."""
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        raise _wrong(value, where, "an array of numbers")
    named = get_args(args[1]) if len(args) > 1 else ()
    if named and named[0] is not Any and value.dtype != np.dtype(named[0]):
        raise PlainError(f"{where} is an array of {value.dtype}, expected {np.dtype(named[0])}")
    return value.copy()
