import pytest
import torch

from raymm.data import StepBuilder, check_data, local_steps, open_split
from raymm.errors import DataError, SampleError
from tests.support.sample_files import write_image


def builder(config):
    return StepBuilder(config, open_split(config, "train"))


def test_a_step_has_every_sample_once_in_microbatches_of_a_kind(make_config):
    built = builder(make_config()).build([0, 1, 2, 5, 6, 7])
    assert [meta.sample_ids for meta in built.meta] == [("s1", "s6"), ("s2", "s7"), ("s0", "s5")]
    assert [set(meta.items) for meta in built.meta] == [{"vision"}, {"audio"}, set()]
    assert [set(mb) - {"input_ids", "attention_mask", "labels"} for mb in built.microbatches] == [
        {"vision"},
        {"audio"},
        set(),
    ]
    audio = built.microbatches[1]["audio"]
    assert audio["input_features"].shape == (2, 100) and audio["level"].dtype == torch.bfloat16
    assert len({meta.seq_len for meta in built.meta}) > 1
    assert all((mb["labels"][:, 0] == -100).all() for mb in built.microbatches)


def test_a_corrupt_file_names_sample_and_path(make_config, tmp_path):
    config = make_config()
    (tmp_path / "i1.png").write_bytes(b"not a picture")
    with pytest.raises(SampleError, match=r"'s1'.*i1\.png.*cannot be read"):
        builder(config).build([0, 1, 2])


def test_skipping_keeps_the_rest_and_reports(make_config, tmp_path):
    config = make_config(on_error="skip")
    (tmp_path / "a2.wav").write_bytes(b"RIFF")
    (tmp_path / "i6.png").unlink()
    built = builder(config).build([0, 1, 2, 5, 6, 7])
    assert [s.id for s in built.skipped] == ["s6", "s2"]
    assert built.skipped[0].path == str(tmp_path / "i6.png")
    assert "does not exist" in built.skipped[0].reason
    ids = [meta.sample_ids for meta in built.meta]
    assert ids == [("s1",), ("s7",), ("s0", "s5")]
    fewer = builder(config).build([1, 2, 6])
    assert [meta.sample_ids for meta in fewer.meta] == [("s1",)]
    with pytest.raises(DataError, match="none of the step's 2 samples is usable.*'s6'.*'s2'"):
        builder(config).build([2, 6])


def test_a_shortage_of_memory_skips_no_sample(make_config, monkeypatch):
    """Raise an error, as the shortage is temporary and another run would not skip the sample."""
    def no_memory(*args):
        raise MemoryError("no memory")

    steps = builder(make_config(on_error="skip"))
    monkeypatch.setattr("raymm.data.loading.builder.processor_input", no_memory)
    with pytest.raises(MemoryError):
        steps.build([0, 1, 2])


def test_samples_without_labels_are_skipped_too(make_config):
    built = builder(make_config(on_error="skip", max_length=8)).build([0, 1])
    assert [s.id for s in built.skipped] == ["s1"] and built.skipped[0].path is None


def test_shapes_that_do_not_stack(make_config, tmp_path):
    config = make_config(image="natural_size")
    write_image(tmp_path / "i6.png", 0, size=(5, 5))
    with pytest.raises(DataError, match="'vision'.*same shape"):
        builder(config).build([1, 6])


def test_heldout_is_one_pass_with_a_smaller_last_step(make_config):
    config = make_config(count=8)
    steps = list(local_steps(config, "heldout"))
    assert [[m.num_samples for m in step.meta] for step in steps] == [[2, 2, 2], [2]]
    assert sorted(i for s in steps for m in s.meta for i in m.sample_ids) == sorted(
        f"s{i}" for i in range(8)
    )


def test_check_data_finds_the_errors_of_workers(make_config, tmp_path):
    config = make_config(ignore_columns=["audio"])
    check_data(config)
    cases = {
        "heldout": (str(tmp_path / "none.jsonl"), "none.jsonl"),
        "tokenizer": ("/nowhere", "data.tokenizer: '/nowhere'"),
        "modalities": (
            {"vision": {"column": "images", "processor": "nope:fn"}},
            "data.modalities.vision.processor.*nope:fn",
        ),
    }
    for field, (value, message) in cases.items():
        with pytest.raises(DataError, match=message):
            check_data(
                config.model_copy(update={field: value}).model_validate(
                    config.model_dump() | {field: value}
                )
            )
