"""Threads of concurrent modules."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from raymm.actors.quota import (
    ConcurrentModules,
    Work,
)
from tests.support.one_after_another import one_after_another
from tests.support.three_modules import MEET_SECONDS, MODULES, meeting


def test_threads_end_with_an_unclosed_object(streams):
    side = ConcurrentModules()
    side.run(streams, {m: Work(lambda: 1, draws=False) for m in MODULES})
    threads = [t for t in threading.enumerate() if t.name in names()]
    assert len(threads) == len(MODULES)
    del side
    for thread in threads:
        thread.join(MEET_SECONDS)
    assert not names()


def names():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("side-by-side"))


def test_threads_are_reused_and_all_end(streams):
    assert not names()
    side, seen = ConcurrentModules(), set()
    for step in range(100):
        chosen = MODULES[: 1 + step % 3]
        works = {m: Work(threading.get_ident, draws=False) for m in chosen}
        seen |= {(m, out.get()) for m, out in side.run(streams, works).items()}
        assert len(names()) <= len(MODULES)
    assert len(seen) == len(MODULES)
    assert names() == sorted(f"side-by-side-{m}" for m in MODULES)
    side.close()
    side.close()
    assert not names()
    with pytest.raises(RuntimeError, match="any more: they were closed"):
        side.run(streams, {"vision": Work(lambda: 1)})


def test_results_are_not_kept_alive(streams, side):
    import gc
    import weakref

    out = side.run(streams, {"vision": Work(lambda x: x + 1, (torch.ones(3),))})["vision"]
    watched = weakref.ref(out.value)
    del out
    gc.collect()
    assert watched() is None


def probe():
    x = torch.ones(2, 2, requires_grad=True)
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": (x @ x).dtype,
        "records": (x @ x).requires_grad,
        "device": torch.empty(1).device.type,
        "float": torch.empty(1).dtype,
    }


@pytest.mark.parametrize(
    "settings",
    [
        torch.enable_grad,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
        lambda: torch.device("meta"),
    ],
    ids=["grad", "no_grad", "inference", "bf16", "f16", "meta"],
)
def test_threads_have_the_settings_of_their_caller(streams, side, settings):
    default = probe()
    with settings():
        wanted = probe()
        found = side.run(streams, {m: Work(probe) for m in MODULES})
    assert [out.get() for out in found.values()] == [wanted] * 3
    again = side.run(streams, {"vision": Work(probe)})
    assert again["vision"].get() == default, "settings stay in a thread"


def test_autocast_of_a_reused_weight_is_independent(streams, side):
    """Disable the cache of casts: another thread that leaves autocast would clear it."""
    nets = {m: nn.Linear(8, 8) for m in MODULES}
    meet = meeting(len(MODULES))

    def step(net):
        with torch.autocast("cpu", torch.bfloat16):
            y = net(torch.ones(2, 8))
            meet()
            y = net(y)
        meet()
        y.float().sum().backward()
        return net.weight.grad.clone()

    works = {m: Work(step, (net,), draws=False) for m, net in nets.items()}
    found = side.run(streams, works)
    meet = lambda: None  # noqa: E731
    for module, net in nets.items():
        net.zero_grad()
        alone = one_after_another(streams, {module: Work(step, (net,), draws=False)})
        assert torch.equal(found[module].get(), alone[module].get())
