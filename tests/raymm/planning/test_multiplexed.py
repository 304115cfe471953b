"""``raymm.plan_multiplexed``: estimated surfaces, mappings, rejections, views, comparisons."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, SiglipVisionConfig

import raymm
from benchmarks.baselines.mappings import distmm, megatron
from raymm.config.planning_options import MULTIPLEXED
from raymm.costs.analytic import analytic_profile
from raymm.costs.load import Load
from raymm.costs.scaling_estimates import (
    BANDWIDTH_SHARES,
    TILE,
    SurfaceEstimates,
    filled_profile,
    shapes_of,
)
from raymm.errors import NoPlanError, PlanError
from raymm.model.contrastive import ContrastiveLoss
from raymm.model.dag_module import DagLoss, DagModule, every
from raymm.model.modality_module import ModalityModule
from raymm.model.module_dag import ModuleDag
from raymm.model.multimodal import MultimodalModule, module_graph
from raymm.planning.inputs import PlanInputs
from raymm.planning.multiplexed import gpus_text
from raymm.planning.request import PlanRequest, Workload
from raymm.planning.styles import (
    compare_styles,
    plan_step_multiplexed,
    step_plan,
    with_ranks_of,
)
from raymm.runtime.specs import MultimodalParallelSpec
from raymm.scheduler.costs.devices import Link, Links, find_device
from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost, layer_work
from raymm.scheduler.costs.surface import (
    ScalingSurface,
    SurfaceConditions,
    conditions_from_json,
    surfaces_to_json,
)
from raymm.scheduler.multiplex.iteration_memory import iteration_memory
from raymm.scheduler.multiplex.mapping import (
    module_seconds,
)
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.memory import GIB, rank_memory
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.schedule.process_costs import all_reduce_seconds
from raymm.scheduler.search.evaluation import evaluate, step_timeline

H100 = find_device("H100")


def vlm(width: int = 256, frozen: bool = True) -> MultimodalModule:
    llama = LlamaConfig(
        hidden_size=2 * width, intermediate_size=4 * width, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
    )
    siglip = SiglipVisionConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=3,
        num_attention_heads=4, image_size=32, patch_size=4,
    )
    return MultimodalModule(
        {"vision": ModalityModule(siglip, "mlp", frozen=frozen)},
        ModalityModule(llama, frozen=False),
    )


class Layer(nn.Linear):
    """Tower of one matrix."""


def towers(**widths: int) -> ModuleDag:
    with torch.device("meta"):
        made = {n: nn.Sequential(Layer(w, w), Layer(w, w)) for n, w in widths.items()}
    nodes = {name: DagModule(module, reads={"x": name}) for name, module in made.items()}
    first, *others = widths
    for other in others:
        nodes[f"pair_{other}"] = DagLoss(
            ContrastiveLoss(), inputs={"first": every(first), "second": every(other)}
        )
    return ModuleDag(nodes)


def surface(name, seconds=0.1, memory=10**9, steps=10, bandwidth=0.5) -> ScalingSurface:
    """Return a surface with ideal scaling in degree and quota."""
    quotas = tuple(range(1, steps + 1))
    return ScalingSurface(
        name, (1, 2), quotas, steps,
        tuple(tuple(seconds / d * steps / q for q in quotas) for d in (1, 2)), (memory, memory),
        tuple(bandwidth * q / steps for q in quotas),
    )


def test_full_device_times_equal_the_analytic_profile():
    model = vlm()
    loads = {"vision": Load(64, 640), "llm": Load(64, 1024, 64 * 500)}
    profile = analytic_profile(model, loads, H100, "bf16")
    work = layer_work(module_graph(model), profile)
    for shape in shapes_of(model):
        load = loads[shape.name]
        assert shape.tiles(load) > 132
        found = SurfaceEstimates(H100, gpus=1, steps=10).surface(shape, load)
        wanted = sum(layer.total for layer in work[shape.name])
        assert found.seconds_at(1, 10) == pytest.approx(wanted, rel=1e-9)
    # The pipelined planner's costs are then those of the profile.
    same = filled_profile(profile, shapes_of(model), loads, H100)
    for name, layers in profile.modules.items():
        for a, b in zip(layers, same.modules[name], strict=True):
            assert b.forward == pytest.approx(a.forward, rel=1e-9)
            assert b.backward_weight == pytest.approx(a.backward_weight, rel=1e-9)


def test_small_modules_use_one_multiprocessor_per_tile():
    dag = towers(a=1024, b=1024)
    shape = shapes_of(dag)[0]
    tokens = 4 * TILE
    assert shape.tiles(Load(1, tokens)) == 4 * 1024 / TILE  # 32 of 132 multiprocessors
    slow = replace(H100, flops={"bf16": 1e9})  # arithmetic alone
    found = SurfaceEstimates(slow, gpus=1, steps=10).surface(shape, Load(1, tokens))
    times = [found.seconds_at(1, quota) for quota in range(1, 11)]
    assert times[0] > 1.5 * times[1] > times[2]
    assert times[2] == pytest.approx(times[9], rel=1e-6)  # 0.3 is more than 32 / 132
    # So does a pipeline's stage: 132 / 32 times as long.
    profile = CostProfile({"a": shape.layers(Load(1, tokens), slow, "bf16")}, "H100", "bf16")
    filled = filled_profile(profile, [shape], {"a": Load(1, tokens)}, slow)
    slower = filled.modules["a"][0].forward / profile.modules["a"][0].forward
    assert slower == pytest.approx(132 / 32, rel=1e-3)


def test_gradients_of_trained_replicas_are_summed():
    link = Link(1e-3, 1e9)
    links = Links(link, link, 8)
    for shape in shapes_of(vlm()):
        load = Load(16, 64)
        free = SurfaceEstimates(H100, gpus=4, steps=10).surface(shape, load)
        summed = SurfaceEstimates(H100, gpus=4, steps=10, links=links).surface(shape, load)
        layers = shape.layers(load, H100, "bf16")
        trained = sum(
            c.parameter_bytes for c, t in zip(layers, shape.trainable, strict=True) if t
        )
        assert 0 < trained
        for degree in (1, 2, 4):
            more = summed.seconds_at(degree, 5) - free.seconds_at(degree, 5)
            assert more == pytest.approx(all_reduce_seconds(trained, degree, link), abs=1e-12)
        assert summed.bandwidth == free.bandwidth


def test_replicas_are_limited_by_samples():
    shape = shapes_of(vlm())[1]
    found = SurfaceEstimates(H100, gpus=16, steps=10).surface(shape, Load(6, 64))
    assert found.degrees == (1, 2, 4)
    assert found.memory_bytes[0] > found.memory_bytes[1] > found.memory_bytes[2]


def test_no_baseline_mapping_of_towers_is_faster():
    dag = towers(a=4096, b=1024, c=512)
    planned = raymm.plan_multiplexed(
        dag, gpus=4, device="H100", batch=32, tokens={"a": 256, "b": 128, "c": 128}
    )
    planned.mapping.check(planned.problem)
    assert {p.module for s in planned.mapping.stages for p in s.placements} == {"a", "b", "c"}
    assert planned.estimated and "not measured" in planned.source
    assert planned.problem.interference == BANDWIDTH_SHARES
    for baseline in (megatron, distmm):  # Spindle's slices are not part of the search
        other = baseline(planned.problem)
        other.check(planned.problem)
        assert other.seconds >= planned.seconds * (1 - 1e-9)
    text = planned.explain()
    for part in ("dynamic programming", "bandwidth", "not measured", "32 samples"):
        assert part in text


def test_encoders_come_before_the_language_model():
    planned = raymm.plan_multiplexed(
        vlm(), gpus=2, device="H100", batch=8, tokens={"llm": 256}
    )
    assert planned.problem.edges == (("vision", "llm"),)
    order = [p.module for s in planned.mapping.stages for p in s.placements]
    assert order == ["vision", "llm"]


def test_surfaces_of_a_file_and_interference_of_a_file(tmp_path):
    dag = towers(a=64, b=64)
    file, other = tmp_path / "surfaces.json", tmp_path / "interference.json"
    file.write_text(surfaces_to_json([surface("b"), surface("a", 0.2)]))
    known = Interference(constant=0.5, product=0.25)
    other.write_text(known.to_json())
    planned = raymm.plan_multiplexed(dag, gpus=2, surfaces=file, interference=str(other))
    assert planned.problem.names == ("a", "b") and not planned.estimated
    assert planned.problem.interference == known and "e1 0.5" in planned.explain()
    assert planned.problem.memory_bytes is None and planned.batch is None
    # With this much interference modules alternate or have separate GPUs.
    for stage in planned.mapping.stages:
        gpus = [g for p in stage.placements for g in p.gpus]
        assert len(gpus) == len(set(gpus))
    blind = raymm.plan_multiplexed(dag, gpus=2, surfaces=file, interference="blind")
    assert blind.problem.interference.blind and "blind" in blind.explain()
    assert blind.seconds == pytest.approx(0.15)  # 0.3 GPU seconds on two GPUs


def test_missing_quotas_or_bandwidth_are_reported():
    dag = towers(a=64, b=64)
    whole = [ScalingSurface(n, (1,), (10,), 10, ((0.1,),), (0,), (0.0,)) for n in ("a", "b")]
    planned = raymm.plan_multiplexed(dag, gpus=2, surfaces=whole)
    assert "no quotas below a full device" in planned.explain()
    assert "blind: the surfaces have no bandwidth data" in planned.explain()
    cpu = raymm.plan_multiplexed(dag, gpus=2, batch=4, tokens={"a": 8, "b": 8})
    assert all(s.quotas == (10,) for s in cpu.problem.surfaces)
    assert "one CPU core" in cpu.explain() and "no quotas" in cpu.explain()


def test_a_module_that_fits_nowhere_is_refused_with_numbers():
    dag = towers(a=64, b=64)
    given = [surface("a"), surface("b", memory=3 * 2**30)]
    with pytest.raises(NoPlanError, match=r"'b' fits on no GPU.* 3\.00 GiB .*2\.00 GiB"):
        raymm.plan_multiplexed(dag, gpus=2, surfaces=given, memory_gib=2)


def test_memory_holds_over_the_whole_iteration():
    """Use modules that each fit, but whose weights and activations stay until the backward."""
    dag = towers(a=64, b=64)
    given = [surface("a", memory=2 * 2**30), surface("b", memory=2 * 2**30)]
    tight = raymm.plan_multiplexed(dag, gpus=1, surfaces=given, memory_gib=3)
    assert iteration_memory(tight.problem, tight.mapping) == (4 * 2**30,)
    assert "4.00 GiB over an iteration" in tight.unfit and "does not fit" in tight.explain()
    # On two GPUs they can be separate; the fastest mapping, both everywhere, is not possible.
    apart = raymm.plan_multiplexed(dag, gpus=2, surfaces=given, memory_gib=3)
    assert apart.unfit is None and max(apart.memory) <= 3 * 2**30
    roomy = raymm.plan_multiplexed(dag, gpus=2, surfaces=given, memory_gib=5)
    assert roomy.unfit is None and roomy.seconds <= apart.seconds


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"steps": 17}, PlanError, r"steps is 17.* 132 multiprocessors.* 1 to 16"),
        ({"gpus": 0}, PlanError, "gpus"),
        ({"batch": None}, PlanError, "batch is not given"),
        ({"tokens": {"a": 4}}, PlanError, "tokens of 'b' are not given"),
        ({"tokens": {"z": 4}}, PlanError, "'?z'?"),
        ({"interference": "none.json"}, PlanError, "accepted: bandwidth, blind, or a file"),
        ({"surfaces": "none.json"}, PlanError, "no such file"),
        ({"surfaces": [surface("a")]}, PlanError, r"surfaces are of \['a'\]"),
        ({"memory_gib": 0}, PlanError, "memory_gib is 0"),
        ({"memory_gib": float("inf")}, PlanError, "memory_gib is inf"),
        ({"strategy": "best"}, PlanError, "strategy"),
    ],
)
def test_refusals(arguments, error, text):
    defaults = dict(gpus=2, device="H100", batch=4, tokens={"a": 4, "b": 4})
    with pytest.raises(error, match=text):
        raymm.plan_multiplexed(towers(a=64, b=64), **{**defaults, **arguments})


def inputs_of(model, request, microbatches, samples, dtype="bf16") -> PlanInputs:
    """Return the inputs for a step of so many microbatches."""
    return PlanInputs.of(model, request, Workload(microbatches, samples, dtype=dtype))


def test_rows_table_and_html():
    dag = towers(a=64, b=64)
    planned = raymm.plan_multiplexed(dag, gpus=2, surfaces=[surface("a"), surface("b", 0.05)])
    rows = planned.rows()
    placements = [p for s in planned.mapping.stages for p in s.placements]
    assert [row["module"] for row in rows] == [p.module for p in placements]
    assert [row["quota"] for row in rows] == [f"{p.quota / 10:.0%}" for p in placements]
    times = [
        t for s in planned.mapping.stages for t in module_seconds(planned.problem, s.placements)
    ]
    for row, seconds in zip(rows, times, strict=True):
        assert float(row["ms"].replace(",", "")) == pytest.approx(1e3 * seconds, rel=0.01)
        assert row["GiB"] == "0.93"
    html = planned._repr_html_()
    assert html.count("<tr>") == 1 + len(rows) and "found by auto" in html
    assert planned.table().row_count == len(rows)
    assert [gpus_text(g) for g in ((0,), (0, 1, 2, 3), (0, 2))] == ["0", "0-3", "0,2"]


def test_styles_are_compared_by_the_same_costs():
    model = vlm()
    request = PlanRequest(ranks=2, device="H100", tokens={"vision": 64, "llm": 512},
                          schedules=("1f1b",), degrees="none")  # fmt: skip
    found = compare_styles(inputs_of(model, request, 4, 8))
    assert (found.batch, found.microbatches) == (32, 4)
    both = found.seconds
    assert both == {"pipelined": found.pipelined.seconds, "multiplexed": found.multiplexed.seconds}
    assert found.style == min(both, key=both.get)
    ratio = max(both.values()) / min(both.values())
    assert f"{found.style} is predicted to be {ratio:.2f} times as fast" in found.explain()
    assert found.multiplexed.batch == 32
    # On one GPU with one microbatch there is no sharing: both take the sum of all layers.
    alone = compare_styles(inputs_of(model, replace(request, ranks=1), 1, 8)).seconds
    assert alone["pipelined"] == pytest.approx(alone["multiplexed"], rel=1e-6)


def test_pipelines_are_evaluated_by_surfaces_too():
    model = vlm()
    given = (surface("vision", 0.3), surface("llm", 0.5))
    request = PlanRequest(ranks=1, tokens={"vision": 64, "llm": 512}, schedules=("1f1b",),
                          surfaces=given)  # fmt: skip
    found = compare_styles(inputs_of(model, request, 1, 8, "fp32"))
    assert found.seconds["pipelined"] == pytest.approx(0.8)
    assert found.seconds["multiplexed"] == pytest.approx(0.8)


@pytest.mark.parametrize(("changes", "text"), [
    ({"samples": 16}, "batch is 16, but the surfaces were measured with 8"),
    ({"dtype": "bf16"}, "precision is 'bf16', but the surfaces were measured with 'fp32'"),
    ({"tokens": {"llm": 100_000}}, "tokens.llm is 100000, but the surfaces .* with 512"),
    ({"device": "A100-80GB"}, "device is 'A100-80GB', but .* on 'NVIDIA H100 80GB HBM3'"),
])  # fmt: skip
def test_foreign_surfaces_are_refused_by_field(tmp_path, changes, text):
    """Reject them, because the wrong style would seem faster."""
    conditions = SurfaceConditions(
        8, "NVIDIA H100 80GB HBM3", "fp32", {"vision": 64, "llm": 512}
    )
    file = tmp_path / "surfaces.json"
    file.write_text(surfaces_to_json([surface("vision"), surface("llm", 0.2)], conditions))
    model = vlm()

    def planned(plan, samples=8, dtype="fp32", **asked):
        asked = {"ranks": 1, "device": "H100", "tokens": {"vision": 64, "llm": 512}, **asked}
        request = PlanRequest(**asked, schedules=("1f1b",), degrees="none", surfaces=file)
        return plan(PlanInputs.of(model, request, Workload(1, samples, 512, dtype=dtype)))

    found = planned(plan_step_multiplexed)
    assert found.batch == 8 and not any("not record" in note for note in found.notes)
    for plan in (plan_step_multiplexed, compare_styles):
        with pytest.raises(PlanError, match=text):
            planned(plan, **changes)


def test_lengths_with_surfaces_of_unknown_length_are_refused():
    given = [surface("a"), surface("b")]
    with pytest.raises(PlanError, match="tokens is {'a': 4}, but the given surfaces"):
        raymm.plan_multiplexed(towers(a=64, b=64), gpus=2, surfaces=given, tokens={"a": 4})


@pytest.mark.parametrize(("field", "value", "text"), [
    ("batch", 0, "measured.batch is 0"), ("device", "", "measured.device is ''"),
    ("tokens", [], r"measured.tokens is \[\]"), ("tokens", {"a": 1.5}, "measured.tokens.a is 1.5"),
    ("extra", 1, r"measured has unknown fields \['extra'\]"),
])  # fmt: skip
def test_conditions_of_measured_surfaces_are_checked(field, value, text):
    source = surfaces_to_json([surface("a")], SurfaceConditions(8, "cpu", "fp32", {"a": 4}))
    assert conditions_from_json(source).batch == 8
    assert conditions_from_json(surfaces_to_json([surface("a")])) is None
    data = json.loads(source)
    data["measured"][field] = value
    with pytest.raises(PlanError, match=text):
        conditions_from_json(json.dumps(data))


def test_surfaces_without_one_whole_device_refuse_pipelines_only():
    """Use a language model that needs two devices."""
    alone = surface("llm", 0.2)
    two = replace(alone, degrees=(2,), seconds=alone.seconds[1:], memory_bytes=(10**9,))
    request = PlanRequest(ranks=2, tokens={"vision": 64, "llm": 512}, schedules=("1f1b",),
                          surfaces=(surface("vision"), two))  # fmt: skip
    found = compare_styles(inputs_of(vlm(), request, 1, 8, "fp32"))
    assert found.style == "multiplexed" and found.pipelined is None
    assert "pipelined does not run: surfaces of 'llm' lack one full device" in found.explain()


def test_a_given_plan_is_compared_under_its_own_settings():
    model, options = vlm(), {"device": "H100", "tokens": {"vision": 64, "llm": 512}}
    given = MultimodalParallelSpec(num_microbatches=2).plan(model)
    ranks = given.num_ranks
    request = with_ranks_of(given, PlanRequest(**options))
    found = compare_styles(inputs_of(model, request, 2, 4), given)
    assert found.multiplexed.mapping.gpus == ranks == 2
    with pytest.raises(PlanError, match="ranks is 8, but the given plan"):
        with_ranks_of(given, PlanRequest(ranks=8, **options))
    with pytest.raises(PlanError, match="microbatches is 4; the given plan has 2"):
        compare_styles(inputs_of(model, request, 4, 4), given)


def test_a_style_that_does_not_fit_loses():
    request = PlanRequest(ranks=2, device="H100", tokens={"vision": 64, "llm": 512},
                          schedules=("1f1b",), memory_gib=0.05)  # fmt: skip
    found = compare_styles(inputs_of(vlm(), request, 8, 4))
    assert "multiplexed" in found.refused and found.style != "multiplexed"
    assert "multiplexed does not run: module 'llm' fits on no GPU" in found.explain()


def assert_within(plan: Plan, limit: int) -> None:
    """Check the memory of all plans, including messages and the system."""
    needs = rank_memory(plan, full_program(plan))
    assert max(need.total for need in needs) <= limit
    assert plan.memory_limit in (None, limit)


@pytest.mark.cells(1)
@pytest.mark.parametrize(("ranks", "frozen"), [(1, True), (2, False)])
def test_every_style_returns_plans_within_the_limit(ranks, frozen):
    """Use limits near the fastest mapping's need: slightly below, another one or none runs."""
    request = PlanRequest(ranks=ranks, device="H100", tokens={"vision": 64, "llm": 512},
                          schedules=("1f1b",), degrees="none")  # fmt: skip
    model = vlm(frozen=frozen)
    free = compare_styles(inputs_of(model, request, 4, 8))
    most = max(free.multiplexed.memory)
    refused = 0
    for share in (1.0, 0.999, 0.9, 0.2):
        inputs = inputs_of(model, replace(request, memory_gib=share * most / GIB), 4, 8)
        with suppress(NoPlanError):
            mapped = plan_step_multiplexed(inputs)
            if mapped.unfit is None:
                assert max(mapped.memory) <= inputs.memory_limit
                assert_within(step_plan(inputs, mapped), inputs.memory_limit)
        found = compare_styles(inputs)
        for option in found.between.starts.values() if found.between else ():
            assert_within(option.plan, inputs.memory_limit)
        if found.chosen is not None:
            assert_within(found.chosen, inputs.memory_limit)
        refused += MULTIPLEXED in found.refused
    assert 0 < refused < 4


@pytest.mark.cells(2)
@pytest.mark.parametrize(("ranks", "memory"), [(2, None), (4, None), (3, 3.0)])
def test_plans_between_styles_are_not_slower_than_either(ranks, memory):
    """Check that the plan's file contains the predictions used by the search."""
    request = PlanRequest(ranks=ranks, device="H100", tokens={"vision": 64, "llm": 512},
                          degrees="none", memory_gib=memory)  # fmt: skip
    found = compare_styles(inputs_of(vlm(), request, 4, 8))
    best = found.between.best
    assert all(best.seconds <= option.seconds for option in found.between.starts.values())
    assert set(found.between.starts) == set(found.seconds)
    again = Plan.from_json(found.chosen.to_json())
    network = found.pipelined.network
    assert evaluate(again, network)[0].seconds == pytest.approx(best.seconds)
    text = found.explain()
    assert "auto: " in text and "\nvision: " in text and "\nllm: " in text
    if "multiplexed" in found.seconds:
        # Without messages the mapping's plan takes the time of its surfaces.
        option = found.between.starts["multiplexed"]
        bare = step_timeline(option.plan, Network()).makespan
        assert bare == pytest.approx(found.multiplexed.seconds, rel=1e-6)


def test_measured_layers_scale_the_estimates():
    """Use a profile with three times the estimate of a module, which triples its surfaces."""
    from raymm.costs.scaling_estimates import edges_of, local_load
    from raymm.planning.mapping_inputs import MappedBatch, mapping_inputs

    model = vlm()
    shapes = shapes_of(model)
    micro = {"vision": Load(8, 640), "llm": Load(8, 1024)}
    whole = {name: local_load(replace(load, samples=32), 1) for name, load in micro.items()}
    profile = filled_profile(analytic_profile(model, micro, H100), shapes, micro, H100)

    def slower(cost: LayerCost) -> LayerCost:
        return replace(cost, forward=3 * cost.forward, backward_input=3 * cost.backward_input,
                       backward_weight=3 * cost.backward_weight)  # fmt: skip

    measured = replace(profile, source="measured", modules={
        name: tuple(map(slower, layers)) for name, layers in profile.modules.items()
    })
    edges = edges_of(model, [shape.name for shape in shapes])
    plain, scaled = (
        raymm.PlannedMultiplexed.of(mapping_inputs(
            shapes, edges, PlanRequest(ranks=1), MappedBatch(loads=whole, measured=known), H100
        ))
        for known in (None, (measured, micro))
    )
    assert scaled.seconds == pytest.approx(3 * plain.seconds)
    assert "scaled to layers measured on H100" in scaled.explain()
