"""A supervised edge node: ``fedcomp node --superlink HOST:PORT --partition I --of N``, or ``python -m``."""

from __future__ import annotations

from fedcomp.clients.edge.node import main, prepare, program
from fedcomp.clients.edge.node_config import DATA_PATH, LEDGER_FILE, OWN_BUDGET, PEER_ADDRESS, PEER_STORE, STATE_FOLDER

__all__ = [
    "DATA_PATH",
    "LEDGER_FILE",
    "OWN_BUDGET",
    "PEER_ADDRESS",
    "PEER_STORE",
    "STATE_FOLDER",
    "main",
    "prepare",
    "program",
]
