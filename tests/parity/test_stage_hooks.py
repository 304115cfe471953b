"""Stage hooks change values and gradients as in one process, under any layout."""

import pytest
import torch

from raymm import StageHook
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.errors import ModelError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec, vlm_plan
from tests.parity.test_dropout import SEED, expected
from tests.parity.test_vlms_on_ray import whole
from tests.support import parity_models as pm
from tests.support.multiplex_models import gradient_problems
from tests.support.parity_check import check_gradients, check_reference, oracle_of
from tests.support.parity_oracle import Oracle, gradient_errors
from tests.support.stage_hooks import Doubled, Noise, Squashed

LAYOUTS = {
    "pp": {"pp": 2, "recompute_layers": "all"}, "tp": {"tp": 2}, "cp": {"cp": 2}, "dp": {"dp": 2},
    "fsdp": {"dp": 2, "sharding": "fsdp"},
}


@pytest.fixture
def model():
    vision = ModalityModule(pm.build(pm.siglip(), 1), "mlp", frozen=False)
    return MultimodalModule({"vision": vision}, ModalityModule(pm.build(pm.llama(layers=2), 3)))


def step():
    return [
        pm.batch([9, 7, 4], 4, vision=[0, 1, 2]), pm.batch([6, 8], 5, vision=[1, 1]),
    ]


def squashed(encode):
    """Return the oracle's encoder with the formulas of :class:`Squashed`."""
    def changed(oracle, name, one):
        return 2 * encode(oracle, name, {"pixel_values": 1.5 * one["pixel_values"]}).tanh()

    return changed


def spec_of(layout):
    return MultimodalParallelSpec({"vision": ParallelSpec(**LAYOUTS[layout])}, ParallelSpec(), 2)


@pytest.mark.cells(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_the_formula(ray_cluster, model, layout, monkeypatch):
    monkeypatch.setattr(Oracle, "_encode", squashed(Oracle._encode))
    model.add_stage_hook("vision", Squashed())
    oracle = oracle_of(model)
    check_reference(model, oracle, step())
    with spec_of(layout).apply(model) as parallel:
        check_gradients(parallel, oracle, step())


@pytest.mark.cells(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_noise_equals_that_of_one_process(ray_cluster, model, layout):
    model.add_stage_hook("vision", Noise())
    model.add_stage_hook("vision", Doubled())
    loss, gradients = expected(model, step())
    model.eval()
    with torch.no_grad():
        count = sum(int((one["labels"][:, 1:] != -100).sum()) for one in step())
        quiet = sum(float(model(**one, label_tokens=count)) for one in step())
    with spec_of(layout).apply(model, seed=SEED) as parallel:
        output = parallel.execute(step())
        assert abs(output.loss - loss) <= 1e-5 * abs(loss)
        found = {n: g for n, g in parallel.gradients().items() if g is not None}
        assert gradient_errors(found, gradients) == []
        evaluated = parallel.evaluate(step()).loss
    assert abs(evaluated - quiet) <= 1e-5 * abs(quiet) < abs(quiet - loss)


@pytest.mark.cells(2)
def test_features_of_a_vlm(ray_cluster):
    model, microbatches = whole("LlavaForConditionalGeneration")
    reference = model.materialize()
    projector = reference.get_submodule("model.multi_modal_projector")
    doubling = projector.register_forward_hook(lambda module, args, output: 2 * output)
    loss = model.loss(microbatches)
    loss.backward()
    doubling.remove()
    due = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    model.add_stage_hook("vision", Doubled())
    with pytest.raises(ModelError, match="stage hooks, which run on ranks only"):
        model.loss(microbatches)
    plan = vlm_plan(model, {"vision": ParallelSpec(pp=2)}, len(microbatches))
    with ParallelModel(model, plan) as running:
        output = running.execute(microbatches)
        assert abs(output.loss - loss.item()) <= 1e-6 * abs(loss.item())
        assert gradient_problems(running.gradients(), due) == []


def test_hooks_run_in_their_order(model):
    model.add_stage_hook("vision", Doubled())
    model.add_stage_hook("vision", Squashed())
    stage_hooks = model.hooks_of("vision")
    assert [type(hook) for hook in stage_hooks.hooks] == [Doubled, Squashed]
    features = torch.full((1, 1, 1), 0.3)
    changed = stage_hooks.changed_outputs(Message((features,), {}), MicrobatchContext(1))
    torch.testing.assert_close(changed.tensors[0], 2 * (2 * features).tanh())


def test_hooks_run_around_callbacks():
    places = []

    def noting(place):
        return lambda *values: places.append(place) or values[-1]

    class Noting(StageHook):
        def inputs(self, inputs, call):
            return noting("inputs")(inputs)

        def output(self, features, call):
            return noting("output")(features)

    vision = ModalityModule(
        pm.build(pm.siglip(), 1), "mlp", preprocess_callback=noting("preprocess"),
        postprocess_module_callback=noting("module"),
        postprocess_projector_callback=noting("projector"),
    )
    model = MultimodalModule({"vision": vision}, ModalityModule(pm.build(pm.llama(layers=2), 3)))
    model.add_stage_hook("vision", Noting())
    model(**step()[0])
    assert places == ["inputs", "preprocess", "module", "projector", "output"]


class Nothing(StageHook):
    pass


class Trained(StageHook):
    def __init__(self):
        self.linear = torch.nn.Linear(2, 2)

    def output(self, features, call):
        return self.linear(features)


@pytest.mark.parametrize("module, hook, words", [
    ("audio", Squashed(), "a stage hook is for 'audio'; accepted: encoders of the model .vision"),
    ("llm", Squashed(), "a stage hook is for 'llm'; accepted: encoders of the model .vision"),
    ("vision", len, "is not a subclass of raymm.StageHook"),
    ("vision", Nothing(), "Nothing overrides no method; accepted: inputs, output, or both"),
    ("vision", Trained(), "Trained has parameters that require a gradient"),
])  # fmt: skip
def test_invalid_hooks_are_rejected(model, module, hook, words):
    with pytest.raises(ModelError, match=words):
        model.add_stage_hook(module, hook)


@pytest.mark.parametrize("changed, words", [
    (lambda features: features[:, :1], "accepted: a torch.float32 tensor of shape"),
    (lambda features: features.double(), "returned a torch.float64 tensor"),
    (lambda features: features.detach(), "output returned without a gradient"),
])  # fmt: skip
def test_features_of_another_kind_are_rejected(model, changed, words):
    class Wrong(StageHook):
        def output(self, features, call):
            return changed(features)

    model.add_stage_hook("vision", Wrong())
    with pytest.raises(ModelError, match=f"stage hook .*Wrong of 'vision': .*{words}"):
        model(**step()[0])
