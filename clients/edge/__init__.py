"""An edge node: ``python -m fedcomp.clients.edge --superlink HOST:PORT --partition I --of N``."""

from __future__ import annotations

from fedcomp.clients.edge.launch import main, prepare, program, start_listener
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
    "start_listener",
]
