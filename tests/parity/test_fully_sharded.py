"""Modules with sharded samples and parameters equal one process."""

import pytest
import torch

from raymm.actors.modules.merge import ReplaceTokens
from raymm.errors import PlanError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.plan.stage import StageId
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, check_gradients, check_training, oracle_of
from tests.support.parity_oracle import replace


def fsdp(**degrees) -> ParallelSpec:
    return ParallelSpec(sharding="fsdp", **degrees)


def model_of(llm=None, vision=None, frozen=False) -> MultimodalModule:
    return MultimodalModule(
        {"vision": ModalityModule(pm.build(vision or pm.siglip(), 1), "mlp", frozen=frozen)},
        ModalityModule(pm.build(llm or pm.llama(tied=True), 3)),
    )


def uneven() -> list[dict]:
    """Return rows and items that do not divide, one row, one item, and only text."""
    return [
        pm.batch([17, 9, 5], 4, vision=[0, 0, 2]), pm.batch([6], 5),
        pm.batch([8, 3], 6, vision=[1]),
    ]


def elements(model: MultimodalModule, name: str) -> tuple[int, int]:
    """Return the numbers of sharded and of replicated elements.

    Tied embeddings, norms and patches are replicated.
    """
    one = model.language_model if name == "llm" else model.encoders[name]
    inside = sum(p.numel() for n, p in one.module.named_parameters() if ".layers." in n)
    around = sum(p.numel() for p in one.module.parameters()) - inside
    if one.projector is not None:
        around += sum(p.numel() for p in one.projector.parameters())
    return inside, around


def check_everything(model, spec) -> list[dict[str, int]]:
    """Check gradients and training; return the number of parameter elements per process."""
    oracle, steps = oracle_of(model), uneven()
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, steps)
        check_gradients(parallel, oracle, steps[1:2], steps)  # only text, and accumulated gradients
        check_training(parallel, oracle, [[steps], [steps[::-1]], [steps, steps[:1]]])
        return parallel.group.num_parameters


def test_both_modules_and_a_projector(ray_cluster):
    """Check that every process has half of every block, and all parameters around them."""
    model = model_of()
    held = check_everything(model, MultimodalParallelSpec({"vision": fsdp(dp=2)}, fsdp(dp=2), 3))
    for name in ("vision", "llm"):
        inside, around = elements(model, name)
        parts = [part[StageId(name, 0)] for part in held if StageId(name, 0) in part]
        assert parts == [inside // 2 + around] * 2  # all first dimensions are even


def test_token_shards_of_sample_shards(ray_cluster):
    """Use two processes per sample; an encoder without gradients, sharded by tokens alone."""
    model = model_of(pm.qwen3(), frozen=True)
    spec = MultimodalParallelSpec({"vision": fsdp(cp=2)}, fsdp(dp=2, cp=2), 3)
    check_everything(model, spec)


@pytest.mark.cells(1)
@pytest.mark.parametrize("exact", [False, True])
def test_bf16_errors_do_not_depend_on_sharding(ray_cluster, exact):
    """Gather blocks in bf16, or cast them by autocast; gradients are summed in fp32."""
    model, steps = model_of(), uneven()
    spec = MultimodalParallelSpec({"vision": fsdp(dp=2)}, fsdp(dp=2), 3)
    found = []
    for options in ({"precision": "bf16", "exact_autocast": exact}, {}):
        with spec.apply(model, optimizer=OPTIMIZER, **options) as parallel:
            loss = parallel.execute(steps).loss
            found.append((loss, parallel.gradients()))
    (loss, gradients), (due, exactly) = found
    assert loss == pytest.approx(due, rel=5e-3)
    largest = max(gradient.norm() for gradient in exactly.values() if gradient is not None)
    for name, gradient in exactly.items():
        if gradient is not None:
            assert gradients[name].dtype == torch.float32
            allowed = 5e-2 * gradient.norm() + 1e-3 * largest
            assert (gradients[name] - gradient).norm() <= allowed, name


@pytest.mark.cells(1)
@pytest.mark.parametrize("recompute", [False, True])
def test_pipelines(ray_cluster, recompute):
    """Tie embeddings at both ends; separate projector; several microbatches in flight."""
    model = model_of()
    spec = MultimodalParallelSpec(
        {"vision": fsdp(dp=2, layers=(2, 1), pp=2)}, fsdp(pp=2, dp=2), 3, recompute=recompute
    )
    check_everything(model, spec)


def test_modules_on_the_same_ranks(ray_cluster):
    """Alternate encoder and language model; first dimensions that do not divide by three."""
    model = model_of(pm.gpt2(), pm.clip())
    one = fsdp(dp=3, ranks=(0,))
    check_everything(model, MultimodalParallelSpec({"vision": one}, one, 3))


def test_untied_embeddings(ray_cluster):
    """Shard an untied embedding and head too; odd first dimensions; a frozen encoder."""
    model = model_of(pm.llama(tied=False), frozen=True)
    spec = MultimodalParallelSpec({"vision": fsdp(dp=2)}, fsdp(pp=2, dp=2), 3)
    held = check_everything(model, spec)
    llm = model.language_model.module
    blocks = sum(p.numel() for p in llm.model.layers[:2].parameters())
    first = [part[StageId("llm", 0)] for part in held if StageId("llm", 0) in part]
    assert sum(first) == blocks + llm.model.embed_tokens.weight.numel()


@pytest.mark.cells(1)
@pytest.mark.parametrize("packing", [False, True])
def test_masks_and_another_encoder(ray_cluster, packing):
    """Shard masks over placeholders with their rows; the other encoder has two replicas."""
    tokens = {"vision": pm.IMAGE_TOKEN, "audio": pm.AUDIO_TOKEN}
    image, sound = (pm.IMAGE_TOKEN, 4), (pm.AUDIO_TOKEN, pm.AUDIO_FRAMES // 2)
    model = MultimodalModule(
        {
            "vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp"),
            "audio": ModalityModule(pm.build(pm.whisper(), 2), "linear"),
        },
        ModalityModule(pm.build(pm.llama(), 3)),
        ReplaceTokens(tokens),
        "multimodal_isolated",
        packing,
    )
    steps = [
        pm.batch([7, 5, 9], 4, [[image, image], [], [sound, image]], vision=[0, 0, 2], audio=[2]),
        pm.batch([13], 7),
    ]
    oracle = oracle_of(
        model, replace(tokens), lambda query, key, past: past if query[0] == 0 else query == key
    )
    spec = MultimodalParallelSpec(
        {"vision": fsdp(dp=2), "audio": ParallelSpec(dp=2, sharding="zero1")}, fsdp(dp=2), 2
    )
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, steps, steps[::-1])
        check_training(parallel, oracle, [[steps], [steps[::-1]]])


@pytest.mark.parametrize(
    ("vision", "llm", "options", "why"),
    [
        ({}, {"tp": 2}, {}, "sharding is 'fsdp' and tp 2; .* none or zero1"),
        ({}, {"dp": 2}, {"schedule": "zero_bubble"}, "use schedule 1f1b or gpipe"),
        ({"ranks": (0,)}, {"dp": 2, "ranks": (0,)}, {}, "fsdp of stage .* all stages of rank 0"),
        ({"dp": 2, "ranks": (0, 1)}, {}, {}, r"ranks is \(0, 1\); it needs one entry per rank"),
    ],
)
def test_unsupported_combinations(ray_cluster, ended_actors, vision, llm, options, why):
    with pytest.raises(PlanError, match=why):
        spec = MultimodalParallelSpec({"vision": fsdp(**vision)}, fsdp(**llm), 3, **options)
        spec.apply(model_of())
    assert ended_actors() == []


class NormOverItems(pm.PlainCNN):
    """Encoder that normalizes over all items."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(12)


@pytest.mark.parametrize(
    ("encoder", "example", "why"),
    [
        (NormOverItems, None, "batch norms, which need all samples"),
        (pm.PlainCNN, {"pixel_values": torch.zeros(64, 12), "grid_thw": torch.ones(2, 3)},
         r"pixel_values \(64, 12\), grid_thw \(2, 3\)"),
        (lambda: torch.nn.Conv2d(3, 12, 8, stride=8), None, "no list of blocks"),
    ],
)  # fmt: skip
def test_encoders_that_cannot_be_sharded(
    ray_cluster, ended_actors, encoder, example, why
):
    vision = ModalityModule(
        encoder(), "linear", example_inputs=example, hidden_size=12
    )
    model = MultimodalModule({"vision": vision}, ModalityModule(pm.build(pm.llama())))
    with pytest.raises(PlanError, match=why):
        MultimodalParallelSpec({"vision": fsdp(dp=2)}, num_microbatches=3).apply(model)
    assert ended_actors() == []
