"""Updates by rules equal torch's own optimizers; rejected steps change nothing."""

import sys

import pytest
import torch
from torch import nn

from raymm.actors.optimizer.bf16_parameters import keep_in_bf16
from raymm.actors.optimizer.optimizer_config import ALGORITHMS, OptimizerConfig
from raymm.actors.optimizer.updates import (
    ParameterUpdates,
    layer_norm_parameters,
    matrices_of,
)
from raymm.scheduler.plan.stage import StageId

LLM, VISION = StageId("llm", 0), StageId("vision", 0)
STEPS = 4
CUSTOM = [f"tests.support.custom_optimizers:{name}" for name in ("Lion", "adagrad", "rprop")]
GO, REFUSED = torch.zeros(()), torch.ones(())


def modules() -> dict[StageId, nn.Module]:
    torch.manual_seed(0)
    llm = nn.ModuleDict({
        "module": nn.Sequential(nn.Embedding(7, 64), nn.Linear(64, 64), nn.LayerNorm(64)),
    })
    vision = nn.ModuleDict({"module": nn.Linear(4, 5), "projector": nn.Linear(5, 6)})
    return {LLM: llm, VISION: vision}


def updates_of(config: OptimizerConfig, parts=None) -> ParameterUpdates:
    parts = parts or modules()
    parameters = {(s, n): p for s, part in parts.items() for n, p in part.named_parameters()}
    return ParameterUpdates(
        parameters, config, matrices_of(parts.values()), layer_norm_parameters(parts.values())
    )


def with_gradients(parameters, step: int):
    for place, (_, parameter) in enumerate(sorted(parameters.items())):
        generator = torch.Generator().manual_seed(100 * step + place)
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return parameters.values()


def check(config: OptimizerConfig, oracles) -> None:
    """Compare updates with torch's optimizers.

    Args:
        oracles: torch's optimizers by parameter name, with their rates per step.
    """
    updates, mine = updates_of(config), updates_of(config).parameters
    torch_optimizers = oracles({f"{stage.module}/{name}": p for (stage, name), p in mine.items()})
    for step in range(STEPS):
        updates.step(with_gradients(updates.parameters, step), GO, step)
        with_gradients(mine, step)
        for optimizer, rates in torch_optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rates(step)
            optimizer.step()
    for key, parameter in updates.parameters.items():
        error = (parameter - mine[key]).norm() / mine[key].norm()
        assert error < 1e-6, key


def test_modules_have_separate_rates_and_schedules():
    config = OptimizerConfig(
        lr=1e-2, weight_decay=0.1, no_decay=("*bias",), modules={
            "vision": {"lr": 1e-3, "schedule": "linear", "total_steps": 8, "no_decay": []},
            "vision_projector": {"betas": [0.5, 0.9]},
        },
    )

    def oracles(named):
        def adamw(names, decay, rate, **more):
            own = [named[name] for name in names]
            return torch.optim.AdamW(own, weight_decay=decay, **more), rate

        llm = [name for name in named if name.startswith("llm")]
        biases = [name for name in llm if name.endswith("bias")]
        betas = (0.5, 0.9)
        return [
            adamw([n for n in llm if n not in biases], 0.1, lambda step: 1e-2),
            adamw(biases, 0.0, lambda step: 1e-2),
            adamw(["vision/module.weight", "vision/module.bias"], 0.1,
                  lambda step: 1e-3 * (1 - step / 8)),
            adamw(["vision/projector.weight"], 0.1, lambda step: 1e-2, betas=betas),
            adamw(["vision/projector.bias"], 0.0, lambda step: 1e-2, betas=betas),
        ]

    check(config, oracles)


def test_muon_applies_to_matrices_of_the_blocks():
    config = OptimizerConfig(name="muon", lr=1e-2, modules={"vision_projector": {"name": "adamw"}})

    def oracles(named):
        matrices = ["llm/module.1.weight", "vision/module.weight"]
        muon = torch.optim.Muon(
            [named[name] for name in matrices], weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        )
        exempt = [n for n in named if n.endswith("bias") or n == "llm/module.2.weight"]
        others = [named[n] for n in named if n not in matrices + exempt]
        adamw = torch.optim.AdamW(others, weight_decay=0.01)
        plain = torch.optim.AdamW([named[n] for n in exempt], weight_decay=0.0)
        return [(one, lambda step: 1e-2) for one in (muon, adamw, plain)]

    check(config, oracles)


@pytest.mark.parametrize("name", [*ALGORITHMS, *CUSTOM])
@pytest.mark.parametrize("first", [True, False])
def test_a_refused_step_changes_nothing(name, first):
    """Try any gradients, also in the first step."""
    config = OptimizerConfig(name=name)
    updates, due = updates_of(config), updates_of(config)
    for step in (0,) * (not first):
        for one in (updates, due):
            one.step(with_gradients(one.parameters, step), GO, step)
    wrong = with_gradients(updates.parameters, 1)
    for parameter in wrong:
        parameter.grad.fill_(float("nan"))
    updates.step(wrong, REFUSED, 1)
    for one in (updates, due):
        one.step(with_gradients(one.parameters, 2), GO, 2)
    for key, parameter in updates.parameters.items():
        assert torch.equal(parameter, due.parameters[key]), key


@pytest.mark.parametrize("name", [*ALGORITHMS, *CUSTOM])
def test_state_is_restored_from_a_checkpoint(name):
    config = OptimizerConfig(name=name)
    updates, later = updates_of(config), updates_of(config)
    updates.step(with_gradients(updates.parameters, 0), GO, 0)
    with torch.no_grad():
        for key, parameter in updates.parameters.items():
            later.parameters[key].copy_(parameter)
            later.load_state(key, {n: v.clone() for n, v in updates.states([key])[key].items()})
    for one in (updates, later):
        one.step(with_gradients(one.parameters, 1), GO, 1)
    assert all(p.equal(later.parameters[key]) for key, p in updates.parameters.items())


def test_only_requested_parameters_are_updated():
    updates, before = updates_of(OptimizerConfig(name="muon")), updates_of(OptimizerConfig())
    chosen = list(with_gradients(updates.parameters, 0))[1:3]
    updates.step(chosen, GO, 0)
    for key, parameter in updates.parameters.items():
        assert parameter.equal(before.parameters[key]) != any(parameter is c for c in chosen)
        assert bool(updates.states([key])[key]) == any(parameter is c for c in chosen)


@pytest.mark.parametrize(("values", "says"), [
    ({"name": "sgd"}, "name is 'sgd'; accepted: adamw, adamw_8bit, muon"),
    ({"momentum": 1.0}, "momentum is 1.0; accepted: a number from 0 to below 1"),
    ({"no_decay": "*.bias"}, "no_decay is '*.bias'; accepted: a list of patterns"),
    ({"modules": {"llm": {"rate": 1}}}, "modules.llm.rate is not a field; accepted: name, par"),
    ({"modules": {"llm": {"lr": -1}}}, "modules.llm.lr is -1; accepted: a number from 0"),
])  # fmt: skip
def test_wrong_values_are_named(values, says):
    with pytest.raises(ValueError) as error:
        OptimizerConfig(**values)
    assert says in str(error.value)


def test_the_host_waits_once_for_the_state_of_all_parameters(monkeypatch):
    updates = updates_of(OptimizerConfig())
    updates.step(with_gradients(updates.parameters, 0), GO, 0)
    reads = []
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: reads.append(self) or True)
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self) or read(self))
    states = updates.states(updates.parameters)
    assert len(reads) == 1 and all(len(state) == 3 for state in states.values())


def test_bf16_step_work_grows_with_the_parameters(monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)

    def lines(count: int) -> int:
        parts = {StageId("llm", 0): nn.ModuleList(nn.Linear(1, 1) for _ in range(count))}
        parameters = {(s, n): p for s, part in parts.items() for n, p in part.named_parameters()}
        config = OptimizerConfig(parameters="bf16_master")
        in_bf16 = keep_in_bf16(parameters, config, parts.values(), {}, 0)
        assert len(in_bf16) == 2 * count
        updates = ParameterUpdates(parameters, config, (), in_bf16=in_bf16)
        executed = 0

        def trace(frame, event, argument):
            nonlocal executed
            if frame.f_code.co_filename != ParameterUpdates.step.__code__.co_filename:
                return None
            executed += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            updates.step(parameters.values(), GO, 0)
        finally:
            sys.settrace(before)
        return executed

    assert lines(80) < 2.5 * lines(40)


@pytest.mark.parametrize("name", ["adamw", "muon", "adamw_8bit", CUSTOM[0]])
def test_a_factor_in_the_update_equals_scaled_gradients(name):
    """Check which updates take the factor; others get scaled gradients from the caller."""
    config, factor = OptimizerConfig(lr=1e-2, name=name), torch.tensor(0.37, dtype=torch.float64)
    before, within = updates_of(config), updates_of(config)
    for step in range(STEPS):
        for parameter in with_gradients(before.parameters, step):
            parameter.grad.mul_(factor.float())
        before.step(before.parameters.values(), GO, step)
        parameters = with_gradients(within.parameters, step)
        taken = [p for p in parameters if within.scales(p)]
        assert len(taken) == {"adamw": 9, "muon": 6}.get(name, 0)
        for parameter in parameters:
            if not within.scales(parameter):
                parameter.grad.mul_(factor.float())
        within.scale_gradients(factor)
        within.step(parameters, GO, step)
        within.scale_gradients(None)
    for key, parameter in within.parameters.items():
        error = (parameter - before.parameters[key]).norm() / before.parameters[key].norm()
        assert error < 1e-6, key
