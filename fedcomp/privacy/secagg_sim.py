"""A simulation of secure aggregation: pairwise masks that cancel in the sum. Not a protocol; it protects nobody.

Every pair of clients shares a seed; the one with the lower number adds the mask that it expands to, the other one
subtracts it, modulo M. The sum of all uploads is the sum of all vectors, and any single upload is uniform (Bonawitz et
al., CCS 2017; recalled). Here one process deals the seeds, and hands those of a client that vanished to the server; in
the protocol they come from key agreement and are recovered from secret shares. What really sums over clients in this
project is :mod:`fedcomp.coding.sumcode`; this is here to check what noise and modulus do to a sum, without a network.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.errors import ConfigError
from fedcomp.privacy.entropy import Entropy
from fedcomp.privacy.errors import Unbounded

SIMULATION: Final = "a simulation: one process holds every seed"
"""What a report has to say of sums made here."""

_SEED_BYTES: Final = 32
_LARGEST: Final = 1 << 62


def modulus_for(clients: int, levels: int) -> int:
    """Return the smallest power of two with room for a sum of ``clients`` integers of magnitude ``levels``, signed."""
    # 2 clients levels + 1 different sums, the negative ones included.
    return 1 << (2 * clients * levels).bit_length()


@dataclass(frozen=True)
class MaskedSum:
    """One masked sum, simulated.

    Parameters
    ----------
    clients : int
    size : int
        Integers of one vector.
    modulus : int
        M, at most 2^62; sums come back centred, in [-M/2, M/2).
    least : int
        A sum of fewer uploads is void.
    seeds : mapping of (int, int) to bytes
        Of every pair, the lower number first.

    Examples
    --------
    >>> from fedcomp.privacy.entropy import SystemEntropy
    >>> masked = MaskedSum.deal(clients=3, size=2, modulus=modulus_for(3, levels=10), entropy=SystemEntropy())
    >>> vectors = {0: np.array([1, -2]), 1: np.array([3, 4]), 2: np.array([0, 5])}
    >>> masked.total({client: masked.upload(client, vector) for client, vector in vectors.items()}).tolist()
    [4, 7]
    """

    clients: int
    size: int
    modulus: int
    least: int
    seeds: Mapping[tuple[int, int], bytes]

    @classmethod
    def deal(cls, clients: int, size: int, modulus: int, entropy: Entropy, *, least: int = 2) -> MaskedSum:
        """Deal seeds to all pairs of clients.

        Raises
        ------
        ConfigError
            For numbers that make no sense.
        """
        for name, value, low in (
            ("clients", clients, 2),
            ("size", size, 1),
            ("modulus", modulus, 2),
            ("least", least, 1),
        ):
            params.integer(name, value, low=low)
        if modulus > _LARGEST:
            raise ConfigError(f"modulus={modulus} is not valid: at most 2^62, so that sums of two residues fit 64 bits")
        pairs = [(i, j) for j in range(clients) for i in range(j)]
        return cls(clients, size, modulus, least, {pair: entropy.bytes(_SEED_BYTES) for pair in pairs})

    def upload(self, client: int, integers: NDArray[Any]) -> NDArray[np.int64]:
        """Return what ``client`` sends: its integers plus its masks, (size,), residues in [0, modulus).

        Raises
        ------
        Unbounded
            When it is not a vector of integers of this size.
        """
        if integers.shape != (self.size,) or integers.dtype.kind != "i":
            raise Unbounded(f"a vector is {integers.dtype}{integers.shape}, expected int({self.size},)")
        out = integers.astype(np.int64) % self.modulus
        for other in range(self.clients):
            if other != client:
                # Reduced after each mask: two residues below 2^62 fit into 64 bits, three need not.
                out = (out + self._mask(client, other)) % self.modulus
        return out

    def total(self, uploads: Mapping[int, NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return the sum of the vectors behind ``uploads``, centred.

        Raises
        ------
        Unbounded
            When there are too few of them: the sum is void.
        """
        if len(uploads) < self.least:
            raise Unbounded(f"{len(uploads)} uploads, at least {self.least} are needed: the sum is void")
        total = np.zeros(self.size, np.int64)
        for client in sorted(uploads):
            total = (total + uploads[client]) % self.modulus
        # Masks between survivors cancel; those with the vanished are taken off.
        for client in uploads:
            for other in self._vanished(uploads):
                total = (total - self._mask(client, other)) % self.modulus
        half = self.modulus // 2
        return np.where(total >= self.modulus - half, total - self.modulus, total)

    def _vanished(self, present: Collection[int]) -> list[int]:
        return [client for client in range(self.clients) if client not in present]

    def _mask(self, client: int, other: int) -> NDArray[np.int64]:
        """Return the residues that ``client`` adds for the pair."""
        mask = _expand(self.seeds[min(client, other), max(client, other)], self.size, self.modulus)
        return mask if client < other else -mask % self.modulus


def _expand(seed: bytes, size: int, modulus: int) -> NDArray[np.int64]:
    """Return ``size`` uniform residues from ChaCha20 under ``seed``, without the bias of a plain remainder."""
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    # Words from the last, incomplete multiple of the modulus are redrawn: they would favour small residues.
    limit = (1 << 64) // modulus * modulus
    out = np.empty(0, np.int64)
    while out.size < size:
        words = np.frombuffer(stream.update(bytes(8 * (size - out.size + 8))), "<u8")
        kept = words if limit == 1 << 64 else words[words < np.uint64(limit)]
        out = np.concatenate([out, (kept % np.uint64(modulus)).astype(np.int64)])
    return out[:size]
