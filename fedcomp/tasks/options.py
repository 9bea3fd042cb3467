"""Options of a task: a name, a default, and a parser that accepts Python values and their text form alike.

Run configurations carry only numbers, booleans and text, so ``hidden=(256, 256)`` and ``hidden="256,256"``
mean the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedcomp.errors import ConfigError, nearest

Parser = Callable[[str, Any], Any]
"""``parser(option name, value) -> canonical, hashable value``; raises ConfigError."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a task: its default, its parser and a line of help."""

    default: Any
    parse: Parser
    help: str


def resolve(task: str, table: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
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
        if value not in names:
            raise ConfigError(f"{option}={value!r} is not one of {', '.join(names)}{nearest(str(value), names)}")
        return str(value)

    return parse


def integer(low: int, high: int | None = None) -> Parser:
    """Accept a whole number in ``[low, high]``."""

    def parse(option: str, value: Any) -> int:
        try:
            number = int(str(value).strip())
        except ValueError:
            raise ConfigError(f"{option}={value!r} is not a whole number") from None
        if isinstance(value, bool) or number < low or (high is not None and number > high):
            bound = f"at least {low}" if high is None else f"{low} to {high}"
            raise ConfigError(f"{option}={value!r} is out of range; expected {bound}")
        return number

    return parse


def number(low: float, high: float = math.inf) -> Parser:
    """Accept a finite real number in ``[low, high]``."""

    def parse(option: str, value: Any) -> float:
        try:
            real = float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{option}={value!r} is not a number") from None
        if isinstance(value, bool) or not math.isfinite(real) or not low <= real <= high:
            raise ConfigError(f"{option}={value!r} is out of range; expected {low:g} to {high:g}")
        return real

    return parse


def flag(option: str, value: Any) -> bool:
    """Accept a boolean, or "true" / "false"."""
    text = str(value).strip().lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{option}={value!r} is not a boolean; use true or false")
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
        raise ConfigError(f"{option}={value!r} is not a list of layer widths; write e.g. '256,256'") from None
    parse = integer(1)
    return tuple(parse(option, part) for part in parts)


def optional(inner: Parser) -> Parser:
    """Accept None (or empty text) or what ``inner`` accepts."""

    def parse(option: str, value: Any) -> Any:
        return None if value is None or value == "" else inner(option, value)

    return parse


def text(option: str, value: Any) -> str:
    """Accept any text (or path)."""
    return str(value)
