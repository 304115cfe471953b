"""What a model says of rows first is kept by their ids, of which each must be one row's."""

import json
from types import SimpleNamespace

import pytest
import ray
import torch

from raymm.data.samples.collate import EncodedSample, collate, describe
from raymm.evaluation.first_scores import keep_references
from raymm.files.config_error import ConfigError
from raymm.kernels.preference import PreferenceLoss


class Steps:
    """Microbatches of two rows each, as a loader gives them."""

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


def asked(rows, folder, scores=(-1.0, -2.0)):
    parallel = SimpleNamespace(
        model=SimpleNamespace(preference=PreferenceLoss(reference="initial")), steps_taken=0,
        scores=lambda prepared: [torch.tensor(scores)] * len(prepared[1]), references={},
    )
    keep_references(parallel, [Steps(rows)], folder, lambda line: None)
    return parallel.references


def test_another_row_of_the_same_id_is_told_by_its_tokens(ray_cluster, tmp_path):
    """However likely it is."""
    rows = [("a", [1, 2, 3]), ("b", [4, 5]), ("a", [1, 2, 3]), ("b", [4, 5, 6, 7])]
    with pytest.raises(ConfigError, match="two rows are named 'b'"):
        asked(rows, tmp_path)
    assert not list(tmp_path.iterdir())
    # The same row again is no other, whatever it is padded to.
    again = [("a", [1, 2, 3]), ("b", [4, 5]), ("a", [1, 2, 3]), ("b", [4, 5])]
    references = asked(again, tmp_path)
    assert references == {"a": -1.0, "b": -2.0}
    assert json.loads((tmp_path / "references.json").read_text()) == references


def test_another_row_with_the_same_tokens_is_told_by_its_score(ray_cluster, tmp_path):
    """It has another picture."""
    with pytest.raises(ConfigError, match="two rows are named 'a'"):
        asked([("a", [1, 2]), ("a", [1, 2])], tmp_path)
