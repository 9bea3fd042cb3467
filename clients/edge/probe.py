"""Tests of a SuperLink from outside: whether it answers, with TLS, its clock, and the link's speed."""

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
from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from fedcomp.flower.offline import without_proxy

_PADDING: Final = 16384


@dataclass(frozen=True)
class Answer:
    """What one request brought.

    Attributes
    ----------
    status : int
    behind : float or None
        Seconds by which this clock is behind the server's, to half a second and half of ``seconds``; None if it is not
        said.
    seconds : float
        From the request to its whole answer.
    certificate : dict
        The server's, where it was verified.
    """

    status: int
    behind: float | None
    seconds: float
    certificate: dict[str, Any]


def proxy_of(address: tuple[str, int], *, tls: bool) -> SplitResult | None:
    """Return the proxy through which Flower's nodes reach ``address`` from this environment; None for none.

    Raises
    ------
    OSError
        Where what the environment names is no URL.
    """
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
    if not found:
        return None
    try:
        proxy = urlsplit(found if "://" in found else f"http://{found}")
        _ = proxy.port  # read when it is asked for
    except ValueError:
        # Without what is wrong with it: that may be a part of its password.
        raise OSError("the proxy that the environment names is no URL") from None
    return proxy


def ask(address: tuple[str, int], context: ssl.SSLContext | None, *, padding: int = 0, timeout: float = 5.0) -> Answer:
    """Ask for ``/health`` as a node asks; any SuperLink has it, and behind a proxy that hides it an error answers.

    Parameters
    ----------
    address : tuple of str and int
    context : ssl.SSLContext or None
        None is a connection without TLS.
    padding : int
        Bytes more in a header.
    timeout : float
        Seconds.

    Raises
    ------
    OSError, http.client.HTTPException
    """
    proxy, place, target = proxy_of(address, tls=context is not None), address, "/health"
    login, headers = {}, {"X-Padding": "0" * padding} if padding else {}
    if proxy is not None:
        place = proxy.hostname or "", proxy.port or (443 if proxy.scheme == "https" else 80)
        if proxy.username is not None:
            pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
            login = {"Proxy-Authorization": f"Basic {base64.b64encode(pair).decode()}"}
        if context is None:
            target, headers = f"http://{address[0]}:{address[1]}/health", {**headers, **login}
    connection = http.client.HTTPConnection(*place, timeout=timeout)
    if context is not None:
        connection = http.client.HTTPSConnection(*place, timeout=timeout, context=context)
        if proxy is not None:
            connection.set_tunnel(*address, headers=login)
    with contextlib.closing(connection):
        connection.connect()
        # Now: a server that closes takes the socket away with its answer.
        certificate = connection.sock.getpeercert() if isinstance(connection.sock, ssl.SSLSocket) else None
        asked, began = time.time(), time.monotonic()
        connection.request("GET", target, headers=headers)
        answer = connection.getresponse()
        answer.read(1 << 20)
        seconds = time.monotonic() - began
        date = answer.getheader("Date")
        middle, behind = asked + seconds / 2, None
        # A date that cannot be read says nothing.
        with contextlib.suppress(ValueError):
            # It has no fractions: half a second is their mean.
            behind = None if date is None else parsedate_to_datetime(date).timestamp() + 0.5 - middle
        return Answer(answer.status, behind, seconds, certificate or {})


def uplink(address: tuple[str, int], context: ssl.SSLContext | None) -> float | None:
    """Return about how many bits per second reach the server: 16 kB more in a request's header take so much longer.

    A server answers only when it has read the whole header. None when the difference is below two milliseconds.

    Raises
    ------
    OSError, http.client.HTTPException
    """
    short, long = (ask(address, context, padding=padding, timeout=20.0).seconds for padding in (0, _PADDING))
    return _PADDING * 8 / (long - short) if long - short > 0.002 else None


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
