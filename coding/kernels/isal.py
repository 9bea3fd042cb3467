"""ISA-L's erasure-code product through ctypes: optional, for comparison and cross-checks only.

Intel's library (BSD-3) takes any matrix over the same field. It is found as the system's ``libisal.so.2`` or as the
copy in PyECLib's wheel, which is newer than what most distributions have. Its tables depend on the machine's
instruction set and on the version: they are made for one call and never kept or sent.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding.kernels.rows import Rows
from fedcomp.errors import ConfigError

Bytes = NDArray[np.uint8]

_LONGEST: Final = 2**31 - 1


@dataclass(frozen=True)
class Library:
    """One loaded copy of ISA-L.

    Attributes
    ----------
    version : str
        From the file's name where it says so: ``"2.30 (libisal.so.2)"``, else where the copy comes from.
    """

    version: str
    _handle: ctypes.CDLL

    def product(self, a: Bytes, b: Bytes | Rows, out: Bytes, accumulate: bool) -> None:
        """Write ``a @ b``, or add it to what is in ``out``; no dimension is zero, rows are contiguous."""
        # The library's product overwrites its outputs, so adding is done here.
        target = np.empty(out.shape, np.uint8) if accumulate else out
        self.prepare(a, b, target)()
        if accumulate:
            np.bitwise_xor(out, target, out=out)

    def prepare(self, a: Bytes, b: Bytes | Rows, out: Bytes) -> Callable[[], None]:
        """Return a call that writes ``a @ b``, tables and addresses made beforehand; arrays must stay in place.

        Raises
        ------
        ConfigError
            When a row is longer than the library's interface, a 32-bit number, can say.
        """
        n, k = a.shape
        size = b.shape[1]
        if size > _LONGEST:
            raise ConfigError(f"ISA-L takes rows of at most {_LONGEST} bytes, not {size}; use another tier")
        coefficients = np.ascontiguousarray(a)
        tables = np.empty(32 * k * n, np.uint8)
        self._handle.ec_init_tables(k, n, coefficients.ctypes.data, tables.ctypes.data)
        sources, targets = _pointers(b), _pointers(out)
        # Addresses are bare numbers to ctypes: the call itself has to keep the arrays alive.
        held = tables, sources, targets, b, out
        numbers = size, k, n, *(array.ctypes.data for array in held[:3])
        encode = self._handle.ec_encode_data

        def call(held: object = held) -> None:
            # Writes every byte of its outputs; only the sister that updates them needs them zeroed.
            encode(*numbers)

        return call


def _pointers(rows: Bytes | Rows) -> NDArray[np.intp]:
    if isinstance(rows, Rows):
        return rows.places()
    start, step = rows.ctypes.data, rows.strides[0]
    return np.array([start + j * step for j in range(rows.shape[0])], np.intp)


@functools.cache
def libraries() -> tuple[Library, ...]:
    """Return the copies of ISA-L that can be loaded, the system's first."""
    found = []
    for path, version in _candidates():
        try:
            handle = ctypes.CDLL(path)
            functions = handle.ec_init_tables, handle.ec_encode_data
        except (OSError, AttributeError):
            # Not installed, or built without erasure codes: the tier is reported as missing.
            continue
        pointer, number = ctypes.c_void_p, ctypes.c_int
        # Without these ctypes would pass an address as a C int, cut to half its bits.
        functions[0].argtypes = [number, number, pointer, pointer]
        functions[1].argtypes = [number, number, number, pointer, pointer, pointer]
        functions[0].restype = functions[1].restype = None
        found.append(Library(version or _version(handle), handle))
    return tuple(found)


def _candidates() -> list[tuple[str, str]]:
    found = [("libisal.so.2", "")]
    spec = importlib.util.find_spec("pyeclib")
    if spec is not None and spec.origin is not None:
        beside = Path(spec.origin).parent.parent / "pyeclib.libs"
        found += [(str(path), f"in PyECLib's wheel ({path.name})") for path in sorted(beside.glob("libisal*.so*"))]
    return found


def _version(handle: ctypes.CDLL) -> str:
    """Return the version in the name of the file that was loaded; the library itself does not tell."""
    loaded = Path("/proc/self/maps")
    if loaded.exists():
        for line in loaded.read_text().splitlines():
            path = Path(line.rpartition(" ")[2])
            if path.name.startswith("libisal.so."):
                parts = path.resolve().name.removeprefix("libisal.so.").split(".")
                return f"{parts[0]}.{parts[-1]} ({handle._name})"
    return handle._name
