"""A deployment whose nodes reach the SuperLink over slow links, each in its own network namespace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedcomp.experiments.engines.superlink import Deployment
from fedcomp.experiments.links import HUB, SlowLinks


class LinkedDeployment(Deployment):
    """A SuperLink and nodes at the two ends of :class:`~fedcomp.experiments.links.SlowLinks`.

    Leave it before the links: a namespace outlives its removal as long as a process is in it.

    Parameters
    ----------
    links : SlowLinks
        Entered already; one node per link.
    preload, **options
        Those of :class:`~fedcomp.experiments.engines.superlink.Deployment`.
    """

    def __init__(self, links: SlowLinks, *, preload: Sequence[str] | None = (), **options: Any) -> None:
        super().__init__(links.nodes, preload=preload, **options)
        self.links = links
        self.host = links.address

    def guarded(self, command: list[str]) -> list[str]:
        """Return ``command`` itself: its clients are in other network namespaces, which no other user can enter."""
        return command

    def placed(self, name: str, command: list[str]) -> list[str]:
        """Return ``command`` as it is run in the namespace of a node; all else is at the server's end."""
        node = name.removeprefix("node-")
        return [*self.links.prefix(HUB if node == name else node), *command]
