"""Slow links on this machine: one network namespace per node, joined to the server's by token buckets.

    nodes --- eth0 [bucket: up] ===== port I [bucket: down] --- bridge of the server

All traffic stays in namespaces that are made here and removed again; nothing of the machine's own network is touched.
Linux, root and iproute2 only; :func:`unavailable` says what is missing. Queues are as deep as a modem's: what is sent
too fast waits, and is dropped when two seconds' worth of it do.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from fedcomp import params
from fedcomp.errors import ConfigError, FedcompError

if TYPE_CHECKING:
    from typing import Self

HUB: Final = "hub"
MAX_NODES: Final = 64

FRAME: Final = 1514
"""Bytes of a full Ethernet frame, as the interfaces count it."""

HEADERS: Final = 66
"""Bytes of Ethernet, IP and TCP headers per segment, time stamps included."""

ENOUGH: Final = 3
"""Rounds that show a pace."""

QUEUED_FRAMES: Final = 16
QUEUED_SECONDS: Final = 2.0

_PREFIX: Final = "fedcomp"
_OWNED: Final = re.compile(rf"{_PREFIX}-(\d+)-\d+-\w+")
_PORT: Final = re.compile(r"port(\d+)")
_PATH: Final = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_numbers = itertools.count()


class MadeError(FedcompError, RuntimeError):
    """A namespace, an interface, a token bucket or a small disk could not be made or read."""


COUNTED: Final = ("up_bytes", "up_packets", "down_bytes", "down_packets")
"""What crossed a node's link, from it and to it, as the interface at the server's end counts it: Ethernet headers are
among the bytes."""


class SlowLinks:
    """Links of ``nodes`` nodes to one server, for the duration of a ``with`` block.

    Parameters
    ----------
    nodes : int
    rate : float
        Bits per second that each node sends, and is sent; more than 0.
    down : float, optional
        Bits per second to each node, where that is another rate.

    Raises
    ------
    ConfigError
        When a number is out of range.
    MadeError
        When the links cannot be made; :func:`unavailable` says why beforehand.

    Examples
    --------
    >>> if not unavailable():
    ...     with SlowLinks(2, 200e3) as links:
    ...         before = links.counters()[1]
    ...         subprocess.run([*links.prefix(1), "true"], check=True).returncode
    ... else:
    ...     0
    0
    """

    def __init__(self, nodes: int, rate: float, *, down: float | None = None) -> None:
        params.integer("nodes", nodes, low=1, high=MAX_NODES)
        self.nodes = nodes
        self.up, self.down = float(rate), float(rate if down is None else down)
        for name, value in (("rate", self.up), ("down", self.down)):
            if not 1e3 <= value <= 1e10:
                raise ConfigError(f"{name}={value:g} bits per second is not valid: give 1e3 to 1e10")
        self._base = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._made = contextlib.ExitStack()

    @property
    def address(self) -> str:
        """The server's address, which nodes reach over their links."""
        return "10.77.0.1"

    def name(self, place: int | str) -> str:
        """Return the namespace of a node, or that of :data:`HUB`."""
        return f"{self._base}-{place}"

    def prefix(self, place: int | str) -> list[str]:
        """Return what goes before a command that is to run at a node, or at :data:`HUB`; its process id stays."""
        return [_program("ip"), "netns", "exec", self.name(place)]

    def __enter__(self) -> Self:
        # Python does not call __exit__ when __enter__ fails, and Ctrl-C comes at any time.
        with self._made as made:
            self._make()
            self._made = made.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        # Processes must have left the namespaces before.
        self._made.close()

    def _make(self) -> None:
        sweep()
        hub = self.name(HUB)
        self._namespace(hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "address", "add", f"{self.address}/24", "dev", "bridge")
        self._up(hub, "bridge")
        for node in range(self.nodes):
            name, port = self.name(node), f"port{node}"
            self._namespace(name)
            _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", hub, "link", "set", port, "master", "bridge")
            _ip("-n", name, "address", "add", f"10.77.0.{10 + node}/24", "dev", "eth0")
            for place, device, rate in ((name, "eth0", self.up), (hub, port, self.down)):
                # Frames as a cable has them: the kernel would pass on 64 KB at once, and count one header for it.
                _ip("-n", place, "link", "set", "dev", device, "gso_max_segs", "1")
                bucket(place, device, rate)
                self._up(place, device)

    def _namespace(self, name: str) -> None:
        # Before it is there: an interruption in between must not leave it behind. With it go the interfaces in it.
        self._made.callback(_ip, "netns", "del", name, check=False)
        _ip("netns", "add", name)
        self._up(name, "lo")

    def _up(self, place: str, device: str) -> None:
        # No addresses of IPv6: finding each other would be traffic that nobody asked for.
        _ip("-n", place, "link", "set", "dev", device, "addrgenmode", "none")
        _ip("-n", place, "link", "set", "dev", device, "up")

    def pull(self, node: int) -> None:
        """Take the cable out of ``node``: what is under way is lost, and the node notices as much as a device would."""
        self._set(node, "down")

    def plug(self, node: int) -> None:
        """Put the cable back."""
        self._set(node, "up")

    def _set(self, node: int, state: str) -> None:
        params.integer("node", node, low=0, high=self.nodes - 1)
        _ip("-n", self.name(HUB), "link", "set", "dev", f"port{node}", state)

    def counters(self) -> dict[int, dict[str, int]]:
        """Return what crossed each link so far, by node and :data:`COUNTED`."""
        return counted(self.name(HUB))


def counted(hub: str) -> dict[int, dict[str, int]]:
    """Return what crossed the links of a namespace of the server so far, by node and :data:`COUNTED`."""
    found = {}
    for each in json.loads(_ip("-n", hub, "-json", "-statistics", "link", "show")):
        if (port := _PORT.fullmatch(each["ifname"])) is not None:
            # What the server's end receives is what the node sent.
            ends = {"up": each["stats64"]["rx"], "down": each["stats64"]["tx"]}
            found[int(port[1])] = {f"{way}_{unit}": ends[way][unit] for way in ends for unit in ("bytes", "packets")}
    return found


def bucket(place: str, device: str, rate: float) -> None:
    """Let a device of a namespace send ``rate`` bits per second: 10 ms of them at once, at least one frame."""
    burst = max(FRAME + 86, int(rate / 8 * 0.01))
    queue = max(QUEUED_FRAMES * FRAME, int(rate / 8 * QUEUED_SECONDS))
    shape = ["tbf", "rate", f"{rate:.0f}bit", "burst", str(burst), "limit", str(queue)]
    command(_program("tc"), "-n", place, "qdisc", "replace", "dev", device, "root", *shape)


def unavailable() -> str:
    """Return in one line why links cannot be made here; empty when they can."""
    if not Path("/proc/self/ns/net").exists():
        return "slow links need Linux's network namespaces"
    if os.geteuid() != 0:
        return "slow links need root, for network namespaces"
    for program in ("ip", "tc"):
        if shutil.which(program, path=_PATH) is None:
            return f"slow links need {program!r}: install iproute2"
    try:
        with SlowLinks(1, 1e6):
            return ""
    except MadeError as error:
        return f"slow links cannot be made here: {error}"


def sweep() -> None:
    """Remove the namespaces that a process left behind which was killed."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0] if line.split() else ""
        owner = _OWNED.fullmatch(name)
        if owner is not None and not Path(f"/proc/{owner[1]}").exists():
            _ip("netns", "del", name, check=False)


def _program(name: str) -> str:
    return shutil.which(name, path=_PATH) or name


def _ip(*arguments: str, check: bool = True) -> str:
    return command(_program("ip"), *arguments, check=check)


def command(*words: str, check: bool = True) -> str:
    """Run a command of the system; return what it printed.

    Raises
    ------
    MadeError
        When it cannot be started; with ``check``, when it fails.
    """
    try:
        # In a session of its own: Ctrl-C in a terminal must not end the command that cleans up.
        done = subprocess.run(
            words, capture_output=True, text=True, stdin=subprocess.DEVNULL, start_new_session=True, check=False
        )
    except OSError as error:
        raise MadeError(f"{words[0]} cannot be started: {error}") from error
    if check and done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise MadeError(f"'{' '.join(words)}' failed with status {done.returncode}: {said}")
    return done.stdout


def pace(line: Sequence[Sequence[float]]) -> float:
    """Return the seconds of a round after the first, which carries the first model and the app; their median."""
    times = [point[0] for point in line]
    later = [b - a for a, b in itertools.pairwise(times)]
    return float(median(later)) if later else (times[0] if times else math.inf)


def projected(line: Sequence[Sequence[float]], needed: float) -> float:
    """Return when ``needed`` rounds are over at the pace of those that are; 0 before there are :data:`ENOUGH`."""
    return line[0][0] + (needed - 1) * pace(line) if len(line) >= ENOUGH else 0.0
