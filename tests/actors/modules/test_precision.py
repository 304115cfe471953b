"""One copy of the weights in the compute dtype per step, with autocast's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from raymm.actors.executor.split_backward import backward_input
from raymm.actors.modules import precision
from raymm.actors.modules.precision import ComputeCopies

MICROBATCHES = 4


@pytest.fixture(params=[1, 2**16], ids=["fused", "separate"], autouse=True)
def gradient_sums(request, monkeypatch):
    """Add gradients in one kernel, and as autograd does."""
    monkeypatch.setattr(precision, "FUSED_ELEMENTS", request.param)


def model(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, vocab_size=96, tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def batch(number: int) -> torch.Tensor:
    return torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(number))


def microbatch(module: nn.Module, number: int) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module(input_ids=batch(number), labels=batch(number)).loss


def saved_storages(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, dict[int, int]]:
    """Return a forward's output, and bytes by address of the storages that its graph keeps."""
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return run(), held


def held_by_microbatches(module: nn.Module, copies: ComputeCopies) -> int:
    """Return the bytes that all microbatches keep together, without the parameters."""
    held: dict[int, int] = {}
    with copies.shown():
        losses = []
        for number in range(MICROBATCHES):
            loss, own = saved_storages(lambda n=number: microbatch(module, n))
            losses.append(loss)
            held |= own
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    return sum(size for pointer, size in held.items() if pointer not in parameters)


def test_microbatches_share_one_copy_of_the_weights():
    one = model()
    copied = sum(
        2 * child.weight.numel() for child in one.modules() if isinstance(child, nn.Linear)
    )
    every = held_by_microbatches(one, ComputeCopies([one], None))
    once = held_by_microbatches(one, ComputeCopies([one], torch.bfloat16))
    # All but one of the copies are gone, and nothing else replaces them.
    assert every - once == (MICROBATCHES - 1) * copied
    assert copied > once / (MICROBATCHES + 1)  # they were most of it


@pytest.mark.parametrize("tied", [False, True])
def test_numbers_equal_autocast(tied):
    """Compare losses and gradients of several microbatches in flight bitwise."""
    one = model(tied)
    other = copy.deepcopy(one)
    copies = ComputeCopies([one], torch.bfloat16)
    for _ in range(2):
        with copies.shown():
            losses = [microbatch(one, n) for n in range(MICROBATCHES)]
            for loss in losses:
                loss.backward()
            copies.hide()
        due = [microbatch(other, n) for n in range(MICROBATCHES)]
        for loss in due:
            loss.backward()
        assert [x.item() for x in losses] == [x.item() for x in due]
        for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
            assert mine.grad.dtype == torch.float32 and mine.grad.equal(theirs.grad), name
        for module in (one, other):
            torch.optim.SGD(module.parameters(), lr=0.1).step()
            module.zero_grad()


def test_split_backward_and_a_first_forward_without_grad():
    """Start a step with a forward without gradients that is recomputed later."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    other = copy.deepcopy(one)
    with ComputeCopies([one], torch.bfloat16).shown():
        gradients = []
        for module in (one, other):
            total = []
            for number in range(3):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
                x.requires_grad_()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    if module is one:
                        with torch.no_grad():
                            module(x)
                    out = module(x)
                _, deferred = backward_input([out], [torch.ones_like(out)], [x])
                total.append(deferred)
            for deferred in total:
                deferred.run()
            gradients.append([p.grad for p in module.parameters()])
        for mine, theirs in zip(*gradients, strict=True):
            assert mine.equal(theirs)


def test_parameters_stay_unchanged():
    one = model()
    names, state = [n for n, _ in one.named_parameters()], set(one.state_dict())
    with ComputeCopies([one], torch.bfloat16).shown():
        assert one.lm_head.weight.dtype == torch.bfloat16
        assert [n for n, _ in one.named_parameters()] == names
        assert all(p.dtype == torch.float32 for p in one.parameters())
        assert set(one.state_dict()) == state
    assert one.lm_head.weight.dtype == torch.float32


def test_gradients_are_added_when_their_layer_is_done():
    """Accumulate per layer instead of after the backward, which would double the gradients."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    done = []
    for number, layer in enumerate(layers):
        layer.weight.register_post_accumulate_grad_hook(lambda _, n=number: done.append(("w", n)))
    with ComputeCopies([layers], torch.bfloat16).shown():
        for _ in range(2):  # microbatches
            done.clear()
            hidden = torch.randn(2, 8, requires_grad=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for number, layer in enumerate(layers):
                    hidden.register_hook(lambda _, n=number: done.append(("x", n)))
                    hidden = layer(hidden)
            hidden.sum().backward()
            for number in range(1, 4):
                assert done.index(("w", number)) < done.index(("x", number - 1))


def test_fused_sums_write_no_other_fp32_gradient(monkeypatch):
    """Count the operators of a second microbatch, and respect hooks of a parameter."""
    monkeypatch.setattr(precision, "FUSED_ELEMENTS", 1)
    layer = nn.Linear(8, 8, bias=False)
    x, weight = torch.randn(4, 8), layer.weight

    class Casts(torch.utils._python_dispatch.TorchDispatchMode):
        counts: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
                self.counts.append(str(func))
            return result

    with ComputeCopies([layer], torch.bfloat16).shown():
        outputs = []
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs.append(layer(x).sum())
        outputs[0].backward()
        with Casts() as seen:
            outputs[1].backward()
        assert seen.counts == ["aten.add_.Tensor"]
        before = weight.grad.clone()
        weight.register_hook(lambda gradient: gradient * 0)
        outputs[2].backward()
        assert weight.grad.equal(before)
