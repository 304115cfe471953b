"""Options of parallel modules: declared once, the same errors everywhere."""

from __future__ import annotations

import pytest

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
