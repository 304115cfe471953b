"""Rows of documents, split and joined, on one process and on several."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raymm.kernels.hf.document_rows import DocumentRows, SharedRows, mix_by_documents

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=4).flatmap(
    lambda row: st.tuples(st.just(tuple(row)), st.permutations(row).map(tuple))
)


def numbered(rows: DocumentRows | SharedRows) -> torch.Tensor:
    return torch.arange(rows.shape[0] * rows.shape[1] * 2.0).view(*rows.shape, 2)


@given(LENGTHS)
def test_documents_get_rows_and_return(lengths):
    rows = DocumentRows(lengths)
    tokens = numbered(rows)
    split = rows.split(tokens)
    documents = [d for row, n in zip(tokens, lengths, strict=True) for d in row.split(n)]
    assert len(split) == len(documents)
    for row, document in zip(split, documents, strict=True):
        assert torch.equal(row[: len(document)], document)
        assert (row[len(document) :] == document[-1]).all()  # padding repeats the last token
    assert torch.equal(rows.join(split), tokens)


def test_tuples_are_converted_and_other_values_are_kept():
    rows = DocumentRows(((2, 3),))
    tokens, other = numbered(rows), torch.zeros(7, 7)
    split = rows.split((tokens, [tokens], other, None))
    assert isinstance(split, tuple) and torch.equal(split[1][0], split[0])
    assert split[2] is other and split[3] is None


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_share_rows_and_keep_their_tokens(rank):
    lengths = ((2, 4), (5, 1))
    positions = [torch.tensor([0, 3, 4]), torch.tensor([1, 2, 5])]
    whole = numbered(DocumentRows(lengths))
    parts = [whole[:, own] for own in positions]
    rows = SharedRows(lengths, positions, rank, lambda local: torch.cat(parts, 1))
    split = rows.split(parts[rank])
    assert torch.equal(split, DocumentRows(lengths).split(whole))
    assert torch.equal(rows.join(split), parts[rank])


def test_the_padding_mask_of_all_tokens_replaces_that_of_a_process():
    lengths, real = ((2, 2),), torch.tensor([[1, 1, 1, 0]])
    positions = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    whole = torch.randn(1, 4, 2)
    rows = SharedRows(lengths, positions, 0, lambda local: whole, real)

    def forward(hidden_states, attention_mask=None): ...

    args, kwargs = rows.of_call(forward, (whole[:, :2],), {"attention_mask": None})
    assert args == () and kwargs["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert torch.equal(kwargs["hidden_states"], DocumentRows(lengths).split(whole))


class RunningSum(nn.Module):
    """Layer whose state passes from token to token."""

    def forward(self, hidden):
        return hidden.cumsum(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = RunningSum()

    def forward(self, hidden):
        return self.mixer(hidden)


def test_a_mixer_does_not_leak_between_documents():
    block, tokens = Block(), torch.randn(1, 6, 2)
    undo = mix_by_documents([block], ["RunningSum"])
    out = block(tokens, raymm_documents=((2, 4),))
    assert torch.equal(out, torch.cat([t.cumsum(1) for t in tokens.split([2, 4], 1)], 1))
    assert torch.equal(block(tokens), tokens.cumsum(1))
    assert torch.equal(block(tokens, raymm_documents=((6,),)), tokens.cumsum(1))
    undo()
    assert "forward" not in vars(block) and "forward" not in vars(block.mixer)
