"""Estimated surfaces of modules over data-parallel degrees and quotas."""

import math
from dataclasses import replace

import pytest

from raymm.costs.load import Load
from raymm.costs.scaling_estimates import (
    MULTIPROCESSORS,
    SurfaceEstimates,
    batch_workload,
    check_steps,
    edges_of,
    filled_profile,
    local_load,
    measured_factor,
    shapes_of,
    slowed_layers,
)
from raymm.errors import PlanError
from raymm.scheduler.costs.devices import DEVICES, find_device
from raymm.scheduler.costs.layer_costs import CostProfile
from tests.raymm.costs.test_step_flops import described

H100 = find_device("H100")


@pytest.fixture(scope="module")
def shapes():
    return {shape.name: shape for shape in shapes_of(described(vision=True))}


def test_shapes_have_flags_of_training_by_layer(shapes):
    vision, llm = shapes["vision"], shapes["llm"]
    assert vision.trainable == (False, False, True) and vision.before == (False,) * 3
    assert vision.projector is not None and not vision.causal
    assert llm.causal and llm.before == (True,) * 3  # the projector is trained before
    assert edges_of(described(), ["vision", "llm"]) == (("vision", "llm"),)
    assert edges_of(described(), ["llm"]) == ()


def test_frozen_layers_take_no_time_for_gradients(shapes):
    load = Load(4, 4)
    layers = shapes["vision"].layers(load, H100, "bf16")
    assert shapes["vision"].seconds(layers) == pytest.approx(
        math.fsum(layer.forward for layer in layers) + layers[-1].backward_weight
    )


def test_time_falls_with_the_quota_and_the_degree(shapes):
    llm, load = shapes["llm"], Load(8, 512)
    surface = SurfaceEstimates(H100, gpus=4, steps=10).surface(llm, load)
    assert surface.degrees == (1, 2, 4) and surface.quotas == tuple(range(1, 11))
    for row in surface.seconds:
        assert all(b <= a for a, b in zip(row, row[1:], strict=False))
    whole = [row[-1] for row in surface.seconds]
    assert whole[0] > whole[1]
    doubled = SurfaceEstimates(H100, gpus=4, steps=10).surface(llm, load, factor=2.0)
    assert doubled.seconds[0][0] == pytest.approx(2 * surface.seconds[0][0])


def test_cpus_have_one_quota(shapes):
    surface = SurfaceEstimates(find_device("cpu"), gpus=1, steps=10).surface(
        shapes["vision"], Load(2, 4)
    )
    assert surface.quotas == (10,) and surface.degrees == (1,)


def test_small_modules_take_longer_than_their_roofline(shapes):
    load = {"vision": Load(1, 4), "llm": Load(1, 16)}
    layers = {name: shape.layers(load[name], H100, "bf16") for name, shape in shapes.items()}
    profile = CostProfile(layers, "H100", "bf16")
    filled = filled_profile(profile, list(shapes.values()), load, H100)
    for name, shape in shapes.items():
        assert shape.seconds(filled.modules[name]) >= shape.seconds(layers[name])
        assert measured_factor(shape, load[name], filled.modules[name], H100, "bf16") == (
            pytest.approx(1.0)
        )


def test_slowed_layers_scale_all_times_and_no_bytes(shapes):
    (layer, *_) = shapes["llm"].layers(Load(1, 16), H100, "bf16")
    (slower,) = slowed_layers([layer], 3.0)
    assert slower.forward == 3 * layer.forward
    assert slower.backward_weight == 3 * layer.backward_weight
    assert [o.seconds for o in slower.options] == [3 * o.seconds for o in layer.options]
    assert replace(
        slower, forward=layer.forward, backward_input=layer.backward_input,
        backward_weight=layer.backward_weight, options=layer.options,
    ) == layer


def test_parts_of_a_load_are_rounded_up():
    assert local_load(Load(5, 8, 40), 2) == Load(3, 8, 20)
    assert local_load(Load(1, 2), 4) == Load(1, 2)


def test_loads_of_a_batch_default_to_the_configs_tokens(shapes):
    loads = batch_workload(list(shapes.values()), {"llm": 32}, 6)
    assert loads == {"vision": Load(6, 4), "llm": Load(6, 32)}
    with pytest.raises(PlanError, match="tokens name 'audio'; the model's modules are vision, llm"):
        batch_workload(list(shapes.values()), {"audio": 1}, 1)
    with pytest.raises(PlanError, match="tokens of 'llm' are not given"):
        batch_workload(list(shapes.values()), {}, 1)


def test_steps_are_not_below_the_granularity_of_a_device():
    check_steps("H100", 10)
    check_steps("cpu", 10**6)
    with pytest.raises(PlanError, match="steps is 100: .* of the 132 multiprocessors of H100"):
        check_steps("H100", 100)
    assert set(MULTIPROCESSORS) <= set(DEVICES)
