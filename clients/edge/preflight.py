"""``fedcomp node --preflight``: checks of everything that a node needs, one line each."""

from __future__ import annotations

import http.client
import importlib.metadata
import importlib.util
import re
import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fedcomp.clients.edge import probe
from fedcomp.clients.edge.events import EventLog
from fedcomp.clients.edge.failures import AHEAD, BEHIND
from fedcomp.clients.edge.links import Link
from fedcomp.clients.edge.options import NodeOptions
from fedcomp.coding.transport import parse_host_port

_DISK_BYTES: Final = 256 << 20
_MEMORY_BYTES: Final = 512 << 20
"""Room for bundles and states; a SuperNode, 98 MB, and an executor with torch, 421 MB while it trains (measured)."""
_SOON_DAYS: Final = 14


OK, LATER, WRONG = "ok", "later", "wrong"
Finding = tuple[str, str]
"""What a check found: whether all is well, waiting may help, or something has to be changed; and in words, with a
remedy where it is not well."""


def preflight(options: NodeOptions, log: EventLog) -> int:
    """Write a line for each check; return 0, 75 when only time may help, or 78."""
    verdicts = set()
    for check in CHECKS:
        verdict, text = check(options)
        verdicts.add(verdict)
        ok, name = verdict == OK, check.__name__
        if log.json:
            log("preflight", text, level="info" if ok else "error", check=name, ok=ok)
        else:
            print(f"{name + ':':13}{'ok, ' if ok else ''}{text}", file=log.stream, flush=True)
    return 78 if WRONG in verdicts else 75 if LATER in verdicts else 0


def address(options: NodeOptions) -> Finding:
    """Whether the address resolves and accepts connections."""
    host, port = options.address
    try:
        proxy = probe.proxy_of(options.address, tls=options.root_certificates is not None)
    except OSError as error:
        return WRONG, f"{error}: correct http_proxy, https_proxy or all_proxy, or add {host} to no_proxy"
    if proxy is not None:
        # As the node connects, which asks the proxy and looks no name up. Without what may be its password.
        name = f"{proxy.scheme}://{proxy.hostname}:{proxy.port or ''}".rstrip(":")
        try:
            context = None if options.root_certificates is None else probe.unverified()
            status = probe.ask(options.address, context).status
        except (OSError, http.client.HTTPException) as error:
            text = f"{options.superlink} is not reached through the proxy {name} ({error}): add it to no_proxy"
            return LATER, f"{text}, or see to the proxy"
        # The proxy's own answer for what it cannot reach.
        if options.root_certificates is None and status in (407, 502, 503, 504):
            text = f"the proxy {name} answers {status} for {options.superlink}: add it to no_proxy"
            return LATER, f"{text}, or see to the proxy"
        return OK, f"{options.superlink} answers through the proxy {name}, which the node also uses"
    try:
        places = {str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError as error:
        return LATER, f"{host} has no address ({error}): check --superlink and DNS"
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        text = f"{options.superlink} does not accept connections ({error}): is the SuperLink up, the port open?"
        return LATER, text
    return OK, f"{options.superlink} is {', '.join(sorted(places))} and accepts connections"


def tls(options: NodeOptions) -> Finding:
    """Whether the SuperLink's certificate is verified, and for how long."""
    if options.root_certificates is None:
        if probe.speaks_tls(options.address):
            return WRONG, "the SuperLink speaks TLS: give --root-certificates, not --insecure"
        return OK, "none, because of --insecure: anybody on the network path can read and change everything"
    try:
        answer = probe.ask(options.address, ssl.create_default_context(cafile=str(options.root_certificates)))
    except ssl.SSLCertVerificationError as error:
        dates = "expired" in error.verify_message or "not yet valid" in error.verify_message
        remedy = "set this clock or renew it" if dates else "give the CA of the SuperLink as --root-certificates"
        return (LATER if dates else WRONG), f"the certificate is refused ({error.verify_message}): {remedy}"
    except ssl.SSLError as error:
        return WRONG, f"no TLS ({error.reason}): wrong port, a file without certificates, or a server without TLS"
    except (OSError, http.client.HTTPException) as error:
        return LATER, f"could not be checked ({error}): fix the address first"
    days = (ssl.cert_time_to_seconds(str(answer.certificate["notAfter"])) - time.time()) / 86400
    text = f"verified, the certificate ends in {days:.0f} days"
    return OK, text + (": renew it soon" if days < _SOON_DAYS else "")


def clock(options: NodeOptions) -> Finding:
    """Whether this clock is within what the SuperLink accepts."""
    behind = probe.behind(options.address, tls=options.root_certificates is not None)
    if behind is None:
        return LATER, "the SuperLink sends no time to compare with: fix the address first"
    side = f"{abs(behind):.0f} s {'behind' if behind > 0 else 'ahead of'} the SuperLink's"
    if not -AHEAD <= behind <= BEHIND:
        return LATER, f"{side}, which refuses 5 s ahead and 305 s behind: let chrony set it"
    return OK, f"{side}, of 5 s ahead to 305 s behind that are accepted"


def key(options: NodeOptions) -> Finding:
    """Whether the key is one that Flower takes, and nobody else's."""
    if options.key is None:
        return OK, "none: the node has a new id after each start, and a SuperLink may ask for one"
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    remedy = "make one with ssh-keygen -t ecdsa -b 384 -N '', then register it"
    try:
        loaded = load_ssh_private_key(options.key.read_bytes(), None)
    except OSError as error:
        return WRONG, f"{options.key} cannot be read ({error.strerror}): run the node as its owner"
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        return WRONG, f"{options.key} is no private key without passphrase ({error}): {remedy}"
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        return WRONG, f"{options.key} is no ECDSA key: {remedy}"
    if options.key.stat().st_mode & 0o077:
        return WRONG, f"others can read {options.key}: chmod 600 {options.key}"
    return OK, f"ECDSA on {loaded.curve.name}, private; whether it is registered shows when the node joins"


def link(options: NodeOptions) -> Finding:
    """How long a request takes, and from a longer one about how fast the uplink is."""
    context = None if options.root_certificates is None else probe.unverified()
    try:
        answer = probe.ask(options.address, context)
        rate = probe.uplink(options.address, context)
    except (OSError, http.client.HTTPException) as error:
        return LATER, f"could not be timed ({error}): fix the address first"
    text = f"round trip {answer.seconds * 1000:.0f} ms"
    if rate is None:
        return OK, f"{text}; the uplink is too fast for an estimate from 16 kB"
    text += f", uplink about {rate / 1000:.0f} kbit/s (an estimate from 16 kB)"
    asked = options.link.rate if options.link is not None else None
    if asked is None and rate < 1e6:
        suited = Link.of(f"{max(rate, 1000):.0f}bit")
        return OK, f"{text}: give --link {suited.rate / 1000:.0f}kbit"
    if asked is not None and rate < asked / 2:
        return OK, f"{text}, less than half of --link: set --link to the measured rate"
    return OK, text


def disk(options: NodeOptions) -> Finding:
    """Whether there is room where the node writes."""
    folders = [path for path in (options.home, options.state_dir) if path is not None] or [Path(tempfile.gettempdir())]
    for folder in folders:
        # What does not exist yet will be made below what does.
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        if free < _DISK_BYTES:
            return WRONG, f"{free >> 20} MB free at {there}, {_DISK_BYTES >> 20} MB are needed: free some space"
    return OK, f"{free >> 20} MB free at {there}"


def memory(options: NodeOptions) -> Finding:
    """Whether a node with torch would fit."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    free = int(found[1]) << 10 if found else 0
    if free < _MEMORY_BYTES:
        return LATER, f"{free >> 20} MB free, a node with torch takes about {_MEMORY_BYTES >> 20} MB"
    return OK, f"{free >> 20} MB free"


def versions(options: NodeOptions) -> Finding:
    """Whether Flower is not older than what this project needs."""
    needs = next((r for r in importlib.metadata.requires("fedcomp") or () if re.match(r"flwr\b(?!\[)", r)), "flwr")
    has = importlib.metadata.version("flwr")
    least = re.search(r">=([\d.]+)", needs)
    if least and _number(has) < _number(least[1]):
        return WRONG, f"flwr is {has}: pip install '{needs.partition(';')[0].strip()}'"
    torch = importlib.util.find_spec("torch")
    text = f"fedcomp {importlib.metadata.version('fedcomp')}, flwr {has}, "
    return OK, text + ("torch is installed" if torch else "no torch, which most apps need")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def ports(options: NodeOptions) -> Finding:
    """Whether the ports that the node opens are free."""
    wanted = [("127.0.0.1", options.port, "--port")]
    if options.peer is not None:
        wanted.append((*parse_host_port(options.peer), "--peer"))
    for host, port, option in wanted:
        if not port_is_free(host, port):
            return WRONG, f"{host}:{port} is taken or not an address of this machine: change {option}"
    return OK, ", ".join(f"{host}:{port}" for host, port, _ in wanted) + " free"


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as sock:
            # As servers do: connections that were closed a moment ago take no port.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(place)
            sock.listen()
    except OSError:
        return False
    return True


CHECKS: Final[tuple[Callable[[NodeOptions], Finding], ...]] = (
    *(address, tls, clock, key, link, disk, memory, versions, ports),
)
