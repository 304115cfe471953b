"""Construction of a model description and a plan from configuration sections."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig

from raymm.actors.modules.merge import CrossAttend, MergePolicy, Prepend, ReplaceTokens
from raymm.actors.weights.source import FactorySource
from raymm.config.model_section import (
    EncoderSection,
    SourceSection,
    adapters_of,
    example_tensors,
    frozen_flag,
)
from raymm.config.planning_options import named_schedule
from raymm.config.sections import DegreeRange, LayoutSection, ParallelSection, TrainConfig
from raymm.config.vlm import build_vlm, preference_of, token_loss_of
from raymm.data.conversations.text import load_tokenizer
from raymm.errors import USER_CODE_RAISES, ConfigError, ModelError, PlanError
from raymm.files.run_files import write_whole
from raymm.layout.plan_check import check_fits, chosen_per_batch, differences
from raymm.model.modality_module import ModalityModule
from raymm.model.model import Model
from raymm.model.multimodal import MultimodalModule
from raymm.packages import import_object
from raymm.plural import plural
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.graph.strict_json import read_file
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedules.registry import DEFAULT_SCHEDULE
from raymm.scheduler.search.options import LAYERS, SEARCHED_SCHEDULES

# Minimum similarity, from 0 to 1, of a known key that is suggested for an unknown one.
_ALIKE = 0.7


def build_model(config: TrainConfig) -> Model:
    """Return the model of a configuration. It holds no weights except the projectors'. Raises
    ModelError, ConfigError or DataError, which name what does not exist or fit."""
    model = _build_parts(config) if config.model.path is None else build_vlm(config)
    for name, paths in config.model.stage_hooks.items():
        for number, path in enumerate(paths):
            with _errors_name(f"model.stage_hooks.{name}[{number}]"):
                hook = import_object(path)
                try:
                    hook = hook() if isinstance(hook, type) else hook
                except USER_CODE_RAISES as error:
                    kind = type(error).__name__
                    raise ModelError(f"{path}() raised {kind}: {error}") from error
                model.add_stage_hook(name, hook)
    return model


def _build_parts(config: TrainConfig) -> MultimodalModule:
    seed, trust = config.run.seed, config.model.trust_remote_code
    encoders = {}
    for name, section in config.model.encoders.items():
        with _errors_name(f"model.encoders.{name}"):
            encoders[name] = ModalityModule(
                _source_of(section, seed),
                section.projector,
                frozen=frozen_flag(section.train),
                lora=adapters_of(section.train),
                projector_frozen=frozen_flag(section.projector_train),
                projector_lora=adapters_of(section.projector_train),
                hidden_size=section.hidden_size,
                model_class=section.model_class,
                preprocess_callback=_callback("preprocess", section.preprocess),
                postprocess_module_callback=_callback(
                    "postprocess_module", section.postprocess_module
                ),
                postprocess_projector_callback=_callback(
                    "postprocess_projector", section.postprocess_projector
                ),
                example_inputs=example_tensors(section.example_inputs),
                seed=seed,
                trust_remote_code=trust,
                missing_weights=section.missing_weights,
            )
            encoders[name].output_size(encoders[name].source())
    section = config.model.language_model
    assert section is not None  # ModelSection has it or a path
    with _errors_name("model.language_model"):
        language_model = ModalityModule(
            _source_of(section, seed), frozen=frozen_flag(section.train),
            lora=adapters_of(section.train), model_class=section.model_class,
            seed=seed, trust_remote_code=trust, missing_weights=section.missing_weights,
        )
        language_model.set_causal()
        language_model.source()
    mask = config.model.mask
    if mask is not None and ":" in mask:
        mask = _callback("model.mask", mask)
    with _errors_name("model"):
        return MultimodalModule(
            encoders, language_model, build_merge(config), mask, config.model.packing,
            config.model.router_loss, preference_of(config.model),
            token_loss_of(config.model),
        )


@contextmanager
def _errors_name(field: str) -> Iterator[None]:
    """Prefix errors about a module's source with the module's field."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{field}: {error}") from error


def _source_of(section: SourceSection | EncoderSection, seed: int) -> Any:
    if section.factory is not None:
        _callback("factory", section.factory)
        return FactorySource(section.factory, section.kwargs, section.weights, seed=seed)
    if section.config is not None:
        return model_config(section.config)
    return section.path


def _callback(field: str, target: str | None) -> Callable[..., Any] | None:
    if target is None:
        return None
    try:
        function = import_object(target)
    except ModelError as error:
        raise ConfigError(f"{field}: {error}") from None
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(f"{field}: {target!r} is a {kind}; expected a function")
    return function


def build_merge(config: TrainConfig) -> MergePolicy:
    """Return the merge policy of a configuration.

    Raises:
        ConfigError: a placeholder is not a single token of the tokenizer, or is for an unknown
            encoder.
        DataError: the tokenizer does not exist.
    """
    merge = config.model.merge
    if merge == "prepend":
        return Prepend()
    if merge == "cross_attention":
        return CrossAttend()
    if isinstance(merge, str):
        policy = _callback("model.merge", merge)
        assert policy is not None  # it is named
        return policy
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.trust_remote_code)
    if missing := sorted(set(config.model.encoders) - set(merge)):
        raise ConfigError(f"model.merge gives no placeholder token for {missing}")
    ids = {}
    for name, token in merge.items():
        if name not in config.model.encoders:
            raise ConfigError(
                f"model.merge names {name!r}; model.encoders are "
                f"{sorted(config.model.encoders) or 'none'}"
            )
        encoded = tokenizer.encode(token, add_special_tokens=False)
        if len(encoded) != 1:
            raise ConfigError(
                f"model.merge.{name} is {token!r}, which is {len(encoded)} tokens; "
                "expected one token of the tokenizer"
            )
        if encoded[0] == tokenizer.unk_token_id and token != tokenizer.unk_token:
            raise ConfigError(f"model.merge.{name} is {token!r}, which the tokenizer does not know")
        ids[name] = encoded[0]
    return ReplaceTokens(ids)


def build_plan(config: TrainConfig, model: Model) -> Plan | None:
    """Return the plan of the configuration's layouts or its ``parallel.plan`` file, which may be a
    multiplexed mapping. None if raymm makes the plan.

    Raises:
        PlanError: the plan cannot run.
        ConfigError: the file does not exist or is for another model.
    """
    section = config.parallel
    if section.style is not None and (section.plan is not None or section.has_layouts):
        setting = "parallel.plan is" if section.plan is not None else "layouts are"
        raise ConfigError(
            f"parallel.style is {section.style!r}, but {setting} given; accepted only for plans "
            "that raymm makes"
        )
    if section.style == "multiplexed":
        _refuse_pipelined_only(section, "parallel.style is 'multiplexed', which does not use it")
    planning = config.planning.model_dump()
    passes, per_batch = planning["passes"], planning["per_batch"]
    if section.plan is not None:
        plan = _plan_of_file(section.plan, config, model)
        if passes and plan.passes != passes:
            raise ConfigError(
                f"planning.passes is {list(passes)}, and the passes of parallel.plan "
                f"{section.plan!r} were {list(plan.passes)}; accepted: the same, or none"
            )
        if not per_batch:
            return plan
        try:
            return chosen_per_batch(plan, plan.step_schedules or SEARCHED_SCHEDULES)
        except PlanError as error:
            raise PlanError(f"planning.per_batch is true, and {error}") from None
    for name, value in (("passes", list(passes)), ("per_batch", per_batch)):
        if section.has_layouts and value:
            raise ConfigError(
                f"planning.{name} is {value}, but layouts are given; accepted only for plans "
                "that raymm makes"
            )
    if section.has_layouts and section.recompute == LAYERS:
        raise ConfigError(
            f"parallel.recompute is {LAYERS!r}, accepted only for plans that raymm makes; with "
            "layouts, give recompute_layers of each module"
        )
    if (specs := build_layouts(config)) is None:
        return None
    return specs.plan(model)


def build_layouts(config: TrainConfig) -> MultimodalParallelSpec | None:
    """Return the layouts of a configuration; None without. Raises PlanError, which names the
    module, if a layout is not possible."""
    section = config.parallel
    specs = MultimodalParallelSpec(
        {name: _spec(f"encoders.{name}", layout) for name, layout in section.encoders.items()},
        _spec("language_model", section.language_model),
        config.data.microbatches,
        _schedule(section) or DEFAULT_SCHEDULE,
        bool(section.recompute),
    )
    return specs if section.has_layouts else None


def _plan_of_file(
    path: str, config: TrainConfig, model: Model
) -> Plan:
    name = _schedule(config.parallel)
    custom = name is not None and ":" in name  # a plan of it needs the class
    section = config.parallel.model_copy(update={"schedule": None}) if custom else config.parallel
    _refuse_pipelined_only(section, "parallel.plan is given, which has its own")
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"parallel.plan is {path!r}; there is no such file")
    try:
        text = read_file(file)
    except PlanError as error:
        raise ConfigError(f"parallel.plan: {error}") from None
    try:
        plan = Plan.from_json(text)
        check_fits(plan)
    except PlanError as error:
        raise PlanError(f"parallel.plan {path!r}: {error}") from None
    if custom and plan.schedule != name:
        raise ConfigError(
            f"parallel.schedule is {name!r}, but parallel.plan {path!r} has {plan.schedule!r}; "
            "give one of them"
        )
    if different := differences(plan.graph, model.graph):
        raise ConfigError(
            f"parallel.plan {path!r} was made for another model: {'; '.join(different)}"
        )
    if plan.num_microbatches != config.data.microbatches:
        raise ConfigError(
            f"parallel.plan has {plural(plan.num_microbatches, 'microbatch', 'es')}, "
            f"data.microbatches is {config.data.microbatches}; they must be equal"
        )
    return plan


def _schedule(section: ParallelSection) -> str | None:
    name = section.schedule
    return None if name is None else named_schedule("parallel.schedule", name)


def _refuse_pipelined_only(section: ParallelSection, why: str) -> None:
    for name in ("schedule", "recompute"):
        if getattr(section, name) is not None:
            raise ConfigError(
                f"parallel.{name} is {getattr(section, name)!r}, but {why}; give one of them"
            )


def _spec(where: str, layout: LayoutSection) -> ParallelSpec:
    values = layout.model_dump()
    if isinstance(layout.dp, DegreeRange):
        values |= {"dp": layout.dp.min, "max_dp": layout.dp.max}
    try:
        return ParallelSpec(**values)
    except PlanError as error:
        raise PlanError(f"parallel.{where}: {error}") from None


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically. Raises RunFileError if the file cannot be written."""
    write_whole(path, json.dumps(value, indent=2))


def model_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """Return the config of values with a ``model_type``.

    Raises:
        ConfigError: unknown type, a key that the config class does not have (transformers would
            store and ignore it), or a value that the class refuses.
    """
    values = dict(values)
    kind = values.pop("model_type", None)
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        suggestion = _like(kind, transformers.CONFIG_MAPPING)
        raise ConfigError(
            f"config.model_type is {kind!r}; expected one that transformers knows, such as "
            f"{suggestion or 'llama or siglip_vision_model'}"
        )
    try:
        config = transformers.CONFIG_MAPPING[kind](**values)
    except Exception as error:  # each config class has its own checks and error types
        raise ConfigError(f"config of a {kind!r} model: {error}") from None
    _check_keys(config, values, "config", _default(type(config)))
    return config


def _check_keys(
    config: PretrainedConfig, values: Mapping[str, Any], where: str, default: Mapping[str, Any]
) -> None:
    accepted = _known_keys(type(config)) | set(default)
    for key, value in values.items():
        # A class consumes the keys that it knows, or stores them under an existing name.
        if (
            key in accepted or key not in vars(config) or key.startswith("_")
            or _code_reads(type(config), key)
        ):
            inner = vars(config).get(key)
            if isinstance(inner, PretrainedConfig) and isinstance(value, Mapping):
                inner_values = {k: v for k, v in value.items() if k != "model_type"}
                defaults = default.get(key)
                defaults = defaults if isinstance(defaults, dict) else _default(type(inner))
                _check_keys(inner, inner_values, f"{where}.{key}", defaults)
            continue
        hint = _like(key, accepted)
        raise ConfigError(
            f"{where}.{key}: {type(config).__name__} has no such key"
            + (f"; did you mean {hint}?" if hint else f"; accepted: {', '.join(sorted(accepted))}")
        )


def _like(key: Any, accepted: Iterable[str]) -> str:
    return " or ".join(difflib.get_close_matches(str(key), sorted(accepted), 2, _ALIKE))


@cache
def _default(kind: type[PretrainedConfig]) -> Mapping[str, Any]:
    """Return the default values of a config class, with those of nested configs."""
    try:
        values = kind().to_dict()
    except Exception:  # some classes need arguments
        return {}
    return {key: value for key, value in values.items() if not key.startswith("_")}


@cache
def _known_keys(kind: type[PretrainedConfig]) -> frozenset[str]:
    """Return fields, their aliases, and properties."""
    names = {field.name for field in fields(kind)} | set(kind.attribute_map)
    properties = {n for n in dir(kind) if isinstance(getattr(kind, n, None), property)}
    return frozenset(n for n in names | properties if not n.startswith("_"))


def _code_reads(kind: type[PretrainedConfig], key: str) -> bool:
    """Return True if the code of the model family reads a key that the class does not declare."""
    pattern = re.compile(
        rf"config\.{re.escape(key)}\b|(getattr|kwargs\.(get|pop))\([^()\n]*[\"']{re.escape(key)}[\"']"
    )
    return any(pattern.search(text) for text in _code(kind))


@cache
def _code(kind: type[PretrainedConfig]) -> tuple[str, ...]:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    files = Path(file).parent.glob("*.py") if file else ()
    return tuple(
        path.read_text(errors="replace") for path in sorted(files)
        if path.name.startswith(("modeling_", "configuration_"))
    )
