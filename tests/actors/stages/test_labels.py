"""Labelled positions of a microbatch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from raymm.actors.modules.message import SOURCES
from raymm.actors.stages.labels import Labelled, label_mask, with_sources

CPU = torch.device("cpu")
labels_of_rows = st.lists(
    st.lists(st.sampled_from([-100, 0, 3, 7]), min_size=4, max_size=4), min_size=1, max_size=4
)


def total(values, labels):
    return (values * (labels + 1)).sum()


@given(labels_of_rows, st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_sums_of_sources_equal_a_loop(rows, sources) -> None:
    labels, sources = torch.tensor(rows), torch.tensor(sources[: len(rows)])
    values = torch.arange(labels.numel(), dtype=torch.float32).view(labels.shape)
    labelled = Labelled(with_sources({"labels": labels, SOURCES: sources})["labels"], CPU)
    expected: dict[int, tuple[float, int]] = {}
    for row, source in enumerate(sources.tolist()):
        for label, value in zip(rows[row], values[row].tolist(), strict=True):
            if label != -100:
                before, count = expected.get(source, (0.0, 0))
                expected[source] = before + value * (label + 1), count + 1
    chosen = labelled.of(values)
    assert labelled.targets.tolist() == labels[labels != -100].tolist()
    sums = labelled.by_source(total, chosen, total(chosen, labelled.targets))
    assert {source: (float(value), n) for source, (value, n) in sums.items()} == expected


@given(labels_of_rows, st.data())
def test_sums_of_rows_equal_a_loop(rows, data) -> None:
    labels = torch.tensor(rows)
    values = torch.arange(labels.numel(), dtype=torch.float32).view(labels.shape)
    own = range(data.draw(st.integers(0, 3)), 0)
    own = range(own.start, own.start + len(rows))
    numbered = torch.cat([torch.full((own.start, 4), -100), labels])
    encoded = with_sources({"labels": numbered}, rows=True)["labels"][own.start :]
    labelled = Labelled(encoded, CPU)
    real = labels != -100
    expected = [float(total(values[n][real[n]], labels[n][real[n]])) for n in range(len(rows))]
    assert labelled.row_sums(total, labelled.of(values), own).tolist() == expected


def test_decoding_needs_the_last_position_of_each_row() -> None:
    values = torch.arange(6).view(2, 3)
    labelled = Labelled(torch.full((2, 3), -100), CPU, only_last=True)
    assert labelled.of(values).tolist() == [2, 5]


def test_the_first_token_is_never_a_label() -> None:
    assert label_mask(torch.tensor([[5, -100, 6]])).tolist() == [[False, True]]
    inputs = {"labels": torch.tensor([[5, -100, 6]])}
    assert torch.equal(with_sources(inputs)["labels"], inputs["labels"])
