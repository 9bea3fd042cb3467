"""The proxy: only plain calls of the fleet API pass, in pieces, and whoever is slow, large or many is cut off."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from email.utils import parsedate_to_datetime

import h11
import pytest

from fedcomp.experiments.security.certificates import create
from fedcomp.experiments.security.proxy import PATH, Limits, Proxy, Refused, ThinnedLog, contexts, examine

LIMITS = Limits(
    per_address=4,
    connections=8,
    body=300_000,
    handshake=1.0,
    idle=1.0,
    transfer=3.0,
    stall=1.0,
    answer=1.5,
    linger=0.02,
)
CALL = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\n"
PULL = b"POST /v1/fleet/pull-object HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


class Backend:
    """A SuperLink that keeps what it was sent and answers with it, piece by piece."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.reply: Callable[[bytes, asyncio.StreamWriter], Awaitable[None]] | None = None
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                body = b""
                lines = head.lower().split(b"\r\n")
                lengths = [int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length")]
                if lengths:
                    body = await reader.readexactly(lengths[0])
                elif b"transfer-encoding: chunked" in lines:
                    while size := int(await reader.readline(), 16):
                        body += await reader.readexactly(size)
                        await reader.readexactly(2)
                    await reader.readline()
                self.received.append(head + body)
                if self.reply is not None:
                    await self.reply(body, writer)
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Return all that comes until the proxy closes."""
    try:
        return await asyncio.wait_for(reader.read(), 100)
    except ConnectionResetError:
        # Whether an end or a reset comes first where bytes are left unread is the kernel's affair.
        return b""


class Scene:
    """A proxy in front of a backend, and raw clients."""

    def __init__(self) -> None:
        self.backend = Backend()
        self.said: list[str] = []

    async def ask(self, data: bytes, *, tls: ssl.SSLContext | None = None) -> bytes:
        """Send bytes, return all that comes back until the proxy closes."""
        reader, writer = await self.open(tls)
        writer.write(data)
        try:
            return await rest(reader)
        finally:
            writer.close()

    async def open(self, tls: ssl.SSLContext | None = None):
        name = "localhost" if tls else None
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=tls, server_hostname=name)


def scene(body: Callable[[Scene], Awaitable[None]], *, limits: Limits = LIMITS, folder=None) -> Scene:
    """Run ``body`` beside a proxy and its backend."""
    made = Scene()

    async def main() -> None:
        tls, trust = contexts(folder.server, folder.server_key, folder.ca) if folder else (None, None)
        backend = await asyncio.start_server(made.backend, "127.0.0.1", 0, ssl=tls)
        made.proxy = Proxy(backend.sockets[0].getsockname()[1], tls, trust, limits, made.said.append)
        listener = socket.create_server(("127.0.0.1", 0))
        made.port = listener.getsockname()[1]
        made.server, made.listener = backend, listener
        serving = asyncio.create_task(made.proxy.serve(listener))
        try:
            await body(made)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            listener.close()
            backend.close()
        assert not made.proxy._open

    asyncio.run(main())
    return made


def test_a_call_and_its_answer_pass_and_the_connection_is_used_again():
    async def body(s: Scene) -> None:
        one = CALL + b"Content-Length: 3\r\nX-Forwarded-For: 9.9.9.9\r\nFlwr-Public-Key: k\r\n\r\nabc"
        # Two at once in one write, the second closes.
        answer = await s.ask(one + CALL + b"Connection: close\r\nContent-Length: 2\r\n\r\nde")
        assert answer.count(b"HTTP/1.1 200") == 2
        assert answer.endswith(b"\r\n\r\nde")

    made = scene(body)
    first, second = made.backend.received
    assert first.startswith(b"POST /v1/fleet/push-object HTTP/1.1\r\n")
    assert first.endswith(b"\r\n\r\nabc")
    assert b"flwr-public-key: k" in first.lower()
    # What a server on loopback believes comes from us.
    assert b"9.9.9.9" not in first
    assert b"x-forwarded-for: 127.0.0.1" in first.lower()
    assert made.backend.connections == 1
    assert b"connection" not in second.lower()
    assert made.said == []


def test_bodies_pass_in_pieces_both_ways():
    """The backend has the first piece before the client sends the second, and the client the answer's likewise."""

    async def body(s: Scene) -> None:
        seen = asyncio.Queue()

        async def backend(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(2):
                size = int(await reader.readline(), 16)
                seen.put_nowait(await reader.readexactly(size + 2))
            assert await reader.readline() == b"0\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
            assert await asked.get() == "more"
            writer.write(b"1\r\nc\r\n0\r\n\r\n")

        asked = asyncio.Queue()
        async with await asyncio.start_server(backend, "127.0.0.1", 0) as server:
            s.proxy.port = server.sockets[0].getsockname()[1]
            reader, writer = await s.open()
            writer.write(CALL + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
            assert await seen.get() == b"x\r\n"
            writer.write(b"1\r\ny\r\n0\r\n\r\n")
            assert await seen.get() == b"y\r\n"
            assert (await reader.readuntil(b"ab\r\n")).startswith(b"HTTP/1.1 200")
            asked.put_nowait("more")
            assert await reader.readuntil(b"0\r\n\r\n") == b"1\r\nc\r\n0\r\n\r\n"
            writer.close()

    scene(body, limits=replace(LIMITS, stall=20.0, answer=20.0, transfer=20.0))


TRICKS = {
    "another api": b"/v1/control/start-run",
    "nothing": b"/",
    "two slashes": b"//v1/fleet/push-object",
    "two slashes inside": b"/v1/fleet//push-object",
    "dots": b"/v1/fleet/../control/start-run",
    "escaped dots": b"/v1/fleet/%2e%2e/control/start-run",
    "escaped slash": b"/v1/fleet%2fpush-object",
    "escaped letter": b"/v1/fleet/push%2dobject",
    "backslash": b"/v1/fleet/..\\control\\start-run",
    "absolute form": b"http://x/v1/fleet/push-object",
    "query": b"/v1/fleet/push-object?x=/v1/control/start-run",
    "fragment": b"/v1/fleet/push-object#x",
    "parameter": b"/v1/fleet/push-object;x",
    "capital": b"/v1/FLEET/push-object",
    "trailing slash": b"/v1/fleet/push-object/",
    "prefix": b"/x/v1/fleet/push-object",
    "authority": b"x:443",
    "star": b"*",
}


@pytest.mark.parametrize("trick", TRICKS)
def test_every_other_target_is_refused_before_its_body_is_read(trick):
    async def body(s: Scene) -> None:
        # A body is announced and never sent.
        answer = await s.ask(b"POST " + TRICKS[trick] + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 403"), answer
        # Nodes compare their clocks with it before they start.
        date = re.search(rb"\r\ndate: ([^\r]+ GMT)\r\n", answer)
        assert abs(parsedate_to_datetime(date[1].decode()).timestamp() - time.time()) < 10

    made = scene(body)
    assert made.backend.connections == 0
    assert len(made.said) == 1
    assert "403" in made.said[0]


def test_incorrect_variants_would_pass_what_the_whole_pattern_refuses():
    """A prefix, which is what many proxies compare, and a search let control calls through."""
    assert TRICKS["dots"].startswith(b"/v1/fleet/")
    assert PATH.match(TRICKS["dots"].replace(b"..", b"a/.."))
    assert PATH.search(TRICKS["prefix"])
    assert not any(PATH.fullmatch(target) for target in TRICKS.values())


HEADS = {
    "length and chunks": (b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "two lengths": (b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
    "lengths in a list": (b"Content-Length: 3, 4\r\n\r\nabc", 400),
    "signed length": (b"Content-Length: +3\r\n\r\nabc", 400),
    "twice chunked": (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
    "hidden chunks": (b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
    "space before colon": (b"Content-Length : 3\r\n\r\nabc", 400),
    "null in a header": (b"X: a\0b\r\n\r\n", 400),
    "two hosts": (b"Host: y\r\n\r\n", 400),
    "expects": (b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n", 417),
    "upgrade": (b"Upgrade: h2c\r\nConnection: upgrade\r\n\r\n", 417),
    "long head": (b"X: " + b"a" * 20_000 + b"\r\n\r\n", 431),
    "many headers": (b"a:\r\n" * 4_000 + b"\r\n", 431),
    "long body": (b"Content-Length: 300001\r\n\r\n", 413),
    "long chunks": (b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b"a" * 65536 + b"\r\n") * 5, 413),
    "bad chunk": (b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
}


@pytest.mark.parametrize("case", HEADS)
def test_what_two_parsers_might_read_differently_is_refused(case):
    rest, status = HEADS[case]

    async def body(s: Scene) -> None:
        answer = await s.ask(CALL + rest)
        assert answer.startswith(b"HTTP/1.1 %d" % status), answer
        assert b"connection: close" in answer.lower()

    made = scene(body)
    # Nothing of it was complete for the backend: no second request may hide in the rest.
    assert made.backend.received == []
    assert len(made.said) == 1


def test_a_long_target_is_a_long_head():
    """Also where it came with the rest at once, of a name that passes."""

    async def body(s: Scene) -> None:
        answer = await s.ask(b"POST /v1/fleet/" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 431"), answer

    assert scene(body).backend.connections == 0


def test_other_methods_are_refused():
    async def body(s: Scene) -> None:
        assert (await s.ask(b"GET /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 405")
        assert (await s.ask(b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 403")
        assert (await s.ask(b"\x16\x03\x01 garbage\r\n\r\n")).startswith(b"HTTP/1.1 400")

    assert scene(body).backend.connections == 0


def test_a_folded_header_reaches_the_backend_on_one_line():
    async def body(s: Scene) -> None:
        await s.ask(CALL + b"X: a\r\n Content-Length: 50\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")

    (head,) = scene(body).backend.received
    assert b"\r\n content-length: 50" not in head.lower()
    assert b"x: a content-length: 50\r\n" in head.lower()


def test_what_a_client_writes_into_the_log_is_one_line_of_ascii():
    async def body(s: Scene) -> None:
        await s.ask(b"POST /\xffproxy:ready HTTP/1.1\r\nHost: x\r\n\r\n")
        await s.ask(b"POST /" + b"a" * 500 + b" HTTP/1.1\r\nHost: x\r\n\r\n")

    for line in scene(body).said:
        assert line.isascii()
        assert "\n" not in line
        assert len(line) < 400


def test_whoever_is_slow_is_cut_off():
    """In the middle of the head, of the body, and of the handshake; and with a body that never ends."""

    async def body(s: Scene) -> None:
        assert await s.ask(b"POST /v1/fle") == b""
        assert await s.ask(b"") == b""
        assert await s.ask(CALL + b"Content-Length: 5\r\n\r\nab") == b""
        reader, writer = await s.open()
        writer.write(CALL + b"Content-Length: 200000\r\n\r\n")

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"a")
                    await writer.drain()
                    await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        # Each byte comes in time, all of them do not.
        assert await rest(reader) == b""
        dripping.cancel()

    assert scene(body).backend.received == []


def test_the_handshake_counts_as_a_connection_and_ends(tmp_path):
    folder = create(tmp_path / "keys", ["localhost"], 0)

    async def body(s: Scene) -> None:
        silent = [await s.open() for _ in range(LIMITS.per_address)]
        reader, writer = await s.open()
        # More than one address may have, all of them still before TLS. A reset is what Flower's nodes retry after;
        # at an end in the middle of the handshake they give up.
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 20)
        writer.close()
        for reader, writer in silent:
            assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()
        trust = ssl.create_default_context(cafile=str(folder.ca))
        answer = await s.ask(CALL + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi", tls=trust)
        assert answer.endswith(b"hi")

    made = scene(body, folder=folder)
    assert any("as many connections as" in line for line in made.said)
    assert len(made.backend.received) == 1


def test_a_flood_of_unfinished_bodies_is_bounded_in_all_and_by_address_and_others_pass():
    """The backend holds what it was sent until a body is complete; what is announced and never comes counts as well."""
    limits = replace(LIMITS, per_address=20, connections=100, transfer=60.0, stall=60.0, queue=0.5)
    limits = replace(limits, body=300_000, address_bytes=600_000, all_bytes=1_000_000)
    held = 0

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal held
        while data := await reader.read(65536):
            held += len(data)
        writer.close()

    async def from_address(s: Scene, source: str):
        return await asyncio.open_connection("127.0.0.1", s.port, local_addr=(source, 0))

    async def body(s: Scene) -> None:
        good = Scene.ask
        backend = await asyncio.start_server(swallow, "127.0.0.1", 0)
        real, s.proxy.port = s.proxy.port, backend.sockets[0].getsockname()[1]
        flood = []
        for _ in range(2):
            for number in range(8):
                reader, writer = await from_address(s, f"127.0.0.{2 + number % 2}")
                writer.write(CALL + b"Content-Length: 300000\r\n\r\n" + b"a" * 299_000)
                flood.append((reader, writer))
        # Those for whom there is no room are told so, to try again, and nothing of their bodies is passed on.
        waiting = {asyncio.create_task(reader.read(12)) for reader, _ in flood}
        answered: set[asyncio.Task[bytes]] = set()
        while len(answered) < len(flood) - 3:
            done, waiting = await asyncio.wait(waiting, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            assert done
            answered |= done
        assert {task.result() for task in answered} == {b"HTTP/1.1 503"}
        assert 0 < held <= 3 * 300_500
        # What is small passes all the same, and once the flood is over what is large.
        s.proxy.port = real
        assert (await good(s, CALL + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi")).endswith(b"hi")
        large = asyncio.create_task(
            good(s, CALL + b"Connection: close\r\nContent-Length: 200000\r\n\r\n" + b"b" * 200_000)
        )
        for task in waiting:
            task.cancel()
        for _, writer in flood:
            writer.close()
        assert (await large).endswith(b"b" * 200_000)
        backend.close()

    made = scene(body, limits=limits)
    assert not made.proxy._bodies.sizes
    # One line for each address, and one for the rest.
    assert sum("503" in line for line in made.said) == 2
    assert "more refusals without a line" in made.said[-1]


def test_slow_readers_are_bounded_in_all_and_by_address_and_others_pass():
    """The backend holds an answer until it is taken: of sixteen that nobody reads it holds five."""
    limits = replace(LIMITS, per_address=20, connections=100, transfer=60.0, stall=60.0, answer=60.0)
    limits = replace(limits, address_bytes=1_000_000, all_bytes=1_500_000)
    size, held = 300_000, 0

    async def until(so: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not so():
                await asyncio.sleep(0.01)

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal held
        while head := await reader.read(65536):
            length = size if b"pull-object" in head else 2
            held += length
            try:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length + b"a" * length)
                await reader.read(1)
            finally:
                held -= length
        writer.close()

    async def slow(s: Scene, source: str):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        connection.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", s.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=16)
        writer.write(PULL)
        status = await asyncio.wait_for(reader.readexactly(12), 60)
        return status, reader, writer

    async def body(s: Scene) -> None:
        # What the kernel holds is nobody's memory here.
        s.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        backend = await asyncio.start_server(server, "127.0.0.1", 0)
        s.proxy.port = backend.sockets[0].getsockname()[1]
        clients = [await slow(s, f"127.0.0.{2 + number % 2}") for number in range(16)]
        assert [status for status, _, _ in clients].count(b"HTTP/1.1 200") == 5
        assert {status for status, _, _ in clients} == {b"HTTP/1.1 200", b"HTTP/1.1 503"}
        assert max(s.proxy._answers.sizes.values()) == 3 * size
        assert s.proxy._answers.sizes.total() == 5 * size
        # What is small passes all the same, and once the slow ones are gone what is large.
        assert (await s.ask(CALL + b"Connection: close\r\n\r\n")).endswith(b"aa")
        # What was refused is nobody's any more.
        await until(lambda: held == 5 * size)
        for _, _, writer in clients:
            writer.transport.abort()
        await until(lambda: not held)
        assert (await s.ask(PULL.replace(b"Host", b"Connection: close\r\nHost"))).endswith(b"a" * size)
        backend.close()

    made = scene(body, limits=limits)
    assert not made.proxy._answers.sizes
    assert sum("503" in line for line in made.said) == 2


def test_an_answer_is_taken_in_time_or_broken_off():
    """Whoever takes a little of it again and again is not silent, and is cut off all the same."""
    limits = replace(LIMITS, transfer=0.5, stall=60.0, answer=60.0)

    async def long(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n")
        for _ in range(2000):
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.05)

    async def body(s: Scene) -> None:
        s.backend.reply = long
        answer = await s.ask(CALL + b"Content-Length: 0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert len(answer) < 1000

    scene(body, limits=limits)


def test_refusals_without_end_are_few_lines():
    async def body(s: Scene) -> None:
        for _ in range(50):
            await s.ask(b"POST /v1/control/start-run HTTP/1.1\r\nHost: x\r\n\r\n")

    made = scene(body)
    assert [line for line in made.said if "403" in line] == made.said[:1]
    assert made.said[1:] == ["proxy: 49 more refusals without a line, most of 127.0.0.1 (49)"]


def test_one_address_has_ten_lines_a_minute_whatever_it_asks_for():
    lines: list[str] = []
    log = ThinnedLog(lines.append)
    for number in range(1000):
        log("10.0.0.1", f"403 '/{number}'")
    log("10.0.0.2", "403 '/x'")
    assert len(lines) == ThinnedLog.EACH + 1
    assert lines[-1] == "proxy: refused 10.0.0.2: 403 '/x'"


def test_a_log_of_many_addresses_is_bounded():
    lines: list[str] = []
    log = ThinnedLog(lines.append)
    for number in range(10_000):
        log(f"10.0.{number // 256}.{number % 256}", "403 no")
    assert len(lines) == ThinnedLog.LINES
    assert len(log._more) <= ThinnedLog.LINES + 1
    log.flush()
    assert lines[-1].startswith("proxy: 9900 more refusals without a line, most of others (9800)")


def test_a_superlink_that_is_away_silent_or_breaks_off():
    async def body(s: Scene) -> None:
        async def silent(received: bytes, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(30)

        async def half(received: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
            await writer.drain()
            writer.close()

        async def garbage(received: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(b"nonsense\r\n\r\n")

        ask = CALL + b"Content-Length: 2\r\n\r\nhi"
        s.backend.reply = silent
        assert (await s.ask(ask)).startswith(b"HTTP/1.1 504")
        s.backend.reply = garbage
        assert (await s.ask(ask)).startswith(b"HTTP/1.1 502")
        s.backend.reply = half
        # Cut off, not completed: a client sees that three of ten bytes came.
        assert (await s.ask(ask)).endswith(b"abc")
        s.server.close()
        assert (await s.ask(ask)).startswith(b"HTTP/1.1 502")

    made = scene(body)
    assert [line.split(": ")[2][:3] for line in made.said] == ["504", "502", "502"]


@pytest.mark.parametrize("target", [b"/v1/fleet/pull-messages", b"/v1/fleet/register-node", b"/v1/fleet/get-fab"])
def test_calls_of_nodes_pass(target):
    examine(h11.Request(method="POST", target=target, headers=[("Host", "x"), ("Content-Length", "5")]), Limits())
    with pytest.raises(Refused):
        examine(h11.Request(method="POST", target=target + b"/", headers=[("Host", "x")]), Limits())


def test_every_route_of_flowers_fleet_api_passes_and_no_other():
    """Of the version that is installed, so that a new one with another spelling is noticed here."""
    from flwr.superlink.routers.control import router as control
    from flwr.superlink.routers.fleet.router import router as fleet

    assert len(fleet.routes) >= 10
    for route in fleet.routes:
        assert PATH.fullmatch(route.path.encode()), route.path
        assert route.methods == {"POST"}
    assert not [route.path for route in control.routes if PATH.fullmatch(route.path.encode())]
