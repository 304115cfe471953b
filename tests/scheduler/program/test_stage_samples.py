"""Samples that stages run on and read equal a loop over the samples."""

from __future__ import annotations

from hypothesis import given

from raymm.scheduler.graph.sample_ranges import Range, share
from raymm.scheduler.multiplex.mapping import mapped_plan
from raymm.scheduler.program.stage_samples import Samples, filled_samples, needed_samples
from raymm.scheduler.program.stage_samples import stage_samples as samples_of
from tests.support.random_mappings import cases, clip, mapping_of


def numbers(ranges) -> list[int]:
    return [sample for lo, hi in ranges for sample in range(lo, hi)]


@given(cases())
def test_replicas_run_on_each_sample_once(case) -> None:
    graph, mapping, batch = case
    plan = mapped_plan(graph, mapping)
    for node in plan.graph.nodes:
        replicas = plan.replicas(node.name)
        if replicas[0][0].split == "samples":
            ran = [n for r in replicas for n in numbers(samples_of(plan, r[0], Samples(batch)))]
            assert ran == list(range(batch))


def test_samples_without_data_are_not_run_or_read() -> None:
    plan = mapped_plan(clip(), mapping_of(2, {"image": (0,), "text": (0, 1)}))
    samples = filled_samples(plan, 4, {"text": [0, 1, 3, 3, 3]})  # no text in the second half
    assert samples.of("text") == (Range(0, 2),) and samples.of("image") == (Range(0, 4),)
    for replica, expected in enumerate([[0, 1], []]):
        text = plan.replicas("text")[replica][0]
        assert numbers(samples_of(plan, text, samples)) == expected
    for loss in (replica[0] for replica in plan.replicas("loss")):
        read = numbers(needed_samples(plan, "text", loss, samples))
        own = numbers([share(4, loss.replica, 2)])
        assert read in ([0, 1], [n for n in own if n < 2])
