"""Optimus runs encoders without delaying the language model."""

from __future__ import annotations

from tests.support.field_schedules import replicated_plan, stepped


def test_optimus_runs_encoders_in_bubbles_only() -> None:
    """The language model takes as long as alone, from its first input to its last gradient."""
    plan = replicated_plan(16, "optimus", encoder_seconds=0.25)
    alone = stepped(replicated_plan(16, "1f1b", encoder_seconds=0.0)).seconds()
    assert alone <= stepped(plan).seconds() <= alone + 2.0
