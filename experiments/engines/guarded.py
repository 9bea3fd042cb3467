"""A deployment as in the field: ``fedcomp link`` with TLS and keys, and ``fedcomp node`` at the ends of links.

The SuperLink has a database and the server app a process of its own, so that each of them can be killed alone. What
``fedcomp link`` supervises is started again by it; nodes have keys, and so keep their ids when they are restarted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from fedcomp.errors import ConfigError
from fedcomp.experiments import clocks
from fedcomp.experiments.disks import SmallDisk
from fedcomp.experiments.engines.linked import LinkedDeployment
from fedcomp.experiments.engines.processes import processes_with
from fedcomp.experiments.engines.superlink import kill_all
from fedcomp.experiments.links import SlowLinks
from fedcomp.experiments.security.certificates import Folder, create
from fedcomp.experiments.security.link import CONNECTION

READY_SECONDS: Final = 180.0


class GuardedDeployment(LinkedDeployment):
    """A ``fedcomp link`` and a ``fedcomp node`` per link, each with a key.

    Parameters
    ----------
    links : SlowLinks
        Entered already; one node per link.
    disk : int, optional
        Bytes of the disk below every state folder; None is that of the machine. Needs ``states``.
    **options
        Those of :class:`~fedcomp.experiments.engines.linked.LinkedDeployment`.
    """

    SERVER_PORTS: ClassVar[int] = 2
    connection: ClassVar[str] = CONNECTION

    def __init__(self, links: SlowLinks, *, disk: int | None = None, **options: Any) -> None:
        super().__init__(links, **options)
        if disk is not None and self.states is None:
            raise ConfigError("a disk of its own is for a state folder; give states=")
        self._bytes = disk
        self.disks: list[SmallDisk] = []

    def home(self, name: str) -> Path:
        """Return the Flower home of the process called ``name``; the command line's is that of the link's operator."""
        return self.keys.home(name) if name == "cli" else super().home(name)

    def trust(self, node: int) -> list[str]:
        """Return the arguments of a node that say whom it trusts, and as whom it comes."""
        return ["--root-certificates", str(self.keys.ca), "--key", str(self.keys.nodes / f"node-{node}")]

    def _start(self) -> None:
        self.keys = Folder(self.folder / "keys")
        if self._bytes is not None and self.states is not None:
            for node in range(self.nodes):
                disk = SmallDisk(self.states / str(node), self._bytes)
                self.disks.append(self._beside.enter_context(disk))
        super()._start()

    def _start_server(self, ports: Sequence[int]) -> None:
        create(self.keys.path, [self.host], self.nodes)
        command = [sys.executable, "-m", "fedcomp.experiments.security.link", str(self.keys.path)]
        command += ["--listen", f"{self.host}:{ports[0]}", "--port", str(ports[1])]
        link = self._launch("fedcomp link", "link", command)
        # Its port is open before the keys of the nodes are registered.
        link.wait_until(lambda: "ready:" in link.tail(10**6), "was not ready", READY_SECONDS)

    def set_clock(self, node: int, seconds: float) -> None:
        """Put a node's clock forward, or back where ``seconds`` are below 0; 0 sets it right.

        A node that runs when its clock is wrong for the first time has to be started again to notice; later it will
        within a second.
        """
        clocks.set_clock(self.folder / f"node-{node}.clock", seconds)

    def env(self, name: str) -> dict[str, str]:
        """Return the environment of the process called ``name``, with its clock where that was ever wrong."""
        clock = self.folder / f"{name}.clock"
        return {**super().env(name), **(clocks.environment(clock) if clock.exists() else {})}

    @property
    def server_app_home(self) -> Path:
        """The Flower home of what starts server apps: a process of its own."""
        return self.keys.home("superexec")

    def kill_superlink(self) -> list[int]:
        """Kill the SuperLink with SIGKILL; return the ids of its processes. ``fedcomp link`` starts it again."""
        return kill_all(processes_with("FLWR_HOME", str(self.keys.home("superlink"))))

    def left(self) -> list[str]:
        """Return the command lines of all living processes of this deployment."""
        homes = [self.folder / f"node-{node}" for node in range(self.nodes)] + [self.folder / "link"]
        homes += [self.keys.home(name) for name in ("superlink", "superexec", "cli")]
        return [command for home in homes for command in processes_with("FLWR_HOME", str(home)).values()]
