"""Random mixtures of images, for a few steps.

``python -m tests.soak.image_mixtures`` runs more.
"""

import pytest

from tests.soak.image_mixtures import MICROBATCHES, soak

STEPS = 12


@pytest.mark.usefixtures("ray_cluster")
def test_mixtures_of_images_train_as_in_one_process() -> None:
    report = soak(STEPS, seed=3)
    assert report["ok"], report
    assert sum(report["microbatches_by_images"].values()) == STEPS * MICROBATCHES
    assert report["microbatches_by_images"].keys() == set(range(6))  # none, and all numbers
