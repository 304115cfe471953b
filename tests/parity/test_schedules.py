"""Schedules, recomputation and layouts change when and where things run, never the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raymm.errors import PlanError
from raymm.model.modality_module import ModalityModule
from raymm.model.model import LANGUAGE_MODEL
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.parallel_module import StepOutput
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedules.base import Schedule
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import restore
from tests.docs.page_schedule import limited_forwards
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, check_gradients, check_training, close, oracle_of

# Frozen modules: vision with its 2 blocks; its projector; all 4 blocks of the language model.
TRAINING = {
    "projectors_only": {"encoders": True, "projectors": False, "llm": True},
    "encoders_frozen": {"encoders": True, "projectors": False, "llm": False},
    "everything": {"encoders": False, "projectors": False, "llm": False},
}
# Schedules of other projects.
FIELD = ("megatron", "mimo", "mimo_colocated", "entrain", "dip", "bigmac", "optimus")
# A step with text-only microbatches in between, of different lengths.
STEP = [
    pm.batch([7, 5], 3, vision=[0, 1]),
    pm.batch([4, 9], 4),
    pm.batch([6], 5, vision=[0, 0]),
    pm.batch([8, 3], 6, vision=[1]),
    pm.batch([5], 7),
    pm.batch([10, 4], 8, vision=[0, 1]),
]
TEXT = [STEP[1], STEP[4]]


def vision_and_llm(**frozen: bool) -> MultimodalModule:
    model = MultimodalModule(
        {"vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp")},
        ModalityModule(pm.build(pm.llama(tied=True, layers=4), 2)),
    )
    if frozen:
        model.freeze(**frozen)
    return model


def planned(plan: Plan, schedule: str | Schedule, *recompute: str) -> Plan:
    """Return the plan with another schedule; stages of the modules ``recompute`` keep only inputs.
    """
    stages = tuple(replace(stage, recompute=stage.module in recompute) for stage in plan.stages)
    return replace(plan, stages=stages, schedule=schedule)


def ops(output: StepOutput) -> dict[StageId, set[str]]:
    """Return the compute ops that ran, per stage."""
    seen: dict[StageId, set[str]] = {}
    for span in output.timeline.compute():
        seen.setdefault(span.stage, set()).add(span.op)
    return seen


@pytest.mark.cells(1)
@pytest.mark.parametrize("training", TRAINING)
def test_every_schedule_with_two_chunks_per_rank(ray_cluster, training):
    """Use two ranks; rank i holds vision.i and the language model's stages i and i + 2.

    The first and the last one, on different ranks, share the tied embedding.
    """
    model = vision_and_llm(**TRAINING[training])
    oracle = oracle_of(model)
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(pp=2, ranks=(0, 1))}, ParallelSpec(pp=4, ranks=(0, 1, 0, 1)), 6
    )
    plan = spec.plan(model)
    llm_trains = training != "projectors_only"
    with ParallelModel(model, plan, optimizer=OPTIMIZER) as parallel:
        parallel.reschedule(planned(plan, "gpipe", "vision"))
        (output,) = check_gradients(parallel, oracle, STEP)
        assert Op.RECOMPUTE in ops(output)[StageId("vision", 1)]
        assert (Op.RECOMPUTE in ops(output)[StageId("vision", 0)]) == (training == "everything")

        parallel.reschedule(planned(plan, "1f1b", LANGUAGE_MODEL))
        (output,) = check_gradients(parallel, oracle, STEP)
        assert all(Op.FORWARD_CHECKPOINTED in ops(output)[StageId("llm", i)] for i in range(4))
        assert ops(output)[StageId("vision", 1)] == {Op.FORWARD, Op.BACKWARD}

        parallel.reschedule(planned(plan, "zero_bubble"))
        (output,) = check_gradients(parallel, oracle, STEP)
        split = {name for name, seen in ops(output).items() if Op.BACKWARD_WEIGHT in seen}
        assert bool(split) == llm_trains
        check_gradients(parallel, oracle, TEXT)

        parallel.reschedule(planned(plan, "zero_bubble", "vision", LANGUAGE_MODEL))
        check_gradients(parallel, oracle, STEP, STEP[2:4])
        check_training(parallel, oracle, [[STEP], [STEP[:2], STEP[3:]], [STEP[3:]]])

        parallel.reschedule(planned(plan, limited_forwards()(2), "vision"))
        check_gradients(parallel, oracle, STEP)
        check_gradients(parallel, oracle, TEXT)
        with pytest.raises(PlanError, match="differ in layers or ranks"):
            parallel.reschedule(replace(spec, language_model_spec=ParallelSpec()).plan(model))


def test_schedules_of_other_projects(ray_cluster):
    """Use two ranks, each with a replica of the encoder and a stage of the language model."""
    model = vision_and_llm()
    plan = MultimodalParallelSpec(
        {"vision": ParallelSpec(ranks=(0,))}, ParallelSpec(pp=2, ranks=(0, 1)), 6
    ).plan(model)
    (first,) = plan.module_stages("vision")
    copy = Stage("vision", 0, first.layers, 1, 1)
    plan = replace(plan, stages=(*plan.stages, copy), shared_ranks=None)
    oracle = oracle_of(model)
    programs = set()
    with ParallelModel(model, plan, optimizer=OPTIMIZER) as parallel:
        for schedule in FIELD:
            parallel.reschedule(planned(plan, schedule))
            (output,) = check_gradients(parallel, oracle, STEP)
            programs.add(tuple(
                (s.rank, s.stage, s.op, s.microbatch) for s in output.timeline.compute()
            ))
            parallel.reschedule(planned(plan, schedule, "vision"))
            check_gradients(parallel, oracle, TEXT, STEP[1:5])
    assert len(programs) > 2  # they differ in more than their names


def test_the_custom_schedule_of_the_pages(ray_cluster):
    """Give a layout with replicas an object whose limit is three microbatches in flight."""
    model, schedule = vision_and_llm(), limited_forwards()(3)
    schedule.name = "three_in_flight"
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(dp=2)}, ParallelSpec(pp=2), 6, schedule=schedule
    )
    with ParallelModel(model, spec.plan(model), optimizer=OPTIMIZER) as parallel:
        check_training(parallel, oracle_of(model), [[STEP], [STEP[::-1]]])


def test_two_replicas_of_an_encoder(ray_cluster, tmp_path):
    """Alternate two replicas; each has a part of the gradient, or none at all.

    SigLIP's pooling head never has one: it must not move, not even by weight decay.
    """
    model = vision_and_llm()
    oracle = oracle_of(model)
    plan = MultimodalParallelSpec(
        {"vision": ParallelSpec(pp=2, ranks=(0, 1))}, ParallelSpec(pp=2, ranks=(2, 2)), 6
    ).plan(model)
    copies = [
        Stage(s.module, s.index, s.layers, 1 - s.rank, 1) for s in plan.module_stages("vision")
    ]
    plan = replace(plan, stages=(*plan.stages, *copies), shared_ranks=None)
    with ParallelModel(model, plan, optimizer=OPTIMIZER) as parallel:
        (output,) = check_gradients(parallel, oracle, STEP)
        ran = {
            (s.stage, s.microbatch) for s in output.timeline.compute()
            if s.stage.module == "vision"
        }
        assert ran == {
            (StageId("vision", i, replica), m) for i in (0, 1)
            for replica, m in [(0, 0), (0, 2), (1, 3), (1, 5)]
        }
        parallel.reschedule(planned(plan, "zero_bubble", "vision"))
        check_gradients(parallel, oracle, STEP)
        # Only the first replica sees an image in the second update, none does in the third.
        check_training(parallel, oracle, [[STEP], [STEP[2:3]], [TEXT], [STEP[:4], STEP[2:]]])
        held = parallel.group.call("parameters", True)
        for name, tensor in held[0].items():
            if name[0] == StageId("vision", 0):
                assert torch.equal(tensor, held[1][StageId("vision", 0, 1), name[1]])

        folder = CheckpointStore(tmp_path).save(parallel, {})
        trained = parallel.parameters()
        loss = parallel.evaluate(STEP).loss
        after = parallel.train_step(STEP).loss, parallel.evaluate(STEP).loss
        assert after[1] != loss
        manifest = restore(parallel, folder)
        names = [name for name in manifest.index if name.startswith("vision/")]
        assert set(names) == {f"vision/{name}" for name in model.encoders["vision"].state_dict()}
        # Each tensor is in one file only: the second replica writes nothing.
        assert [manifest.index[n] for n in names if ".layers.0." in n][0] == (
            "model-rank0.safetensors"
        )
        restored = parallel.parameters()
        assert all(torch.equal(restored[name], trained[name]) for name in trained)
        assert (parallel.train_step(STEP).loss, parallel.evaluate(STEP).loss) == after


def test_dropout_is_the_same_when_recomputed(ray_cluster):
    """Compare bit for bit, in both modules, under every schedule."""
    gpt2 = pm.gpt2()
    gpt2.resid_pdrop = gpt2.embd_pdrop = gpt2.attn_pdrop = 0.3
    whisper = pm.whisper()
    whisper.dropout = 0.3
    model = MultimodalModule(
        {"audio": ModalityModule(pm.build(whisper, 1), "mlp")}, ModalityModule(pm.build(gpt2, 2))
    )
    step = [pm.batch([7, 5], 3, audio=[0, 1]), pm.batch([4, 9], 4), pm.batch([6], 5, audio=[0])]
    spec = MultimodalParallelSpec(
        {"audio": ParallelSpec(pp=2, ranks=(0, 1))}, ParallelSpec(pp=2, ranks=(0, 1)), 3
    )
    plan = spec.plan(model)
    with ParallelModel(model, plan, optimizer=OPTIMIZER) as parallel:
        expected = parallel.execute(step).loss
        due = parallel.gradients()
        assert abs(parallel.evaluate(step).loss - expected) > 1e-4  # dropout is active
        for schedule in ("1f1b", "gpipe", "zero_bubble"):
            parallel.reschedule(planned(plan, schedule, "audio", LANGUAGE_MODEL))
            parallel.optimizer.zero_grad()
            output = parallel.execute(step)
            assert all(Op.RECOMPUTE in seen for seen in ops(output).values())
            assert output.loss == expected
            mine = parallel.gradients()
            for name, gradient in due.items():
                assert (gradient is None) == (mine[name] is None)
                if gradient is not None:  # schedules sum microbatches in the same order
                    assert torch.equal(mine[name], gradient), name
        # The next accumulated step uses other random numbers, the same as the whole model.
        second = parallel.execute(step).loss
        tokens = sum(int((one["labels"][:, 1:] != -100).sum()) for one in step)
        for batch, loss in enumerate((expected, second)):
            whole = 0.0
            for number, microbatch in enumerate(step):
                with model.drawing(0, 0, number, batch), torch.no_grad():
                    whole += float(model(**microbatch, label_tokens=tokens))
            assert close(loss, whole, 1e-5)
        assert abs(second - expected) > 1e-4


def test_colocated_encoders(ray_cluster):
    """Put two encoders on the same two ranks, the language model on another."""
    model = MultimodalModule(
        {
            "vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp"),
            "audio": ModalityModule(pm.build(pm.whisper(), 2), "linear"),
        },
        ModalityModule(pm.build(pm.llama(layers=2), 3)),
    )
    model.encoders["vision"].freeze(module=True, projector=False)
    oracle = oracle_of(model)
    both = ParallelSpec(pp=2, ranks=(0, 1))
    plan = MultimodalParallelSpec(
        {"vision": both, "audio": both}, ParallelSpec(pp=2, ranks=(2, 2)), 4
    ).plan(model)
    step = [
        pm.batch([7, 5], 3, vision=[0, 1], audio=[1]), pm.batch([4, 9], 4),
        pm.batch([6], 5, audio=[0, 0]), pm.batch([8, 3], 6, vision=[1]),
    ]
    with ParallelModel(model, plan, optimizer=OPTIMIZER) as parallel:
        for schedule in ("1f1b", "zero_bubble"):
            parallel.reschedule(planned(plan, schedule, "audio"))
            check_gradients(parallel, oracle, step)
        check_training(parallel, oracle, [[step], [step[:3]], [step[1:]]])
