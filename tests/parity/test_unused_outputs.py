"""Outputs that are sent but not used have no gradient, as in one process.

So they have no weight decay either.
"""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import nn

from raymm.model.dag_module import DagLoss, DagModule
from raymm.model.modality_module import ModalityModule
from raymm.model.module_dag import ModuleDag
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec, dag_plan
from tests.parity.test_mapped_graphs import mapped, split
from tests.parity.test_pipelined_graphs import check, steps_of
from tests.support import parity_models as pm
from tests.support.multiplex_models import WIDTH, MeanSquare, Pooled, pooled_dag
from tests.support.parity_check import OPTIMIZER, check_training, oracle_of

pytestmark = pytest.mark.usefixtures("ray_cluster")

POOL = {f"{tower}.pool.{kind}" for tower in ("tower", "other") for kind in ("weight", "bias")}


def pooled_batch(size: int, seed: int) -> dict[str, torch.Tensor]:
    """Return a batch whose pooled states are used only in the second microbatch of step two."""
    torch.manual_seed(9000 + seed)
    return {"x": torch.randn(size, 3), "used": torch.full((size,), float(seed == 11))}


def never(size: int, seed: int) -> dict[str, torch.Tensor]:
    return pooled_batch(size, seed) | {"used": torch.zeros(size)}


@pytest.mark.cells(2)
@pytest.mark.parametrize("batch", [never, pooled_batch])
@pytest.mark.parametrize("specs", [
    {},  # one rank each
    {"tower": {"ranks": (0,)}, "error": {"ranks": (0,)}},
    {"tower": {"dp": 2}},
    {"error": {"dp": 2}},
], ids=["apart", "on one rank", "replicas", "readers"])  # fmt: skip
def test_unused_outputs(specs, batch):
    dag = pooled_dag()
    plan = dag_plan(dag, {name: ParallelSpec(**spec) for name, spec in specs.items()}, 2)
    unmoved = {name for name in POOL if batch is never or name.startswith("other")}
    check(dag, plan, steps_of(batch, 2), unmoved)


@pytest.mark.cells(1)
@pytest.mark.parametrize("batch", [never, pooled_batch])
def test_unused_outputs_of_shared_samples(batch):
    """Use slots, and zero bubble with replicas that share samples."""
    unmoved = {name for name in POOL if batch is never or name.startswith("other")}
    dag = pooled_dag()
    plan = mapped(dag, 2, {"tower": ((0, 1), 5), "other": ((1,), 5)}, microbatches=2)
    check(dag, plan, steps_of(batch, 2), unmoved)
    dag = pooled_dag()
    specs = {"tower": ParallelSpec(dp=2), "error": ParallelSpec(dp=2)}
    plan = split(dag_plan(dag, specs, 2, "zero_bubble"), "tower", "error")
    check(dag, plan, steps_of(batch, 2), unmoved)


class PooledReader(hf.ModernBertModel):
    """Transformer over states; uses the pooled input only in samples that request it."""

    def __init__(self, config: hf.ModernBertConfig) -> None:
        super().__init__(config)
        self.widen = nn.Linear(2, WIDTH)
        self.get_input_embeddings().requires_grad_(False)  # its embedding is not used

    def forward(
        self, states: torch.Tensor, pooled: torch.Tensor, used: torch.Tensor
    ) -> torch.Tensor:
        place = torch.arange(1.0, 6.0, device=states.device)
        states = states[:, None] * place[:, None]
        if used.is_meta or used.any():
            states = states + (used[:, None] * self.widen(pooled))[:, None]
        output = super().forward(inputs_embeds=states).last_hidden_state
        assert output is not None
        # The mean square of normalized states has hardly any gradient.
        return output.mean(1) * torch.arange(1.0, 1.0 + WIDTH, device=states.device)


def read_pools() -> ModuleDag:
    torch.manual_seed(8)
    config = hf.ModernBertConfig(
        hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=9, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2, local_attention=4,
    )  # fmt: skip
    example = {"states": torch.randn(3, WIDTH), "pooled": torch.randn(3, 2), "used": torch.ones(3)}
    return ModuleDag({
        "tower": DagModule(Pooled(), reads="x"),
        "reader": DagModule(
            PooledReader(config), reads="used", example_inputs=example,
            inputs={name: f"tower.{name}" for name in ("states", "pooled")},
        ),
        "mean": DagLoss(MeanSquare(), inputs={"x": "reader"}),
    })


def last_sample(size: int, seed: int) -> dict[str, torch.Tensor]:
    """Return a batch in which only one process has the sample that uses its pooled state."""
    batch = pooled_batch(size, seed)
    batch["used"][:-1] = 0
    return batch


@pytest.mark.cells(1)
@pytest.mark.parametrize("spec", [
    {"cp": 2}, {"dp": 2, "sharding": "fsdp"}, {"tp": 2}, {"dp": 2, "sharding": "fsdp", "pp": 2},
], ids=["cp", "fsdp", "tp", "stages"])  # fmt: skip
@pytest.mark.parametrize("batch", [never, last_sample])
def test_outputs_unused_by_all_processes(spec, batch):
    """Check that processes that share a microbatch agree on the used outputs."""
    dag = read_pools()
    plan = dag_plan(dag, {"reader": ParallelSpec(**spec)}, 2)
    parameters = {f"reader.widen.{kind}" for kind in ("weight", "bias")}
    parameters |= {name for name in POOL if name.startswith("tower")}
    check(dag, plan, steps_of(batch, 2), parameters if batch is never else ())


class Deep(hf.ModernBertModel):
    """Two layers over states made of x (b, 3).

    The means (b, WIDTH) are an unnamed tensor, alone or as the first of two.
    """

    def __init__(self, config: hf.ModernBertConfig) -> None:
        super().__init__(config)
        self.widen = nn.Linear(3, WIDTH)
        self.get_input_embeddings().requires_grad_(False)  # its embedding is not used

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        place = torch.arange(1.0, 6.0, device=x.device)
        hidden = super().forward(inputs_embeds=self.widen(x)[:, None] * place[:, None])[0]
        assert isinstance(hidden, torch.Tensor)
        means = hidden.mean(1) * torch.arange(1.0, 1.0 + WIDTH, device=x.device)
        return (means, hidden[:, 0] * 2.0) if self.config.several else means


class DeepError(nn.Module):
    """Error that reads the deep tower's output only in samples that use it."""

    def forward(
        self, x: torch.Tensor, deep: torch.Tensor | tuple[torch.Tensor, ...], used: torch.Tensor
    ) -> torch.Tensor:
        error = x.square().mean(1)
        first = deep if isinstance(deep, torch.Tensor) else deep[0]
        return error + used * first.square().mean(1) if used.any() else error


def deep_dag(several: bool) -> ModuleDag:
    torch.manual_seed(8)
    config = hf.ModernBertConfig(
        hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=9, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2, local_attention=4, several=several,
    )  # fmt: skip
    deep = DagModule(Deep(config), reads="x", example_inputs={"x": torch.randn(3, 3)})
    return ModuleDag({
        "plain": DagModule(nn.Linear(3, WIDTH), reads={"input": "x"}), "deep": deep,
        "error": DagLoss(DeepError(), reads="used", inputs={"x": "plain", "deep": "deep"}),
    })


@pytest.mark.cells(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("several", [False, True], ids=["tensor", "tuple"])
@pytest.mark.parametrize("batch", [never, pooled_batch])
def test_an_unused_module_in_stages(batch, several, schedule):
    """Check that its first stage has no gradient either, as the second one reports."""
    dag = deep_dag(several)
    dag.materialize()
    unmoved = {name for name, p in dag.named_parameters() if "deep" in name and p.requires_grad}
    plan = dag_plan(dag, {"deep": ParallelSpec(pp=2)}, 2, schedule)
    check(dag, plan, steps_of(batch, 2), unmoved if batch is never else ())


def text_alone(features: dict, inputs: dict) -> dict:
    """Return the text alone, as a merge policy that ignores images."""
    return {name: inputs[name] for name in ("inputs_embeds", "attention_mask", "labels")}


def test_an_encoder_that_a_merge_policy_ignores():
    """Check that its parameters, in two stages and a projector, stay bitwise unchanged."""
    model = MultimodalModule(
        {"vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp")},
        ModalityModule(pm.build(pm.llama(), 2)), text_alone,
    )
    oracle = oracle_of(model, lambda features, ids, embeds, labels: (embeds, labels))
    before = {n: p.clone() for n, p in oracle.named_parameters() if n.startswith("vision")}
    steps = [[pm.batch([7, 5], 3, vision=[0, 1]), pm.batch([6], 4, vision=[0, 0])]]
    spec = MultimodalParallelSpec({"vision": ParallelSpec(pp=2)}, ParallelSpec(pp=2), 2)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_training(parallel, oracle, [steps, steps, steps])
        after = parallel.parameters()
    assert before and all(torch.equal(after[name], p) for name, p in before.items())
