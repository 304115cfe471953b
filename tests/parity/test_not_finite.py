"""A non-finite step is skipped on all processes, in any layout, and is explained."""

import math
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.errors import CheckpointError, ModelError, NotFiniteError
from raymm.layout.mapping_plan import plan_of_mapping
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.skipped_step import SkippedStepWarning
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage, Placement
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import restore
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER

UNCLIPPED = OptimizerConfig(lr=1e-2, max_grad_norm=None)
# Finite pixels that trigger the traps below.
FORWARD, BACKWARD = 1e6, 1e8


class Trap(nn.LayerNorm):
    """Norm that fails for certain pixels.

    With an item of the size of FORWARD, the output is infinite. With one of the size of BACKWARD,
    the output is finite, and the gradients of all items are NaN.
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found = super().forward(hidden)
        size = hidden.detach().nan_to_num(posinf=0.0).abs().amax(dim=(1, 2), keepdim=True)
        found = torch.where((size > 1e3) & (size < 3e6), math.inf, found)
        return found + (hidden * 0).abs().sqrt() if size.max() > 3e6 else found


def model_of() -> MultimodalModule:
    """Return a model with the trap in the vision encoder's second block."""
    tower = pm.build(pm.siglip(), 1)
    (blocks,) = (one for one in tower.modules() if isinstance(one, nn.ModuleList))
    trap = Trap(blocks[1].layer_norm1.normalized_shape)
    trap.load_state_dict(blocks[1].layer_norm1.state_dict())
    blocks[1].layer_norm1 = trap
    return MultimodalModule(
        {"vision": ModalityModule(tower, "mlp")}, ModalityModule(pm.build(pm.llama(tied=True), 3))
    )


def step(seed: int, pixel: float | None = None) -> list[dict]:
    """Return four microbatches; ``pixel`` is for the last image of the second one, of its row 1."""
    step = [
        pm.batch([7, 5], seed, vision=[0, 0]), pm.batch([6, 8, 4], seed + 1, vision=[0, 1]),
        pm.batch([4, 9], seed + 2, vision=[1]), pm.batch([10], seed + 3),
    ]
    if pixel is not None:
        step[1]["vision"]["pixel_values"][1, 0, 3, 3] = pixel
    return step


def pipelined(vision: dict, llm: dict, config=OPTIMIZER, **options):
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(**vision)}, ParallelSpec(**llm), 4, **options
    )
    return lambda: spec.apply(model_of(), optimizer=config)


def multiplexed():
    """Return a mapping with the encoder on two of three GPUs, the language model on two."""
    stages = ({"vision": Placement("vision", (0, 1), 6)}, {"llm": Placement("llm", (1, 2), 10)})
    mapping = Mapping(
        3, 10, tuple(MultiplexStage(tuple(one.values()), 1.0) for one in stages)
    )
    model = model_of()
    return ParallelModel(model, plan_of_mapping(model, mapping), optimizer=OPTIMIZER)


LAYOUTS = {
    "dp, zero1, tp": (pipelined({"dp": 2, "sharding": "zero1"}, {"tp": 2}), "vision.0@1"),
    "dp, cp": (pipelined({}, {"dp": 2, "cp": 2}), "vision.0"),
    "fsdp": (pipelined({"dp": 2, "sharding": "fsdp"}, {"dp": 2, "sharding": "fsdp"}), "vision.0"),
    "multiplexed": (multiplexed, "vision.0@1"),
    "pp, zero bubble, no clipping": (
        pipelined({"pp": 2, "ranks": (0, 1)}, {"pp": 2, "ranks": (0, 1)}, UNCLIPPED,
                  schedule="zero_bubble"), "vision.1"),
}  # fmt: skip


def state(folder: Path) -> dict[str, torch.Tensor]:
    """Return all content of a checkpoint, by file."""
    return {
        f"{file.name}/{name}": tensor
        for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and len(one)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.cells(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_non_finite_step_is_skipped_and_explained(ray_cluster, tmp_path, layout):
    start, stage = LAYOUTS[layout]
    store = CheckpointStore(tmp_path, keep=9)
    with start() as parallel:
        parallel.train_step(step(0))
        before = store.save(parallel, {})
        began = []
        for number, pixel in enumerate((math.nan, math.inf, FORWARD, BACKWARD)):
            with pytest.warns(SkippedStepWarning, match=f"step {number + 2} was not applied"):
                output = parallel.train_step(step(10, pixel))
            assert not math.isfinite(output.grad_norm) and output.learning_rate is None
            # A NaN gradient does not show in the loss before it.
            assert math.isfinite(output.loss) == (pixel == BACKWARD)
            began.append(output.skipped.began)
        assert parallel.steps_taken == 5 and parallel.skipped is output.skipped
        skipped = store.save(parallel, {})
        assert_same(state(skipped), state(before))
        assert all(gradient is None for gradient in parallel.gradients().values())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            output = parallel.train_step(step(20))
        assert output.skipped is None and parallel.skipped is None
        after = store.save(parallel, {})
        for folder in (skipped, before):  # a resumed run, and one without these steps
            restore(parallel, folder)
            parallel.train_step(step(20))
            again = CheckpointStore(tmp_path / folder.name).save(parallel, {})
            assert_same(state(again), state(after))
    for number, origins in enumerate(began[:3]):
        (origin,) = origins
        first = stage.replace("1", "0", 1) if number < 2 and layout.startswith("pp") else stage
        assert (origin.module, origin.stage, origin.what) == ("vision", first, "output")
        # With sharded samples or tokens, rows are not rows of the microbatch.
        assert origin.microbatch == 1 and "1" in origin.sample_ids
        assert origin.sample_ids == ("1",) or layout == "fsdp"
    if layout.startswith("pp"):
        (origin,) = began[3]
        assert (origin.stage, origin.what) == ("vision.1", "gradient")
        assert origin.microbatch == 1 and origin.sample_ids == ("0", "1")
    else:
        assert {(one.module, one.what) for one in began[3]} == {("vision", "parameters")}


def test_accumulated_batches_and_non_finite_weights(ray_cluster, tmp_path):
    """Use one process; ``optimizer.step`` reports the batch."""
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(ranks=(0,))}, ParallelSpec(ranks=(0,)), 4
    )
    store = CheckpointStore(tmp_path)
    model = model_of()
    with spec.apply(model, optimizer=UNCLIPPED) as parallel:
        before = parallel.parameters()
        for seed, pixel in ((0, None), (10, math.nan), (20, None)):
            parallel.execute(step(seed, pixel))
        with pytest.warns(SkippedStepWarning, match="microbatch 1 of batch 1, samples '1'") as told:
            assert math.isnan(parallel.optimizer.step())
        assert told[0].filename == __file__
        assert parallel.skipped.loss is None and parallel.steps_taken == 1
        assert_same(parallel.parameters(), before)
        parallel.execute(step(0, math.nan))
        parallel.optimizer.zero_grad()  # also drops the loss
        parallel.execute(step(0))
        assert parallel.optimizer.step() > 0 and parallel.skipped is None
        folder = store.save(parallel, {})
        good = state(folder)

    model.language_model.module.model.norm.weight.data[3] = math.nan
    with pytest.raises(ModelError, match=r"not finite: llm/module.model.norm.weight \(1 of 32 val"):
        spec.apply(model)
    model.language_model.module.model.norm.weight.data[3] = 1.0
    with spec.apply(model, optimizer=OptimizerConfig(lr=1e30, weight_decay=1e10)) as parallel:
        restore(parallel, folder)
        parallel.train_step(step(0))
        with pytest.raises(NotFiniteError, match=r"no checkpoint of step 3 was written: these"
                                                 r" tensors are not finite: vision/module\..* and"
                                                 r" .* more. The last .*"
                                                 r"/step-00000002"):
            store.save(parallel, {})
        assert store.latest() == folder
        assert_same(state(folder), good)
        parallel.not_finite_tensors = list  # a checkpoint as another program may have written it
        bad = store.save(parallel, {})
        del parallel.not_finite_tensors
        with pytest.raises(CheckpointError, match="has tensors that are not finite: vision/module"):
            restore(parallel, bad)
