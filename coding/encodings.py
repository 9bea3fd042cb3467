"""Encoding matrices over the reals: which device combines which data partitions, and with which coefficients.

For :mod:`fedcomp.coding.datacode`, which says what they are used for. A zero is a partition that need not be sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, nearest

Real = NDArray[np.float64]

CODES: Final[Mapping[str, str]] = {
    "mds": "systematic, dense Gaussian parities: any k devices decode",
    "binary": "systematic, parities of 0/1 coefficients, each nonzero with probability `density`",
    "gaussian": "systematic, Gaussian coefficients on such a support",
    "balanced": "systematic, Gaussian coefficients; every partition in exactly ceil(density r) parities",
    "replication": "systematic, every parity a copy of one partition",
    "general": "no systematic part: Gaussian coefficients at every device, on a support of that density",
}
"""Encoding matrices by name."""


def encoding_matrix(code: str, devices: int, partitions: int, *, density: float = 0.5, seed: int = 0) -> Real:
    """Return G, float64 of shape ``(devices, partitions)``; partition j belongs to device j.

    Parameters
    ----------
    code : str
        One of :data:`CODES`.
    devices, partitions : int
        n and k; the r = n - k devices that own nothing hold parities.
    density : float
        Probability of a nonzero coefficient, 1 for "mds" whatever is given, no meaning for "replication".
    seed : int
        Names the draw; the stream is portable (:mod:`fedcomp.coding.stream`).

    Raises
    ------
    ConfigError
        For an unknown code (Vandermonde matrices among them) or numbers out of range.

    Notes
    -----
    Parities "gaussian", "mds", "balanced" are N(0, 1)/sqrt(k) on their support (derived).

    "balanced" gives each partition to the ceil(density r) parities that hold the fewest so far, ties broken at random.
    With c such copies any c losses can be repaired with probability 1 over the coefficients (derived, by Hall's
    theorem): if f <= c devices are lost, b of them parities, any a' of the f - b lost partitions are together in at
    least c - b >= f - b >= a' parities that are left. No fewer transfers can promise it: a partition must reach c other
    devices to survive c losses.
    """
    if code == "vandermonde":
        raise ConfigError(
            "code='vandermonde' is refused: plain Vandermonde rows have condition numbers of 1e4 at k = 10 and 1e9 at "
            "k = 20 (measured), and under an identity they are not MDS; use 'mds'"
        )
    if code not in CODES:
        raise ConfigError(f"code={code!r} is not an encoding matrix{nearest(code, CODES)}")
    if not 1 <= partitions <= devices:
        raise ConfigError(f"{partitions} partitions over {devices} devices: expected 1 <= partitions <= devices")
    if not 0.0 < density <= 1.0:
        raise ConfigError(f"density={density!r} is not a fraction of the coefficients; expected a number in (0, 1]")
    if code == "general":
        return _general(devices, partitions, density, seed)
    matrix = np.zeros((devices, partitions))
    # An owner stores its own partition as it is, which takes no transfer.
    matrix[:partitions] = np.eye(partitions)
    matrix[partitions:] = _parities(code, devices - partitions, partitions, density, seed)
    return matrix


def _parities(code: str, rows: int, partitions: int, density: float, seed: int) -> Real:
    if code == "replication":
        # Dealt in turn, so that numbers of copies differ by one at most.
        return np.eye(partitions)[np.arange(rows) % partitions]
    if code == "mds":
        support = np.ones((rows, partitions), bool)
    elif code == "balanced":
        support = _balanced(rows, partitions, math.ceil(density * rows), seed)
    else:
        support = _uniform((rows, partitions), "support", code, seed) < density
    if code == "binary":
        return support.astype(np.float64)
    return np.where(support, _normal((rows, partitions), code, seed) / math.sqrt(partitions), 0.0)


def _general(devices: int, partitions: int, density: float, seed: int) -> Real:
    shape = (devices, partitions)
    support = _uniform(shape, "support", "general", seed) < density
    # What a device owns costs no transfer, so it is always in.
    support[:partitions] |= np.eye(partitions, dtype=bool)
    return np.where(support, _normal(shape, "general", seed) / math.sqrt(partitions), 0.0)


def _balanced(rows: int, partitions: int, copies: int, seed: int) -> NDArray[np.bool_]:
    support = np.zeros((rows, partitions), bool)
    load = np.zeros(rows, np.int64)
    ties = _uniform((partitions, rows), "ties", "balanced", seed)
    for partition in range(partitions):
        # lexsort's last key counts first: the parities with the fewest partitions, equals in drawn order.
        chosen = np.lexsort((ties[partition], load))[:copies]
        support[chosen, partition] = True
        load[chosen] += 1
    return support


def _uniform(shape: tuple[int, int], purpose: str, code: str, seed: int) -> Real:
    from fedcomp.coding.stream import SplitMix64, derive

    # Purpose, code and shape are part of the name: the support and the coefficients of a matrix are independent draws.
    stream = SplitMix64(derive("datacode", purpose, code, shape[0], shape[1], seed))
    return stream.uniform(shape[0] * shape[1]).reshape(shape)


def _normal(shape: tuple[int, int], code: str, seed: int) -> Real:
    from fedcomp.coding.stream import SplitMix64, derive

    stream = SplitMix64(derive("datacode", "coefficients", code, shape[0], shape[1], seed))
    return stream.normal(shape[0] * shape[1]).reshape(shape)
