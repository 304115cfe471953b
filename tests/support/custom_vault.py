"""File systems of tests, named in configurations: the whole disk, from its root."""

from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from pyarrow import fs


def vault():
    return DirFileSystem("/", LocalFileSystem())


def arrow():
    return fs.SubTreeFileSystem("/", fs.LocalFileSystem())
