"""The choice of a tier: by the size of a vector, compiled or numpy; and by where it is, on the host or on a device."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any, Final, Literal

from fedcomp.device import DeviceArray
from fedcomp.errors import ConfigError
from fedcomp.kernels import portable
from fedcomp.kernels.interface import Ops

Tier = Literal["auto", "numba", "numpy"]

SMALL: Final = 20_000
"""Below this many elements ``tier="auto"`` takes numpy, which is fast enough there: a process that only ever sees small
vectors never imports numba, which costs it a second and more."""


LOADED: Final = 4096
"""The same for a process that has loaded the compiled kernels already."""


@functools.cache
def has_numba() -> bool:
    """Whether numba is installed (found, not imported), and its compiler is on: without it the kernels cannot run."""
    off = os.environ.get("NUMBA_DISABLE_JIT", "").strip() not in ("", "0")
    return importlib.util.find_spec("numba") is not None and not off


def preferred(size: int) -> Tier:
    """Return the tier that "auto" takes for ``size`` elements, for all parts of one vector of that size."""
    # Where the compiled kernels are loaded anyway they are the faster ones from some thousand elements on.
    least = LOADED if "fedcomp.kernels.compiled" in sys.modules else SMALL
    # Compiled code keeps candidate positions in 32 bits.
    return "numba" if least <= size < 2**32 and has_numba() else "numpy"


def ops(tier: Tier, size: int) -> Ops:
    """Return the implementation of ``tier`` for vectors of ``size`` elements.

    Raises
    ------
    ConfigError
        When the tier is unknown, or numba is asked for by name and is missing or cannot index the vector.
    """
    if tier not in ("auto", "numba", "numpy"):
        raise ConfigError(f"unknown kernel tier {tier!r}; use 'auto', 'numba' or 'numpy'")
    if tier == "auto":
        tier = preferred(size)
    if tier == "numpy":
        return portable
    if not has_numba():
        raise ConfigError(
            "kernel tier 'numba' was asked for but numba is not installed, or its compiler is off (NUMBA_DISABLE_JIT); "
            "use 'auto' or 'numpy'"
        )
    if size >= 2**32:
        raise ConfigError(f"kernel tier 'numba' reaches to 2**32 elements, not {size}; use 'auto' or 'numpy'")
    # Only now: importing it imports numba, which takes a second and more.
    from fedcomp.kernels import compiled

    return compiled


def on_device(vector: Any) -> ModuleType | None:
    """Return the device tier for a vector that is on a device, None for one on the host."""
    return importlib.import_module("fedcomp.kernels.device") if isinstance(vector, DeviceArray) else None


def of(tier: Tier, vector: Any) -> Any:
    """Return the implementation for a vector where it is: of ``tier`` on the host, as :func:`ops`."""
    return on_device(vector) or ops(tier, vector.size)
