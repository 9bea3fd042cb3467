"""A launcher that admits only this user and root to a Flower server's port: ``python -P own_user.py PROGRAM ...``.

Flower's SuperLink takes the orders of operators from whoever reaches its port, on loopback from every local user; and
the tokens of app processes are on their command lines, where every local user can read them. So every connection is
looked up before a byte of it is parsed: the kernel knows which user opened the other end (``sock_diag``, what ``ss -e``
shows). Linux only, and for clients in this network namespace.

A program of its own that imports nothing of this project: it is what stays in memory beside Flower's server.
"""

from __future__ import annotations

import os
import runpy
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

_SOCK_DIAG, _BY_FAMILY, _REQUEST, _DUMP, _ERROR, _DONE = 4, 20, 0x1, 0x301, 2, 3
_HEADER, _ENDS = struct.Struct("=IHHII"), struct.Struct("!HH16s16sI8s")
_ANY_COOKIE: Final = b"\xff" * 8
_USER: Final = 64
"""Where ``struct inet_diag_msg`` has the user id."""
_ESTABLISHED: Final = 1
_QUIET_SECONDS: Final = 60.0
"""After a line about a user who was refused, there is none for so long."""

_GRACE_SECONDS: Final = 5
"""For so long a server that is told to end waits for its clients: `flwr run --stream`, for one, would stay for ever."""


def guarded(command: Sequence[str]) -> list[str]:
    """Return ``command``, whose first word is the path of a Flower program, with a port for this user alone."""
    return [sys.executable, "-P", __file__, *command]


def sock_diag(family: int, states: int, more: int = 0, ends: bytes = b"") -> Iterator[bytes]:
    """Yield what the kernel says of TCP connections: ``struct inet_diag_msg``, and the attributes asked for behind it.

    Parameters
    ----------
    family, states : int
        Address family, and the states of interest as bits.
    more : int
        Attributes, as bits.
    ends : bytes
        ``struct inet_diag_sockid`` of the one that is asked for; empty for all.

    Raises
    ------
    OSError
        When this kernel does not tell; with code 2 when there is no such socket.
    """
    request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, more, 0, states) + (ends or bytes(_ENDS.size))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as asked:
        asked.settimeout(2.0)
        header = _HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST if ends else _DUMP, 1, 0)
        asked.send(header + request)
        while True:
            data = asked.recv(1 << 17)
            while data:
                size, kind, *_ = _HEADER.unpack_from(data)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    code = -struct.unpack_from("=i", data, _HEADER.size)[0]
                    raise OSError(code, f"sock_diag: {os.strerror(code)}")
                yield data[_HEADER.size : size]
                # Messages begin at multiples of four bytes.
                data = data[(size + 3) & ~3 :]


def owner(here: tuple[str, int], there: tuple[str, int]) -> int | None:
    """Return the id of the user who opened the socket at ``there`` of a TCP connection of this machine.

    Parameters
    ----------
    here, there : tuple of str and int
        IPv4 address and port of the two ends.

    Returns
    -------
    int or None
        None when no socket of this network namespace is that end.

    Raises
    ------
    OSError
        When this kernel does not tell.
    """
    ends = _ENDS.pack(there[1], here[1], socket.inet_aton(there[0]), socket.inet_aton(here[0]), 0, _ANY_COOKIE)
    try:
        message = next(sock_diag(socket.AF_INET, 0xFFFFFFFF, ends=ends))
    except FileNotFoundError:
        # No such socket: somebody else's network namespace, or gone meanwhile.
        return None
    # The end asked for, and open: of one that its process has closed the kernel no longer knows the user.
    if message[1] != _ESTABLISHED or _ENDS.unpack_from(message, 4)[:2] != (there[1], here[1]):
        return None
    return int(struct.unpack_from("=I", message, _USER)[0])


def require_owners() -> None:
    """Raise :class:`OSError` where this kernel does not say who opened a connection."""
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} has no sock_diag; it is Linux's")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as there,
        listener.accept()[0] as here,
    ):
        if owner(here.getsockname(), there.getsockname()) != os.geteuid():
            raise OSError("sock_diag names another user for a connection of this process")


def client_of(connection: socket.socket) -> int | None:
    """Return the id of the user at the other end of an accepted connection; None when it cannot be told."""
    try:
        here, there = connection.getsockname(), connection.getpeername()
        found = owner(here[:2], there[:2])
        # While this end is established, the other one's address cannot have become another socket's.
        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        return None
    return found if state == _ESTABLISHED else None


def main() -> None:
    """Run the Flower program that the command line names, with its port for this user and root."""
    program = Path(sys.argv[1]).name
    sys.argv = sys.argv[1:]
    try:
        require_owners()
    except OSError as error:
        sys.exit(f"{program} is not started: this kernel does not say which user opened a connection ({error})")
    # Ports of another kind, which nothing would guard.
    for name in ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"):
        os.environ.pop(name, None)
    _guard()
    runpy.run_path(sys.argv[0], run_name="__main__")


def _guard() -> None:
    """Have every server that uvicorn makes from now on look at who connects; nothing may listen otherwise."""
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    allowed = {0, os.geteuid()}
    configure = uvicorn.Config.__init__
    guarded_configs: list[uvicorn.Config] = []
    refused: dict[int | None, tuple[float, int]] = {}

    class OwnUserProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """HTTP for this user and root; a reset for everybody else."""

        refused = False

        def connection_made(self, transport: Any) -> None:
            # A copy: what uvloop gives is no socket.
            with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as connection:
                user = client_of(connection)
            if user in allowed:
                super().connection_made(transport)
                return
            self.refused = True
            transport.abort()
            _say_refused(user, refused)

        def data_received(self, data: bytes) -> None:
            if not self.refused:
                super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            if not self.refused:
                super().connection_lost(exc)

    def configure_guarded(self: uvicorn.Config, *arguments: Any, **options: Any) -> None:
        ended = {"timeout_graceful_shutdown": _GRACE_SECONDS}
        configure(self, *arguments, **{**options, "http": OwnUserProtocol, **ended})
        guarded_configs.append(self)

    def refuse_other_ports(event: str, arguments: tuple[Any, ...]) -> None:
        internet = event == "socket.bind" and arguments[0].family in (socket.AF_INET, socket.AF_INET6)
        if internet and not guarded_configs:
            raise RuntimeError(f"the port at {arguments[1]} would not be guarded; this Flower is not supported")

    uvicorn.Config.__init__ = configure_guarded  # type: ignore[method-assign]
    sys.addaudithook(refuse_other_ports)


def _say_refused(user: int | None, refused: dict[int | None, tuple[float, int]]) -> None:
    said, since = refused.get(user, (-_QUIET_SECONDS, 0))
    now = time.monotonic()
    if now - said < _QUIET_SECONDS:
        refused[user] = said, since + 1
        return
    refused[user] = now, 0
    who = "a user that the kernel does not name" if user is None else f"user {user}"
    more = f", and {since} times since the last such line" if since else ""
    print(f"refused {who} at this port, which serves user {os.geteuid()} and root{more}", flush=True)


if __name__ == "__main__":
    main()
