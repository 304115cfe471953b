"""Real S3 server on this machine (moto), for tests that interfere with requests."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

BUCKET = "runs"


class S3Server:
    """Server of one bucket at a separate port.

    Attributes:
        before: called with every request (method, key and query, if any) before it is served;
            returns an error status, a URL to redirect to, or None.
        requests: all requests since the list was last cleared.
    """

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from pyarrow.fs import S3FileSystem
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._served = DomainDispatcherApplication(create_backend_app)
        self.before: Callable[[str, str], int | str | None] = lambda method, key: None
        self.requests: list[tuple[str, str]] = []
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"127.0.0.1:{self._server.port}"
        S3FileSystem(
            endpoint_override=self.endpoint, scheme="http", allow_bucket_creation=True
        ).create_dir(BUCKET)

    def _serve(self, environment: dict[str, Any], start: Callable[..., Any]) -> Any:
        method, key = environment["REQUEST_METHOD"], environment["PATH_INFO"]
        if query := environment.get("QUERY_STRING"):
            key += f"?{query}"
        self.requests.append((method, key))
        if (answer := self.before(method, key)) is not None:
            environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
            if isinstance(answer, str):
                start("307 Temporary Redirect", [("Content-Length", "0"), ("Location", answer)])
            else:
                start(f"{answer} Error", [("Content-Length", "0")])
            return [b""]
        return self._served(environment, start)

    def url(self, folder: str) -> str:
        """Return the URL of a folder of the bucket."""
        return f"s3://{BUCKET}/{folder}?endpoint_override={self.endpoint}&scheme=http"

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="session")
def running_s3():
    server = S3Server()
    yield server
    server.end()


@pytest.fixture
def s3(running_s3):
    """Return the server without interference."""
    running_s3.requests.clear()
    yield running_s3
    running_s3.before = lambda method, key: None
