"""Tensors of a checkpoint: whichever shards were written, any others can be read."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.actors.optimizer.checkpoint_shards import checksum, stored_shards, write_shard
from raymm.actors.optimizer.stored_tensors import StoredTensors
from raymm.errors import CheckpointError


class ParameterShard(NamedTuple):
    dim: int
    ranges: tuple[tuple[int, int], ...]


WHOLE = torch.arange(11 * 6, dtype=torch.float32).view(11, 6)


@st.composite
def layouts(draw: st.DrawFn) -> list[ParameterShard | None]:
    """Draw the shards of a tensor: full, or cut along a dimension.

    It may be packed (two parts, each cut separately).
    """
    processes = draw(st.integers(1, 4))
    if draw(st.booleans()):
        return [None] * processes
    dim = draw(st.integers(0, 1))
    length = WHOLE.shape[dim]
    middle = draw(st.sampled_from([0, length // 2]))
    cuts = []
    for lo, hi in ((0, middle), (middle, length)):
        inner = sorted(draw(st.integers(lo, hi)) for _ in range(processes - 1))
        cuts.append([lo, *inner, hi])
    return [
        ParameterShard(dim, tuple((c[i], c[i + 1]) for c in cuts if c[0] < c[-1]))
        for i in range(processes)
    ]


def cut(own: ParameterShard | None) -> torch.Tensor:
    if own is None:
        return WHOLE
    return torch.cat([WHOLE.narrow(own.dim, a, b - a) for a, b in own.ranges], own.dim)


@settings(deadline=None)
@given(layouts(), layouts())
def test_any_shards_are_read_from_any_others(tmp_path_factory, written, wanted):
    folder = tmp_path_factory.mktemp("shards")
    index, files = {}, {}
    writers = written if written[0] is not None else written[:1]
    for process, own in enumerate(writers):
        tensors = dict(stored_shards("llm/weight", cut(own), own))
        if process == 0:  # one of several owners writes
            tensors |= dict(stored_shards("optimizer/llm/weight/step", torch.tensor(3.0), None))
        shard = write_shard(folder / f"{process}", {n: t.clone() for n, t in tensors.items()})
        assert shard.names == sorted(tensors)
        files[str(process)] = shard.file
        index |= dict.fromkeys(tensors, str(process))
    stored = StoredTensors(folder, index, files)
    assert stored.optimizer_keys() == {"optimizer/llm/weight": ["step"]}
    for own in wanted:
        asked = {"llm/weight": own, "optimizer/llm/weight/step": own, "none": own}
        read = stored.read(asked)
        assert set(read) == {"llm/weight", "optimizer/llm/weight/step"}
        assert torch.equal(read["llm/weight"], cut(own))
        assert read["optimizer/llm/weight/step"] == 3


def test_a_missing_range_is_an_error(tmp_path):
    own = ParameterShard(0, ((0, 4),))
    shard = write_shard(tmp_path / "a", dict(stored_shards("x", WHOLE[:4].clone(), own)))
    stored = StoredTensors(tmp_path, {"x[0:0:4]": "a"}, {"a": shard.file})
    assert torch.equal(stored.read({"x": ParameterShard(0, ((1, 3),))})["x"], WHOLE[1:3])
    with pytest.raises(CheckpointError, match=r"lacks \[4, 8\) of x"):
        stored.read({"x": ParameterShard(0, ((2, 8),))})


def two_shards(folder):
    """Write a tensor in two files; return its index and the files."""
    index, files = {}, {}
    for name, rows in (("a", (0, 5)), ("b", (5, 11))):
        part = dict(stored_shards("x", WHOLE[slice(*rows)].clone(), ParameterShard(0, (rows,))))
        files[name] = write_shard(folder / name, part).file
        index |= dict.fromkeys(part, name)
    return index, files


def test_files_are_verified_before_their_first_read(tmp_path):
    index, files = two_shards(tmp_path)
    flip(tmp_path / "b", -1)
    stored = StoredTensors(tmp_path, index, files)
    assert torch.equal(stored.read({"x": ParameterShard(0, ((1, 5),))})["x"], WHOLE[1:5])
    for wanted in (ParameterShard(0, ((4, 6),)), ParameterShard(1, ((0, 1),)), None):
        with pytest.raises(CheckpointError, match="/b has checksum .* bytes have changed"):
            stored.read({"x": wanted})


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_replaced_file_is_named_with_the_reason(tmp_path):
    index, files = two_shards(tmp_path)
    path = tmp_path / "a"

    def problem(index=index, files=files):
        with pytest.raises(CheckpointError) as error:
            StoredTensors(tmp_path, index, files).read({"x": None})
        return str(error.value)

    good = path.read_bytes()
    path.write_bytes(good[:-1])
    assert f"{path} has {len(good) - 1} bytes; {len(good)} were written" in problem()
    path.unlink()
    assert f"{path} is missing" in problem()
    path.mkdir()
    assert f"{path} is missing or not a file" in problem()
    path.rmdir()
    path.write_bytes(good)
    assert f"{path} lacks y, which the manifest lists" in problem({**index, "y": "a"})
    # An attacker can write any checksum: the following checks must hold, too.
    for header in (2**40, 99_999_999, len(good), 2**63):
        path.write_bytes(header.to_bytes(8, "little") + good[8:])
        assert f"cannot read {path}: " in problem(files={**files, "a": checksum(path)})
