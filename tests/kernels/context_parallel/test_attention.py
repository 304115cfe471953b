"""Attention of sharded tokens equals one process, for any distribution."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.every_mask import every_pattern
from raymm.errors import ModelError
from raymm.kernels.attention import attention
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.attention import (
    context_attention,
    recomputed_context_attention,
)
from raymm.kernels.context_parallel.call import ContextCall, ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout, join_ranges, needed_keys
from raymm.kernels.context_parallel.methods import METHODS
from raymm.kernels.flash.reference import reference_attention
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.patterns import causal, documents, full
from tests.support.rank_processes import rank_processes

TOLERANCE = 1e-5
D = 8
SELF = [name for name in every_pattern(100) if not name.startswith("cross")]
CROSS = ["cross", "cross_all"]


@pytest.fixture(scope="module")
def processes():
    with rank_processes() as running:
        yield running


def random_layout(length: int, ranks: int, seed: int) -> ContextLayout:
    """Return ranges of random sizes on random ranks; a rank may have many, few or none."""
    rng = np.random.default_rng(seed)
    cuts = np.unique(np.concatenate([[0, length], rng.integers(0, length + 1, 12)]))
    owner = rng.integers(0, ranks, len(cuts) - 1)
    regions = list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))
    return ContextLayout(
        tuple(
            join_ranges([p for p, o in zip(regions, owner, strict=True) if o == rank])
            for rank in range(ranks)
        )
    )


def tensors(masks: list[AttentionMask], heads: tuple[int, int], seed: int) -> list[torch.Tensor]:
    """Return query, key, value and output gradient of all tokens."""
    generator = torch.Generator().manual_seed(seed)
    n_queries, n_keys = masks[0].shape
    sizes = [(heads[0], n_queries), (heads[1], n_keys), (heads[1], n_keys), (heads[0], n_queries)]
    return [torch.randn(len(masks), h, t, D, generator=generator) for h, t in sizes]


def expected_of(whole: list[torch.Tensor], masks, **kwargs) -> list[torch.Tensor]:
    """Return output and gradients of the float64 oracle."""
    query, key, value = (t.double().requires_grad_() for t in whole[:3])
    dense = torch.stack([mask.dense() for mask in masks])
    out, _ = reference_attention(query, key, value, dense, **kwargs)
    out.backward(whole[3].double())
    return [out.detach(), query.grad, key.grad, value.grad]


def run_local(
    whole, masks, group: ContextGroup, method: str, recompute: bool = False, **kwargs
) -> tuple[list[torch.Tensor], tuple[int, int]]:
    """Return this rank's output and gradients, and bytes sent forward and backward."""
    rows, keys = group.queries.positions(group.rank), group.keys.positions(group.rank)
    query, key, value, grad = (
        t[:, :, index].clone().requires_grad_()
        for t, index in zip(whole, (rows, keys, keys, rows), strict=True)
    )
    run = partial(context_attention, call=ContextCall(group, masks, **kwargs), method=method)
    exchange = group.exchange
    before = exchange.sent_bytes
    if recompute:
        out = checkpoint(run, query, key, value, use_reentrant=False)
    else:
        out = run(query, key, value)
    middle = exchange.sent_bytes
    out.backward(grad.detach())
    sent = middle - before, exchange.sent_bytes - middle
    return [out.detach(), query.grad, key.grad, value.grad], sent


def errors(local, expected, group: ContextGroup, label: str) -> list[str]:
    rows, keys = group.queries.positions(group.rank), group.keys.positions(group.rank)
    found = []
    where = {"out": rows, "dq": rows, "dk": keys, "dv": keys}
    for (name, index), mine, due in zip(where.items(), local, expected, strict=True):
        error = (mine.double() - due[:, :, index]).norm()
        # Relative to the full tensor's norm per element: a rank may have almost no elements.
        share = due.norm() * (max(mine.numel(), 1) / due.numel()) ** 0.5
        if not (mine.shape == due[:, :, index].shape and error <= TOLERANCE * share):
            found.append(f"{label} {name}: {error:.2e} of {share:.2e}")
    return found


def patterns_on_a_rank(group, names, length, heads, seed, recompute) -> list[str]:
    """Run all methods on all patterns; return the errors."""
    exchange, problems = Exchange(group), []
    for name in names:
        mask = every_pattern(length, seed)[name]()
        queries = random_layout(mask.n_queries, exchange.size, seed)
        keys = queries if name in SELF else random_layout(mask.n_keys, exchange.size, seed + 1)
        context = ContextGroup(exchange, queries, keys)
        whole = tensors([mask], heads, seed)
        expected = expected_of(whole, [mask])
        for method in METHODS:
            if method == "ulysses" and heads[1] % exchange.size:
                continue
            local, _ = run_local(whole, [mask], context, method, recompute)
            problems += errors(local, expected, context, f"{name} {method}")
    return problems


@pytest.mark.cells(2)
@pytest.mark.parametrize(
    ("ranks", "length", "heads"),
    [(2, 400, (4, 2)), (3, 600, (3, 3)), (4, 1000, (4, 4)), (4, 203, (8, 1)), (1, 100, (2, 1))],
)
def test_every_pattern_and_method_in_any_layout(processes, ranks, length, heads):
    found = processes.run(
        patterns_on_a_rank, ranks, names=SELF + CROSS, length=length, heads=heads, seed=ranks,
        recompute=False,
    )  # fmt: skip
    assert sum(found, []) == []


def test_with_activation_recomputation(processes):
    found = processes.run(
        patterns_on_a_rank, 3, names=["mp", "own_image_window", "cross"], length=200,
        heads=(3, 3), seed=5, recompute=True,
    )  # fmt: skip
    assert sum(found, []) == []


def batches_on_a_rank(group) -> list[str]:
    """Run two masks in one batch, two consecutive batches, softcap and scale."""
    exchange, problems = Exchange(group), []
    layout = random_layout(150, exchange.size, 3)
    context = ContextGroup(exchange, layout, layout)
    for masks in ([causal(150), documents([70, 80])], [full(150), causal(150)]):
        whole = tensors(masks, (6, 3), 1)
        for kwargs in ({}, {"softcap": 2.0, "scale": 0.5}):
            expected = expected_of(whole, masks, **kwargs)
            for method in METHODS:
                local, _ = run_local(whole, masks, context, method, **kwargs)
                problems += errors(local, expected, context, f"{method} {kwargs}")
    return problems


def test_two_masks_in_a_batch_and_back_to_back(processes):
    assert sum(processes.run(batches_on_a_rank, 3), []) == []


def widths_on_a_rank(group) -> list[str]:
    """Use values that are narrower and wider than keys, as in latent attention."""
    exchange, problems = Exchange(group), []
    layout = random_layout(150, exchange.size, 3)
    context, masks = ContextGroup(exchange, layout, layout), [causal(150)]
    for width in (5, 12):
        whole = tensors(masks, (6, 3), 1)
        for number in (2, 3):  # values and the output gradient
            whole[number] = whole[number].repeat(1, 1, 1, 2)[..., :width]
        expected = expected_of(whole, masks)
        for method in METHODS:
            local, _ = run_local(whole, masks, context, method)
            problems += errors(local, expected, context, f"{method} {width}")
    return problems


def test_values_of_another_width_than_keys(processes):
    assert sum(processes.run(widths_on_a_rank, 3), []) == []


def half_precision_on_a_rank(group) -> list[float]:
    """Return the error of bf16 relative to that of one process in bf16."""
    exchange = Exchange(group)
    mask = documents([100, 56])
    layout = random_layout(156, exchange.size, 3)
    context = ContextGroup(exchange, layout, layout)
    whole = [t.bfloat16() for t in tensors([mask], (4, 2), 1)]
    expected = expected_of(whole, [mask])
    worst = []
    for method in METHODS:
        local, _ = run_local(whole, [mask], context, method)
        assert all(t.dtype == torch.bfloat16 for t in local)
        rows = layout.positions(group.rank())
        worst += [
            float((mine.double() - due[:, :, rows]).norm() / due[:, :, rows].norm())
            for mine, due in zip(local, expected, strict=True)
        ]
    return worst


def test_bf16_merges_in_fp32(processes):
    for worst in processes.run(half_precision_on_a_rank, 2):
        assert max(worst) <= 1e-2


def autocast_on_a_rank(group) -> list[str]:
    """Use Q and K in fp32 but not V, as Hugging Face's rotary embeddings do under autocast."""
    exchange, problems = Exchange(group), []
    mask = documents([100, 56])
    layout = random_layout(156, exchange.size, 3)
    context = ContextGroup(exchange, layout, layout)
    whole = tensors([mask], (4, 2), 1)
    rows = layout.positions(group.rank())
    for method in METHODS:
        results = []
        for cast in (False, True):
            local = [t[:, :, rows].clone() for t in whole]
            if cast:
                local[2] = local[2].bfloat16()
            else:
                local = [t.bfloat16() for t in local]
            inputs = [t.requires_grad_() for t in local[:3]]
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                out = context_attention(*inputs, ContextCall(context, [mask]), method=method)
            out.backward(local[3].to(out.dtype))
            problems += [
                f"{method}: gradient in {t.grad.dtype}" for t in inputs if t.grad.dtype != t.dtype
            ]
            results.append([out.detach(), *(t.grad.bfloat16() for t in inputs)])
        problems += [
            f"{method} {name}"
            for name, one, other in zip(("out", "dq", "dk", "dv"), *results, strict=True)
            if not (one.dtype == other.dtype and torch.equal(one, other))
        ]
    return problems


def test_autocast_casts_mixed_dtypes(processes):
    """Compare with inputs that were cast before."""
    assert sum(processes.run(autocast_on_a_rank, 2), []) == []


class Project(torch.nn.Module):
    """Queries from one input, keys and values from the other.

    ``fp32_queries``: like a norm of the queries under autocast.
    """

    def __init__(self, width: int, heads: int, seed: int, fp32_queries: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.heads, self.fp32_queries = heads, fp32_queries
        self.q, self.k, self.v = (torch.nn.Linear(width, heads * D) for _ in range(3))

    def forward(self, hidden, visual):
        query = self.q(hidden)
        made = (query.float() if self.fp32_queries else query, self.k(visual), self.v(visual))
        return tuple(t.unflatten(-1, (self.heads, D)).transpose(1, 2) for t in made)


class Saved:
    """Bytes that autograd saves for a backward, each tensor once."""

    def __enter__(self):
        self.tensors: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)

    def _pack(self, tensor):
        self.tensors[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    @property
    def total(self) -> int:
        return sum(self.tensors.values())


def two_layers(layers, hidden, visual, attend) -> torch.Tensor:
    """Run cross attention twice on the same visual tokens."""
    for layer in layers:
        out = attend(layer, hidden, visual)
        hidden = hidden + out.transpose(1, 2).flatten(2)
    return hidden


def recomputed_under_autocast_on_a_rank(group) -> list[str]:
    """Compare with the same layer without recomputation."""
    exchange, heads = Exchange(group), 2
    mask = every_pattern(60, 2)["cross"]()
    context = ContextGroup(
        exchange, random_layout(60, exchange.size, 4), random_layout(mask.n_keys, exchange.size, 5)
    )
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, t, heads * D, generator=generator) for t in (60, mask.n_keys)]
    rows, keys = (layout.positions(group.rank()) for layout in (context.queries, context.keys))
    grads = []
    for attend in (context_attention, recomputed_context_attention):
        layer = Project(heads * D, heads, 0, fp32_queries=True)
        hidden, visual = (
            t[:, index].clone().requires_grad_()
            for t, index in zip(whole, (rows, keys), strict=True)
        )
        with torch.autocast("cpu", torch.bfloat16):
            made = (
                layer(hidden, visual) if attend is context_attention
                else (layer, hidden, visual)
            )
            out = attend(*made, ContextCall(context, [mask]), method="rotate")
        out.float().square().sum().backward()
        grads.append([hidden.grad, visual.grad, *(p.grad for p in layer.parameters())])
    return [
        f"gradient {number} is {one.dtype} {float((one - other).norm())} off"
        for number, (one, other) in enumerate(zip(*grads, strict=True))
        if not (one.dtype == other.dtype and torch.equal(one, other))
    ]


def test_recomputation_casts_as_autocast_did(processes):
    assert sum(processes.run(recomputed_under_autocast_on_a_rank, 2), []) == []


def recomputed_on_a_rank(group, method: str) -> tuple[list[str], int, int]:
    """Compare gradients of inputs and weights with one process.

    Returns errors, and bytes saved with and without recomputation.
    """
    exchange, heads, T, V = Exchange(group), 2, 60, 90
    mask = every_pattern(T, 2)["cross"]()
    V = mask.n_keys
    context = ContextGroup(
        exchange, random_layout(T, exchange.size, 4), random_layout(V, exchange.size, 5)
    )
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, t, heads * D, generator=generator) for t in (T, V, T)]
    layers = [Project(heads * D, heads, seed) for seed in (0, 1)]

    def one_process(layer, hidden, visual):
        q, k, v = layer(hidden, visual)
        return reference_attention(q, k, v, mask.dense())[0]

    exact = [Project(heads * D, heads, seed).double() for seed in (0, 1)]
    x, y = (t.double().requires_grad_() for t in whole[:2])
    two_layers(exact, x, y, one_process).backward(whole[2].double())

    rows, keys = context.queries.positions(group.rank()), context.keys.positions(group.rank())
    local = [t[:, index].clone() for t, index in zip(whole, (rows, keys, rows), strict=True)]

    def kept(layer, hidden, visual):
        call = ContextCall(context, [mask])
        return context_attention(*layer(hidden, visual), call, method=method)

    def recomputed(layer, hidden, visual):
        return recomputed_context_attention(
            layer, hidden, visual, ContextCall(context, [mask]), method=method
        )

    sizes = []
    for attend in (kept, recomputed):
        hidden, visual = (t.clone().requires_grad_() for t in local[:2])
        for layer in layers:
            layer.zero_grad()
        with Saved() as saved:
            out = two_layers(layers, hidden, visual, attend)
        sizes.append(saved.total)
        out.backward(local[2])
    found = {"x": (hidden.grad, x.grad[:, rows]), "y": (visual.grad, y.grad[:, keys])}
    for number, (layer, due) in enumerate(zip(layers, exact, strict=True)):
        for (name, mine), other in zip(layer.named_parameters(), due.parameters(), strict=True):
            total = mine.grad.clone()
            dist.all_reduce(total, group=group)  # every rank has the gradient of its tokens
            found[f"{number}.{name}"] = total, other.grad
    problems = [
        name
        for name, (mine, due) in found.items()
        # A key's bias adds the same to all scores of a row: its gradient is zero.
        if not name.endswith("k.bias")
        and not (mine.double() - due).norm() <= TOLERANCE * due.norm()
    ]
    return problems, *sizes


@pytest.mark.parametrize("method", [m for m in METHODS if m != "ulysses"])
def test_recomputed_keys_are_not_kept(processes, method):
    for problems, kept, recomputed in processes.run(recomputed_on_a_rank, 3, method=method):
        assert problems == []
        assert recomputed < 0.7 * kept


def bytes_on_a_rank(group, heads, n_queries, n_keys) -> dict[str, tuple[int, int]]:
    exchange = Exchange(group)
    context = ContextGroup(
        exchange,
        ContextLayout.even(n_queries, exchange.size),
        ContextLayout.even(n_keys, exchange.size),
    )
    mask = full(n_queries, n_keys)
    whole = [t.bfloat16() for t in tensors([mask], heads, 0)]
    return {m: run_local(whole, [mask], context, m)[1] for m in METHODS}


@pytest.mark.parametrize("n_queries", [96, 480])
def test_bytes_are_those_of_the_formulas(processes, n_queries):
    """Check the payload per rank, with e bytes per activation and a = 4 per accumulator."""
    n, (hq, hk), n_keys, e, a = 4, (8, 4), 240, 2, 4
    counted = processes.run(
        bytes_on_a_rank, n, heads=(hq, hk), n_queries=n_queries, n_keys=n_keys
    )
    others = (n - 1) / n
    ulysses = others / n * D * e * (2 * n_queries * hq + 2 * n_keys * hk)
    keys = others * n_keys * hk * D
    rows = others * n_queries * hq
    expected = {
        "gather": (keys * 2 * e, keys * (2 * e + 2 * a)),
        "needed": (keys * 2 * e, keys * (2 * e + 2 * a)),
        "ring": (keys * 2 * e, keys * (2 * e + 2 * a)),
        "ulysses": (ulysses, ulysses),
        "rotate": (rows * (D * (e + a) + 4), rows * (D * (2 * e + a) + 8)),
    }
    for per_rank in counted:
        assert per_rank == expected


def document_bytes_on_a_rank(group, lengths) -> dict[str, tuple[int, int]]:
    exchange = Exchange(group)
    layout = ContextLayout.even(sum(lengths), exchange.size)
    context = ContextGroup(exchange, layout, layout)
    mask = documents(lengths)
    whole = tensors([mask], (2, 2), 0)
    return {m: run_local(whole, [mask], context, m)[1] for m in ("gather", "needed")}


def test_only_visible_keys_are_sent(processes):
    """Count the visible ranges on the dense mask."""
    lengths, n, hk, e = [70, 90, 40, 110, 90], 4, 2, 4
    counted = processes.run(document_bytes_on_a_rank, n, lengths=lengths)
    dense = documents(lengths).dense()
    layout = ContextLayout.even(sum(lengths), n)

    def travel(giver: int, taker: int) -> int:
        rows, keys = layout.positions(taker), layout.positions(giver)
        return int(dense[rows][:, keys].any(dim=0).sum()) if giver != taker else 0

    for rank in range(n):
        given = sum(travel(rank, other) for other in range(n)) * hk * D * 2 * e
        returned = sum(travel(other, rank) for other in range(n)) * hk * D * 2 * e
        assert counted[rank]["needed"] == (given, given + returned)
        assert sum(counted[rank]["needed"]) < sum(counted[rank]["gather"])


def test_documents_need_a_third_of_the_keys_at_most():
    lengths = [1000, 300, 2500, 800, 1200, 700, 1692]
    mask = documents(lengths)
    layout = ContextLayout.even(sum(lengths), 8)
    needed = sum(
        stop - start
        for rows in range(8)
        for keys in range(8)
        if rows != keys
        for start, stop in needed_keys((mask,), layout.ranges[rows], layout.ranges[keys])
    )
    assert needed * 3 <= 7 * sum(lengths)


def test_impossible_layouts_are_refused():
    with pytest.raises(ModelError, match="tokens 3 to 5 have no rank"):
        ContextLayout((((0, 3),), ((5, 9),)))
    with pytest.raises(ModelError, match="tokens 3 to 4 are on two ranks"):
        ContextLayout((((0, 4),), ((3, 9),)))
    with pytest.raises(ModelError, match="must ascend"):
        ContextLayout((((4, 9), (0, 4)),))
    blocks = ContextLayout.of_blocks([[0, 3], [2, 1]], 4, 14)
    assert blocks.ranges == (((0, 4), (12, 14)), ((4, 12),))
    assert blocks.sizes == (6, 8) and blocks.length == 14
    assert blocks.positions(0).tolist() == [0, 1, 2, 3, 12, 13]


def refusals_on_a_rank(group) -> list[str]:
    exchange = Exchange(group)
    layout = ContextLayout.even(12, exchange.size)
    context = ContextGroup(exchange, layout, layout)
    query, key = torch.randn(1, 4, 6, D), torch.randn(1, 1, 6, D)
    said = []
    for kwargs in (
        {"method": "tree"},
        {"method": "ulysses"},
        {"mask": causal(11)},
        {"group": ContextGroup(exchange, ContextLayout.even(10, 2), layout), "mask": full(10, 12)},
        {"layout": ContextLayout.even(12, 3)},
    ):
        try:
            if "layout" in kwargs:
                ContextGroup(exchange, kwargs["layout"], layout)
            call = ContextCall(kwargs.get("group", context), [kwargs.get("mask", causal(12))])
            context_attention(query, key, key, call, method=kwargs.get("method", "gather"))
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_does_not_fit_is_refused(processes):
    expected = [
        "method is 'tree'", "must be multiples of 2 ranks", "for 11 queries", "6 rows and 6 keys",
        "split over 3 ranks",
    ]  # fmt: skip
    for said in processes.run(refusals_on_a_rank, 2):
        assert all(part in one for part, one in zip(expected, said, strict=True)), said


def test_one_process_is_plain_attention():
    """Compare the oracle here with the attention of one process."""
    mask = causal(50)
    whole = tensors([mask], (4, 2), 0)
    out, _ = attention(*whole[:3], mask)
    due = expected_of(whole, [mask])[0]
    assert (out.double() - due).norm() <= TOLERANCE * due.norm()
