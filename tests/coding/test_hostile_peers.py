"""What a hostile peer names, and how much it may take up: its own loss, never the honest sender's or receiver's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_transport import RUN, files, parcel

from fedcomp.coding import transport as transport_module
from fedcomp.coding.errors import TransportError
from fedcomp.coding.transport import DeliveryFailed, Spool, SpoolRoot, StoreFull, deliver, transport_of
from fedcomp.errors import ConfigError


@pytest.mark.parametrize(
    "address",
    [
        f"tcp://h:{'0' * 5000}80",
        f"tcp://{'a.' * 400}h:80",
        "tcp://h\0.example:80",
        "tcp://h\r:80",
        "spool:/x%00y/z",
        f"spool:/{'a' * 5000}/x",
        "spool:/dev/null/x/y",
    ],
    ids=lambda address: address[:14],
)
@pytest.mark.parametrize("kind", ["tcp", "spool"])
def test_no_address_of_a_peer_raises_anything_but_its_own_loss(kind: str, address: str, tmp_path: Path) -> None:
    """Addresses are other clients' words: an error of another kind would end the honest sender's whole round."""
    root = SpoolRoot.create(tmp_path)
    if kind == "tcp":
        sender = transport_of("tcp://127.0.0.1:9", tmp_path / "own")
    else:
        sender = transport_of(root.address(0))
        address = address.replace("/x%00y/z", f"{tmp_path}/x%00y")
    (delivery,) = deliver(sender, [(address, parcel())])
    assert isinstance(delivery.error, DeliveryFailed)
    assert delivery.handed_over == 0
    assert len(str(delivery.error)) < 6000


def test_a_name_with_many_addresses_costs_one_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waited: list[float] = []
    now = [0.0]

    class Silent:
        def __init__(self, *_: object) -> None:
            self.seconds = 0.0

        def settimeout(self, seconds: float) -> None:
            self.seconds = seconds

        def connect(self, _: object) -> None:
            waited.append(self.seconds)
            now[0] += self.seconds
            raise TimeoutError("timed out")

        def close(self) -> None: ...

    found = [(2, 1, 6, "", (f"10.0.0.{i}", 80)) for i in range(50)]
    monkeypatch.setattr(transport_module.socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(transport_module.socket, "socket", Silent)
    monkeypatch.setattr(transport_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(transport_module.time, "sleep", lambda _: None)
    sender = transport_of("tcp://127.0.0.1:9", tmp_path)
    with pytest.raises(DeliveryFailed, match="timed out"):
        sender.send("tcp://many.example:80", parcel())
    assert waited == [3.0, 3.0], "one per attempt, not one per address"


def test_a_second_address_is_tried_when_the_first_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = transport_module.socket.create_server(("127.0.0.1", 0))
    there = free.getsockname()
    gone = transport_module.socket.create_server(("127.0.0.1", 0))
    found = [(2, 1, 6, "", gone.getsockname()), (2, 1, 6, "", there)]
    gone.close()
    monkeypatch.setattr(transport_module.socket, "getaddrinfo", lambda *_, **__: found)
    with free, transport_module._connect(("both.example", 80), 5.0) as connection:
        assert connection.getpeername() == there


def test_short_parcels_do_not_take_a_block_of_the_disk_each_without_end(tmp_path: Path) -> None:
    store = Spool(tmp_path, max_parcels=3)
    for source in range(3):
        assert store.put(parcel(source, b""))
    assert not store.put(parcel(0, b"")), "what is kept already needs no room"
    with pytest.raises(StoreFull, match="holds 3 parcels, as many as it may"):
        store.put(parcel(3, b""))
    store.drop_before(RUN, 8)
    assert store.put(parcel(3, b""))
    with pytest.raises(ConfigError, match="max_parcels"):
        Spool(tmp_path, max_parcels=0)


def test_a_writer_asks_the_system_for_no_files_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of parcels that is most of the time for which the lock is held."""
    store = Spool(tmp_path)
    for source in range(4):
        store.put(parcel(source))

    def asked(*_: object) -> None:
        raise AssertionError("asked for a file's size")

    monkeypatch.setattr(Path, "lstat", asked)
    monkeypatch.setattr(Path, "stat", asked)
    assert store.put(parcel(4))
    assert store.held == 5 * len(parcel())


def test_parcels_are_their_owners_alone_and_written_through_no_link(tmp_path: Path) -> None:
    """Also in a folder that was there before, with the permissions of others."""
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    store = Spool(folder)
    store.put(parcel())
    (name,) = files(folder)
    assert (folder / name).stat().st_mode & 0o077 == 0

    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    store.remove(parcel())
    names = store._names

    def planted() -> Any:
        found = list(names())
        (folder / name).with_suffix(".partial").symlink_to(victim)
        return found

    store._names = planted  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="could not be kept"):
        store.put(parcel())
    assert victim.read_bytes() == b"precious"
