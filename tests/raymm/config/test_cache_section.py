"""The section ``cache``: accepted places and sizes."""

import pytest
from pydantic import ValidationError

from raymm.config.cache_section import MOST_GIB, CacheSection


def test_room_is_above_zero_and_at_most_a_pebibyte():
    assert CacheSection(room_gib=MOST_GIB).room_gib == MOST_GIB
    for room in (0.0, -1.0, MOST_GIB + 1.0, float("nan"), float("inf")):
        with pytest.raises(ValidationError, match="room_gib"):
            CacheSection(room_gib=room)


def test_other_places_of_features_are_refused_by_name():
    with pytest.raises(ValidationError, match="(?s)features.*'disk', 'host' or 'none'.*'gpu'"):
        CacheSection.model_validate({"features": "gpu"})


def test_names_are_not_blank():
    for field in ("folder", "version"):
        with pytest.raises(ValidationError, match=f"(?s){field}.*not blank"):
            CacheSection.model_validate({field: " "})
