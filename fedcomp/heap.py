"""Reuse of memory for large arrays within the process, which avoids repeated allocation from the system."""

from __future__ import annotations

import ctypes
import os
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Numbers of the parameters of glibc's ``mallopt`` (``malloc.h``)."""

ENVIRONMENT: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which users say themselves what glibc does with freed memory."""

KEPT: Final = 1 << 30
"""Bytes at the end of the heap that stay when they are freed, and of which on an array has pages of its own."""


def keep_freed_memory() -> bool:
    """Let this process keep freed memory of up to a GiB for its next arrays; return whether it does.

    glibc fetches every array of more than 32 MB from the system and gives it back when it is freed, so that with models
    of that size each pass over a new array has its pages made and zeroed first: half of the time and more (``python -m
    experiments.bench upkeep``). Between two rounds the process then keeps the most that it took, which is about a tenth
    more than without. A child process that is forked inherits the choice. What the user has set in the environment
    counts; where the C library is another one, nothing is changed.
    """
    if any(name in os.environ for name in ENVIRONMENT) or not is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # Together: as soon as one of them is set glibc no longer adapts the other.
    return bool(mallopt(_MMAP_THRESHOLD, KEPT) and mallopt(_TRIM_THRESHOLD, KEPT))


def is_glibc() -> bool:
    """Whether this process's C library is glibc."""
    if not hasattr(os, "confstr"):
        return False
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (OSError, ValueError):
        # Asked for by a name that another C library does not know.
        return False
