"""Comparison of a folder's weights with a model class, by names and shapes only.

transformers loads a folder by rules for renamed, fused and tied weights, and initialises the rest.
To find the rest, transformers loads the folder's tensors on the meta device; only file headers are
read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as hf_logging

from raymm.actors.storage.folder import is_plain_name, read_plain
from raymm.errors import ModelError

# Maximum number of names in a message.
SHOWN = 4


class Misfit(NamedTuple):
    """Parameter or buffer with different shapes in the folder and in the class."""

    name: str
    stored: tuple[int, ...]
    expected: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {list(self.stored)}, expected {list(self.expected)}"


class WeightsReport(NamedTuple):
    """Result of loading a folder into a class. ``lacking`` are parameters and buffers that the
    folder lacks, ``misfits`` those that it has in another shape, and ``unused`` its tensors that
    the class does not have."""

    lacking: tuple[str, ...]
    misfits: tuple[Misfit, ...]
    unused: tuple[str, ...]

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> WeightsReport:
        """Convert the loading info of ``from_pretrained(..., output_loading_info=True)``."""
        misfits = (
            Misfit(name, tuple(stored), tuple(expected))
            for name, stored, expected in info["mismatched_keys"]
        )
        lacking, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
        return cls(tuple(lacking), tuple(sorted(misfits)), tuple(unused))

    @property
    def fresh(self) -> tuple[str, ...]:
        """Names of parameters and buffers without usable values in the folder."""
        return (*self.lacking, *(misfit.name for misfit in self.misfits))

    def refusal(self, model_class: type) -> str | None:
        """Return the reason to reject the folder for a class; None if its weights are complete."""
        reasons = []
        if self.lacking:
            reasons.append(
                f"its weights lack {len(self.lacking)} of {model_class.__name__}: "
                f"{_few(self.lacking)}"
            )
        if self.misfits:
            reasons.append(f"weights with other shapes than in config.json: {_few(self.misfits)}")
        if not reasons:
            return None
        if self.lacking and self.unused:
            reasons.append(f"it has {len(self.unused)} that the class lacks: {_few(self.unused)}")
        return (
            f"{'; '.join(reasons)}. Accepted: a folder with all of the class's weights, or another "
            "model_class; or missing_weights: fresh (in Python, missing_weights='fresh'), which "
            "initialises these from the seed, as for the head of a new task"
        )

    def notes(self, model_class: type) -> list[str]:
        """Return notes for the user about an accepted folder."""
        notes = []
        if self.fresh:
            notes.append(
                f"{len(self.fresh)} weights of {model_class.__name__} are initialised from the "
                f"seed (missing_weights is 'fresh'): {_few(self.fresh)}"
            )
        if self.unused:
            notes.append(
                f"{len(self.unused)} tensors of it are not used by {model_class.__name__}: "
                f"{_few(self.unused)}"
            )
        return notes


def folder_report(
    folder: Path, model_class: type[PreTrainedModel], config: PretrainedConfig
) -> WeightsReport:
    """Compare a folder's weights with a model class. Reads file headers only. Raise a
    ``ModelError`` if files cannot be read, or weights cannot be converted to those of the class."""
    stored: dict[str, torch.Tensor] = {}
    for file in weight_files(folder, config):
        stored |= header_tensors(file)
    try:
        with quiet_loading():
            loaded: Any = model_class.from_pretrained(
                None, config=config, state_dict=stored, device_map={"": "meta"},
                dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True,
            )
    except RuntimeError as error:  # parts of a fused weight do not fit together
        raise ModelError(
            f"its weights cannot be converted to those of {model_class.__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error
    _, info = loaded
    return WeightsReport.of(info)


def weight_files(folder: Path, config: PretrainedConfig) -> list[Path]:
    """Return the files that transformers reads a folder's weights from. Raise a ``ModelError`` if
    there are no files, or some are missing."""
    name = getattr(config, "transformers_weights", None) or SAFE_WEIGHTS_NAME
    _check_plain("transformers_weights of config.json", [name])
    path = folder / name
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if path.is_file() and path.suffix == ".safetensors":
        extra = (folder / name for name in type(config).extra_files)
        return [path, *filter(Path.is_file, extra)]
    if path.is_file():
        index = path
    try:
        names = set(json.loads(read_plain(index))["weight_map"].values())
    except FileNotFoundError:
        raise ModelError(
            f"it has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; expected one"
        ) from None
    except OSError as error:
        raise ModelError(f"cannot read {index}: {error.strerror or error}") from None
    except (ValueError, RecursionError, LookupError, AttributeError, TypeError):
        raise ModelError(
            f"{index} is not an index of weights; expected JSON with a weight_map from parameter "
            "names to files"
        ) from None
    _check_plain(index.name, names)
    files = [folder / name for name in sorted(names)]
    if absent := [file.name for file in files if not file.is_file()]:
        raise ModelError(f"{index.name} names files that are not in the folder: {_few(absent)}")
    return files


def _check_plain(source: str, names: Iterable[Any]) -> None:
    """Raise ModelError if a name is not that of a file directly in the model's folder."""
    if outside := sorted(repr(name) for name in names if not is_plain_name(name)):
        raise ModelError(
            f"{source} names {_few(outside)}; accepted: names of files in the same folder, without "
            "a path"
        )


def header_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return a safetensors file's tensors on the meta device, in fp32. Raise a ``ModelError`` if
    the file cannot be read."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {
                name: torch.empty(opened.get_slice(name).get_shape(), device="meta")
                for name in opened.keys()  # noqa: SIM118 not a dict
            }
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {file}: {error}") from None


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Context manager that hides transformers' load report and its progress bar (one per rank)."""
    level, bar = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bar:
            hf_logging.enable_progress_bar()


def _few(names: Any) -> str:
    return ", ".join(map(str, names[:SHOWN])) + (", ..." if len(names) > SHOWN else "")
