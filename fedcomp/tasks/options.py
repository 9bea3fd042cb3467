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

_LARGEST = 2**63 - 1


def shown(value: Any) -> str:
    """Return ``repr(value)`` for a message, cut short; never fails on a number with too many digits to print."""
    try:
        out = repr(value)
    except ValueError:
        # Python converts at most sys.get_int_max_str_digits() digits.
        return "a number of thousands of digits"
    return out if len(out) <= 80 else f"{out[:60]}... ({len(out)} characters)"


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
        if value not in names:
            # Cut short: the search for the nearest name takes time quadratic in the length.
            hint = nearest(plain(option, value)[:80], names)
            raise ConfigError(f"{option}={shown(value)} is not one of {', '.join(names)}{hint}")
        return str(value)

    return parse


def integer(low: int, high: int | None = None) -> Parser:
    """Accept a whole number in ``[low, high]``; without ``high`` it must fit 64 bits, as sizes do."""

    def parse(option: str, value: Any) -> int:
        try:
            # Through text: int() alone would turn 2.7 into 2 without a word.
            number = int(str(value).strip())
        except ValueError:
            raise ConfigError(f"{option}={shown(value)} is not a whole number") from None
        if not low <= number <= (_LARGEST if high is None else high):
            bound = f"at least {low} and below 2**63" if high is None else f"{low} to {high}"
            raise ConfigError(f"{option}={shown(value)} is out of range; expected {bound}")
        return number

    return parse


def number(low: float, high: float = math.inf) -> Parser:
    """Accept a finite real number in ``[low, high]``."""

    def parse(option: str, value: Any) -> float:
        try:
            real = float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{option}={shown(value)} is not a number") from None
        # A whole number beyond the range of a double; the check below refuses it with the bounds.
        except OverflowError:
            real = math.inf
        if isinstance(value, bool) or not math.isfinite(real) or not low <= real <= high:
            raise ConfigError(f"{option}={shown(value)} is out of range; expected {low:g} to {high:g}")
        return real

    return parse


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
