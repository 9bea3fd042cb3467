"""Sealed boxes: encryption of parcels that pass through the server or an untrusted network.

A box is made for one recipient with a key pair that exists for this box alone: X25519 agrees on a secret, HKDF-SHA256
turns it into a key and a nonce, ChaCha20-Poly1305 encrypts and authenticates (RFC 7748, 5869 and 8439, all by the
``cryptography`` package). The parcel's coordinates are associated data, so a box moved to another round, kind, source
or destination does not open.

What this does not give:

- **Who sent it.** Anybody who knows a recipient's public key can make a box. The source inside the coordinates is what
  the sender claims.
- **Protection from an active server.** The public keys are handed round by the server. One that hands out its own keys
  reads everything and seals it again, unless nodes sign theirs: :mod:`fedcomp.coding.sealkeys`.
- **Forward secrecy of the recipient's key.** The sender forgets its half at once, but whoever obtains an identity's
  secret later opens every box recorded for it. A fresh identity per run bounds this to the run.
- **Secret lengths or traffic.** A box is exactly :data:`OVERHEAD` bytes longer than its body.
- **Freshness.** A box sent again opens again. Stores drop a parcel they hold already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fedcomp.coding.errors import SealError
from fedcomp.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
OVERHEAD: Final = KEY_BYTES + TAG_BYTES
"""Bytes a box is longer than its body: the sender's public key for this box, and the authenticator."""

# Bound into the key: a box of another protocol or version never opens here.
_LABEL: Final = b"fedcomp.coding.seal/1"
_NONCE_BYTES: Final = 12


class PeerIdentity:
    """The key pair of one receiver.

    Attributes
    ----------
    public : bytes
        32 bytes that anybody may know; :func:`seal` takes them.

    Examples
    --------
    >>> receiver = PeerIdentity.generate()
    >>> receiver.open(seal(b"a shard", receiver.public, b"round 1"), b"round 1")
    b'a shard'
    """

    __slots__ = ("_private", "public")

    def __init__(self, private: X25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> PeerIdentity:
        """Return a new identity from the operating system's randomness."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        return cls(X25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, secret: bytes) -> PeerIdentity:
        """Return the identity :meth:`to_bytes` wrote.

        Raises
        ------
        ConfigError
            When ``secret`` is not 32 bytes.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        if len(secret) != KEY_BYTES:
            raise ConfigError(f"an identity's secret is {len(secret)} bytes long; expected {KEY_BYTES} (X25519)")
        return cls(X25519PrivateKey.from_private_bytes(bytes(secret)))

    def to_bytes(self) -> bytes:
        """Return the 32 secret bytes, for the node's own state and nowhere else."""
        return self._private.private_bytes_raw()

    def open(self, sealed: bytes, context: bytes) -> bytes:
        """Return the body of a box made for this identity and ``context``.

        Raises
        ------
        SealError
            When the box is too short, was made for somebody else or another context, or was changed on the way. These
            cannot be told apart, except the first.
        """
        from cryptography.exceptions import InvalidTag

        if len(sealed) < OVERHEAD:
            raise SealError(f"a sealed parcel is {len(sealed)} bytes long; even an empty one has {OVERHEAD}")
        sender = bytes(sealed[:KEY_BYTES])
        # The sender made a key pair for this box alone, so there is no nonce to store or to repeat.
        cipher, nonce = _cipher(self._private, sender, sender, self.public)
        try:
            return cipher.decrypt(nonce, bytes(sealed[KEY_BYTES:]), context)
        except InvalidTag as error:
            raise SealError(
                f"a sealed parcel of {len(sealed)} bytes does not open: it was made for another node, another place in "
                "the protocol, or was changed on the way"
            ) from error

    def __repr__(self) -> str:
        # The secret must not reach a log.
        return f"PeerIdentity(public={self.public.hex()[:16]}...)"


def seal(
    body: bytes,
    recipient_public: bytes,
    context: bytes,
    *,
    ephemeral_only_for_test_vectors: PeerIdentity | None = None,
) -> bytes:
    """Return a box that only the owner of ``recipient_public`` opens, and only under the same ``context``.

    Parameters
    ----------
    body : bytes
    recipient_public : bytes
        The 32 bytes of :attr:`PeerIdentity.public`.
    context : bytes
        Bound to the box but not inside it; :attr:`fedcomp.coding.transport.Parcel.coordinates`.
    ephemeral_only_for_test_vectors : PeerIdentity, optional
        Makes the box reproducible. Two boxes for one recipient from one such key share key and nonce, which gives both
        away; outside a test vector leave it out.

    Returns
    -------
    bytes
        Public key for this box (32 bytes), ciphertext (as long as ``body``), authenticator (16 bytes).

    Raises
    ------
    SealError
        When ``recipient_public`` is no usable public key. It came from a peer.
    """
    ephemeral = PeerIdentity.generate() if ephemeral_only_for_test_vectors is None else ephemeral_only_for_test_vectors
    recipient = bytes(recipient_public)
    cipher, nonce = _cipher(ephemeral._private, recipient, ephemeral.public, recipient)
    return ephemeral.public + cipher.encrypt(nonce, bytes(body), context)


def _cipher(own: X25519PrivateKey, other: bytes, sender: bytes, recipient: bytes) -> tuple[ChaCha20Poly1305, bytes]:
    """Return the cipher and its nonce on which ``own`` and ``other`` agree; both public keys are part of the key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    if len(other) != KEY_BYTES:
        raise SealError(f"a public key is {len(other)} bytes long; expected {KEY_BYTES} (X25519)")
    try:
        secret = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        # A point of small order makes every secret the same, known to all.
        raise SealError(f"the public key {other.hex()} gives no shared secret; it was not made by X25519") from error
    derived = HKDF(SHA256(), KEY_BYTES + _NONCE_BYTES, salt=None, info=_LABEL + sender + recipient).derive(secret)
    # The key serves one box, so that a nonce derived beside it never meets another message.
    return ChaCha20Poly1305(derived[:KEY_BYTES]), derived[KEY_BYTES:]
