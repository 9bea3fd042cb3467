"""Questions to a SuperLink that need no node: does it answer, with TLS, at what time, and how fast."""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from fedcomp.flower.offline import without_proxy


@dataclass(frozen=True)
class Answer:
    """What one request brought.

    Attributes
    ----------
    status : int
    behind : float or None
        Seconds by which this clock is behind the server's, to half a second and half of ``seconds``; None if it is not
        said.
    connected, seconds : float
        Until the connection stood, with TLS; from the request to its whole answer.
    size : int
        Bytes of the answer's body.
    certificate : dict
        The server's, where it was verified.
    """

    status: int
    behind: float | None
    connected: float
    seconds: float
    size: int
    certificate: dict[str, Any]


def proxy_of(address: tuple[str, int], *, tls: bool) -> SplitResult | None:
    """Return the proxy through which Flower's nodes reach ``address`` from this environment; None for none."""
    host, port = address
    # A node's processes are started with loopback excepted.
    proxies = urllib.request.getproxies_environment()
    if excepted := without_proxy(os.environ):
        proxies["no"] = excepted["no_proxy"]
    # Documented by what it does for urllib alone, and not in the list of types.
    bypass: Callable[[str, dict[str, str]], object] = vars(urllib.request)["proxy_bypass_environment"]
    if bypass(host, proxies) or bypass(f"{host}:{port}", proxies):
        return None
    found = proxies.get("https" if tls else "http") or proxies.get("all")
    return urlsplit(found if "://" in found else f"http://{found}") if found else None


def connection_to(
    address: tuple[str, int], context: ssl.SSLContext | None, timeout: float
) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
    """Return a connection as a node makes it, through the environment's proxy where there is one; the target of
    ``/health`` on it, and headers for the proxy."""
    proxy = proxy_of(address, tls=context is not None)
    place = address if proxy is None else (proxy.hostname or "", proxy.port or (443 if proxy.scheme == "https" else 80))
    login = {}
    if proxy is not None and proxy.username is not None:
        pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
        login = {"Proxy-Authorization": f"Basic {base64.b64encode(pair).decode()}"}
    if context is None:
        host, port = address
        target = "/health" if proxy is None else f"http://{host}:{port}/health"
        return http.client.HTTPConnection(*place, timeout=timeout), target, login
    connection = http.client.HTTPSConnection(*place, timeout=timeout, context=context)
    if proxy is not None:
        connection.set_tunnel(*address, headers=login)
    return connection, "/health", {}


def ask(address: tuple[str, int], context: ssl.SSLContext | None, *, timeout: float = 5.0) -> Answer:
    """Ask for ``/health``, which any SuperLink has; behind a proxy that hides it, an error answers as well.

    Raises
    ------
    OSError, http.client.HTTPException
    """
    began = time.monotonic()
    connection, target, login = connection_to(address, context, timeout)
    with contextlib.closing(connection):
        connection.connect()
        connected = time.monotonic()
        # Now: a server that closes takes the socket away with its answer.
        certificate = connection.sock.getpeercert() if isinstance(connection.sock, ssl.SSLSocket) else None
        asked = time.time()
        connection.request("GET", target, headers=login)
        answer = connection.getresponse()
        size = len(answer.read(1 << 20))
        seconds = time.monotonic() - connected
        date = answer.getheader("Date")
        behind = None
        if date is not None:
            # The date has no fractions: half a second is their mean.
            behind = parsedate_to_datetime(date).timestamp() + 0.5 - (asked + seconds / 2)
        return Answer(answer.status, behind, connected - began, seconds, size, certificate or {})


_PADDING: Final = 16384


def uplink(address: tuple[str, int], context: ssl.SSLContext | None, *, timeout: float = 20.0) -> float | None:
    """Return about how many bits per second reach the server: 16 kB more in a request's header take so much longer.

    A server answers only when it has read the whole header. None when the difference is below two milliseconds.

    Raises
    ------
    OSError, http.client.HTTPException
    """
    taken = []
    for padding in (0, _PADDING):
        connection, target, login = connection_to(address, context, timeout)
        with contextlib.closing(connection):
            connection.connect()
            began = time.monotonic()
            connection.request("GET", target, headers={**login, "X-Padding": "0" * padding})
            connection.getresponse().read(1 << 20)
            taken.append(time.monotonic() - began)
    more = taken[1] - taken[0]
    return _PADDING * 8 / more if more > 0.002 else None


def verifying(trusted: Path) -> ssl.SSLContext:
    """Return a context that accepts what the certificates in ``trusted`` verify.

    Raises
    ------
    OSError
        When the file holds no certificate.
    """
    return ssl.create_default_context(cafile=str(trusted))


def unverified() -> ssl.SSLContext:
    """Return a context that accepts any server: for its clock alone, which is compared, never set."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def behind(address: tuple[str, int], *, tls: bool) -> float | None:
    """Return by how many seconds this clock is behind the SuperLink's; None when it does not say."""
    try:
        return ask(address, unverified() if tls else None).behind
    except (OSError, http.client.HTTPException, ValueError):
        return None


def speaks_tls(address: tuple[str, int], *, timeout: float = 3.0) -> bool:
    """Whether a server answers a TLS greeting."""
    try:
        with socket.create_connection(address, timeout=timeout) as plain, unverified().wrap_socket(plain):
            return True
    except OSError:
        return False
