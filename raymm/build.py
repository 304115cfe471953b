"""From configuration sections to a model description and parallel specs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers

from raymm.actors.stages.merge import MergePolicy, Prepend, ReplaceTokens
from raymm.actors.stages.source import FactorySource, SourceError, import_object
from raymm.config import ConfigError, EncoderSection, LayoutSection, SourceSection, TrainConfig
from raymm.data.text import load_tokenizer
from raymm.model import ModalityModule, MultimodalModule
from raymm.scheduler.plan import Plan
from raymm.specs import MultimodalParallelSpec, ParallelSpec


def build_model(config: TrainConfig) -> MultimodalModule:
    """The model a configuration describes. Holds no weights but the projectors'.

    Raises:
        ModelError, ConfigError, DataError: naming what does not exist or fit.
    """
    seed = config.run.seed
    encoders = {}
    for name, section in config.model.encoders.items():
        with _errors_name(f"model.encoders.{name}"):
            encoders[name] = ModalityModule(
                _given(section, seed),
                section.projector,
                frozen=section.frozen,
                projector_frozen=section.projector_frozen,
                hidden_size=section.hidden_size,
                model_class=section.model_class,
                preprocess_callback=_callback("preprocess", section.preprocess),
                postprocess_module_callback=_callback(
                    "postprocess_module", section.postprocess_module
                ),
                postprocess_projector_callback=_callback(
                    "postprocess_projector", section.postprocess_projector
                ),
                seed=seed,
            )
            encoders[name].output_size(encoders[name].source())
    section = config.model.language_model
    with _errors_name("model.language_model"):
        language_model = ModalityModule(
            _given(section, seed), frozen=section.frozen, model_class=section.model_class,
            seed=seed,
        )
        language_model.source(language_model=True)
    return MultimodalModule(encoders, language_model, build_merge(config))


@contextmanager
def _errors_name(field: str) -> Iterator[None]:
    """Errors about a module's source do not know which module of the configuration it is."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{field}: {error}") from error


def _given(section: SourceSection | EncoderSection, seed: int) -> Any:
    if section.factory is not None:
        _callback("factory", section.factory)
        return FactorySource(section.factory, section.kwargs, section.weights, seed=seed)
    if section.config is not None:
        values = dict(section.config)
        kind = values.pop("model_type", None)
        if kind not in transformers.CONFIG_MAPPING:
            raise ConfigError(
                f"config.model_type is {kind!r}; expected one that transformers knows, such as "
                "llama or siglip_vision_model"
            )
        try:
            return transformers.CONFIG_MAPPING[kind](**values)
        except Exception as error:  # each config class has its own checks and error types
            raise ConfigError(f"config of a {kind!r} model: {error}") from None
    return section.path


def _callback(field: str, target: str | None) -> Callable[..., Any] | None:
    if target is None:
        return None
    try:
        found = import_object(target)
    except SourceError as error:
        raise ConfigError(f"{field}: {error}") from None
    if not callable(found):
        raise ConfigError(f"{field}: {target!r} is a {type(found).__name__}; expected a function")
    return found


def build_merge(config: TrainConfig) -> MergePolicy:
    """The merge policy a configuration names.

    Raises:
        ConfigError: if a placeholder is not a single token of the tokenizer, or is for no
            encoder.
        DataError: if there is no tokenizer.
    """
    merge = config.model.merge
    if merge == "prepend":
        return Prepend()
    if isinstance(merge, str):
        return _callback("model.merge", merge)
    tokenizer = load_tokenizer(config.data.tokenizer)
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


def build_plan(config: TrainConfig, model: MultimodalModule) -> Plan:
    """The plan a configuration asks for, or the one in its ``parallel.plan`` file.

    Raises:
        PlanError: if it cannot run.
        ConfigError: if a named file does not exist or is for another model.
    """
    section = config.parallel
    specs = MultimodalParallelSpec(
        {name: _spec(layout) for name, layout in section.encoders.items()},
        _spec(section.language_model),
        config.data.microbatches,
    )
    if section.plan is None:
        return specs.plan(model)
    file = Path(section.plan)
    if not file.is_file():
        raise ConfigError(f"parallel.plan is {section.plan!r}; there is no such file")
    plan = Plan.from_json(file.read_text())
    wanted = MultimodalParallelSpec(num_microbatches=1).plan(model).graph
    if plan.graph != wanted:
        raise ConfigError(f"parallel.plan {section.plan!r} was made for another model")
    if plan.num_microbatches != config.data.microbatches:
        raise ConfigError(
            f"parallel.plan has {plan.num_microbatches} microbatches, "
            f"data.microbatches is {config.data.microbatches}; they must be equal"
        )
    return plan


def _spec(layout: LayoutSection) -> ParallelSpec:
    return ParallelSpec(**layout.model_dump())


def describe_plan(plan: Plan) -> list[dict[str, str]]:
    """Rows of a table: one per stage."""
    rows = []
    for stage in plan.stages:
        node = plan.graph.node(stage.module)
        lo, hi = stage.layers
        has_projector = node.projector and hi == node.num_layers
        blocks = min(hi, node.num_blocks) - lo
        parts = [f"{blocks} block{'s' * (blocks != 1)}"] if blocks > 0 else []
        parts += ["projector"] if has_projector else []
        rows.append(
            {
                "rank": str(stage.rank),
                "stage": stage.name,
                "layers": f"{lo}..{hi - 1}",
                "holds": " + ".join(parts),
                "trainable": "yes" if plan.trainable(stage) else "frozen",
                "depth": str(plan.depth[stage.name]),
            }
        )
    return rows


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2))
    temporary.replace(path)
