"""Seal keys signed by a node's own key, so that no third party can substitute one.

Boxes (:mod:`fedcomp.coding.sealing`) are made for X25519 keys that a server hands round. Where nodes have a list of
each other's public keys (:mod:`fedcomp.coding.peertls`), a node signs its X25519 key with the key by which the others
know it, and they seal for nothing else. The signature is ECDSA (SHA-256, SHA-384 or SHA-512, as long as the curve) of

====== ===== ==================================
offset bytes field
====== ===== ==================================
0      25    ``fedcomp.coding.seal-key/1``
25     8     run; zeros where it has no name yet
33     4     partition, little endian
37     32    the X25519 public key
====== ===== ==================================

in DER. The label keeps it apart from all else that key signs: TLS handshakes and signing in to a SuperLink.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fedcomp.coding.errors import SealError

if TYPE_CHECKING:
    from fedcomp.coding.peertls import PeerKeys, PeerTls

MOST_SIGNATURE: Final = 144
"""Bytes of a signature: one of P-521, the longest curve of a list, has 139 at most."""

NO_RUN: Final = bytes(8)
"""The run of a key that is signed before its run has a name."""

_LABEL: Final = b"fedcomp.coding.seal-key/1"


def statement(run: bytes, partition: int, public: bytes) -> bytes:
    """Return what is signed."""
    return _LABEL + run + partition.to_bytes(4, "little") + public


def sign(tls: PeerTls, run: bytes, public: bytes) -> bytes:
    """Return the signature by which a node says that a seal key is its own.

    Parameters
    ----------
    tls : PeerTls
        The node's key and its partition.
    run : bytes
        8 bytes.
    public : bytes
        32 bytes.
    """
    return tls.sign(statement(run, tls.partition, public))


def require_signed(keys: PeerKeys, partition: int | None, run: bytes, public: bytes, signature: bytes) -> None:
    """Refuse a seal key that is not the one of its partition's node; raise nothing where it is.

    Raises
    ------
    SealError
        When the partition is not known or not listed, or the signature is missing or not that of its key over this very
        key in this run.
    """
    if partition is None or not signature:
        whose = "" if partition is None else f" of partition {partition}"
        raise SealError(
            f"the seal key{whose} is not signed, so nothing is sealed for it; start its node with --key and --peer-keys"
        )
    if partition not in keys.by_partition:
        raise SealError(
            f"partition {partition} is not in this node's list of peer keys, so nothing is sealed for it; add its line"
        )
    if not keys.signed(partition, statement(run, partition, public), signature):
        raise SealError(
            f"the seal key of partition {partition} is not signed by the key listed for it, in this run, so nothing is "
            "sealed for it; compare the lists of both nodes, and do not trust this server if they agree"
        )
