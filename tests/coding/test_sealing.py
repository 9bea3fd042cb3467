"""Sealed boxes: vectors of the RFCs, the whole against a second implementation, and everything that must not open."""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.coding.errors import SealError
from fedcomp.coding.parcels import Parcel
from fedcomp.coding.sealing import OVERHEAD, PeerIdentity, seal
from fedcomp.errors import ConfigError, FedcompError

# RFC 7748, section 6.1.
ALICE = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
ALICE_PUBLIC = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
BOB = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
BOB_PUBLIC = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
SHARED = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")

# RFC 8439, section 2.8.2.
SUNSCREEN = (
    b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
    b"sunscreen would be it."
)
SUNSCREEN_BOX = bytes.fromhex(
    "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da92728b1a71de0a9e060b29"
    "05d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc3ff4def08e4b7a9de576d26586cec64b"
    "61161ae10b594f09e26a7e902ecbd0600691"
)

GOLDEN = "4766139dbee38ca3fd56a4e5d177a0394e24b65478"

PLACE = Parcel(b"run-0001", 3, 1, 4, 2, b"")


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """HKDF-SHA256 from the standard library's HMAC."""
    key = hmac.digest(salt or bytes(32), secret, hashlib.sha256)
    out = block = b""
    for i in range(1, -(-length // 32) + 1):
        block = hmac.digest(key, block + info + bytes([i]), hashlib.sha256)
        out += block
    return out[:length]


def chacha20(key: bytes, counter: int, nonce: bytes) -> bytes:
    """One 64-byte block of the key stream."""
    start = list(struct.unpack("<16I", b"expand 32-byte k" + key + counter.to_bytes(4, "little") + nonce))
    x = start.copy()

    def turn(a: int, b: int, c: int, d: int) -> None:
        for i, j, k, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[i] = (x[i] + x[j]) % 2**32
            mixed = x[k] ^ x[i]
            x[k] = (mixed << bits | mixed >> (32 - bits)) % 2**32

    for _ in range(10):
        for i in range(4):
            turn(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            turn(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return struct.pack("<16I", *((a + b) % 2**32 for a, b in zip(x, start, strict=True)))


def box(key: bytes, nonce: bytes, body: bytes, context: bytes) -> bytes:
    """ChaCha20-Poly1305 in plain arithmetic."""
    stream = b"".join(chacha20(key, 1 + i, nonce) for i in range(-(-len(body) // 64)))
    cipher = bytes(a ^ b for a, b in zip(body, stream, strict=False))
    one_time = chacha20(key, 0, nonce)[:32]
    r = int.from_bytes(one_time[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF

    def padded(part: bytes) -> bytes:
        return part + bytes(-len(part) % 16)

    text = padded(context) + padded(cipher) + len(context).to_bytes(8, "little") + len(cipher).to_bytes(8, "little")
    total = 0
    for i in range(0, len(text), 16):
        total = (total + int.from_bytes(text[i : i + 16] + b"\1", "little")) * r % (2**130 - 5)
    tag = (total + int.from_bytes(one_time[16:], "little")) % 2**128
    return cipher + tag.to_bytes(16, "little")


def test_the_second_implementation_gives_the_vectors_of_the_rfcs() -> None:
    okm = hkdf(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42)
    # RFC 5869, appendix A.1.
    assert okm.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    key, nonce = bytes(range(0x80, 0xA0)), bytes.fromhex("070000004041424344454647")
    assert box(key, nonce, SUNSCREEN, bytes.fromhex("50515253c0c1c2c3c4c5c6c7")) == SUNSCREEN_BOX


def test_identities_are_x25519_keys() -> None:
    assert PeerIdentity.from_bytes(ALICE).public == ALICE_PUBLIC
    assert PeerIdentity.from_bytes(BOB).public == BOB_PUBLIC
    assert PeerIdentity.from_bytes(ALICE).to_bytes() == ALICE


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000])
def test_a_box_is_what_its_parts_make_by_hand(length: int) -> None:
    body = bytes(i % 251 for i in range(length))
    context = PLACE.coordinates
    key = hkdf(SHARED, b"", b"fedcomp.coding.seal/1" + ALICE_PUBLIC + BOB_PUBLIC, 44)
    expected = ALICE_PUBLIC + box(key[:32], key[32:], body, context)
    sealed = seal(body, BOB_PUBLIC, context, ephemeral_only_for_test_vectors=PeerIdentity.from_bytes(ALICE))
    assert sealed == expected
    assert len(sealed) == length + OVERHEAD == length + 48
    assert PeerIdentity.from_bytes(BOB).open(sealed, context) == body


def test_golden_bytes() -> None:
    sealed = seal(b"shard", BOB_PUBLIC, b"here", ephemeral_only_for_test_vectors=PeerIdentity.from_bytes(ALICE))
    assert sealed == ALICE_PUBLIC + bytes.fromhex(GOLDEN)


@pytest.mark.slow
@given(st.binary(max_size=300), st.binary(max_size=40))
def test_only_the_recipient_opens_it_and_only_in_its_place(body: bytes, context: bytes) -> None:
    recipient, other = PeerIdentity.generate(), PeerIdentity.generate()
    sealed = seal(body, recipient.public, context)
    assert recipient.open(sealed, context) == body
    with pytest.raises(SealError, match="does not open"):
        other.open(sealed, context)
    with pytest.raises(SealError, match="does not open"):
        recipient.open(sealed, context + b"!")


@pytest.mark.parametrize(
    "moved",
    [
        {"run": b"run-0002"},
        {"round": 4},
        {"kind": 2},
        {"source": 5},
        {"destination": 3},
    ],
    ids=lambda moved: next(iter(moved)),
)
def test_a_box_moved_to_another_place_does_not_open(moved: dict) -> None:
    recipient = PeerIdentity.generate()
    sealed = seal(b"shard", recipient.public, PLACE.coordinates)
    assert recipient.open(sealed, PLACE.coordinates) == b"shard"
    with pytest.raises(SealError):
        recipient.open(sealed, replace(PLACE, **moved).coordinates)


def test_the_body_is_no_part_of_the_coordinates() -> None:
    assert replace(PLACE, body=b"what is sealed cannot be known before").coordinates == PLACE.coordinates


def test_every_single_changed_bit_is_found() -> None:
    recipient = PeerIdentity.generate()
    sealed = seal(b"shard", recipient.public, b"here")
    unchanged = []
    for i in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[i // 8] ^= 1 << i % 8
        try:
            assert recipient.open(bytes(changed), b"here") == b"shard"
            unchanged.append(i)
        except SealError:
            pass
    # X25519 ignores the topmost bit of a public key; here it is part of the key that is derived.
    assert unchanged == []


@pytest.mark.parametrize("length", [0, 1, 32, 47])
def test_what_is_too_short_to_be_a_box_is_refused(length: int) -> None:
    with pytest.raises(SealError, match=f"{length} bytes long; even an empty one has 48"):
        PeerIdentity.generate().open(bytes(length), b"")


def test_truncated_and_extended_boxes_do_not_open() -> None:
    recipient = PeerIdentity.generate()
    sealed = seal(b"x" * 100, recipient.public, b"")
    for wrong in (sealed[:-1], sealed[:-20], sealed + b"\0"):
        with pytest.raises(SealError):
            recipient.open(wrong, b"")


SMALL_ORDER = [
    bytes(32),
    b"\1" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
]


@pytest.mark.parametrize("public", SMALL_ORDER, ids=["zero", "one", "order 8"])
def test_public_keys_that_agree_on_nothing_are_refused_on_both_sides(public: bytes) -> None:
    with pytest.raises(SealError, match="gives no shared secret"):
        seal(b"shard", public, b"")
    with pytest.raises(SealError, match="gives no shared secret"):
        PeerIdentity.generate().open(public + bytes(40), b"")


def test_keys_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(SealError, match="31 bytes long; expected 32"):
        seal(b"shard", bytes(31), b"")
    with pytest.raises(ConfigError, match="33 bytes long; expected 32"):
        PeerIdentity.from_bytes(bytes(33))
    assert issubclass(SealError, FedcompError)


def test_two_boxes_of_one_body_share_nothing() -> None:
    recipient = PeerIdentity.generate()
    first, second = (seal(bytes(64), recipient.public, b"") for _ in range(2))
    assert first[:32] != second[:32]
    assert first[32:] != second[32:]
    # Bodies of zeros show the key stream itself: it must not repeat.
    assert first[32:96] != second[32:96]


def test_the_secret_stays_out_of_logs() -> None:
    identity = PeerIdentity.generate()
    assert identity.to_bytes().hex() not in repr(identity)
    assert identity.public.hex()[:16] in repr(identity)
