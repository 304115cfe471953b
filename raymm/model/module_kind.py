"""Kinds of modules of a multimodal model."""

from enum import StrEnum

LANGUAGE_MODEL = "llm"
"""Name of the language model among a model's modules; no encoder may have it."""


class ModuleKind(StrEnum):
    """Kind of a module, which determines how its layers are counted and cut."""

    ENCODER = "encoder"  # reads items of a modality independently
    LANGUAGE_MODEL = "language_model"  # reads text and features; computes the loss


def module_kind(name: str) -> ModuleKind:
    """Return the kind of a module of a :class:`raymm.MultimodalModule`, by its name."""
    return ModuleKind.LANGUAGE_MODEL if name == LANGUAGE_MODEL else ModuleKind.ENCODER
