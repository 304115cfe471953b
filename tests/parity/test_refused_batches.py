"""A rejected batch leaves a running model unchanged, in both styles.

Accumulated gradients, the next loss, and the processes stay as they were.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raymm.errors import DataError
from raymm.layout.mapping_plan import plan_of_mapping
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage, Placement
from tests.support import wrong_batches as wb

PIPELINED = MultimodalParallelSpec(
    {"vision": ParallelSpec(pp=2, ranks=(0, 1)), "audio": ParallelSpec(ranks=(1,))},
    ParallelSpec(pp=2, ranks=(0, 1)), 2,
)  # fmt: skip
SHARED = Mapping(2, 10, (
    MultiplexStage((Placement("vision", (0, 1), 6), Placement("audio", (1,), 4)), 1.0),
    MultiplexStage((Placement("llm", (0, 1), 10),), 1.0),
))


@pytest.fixture(scope="module", params=["pipelined", "multiplexed"])
def running(request, ray_cluster):
    """Return a model, its running replica, and its loss for the good batch."""
    model = wb.small_model()
    if request.param == "pipelined":
        parallel = PIPELINED.apply(model)
    else:
        parallel = ParallelModel(
            model, plan_of_mapping(model, SHARED, 2), timeout_s=120
        )
    with parallel:
        yield model, parallel, parallel.evaluate(wb.good_batch()).loss


def test_refused_batches_change_nothing(running):
    _, parallel, loss = running
    for _ in range(2):
        parallel.execute(wb.good_batch())
    twice = parallel.gradients()
    parallel.optimizer.zero_grad()
    assert parallel.execute(wb.good_batch()).loss == loss
    before = parallel.gradients()
    for name, (batch, _) in wb.WRONG.items():
        for run in (parallel.execute, parallel.train_step, parallel.evaluate):
            with pytest.raises(DataError):
                run(batch)
                pytest.fail(name)
    assert parallel.steps_taken == 0
    after = parallel.gradients()
    assert all(torch.equal(after[n], g) for n, g in before.items() if g is not None)
    assert parallel.execute(wb.good_batch()).loss == loss
    after = parallel.gradients()
    assert all(torch.equal(after[n], g) for n, g in twice.items() if g is not None)
    parallel.optimizer.zero_grad()


def reference(model, microbatches) -> float:
    tokens = sum(int((one["labels"][:, 1:] != -100).sum()) for one in microbatches)
    with torch.no_grad():
        return sum(float(model(**one, label_tokens=tokens)) for one in microbatches)


def test_what_means_the_same_gives_the_same(running):
    model, parallel, loss = running
    for name, batch in wb.equal_numbers().items():
        assert parallel.evaluate(batch).loss == pytest.approx(loss, rel=1e-6), name
    unlabelled = wb.good_batch(5)
    unlabelled["labels"].fill_(-100)
    step = [wb.good_batch(), unlabelled]
    assert parallel.evaluate(step).loss == pytest.approx(reference(model, step), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.float8_e4m3fn], ids=str)
def test_dtypes_without_pickle_support_arrive(running, dtype):
    _, parallel, _ = running
    batch = wb.good_batch()
    whole = torch.randint(0, 5, batch["vision"]["pixel_values"].shape).float()
    losses = []
    for pixels in (whole, whole.to(dtype)):
        batch["vision"]["pixel_values"] = pixels
        losses.append(parallel.evaluate(batch).loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("around", [
    lambda: torch.device("meta"), torch.inference_mode, torch.no_grad,
    lambda: torch.autocast("cpu"),
], ids=["default device", "inference mode", "no grad", "autocast"])  # fmt: skip
def test_the_callers_torch_modes_change_nothing(running, around):
    """Check also inputs of dtypes that are first tried in such a context."""
    _, parallel, loss = running
    batch, other = wb.good_batch(), wb.good_batch()
    other["vision"]["pixel_values"] = other["vision"]["pixel_values"].half()
    with around():
        assert parallel.evaluate(batch).loss == loss
        assert parallel.evaluate(other).loss == pytest.approx(loss, rel=1e-4)
        assert parallel.execute(batch).loss == loss
    assert any(one is not None and bool(one.any()) for one in parallel.gradients().values())
    parallel.zero_grad()


def test_steps_of_several_threads_do_not_mix(running):
    """Check that all ranks run them in the same order."""
    _, parallel, _ = running
    batches = [wb.good_batch(seed) for seed in range(3, 7)]
    alone = [parallel.evaluate(batch).loss for batch in batches]
    with ThreadPoolExecutor(len(batches)) as pool:
        for _ in range(3):
            together = pool.map(lambda batch: parallel.evaluate(batch).loss, batches, timeout=100)
            assert list(together) == alone


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(wb.changes(), min_size=1, max_size=2), split=st.booleans())
def test_any_batch_is_rejected_or_has_the_reference_loss(running, steps, split):
    model, parallel, loss = running
    batch = wb.good_batch()
    for change in steps:
        batch = wb.changed(batch, change)
    try:
        found = parallel.evaluate(batch if split else [batch]).loss
    except DataError:
        assert parallel.evaluate(wb.good_batch()).loss == loss
    else:
        expected = reference(model, [batch])
        assert found == pytest.approx(expected, rel=1e-5, nan_ok=True)
