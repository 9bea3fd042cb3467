"""Certificates and keys: who trusts whom, what Flower accepts, and what is never overwritten or readable by others."""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import verification

from fedcomp.coding.peertls import PeerKeys, PeerTls
from fedcomp.errors import ConfigError
from fedcomp.experiments.program import main as fedcomp
from fedcomp.experiments.security.certificates import (
    CA_DAYS,
    SERVER_DAYS,
    Folder,
    add_nodes,
    create,
    read,
    renew,
    write_new,
)

NOW = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Folder:
    return create(tmp_path_factory.mktemp("keys") / "a", ["links.example", "10.0.0.1", "fd00::1"], 2, now=NOW)


def verifies(folder: Folder, ca: Folder, name: str, when: datetime.datetime = NOW) -> bool:
    """Whether a client that trusts ``ca`` accepts the server of ``folder`` under ``name``, by the strict profile."""
    address = ":" in name or name.replace(".", "").isdecimal()
    subject = x509.IPAddress(ipaddress.ip_address(name)) if address else x509.DNSName(name)
    store = verification.Store([read(ca.ca)])
    verifier = verification.PolicyBuilder().store(store).time(when).build_server_verifier(subject)
    try:
        verifier.verify(read(folder.server), [])
    except verification.VerificationError:
        return False
    return True


def test_the_server_is_known_by_its_names_to_whoever_has_its_authority(folder, tmp_path):
    for name in ("links.example", "10.0.0.1", "fd00::1", "localhost", "127.0.0.1"):
        assert verifies(folder, folder, name), name
    assert not verifies(folder, folder, "other.example")
    assert not verifies(folder, folder, "10.0.0.2")
    # The same names from another authority.
    assert not verifies(folder, create(tmp_path / "b", ["links.example"], 0, now=NOW), "links.example")
    # A clock that is some hours late is not locked out; one that is years late is.
    assert verifies(folder, folder, "localhost", NOW - datetime.timedelta(hours=20))
    assert not verifies(folder, folder, "localhost", NOW - datetime.timedelta(days=2))
    assert not verifies(folder, folder, "localhost", NOW + datetime.timedelta(days=900))


def test_a_server_certificate_makes_no_others(folder):
    server, authority = read(folder.server), read(folder.ca)
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = server.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [x509.ExtendedKeyUsageOID.SERVER_AUTH]
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    assert authority.extensions.get_extension_for_class(x509.KeyUsage).critical
    assert authority.not_valid_after_utc == NOW + datetime.timedelta(days=CA_DAYS)


def test_flower_takes_the_keys(folder):
    """With the functions that flower-supernode and flwr use themselves."""
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, uses_nist_ec_curve

    seen = set()
    for public in folder.public_keys():
        private = serialization.load_ssh_private_key(public.with_suffix("").read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert private.curve.name == "secp384r1"
        assert uses_nist_ec_curve(private.public_key())
        assert try_load_public_key(public) == public_key_to_bytes(private.public_key())
        seen.add(public.read_bytes().split()[1])
    assert len(seen) == 2


def test_private_files_are_the_owners_alone(folder):
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder.path, folder.nodes)} == {0o700}
    private = [folder.ca_key, folder.server_key, *(key.with_suffix("") for key in folder.public_keys())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}


def test_nothing_is_overwritten(tmp_path):
    folder = create(tmp_path, ["localhost"], 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="not overwritten"):
        create(tmp_path, ["localhost"], 1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    # Numbers go on after the highest, also where the private keys are on their devices by now.
    (folder.nodes / "node-0").unlink()
    assert add_nodes(folder, 2) == ["node-1", "node-2"]
    assert [path.stem for path in folder.public_keys()] == ["node-0", "node-1", "node-2"]
    with pytest.raises(ConfigError, match="10000"):
        add_nodes(folder, 9_998)
    with pytest.raises(ConfigError, match=r"no ca\.crt"):
        add_nodes(Folder(tmp_path / "none"), 1)


def test_a_file_has_its_name_when_it_is_on_disk_and_not_before(tmp_path, monkeypatch):
    """A key that a power cut left empty would be used, and not be overwritten, for ever after."""
    path, written = tmp_path / "key", []

    def cut(descriptor: int) -> None:
        written.append(Path(f"/proc/self/fd/{descriptor}").resolve().read_bytes())
        raise OSError("the power is cut")

    monkeypatch.setattr(os, "fsync", cut)
    with pytest.raises(OSError, match="the power is cut"):
        write_new(path, b"secret", 0o600)
    assert written == [b"secret"]
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    write_new(path, b"secret", 0o600)
    with pytest.raises(ConfigError, match="made by another process"):
        write_new(path, b"other", 0o600)
    assert list(tmp_path.iterdir()) == [path]
    assert (path.read_bytes(), path.stat().st_mode & 0o777, path.stat().st_nlink) == (b"secret", 0o600, 1)


def test_public_keys_are_in_the_order_of_their_numbers(tmp_path):
    assert [path.stem for path in create(tmp_path, ["localhost"], 11).public_keys()][-2:] == ["node-9", "node-10"]


def test_renewal_keeps_authority_key_and_names(tmp_path):
    folder = create(tmp_path, ["links.example"], 0, now=NOW)
    old, key = read(folder.server), folder.server_key.read_bytes()
    assert old.not_valid_after_utc - old.not_valid_before_utc == datetime.timedelta(days=SERVER_DAYS)
    later = NOW + datetime.timedelta(days=800)
    renew(folder, now=later)
    assert read(folder.server).serial_number != old.serial_number
    assert folder.server_key.read_bytes() == key
    assert verifies(folder, folder, "links.example", later + datetime.timedelta(days=800))
    renew(folder, ["new.example"], now=later)
    assert verifies(folder, folder, "new.example", later)
    assert verifies(folder, folder, "127.0.0.1", later)
    assert not verifies(folder, folder, "links.example", later)
    # A pair that does not belong together would lock every node out.
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder.server, folder.server_key)
    other = create(tmp_path / "other", ["localhost"], 0)
    folder.ca_key.write_bytes(other.ca_key.read_bytes())
    with pytest.raises(ConfigError, match="different authorities"):
        renew(folder, now=later)


def test_an_authority_near_its_end_issues_nothing(tmp_path):
    folder = create(tmp_path, ["localhost"], 0, now=NOW)
    with pytest.raises(ConfigError, match="the authority ends on 2039-12-30"):
        renew(folder, now=NOW + datetime.timedelta(days=CA_DAYS - 800))


@pytest.mark.parametrize("host", ["10.0.0.256", "https://a", "a:9092", "", "a..b", "a b", "*", "ü.example", "x" * 64])
def test_a_host_that_is_none_is_refused_before_anything_is_written(host, tmp_path):
    with pytest.raises(ConfigError, match="--host"):
        create(tmp_path / "new", [host], 1)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("nodes", [-1, 10_001])
def test_a_number_of_nodes_that_cannot_be_is_refused_before_anything_is_written(nodes, tmp_path):
    with pytest.raises(ConfigError, match="outside 0 to 10000 in all"):
        create(tmp_path / "new", ["localhost"], nodes)
    assert not (tmp_path / "new").exists()


def test_the_command_says_when_certificates_end_and_what_is_next(tmp_path, capsys):
    where = str(tmp_path / "with space")
    assert fedcomp(["certificates", where, "--host", "links.example", "--nodes", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("valid until 20") == 2
    assert f"fedcomp link '{where}'" in printed
    assert "links.example, localhost, 127.0.0.1" in printed
    assert fedcomp(["certificates", where, "--add-nodes", "1"]) == 0
    printed = capsys.readouterr().out
    assert "added: node-1" in printed
    # A link that runs holds its ports: to start it again would fail.
    assert f"fedcomp link '{where}' --register" in printed
    assert fedcomp(["certificates", where, "--renew"]) == 0
    assert "nodes keep their files" in capsys.readouterr().out
    assert fedcomp(["certificates", where, "--host", "a", "--nodes", "1"]) == 2
    assert "not overwritten" in capsys.readouterr().err
    with pytest.raises(SystemExit) as wrong:
        fedcomp(["certificates", where, "--nodes", "1"])
    assert wrong.value.code == 2


def test_the_list_for_links_between_nodes_has_every_key_that_is_there_and_no_other(tmp_path, capsys):
    where = tmp_path / "keys"
    assert fedcomp(["certificates", str(where), "--host", "links.example", "--nodes", "3"]) == 0
    folder = Folder(where)
    assert str(folder.peers) in capsys.readouterr().out
    keys = PeerKeys.read(folder.peers)
    assert keys.by_partition.keys() == {0, 1, 2}
    for node in range(3):
        assert PeerTls(folder.nodes / f"node-{node}", keys).partition == node
    # A lost device: its public key goes, and the list is written again.
    (folder.nodes / "node-1.pub").unlink()
    assert fedcomp(["certificates", str(where), "--add-nodes", "1"]) == 0
    assert PeerKeys.read(folder.peers).by_partition.keys() == {0, 2, 3}
    assert sorted(path.name for path in where.iterdir() if "new" in path.name) == []
