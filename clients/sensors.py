"""Sensors on a socket: ``python -m fedcomp.clients.sensors --listen unix:/run/sensors.sock --folder DIR``.

A Flower client app is a new process for every message, and sensors speak at any time. So one process beside the
SuperNode talks to the sensors, and a folder is what it shares with the app (:class:`StoredEdge`): windows that came,
one file each, and the deployed model. Nothing else has to run, and either side may be restarted.

On a connection every message stands behind its length (uint32, little-endian). Whoever can reach the address can send
windows and read the model: use a Unix socket, whose file has permissions, loopback, or a network you trust.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import socketserver
import struct
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp import files, params
from fedcomp.coding.transport import parse_tcp
from fedcomp.drift.edge import Arrays, Deployments, Edge, LinkTraffic, Measure
from fedcomp.drift.messages import MAX_BYTES, SensorError, SensorMessage
from fedcomp.drift.sensor import Upload
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.flower import store
from fedcomp.flower.logs import log
from fedcomp.layout import policy_from_config
from fedcomp.plain import from_plain

_LENGTH: Final = struct.Struct("<I")
_UNIX: Final = "unix:"
_KIND: Final = "deployments"
_STATE: Final = "deployed"
_WINDOW: Final = ".window"
_LOOK_SECONDS: Final = 0.2
_READ_SECONDS: Final = 30.0
"""Between two bytes of a message; on a slow link a long one takes longer."""

MAX_CONNECTIONS: Final = 128


class StoredEdge(Edge):
    """An edge in a folder, which processes share: one that talks to sensors, and those of the app.

    Parameters
    ----------
    folder : path
        Made when it is not there.
    deployments : Deployments, optional
        What the app deploys with. Without it the edge serves what another process deploys, and collects.
    most : int
        Windows that are kept until they are forgotten; the oldest go first.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> model = {"w": np.zeros(3, np.float32)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     app = StoredEdge(folder, Deployments(model, window=20))
    ...     serving = StoredEdge(folder)
    ...     app.deploy(model, lambda deployed: np.linspace(0.5, 1.0, 100)), serving.refresh(), serving.version
    (1, True, 1)
    """

    def __init__(self, folder: str | os.PathLike[str], deployments: Deployments | None = None, *, most: int = 64):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._deploys = deployments is not None
        self._seen: tuple[int, int] | None = None
        # One without a model is as good as none; the file brings the first one.
        super().__init__(deployments or Deployments({"": np.zeros(1, np.float32)}), most=most)
        self.refresh()

    @property
    def version(self) -> int:
        """Version of the deployed model; 0 before the first one."""
        return self.deployments.version

    def refresh(self) -> bool:
        """Take what another process has deployed; return whether there was something.

        Raises
        ------
        FedcompError
            When the file is damaged, or of an app with another model, codec or window.
        """
        path = self.folder / _STATE
        try:
            found = path.stat()
        except FileNotFoundError:
            return False
        stamp = (found.st_mtime_ns, found.st_ino)
        if stamp == self._seen:
            return False
        held = store.loads(path.read_bytes(), _KIND)
        with store.reading("the folder's deployed model"):
            deployments = self.deployments
            if not self._deploys:
                shapes = from_plain(dict[str, NDArray[Any]], held["model"], "model")
                policy = policy_from_config(held["policy"])
                options = {"policy": policy, "window": held["window"], "seed": held["seed"]}
                deployments = Deployments(shapes, held["codec"], **options)
            deployments.load_state_dict(held["state"])
        # What cannot be read whole leaves the former one in its place.
        self.deployments, self._seen = deployments, stamp
        return True

    def deploy(self, arrays: Arrays, measure: Measure) -> int:
        """Deploy a model, see :meth:`fedcomp.drift.edge.Deployments.deploy`, and leave it in the folder."""
        if not self._deploys:
            raise ConfigError("this StoredEdge serves models that others deploy; pass deployments=Deployments(model)")
        self.refresh()
        version = super().deploy(arrays, measure)
        held = {"model": dict(arrays), **self.deployments.made_from(), "state": self.deployments.state_dict()}
        files.write(self.folder / _STATE, store.dumps(held, _KIND))
        return version

    def windows(self) -> dict[int, Upload]:
        """Return the windows in the folder, by number; one that is damaged is removed, and the log says so."""
        found: dict[int, Upload] = {}
        for path in self._files():
            try:
                upload = SensorMessage.from_bytes(path.read_bytes()).upload
            except FileNotFoundError:
                continue
            except SensorError as error:
                log.warning("%s is damaged and removed: %s", path, error)
                path.unlink(missing_ok=True)
                continue
            if upload is not None:
                found[int(path.stem)] = upload
        return found

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove windows that were used."""
        for number in numbers:
            (self.folder / f"{number:012d}{_WINDOW}").unlink(missing_ok=True)

    def keep(self, data: bytes) -> None:
        """Write a window into the folder; raises :class:`OSError` where that fails."""
        held = self._files()
        for path in held[: max(0, len(held) + 1 - self.most)]:
            path.unlink(missing_ok=True)
            self.drop()
        # Above what was ever given: a number that was forgotten must not come back as another window.
        self._number = max(self._number, int(held[-1].stem) if held else 0) + 1
        files.write(self.folder / f"{self._number:012d}{_WINDOW}", data)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"*{_WINDOW}"))


class SocketLink:
    """One end of a link over a socket.

    Parameters
    ----------
    connection : socket
        Connected; see :func:`connect`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.traffic = LinkTraffic()
        self._connection = connection
        self._buffer = bytearray()
        # Two threads of an edge may send at a time: an answer, and a model that was just deployed.
        self._sending = threading.Lock()

    def send(self, message: bytes) -> None:
        """Send a message; raises :class:`OSError` when the other end is gone or takes nothing, from then on."""
        data = _LENGTH.pack(len(message)) + message
        with self._sending:
            try:
                self._connection.sendall(data)
            except OSError:
                # A part of it may have gone: the other end would take the next message for the rest of this one.
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
                raise
            self.traffic.sent += len(data)
            self.traffic.sent_messages += 1

    def receive(self) -> bytes | None:
        """Return the next message that has come whole; None when there is none.

        Raises
        ------
        SensorError
            When the other end announces a message that is too long.
        OSError
            When the other end is gone.
        """
        while (message := self._whole()) is None and select.select([self._connection], [], [], 0.0)[0]:
            data = self._connection.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the other end has closed the connection")
            self._buffer += data
        return message

    def wait(self, seconds: float) -> bool:
        """Wait until something has come; return whether it has."""
        return bool(select.select([self._connection], [], [], seconds)[0])

    @property
    def partial(self) -> bool:
        """Whether a part of a message has come."""
        return bool(self._buffer)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _whole(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_BYTES:
            raise SensorError(f"a message of {length} bytes is announced; at most {MAX_BYTES} are read")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        self.traffic.received += end
        self.traffic.received_messages += 1
        return message


def connect(address: str, seconds: float = 10.0) -> SocketLink:
    """Return a sensor's link to the edge at ``unix:/path`` or ``tcp://host:port``.

    Raises
    ------
    ConfigError
        When the address is none.
    OSError
        When nobody is there.
    """
    if address.startswith(_UNIX):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(seconds)
        connection.connect(address.removeprefix(_UNIX))
    else:
        connection = socket.create_connection(parse_tcp(address), seconds)
    return SocketLink(connection)


class _TCPServer(socketserver.ThreadingTCPServer):
    # Connections of the process that ended keep its port for a minute.
    allow_reuse_address = True
    # After a restart all sensors come at once.
    request_queue_size = MAX_CONNECTIONS


class _UnixServer(socketserver.ThreadingUnixStreamServer):
    request_queue_size = MAX_CONNECTIONS


class SensorServer:
    """Serves an edge's sensors on a socket, from :meth:`start` to :meth:`close`.

    Parameters
    ----------
    edge : Edge
        A :class:`StoredEdge` is looked at for models that other processes deploy.
    address : str
        ``unix:/path`` or ``tcp://host:port``.

    Attributes
    ----------
    links : dict of int to SocketLink
        By sensor.

    Raises
    ------
    ConfigError
        When the address is none, or cannot be listened on.
    """

    def __init__(self, edge: Edge, address: str) -> None:
        self.edge = edge
        self.links: dict[int, SocketLink] = {}
        self._lock = threading.Lock()
        self._open = 0
        self._unread = ""
        self._closing = threading.Event()
        serve = self._serve

        class _Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                serve(self.request)

        path = address.removeprefix(_UNIX) if address.startswith(_UNIX) else ""
        kind = _UnixServer if path else _TCPServer
        place: Any = path or parse_tcp(address)
        try:
            self._server = kind(place, _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error}; choose a free port or path, and remove the socket of a process "
                "that is gone"
            ) from error
        self._path = path
        self._server.daemon_threads = True
        self._threads = [
            threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": _LOOK_SECONDS}, daemon=True),
            threading.Thread(target=self._look, daemon=True),
        ]

    def start(self) -> None:
        """Begin to accept connections."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop, and close all connections."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()
        if self._path:
            Path(self._path).unlink(missing_ok=True)

    def stop(self) -> None:
        """Let :meth:`wait` return."""
        self._closing.set()

    def wait(self) -> None:
        """Return when this was stopped."""
        self._closing.wait()

    def _serve(self, connection: socket.socket) -> None:
        link, numbers = SocketLink(connection), set[int]()
        with self._lock:
            self._open += 1
            busy = self._open > MAX_CONNECTIONS
        try:
            # A sensor that is turned away finds its connection closed.
            while not busy and not self._closing.is_set():
                connection.settimeout(_READ_SECONDS)
                if not link.wait(_READ_SECONDS if link.partial else _LOOK_SECONDS):
                    if link.partial:
                        raise SensorError(f"nothing more of a message came for {_READ_SECONDS:g} seconds")
                    continue
                while (message := link.receive()) is not None:
                    with self._lock:
                        number = self.edge.handle(message, link)
                        self.links[number] = link
                    numbers.add(number)
        except ConnectionResetError:
            pass  # sensors come and go
        except (OSError, FedcompError) as error:
            log.warning("a sensor's connection is closed: %s", error)
        finally:
            with self._lock:
                self._open -= 1
                for number in numbers:
                    if self.links.get(number) is link:
                        del self.links[number]
                        self.edge.gone(number)
            link.close()

    def _look(self) -> None:
        """Send sensors what was deployed meanwhile."""
        while not self._closing.wait(_LOOK_SECONDS):
            with self._lock:
                self._push()

    def _push(self) -> None:
        try:
            if isinstance(self.edge, StoredEdge):
                self.edge.refresh()
        except (OSError, FedcompError) as error:
            # Once: it is looked at several times a second.
            if str(error) != self._unread:
                self._unread = str(error)
                log.warning("the deployed model cannot be read; sensors keep the one they have: %s", error)
            return
        self._unread = ""
        for number, link in list(self.links.items()):
            try:
                self.edge.push(number, link)
            except OSError as error:
                log.warning("sensor %d was not sent the deployed model, its connection is closed: %s", number, error)
                # A part of a message may have gone; the sensor comes back, and is sent the whole.
                link.close()
                del self.links[number]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a folder's sensors until interrupted; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fedcomp.clients.sensors", description="Talk to a node's sensors.")
    parser.add_argument("--listen", required=True, metavar="ADDRESS", help="unix:/path or tcp://host:port")
    parser.add_argument("--folder", required=True, type=Path, metavar="DIR", help="shared with the node's app")
    parser.add_argument("--most", type=int, default=64, metavar="N", help="windows to keep (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        server = SensorServer(StoredEdge(args.folder, most=params.integer("most", args.most, low=1)), args.listen)
    except FedcompError as error:
        parser.error(str(error))
    server.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    print(f"sensors connect to {args.listen}", flush=True)
    server.wait()
    server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
