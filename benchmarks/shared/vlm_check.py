"""Check of a vision-language model in stages against the same model in one process.

Compares the loss, every gradient, the losses of three AdamW steps, and the saved and reloaded
folder.
"""

from __future__ import annotations

import copy
import itertools
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from benchmarks.shared.family_check import (
    EXACT,
    NOT_APPLICABLE,
    REFUSED,
    TOLERANCE,
    UNCLEAR,
    WRONG,
    Outcome,
    Result,
    _last_lines,
    _of_its_defaults,
    differences,
)
from benchmarks.shared.family_classes import Family
from benchmarks.shared.family_configs import UnmakeableError, _parts, default_config, tiny_configs
from benchmarks.shared.family_exceptions import AWKWARD
from benchmarks.shared.vlm_hints import HINTS, Hint, set_values
from benchmarks.shared.vlm_inputs import Style, batches, styles
from raymm.actors.executor.executor import Executor
from raymm.actors.executor.step_meta import StepMeta
from raymm.actors.modules.blocks import num_blocks
from raymm.actors.probe.vlm.cut import (
    cut_language_model,
    cut_tower,
    language_source,
    language_spec,
    tower_source,
    tower_spec,
)
from raymm.actors.probe.vlm.towers import check_kind, find_towers
from raymm.actors.stages.tower import TowerStage
from raymm.actors.stages.vlm_language import VlmLanguageStage, language_inputs
from raymm.actors.weights.model_part import is_within
from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.actors.weights.source import ConfigSource
from raymm.errors import Error
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Instruction, Op
from raymm.storage.export import SOURCE, ModelFolder


def reload_problem(
    source: ConfigSource, parameters: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> str | None:
    """Return the problem of an exported folder; None if it gives the same logits bit for bit.

    Args:
        parameters: parameters of all stages, by name.
    """
    model = source.build().eval()
    named = dict(model.named_parameters())
    if missing := sorted(named.keys() - parameters.keys()):
        return f"no stage has {', '.join(missing[:3])}"
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(parameters[name])
    with tempfile.TemporaryDirectory() as folder:
        cast(Any, model).save_pretrained(folder)
        again, report = type(cast(Any, model)).from_pretrained(folder, output_loading_info=True)
    lost = [name for kind in ("missing_keys", "unexpected_keys") for name in report[kind]]
    if lost:
        return f"the folder it is saved as has other keys than its class: {', '.join(lost[:3])}"
    # rounding of products depends on the memory alignment of their factors
    for parameter in again.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        before, after = (_logits(m, batch) for m in (model, again.eval()))
    if not torch.equal(before, after):
        return "its folder read again gives other logits"
    return _export_problem(model, batch)


def _export_problem(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> str | None:
    """Compare a bf16 export with its source folder, and a second export with the first.

    Args:
        model: fp32 model with trained weights.

    Returns:
        The difference; None if all files are equal byte for byte.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with tempfile.TemporaryDirectory() as place:
        source, same, first, second = (Path(place) / n for n in ("source", "same", "1", "2"))
        cast(Any, copy.deepcopy(model)).to(torch.bfloat16).save_pretrained(source)
        read = PretrainedSource(str(source), type(model).__name__).build()
        trained = copy.deepcopy(read)
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter += 1e-3 * torch.randn_like(parameter)
        try:
            ModelFolder(str(source), SOURCE).save(cast(Any, read), same, inputs)
            ModelFolder(str(source), SOURCE).save(cast(Any, trained), first, inputs)
            again = PretrainedSource(str(first), type(model).__name__).build()
            ModelFolder(str(first), SOURCE).save(cast(Any, again), second, inputs)
        except Error as error:
            return str(error)
        for expected, actual, what in (
            (source, same, "its exported folder differs from the bf16 source in"),
            (first, second, "a second export differs from the first in"),
        ):
            if names := _unequal_files(expected, actual):
                return f"{what} {', '.join(names)}"
    return None


def _unequal_files(expected: Path, actual: Path) -> list[str]:
    contents = [{f.name: f.read_bytes() for f in each.iterdir()} for each in (expected, actual)]
    return sorted({name for name, _ in contents[0].items() ^ contents[1].items()})


def _logits(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return model(**inputs, use_cache=False).logits


_TOKENS = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
_OUTPUTS = ("out_hidden_size", "output_dim", "projection_dim", "text_hidden_size")
_AROUND = (
    "vision_start_token_id", "vision_end_token_id", "audio_start_token_id", "audio_end_token_id",
)  # fmt: skip


def complete_default(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """Return a class's defaults; parts without one get those of the part's class."""
    config = default_config(config_class)
    kinds: Any = config_class.sub_configs or {}
    missing = {
        name: part for name, part in kinds.items()
        if isinstance(part, type) and issubclass(part, PretrainedConfig)
        and getattr(config, name, 0) is None
    }  # fmt: skip
    if not missing:
        return config
    try:
        parts: dict[str, Any] = {name: default_config(part) for name, part in missing.items()}
        return config_class(**parts)
    except Exception:  # noqa: BLE001  a class's own checks raise any error
        return config


def fit_parts(config: PretrainedConfig) -> None:
    """Make the parts of a configuration consistent.

    Disable random numbers, set placeholder ids, make tower outputs as wide as the text model's
    input, and as many tokens as a small image has patches.
    """
    every = (config, *_parts(config))
    text = getattr(config, "text_config", None) or config
    wide = getattr(text, "hidden_size", None)
    for part in every:
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and "drop" in name:
                setattr(part, name, 0.0)
            if name in _TOKENS and value is None:
                setattr(part, name, 99 + _TOKENS.index(name))
            if name in _OUTPUTS and part is not text and isinstance(value, int) and wide:
                setattr(part, name, wide)
        for name, value in AWKWARD.get(type(part).__name__, {}).items():
            if "." not in name:
                setattr(part, name, value)
    for name in _AROUND:  # set in published configurations, but not by these classes' defaults
        if hasattr(config, "audio_config") and not hasattr(config, name):
            setattr(config, name, 90 + _AROUND.index(name))
    _fit_images(config)


def _fit_images(config: PretrainedConfig) -> None:
    vision = getattr(config, "vision_config", None)
    side, patch = _side(getattr(vision, "image_size", None)), _side(
        getattr(vision, "patch_size", None)
    )
    depth = getattr(vision, "num_hidden_layers", None)
    for part in (config, *_parts(config)):
        values: dict[str, Any] = vars(part)
        if side and values.get("image_grid_pinpoints"):
            part.image_grid_pinpoints = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]]
        if side and patch and isinstance(values.get("mm_tokens_per_image"), int):
            part.mm_tokens_per_image = (side // patch) ** 2
        for name, layers in list(values.items()):
            if "feature_layer" in name and isinstance(layers, list | tuple) and depth:
                if max(map(abs, layers)) > depth:
                    setattr(part, name, [-1 - n % depth for n in range(len(layers))])


def _side(value: Any) -> int | None:
    value = value[0] if isinstance(value, list | tuple) and value else value
    return value if isinstance(value, int) else None


def fit_sections(model: nn.Module, config: PretrainedConfig) -> None:
    """Set rotary sections that add up to the reduced head width.

    Their default is often defined in the class instead of the configuration.
    """
    for child in model.modules():
        sections, table = getattr(child, "mrope_section", 0), getattr(child, "inv_freq", None)
        if table is None or not isinstance(sections, list | tuple | None):
            continue
        wide, sections = table.shape[-1], sections or (1, 1, 1)
        if sum(sections) != wide:
            fitted = [max(1, wide * n // sum(sections)) for n in sections]
            fitted[0] += wide - sum(fitted)
            for part in (config, *_parts(config)):
                if isinstance(getattr(part, "rope_parameters", None), dict):
                    part.rope_parameters["mrope_section"] = fitted


LLM = "llm"
# Label of a class whose step contained both.
SEVERAL = "images and sound"
_MOST_PARAMETERS = 60_000_000
_STEPS = 3
_FLAGS: dict[str, Any] = {}
Batch = dict[str, torch.Tensor]


class NotRunnableError(UnmakeableError):
    """Error for a class without a tiny configuration and inputs that run in one process."""


def check(family: Family, training: bool = True) -> Outcome:
    """Compare a class, with each of its modules in two stages, with one process."""
    try:
        with torch.device("meta"):
            check_kind(family.model_class._from_config(complete_default(family.config_class)))
    except Error as error:
        return Outcome(REFUSED, str(error))
    except Exception:  # noqa: BLE001  inconsistent defaults
        pass
    try:
        config, microbatches = runnable(family)
    except UnmakeableError as error:
        if why := _of_its_defaults(family):
            return Outcome(NOT_APPLICABLE, f"its own defaults make no model: {why}")
        return Outcome(UNCLEAR, str(error)[:1500])
    try:
        source = ConfigSource(family.model_class, config, seed=1)
        stages = _Stages(source, microbatches)
        mine = stages.steps()
    except Exception as error:  # noqa: BLE001  any error is the outcome
        if isinstance(error, Error):
            return Outcome(REFUSED, str(error))
        return Outcome(UNCLEAR, _last_lines(error))
    due = one_process(source, microbatches)
    if why := stages.unreached(due[0]):
        return Outcome(UNCLEAR, why)
    problems = differences(mine[0], due[0])
    for step, (own, other) in enumerate(zip(mine[1:], due[1:], strict=True), 2):
        if not math.isfinite(own[0]) or abs(own[0] - other[0]) > TOLERANCE * abs(other[0]):
            problems.append(f"loss of step {step} is {own[0]:.7g}, not {other[0]:.7g}")
    if why := reload_problem(source, stages.parameters(), microbatches[0]):
        problems.append(why)
    if problems:
        return Outcome(WRONG, "; ".join(problems))
    towers = {tower.name for tower in stages.towers}
    return Outcome(EXACT, SEVERAL if {"vision", "audio"} <= towers else "")


def runnable(family: Family) -> tuple[PretrainedConfig, list[Batch]]:
    """Return a tiny configuration and microbatches with which transformers runs the class.

    Raises:
        UnmakeableError: no such configuration was found.
    """
    errors: list[str] = []
    hint = HINTS.get(family.name, Hint())
    default = complete_default(family.config_class)
    set_values(default, hint.default)
    for config in itertools.islice(tiny_configs(family.config_class, _FLAGS, default), 6):
        try:
            fit_parts(config)
            set_values(config, hint.config)
            with torch.device("meta"):
                size = sum(p.numel() for p in family.model_class._from_config(config).parameters())
            if size > _MOST_PARAMETERS:
                raise ValueError(f"{size:,} parameters are more than tiny")
            fit_sections(ConfigSource(family.model_class, config, seed=1).skeleton(), config)
            model = ConfigSource(family.model_class, config, seed=1).build().train()
        except Exception as error:  # noqa: BLE001
            errors.append("not built: " + _last_lines(error))
            continue
        for found in _tries(model, config, errors):
            return config, found
    raise NotRunnableError(" | ".join(dict.fromkeys(errors)) or "no configuration")


def _tries(model: Any, config: PretrainedConfig, errors: list[str]) -> Iterator[list[Batch]]:
    vocabulary, width = next(model.get_input_embeddings().parameters()).shape
    vocabulary = min(vocabulary, getattr(config.get_text_config(), "vocab_size", vocabulary))

    def tried(kinds: list[Style]) -> list[Batch] | None:
        try:
            found = batches(model.eval(), config, kinds, vocabulary, width)
            for batch in found:
                logits = logits_of(model, batch)
                if not torch.isfinite(logits).all():
                    raise ValueError("the output is not finite")
        except Exception as error:  # noqa: BLE001
            errors.append(f"{kinds[-1].modality}: " + _last_lines(error))
            return None
        return found

    every = list(styles(model, config))
    for style in every:
        if (found := tried([style])) is None:
            continue
        sounds = [other for other in every if other.modality == "audio"]
        for sound in sounds if style.modality == "image" else ():
            if (both := tried([style, sound])) is not None:
                yield both
                break
        yield found


def logits_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the logits of the model's own forward."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return model(**inputs, use_cache=False).logits


def one_process(source: ConfigSource, microbatches: list[Batch]) -> list[Result]:
    """Return loss and gradients of three steps."""
    model = noisy(source.build())
    model.train()
    labels = _label_tokens(microbatches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found: list[Result] = []
    for _ in range(_STEPS):
        optimizer.zero_grad()
        total = 0.0
        for batch in microbatches:
            logits = logits_of(model, batch)
            loss = F.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten(),
                reduction="sum",
            ) / labels  # fmt: skip
            loss.backward()
            total += float(loss.detach())
        found.append((total, _gradients([model])))
        optimizer.step()
    return found


def noisy(model: nn.Module) -> nn.Module:
    """Add noise to parameters that are initialized with zeros or ones.

    The noise of a parameter is the same in every part of the model.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = name.removeprefix("module.")
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def _label_tokens(microbatches: list[Batch]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in microbatches)


def _gradients(modules: list[nn.Module]) -> dict[str, torch.Tensor | None]:
    found: dict[str, torch.Tensor | None] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            name, new, known = name.removeprefix("module."), parameter.grad, None
            known = found.get(name)
            if new is not None:
                new = new.clone() if known is None else known + new
            found[name] = known if new is None else new
    return found


@dataclass(frozen=True)
class _Module:
    name: str
    spec: Any
    stage: Any


class _Stages:
    """Towers and language model, each in two stages if it has at least two blocks."""

    def __init__(self, source: ConfigSource, microbatches: list[Batch]) -> None:
        self._microbatches = microbatches
        example = {k: v for k, v in microbatches[0].items() if k != "labels"}
        model = cast(PreTrainedModel, noisy(source.build()).eval())
        self.towers = find_towers(model, example)
        modules = []
        for tower in self.towers:
            own = tower_source(source, tower)
            blocks = num_blocks(own.skeleton())
            spec = tower_spec(own, tower, blocks)
            if blocks > 1:
                spec = cut_tower(spec, tower.inputs(example) or {})
            modules.append(_Module(tower.name, spec, TowerStage))
        own = language_source(source, self.towers)
        spec = language_spec(LLM, own, self.towers, num_blocks(own.skeleton()))
        if spec.num_blocks > 1:
            spec = cut_language_model(spec, self.towers, example)
        modules.append(_Module(LLM, spec, VlmLanguageStage))
        self.stages: dict[StageId, Any] = {}
        for module in modules:
            spec, count = module.spec, 2 if module.spec.cut else 1
            bounds = [spec.num_blocks * n // count for n in range(count + 1)]
            for n, (lo, hi) in enumerate(itertools.pairwise(bounds)):
                self.stages[StageId(module.name, n)] = noisy(module.stage.build(spec, lo, hi))
        for stage in self.stages.values():
            stage.train()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters of all stages under the model's names."""
        return {
            name.removeprefix("module."): parameter.detach()
            for stage in self.stages.values() for name, parameter in stage.named_parameters()
        }  # fmt: skip

    def _of(self, name: str) -> list[StageId]:
        return [stage for stage in self.stages if stage.module == name]

    def unreached(self, due: Result) -> str | None:
        """Return a tower without any gradient, for which nothing was compared; None if all have
        some.
        """
        for tower in self.towers:
            own = [g for n, g in due[1].items() if is_within(n, tower.places) and g is not None]
            if not any(bool(gradient.any()) for gradient in own):
                return f"no gradient comes to its tower {tower.name!r}"
        return None

    def steps(self) -> list[Result]:
        """Return loss and gradients of three steps."""
        entries = {entry for tower in self.towers for _, entry in tower.arguments}
        inputs: dict[StageId, list[Any]] = {StageId(t.name, 0): [] for t in self.towers}
        inputs[StageId(LLM, 0)] = []
        program: list[Instruction] = []
        for m, batch in enumerate(self._microbatches):
            own = {tower.name: tower.inputs(batch) for tower in self.towers}
            text = {name: value for name, value in batch.items() if name not in entries}
            there = {name: value for name, value in own.items() if value is not None}
            inputs[StageId(LLM, 0)].append(language_inputs(text, {
                t.name: {entry: batch[entry] for _, entry in t.arguments if entry in batch}
                for t in self.towers if t.name in there
            }))  # fmt: skip
            for tower in self.towers:
                inputs[StageId(tower.name, 0)].append(own[tower.name])
            order = [s for s in self.stages if s.module in there or s.module == LLM]
            program += [Instruction(Op.FORWARD, stage, m) for stage in order]
            program += [Instruction(Op.BACKWARD, stage, m) for stage in reversed(order)]
        edges = [pair for t in (*self.towers,) for pair in itertools.pairwise(self._of(t.name))]
        edges += [(self._of(t.name)[-1], StageId(LLM, 0)) for t in self.towers]
        edges += itertools.pairwise(self._of(LLM))
        executor = Executor(self.stages, edges, {}, {}, {})
        prepared = executor.compile(program)
        parameters = _shared([p for s in self.stages.values() for p in s.named_parameters()])
        optimizer = torch.optim.AdamW([own for owned in parameters for own in owned], lr=1e-4)
        found = []
        for step in range(_STEPS):
            optimizer.zero_grad()
            meta = StepMeta(
                step, _label_tokens(self._microbatches), tuple(range(len(self._microbatches)))
            )
            result = executor.run(prepared, inputs, meta)
            found.append((sum(result.losses.values()), _gradients(list(self.stages.values()))))
            for owned in parameters:
                _sum_gradients(owned)
            optimizer.step()
        return found


def _shared(named: list[tuple[str, nn.Parameter]]) -> list[list[nn.Parameter]]:
    """Group named parameters; entries of several stages form one group."""
    by_name: dict[str, list[nn.Parameter]] = {}
    for name, parameter in named:
        by_name.setdefault(name, []).append(parameter)
    return list(by_name.values())


def _sum_gradients(owned: list[nn.Parameter]) -> None:
    gradients = [p.grad for p in owned if p.grad is not None]
    if len(owned) > 1 and gradients:
        total = torch.stack(gradients).sum(dim=0)
        for parameter in owned:
            parameter.grad = total.clone()
