"""SM-quota streams on a GPU; without one, their control flow on fakes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.gpu import green_contexts as benchmark
from benchmarks.gpu.device import Device
from raymm.actors.quota import ConcurrentModules, CudaBackend, StreamPool, Work
from tests.support.one_after_another import one_after_another

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SETS = {"encoders": {"vision": 0.6, "audio": 0.4}, "llm": {"llm": 1.0}, "alone": {"vision": 0.6}}


def test_a_pool_of_green_context_streams(cuda):
    driver = cuda.driver
    pool = StreamPool(CudaBackend(), SETS)
    chosen = {name: pool._sets[name].streams for name in SETS}
    vision, audio = (chosen["encoders"][m].torch_stream for m in ("vision", "audio"))
    assert not driver.sms_of(vision.address) & driver.sms_of(audio.address)
    assert len(driver.sms_of(vision.address)) == chosen["encoders"]["vision"].partition.sms == 80
    assert chosen["llm"]["llm"].torch_stream.address is None, "all of the GPU needs no context"
    assert chosen["alone"]["vision"].torch_stream is vision, "the same groups of the same module"
    assert len(driver.contexts) == len(driver.streams) == 2
    assert not cuda.log
    pool.close()
    assert cuda.log == ["synchronize", "workspaces", "empty_cache with 2 streams"]
    assert not driver.streams and not driver.contexts


def test_group_counts():
    assert benchmark.group_counts(16) == [1, 2, 4, 8, 16]
    assert benchmark.group_counts(18) == [1, 2, 4, 8, 16, 18]
    assert benchmark.group_counts(1) == [1]


def test_overlap_share():
    assert benchmark.overlap_share((0, 10), (5, 9)) == 1.0
    assert benchmark.overlap_share((0, 10), (5, 15)) == 0.5
    assert benchmark.overlap_share((0, 10), (12, 15)) == 0.0


@needs_gpu
def test_partitions_are_disjoint_on_the_gpu():
    backend = CudaBackend()
    with StreamPool(backend, SETS) as pool:
        streams = pool.select("encoders").streams
        found = {
            m: benchmark.sm_numbers(Device("cuda"), s, backend.gpu.total)
            for m, s in streams.items()
        }
        for module, stream in streams.items():
            assert len(found[module]) == stream.partition.sms
        assert not set(found["vision"]) & set(found["audio"])


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.3)
        return x


@needs_gpu
@pytest.mark.parametrize("draws", [True, False])
def test_numbers_on_the_gpu_are_those_of_one_after_another(draws):
    """Repeat forward, backward and an optimizer step on the caller's stream many times."""

    def train(run, streams):
        torch.manual_seed(0)
        nets = {m: Net(256 * (i + 1)).cuda() for i, m in enumerate(streams.streams)}
        if not draws:
            for net in nets.values():
                net.forward = nn.Sequential(*net.layers).forward
        optimizer = torch.optim.SGD([p for n in nets.values() for p in n.parameters()], 0.1)
        for step in range(20):
            x = {m: torch.full((64, 256 * (i + 1)), 0.1 * step, device="cuda")
                 for i, m in enumerate(nets)}  # fmt: skip
            outs = run(streams, {
                m: Work(n, (x[m],), draws=draws, seed=step if draws else None)
                for m, n in nets.items()
            })  # fmt: skip
            run(streams, {
                m: Work(lambda y: y.square().mean().backward(), (o,), draws=draws, backward_of=o)
                for m, o in outs.items()
            })  # fmt: skip
            streams.join()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return [p.detach().cpu() for n in nets.values() for p in n.parameters()]

    with ConcurrentModules() as side, StreamPool(CudaBackend(), SETS) as pool:
        streams = pool.select("encoders")
        for a, b in zip(train(side.run, streams), train(one_after_another, streams), strict=True):
            assert torch.equal(a, b)


@needs_gpu
def test_the_host_does_not_wait():
    """Raise in waiting calls while stages are switched and work is issued."""
    x = torch.ones(64, 64, device="cuda")
    with ConcurrentModules() as side, StreamPool(CudaBackend(), SETS) as pool:
        for _ in range(2):  # the first time creates handles
            torch.cuda.set_sync_debug_mode("error")
            try:
                first = side.run(pool.select("encoders"), {
                    m: Work(lambda x: x @ x, (x,), draws=False) for m in ("vision", "audio")
                })  # fmt: skip
                last = side.run(pool.select("llm"), {
                    "llm": Work(lambda a, b: a + b, (first["vision"], first["audio"]), draws=False)
                })  # fmt: skip
                total = last["llm"].get()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert total.eq(128).all()
        del x, first, last, total  # read on streams that end here
