"""Moving averages of weights on one and several processes equal torch's ``AveragedModel``."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from raymm.actors.optimizer.gradient_reduction import ParameterOwnership
from raymm.actors.optimizer.optimizer import RankOptimizer
from raymm.actors.optimizer.optimizer_config import EmaConfig, OptimizerConfig
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.plan.stage import StageId
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER

STAGE = StageId("llm", 0)


def optimizer_of(module: nn.Module, ema: EmaConfig, parameters: str = "fp32") -> RankOptimizer:
    own = {(STAGE, name): p for name, p in module.named_parameters()}
    ownership = ParameterOwnership((), frozenset(own), frozenset(own))
    config = OptimizerConfig(lr=0.1, ema=ema, parameters=parameters)
    return RankOptimizer(0, own, config, ownership, {}, torch.device("cpu"), [module])


def averages(optimizer: RankOptimizer) -> dict[str, torch.Tensor]:
    return {name: v for (_, name, key), v in optimizer.state_tensors().items() if key == "ema"}


def take_step(optimizer: RankOptimizer, module: nn.Module, scale: float = 1.0) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter) * scale
    optimizer.clip()
    optimizer.step()
    optimizer.finish()


@given(
    st.floats(0, 0.999), st.integers(1, 3),
    st.lists(st.sampled_from([1.0, float("nan"), 1e20]), min_size=1, max_size=7),
    st.sampled_from(["fp32", "bf16_master", "bf16_stochastic"]),
)
def test_averages_equal_torch(decay, every, scales, parameters):
    """Ignore skipped steps; count steps once whose norm overflows at first."""
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    optimizer = optimizer_of(module, EmaConfig(decay, every), parameters)
    # AveragedModel copies the weights at its first update.
    shown = nn.Linear(3, 2)

    def follow() -> None:
        for key, p in optimizer.updated.items():
            kept = optimizer.in_bf16.get(id(p))
            wide = kept.wide if kept is not None and kept.master else p
            dict(shown.named_parameters())[key[1]].data.copy_(wide.detach())

    follow()
    due = AveragedModel(shown, multi_avg_fn=get_ema_multi_avg_fn(decay))
    due.update_parameters(shown)
    for number, scale in enumerate(scales):
        take_step(optimizer, module, scale)
        follow()
        if (number + 1) % every == 0 and scale == scale:
            due.update_parameters(shown)
    for name, value in averages(optimizer).items():
        torch.testing.assert_close(value, dict(due.module.named_parameters())[name].detach())


def test_averages_are_shown_restored_and_stored():
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    optimizer = optimizer_of(module, EmaConfig(0.5), "bf16_stochastic")
    optimizer.show_averages()  # without averages, nothing happens
    optimizer.hide_averages()
    for _ in range(3):
        take_step(optimizer, module)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    stored, due = optimizer.state_tensors(), averages(optimizer)
    optimizer.show_averages()
    optimizer.show_averages()
    for name, p in module.named_parameters():
        assert p.equal(due[name].to(p.dtype)) and not p.equal(before[name])
    optimizer.hide_averages()
    assert all(p.equal(before[name]) for name, p in module.named_parameters())

    again = optimizer_of(nn.Linear(3, 2), EmaConfig(0.5), "bf16_stochastic")
    again.load_state_tensors(stored, 3)
    assert all(value.equal(due[name]) for name, value in averages(again).items())
    without = optimizer_of(nn.Linear(3, 2), None, "bf16_stochastic")
    without.load_state_tensors(stored, 3)
    assert averages(without) == {}


@pytest.mark.parametrize(("values", "says"), [
    ({"decay": 1.0}, "decay is 1.0"), ({"every": 0}, "every is 0"),
])  # fmt: skip
def test_what_cannot_be(values, says):
    with pytest.raises(ValueError, match=says):
        EmaConfig(**values)


@pytest.mark.cells(2)
@pytest.mark.parametrize("layout", [
    {"pp": 2}, {"dp": 2, "sharding": "zero1"}, {"dp": 2, "sharding": "fsdp"}, {"tp": 2},
], ids=lambda layout: "-".join(map(str, layout.values())))  # fmt: skip
def test_processes_show_the_same_averages(ray_cluster, layout):
    """Evaluate the averages, whichever process stores them; training is unchanged."""
    def model() -> MultimodalModule:
        module = ModalityModule(pm.build(pm.llama(tied=True), 3))
        return MultimodalModule({}, module)

    batches = [[pm.batch([9, 7], seed), pm.batch([6, 8], seed + 9)] for seed in range(3)]
    spec = MultimodalParallelSpec({}, ParallelSpec(**layout), 2)
    ema = EmaConfig(0.5, evaluate=True)
    config = OptimizerConfig(**{**vars(OPTIMIZER), "ema": ema})
    with spec.apply(model(), optimizer=config) as parallel:
        weights = [parallel.parameters()]
        for batch in batches:
            parallel.train_step(batch)
            weights.append(parallel.parameters())
        loss = parallel.evaluate(batches[0]).loss
        with parallel.evaluated_weights():
            shown = parallel.parameters()
            averaged = parallel.evaluate(batches[0]).loss
        assert parallel.evaluate(batches[0]).loss == loss != averaged
        after = parallel.parameters()
        for name, value in weights[0].items():
            due = value
            for later in weights[1:]:
                due = due.lerp(later[name], 0.5)
            torch.testing.assert_close(shown[name], due, rtol=0, atol=1e-7)
            assert after[name].equal(weights[-1][name])
