"""Web server on this machine that serves files of a folder by ranges, and counts its answers."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class RangeServer:
    """Server of a folder.

    Attributes:
        before: called with every path; returns an error status, a URL to redirect to, or None.
        ranges: (path, first byte, last byte) of all served requests.
        credentials: headers ``Authorization`` and ``Cookie`` of all requests.
        whole: True to serve full files instead of ranges.

    Args:
        folder: served folder.
        certificate: file with a certificate and its key, for TLS.
    """

    def __init__(self, folder: Path, certificate: Path | None = None) -> None:
        self.folder, self.ranges, self.whole = folder, [], False
        self.credentials: list[tuple[str | None, str | None]] = []
        self.before: Callable[[str], int | str | None] = lambda path: None
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                owner._serve(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        scheme = "http" if certificate is None else "https"
        self.root = f"{scheme}://127.0.0.1:{self._server.server_port}"

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        headers = request.headers
        self.credentials.append((headers["Authorization"], headers["Cookie"]))
        path = unquote(request.path).lstrip("/")
        answer = self.before(path)
        file = self.folder / path
        if isinstance(answer, str):
            return self._end(request, 302, b"", Location=answer, **{"Set-Cookie": "key=secret"})
        if answer is not None or not file.is_file():
            return self._end(request, answer or 404, b"")
        data = file.read_bytes()
        tag = f'"{hashlib.md5(data).hexdigest()}"'
        if self.whole:
            return self._end(request, 200, data, ETag=tag)
        first, last = map(int, request.headers["Range"].removeprefix("bytes=").split("-"))
        self.ranges.append((path, first, last))
        if first >= len(data):
            described = f"bytes */{len(data)}"
            return self._end(request, 416, b"", ETag=tag, **{"Content-Range": described})
        last = min(last, len(data) - 1)
        described = f"bytes {first}-{last}/{len(data)}"
        self._end(
            request, 206, data[first : last + 1], ETag=tag, **{"Content-Range": described}
        )

    @staticmethod
    def _end(request: BaseHTTPRequestHandler, status: int, data: bytes, **headers: str) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def web(tmp_path):
    """Return a server of ``tmp_path / "served"``."""
    (tmp_path / "served").mkdir()
    server = RangeServer(tmp_path / "served")
    yield server
    server.end()


def write_certificates(folder: Path, name: str = "127.0.0.1") -> tuple[Path, Path]:
    """Write an authority's certificate, and a file with a server's signed certificate and key.

    Args:
        folder: folder of both.
        name: address of the server.
    """
    encoding = serialization.Encoding.PEM
    now = datetime.datetime.now(datetime.UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    subjects = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])
                for text in ("authority of a test", name)]

    def signed(subject: int) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder().subject_name(subjects[subject]).issuer_name(subjects[0])
            .public_key(keys[subject].public_key()).serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=not subject, path_length=None), critical=True)
        )

    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(name))])
    certificates = [
        signed(0).sign(keys[0], hashes.SHA256()),
        signed(1).add_extension(address, critical=False).sign(keys[0], hashes.SHA256()),
    ]
    authority, server = folder / "authority.pem", folder / "server.pem"
    authority.write_bytes(certificates[0].public_bytes(encoding))
    key = keys[1].private_bytes(
        encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    server.write_bytes(certificates[1].public_bytes(encoding) + key)
    return authority, server
