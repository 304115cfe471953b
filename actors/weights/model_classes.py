"""Lookup of transformers classes by name. Only transformers is ever imported."""

from __future__ import annotations

import difflib
import importlib
import re
from functools import cache
from pathlib import Path

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from raymm.errors import ModelError

_PATH = re.compile(r"transformers(\.models\.\w+\.modeling_\w+)?\.(\w+)")
_CLASS = re.compile(r"^class (\w+)\(", re.MULTILINE)


def find_model_class(name: str, config: PretrainedConfig | None = None) -> type[PreTrainedModel]:
    """Return a model class of transformers, exported or not. Raise a ``ModelError`` if there is no
    such model class, or more than one.

    Args:
        name: ``"SiglipVisionModel"``, or, if several files define the name, a path such as
            ``"transformers.models.siglip.modeling_siglip.SiglipVisionModel"``.
        config: config of the model; the file of its model type is preferred.
    """
    if "." in name:
        if not _PATH.fullmatch(name):
            raise ModelError(
                f"model_class is {name!r}; accepted: a class name, or a path within transformers "
                "such as transformers.models.siglip.modeling_siglip.SiglipVisionModel"
            )
        module, _, leaf = name.rpartition(".")
        return _model_class(name, module, leaf)
    if hasattr(transformers, name):
        return _model_class(name, "transformers", name)
    modules = _modules().get(name, ())
    type_segment = f".{getattr(config, 'model_type', None) or ' '}."
    candidates = [module for module in modules if type_segment in module] or list(modules)
    if not candidates:
        close = difflib.get_close_matches(name, _modules(), n=3)
        hint = f"; there is {', '.join(close)}" if close else ""
        raise ModelError(f"model_class is {name!r}; transformers has no such class{hint}")
    if len(candidates) > 1:
        matches = ", ".join(f"{module}.{name}" for module in candidates)
        raise ModelError(
            f"model_class is {name!r}, which is ambiguous in transformers; accepted: one of "
            f"{matches}"
        )
    return _model_class(name, candidates[0], name)


@cache
def _modules() -> dict[str, tuple[str, ...]]:
    """Return defining modules by class name, found in the source text: imports would take minutes.
    """
    modules: dict[str, tuple[str, ...]] = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        module = f"transformers.models.{file.parent.name}.{file.stem}"
        for name in set(_CLASS.findall(file.read_text(encoding="utf-8"))):
            modules[name] = (*modules.get(name, ()), module)
    return modules


def _model_class(field: str, module: str, name: str) -> type[PreTrainedModel]:
    try:
        model_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"model_class is {field!r}, which cannot be imported: {error}"
        ) from error
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise ModelError(f"model_class is {field!r}, which is not a PreTrainedModel")
    return model_class
