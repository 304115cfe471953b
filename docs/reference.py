"""Generators of the reference pages: of the configuration, from the classes that check it, and of
the Python interface, from the public names of the package.
"""

import inspect
import pydoc
import re
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import raymm
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.optimizer.optimizer_config import OptimizerConfig, UpdateRule
from raymm.config.model_section import LoraSection
from raymm.config.planning_options import PlanningOptions
from raymm.config.sections import (
    LayoutSection,
    OptimizerSection,
    PlanningSection,
    TrainConfig,
    UpdateSection,
)
from raymm.data import DataConfig
from raymm.data.samples.headers import Limits
from raymm.runtime.specs import ParallelSpec

INTRODUCTION = """# Configuration

Every section and field of the YAML file that `raymm train`, `plan`, `profile` and `export` read,
generated from the classes that check it. Unknown keys are rejected, and so are values of another
type (`true` for 1, `"3"` for 3). Every value can be changed on the command line:
`--set run.steps=100`. `${NAME}` and `${NAME:-default}` in texts are environment variables, a
leading `~` is the home folder. Complete configurations:
[stamps.yaml](../examples/alignment/stamps.yaml),
[llm32b.yaml](../examples/planning/llm32b.yaml).
"""
# Classes that describe a section's fields in fields of the same names.
EXPLAINED_BY: dict[type[BaseModel], type] = {
    LayoutSection: ParallelSpec, OptimizerSection: OptimizerConfig,
    UpdateSection: UpdateRule,
    PlanningSection: PlanningOptions, DataConfig: Limits, LoraSection: LoraConfig,
}  # fmt: skip
PYTHON_INTRODUCTION = """# Python reference

The public names of the package `raymm`, generated from their docstrings. Everything else may change
between versions. `raymm.data` and `raymm.callbacks` have further names for data and loggers of your
own; [your own data](own-data.md) and [watching a run](watching.md) show how to use them.
"""
# Every public name belongs to one group.
GROUPS = {
    "Models": (
        "MultimodalModule", "ModalityModule", "from_pretrained", "PretrainedVlm", "ModuleDag",
        "DagModule", "DagLoss", "ContrastiveLoss", "FactorySource", "Projector", "LoraConfig",
        "ReplaceTokens", "Prepend", "CrossAttend", "every", "normal_noise", "uniform_noise",
        "SampleSeeds", "StageHook", "HookCall",
    ),
    "Layouts and plans": (
        "MultimodalParallelSpec", "ParallelSpec", "RankResources", "plan", "Planned",
        "plan_multiplexed", "PlannedMultiplexed", "PlanRequest", "PlanPass", "Plan", "Schedule",
        "dag_plan", "vlm_plan", "plan_of_mapping",
    ),
    "Training": (
        "Trainer", "RunConfig", "DataConfig", "ModalityDataConfig", "OptimizerConfig", "Callback",
        "RunHook", "Result", "connect", "export_model",
    ),
    "Steps": (
        "ParallelModel", "StepOutput", "Timeline", "SkippedStep", "SkippedStepWarning",
    ),
    "Errors": (
        "Error", "InputError", "PlanError", "ClusterError", "RunError", "RankFailedError",
        "NotFiniteError",
    ),
}
_ATTRIBUTES = re.compile(r"^Attributes:\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*?)(?=^    \w|\Z)", re.MULTILINE | re.DOTALL)
_SEE = re.compile(r"see :class:`([\w.]+)`\.(.*)", re.DOTALL)
_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")
_NAMES = {bool: "true or false", str: "text", int: "integer", float: "number", Any: "anything"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}  # as annotated_types calls them
_HUGE = 10**7  # larger bounds only prevent overflow of sums


def configuration_page() -> str:
    """Return the page, in Markdown."""
    return "\n".join([INTRODUCTION, *map(_section, sections(TrainConfig).items())])


def python_page() -> str:
    """Return the page, in Markdown with directives of mkdocstrings.

    Raises:
        LookupError: a public name is in no group, or a group has a name that is not public.
    """
    grouped = {name for names in GROUPS.values() for name in names}
    if wrong := grouped ^ (set(raymm.__all__) - {"__version__"}):
        raise LookupError(f"GROUPS and raymm.__all__ differ: {', '.join(sorted(wrong))}")
    parts = [PYTHON_INTRODUCTION]
    for group, names in GROUPS.items():
        parts.append(f"## {group}\n")
        for name in names:
            # The name in the heading is the one that users import.
            parts.append(f"::: {_path(name)}\n    options:\n      heading: raymm.{name}\n")
    return "\n".join(parts)


def sections(root: type[BaseModel], path: str = "") -> dict[type[BaseModel], list[str]]:
    """Return every section within a section, with its paths."""
    found: dict[type[BaseModel], list[str]] = {}
    for name, field in root.model_fields.items():
        inner = f"{path}{name}" + (".NAME" if dict in _origins(field.annotation) else "")
        for section in _sections_in(field.annotation):
            found.setdefault(section, []).append(inner)
            for further, paths in sections(section, f"{inner}.").items():
                found.setdefault(further, []).extend(paths)
    return found


def description(section: type[BaseModel], name: str) -> str:
    """Return the description of a field.

    Raises:
        LookupError: no class describes the field.
    """
    explained_by = EXPLAINED_BY.get(section)
    for source in (*(explained_by.__mro__ if explained_by else ()), *section.__mro__):
        if is_dataclass(source):
            for field in fields(source):
                if field.name == name and "help" in field.metadata:
                    return field.metadata["help"]
        for names, text in _explained(source):
            if name in names:
                # A reference is replaced by the description in the other class.
                if see := _SEE.match(text):
                    other: Any = pydoc.locate(see[1])
                    return f"{description(other, name)} {see[2]}"
                return text
    raise LookupError(f"no docstring describes {section.__name__}.{name}")


def _explained(source: type) -> Iterator[tuple[list[str], str]]:
    attributes = _ATTRIBUTES.search(inspect.getdoc(source) or "")
    for names, text in _ENTRY.findall(attributes[1] if attributes else ""):
        yield names.split(", "), text


def _section(entry: tuple[type[BaseModel], list[str]]) -> str:
    section, paths = entry
    rows = [
        f"| `{name}` | {_kind(field)} | {_default(field)} | "
        f"{_markdown(description(section, name))} |"
        for name, field in section.model_fields.items()
    ]
    about = (inspect.getdoc(section) or "").split("\n\nAttributes:")[0]
    return "\n".join([
        f"## {', '.join(paths)}\n", _markdown(about) + "\n",
        "| field | value | default | description |", "| --- | --- | --- | --- |", *rows, "",
    ])


def _markdown(text: str) -> str:
    """Return a docstring's text in Markdown, with links to public names and YAML's null."""
    def name(role: re.Match[str]) -> str:
        public = role[1] in raymm.__all__
        return f"[`{role[1]}`][{_path(role[1])}]" if public else f"`{role[1]}`"

    text = _ROLE.sub(name, text).replace("``", "`").replace("|", "\\|")
    return " ".join(re.sub(r"\bNone\b", "null", text).split())


def _path(public: str) -> str:
    """Return the path of a public name's definition, which is its anchor."""
    return f"{getattr(raymm, public).__module__}.{public}"


def _kind(field: FieldInfo) -> str:
    return _spelled(field.annotation) + _bounds(field.metadata)


def _bounds(metadata: Iterable[Any]) -> str:
    text = ""
    for item in metadata:
        if isinstance(item, FieldInfo):
            text += _bounds(item.metadata)
        for name, sign in _BOUNDS.items():
            if (bound := getattr(item, name, None)) is not None and bound < _HUGE:
                text += f" {sign} {bound:g}"
    return text


def _spelled(annotation: Any) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _spelled(inner[0]) + _bounds(inner[1:])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(_spelled(a) for a in inner if a is not type(None)))
    if origin is dict:
        return f"by name: {_spelled(inner[1])}"
    if origin in (list, tuple):
        return f"list of {_spelled(inner[0])}"
    return _NAMES.get(annotation) or "section"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or value in ({}, [], ()):
        return ""
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _origins(annotation: Any) -> Iterator[Any]:
    yield typing.get_origin(annotation)
    for inner in typing.get_args(annotation):
        yield from _origins(inner)


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _sections_in(inner)
