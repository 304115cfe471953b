"""Files of shards: their checksums, and failed writes."""

from __future__ import annotations

import resource
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from raymm.actors.optimizer.checkpoint_shards import (
    Files,
    HostCopy,
    Saved,
    SavingActor,
    checksum,
    write_shard,
)
from raymm.actors.optimizer.host_staging import HostStaging
from raymm.errors import CheckpointError


@pytest.fixture
def small_files():
    """Limit files to 10 kB, as on a nearly full disk."""
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, heard)


def test_the_checksum_of_the_tensors_is_that_of_the_file(tmp_path):
    """Use every dtype, a scalar, no elements, a view, a name that JSON escapes."""
    dtypes = [
        torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
        torch.bool, torch.uint8, torch.int8, torch.int64, torch.complex64,
    ]
    tensors = {f"z{i}.\"ä\n{dtype}": torch.randn(3, 5).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {"scalar": torch.tensor(2.5), "nothing": torch.zeros(0, 4), "all": torch.zeros(0)}
    tensors["view"] = torch.randn(6, 4).t()[1:]
    for names in (list(tensors), ["nothing"], []):
        path = tmp_path / f"{len(names)}.safetensors"
        written = write_shard(path, {name: tensors[name] for name in names})
        assert written.file == checksum(path)


def test_failed_writes_are_named_with_the_cause(tmp_path, small_files):
    with pytest.raises(CheckpointError, match="cannot write .*/a: .*File too large"):
        write_shard(tmp_path / "a", {"x": torch.zeros(100_000)})
    with pytest.raises(CheckpointError, match="cannot write .*/none/a: .*No such file"):
        write_shard(tmp_path / "none" / "a", {"x": torch.zeros(1)})


WIDENED = "llm/0[0:0:4]"  # stored in fp32
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


class Process(SavingActor):
    """Process with tensors to save."""

    def __init__(self, files: Files) -> None:
        self.files, self._staging = files, HostStaging(CPU)

    def _files_to_save(self, skip_frozen: frozenset[str]) -> Saved:
        assert skip_frozen == {"vision"}
        return Saved(self.files, frozenset({WIDENED}))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw scalars, empty tensors, transposed ones, and views."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    whole = torch.randint(0, 100, [*shape, 2], generator=seed).to(draw(st.sampled_from(DTYPES)))
    part = whole[..., 0]
    return part.transpose(0, 1) if len(shape) > 1 and draw(st.booleans()) else part


@given(st.lists(st.lists(tensors(), min_size=1, max_size=3), min_size=1, max_size=2), st.booleans())
def test_a_copy_is_written_like_its_source(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[torch.Tensor]], tied: bool
) -> None:
    """Check for the same bytes in the same files, while the tensors change."""
    files = {
        f"part{n}-rank0.safetensors": {f"llm/{i}[0:0:4]": t for i, t in enumerate(part)}
        for n, part in enumerate(parts)
    }
    if tied:  # two names of the same memory
        files["part0-rank0.safetensors"]["llm/tied"] = parts[0][0]
    process, frozen = Process(files), frozenset({"vision"})
    folders = [tmp_path_factory.mktemp(name) for name in ("copied", "at-once")]
    nbytes = process.copy_state(frozen)
    assert nbytes == sum(
        t.numel() * 4 if name == WIDENED else t.nbytes
        for part in files.values()
        for name, t in part.items()
    )
    at_once = process.save(str(folders[1]), frozen)
    for part in parts:
        for tensor in part:
            tensor.fill_(-1)
    copied = process.write_copy(str(folders[0]))
    assert copied.not_finite == [] and copied.shards == at_once
    for file in files:
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes()
        assert set(load_file(folders[0] / file)) == set(files[file])
    with pytest.raises(CheckpointError, match="no copied state"):  # it was removed
        process.write_copy(str(folders[0]))


def test_non_finite_tensors_are_named_and_not_written(tmp_path) -> None:
    copy = HostCopy(HostStaging(CPU))
    bad = torch.tensor([1.0, torch.inf, torch.nan])
    copy.copy(Saved({"a.safetensors": {"llm/x[0:3:6]": bad, "llm/y": torch.ones(2)}}))
    assert copy.write(str(tmp_path)) == ({}, ["llm/x (2 of 3 values)"])
    assert list(tmp_path.iterdir()) == []
