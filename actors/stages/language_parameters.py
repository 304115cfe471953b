"""Parameter names of a language model stage."""

from __future__ import annotations

from raymm.actors.modules.cut import stage_parameters
from raymm.actors.stages.language import LanguageSpec


def language_stage_parameters(spec: LanguageSpec, lo: int, hi: int) -> list[str]:
    """Return the parameter names, relative to the chain, that blocks [lo, hi) own."""
    skeleton = spec.source.skeleton()
    if lo == 0 and hi == spec.num_blocks:
        return [f"module.{name}" for name, _ in skeleton.named_parameters()]
    assert spec.cut is not None
    return [f"module.{name}" for name in stage_parameters(skeleton, spec.cut, lo, hi)]
