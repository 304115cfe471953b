"""Blocks that are recomputed or offloaded: bitwise equal results, and less memory."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from raymm.actors.modules.module_state import ForwardBuffers
from raymm.actors.recompute.recomputed_layers import OffloadedBlocks, _Moved, recompute_layers
from raymm.errors import PlanError
from raymm.kernels.hf import self_attention as hf_attention
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.costs.recomputation import ALL, ATTENTION, MATMULS, OPTIONS
from raymm.scheduler.plan.plan import Plan
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, check_training, oracle_of


def model_of(llm=None, mask=None) -> MultimodalModule:
    return MultimodalModule(
        {"vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp")},
        ModalityModule(pm.build(llm or pm.qwen3(), 3)), mask=mask,
    )


def step() -> list[dict]:
    return [pm.batch([17, 9], 4, vision=[0, 0]), pm.batch([6], 5)]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("mask", [None, "multimodal"])
def test_recomputation_is_bitwise_equal_with_less_memory(option, mask):
    """Compare in one process, with dropout, with torch's attention and raymm's."""
    config = pm.gpt2()
    config.resid_pdrop = 0.3
    found = {}
    for used in ("keep", option):
        model = model_of(config, mask).materialize()
        blocks = model.language_model.module.transformer.h
        model.language_model.module.train()
        if mask is not None:  # also after the forward, when the blocks run again
            hf_attention.register()
            model.language_model.module.set_attn_implementation(hf_attention.NAME)
        recompute_layers(list(blocks), [used] * len(blocks))
        held = 0

        def pack(tensor):
            nonlocal held
            held += tensor.nbytes
            return tensor

        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(**step()[0])
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found[used] = loss.item(), gradients, held
    (loss, gradients, held), (other, others, fewer) = found["keep"], found[option]
    assert loss == other and gradients.keys() == others.keys() and len(gradients) > 50
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)
    assert option == "keep" or fewer < held / 2


@pytest.mark.parametrize(
    ("option", "times"), [("keep", 1), ("matmuls", 1), ("attention", 1), ("all", 2)]
)
def test_kept_attention_is_not_recomputed(option, times, monkeypatch):
    """Check raymm's attention, which is a single operator for torch."""
    from raymm.kernels.flash.cpu import attention as attention_cpu

    model = model_of(mask="multimodal").materialize()
    hf_attention.register()
    llm = model.language_model.module
    llm.set_attn_implementation(hf_attention.NAME)
    llm.train()
    recompute_layers(list(llm.model.layers), [option] * 3)
    runs = []
    compute = attention_cpu.cpu_forward
    monkeypatch.setattr(attention_cpu, "cpu_forward", lambda *a: runs.append(1) or compute(*a))
    model(**step()[0]).backward()
    assert len(runs) == 3 * times


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("vision", "llm"),
    [
        (ParallelSpec(recompute_layers="all"),
         ParallelSpec(pp=2, recompute_layers=("matmuls", "all", "attention"))),
        (ParallelSpec(dp=2, ranks=(0, 1), recompute_layers="attention"),
         ParallelSpec(dp=2, cp=2, ranks=(2, 3), recompute_layers="matmuls")),
        (ParallelSpec(tp=2, recompute_layers="matmuls"),
         ParallelSpec(tp=2, cp=2, recompute_layers="attention")),
        (ParallelSpec(dp=2, sharding="fsdp", recompute_layers="all"),
         ParallelSpec(dp=2, sharding="fsdp", recompute_layers="matmuls")),
    ],
    ids=["pipeline", "copies-and-tokens", "tensors", "fully-sharded"],
)
def test_training(ray_cluster, vision, llm):
    model = model_of(mask="multimodal")
    oracle = oracle_of(model, visible=lambda q, k, past: past if q[0] == 0 else q[0] == k[0])
    spec = MultimodalParallelSpec({"vision": vision}, llm, 2)
    assert Plan.from_json(spec.plan(model).to_json()) == spec.plan(model)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_training(parallel, oracle, [[step()], [step()[::-1]], [step(), step()]])


def test_what_cannot_be_is_refused():
    model = model_of()

    def plan(schedule="1f1b", recompute=False, **llm):
        spec = MultimodalParallelSpec({}, ParallelSpec(**llm), 2, schedule, recompute)
        return spec.plan(model)

    for given in ("some", ("all", "keep"), ("all", "keep", "none")):
        with pytest.raises(PlanError, match="recompute_layers of 'llm' is .*each of its 3 blocks"):
            plan(recompute_layers=given)
    with pytest.raises(PlanError, match="has layer_options, but schedule is 'zero_bubble'"):
        plan("zero_bubble", recompute_layers="all")
    with pytest.raises(PlanError, match="layer_options and recompute"):
        plan(recompute=True, pp=2, recompute_layers="all")
    assert all(not stage.layer_options for stage in plan(recompute_layers=("keep",) * 3).stages)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)  # three views of one storage
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        return x + nn.functional.dropout(self.out(mixed).exp(), 0.3)


@pytest.fixture
def events(monkeypatch):
    """Record moves, fetches and frees, in order."""
    events: list[str] = []
    make, fetch = _Moved.__init__, _Moved.fetch

    def made(moved, storage, blocks):
        make(moved, storage, blocks)
        events.append(f"out {storage.nbytes()}")

    def fetched(moved):
        if moved._back is None:
            events.append(f"back {moved._host.nbytes}")
        fetch(moved)

    monkeypatch.setattr(_Moved, "__init__", made)
    monkeypatch.setattr(_Moved, "fetch", fetched)
    return events


def run(offload: bool, smallest: int = 0, microbatches: int = 2, events: list[str] | None = None):
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    offloaded = OffloadedBlocks(smallest)
    for index, block in enumerate(blocks if offload else ()):
        block.forward = offloaded.wrap(block.forward)

        def mark(gradient, index=index):
            if events is not None:
                events.append(f"backward {index}")

        block.register_forward_hook(lambda _, __, out, mark=mark: out.register_hook(mark) and None)
    outputs = []
    for _ in range(microbatches):
        x = torch.randn(2, 10, 16, requires_grad=True)
        hidden = x
        for block in blocks:
            hidden = block(hidden)
        outputs.append((x, hidden))
    for _, hidden in outputs:
        hidden.square().sum().backward()
    gradients = [p.grad for block in blocks for p in block.parameters()]
    return [h for _, h in outputs], [x.grad for x, _ in outputs] + gradients


def test_numbers_are_the_same(events):
    before, after = run(False), run(True)
    for one, other in zip(before, after, strict=True):
        assert len(one) == len(other) and all(map(torch.equal, one, other))
    assert events


def test_views_are_moved_once_and_parameters_stay(events):
    run(True, microbatches=1)
    moved = [int(event.split()[1]) for event in events if event.startswith("out")]
    assert moved.count(2 * 10 * 48 * 4) == 3  # q, k and v of each block together
    parameters = {p.untyped_storage().nbytes() for p in Block().parameters()}
    assert not parameters & set(moved)
    assert len(moved) == sum(event.startswith("back") for event in events)


def test_a_block_is_fetched_while_the_one_after_it_runs(events):
    run(True, microbatches=2, events=events)
    first = events.index("backward 2")
    assert not any(event.startswith("back ") for event in events[:first])
    second = events.index("backward 1", first)
    large = f"back {2 * 10 * 48 * 4}"
    # The last block's own, and those of the one before, but not the first one's yet.
    assert events[first:second].count(large) == 2
    # The last block of the other microbatch is not fetched until its backward.
    third = events.index("backward 2", first + 1)
    assert events[first:third].count(large) == 3
    assert events[third:].count(large) == 3


def test_small_ones_stay(events):
    run(True, smallest=2 * 10 * 48 * 4)
    assert {int(event.split()[1]) for event in events if event.startswith("out")} == {3840}


def test_nothing_is_moved_without_gradients(events):
    block = Block()
    block.forward = OffloadedBlocks(0).wrap(block.forward)
    with torch.no_grad():
        block(torch.randn(1, 4, 16))
    assert not events


def test_a_fetch_waits_for_its_own_copy_out_only(monkeypatch):
    """Check that it does not wait for later copies."""
    log: list[tuple] = []

    class Stream:
        def __init__(self, name="main"):
            self.name, self.work = name, 0

        def wait_stream(self, other):
            log.append((self.name, "waits for", other.name, other.work))

        def wait_event(self, event):
            log.append((self.name, "waits for", *event))

        def record_event(self):
            self.work += 1
            return self.name, self.work

    out, back = Stream("out"), Stream("back")
    blocks = OffloadedBlocks()
    blocks._streams = out, back
    cuda = SimpleNamespace(stream=nullcontext, current_stream=Stream, Event=object)
    monkeypatch.setattr(torch, "cuda", cuda)
    first, later = (object.__new__(_Moved) for _ in range(2))
    for moved in (first, later):
        moved._blocks, moved._device, moved._back = blocks, torch.device("cuda"), None
        moved._host, moved._left = torch.ones(4), out.record_event()
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, non_blocking: tensor.clone())
    first.fetch()
    assert log == [("back", "waits for", "out", 1)]


class Counted(nn.Module):
    """Module that replaces a buffer that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x):
        self.calls = self.calls + self.training
        return x * self.calls


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        spectral_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6), Counted(), nn.ReLU(), nn.Dropout(0.3),
        spectral_norm(nn.Linear(6, 6)),
    )


def outcome(module: nn.Module) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Run several forwards, then their backwards in order; return gradients and state."""
    torch.manual_seed(1)
    outputs = [module(torch.randn(5, 6)) for _ in range(3)]
    for output in reversed(outputs):
        output.square().sum().backward()
    return [p.grad for p in module.parameters()], dict(module.state_dict())


@pytest.mark.parametrize("option", [ALL, MATMULS, ATTENTION])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_and_buffers_are_those_of_one_run(option, training):
    kept = block().train(training)
    again = copy.deepcopy(kept)
    recompute_layers([again], [option])
    for _ in range(2):
        (due, state), (gradients, others) = outcome(kept), outcome(again)
        assert all(map(torch.equal, due, gradients))
        assert state.keys() == others.keys()
        assert all(torch.equal(value, others[name]) for name, value in state.items())


def test_only_changed_buffers_are_copied():
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    module.register_buffer("table", torch.zeros(9))
    buffers = ForwardBuffers(module)
    for _ in range(2):
        with buffers.recorded() as before:
            module(torch.randn(4, 3))
    assert sorted(name for _, name, _ in before) == [
        "num_batches_tracked", "running_mean", "running_var"
    ]
