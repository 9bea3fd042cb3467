"""The duration of an all-reduce by the alpha-beta-gamma model, with and without compression.

A message costs ``latency`` seconds (alpha) and ``per_byte`` seconds for every byte (beta); adding costs
``add_per_byte`` seconds for every byte (gamma). The first two formulas are the classic ones. Those for compressed sums
are derived here. All seconds are *simulated*: they compare, they do not predict a network.

A code whose frames can be added ("summable") is encoded once, goes round the ring in compressed form and is decoded
once, so that coding one segment runs beside the transfer of another. A code whose frames cannot be added either is
decoded, added and encoded again at every hop, where the next hop waits for it, or travels unadded to everybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fedcomp.rules import Configured, Int, NotNegative, Real, checked

__all__ = ["Coding", "Network"]


def _cost(name: str, value: Any) -> float:
    cost: float = checked(name, value, Real(least=0.0))
    return cost


@dataclass(frozen=True, slots=True)
class Coding(Configured):
    """What a compressor costs and saves.

    Parameters
    ----------
    ratio : float
        Bytes before over bytes after, at least 1.
    encode_per_byte, decode_per_byte : float
        Seconds for every byte of the uncompressed vector.

    Raises
    ------
    ConfigError
        When the ratio is below 1 or a cost is negative or not finite.
    """

    ratio: Annotated[float, Real(least=1.0)]
    encode_per_byte: NotNegative = 0.0
    decode_per_byte: NotNegative = 0.0


@dataclass(frozen=True, slots=True)
class Network(Configured):
    """Equal workers with equal links.

    Parameters
    ----------
    workers : int
        How many take part, at least 2 (p in the formulas).
    latency : float
        Seconds of a message, whatever its size.
    per_byte, add_per_byte : float
        Seconds to send, and to add, one byte.
    fixed : float
        Seconds that every collective costs besides.

    Examples
    --------
    Four workers, 61 million float32 parameters, 10 Gbit/s:

    >>> network = Network(4, latency=50e-6, per_byte=8e-10, add_per_byte=1e-10)
    >>> round(network.ring(244e6), 3), round(network.central(244e6), 3)
    (0.311, 1.659)
    """

    workers: Annotated[int, Int(2)]
    latency: NotNegative = 0.0
    per_byte: NotNegative = 0.0
    add_per_byte: NotNegative = 0.0
    fixed: NotNegative = 0.0

    def ring(self, nbytes: float) -> float:
        """Return the seconds of a ring all-reduce: reduce-scatter, then all-gather."""
        p, n = self.workers, _cost("nbytes", nbytes)
        share = (p - 1) / p * n
        return 2 * (p - 1) * self.latency + 2 * share * self.per_byte + share * self.add_per_byte + self.fixed

    def central(self, nbytes: float) -> float:
        """Return the seconds of a parameter server with one link that all workers share."""
        p, n = self.workers, _cost("nbytes", nbytes)
        return 2 * self.latency + 2 * p * n * self.per_byte + p * n * self.add_per_byte + self.fixed

    def summable(self, nbytes: float, coding: Coding, segments: int = 1) -> float:
        """Return the seconds of a ring that adds compressed vectors, encoded and decoded once by every worker.

        With several ``segments`` coding runs beside the ring, and only the first segment's share of the shorter of the
        two is not hidden; every segment is a collective with latencies of its own. With one nothing overlaps.
        """
        segments = checked("segments", segments, Int(1))
        n = _cost("nbytes", nbytes)
        code = n * (coding.encode_per_byte + coding.decode_per_byte)
        travel = segments * self.ring(n / coding.ratio / segments)
        return max(code, travel) + min(code, travel) / segments

    def hop_by_hop(self, nbytes: float, coding: Coding) -> float:
        """Return the seconds of a ring whose code cannot be added: every hop decodes, adds and encodes again.

        A worker encodes each of the p parts of the vector once: one it starts, p - 2 partial sums, the finished part
        it owns. It decodes a part at each of the p - 1 hops, and the p - 1 finished parts of the others.
        Additions are of uncompressed values.
        """
        p, n = self.workers, _cost("nbytes", nbytes)
        share = (p - 1) / p * n
        code = n * coding.encode_per_byte + 2 * share * coding.decode_per_byte
        travel = 2 * (p - 1) * self.latency + 2 * share / coding.ratio * self.per_byte
        return travel + share * self.add_per_byte + code + self.fixed

    def gathered(self, nbytes: float, coding: Coding) -> float:
        """Return the seconds of an all-gather of frames that cannot be added: everybody decodes everybody's."""
        p, n = self.workers, _cost("nbytes", nbytes)
        travel = (p - 1) * (self.latency + n / coding.ratio * self.per_byte)
        code = n * coding.encode_per_byte + p * n * coding.decode_per_byte
        return travel + code + (p - 1) * n * self.add_per_byte + self.fixed
