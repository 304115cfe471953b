

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymm.data import EncodedSample, describe, join_parts, split_parts
from raymm.data.samples.collate import collate, shuffle_modality
from raymm.errors import DataError

X = -100


def item(value, size=2):
    return {"pixel_values": torch.full((size,), float(value))}


def encoded(name, ids, images=()):
    media = {"vision": [item(i) for i in images]} if images else {}
    return EncodedSample(name, ids, [X] + ids[1:], media)


def test_padding_items_and_metadata():
    samples = [encoded("a", [5, 6], [1, 2]), encoded("b", [7, 8, 9]), encoded("c", [4, 3], [3])]
    microbatch = collate(samples, pad_id=0)
    assert microbatch["input_ids"].tolist() == [[5, 6, 0], [7, 8, 9], [4, 3, 0]]
    assert microbatch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 0]]
    assert microbatch["labels"].tolist() == [[X, 6, X], [X, 8, 9], [X, 3, X]]
    assert microbatch["vision"]["pixel_values"].tolist() == [[1, 1], [2, 2], [3, 3]]
    assert microbatch["vision"]["sample_index"].tolist() == [0, 0, 2]
    tensors = [*split_parts(microbatch)["text"].values(), microbatch["vision"]["sample_index"]]
    assert all(tensor.dtype == torch.int64 for tensor in tensors)
    meta = describe(microbatch, ["a", "b", "c"])
    assert (meta.num_samples, meta.seq_len, meta.tokens, meta.label_tokens) == (3, 3, 7, 4)
    assert meta.lengths == (2, 3, 2)
    assert meta.items == {"vision": [0, 0, 2]}
    assert meta.shapes["vision"] == {"pixel_values": (3, 2), "sample_index": (3,)}
    assert meta.shapes["text"]["labels"] == (3, 3)
    parts = split_parts(microbatch)
    assert set(parts) == {"text", "vision"}
    assert join_parts(parts).keys() == microbatch.keys()


def test_an_unused_modality_is_absent():
    microbatch = collate([encoded("a", [5, 6])], pad_id=0)
    assert set(microbatch) == {"input_ids", "attention_mask", "labels"}


def test_items_that_do_not_stack_name_both_samples():
    odd = EncodedSample("b", [1, 2], [X, 2], {"vision": [item(1, size=3)]})
    with pytest.raises(DataError, match="'vision'.*'b'.*'a'"):
        collate([encoded("a", [1, 2], [1]), odd], pad_id=0)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8).filter(any), st.integers(0, 99))
def test_shuffle_is_a_derangement_whenever_one_exists(counts, seed):
    owners = [row for row, count in enumerate(counts) for _ in range(count)]
    samples, first = [], 0
    for row, count in enumerate(counts):
        samples.append(encoded(str(row), [1, 2], range(first, first + count)))
        first += count
    microbatch = collate(samples, pad_id=0)
    before = microbatch["vision"]["pixel_values"].clone()
    moved = shuffle_modality(microbatch, "vision", torch.Generator().manual_seed(seed))
    torch.testing.assert_close(microbatch["vision"]["pixel_values"], before)
    source = moved["vision"]["pixel_values"][:, 0].int().tolist()
    assert sorted(source) == list(range(first))
    assert moved["vision"]["sample_index"].tolist() == owners
    stayed = sum(owners[item] == owner for item, owner in zip(source, owners, strict=True))
    # Pigeonhole principle: a sample with most of the items gets some of them back.
    assert stayed == max(0, 2 * max(counts) - first)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 2**31))
def test_shuffled_pairs_get_one_other_pairs_items(counts, seed):
    """Check that both answers of a pair have the same items before and after."""
    if not sum(counts):
        return
    pairs = [range(sum(counts[:n]), sum(counts[: n + 1])) for n in range(len(counts))]
    rows = [encoded(str(n), [1, 2], own) for n, own in enumerate(pairs) for _ in range(2)]
    microbatch = collate(rows, pad_id=0)
    owners = microbatch["vision"]["sample_index"].tolist()
    moved = shuffle_modality(microbatch, "vision", torch.Generator().manual_seed(seed), 2)
    assert moved["vision"]["sample_index"].tolist() == owners
    values = moved["vision"]["pixel_values"][:, 0].int().tolist()
    chosen, rejected = (
        [value for value, row in zip(values, owners, strict=True) if row % 2 == answer]
        for answer in range(2)
    )
    assert chosen == rejected and sorted(chosen) == list(range(sum(counts)))
    due = [pair for pair, own in enumerate(pairs) for _ in own]
    stayed = sum(value in pairs[pair] for value, pair in zip(chosen, due, strict=True))
    assert stayed == max(0, 2 * max(counts) - sum(counts))


def test_shuffle_follows_its_generator():
    microbatch = collate([encoded(str(i), [1, 2], [i]) for i in range(20)], pad_id=0)
    drawn = [
        tuple(
            shuffle_modality(microbatch, "vision", torch.Generator().manual_seed(seed))["vision"][
                "pixel_values"
            ][:, 0].tolist()
        )
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert shuffle_modality(microbatch, "audio") is microbatch


def microbatch(owners):
    index = torch.tensor(owners)
    return {
        "input_ids": torch.zeros(8, 1),
        "vision": {"pixels": torch.arange(len(owners)) * 10, "sample_index": index},
    }


@pytest.mark.parametrize("owners", [[0, 1], [0, 0, 1, 1], [2, 0, 1, 0, 3], [0, 1, 1, 2, 3, 3]])
@pytest.mark.parametrize("seed", range(4))
def test_no_item_stays_with_its_sample(owners, seed):
    before = microbatch(owners)
    after = shuffle_modality(before, "vision", torch.Generator().manual_seed(seed))
    moved = (after["vision"]["pixels"] // 10).tolist()
    assert sorted(moved) == list(range(len(owners)))
    assert all(owners[item] != owner for item, owner in zip(moved, owners, strict=True))
    assert after["vision"]["sample_index"].tolist() == owners
    assert before["vision"]["pixels"].tolist() == [10 * i for i in range(len(owners))]


def test_as_few_items_as_possible_stay():
    moved = shuffle_modality(microbatch([0, 0, 0, 1]), "vision")["vision"]["pixels"] // 10
    owners = torch.tensor([0, 0, 0, 1])
    assert int((owners[moved] == owners).sum()) == 2


@pytest.mark.parametrize("seed", range(8))
def test_both_rows_of_a_pair_get_the_same_items(seed):
    pixels = torch.tensor([[1, 2], [1, 2], [3, 4], [3, 4], [5, 6], [5, 6]]).flatten()
    owners = torch.arange(6).repeat_interleave(2)
    batch = {"vision": {"pixels": pixels, "sample_index": owners}}
    after = shuffle_modality(batch, "vision", torch.Generator().manual_seed(seed), rows=2)
    moved = after["vision"]["pixels"].view(3, 2, 2)
    assert bool((moved[:, 0] == moved[:, 1]).all())
    assert bool((moved != pixels.view(3, 2, 2)).all())


def test_a_microbatch_without_the_modality_is_unchanged():
    batch = microbatch([0, 1])
    assert shuffle_modality(batch, "audio") is batch
