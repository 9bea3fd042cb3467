"""Transfer times of a run's bytes on a link, by the alpha-beta model.

A transfer of n bytes over a link with latency alpha (seconds) and bandwidth B (bits per second) takes

    t(n) = alpha + 8 n / B,

so beta = 8 / B is the time per byte. The model knows no congestion, loss or slow start: it turns counted
bytes into seconds that can be compared; it does not predict a network. The figures computed here are
*simulated* and must be labelled so wherever they are shown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fedcomp.errors import ConfigError, nearest
from fedcomp.rules import Configured, NotNegative, Real, checked


@dataclass(frozen=True, slots=True)
class Link(Configured):
    """One node's connection to the server.

    Parameters
    ----------
    up_bits_per_s, down_bits_per_s : float
        Bandwidth from the node and to the node, in bits (not bytes) per second; positive, infinity allowed.
    latency_s : float
        Time one message spends on the way in either direction, independent of its size, in seconds.

    Raises
    ------
    ConfigError
        When one of them is not a number, a bandwidth is not positive, or the latency is negative or not finite.
    """

    up_bits_per_s: Annotated[float, Real(above=0.0, infinite=True)]
    down_bits_per_s: Annotated[float, Real(above=0.0, infinite=True)]
    latency_s: NotNegative = 0.0

    def up_seconds(self, nbytes: float) -> float:
        """Return the seconds ``nbytes`` take from the node to the server: ``latency + 8 nbytes / up``."""
        return self.latency_s + 8.0 * _bytes(nbytes) / self.up_bits_per_s

    def down_seconds(self, nbytes: float) -> float:
        """Return the seconds ``nbytes`` take from the server to the node: ``latency + 8 nbytes / down``."""
        return self.latency_s + 8.0 * _bytes(nbytes) / self.down_bits_per_s


def _bytes(value: Any) -> float:
    nbytes: float = checked("nbytes", value, Real(least=0.0))
    return nbytes


PRESETS: Final[Mapping[str, Link]] = {
    "lan": Link(1e9, 1e9, 0.0005),
    "100mbit": Link(100e6, 100e6, 0.010),
    "10mbit": Link(10e6, 50e6, 0.020),
    "lte": Link(12e6, 30e6, 0.050),
    "1mbit": Link(1e6, 8e6, 0.050),
    "200kbit": Link(200e3, 200e3, 0.100),
}
"""Links by name. They are round figures chosen to be reproducible, not measurements of anybody's network:
"10mbit" is a home line (10 Mbit/s up, 50 down), "lte" a phone in fair reception, "200kbit" a constrained
device."""

_UNITS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:bit|bps)?(?:/s)?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s)", re.IGNORECASE)


def _rate(text: str, whole: str) -> float:
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(
            f"{text!r} in link {whole!r} is not a bandwidth; write e.g. '10mbit', '250kbit' or '1.5g', "
            f"or name a preset{nearest(whole, PRESETS)}"
        )
    return float(match[1]) * _UNITS[match[2].lower()]


def parse_link(text: str) -> Link:
    """Return the link that ``text`` describes.

    Parameters
    ----------
    text : str
        The name of a preset (``"lte"``), or ``UP[/DOWN][@LATENCY]`` with bandwidths in bit/s and an optional
        unit prefix k, M or G (powers of 1000), e.g. ``"5mbit"``, ``"10mbit/50mbit"``,
        ``"200kbit/1mbit@80ms"``. Without DOWN both directions have the same bandwidth; without LATENCY it is
        0.

    Raises
    ------
    ConfigError
        When the text is neither; the message names the nearest preset.
    """
    name = text.strip().lower()
    if name in PRESETS:
        return PRESETS[name]
    rates, at, delay = name.partition("@")
    latency = 0.0
    if at:
        match = _TIME.fullmatch(delay.strip())
        if match is None:
            raise ConfigError(f"{delay!r} in link {text!r} is not a latency; write e.g. '20ms' or '0.5s'")
        latency = float(match[1]) * (1e-3 if match[2].lower() == "ms" else 1.0)
    # "/s" belongs to a rate ("10mbit/s"), any other slash separates up from down.
    up, slash, down = re.sub(r"(bit|b)/s\b", r"\1", rates).partition("/")
    return Link(_rate(up, text), _rate(down if slash else up, text), latency)


def simulated_seconds(
    rows: Iterable[Mapping[str, Any]],
    links: Link | Mapping[int, Link],
    *,
    compute: float = 0.0,
) -> float:
    """Return the communication time of a run, in seconds, from the bytes its ledger counted.

    The messages of one type in one round are an exchange. It lasts as long as its slowest node, and exchanges follow
    one another:

        T = sum over exchanges e of  max over nodes v of  ( down_v(e) + compute + up_v(e) ).

    Parameters
    ----------
    rows : iterable of mapping
        Messages: ``round``, ``node``, ``direction`` ("up" or "down"), ``wire`` (bytes) and ``message_type``. Bytes of
        one exchange add up, and each message is charged one latency.
    links : Link or mapping of node to Link
        One link for everyone, or one per node.
    compute : float
        Seconds every node computes in every exchange; 0 gives pure communication time.

    Raises
    ------
    ConfigError
        When a row's direction is neither "up" nor "down", its bytes are negative or beyond 64 bits, ``compute``
        is negative or not finite, or a node has no link.
    """
    checked("compute", compute, Real(least=0.0))
    # exchange -> node -> [down bytes, down messages, up bytes, up messages]
    traffic: dict[tuple[int, str], dict[int, list[int]]] = defaultdict(dict)
    for row in rows:
        round_, node, direction, wire = int(row["round"]), int(row["node"]), row["direction"], int(row["wire"])
        if direction not in ("up", "down"):
            raise ConfigError(f"ledger row has direction {direction!r}; expected 'up' or 'down'")
        if not 0 <= wire < 2**64:
            # Python refuses to print integers of thousands of digits.
            count = f"{wire} bytes" if abs(wire) < 2**64 else "a byte count beyond 64 bits"
            raise ConfigError(f"ledger row of round {round_}, node {node} has {count}; expected 0 to 2**64 - 1")
        cell = traffic[round_, row["message_type"]].setdefault(node, [0, 0, 0, 0])
        at = 0 if direction == "down" else 2
        cell[at] += wire
        cell[at + 1] += 1
    total = 0.0
    for nodes in traffic.values():
        slowest = 0.0
        for node, (down, n_down, up, n_up) in nodes.items():
            link = links if isinstance(links, Link) else links.get(node)
            if link is None:
                raise ConfigError(
                    f"node {node} appears in the ledger but has no link; give one Link or a link per node"
                )
            # Not up_seconds(): the bytes of several messages are one sum, and each message has its own latency.
            seconds = (
                8.0 * down / link.down_bits_per_s
                + 8.0 * up / link.up_bits_per_s
                + link.latency_s * (n_down + n_up)
                + compute
            )
            slowest = max(slowest, seconds)
        total += slowest
    return total
