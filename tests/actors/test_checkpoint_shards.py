"""Pieces of tensors: whatever pieces were written, any others can be read."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.actors.shards import ShardError, StoredTensors, stored_pieces, write_shard


class Piece(NamedTuple):
    dim: int
    ranges: tuple[tuple[int, int], ...]


WHOLE = torch.arange(11 * 6, dtype=torch.float32).view(11, 6)


@st.composite
def layouts(draw: st.DrawFn) -> list[Piece | None]:
    """How several processes have a tensor: whole, or cut along a dimension, perhaps packed (two
    parts, each cut for itself)."""
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
        Piece(dim, tuple((c[i], c[i + 1]) for c in cuts if c[0] < c[-1])) for i in range(processes)
    ]


def cut(piece: Piece | None) -> torch.Tensor:
    if piece is None:
        return WHOLE
    return torch.cat([WHOLE.narrow(piece.dim, a, b - a) for a, b in piece.ranges], piece.dim)


@settings(deadline=None)
@given(layouts(), layouts())
def test_any_pieces_from_any_others(tmp_path_factory, written, wanted):
    folder = tmp_path_factory.mktemp("shards")
    index = {}
    writers = written if written[0] is not None else written[:1]
    for process, piece in enumerate(writers):
        tensors = dict(stored_pieces("llm/weight", cut(piece), piece))
        tensors |= dict(stored_pieces("optimizer/llm/weight/step", torch.tensor(3.0), None))
        write_shard(folder / f"{process}", {n: t.clone() for n, t in tensors.items()})
        index |= dict.fromkeys(tensors, str(process))
    stored = StoredTensors(folder, index)
    assert stored.optimizer_keys() == {"optimizer/llm/weight": ["step"]}
    for piece in wanted:
        asked = {"llm/weight": piece, "optimizer/llm/weight/step": piece, "none": piece}
        read = stored.read(asked)
        assert set(read) == {"llm/weight", "optimizer/llm/weight/step"}
        assert torch.equal(read["llm/weight"], cut(piece))
        assert read["optimizer/llm/weight/step"] == 3


def test_a_range_that_nobody_wrote(tmp_path):
    piece = Piece(0, ((0, 4),))
    write_shard(tmp_path / "a", dict(stored_pieces("x", WHOLE[:4].clone(), piece)))
    stored = StoredTensors(tmp_path, {"x[0:0:4]": "a"})
    assert torch.equal(stored.read({"x": Piece(0, ((1, 3),))})["x"], WHOLE[1:3])
    with pytest.raises(ShardError, match=r"lacks \[4, 8\) of x"):
        stored.read({"x": Piece(0, ((2, 8),))})
    (tmp_path / "a").write_bytes(b"torn")
    with pytest.raises(ShardError, match="cannot read .*/a"):
        stored.read({"x": None})
