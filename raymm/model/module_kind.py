"""The kinds of modules that a multimodal model has."""

from enum import StrEnum

LANGUAGE_MODEL = "llm"
"""Name of the language model among a model's modules; no encoder may have it."""


class ModuleKind(StrEnum):
    """What a module reads, and so what its layers are counted and cut as."""

    ENCODER = "encoder"  # items of a modality, each by itself
    LANGUAGE_MODEL = "language_model"  # text with what encoders made of it; computes the loss


def module_kind(name: str) -> ModuleKind:
    """Of a module of a :class:`raymm.model.multimodal.MultimodalModule`, by its name."""
    return ModuleKind.LANGUAGE_MODEL if name == LANGUAGE_MODEL else ModuleKind.ENCODER
