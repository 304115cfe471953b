"""Files of shards: their checksums, and failed writes."""

import resource
import signal

import pytest
import torch

from raymm.actors.optimizer.checkpoint_shards import checksum, write_shard
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
