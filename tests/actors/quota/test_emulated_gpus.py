"""Emulated GPUs as Ray actors: the modules of each sleep concurrently."""

from __future__ import annotations

import threading

import ray
import torch

from benchmarks.devices.emulated_backend import EmulatedBackend, EmulatedModule
from raymm.actors.quota import ConcurrentModules, StreamPool, Work
from tests.support.quota_spans import most_sms

SETS = {"encoders": {"vision": 0.6, "audio": 0.4}, "llm": {"llm": 1.0}}
SECONDS = {"vision": 0.02, "audio": 0.02, "llm": 0.005}
MEET_SECONDS = 60


class EmulatedGpu:
    """Run encoders concurrently, then the language model, forward and backward."""

    def __init__(self):
        self.slept = []
        together = threading.Barrier(2)

        def pause(seconds):
            if seconds >= SECONDS["vision"]:
                together.wait(MEET_SECONDS)  # fails unless both encoders are here
            self.slept.append(seconds)

        self.backend = EmulatedBackend(
            lambda module, degree, *_: SECONDS[module] * degree,
            lambda module, degree, *_: 2 * SECONDS[module],
            pause=pause,
        )
        self.modules = {m: EmulatedModule(degree=1) for m in SECONDS}

    def steps(self, count):
        with ConcurrentModules() as side, StreamPool(self.backend, SETS) as pool:
            for _ in range(count):
                self.step(side, pool)
        order = [span.partition.module for span in self.backend.account.spans]
        grads = {m: one.weight.grad.item() for m, one in self.modules.items()}
        return sorted(self.slept), order, most_sms(self.backend.account), grads

    def step(self, side, pool):
        encoders, llm = (pool.select(name) for name in SETS)
        works = {m: Work(self.modules[m], (torch.ones(2),), draws=False) for m in encoders.streams}
        outputs = side.run(encoders, works)
        leaves = [out.get().detach().requires_grad_() for out in outputs.values()]

        def language(*received):
            self.modules["llm"](sum(received)).sum().backward()

        # The sum has two leaves: the language model sleeps once.
        side.run(llm, {"llm": Work(language, tuple(leaves), draws=False)})
        gradients = [leaf.grad for leaf in leaves]
        side.run(encoders, {
            m: Work(lambda y, g: y.backward(g), (out, g), draws=False, backward_of=out)
            for (m, out), g in zip(outputs.items(), gradients, strict=True)
        })  # fmt: skip


def test_steps_of_two_emulated_gpus(ray_cluster):
    gpus = [ray.remote(EmulatedGpu).options(num_cpus=1).remote() for _ in range(2)]
    try:
        for slept, order, most, grads in ray.get([gpu.steps.remote(3) for gpu in gpus]):
            assert slept == sorted(3 * [0.02, 0.02, 0.005, 0.04, 0.04, 0.01])
            for step in range(3):
                one = order[5 * step : 5 * step + 5]
                assert set(one[:2]) == {"vision", "audio"} == set(one[3:]) and one[2] == "llm"
            assert most == 132
            assert grads == {"vision": 6, "audio": 6, "llm": 6}
    finally:
        for gpu in gpus:
            ray.kill(gpu)
