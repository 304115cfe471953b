"""Names of stages in files, and the processes that shard parameters."""

from __future__ import annotations

import pytest

from raymm.scheduler.plan.stage import NO_STAGE, WHOLE, Stage, StageId


@pytest.mark.parametrize(("stage", "name"), [
    (StageId("llm", 2), "llm.2"), (StageId("vision", 0, 1), "vision.0@1"),
    (StageId("audio", WHOLE), "audio"), (StageId("audio", WHOLE, 3), "audio@3"), (NO_STAGE, ""),
])
def test_names_of_stages(stage: StageId, name: str) -> None:
    assert str(stage) == name
    assert stage.first_replica == (stage.module, stage.index, 0)


def test_ids_sort_by_module_index_and_replica() -> None:
    ids = [StageId("b", 0), StageId("a", 10), StageId("a", 2, 1), StageId("a", 2)]
    assert sorted(ids) == ids[::-1]


@pytest.mark.parametrize(("sharding", "shards"), [("none", 1), ("zero1", 1), ("fsdp", 6)])
def test_only_fsdp_shards_parameters_of_blocks(sharding: str, shards: int) -> None:
    stage = Stage("llm", 1, (4, 8), 0, replica=2, cp=2, tp=4, fsdp=3, sharding=sharding)
    assert stage.shards == shards
    assert stage.degrees == (2, 4, 3)
    assert stage.id == ("llm", 1, 2)
