"""Which parameters a stage of a language model has."""

from __future__ import annotations

from raymm.actors.modules.cut import stage_parameters
from raymm.actors.stages.language import LanguageSpec


def language_stage_parameters(spec: LanguageSpec, lo: int, hi: int) -> list[str]:
    """Names, relative to the chain, of the parameters that blocks [lo, hi) own.

    Args:
        spec: of the whole language model.
        lo, hi: the blocks of the stage.
    """
    skeleton = spec.source.skeleton()
    if lo == 0 and hi == spec.num_blocks:
        return [f"module.{name}" for name, _ in skeleton.named_parameters()]
    assert spec.cut is not None
    return [f"module.{name}" for name in stage_parameters(skeleton, spec.cut, lo, hi)]
