"""Every module with its own tensor, context and data parallelism equals one process.

The matrix is all of encoder (tp, cp, dp) x language model (tp, cp, dp) in {1, 2}^3 that four
processes can hold, in one step each; a few get the full training check.
"""

from itertools import product
from math import prod

import pytest

from raymm.errors import PlanError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, check_gradients, check_training, oracle_of

MOST_PROCESSES = 4
DEGREES = list(product((1, 2), repeat=3))


def model_of(llm=None) -> MultimodalModule:
    """Return a model with GQA and one key head, so that tp 2 has fewer key heads than processes."""
    return MultimodalModule(
        {"vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp")},
        ModalityModule(pm.build(llm or pm.llama(tied=True), 3)),
    )


def step() -> list[dict]:
    """Return a step with images in some microbatches and rows, and lengths that do not divide."""
    return [pm.batch([17, 9], 4, vision=[0, 0]), pm.batch([6], 5)]


def spec_of(vision, llm, **options) -> MultimodalParallelSpec:
    def one(degrees):
        return ParallelSpec(**dict(zip(("tp", "cp", "dp"), degrees, strict=True)))

    return MultimodalParallelSpec({"vision": one(vision)}, one(llm), 2, **options)


MATRIX = [
    (vision, llm)
    for vision, llm in product(DEGREES, DEGREES)
    if prod(vision) + prod(llm) <= MOST_PROCESSES and (vision, llm) != ((1, 1, 1), (1, 1, 1))
]


def name_of(degrees) -> str:
    return "".join(f"{n}{d}" for n, d in zip(("tp", "cp", "dp"), degrees, strict=True) if d > 1)


@pytest.mark.cells(2)
@pytest.mark.parametrize(
    ("vision", "llm"), MATRIX,
    ids=[f"vision {name_of(v) or 1}-llm {name_of(one) or 1}" for v, one in MATRIX],
)
def test_degrees(ray_cluster, vision, llm):
    model = model_of()
    oracle = oracle_of(model)
    with spec_of(vision, llm).apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step())
        check_training(parallel, oracle, [[step()], [step()[::-1]], [step(), step()]])


@pytest.mark.cells(1)
@pytest.mark.parametrize("degrees", [{"tp": 2, "cp": 2}, {"tp": 2, "dp": 2}, {"cp": 2, "dp": 2}])
def test_modules_on_the_same_ranks(ray_cluster, degrees):
    """Alternate encoder and language model on four processes.

    A sharded gradient is summed without a message.
    """
    model = model_of(pm.qwen3())
    oracle = oracle_of(model)
    one = ParallelSpec(**degrees, ranks=tuple(range(degrees.get("dp", 1))))
    spec = MultimodalParallelSpec({"vision": one}, one, 2)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        assert parallel.group.num_ranks == 4
        check_gradients(parallel, oracle, step())
        check_training(parallel, oracle, [[step()], [step()], [step()]])


def test_two_encoders_with_all_features(ray_cluster):
    """Use two encoders with separate specs, one frozen; text-only microbatches; one key head.

    Also a pipeline; ZeRO-1; B_w separate from B_d; recomputation.
    """
    llm = pm.llama(tied=True)
    llm.num_key_value_heads = 1
    model = MultimodalModule(
        {
            "vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp", frozen=True),
            "audio": ModalityModule(pm.build(pm.whisper(), 2), "linear"),
        },
        ModalityModule(pm.build(llm, 3)),
    )
    batches = [
        pm.batch([7, 5], 4, vision=[0, 0], audio=[1]), pm.batch([6, 8], 5, vision=[0, 1]),
        pm.batch([4, 9], 6, audio=[0]), pm.batch([10], 7),
    ]
    oracle = oracle_of(model)
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(tp=2), "audio": ParallelSpec(cp=2, sharding="zero1")},
        ParallelSpec(pp=2, tp=2, sharding="zero1"), 4, "zero_bubble", recompute=True,
    )
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        assert parallel.group.num_ranks == 8
        check_gradients(parallel, oracle, batches)
        check_gradients(parallel, oracle, batches[3:], batches[:2])
        check_training(parallel, oracle, [[batches], [batches[::-1]], [batches, batches[1:]]])


@pytest.mark.cells(1)
@pytest.mark.parametrize("llm", [pm.gemma3, pm.gpt2], ids=["gemma3", "gpt2"])
def test_masks_and_plans_of_other_families(ray_cluster, llm):
    """Use sharded heads with a sharded vocabulary, and a family without its own TP plan.

    That family has fused projections; ZeRO-1 over replicas.
    """
    model = model_of(llm())
    oracle = oracle_of(model)
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(dp=2, sharding="zero1")},
        ParallelSpec(tp=2, dp=2, sharding="zero1"), 2,
    )
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step())
        check_training(parallel, oracle, [[step()], [step()], [step()]])


@pytest.mark.parametrize(
    ("vision", "llm", "why"),
    [
        ({}, {"tp": 8}, "tp of 'llm' is 8"),
        ({"tp": 3}, {}, "tp of 'vision' is 3"),
        ({"dp": 3}, {}, "dp of 'vision' is 3, which does not divide"),
    ],
)
def test_degrees_that_the_model_does_not_support(ray_cluster, ended_actors, vision, llm, why):
    with pytest.raises(PlanError, match=why):
        MultimodalParallelSpec({"vision": ParallelSpec(**vision)}, ParallelSpec(**llm), 2).apply(
            model_of()
        )
    assert ended_actors() == []
