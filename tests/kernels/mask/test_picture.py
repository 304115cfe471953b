"""Pictures of masks count visible pairs, at any length."""

import numpy as np
import pytest
from hypothesis import given

from benchmarks.gpu.every_mask import every_pattern
from raymm.kernels.mask.patterns import causal, embedded, full
from raymm.kernels.mask.picture import visible_share
from raymm.kernels.mask.spans import Span
from tests.support.random_masks import tables


@given(tables(48, 48))
def test_pixels_hold_the_share_of_visible_pairs(mask):
    """Check short masks with a pixel per pair; their kinds together are the dense mask."""
    shares, identities = visible_share(mask, 64)
    assert np.array_equal(shares.sum(axis=0) > 0.5, mask.dense().numpy())
    dense = mask.dense().numpy()
    identity = mask.rows().identity.numpy()
    for share, one in zip(shares, identities, strict=True):
        assert np.array_equal(share > 0.5, dense & (identity == one))


@pytest.mark.parametrize("name", every_pattern(1000))
def test_larger_masks_keep_their_area(name):
    mask = every_pattern(1000)[name]()
    shares, _ = visible_share(mask, 50)
    expected = mask.area() / (mask.n_queries * mask.n_keys)
    rows = np.diff(np.linspace(0, mask.n_queries, shares.shape[1] + 1).astype(int))
    columns = np.diff(np.linspace(0, mask.n_keys, shares.shape[2] + 1).astype(int))
    area = (shares.sum(axis=0) * rows[:, None] * columns).sum()
    assert area / (rows.sum() * columns.sum()) == pytest.approx(expected, abs=1e-9)


def test_a_mask_of_64k_tokens_draws(tmp_path):
    spans = [Span(s, s + 3000, 1 + s % 2) for s in range(500, 60000, 7001)]
    figure = embedded(65536, spans).draw(256)
    figure.savefig(tmp_path / "mask.png")
    assert (tmp_path / "mask.png").stat().st_size > 10_000
    axes = [a for a in figure.axes if a.images]
    image = axes[0].images[0].get_array()
    assert image.shape == (256, 256, 3)
    assert not np.allclose(image[190, 20], 1) and np.allclose(image[20, 200], 1)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "text", "encoder 1", "encoder 2",
    ]  # fmt: skip


def test_masks_without_a_picture_are_refused():
    with pytest.raises(ValueError, match="at least 16"):
        causal(32).draw(8)
    with pytest.raises(ValueError, match="cannot draw"):
        full(0, 4).draw()
