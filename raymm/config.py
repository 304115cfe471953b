"""The configuration of a run, as ``raymm train CONFIG.yaml`` reads it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    ValidationError,
    model_validator,
)

from raymm.actors.group import RankResources
from raymm.actors.optimizer import OptimizerConfig
from raymm.data import DataConfig


class ConfigError(ValueError):
    """A configuration that cannot run. Names the field, its value and what is accepted."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SourceSection(_Section):
    """Where a module comes from: exactly one of ``path``, ``config``, ``factory``.

    Attributes:
        path: local folder that ``save_pretrained`` wrote.
        config: Hugging Face config values with their ``model_type``; random weights.
        factory: ``"package.module:function"`` that returns a plain ``nn.Module``.
        kwargs: the factory's arguments.
        weights: safetensors file with the factory module's state dict.
        model_class: transformers class name, where config or folder do not say which.
        frozen: whether the module's weights stay as they are.
    """

    path: str | None = None
    config: dict[str, Any] | None = None
    factory: str | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict)
    weights: str | None = None
    model_class: str | None = None
    frozen: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> SourceSection:
        given = [name for name in ("path", "config", "factory") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of path, config, factory; got {given or 'none'}")
        return self


class EncoderSection(SourceSection):
    """An encoder and its projector. Callbacks are import paths (Cornstarch v1, Listing 2)."""

    projector: Literal["linear", "mlp"] | None = "mlp"
    projector_frozen: bool = False
    hidden_size: int | None = Field(default=None, gt=0)
    preprocess: str | None = None
    postprocess_module: str | None = None
    postprocess_projector: str | None = None


class ModelSection(_Section):
    """The model.

    Attributes:
        language_model: the language model.
        encoders: by modality name, as in ``data.modalities``.
        merge: ``"prepend"``, or a placeholder token per encoder
            (``{vision: "<image>"}``), or the import path of a merge policy.
        mask: which tokens of the merged sequence see which: ``"causal"``, ``"multimodal"``
            (text is causal, an encoder's tokens see one another), ``"multimodal_isolated"``
            (an item's tokens see their item), ``"causal_with_own_image"`` (causal, and an
            item's tokens see all of it), or the import path of a mask policy; default: the
            language model's own mask.
        packing: run a microbatch's samples as one sequence without padding, each a document by
            itself.
    """

    language_model: SourceSection
    encoders: dict[str, EncoderSection] = Field(default_factory=dict)
    merge: str | dict[str, str] = "prepend"
    mask: str | None = None
    packing: bool = False


class LayoutSection(_Section):
    """Layout of one module: see :class:`raymm.specs.ParallelSpec`, which checks the numbers.
    Strict ones: others take true for 1."""

    pp: StrictInt = 1
    chunks: StrictInt = 1
    replicas: StrictInt | None = None
    tp: StrictInt = 1
    cp: StrictInt = 1
    dp: StrictInt = 1
    sharding: Literal["none", "zero1", "fsdp"] = "none"
    recompute_layers: str | tuple[str, ...] = "keep"
    layers: tuple[StrictInt, ...] | None = None
    ranks: tuple[StrictInt, ...] | None = None
    quota: StrictFloat | None = None


class ParallelSection(_Section):
    """What runs where. Without ``language_model``, ``encoders`` and ``plan``, raymm plans.

    Attributes:
        language_model, encoders: layouts by module; what is not named gets one stage on a rank
            of its own.
        plan: a file that ``raymm plan`` saved, which is used instead of layouts: a pipelined plan
            or a multiplexed mapping.
        style: where raymm plans: ``"pipelined"`` (the default), ``"multiplexed"``, or ``"auto"``,
            whichever is predicted to be faster.
        schedule: ``"1f1b"`` (the default of layouts), ``"zero_bubble"`` or ``"gpipe"``; where
            raymm plans, the only one it tries.
        recompute: run forwards again for their backward instead of keeping activations. Where
            raymm plans, ``"layers"`` means: every layer keeps as much as there is memory for; and
            None: what is fastest within the memory.
    """

    language_model: LayoutSection = Field(default_factory=LayoutSection)
    encoders: dict[str, LayoutSection] = Field(default_factory=dict)
    plan: str | None = None
    style: Literal["pipelined", "multiplexed", "auto"] | None = None
    schedule: str | None = None
    recompute: bool | Literal["layers"] | None = None

    @property
    def has_layouts(self) -> bool:
        """Whether layouts are given, so that there is nothing to plan."""
        return bool(self.model_fields_set & {"language_model", "encoders"})


class PlanningSection(_Section):
    """What raymm plans for, where it plans. Options of ``raymm plan`` go before it.

    Attributes:
        ranks: how many devices there will be; those of the cluster by default.
        device: a device that costs are computed for (``raymm.scheduler.devices``); the
            cluster's by default.
        profile: file of ``raymm profile``; its measured costs are used instead.
        tokens: tokens per sample, by module: the language model's with everything merged in,
            an encoder's of one item. Where not given, those of the training data.
        memory_gib: GiB that a device may use; by default 0.9 of the device's memory, without
            limit on CPUs.
        ranks_per_node: devices that share a node; decides which links are fast.
        degrees: which degrees of parallelism within modules may be used beside pipelines:
            ``auto`` (all), ``none``, or a list of ``tp``, ``cp``, ``dp``; ``tp=4`` up to a degree,
            ``llm.tp=4`` with this one.
    """

    ranks: int | None = Field(default=None, gt=0)
    device: str | None = None
    profile: str | None = None
    tokens: dict[str, int] = Field(default_factory=dict)
    memory_gib: float | None = Field(default=None, gt=0)
    ranks_per_node: int = Field(default=8, gt=0)
    degrees: str | list[str] = "auto"


class ResourcesSection(_Section):
    """What one rank reserves in Ray, and how many threads it computes with."""

    cpus: float = Field(default=1.0, ge=0)
    gpus: float | None = Field(default=None, ge=0)
    custom: dict[str, float] = Field(default_factory=dict)
    threads: int = Field(default=1, ge=1)

    def for_device(self, device: str) -> RankResources:
        gpus = self.gpus if self.gpus is not None else float(device == "cuda")
        return RankResources(self.cpus, gpus, self.custom)


class OptimizerSection(_Section):
    """AdamW: see :class:`raymm.actors.optimizer.OptimizerConfig`. ``total_steps`` is the run's
    ``steps`` unless given."""

    lr: float = Field(default=1e-3, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    total_steps: int | None = Field(default=None, gt=0)
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)

    def build(self, steps: int) -> OptimizerConfig:
        values = self.model_dump()
        values["total_steps"] = self.total_steps or steps
        return OptimizerConfig(**values)


class RunConfig(_Section):
    """How long to run, and what to write where.

    Attributes:
        storage_path: folder of the run; on a cluster, one that every node can reach. A run
            whose folder holds a checkpoint goes on from it.
        steps: optimizer steps in all.
        checkpoint_every: steps between checkpoints; the last step always writes one.
        keep_checkpoints: how many to keep.
        eval_every: steps between held-out evaluations; None for none. The first is before
            the first step.
        eval_steps: held-out steps per evaluation; None for all of the held-out data.
        eval_shuffled: also report the held-out loss with each modality's items given to the
            wrong samples: the gap to the right ones is what the model gets out of them.
        log_every: steps between printed lines.
        seed: of random weights and dropout.
        precision: ``"fp32"``, or ``"bf16"`` autocast with fp32 parameters.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``: CUDA if the cluster has GPUs.
        timeout_s: seconds a rank may wait for another.
        steps_in_flight: steps submitted ahead, so that ranks never wait for the driver.
        log_samples: write ``samples.jsonl``: which samples every step had, by microbatch.
    """

    storage_path: str
    steps: int = Field(gt=0)
    checkpoint_every: int = Field(default=100, gt=0)
    keep_checkpoints: int = Field(default=2, gt=0)
    eval_every: int | None = Field(default=None, gt=0)
    eval_steps: int | None = Field(default=None, gt=0)
    eval_shuffled: bool = True
    log_every: int = Field(default=10, gt=0)
    seed: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: float = Field(default=300.0, gt=0)
    steps_in_flight: int = Field(default=2, ge=1, le=8)
    log_samples: bool = False


class TrainConfig(_Section):
    """A whole configuration file."""

    run: RunConfig
    model: ModelSection
    data: DataConfig
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    planning: PlanningSection = Field(default_factory=PlanningSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    resources: ResourcesSection = Field(default_factory=ResourcesSection)

    @model_validator(mode="after")
    def _modalities_match(self) -> TrainConfig:
        unknown = set(self.data.modalities) - set(self.model.encoders)
        if unknown:
            raise ValueError(
                f"data.modalities has {sorted(unknown)}, but model.encoders are "
                f"{sorted(self.model.encoders) or 'none'}"
            )
        return self

    @model_validator(mode="after")
    def _placeholders_of_the_merge(self) -> TrainConfig:
        """Data workers need to know them, to compare them with the items of a sample."""
        merge = self.model.merge if isinstance(self.model.merge, dict) else {}
        for name, modality in self.data.modalities.items():
            token = merge.get(name)
            if token is None:
                continue
            if modality.placeholder not in (None, token):
                raise ValueError(
                    f"data.modalities.{name}.placeholder is {modality.placeholder!r}, but "
                    f"model.merge.{name} is {token!r}; leave out the first"
                )
            modality.placeholder = token
        return self


_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def expand_variables(value: Any, where: str = "") -> Any:
    """Replace ``${NAME}`` and ``${NAME:-default}`` in strings by environment variables, and a
    leading ``~`` by the home folder.

    Raises:
        ConfigError: if a variable without default is not set.
    """
    if isinstance(value, dict):
        prefix = f"{where}." if where else ""
        return {k: expand_variables(v, f"{prefix}{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [expand_variables(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, default = match.groups()
        if name not in os.environ and default is None:
            raise ConfigError(f"{where}: the environment variable {name} is not set")
        return os.environ.get(name) or default or ""

    expanded = _VARIABLE.sub(replace, value)
    return os.path.expanduser(expanded) if expanded.startswith("~") else expanded


def apply_override(data: dict[str, Any], override: str) -> None:
    """Apply one ``a.b.c=value`` in place; the value is read as YAML.

    Raises:
        ConfigError: if it has no ``=`` or goes through something that is no section.
    """
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set takes key.path=value, got {override!r}")
    *parents, last = path.split(".")
    target = data
    for name in parents:
        target = target.setdefault(name, {})
        if not isinstance(target, dict):
            raise ConfigError(f"--set {override}: {name!r} is a value, not a section")
    try:
        target[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: {error}") from None


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a configuration file.

    Args:
        path: YAML file.
        overrides: ``key.path=value`` strings, applied in order.

    Raises:
        ConfigError: naming every wrong field.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"config is {str(path)!r}; there is no such file")
    try:
        data = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}, not sections")
    for override in overrides:
        apply_override(data, override)
    return parse_config(data)


def parse_config(data: dict[str, Any]) -> TrainConfig:
    """Check configuration values.

    Raises:
        ConfigError: naming every wrong field.
    """
    try:
        return TrainConfig.model_validate(expand_variables(data))
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "config"
        if item["type"] == "extra_forbidden":
            accepted = ", ".join(_fields_at(item["loc"][:-1]))
            lines.append(f"{where}: unknown key; accepted: {accepted}")
        elif item["type"] == "missing":
            lines.append(f"{where}: required, but not given")
        else:
            message = item["msg"].removeprefix("Value error, ")
            value = item["input"]
            given = "" if isinstance(value, dict) else f" (got {value!r})"
            lines.append(f"{where}: {message}{given}")
    return "\n".join(lines)


def _fields_at(path: Sequence[Any]) -> list[str]:
    """Names of the fields of the section that a location leads to."""
    section: Any = TrainConfig
    for part in path:
        field = section.model_fields.get(part) if isinstance(section, type) else None
        annotation = field.annotation if field is not None else None
        models = _models_in(annotation)
        if field is not None and models:
            section = models[0]
        # a dict key (an encoder's name) stays at the section its values have
    return sorted(section.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for argument in getattr(annotation, "__args__", ()) for m in _models_in(argument)]
