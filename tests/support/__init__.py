"""Helpers that tests share: small models, oracles, random problems, servers and scripts."""

from pathlib import Path

SUPPORT = Path(__file__).parent
REPOSITORY = SUPPORT.parents[1]
