"""Metadata of a step, and the timeline of its results."""

from array import array

from raymm.actors.executor.step_meta import (
    LayoutKey,
    StepMeta,
    StepResult,
    measured_timeline,
    pack_labels,
)
from raymm.actors.modules.message import Decode
from raymm.scheduler.plan.stage import NO_STAGE, StageId

A, B = StageId("vision", 0), StageId("llm", 0)


def result(*spans):
    labels = pack_labels([(op, stage, number, NO_STAGE, 1.0) for op, stage, number, _, _ in spans])
    times = [start for *_, start, _ in spans] + [end for *_, end in spans]
    return StepResult(labels=labels, times=array("d", times).tobytes())


def test_the_timeline_begins_with_the_first_task_of_any_rank():
    timeline = measured_timeline([
        result(("FORWARD", A, 0, 101.0, 102.0), ("FORWARD", A, 1, 102.0, 104.0)),
        result(("FORWARD", B, 0, 100.5, 103.0)), StepResult(),
    ])
    assert [(s.rank, s.stage, s.microbatch, s.start, s.end) for s in timeline.spans] == [
        (0, A, 0, 0.5, 1.5), (0, A, 1, 1.5, 3.5), (1, B, 0, 0.0, 2.5),
    ]


def test_layouts_of_single_tokens_do_not_depend_on_the_prompt():
    keys = [LayoutKey(1, 2, (5,)), LayoutKey(3, 4, (7, 8))]
    assert [key.decoding(None) for key in keys] == keys
    assert [key.decoding(Decode((0,), first=True)) for key in keys] == keys
    first, second = (key.decoding(Decode((0,), first=False)) for key in keys)
    assert first.structure == second.structure != keys[0].structure
    assert first.identity != second.identity  # each text has its own entry


def test_samples_have_ids_or_are_counted():
    assert StepMeta(0, 1, (), sample_ids=(("a", "b"), ("c",))).samples_in(1) == 1
    assert StepMeta(0, 1, (), sample_counts=(4, 2)).samples_in(0) == 4
    assert StepMeta(0, 1, ()).samples_in(0) == 0


def test_noise_of_evaluation_does_not_depend_on_the_step():
    meta = StepMeta(7, 1, (), seed=3, batch=2, first_samples=(0, 4))
    seeds = [meta._replace(step=step, training=False).sample_seeds(1) for step in (1, 7)]
    assert seeds[0] == seeds[1] != meta.sample_seeds(1)
    assert meta.sample_seeds(1) != meta.sample_seeds(0)
    assert StepMeta(7, 1, ()).sample_seeds(0) is None
