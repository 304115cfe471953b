"""The loss of every source equals that of its rows alone in one process, in any layout."""

import pytest
import torch

from raymm.actors.modules.merge import IGNORE_INDEX, ReplaceTokens
from raymm.actors.modules.message import SOURCES
from raymm.actors.stages.labels import Labelled, with_sources
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, close, oracle_of
from tests.support.parity_oracle import label_tokens, replace

TOKENS = {"vision": pm.IMAGE_TOKEN}
# Source of every row of the step's microbatches; 2 has no label, 7 is alone in one.
ROWS = [[0, 1, 0], [1, 2], [7]]


def step() -> list[dict]:
    image = (pm.IMAGE_TOKEN, 4)
    microbatches = [
        pm.batch([17, 25, 9], 4, [[image], [], [image]], vision=[0, 2]),
        pm.batch([3, 11], 5),
        pm.batch([20], 7, [[image]], vision=[0]),
    ]
    microbatches[1]["labels"][1] = IGNORE_INDEX
    return microbatches


def of_source(number: int) -> list[dict]:
    """Return the step with labels of one source alone."""
    alone = []
    for microbatch, sources in zip(step(), ROWS, strict=True):
        labels = microbatch["labels"].clone()
        labels[torch.tensor(sources) != number] = IGNORE_INDEX
        alone.append({**microbatch, "labels": labels})
    return alone


@pytest.mark.cells(1)
@pytest.mark.parametrize(("llm", "packing"), [
    (ParallelSpec(pp=2, cp=2), True), (ParallelSpec(tp=2, dp=3), False),
    (ParallelSpec(dp=2, sharding="fsdp"), True),
])  # fmt: skip
def test_stages_processes_and_packed_rows(ray_cluster, llm, packing):
    model = MultimodalModule(
        {"vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp")},
        ModalityModule(pm.build(pm.llama(), 3)), ReplaceTokens(TOKENS), "causal", packing,
    )
    oracle = oracle_of(model, replace(TOKENS))
    spec = MultimodalParallelSpec({"vision": ParallelSpec(ranks=(0,))}, llm, 3)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        plain = parallel.execute(step())
        assert plain.source_losses == {}
        gradients = parallel.gradients()
        parallel.optimizer.zero_grad()
        parts, meta = parallel.prepare(step())
        for part, sources in zip(parts, ROWS, strict=True):
            part["text"][SOURCES] = torch.tensor(sources)
        output = parallel.submit((parts, meta)).result()
        for name, gradient in parallel.gradients().items():
            same = gradient is gradients[name]  # None for unused parameters
            assert same or torch.equal(gradient, gradients[name]), name
    assert output.loss == plain.loss
    assert list(output.source_losses) == [0, 1, 7]
    for number, (loss, count) in output.source_losses.items():
        alone = of_source(number)
        assert count == label_tokens(alone)
        assert close(loss, oracle.loss(alone).item())


def test_a_single_source_needs_no_second_pass():
    calls = []

    def function(values, targets):
        calls.append(len(targets))
        return (values * targets).sum()

    labels = torch.tensor([[IGNORE_INDEX, 3, 4], [5, IGNORE_INDEX, 6]])
    values = torch.rand(4, requires_grad=True)
    for sources, expected in (([9, 9], []), ([2, 9], [2, 2])):
        told = with_sources({"labels": labels, SOURCES: torch.tensor(sources)})
        labelled = Labelled(told["labels"], torch.device("cpu"))
        assert labelled.targets.tolist() == [3, 4, 5, 6]
        total, before = function(values, labelled.targets), len(calls)
        sums = labelled.by_source(function, values, total)
        assert calls[before:] == expected and list(sums) == sorted(set(sources))
        torch.testing.assert_close(sum(part for part, _ in sums.values()), total.detach())
        assert not any(part.requires_grad for part, _ in sums.values())
    assert Labelled(labels, torch.device("cpu")).by_source(function, values, total) == {}
