"""The time at which a process last received bytes from the network, as the kernel reports it.

A SuperNode that waits for its SuperLink is alive, and its ``/health`` says 200. But it asks for messages every three
seconds, and sends a heartbeat every 17 to 23 s while it trains; the kernel knows when the last byte of an answer came
(``tcpi_last_data_recv``, what ``ss -i`` shows). Linux only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Final

from fedcomp.clients.edge.own_user import sock_diag

_INFO: Final = 2
# Established, and closed by the other side: it closes after five idle seconds, and the last answer still counts.
_STATES: Final = (1 << 1) | (1 << 8)
_ATTRIBUTE: Final = struct.Struct("=HH")
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
    found = [_connection(m) for family in (socket.AF_INET, socket.AF_INET6) for m in sock_diag(family, _STATES, _INFO)]
    ages = [age for port, inode, age in found if inode in own and port != own_port and age is not None]
    return min(ages, default=None)


def _sockets(pid: int) -> set[int]:
    found: set[int] = set()
    # The process may have ended meanwhile.
    with contextlib.suppress(FileNotFoundError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(f"/proc/{pid}/fd/{entry}")
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found


def _connection(message: bytes) -> tuple[int, int, float | None]:
    """Return local port, inode and seconds since the last data of a connection."""
    port = struct.unpack_from("!H", message, 4)[0]
    inode = struct.unpack_from("=I", message, _DIAG_BYTES - 4)[0]
    rest = message[_DIAG_BYTES:]
    while rest:
        size, kind = _ATTRIBUTE.unpack_from(rest)
        info = rest[_ATTRIBUTE.size : size]
        if kind == _INFO and len(info) >= _BYTES_RECEIVED + 8 and struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]:
            return port, inode, struct.unpack_from("=I", info, _LAST_RECEIVED)[0] / 1000
        rest = rest[(size + 3) & ~3 :]
    return port, inode, None
