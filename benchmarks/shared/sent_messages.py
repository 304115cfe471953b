"""Planned message bytes compared with the bytes that the ranks send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import transformers

from benchmarks.shared import cost_cases, image_text
from raymm.actors.modules.merge import CrossAttend
from raymm.actors.rank.rank_resources import RankResources
from raymm.actors.weights.source import ConfigSource
from raymm.costs.analytic import analytic_profile
from raymm.costs.workload import microbatch_workload
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.model.vlm import PretrainedVlm, from_pretrained
from raymm.runtime.parallel_model import (
    ParallelModel,
)
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec, vlm_plan
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Edge
from raymm.scheduler.schedule.stage_costs import edge_bytes, stage_costs

MICROBATCHES, TOKENS, IMAGE = 2, 24, 32
_TWO, _HALF = ParallelSpec(pp=2), RankResources(cpus=0.5)


def planned_bytes(plan: Plan, microbatches: int) -> dict[Edge, int]:
    """Return bytes per directed edge between ranks, for a step in which all modules are trained.

    Args:
        plan: plan with a profile.
    """
    sent = {}
    for (src, dst), nbytes in edge_bytes(plan, stage_costs(plan)).items():
        if plan.by_id[src].rank != plan.by_id[dst].rank:
            sent |= {(src, dst): nbytes * microbatches, (dst, src): nbytes * microbatches}
    return sent


def sent_bytes(running: ParallelModel) -> dict[Edge, int]:
    """Return the bytes that ranks have sent so far, per directed edge."""
    sent: Counter[Edge] = Counter()
    for of_process in running.group.call("sent_bytes"):
        sent.update(of_process)
    return dict(sent)


def message_rows() -> Iterator[dict[str, Any]]:
    """Run a step of a pipeline of every kind of model on Ray; yield planned and sent bytes per
    edge.
    """
    for name, model, microbatch in _models():
        loads = microbatch_workload(model, microbatch).by_module
        profile = analytic_profile(model, loads, "cpu", "fp32")
        running: ParallelModel
        if isinstance(model, PretrainedVlm):
            specs = {"vision": ParallelSpec(), "llm": _TWO}
            plan = replace(vlm_plan(model, specs, MICROBATCHES), profile=profile)
            running = ParallelModel(model, plan, resources=_HALF)
        else:
            spec = MultimodalParallelSpec({"vision": _TWO}, _TWO, MICROBATCHES)
            plan = replace(spec.plan(model), profile=profile)
            running = ParallelModel(model, plan, resources=_HALF)
        with running:
            running.execute([microbatch] * MICROBATCHES)
            sent = sent_bytes(running)
        planned = planned_bytes(plan, MICROBATCHES)
        for src, dst in sorted(planned.keys() | sent.keys()):
            yield {
                "case": f"{name}: {src} to {dst}", "planned": planned.get((src, dst), 0),
                "sent": sent.get((src, dst), 0),
            }


def _models() -> Iterator[tuple[str, MultimodalModule | PretrainedVlm, dict[str, Any]]]:
    sizes: dict[str, Any] = cost_cases.TEXT
    common: dict[str, Any] = cost_cases.SIZES
    vision = transformers.SiglipVisionConfig(
        **common, image_size=IMAGE, patch_size=8, vision_use_head=False
    )
    llama = transformers.LlamaConfig(**sizes)
    (pair,) = image_text.microbatches(1, 2, TOKENS, cost_cases.VOCABULARY, IMAGE)
    images = {"vision": ModalityModule(vision, "mlp")}
    yield "images before text", MultimodalModule(images, llama), pair
    case = cost_cases.cross_attention()
    source = cast(ConfigSource, case.source())
    text = source.config.get_text_config()
    crossed = ModalityModule(transformers.MllamaForCausalLM._from_config(text))
    yield "cross attention", MultimodalModule(images, crossed, CrossAttend()), pair
    source.config.architectures = [source.model_class.__name__]
    microbatch = case.inputs[0]()
    yield "vision-language model", from_pretrained(source.config, microbatch), microbatch
