"""Peer links: direct transport of parcels between clients.

Flower has no messages between clients, so these links stand beside it. Two kinds, one interface:

- ``tcp://host:port``: a listener (:mod:`fedcomp.coding.listener`) runs beside each SuperNode and puts what arrives into
  a spool; the client app, a new process for every message, sends from within and finds in the spool what came
  meanwhile.
- ``spool:/folder``: a simulated link on one machine. Sending is putting a file into the receiver's spool.

A parcel on a TCP connection is its bytes as they are, its header saying how long it is, answered by one
acknowledgement of 12 bytes: magic ``FCPA``, a status, three zeros, and the parcel's own CRC-32. It is sent after the
parcel is on disk. Parcels travel in the clear unless their bodies are sealed, or all of it is inside of TLS
(:mod:`fedcomp.coding.peertls`).
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from fedcomp.coding.errors import TransportError
from fedcomp.coding.parcels import (
    HEADER_BYTES,
    MAX_PARCEL_BYTES,
    MAX_STORE_BYTES,
    PARTITIONS_FROM,
    Parcel,
    StoreFull,
    parcel_length,
)
from fedcomp.coding.spool import Spool, SpoolRoot, parse_spool
from fedcomp.errors import ConfigError, nearest

if TYPE_CHECKING:
    from fedcomp.coding.peertls import PeerTls

__all__ = [
    "HEADER_BYTES",
    "MAX_PARCEL_BYTES",
    "MAX_STORE_BYTES",
    "DeliveryFailed",
    "Parcel",
    "PeerTransport",
    "SendResult",
    "Sender",
    "Spool",
    "SpoolRoot",
    "SpoolTransport",
    "StoreFull",
    "TcpSender",
    "TcpTransport",
    "deliver",
    "parcel_length",
    "parse_tcp",
    "transport_of",
]

ACK: Final = struct.Struct("<4sB3xI")
ACK_MAGIC: Final = b"FCPA"
KEPT: Final = 0
REFUSED: Final = 1
FULL: Final = 2
BUSY: Final = 3
FAILED: Final = 4

_SAID: Final = {
    REFUSED: "that peer does not accept this parcel; run the same release on all nodes and compare their size limits",
    FULL: "that peer's store is full; raise its --peer-store-bytes, or send fewer parcels",
    BUSY: "that peer has no free connection",
    FAILED: "that peer could not write it to its disk; its listener's messages say why",
}
_ADDRESSES: Final = ("tcp://host:port", "spool:/folder")
_LONGEST: Final = 300
"""Characters of an address: a name has at most 253."""
# The checksum is the last field of a parcel's header; an acknowledgement repeats it.
_CRC_AT: Final = HEADER_BYTES - 4


class DeliveryFailed(TransportError):
    """A parcel was not acknowledged.

    Attributes
    ----------
    handed_over : int
        Bytes that were given to the connection all the same, all attempts together; they may have crossed the link.
    """

    def __init__(self, message: str, handed_over: int = 0) -> None:
        super().__init__(message)
        self.handed_over = handed_over


class Sender(Protocol):
    """What hands parcels to other clients."""

    def send(self, address: str, parcel: Parcel, partition: int | None = None) -> int:
        """Hand ``parcel`` to the client at ``address``; return the bytes handed over.

        Parameters
        ----------
        address : str
        parcel : Parcel
        partition : int, optional
            Whose key that client has to show, on links with pinned keys.

        Raises
        ------
        DeliveryFailed
            When that client does not acknowledge it, or its address, which is a peer's word, is of no use here.
        """


class PeerTransport(Sender, Protocol):
    """One client's end of its peer links.

    Attributes
    ----------
    address : str
        What other clients send to.
    store : Spool
        Where parcels for this client are kept.
    """

    address: str
    store: Spool


@dataclass(frozen=True)
class SendResult:
    """What became of one parcel.

    Attributes
    ----------
    address : str
    parcel : Parcel
    handed_over : int
        Bytes given to the link.
    error : DeliveryFailed or None
        Why it was not acknowledged; None when it was.
    """

    address: str
    parcel: Parcel
    handed_over: int
    error: DeliveryFailed | None = None


class SpoolTransport:
    """Simulated peer links: every client has a spool on this machine.

    Parameters
    ----------
    address : str
        This client's own spool, ``spool:/folder``, below a folder marked by :meth:`SpoolRoot.create`.
    max_store_bytes : int
        Limit of each spool written to.
    """

    def __init__(self, address: str, max_store_bytes: int = MAX_STORE_BYTES) -> None:
        self.address = address
        self._limit = max_store_bytes
        self.store = self._spool(address)

    def send(self, address: str, parcel: Parcel, partition: int | None = None) -> int:
        """Put ``parcel`` into the spool at ``address``. See :class:`PeerTransport`."""
        try:
            self._spool(address).put(parcel)
        except (TransportError, ConfigError) as error:
            # An unusable address came from a message: it costs a delivery, like a peer that is away, and not the round.
            raise DeliveryFailed(f"peer {address}: {error}") from error
        return len(parcel)

    def _spool(self, address: str) -> Spool:
        folder = parse_spool(address)
        # Raises when nobody on this machine marked the folder for the purpose.
        SpoolRoot(folder.parent)
        return Spool(folder, self._limit)


class TcpSender:
    """The sending half of links over TCP: all that a client needs which cannot be reached itself.

    Parameters
    ----------
    connect_timeout, send_timeout : float
        Seconds to open a connection, and from then on to the acknowledgement, a handshake included.
    max_parcel_bytes : int
        Largest parcel to send.
    tls : PeerTls, optional
        Send over TLS, and only to whoever has a key of its list: that of the partition which the parcel or the caller
        names. Default: plain TCP.

    Notes
    -----
    A parcel that is not acknowledged is sent once more: a receiver keeps equal parcels once. What a receiver refuses is
    not sent again.
    """

    def __init__(
        self,
        *,
        connect_timeout: float = 3.0,
        send_timeout: float = 20.0,
        max_parcel_bytes: int = MAX_PARCEL_BYTES,
        tls: PeerTls | None = None,
    ) -> None:
        for name, seconds in (("connect_timeout", connect_timeout), ("send_timeout", send_timeout)):
            if not seconds > 0:
                raise ConfigError(f"{name} is {seconds!r}; expected a positive number of seconds")
        self._connect_timeout = connect_timeout
        self._send_timeout = send_timeout
        self._limit = max_parcel_bytes
        self._tls = tls

    def send(self, address: str, parcel: Parcel, partition: int | None = None) -> int:
        """Send ``parcel`` to the listener at ``address`` and wait for its acknowledgement. See :class:`PeerTransport`.

        The bytes of a first attempt that failed are part of what is returned.
        """
        try:
            place = parse_tcp(address)
        except ConfigError as error:
            raise DeliveryFailed(str(error)) from error
        if len(parcel) > self._limit:
            raise DeliveryFailed(f"a parcel of {len(parcel)} bytes exceeds the {self._limit} a peer accepts")
        data = parcel.to_bytes()
        wanted = parcel.destination if parcel.kind >= PARTITIONS_FROM else partition
        handed_over = 0
        for last in (False, True):
            attempt = _Attempt(place, data, self._tls, wanted)
            try:
                attempt.run(self._connect_timeout, self._send_timeout)
                return handed_over + attempt.handed_over
            except (OSError, _Refused) as error:
                handed_over += attempt.handed_over
                # BUSY is the only refusal that passes by itself.
                if last or (isinstance(error, _Refused) and error.status != BUSY):
                    raise DeliveryFailed(
                        f"peer {address} did not take a parcel of {len(data)} bytes: {error}", handed_over
                    ) from error
            # A listener that just started, or has just closed a connection, needs a moment.
            time.sleep(0.2)
        raise AssertionError("the second attempt returns or raises")


class TcpTransport(TcpSender):
    """Peer links over TCP; a listener puts what arrives for this client into ``store``.

    Parameters
    ----------
    address : str
        Where this client's listener is reached, ``tcp://host:port``.
    store : Spool
        The directory its listener writes to.
    **options
        Those of :class:`TcpSender`.
    """

    def __init__(self, address: str, store: Spool, **options: Any) -> None:
        # Says what is wrong with an address before a round depends on it.
        parse_tcp(address)
        super().__init__(**options)
        self.address = address
        self.store = store


class _Refused(Exception):
    """The peer answered that it does not keep the parcel."""

    def __init__(self, status: int) -> None:
        super().__init__(_SAID.get(status, f"it answered with the unknown status {status}"))
        self.status = status


class _Stranger(_Refused):
    """Somebody else answers at that address."""

    def __init__(self, found: int | None, wanted: int | None) -> None:
        whose = "a key that is not in the list" if found is None else f"the key of partition {found}"
        expected = "one of the list" if wanted is None else f"that of partition {wanted}"
        Exception.__init__(self, f"it has {whose} of peer keys, not {expected}; nothing was sent")
        self.status = REFUSED


class _Attempt:
    """One connection that carries one parcel; over TLS, to the node of the partition ``wanted`` where that is known."""

    def __init__(self, place: tuple[str, int], data: bytes, tls: PeerTls | None, wanted: int | None) -> None:
        self._place = place
        self._data = data
        self._tls = tls
        self._wanted = wanted
        self.handed_over = 0

    def run(self, connect_timeout: float, send_timeout: float) -> None:
        """Send and wait for the acknowledgement; raise :class:`OSError` or :class:`_Refused`."""
        opened = _connect(self._place, connect_timeout)
        deadline = time.monotonic() + send_timeout
        with self._secured(opened, deadline) as connection:
            try:
                self._send(connection, deadline)
            except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
                # A peer that refuses answers before it has read everything; its answer says more than the reset.
                if (status := self._answer(connection, deadline, strict=False)) is None:
                    raise
            else:
                status = self._answer(connection, deadline, strict=True)
        if status != KEPT:
            raise _Refused(-1 if status is None else status)

    def _secured(self, connection: socket.socket, deadline: float) -> socket.socket:
        """Return the connection, over TLS where that is asked for, when the right peer is at its end."""
        if self._tls is None:
            return connection
        try:
            connection.settimeout(_left(deadline))
            secured = self._tls.client.wrap_socket(connection)
        except BaseException:
            connection.close()
            raise
        found = self._tls.peer(secured)
        if found is None or self._wanted not in (None, found):
            secured.close()
            raise _Stranger(found, self._wanted)
        return secured

    def _send(self, connection: socket.socket, deadline: float) -> None:
        # A view: slices of bytes would copy the rest of the parcel for every piece that is sent.
        view = memoryview(self._data)
        while self.handed_over < len(view):
            # One deadline for all pieces: a peer that takes a byte at a time must not hold its sender.
            connection.settimeout(_left(deadline))
            self.handed_over += connection.send(view[self.handed_over :])

    def _answer(self, connection: socket.socket, deadline: float, *, strict: bool) -> int | None:
        """Return the status the peer answers; without ``strict`` None when there is no answer."""
        answer = b""
        try:
            while len(answer) < ACK.size:
                connection.settimeout(_left(deadline))
                more = connection.recv(ACK.size - len(answer))
                if not more:
                    hint = "" if self._tls is None else "; is this node's key in its list of peer keys?"
                    raise ConnectionError(f"it closed the connection without an acknowledgement{hint}")
                answer += more
        except OSError:
            if strict:
                raise
            return None
        magic, status, checksum = ACK.unpack(answer)
        (sent,) = struct.unpack_from("<I", self._data, _CRC_AT)
        if magic != ACK_MAGIC:
            raise ConnectionError(
                f"it answered {answer!r}, which is not an acknowledgement: does another program listen there?"
            )
        # An answer to another parcel would count this one as kept.
        if status == KEPT and checksum != sent:
            raise ConnectionError("it acknowledged another parcel")
        return int(status)


def _connect(place: tuple[str, int], seconds: float) -> socket.socket:
    """Return a connection to the first address of ``place`` that takes one, in ``seconds`` for all of them together.

    ``socket.create_connection`` gives each its own: a name with fifty addresses would hold its sender for minutes.
    """
    deadline = time.monotonic() + seconds
    found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
    failure: OSError = TimeoutError("no connection was made in time")
    for family, kind, protocol, _, address in found:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            connection = socket.socket(family, kind, protocol)
        except OSError as error:
            failure = error
            continue
        try:
            connection.settimeout(left)
            connection.connect(address)
            # The last piece of a handshake is not acknowledged until a parcel follows: held back, it costs 40 ms.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            connection.close()
            failure = error
            continue
        return connection
    raise failure


def acknowledgement(status: int, header: bytes = b"") -> bytes:
    """Return the answer to the parcel that began with ``header``; empty when there is none to speak of."""
    checksum = struct.unpack_from("<I", header, _CRC_AT)[0] if len(header) >= HEADER_BYTES else 0
    return ACK.pack(ACK_MAGIC, status, checksum)


def deliver(
    transport: Sender,
    outgoing: Iterable[tuple[str, Parcel]],
    *,
    partitions: Mapping[int, int] | None = None,
    workers: int = 8,
) -> list[SendResult]:
    """Send many parcels, several at a time, so that peers that do not answer cost their timeout once and not in turn.

    Parameters
    ----------
    transport : Sender
    outgoing : iterable of (str, Parcel)
        Addresses, and what goes there.
    partitions : mapping of int to int, optional
        By destination of a parcel: the partition that is to be there, where that is known.
    workers : int
        Threads.

    Returns
    -------
    list of SendResult
        In the order of ``outgoing``. A failed delivery is a loss the code is there for, not an exception.
    """

    known = partitions or {}

    def one(item: tuple[str, Parcel]) -> SendResult:
        address, parcel = item
        try:
            return SendResult(address, parcel, transport.send(address, parcel, known.get(parcel.destination)))
        except DeliveryFailed as error:
            return SendResult(address, parcel, error.handed_over, error)

    items = list(outgoing)
    if not items:
        return []
    with ThreadPoolExecutor(min(workers, len(items)), thread_name_prefix="peer-link") as pool:
        # map() keeps the order of what was sent, whatever the order in which peers answer.
        return list(pool.map(one, items))


def transport_of(
    address: str,
    store: Path | None = None,
    *,
    max_store_bytes: int = MAX_STORE_BYTES,
    max_parcel_bytes: int = MAX_PARCEL_BYTES,
    tls: PeerTls | None = None,
) -> PeerTransport:
    """Return the transport of the client that others reach at ``address``.

    Parameters
    ----------
    address : str
        ``tcp://host:port`` or ``spool:/folder``.
    store : Path, optional
        Directory its listener writes to; for ``tcp://`` only, and needed there.
    max_store_bytes, max_parcel_bytes : int
    tls : PeerTls, optional
        Of links over TCP, see :class:`TcpSender`. Simulated links are files of this machine.

    Raises
    ------
    ConfigError
        For an address of no known kind, or a store that is missing or superfluous.
    """
    if address.startswith("spool:"):
        if store is not None:
            raise ConfigError(f"{address} is its own store; leave out {store}")
        return SpoolTransport(address, max_store_bytes)
    if address.startswith("tcp:"):
        parse_tcp(address)
        if store is None:
            raise ConfigError(
                f"{address} needs the folder its listener writes to; fedcomp.clients.edge calls it --peer-store"
            )
        return TcpTransport(address, Spool(store, max_store_bytes), max_parcel_bytes=max_parcel_bytes, tls=tls)
    raise ConfigError(f"peer address {address!r} is of an unknown kind{nearest(address, _ADDRESSES)}")


def parse_tcp(address: str) -> tuple[str, int]:
    """Return host and port of ``tcp://host:port``; an IPv6 host stands in brackets.

    Raises
    ------
    ConfigError
        When ``address`` is not one.
    """
    if not address.startswith("tcp://"):
        raise ConfigError(
            f"peer address {address[:80]!r} is not 'tcp://host:port', for instance tcp://192.168.1.7:9100"
        )
    return parse_host_port(address.removeprefix("tcp://"))


def parse_host_port(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port``; an IPv6 host stands in brackets.

    Raises
    ------
    ConfigError
        When ``text`` is something else.
    """
    # From the right: an IPv6 host has colons of its own.
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    inner = host[1:-1] if bracketed else host
    wrong = not colon or not inner or any(c in inner for c in "/@[] \t\r\n\0") or (":" in inner) != bracketed
    wrong = wrong or len(text) > _LONGEST
    try:
        inner.encode("idna")  # as the resolver will, which has no error of its own for it
    except UnicodeError:
        wrong = True
    # Python refuses to read numbers of thousands of digits, with an error of another kind.
    if wrong or not (port.isascii() and port.isdigit() and len(port) <= 5) or not 0 < int(port) < 65536:
        raise ConfigError(
            f"address {text[:80]!r}; expected HOST:PORT with a port from 1 to 65535, e.g. 192.168.1.7:9100"
        )
    return inner, int(port)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no acknowledgement arrived in time")
    return left
