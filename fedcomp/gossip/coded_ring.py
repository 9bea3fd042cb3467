"""Ring all-reduce of float vectors that are compressed on every hop.

In the reduce-scatter a worker expands what it receives, adds in float32 and compresses the sum again, p - 1 times for
every part, so that errors grow with the ring; the all-gather passes the finished part's bytes on as they are, and all
workers hold the same values. Both are how the collective of Pipe-SGD has to be made (arXiv:1811.03619, abstract; the
consequences are derived). The paper names two light codes (recalled): the upper half of a float32, and 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcomp import wire
from fedcomp.errors import LayoutError
from fedcomp.layout import Vector
from fedcomp.wire import Frame, Tensor, Values

__all__ = ["CodedSum", "coded_ring", "eight_bits", "upper_half"]

Code = Callable[[Vector], Values]
"""How values travel; what arrives is what the wire's class decodes."""


def upper_half(values: Vector) -> Values:
    """Return values without the lower 16 bits of their patterns: towards zero, by less than 2^-7 of each."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return wire.Bf16(bits.view(np.float32))


def eight_bits(values: Vector) -> Values:
    """Return values rounded to the nearest of 255 levels of the largest magnitude among them."""
    return wire.QsgdLevels.nearest(values, 127, max(1, values.size))


@dataclass(frozen=True, slots=True)
class CodedSum:
    """What every worker holds after a compressed ring all-reduce.

    Attributes
    ----------
    sums : tuple of float32 arrays, shape (n,)
        One for each worker; all are equal, bit for bit.
    frames : tuple of tuple of bytes
        The finished parts as each worker received, or made, them: the same bytes everywhere.
    sent : tuple of int
        Bytes that each worker sent.
    """

    sums: tuple[NDArray[np.float32], ...]
    frames: tuple[tuple[Frame, ...], ...]
    sent: tuple[int, ...]


def coded_ring(vectors: Sequence[Vector], code: Code) -> CodedSum:
    """Add the workers' vectors around a ring whose messages are compressed.

    Parameters
    ----------
    vectors : sequence of float32 arrays, shape (n,)
        One for each worker.
    code : callable
        Such as :func:`upper_half` and :func:`eight_bits`.

    Raises
    ------
    LayoutError
        When there are no vectors, or their lengths differ.

    Examples
    --------
    >>> found = coded_ring([np.float32([1, 2, 4]), np.float32([3, 2, 4])], upper_half)
    >>> found.sums[0], found.sums[1].tobytes() == found.sums[0].tobytes()
    (array([4., 4., 8.], dtype=float32), True)
    """
    workers = len(vectors)
    if not workers or len({vector.shape for vector in vectors}) != 1 or vectors[0].ndim != 1:
        raise LayoutError("a ring adds one flat vector of the same length for each of its workers")
    held = [np.array_split(np.array(vector, np.float32), workers) for vector in vectors]
    sent = [0] * workers
    finished: list[list[Frame]] = [[b""] * workers for _ in range(workers)]
    for step in range(workers - 1):
        # All send before any receives: what goes on is the sum up to the last step.
        messages = [_frame(held[w][(w - step) % workers], code) for w in range(workers)]
        for w, frame in enumerate(messages):
            sent[w] += len(frame)
            held[(w + 1) % workers][(w - step) % workers] += _values(frame)
    for w in range(workers):
        # The owner, too, takes what its bytes say: its own sum is not what the others will have.
        finished[w][(w + 1) % workers] = _frame(held[w][(w + 1) % workers], code)
    for step in range(workers - 1):
        passed = [finished[w][(w + 1 - step) % workers] for w in range(workers)]
        for w, frame in enumerate(passed):
            sent[w] += len(frame)
            finished[(w + 1) % workers][(w + 1 - step) % workers] = frame
    sums = tuple(np.concatenate([_values(frame) for frame in frames]) for frames in finished)
    return CodedSum(sums, tuple(map(tuple, finished)), tuple(sent))


def _frame(values: Vector, code: Code) -> Frame:
    return wire.encode([Tensor(code(values), values.shape)])


def _values(frame: Frame) -> Vector:
    (tensor,) = wire.decode(frame).tensors
    return tensor.values.decoded()
