"""A web server on this machine that serves files of a folder by ranges, and counts its answers."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest


class RangeServer:
    """Serves a folder.

    Attributes:
        before: is called with every path; returns the status to answer with instead, the place to
            redirect to, or None.
        ranges: (path, first byte, last byte) of all requests that were served.
        whole: do not serve ranges, but whole files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.ranges, self.whole = folder, [], False
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
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.root = f"http://127.0.0.1:{self._server.server_port}"

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(request.path).lstrip("/")
        answer = self.before(path)
        file = self.folder / path
        if isinstance(answer, str):
            return self._end(request, 302, b"", Location=answer)
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
    """A server of ``tmp_path / "served"``."""
    (tmp_path / "served").mkdir()
    server = RangeServer(tmp_path / "served")
    yield server
    server.end()
