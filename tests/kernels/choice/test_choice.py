"""Choice of the attention kernel: with simulated timings, and for real on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.every_mask import every_pattern
from raymm.kernels.attention import attention
from raymm.kernels.choice import choice, flex, library
from raymm.kernels.choice.choice import (
    KERNEL_CHOICE,
    REPEATS,
    KernelChoice,
    ShapeClass,
    agreed,
    chosen_attention,
    seconds,
)
from raymm.kernels.choice.flex import flex_attention, padded_length
from raymm.kernels.choice.library import (
    library_kernels,
    plain_form,
    sdpa_attention,
    varlen_attention,
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


PLAIN = {
    "full": patterns.full(57), "causal": patterns.causal(57),
    "causal_window": patterns.causal(57, 5),
    "causal_documents": patterns.documents([20, 30, 7]),
    "full_documents": patterns.documents([20, 30, 7], causal=False),
    "causal_documents_window": patterns.documents([20, 30, 7]).windowed(9),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_masks_are_recognized(name):
    mask = PLAIN[name]
    form = plain_form(mask)
    assert form is not None and form.name == name
    lengths = (20, 30, 7) if "documents" in name else (57,)
    assert form.lengths == lengths and form.causal == name.startswith("causal")
    assert form.window == {"causal_window": 5, "causal_documents_window": 9}.get(name)


def test_other_masks_are_not_plain():
    plain = {key for key, make in every_pattern(57).items() if plain_form(make()) is not None}
    for key in plain:
        form, mask = plain_form(every_pattern(57)[key]()), every_pattern(57)[key]()
        rebuilt = patterns.documents(form.lengths, causal=form.causal)
        rebuilt = rebuilt if form.window is None else rebuilt.windowed(form.window)
        assert torch.equal(rebuilt.dense(), mask.dense()), key
    assert "causal" in plain and not {"ee", "mp_window", "own_image"} & plain
    assert plain_form(patterns.full(5, 7)) is None


def varlen_by_sdpa(
    query, key, value, ends, key_ends, longest, longest_key, *, scale, window_size, enable_gqa
):
    """Compute torch's ``varlen_attn``, which CPUs lack, document by document."""
    assert torch.equal(ends, key_ends) and longest == longest_key == int(ends.diff().max())
    outputs = []
    for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        row, column = torch.arange(stop - start)[:, None], torch.arange(stop - start)
        left, right = window_size
        visible = torch.ones(len(row), len(row), dtype=torch.bool)
        visible &= (column >= row - left) if left >= 0 else True
        visible &= (column <= row + right) if right >= 0 else True
        document = (t[start:stop].transpose(0, 1)[None] for t in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            *document, attn_mask=visible, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("kernel, name", [
    ("sdpa", "full"), ("sdpa", "causal"), *(("varlen", name) for name in PLAIN)
])  # fmt: skip
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_kernels_of_libraries_equal_raymms(monkeypatch, kernel, name, dtype, bound):
    """Compare outputs and gradients; in bf16 with fp32 of the same inputs."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_sdpa)
    monkeypatch.setattr(library, "_activate_newest", lambda: None)
    other = PLAIN[name]
    if "documents" in name:  # other documents in the second row
        other = patterns.documents([50, 7], causal=name.startswith("causal"))
        other = other.windowed(9) if "window" in name else other
    batch = (PLAIN[name], other)
    assert kernel in library_kernels(batch, None)
    given = [torch.cat([t, t.flip(2)]).to(dtype) for t in tensors(57)]
    attend = {"sdpa": sdpa_attention, "varlen": varlen_attention}[kernel]

    def outcome(attend, inputs):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        out = attend(*leaves, batch, scale=0.3, softcap=None)[0]
        weights = torch.arange(out.numel(), dtype=torch.float32).sin().view(out.shape)
        return [out, *torch.autograd.grad(out, leaves, weights.to(out.dtype))]

    expected = outcome(cpu_attention, [t.float() for t in given])
    for found, exact in zip(outcome(attend, given), expected, strict=True):
        assert found.dtype == dtype
        assert float((found.float() - exact).norm() / exact.norm()) < bound


def test_library_kernels_are_refused_where_they_compute_something_else():
    plain, packed = patterns.causal(40), patterns.documents([20, 20])
    assert list(library_kernels((plain, plain), None)) == ["sdpa", "varlen"]
    assert list(library_kernels((plain, packed), None)) == ["varlen"]
    assert not library_kernels((plain,), 2.0)
    assert not library_kernels((plain, patterns.full(40)), None)
    with pytest.raises(ValueError, match="expected full or causal masks, got causal_documents"):
        sdpa_attention(*tensors(), (packed,))
    with pytest.raises(ValueError, match="no softcap"):
        varlen_attention(*tensors(), (plain,), softcap=2.0)


def test_flex_gets_few_lengths(monkeypatch):
    """Count the shapes that would be compiled for 200 lengths; outputs keep their lengths."""
    shapes, real = set(), flex._function("cpu")

    def seen(query, key, value, **options):
        shapes.add((query.shape, key.shape))
        return real(query, key, value, **options)

    monkeypatch.setattr(flex, "_function", lambda device: seen)
    for length in (1, 100, 128, 129, 200, 300, 383):
        given, mask = tensors(length), patterns.causal(length)
        out, lse = flex_attention(*given, (mask,))
        expected = cpu_attention(*given, (mask,))
        torch.testing.assert_close(out, expected[0], atol=2e-6, rtol=0)
        torch.testing.assert_close(lse, expected[1], atol=1e-5, rtol=0)
    assert len(shapes) == 3
    classes = {padded_length(length) for length in range(4097, 65537)}
    assert len(classes) == 16 and all(size % 128 == 0 for size in classes)
    assert all(length <= padded_length(length) <= max(1.25 * length, 128 + length)
               for length in range(1, 9000))


def test_rows_that_see_nothing_by_flex():
    mask = every_pattern(57)["own_image"]().select_keys([(0, 7)])
    query, key, value = tensors(57)
    given = query, key[:, :, :7], value[:, :, :7]
    out, lse = flex_attention(*given, (mask,))
    expected = cpu_attention(*given, (mask,))
    torch.testing.assert_close(out, expected[0], atol=2e-6, rtol=0)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(expected[1]))


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
