"""A tiny server in the SuperLink's place, with and without TLS, and the certificates for it."""

from __future__ import annotations

import contextlib
import datetime
import http.server
import socketserver
import ssl
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def authority(folder: Path, name: str = "ca", *, days: tuple[float, float] = (-1, 365)) -> tuple[Path, ssl.SSLContext]:
    """Return the file of a new CA, and a server context with a certificate of its for 127.0.0.1, valid from and to
    ``days`` from now."""
    key, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    whole = (now - datetime.timedelta(days=9999), now + datetime.timedelta(days=9999))
    times = (now + datetime.timedelta(days=days[0]), now + datetime.timedelta(days=days[1]))

    def signed(subject: x509.Name, public: ec.EllipticCurvePublicKey, valid: tuple, *extensions: x509.ExtensionType):
        builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number(), *valid)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    ca = folder / f"{name}.crt"
    ca.write_bytes(signed(issuer, key.public_key(), whole, x509.BasicConstraints(True, None)))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "link")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    both = folder / f"{name}-server.pem"
    both.write_bytes(
        own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + signed(subject, own.public_key(), times, names)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    return ca, context


@contextlib.contextmanager
def serving(context: ssl.SSLContext | None = None, *, ahead: float | str | None = 0.0) -> Iterator[str]:
    """Serve ``/health``; the server's clock is ``ahead`` seconds before this one, or it gives no date for None; a text
    is what it gives in its place."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(200)
            if ahead is not None:
                date = ahead if isinstance(ahead, str) else formatdate(time.time() + ahead, usegmt=True)
                self.send_header("Date", date)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def get_request(self):
            sock, address = super().get_request()
            # A failed handshake must not end the server.
            sock.settimeout(5)
            return (sock if context is None else context.wrap_socket(sock, server_side=True)), address

    with in_a_thread(Server(("127.0.0.1", 0), Handler)) as address:
        yield address


@contextlib.contextmanager
def in_a_thread(server: socketserver.TCPServer) -> Iterator[str]:
    """Let a server answer in a thread of its own; yield its address."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
