"""A client's end of the links to its peers, from the node configuration, and the key that its messages are sealed
for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from flwr.app import ConfigRecord, Context

from fedcomp.clients.edge.node_config import PEER_ADDRESS, PEER_KEY, PEER_KEYS, PEER_STORE
from fedcomp.errors import ConfigError

if TYPE_CHECKING:
    from fedcomp.coding.peertls import PeerTls
    from fedcomp.coding.sealing import PeerIdentity
    from fedcomp.coding.transport import PeerTransport, Sender

IDENTITY: Final = "fedcomp.coded.identity"
"""The node's key pair."""


def own_end(context: Context, number: int, spools: str, max_store_bytes: int) -> PeerTransport | None:
    """Return the transport of a node's address, or of its simulated link; None where nobody can reach this node.

    Parameters
    ----------
    number : int
        This client's, which names its simulated link.
    spools : str
        Folder of the simulated links, as the server says; empty when there are none.
    max_store_bytes : int
        Limit of what is kept for this client.

    Raises
    ------
    ConfigError
        When the node's configuration is half of what it needs.
    """
    from fedcomp.coding.transport import SpoolRoot, transport_of

    address, folder = (context.node_config.get(name) for name in (PEER_ADDRESS, PEER_STORE))
    if isinstance(address, str) and isinstance(folder, str):
        return transport_of(address, Path(folder), max_store_bytes=max_store_bytes, tls=link_tls(context))
    if address is not None or folder is not None:
        raise ConfigError(f"this node's configuration needs both {PEER_ADDRESS} and {PEER_STORE}, or neither")
    if not spools:
        return None
    try:
        # Only a folder that was marked on this very machine for simulated links is accepted.
        own = SpoolRoot(Path(spools), max_store_bytes).address(number)
        return transport_of(own, max_store_bytes=max_store_bytes)
    except ConfigError:
        # The folder is on the server's machine, and this is another one.
        return None


def sender_of(context: Context, transport: PeerTransport | None) -> Sender:
    """Return what a node sends with: its own end of its links; who cannot be reached may still reach others."""
    from fedcomp.coding.transport import TcpSender

    return TcpSender(tls=link_tls(context)) if transport is None else transport


def link_tls(context: Context) -> PeerTls | None:
    """Return what this node's links are secured with; None where they are plain TCP.

    Raises
    ------
    ConfigError
        When the node's configuration is half of what it needs, or a file cannot be used: nothing is sent in the clear
        by a node that was told to secure its links.
    """
    from fedcomp.coding.peertls import PeerKeys, PeerTls

    key, keys = (context.node_config.get(name) for name in (PEER_KEY, PEER_KEYS))
    if isinstance(key, str) and isinstance(keys, str):
        return PeerTls(Path(key), PeerKeys.read(Path(keys)))
    if key is not None or keys is not None:
        raise ConfigError(f"this node's configuration needs both {PEER_KEY} and {PEER_KEYS}, or neither")
    return None


def identity_in(context: Context) -> PeerIdentity:
    """Return the key pair in a node's state, a new one where there is none; writes nothing."""
    from fedcomp.coding.sealing import PeerIdentity

    held = context.state.config_records.get(IDENTITY)
    return PeerIdentity.generate() if held is None else PeerIdentity.from_bytes(bytes(held["key"]))  # type: ignore[arg-type]


def identity_record(identity: PeerIdentity) -> ConfigRecord:
    """Return a key pair as :data:`IDENTITY` of a node's state."""
    return ConfigRecord({"key": identity.to_bytes()})
