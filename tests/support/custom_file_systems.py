"""File systems of users, in the folder ``$VAULT``."""

import os

from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from pyarrow import fs


def vault():
    return DirFileSystem(os.environ["VAULT"], LocalFileSystem())


def arrow():
    return fs.SubTreeFileSystem(os.environ["VAULT"], fs.LocalFileSystem())


def failing():
    raise KeyError("token")


def number():
    return 3
