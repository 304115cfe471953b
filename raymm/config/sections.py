"""Configuration of a run, as ``raymm train CONFIG.yaml`` reads it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from raymm.actors.optimizer.optimizer_config import (
    EmaConfig,
    OptimizerConfig,
    check_optimizer_name,
    check_schedule_name,
)
from raymm.actors.storage.location import check_location
from raymm.config.model_section import ModelSection, path_with_revision
from raymm.config.planning_options import PlanningOptions
from raymm.data import DataConfig
from raymm.errors import ConfigError
from raymm.files.config_file import expand_variables, read_sections, with_overrides
from raymm.files.field_errors import explain
from raymm.files.output import with_home
from raymm.files.section import (
    MOST_COUNT,
    Count,
    NonNegative,
    Seconds,
    Section,
    Seed,
    Text,
    Tuple,
    section_of,
)

if TYPE_CHECKING:
    from raymm.actors.rank.rank_resources import RankResources

# Threads of one process; torch aborts where the system cannot start as many.
MOST_THREADS = 1024


# ParallelSpec checks the minimum and names the degree.
Degree = Annotated[int, Field(le=MOST_COUNT)]


PERPLEXITY = "perplexity"
PAIR_LOSS = "preference_loss"
OF_PAIRS = (
    PAIR_LOSS, "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected",
)  # fmt: skip
METRICS = ("exact_match", "anls", "wer", PERPLEXITY, *OF_PAIRS)
LOWER_IS_BETTER = ("wer", PERPLEXITY, PAIR_LOSS)


def _metric(name: str) -> str:
    if name not in METRICS and ":" not in name:
        raise ValueError(f"accepted: {', '.join(METRICS)}, or 'package.module:function'")
    return name


MOST_GIB = 2**20


class CacheSection(Section):
    """Results that a run computes once.

    Attributes:
        features: where the features of frozen encoders, or of the frozen layers before an encoder's
            first trained one, are cached: ``"disk"``, across runs; ``"host"``, in host memory
            (``/dev/shm``) while the run lasts; ``"none"``, nowhere, but encoders still process
            every item separately, as with a cache. The key of a feature consists of the item's
            content, the encoder's weights, the code of its classes, callbacks and processor with
            all user modules that these import, the precision and ``tp``. Once all items of a step
            are cached, they are not decoded, and the step's program does not run the encoder.
            Processors and callbacks must be deterministic. For a whole model, the features of its
            frozen towers are cached; its processor runs every time.
        folder: folder for ``"disk"`` that all nodes can reach; by default ``features`` in
            ``~/.cache/raymm``.
        version: text that is part of the folder's name. Change it together with files that user
            code reads. Required with ``"disk"`` if changes of the code cannot be detected.
        room_gib: maximum size of all features in the folder. Features beyond it are computed every
            time.
    """

    features: Literal["disk", "host", "none"] = "disk"
    folder: Text | None = None
    version: Text | None = None
    room_gib: Annotated[float, Field(gt=0, le=MOST_GIB)] = 20.0


class GenerateSection(Section):
    """Greedy generation of texts.

    Attributes:
        max_tokens: maximum number of tokens per text.
        under_way: number of texts that are generated at once; by default eight for each stage of
            the language model (sixteen if it has one).
        skip_special_tokens: omit the tokenizer's special tokens from texts and answers, as
            ``decode`` of transformers does. Set it to false if they are part of an answer, such as
            those around boxes.
    """

    max_tokens: Count = 64
    under_way: Count | None = None
    skip_special_tokens: bool = True


class EvaluateSection(Section):
    """Evaluation of a model during training, on the same ranks.

    Attributes:
        every: steps between evaluations; the first is before all steps, the last after all.
        generate: how texts are generated.
        metrics: metrics of the generated text against the last answer of every sample:
            ``"exact_match"``, ``"anls"`` (average normalised Levenshtein similarity, 0 below 0.5)
            and ``"wer"`` (word errors over words, lower is better); ``"perplexity"`` of the right
            answers; or ``"pkg.mod:fn"``, a function of text and answer to a number, which is
            averaged. For pairs of answers, the chosen one is the right one, and instead of
            perplexity there is the mean over pairs of the ``"preference_loss"``,
            ``"rewards/accuracies"``, ``"rewards/margins"``, ``"rewards/chosen"`` or
            ``"rewards/rejected"``.
        samples: number of held-out samples, from the first; None for all.
        best: metric of the best checkpoint, which is kept in addition and named in ``best.json``.
        lower_is_better: True if a lower value is better; by default known for raymm's own metrics.
        patience: evaluations without improvement after which the run ends; None for no limit.
    """

    every: Count
    generate: GenerateSection = Field(default_factory=GenerateSection)
    metrics: list[Annotated[Text, AfterValidator(_metric)]] = Field(
        default_factory=lambda: ["exact_match"], min_length=1
    )
    samples: Count | None = 32
    best: Text | None = None
    lower_is_better: bool | None = None
    patience: Count | None = None

    @model_validator(mode="after")
    def _best_is_measured(self) -> EvaluateSection:
        if self.best is not None and self.best not in self.metrics:
            raise ValueError(f"best is {self.best!r}; accepted: one of metrics, {self.metrics}")
        if self.best is None and (self.patience or self.lower_is_better is not None):
            raise ValueError(
                "patience and lower_is_better need best, the metric that they apply to"
            )
        return self

    @property
    def smallest(self) -> bool:
        if self.lower_is_better is not None:
            return self.lower_is_better
        return self.best in LOWER_IS_BETTER


class UpdateSection(Section):
    """Optimizer settings of a module that differ from those of the whole model.

    Attributes:
        name: ``adamw``, ``adamw_8bit``, ``muon``, or ``module:function`` of a custom optimizer.
        schedule: ``constant``, ``linear``, ``cosine``, or ``module:function`` of a custom schedule.
        warmup_steps: first steps, in which the learning rate rises linearly from 0, as in
            ``transformers.get_scheduler``: step ``n``, from 0, has ``n / warmup_steps`` of ``lr``.
        total_steps: end of the schedule; by default ``run.steps``.
        min_lr_ratio: fraction of ``lr`` at the end of the schedule.
    """

    name: Annotated[Text, AfterValidator(check_optimizer_name)] = "adamw"
    parameters: Literal["fp32", "bf16_master", "bf16_stochastic"] = "fp32"
    lr: float = 1e-3
    betas: Tuple[float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    no_decay: Tuple[Text] | None = None
    momentum: float = 0.95
    schedule: Annotated[Text, AfterValidator(check_schedule_name)] = "constant"
    warmup_steps: NonNegative = 0
    total_steps: Count | None = None
    min_lr_ratio: float = 0.0


class EmaSection(Section):
    """Exponential moving average of the trained weights, stored like optimizer state; ``raymm
    export --ema`` writes it.

    Attributes:
        decay: weight of the old average at an update.
        every: steps between updates.
        evaluate: compute held-out losses and texts with the average.
    """

    decay: float = 0.999
    every: Count = 1
    evaluate: bool = False


class OptimizerSection(UpdateSection):
    """Optimizer of the model: see
    :class:`raymm.actors.optimizer.optimizer_config.OptimizerConfig`."""

    max_grad_norm: float | None = 1.0
    modules: dict[Text, UpdateSection] = Field(default_factory=dict)
    ema: EmaSection | None = None

    @model_validator(mode="after")
    def _numbers_make_sense(self) -> OptimizerSection:
        self.build(steps=1)
        return self

    def build(self, steps: int) -> OptimizerConfig:
        values = self.model_dump()
        # A run that ends within its warm-up is a short trial of a longer run.
        values["total_steps"] = self.total_steps or max(steps, self.warmup_steps)
        values["modules"] = {
            name: section.model_dump(exclude_unset=True) for name, section in self.modules.items()
        }
        for options in values["modules"].values() if self.total_steps is None else ():
            if options.get("warmup_steps", 0) > values["total_steps"]:
                options.setdefault("total_steps", options["warmup_steps"])
        if self.ema is not None:
            try:
                values["ema"] = EmaConfig(**self.ema.model_dump())
            except ValueError as error:
                raise ValueError(f"ema.{error}") from None
        return OptimizerConfig(**values)


class DegreeRange(Section):
    """Number of replicas that varies with the available nodes.

    Attributes:
        min: minimum number; the run starts once there is room for these replicas.
        max: maximum number; an autoscaler is requested to add room for these replicas.
    """

    min: Degree = 1
    max: Degree


class LayoutSection(Section):
    """Layout of one module: see :class:`raymm.runtime.specs.ParallelSpec`, which checks the
    numbers."""

    pp: Degree = 1
    chunks: Degree = 1
    replicas: Degree | None = None
    tp: Degree = 1
    cp: Degree = 1
    ep: Degree = 1
    dp: Degree | DegreeRange = 1
    sharding: Literal["none", "zero1", "fsdp"] = "none"
    recompute_layers: Text | Tuple[Text] = "keep"
    layers: Tuple[int] | None = None
    ranks: Tuple[int] | None = None
    quota: float | None = None
    microbatch_factor: Degree = 1


class ParallelSection(Section):
    """Placement of modules. Without ``language_model``, ``encoders`` and ``plan``, raymm makes a
    plan.

    Attributes:
        language_model, encoders: layouts by module; other modules get one stage on a separate rank.
        plan: file that ``raymm plan`` saved, used instead of layouts: a pipelined plan or a
            multiplexed mapping.
        style: style of plans that raymm makes: ``"pipelined"`` (default), ``"multiplexed"``, or
            ``"auto"`` for the one that is predicted to be faster.
        schedule: ``"1f1b"`` (default of layouts), ``"zero_bubble"``, ``"gpipe"``, a schedule of
            another project (``"megatron"``, ``"mimo"``, ``"mimo_colocated"``, ``"entrain"``,
            ``"dip"``, ``"bigmac"``, ``"optimus"``), or ``module:Class`` of a custom
            :class:`raymm.Schedule`. If set, raymm only makes plans
            with this schedule. With ``plan``, accepted only for a plan of a custom schedule.
        recompute: run forwards again for the backward instead of keeping activations. For plans
            that raymm makes, ``"layers"`` lets every layer keep as much as fits in memory, and None
            chooses the fastest that fits.
    """

    language_model: LayoutSection = Field(default_factory=LayoutSection)
    encoders: dict[str, LayoutSection] = Field(default_factory=dict)
    plan: Text | None = None
    style: Literal["pipelined", "multiplexed", "auto"] | None = None
    schedule: Text | None = None
    recompute: bool | Literal["layers"] | None = None

    @property
    def has_layouts(self) -> bool:
        """True if layouts are given, so that no plan is needed."""
        return bool(self.model_fields_set & {"language_model", "encoders"})


class PlanningSection(section_of(PlanningOptions)):
    """Targets of plans that raymm makes: fields of :class:`PlanningOptions`. Options of ``raymm
    plan`` take precedence."""


class ResourcesSection(Section):
    """Ray resources and threads of one rank.

    Attributes:
        cpus: may be a fraction.
        gpus: by default 1 on ``cuda``, the only number supported there, and 0 on ``cpu``.
        custom: other Ray resources by name.
        env: environment variables of the ranks' processes, e.g. ``{NCCL_DEBUG: INFO}``.
        threads: torch threads within one operation.
    """

    cpus: float = Field(default=1.0, ge=0, le=MOST_COUNT)
    gpus: float | None = Field(default=None, ge=0, le=MOST_COUNT)
    custom: dict[Text, Annotated[float, Field(ge=0, le=MOST_COUNT)]] = Field(default_factory=dict)
    env: dict[Text, str] = Field(default_factory=dict)
    threads: int = Field(default=1, ge=1, le=MOST_THREADS)

    @field_validator("custom")
    @classmethod
    def _not_ours(cls, custom: dict[str, float]) -> dict[str, float]:
        if reserved := sorted({"CPU", "GPU"} & set(custom)):
            raise ValueError(f"{reserved[0]} has a separate field: give cpus or gpus")
        return custom

    def for_device(self, device: str) -> RankResources:
        """Return the resources of a rank on ``"cpu"`` or ``"cuda"``."""
        from raymm.actors.rank.rank_resources import RankResources

        gpus = self.gpus if self.gpus is not None else float(device == "cuda")
        return RankResources(self.cpus, gpus, self.custom, self.env)


class RunConfig(Section):
    """Length of a run, its output, and its handling of failures.

    Attributes:
        storage_path: folder of the run; on a cluster, one that every node can reach. Or a URL:
            ``file:///folder``, or a bucket, ``s3://bucket/folder`` or ``gs://bucket/folder``, or a
            scheme of fsspec. ``module:function://folder`` is a folder of the file system that a
            function returns. A run whose folder has a checkpoint resumes from it.
        steps: total number of optimizer steps.
        checkpoint_every: steps between checkpoints; the last step always writes one.
        keep_checkpoints: number of checkpoints to keep.
        asynchronous_checkpoints: write checkpoints in the background; steps only wait for a copy in
            host memory.
        eval_every: steps between held-out evaluations, the first before all steps; None: none.
        eval_steps: held-out steps per evaluation; None for all held-out data.
        eval_shuffled: also report the held-out loss with the items of each modality assigned to
            wrong samples; the difference shows how much the model uses them.
        log_every: steps between printed lines.
        seed: seed of random weights and dropout.
        precision: see :class:`raymm.runtime.options.RuntimeOptions`. With ``"auto"``, a run that
            resumes keeps the precision of its checkpoint.
        exact_autocast, kernels, compile: see :class:`raymm.runtime.options.RuntimeOptions`.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``: CUDA if ranks reserve GPUs (``resources``) or,
            where not given, if the cluster has GPUs or its autoscaler can add them.
        max_failures: maximum number of automatic resumes from the last checkpoint after a process
            or a node was lost; null for no limit. A failure that would repeat ends the run.
        max_preemptions: the same for nodes whose end was announced (spot instances, drains).
        snapshot_every: steps between snapshots of the training state in host memory. If processes
            are lost, the remaining ones continue from a snapshot; null: only from checkpoints, with
            new processes.
        max_recoveries: maximum number of such recoveries within an hour; null for no limit.
        spares: waiting processes, each with the resources of a rank, that replace lost ones.
        replace_stragglers: let a spare also replace a rank that was slow for 20 consecutive steps;
            needs ``spares`` and ``snapshot_every``.
        wait_for_nodes_s: seconds to wait for nodes; by default 1800 with an autoscaler, else 0.
        max_seconds: seconds after which the run is saved and ends, including the wait for nodes.
        timeout_s: maximum seconds that a rank waits for another, and that one instruction (such as
            a forward) takes.
        nccl_timeout_s: seconds until NCCL's watchdog ends a rank; by default 2 * ``timeout_s``.
        steps_in_flight: steps that are submitted ahead, so that ranks never wait for the driver.
        max_skipped_steps: consecutive steps with a non-finite loss or gradient, which are not
            applied, after which the run ends.
        log_samples: write ``samples.jsonl`` with the samples of every step by microbatch.
        allow_changes: fields, as in the error message, that may differ from those of the checkpoint
            that the run resumes from (:mod:`raymm.storage.resuming`).
        callbacks: ``tensorboard``, ``wandb``, ``mlflow``, or ``module:Class`` of a
            :class:`raymm.Callback`; ``{name: {argument: value}}`` passes arguments.
        evaluate: generation for held-out samples.
    """

    storage_path: Annotated[Text, AfterValidator(check_location), AfterValidator(with_home)]
    steps: Count
    checkpoint_every: Count = 100
    keep_checkpoints: Count = 2
    asynchronous_checkpoints: bool = True
    eval_every: Count | None = None
    eval_steps: Count | None = None
    eval_shuffled: bool = True
    log_every: Count = 10
    seed: Seed = 0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    exact_autocast: bool = False
    kernels: Literal["raymm", "raymm_unordered", "auto"] = "raymm"
    compile: Literal["blocks"] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_failures: NonNegative | None = 3
    max_preemptions: NonNegative | None = None
    snapshot_every: Count | None = None
    max_recoveries: NonNegative | None = 20
    spares: NonNegative = 0
    replace_stragglers: bool = False
    wait_for_nodes_s: Seconds | None = None
    max_seconds: Seconds | None = None
    timeout_s: Seconds = 300.0
    nccl_timeout_s: Seconds | None = None
    steps_in_flight: int = Field(default=2, ge=1, le=8)
    max_skipped_steps: Count = 10
    log_samples: bool = False
    allow_changes: list[Text] = Field(default_factory=list)
    callbacks: list[Text | dict[Text, dict[Text, Any]]] = Field(default_factory=list)
    evaluate: EvaluateSection | None = None

    @model_validator(mode="after")
    def _stragglers_have_successors(self) -> RunConfig:
        if self.replace_stragglers and not (self.spares and self.snapshot_every):
            raise ValueError(
                f"replace_stragglers is true, but spares is {self.spares} and snapshot_every is "
                f"{self.snapshot_every}; accepted: at least 1 of each"
            )
        return self


class TrainConfig(Section):
    """A whole configuration file. The data of a whole model use the processor in its folder by
    default.

    Attributes:
        at: by step, after which the change holds: ``"full"`` or ``"frozen"`` by module as in plans
            (``llm``, an encoder's name, or that with ``_projector``), or by part of a whole model
            as in ``model.train``. The run is planned again at that step, from the checkpoint that
            it writes.
    """

    run: RunConfig
    model: ModelSection
    data: DataConfig
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    planning: PlanningSection = Field(default_factory=PlanningSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    resources: ResourcesSection = Field(default_factory=ResourcesSection)
    cache: CacheSection | None = None
    at: dict[Count, dict[Text, Literal["full", "frozen"]]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _processor_of_the_model(cls, values: Any) -> Any:
        model, data = (values.get(name) for name in ("model", "data")) if isinstance(
            values, dict) else (None, None)  # fmt: skip
        if isinstance(model, dict) and isinstance(data, dict) and model.get("path"):
            path = model["path"]
            if isinstance(path, str) and isinstance(revision := model.get("revision"), str):
                path = path_with_revision(path, revision)
            values = {**values, "data": (data := {"processor": path, **data})}
        if isinstance(model, dict) and isinstance(data, dict) and isinstance(
            model.get("loss"), dict
        ):
            return {**values, "data": {"preferences": True, **data}}
        return values

    @model_validator(mode="after")
    def _modalities_match(self) -> TrainConfig:
        unknown = set(self.data.modalities) - set(self.model.encoders)
        if unknown and self.model.path is None:
            raise ValueError(
                f"data.modalities has {sorted(unknown)}, but model.encoders are "
                f"{sorted(self.model.encoders) or 'none'}"
            )
        return self

    @model_validator(mode="after")
    def _trust_is_for_all_folders(self) -> TrainConfig:
        if self.model.trust_remote_code:
            self.data = self.data.model_copy(update={"trust_remote_code": True})
        return self

    @model_validator(mode="after")
    def _something_to_evaluate(self) -> TrainConfig:
        if self.run.eval_every is not None and self.data.heldout is None:
            raise ValueError(
                f"run.eval_every is {self.run.eval_every}, but data.heldout is not given; give "
                "data.heldout or data.heldout_fraction, or leave out run.eval_every"
            )
        if self.run.evaluate is not None and self.data.heldout is None:
            raise ValueError("run.evaluate needs data.heldout, which is not given; give it, or "
                             "data.heldout_fraction")
        return self

    @model_validator(mode="after")
    def _placeholders_of_the_merge(self) -> TrainConfig:
        """Pass the placeholders to the data workers, which compare them with the items of a
        sample."""
        merge = self.model.merge if isinstance(self.model.merge, dict) else {}
        for name, modality in self.data.modalities.items():
            token = merge.get(name)
            if token is None:
                continue
            if modality.placeholder not in (None, token):
                raise ValueError(
                    f"data.modalities.{name}.placeholder is {modality.placeholder!r}, but "
                    f"model.merge.{name} is {token!r}; leave out the placeholder"
                )
            placed = modality.model_copy(update={"placeholder": token})
            self.data.modalities[name] = placed
        return self


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML configuration file, and apply ``key.path=value`` overrides in order. Raises
    ConfigError, which names the file, or every wrong field."""
    data = read_sections(path, overrides)
    try:
        return parse_config(data)
    except ConfigError as error:
        raise ConfigError(f"{with_overrides(path, overrides)}:\n{error}") from None


def parse_config(data: dict[str, Any]) -> TrainConfig:
    """Check configuration values. Raises ConfigError, which names every wrong field."""
    try:
        return TrainConfig.model_validate(expand_variables(data))
    except ValidationError as error:
        raise ConfigError(explain(error, TrainConfig)) from None
