"""What all systems with links between clients share on the server: simulated ones, and the books of all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from flwr.serverapp import Grid

from fedcomp.coding.transport import HEADER_BYTES, Spool, SpoolRoot
from fedcomp.errors import ConfigError

REST_ROUNDS: Final = 8
"""Rounds for which a link that failed is not tried again."""


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

    def spool(self, partition: int) -> Spool:
        """Return the folder of a node.

        Raises
        ------
        ConfigError
            Where there are no simulated links.
        """
        if self._spools is None:
            raise ConfigError("parcels of simulated links, in a run that has none")
        return self._spools.spool(partition)

    def address(self, own: str, partition: int) -> str:
        """Return where peers reach a node: at the address of its ``own``, or in its folder."""
        return own if own or self._spools is None else self._spools.address(partition)


def record_peer(grid: Grid, server_round: int, node: int, message_type: str, sizes: Iterable[int]) -> int:
    """Let a grid that keeps a ledger count parcels that a node handed to others, by its own word or by that of who
    holds them; return their bytes.

    Parameters
    ----------
    message_type : str
        Of the message in whose answer they were reported.
    sizes : iterable of int
        Bytes of each; 0 stands for a parcel that was not handed over.
    """
    handed = [size for size in sizes if size]
    # The header of each parcel is no payload.
    wire, payload = sum(handed), sum(max(0, size - HEADER_BYTES) for size in handed)
    record = getattr(grid, "record_peer", None)
    if callable(record) and wire:
        record(server_round, node, message_type, payload, wire)
    return wire
