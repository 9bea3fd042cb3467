"""The server's proxy: TLS from the nodes, ``/v1/fleet/`` to the SuperLink on loopback, 403 for everything else.

The port that Flower opens for nodes also takes the orders of the operator and of the app processes; whoever reaches it
can register nodes and start runs. So the SuperLink listens on loopback only, and nodes reach it through here.

Connections are asyncio's and HTTP is h11's, a strict parser that comes with Flower's own server and client. Every
message is parsed and written anew, never copied: both ends read the same bytes in the same way. Bodies pass in pieces
as they arrive, in both directions. Flower speaks HTTP/1.1 with POST only (read), and so does this.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any, ClassVar, Final

import h11

from fedcomp.errors import ConfigError
from fedcomp.experiments.security.status import Callers

PATH: Final = re.compile(rb"/v1/fleet/[a-z]+(?:-[a-z]+)*", re.ASCII)
"""The whole target of a call that passes: no query, no escapes, no second slash, nothing to be read in two ways."""
Headers = Sequence[tuple[bytes, bytes]]
_PIECE: Final = 64 * 1024
_SMALL: Final = 64 * 1024
"""Most bytes of a body that are as little as what its connection takes."""
_STALE: Final = 4.0
"""Seconds after which an idle connection to the SuperLink is not used again; its server closes it after five."""
_HOP: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
"""Headers about one connection, which say nothing on the next."""
_FORWARDED: Final = frozenset((b"forwarded", b"x-forwarded-for", b"x-forwarded-proto", b"x-real-ip"))
"""Headers that a server believes when they come from loopback: only ours may."""


@dataclass(frozen=True)
class Limits:
    """What one client may take of the proxy.

    Parameters
    ----------
    per_address : int
        Connections of one address at a time; a node has about four, and nodes behind one router share an address.
    connections : int
        Connections at a time in all.
    head : int
        Most bytes of a request's line and headers.
    body : int
        Most bytes of a request's body; an object of Flower's has at most 20 MiB.
    address_bytes, all_bytes : int
        Bytes of bodies under way at a time, of one address and in all, and as many of answers: the SuperLink holds a
        body until it is complete and only then looks at who sent it, and an answer until it is taken. Counted as
        announced; what has 64 KiB and less is not counted.
    queue : float
        Seconds that a body waits for room, before it is read.
    handshake, idle : float
        Seconds for the TLS handshake, and for the next request's head to be complete.
    transfer : float
        Seconds for a request's body to be complete, and for an answer to be taken; Flower gives up a message after 180.
    stall : float
        Seconds without a byte from the client, or in which it takes none.
    answer : float
        Seconds for the SuperLink to answer.
    linger : float
        Seconds in which a client that was refused may stop sending and read why.
    """

    per_address: int = 1024
    connections: int = 4096
    head: int = 16 * 1024
    body: int = 64 * 1024 * 1024
    address_bytes: int = 128 * 1024 * 1024
    all_bytes: int = 512 * 1024 * 1024
    queue: float = 10.0
    handshake: float = 10.0
    idle: float = 60.0
    transfer: float = 600.0
    stall: float = 60.0
    answer: float = 300.0
    linger: float = 2.0


class Refused(Exception):
    """A request that is answered here: its status, and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class ThinnedLog:
    """Lines about refusals, of which a flood makes few: each once a minute, ten of an address, a hundred in all.

    Parameters
    ----------
    say : callable
        Receives one line for each refusal, and one for those that had none.
    """

    SECONDS: ClassVar[float] = 60.0
    LINES: ClassVar[int] = 100
    EACH: ClassVar[int] = 10

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._since = -self.SECONDS
        self._said: dict[str, set[str]] = {}
        self._more: Counter[str] = Counter()

    def __call__(self, address: str, text: str) -> None:
        """Say that ``address`` was refused, and why."""
        if time.monotonic() - self._since >= self.SECONDS:
            self.flush()
        said = self._said.get(address, set())
        if text in said or len(said) >= self.EACH or sum(map(len, self._said.values())) >= self.LINES:
            # Addresses are bounded as well: those of an attacker may be as many as there are.
            self._more[address if address in self._more or len(self._more) < self.LINES else "others"] += 1
            return
        self._said.setdefault(address, said).add(text)
        self._say(f"proxy: refused {address}: {text}")

    def flush(self) -> None:
        """Say how many refusals had no line, and begin another minute."""
        if self._more:
            most = ", ".join(f"{address} ({count})" for address, count in self._more.most_common(3))
            self._say(f"proxy: {self._more.total()} more refusals without a line, most of {most}")
        self._since = time.monotonic()
        self._said.clear()
        self._more.clear()


def examine(request: h11.Request, limits: Limits) -> None:
    """Raise :class:`Refused` unless ``request`` is a call of the fleet API in its one plain form."""
    names = [name for name, _ in request.headers]
    if not PATH.fullmatch(request.target):
        raise Refused(403, "this port passes only calls of nodes; operators reach the SuperLink on its own machine")
    # h11 bounds a head that is incomplete; one that came whole is as long as what was read at once.
    if len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers) > limits.head:
        raise Refused(431, f"a head has at most {limits.head} bytes")
    if request.method != b"POST":
        raise Refused(405, "the calls of nodes are POST")
    # h11 has merged lengths that agree and refused those that differ.
    if b"transfer-encoding" in names and b"content-length" in names:
        raise Refused(400, "a body has a length or is chunked, not both")
    if b"expect" in names or b"upgrade" in names:
        raise Refused(417, "Expect and Upgrade are not supported here")
    if announced(request.headers, limits) > limits.body:
        raise Refused(413, f"a body has at most {limits.body} bytes")


def announced(headers: Headers, limits: Limits, unsaid: int = 0) -> int:
    """Return how many bytes a body has at most, by its length: ``unsaid`` without one, all that may be in chunks."""
    said = dict(headers)
    return limits.body if b"transfer-encoding" in said else int(said.get(b"content-length", unsaid))


@dataclass
class UnderWay:
    """Bytes under way in one direction, of which each address and all of them may have so many.

    Parameters
    ----------
    limits : Limits
    """

    limits: Limits
    sizes: Counter[str] = field(default_factory=Counter)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)

    def fits(self, address: str, size: int) -> bool:
        """Return whether there is room for ``size`` bytes more of ``address``."""
        limits = self.limits
        return size <= _SMALL or (
            self.sizes[address] + size <= limits.address_bytes and self.sizes.total() + size <= limits.all_bytes
        )

    async def until_it_fits(self, address: str, size: int) -> None:
        """Return when there is room."""
        while not self.fits(address, size):
            await self._freed.wait()

    @contextlib.contextmanager
    def hold(self, address: str, size: int) -> Iterator[None]:
        """Hold room."""
        if size <= _SMALL:
            yield
            return
        self.sizes[address] += size
        try:
            yield
        finally:
            self.sizes[address] -= size
            # A Counter keeps its zeros.
            self.sizes += Counter()
            self._freed.set()
            self._freed = asyncio.Event()


@dataclass
class Peer:
    """One end of a connection: its streams, its parser, and how long it may take.

    Parameters
    ----------
    reader, writer
        The streams.
    state : h11.Connection
        What has been said on the connection.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    state: h11.Connection

    async def event(self, seconds: float) -> Any:
        """Return the next event that arrives within ``seconds``."""
        async with asyncio.timeout(seconds):
            while (event := self.state.next_event()) is h11.NEED_DATA:
                self.state.receive_data(await self.reader.read(_PIECE))
        return event

    async def send(self, event: Any, seconds: float) -> None:
        """Write an event; wait up to ``seconds`` while the other end takes nothing."""
        data = self.state.send(event)
        if data:
            self.writer.write(data)
            async with asyncio.timeout(seconds):
                await self.writer.drain()

    def again(self) -> bool:
        """Make ready for another request, if both ends agree to one."""
        if self.state.our_state is h11.DONE and self.state.their_state is h11.DONE:
            self.state.start_next_cycle()
            return True
        return False


@dataclass
class Proxy:
    """Pass calls of nodes to the SuperLink on loopback ``port``.

    Parameters
    ----------
    port : int
        Where the SuperLink listens.
    tls : ssl.SSLContext, optional
        What nodes see; without it, anybody on the way reads and changes everything.
    trust : ssl.SSLContext, optional
        How the SuperLink's certificate is verified; None for a SuperLink without TLS.
    limits : Limits
    say : callable
        Receives lines about refusals.
    callers : Callers
        Counts calls by their keys.
    """

    port: int
    tls: ssl.SSLContext | None = None
    trust: ssl.SSLContext | None = None
    limits: Limits = field(default_factory=Limits)
    say: Callable[[str], object] = print
    callers: Callers = field(default_factory=Callers)
    _open: Counter[str] = field(default_factory=Counter)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._refusals = ThinnedLog(self.say)
        self._bodies, self._answers = UnderWay(self.limits), UnderWay(self.limits)

    @property
    def connections(self) -> int:
        """How many connections of nodes are open."""
        return self._open.total()

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until cancelled; then close all of them."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, (address, *_) = await loop.sock_accept(listener)
                except OSError as error:
                    # Out of descriptors, or the client left in the queue.
                    self._refusals("somebody", f"no connection accepted: {error}")
                    await asyncio.sleep(0.1)
                    continue
                if self._open[address] >= self.limits.per_address or self._open.total() >= self.limits.connections:
                    # Reset, not closed: a node retries after a reset, and gives up when TLS ends in the middle.
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.close()
                    self.callers.refused["reset"] += 1
                    self._refusals(address, "as many connections as one address, or all of them, may have")
                    continue
                # Before the handshake, which is where an attacker waits first.
                self._open[address] += 1
                task = loop.create_task(self._client(connection, address))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._refusals.flush()

    async def _client(self, connection: socket.socket, address: str) -> None:
        # Errors of the network, and clients that are too slow: there is nobody to tell.
        with contextlib.suppress(OSError, h11.LocalProtocolError):
            try:
                client = await self._accept(connection)
                try:
                    await self._converse(client, address)
                finally:
                    client.writer.close()
            finally:
                self._open[address] -= 1
                if not self._open[address]:
                    del self._open[address]

    async def _accept(self, connection: socket.socket) -> Peer:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(_PIECE, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        patience = {"ssl_handshake_timeout": self.limits.handshake, "ssl_shutdown_timeout": 5.0} if self.tls else {}
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self.tls, **patience)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        return Peer(reader, writer, h11.Connection(h11.SERVER, self.limits.head))

    async def _converse(self, client: Peer, address: str) -> None:
        """Answer the requests of one connection, one after the other."""
        server: Peer | None = None
        request, used = None, 0.0
        clock = asyncio.get_running_loop().time
        try:
            while isinstance(request := await client.event(self.limits.idle), h11.Request):
                examine(request, self.limits)
                async with self._room(address, announced(request.headers, self.limits)):
                    if server is None or server.reader.at_eof() or clock() - used > _STALE:
                        if server is not None:
                            server.writer.close()
                        server = await self._connect()
                    await self._exchange(request, client, server, address)
                used, request = clock(), None
                if not server.again():
                    server.writer.close()
                    server = None
                if not client.again():
                    break
        except (Refused, h11.RemoteProtocolError) as error:
            await self._refuse(client, error, address, request)
        finally:
            if server is not None:
                server.writer.close()

    @contextlib.asynccontextmanager
    async def _room(self, address: str, size: int) -> AsyncIterator[None]:
        """Hold room for a body while it and its answer pass; wait for it first, while nothing of it is read."""
        try:
            async with asyncio.timeout(self.limits.queue):
                await self._bodies.until_it_fits(address, size)
        except TimeoutError:
            raise Refused(503, "too many bodies are under way; try again") from None
        with self._bodies.hold(address, size):
            yield

    async def _connect(self) -> Peer:
        name = "localhost" if self.trust else None
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", self.port, limit=_PIECE, ssl=self.trust, server_hostname=name
            )
        except OSError as error:
            raise Refused(502, f"the SuperLink does not answer: {error}") from error
        return Peer(reader, writer, h11.Connection(h11.CLIENT))

    async def _exchange(self, request: h11.Request, client: Peer, server: Peer, address: str) -> None:
        """Pass one request on and its answer back, both in pieces."""
        limits = self.limits
        kept = [(name, value) for name, value in request.headers if name not in _HOP | _FORWARDED]
        kept.append((b"x-forwarded-for", address.encode()))
        if b"transfer-encoding" in dict(request.headers):
            kept.append((b"transfer-encoding", b"chunked"))
        size = 0
        with _to_server():
            await server.send(h11.Request(method="POST", target=request.target, headers=kept), limits.stall)
        async with asyncio.timeout(limits.transfer):
            while isinstance(event := await client.event(limits.stall), h11.Data):
                size += len(event.data)
                if size > limits.body:
                    raise Refused(413, f"a body has at most {limits.body} bytes")
                with _to_server():
                    await server.send(h11.Data(data=event.data), limits.stall)
        with _to_server():
            # Trailers, if any, end here.
            await server.send(h11.EndOfMessage(), limits.stall)
            while isinstance(answer := await server.event(limits.answer), h11.InformationalResponse):
                pass
        if not isinstance(answer, h11.Response):
            raise Refused(502, "the SuperLink broke off before it answered")
        announces = announced(answer.headers, limits, unsaid=limits.body)
        if not self._answers.fits(address, announces):
            # It does not wait: the SuperLink holds it meanwhile, and lets it go when the connection ends.
            server.writer.close()
            raise Refused(503, "too many answers are under way; try again")
        with self._answers.hold(address, announces):
            async with asyncio.timeout(limits.transfer):
                down = await self._answer(answer, client, server)
        self.callers.note(request.headers, address, answer.status_code, size, down)

    async def _answer(self, answer: h11.Response, client: Peer, server: Peer) -> int:
        """Pass an answer back; return the bytes of its body."""
        limits = self.limits
        headers, down = [(name, value) for name, value in answer.headers if name not in _HOP], 0
        await client.send(h11.Response(status_code=answer.status_code, headers=headers), limits.stall)
        try:
            while isinstance(event := await server.event(limits.answer), h11.Data):
                down += len(event.data)
                await client.send(h11.Data(data=event.data), limits.stall)
        except h11.RemoteProtocolError as error:
            # The answer has begun: this can only be shown by breaking off.
            raise ConnectionResetError("the SuperLink broke off within its answer") from error
        await client.send(h11.EndOfMessage(), limits.stall)
        return down

    async def _refuse(self, client: Peer, error: Exception, address: str, request: Any) -> None:
        """Say why, on both sides, and end the connection."""
        status = error.status if isinstance(error, Refused) else getattr(error, "error_status_hint", 400)
        target = request.target[:100] if isinstance(request, h11.Request) else b""
        # What the client wrote is shown as ASCII, so that no line of a log is another's words.
        self.callers.refused[str(status)] += 1
        self._refusals(address, f"{status} {target.decode('latin-1')!a}: {str(error)[:200]!a}")
        if client.state.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = f"{error}\n".encode()
        headers = [("content-type", "text/plain; charset=utf-8"), ("content-length", str(len(body)))]
        # A node that checks its clock before a start has no other time to compare with.
        headers.append(("date", formatdate(usegmt=True)))
        answer = h11.Response(status_code=status, headers=[*headers, ("connection", "close")])
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            await client.send(event, self.limits.stall)
        # A connection that is closed with bytes unread is reset, and the client might not see the answer.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.linger):
                while await client.reader.read(_PIECE):
                    pass


@contextlib.contextmanager
def _to_server() -> Iterator[None]:
    """Turn what goes wrong between here and the SuperLink into an answer to the client."""
    try:
        yield
    except TimeoutError:
        raise Refused(504, "the SuperLink takes too long") from None
    except (OSError, h11.RemoteProtocolError) as error:
        raise Refused(502, f"the SuperLink broke off: {error}") from error


def contexts(certificate: Path, key: Path, ca: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return what nodes see, and how the SuperLink's certificate is verified.

    Raises
    ------
    ConfigError
        When a file is missing or damaged, or the key is another certificate's.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.minimum_version = ssl.TLSVersion.TLSv1_2
    server.set_alpn_protocols(["http/1.1"])
    try:
        server.load_cert_chain(certificate, key)
        trust = ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{certificate}, {key} and {ca} cannot be used together: {error}") from error
    return server, trust
