"""raymm: distributed training of multimodal models on Ray.

``raymm.actors``, ``raymm.scheduler`` and ``raymm.kernels`` lie beside this folder in
a checkout. When the package runs from a checkout that is not installed, they are
found there; an installed raymm has them below this folder.
"""

from pathlib import Path as _Path

_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "actors").is_dir():
    __path__.append(str(_root))

__version__ = "0.1.0"
