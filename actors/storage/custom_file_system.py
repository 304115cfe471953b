"""File systems of users: schemes that fsspec knows, and functions that return one."""

from __future__ import annotations

from typing import Any

from raymm.errors import USER_CODE_RAISES
from raymm.packages import is_import_path, user_function

ACCEPTED = (
    "module:function://FOLDER, with a function that returns a pyarrow.fs.FileSystem or an "
    "fsspec.AbstractFileSystem"
)
# Schemes of fsspec that do not share written files between processes.
_NOT_SHARED = ("http", "https", "memory", "local", "data", "git", "github", "zip", "tar")


def is_custom(scheme: str) -> bool:
    """Return True if a scheme is a user's function, or is known to fsspec."""
    if is_import_path(scheme):
        return True
    from fsspec import get_filesystem_class

    try:
        return scheme not in _NOT_SHARED and get_filesystem_class(scheme) is not None
    except (ImportError, ValueError):  # the class needs a missing package; the scheme is unknown
        return False


def custom_file_system(scheme: str) -> Any:
    """Return the ``pyarrow.fs.FileSystem`` of a scheme.

    Raises:
        ConfigError: the function cannot be imported.
        ValueError: the function raises, or does not return a file system.
    """
    import fsspec
    from pyarrow import fs

    if not is_import_path(scheme):
        return fs.PyFileSystem(_handler()(fsspec.filesystem(scheme)))
    function = user_function("run.storage_path", scheme, ACCEPTED)
    try:
        system = function()
    except USER_CODE_RAISES as error:
        raise ValueError(
            f"{scheme} raised {type(error).__name__}: {error}; accepted: {ACCEPTED}"
        ) from error
    if isinstance(system, fsspec.AbstractFileSystem):
        return fs.PyFileSystem(_handler()(system))
    if not isinstance(system, fs.FileSystem):
        raise ValueError(f"{scheme} returned {type(system).__name__}; accepted: {ACCEPTED}")
    return system


def _handler() -> Any:
    from pyarrow.fs import FSSpecHandler

    class Handler(FSSpecHandler):
        """Adapter without cached listings, which would hide the files of other processes."""

        def get_file_info_selector(self, selector: Any) -> Any:
            self.fs.invalidate_cache()
            return super().get_file_info_selector(selector)

    return Handler
