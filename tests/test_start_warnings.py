"""Warnings of libraries at the start of a command."""

from __future__ import annotations

import logging
from enum import StrEnum

import torch.utils._pytree as pytree

import raymm  # noqa: F401  filters the warnings


def test_a_warning_that_torchao_causes_is_not_shown(caplog):
    class Kind(StrEnum):
        ONE = "one"

    with caplog.at_level(logging.WARNING, logger="torch.utils._pytree"):
        pytree.register_constant(Kind)
        logging.getLogger("torch.utils._pytree").warning("another warning")
    assert [record.getMessage() for record in caplog.records] == ["another warning"]
