"""A folder in an object store, through pyarrow: the library that reads Parquet here, with one
client for S3 and Google's store, and the one that Ray Train's ``storage_path`` goes through."""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from raymm.actors.storage.folder import StorageFolder

# An operation that fails is tried again, after waits that double from the first to the longest
# (each shortened by up to a half, so that ranks do not come back together), until so many seconds
# have passed since its beginning.
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 16.0
RETRY_FOR_S = 120.0
# Of one request to S3: until there is a connection, and while nothing comes.
CONNECT_TIMEOUT_S = 10.0
SILENT_TIMEOUT_S = 30.0
# Bytes that are copied at once.
BLOCK = 8 * 2**20

# Of a URL's query, as pyarrow's clients take them.
OPTIONS = {
    "s3": ("endpoint_override", "scheme", "region", "anonymous"),
    "gs": ("endpoint_override", "scheme", "anonymous"),
}
# Where the environment says where the server is, as AWS' own tools take it.
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")

# Trying again does not help against these, in the words of AWS' and Google's libraries.
_LASTING = re.compile(
    "ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|INVALID_SIGNATURE"
    "|INVALID_CLIENT_TOKEN|UNRECOGNIZED_CLIENT|EXPIRED_TOKEN|PERMISSION_DENIED|UNAUTHENTICATED"
    "|Bucket '.*' not found|HTTP status 301"
)
_REQUEST_ID = re.compile(r" \(Request ID: [^)]*\)")

Value = TypeVar("Value")


class BucketFolder(StorageFolder):
    """Objects of a bucket whose keys begin alike. Nothing is connected to before it is needed.

    An object appears whole when its upload has ended; of one that was cut off there is nothing to
    see.

    Args:
        location: a URL, whose query has options of the connection (:data:`OPTIONS`).
        retry_for_s: how long an operation that fails is tried again.

    Raises:
        ModuleNotFoundError: of any operation, where there is no pyarrow.
    """

    def __init__(self, location: str, retry_for_s: float = RETRY_FOR_S) -> None:
        self._url = urlsplit(location)
        self._retry_for_s = retry_for_s
        self._key = f"{self._url.netloc}{self._url.path}".rstrip("/")

    @property
    def location(self) -> str:
        return urlunsplit(self._url._replace(path=self._url.path.rstrip("/")))

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
        return BucketFolder(urlunsplit(self._url._replace(path=path)), self._retry_for_s)

    @property
    def _store(self) -> Any:
        return connect(self._url.scheme, self._url.netloc, self._url.query)

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
        """Nothing: a key needs no folder."""

    def read(self, name: str) -> bytes:
        def read() -> bytes:
            with self._store.open_input_stream(f"{self._key}/{name}") as source:
                return source.read()

        return self._tried(read)

    def replace(self, name: str, data: bytes) -> None:
        def put() -> None:
            with self._store.open_output_stream(f"{self._key}/{name}") as target:
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
                    self._store.open_output_stream(f"{self._key}/{name}") as target,
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
        self._tried(lambda: self._store.delete_dir(self._key))  # the object that stands for it

    def rename(self, name: str) -> BucketFolder:
        """By copies: objects cannot be renamed."""
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
    """Carry out an operation, again if it fails for reasons that may pass.

    Args:
        operation: on an object store.
        retry_for_s: how long it is tried again.

    Raises:
        OSError: it failed for a reason that lasts, or for so long.
    """
    end, wait = time.monotonic() + retry_for_s, FIRST_WAIT_S
    while True:
        try:
            return operation()
        except OSError as error:
            # With a number it is of this machine's disk, or a file that is not there.
            lasting = error.errno is not None or _LASTING.search(str(error))
            if lasting or time.monotonic() + wait > end:
                raise _plain(error) from None
        time.sleep(wait * random.uniform(0.5, 1.0))
        wait = min(2 * wait, LONGEST_WAIT_S)


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="raymm-") as folder:
        yield Path(folder)


def _plain(error: OSError) -> OSError:
    """An error without what nobody can do anything with."""
    if error.errno is not None:
        return error
    return OSError(_REQUEST_ID.sub("", str(error)).strip())


@functools.cache
def connect(scheme: str, bucket: str, query: str) -> Any:
    """The client of a bucket, with what the environment says of credentials; one per process. It
    does not try again by itself.

    Args:
        scheme: ``"s3"`` or ``"gs"``.
        bucket: its name.
        query: of a URL, with :data:`OPTIONS`.

    Raises:
        ModuleNotFoundError: there is no pyarrow.
    """
    from pyarrow import fs

    options: dict[str, Any] = dict(parse_qsl(query))
    if "anonymous" in options:  # of public buckets
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
