"""Check that the frozen leading blocks of an encoder always return the same features for an
item."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from raymm.actors.features.kept_features import every_item
from raymm.actors.modules.brief_error import because
from raymm.actors.modules.cut import prune
from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.probe.callbacks import Cuts, Inputs, chain_example, module_inputs, probe_chain
from raymm.actors.probe.draws import NotedDraws
from raymm.actors.quota.generators import generators_kept, host_states
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.stages.stage_inputs import joined, kept_entries
from raymm.actors.weights.source import on_meta, set_mode
from raymm.errors import USER_CODE_RAISES, ProbeError


def what_changes(spec: EncoderSpec, blocks: int, example: Inputs | None = None) -> str | None:
    """Return why the features of an encoder's first ``blocks`` blocks cannot be cached; None if
    they can.

    A partly frozen encoder runs in training mode, so its frozen blocks may still draw random
    numbers. All of them run on the meta device, since in some models later blocks draw more.
    ``example`` holds inputs of the encoder in a batch; they are guessed if None.
    """
    try:
        spec = probe_chain(spec, Cuts(True, False), example)
        skeleton = set_mode(on_meta(spec.source.skeleton()).to("meta"))
        example = chain_example(spec, skeleton, example)
        inputs = module_inputs(spec, example)
    except ProbeError as error:
        return str(error)
    assert spec.cut is not None  # set by the probe
    module = prune(skeleton, spec.cut, 0, blocks)
    if any(isinstance(child, _BatchNorm) and child.training for child in module.modules()):
        return "they contain batch norms, whose running statistics change in training"
    stage = EncoderStage(replace(spec, preprocess=None), 0, blocks, module, None)
    drawn: list[tuple[int, ...]] = []
    context = MicrobatchContext(1)
    try:
        with generators_kept(), torch.no_grad(), NotedDraws(drawn):
            states_before = host_states()
            hidden = [stage.run(item, {}, context) for item in every_item(_two(inputs))]
            after = host_states()
    except USER_CODE_RAISES as error:  # not every forward runs without data
        return f"they do not run on the meta device{because(error)}"
    if drawn or after != states_before:
        return "they draw random numbers in training, as dropout does"
    entries = kept_entries(joined(hidden))
    if bad := [name for name, entry in entries.items() if len(entry) != 2]:
        return f"their output {bad[0]!r} does not have one row per item"
    return None


def _two(inputs: Inputs) -> dict[str, Any]:
    """Return inputs of two items on the meta device."""
    return {
        name: torch.cat([value[:1]] * 2).to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
