"""Fixtures of the data tests; this folder is on sys.path, for the helpers in it."""

import pytest

from raymm.data import DataConfig
from tests.support.range_server import web  # noqa: F401 (fixture)
from tests.support.sample_files import build_tokenizer, write_rows


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def make_config(tmp_path, tokenizer_dir):
    """Return a function that writes a configuration over ``count`` new rows in ``tmp_path``.

    Keywords override fields.
    """

    def make(count: int = 20, image: str = "image", **overrides) -> DataConfig:
        write_rows(tmp_path, count)
        fields = {
            "train": str(tmp_path / "train.jsonl"),
            "heldout": str(tmp_path / "train.jsonl"),
            "tokenizer": tokenizer_dir,
            "modalities": {
                "vision": {"column": "images",
                    "processor": f"tests.support.media_processors:{image}"},
                "audio": {"column": "audio", "processor": "tests.support.media_processors:sound"},
            },
            "batch_size": 6,
            "microbatches": 3,
            "max_length": 40,
        }
        return DataConfig(**(fields | overrides))

    return make
