"""Checking and describing a codec's parameters, so that every codec refuses the same things with the same words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from typing import Any

from fedcomp.errors import ConfigError, nearest


def number(name: str, value: Any, *, rule: str, ok: Callable[[float], bool]) -> float:
    """Return ``value`` as a float when it is a real number with ``ok(value)``.

    Raises
    ------
    ConfigError
        Naming the parameter, the value and ``rule``. NaN, strings and booleans are never numbers.
    """
    try:
        as_float = float(value) if not isinstance(value, str | bytes | bool) else math.nan
    except (TypeError, ValueError):
        as_float = math.nan
    if math.isnan(as_float) or not ok(as_float):
        raise ConfigError(f"{name}={value!r} is not valid: {name} must be {rule}")
    return as_float


def integer(name: str, value: Any, *, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int in [low, high].

    Raises
    ------
    ConfigError
    """
    rule = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    checked = number(name, value, rule=rule, ok=lambda v: v % 1 == 0 and low <= v and (high is None or v <= high))
    return int(checked)


def density(value: Any) -> float:
    """Return a density, the fraction of coordinates that travels, in (0, 1]."""
    return number("density", value, rule="a number in (0, 1]", ok=lambda v: 0.0 < v <= 1.0)


def unit(name: str, value: Any) -> float:
    """Return a number in [0, 1]."""
    return number(name, value, rule="a number in [0, 1]", ok=lambda v: 0.0 <= v <= 1.0)


def positive(name: str, value: Any) -> float:
    """Return a positive finite number."""
    return number(name, value, rule="a positive finite number", ok=lambda v: 0.0 < v < math.inf)


def boolean(name: str, value: Any) -> bool:
    """Return ``value`` when it is a bool."""
    if isinstance(value, bool):
        return value
    raise ConfigError(f"{name}={value!r} is not valid: {name} must be True or False")


def choice(name: str, value: Any, known: Iterable[str]) -> str:
    """Return ``value`` when it is one of ``known``."""
    known = tuple(known)
    if isinstance(value, str) and value in known:
        return value
    listed = ", ".join(map(repr, known))
    raise ConfigError(f"{name}={value!r} is not valid: {name} must be one of {listed}{nearest(str(value), known)}")


def count(fraction: float, size: int) -> int:
    """Return k, the number of kept coordinates of ``size`` at density ``fraction``: ``max(1, ceil(density * n))``.

    The product is taken a hair low, so that 0.07 of 100 is 7 although the floating-point product lies above it.
    """
    return min(size, max(1, math.ceil(fraction * size * (1.0 - 1e-12))))


def assign(target: Any, **values: Any) -> None:
    """Set checked parameters on a frozen dataclass, from its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(target, name, value)


def dataclass_config(target: Any) -> dict[str, Any]:
    """Return a dataclass's fields in order; fields that are themselves configured appear as config dictionaries."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(v) for v in value]
        return value.to_config() if hasattr(value, "to_config") else value

    return {f.name: plain(getattr(target, f.name)) for f in fields(target)}


def dataclass_repr(target: Any) -> str:
    """Return ``Name(field=value, ...)`` without the fields at their defaults.

    Nested objects appear as their own repr, so that ``eval`` gives an equal object.
    """
    given = [(f, getattr(target, f.name)) for f in fields(target)]
    args = ", ".join(f"{f.name}={value!r}" for f, value in given if f.default is MISSING or value != f.default)
    return f"{type(target).__name__}({args})"
