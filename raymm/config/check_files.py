"""Check of the files and folders of a configuration, before slow imports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from raymm.actors.weights.hub_folder import is_hub_id, pinned
from raymm.config.model_section import ModelSection, SourceSection
from raymm.config.sections import TrainConfig
from raymm.data.readers.files import is_there
from raymm.data.remote.urls import is_url
from raymm.data.samples.config import DataConfig
from raymm.data.samples.source_config import HUB
from raymm.errors import ConfigError


def check_files(config: TrainConfig, with_data: bool = False) -> None:
    """Check that files exist, and pin hub ids of models to commits, in place, so that all processes
    of a run read the same files. ``with_data`` includes the files of ``data``. Raises ConfigError,
    which names the field, its value, and what is accepted."""
    for field, section in _modules(config.model):
        if section.path is not None:
            section.replace_files(path=_pinned(field, section.path))
            folder = Path(section.path)
            if not is_hub_id(section.path) and not (folder / "config.json").is_file():
                problem = "has no config.json" if folder.is_dir() else "does not exist"
                raise ConfigError(
                    f"{field}: path is {section.path!r}, which {problem}; expected a folder with "
                    "config.json and safetensors, or the id of a model on the hub, ORG/NAME"
                )
    if with_data:
        _check_data(config.data)
    profile = config.planning.model_dump()["profile"]
    for field, file in (("parallel.plan", config.parallel.plan), ("planning.profile", profile)):
        if file is not None and not Path(file).is_file():
            raise ConfigError(f"{field} is {file!r}; there is no such file")


def _check_data(data: DataConfig) -> None:
    if data.processor is not None:
        data.replace_files(processor=_folder("data.processor", data.processor))
    data.replace_files(tokenizer=_folder("data.tokenizer", data.tokenizer))
    for name, modality in data.modalities.items():
        if modality.processor is not None:
            field = f"data.modalities.{name}.processor"
            modality.replace_files(processor=_pinned(field, modality.processor))
    for split in ("train", "heldout"):
        for source in data.sources(split):
            if is_url(source.path) or is_there(source.path):
                continue
            hub = f"; a data set of the hub is {HUB}{source.path}" if is_hub_id(source.path) else ""
            raise ConfigError(
                f"data.{split}: data file {source.path!r} does not exist (looked for "
                f"{Path(source.path).absolute()}){hub}"
            )


def _modules(model: ModelSection) -> Iterator[tuple[str, ModelSection | SourceSection]]:
    yield "model", model
    if model.language_model is not None:
        yield "model.language_model", model.language_model
    for name, encoder in model.encoders.items():
        yield f"model.encoders.{name}", encoder


def _pinned(field: str, path: str) -> str:
    try:
        return pinned(path)
    except ConfigError as error:
        raise ConfigError(f"{field} is {path!r}: {error}") from None


def _folder(field: str, path: str) -> str:
    if not is_hub_id(path) and not Path(path).is_dir():
        raise ConfigError(
            f"{field}: {path!r} is not a local folder; expected a folder, or the id of a model on "
            "the hub, ORG/NAME"
        )
    return _pinned(field, path)
