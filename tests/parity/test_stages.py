"""Models on actors equal the oracle: loss, every gradient, parameters after AdamW steps."""

import torch

from raymm.actors.modules.merge import ReplaceTokens
from raymm.data.loading.in_memory import split_batch
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.plan.stage import StageId
from tests.support import parity_models as pm
from tests.support.parity_check import (
    OPTIMIZER,
    check_gradients,
    check_training,
    close,
    oracle_of,
)
from tests.support.parity_oracle import replace


def test_vision_and_llm_in_2_plus_2_stages(ray_cluster):
    """Run SigLIP and tied Llama on four ranks.

    One batch is cut into microbatches; gradients accumulate over two executes; and training.
    """
    model = MultimodalModule(
        {"vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp")},
        ModalityModule(pm.build(pm.llama(tied=True), 2)),
    )
    oracle = oracle_of(model)
    spec = MultimodalParallelSpec({"vision": ParallelSpec(pp=2)}, ParallelSpec(pp=2), 2)
    whole = pm.batch([7, 5, 9, 6], 3, vision=[0, 1, 1, 3])
    other = [pm.batch([8, 4], 4, vision=[0, 1]), pm.batch([3, 12], 5, vision=[1])]
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        assert parallel.plan.num_ranks == 4
        assert close(parallel.execute(whole).loss, oracle.loss([whole]).item())
        check_gradients(parallel, oracle, split_batch(whole, 2), other)
        tied = [
            [reference.stage for reference in one.references]
            for one in parallel.parameter_ownership[2].shared
            if one.references[0].name.endswith("embed_tokens.weight")
        ]
        assert tied == [[StageId("llm", 0), StageId("llm", 1)]]
        check_training(parallel, oracle, [[split_batch(whole, 2), other], [other], [other]])


def test_vision_audio_and_llm_in_1_2_3_stages(ray_cluster):
    """Run SigLIP, Whisper and Qwen3 on six ranks.

    Placeholders, modalities that are partly missing, and microbatches of different lengths.
    """
    tokens = {"vision": pm.IMAGE_TOKEN, "audio": pm.AUDIO_TOKEN}
    model = MultimodalModule(
        {
            "vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp"),
            "audio": ModalityModule(pm.build(pm.whisper(), 2), "linear"),
        },
        ModalityModule(pm.build(pm.qwen3(), 3)),
        ReplaceTokens(tokens),
    )
    oracle = oracle_of(model, replace(tokens))
    image, sound = (pm.IMAGE_TOKEN, 4), (pm.AUDIO_TOKEN, pm.AUDIO_FRAMES // 2)
    both = pm.batch([7, 5, 9], 4, [[image, image], [], [sound, image]], vision=[0, 0, 2], audio=[2])
    only_images = pm.batch([6, 8], 5, [[image], [image]], vision=[0, 1])
    only_sounds = pm.batch([10], 6, [[sound]], audio=[0])
    only_text = pm.batch([4, 13], 7)
    spec = MultimodalParallelSpec({"audio": ParallelSpec(pp=2)}, ParallelSpec(pp=3), 4)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        assert parallel.plan.num_ranks == 6
        check_gradients(parallel, oracle, [both, only_images, only_text, only_sounds])
        check_gradients(parallel, oracle, [only_text, only_images])  # no audio in the whole step
        check_gradients(parallel, oracle, [only_text])  # no encoder at all
        check_training(
            parallel, oracle,
            [[[both, only_text, only_sounds]], [[only_images, both]], [[only_text, only_sounds]]],
        )


def two_ranks(vision: ParallelSpec, llm: ParallelSpec) -> MultimodalParallelSpec:
    return MultimodalParallelSpec({"vision": vision}, llm, 2)


def check_pair(model, spec, ray_cluster):
    """Check gradients and training of a vision and language model, mixed and text-only."""
    oracle = oracle_of(model)
    mixed = pm.batch([7, 5], 3, vision=[0, 0])
    text = pm.batch([4, 12, 6], 4)
    step = [mixed, text, pm.batch([9], 5, vision=[0])]
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step)
        check_gradients(parallel, oracle, [text])
        check_training(parallel, oracle, [[step], [[mixed]], [[text, mixed]]])


def test_clip_and_gemma3_with_a_projector_on_a_separate_rank(ray_cluster):
    """Tie embeddings; sliding-window layers on both sides of the cut."""
    model = MultimodalModule(
        {"vision": ModalityModule(pm.build(pm.clip(), 1), "mlp")},
        ModalityModule(pm.build(pm.gemma3(), 2)),
    )
    spec = two_ranks(
        ParallelSpec(pp=3, layers=(1, 1, 1), ranks=(0, 1, 2)), ParallelSpec(pp=2, ranks=(0, 1))
    )
    assert [s.id for s in spec.plan(model).rank_stages(2)] == [StageId("vision", 2)]
    check_pair(model, spec, ray_cluster)


def test_dinov2_and_gpt2_with_stages_sharing_ranks(ray_cluster):
    """Tie embeddings; a rank holds an early and a late stage."""
    model = MultimodalModule(
        {"vision": ModalityModule(pm.build(pm.dinov2(), 1), "mlp")},
        ModalityModule(pm.build(pm.gpt2(), 2)),
    )
    spec = two_ranks(ParallelSpec(pp=2, ranks=(0, 1)), ParallelSpec(pp=3, ranks=(0, 1, 0)))
    check_pair(model, spec, ray_cluster)


def test_cut_cnn_and_opt(ray_cluster):
    """Cut a plain encoder in two; embeddings are narrower than the hidden state."""
    cnn = ModalityModule(
        pm.make_cnn(), "linear", hidden_size=12, example_inputs=pm.images(1)
    )
    model = MultimodalModule({"vision": cnn}, ModalityModule(pm.build(pm.opt(), 2)))
    spec = two_ranks(ParallelSpec(pp=2, ranks=(0, 1)), ParallelSpec(pp=2, ranks=(1, 0)))
    check_pair(model, spec, ray_cluster)


class TextThenModalities:
    """User-defined merge policy: all of a sample's features after its first token."""

    def __call__(self, encoder_outputs, inputs):
        if not encoder_outputs:
            return inputs
        (features,) = encoder_outputs.values()
        rows = inputs["inputs_embeds"].shape[0]
        assert inputs["sample_index"]["vision"].tolist() == list(range(rows))
        mask, labels = inputs["attention_mask"], inputs["labels"]
        ones = mask.new_ones(features.shape[:2])
        ignored = torch.full(features.shape[:2], -100)

        def insert(text, new):
            return torch.cat([text[:, :1], new, text[:, 1:]], dim=1)

        return {
            "inputs_embeds": insert(inputs["inputs_embeds"], features),
            "labels": insert(labels, ignored),
            "attention_mask": insert(mask, ones),
        }


def after_first_token(features, ids, embeds, labels):
    """Merge like :class:`TextThenModalities`, for the oracle."""
    items = [item for several in features.values() for item in several]
    extra = labels.new_full((sum(len(item) for item in items),), -100)
    return (
        torch.cat([embeds[:1], *items, embeds[1:]]),
        torch.cat([labels[:1], extra, labels[1:]]),
    )


def test_callback_merge_with_all_stages_on_one_rank(ray_cluster):
    model = MultimodalModule(
        {"vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp")},
        ModalityModule(pm.build(pm.llama(tied=True), 2)),
        TextThenModalities(),
    )
    oracle = oracle_of(model, after_first_token)
    step = [pm.batch([7, 5], 3, vision=[0, 1]), pm.batch([4, 9], 4)]
    spec = two_ranks(ParallelSpec(pp=2, ranks=(0, 0)), ParallelSpec(pp=2, ranks=(0, 0)))
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        output = check_gradients(parallel, oracle, step)[-1]
        assert not [s for s in output.timeline.spans if s.op in ("send", "recv")]
        check_training(parallel, oracle, [[step], [step], [step[1:]]])
