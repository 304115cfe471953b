"""Other formats and their errors through Ray's data workers."""

from itertools import islice

import pytest
import ray
import torch

from raymm.data import StepLoader, join_parts, local_steps, open_split, training_sampler
from raymm.errors import DataError, SampleError
from tests.support.same_rows import write_parquet, write_shards

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def mixed(make_config, tmp_path):
    """Return a configuration with one source of each kind."""
    shards = {"path": str(write_shards(tmp_path, 10)), "name": "shards",
              "columns": {"vision": "*.png", "audio": "wav"}}
    return make_config(train=[str(tmp_path / "train.jsonl"), shards,
                              str(write_parquet(tmp_path, 10))], num_workers=2)


def test_a_mixture_through_workers_is_the_local_stream(mixed):
    reference, dataset = list(local_steps(mixed, steps=6)), open_split(mixed, "train")
    indices = [own for own, _ in islice(training_sampler(mixed, dataset).batches(), 6)]
    with StepLoader(mixed, steps=6) as loader:
        assert loader.num_samples == 40 and "shards" in str(loader.path)
        for step, want in zip(loader, reference, strict=True):
            assert (step.meta, step.state_after) == (want.meta, want.state_after)
            sources = []
            for parts, expected in zip(step.microbatches, want.microbatches, strict=True):
                got = join_parts({name: ray.get(ref) for name, ref in parts.items()})
                sources += got.pop("sources").tolist()  # for separate losses
                torch.testing.assert_close(got, expected, rtol=0, atol=0)
            assert sorted(sources) == sorted(dataset.sources[indices[step.index]].tolist())


def test_errors_of_workers_name_file_sample_and_column(mixed, tmp_path):
    shard = tmp_path / "shards" / "000.tar"
    content = shard.read_bytes()
    assert content.count(b"\x89PNG") > 2
    shard.write_bytes(content.replace(b"\x89PNG", b"\x89XXX"))
    strict = mixed.model_copy(update={"train": mixed.sources("train")[1:2], "shuffle": False})
    with StepLoader(strict) as loader, pytest.raises(SampleError) as caught:
        next(loader)
    error = caught.value
    assert (error.sample_id, error.column) == ("s3", "*.png")  # samples of a kind share batches
    assert error.path == f"{shard}[part/s3.0.png]" and error.place == f"{shard}[part/s3]"
    skipping = strict.model_copy(update={"on_error": "skip"})
    with StepLoader(skipping, steps=1) as loader:
        (step,) = loader
    assert {(one.id, one.column, one.source) for one in step.skipped} == {
        ("s1", "*.png", "shards"), ("s3", "*.png", "shards"), ("s4", "*.png", "shards"),
    }


def test_wrong_placeholders_are_found_before_an_actor_starts(mixed, monkeypatch):
    # A call would raise a TypeError.
    monkeypatch.setattr("raymm.data.loading.loader.start_worker", None)
    mixed.modalities["vision"].placeholder = "<picture>"
    with pytest.raises(DataError, match="data.modalities.vision.placeholder is '<picture>'"):
        StepLoader(mixed)
