"""Model folders whose weights do not match the class.

They are rejected by name, or initialized from the seed on request.
"""

import json
import os
import re

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from raymm.actors.probe.cut import probe_language_model
from raymm.actors.weights.part import Part
from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.actors.weights.source import ConfigSource, FactorySource
from raymm.errors import ModelError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule

TINY = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 3,
}
TEXT = TINY | {"vocab_size": 32, "num_key_value_heads": 1, "max_position_embeddings": 32}
MOE = TEXT | {"num_experts_per_tok": 1}


def plain():
    """Build a factory's module."""
    return torch.nn.Linear(3, 2)


def config(kind, **more):
    return {
        "llama": lambda: hf.LlamaConfig(**TEXT, **more),
        "tied": lambda: hf.LlamaConfig(**TEXT, tie_word_embeddings=True),
        "mixtral": lambda: hf.MixtralConfig(**MOE, num_local_experts=3),
        "qwen3_moe": lambda: hf.Qwen3MoeConfig(
            **MOE, num_experts=3, moe_intermediate_size=8, head_dim=8
        ),
        "siglip": lambda: hf.SiglipVisionConfig(**TINY, image_size=8, patch_size=4),
        "resnet": lambda: hf.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
        ),
        "wav2vec2": lambda: hf.Wav2Vec2Config(
            **TINY, vocab_size=8, conv_dim=(8, 8), conv_kernel=(4, 4), conv_stride=(2, 2),
            num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        ),
    }[kind]()


CLASSES = {
    "llama": hf.LlamaForCausalLM, "tied": hf.LlamaForCausalLM, "mixtral": hf.MixtralForCausalLM,
    "qwen3_moe": hf.Qwen3MoeForCausalLM, "siglip": hf.SiglipVisionModel,
    "resnet": hf.ResNetModel, "wav2vec2": hf.Wav2Vec2Model,
}


def saved(folder, kind, model_class=None):
    """Save a model of a kind in a folder."""
    torch.manual_seed(1)
    (model_class or CLASSES[kind])(config(kind)).save_pretrained(folder)
    return folder


def edit(folder, change):
    """Save a folder's tensors again, changed."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", CLASSES)
def test_any_tensor_that_a_folder_lacks_is_missed(tmp_path, kind):
    """Remove one tensor of each kind: renamed, fused, of experts, tied, parametrized, or a buffer.
    """
    source = PretrainedSource(str(saved(tmp_path, kind)), CLASSES[kind].__name__)
    assert source.check() == []
    whole = load_file(tmp_path / "model.safetensors")
    unnoticed = []
    for name in {re.sub(r"\d+", "0", name): name for name in whole}.values():
        edit(tmp_path, lambda tensors, name=name: tensors.pop(name))
        try:
            source.check()
        except ModelError:
            pass
        else:
            unnoticed.append(name)
        save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    # Counters that are read with momentum None only; transformers' classes declare so.
    assert [name for name in unnoticed if not name.endswith("num_batches_tracked")] == []


def test_an_error_names_missing_weights_and_the_option(tmp_path):
    folder = saved(tmp_path / "llm", "llama", hf.LlamaModel)
    with pytest.raises(ModelError) as error:
        MultimodalModule(language_model=str(folder))
    for part in (str(folder), "lack 1 of LlamaForCausalLM: lm_head.weight", "missing_weights"):
        assert part in str(error.value)
    edit(folder, lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(7, 16)}))
    with pytest.raises(ModelError, match=r"embed_tokens.weight \[7, 16\], expected \[32, 16\]"):
        PretrainedSource(str(folder), language_model=True).check()
    with pytest.raises(ModelError, match="missing_weights is 'random'; accepted: 'fresh'"):
        PretrainedSource(str(folder), missing_weights="random")


def test_stages_only_reject_their_own_missing_weights(tmp_path):
    """Check stages that have not been checked on the driver."""
    folder = saved(tmp_path, "llama")
    source = PretrainedSource(str(folder), language_model=True)
    cut = probe_language_model(source)
    first, last = Part(cut, 0, 1), Part(cut, 1, 3)
    edit(folder, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    source.build(first)
    for part in (last, None):
        with pytest.raises(ModelError, match=r"layers\.2\.mlp\.up_proj\.weight"):
            source.build(part)


def test_reinitialized_weights_follow_the_seed(tmp_path):
    """Initialize a missing head and a resized embedding, as for a config with the same seed."""
    folder = saved(tmp_path, "llama")
    there = load_file(folder / "model.safetensors")

    def change(tensors):
        del tensors["lm_head.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.embed_tokens.weight"] = torch.zeros(7, 16)

    edit(folder, change)
    source = PretrainedSource(
        str(folder), language_model=True, missing_weights="fresh", seed=5
    )
    (note,) = source.check()
    assert "3 weights of LlamaForCausalLM are initialised" in note
    assert "lm_head.weight" in note
    due = dict(ConfigSource(hf.LlamaForCausalLM, source.config, seed=5).build().named_parameters())
    kept = there.keys() - {
        "lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
    }
    due |= {name: there[name] for name in kept}
    cut = probe_language_model(source)
    for part in (None, Part(cut, 0, 1), Part(cut, 1, 3)):
        for name, parameter in source.build(part).named_parameters():
            assert torch.equal(parameter, due[name]), (part, name)


def test_unused_tensors_are_reported_in_a_line(tmp_path, caplog):
    saved(tmp_path, "llama")
    MultimodalModule(language_model=ModalityModule(str(tmp_path), model_class="LlamaModel"))
    (line,) = caplog.messages
    assert "\n" not in line
    assert line.endswith("1 tensors of it are not used by LlamaModel: lm_head.weight")


def test_sharded_folders_with_wrong_files(tmp_path, caplog):
    torch.manual_seed(1)
    hf.LlamaForCausalLM(config("llama")).save_pretrained(tmp_path, max_shard_size="8KB")
    source = PretrainedSource(str(tmp_path), language_model=True)
    MultimodalModule(language_model=str(tmp_path))
    assert not caplog.messages
    index = tmp_path / "model.safetensors.index.json"
    shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
    data = shard.read_bytes()
    text = index.read_text()
    for content in ("", "[1]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', text[:90]):
        index.write_text(content)
        with pytest.raises(ModelError, match="index"):
            source.check()
    index.write_text(json.dumps({"weight_map": {"a": "model-9.safetensors"}}))
    with pytest.raises(ModelError, match=r"files that are not in the folder: model-9\.safetensors"):
        source.check()
    index.write_text(text)
    for content in (b"", data[:-5], data[:20], b"\xff" * 100):
        shard.write_bytes(content)
        with pytest.raises(ModelError, match=shard.name):
            source.check()
    index.unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        source.check()


OUTSIDE = ["../model.safetensors", "/tmp/model.safetensors", "sub/model.safetensors", "..", ".", ""]


@pytest.mark.parametrize("name", [*OUTSIDE, "a/../model.safetensors", "a\0b", "./a.safetensors"])
def test_an_index_names_files_of_its_folder_only(tmp_path, name):
    """Reject other files, even if they exist and have the weights."""
    folder = tmp_path / "model"
    hf.LlamaForCausalLM(config("llama")).save_pretrained(folder)
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "a.safetensors").touch()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": name, "b": "a.safetensors"}})
    )
    source = PretrainedSource(str(folder), language_model=True)
    with pytest.raises(ModelError, match="index.json names .*; accepted: names of files in the"):
        source.check()


def test_a_configuration_cannot_name_other_weights(tmp_path):
    folder = tmp_path / "model"
    hf.LlamaForCausalLM(config("llama")).save_pretrained(folder)
    (folder / "model.safetensors").rename(tmp_path / "other.safetensors")
    (folder / "a.safetensors").touch()
    values = json.loads((folder / "config.json").read_text())
    values["transformers_weights"] = "../other.safetensors"
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match="transformers_weights of config.json names '../other"):
        PretrainedSource(str(folder), language_model=True).check()


@pytest.mark.timeout(60)
def test_an_index_that_is_a_pipe_is_refused(tmp_path):
    hf.LlamaForCausalLM(config("llama")).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(ModelError, match="index.json: it is not a regular file"):
        PretrainedSource(str(tmp_path), language_model=True).check()


def test_weights_of_a_factory_are_checked_before_building(tmp_path):
    file = tmp_path / "weights.safetensors"
    source_of = lambda: FactorySource(f"{__name__}:plain", weights=str(file))  # noqa: E731
    whole = plain().state_dict()
    save_file(whole, file)
    assert source_of().check() == []
    for wrong, match in (
        ({"weight": whole["weight"]}, "bias"),
        (whole | {"more": torch.zeros(1)}, "more"),
        (whole | {"weight": torch.zeros(2, 2)}, "weight"),
    ):
        save_file(wrong, file)
        for look in (source_of().check, source_of().build):
            with pytest.raises(ModelError, match=match):
                look()
    file.write_bytes(b"no tensors")
    for look in (source_of().check, source_of().build):
        with pytest.raises(ModelError, match=r"weights\.safetensors"):
            look()
