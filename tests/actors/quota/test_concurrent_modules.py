"""Concurrent modules have the numbers of sequential ones, in any order of threads."""

from __future__ import annotations

import copy
import random
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.devices.emulated_backend import EmulatedBackend, EmulatedModule
from raymm.actors.quota import (
    RecordingBackend,
    StreamPool,
    Work,
)
from raymm.actors.quota.work import tensors_in
from raymm.errors import InternalError
from tests.support.one_after_another import one_after_another
from tests.support.quota_spans import most_sms, seconds_together
from tests.support.three_modules import MODULES, QUOTAS, meeting


class Net(nn.Module):
    """Module with dropout, a recomputed layer with dropout, and numpy's and Python's generators."""

    def __init__(self, width, waits):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.waits = waits

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            # Other threads run while one sleeps.
            time.sleep(self.waits[index])
            if index == 1:
                x = checkpoint(self.recomputed, layer, x, use_reentrant=False)
            else:
                x = nn.functional.dropout(torch.tanh(layer(x)), 0.4, self.training)
            x = x * (1 + 0.1 * np.random.rand() + 0.1 * random.random())
        return x

    def recomputed(self, layer, x):
        return nn.functional.dropout(torch.relu(layer(x)), 0.3, self.training)


def models():
    torch.manual_seed(5)
    waits = [(0.0, 2e-3, 0.0), (1e-3, 0.0, 1e-3), (0.0, 0.0, 2e-3)]
    return {m: Net(16 + 8 * i, waits[i]) for i, m in enumerate(MODULES)}


def train(models, streams, run, steps, seeded):
    """Run forwards as one stage and backwards as the next, with accumulated gradients."""
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    found = []
    for step in range(steps):
        inputs = {m: torch.full((4, net.layers[0].in_features), 0.5) for m, net in models.items()}
        forwards = run(
            streams,
            {
                m: Work(net, (inputs[m],), seed=7 * step + i if seeded else None)
                for i, (m, net) in enumerate(models.items())
            },
        )
        run(
            streams,
            {
                m: Work(lambda y: y.square().sum().backward(), (out,), backward_of=out)
                for m, out in forwards.items()
            },
        )
        found += [out.get().detach().clone() for out in forwards.values()]
    for net in models.values():
        found += [p.grad for p in net.parameters()]
    return [*found, torch.get_rng_state()]


def plain(models, streams, steps, seeded):
    """Run the same without the package."""

    def run(_, works):
        results = {}
        for module, work in works.items():
            if work.seed is not None:
                torch.manual_seed(work.seed)
                np.random.seed(work.seed)
                random.seed(work.seed)
            args = [a.value if hasattr(a, "value") else a for a in work.consumes]
            results[module] = work.run(*args)
        return {m: Plain(v) for m, v in results.items()}

    return train(models, streams, run, steps, seeded)


class Plain:
    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value


@pytest.mark.parametrize("seeded", [True, False])
def test_bit_identical_to_one_after_another(streams, side, seeded):
    one = models()
    others = [copy.deepcopy(one) for _ in range(2)]
    wanted = plain(one, streams, 5, seeded)
    for run, net in zip((side.run, one_after_another), others, strict=True):
        found = train(net, streams, run, 5, seeded)
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b)
    assert any(p.abs().sum() > 0 for p in wanted[-7:-1])


def test_works_without_random_numbers_run_concurrently(streams, side):
    """Let every module wait for the others."""
    meet = meeting(len(MODULES))
    found = side.run(streams, {m: Work(meet, draws=False) for m in MODULES})
    assert list(found) == list(MODULES) and all(out.value for out in found.values())
    account = streams.backend.account
    assert seconds_together(account, "vision", "audio") > 0
    assert most_sms(account) == sum(s.partition.sms for s in streams.streams.values())


def test_random_works_run_in_order(streams, side):
    for order in (MODULES, MODULES[::-1]):
        log = []

        def run(module, log=log):
            log.append(module)
            time.sleep(1e-3)
            log.append(module)

        side.run(streams, {m: Work(run, (m,)) for m in order})
        assert log == [m for m in order for _ in range(2)]
        assert seconds_together(streams.backend.account, order[0], order[1]) == 0.0


def test_only_random_works_wait_for_each_other(streams, side):
    """Check that only modules with random numbers wait for each other."""
    meet = meeting(2)
    found = side.run(
        streams,
        {
            "vision": Work(meet, draws=False),
            "audio": Work(lambda: torch.rand(3), seed=3),
            "touch": Work(lambda: (meet(), torch.rand(3))[1], seed=4),
        },
    )
    for module, seed in (("audio", 3), ("touch", 4)):
        wanted = torch.rand(3, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(found[module].get(), wanted)


def test_undeclared_random_numbers_are_detected(streams, side):
    works = {"audio": Work(lambda: torch.rand(1), draws=False),
             "vision": Work(lambda: 1, draws=False)}  # fmt: skip
    with pytest.raises(
        InternalError,
        match="one of modules 'audio', 'vision', with draws=False; accepted: draws=True",
    ):
        side.run(streams, works)
    own = torch.Generator().manual_seed(0)
    side.run(streams, {"audio": Work(lambda: torch.rand(1, generator=own), draws=False)})


def test_a_seed_is_that_of_numpy_and_python_too(streams, side):
    def draw():
        return float(torch.rand(1)), np.random.rand(), random.random()

    first, second, other = (
        side.run(streams, {"audio": Work(draw, seed=seed)})["audio"].get()
        for seed in (2**40 + 1, 2**40 + 1, 2)
    )
    assert first == second
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_a_seed_for_deterministic_work_is_refused():
    with pytest.raises(ValueError, match="seed is 3, but draws is False"):
        Work(print, draws=False, seed=3)


def test_outputs_of_earlier_stages_are_consumed(streams, side):
    first = side.run(streams, {m: Work(lambda m=m: {"x": torch.ones(2), "m": m}) for m in MODULES})
    joined = side.run(
        streams,
        {"audio": Work(lambda a, b, c: a["x"] + b["x"] + c, (first["vision"], first["touch"], 2))},
    )
    assert joined["audio"].get().tolist() == [4, 4]


class Ordered(RecordingBackend):
    """Backend whose streams log their calls, and whose events know their stream."""

    def __init__(self):
        super().__init__()
        self.log = []

    def create(self, partition, colocated=()):
        return self.logged(super().create(partition, colocated), partition.module)

    def current(self):
        return self.logged(super().current(), "caller")

    def logged(self, stream, name):
        stream.record = lambda: self.log.append((name, "records")) or f"event of {name}"
        stream.wait = lambda event: self.log.append((name, "waits for", event))
        stream.keep = lambda tensors: self.log.append((name, "keeps", len(list(tensors))))
        return stream


def test_streams_wait_for_events_and_keep_their_inputs(side):
    backend = Ordered()
    streams = StreamPool(backend, {"s": QUOTAS}).select("s")
    x = torch.ones(2)
    out = side.run(streams, {"vision": Work(lambda x: (x, [x]), (x,))})["vision"]
    assert backend.log == [
        ("caller", "records"),
        ("vision", "waits for", "event of caller"),
        ("vision", "keeps", 1),
        ("vision", "records"),
    ]
    backend.log.clear()
    side.run(streams, {"audio": Work(lambda pair: None, (out,))})
    assert backend.log == [
        ("caller", "records"),
        ("audio", "waits for", "event of caller"),
        ("audio", "waits for", "event of vision"),
        ("audio", "keeps", 2),
        ("audio", "records"),
    ]
    backend.log.clear()
    side.run(streams, {"vision": Work(lambda: None, backward_of=out)})
    assert ("vision", "waits for", "event of vision") in backend.log
    backend.log.clear()
    out.get()
    streams.join()
    assert backend.log[:2] == [("caller", "waits for", "event of vision"), ("caller", "keeps", 2)]
    assert backend.log[2:] == [
        entry
        for m in MODULES
        for entry in ((m, "records"), ("caller", "waits for", f"event of {m}"))
    ]


@dataclass
class Message:
    tensors: tuple
    side: dict


def test_tensors_are_found_in_results():
    a, b, c = (torch.zeros(i) for i in range(3))
    nested = [Message((a,), {"b": b}), {"c": (c, 3)}, "text", None, Message]
    assert [t.numel() for t in tensors_in(nested)] == [0, 1, 2]


def test_emulated_modules_overlap(side):
    """Check that both sleep at the same time, forward and backward."""
    meet = meeting(2)
    seconds = {"vision": 0.25, "audio": 0.5}
    backend = EmulatedBackend(
        lambda module, *_: seconds[module], lambda module, *_: 2 * seconds[module],
        pause=lambda s: (meet(), slept.append(s)),
    )  # fmt: skip
    slept: list[float] = []
    with StreamPool(backend, {"s": {"vision": 0.5, "audio": 0.5}}) as pool:
        streams = pool.select("s")
        nets = {m: EmulatedModule() for m in seconds}
        outs = side.run(streams, {m: Work(n, (torch.ones(2),), draws=False)
                                  for m, n in nets.items()})  # fmt: skip
        assert sorted(slept) == [0.25, 0.5]
        side.run(streams, {m: Work(lambda y: y.sum().backward(), (o,), draws=False, backward_of=o)
                           for m, o in outs.items()})  # fmt: skip
    assert sorted(slept) == [0.25, 0.5, 0.5, 1.0]
    assert seconds_together(backend.account, "vision", "audio") > 0
    assert all(net.weight.grad == 2 for net in nets.values())
