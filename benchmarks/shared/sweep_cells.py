"""Cells of the layout sweep on Ray actors, compared with one process."""

from __future__ import annotations

import math
import re
import tempfile
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from benchmarks.shared.family_check import EXACT, REFUSED, UNCLEAR, WRONG, Outcome
from benchmarks.shared.sweep_oracle import SEED, UPDATES, Training, described, step_of, trained
from benchmarks.shared.sweep_tables import (
    FEATURES,
    LAYOUTS,
    OPTIONS,
    PAIRS,
    PLAIN,
    Feature,
    Layout,
    Option,
)
from benchmarks.shared.vlm_shares import (
    LOSS_TOLERANCE,
    MOVED_TOLERANCE,
    gradient_problems,
    moved_problems,
    only_rounding,
)
from raymm.actors.features.feature_folder import FeatureFolder
from raymm.actors.optimizer.optimizer_config import MUON, STOCHASTIC
from raymm.data.loading.in_memory import describe_microbatches
from raymm.errors import Error, RankFailedError
from raymm.layout.feature_stages import featured_modules, with_feature_stages
from raymm.model.model import LANGUAGE_MODEL
from raymm.model.multimodal import MultimodalModule
from raymm.model.vlm import PretrainedVlm
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec, vlm_plan
from raymm.scheduler.plan.plan import Plan
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import load_into_model, restore
from raymm.training.phases import Phases

# Muon computes five successive products in bf16.
_MUON_TOLERANCE = 0.1
# Accepted error of a bf16 run against fp32, relative to that of one process in bf16: for all
# parameters together, and for each, where rounding averages out less; and an error that is always
# accepted for each.
_BF16_RATIO, _BF16_RATIO_OF_EACH, _BF16_LEAST = 1.3, 4.0, 2e-3
# bf16 weights without a master copy are rounded by up to one ulp per step.
_ULP = 2.0**-7
_TIMEOUT_S = 60.0


class Cell(NamedTuple):
    """Model, training option and layout, by their names in the tables."""

    feature: str
    option: str
    layout: str

    def __str__(self) -> str:
        return ", ".join(self)


def cells(
    features: Collection[str], options: Collection[str], layouts: Collection[str]
) -> list[Cell]:
    """Return the cells of the sweep.

    Every feature with the plain option, and every option with its feature, under all layouts; some
    other pairs under a third of the layouts each.
    """
    every = dict.fromkeys((feature, PLAIN) for feature in features)
    every |= dict.fromkeys((OPTIONS[option].feature, option) for option in options)
    found = [Cell(*pair, layout) for pair in every for layout in layouts]
    some = [pair for pair in PAIRS if pair[0] in features and pair[1] in options]
    return found + [
        Cell(*pair, layout)
        for number, pair in enumerate(some) for layout in list(layouts)[number % 3 :: 3]
    ]


def outcomes(waiting: Iterable[Cell]) -> Iterator[tuple[Cell, Outcome]]:
    """Run cells on the connected cluster.

    Args:
        waiting: cells. Adjacent cells with the same model and option share the results of the
            single process.
    """
    key, due = None, None
    for cell in waiting:
        feature, option, layout = (
            FEATURES[cell.feature], OPTIONS[cell.option], LAYOUTS[cell.layout])
        # A random number depends on the element's position, which packing changes.
        packing = feature.draws and layout.packing
        try:
            if due is None or key != (*cell[:2], packing):
                key, due = (*cell[:2], packing), _Due(feature, option, packing)
            found = _outcome(feature, option, layout, due)
        except Exception as error:  # any exception of a cell is its outcome
            found = Outcome(UNCLEAR, f"{type(error).__name__}: {error}".strip())
        yield cell, found


class _Due:
    """Results of the single process, computed on demand."""

    def __init__(self, feature: Feature, option: Option, packing: bool) -> None:
        self._train = partial(trained, feature, option, packing=packing)

    @cached_property
    def exact(self) -> Training:
        """Return the result in fp32."""
        return self._train()

    @cached_property
    def bf16(self) -> Training:
        """Return the result under autocast."""
        return self._train(bf16=True)


def _outcome(feature: Feature, option: Option, layout: Layout, due: _Due) -> Outcome:
    found = Training([], {}, {}, {})
    begins = sorted({0, *option.at, *([1] if layout.resumed is not None else [])})
    references: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = CheckpointStore(f"{folder}/run")
        kept = FeatureFolder(Path(folder) / "features", 2**30)
        for begin, end in pairwise((*begins, UPDATES)):
            try:
                model = described(feature, option, layout.packing)
                phases = Phases(model, option.at, UPDATES)
                phases.enter(begin)
                degrees = layout.resumed if begin and layout.resumed else layout.degrees
                plan, caches = _plan(model, layout, degrees, len(step_of(feature))), {}
                if option.cached:
                    blocks, _ = featured_modules(model, plan, ["vision"])
                    plan, caches = with_feature_stages(plan, blocks), dict.fromkeys(blocks, kept)
                whole = isinstance(model, PretrainedVlm)
                parallel = (ParallelModel if whole else ParallelModel)(
                    model, plan, optimizer=option.config, precision=option.precision, seed=SEED,
                    timeout_s=_TIMEOUT_S, features=caches,
                )
            except RankFailedError:
                raise  # the run had already started
            except Error as error:
                return _refusal(str(error), feature, option, layout)
            with parallel:
                if begin:
                    restore(parallel, store.latest(), phases.dropped(begin))
                references = references or _references(parallel, feature)
                parallel.references = references
                for update in range(begin, end):
                    _step(parallel, feature, option, update, found)
                if end < UPDATES or option.averages:
                    store.save(parallel, {})
                if end == UPDATES and not option.averages:
                    found.after.update(parallel.parameters(trainable_only=False))
        features = any(kept.path.rglob("*.features"))
        if option.averages:
            model = cast(MultimodalModule, described(feature, option, layout.packing))
            load_into_model(model, store.latest(), averaged=True)
            found.after.update(
                (name, p.detach()) for name, p in model.named_parameters() if p.requires_grad)
    problems = _problems(found, due, feature, option)
    if caches and not features:
        problems.append("no features were kept")
    return Outcome(WRONG, "; ".join(problems)) if problems else Outcome(EXACT)


def _plan(
    model: MultimodalModule | PretrainedVlm, layout: Layout, degrees: Mapping[str, Any], count: int
) -> Plan:
    """Return a plan for ``count`` microbatches."""
    vision, language = layout.specs(degrees)
    if isinstance(model, PretrainedVlm) and language.cp > 1:
        vision, language = ParallelSpec(), replace(language, ranks=None)
    names = model.tower_names if isinstance(model, PretrainedVlm) else model.encoder_names
    recompute = degrees.get("recompute_layers", "keep")
    options = (recompute,) if isinstance(recompute, str) else recompute
    specs = {
        name: replace(spec, recompute_layers=tuple(
            islice(cycle(options), model.graph.node(name).num_blocks)))
        for name, spec in {**dict.fromkeys(names, vision), LANGUAGE_MODEL: language}.items()
    }  # fmt: skip
    if isinstance(model, PretrainedVlm):
        return vlm_plan(model, specs, count, **layout.plan)
    language = specs.pop(LANGUAGE_MODEL)
    return MultimodalParallelSpec(specs, language, count, **layout.plan).plan(model)


def _references(parallel: Any, feature: Feature) -> dict[str, float]:
    """Return the scores of each row under the initial weights, if the loss needs them."""
    preference = getattr(parallel.model, "preference", None)
    if preference is None or not preference.asked_once:
        return {}
    prepared = _prepared(parallel, feature)
    return {
        row: score
        for meta, scores in zip(prepared[1], parallel.scores(prepared), strict=True)
        for row, score in zip(meta.sample_ids, scores.tolist(), strict=True)
    }


def _prepared(parallel: Any, feature: Feature) -> tuple[Any, list[Any]]:
    """Return a step whose rows have ids.

    If features of the tower are cached, its items have keys, or the cached features if all are
    known.
    """
    step = step_of(feature)
    parts, metas = parallel.prepare(step)
    if (folder := parallel.options.features.get("vision")) is not None:
        keys = [
            tuple(f"{number}{item}".rjust(40, "0") for item in range(len(meta.items["vision"])))
            for number, meta in enumerate(metas)
        ]
        known = [[folder.read(key) for key in of_microbatch] for of_microbatch in keys]
        if all(one is not None for features in known for one in features):
            parts, metas = describe_microbatches(
                [
                    {**one, "vision": _stacked(features, one["vision"]["sample_index"])}
                    for one, features in zip(step, known, strict=True)
                ],
                ["vision"],
            )
        else:
            metas = [
                replace(meta, feature_keys={"vision": own})
                for meta, own in zip(metas, keys, strict=True)
            ]
    return parts, [
        replace(meta, sample_ids=tuple(f"{number}.{row}" for row in range(meta.num_samples)))
        for number, meta in enumerate(metas)
    ]


def _stacked(features: Sequence[Any], rows: torch.Tensor) -> dict[str, torch.Tensor]:
    names = features[0]
    return {n: torch.stack([one[n] for one in features]) for n in names} | {"sample_index": rows}


def _step(
    parallel: Any, feature: Feature, option: Option, update: int, found: Training
) -> None:
    """Run one optimizer step; read gradients after the first."""
    at_once = update and option.batches == 1
    for _ in range(option.batches):
        pending = parallel.submit(_prepared(parallel, feature), update=bool(at_once))
        found.losses.append(pending.result().loss)
    if not update:
        found.gradients.update(parallel.gradients())
    if not at_once:
        parallel.optimizer.step()


def _problems(found: Training, due: _Due, feature: Feature, option: Option) -> list[str]:
    if option.precision == "bf16":
        return _bf16_problems(found, due.exact, due.bf16, option)
    exact, problems = due.exact, []
    # A margin is a small difference of sums of log-probabilities.
    accepted = LOSS_TOLERANCE * 10 ** ("preference" in option.model)
    for number, (mine, loss) in enumerate(zip(found.losses, exact.losses, strict=True)):
        if not abs(mine - loss) <= accepted * 10 ** (number > 0) * abs(loss):
            problems.append(f"loss of batch {number + 1} is {mine:.7g}, not {loss:.7g}")
    problems += gradient_problems(found.gradients, exact.gradients, feature.tolerance)
    muon = MUON in repr(option.config)
    problems += moved_problems(
        found.after, exact.after, exact.before, only_rounding(exact.gradients),
        _MUON_TOLERANCE if muon else MOVED_TOLERANCE,
    )
    return problems


def _bf16_problems(
    found: Training, exact: Training, bf16: Training, option: Option
) -> list[str]:
    """Check that a bf16 run is as close to fp32 as one process in bf16."""
    problems = []
    rounding = only_rounding(exact.gradients)
    slack = _ULP * UPDATES if option.config.parameters == STOCHASTIC else 0.0
    for kind in ("gradients", "after"):
        named = getattr(exact, kind)
        names = [n for n, value in named.items() if value is not None and n not in rounding]
        errors, accepted, sizes = [], [], []
        for name in names:
            mine, other = (getattr(one, kind)[name].float() for one in (found, bf16))
            value = named[name]
            size = float((value - exact.before[name] * (kind == "after")).norm())
            errors.append(float((mine - value).norm()))
            accepted.append(float((other - value).norm()))
            sizes.append(_BF16_LEAST * size + (kind == "after") * slack * float(value.norm()))
        together = [math.hypot(*several) for several in (errors, accepted, sizes)]
        for name, error, least, size, ratio in (
            ("all parameters", *together, _BF16_RATIO),
            *zip(names, errors, accepted, sizes, [_BF16_RATIO_OF_EACH] * len(names), strict=True),
        ):
            if not error <= max(ratio * least, size):
                problems.append(f"{kind} of {name}: error {error:.2e}, {least:.2e} in one process")
    losses = torch.tensor([found.losses, bf16.losses, exact.losses])
    error, least = (losses[:2] - losses[2]).norm(dim=1).tolist()
    if not error <= max(_BF16_RATIO_OF_EACH * least, _BF16_LEAST):
        problems.append(f"losses: error {error:.2e}, {least:.2e} in one process")
    return problems


def _refusal(sentence: str, feature: Feature, option: Option, layout: Layout) -> Outcome:
    """Accept a rejection that names one of the features that do not fit together."""
    family = re.sub("(Text)?Config$|ForConditionalGeneration$", "", feature.config)
    for words in ({*feature.words, *option.words, family}, layout.words):
        if not any(re.search(rf"(?<![a-z]){re.escape(w)}", sentence, re.I) for w in words):
            return Outcome(UNCLEAR, f"names none of {', '.join(sorted(words))}: {sentence}")
    return Outcome(REFUSED, sentence)
