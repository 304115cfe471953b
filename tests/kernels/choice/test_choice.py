"""Choice of the attention kernel: with simulated timings, and for real on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.every_mask import every_pattern
from raymm.kernels.attention import attention
from raymm.kernels.choice import choice
from raymm.kernels.choice.choice import (
    KERNEL_CHOICE,
    REPEATS,
    KernelChoice,
    ShapeClass,
    agreed,
    chosen_attention,
    seconds,
)
from raymm.kernels.flash.cpu.attention import cpu_attention
from raymm.kernels.flash.reference import reference_attention
from raymm.kernels.mask import patterns


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    KERNEL_CHOICE.use("raymm")


def tensors(length=40, heads=(2, 1), dim=16, dtype=torch.float32, grad=False):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(1, count, length, dim, generator=generator).to(dtype).requires_grad_(grad)
        for count in (heads[0], heads[1], heads[1])
    )


def shape_of(length=40, softcap=None, **kinds):
    return ShapeClass.of(*tensors(length, **kinds), (patterns.causal(length),), softcap)


def test_the_faster_one_once_per_shape_class():
    found, asked = KernelChoice(), []

    def taking(name, took):
        def measure():
            asked.append(name)
            return took
        return measure

    slow_flex = {"raymm": taking("raymm", 1.0), "flex": taking("flex", 2.0)}
    fast_flex = {"raymm": taking("raymm", 1.0), "flex": taking("flex", 0.5)}
    one, other = shape_of(40), shape_of(400)
    assert found.fastest(one, slow_flex) == "raymm" and found.fastest(other, fast_flex) == "flex"
    assert asked == ["raymm", "flex"] * 2
    # Neither is measured again, whatever its time now.
    assert found.fastest(one, fast_flex) == "raymm" and found.fastest(other, slow_flex) == "flex"
    assert len(asked) == 4
    same = {name: taking(name, 1.0) for name in ("raymm", "flex")}
    assert found.fastest(shape_of(4000), same) == "raymm"
    found.keep_to(other, "raymm")
    assert found.fastest(other, fast_flex) == "raymm"
    found.use("auto")  # starts from scratch
    assert found.fastest(one, fast_flex) == "flex"


def test_kernels_that_fail_are_excluded():
    def refuses():
        raise ValueError("head dim must be at most 512, got 576")

    found = KernelChoice()
    assert found.fastest(shape_of(40), {"raymm": refuses, "flex": lambda: 9.0}) == "flex"
    assert found.fastest(shape_of(400), {"raymm": lambda: 9.0, "flex": refuses}) == "raymm"
    with pytest.raises(ValueError, match="at most 512, got 576"):
        found.fastest(shape_of(4000), {"raymm": refuses, "flex": refuses})


def test_shape_classes():
    assert shape_of(33) == shape_of(60) != shape_of(64)
    alike = [
        shape_of(40), shape_of(40, 2.0), shape_of(40, dim=32), shape_of(40, heads=(4, 1)),
        shape_of(40, dtype=torch.bfloat16), shape_of(40, grad=True),
    ]
    assert len(set(alike)) == len(alike)
    with torch.no_grad():
        assert shape_of(40, grad=True) == shape_of(40)


@pytest.mark.parametrize("kernels", ["flex", "fastest", ""])
def test_other_kernels_are_refused_by_name(kernels):
    accepted = "raymm, raymm_unordered, auto"
    with pytest.raises(ValueError, match=f"kernels is {kernels!r}; accepted: {accepted}"):
        KERNEL_CHOICE.use(kernels)


def test_a_cpu_measures_nothing(monkeypatch):
    def never(*_):
        raise AssertionError("measured")

    monkeypatch.setattr(choice, "seconds", never)
    mask = patterns.causal(40)
    plain = attention(*tensors(), mask)
    KERNEL_CHOICE.use("auto")
    assert all(torch.equal(a, b) for a, b in zip(plain, attention(*tensors(), mask), strict=True))


def choose(monkeypatch, name, masks, *, softcap=None, grad=False, length=40):
    """Return the kernel of ``auto`` if ``name`` is faster; a CPU's kernel replaces a GPU's."""
    took = iter((1.0, 0.5) if name == "flex" else (0.5, 1.0))
    monkeypatch.setattr(choice, "seconds", lambda *_: next(took))
    KERNEL_CHOICE.use("auto")
    given = tensors(length, grad=grad)
    options = {"scale": 0.3, "softcap": softcap}
    attend = chosen_attention(*given, masks, own=cpu_attention, **options)
    # The second call of the class measures nothing: there are no more timings.
    chosen_attention(*given, masks, own=cpu_attention, **options)
    return attend, given, options


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("pattern", ["causal", "ee", "mp_window", "own_image"])
def test_flex_where_it_is_faster(monkeypatch, pattern, softcap):
    masks = (every_pattern(57)[pattern](),)
    attend, given, options = choose(monkeypatch, "flex", masks, softcap=softcap, length=57)
    assert attend is not cpu_attention
    out, lse = attend(*given, masks, **options)
    exact_out, exact_lse = reference_attention(
        *(t.double() for t in given), masks[0].dense()[None], **options
    )
    torch.testing.assert_close(out.double(), exact_out, atol=2e-6, rtol=0)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=0)
    assert lse.dtype == torch.float32 and not lse.requires_grad


def test_raymm_where_it_is_faster(monkeypatch):
    attend, *_ = choose(monkeypatch, "raymm", (patterns.causal(40),))
    assert attend is cpu_attention


def test_raymm_replaces_flex_after_a_failure(monkeypatch):
    """Use a CPU, which has no backward of FlexAttention, and rejects its forward."""
    masks = (patterns.causal(40),)
    attend, given, options = choose(monkeypatch, "flex", masks, grad=True)
    out, _ = attend(*given, masks, **options)
    torch.testing.assert_close(out, cpu_attention(*given, masks, **options)[0])
    again = chosen_attention(*given, masks, own=cpu_attention, **options)
    assert again is cpu_attention


def test_driven_processes_use_one_choice():
    """Give two processes different timings: neither chooses by its own."""
    shape, timings = shape_of(40), ({"raymm": 1.0, "flex": 0.9}, {"raymm": 1.0, "flex": 3.0})
    ranks = [KernelChoice() for _ in timings]
    for rank, seconds_by_name in zip(ranks, timings, strict=True):
        rank.use("auto", driven=True)
        contenders = {name: lambda took=took: took for name, took in seconds_by_name.items()}
        assert rank.fastest(shape, contenders) == "raymm", "used another before the choice"
    measured = [rank.new_seconds() for rank in ranks]
    assert measured == [{shape.key: each} for each in timings]
    assert [rank.new_seconds() for rank in ranks] == [{}, {}], "reported twice"
    assert agreed(measured, {}) == {shape.key: "raymm"}
    assert agreed(measured[:1], {}) == {shape.key: "flex"}
    assert agreed(measured, {shape.key: "flex"}) == {}, "an earlier choice was changed"
    for rank in ranks:
        rank.decide({shape.key: "flex"})
        assert rank.fastest(shape, {}) == "flex"
    # A kernel that fails on one process is not chosen for all.
    failed = [{"a": {"raymm": 2.0}}, {"a": {"raymm": 2.0, "flex": 0.1}}]
    assert agreed(failed, {}) == {"a": "raymm"}


def test_a_resumed_process_uses_the_stored_choice(monkeypatch, caplog):
    def never(*_):
        raise AssertionError("measured")

    monkeypatch.setattr(choice, "seconds", never)
    KERNEL_CHOICE.use("auto", driven=True)
    given, masks = tensors(), (patterns.causal(40),)
    shape = ShapeClass.of(*given, masks, None, lse=False)
    KERNEL_CHOICE.decide({shape.key: "sdpa"})
    options = {"scale": None, "softcap": None}
    attend = chosen_attention(*given, masks, own=cpu_attention, lse=False, **options)
    assert attend is not cpu_attention
    # A kernel of another release: raymm's computes the class, also after the next step's choice.
    for _ in range(2):
        KERNEL_CHOICE.decide({shape.key: "flash9"})
        attend = chosen_attention(*given, masks, own=cpu_attention, lse=False, **options)
        assert attend is cpu_attention
    assert caplog.text.count("unknown kernel, flash9") == 1


def test_measuring_leaves_recomputation_alone():
    """Measure in the first forward only, because recomputation counts saved tensors."""
    masks, calls = (patterns.causal(40),), []

    def timed(*given):
        def attend(*leaves):
            calls.append(all(t.requires_grad for t in leaves))
            return cpu_attention(*leaves, masks)[0]

        if not calls:
            assert seconds(attend, given, backward=True) > 0
        return cpu_attention(*given, masks)[0]

    given = tensors(grad=True)
    out = checkpoint(timed, *given, use_reentrant=False)
    out.sum().backward()
    assert calls == [True] * (REPEATS + 2)
    found = [t.grad for t in given]
    plain = tensors(grad=True)
    cpu_attention(*plain, masks)[0].sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(found, plain, strict=True))
