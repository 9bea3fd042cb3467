"""What a client of a program still owes, read from its state."""

from __future__ import annotations

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from fedcomp.clients import memory as kept
from fedcomp.layout import Layout
from fedcomp.strategies.server import Server


def owed(server: Server, context: Context, address: int, layout: Layout) -> NDArray[np.float64]:
    """Return what a client remembers, with what it sent last where that was not consumed."""
    peer = server.roster.peer(address)
    return kept.owed(context.state, server.system, layout, (peer.generation, peer.consumed)).astype(np.float64)
