"""The best checkpoint survives until a better one is committed."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raymm.config.evaluate_section import EvaluateSection
from raymm.errors import CheckpointError, RunFileError
from raymm.evaluation.best_evaluation import BestEvaluation
from raymm.storage import checkpoint
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.step_folders import step_number
from tests.support.killed_saves import Running, write_copies


def committed(store: CheckpointStore) -> list[int]:
    return [step_number(folder.name) for folder in store.committed()]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=5))
@example([(4, True), (1, True), (2, True)])
@example([(1, True), (0, True), (4, False), (2, True)])
@example([(1, True), (0, True), (4, True), (2, True)])
def test_the_best_checkpoint_always_exists(tmp_path_factory, steps) -> None:
    """Evaluate and save every step; some saves fail, as on a full disk.

    During and after a save, the best of the committed evaluations has a checkpoint.
    """
    root = tmp_path_factory.mktemp("run")
    best = BestEvaluation(EvaluateSection(every=1, metrics=["anls"], best="anls"), root)
    rows = [{"step": 0, "heldout_anls": 9.0, "texts": 1}]
    store, saved = CheckpointStore(root, 1), []
    store.keep_best(lambda steps: best.write(rows, steps))

    def write(group, method, folder):
        assert committed(store) == expected()
        if not group.succeeds:
            raise CheckpointError(f"cannot write {folder}/model-rank0.safetensors: No space left")
        return write_copies(group, method, folder)

    def expected() -> list[int]:
        values = {step: steps[step - 1][0] for step in saved}
        return sorted({*saved[-1:], max(values, key=values.__getitem__, default=0)} - {0})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint, "call_ranks_behind", write)
        for step, (value, succeeds) in enumerate(steps, start=1):
            rows.append({"step": step, "heldout_anls": float(value), "texts": 1})
            running = Running(step, size=1)
            running.succeeds = succeeds
            store.start(running, {})
            try:
                store.finish()
                saved.append(step)
            except RunFileError:
                assert not succeeds
            assert committed(store) == expected()
