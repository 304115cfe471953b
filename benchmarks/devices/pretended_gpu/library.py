"""Library that lets torch accept tensors on a missing GPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("guard.cpp", "hooks.cpp"))
_BUILD_SECONDS = 300


def load() -> None:
    """Import torch with a CUDA device guard and hooks that need no device.

    Raises:
        RuntimeError: torch is already imported.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is already imported; import the pretended GPU first")
    library = ctypes.CDLL(str(build()), ctypes.RTLD_GLOBAL)  # registers the hooks
    import torch  # noqa: F401

    library.install_guard()


def build() -> Path:
    """Build the library, once per installation of torch and per version of the sources.

    The file is in the temporary folder, which environments share. It contains the path of torch's
    own libraries, so it serves only the environment that built it.

    Raises:
        RuntimeError: compilation failed; contains the compiler's output.
    """
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    version = (torch / "version.py").read_bytes()
    sources = b"".join(source.read_bytes() for source in _SOURCES)
    content = hashlib.sha256(str(torch).encode() + version + sources)
    user = os.getuid()
    library = Path(tempfile.gettempdir()) / f"pretended_gpu-{user}-{content.hexdigest()[:16]}.so"
    if library.exists():
        return library
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [
        "g++", "-shared", "-fPIC", "-std=c++20", *map(str, _SOURCES), f"-I{torch}/include",
        f"-I{torch}/include/torch/csrc/api/include", f"-L{torch}/lib", "-lc10", "-ltorch_cpu",
        f"-Wl,-rpath,{torch}/lib", "-o", str(unfinished),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    unfinished.replace(library)
    return library
