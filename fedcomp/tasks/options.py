"""Options of a task: a name, a default, and a parser that accepts Python values and their text form alike.

Run configurations carry only numbers, booleans and text, so ``hidden=(256, 256)`` and ``hidden="256,256"``
mean the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedcomp import params
from fedcomp.errors import ConfigError, nearest
from fedcomp.params import shown

Parser = Callable[[str, Any], Any]
"""``parser(option name, value) -> canonical, hashable value``; raises ConfigError."""

_LARGEST = 2**63 - 1


def plain(option: str, value: Any) -> str:
    """Return ``str(value)``, or raise ConfigError where the value has too many digits for it."""
    try:
        return str(value)
    except ValueError:
        raise ConfigError(f"{option} is {shown(value)}; expected a value that can be written down") from None


@dataclass(frozen=True, slots=True)
class TaskOption:
    """One option of a task: its default, its parser and a line of help."""

    default: Any
    parse: Parser
    help: str


def resolve(task: str, table: Mapping[str, TaskOption], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of ``task`` with ``given`` values in canonical form and defaults for the rest.

    Raises
    ------
    ConfigError
        For an unknown name (the message gives the nearest) or a value its parser refuses.
    """
    for name in given:
        if name not in table:
            raise ConfigError(f"task {task!r} has no option {name!r}{nearest(name, table)}")
    return {name: option.parse(name, given.get(name, option.default)) for name, option in table.items()}


def choice(*names: str) -> Parser:
    """Accept one of ``names``."""

    def parse(option: str, value: Any) -> str:
        return params.choice(option, value, names)

    return parse


def integer(low: int, high: int = _LARGEST) -> Parser:
    """Accept a whole number in ``[low, high]``; it always fits 64 bits, as sizes do."""

    def parse(option: str, value: Any) -> int:
        return params.integer(option, _read(int, value), low=low, high=high)

    return parse


def number(low: float, high: float = math.inf) -> Parser:
    """Accept a finite real number in ``[low, high]``."""
    rule = f"a finite number >= {low:g}" if high == math.inf else f"a number in [{low:g}, {high:g}]"

    def parse(option: str, value: Any) -> float:
        found = _read(float, value)
        return params.number(option, found, rule=rule, ok=lambda v: low <= v <= high and v < math.inf)

    return parse


def _read(kind: Callable[[str], Any], value: Any) -> Any:
    """Return the number that a text is; what is none is refused by the checks that follow."""
    try:
        return kind(value) if isinstance(value, str) else value
    except ValueError:
        return value


def flag(option: str, value: Any) -> bool:
    """Accept a boolean, or "true" / "false"."""
    text = plain(option, value).strip().lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{option}={shown(value)} is not a boolean; use true or false")
    return text == "true"


def widths(option: str, value: Any) -> tuple[int, ...]:
    """Accept positive layer widths: a number, a sequence, or text such as ``"256,256"`` (empty: no hidden
    layer)."""
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    elif isinstance(value, int):
        value = [value]
    try:
        parts = list(value)
    except TypeError:
        raise ConfigError(f"{option}={shown(value)} is not a list of layer widths; write e.g. '256,256'") from None
    parse = integer(1)
    return tuple(parse(option, part) for part in parts)


def optional(inner: Parser) -> Parser:
    """Accept None (or empty text) or what ``inner`` accepts."""

    def parse(option: str, value: Any) -> Any:
        return None if value is None or value == "" else inner(option, value)

    return parse


def text(option: str, value: Any) -> str:
    """Accept any text (or path)."""
    return plain(option, value)
