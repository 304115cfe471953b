"""A stage holds its own parameters and nothing else."""

import pytest
import torch
import transformers as hf

from raymm.actors.modules.cut import stage_parameters
from raymm.actors.modules.merge import Prepend
from raymm.actors.probe.cut import probe_language_model
from raymm.actors.stages.language import LanguageSpec, LanguageStage
from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.actors.weights.source import ConfigSource, LiveSource
from raymm.layout.stage_builders import stage_builders
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec

BOUNDS = [(0, 1), (1, 3), (3, 4)]


def config() -> hf.LlamaConfig:
    return hf.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=500, tie_word_embeddings=True,
    )


def held_bytes(module: torch.nn.Module) -> int:
    """Return bytes of all tensors the module can reach, each storage once, without buffers."""
    buffers = {b.untyped_storage().data_ptr() for b in module.buffers()}
    storages = {}
    for owner in module.modules():
        for value in [*owner.__dict__.values(), *owner._parameters.values()]:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(size for pointer, size in storages.items() if pointer not in buffers)


@pytest.fixture(scope="module")
def whole() -> hf.LlamaForCausalLM:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(config())


@pytest.mark.parametrize("kind", ["live", "config", "folder"])
def test_stages_hold_only_their_own_parameters(kind, whole, tmp_path):
    if kind == "live":
        source = LiveSource.of(whole)
    elif kind == "config":
        source = ConfigSource(hf.LlamaForCausalLM, config())
    else:
        whole.save_pretrained(tmp_path)
        source = PretrainedSource(str(tmp_path), language_model=True)
    info = probe_language_model(source)
    spec = LanguageSpec("llm", source, 4, Prepend(), info)
    sizes = {name: p.nbytes for name, p in whole.named_parameters()}
    seen: list[str] = []
    for lo, hi in BOUNDS:
        names = stage_parameters(whole, info, lo, hi)
        module = LanguageStage.build(spec, lo, hi).module
        assert [n for n, _ in module.named_parameters()] == names
        ghosts = [
            value for owner in module.modules() for name, value in owner.__dict__.items()
            if isinstance(value, torch.Tensor)
        ]
        assert all(g.untyped_storage().nbytes() == g.element_size() for g in ghosts)
        assert all(not g.requires_grad and not g.is_meta for g in ghosts)
        owned = sum(sizes[name] for name in names)
        assert owned <= held_bytes(module) <= owned + 4 * len(ghosts)
        seen += names
    assert set(seen) == set(sizes)
    tied = "model.embed_tokens.weight"
    assert sorted(seen) == sorted([*sizes, tied])  # the embedding twice, everything else once


def test_a_rank_is_sent_only_its_own_tensors(whole):
    model = MultimodalModule({}, ModalityModule(whole))
    plan = MultimodalParallelSpec({}, ParallelSpec(pp=3, layers=(1, 2, 1))).plan(model)
    made = stage_builders(model, plan)
    for stage, builder in made.build.items():
        _, spec, *_ = builder.args
        assert {f"module.{name}" for name in spec.source.state} == set(made.owned[stage])
        assert all(p.is_meta for p in spec.source.structure.parameters())
