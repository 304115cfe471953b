"""The probe: supported cuts, and rejections by name."""

import random
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

from raymm.actors.modules.blocks import find_blocks
from raymm.actors.modules.cut import stage_parameters
from raymm.actors.probe.cut import draws_of_training, probe_encoder, probe_language_model
from raymm.actors.probe.small_model import small_model
from raymm.actors.weights.part import Part
from raymm.actors.weights.source import ConfigSource, LiveSource
from raymm.errors import InputError, PlanError, ProbeError
from raymm.layout.stage_builders import stage_builders
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.plan.stage import StageId

INPUTS = {"x": torch.linspace(-1, 1, 8).view(1, 2, 4)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, hidden, memory=None):
        hidden = self.layer(hidden)
        if memory is None:
            return hidden
        memory.append(hidden)
        return hidden + sum(memory[:-1])


class Encoder(nn.Module):
    hidden_size = 4

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class SharedMemoryEncoder(Encoder):
    """Encoder whose blocks read a list of earlier blocks, which cannot cross a cut."""

    def forward(self, x):
        memory, hidden = [], self.stem(x)
        for block in self.blocks:
            hidden = block(hidden, memory)
        return self.head(hidden)


class SkipEncoder(Encoder):
    """Encoder that adds the stem's output at the end, which later stages do not have."""

    def forward(self, x):
        start = self.stem(x)
        hidden = start
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden + start)


class TupleBlock(Block):
    def forward(self, hidden, state):
        return self.layer(hidden), state + hidden


class TupleStateEncoder(Encoder):
    """Encoder whose blocks return a second tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TupleBlock() for _ in range(3))

    def forward(self, x):
        hidden = self.stem(x)
        state = torch.zeros_like(hidden)
        for block in self.blocks:
            hidden, state = block(hidden, state)
        return self.head(hidden + state)


class LoopingEncoder(Encoder):
    """Encoder that runs its blocks twice."""

    def forward(self, x):
        return super().forward(super().forward(x))


def test_a_plain_encoder_can_be_cut():
    info = probe_encoder(LiveSource.of(Encoder()), INPUTS)
    assert info.blocks == "blocks" and info.tuple_length == 0
    assert info.first == {"stem.weight", "stem.bias"}
    assert info.middle == frozenset()
    assert info.last == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    "encoder", [SharedMemoryEncoder, SkipEncoder, TupleStateEncoder, LoopingEncoder]
)
def test_state_that_would_not_cross_a_cut_is_refused_by_name(encoder):
    with pytest.raises(ProbeError, match=encoder.__name__):
        probe_encoder(LiveSource.of(encoder()), INPUTS)


def test_a_module_without_blocks_is_refused_by_name():
    with pytest.raises(ProbeError, match="Linear has no list of blocks"):
        probe_encoder(LiveSource.of(nn.Linear(4, 4)), {"input": INPUTS["x"]})
    with pytest.raises(ProbeError, match="Encoder has (a single block|no list of blocks)"):
        probe_encoder(LiveSource.of(Encoder(blocks=1)), INPUTS)


def test_the_refusal_comes_before_anything_starts():
    """Reject without Ray: stages are computed first."""
    llm = hf.LlamaForCausalLM(hf.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=16,
    ))
    vision = ModalityModule(SharedMemoryEncoder(), "linear", example_inputs=INPUTS)
    model = MultimodalModule({"vision": vision}, llm)
    cut = MultimodalParallelSpec({"vision": ParallelSpec(pp=2)}).plan(model)
    with pytest.raises(ProbeError, match="SharedMemoryEncoder"):
        stage_builders(model, cut)
    whole = MultimodalParallelSpec({}).plan(model)  # a single stage works
    assert set(stage_builders(model, whole).build) == {StageId("vision", 0), StageId("llm", 0)}


class NormProjector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)

    def forward(self, hidden):
        return self.norm(self.linear(hidden).flatten(0, -2)).view(*hidden.shape[:-1], 8)


def test_impossible_degrees_name_module_and_accepted_ones():
    llm = hf.LlamaForCausalLM(hf.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=16,
    ))
    vision = ModalityModule(Encoder(), NormProjector(), example_inputs=INPUTS)
    model = MultimodalModule({"vision": vision}, llm)

    def build(**degrees):
        specs = {"vision": ParallelSpec(**degrees)}
        stage_builders(model, MultimodalParallelSpec(specs).plan(model))

    with pytest.raises(ProbeError, match="cp of 'vision' is 2; accepted: 1. Encoder .* attention"):
        build(cp=2)
    with pytest.raises(PlanError, match="sharding of 'vision' is 'fsdp', .*batch norm"):
        build(dp=2, sharding="fsdp")
    vision.freeze(projector=True)
    build(dp=2, sharding="fsdp")  # constant statistics


@pytest.mark.parametrize("degrees", [{"cp": 2}, {"dp": 2, "sharding": "fsdp"}])
def test_layers_skipped_by_some_processes_are_refused(degrees):
    """Reject them, as the other processes would wait."""
    llm = hf.OPTForCausalLM(hf.OPTConfig(
        hidden_size=8, ffn_dim=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=16,
        word_embed_proj_dim=8, layerdrop=0.1,
    ))
    for frozen in (True, False):
        model = MultimodalModule({}, ModalityModule(llm, frozen=frozen))
        plan = MultimodalParallelSpec({}, ParallelSpec(**degrees), 2).plan(model)
        if frozen:
            stage_builders(model, plan)
            continue
        with pytest.raises(PlanError, match="'llm' skips layers at random .*layerdrop"):
            stage_builders(model, plan)


def test_inputs_that_cannot_be_guessed_are_requested():
    with pytest.raises(ProbeError, match="example_inputs"):
        probe_encoder(LiveSource.of(Encoder()))


def test_outer_parameters_are_in_the_stages_that_use_them():
    config = hf.GPT2Config(n_embd=8, n_layer=4, n_head=2, vocab_size=32, n_positions=16)
    info = probe_language_model(ConfigSource(hf.GPT2LMHeadModel, config))
    assert info.blocks == "transformer.h"
    assert info.first == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert info.middle == frozenset()
    norm = {"transformer.ln_f.weight", "transformer.ln_f.bias"}
    assert info.last == norm | {"transformer.wte.weight"}  # tied to the head


class TableEncoder(Encoder):
    """Encoder whose blocks read a table without autograd: no gradient shows the dependency."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 4)
        self.unread = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            places = self.table(torch.arange(2))
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden * places)
        return self.head(hidden)


def test_tensors_without_gradient_are_in_the_reading_stages():
    info = probe_encoder(LiveSource.of(TableEncoder()), INPUTS)
    assert "table.weight" in info.first & info.middle
    assert "table.weight" not in info.last  # cut after the code before its first block
    assert not any(name.startswith("unread") for name in info.first | info.middle | info.last)


class ListEncoder(Encoder):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: [output])

    def forward(self, x):
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)[0]
        return self.head(hidden)


def test_blocks_may_return_lists():
    assert probe_encoder(LiveSource.of(ListEncoder()), INPUTS).tuple_length == 1


def test_blocks_that_share_parameters_are_not_separated():
    encoder = Encoder(4)
    encoder.blocks[2].layer.weight = encoder.blocks[1].layer.weight
    info = probe_encoder(LiveSource.of(encoder), INPUTS)
    assert stage_parameters(encoder, info, 0, 1) and stage_parameters(encoder, info, 1, 4)
    for lo, hi in ((0, 2), (2, 4)):
        with pytest.raises(InputError, match="Encoder .*blocks.[12].layer.weight.* one"):
            stage_parameters(encoder, info, lo, hi)


def test_language_models_without_embeds_input_are_refused():
    config = hf.CpmAntConfig(
        hidden_size=16, num_attention_heads=2, dim_head=8, dim_ff=16, num_hidden_layers=2,
        vocab_size=32, prompt_types=2, prompt_length=2, segment_types=2,
    )
    with pytest.raises(ProbeError, match="CpmAntForCausalLM .* inputs_embeds"):
        probe_language_model(ConfigSource(hf.CpmAntForCausalLM, config))


def test_small_configs_with_unusual_names_of_the_depth():
    config = hf.ProphetNetConfig(
        hidden_size=16, num_encoder_layers=1, num_decoder_layers=6, vocab_size=32,
        num_decoder_attention_heads=2, num_encoder_attention_heads=2, decoder_ffn_dim=16,
        encoder_ffn_dim=16, max_position_embeddings=16,
    )
    small = small_model(ConfigSource(hf.ProphetNetForCausalLM, config))
    assert len(small.get_submodule(find_blocks(small))) < 6


def test_constructor_values_do_not_depend_on_the_stage():
    config = hf.OpenAIGPTConfig(n_embd=8, n_layer=4, n_head=2, vocab_size=32, n_positions=16)
    source = ConfigSource(hf.OpenAIGPTLMHeadModel, config, seed=3)
    whole = dict(source.build().named_parameters())
    info = probe_language_model(source)
    for lo, hi in ((0, 1), (1, 4)):
        part = dict(source.build(Part(info, lo, hi)).named_parameters())
        assert part and all(torch.equal(value, whole[name]) for name, value in part.items())
    weight = whole["transformer.h.2.attn.c_attn.weight"]
    assert 0.01 < float(weight.detach().std()) < 0.03


def test_blocks_are_numbered():
    """Check that parameters of blocks need indices, so named entries are not blocks."""
    levels = OrderedDict(input=nn.Linear(9, 9), group=nn.Linear(9, 9))
    module = nn.Sequential(OrderedDict(levels=nn.Sequential(levels)))
    assert find_blocks(module) is None
    module.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert find_blocks(module) == "layers"


class HostDraws(nn.Module):
    """Encoder whose first block or module may draw a number per item on the host."""

    def __init__(self, where: str, draw) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.where, self.draw = where, draw
        if where == "blocks":
            self.blocks[0].register_forward_hook(lambda *_: draw(3) and None)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        if self.where == "outside" and self.training:
            self.draw(len(pixel_values))
        for block in self.blocks:
            pixel_values = block(pixel_values)
        return pixel_values


def speech_encoder():
    torch.manual_seed(0)
    return hf.Wav2Vec2Model(hf.Wav2Vec2Config(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=2,
        conv_dim=(8, 8), conv_kernel=(10, 3), conv_stride=(5, 2), **{"num_feat_extract_layers": 2},
        num_conv_pos_embedding_groups=2, num_conv_pos_embeddings=8, mask_time_length=2,
        layerdrop=0.0, hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0,
        feat_proj_dropout=0.0, mask_time_prob=0.5,
    ))


SPEECH = {"input_values": torch.randn(1, 400, generator=torch.Generator().manual_seed(2))}
PIXELS = {"pixel_values": torch.ones(1, 3, 4)}


@pytest.mark.parametrize("sharding", ["fsdp", "none"])
@pytest.mark.parametrize(("encoder", "example"), [
    (speech_encoder, SPEECH),
    (lambda: HostDraws("outside", lambda n: np.random.rand(n)), PIXELS),
    (lambda: HostDraws("blocks", lambda n: random.shuffle([1] * n)), PIXELS),
    (lambda: HostDraws("outside", lambda n: torch.rand(()) < 0.01 and np.random.rand(n)), PIXELS),
    (lambda: HostDraws("outside", lambda n: torch.rand(n, 3, 4)), None),
], ids=["SpecAugment", "numpy", "python", "rarely", "torch"])  # fmt: skip
def test_numbers_drawn_on_the_host_for_some_samples_are_refused(encoder, example, sharding):
    """Reject them: processes with a part of the samples would draw other numbers."""
    def build(module, frozen=False) -> None:
        tower = ModalityModule(
            module, "linear", frozen=frozen, example_inputs=example or PIXELS,
            hidden_size=16 if example is SPEECH else 4,
        )
        llm = hf.LlamaForCausalLM(hf.LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            vocab_size=16,
        ))
        model = MultimodalModule({"tower": tower}, ModalityModule(llm))
        degrees = ParallelSpec(dp=2, sharding=sharding)
        plan = MultimodalParallelSpec({"tower": degrees}, ParallelSpec(), 2).plan(model)
        if sharding == "none":  # replicas of a mapping, which share every microbatch by samples
            split = [replace(s, split="samples" if s.module else s.split) for s in plan.stages]
            plan = replace(plan, stages=tuple(split))
        stage_builders(model, plan)

    if example is None:
        build(encoder())
        return
    with pytest.raises(PlanError, match="'tower' draws random numbers with NumPy or Python"):
        build(encoder())
    build(encoder().eval(), frozen=True)


class SharedNoise(HostDraws):
    """Encoder that adds the same random numbers to all items."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        noise = nn.functional.dropout(torch.ones(1, *pixel_values.shape[1:]), 0.5, self.training)
        return super().forward(pixel_values + noise)


@pytest.mark.parametrize("count", [1, 2])
def test_numbers_that_all_items_share_are_refused_before_a_start(count):
    """Use one local row, whose first dimension of 1 is ambiguous."""
    example = {"pixel_values": torch.ones(count, 3, 4)}
    for module, refused in (
        (SharedNoise("", None), True), (SharedNoise("", None).requires_grad_(False), False),
        (HostDraws("outside", lambda n: torch.rand(n, 3, 4)), False),
        (HostDraws("outside", lambda n: torch.rand(n * 3)), True),
        (HostDraws("outside", lambda n: torch.rand(())), False),
    ):
        source = LiveSource.of(module)
        draws = draws_of_training(source, False, example, cuts_rows=True)
        assert ("random numbers of shape" in draws.refused) == refused
        assert not draws_of_training(source, False, example).refused
    text = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=32))
    noise = nn.Dropout(0.1)  # over tokens of all rows, like routers
    text.transformer.h[0].register_forward_hook(
        lambda _, __, out: noise(out.flatten(0, 1)).view_as(out)
    )
    assert not draws_of_training(LiveSource.of(text), True, cuts_rows=True).refused
