"""Mutual TLS 1.3 on peer links: each partition has a pinned key that identifies the other end.

There is no authority. An operator gives every node one list, a line for each partition: its number and the public key
of its node as OpenSSH writes it (``fedcomp certificates`` makes it)::

    0 ecdsa-sha2-nistp384 AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAI... node-0

A node shows a certificate that its own key has signed, made anew in every process. Nothing in it counts but the key:
a sender compares it with the one pinned for the partition it wants to reach, before it sends a byte; a listener lets
OpenSSL refuse, in the handshake, whatever is not signed by a key of the list, and binds the connection to that key's
partition. Certificates need no renewal, and clocks may be wrong.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
import ssl
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fedcomp.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey

MOST_PARTITIONS: Final = 100_000
_ALWAYS: Final = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)
_CURVES: Final = ("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521")


@dataclass(frozen=True)
class PeerKeys:
    """The list of pinned keys.

    Attributes
    ----------
    by_partition : mapping of int to str
        Kind and key of each, as in the file.
    by_key : mapping of str to int
        The other way round.
    """

    by_partition: Mapping[int, str]
    by_key: Mapping[str, int]

    @classmethod
    def read(cls, path: Path) -> PeerKeys:
        """Return the list in a file; empty lines and lines with ``#`` in front are left out.

        Raises
        ------
        ConfigError
            When it cannot be read, or a partition or a key is in it twice: then nobody could be told from another.
        """
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the list of peer keys {path} cannot be read: {error}") from error
        by_partition: dict[int, str] = {}
        by_key: dict[str, int] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            where = f"{path}, line {number}"
            if len(words) < 3 or not words[0].isdecimal() or len(words[0]) > 9 or words[1] not in _CURVES:
                raise ConfigError(
                    f"{where}: expected a partition and an ECDSA public key, as in '3 {_CURVES[1]} AAAA...'"
                )
            partition, key = int(words[0]), f"{words[1]} {words[2]}"
            if partition in by_partition or key in by_key:
                raise ConfigError(f"{where}: partition {partition} or its key is in the list twice; each needs its own")
            by_partition[partition], by_key[key] = key, partition
        if not 0 < len(by_partition) <= MOST_PARTITIONS:
            raise ConfigError(f"{path} lists {len(by_partition)} keys; expected 1 to {MOST_PARTITIONS}")
        return cls(by_partition, by_key)

    def signed(self, partition: int, statement: bytes, signature: bytes) -> bool:
        """Whether the key of a listed partition has signed ``statement``."""
        from cryptography.exceptions import InvalidSignature

        key = _public_key(self.by_partition[partition])
        try:
            key.verify(signature, statement, _ecdsa(key))
        except InvalidSignature:
            return False
        return True


class PeerTls:
    """One node's end of links with pinned keys.

    Parameters
    ----------
    key : Path
        The node's private key on an elliptic curve, without a passphrase: OpenSSH's format or PEM.
    keys : PeerKeys

    Attributes
    ----------
    keys : PeerKeys

    Raises
    ------
    ConfigError
        When the key cannot be read, or is not in the list: no peer would accept it.
    """

    def __init__(self, key: Path, keys: PeerKeys) -> None:
        self.keys = keys
        self._key = _private_key(key)
        text = _text(self._key.public_key())
        if text not in keys.by_key:
            raise ConfigError(f"the key {key} is not in the list of peer keys: no peer would accept it")
        self.partition = keys.by_key[text]
        """Of this node, by its key."""

    @functools.cached_property
    def client(self) -> ssl.SSLContext:
        """What connections to others are made with. The caller asks :meth:`peer` who is there before it sends anything.

        OpenSSL checks that the peer has the key of its certificate, as always in TLS 1.3; with the key itself pinned
        there is no chain to check.
        """
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context

    @functools.cached_property
    def server(self) -> ssl.SSLContext:
        """What a listener accepts connections with: only those of listed keys get through the handshake."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=_anchors(self.keys.by_partition.values()))
        # Every connection shows its key: resumed sessions would spare that.
        context.num_tickets = 0
        return context

    def sign(self, statement: bytes) -> bytes:
        """Return this node's signature, which :meth:`PeerKeys.signed` checks."""
        return self._key.sign(statement, _ecdsa(self._key))

    def peer(self, connection: ssl.SSLSocket | ssl.SSLObject) -> int | None:
        """Return the partition whose key the other end has shown; None for one that is not in the list."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

        shown = connection.getpeercert(binary_form=True)
        if not shown:
            return None
        try:
            key = x509.load_der_x509_certificate(shown).public_key()
        except (ValueError, TypeError):
            return None
        return self.keys.by_key.get(_text(key)) if isinstance(key, EllipticCurvePublicKey) else None

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        from cryptography.hazmat.primitives import serialization

        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        pem += _certificate(self._key.public_key(), self._key, leaf=True).public_bytes(serialization.Encoding.PEM)
        # Python's ssl takes keys from files only; this one is its owner's alone and is gone at once.
        with tempfile.TemporaryDirectory(prefix="fedcomp-peer-key-") as folder:
            path = Path(folder) / "key"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(pem)
            context.load_cert_chain(path)
        return context


def _private_key(path: Path) -> EllipticCurvePrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    try:
        data = path.read_bytes()
        ssh = data.startswith(b"-----BEGIN OPENSSH")
        read = serialization.load_ssh_private_key if ssh else serialization.load_pem_private_key
        key = read(data, None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not a readable private key without a passphrase ({error})") from error
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is not a key on an elliptic curve, as fedcomp certificates makes them")
    return key


def _text(key: EllipticCurvePublicKey) -> str:
    """Return a public key as it stands in the list."""
    from cryptography.hazmat.primitives import serialization

    try:
        return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    except ValueError:
        return ""  # on a curve that OpenSSH does not know, and so no list


def _anchors(keys: Iterable[str]) -> str:
    """Return a certificate of each key, in PEM, as OpenSSL needs them to check what that key has signed.

    These are not signed by the keys they hold: nobody has them here, and signatures of trust anchors are not looked at.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    stand_in = ec.generate_private_key(ec.SECP256R1())
    found = (_certificate(_public_key(text), stand_in, leaf=False) for text in keys)
    return "".join(each.public_bytes(serialization.Encoding.PEM).decode() for each in found)


def _public_key(text: str) -> EllipticCurvePublicKey:
    """Return the key that stands in the list as ``text``."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    try:
        key = serialization.load_ssh_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{text[:60]}... in the list of peer keys is not a public key: {error}") from error
    assert isinstance(key, EllipticCurvePublicKey)
    return key


def _ecdsa(key: EllipticCurvePrivateKey | EllipticCurvePublicKey) -> ECDSA:
    """Return how a key signs: with a hash as long as its curve."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    kinds = {256: hashes.SHA256, 384: hashes.SHA384}
    return ECDSA(kinds.get(key.curve.key_size, hashes.SHA512)())


def _certificate(key: EllipticCurvePublicKey, signer: EllipticCurvePrivateKey, *, leaf: bool) -> x509.Certificate:
    """Return a certificate of ``key``: the one its node shows, or the anchor that this one is checked against."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    # The anchor of a key has a name that follows from it: OpenSSL finds the signer of a certificate by that name.
    name = hashlib.sha256(_text(key).encode()).hexdigest()
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"node {name[:32]}")]) if leaf else issuer
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(1 if leaf else 2).not_valid_before(_ALWAYS[0]).not_valid_after(_ALWAYS[1])
    builder = builder.add_extension(x509.BasicConstraints(ca=not leaf, path_length=None), critical=True)
    return builder.sign(signer, hashes.SHA256())
