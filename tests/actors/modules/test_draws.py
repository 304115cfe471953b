"""Random numbers do not depend on the cuts of a module, or on skipped blocks."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from raymm.actors.recompute.recomputed_layers import _ATTENTION, _contexts
from raymm.errors import InputError, ModelError, ProbeError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.support.stages_in_process import StagesInProcess, reference

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
SAMPLES = 400
SIZE = 16


def llm(config_class=hf.LlamaConfig, **options):
    config = config_class(
        **SMALL, num_hidden_layers=4, num_key_value_heads=2, vocab_size=32, **options
    )
    torch.manual_seed(1)
    return hf.AutoModelForCausalLM.from_config(config)


def speech(config_class=hf.Wav2Vec2Config, layers=4, **options):
    torch.manual_seed(0)
    return hf.AutoModel.from_config(config_class(
        **SMALL, num_hidden_layers=layers, conv_dim=(8, 8), conv_kernel=(10, 3), conv_stride=(5, 2),
        num_conv_pos_embedding_groups=2, num_conv_pos_embeddings=8, mask_time_length=2,
        num_feat_extract_layers=2, **options,
    ))


def tower(module, example, **options):
    return ModalityModule(module, "mlp", frozen=False, example_inputs=example, **options)


def hearing(**options):
    example = {"input_values": torch.randn(1, SAMPLES, generator=torch.Generator().manual_seed(2))}
    return MultimodalModule({"tower": tower(speech(**options), example)}, llm())


def steps(microbatches, key="input_values", shape=(SAMPLES,)):
    generator = torch.Generator().manual_seed(0)

    def batch():
        ids = torch.randint(1, 32, (2, 6), generator=generator)
        return {"input_ids": ids, "labels": ids.clone(),
                "tower": {key: torch.randn(2, *shape, generator=generator)}}

    return [batch() for _ in range(microbatches)]


def wrong_bits(mine, due):
    """Return names of gradients that are not bitwise equal."""
    assert mine.keys() == due.keys()
    return [
        name for name, gradient in due.items()
        if (gradient is None) != (mine[name] is None)
        or gradient is not None and not torch.equal(gradient, mine[name])
    ]


def in_stages(model, step, pp, llm_pp=2, **spec):
    layout = MultimodalParallelSpec(
        {name: ParallelSpec(pp=pp) for name in model.encoder_names}, ParallelSpec(pp=llm_pp),
        len(step), **spec,
    )
    return StagesInProcess(model, layout.plan(model))


def compare(stages, step, due):
    loss, gradients = due
    assert stages.run(step) == loss
    assert wrong_bits(stages.gradients(), gradients) == []


class Calls:
    """Record of the called blocks of the reference's tower, by forward."""

    def __init__(self, model, blocks):
        self.of_forwards: list[set[int]] = []
        module = model.materialize().encoders["tower"].module
        module.register_forward_pre_hook(lambda *_: self.of_forwards.append(set()))
        for index, block in enumerate(module.get_submodule(blocks)):
            block.register_forward_hook(lambda *_, index=index: self.of_forwards[-1].add(index))


@pytest.mark.cells(1)
@pytest.mark.parametrize("config_class", [hf.Wav2Vec2Config, hf.HubertConfig])
def test_blocks_that_a_forward_skips(config_class):
    """Skip first blocks of a stage, last ones, and whole stages."""
    model, step = hearing(config_class=config_class, layerdrop=0.45), steps(20)
    calls = Calls(model, "encoder.layers")
    due = reference(model, step)
    skipped = [set(range(4)) - called for called in calls.of_forwards]
    assert all(any(index in one for one in skipped) for index in range(4))
    assert any({0, 1} <= one for one in skipped) and any({2, 3} <= one for one in skipped)
    for pp in (1, 2, 3):
        compare(in_stages(model, step, pp), step, due)
    assert all(gradient is not None for gradient in due[1].values())


def test_a_language_model_that_skips_blocks():
    torch.manual_seed(1)
    model = MultimodalModule({}, hf.OPTForCausalLM(hf.OPTConfig(
        hidden_size=16, ffn_dim=16, num_hidden_layers=4, num_attention_heads=2, vocab_size=32,
        word_embed_proj_dim=8, layerdrop=0.35, max_position_embeddings=64, pad_token_id=0,
        tie_word_embeddings=False,
    )))
    step = [{k: v for k, v in one.items() if k != "tower"} for one in steps(8)]
    due = reference(model, step)
    for pp in (2, 4):
        compare(in_stages(model, step, 1, llm_pp=pp), step, due)


def test_a_block_that_every_microbatch_skips_has_no_gradient():
    model, step = hearing(layerdrop=0.6), steps(2)
    due = reference(model, step)
    without = {name.split(".")[4] for name, g in due[1].items() if "layers" in name and g is None}
    assert 0 < len(without) < 4
    for schedule in ("1f1b", "zero_bubble"):
        compare(in_stages(model, step, 3, schedule=schedule), step, due)


def test_a_forward_without_blocks_is_an_error():
    model, step = hearing(layerdrop=0.95), steps(2)
    stages = in_stages(model, step, 2)
    with pytest.raises(InputError, match="'tower' in microbatch 0 .*pp 1.*layerdrop"):
        stages.run(step)
    in_stages(model, step, 1).run(step)


def test_random_numbers_outside_blocks_agree_on_all_stages():
    """Check the scale of DINOv3's rotary tables."""
    config = hf.DINOv3ViTConfig(
        **SMALL, num_hidden_layers=4, image_size=SIZE, patch_size=8, pos_embed_rescale=2.0,
        drop_path_rate=0.3,
    )
    torch.manual_seed(0)
    model = MultimodalModule({"tower": tower(hf.DINOv3ViTModel(config), None)}, llm())
    step = steps(4, "pixel_values", (3, SIZE, SIZE))
    due = reference(model, step)
    for pp in (1, 2, 3):
        compare(in_stages(model, step, pp), step, due)


class NoisyBlock(nn.Module):
    """Block that uses all generators."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, hidden):
        scale = 1 + np.random.rand() + random.random()
        return nn.functional.dropout(self.layer(hidden).sin() * scale, 0.3, self.training) + hidden


def add_noise(block, inputs, output):
    """Add noise, as a user's hook."""
    return output + torch.rand(())


class NoisyEncoder(nn.Module):
    """Encoder that also uses all generators outside its blocks; skips blocks if ``hasty``."""

    hidden_size = 4

    def __init__(self, hasty: float = 0.0, in_place: bool = False) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.hasty, self.in_place = hasty, in_place
        self.blocks = nn.ModuleList(NoisyBlock() for _ in range(4))
        self.blocks[1].register_forward_hook(add_noise)

    def forward(self, x):
        hidden = self.stem(x) * (1 + torch.rand(()) + np.random.rand() + random.random())
        for block in self.blocks:
            if random.random() >= self.hasty or not self.training:
                hidden = block(hidden)
                noise = 0.1 * np.random.rand()
                hidden = hidden.add_(noise) if self.in_place else hidden + noise
        return self.head(hidden)


def drop_some(inputs, output):
    return nn.functional.dropout(output, 0.2)


def noisy(**options):
    torch.manual_seed(0)
    example = {"x": torch.linspace(-1, 1, 8).view(1, 2, 4)}
    callbacks = {
        "preprocess_callback": lambda inputs: {"x": inputs["x"] + torch.rand(())},
        "postprocess_module_callback": drop_some, "postprocess_projector_callback": drop_some,
    }
    encoder = tower(NoisyEncoder(**options), example, **callbacks)
    dropout = {"attention_dropout": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    return MultimodalModule({"tower": encoder}, llm(hf.Phi3Config, pad_token_id=0, **dropout))


@pytest.mark.cells(3)
@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": True}, {"schedule": "zero_bubble"}, {"layers": "all"},
     {"layers": "matmuls"}, {"copies": 2}],
    ids=str,
)  # fmt: skip
def test_dropout_everywhere(options):
    """Check blocks, their surroundings and callbacks, with every generator.

    Also with recomputed forwards, and in replicas.
    """
    model, step = noisy(in_place=True), steps(4, "x", (2, 4))
    due = reference(model, step)
    spec = {k: v for k, v in options.items() if k in ("recompute", "schedule")}
    copies = options.get("copies", 1)
    plan = MultimodalParallelSpec(
        {"tower": ParallelSpec(pp=2, dp=copies)}, ParallelSpec(pp=2), len(step), **spec
    ).plan(model)
    if option := options.get("layers"):
        plan = replace(plan, stages=tuple(
            replace(s, layer_options=(option,) * (min(s.layers[1], 4) - s.layers[0]))
            for s in plan.stages
        ))
    stages = StagesInProcess(model, plan)
    if copies == 1:
        compare(stages, step, due)
        return
    assert stages.run(step) == due[0]
    for name, gradient in stages.gradients().items():  # summed in another order
        assert float((gradient - due[1][name]).norm()) <= 1e-6 * float(due[1][name].norm()), name


def test_blocks_are_skipped_by_any_generator():
    model, step = noisy(hasty=0.5), steps(12, "x", (2, 4))
    due = reference(model, step)
    for pp in (1, 2, 3):
        compare(in_stages(model, step, pp), step, due)


def test_in_place_changes_with_skipped_blocks_are_refused():
    model = noisy(hasty=0.01, in_place=True)
    why = "NoisyEncoder cannot be cut between its blocks in training: .*in place"
    with pytest.raises(ProbeError, match=why):
        in_stages(model, steps(1, "x", (2, 4)), 2)
    in_stages(model, steps(1, "x", (2, 4)), 1)


def test_random_numbers_in_evaluation():
    """Use a frozen module that is random in every mode, like masked autoencoders."""
    step = steps(3, "x", (2, 4))
    losses = []
    for pp in (1, 2, 3):
        model = noisy()
        model.freeze()
        stages = in_stages(model, step, pp)
        losses += [stages.run(step, training=False) for _ in range(2)]
    assert len(set(losses)) == 1


def test_a_models_own_gradient_checkpointing():
    """Recompute with the forward's random numbers; cut modules would lack other stages' data."""
    model, step = hearing(hidden_dropout=0.3, layerdrop=0.4), steps(4)
    due = reference(model, step)
    model.encoders["tower"].module.gradient_checkpointing_enable()
    compare(in_stages(model, step, 1), step, due)
    with pytest.raises(ProbeError, match="gradient_checkpointing_disable.*recompute"):
        in_stages(model, step, 2)
    with pytest.raises(ModelError, match="tower_encoder uses its own gradient checkpointing"):
        reference(model, step)


def test_attention_with_dropout_is_recomputed():
    """Recompute it, or later random numbers would change."""
    policy = _contexts(frozenset(_ATTENTION))[0].policy_fn
    query = torch.zeros(1, 1, 2, 4)
    for operator in _ATTENTION[1:3]:
        kept = [policy(None, operator, query, query, query, dropout_p=p) for p in (0.0, 0.1)]
        assert kept == [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE]
