"""Kinds of modules of a multimodal model."""

from enum import StrEnum

LANGUAGE_MODEL = "llm"
"""Name of the language model among a model's modules; no encoder may have it."""


class ModuleKind(StrEnum):
    """Kind of a module, which determines how its layers are counted and cut."""

    ENCODER = "encoder"  # reads items of a modality independently
    LANGUAGE_MODEL = "language_model"  # reads text and features; computes the loss
