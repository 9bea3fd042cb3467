"""Counter-based randomness: every random decision is a pure function of a :class:`Key`.

No global generator is ever read or written, so that the same seed gives the same bytes on every engine, in every
process and in any order of execution. Only the raw bit stream of Philox is used: numpy guarantees bit generators to
be stable between versions, but not the distributions drawn from them (NEP 19).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Key:
    """Names one random stream.

    Parameters
    ----------
    seed : int
        The run's seed, any Python integer.
    purpose : str
        What the stream is for, e.g. ``"codec"``, ``"batches"``, ``"cohort"``.
    round, partition, layer : int
        Where in the run the stream is used. ``partition`` is the client's partition id, never its node id: node ids
        change from run to run.

    Examples
    --------
    >>> key = Key(7, "codec", round=3)
    >>> key.uniform(2).round(3)
    array([0.421, 0.464])
    >>> key.at(round=4) == Key(7, "codec", round=4)
    True
    """

    seed: int
    purpose: str = ""
    round: int = 0
    partition: int = 0
    layer: int = 0

    def at(
        self,
        *,
        purpose: str | None = None,
        round: int | None = None,
        partition: int | None = None,
        layer: int | None = None,
    ) -> Key:
        """Return the same key with some coordinates replaced."""
        given = {"purpose": purpose, "round": round, "partition": partition, "layer": layer}
        return replace(self, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]

    def digest(self) -> bytes:
        """Return 32 bytes that name this stream (SHA-256 over an unambiguous encoding of the fields)."""
        return self._digest_of(self.partition)

    def _digest_of(self, partition: int) -> bytes:
        # Only the purpose is text, and there are integers on both sides of it: no separator inside of it can imitate
        # another key.
        text = f"{self.seed!s}\x1f{self.purpose}\x1f{self.round!s}\x1f{partition!s}\x1f{self.layer!s}"
        return hashlib.sha256(text.encode()).digest()

    def u64(self) -> int:
        """Return one 64-bit word: the seed that travels when the receiver must redraw what the sender drew."""
        return int.from_bytes(self.digest()[:8], "little")

    def u64_of(self, partitions: Iterable[int]) -> dict[int, int]:
        """Return ``self.at(partition=p).u64()`` for each of ``partitions``; for thousands of them in a third of the
        time."""
        return {p: int.from_bytes(self._digest_of(p)[:8], "little") for p in partitions}

    def bits(self, count: int, start: int = 0) -> NDArray[np.uint64]:
        """Return ``count`` uniform 64-bit words, shape ``(count,)``: those after the first ``start`` of the stream."""
        # Philox takes a key of 128 bits.
        words = np.frombuffer(self.digest()[:16], "<u8")
        stream = np.random.Philox(key=words)
        # A step of its counter is four words.
        stream.advance(start // 4)
        return np.asarray(stream.random_raw(start % 4 + count), np.uint64)[start % 4 :]

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Return ``count`` doubles in [0, 1) with 53 random bits each."""
        return (self.bits(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def generator(self) -> np.random.Generator:
        """Return a numpy Generator on this stream, for uses where stability between numpy versions is not needed
        (shuffling of data in an experiment; never for anything a peer must redraw)."""
        return np.random.Generator(np.random.Philox(key=np.frombuffer(self.digest()[:16], "<u8")))


def signs_of(words: NDArray[np.uint64], count: int) -> NDArray[np.float32]:
    """Return the lowest ``count`` bits of words as signs, -1 for a bit that is set.

    Parameters
    ----------
    words : uint64 array, shape (..., ceil(count / 64))

    Returns
    -------
    float32 array, shape (..., count)

    Examples
    --------
    >>> signs_of(np.uint64([5]), 4)
    array([-1.,  1., -1.,  1.], dtype=float32)
    """
    little = np.ascontiguousarray(words, "<u8").view(np.uint8)
    negative = np.unpackbits(little, axis=-1, count=count, bitorder="little")
    return np.float32(1.0) - np.float32(2.0) * negative.astype(np.float32)
