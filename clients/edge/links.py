"""Sending a reply over a slow uplink: chunk sizes that arrive before Flower's timeouts.

Flower posts a reply in pieces of 5 MiB, two at once, each within 30 s; a piece that is late is sent again from the
start. At 64 kbit/s a reply of 1.6 MB was lost after 3.15 MB had been sent; in pieces of 32 KiB, one at a time, it came,
with 1.8 MB sent (measured).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from fedcomp.errors import ConfigError

PIECE_BYTES: Final = "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"
PIECES_AT_ONCE: Final = "FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PUSHES"
"""Environment variables that Flower reads: the largest piece of an array, and how many are posted at a time."""

MAX_PIECE_BYTES: Final = 5_242_880
SECONDS: Final = 180
"""Flower's own largest piece, and how long it keeps a reply that is still arriving."""

_PIECE_SECONDS: Final = 5.25
_UNITS: Final = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_MIN_RATE: Final = 1000.0


@dataclass(frozen=True)
class Link:
    """What is set for an uplink.

    Attributes
    ----------
    rate : float
        Bits per second.
    piece_bytes : int
        The largest power of two that passes in 5.25 s, at most Flower's own: a link that is at times five times as slow
        as its name still keeps the timeout.
    at_once : int
        One below 1 Mbit/s, where two would only delay each other, else Flower's two.

    Examples
    --------
    >>> Link.of("200kbit")
    Link(rate=200000.0, piece_bytes=131072, at_once=1)
    """

    rate: float
    piece_bytes: int
    at_once: int

    @classmethod
    def of(cls, text: str) -> Link:
        """Return what suits ``text``: a number and one of bit, kbit, mbit, gbit.

        Raises
        ------
        ConfigError
            When it is no rate, or one below 1 kbit/s.
        """
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text.strip().lower())
        rate = float(found[1]) * _UNITS[found[2]] if found else 0.0
        if rate < _MIN_RATE:
            raise ConfigError(f"--link is {text!r}; expected the rate of the uplink, at least 1kbit: 64kbit, 2.5mbit")
        fits = int(rate / 8 * _PIECE_SECONDS)
        return cls(rate, min(1 << (fits.bit_length() - 1), MAX_PIECE_BYTES), 1 if rate < 1e6 else 2)

    @property
    def environment(self) -> dict[str, str]:
        """The variables for whoever sends: the node and the app processes it starts."""
        return {PIECE_BYTES: str(self.piece_bytes), PIECES_AT_ONCE: str(self.at_once)}

    @property
    def reply_bytes(self) -> int:
        """What the uplink carries in 180 s, with nothing sent twice: no longer reply arrives in that time."""
        return int(self.rate / 8 * SECONDS)
