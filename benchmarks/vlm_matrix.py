"""Claim: every vision, audio and omni model of transformers is split exactly or rejected by name.

Run with `python -m benchmarks.vlm_matrix --json`.

Each class gets a tiny configuration derived from its own defaults, and three microbatches: an item
of a different size in each row, text only, and two items in one of two rows. Its towers and its
language model run in two stages each, as on ranks, and are compared with the class's own forward in
one process: loss, every gradient, the losses of three AdamW steps, and the folder that is saved
from the stages and loaded again. A bf16 folder is exported too: its files must have the same bytes,
and so must a second export of trained weights. Outcomes are those of :mod:`benchmarks.families`.
"""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from benchmarks.families import class_parser, named, run
from benchmarks.shared.family_classes import Family, _pairs
from benchmarks.shared.vlm_check import check

KIND = "vision- or audio-language model"


def whole_models() -> list[Family]:
    """Return every class of transformers' registries for text with images, or with any modality."""
    found: dict[type[PreTrainedModel], Family] = {}
    for registry in (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
    ):
        for config, model in _pairs(registry):
            found.setdefault(model, Family(KIND, model, model.config_class or config))
    return sorted(found.values(), key=lambda family: family.name)


def main() -> None:
    options = class_parser((__doc__ or "").splitlines()[0]).parse_args()
    run(every := whole_models(), named(every, options.only or ()), options, check)


if __name__ == "__main__":
    main()
