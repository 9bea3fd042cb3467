"""When a process last received anything over the network, asked of the kernel: evidence that no log line can fake.

A SuperNode that waits for its SuperLink is alive, and its ``/health`` says 200. But it asks for messages every three
seconds, and sends a heartbeat every 17 to 23 s while it trains; the kernel knows when the last byte of an answer came
(``tcpi_last_data_recv``, what ``ss -i`` shows). Linux only.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from pathlib import Path
from typing import Final

_SOCK_DIAG: Final = 4
_BY_FAMILY, _DUMP, _DONE, _ERROR = 20, 0x301, 3, 2
_INFO: Final = 2
# Established, and closed by the other side: it closes after five idle seconds, and the last answer still counts.
_STATES: Final = (1 << 1) | (1 << 8)
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_DIAG_BYTES: Final = 72
_LAST_RECEIVED, _BYTES_RECEIVED = 52, 128


def last_received(pid: int, own_port: int) -> float | None:
    """Return how many seconds ago the process ``pid`` received data from others; None when it has no such connection.

    Connections to its own ``own_port`` do not count: those are its helpers'.

    Raises
    ------
    OSError
        When this kernel does not tell.
    """
    own = _sockets(pid)
    ages = [
        age
        for family in (socket.AF_INET, socket.AF_INET6)
        for port, inode, age in _connections(family)
        if inode in own and port != own_port and age is not None
    ]
    return min(ages, default=None)


def _sockets(pid: int) -> set[int]:
    found: set[int] = set()
    folder = Path(f"/proc/{pid}/fd")
    try:
        entries = list(folder.iterdir())
    except FileNotFoundError:
        # The process has ended meanwhile.
        return found
    for entry in entries:
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


def _connections(family: int) -> list[tuple[int, int, float | None]]:
    """Return local port, inode and seconds since the last data of every TCP connection of a family."""
    request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, _INFO, 0, _STATES) + bytes(48)
    found: list[tuple[int, int, float | None]] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as asked:
        asked.settimeout(2.0)
        asked.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
        while True:
            data = asked.recv(1 << 17)
            while data:
                size, kind, *_ = _HEADER.unpack_from(data)
                if kind == _DONE:
                    return found
                if kind == _ERROR:
                    code = -struct.unpack_from("=i", data, _HEADER.size)[0]
                    raise OSError(code, f"sock_diag: {errno.errorcode.get(code, code)}")
                found.append(_connection(data[_HEADER.size : size]))
                # Messages begin at multiples of four bytes.
                data = data[(size + 3) & ~3 :]


def _connection(message: bytes) -> tuple[int, int, float | None]:
    port = struct.unpack_from("!H", message, 4)[0]
    inode = struct.unpack_from("=I", message, _DIAG_BYTES - 4)[0]
    rest = message[_DIAG_BYTES:]
    while rest:
        size, kind = _ATTRIBUTE.unpack_from(rest)
        info = rest[_ATTRIBUTE.size : size]
        if kind == _INFO and len(info) >= _BYTES_RECEIVED + 8:
            received = struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]
            return port, inode, struct.unpack_from("=I", info, _LAST_RECEIVED)[0] / 1000 if received else None
        rest = rest[(size + 3) & ~3 :]
    return port, inode, None
