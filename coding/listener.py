"""The receiving end of TCP peer links: ``python -m fedcomp.coding.listener --listen HOST:PORT --store DIR``.

Every connection brings one parcel, which is put into a spool and acknowledged when it is on disk. Whoever can reach the
port can send, so nothing a peer does may cost more than its share: a parcel's size is checked before a byte of its body
is read, connections are few and short, and whatever one of them does ends with itself. It listens where it is told and
nowhere else, and it leaves with whoever started it: ``--until-closed FD`` names a pipe whose other end they hold.
With ``--key`` and ``--peer-keys`` it takes TLS only, from nodes whose keys are listed: everybody else is refused in the
handshake, and who is not may not write another partition's name on a parcel.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedcomp.coding.errors import PacketError, TransportError
from fedcomp.coding.parcels import (
    HEADER_BYTES,
    MAX_PARCEL_BYTES,
    MAX_STORE_BYTES,
    Parcel,
    StoreFull,
    parcel_length,
    parcel_source,
)
from fedcomp.coding.peertls import PeerKeys, PeerTls
from fedcomp.coding.spool import Spool, file_name
from fedcomp.coding.transport import BUSY, FAILED, FULL, KEPT, REFUSED, acknowledgement, parse_host_port
from fedcomp.errors import ConfigError, FedcompError

_LOG: Final = logging.getLogger(__name__)
_REPORT_SECONDS: Final = 10.0
_CHUNK_BYTES: Final = 1 << 16
_KINDS: Final = {
    "CERTIFICATE_VERIFY_FAILED": "unlisted key",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no certificate",
    "UNSUPPORTED_PROTOCOL": "TLS below 1.3",
    "WRONG_VERSION_NUMBER": "no TLS",
    "HTTP_REQUEST": "no TLS",
}
"""What ended a handshake, by OpenSSL's name for it."""


@dataclass(frozen=True)
class ListenerLimits:
    """What one peer, and all of them together, may take.

    Attributes
    ----------
    parcel_bytes : int
        Largest parcel, header included.
    connections : int
        Open at the same time; what comes above is told so and closed.
    per_host : int
        Of these, from one address.
    buffered_bytes : int
        Of unfinished parcels, all connections together. Counted as it arrives, never as announced: taking it up costs
        a peer as much bandwidth.
    seconds : float
        From the opening of a connection to its end.
    per_key : int
        Connections at the same time that show the same key.
    key_bytes, key_parcels : int
        Kept at the same time of what came under one key since the listener began; 0: half of what the store holds.
        Likewise at most half of ``buffered_bytes`` is one key's, or one address's where there are no keys.
    """

    parcel_bytes: int = MAX_PARCEL_BYTES
    connections: int = 128
    per_host: int = 64
    buffered_bytes: int = 4 * MAX_PARCEL_BYTES
    seconds: float = 30.0
    per_key: int = 16
    key_bytes: int = 0
    key_parcels: int = 0

    def __post_init__(self) -> None:
        if self.parcel_bytes < HEADER_BYTES:
            raise ConfigError(f"parcel_bytes is {self.parcel_bytes}; a parcel's header alone has {HEADER_BYTES}")
        if self.buffered_bytes < self.parcel_bytes:
            raise ConfigError(
                f"buffered_bytes is {self.buffered_bytes}, less than the {self.parcel_bytes} of the largest parcel"
            )
        quotas = min(self.key_bytes, self.key_parcels)
        if min(self.connections, self.per_host, self.per_key) < 1 or not self.seconds > 0 or quotas < 0:
            raise ConfigError(
                f"connections={self.connections}, per_host={self.per_host}, per_key={self.per_key}, "
                f"seconds={self.seconds:g}: all must be positive"
            )


class Listener:
    """Accepts parcels until :meth:`stop`.

    Parameters
    ----------
    store : Spool
    limits : ListenerLimits
    tls : PeerTls, optional
        Take nothing but TLS, from nodes whose keys are in its list.

    Attributes
    ----------
    refused : Counter of str
        How many connections brought nothing, by kind of reason.
    """

    def __init__(self, store: Spool, limits: ListenerLimits, tls: PeerTls | None = None) -> None:
        self.refused: Counter[str] = Counter()
        self._store = store
        self._limits = limits
        self._tls = tls
        self._open: Counter[str] = Counter()
        self._open_keys: Counter[int] = Counter()
        # By partition: bytes and parcels on their way under its key.
        self._coming: Counter[int] = Counter()
        self._coming_parcels: Counter[int] = Counter()
        # By partition: the files that came under its key, and how long each is.
        self._came: dict[int, dict[str, int]] = {}
        # By key, or address where there are none.
        self._buffered: Counter[int | str] = Counter()
        self._told = 0
        self._last = ""
        self._stop = asyncio.Event()

    async def run(self, host: str, port: int, ready: Callable[[str], object]) -> None:
        """Listen on ``host`` and ``port`` until :meth:`stop`; call ``ready`` with the address once it is open.

        Raises
        ------
        ConfigError
            When the address cannot be bound.
        """
        try:
            server = await asyncio.start_server(self._serve, host, port, backlog=self._limits.connections)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error}; choose an address of this machine and a free port"
            ) from error
        bound = server.sockets[0].getsockname()
        ready(f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}")
        reporter = asyncio.create_task(self._report())
        try:
            await self._stop.wait()
        finally:
            reporter.cancel()
            # No wait_closed(): it would wait for the connections that are to be dropped.
            server.close()
        self._tell()

    def stop(self) -> None:
        """End :meth:`run`; connections that are open are dropped, and their senders know."""
        self._stop.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        host = str(peer[0]) if peer else "?"
        busy = self._open.total() >= self._limits.connections or self._open[host] >= self._limits.per_host
        # One that is turned away counts too while it is answered: it holds a descriptor like any other.
        self._open[host] += 1
        try:
            # One limit for reading, keeping and answering: sending a byte at a time does not stretch it.
            async with asyncio.timeout(self._limits.seconds):
                if busy:
                    answer = self._refuse(BUSY, "busy", f"{host} connected when all connections were taken")
                elif self._tls is None:
                    answer = await self._receive(host, reader)
                else:
                    answer = await self._receive_tls(self._tls, host, reader, writer)
                # To who is turned away before a TLS handshake this is no TLS, which ends the connection as well.
                writer.write(answer)
                await writer.drain()
        except ssl.SSLError as error:
            kind = _KINDS.get(error.reason or "", "handshake")
            self._refuse(REFUSED, kind, f"{host}: {error}")
            writer.transport.abort()
        except (OSError, asyncio.IncompleteReadError) as error:
            # The timeout ends here too: TimeoutError is an OSError.
            self._refuse(REFUSED, "broken off", f"{host}: {error!r}")
            # A peer that dawdles gets no orderly end: its half of the connection would have to be waited for.
            writer.transport.abort()
        finally:
            self._open[host] -= 1
            if not self._open[host]:
                # A Counter keeps its zeros: every address that ever connected would stay in memory.
                del self._open[host]
            writer.close()

    async def _receive_tls(
        self, tls: PeerTls, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        """Read one parcel over TLS, from whom a listed key proves to be its partition; return the answer to it."""
        # No await before this: what the peer sends first must not be read by the reader.
        await writer.start_tls(tls.server, ssl_handshake_timeout=self._limits.seconds)
        partition = tls.peer(writer.get_extra_info("ssl_object"))
        if partition is None:
            return self._refuse(REFUSED, "unlisted key", f"{host} presented a certificate for a key that is not listed")
        if self._open_keys[partition] >= self._limits.per_key:
            reason = f"partition {partition} has {self._limits.per_key} connections open"
            return self._refuse(BUSY, "busy", reason)
        self._open_keys[partition] += 1
        try:
            return await self._receive(host, reader, partition)
        finally:
            self._open_keys[partition] -= 1

    async def _receive(self, host: str, reader: asyncio.StreamReader, partition: int | None = None) -> bytes:
        """Read one parcel and keep it; return the answer to it. ``partition``: whose key the connection has shown."""
        header = await reader.readexactly(HEADER_BYTES)
        try:
            total = parcel_length(header, self._limits.parcel_bytes)
        except PacketError as error:
            return self._refuse(REFUSED, "no parcel", f"{host}: {error}", header)
        if partition is not None and (refused := self._improper(host, partition, header, total)):
            return refused
        try:
            if partition is not None:
                self._coming[partition] += total
                self._coming_parcels[partition] += 1
            return await self._body(host, reader, header, total, partition)
        finally:
            if partition is not None:
                self._coming[partition] -= total
                self._coming_parcels[partition] -= 1

    def _improper(self, host: str, partition: int, header: bytes, total: int) -> bytes:
        """Return the answer to a header that its sender may not write, by its key; nothing when it may."""
        source = parcel_source(header)
        if source not in (None, partition):
            reason = f"{host} has the key of partition {partition} and sends in the name of {source}"
            return self._refuse(REFUSED, "another partition", reason, header)
        # With what is still on its way: those are this key's own bytes, and its own loss where it only announces them.
        try:
            parcels, held = self._held_of(partition)
        except TransportError as error:
            return self._refuse(FAILED, "not written", f"{host}: {error}", header)
        held += self._coming[partition]
        parcels += self._coming_parcels[partition]
        if held + total > (self._limits.key_bytes or self._store.max_store_bytes // 2):
            reason = f"partition {partition} has {held} bytes here, and sends {total} more"
            return self._refuse(FULL, "quota", reason, header)
        # Files cost a place in the directory whatever their size: every writer looks through all of them.
        if parcels >= (self._limits.key_parcels or max(1, self._store.max_parcels // 2)):
            return self._refuse(FULL, "quota", f"partition {partition} has {parcels} parcels here", header)
        return b""

    async def _body(
        self, host: str, reader: asyncio.StreamReader, header: bytes, total: int, partition: int | None
    ) -> bytes:
        """Read a parcel's body and keep the parcel; return the answer to it."""
        # One buffer that grows: pieces may be a byte long, and as objects of their own would take far more memory.
        data = bytearray(header)
        arrived = 0
        sender: int | str = host if partition is None else partition
        most = max(self._limits.buffered_bytes // 2, self._limits.parcel_bytes)
        try:
            while arrived < total - HEADER_BYTES:
                chunk = await reader.read(min(total - HEADER_BYTES - arrived, _CHUNK_BYTES))
                if not chunk:
                    raise asyncio.IncompleteReadError(header, total)
                full = self._buffered.total() + len(chunk) > self._limits.buffered_bytes
                if full or self._buffered[sender] + len(chunk) > most:
                    return self._refuse(BUSY, "busy", f"{host} sent more than the memory that is left", header)
                data += chunk
                arrived += len(chunk)
                self._buffered[sender] += len(chunk)
            parcel = Parcel.from_bytes(data, self._limits.parcel_bytes)
            # Writing to a disk may take a while, and others need not wait for it.
            await asyncio.to_thread(self._store.put, parcel)
            if partition is not None:
                self._came.setdefault(partition, {})[file_name(parcel)] = total
        except PacketError as error:
            return self._refuse(REFUSED, "no parcel", f"{host}: {error}", header)
        except StoreFull as error:
            # Caught before TransportError, of which it is a kind: the sender learns that room is missing, not the disk.
            return self._refuse(FULL, "store full", f"{host}: {error}", header)
        except TransportError as error:
            return self._refuse(FAILED, "not written", f"{host}: {error}", header)
        finally:
            # Also on a timeout or an error, or the budget that all connections share would shrink for good.
            self._buffered[sender] -= arrived
            if not self._buffered[sender]:
                del self._buffered[sender]
        return acknowledgement(KEPT, header)

    def _held_of(self, partition: int) -> tuple[int, int]:
        """Return how many parcels are in the store that came under a partition's key, and their bytes."""
        came = self._came.get(partition)
        if not came:
            return 0, 0
        # What a client app has taken or dropped is no longer there.
        there = self._store.names()
        self._came[partition] = came = {name: size for name, size in came.items() if name in there}
        return len(came), sum(came.values())

    def _refuse(self, status: int, kind: str, reason: str, header: bytes = b"") -> bytes:
        """Count a connection that brought nothing; return the answer to it."""
        self.refused[kind] += 1
        self._last = reason
        return acknowledgement(status, header)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            self._tell()

    def _tell(self) -> None:
        """Log what was refused since the last time: a line per interval, not one per unknown connection."""
        if (total := self.refused.total()) > self._told:
            kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.refused.items()))
            _LOG.warning("%d connections brought nothing so far (%s); the last: %s", total, kinds, self._last)
            self._told = total


async def serve(
    listen: tuple[str, int],
    store: Spool,
    limits: ListenerLimits,
    *,
    ready: Callable[[str], object],
    until_closed: int | None = None,
    tls: PeerTls | None = None,
) -> None:
    """Run a listener until SIGTERM, SIGINT, or the end of the pipe ``until_closed``.

    With a pipe SIGINT and SIGHUP are ignored: a Ctrl-C, or a terminal that is closed, reaches the whole group of
    processes, and the one that holds the pipe decides when it has ended.
    """
    listener = Listener(store, limits, tls)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, listener.stop)
    if until_closed is None:
        loop.add_signal_handler(signal.SIGINT, listener.stop)
    else:
        for number in (signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, lambda: None)
        # A reader may be woken with nothing to read; a blocking read would then stop the whole loop.
        os.set_blocking(until_closed, False)

        def look() -> None:
            with contextlib.suppress(BlockingIOError):
                # Only the end of the pipe counts, an empty read; what is written into it is ignored.
                if not os.read(until_closed, 4096):
                    loop.remove_reader(until_closed)
                    listener.stop()

        loop.add_reader(until_closed, look)
    await listener.run(*listen, ready)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and listen; return 0 at the end, 1 with a message when it cannot begin."""
    parser = _parser()
    args = parser.parse_args(argv)
    logging.basicConfig(format="listener: %(message)s", level=logging.INFO, stream=sys.stderr)
    try:
        listen = parse_host_port(args.listen)
        limits = ListenerLimits(
            parcel_bytes=args.parcel_bytes,
            connections=args.connections,
            per_host=args.per_host,
            # A parcel is buffered whole: with less memory the largest one could never arrive.
            buffered_bytes=max(args.buffered_bytes, args.parcel_bytes),
            seconds=args.seconds,
            per_key=args.per_key,
            key_bytes=args.key_bytes,
            key_parcels=args.key_parcels,
        )
        tls = _tls(args)
        # An acknowledgement says that the parcel is on disk, so it is flushed before put() returns.
        store = Spool(args.store, args.store_bytes, durable=True)
        ready = _Ready(args.ready)
        asyncio.run(serve(listen, store, limits, ready=ready, until_closed=args.until_closed, tls=tls))
    except FedcompError as error:
        print(f"python -m fedcomp.coding.listener: {error}", file=sys.stderr)
        return 1
    finally:
        if args.temporary:
            shutil.rmtree(args.store, ignore_errors=True)
    return 0


def _tls(args: argparse.Namespace) -> PeerTls | None:
    if (args.key is None) != (args.peer_keys is None):
        raise ConfigError("--key and --peer-keys must be given together: this node's key, and the list of known keys")
    return None if args.key is None else PeerTls(args.key, PeerKeys.read(args.peer_keys))


class _Ready:
    """Tells whoever started the listener that it is open."""

    def __init__(self, pipe: int | None) -> None:
        self._pipe = pipe

    def __call__(self, address: str) -> None:
        print(f"listening for parcels on {address}", flush=True)
        if self._pipe is not None:
            with os.fdopen(self._pipe, "w") as pipe:
                pipe.write(f"{address}\n")


def _parser() -> argparse.ArgumentParser:
    defaults = ListenerLimits()
    parser = argparse.ArgumentParser(prog="python -m fedcomp.coding.listener", description="Receive parcels of peers.")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="the only address to listen on")
    parser.add_argument("--store", required=True, type=Path, metavar="DIR", help="where parcels are kept")
    parser.add_argument("--store-bytes", type=int, default=MAX_STORE_BYTES, metavar="B", help="most bytes kept")
    parser.add_argument("--parcel-bytes", type=int, default=defaults.parcel_bytes, metavar="B", help="largest parcel")
    parser.add_argument("--connections", type=int, default=defaults.connections, metavar="N", help="most at a time")
    parser.add_argument("--per-host", type=int, default=defaults.per_host, metavar="N", help="most from one address")
    parser.add_argument(
        "--buffered-bytes",
        type=int,
        default=defaults.buffered_bytes,
        metavar="B",
        help="most bytes of unfinished parcels in memory; never less than one parcel",
    )
    parser.add_argument("--seconds", type=float, default=defaults.seconds, metavar="S", help="longest connection")
    parser.add_argument(
        "--key", type=Path, metavar="F", help="this node's private key: take TLS only, from listed nodes"
    )
    parser.add_argument("--peer-keys", type=Path, metavar="F", help="list of partitions and their public keys")
    parser.add_argument(
        "--per-key", type=int, default=defaults.per_key, metavar="N", help="most connections of one key"
    )
    parser.add_argument(
        "--key-bytes",
        type=int,
        default=0,
        metavar="B",
        help="most bytes to keep from one key; 0: half of the store",
    )
    parser.add_argument(
        "--key-parcels",
        type=int,
        default=0,
        metavar="N",
        help="most parcels to keep from one key; 0: half of those that the store may hold",
    )
    parser.add_argument("--temporary", action="store_true", help="remove the store at the end")
    parser.add_argument("--until-closed", type=int, metavar="FD", help="exit when the other end of this pipe closes")
    parser.add_argument("--ready", type=int, metavar="FD", help="write the address to this pipe once the port is open")
    return parser


if __name__ == "__main__":
    sys.exit(main())
