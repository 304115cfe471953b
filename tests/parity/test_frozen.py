"""Every combination of frozen and trainable encoder, projector and language model.

One model has an encoder for each of the four combinations of encoder and projector; a step that
uses only one of them is that combination's program. The language model is frozen in one start and
trainable in the other: eight combinations.
"""

import pytest

from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Op
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, check_gradients, check_training, oracle_of

COMBINATIONS = {  # name -> (encoder frozen, projector frozen)
    "none_frozen": (False, False),
    "encoder_frozen": (True, False),
    "projector_frozen": (False, True),
    "both_frozen": (True, True),
}


def start(llm_frozen: bool):
    encoders = {}
    for seed, name in enumerate(COMBINATIONS):
        # The uncut encoder is a CNN in one stage, the others are SigLIP in two.
        if name == "projector_frozen":
            module = ModalityModule(pm.make_cnn(), "mlp", hidden_size=12)
        else:
            module = ModalityModule(pm.build(pm.siglip(), seed), "mlp")
        encoders[name] = module
    model = MultimodalModule(encoders, ModalityModule(pm.build(pm.llama(), 9)))
    for name, (encoder, projector) in COMBINATIONS.items():
        model.encoders[name].freeze(module=encoder, projector=projector)
    model.language_model.freeze(llm_frozen)
    cut = ParallelSpec(pp=2, ranks=(0, 1))
    specs = {n: cut if n != "projector_frozen" else ParallelSpec(ranks=(0,)) for n in COMBINATIONS}
    return model, MultimodalParallelSpec(specs, ParallelSpec(pp=2, ranks=(0, 1)), 2)


@pytest.mark.cells(1)
@pytest.mark.parametrize("llm_frozen", [True, False])
def test_frozen_combinations(ray_cluster, llm_frozen):
    model, spec = start(llm_frozen)
    oracle = oracle_of(model)
    trainable = {n.split(".")[0] for n, p in oracle.named_parameters() if p.requires_grad}
    assert ("language_model" in trainable) == (not llm_frozen)
    assert "both_frozen_encoder" not in trainable
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        for name, (encoder, projector) in COMBINATIONS.items():
            step = [pm.batch([7, 5], 3, **{name: [0, 1]}), pm.batch([6], 4, **{name: [0]})]
            (output,) = check_gradients(parallel, oracle, step)
            due = {
                stage.id: any(
                    p.requires_grad for p in
                    [*getattr(oracle, f"{name}_encoder").module.parameters()] * (not encoder)
                ) or (stage.index == 1 or name == "projector_frozen") and not projector
                for stage in parallel.plan.module_stages(name)
            }
            anything = not (encoder and projector and llm_frozen)
            due |= {StageId("llm", i): anything for i in (0, 1)}
            backwards = {s.stage for s in output.timeline.spans if s.op == Op.BACKWARD}
            assert backwards == {stage for stage, needed in due.items() if needed}
            if not anything:
                assert all(g is None for g in parallel.gradients().values())
        everything = [
            pm.batch([7, 5], 3, **{name: [0, 1] for name in COMBINATIONS}), pm.batch([6, 9], 4)
        ]
        check_gradients(parallel, oracle, everything)
        some = [pm.batch([6, 9], 5, encoder_frozen=[1], none_frozen=[0, 0])]
        check_training(parallel, oracle, [[everything], [some], [some]])


def test_a_fully_frozen_model_has_no_gradients(ray_cluster):
    """Freeze the whole model: no module has a gradient."""
    model = MultimodalModule(
        {"vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp")},
        ModalityModule(pm.build(pm.llama(), 2)),
    )
    model.freeze(encoders=True, projectors=True, llm=True)
    oracle = oracle_of(model)
    spec = MultimodalParallelSpec({"vision": ParallelSpec(ranks=(0,))}, ParallelSpec(ranks=(0,)), 2)
    step = [pm.batch([7, 5], 3, vision=[0, 1]), pm.batch([6], 4)]
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        (output,) = check_gradients(parallel, oracle, step)
        assert parallel.gradients() == {}
        assert {s.op for s in output.timeline.compute()} == {Op.FORWARD_NO_GRAD}
        update = parallel.train_step(step)  # nothing to update is not an error
        assert update.grad_norm == 0.0 and update.loss == output.loss
