"""Task options: a name, a default, and one rule for Python values and for text.

Run configurations carry only numbers, booleans and text, so ``hidden=(256, 256)`` and ``hidden="256,256"``
mean the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fedcomp.errors import ConfigError, nearest
from fedcomp.params import shown
from fedcomp.rules import Int, Many, Rule, checked


def plain(option: str, value: Any) -> str:
    """Return ``str(value)``, or raise ConfigError where the value has too many digits for it."""
    try:
        return str(value)
    except ValueError:
        raise ConfigError(f"{option} is {shown(value)}; expected a value that can be written down") from None


@dataclass(frozen=True, slots=True)
class TaskOption:
    """One option of a task: its default, its rule and a line of help."""

    default: Any
    rule: Rule
    help: str


def resolve(task: str, table: Mapping[str, TaskOption], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of ``task`` with ``given`` values in canonical form and defaults for the rest.

    Raises
    ------
    ConfigError
        For an unknown name (the message gives the nearest) or a value that breaks its rule.
    """
    for name in given:
        if name not in table:
            raise ConfigError(f"task {task!r} has no option {name!r}{nearest(name, table)}")
    return {
        name: checked(name, given.get(name, option.default), option.rule, text=True) for name, option in table.items()
    }


class _Widths(Many):
    def take(self, value: Any) -> tuple[int, ...]:
        # What one width is in a run configuration.
        return super().take([value] if isinstance(value, int) else value)


WIDTHS: Final = _Widths(Int(1), 1024)
"""Widths of hidden layers: a number, a sequence, or text such as ``"256,256"`` (empty: no hidden layer)."""
