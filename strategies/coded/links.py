"""Simulated links between the nodes of one machine that have no address of their own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fedcomp.coding.transport import SpoolRoot


class SimulatedLinks:
    """One folder per node below a common one, used by nodes that find this machine's mark in it.

    Parameters
    ----------
    transport : {"hub", "peers"}
        Through the server there are none.
    spool : path or None
        The common folder; None makes one that is removed with this object.
    max_store_bytes : int
        What each node's folder may hold.
    """

    def __init__(self, transport: str, spool: str | os.PathLike[str] | None, max_store_bytes: int) -> None:
        self._spools: SpoolRoot | None = None
        if transport == "peers":
            if spool is None:
                # Held as an attribute: the folder is removed when this object is.
                self._folder = tempfile.TemporaryDirectory(prefix="fedcomp-peers-")
                spool = self._folder.name
            self._spools = SpoolRoot.create(Path(spool), max_store_bytes)

    @property
    def root(self) -> str:
        """The common folder; empty where there are no links between peers."""
        return "" if self._spools is None else str(self._spools.root)

    def address(self, own: str, partition: int) -> str:
        """Return where peers reach a node: at the address of its ``own``, or in its folder."""
        return own if own or self._spools is None else self._spools.address(partition)
