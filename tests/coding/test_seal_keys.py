"""Seal keys that nodes sign: nobody else's key passes for a node's, in no other run and for no other partition."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from peer_key_files import make_key, make_list

from fedcomp.coding.errors import SealError
from fedcomp.coding.peertls import PeerKeys, PeerTls
from fedcomp.coding.sealkeys import MOST_SIGNATURE, NO_RUN, require_signed, sign, statement

RUN, PUBLIC = b"run-0001", bytes(range(32))

GOLDEN_STATEMENT = b"fedcomp.coding.seal-key/1" + b"run-0001" + b"\x03\x00\x00\x00" + bytes(range(32))

GOLDEN_KEY = (
    "ecdsa-sha2-nistp384 "
    "AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAIbmlzdHAzODQAAABhBOXxTTVUfmjNG/yJTphF5kopm7U2"
    "0O0SDkMb9e+rZi3rXBqlLpN9ENl+hxSezFlAdTBlp/qgQWfI3TbBco8MWVSH89CCpN+NXdtVhnrUOoxb"
    "lGcQUJJpadw6KAvV9cpFdg=="
)
GOLDEN_SIGNATURE = (
    "306402300d01926b407c08a1360aaedfeed16eee54199aa7af5ea3e06541b7675bca44823ddf1219"
    "c63fb320dd1a04b5a7b1977c023076b24e0fcc8dba1f82dab96f093608494c5b7acfb5e8a0b4563f"
    "7ad4f76cc33411eac4a3c1c80dd9cf8144f86c2e50ad"
)
"""Made once: what was signed by an older release stays signed."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, PeerTls]:
    folder = tmp_path_factory.mktemp("keys")
    keys = {i: make_key(folder / f"node-{i}") for i in (1, 3)}
    listed = PeerKeys.read(make_list(folder / "peers", keys))
    return {i: PeerTls(key, listed) for i, key in keys.items()}


def test_what_is_signed_has_the_bytes_it_always_had() -> None:
    assert statement(RUN, 3, PUBLIC) == GOLDEN_STATEMENT
    keys = PeerKeys({3: GOLDEN_KEY}, {GOLDEN_KEY: 3})
    require_signed(keys, 3, RUN, PUBLIC, bytes.fromhex(GOLDEN_SIGNATURE))


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_keys_of_every_curve_of_a_list_sign_their_own(curve, tmp_path: Path) -> None:
    key = ec.generate_private_key(curve)
    form = serialization.PrivateFormat.PKCS8
    (tmp_path / "key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (tmp_path / "peers").write_bytes(b"3 " + public + b" node-3\n")
    keys = PeerKeys.read(tmp_path / "peers")
    signature = sign(PeerTls(tmp_path / "key", keys), RUN, PUBLIC)
    assert len(signature) <= MOST_SIGNATURE
    require_signed(keys, 3, RUN, PUBLIC, signature)
    for place in range(len(signature)):
        damaged = bytearray(signature)
        damaged[place] ^= 1
        with pytest.raises(SealError, match="not signed by the key listed for it"):
            require_signed(keys, 3, RUN, PUBLIC, bytes(damaged))


def test_no_other_key_partition_or_run_passes_for_the_one_that_was_signed(nodes: dict[int, PeerTls]) -> None:
    keys, signature = nodes[3].keys, sign(nodes[3], RUN, PUBLIC)
    require_signed(keys, 3, RUN, PUBLIC, signature)
    for partition, run, public, proof in (
        (1, RUN, PUBLIC, signature),
        (3, NO_RUN, PUBLIC, signature),
        (3, b"run-0002", PUBLIC, signature),
        (3, RUN, bytes(32), signature),
        (3, RUN, PUBLIC, sign(nodes[1], RUN, PUBLIC)),
        (3, RUN, PUBLIC, b"no signature"),
        (3, RUN, PUBLIC, nodes[3].sign(PUBLIC)),
        (3, RUN, PUBLIC, nodes[3].sign(RUN + (3).to_bytes(4, "little") + PUBLIC)),
    ):
        with pytest.raises(SealError, match=f"of partition {partition} is not signed by the key listed for it"):
            require_signed(keys, partition, run, public, proof)


def test_what_is_missing_is_named_with_the_remedy(nodes: dict[int, PeerTls]) -> None:
    keys, signature = nodes[3].keys, sign(nodes[3], RUN, PUBLIC)
    with pytest.raises(SealError, match=r"partition 3 is not signed.*start its node with --key and --peer-keys"):
        require_signed(keys, 3, RUN, PUBLIC, b"")
    with pytest.raises(SealError, match="the seal key is not signed"):
        require_signed(keys, None, RUN, PUBLIC, signature)
    with pytest.raises(SealError, match=r"partition 2 is not in this node's list of peer keys.*add its line"):
        require_signed(keys, 2, RUN, PUBLIC, signature)
