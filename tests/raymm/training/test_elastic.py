"""Replicas that follow the nodes of a cluster: possible numbers and free resources.

Runs with them are in ``tests/cluster/going_on.py``.
"""

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared.family_classes import Family
from benchmarks.shared.vlm_check import runnable
from benchmarks.vlm_matrix import KIND
from raymm.actors.placement.placement import count_places
from raymm.actors.rank.rank_resources import RankResources
from raymm.config.build import build_layouts
from raymm.config.sections import RunConfig, load_config
from raymm.errors import PlanError
from raymm.model.vlm import from_pretrained
from raymm.monitor.metrics import read_metrics
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.plan.plan import Plan
from raymm.training import elastic
from raymm.training.trainer import Trainer


@pytest.mark.parametrize(("layout", "says"), [
    ({"dp": {"min": 2, "max": 1}}, "max_dp is 1"),
    ({"dp": {"min": 1, "max": 2}, "ranks": [0]}, "the number of ranks is not fixed"),
])  # fmt: skip
def test_impossible_replica_ranges_are_rejected(make_config, layout, says):
    config = load_config(make_config({"parallel": {"language_model": layout}}))
    with pytest.raises(PlanError, match=f"parallel.language_model: .*{says}"):
        build_layouts(config)


def test_replica_counts_divide_the_microbatches(make_config):
    config = load_config(make_config({
        "data.batch_size": 12, "data.microbatches": 6,
        "parallel": {"language_model": {"dp": {"min": 1, "max": 5}, "pp": 2},
                     "encoders": {"vision": {"dp": {"min": 2, "max": 3}}}},
    }))
    sizes = [
        (one.encoder_specs["vision"].dp, one.language_model_spec.dp)
        for one in build_layouts(config).sizes()
    ]
    assert sizes == [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3)]


def test_resources_taken_by_others_meanwhile_are_given_up(
    make_config, raymm, ray_cluster, monkeypatch, tmp_path
):
    """Report room for three processes when there is room for two."""
    monkeypatch.setattr(elastic, "ROOM_S", 2.0)
    monkeypatch.setattr(elastic.ElasticPlans, "_room", lambda *_: 100)
    monkeypatch.setattr(Trainer, "_look_for_room", lambda *_: None)
    code, text = raymm("train", make_config({
        "parallel": {"language_model": {"dp": {"min": 1, "max": 2}}}, "resources": {"cpus": 3},
        "run.steps": 2,
    }))
    assert code == 0, text
    assert "using fewer replicas, as resources were taken: 3 x (3 CPU) and 1 x (0.1 CPU)" in text
    stages = [row["stage_busy"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert [len(busy) for busy in stages] == [2, 2]


@given(
    st.lists(st.fixed_dictionaries({"CPU": st.integers(0, 6), "GPU": st.integers(0, 2)}),
             max_size=4),
    st.integers(0, 2),
)
def test_placements_never_exceed_the_resources(nodes, workers):
    bundle, beside = {"CPU": 2.0, "GPU": 1.0}, [{"CPU": 1.0}] * workers
    count = count_places(nodes, bundle, beside)
    alone = sum(min(node["CPU"] // 2, node["GPU"]) for node in nodes)
    spare = sum(node["CPU"] - 2 * min(node["CPU"] // 2, node["GPU"]) for node in nodes)
    assert count <= alone
    if spare >= workers:
        assert count == alone
    elif count:
        assert sum(node["CPU"] for node in nodes) >= 2 * count + workers


def test_a_vlm_has_as_many_replicas_as_fit_too(ray_cluster, tmp_path):
    """The losses are those of a run with a fixed number of replicas."""
    model_class = transformers.Gemma3ForConditionalGeneration
    config, microbatches = runnable(Family(KIND, model_class, model_class.config_class))
    config.architectures = [model_class.__name__]
    losses = []
    for number, language in enumerate([ParallelSpec(dp=1, max_dp=2), ParallelSpec(dp=2)]):
        result = Trainer(
            from_pretrained(config, microbatches[0], seed=3),
            MultimodalParallelSpec({"vision": ParallelSpec()}, language, num_microbatches=2),
            data=[microbatches[:2]], resources=RankResources(cpus=0.25),
            run_config=RunConfig(steps=2, storage_path=str(tmp_path / str(number))),
        ).fit()
        losses.append([row["loss"] for row in result.history])
        plan = Plan.from_json((tmp_path / str(number) / "plan.json").read_text())
        assert len(plan.replicas("llm")) == 2
    assert losses[0] == losses[1] and losses[0][0] != losses[0][1]
