"""Options of parallel modules: declared once, the same errors everywhere."""

from __future__ import annotations

import pytest

from raymm.actors.placement.placement import ClusterError
from raymm.actors.rank.rank_resources import RankResources
from raymm.runtime.multiplexed import MultiplexedParallelModule
from raymm.runtime.multiplexed_dag import MultiplexedModule
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.pipelined import MultimodalParallelModule

CLASSES = (MultimodalParallelModule, MultiplexedParallelModule, MultiplexedModule)


@pytest.mark.parametrize("make", CLASSES)
def test_options_are_refused_by_name_before_anything_else(make):
    with pytest.raises(TypeError, match="'sed' is no option .* accepted: .*seed, timeout_s"):
        make(None, None, sed=1)
    with pytest.raises(ValueError, match="device is 'tpu'; accepted: cpu, cuda"):
        make(None, None, device="tpu")


@pytest.mark.parametrize("make", CLASSES)
@pytest.mark.parametrize("gpus", [0.5, 2.0, 0.0])
def test_ranks_on_gpus_have_one_each(make, gpus):
    with pytest.raises(ClusterError, match=f"gpus is {gpus:g} with device 'cuda'; accepted: 1"):
        make(None, None, device="cuda", resources=RankResources(gpus=gpus))


def test_the_environment_of_ranks_is_names_and_texts():
    assert RankResources(env={"NCCL_DEBUG": "INFO"}).env == {"NCCL_DEBUG": "INFO"}
    for env in ({"": "a"}, {"A=B": "c"}, {"A": "\0"}, {"A": 1}):
        with pytest.raises(ClusterError, match="resources.env has"):
            RankResources(env=env)  # type: ignore[arg-type]


def test_a_graph_of_modules_has_no_precision():
    with pytest.raises(TypeError, match="'precision' is no option"):
        MultiplexedModule(None, None, precision="bf16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="precision is 'fp8'; accepted: fp32, bf16"):
        MultimodalParallelModule(None, None, precision="fp8")  # type: ignore[arg-type]


def test_what_follows_from_options():
    options = RuntimeOptions.of({"optimizer": None, "precision": "bf16", "device": "cuda"})
    assert options.optimizer == RuntimeOptions().optimizer
    assert options.autocast == "bfloat16" and RuntimeOptions().autocast is None
    assert options.reserved == RankResources(gpus=1.0)
    assert RuntimeOptions().reserved == RankResources()
