"""Features that some kinds of models lack: the one table of what is refused, and why.

``docs/own-model.md`` shows it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """Kind of a model, by how it is described."""

    PARTS = "a model by parts"
    VLM = "a Hugging Face VLM"
    GRAPH = "a graph of modules"


class Feature(NamedTuple):
    """Something that a run, or a user of a model, may ask for.

    Attributes:
        title: row of the table.
        parts, vlm, graph: why models of a kind lack it; empty if they have it.
    """

    title: str
    parts: str = ""
    vlm: str = ""
    graph: str = ""

    def reason(self, kind: Kind) -> str:
        """Return why models of a kind lack the feature; empty if they have it."""
        return {Kind.PARTS: self.parts, Kind.VLM: self.vlm, Kind.GRAPH: self.graph}[kind]


_NO_TEXT = "it has no language model whose text raymm could count"
_OWN_STEPS = "its batches are in memory, so data workers do not load them"

STEPS = Feature("training steps on any layout (`ParallelModel`)")
TRAINER = Feature("`Trainer`: checkpoints, recovery, resume, evaluation, loggers")
FILES = Feature("training from files (`raymm train`)", graph=_OWN_STEPS)
PHASES = Feature("freezing modules during a run (`at`)")
ADAPTERS = Feature("adapters (LoRA)")
PIPELINED_PLANS = Feature(
    "plans that raymm makes, pipelined (`raymm plan`)",
    graph="the sizes of its modules' inputs are not known; give layouts to raymm.dag_plan",
)
MULTIPLEXED_PLANS = Feature(
    "plans that raymm makes, multiplexed",
    vlm="a tower's items are not separate samples, which replicas could split",
)
GIVEN_SIZES = Feature(
    "plans from given sizes, without data",
    vlm="the tokens of its towers follow from what its processor returns for the data",
    graph="the sizes of its modules' inputs are not known; give layouts to raymm.dag_plan",
)
PLANS_PER_BATCH = Feature(
    "order and schedule by the sizes of each batch (`planning.per_batch`)", graph=_NO_TEXT,
)
MEASURED_COSTS = Feature(
    "measured costs (`raymm profile`, `--measure` of `raymm plan`)",
    vlm="its towers are not measured by layers", graph="its modules are not measured by layers",
)
CACHED_FEATURES = Feature("cached features of frozen encoders", graph=_OWN_STEPS)
FLOPS = Feature("FLOP/s and MFU in the metrics", graph=_NO_TEXT)
GENERATION = Feature(
    "text generation", graph="it has no language model that raymm could run token by token"
)
EXPORT = Feature(
    "export to Hugging Face folders",
    graph="its modules have no common format; save the state_dict() of the graph's modules",
)
STAGE_HOOKS = Feature(
    "stage hooks (`raymm.StageHook`)",
    graph="a module of yours in the graph can change what other modules read",
)
PREFERENCES = Feature("preference training (DPO)", graph=_NO_TEXT)
SOURCE_LOSSES = Feature("losses by data source", graph=_OWN_STEPS)
REBALANCING = Feature("batches by measured costs (`rebalance`)", graph=_OWN_STEPS)

FEATURES = (
    STEPS, TRAINER, FILES, PHASES, ADAPTERS, PIPELINED_PLANS, MULTIPLEXED_PLANS, GIVEN_SIZES,
    PLANS_PER_BATCH, MEASURED_COSTS, CACHED_FEATURES, FLOPS, GENERATION, EXPORT, PREFERENCES,
    SOURCE_LOSSES, REBALANCING, STAGE_HOOKS,
)


def features_table() -> str:
    """Return the table of features in Markdown, with the reasons below it."""
    lines = ["| | " + " | ".join(Kind) + " |", "| --- |" + " --- |" * len(Kind)]
    reasons: list[str] = []
    for feature in FEATURES:
        cells = []
        for kind in Kind:
            reason = feature.reason(kind)
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"no ({reasons.index(reason) + 1})" if reason else "yes")
        lines.append(f"| {feature.title} | {' | '.join(cells)} |")
    notes = [f"{n}. {reason[0].upper()}{reason[1:]}." for n, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *notes])
