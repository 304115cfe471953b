"""The table of measured costs: lookup, interpolation, JSON, and rejections."""

import copy
import json

import pytest

from raymm.errors import PlanError
from raymm.scheduler.costs.layer_costs import LayerCost
from raymm.scheduler.costs.profile_table import Measurement, ProfileTable
from raymm.scheduler.costs.recomputation import LayerBytes, LayerOption


def cost(scale: float, parameters: int = 100) -> LayerCost:
    """Return costs on a line through zero, except for the parameters."""
    options = (
        LayerOption("all", scale, int(2 * scale), int(6 * scale)),
        LayerOption("matmuls", scale, int(4 * scale)),
    )
    halved = tuple(o._replace(seconds=0.0, nbytes=o.nbytes // 2) for o in options)
    return LayerCost(
        scale, 2 * scale, 3 * scale, int(8 * scale), parameters, int(4 * scale), options=options,
        halved=LayerBytes(int(6 * scale), int(4 * scale), int(2 * scale), halved),
    )


def table() -> ProfileTable:
    return ProfileTable(
        modules={
            "vision": (Measurement(16, 1, (cost(1.0), cost(0.5))),),
            "llm": tuple(
                Measurement(tokens, 2, (cost(scale), cost(2 * scale), cost(3 * scale)))
                for tokens, scale in ((100, 10.0), (200, 30.0), (400, 50.0))
            ),
        },
        default={"vision": 16, "llm": 200},
        device="a device", dtype="bf16", versions={"torch": "2"}, date="2025-01-01T00:00:00+00:00",
    )


def test_the_default_microbatch_is_used_without_lengths():
    profile = table().at()
    assert profile.modules["llm"] == table().modules["llm"][1].layers
    assert profile.tokens == {"vision": 16, "llm": 200}
    assert (profile.device, profile.dtype, profile.source) == ("a device", "bf16", "measured")
    assert profile.versions == {"torch": "2"}


@pytest.mark.parametrize("tokens, scale", [(100, 10.0), (150, 20.0), (250, 35.0), (400, 50.0)])
def test_between_lengths_every_number_is_on_the_line(tokens, scale):
    layers = table().at({"llm": tokens}).modules["llm"]
    assert layers[0] == cost(scale)
    assert layers[2] == cost(3 * scale)


@pytest.mark.parametrize("tokens", [99, 401])
def test_lengths_outside_the_table_are_refused(tokens):
    with pytest.raises(
        PlanError, match=f"tokens of 'llm' is {tokens}, but 100 to 400 were measured"
    ):
        table().at({"llm": tokens})
    with pytest.raises(PlanError, match="tokens of 'vision' is 32, but 16 were measured"):
        table().at({"vision": 32})


def test_extrapolation_continues_the_nearest_line():
    assert table().at({"llm": 600}, extrapolate=True).modules["llm"][0] == cost(70.0)
    # The first line reaches zero at 50 tokens; times stay there, parameters do not change.
    low = table().at({"llm": 40}, extrapolate=True).modules["llm"][0]
    assert (low.forward, low.activation_bytes, low.parameter_bytes) == (0.0, 0, 100)


def test_extrapolation_of_a_single_measurement_is_proportional():
    layer = table().at({"vision": 32}, extrapolate=True).modules["vision"][0]
    assert layer == cost(2.0)


@pytest.mark.parametrize(
    "tokens, message",
    [
        ({"audio": 5}, r"tokens name \['audio'\]; the table has \['llm', 'vision'\]"),
        ({"llm": 0}, "tokens of 'llm' is 0"),
        ({"llm": 150.5}, "tokens of 'llm' is 150.5"),
    ],
)
def test_bad_lengths_are_refused(tokens, message):
    with pytest.raises(PlanError, match=message):
        table().at(tokens, extrapolate=True)


def test_json_round_trip():
    text = table().to_json()
    again = ProfileTable.from_json(text)
    assert again == table()
    assert again.to_json() == text
    assert again.at({"llm": 150}) == table().at({"llm": 150})


LLM = ("modules", "llm", 0)


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("format",), 7, "format is 7; accepted: 1"),
        (("dtype",), "fp16", "dtype is 'fp16'"),
        (("device",), 3, "device is 3; it must be a string"),
        (("default", "llm"), "200", "default.llm is '200'"),
        (("default",), {"llm": 200}, r"default has modules \['llm'\]"),
        (("modules",), [], "modules is a list; it must be an object"),
        (("modules", "llm"), {}, "modules.llm is a dict; it must be a list"),
        (("modules", "llm"), [], "modules.llm is empty"),
        ((*LLM, "tokens"), 200, r"tokens of modules.llm are \[200, 200, 400\]; they must increase"),
        ((*LLM, "tokens"), -1, r"modules.llm\[0\]: tokens is -1"),
        ((*LLM, "samples"), True, r"modules.llm\[0\]: samples is True"),
        ((*LLM, "layers"), [], r"modules.llm\[0\]: layers is empty"),
        ((*LLM, "layers", 1, "forward"), -1.0, r"modules.llm\[0\].layers\[1\]: forward is -1.0"),
        ((*LLM, "layers", 1, "forward"), "1", r"layers\[1\].forward is '1'; it must be a number"),
        ((*LLM, "layers", 1, "output_bytes"), 1.5, "output_bytes is 1.5"),
        ((*LLM, "layers", 1, "speed"), 1.0, r"layers\[1\] has unknown keys \['speed'\]"),
        ((*LLM, "mood"), 1, r"modules.llm\[0\] has unknown keys \['mood'\]"),
        (("mood",), 1, r"the profile has unknown keys \['mood'\]"),
    ],
)
def test_errors_in_a_table_file_are_named(path, value, message):
    data = copy.deepcopy(json.loads(table().to_json()))
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(PlanError, match=message):
        ProfileTable.from_dict(data)


@pytest.mark.parametrize("key", ["format", "modules", "default"])
def test_missing_keys_are_named(key):
    data = table().to_dict()
    del data[key]
    with pytest.raises(PlanError, match=f"the profile lacks the key '{key}'"):
        ProfileTable.from_dict(data)


def test_measurements_with_different_layers_are_refused():
    rows = (Measurement(1, 1, (cost(1.0),)), Measurement(2, 1, (cost(1.0), cost(1.0))))
    with pytest.raises(PlanError, match=r"modules.llm has measurements of \[1, 2\] layers"):
        ProfileTable({"llm": rows}, {"llm": 1})


def test_other_files_are_refused():
    with pytest.raises(PlanError, match="the profile is not JSON"):
        ProfileTable.from_json("F: 3")
    with pytest.raises(PlanError, match="the profile is a list; it must be an object"):
        ProfileTable.from_json("[]")


@pytest.mark.parametrize("tokens, fixed", [(100, None), (200, 1 / 3), (300, 1 / 4)])
def test_fixed_seconds_are_those_of_the_line_at_zero(tokens, fixed):
    profile = table().at({"llm": tokens})
    assert profile.fixed == pytest.approx({} if fixed is None else {"llm": fixed})
