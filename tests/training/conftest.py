"""Runs of this folder draw no reports."""

import pytest


@pytest.fixture(autouse=True)
def _pictures(blank_pictures):
    """Draw no reports, except that of the fixture ``finished``."""
