"""Keys of the node configuration, by which ``fedcomp node`` passes settings to the app.

An app reads them from ``context.node_config``, beside Flower's own ``partition-id`` and ``num-partitions``.
"""

from __future__ import annotations

from typing import Final

PEER_ADDRESS: Final = "peer-address"
PEER_STORE: Final = "peer-store"
"""Where other clients reach this one's listener, and the folder it writes to."""

PEER_KEY: Final = "peer-key"
PEER_KEYS: Final = "peer-keys"
"""Files: this node's private key, and the list of the public keys of all nodes. Without them links are plain TCP."""

OWN_BUDGET: Final = "privacy-budget"
LEDGER_FILE: Final = "privacy-ledger"
"""An epsilon that this node's trainings never cross, whatever the server plans (it then refuses noise from a seed, and
everything that is not trained with noise); and the file that holds the node's ledger, instead of the node's state."""

OWN_DELTA: Final = "privacy-delta"
"""The delta at which that epsilon is meant, whatever the server plans; 1e-5 where it is not given."""

STATE_FOLDER: Final = "state-dir"
"""An absolute path: the folder in which clients keep what must survive a restart of the node."""

DATA_PATH: Final = "data-path"
"""An absolute path: where the app finds the node's data."""

UPLINK: Final = "uplink"
"""What the node's link carries upwards, such as "1mbit": :class:`fedcomp.codecs.Auto` sends less over a slow one."""
