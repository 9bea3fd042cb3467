"""The choice of the kernel implementation. The choice is made once, at first use, from what the CPU is known to have.

Asking LLVM for an instruction that its target lacks aborts the process, without an exception. So nothing here tries:
the features come from LLVM's own look at this machine (which asks the operating system whether wide registers are
saved), and where numba is told to compile for another CPU than this one, no intrinsic is asked for at all.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.kernels import portable, tables
from fedcomp.coding.kernels.rows import Rows
from fedcomp.errors import ConfigError, nearest

Bytes = NDArray[np.uint8]

Product = Callable[[Bytes, "Bytes | Rows", Bytes, bool], None]
"""``product(a, b, out, accumulate)``: write ``a @ b``, or add it to ``out``.

Arguments have been checked: shapes fit, none of the dimensions is zero, rows of ``b`` and ``out`` are contiguous, and
``out`` overlaps neither operand.
"""

NEEDS: Final = {
    "gfni512": ("gfni", "avx512f", "avx512bw"),
    "gfni256": ("gfni", "avx2"),
    "shuffle512": ("avx512f", "avx512bw"),
    "shuffle256": ("avx2",),
    "shuffle128": ("ssse3",),
    "neon": ("neon",),
}
"""CPU features of the vector tiers, by LLVM's names; fastest first."""

TIERS: Final = (*NEEDS, "swar", "numpy", "isal")
"""Every tier, fastest first; ``isal`` is never chosen by itself."""

PATIENCE: Final = 2**28
"""Multiply-adds that ``tier="auto"`` does in numpy before it loads the compiled kernels.

Importing numba and loading a kernel from the disk cache costs a process half a second and more. That many products
take numpy a fraction of it, and processes that handle one message and end are common among clients.
:func:`fedcomp.coding.kernels.warm` ends the patience at once.
"""


class Loaded(NamedTuple):
    """A tier ready to run."""

    name: str
    product: Product
    reduce: Callable[[Bytes, int], int]


def why_not(tier: str) -> str:
    """Return why ``tier`` cannot run here, empty when it can.

    Raises
    ------
    ConfigError
        When there is no such tier.
    """
    if tier not in TIERS:
        raise ConfigError(f"unknown kernel tier {tier!r}{nearest(tier, ('auto', *TIERS))}")
    if tier == "numpy":
        return ""
    if tier == "isal":
        from fedcomp.coding.kernels import isal

        return (
            ""
            if isal.libraries()
            else "ISA-L is not installed: install libisal.so.2 (Debian's libisal2), or pip install pyeclib"
        )
    if reason := _no_compiler():
        return reason
    if tier == "swar":
        return ""
    if reason := _foreign_target():
        return reason
    lacking = [name for name in NEEDS[tier] if name not in cpu_features()]
    return f"this CPU lacks {', '.join(lacking)}" if lacking else ""


@functools.cache
def cpu_features() -> frozenset[str]:
    """Return the features LLVM finds in this machine and numba compiles for; empty when it cannot tell."""
    import llvmlite.binding  # type: ignore[import-untyped]
    from numba import config

    settings: Any = config
    try:
        found = dict(llvmlite.binding.get_host_cpu_features())
    # LLVM cannot tell on every platform; no vector tier is taken then.
    except RuntimeError:
        return frozenset()
    if not settings.ENABLE_AVX:
        # numba then compiles without them, whatever the machine has.
        found = {name: has and not name.startswith("avx") for name, has in found.items()}
    # evex512 says whether vectors of 512 bits can be used; LLVM versions that lack the name are taken to mean yes.
    if not found.get("evex512", True):
        found = {name: has and not name.startswith("avx512") for name, has in found.items()}
    return frozenset(name for name, has in found.items() if has)


def _no_compiler() -> str:
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    from numba import config

    settings: Any = config
    return "numba's compiler is off (NUMBA_DISABLE_JIT)" if settings.DISABLE_JIT else ""


def _foreign_target() -> str:
    from numba import config

    for name in ("CPU_NAME", "CPU_FEATURES"):
        if getattr(config, name) is not None:
            return f"numba compiles for another target than this CPU (NUMBA_{name} is set)"
    return ""


def tiers() -> tuple[str, ...]:
    """Return the tiers that can run here, the fastest first."""
    return tuple(tier for tier in TIERS if not why_not(tier))


@functools.cache
def load(tier: str) -> Loaded:
    """Compile a tier or load it from the disk cache.

    Raises
    ------
    ConfigError
        When it cannot run here.
    """
    if reason := why_not(tier):
        raise ConfigError(f"kernel tier {tier!r} cannot run here: {reason}; use 'auto' or one of {', '.join(tiers())}")
    if tier == "numpy":
        return Loaded(tier, portable.product, portable.reduce)
    if tier == "isal":
        from fedcomp.coding.kernels import isal

        return Loaded(tier, isal.libraries()[0].product, portable.reduce)
    from fedcomp.coding.kernels import swar

    if tier == "swar":
        return Loaded(tier, _swar_product(swar), _reduce(swar))
    from fedcomp.coding.kernels import vectors

    return Loaded(tier, _vector_product(vectors, tier), _reduce(swar))


_NOWHERE: Final = np.empty(0, np.intp)
_NOTHING: Final = np.empty((0, 0), np.uint8)


def _sources(b: Bytes | Rows) -> tuple[Bytes, NDArray[np.intp]]:
    """Return a matrix and the addresses of rows, one of the two empty: how kernels take their sources."""
    return (_NOTHING, b.places()) if isinstance(b, Rows) else (b, _NOWHERE)


def _swar_product(swar: Any) -> Product:
    # All kernels have one signature; this one reads no words.
    words = np.zeros(1, np.uint64)

    def product(a: Bytes, b: Bytes | Rows, out: Bytes, accumulate: bool) -> None:
        swar.product(a, *_sources(b), out, words, np.empty(swar.scratch_bytes(*a.shape), np.uint8), accumulate)

    return product


def _vector_product(vectors: Any, tier: str) -> Product:
    shape = vectors.SHAPES[tier]
    compiled, words, scratch_bytes = vectors.make(shape), vectors.words_of(shape), vectors.scratch_bytes

    def product(a: Bytes, b: Bytes | Rows, out: Bytes, accumulate: bool) -> None:
        n, k = a.shape
        compiled(a, *_sources(b), out, words, np.empty(scratch_bytes(shape, n, k), np.uint8), accumulate)

    return product


def _reduce(swar: Any) -> Callable[[Bytes, int], int]:
    def reduce(matrix: Bytes, columns: int) -> int:
        n, width = matrix.shape
        # The kernel works on whole lines, and the caller's rows may end anywhere.
        padded = np.zeros((n, -(-width // swar.LINE) * swar.LINE), np.uint8)
        padded[:, :width] = matrix
        scratch = np.empty(swar.reduce_scratch_bytes(*padded.shape), np.uint8)
        rank = swar.reduce(padded, columns, tables.products(), tables.reciprocals(), scratch)
        matrix[:] = padded[:, :width]
        return int(rank)

    return reduce


@functools.cache
def best() -> Loaded:
    """Return the fastest tier that can run here and computes what the field's table says.

    A tier that does not is passed over with a warning: its products would be wrong without any other sign.
    """
    for tier in TIERS:
        # ISA-L is not even asked for: that would load a library nobody wanted into this process.
        if tier == "isal" or why_not(tier):
            continue
        loaded = load(tier)
        if tier == "numpy" or _agrees(loaded):
            return loaded
        warnings.warn(
            f"kernel tier {tier!r} computes wrong products on this machine and is not used; please report it",
            RuntimeWarning,
            stacklevel=2,
        )
    raise AssertionError("the numpy tier can always run")


def _agrees(loaded: Loaded) -> bool:
    """Whether every product, and a sum of several at every place of a vector, is what it has to be."""
    everything = np.arange(256, dtype=np.uint8)
    single = np.empty((256, 256), np.uint8)
    loaded.product(everything[:, None], everything[None, :], single, False)
    # Seven outputs are a block of four and one of three, five sources an odd number, and 195 columns leave three bytes
    # over in every vector width.
    a, b = tables.products()[1:8, 1:6], tables.products()[11:16, :195]
    many, expected = np.zeros((2, 7, 195), np.uint8)
    loaded.product(a, b, many, True)
    portable.product(a, b, expected, False)
    return bool((single == tables.products()).all() and (many == expected).all())


class AutoTier:
    """``tier="auto"``: numpy until :data:`PATIENCE` is used up, then the best tier there is."""

    def __init__(self) -> None:
        self._work = 0
        self._lock = threading.Lock()
        self._chosen: Loaded | None = None

    def choose(self, work: int) -> Loaded:
        """Return what is to do ``work`` multiply-adds."""
        if self._chosen is not None:
            return self._chosen
        # Without the lock: an update lost between threads only puts off the change by a product.
        self._work += work
        return load("numpy") if self._work < PATIENCE else self.settle()

    def settle(self) -> Loaded:
        """Make the choice now, for the life of the process; return it."""
        with self._lock:
            if self._chosen is None:
                self._chosen = best()
        return self._chosen


auto: Final = AutoTier()
"""The choice of this process."""


def best_tier() -> str:
    """Return the name of the tier ``auto`` settles on; compiles or loads it."""
    return auto.settle().name
