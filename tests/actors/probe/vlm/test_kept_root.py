"""Frozen part of a tower whose features are cached."""

from __future__ import annotations

import pytest

from raymm.errors import ProbeError
from tests.support.contained_projectors import frozen_tower


def test_towers_that_read_more_than_features_are_refused():
    model, _ = frozen_tower("DeepseekVLHybridForConditionalGeneration")
    with pytest.raises(ProbeError, match="reads more than its features"):
        model.root_form("vision")
