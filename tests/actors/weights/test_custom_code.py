"""Folders with Python files: they do not run, and do not prompt, unless allowed."""

import builtins
import json
import os
import shutil
import uuid
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import HF_MODULES_CACHE

from raymm import ModalityModule, MultimodalModule, MultimodalParallelSpec, ParallelSpec
from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.data.conversations.text import load_tokenizer
from raymm.data.samples.processors import load_processor
from raymm.errors import DataError, ModelError

# Code that records the id of every importing process.
CODE = """
import os
from transformers import LlamaConfig, LlamaForCausalLM, SiglipImageProcessor
from transformers import PreTrainedTokenizerFast

with open({mark!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass


class OwnProcessor(SiglipImageProcessor):
    pass
"""
TINY = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
}


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch):
    def refuse(*_):
        raise AssertionError("input was requested on standard input")

    monkeypatch.setattr(builtins, "input", refuse)


class Folder:
    """Checkpoint of a tiny Llama with a Python file, and the file's record."""

    def __init__(self, path: Path) -> None:
        self.path, self.mark = path, path.parent / "mark"
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(path)
        (path / "own_code.py").write_text(CODE.format(mark=str(self.mark)))

    def change(self, name: str = "config.json", **values) -> None:
        file = self.path / name
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**known, **values}))

    def is_own(self) -> None:
        """Require the file, which defines the classes."""
        self.change(model_type="own_llama", architectures=["OwnForCausalLM"], auto_map={
            "AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM",
        })

    @property
    def processes(self) -> set[int]:
        return set(map(int, self.mark.read_text().split())) if self.mark.exists() else set()


@pytest.fixture
def folder(tmp_path):
    name = f"own_{uuid.uuid4().hex}"  # transformers caches files by the folder's name
    yield Folder(tmp_path / name)
    for copy in (Path(HF_MODULES_CACHE) / "transformers_modules").glob(f"*{name}*"):
        shutil.rmtree(copy, ignore_errors=True)


def test_unknown_classes_are_refused_with_file_and_option(folder):
    folder.is_own()
    model = ModalityModule(folder.path)
    with pytest.raises(ModelError) as caught:
        MultimodalModule({}, model)
    for part in (str(folder.path), "own_code.py", "model.trust_remote_code: true"):
        assert part in str(caught.value)
    assert not folder.processes


def test_a_known_class_is_used_although_the_folder_has_its_own(folder):
    folder.change(auto_map={
        "AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM",
    })
    source = PretrainedSource(str(folder.path), language_model=True)
    assert type(source.build()) is LlamaForCausalLM
    assert not folder.processes


def test_a_custom_architecture_is_not_taken_for_a_known_one(folder):
    folder.change(architectures=["OwnForCausalLM"], auto_map={
        "AutoModelForCausalLM": "own_code.OwnForCausalLM",
    })
    with pytest.raises(ModelError, match="own_code.py"):
        PretrainedSource(str(folder.path), language_model=True).skeleton()
    chosen = PretrainedSource(str(folder.path), "LlamaForCausalLM", language_model=True)
    assert chosen.resolved_class is transformers.LlamaForCausalLM
    assert not folder.processes


def test_with_permission_the_code_runs_on_ranks_too(folder, ray_cluster):
    folder.is_own()
    model = MultimodalModule({}, ModalityModule(folder.path, trust_remote_code=True))
    ids = torch.arange(12).reshape(2, 6)
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=2), num_microbatches=2)
    with spec.apply(model) as parallel:
        loss = parallel.execute({"input_ids": ids, "labels": ids}).loss
    reference = LlamaForCausalLM.from_pretrained(folder.path, config=LlamaConfig(**TINY))
    assert loss == pytest.approx(reference(ids, labels=ids).loss.item(), rel=1e-5)
    language_model = model.language_model.materialize()
    assert type(language_model).__name__ == "OwnForCausalLM"
    assert os.getpid() in folder.processes and len(folder.processes) == 3


@pytest.mark.parametrize("trusted", [False, True])
def test_custom_tokenizers(folder, trusted):
    tokenizer = folder.path / "tokenizer.json"
    tokenizer.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"},
    }))
    folder.is_own()
    folder.change("tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map={
        "AutoTokenizer": [None, "own_code.OwnTokenizer"],
    })
    if trusted:
        assert type(load_tokenizer(str(folder.path), True)).__name__ == "OwnTokenizer"
        assert folder.processes == {os.getpid()}
        return
    with pytest.raises(DataError, match=r"data\.tokenizer: .*own_code\.py.*trust_remote_code"):
        load_tokenizer(str(folder.path))
    assert not folder.processes


@pytest.mark.parametrize("trusted", [False, True])
def test_custom_processors(folder, trusted):
    folder.change("preprocessor_config.json", image_processor_type="OwnProcessor", auto_map={
        "AutoImageProcessor": "own_code.OwnProcessor",
    })
    folder.is_own()
    if trusted:
        load_processor(str(folder.path), "data.vision", True)
        assert folder.processes == {os.getpid()}
        return
    with pytest.raises(DataError, match=r"data\.vision: .*own_code\.py.*trust_remote_code"):
        load_processor(str(folder.path), "data.vision")
    assert not folder.processes
