"""What a client of a program still owes, read from its state."""

from __future__ import annotations

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from fedcomp.clients import memory as kept
from fedcomp.flower.payload import FRAME, NODE_RECORD, take_frame
from fedcomp.flower.records import to_arrays
from fedcomp.layout import Layout
from fedcomp.strategies.server import Server


def owed(server: Server, context: Context, address: int, layout: Layout) -> NDArray[np.float64]:
    """Return what a client remembers, with what it sent last where that was not consumed."""
    state = context.state
    if kept.MEMORY not in state:
        return np.zeros(layout.size)
    memory = {name: np.array(array) for name, array in to_arrays(state[kept.MEMORY]).items()}
    held, peer = kept.Held.take(state), server.roster.peer(address)
    if held.sent and (peer.generation, peer.consumed) != (held.generation, held.sent):
        frame = take_frame(state, kept.PENDING) or state[kept.REPLY + NODE_RECORD].get(FRAME + "values")
        # Else it was put back already.
        memory = memory if frame is None else server.system.rollback(memory, frame, layout)
    residual = server.system.residual(memory, layout)
    assert residual is not None
    return residual.astype(np.float64)
