"""Why a SuperNode ended, read from what Flower printed: its exit status is 0 or 1 for everything.

Flower ends with status 0, and gives no reason, when the SuperLink answers 401: it does not know the node, or the node's
clock is 5 s ahead of its own, or 305 s behind. A node that was killed stays activated for up to 60 s; until then the
SuperLink refuses it as it refuses an unknown one (measured).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Failure:
    """One way to end.

    Attributes
    ----------
    event : str
        A word for logs and heartbeats.
    message : str
        What happened, and what to do.
    patience : float
        Seconds for which it may repeat itself before it counts as a wrong configuration: 0 at once, infinity never.
    """

    event: str
    message: str
    patience: float = math.inf


AHEAD, BEHIND = 4.0, 304.0
"""How far a node's clock may be ahead of the SuperLink's and behind it, in seconds: Flower's limits of 5 and 305, less
what the answer of a server, in whole seconds, leaves open."""

RULES: Final[tuple[tuple[str, Failure], ...]] = (
    (
        r"address already in use",
        Failure("port-taken", "the port is taken; choose another with --port, one per node and machine", 60.0),
    ),
    (
        r"\[code: 2004\]",
        Failure(
            "unregistered",
            "the SuperLink does not accept this key: it is not registered, or this node was killed a minute ago; "
            "register it with 'flwr supernode register KEY.pub'",
            90.0,
        ),
    ),
    (
        r"\[code: 2001\]",
        Failure("key-needed", "the SuperLink admits registered nodes only: give their private key with --key", 0.0),
    ),
    (
        r"certificate (has expired|is not yet valid)",
        Failure(
            "certificate-dates",
            "the SuperLink's certificate is not valid by this clock: set the clock, or renew the certificate",
        ),
    ),
    (
        r"(?i)hostname mismatch|ip address mismatch|certificate is not valid for",
        Failure(
            "certificate-name",
            "the SuperLink's certificate is for another name: use one of its names in --superlink",
            0.0,
        ),
    ),
    (
        r"(?i)certificate[_ ]verify[_ ]failed",
        Failure("wrong-ca", "--root-certificates does not verify the SuperLink; give the file of its own CA", 0.0),
    ),
    (
        r"(?i)wrong[_ ]version[_ ]number|record layer failure",
        Failure("no-tls", "the SuperLink speaks no TLS: is the port right? On a private network give --insecure", 0.0),
    ),
    (
        r"Exit Code: 302\b",
        Failure(
            "wrong-key",
            "--key is no elliptic-curve key; make one with ssh-keygen -t ecdsa -b 384, then register it",
            0.0,
        ),
    ),
    (r"Exit Code: 303\b", Failure("key-without-tls", "--key needs TLS: give --root-certificates", 0.0)),
    (r"Exit Code: 60[0-5]\b", Failure("arguments", "Flower refused the arguments; see its message above", 0.0)),
    (
        r"Exit Code: 606\b",
        Failure("versions", "the SuperLink runs another version of Flower; install the same on both", 0.0),
    ),
    (r"does not recognize this SuperNode", Failure("forgotten", "the SuperLink does not know this node any more")),
)
"""Patterns of what Flower prints, the first that matches counts."""


def classify(status: int, lines: Sequence[str], behind: Callable[[], float | None]) -> Failure:
    """Return why a SuperNode ended that was not asked to.

    Parameters
    ----------
    status : int
        Negative for a signal.
    lines : sequence of str
        The last it printed, without colours.
    behind : callable
        Returns by how many seconds this clock is behind the SuperLink's, or None; called only where it matters.
    """
    text = "\n".join(lines)
    for pattern, failure in RULES:
        if re.search(pattern, text):
            return failure
    if status == 0:
        return _refused(behind())
    if status < 0:
        return Failure("killed", f"the SuperNode was ended by signal {-status}; 9 is often a lack of memory")
    last = next((line for line in reversed(lines) if line.strip() and "more information" not in line), "nothing")
    return Failure("failed", f"the SuperNode ended with status {status}; it printed last: {last.strip()}")


def _refused(behind: float | None) -> Failure:
    if behind is None:
        return Failure(
            "refused",
            "the SuperLink refused this node, and gave no time to compare with: it does not know it, or this clock "
            "is wrong",
        )
    if -AHEAD <= behind <= BEHIND:
        return Failure(
            "forgotten",
            "the SuperLink does not know this node any more, as when it is restarted without --database; joining again",
        )
    side = f"{behind:.0f} s behind" if behind > 0 else f"{-behind:.0f} s ahead of"
    return Failure(
        "clock", f"this clock is {side} the SuperLink's, which refuses 5 s ahead and 305 s behind; let chrony set it"
    )
