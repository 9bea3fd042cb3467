"""The reason a SuperNode ended, read from its output, since its exit status is always 0 or 1.

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

RULES: Final = (
    ("address already in use", "port-taken", 60.0),
    (r"\[code: 2004\]", "unregistered", 90.0),
    (r"\[code: 2001\]", "key-needed", 0.0),
    ("certificate (has expired|is not yet valid)", "certificate-dates", math.inf),
    ("(?i)hostname mismatch|ip address mismatch|certificate is not valid for", "certificate-name", 0.0),
    ("(?i)certificate[_ ]verify[_ ]failed", "wrong-ca", 0.0),
    ("(?i)wrong[_ ]version[_ ]number|record layer failure", "no-tls", 0.0),
    (r"Exit Code: 302\b", "wrong-key", 0.0),
    (r"Exit Code: 303\b", "key-without-tls", 0.0),
    (r"Exit Code: 60[0-5]\b", "arguments", 0.0),
    (r"Exit Code: 606\b", "versions", 0.0),
    ("does not recognize this SuperNode", "forgotten", math.inf),
)
"""Patterns of what Flower prints, the first that matches counts, with the event and the patience."""

_MESSAGES: Final = {
    "port-taken": "the port is taken; choose another with --port, one per node and machine",
    "unregistered": "the SuperLink does not accept this key: it is not registered, or this node was killed a minute "
    "ago; register it with 'flwr supernode register KEY.pub'",
    "key-needed": "the SuperLink admits registered nodes only: give their private key with --key",
    "certificate-dates": "the SuperLink's certificate is not valid by this clock: set the clock, or renew the "
    "certificate",
    "certificate-name": "the SuperLink's certificate is for another name: use one of its names in --superlink",
    "wrong-ca": "--root-certificates does not verify the SuperLink; give the file of its own CA",
    "no-tls": "the SuperLink speaks no TLS: is the port right? On a private network give --insecure",
    "wrong-key": "--key is no elliptic-curve key; make one with ssh-keygen -t ecdsa -b 384, then register it",
    "key-without-tls": "--key needs TLS: give --root-certificates",
    "arguments": "Flower refused the arguments; see its message above",
    "versions": "the SuperLink runs another version of Flower; install the same on both",
    "forgotten": "the SuperLink does not know this node any more, as when it is restarted without --database; joining "
    "again",
}


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
    for pattern, event, patience in RULES:
        if re.search(pattern, text):
            return Failure(event, _MESSAGES[event], patience)
    if status < 0:
        return Failure("killed", f"the SuperNode was ended by signal {-status}; 9 is often a lack of memory")
    if status > 0:
        last = next((line for line in reversed(lines) if line.strip() and "more information" not in line), "nothing")
        return Failure("failed", f"the SuperNode ended with status {status}; it printed last: {last.strip()}")
    seconds = behind()
    if seconds is None:
        text = "the SuperLink refused this node, and sent no time to compare with: the node is unknown, or this clock "
        return Failure("refused", text + "is wrong")
    if -AHEAD <= seconds <= BEHIND:
        return Failure("forgotten", _MESSAGES["forgotten"])
    side = f"{seconds:.0f} s behind" if seconds > 0 else f"{-seconds:.0f} s ahead of"
    text = f"this clock is {side} the SuperLink's, which refuses 5 s ahead and 305 s behind; let chrony set it"
    return Failure("clock", text)
