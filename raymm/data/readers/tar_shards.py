"""Reader of tar shards in the webdataset format, where files with the same key are one sample.

``a/0001.json``, ``a/0001.jpg`` and ``a/0001.seg.png`` are the columns ``json``, ``jpg`` and
``seg.png`` of the sample ``a/0001``. The fields of ``json`` are columns too, and ``txt`` is the
column ``text``. The headers of a shard are scanned once; samples are read by byte offset.
"""

import fnmatch
import json
import tarfile
from collections.abc import Iterator

import numpy as np

from raymm.data.readers.base import Reader
from raymm.data.readers.files import find_files
from raymm.data.readers.row_index import ProgressReport, RowIndex
from raymm.data.remote.path import DataPath, RemotePath, open_data, size_of
from raymm.data.samples.media import MediaRange
from raymm.data.samples.rows import TEXT
from raymm.errors import DataError, SampleError

JSON, TXT = "json", "txt"
# Largest ``json`` or ``txt`` member, because these are read while a shard is scanned.
MAX_TEXT_BYTES = 2**24
# Bytes per request of a remote shard, so that small members arrive with their headers.
SHARD_BLOCK = 2**18


class TarDataset(Reader):
    """Samples of one tar file, a folder of them, or a glob, in the order of their names.

    The column of a modality is an extension. ``"jpg;png"`` is the first of them that a sample has,
    and ``"*.jpg"`` all that match, in the order of the shard. Consecutive members with the same
    path up to the first dot of the file name are a sample. Links, folders and devices are ignored.
    Compressed archives cannot be read by offset and are refused.
    """

    def _open(self, report: ProgressReport) -> None:
        self.files = find_files(self.path, (".tar",))
        self._extensions: list[str] = []
        numbers: dict[str, int] = {}
        samples, keys, members = [], [], []  # (shard, first member), str, (extension, start, size)
        index = RowIndex(self.options)
        folders = self._media_folders(0)
        for shard, path in enumerate(self.files):
            with open_data(path) as file:
                for key, sample in _samples(path):
                    samples.append((shard, len(members)))
                    keys.append(key)
                    for extension, start, size in sample:
                        number = numbers.setdefault(extension, len(numbers))
                        members.append((number, start, size))
                    row = self._described(file, path, key, sample)
                    index.add(row, f"{path}[{key}]", folders)
                    report(len(index), (shard + file.tell() / size_of(path)) / len(self.files))
        if not samples:
            raise DataError(f"no tar shard of {self.path} has a sample")
        self._extensions = list(numbers)
        self._samples = np.asarray([*samples, (0, len(members))], dtype=np.int64)
        self._keys = np.asarray([key.encode() for key in keys])
        self._members = np.asarray(members, dtype=np.int64)
        self._use(index.finish())
        self._check_columns(set(self.survey.columns))

    @property
    def folder(self) -> DataPath:
        return self.files[0].parent

    def __len__(self) -> int:
        return len(self._samples) - 1

    def place(self, index: int) -> str:
        return f"{self.files[self._samples[index, 0]]}[{self._keys[index].decode()}]"

    def _row(self, index: int) -> dict:
        shard, first = self._samples[index]
        members = [
            (self._extensions[extension], int(start), int(size))
            for extension, start, size in self._members[first : self._samples[index + 1, 1]]
        ]
        path = self.files[shard]
        with open_data(path) as file:
            row = self._described(file, path, self._keys[index].decode(), members)
        if isinstance(row, SampleError):
            raise row
        return row

    def _described(self, file, path: DataPath, key: str, members: list) -> dict | SampleError:
        """Return the row of a sample: text is read from ``file``, media are byte ranges."""
        try:
            return self._described_or_raise(file, path, key, members)
        except SampleError as error:
            return error

    def _described_or_raise(self, file, path: DataPath, key: str, members: list) -> dict:
        row, media = {}, {}
        version = path.version if isinstance(path, RemotePath) else None
        for extension, start, size in members:
            if extension in media:
                raise SampleError("has two members of this extension", extension)
            media[extension] = MediaRange(f"{key}.{extension}", str(path), start, size, version)
            if extension not in (JSON, TXT):
                continue
            if size > MAX_TEXT_BYTES:
                raise SampleError(f"it has {size:,} bytes, above {MAX_TEXT_BYTES:,}", extension)
            file.seek(start)
            content = file.read(size)
            if len(content) < size:
                missing = size - len(content)
                raise SampleError(f"the shard ends {missing} bytes before it", extension)
            row |= _text_columns(extension, content)
        if clash := sorted(set(row) & set(media) - {JSON, TXT}):
            raise SampleError(f"is a member of the shard and a field of {JSON!r}", clash[0])
        row = {**media, **row}
        named: set[str] = {JSON, TXT}
        for column in self.columns.values():
            if column not in row:
                matches = _matches(column, list(media))
                if matches:
                    row[column] = [media[extension] for extension in matches]
                named |= {name for pattern in column.split(";") for name in media
                          if fnmatch.fnmatchcase(name, pattern)}
        # Items of these members are in the column of a pattern, and JSON fields are columns.
        for extension in named - set(self.columns.values()):
            if isinstance(row.get(extension), MediaRange):
                del row[extension]
        return row


def _text_columns(extension: str, content: bytes) -> dict:
    try:
        if extension == TXT:
            return {TEXT: content.decode()}
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SampleError(f"is not {extension}: {error}", extension) from None
    if not isinstance(value, dict):
        raise SampleError(f"must be a JSON object, got {type(value).__name__}", extension)
    return value


def _matches(column: str, extensions: list[str]) -> list[str]:
    """Return the extensions that a column refers to: those of the first alternative that exists."""
    for alternative in column.split(";"):
        if matches := [name for name in extensions if fnmatch.fnmatchcase(name, alternative)]:
            return matches
    return []


def _samples(path: DataPath) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """Yield (key, members as (extension, first byte, size)) in the order of the shard."""
    size_of_shard = size_of(path)
    key, members = "", []
    try:
        with open_data(path, SHARD_BLOCK) as file, tarfile.open(fileobj=file, mode="r:") as shard:
            for member in shard:
                shard.members = []  # type: ignore[attr-defined]  # otherwise tarfile keeps all
                folder, slash, name = member.name.rpartition("/")
                stem, dot, extension = name.partition(".")
                if not member.isreg() or not dot or not stem:
                    continue
                if member.issparse() or member.offset_data + member.size > size_of_shard:
                    problem = "is sparse" if member.issparse() else "is longer than the shard"
                    raise DataError(f"{path}: member {member.name!r} {problem}; is it cut off?")
                member_key = folder + slash + stem
                if members and member_key != key:
                    yield key, members
                    members = []
                key = member_key
                members.append((extension, member.offset_data, member.size))
            # tarfile does not notice that a shard was cut off between members.
            shard.fileobj.seek(shard.offset)
            if shard.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise DataError(
                    f"{path} has no end of archive after byte {shard.offset:,}; is it cut off?"
                )
    except (tarfile.TarError, OSError, EOFError, UnicodeError) as error:
        raise DataError(
            f"{path} cannot be read as an uncompressed tar file (a compressed one has to be "
            f"unpacked first): {error}"
        ) from None
    if members:
        yield key, members
