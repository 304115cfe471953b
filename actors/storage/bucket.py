"""Folder in an object store or a custom file system, accessed through pyarrow: one client for S3
and Google Cloud Storage, which also reads Parquet here and serves Ray Train's ``storage_path``."""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from raymm.actors.storage.custom_file_system import custom_file_system
from raymm.actors.storage.folder import StorageFolder

# A failed operation is retried. Waits double from the first to the longest (each shortened by up to
# a half, so that ranks do not retry together), until RETRY_FOR_S seconds have passed.
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 16.0
RETRY_FOR_S = 120.0
# Timeouts of one request to S3 for connecting, and between received data.
CONNECT_TIMEOUT_S = 10.0
SILENT_TIMEOUT_S = 30.0
# Bytes per copy operation.
BLOCK = 8 * 2**20

# Options in a URL's query, as pyarrow's clients accept them.
OPTIONS = {
    "s3": ("endpoint_override", "scheme", "region", "anonymous"),
    "gs": ("endpoint_override", "scheme", "anonymous"),
}
# Environment variables for the server's address and region, as AWS' tools read them.
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")

# Errors that a retry cannot fix, in the words of AWS' and Google's libraries.
_LASTING = re.compile(
    "ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|INVALID_SIGNATURE"
    "|INVALID_CLIENT_TOKEN|UNRECOGNIZED_CLIENT|EXPIRED_TOKEN|PERMISSION_DENIED|UNAUTHENTICATED"
    "|Bucket '.*' not found|HTTP status 301"
)
_REQUEST_ID = re.compile(r" \(Request ID: [^)]*\)")

Value = TypeVar("Value")


class BucketFolder(StorageFolder):
    """Objects of a bucket, or files of a custom file system, with a common prefix. Connects lazily.

    An object appears only after its upload has finished; an interrupted upload leaves nothing
    visible.

    Args:
        location: URL; its query has options of the connection (:data:`OPTIONS`).

    Raises:
        ModuleNotFoundError: pyarrow is not installed; raised by any operation.
    """

    def __init__(self, location: str, retry_for_s: float = RETRY_FOR_S) -> None:
        self._scheme, _, rest = location.partition("://")
        self._url = urlsplit(f"//{rest}")
        self._retry_for_s = retry_for_s
        self._key = f"{self._url.netloc}{self._url.path}".rstrip("/")

    @property
    def location(self) -> str:
        return self._located(self._url.path.rstrip("/"))

    @property
    def place(self) -> str:
        return self.location

    @property
    def path(self) -> None:
        return None

    @property
    def name(self) -> str:
        return self._key.rpartition("/")[2]

    @property
    def parent(self) -> BucketFolder:
        return self._at(self._url.path.rstrip("/").rpartition("/")[0])

    def __truediv__(self, name: str) -> BucketFolder:
        return self._at(f"{self._url.path.rstrip('/')}/{name}")

    def _at(self, path: str) -> BucketFolder:
        return BucketFolder(self._located(path), self._retry_for_s)

    def _located(self, path: str) -> str:
        return f"{self._scheme}:{urlunsplit(self._url._replace(path=path))}"

    @property
    def _store(self) -> Any:
        return connect(self._scheme, self._url.netloc, self._url.query)

    def _open_output(self, name: str) -> Any:
        path = f"{self._key}/{name}"
        if self._scheme not in OPTIONS:  # keys of buckets need no folder
            self._store.create_dir(path.rpartition("/")[0], recursive=True)
        return self._store.open_output_stream(path)

    def names(self) -> list[str]:
        return sorted(entry.base_name for entry in self._listed(recursive=False))

    def files(self) -> list[str]:
        return sorted(
            entry.path.removeprefix(f"{self._key}/")
            for entry in self._listed(recursive=True) if entry.is_file
        )

    def _listed(self, recursive: bool) -> list[Any]:
        from pyarrow.fs import FileSelector

        selector = FileSelector(self._key, allow_not_found=True, recursive=recursive)
        return self._tried(lambda: self._store.get_file_info(selector))

    def create(self) -> None:
        """Do nothing: keys need no folder."""

    def read(self, name: str) -> bytes:
        def read() -> bytes:
            with self._store.open_input_stream(f"{self._key}/{name}") as source:
                return source.read()

        return self._tried(read)

    def replace(self, name: str, data: bytes) -> None:
        def put() -> None:
            with self._open_output(name) as target:
                target.write(data)

        self._tried(put)

    @contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        with _scratch() as folder:
            path = folder / os.path.basename(name)

            def download() -> None:
                with (
                    self._store.open_input_stream(f"{self._key}/{name}") as source,
                    open(path, "wb") as target,
                ):
                    shutil.copyfileobj(source, target, BLOCK)

            self._tried(download)
            yield path

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        with _scratch() as folder:
            path = folder / os.path.basename(name)
            yield path

            def upload() -> None:
                with (
                    open(path, "rb") as source,
                    self._open_output(name) as target,
                ):
                    shutil.copyfileobj(source, target, BLOCK)

            self._tried(upload)

    def unlink(self, name: str) -> None:
        def delete() -> None:
            try:
                self._store.delete_file(f"{self._key}/{name}")
            except FileNotFoundError:
                pass

        self._tried(delete)

    def remove(self) -> None:
        if files := self.files():
            raise OSError(f"{self} is not empty: it has {files[0]}")
        # the object that represents the folder
        with suppress(FileNotFoundError):
            self._tried(lambda: self._store.delete_dir(self._key))

    def rename(self, name: str) -> BucketFolder:
        """Rename by copying, because objects cannot be renamed."""
        target = self.parent / name
        for file in self.files():
            with self.reading(file) as source, target.writing(file) as copy:
                shutil.copyfile(source, copy)
            self.unlink(file)
        self.remove()
        return target

    def _tried(self, operation: Callable[[], Value]) -> Value:
        return tried(operation, self._retry_for_s)


def tried(operation: Callable[[], Value], retry_for_s: float) -> Value:
    """Run an operation on an object store, and retry it after errors that may be temporary. Raise
    an ``OSError`` for a permanent error, or without success in time."""
    end, wait = time.monotonic() + retry_for_s, FIRST_WAIT_S
    while True:
        try:
            return operation()
        except OSError as error:
            # An error with a number comes from the local disk or a missing file.
            lasting = _is_local(error) or _LASTING.search(str(error))
            if lasting or time.monotonic() + wait > end:
                raise _plain(error) from None
        time.sleep(wait * random.uniform(0.5, 1.0))
        wait = min(2 * wait, LONGEST_WAIT_S)


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="raymm-") as folder:
        yield Path(folder)


def _plain(error: OSError) -> OSError:
    """Return an error without its request id, which is of no use to a reader."""
    if _is_local(error):
        return error
    return OSError(_REQUEST_ID.sub("", str(error)).strip())


def _is_local(error: OSError) -> bool:
    return error.errno is not None or isinstance(error, FileNotFoundError)


@functools.cache
def connect(scheme: str, bucket: str, query: str) -> Any:
    """Return the client of a bucket (``"s3"`` or ``"gs"``), one per process, with credentials from
    the environment and :data:`OPTIONS` from the URL's query; or a custom file system. The client
    does not retry by itself. Raise a ``ModuleNotFoundError`` if pyarrow is not installed."""
    from pyarrow import fs

    if scheme not in OPTIONS:
        return custom_file_system(scheme)
    options: dict[str, Any] = dict(parse_qsl(query))
    if "anonymous" in options:  # for public buckets
        options["anonymous"] = options["anonymous"] == "true"
    if scheme == "gs":
        return fs.GcsFileSystem(**options, retry_time_limit=timedelta(seconds=FIRST_WAIT_S))
    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), None)
    if endpoint and "endpoint_override" not in options:
        server = urlsplit(endpoint)
        options |= {"scheme": server.scheme, "endpoint_override": server.netloc}
    has_region = "region" in options or any(os.environ.get(name) for name in _REGIONS)
    if not has_region and "endpoint_override" not in options:
        options["region"] = fs.resolve_s3_region(bucket)
    once = fs.AwsStandardS3RetryStrategy(max_attempts=1)
    return fs.S3FileSystem(
        **options, retry_strategy=once,
        connect_timeout=CONNECT_TIMEOUT_S, request_timeout=SILENT_TIMEOUT_S,
    )
