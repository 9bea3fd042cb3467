"""A certificate authority, a server certificate and one key pair for each node, in a folder: ``fedcomp certificates``.

Elliptic curves throughout, as Flower's node keys have to be: P-256 for TLS, P-384 for the nodes. Private keys have no
passphrase, because what uses them starts without anybody watching; their files are readable by their owner alone.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import ipaddress
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedcomp.errors import ConfigError
from fedcomp.experiments.commands import OK, WRONG_INPUT, complain
from fedcomp.files import flush_folder

CA_DAYS: Final = 3650
SERVER_DAYS: Final = 825
"""The longest that common TLS libraries accept of a server certificate."""
MAX_NODES: Final = 10_000
LOOPBACK: Final = ("localhost", "127.0.0.1")
"""Always in the server certificate: the SuperLink itself listens there, behind the proxy."""
_BACKDATED: Final = datetime.timedelta(days=1)
"""A device whose clock is a few hours behind must not find the certificate invalid before it has set its clock."""


class Folder:
    """Where the files of a deployment are.

    Parameters
    ----------
    path : Path
        The folder that ``fedcomp certificates`` was given.

    Attributes
    ----------
    ca, ca_key : Path
        The authority's certificate, which every node needs, and its private key, which renewal alone needs.
    server, server_key : Path
        The server's.
    nodes : Path
        Folder with the keys of the nodes: ``node-0`` and ``node-0.pub``, and so on.
    peers : Path
        List of the nodes' public keys, by partition, for links between nodes: the same for every node.
    kept : Path
        Folder of what ``fedcomp link`` keeps.
    secret : Path
        What the SuperExec shows the SuperLink, so that no other process of this machine gets a run's work.
    registered : Path
        Which node has which id at the SuperLink: a line for each key when it was registered.
    status, rounds : Path
        What a running link knows of its nodes, for ``fedcomp status``; what server apps say of the rounds that ended
        since it began.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ca, self.ca_key = path / "ca.crt", path / "ca.key"
        self.server, self.server_key = path / "server.crt", path / "server.key"
        self.nodes, self.peers = path / "nodes", path / "peers.txt"
        self.kept = path / "link"
        self.secret, self.registered = self.kept / "superexec.secret", self.kept / "registered.txt"
        self.status, self.rounds = self.kept / "status.json", self.kept / "rounds.jsonl"

    def registrations(self) -> dict[str, tuple[str, str]]:
        """Return the id and the digest of the key of each node that was registered, by name; the last line counts."""
        if not self.registered.exists():
            return {}
        lines = [line.split() for line in self.registered.read_text(encoding="utf-8").splitlines() if line.strip()]
        # Lines of an earlier version have no digest.
        return {name: (node, digest[0] if digest else "") for name, node, *digest in lines}

    def home(self, name: str) -> Path:
        """Return the Flower home of the process called ``name``; the operator's is ``cli``."""
        return self.kept / name

    def public_keys(self) -> list[Path]:
        """Return the public keys of the nodes, in the order of their numbers."""
        return sorted(self.nodes.glob("node-*.pub"), key=lambda path: (len(path.name), path.name))

    def next_node(self) -> int:
        """Return the number after the highest that a node has."""
        numbers = [path.stem.removeprefix("node-") for path in self.nodes.glob("node-*")]
        return 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)


def create(path: Path, hosts: Sequence[str], nodes: int, *, now: datetime.datetime | None = None) -> Folder:
    """Make a new authority, a server certificate for ``hosts``, and the keys of ``nodes`` nodes.

    Parameters
    ----------
    path : Path
        Made when it does not exist, readable by its owner alone.
    hosts : sequence of str
        Names and IP addresses by which nodes reach the server; those of loopback are added.
    nodes : int
        How many key pairs, 0 to 10,000; node ``i`` gets ``nodes/node-i``.
    now : datetime, optional
        When the certificates begin to be valid, less a day.

    Raises
    ------
    ConfigError
        When a host is neither a name nor an address, ``nodes`` is out of range, or a file exists already: nothing is
        ever overwritten.
    """
    names = [_name(host) for host in dict.fromkeys((*hosts, *LOOPBACK))]
    folder = Folder(path)
    existing = [file for file in (folder.ca, folder.ca_key, folder.server, folder.server_key) if file.exists()]
    if existing:
        raise ConfigError(
            f"{existing[0]} exists, and keys are not overwritten; --add-nodes adds nodes, --renew renews the server "
            "certificate, another folder starts afresh"
        )
    # Before anything is written that would be in the way of the next attempt.
    _first_of(folder, nodes)
    private_folder(path)
    now = now or datetime.datetime.now(datetime.UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedcomp certificate authority")])
    usage = dict.fromkeys(_USAGES, False) | {"key_cert_sign": True, "crl_sign": True}
    authority = (
        _certificate(subject, subject, key.public_key(), now, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .sign(key, hashes.SHA256())
    )
    write_new(folder.ca_key, _pem(key), 0o600)
    write_new(folder.ca, authority.public_bytes(serialization.Encoding.PEM), 0o644)
    server = ec.generate_private_key(ec.SECP256R1())
    write_new(folder.server_key, _pem(server), 0o600)
    write_new(folder.server, _server(authority, key, server.public_key(), names, now), 0o644)
    add_nodes(folder, nodes)
    return folder


def digest_of(key: Path) -> str:
    """Return what tells the contents of a public key's file from another's."""
    return hashlib.sha256(key.read_bytes()).hexdigest()[:16]


def add_nodes(folder: Folder, count: int) -> list[str]:
    """Make ``count`` more key pairs, numbered after those that exist; return their names.

    Raises
    ------
    ConfigError
        When the numbers would pass 10,000, or ``folder`` has no authority.
    """
    first = _first_of(folder, count)
    if not folder.ca.is_file():
        raise ConfigError(f"{folder.path} holds no ca.crt; make it first, with --host and --nodes")
    private_folder(folder.nodes)
    names = [f"node-{number}" for number in range(first, first + count)]
    for name in names:
        # The one kind of key that flower-supernode takes: ECDSA on a NIST curve, in OpenSSH's format.
        key = ec.generate_private_key(ec.SECP384R1())
        write_new(folder.nodes / name, _pem(key, serialization.PrivateFormat.OpenSSH), 0o600)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        write_new(folder.nodes / f"{name}.pub", public + f" {name}\n".encode(), 0o644)
    return names


def _first_of(folder: Folder, count: int) -> int:
    """Return the number of the first of ``count`` more nodes; raise ConfigError when they are too many."""
    first = folder.next_node()
    if not 0 <= count <= MAX_NODES - first:
        raise ConfigError(f"{count} more nodes after {first} are outside 0 to {MAX_NODES} in all")
    return first


def list_peers(folder: Folder) -> None:
    """Write the list of public keys by partition, where node ``i`` has partition ``i``, from those that are there."""
    lines = [
        f"{key.stem.removeprefix('node-')} {key.read_text(encoding='ascii').strip()}" for key in folder.public_keys()
    ]
    _replace(folder.peers, "".join(f"{line}\n" for line in lines).encode())


def _replace(path: Path, content: bytes) -> None:
    # In one step: whoever reads it in this moment finds the old file or the new one.
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    write_new(fresh, content, 0o644)
    fresh.replace(path)


def renew(folder: Folder, hosts: Sequence[str] = (), *, now: datetime.datetime | None = None) -> None:
    """Issue the server certificate again, from the same authority, for the same key: nodes notice nothing.

    Parameters
    ----------
    folder : Folder
    hosts : sequence of str
        Other names than those of the present certificate; none keeps them.
    now : datetime, optional
        When the certificate begins to be valid, less a day.

    Raises
    ------
    ConfigError
        When a file is missing or damaged, or the authority ends before the certificate would.
    """
    authority, old = read(folder.ca), read(folder.server)
    key = _read_key(folder.ca_key)
    now = now or datetime.datetime.now(datetime.UTC)
    if key.public_key() != authority.public_key():
        raise ConfigError(f"{folder.ca_key} is not the key of {folder.ca}: the two belong to different authorities")
    if authority.not_valid_after_utc < now + datetime.timedelta(days=SERVER_DAYS):
        raise ConfigError(
            f"the authority ends on {authority.not_valid_after_utc:%Y-%m-%d}, before a new server certificate would; "
            "make a new folder, and give every node ca.crt and a key from there"
        )
    names = [_name(host) for host in dict.fromkeys((*hosts, *LOOPBACK))]
    if not hosts:
        names = list(old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    _replace(folder.server, _server(authority, key, _read_key(folder.server_key).public_key(), names, now))


def read(path: Path) -> x509.Certificate:
    """Return the certificate in a PEM file.

    Raises
    ------
    ConfigError
        When there is none.
    """
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a readable certificate in PEM ({error})") from error


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a readable private key in PEM ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is not a key of an elliptic curve, as fedcomp certificates makes them")
    return key


_USAGES: Final = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


def _server(
    authority: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    public: ec.EllipticCurvePublicKey,
    names: Sequence[x509.GeneralName],
    now: datetime.datetime,
) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedcomp server")])
    issuer_key = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        # The day before now is one of them.
        _certificate(subject, authority.subject, public, now, SERVER_DAYS - _BACKDATED.days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**{**dict.fromkeys(_USAGES, False), "digital_signature": True}), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def _certificate(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.split(".")
    valid = all(
        0 < len(label) < 64 and label.isascii() and label.replace("-", "").replace("_", "").isalnum()
        for label in labels
    )
    # Digits and dots alone are an address with a mistake in it, such as 10.0.0.256.
    if not valid or len(host) > 253 or host.replace(".", "").isdecimal():
        raise ConfigError(f"--host {host!r} is neither a host name nor an IP address; give it without scheme and port")
    return x509.DNSName(host)


def _pem(
    key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8
) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def private_folder(path: Path) -> None:
    """Make a folder for its owner alone, if it is not there."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a file that does not exist yet, whole or not at all; :class:`ConfigError` when it does."""
    # Beside its place: what a power cut leaves there is nobody's key. Of this process, and so of nobody else's making.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    try:
        # Made with its mode, so that it is at no moment readable by others.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        try:
            # A second name, and not a new one for the first: this overwrites nothing.
            os.link(partial, path)
        except FileExistsError:
            # Whoever calls has looked before: another process has made it since.
            raise ConfigError(f"{path} was made by another process meanwhile; try again when that has ended") from None
        flush_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None, program: str = "fedcomp certificates") -> int:
    """Run the command; return its exit code."""
    parser = _parser(program)
    args = parser.parse_args(arguments)
    if args.nodes is not None and not args.host:
        parser.error("--nodes needs --host: the name or address by which nodes reach this server")
    if args.add_nodes is not None and args.host:
        parser.error("--host belongs to the server certificate: use it with --nodes or --renew")
    folder = Folder(args.folder)
    try:
        if args.renew:
            renew(folder, args.host)
        elif args.add_nodes is not None:
            print(f"added: {' '.join(add_nodes(folder, args.add_nodes))}")
        else:
            create(args.folder, args.host, args.nodes)
        list_peers(folder)
        _report(folder, renewed=args.renew, added=args.add_nodes is not None)
    except (ConfigError, OSError) as error:
        return complain(str(error), WRONG_INPUT)
    return OK


def _report(folder: Folder, *, renewed: bool, added: bool) -> None:
    for path, what in ((folder.ca, "authority"), (folder.server, "server")):
        print(f"{path}: the {what}'s certificate, valid until {read(path).not_valid_after_utc:%Y-%m-%d}")
    names = read(folder.server).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    print(f"names of the server: {', '.join(str(name.value) for name in names)}")
    print(f"{folder.nodes}: keys of {len(folder.public_keys())} nodes")
    print(f"{folder.peers}: their public keys by partition, for nodes with --peer-keys")
    where = shlex.quote(str(folder.path))
    if renewed:
        print(f"next: start `fedcomp link {where}` again; nodes keep their files")
        return
    if added:
        print(
            f"next: `fedcomp link {where} --register` while the link runs; each new node gets its own key, and ca.crt"
        )
        return
    print("next:")
    print(f"  fedcomp link {where}                      # here: registers the keys and listens for the nodes")
    print(f"  scp {where}/ca.crt {where}/nodes/node-0 NODE:   # to each node its own key, and the certificate")
    print(f"keep {folder.ca_key} elsewhere: only --renew needs it, and anybody who has it can pose as the server")


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description="Make the certificates of a server and the keys of its nodes."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the files are kept")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME|IP",
        help="how nodes reach the server, without a port; may be repeated",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--nodes", type=int, metavar="N", help="make a new authority, a server certificate, and keys for N nodes"
    )
    what.add_argument("--add-nodes", type=int, metavar="N", help="keys of N more nodes")
    what.add_argument("--renew", action="store_true", help="make the server certificate again, from the same authority")
    return parser


if __name__ == "__main__":
    sys.exit(main())
