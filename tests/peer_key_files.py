"""Keys of nodes and lists of them, as ``fedcomp certificates`` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec


def make_key(path: Path) -> Path:
    """Write a new private key, and its public one beside it."""
    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PrivateFormat.OpenSSH
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b" " + path.name.encode() + b"\n")
    return path


def make_list(path: Path, keys: Mapping[int, Path]) -> Path:
    """Write the list of some private keys' public ones."""
    path.write_text("".join(f"{i} {key.with_suffix('.pub').read_text()}" for i, key in keys.items()))
    return path
