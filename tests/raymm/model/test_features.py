"""The table of features is true, and a page shows it."""

import pytest
import torch
import transformers
from torch import nn

import raymm
from benchmarks.shared.family_classes import Family
from benchmarks.shared.vlm_check import runnable
from benchmarks.vlm_matrix import KIND
from raymm.cli.plan import _measured
from raymm.config.sections import CacheSection, RunConfig
from raymm.data import DataConfig
from raymm.errors import ModelError
from raymm.model import features
from raymm.model.features import FEATURES, Kind, features_table
from raymm.model.vlm import from_pretrained
from raymm.monitor.throughput import Throughput
from raymm.planning.request import PlanRequest
from raymm.storage.export import export_model
from tests.house import ROOT

# A graph has no rows that could be pairs, of several sources, or grouped: nothing asks for these.
NEVER_ASKED = {features.PREFERENCES, features.SOURCE_LOSSES, features.REBALANCING}


class Difference(nn.Module):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (first - second).square().mean(-1)


@pytest.fixture(scope="module")
def models():
    dag = raymm.ModuleDag({
        "one": raymm.DagModule(nn.Linear(4, 3), reads={"input": "x"}),
        "two": raymm.DagModule(nn.Linear(5, 3), reads={"input": "y"}),
        "loss": raymm.DagLoss(Difference(), inputs={"first": "one", "second": "two"}),
    })
    model_class = transformers.Gemma3ForConditionalGeneration
    config, (microbatch, *_) = runnable(Family(KIND, model_class, model_class.config_class))
    config.architectures = [model_class.__name__]
    return {Kind.GRAPH: dag, Kind.VLM: from_pretrained(config, microbatch)}


def train(model, folder, **options):
    given = dict(data=[{}], run_config=RunConfig(steps=1, storage_path=str(folder))) | options
    raymm.Trainer(model, **given)


DATA = DataConfig(train="rows.jsonl", tokenizer="folder", batch_size=1, microbatches=1)
ASKED = {
    features.FILES: lambda model, folder: train(model, folder, data=DATA),
    features.PIPELINED_PLANS: lambda model, folder: raymm.plan(model, ranks=2),
    features.MULTIPLEXED_PLANS: lambda model, folder: PlanRequest(style="multiplexed").check(model),
    features.GIVEN_SIZES: lambda model, folder: raymm.plan(model, ranks=2),
    features.PLANS_PER_BATCH: lambda model, folder: PlanRequest(per_batch=True).check(model),
    features.MEASURED_COSTS: lambda model, folder: _measured(1, None, model, None, None),
    features.CACHED_FEATURES: lambda model, folder: train(model, folder, cache=CacheSection()),
    features.GENERATION: lambda model, folder: model.check_generates(),
    features.STAGE_HOOKS: lambda model, folder: model.add_stage_hook("one", raymm.StageHook()),
    features.EXPORT: lambda model, folder: export_model(model, str(folder), str(folder / "out")),
}


@pytest.mark.parametrize(("feature", "kind"), [
    (feature, kind) for feature in FEATURES for kind in Kind
    if feature.reason(kind) and feature not in (*NEVER_ASKED, features.FLOPS)
])  # fmt: skip
def test_what_a_kind_lacks_is_refused_with_the_reason(models, feature, kind, tmp_path):
    with pytest.raises(ModelError) as refused:
        ASKED[feature](models[kind], tmp_path)
    message = str(refused.value)
    assert message.endswith(f"not for {kind}: {feature.reason(kind)}") and "accepted for" in message


def test_a_run_says_why_it_has_no_flops(models):
    said = []
    throughput = Throughput(models[Kind.GRAPH], {}, "cpu", "fp32", said.append)
    assert said == []  # counted during the first step
    throughput.count()
    assert throughput.after_step([], 1.0) == throughput.after_step([], 1.0) == {}
    assert len(said) == 1 and said[0].startswith("no TFLOP/s: ")
    assert said[0].endswith(features.FLOPS.graph)


def test_a_page_shows_the_table():
    assert features_table() in (ROOT / "docs" / "own-model.md").read_text()
