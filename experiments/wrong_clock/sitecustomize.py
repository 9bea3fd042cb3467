"""Startup code for every Python process that finds it: shifts the wall clock by the seconds in a file.

See fedcomp.experiments.clocks. Monotonic clocks, and what is no Python, stay right.
"""

import datetime
import os
import time
from collections.abc import Callable
from typing import Any

_file = os.environ.get("FEDCOMP_WRONG_CLOCK", "")
_right: Callable[[], float] = time.time
_plain = datetime.datetime


def _wrong() -> float:
    # Read each time, so that the process notices when its clock is set.
    with open(_file, encoding="utf-8") as file:
        return _right() + float(file.read())


class _Kind(type):
    # Others make times of the plain type, which are still times.
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _plain)


class _Datetime(_plain, metaclass=_Kind):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return cls.fromtimestamp(_wrong(), tz)

    @classmethod
    def utcnow(cls) -> Any:
        return cls.fromtimestamp(_wrong(), datetime.UTC).replace(tzinfo=None)


if _file:
    time.time = _wrong
    datetime.datetime = _Datetime  # type: ignore[misc]
