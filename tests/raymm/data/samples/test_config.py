import pytest
from pydantic import ValidationError

from raymm.data import DataConfig

FIELDS = {"train": "a", "tokenizer": "t", "batch_size": 8, "microbatches": 4}


def test_microbatches_must_divide_and_the_error_names_both():
    with pytest.raises(ValidationError, match=r"batch_size \(8\).*microbatches \(3\)"):
        DataConfig(**FIELDS | {"microbatches": 3})


@pytest.mark.parametrize(
    ("field", "value"),
    [("colour", 1), ("batch_size", 0), ("microbatches", 0), ("on_error", "ignore"), ("seed", -1)],
)
def test_bad_fields_are_named(field, value):
    with pytest.raises(ValidationError, match=field):
        DataConfig(**FIELDS | {field: value})


def test_a_modality_may_not_take_the_texts_name():
    modalities = {"labels": {"column": "x", "processor": "a:b"}}
    with pytest.raises(ValidationError, match="'labels'"):
        DataConfig(**FIELDS, modalities=modalities)
