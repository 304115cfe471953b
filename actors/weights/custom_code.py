"""Model folders with custom Python files (``auto_map``), which run only if the user allows them.

transformers would ask on standard input in every process. raymm decides by the user's setting
instead.
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
    """Return a folder's custom classes by auto class (``AutoModel``), as ``module.Class``.
    Unreadable files are ignored here; loading the folder reports them."""
    classes: dict[str, str] = {}
    for name in _CONFIGS:
        try:
            config = json.loads((Path(folder) / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        named = config.get("auto_map") if isinstance(config, dict) else None
        if isinstance(named, list | tuple):  # old tokenizers: (slow, fast)
            named = {"AutoTokenizer": named}
        for kind, target in named.items() if isinstance(named, dict) else ():
            targets = target if isinstance(target, list | tuple) else [target]
            class_names = [name for name in targets if isinstance(name, str) and "." in name]
            if class_names:
                classes.setdefault(str(kind), class_names[-1])
    return classes


def file_of(target: str) -> str:
    """Convert ``module.Class`` to ``module.py``; ``repository--module.Class`` keeps its repository.
    """
    return f"{target.rpartition('.')[0]}.py"


def why_not_loaded(folder: str | Path, kind: str, error: BaseException) -> str:
    """Return the message for a folder that ``kind``, an auto class, could not load without its
    code."""
    classes = custom_code(folder)
    target = classes.get(kind) or classes.get("AutoConfig") or next(iter(classes.values()), None)
    if target is None:
        return f"{str(folder)!r} cannot be loaded: {type(error).__name__}: {error}"
    return (
        f"{str(folder)!r} needs custom Python code, {file_of(target)!r} (auto_map), which runs "
        "only if you allow it: read the code, and set model.trust_remote_code: true (in Python, "
        "trust_remote_code=True)"
    )


def own_class(folder: str, target: str) -> Any:
    """Import a class from a folder's custom code, which runs that code."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(target, folder, local_files_only=True)
