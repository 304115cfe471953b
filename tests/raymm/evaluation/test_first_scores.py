"""Initial scores of rows are stored by id, and each id must belong to one row."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import ray
import torch

from raymm.data.samples.collate import EncodedSample, collate, describe
from raymm.errors import ConfigError
from raymm.evaluation.first_scores import keep_references
from raymm.kernels.preference import PreferenceLoss
from raymm.storage.resuming import have_same_rows

RUN = {"run.steps": 3, "data.batch_size": 2, "data.max_length": 9, "data.train": [{"digest": "0"}]}


class Steps:
    """Microbatches of two rows each, like a loader's."""

    def __init__(self, rows):
        self.steps = []
        for pair in zip(rows[::2], rows[1::2], strict=True):
            samples = [EncodedSample(name, ids, [-100, *ids[1:]], {}) for name, ids in pair]
            microbatch = collate(samples, 0)
            meta = describe(microbatch, [sample.id for sample in samples])
            parts = {"text": ray.put(microbatch)}
            self.steps.append(SimpleNamespace(microbatches=[parts], meta=[meta]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __iter__(self):
        return iter(self.steps)


def asked(rows, folder, scores=(-1.0, -2.0), run=None, begins=True):
    references = {}
    parallel = SimpleNamespace(
        model=SimpleNamespace(preference=PreferenceLoss(reference="initial")),
        scores=lambda prepared: [torch.tensor(scores)] * len(prepared[1]),
        set_references=references.update,
    )
    same_rows = None if begins else partial(have_same_rows, now=run)
    keep_references(parallel, [Steps(rows)], folder, run or RUN, same_rows, lambda line: None)
    return references


def test_a_row_with_a_used_id_is_detected_by_its_tokens(ray_cluster, tmp_path):
    """Detect it by its tokens, even if its score is equal."""
    rows = [("a", [1, 2, 3]), ("b", [4, 5]), ("a", [1, 2, 3]), ("b", [4, 5, 6, 7])]
    with pytest.raises(ConfigError, match="two rows have the id 'b'"):
        asked(rows, tmp_path)
    assert not list(tmp_path.iterdir())
    # A repeated row is not a new one, whatever its padding.
    again = [("a", [1, 2, 3]), ("b", [4, 5]), ("a", [1, 2, 3]), ("b", [4, 5])]
    references = asked(again, tmp_path)
    assert references == {"a": -1.0, "b": -2.0}
    assert json.loads((tmp_path / "references.json").read_text())["scores"] == references


def test_a_row_with_equal_tokens_is_detected_by_its_score(ray_cluster, tmp_path):
    """Detect a row with another picture."""
    with pytest.raises(ConfigError, match="two rows have the id 'a'"):
        asked([("a", [1, 2]), ("a", [1, 2])], tmp_path)


@pytest.mark.parametrize(("changes", "is_computed"), [
    ({}, False),
    ({"run.steps": 9}, False),
    ({"data.batch_size": 4, "data.microbatches": 2}, False),
    ({"data.max_length": 5}, True),
    ({"data.heldout": [{"digest": "1"}]}, True),
    ({"data.train": [{"digest": "2"}]}, True),
])  # fmt: skip
def test_a_resumed_run_scores_rows_that_differ(ray_cluster, tmp_path, changes, is_computed):
    """Read scores of the initial weights only for the same rows."""
    rows = [("a", [1, 2, 3]), ("b", [4, 5])]
    first = asked(rows, tmp_path)
    again = asked(rows, tmp_path, (-3.0, -4.0), {**RUN, **changes}, begins=False)
    assert again == ({"a": -3.0, "b": -4.0} if is_computed else first)
    assert asked(rows, tmp_path, (-5.0, -6.0), {**RUN, **changes}, begins=False) == again
