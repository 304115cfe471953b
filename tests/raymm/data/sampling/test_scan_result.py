"""Sizes of samples from a scan, compared with sums by hand."""

import numpy as np

from raymm.data.sampling.scan_result import SampleScan


def scanned():
    return SampleScan(
        text_tokens=np.array([5, 0, 7]),
        counts={"vision": np.array([2, 0, 1]), "audio": np.array([0, 0, 2])},
        items={
            "vision": np.array([[4, 2, 1], [3, 3, 1], [10, 1, 2]]),
            "audio": np.array([[32_000, 16_000, 1], [0, 0, 0]]),
        },
        sources=np.array([0, 1, 1]), source_names=("a", "b"),
        unusable=np.array([1]), reasons=("broken",),
    )


def test_items_count_as_one_unit_by_default():
    sizes = scanned().sizes()
    assert sizes.values.tolist() == [[2, 0, 5], [0, 0, 0], [1, 2, 7]]


def test_units_are_summed_over_the_items_of_a_sample():
    sizes = scanned().sizes({"vision": lambda items: items.prod(axis=1)})
    assert sizes.values[:, 0].tolist() == [4 * 2 + 3 * 3, 0, 20]
    assert sizes.values[:, 1].tolist() == [0, 0, 2]


def test_the_length_of_an_unreadable_sound_is_zero():
    assert scanned().seconds("audio").tolist() == [2.0, 0.0]


def test_a_dataset_without_samples_has_no_sizes():
    none = np.zeros(0, np.int64)
    scan = SampleScan(
        none, {"vision": none}, {"vision": none.reshape(0, 3)}, none, ("a",), none, ()
    )
    assert len(scan) == 0 and scan.sizes().values.shape == (0, 2)
