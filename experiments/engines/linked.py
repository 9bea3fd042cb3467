"""A deployment whose nodes reach the SuperLink over slow links, each in a network namespace of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fedcomp.experiments.engines.processes import Child, DeploymentError
from fedcomp.experiments.engines.superlink import Deployment
from fedcomp.experiments.links import HUB, SlowLinks

_LISTENING: Final = "0A"
"""State of a listening socket in ``/proc/net/tcp``."""


class LinkedDeployment(Deployment):
    """A SuperLink and SuperNodes at the two ends of :class:`~fedcomp.experiments.links.SlowLinks`.

    Leave it before the links: a namespace outlives its removal as long as a process is in it.

    Parameters
    ----------
    links : SlowLinks
        Entered already; one node per link.
    settings : mapping of str to str
        Environment variables of the SuperLink, its server app, and all nodes.
    stock : bool
        Start Flower's SuperNodes as they are, in place of this project's nodes.
    preload : sequence of str
        Modules that this project's nodes import once, before the first message.
    **options
        Those of :class:`~fedcomp.experiments.engines.superlink.Deployment`.
    """

    def __init__(
        self,
        links: SlowLinks,
        *,
        settings: Mapping[str, str] | None = None,
        stock: bool = False,
        preload: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(links.nodes, **options)
        self.links = links
        self.host = links.address
        self._settings = dict(settings or {})
        self._stock = stock
        self._preload = tuple(preload)

    def node_command(self, arguments: list[str]) -> list[str]:
        """Return the command line of a node with these arguments."""
        if self._stock:
            return super().node_command(arguments)
        return [sys.executable, "-m", "fedcomp.clients.edge", *arguments, "--preload", ",".join(self._preload)]

    def guarded(self, command: list[str]) -> list[str]:
        """Return ``command`` itself: its clients are in other network namespaces, which no other user can enter."""
        return command

    def placed(self, name: str, command: list[str]) -> list[str]:
        """Return ``command`` as it is run in the namespace of a node; all else is at the server's end."""
        node = name.removeprefix("node-")
        return [*self.links.prefix(HUB if node == name else node), *command]

    def env(self, name: str) -> dict[str, str]:
        """Return the environment of the process called ``name``, with the settings of the links."""
        return {**super().env(name), **self._settings}

    def _wait_for(self, port: int, child: Child) -> None:
        # Its sockets are in another namespace, where nothing of ours can connect to them.
        deadline = time.monotonic() + self.START_LIMIT
        while not listens(child.pid, port):
            child.require_running()
            if time.monotonic() > deadline:
                late = f"{child.name} did not open port {port} within {self.START_LIMIT:.0f} s"
                raise DeploymentError(f"{late}; its log says:\n{child.tail()}")
            time.sleep(0.1)


def listens(pid: int, port: int) -> bool:
    """Whether a process of the network namespace of ``pid`` listens on TCP ``port``."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            # Gone meanwhile, or no IPv6 here.
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                return True
    return False
