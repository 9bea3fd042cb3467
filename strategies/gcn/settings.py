"""How feature rows travel in a graph run, and what a round asks of a client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from fedcomp.flower.gcn import MOST_STEPS
from fedcomp.graphs.cache import POLICIES
from fedcomp.graphs.rowcodecs import ROW_CODECS
from fedcomp.rules import TIMEOUT, Configured, Int, NotNegative, OneOf, Switch

EVALUATIONS: Final = ("full", "sampled")

CACHE_BYTES: Final = 64 * 1024 * 1024
"""Default limit of a client's cache of the policy "lru"."""


@dataclass(frozen=True)
class RowSettings(Configured):
    """How feature rows travel between owners, and which of them a client keeps.

    Parameters
    ----------
    codec : str
        How rows are written; see :func:`fedcomp.graphs.rowcodecs.get_row_codec`.
    cache : {"none", "lru", "all"}
        Which rows of other owners a client keeps.
    cache_bytes : int
        Limit of "lru", in bytes; no effect on the others.
    dedupe : bool
        Fetch a row once for all clients that want it in the same round. The server then reads frames and takes rows out
        of them.
    noise : float
        Standard deviation of the Gaussian noise that an owner adds to its rows. This is not differential privacy:
        nothing is clipped or accounted for.

    Raises
    ------
    ConfigError
        For an unknown name or a number out of range.

    Examples
    --------
    >>> RowSettings(codec="auto", cache="lru", cache_bytes=1 << 20).limit
    1048576
    """

    codec: Annotated[str, OneOf(*ROW_CODECS)] = "dense-f32"
    cache: Annotated[str, OneOf(*POLICIES)] = "none"
    cache_bytes: Annotated[int, Int(1)] = CACHE_BYTES
    dedupe: Switch = False
    noise: NotNegative = 0.0

    @property
    def limit(self) -> int:
        """Bytes that a client's cache may hold; 0 where there is no limit."""
        return self.cache_bytes if self.cache == "lru" else 0


@dataclass(frozen=True)
class RoundSettings(Configured):
    """What a round asks of a client.

    Parameters
    ----------
    local_steps : int
        SGD steps. With one step, and updates weighted by batch sizes, training is synchronous data-parallel SGD on the
        union of the batches; with more it is local SGD.
    batch_size : int
        Training nodes of a step; 0 takes all.
    evaluate : {"full", "sampled"}
        Whether clients evaluate with all neighbours, or with the sampler of training.
    timeout : float, optional
        Seconds to wait for the replies of each exchange; default: the driver's timeout alone.

    Raises
    ------
    ConfigError
        For an unknown name or a number out of range.

    Examples
    --------
    >>> RoundSettings(local_steps=4).method
    'local SGD, 4 steps a round'
    """

    local_steps: Annotated[int, Int(1, MOST_STEPS)] = 1
    batch_size: Annotated[int, Int()] = 128
    evaluate: Annotated[str, OneOf(*EVALUATIONS)] = "full"
    timeout: Annotated[float | None, TIMEOUT] = None

    @property
    def method(self) -> str:
        """What training is equivalent to."""
        if self.local_steps == 1:
            return "synchronous data-parallel SGD"
        return f"local SGD, {self.local_steps} steps a round"
