"""``raymm generate``: generate text from prompts with a run's model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from raymm.data.samples.config import TOWER_OF, ModalityDataConfig
from raymm.data.samples.placeholders import part_types
from raymm.errors import ConfigError
from raymm.plural import plural
from raymm.training.under_way import UnderWay

_MAX_TOKENS = 64


def add_generate_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``raymm generate``, except the configuration."""
    add = command.add_argument
    add("--prompt", action="append", required=True, help="text of the user's turn (repeatable)")
    add(
        "--item", action="append", default=[], metavar="NAME=FILE",
        help="media file for all prompts, by its modality or tower: image=a.png, vision=a.png, "
             "audio=a.wav (repeatable)",
    )
    add(
        "--max-tokens", type=int, default=_MAX_TOKENS, metavar="N",
        help=f"maximum number of tokens per text (default: {_MAX_TOKENS})",
    )
    add(
        "--skip-special-tokens", action=argparse.BooleanOptionalAction, default=True,
        help="leave the tokenizer's special tokens out of what is printed (default: yes)",
    )


def run_generate(args: argparse.Namespace) -> int:
    """Start the model of a configuration from the run's newest checkpoint, and print a text per
    prompt.

    Raises:
        ConfigError: invalid options.
        ModelError: the model cannot generate text under its plan.
        CheckpointError, ClusterError, ProbeError: as for a run that resumes.
        SampleError: a prompt or an item cannot be used.
    """
    from raymm.config.check_files import check_files
    from raymm.config.sections import load_config

    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens is {args.max_tokens}; expected at least 1")
    config = load_config(args.config, args.overrides)
    check_files(config)
    items = _items(args.item, config.data.modalities)
    from raymm.config.build import build_model, build_plan
    from raymm.planning.request import PlanRequest
    from raymm.runtime.cluster import connected, pick_device
    from raymm.runtime.generation import WritingModule, WritingRules, generate
    from raymm.runtime.options import resolve_precision
    from raymm.runtime.parallel_model import ParallelModel
    from raymm.storage.checkpoint import CheckpointStore
    from raymm.storage.loading import restore
    from raymm.training.phases import Phases
    from raymm.training.run_plan import RunPlanner
    from raymm.training.run_start import with_vocabulary

    checkpoint = CheckpointStore(config.run.storage_path).newest()
    if checkpoint is None:
        raise ConfigError(
            f"run.storage_path is {config.run.storage_path!r}, which has no checkpoint; accepted: "
            f"the folder of a run. `raymm train {args.config}` trains one"
        )
    with UnderWay(Console(stderr=True), "reading the model") as work:
        model = build_model(config)
        phases = Phases(model, config.at, config.run.steps)
        phases.enter_before(checkpoint)  # the checkpoint has what was trained at its step
        optimizer = config.optimizer.build(config.run.steps)
        # A prompt is a user's turn, even in a run on pairs of answers.
        data = with_vocabulary(config.data, model).model_copy(update={"preferences": False})
        builder, prompts = _prompts(data, args.prompt, items)
        work.update("connecting to Ray")
        with connected():
            device = pick_device(config.run.device, config.resources.for_device)
            precision = resolve_precision(config.run.precision, device)
            resources = config.resources.for_device(device)
            work.update("planning")
            plan = phases.plan(build_plan(config, model)) or RunPlanner(
                PlanRequest.of_config(config), model, config.data, precision, optimizer, work.line,
            ).plan(checkpoint, device, resources, _nothing_beside())
            work.update(f"starting {plural(plan.num_processes, 'process', 'es')}")
            with ParallelModel(
                model, plan, optimizer=optimizer, precision=precision, device=device,
                exact_autocast=config.run.exact_autocast, kernels=config.run.kernels,
                resources=resources, threads=config.resources.threads, seed=config.run.seed,
                timeout_s=config.run.timeout_s, nccl_timeout_s=config.run.nccl_timeout_s,
            ) as parallel:
                work.update("loading the checkpoint")
                restore(parallel, checkpoint.folder)
                rules = WritingRules.of(model, builder.tokenizer, builder.answer_ends)
                if rules.note is not None:
                    print(rules.note)
                running = cast(WritingModule, parallel)  # generate() refuses other modules
                work.update(f"generating {plural(len(prompts), 'text')}")
                written_ids = generate(running, prompts, args.max_tokens, rules.ends)
                skip = args.skip_special_tokens
                for text, ids in zip(args.prompt, written_ids, strict=True):
                    written = builder.tokenizer.decode(ids, skip_special_tokens=skip).strip()
                    print(f"> {text}\n{written}\n")
    return 0


def _nothing_beside() -> Any:
    from raymm.actors.placement.placement import PlacementOptions

    return PlacementOptions()


def _items(
    options: Sequence[str], modalities: Mapping[str, ModalityDataConfig]
) -> dict[str, tuple[Any, ...]]:
    """Return files by modality. An option may use the name in the data, their messages or the
    model: ``image``, ``images`` and ``vision`` are equivalent."""
    items: dict[str, tuple[Any, ...]] = {}
    for item in options:
        name, _, file = item.partition("=")
        names = [kind for kind in modalities if name in _names_of(kind, modalities[kind])]
        exact = [name] if name in modalities else names
        if len(exact) != 1 or not Path(file).is_file():
            ambiguity = f"; {name!r} may be {' or '.join(exact)}" if len(exact) > 1 else ""
            raise ConfigError(
                f"--item is {item!r}; accepted: NAME=FILE, an existing file of one of these "
                f"modalities: {', '.join(modalities) or 'none (data.modalities is empty)'}"
                f"{ambiguity}"
            )
        items[exact[0]] = (*items.get(exact[0], ()), str(Path(file).resolve()))
    return items


def _names_of(kind: str, modality: ModalityDataConfig) -> set[str]:
    """Return all names of a modality: its own, those of its column and message parts, and its
    tower's."""
    names = {kind, *part_types({kind: modality}), TOWER_OF.get(kind, kind)}
    return names | {f"{name}s" for name in names}


def _prompts(
    data: Any, texts: Sequence[str], items: dict[str, tuple[Any, ...]]
) -> tuple[Any, list[Any]]:
    """Return the sample builder, and a prompt for each text: the user's turn before an answer,
    which is left out."""
    from raymm.data import Sample
    from raymm.data.loading.processed import step_builder
    from raymm.evaluation.text_evaluation import last_answer, prompt_before

    builder: Any = step_builder(data, None)  # type: ignore[arg-type] # reads no samples
    prompts = []
    for number, text in enumerate(texts):
        content = text if data.processor is None else _with_places(text, items)
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "."}]
        encoded = builder.encode(Sample(number, f"prompt {number}", messages, None, items))
        inputs, meta = builder.alone(encoded)
        start, _ = last_answer(inputs["text"]["labels"][0])
        prompts.append(prompt_before(start, inputs, meta))
    return builder, prompts


def _with_places(text: str, items: dict[str, tuple[Any, ...]]) -> list[dict[str, str]]:
    """Return a text after its items, except items with a placeholder (``<image>``) in the text."""
    placeholders = [
        {"type": kind} for kind, kind_items in items.items()
        if f"<{kind}>" not in text for _ in kind_items
    ]
    return [*placeholders, {"type": "text", "text": text}]
