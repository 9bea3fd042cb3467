"""Matrices whose rows lie anywhere in memory: received packets are multiplied in place, without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError

Bytes = NDArray[np.uint8]


class Rows:
    """A matrix of shape ``(k, s)`` in ``k`` separate arrays, as :func:`fedcomp.coding.kernels.matmul` reads it.

    The arrays are kept alive as long as this object. Nobody may write to them while a product is computed.

    Parameters
    ----------
    arrays : sequence of uint8 arrays, each with ``s`` elements
        C-contiguous, of any shape; row j of the matrix is array j, flattened. At least one.

    Examples
    --------
    >>> import numpy as np
    >>> from fedcomp.coding.kernels import matmul
    >>> first, second = np.full((1, 3), 6, np.uint8), np.full((1, 3), 3, np.uint8)
    >>> matmul(np.array([[1, 1]], np.uint8), Rows([first, second]))
    array([[5, 5, 5]], dtype=uint8)
    """

    __slots__ = ("arrays", "shape")

    def __init__(self, arrays: Sequence[Bytes]) -> None:
        if not arrays:
            raise ConfigError("a matrix in separate rows has at least one; pass an array of shape (0, s)")
        self.arrays = arrays
        self.shape = (len(arrays), arrays[0].size)

    def __iter__(self) -> Iterator[Bytes]:
        return iter(self.arrays)

    def places(self) -> NDArray[np.intp]:
        """Return the address of every row.

        Raises
        ------
        ConfigError
            When an array is not contiguous uint8, or its size differs: a kernel would read memory that is not its own.
        """
        # Imported here: it brings numba with it, and the numpy tier needs no addresses.
        from fedcomp.coding.kernels.lanes import find_places

        # What is read of them is laid out as an array's.
        if set(map(type, self.arrays)) != {np.ndarray}:
            raise ConfigError("rows are plain numpy arrays of uint8")
        found = np.empty(len(self.arrays), np.intp)
        wrong = find_places(found, np.fromiter(map(id, self.arrays), np.intp, len(self.arrays)), self.shape[1])
        if wrong >= 0:
            raise ConfigError(
                f"row {wrong} has shape {self.arrays[wrong].shape} and strides {self.arrays[wrong].strides}; rows are "
                f"contiguous and have {self.shape[1]} bytes here"
            )
        return found
