"""Colours of modules: fixed by their names, and different for each."""

import itertools

import pytest
from matplotlib.colors import to_rgb

from raymm.draw.palette import HUES, TEXT, USUAL, ink_on, module_hues, op_looks, shade, tint
from raymm.scheduler.program.program import Op


def test_a_module_keeps_its_colour():
    every = module_hues(["vision", "llm", "audio"])
    assert all(every[name] == to_rgb(USUAL[name]) for name in every)
    assert module_hues(["vision"])["vision"] == every["vision"]
    assert len(set(module_hues([f"m{i}" for i in range(6)] + ["llm", "vision"]).values())) == 8


def test_colours_depend_on_the_set_of_names_alone():
    orders = itertools.permutations(["a", "b", "llm", "a"])
    assert len({tuple(sorted(module_hues(order).items())) for order in orders}) == 1
    assert len(module_hues(f"m{i}" for i in range(3 * len(HUES)))) == 3 * len(HUES)
    assert module_hues([]) == {}


def test_tints_end_in_white_and_shades_in_black():
    hue = to_rgb(HUES[0])
    assert tint(hue, 0) == shade(hue, 0) == hue
    assert tint(hue, 1) == pytest.approx((1, 1, 1)) and shade(hue, 1) == (0, 0, 0)
    assert tint((0.0, 0.5, 1.0), 0.5) == (0.5, 0.75, 1.0)


def test_ink_contrasts_with_the_colour():
    assert ink_on((1, 1, 1)) == TEXT and ink_on((0, 0, 0)) == "white"
    assert ink_on((0, 1, 0)) == TEXT and ink_on((0, 0, 1)) == "white"  # green looks lighter


def test_ops_of_a_module_differ_in_lightness():
    looks = op_looks(to_rgb(HUES[1]))
    order = (Op.FORWARD_NO_GRAD, Op.FORWARD_CHECKPOINTED, Op.FORWARD, Op.BACKWARD_INPUT,
             Op.BACKWARD, Op.BACKWARD_WEIGHT)
    lightness = [sum(looks[op].fill) for op in order]
    assert lightness == sorted(lightness, reverse=True) and len(set(lightness)) == len(order)
    assert looks[Op.RECOMPUTE].hatch
