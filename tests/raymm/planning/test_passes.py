"""Plan passes run in order on a plan that raymm made, and their results are checked."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, SiglipVisionConfig

import raymm
from raymm.errors import ConfigError, PlanError
from raymm.planning.passes import run_passes
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.plan.plan import Plan
from raymm.training.run_plan import RunPlanner
from tests.docs.pages import blocks

SIZES = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2)
OWN = __name__


def model():
    vision = raymm.ModalityModule(
        SiglipVisionConfig(image_size=16, patch_size=8, num_hidden_layers=2, **SIZES), "mlp"
    )
    return raymm.MultimodalModule(
        {"vision": vision}, LlamaConfig(vocab_size=64, num_hidden_layers=3, **SIZES)
    )


@pytest.fixture(scope="module")
def plan():
    return MultimodalParallelSpec({"vision": ParallelSpec()}, ParallelSpec(pp=2), 2).plan(model())


def page_pass():
    """Return the pass of docs/extending.md."""
    names: dict = {}
    for block in blocks("python"):
        if block.page == "docs/extending.md":
            exec(block.text, names)
    return names["gpipe"]


def zero_bubble(plan):
    return replace(plan, schedule="zero_bubble" if plan.schedule == "gpipe" else "1f1b")


def nothing(plan):
    return None


def more_microbatches(plan):
    return replace(plan, num_microbatches=4)


def without_memory(plan):
    return replace(plan, memory_limit=1)


def failing(plan):
    raise KeyError("llm")


def test_passes_run_in_order_and_are_saved_with_the_plan(plan):
    changed = run_passes(plan, (page_pass(), f"{OWN}:zero_bubble"))
    assert changed.schedule == "zero_bubble"
    assert changed.passes[1] == f"{OWN}:zero_bubble" and changed.passes[0].endswith(":gpipe")
    assert Plan.from_json(changed.to_json()) == changed
    assert "passes" not in plan.to_dict()


@pytest.mark.parametrize(("name", "says"), [
    ("nothing", "it returned NoneType"), ("failing", "KeyError: 'llm'"),
    ("more_microbatches", "its plan has 4 microbatches, and the plan before it 2"),
])  # fmt: skip
def test_a_result_that_cannot_run_names_the_pass(plan, name, says):
    with pytest.raises(PlanError) as error:
        run_passes(plan, (zero_bubble, f"{OWN}:{name}"))
    assert str(error.value).startswith(f"planning.passes[1] is '{OWN}:{name}': {says}")
    assert "accepted: module:function, which returns a raymm.Plan" in str(error.value)


def test_a_result_that_does_not_fit_names_the_pass():
    planned = raymm.plan(model(), ranks=2, microbatches=2, tokens={"llm": 64})
    with pytest.raises(PlanError, match=rf"planning.passes\[0\] is '{OWN}:without_memory'"):
        run_passes(planned.plan, (f"{OWN}:without_memory",))


def test_plans_that_raymm_makes_have_their_passes():
    planned = raymm.plan(
        model(), ranks=2, microbatches=2, tokens={"llm": 64}, passes=(page_pass(),)
    )
    assert planned.plan.schedule == "gpipe" and planned.plan.passes[0].endswith(":gpipe")
    assert planned.seconds > 0


@pytest.mark.parametrize(("options", "error", "says"), [
    ({"passes": (f"{OWN}:absent",)}, ConfigError, rf"planning.passes\[0\] is '{OWN}:absent'"),
    ({"passes": (f"{OWN}:SIZES",)}, ConfigError, "a dict; accepted: module:function"),
    ({"passes": ("a:b",), "style": "auto"}, PlanError, "parallel.style 'auto'; accepted: style"),
])  # fmt: skip
def test_wrong_passes_are_rejected_before_a_search(options, error, says):
    with pytest.raises(error, match=says):
        raymm.PlanRequest(**options).check(model())


def test_a_resumed_run_keeps_the_plan_of_the_same_passes_only(plan, monkeypatch):
    monkeypatch.setattr("raymm.training.run_plan.check_capacity", lambda *arguments: None)
    saved = run_passes(plan, (zero_bubble,))
    checkpoint = SimpleNamespace(manifest=SimpleNamespace(plan=saved.to_dict()))
    new = SimpleNamespace(plan=plan, lines=())
    planned = "raymm.planning.planned_run"
    monkeypatch.setattr(f"{planned}.request_for_cluster", lambda request, *_: (request, None))
    monkeypatch.setattr(f"{planned}.plan_for_cluster", lambda *a, **k: new)

    def resumed(*passes):
        lines = []
        placement = SimpleNamespace(bundles_beside=lambda bundle: ())
        planner = RunPlanner(
            raymm.PlanRequest(passes=passes), model(), [{}], "fp32", raymm.OptimizerConfig(),
            lines.append,
        )
        return planner.plan(checkpoint, "cpu", raymm.RankResources(), placement), lines

    assert resumed(zero_bubble) == (saved, ["resuming with the plan of the checkpoint"])
    other, lines = resumed()
    assert other == plan
    assert lines[0].startswith(f"planning again: planning.passes is [], and was ['{OWN}:zero")
