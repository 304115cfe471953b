"""Small server of Hugging Face's hub on this machine: models and data sets with revisions."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

_KINDS = {"models": "", "datasets": "datasets/"}


class HubServer:
    """Server of repositories, which are dicts of file name -> bytes by commit.

    Attributes:
        root: value of ``HF_ENDPOINT``.
        requests: ``"METHOD path"`` of all requests.
        tokens: repository -> required token.
        files_at: root of another server for redirected downloads, like the hub's storage; empty for
            none.
        authorizations: ``Authorization`` header of each request, or None.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.tokens: dict[str, str] = {}
        self.files_at = ""
        self.authorizations: list[str | None] = []
        self._commits: dict[str, dict[str, dict[str, bytes]]] = {}
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                owner._serve(self)

            do_HEAD = do_POST = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.root = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, repository: str, folder: Path, **more: bytes) -> str:
        """Commit a folder's files and others to ``models/ORG/NAME`` or ``datasets/ORG/NAME``.

        Returns the hash of the new commit.
        """
        files = {
            str(file.relative_to(folder)): file.read_bytes()
            for file in folder.rglob("*") if file.is_file()
        } | more
        content = repr(sorted(files.items())).encode()
        commit = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        commits = self._commits.setdefault(repository, {})
        commits.pop(commit, None)
        commits[commit] = files
        return commit

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path).strip("/")
        self.requests.append(f"{request.command} {path}")
        self.authorizations.append(request.headers.get("Authorization"))
        length = int(request.headers.get("Content-Length") or 0)
        body = request.rfile.read(length) if length else b""
        status, headers, content = self._answer(path, body, request.headers)
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)

    def _answer(self, path, body, headers) -> tuple[int, dict[str, str], bytes]:
        is_api = path.startswith("api/")
        words = path.removeprefix("api/").split("/")
        kind = words.pop(0) if words[0] in _KINDS else "models"
        repository = "/".join([kind, *words[:2]])
        action, rest = (words[2] if len(words) > 2 else "revision"), words[3:]
        commits = self._commits.get(repository)
        if commits is None:
            return _error(404, "RepoNotFound")
        token = self.tokens.get(repository)
        if token is not None and headers.get("Authorization") != f"Bearer {token}":
            return _error(401, "GatedRepo")
        revision = rest.pop(0) if rest else "main"
        commit = [*commits][-1] if revision == "main" else revision
        if commit not in commits:
            return _error(404, "RevisionNotFound")
        files = commits[commit]
        if is_api and action == "revision":
            return _json({
                "id": "/".join(words[:2]), "sha": commit, "private": False, "downloads": 0,
                "likes": 0, "tags": [], "lastModified": "2026-01-01T00:00:00.000Z",
                "siblings": [{"rfilename": name} for name in files],
            })
        if is_api and action == "tree":
            below = "/".join(rest)
            return _json([
                _entry(name, files[name]) for name in files if name.startswith(below)
            ])
        if is_api and action == "paths-info":
            fields = parse_qs(body.decode())
            names = fields.get("paths") or json.loads(body)["paths"]
            return _json([_entry(name, files[name]) for name in names if name in files])
        name = "/".join(rest)
        if action != "resolve" or name not in files:
            return _error(404, "EntryNotFound")
        content = files[name]
        sent = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": commit}
        if self.files_at:
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": sent["ETag"]}
            return 302, {**sent, **linked, "Location": f"{self.files_at}/{path}"}, b""
        if (asked := headers.get("Range")) is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1 if last else None]
            place = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
            return 206, {**sent, "Content-Range": place}, part
        return 200, sent, content


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _entry(name: str, content: bytes) -> dict:
    return {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}


def _json(value) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _error(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    return status, {"X-Error-Code": code, "X-Error-Message": code}, b"{}"
