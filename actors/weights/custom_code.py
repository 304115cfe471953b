"""Folders that bring Python files of their own (``auto_map``): nothing of theirs runs unasked.

transformers would ask on standard input whether to run them, in every process that loads the
folder. raymm never lets it: a folder is loaded without its files, or, where the user has said so,
with them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Files in which transformers looks for ``auto_map``.
_CONFIGS = (
    "config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json",
)


def custom_code(folder: str | Path) -> dict[str, str]:
    """By auto class (``AutoModel``), the class of its own that a folder names for it, as
    ``module.Class``; empty for most folders. Files that cannot be read are for others to refuse."""
    classes: dict[str, str] = {}
    for name in _CONFIGS:
        try:
            config = json.loads((Path(folder) / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        named = config.get("auto_map") if isinstance(config, dict) else None
        if isinstance(named, list | tuple):  # tokenizers of old: (slow, fast)
            named = {"AutoTokenizer": named}
        for kind, target in named.items() if isinstance(named, dict) else ():
            targets = target if isinstance(target, list | tuple) else [target]
            of_kind = [name for name in targets if isinstance(name, str) and "." in name]
            if of_kind:
                classes.setdefault(str(kind), of_kind[-1])
    return classes


def file_of(target: str) -> str:
    """``module.Class`` -> ``module.py``; ``repository--module.Class`` keeps its repository."""
    return f"{target.rpartition('.')[0]}.py"


def why_not_loaded(folder: str | Path, kind: str, error: BaseException) -> str:
    """What to say of a folder that could not be loaded without its own code.

    Args:
        folder: that was to be loaded.
        kind: the auto class that was asked for.
        error: what transformers said.
    """
    classes = custom_code(folder)
    target = classes.get(kind) or classes.get("AutoConfig") or next(iter(classes.values()), None)
    if target is None:
        return f"{str(folder)!r} cannot be loaded: {type(error).__name__}: {error}"
    return (
        f"{str(folder)!r} needs Python code of its own, {file_of(target)!r} (auto_map), which is "
        "run only where that is asked for: read it, and set model.trust_remote_code: true (in "
        "Python, trust_remote_code=True)"
    )


def own_class(folder: str, target: str) -> Any:
    """Import a class from a folder's own code. Runs it."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(target, folder, local_files_only=True)
