"""Checks of single function arguments; classes with fields use rules (:mod:`fedcomp.rules`)."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fedcomp.errors import ConfigError, nearest

_LONGEST_NAME = 64


def shown(value: Any) -> str:
    """Return a short ``repr`` of ``value`` for messages: bounded in length and depth, whatever a peer sent."""
    try:
        return reprlib.repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints
        return f"<{type(value).__name__}>"


def similar(name: str, known: Iterable[str]) -> str:
    """Return :func:`fedcomp.errors.nearest`'s advice for a name of sensible length, else nothing."""
    return nearest(name, known) if len(name) <= _LONGEST_NAME else ""


def number(name: str, value: Any, *, rule: str, ok: Callable[[float], bool]) -> float:
    """Return ``value`` as a float when it is a real number with ``ok(value)``.

    Raises
    ------
    ConfigError
        Naming the parameter, the value and ``rule``. Numbers are :class:`numbers.Real`; NaN, integers beyond float64,
        strings, bytes, booleans and arrays never are.
    """
    try:
        as_float = to_float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        as_float = math.nan
    if math.isnan(as_float) or not ok(as_float):
        raise ConfigError(f"{name}={shown(value)} is not valid: {name} must be {rule}")
    return as_float


def to_float(value: Any) -> float:
    """Return the float that ``value`` was written as: ``np.float32(0.1)`` is 0.1, not 0.10000000149.

    Raises
    ------
    OverflowError
        When an integer or a fraction lies beyond float64.
    """
    narrow = isinstance(value, np.floating) and not isinstance(value, float)
    return float(str(value)) if narrow else float(value)


def integer(name: str, value: Any, *, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int in [low, high].

    Raises
    ------
    ConfigError
        When it is not a whole number in that range.
    """
    # Nearly every call: keys and ledgers check each number they are given. The bound is where every int is a float64.
    if type(value) is int and low <= value <= (2**53 if high is None else high):
        return value
    rule = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"

    def within(v: float) -> bool:
        # Not by way of float64, which loses digits of integers above 2**53.
        exact = int(value) if isinstance(value, numbers.Integral) else v
        return exact % 1 == 0 and low <= exact and (high is None or exact <= high)

    checked = number(name, value, rule=rule, ok=within)
    return int(value) if isinstance(value, numbers.Integral) else int(checked)


def seed(value: Any) -> int:
    """Return a seed: an integer of 64 bits, with sign, as messages can hold it."""
    return integer("seed", value, low=-(2**63), high=2**63 - 1)


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
    raise ConfigError(f"{name}={shown(value)} is not valid: {name} must be True or False")


def choice(name: str, value: Any, known: Iterable[str]) -> str:
    """Return ``value`` when it is one of ``known``."""
    known = tuple(known)
    if isinstance(value, str) and value in known:
        # The string of the list: one of numpy's is equal to it, but has another repr.
        return known[known.index(value)]
    listed = ", ".join(map(repr, known))
    advice = similar(value, known) if isinstance(value, str) else ""
    raise ConfigError(f"{name}={shown(value)} is not valid: {name} must be one of {listed}{advice}")


def count(fraction: float, size: int) -> int:
    """Return k, the number of kept coordinates of ``size`` at density ``fraction``: ``max(1, ceil(density * n))``.

    The ceiling is that of the number the density was meant as: k is the least integer whose quotient ``k / n``, rounded
    to float64, reaches the density. So 0.07 of 100 is 7 although the binary 0.07 lies above it, k/n of n is k, and a
    density of 1 keeps everything at every size.
    """
    fraction = to_float(fraction)
    if fraction >= 1.0:
        return size
    numerator, denominator = fraction.as_integer_ratio()
    k = -(-numerator * size // denominator)
    return min(size, max(1, k - 1 if (k - 1) / max(1, size) >= fraction else k))


def assign(target: Any, **values: Any) -> None:
    """Set checked parameters on a frozen dataclass, from its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(target, name, value)
