"""Picture of a profile."""

import pytest
from PIL import Image

from raymm.draw.profile import draw_profile
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost


def profile(llm: int, vision: int) -> CostProfile:
    layers = {"vision": LayerCost(1e-3, 1e-3, 2e-3), "llm": LayerCost(3e-3, 3e-3, 0)}
    return CostProfile(
        {"vision": (layers["vision"],) * vision, "llm": (layers["llm"],) * llm},
        "a device", "bf16", "measured", {"llm": 99},
    )


def size(path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


def test_more_layers_make_a_wider_picture_up_to_a_limit(tmp_path):
    widths = []
    for layers in (2, 24, 300, 600):
        path = draw_profile(profile(layers, 3), tmp_path / f"{layers}.png", projectors=["vision"])
        widths.append(size(path)[0])
    assert widths[0] < widths[1] < widths[2]
    assert widths[3] < 3000


def test_equal_profiles_give_equal_bytes(tmp_path):
    one = draw_profile(profile(4, 3), tmp_path / "one.png").read_bytes()
    assert draw_profile(profile(4, 3), tmp_path / "two.png").read_bytes() == one
    labelled = draw_profile(profile(4, 3), tmp_path / "p.png", projectors=["vision"])
    assert labelled.read_bytes() != one


def test_the_profile_picture_has_labels(tmp_path):
    text = draw_profile(profile(4, 3), tmp_path / "p.svg", title="mine").read_text()
    assert "<svg" in text
    for comment in ("mine", "llm, 99 tokens", "B_w: gradient of the weights"):
        assert f"<!-- {comment} -->" in text


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must end in .png or .svg"):
        draw_profile(profile(1, 1), tmp_path / "p.jpg")
