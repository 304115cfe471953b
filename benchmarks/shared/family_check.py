"""Check of one class cut in two against the uncut class: loss and every gradient, in training mode.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from benchmarks.shared.family_classes import ENCODER, LANGUAGE, Family
from benchmarks.shared.family_configs import UnmakeableError, default_config, tiny_configs
from benchmarks.shared.family_inputs import item_candidates, text_microbatches
from raymm.actors.executor.executor import Executor
from raymm.actors.executor.step_meta import StepMeta
from raymm.actors.modules.blocks import num_blocks
from raymm.actors.modules.draws import derive_seed
from raymm.actors.modules.merge import Prepend
from raymm.actors.modules.message import Message
from raymm.actors.probe.cut import probe_encoder, probe_language_model
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.stages.language import LanguageSpec, LanguageStage
from raymm.actors.weights.source import ConfigSource
from raymm.errors import Error
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Instruction, Op

EXACT, REFUSED, UNCLEAR, WRONG = "exact", "refused", "unclear", "wrong"
NOT_APPLICABLE = "not_applicable"
TOLERANCE = 1e-5  # relative to the gradient's norm
# Gradients that a softmax or a normalisation cancels are zero up to rounding.
ROUNDING = 1e-7  # relative to the largest gradient's norm
_NOISE = 0.02  # added to all parameters, since many are initialized with zeros or ones
_MICROBATCHES = 2
# A class that can be a text encoder or a language model is built as the latter, with one list of
# ids per row, and all of it is trained.
_FLAGS = {LANGUAGE: {"is_decoder": True, "num_codebooks": 1}, ENCODER: {"freeze": False}}
_MOST_PARAMETERS = 200_000_000
_STEP, _SEED = 3, 5

# Errors of transformers about classes that cannot run here, or not on these inputs alone.
_NOT_ALONE = re.compile(
    r"requires the \w+ library|missing \d+ required (positional|keyword-only) argument"
    r"|shared_kv_states cannot be None"  # keys and values of the model that this one assists
)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a class: one of the five results, with a sentence unless it is exact."""

    result: str
    sentence: str = ""


class Objective(nn.Module):
    """Scalar objective that depends on every feature; stands for the language model."""

    training = True
    may_draw = False

    def run(self, inputs: Any, received: dict[str, Message], context: Any) -> Message:
        (message,) = received.values()
        (features,) = message.tensors
        generator = torch.Generator().manual_seed(features.numel())
        weights = torch.randn(features.shape, generator=generator)
        return Message(((features.float() * weights).sum() / weights.numel() ** 0.5,), {})


@dataclass(frozen=True)
class Chain:
    """Module as stages of the executor.

    Attributes:
        build: builds blocks [lo, hi).
        inputs: inputs of the first stage, per microbatch.
        objective: True if the module returns features instead of a loss.
    """

    name: str
    build: Callable[[int, int], nn.Module]
    blocks: int
    inputs: list[dict[str, Any]]
    label_tokens: int
    objective: bool


class NotAloneError(UnmakeableError):
    """Error for a class that transformers itself cannot run here, or not on these inputs alone."""


def check(family: Family, training: bool = True) -> Outcome:
    """Cut a class in two and compare it with the uncut class."""
    try:
        config, inputs = runnable(family, training)
    except NotAloneError as error:
        return Outcome(NOT_APPLICABLE, str(error))
    except UnmakeableError as error:
        return Outcome(UNCLEAR, str(error))
    try:
        chain = _chain(family, config, inputs)
        cut = _step(chain, [chain.blocks // 2], training)
        whole = _step(chain, [], training)
    except Exception as error:  # noqa: BLE001  any error is the outcome
        if isinstance(error, Error):
            return Outcome(REFUSED, str(error))
        return Outcome(UNCLEAR, _last_lines(error))
    problems = differences(cut, whole)
    return Outcome(WRONG, "; ".join(problems)) if problems else Outcome(EXACT)


def _last_lines(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in frames[:-4:-1])
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text} ({where})"


def runnable(family: Family, training: bool) -> tuple[PretrainedConfig, list[dict[str, Any]]]:
    """Return a tiny configuration and microbatches with which transformers runs the class.

    Raises:
        UnmakeableError: no such configuration was found.
    """
    unbuilt: list[str] = []
    not_run: list[str] = []
    try:
        for config in tiny_configs(family.config_class, _FLAGS[family.kind]):
            for microbatches in _tries(family, config, unbuilt, not_run):
                return config, microbatches
    except UnmakeableError as error:
        unbuilt.append(str(error))
    unlike = list(dict.fromkeys(not_run or unbuilt))
    if all(_NOT_ALONE.search(error) for error in unlike):
        raise NotAloneError(unlike[0])
    if error := _of_its_defaults(family):
        raise NotAloneError(f"its own defaults make no model: {error}")
    raise UnmakeableError(f"no tiny configuration runs: {' | '.join(unlike)[:600]}")


def _of_its_defaults(family: Family) -> str | None:
    """Return the error that transformers raises for the class's own defaults, or None."""
    try:
        with torch.device("meta"):
            family.model_class._from_config(default_config(family.config_class))
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        return _last_lines(error)
    return None


def _tries(
    family: Family, config: PretrainedConfig, unbuilt: list[str], not_run: list[str]
) -> Iterator[list[dict[str, Any]]]:
    torch.manual_seed(0)
    _complete(config)
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in family.model_class._from_config(config).parameters())
        if size > _MOST_PARAMETERS:
            raise ValueError(f"{size:,} parameters are more than tiny")
        model = family.model_class._from_config(config).train(True)
    except Exception as error:  # noqa: BLE001
        unbuilt.append(_last_lines(error))
        return
    if family.kind == LANGUAGE:
        candidates = iter([text_microbatches(_vocabulary(model), _MICROBATCHES)])
    else:
        streams = [item_candidates(model, config, seed) for seed in range(_MICROBATCHES)]
        candidates = (list(several) for several in zip(*streams, strict=False))
    for microbatches in candidates:
        try:
            shown = microbatches[0]
            if family.kind == LANGUAGE:
                output = model(input_ids=shown["input_ids"], use_cache=False).logits
            else:
                output = _float_tensors(model(**shown))
            if not all(bool(torch.isfinite(t).all()) for t in output):
                raise ValueError("the output is not finite")
            torch.stack([t.float().sum() for t in output if t.requires_grad]).sum().backward()
        except Exception as error:  # noqa: BLE001
            not_run.append(_last_lines(error))
            continue
        yield microbatches


def _vocabulary(model: nn.Module) -> int:
    table = model.get_input_embeddings()
    tables = list(table) if isinstance(table, nn.ModuleList) else [table]  # Musicgen's
    return tables[0].weight.shape[0]


def _complete(config: PretrainedConfig) -> None:
    """Add fields that the configuration of an attention part lacks although its model reads them.
    """
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig) and "Attention" in type(part).__name__:
            part.rope_theta = getattr(part, "rope_theta", 10000.0)
            if vars(part).get("clip_qkv", 0) is None:
                part.clip_qkv = 8.0


def _float_tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    return (
        [t for one in output for t in _float_tensors(one)]
        if isinstance(output, list | tuple)
        else []
    )


def _chain(family: Family, config: PretrainedConfig, inputs: list[dict[str, Any]]) -> Chain:
    source = ConfigSource(family.model_class, config, seed=1)
    blocks = num_blocks(source.skeleton())
    if family.kind == LANGUAGE:
        spec: Any = LanguageSpec("llm", source, blocks, Prepend())
        spec = dataclasses.replace(spec, cut=probe_language_model(source))
        labels = sum(int((one["labels"][:, 1:] != -100).sum()) for one in inputs)
        return Chain(spec.name, _Builder(LanguageStage, spec), blocks, inputs, labels, False)
    spec = EncoderSpec("enc", source, blocks)
    spec = dataclasses.replace(spec, cut=probe_encoder(source, inputs[0]))
    return Chain(spec.name, _Builder(EncoderStage, spec), blocks, inputs, 1, True)


@dataclass(frozen=True)
class _Builder:
    stage: Any
    spec: Any

    def __call__(self, lo: int, hi: int) -> nn.Module:
        built = self.stage.build(self.spec, lo, hi)
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                generator = torch.Generator().manual_seed(derive_seed("noise", name))
                parameter += _NOISE * torch.randn(parameter.shape, generator=generator)
        return built


Result = tuple[float, dict[str, torch.Tensor | None]]


def _step(chain: Chain, cuts: list[int], training: bool) -> Result:
    """Run one step with stages that end at ``cuts``; return loss and gradients."""
    bounds = [0, *cuts, chain.blocks]
    stages: dict[StageId, Any] = {
        StageId(chain.name, n): chain.build(lo, hi)
        for n, (lo, hi) in enumerate(itertools.pairwise(bounds))
    }
    if chain.objective:
        stages[StageId("llm", 0)] = Objective()
    names = list(stages)
    edges = list(itertools.pairwise(names))
    executor = Executor(stages, edges, {}, {}, {})
    program = []
    for m in range(len(chain.inputs)):
        program += [Instruction(Op.FORWARD, name, m) for name in names]
        program += [Instruction(Op.BACKWARD, name, m) for name in reversed(names)]
    meta = StepMeta(
        _STEP, chain.label_tokens, tuple(range(len(chain.inputs))), _SEED, training=training
    )
    result = executor.run(executor.compile(program), {names[0]: chain.inputs}, meta)
    gradients: dict[str, torch.Tensor | None] = {}
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            known, new = gradients.get(name), parameter.grad
            gradients[name] = new if known is None else known if new is None else known + new
    return sum(result.losses.values()), gradients


def differences(cut: Result, whole: Result) -> list[str]:
    """Return the differences beyond rounding, largest first."""
    (loss, mine), (expected, due) = cut, whole
    problems = []
    if not math.isfinite(loss) or abs(loss - expected) > TOLERANCE * abs(expected):
        problems.append(f"loss {loss:.7g}, not {expected:.7g}")
    problems += [f"{name}: missing" for name in due if name not in mine]
    problems += [f"{name}: not expected" for name in mine if name not in due]
    floor = ROUNDING * max((float(g.norm()) for g in due.values() if g is not None), default=0.0)
    errors = []
    for name in mine.keys() & due.keys():
        ours, theirs = mine[name], due[name]
        if ours is None and theirs is None:
            continue
        # A missing gradient counts as zero: one of the cuts does not reach the parameter.
        ours = torch.zeros_like(theirs) if ours is None else ours
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        error, norm = float((ours - theirs).double().norm()), float(theirs.double().norm())
        if not error <= max(TOLERANCE * norm, floor):
            errors.append((error / max(norm, 1e-30), name))
    errors.sort(reverse=True)
    problems += [f"{name}: relative error {error:.1e}" for error, name in errors[:3]]
    if len(errors) > 3:
        problems.append(f"and {len(errors) - 3} of {len(due)} gradients more")
    return problems
