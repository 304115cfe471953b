"""Single-process training of the layout sweep's models with transformers, peft and torch alone."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from benchmarks.shared.family_classes import Family
from benchmarks.shared.sweep_tables import (
    AUDIO_FRAMES,
    IMAGE_SIZE,
    MEL_BINS,
    Feature,
    Option,
    WholeFeature,
)
from benchmarks.shared.vlm_check import runnable
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.model.vlm import PretrainedVlm, from_pretrained

UPDATES = 3
SEED = 11
# Text tokens of each row, and the row of each of the tower's items.
_ROWS = (((17, 9), (0, 0)), ((6, 8), (1,)))
Microbatch = Mapping[str, Any]
Step = Sequence[Microbatch]
Named = dict[str, nn.Parameter]


@functools.cache
def _runnable(name: str) -> tuple[Any, list[dict[str, Any]]]:
    """Return a tiny configuration of a transformers class, and microbatches."""
    model_class = getattr(transformers, name)
    config, microbatches = runnable(Family("whole model", model_class, model_class.config_class))
    config.architectures = [name]
    return config, microbatches[:2]


def _whole(feature: WholeFeature, packing: bool) -> PretrainedVlm:
    config, microbatches = _runnable(feature.config)
    train = dict(feature.train)
    if (how := train.pop("tower", None)) is not None:
        towers = from_pretrained(config, microbatches[0]).tower_names
        train |= dict.fromkeys(towers, how)
    size = config.get_text_config().vocab_size
    return from_pretrained(
        config, microbatches[0], seed=4, train=train, packing=packing,
        new_rows=range(size - feature.new_rows, size) if feature.new_rows else range(0),
    )


def described(
    feature: Feature, option: Option, packing: bool
) -> MultimodalModule | PretrainedVlm:
    """Return the model of a cell as a raymm model.

    Raises:
        ModelError, ProbeError: raymm rejects the model.
    """
    if isinstance(feature, WholeFeature):
        return _whole(feature, packing)
    encoders = {}
    if feature.tower is not None:
        encoders["vision"] = ModalityModule(
            *feature.encoder(), seed=7, **feature.modules.get("vision", {}))
    language = ModalityModule(
        feature.language_model(), seed=7, **feature.modules.get("llm", {}))
    model = MultimodalModule(
        encoders, language, packing=packing, **{**feature.model, **option.model})
    torch.manual_seed(5)
    with torch.no_grad():  # B of an adapter is initially zero, which hides the gradient of A
        for name, parameter in model.materialize().named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def step_of(feature: Feature) -> list[dict[str, Any]]:
    """Return two microbatches of two rows with padding; the first two tokens of a row have no
    label.

    Args:
        feature: model whose tower determines the items.
    """
    if isinstance(feature, WholeFeature):
        return _runnable(feature.config)[1]
    generator = torch.Generator().manual_seed(4)
    step = []
    for lengths, items in _ROWS:
        ids = [torch.randint(3, 90, (length,), generator=generator) for length in lengths]
        labels = [torch.cat([torch.full((2,), -100), row[2:]]) for row in ids]
        ones = [torch.ones_like(row) for row in ids]
        side = "left" if feature.left else "right"
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side)
        microbatch: dict[str, Any] = {
            "input_ids": pad(ids), "attention_mask": pad(ones),
            "labels": pad(labels, padding_value=-100),
        }
        if feature.tower is not None:
            sounds = feature.tower == "WhisperConfig"
            shape = (MEL_BINS, AUDIO_FRAMES) if sounds else (3, IMAGE_SIZE, IMAGE_SIZE)
            microbatch["vision"] = {
                "input_features" if sounds else "pixel_values":
                    torch.randn(len(items), *shape, generator=generator),
                "sample_index": torch.tensor(items),
            }
        step.append(microbatch)
    return step


class _Row(NamedTuple):
    """Row with its items before its text.

    Attributes:
        embeds: (T, hidden).
        labels: (T,).
    """

    embeds: torch.Tensor
    labels: torch.Tensor
    items: list[int]


class _Plain(nn.Module):
    """Copies of a model's modules under raymm's parameter names, without raymm's code."""

    language_model: Any
    vision_encoder: Any

    def __init__(self, feature: Feature, option: Option, model: MultimodalModule) -> None:
        super().__init__()
        preference: Any = model.preference
        self._feature, self._preference = feature, preference
        self.language_model = self._part(model.language_model, feature.language_model())
        if feature.tower is not None:
            self.vision_encoder = self._part(model.encoders["vision"], *feature.encoder())
        # Stored in a list so that it is not registered as a submodule.
        self._initial = [copy.deepcopy(self)]

    def _part(
        self, described: ModalityModule, module: nn.Module, projector: nn.Module | None = None
    ) -> nn.Module:
        part = nn.Module()
        for name, plain, lora in (
            ("module", module, described.lora),
            ("projector", projector, described.projector_lora),
        ):
            if plain is None:
                continue
            own = getattr(described, name)
            if lora is not None:
                plain = _in_peft(plain, own, lora)
            else:
                for mine, other in zip(plain.parameters(), own.parameters(), strict=True):
                    mine.requires_grad_(other.requires_grad)
            trains = any(p.requires_grad for p in plain.parameters())
            setattr(part, name, plain.train(trains))
        return part

    def loss(self, step: Step, update: int, batch: int) -> torch.Tensor:
        """Return the loss of a step.

        Args:
            update, batch: indices from 0 of the optimizer step and of the batch, for models that
                use random numbers.
        """
        del update, batch
        count = _count(step, self._preference is not None)
        if self._preference is not None:
            return torch.stack([self._pairs(microbatch) for microbatch in step]).sum() / count
        microbatches = [self._rows(microbatch) for microbatch in step]
        if self._feature.whole_step:
            microbatches = [[row for rows in microbatches for row in rows]]
        return torch.stack([self._loss(rows, count) for rows in microbatches]).sum()

    def named(self) -> Named:
        """Return trainable parameters by raymm's names."""
        return {own_name(name): value for name, value in _trainable(self).items()}

    def _rows(self, microbatch: Microbatch) -> list[_Row]:
        features: list[torch.Tensor] = []
        inputs = dict(microbatch.get("vision", {}))
        owners = inputs.pop("sample_index", torch.empty(0)).tolist()
        if owners:
            hidden = self.vision_encoder.module(**inputs).last_hidden_state
            features = list(self.vision_encoder.projector(hidden))
        rows = []
        for number, real in enumerate(microbatch["attention_mask"].bool()):
            ids, labels = (microbatch[name][number][real] for name in ("input_ids", "labels"))
            labels = torch.cat([labels.new_full((1,), -100), labels[1:]])
            own = [item for item, row in zip(features, owners, strict=True) if row == number]
            text = self.language_model.module.get_input_embeddings()(ids)
            sizes = [len(item) for item in own]
            padded = F.pad(labels, (sum(sizes), 0), value=-100)
            rows.append(_Row(torch.cat([*own, text]), padded, sizes))
        return rows

    def _output(self, rows: Sequence[_Row]) -> tuple[Any, torch.Tensor]:
        """Return the language model's output, and labels (B, T)."""
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        embeds = pad([row.embeds for row in rows])
        labels = pad([row.labels for row in rows], padding_value=-100)
        mask = pad([torch.ones_like(row.labels) for row in rows])
        if "mask" in self._feature.model:
            mask = torch.stack([_isolated(row.items, embeds.shape[1]) for row in rows])[:, None]
        module: Any = self.language_model.module
        _forget(module)
        return module(inputs_embeds=embeds, attention_mask=mask, use_cache=False), labels

    def _loss(self, rows: Sequence[_Row], count: int) -> torch.Tensor:
        output, labels = self._output(rows)
        loss = F.cross_entropy(
            output.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(),
            ignore_index=-100, reduction="sum",
        ) / count
        if self._feature.whole_step:
            config = self.language_model.module.config
            loss = loss + config.router_aux_loss_coef * output.aux_loss
        return loss

    def _scores(self, microbatch: Microbatch) -> torch.Tensor:
        """Return (B,), log-probabilities of the labels of each row."""
        output, labels = self._output(self._rows(microbatch))
        logs, due = output.logits[:, :-1].float().log_softmax(-1), labels[:, 1:]
        found = logs.gather(-1, due.clamp(min=0)[..., None])[..., 0]
        return found.where(due != -100, 0.0).sum(1)

    def _pairs(self, microbatch: Microbatch) -> torch.Tensor:
        """Return the sum of the losses of pairs of a chosen and a rejected row."""
        from peft import PeftModel

        with torch.no_grad():
            if self._preference.reference == "initial":
                reference = self._initial[0]._scores(microbatch)
            else:
                with contextlib.ExitStack() as stack:
                    for module in self.modules():
                        if isinstance(module, PeftModel):
                            stack.enter_context(module.disable_adapter())
                    reference = self._scores(microbatch)
        won = self._scores(microbatch) - reference
        return -F.logsigmoid(self._preference.beta * (won[0::2] - won[1::2])).sum()


def _isolated(items: Sequence[int], size: int) -> torch.Tensor:
    """Return a (size, size) bool mask: text sees all earlier tokens, an item's tokens see each
    other.
    """
    visible = torch.ones(size, size, dtype=torch.bool).tril()
    begin = 0
    for length in items:
        visible[begin : begin + length] = False
        visible[begin : begin + length, begin : begin + length] = True
        begin += length
    return visible


def _forget(module: nn.Module) -> None:
    """Reset rotary embeddings that keep the frequencies of the longest rows so far.

    After that, a forward depends on its inputs alone.
    """
    for rotary in module.modules():
        if hasattr(rotary, "original_max_seq_len") and hasattr(rotary, "original_inv_freq"):
            rotary.register_buffer("inv_freq", rotary.original_inv_freq.clone(), persistent=False)
            rotary.max_seq_len_cached = rotary.original_max_seq_len


def _count(step: Step, pairs: bool) -> int:
    """Return the label tokens of a step, or its pairs of rows; the first token of a row has no
    label.
    """
    if pairs:
        return sum(len(one["labels"]) // 2 for one in step)
    return sum(int((one["labels"][:, 1:] != -100).sum()) for one in step)


def _trainable(module: nn.Module) -> Named:
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def _in_peft(plain: nn.Module, adapted: nn.Module, lora: LoraConfig) -> nn.Module:
    """Apply peft adapters with the values of raymm's adapters."""
    import peft

    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    alpha: Any = lora.alpha  # peft declares an int
    config = peft.LoraConfig(
        r=lora.r, lora_alpha=alpha, lora_dropout=lora.dropout, use_dora=lora.dora,
        use_rslora=lora.use_rslora, target_modules=targets,
    )
    own = dict(adapted.named_parameters())
    model = peft.get_peft_model(plain, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(own[own_name(name.removeprefix("base_model.model."))])
    return model


def own_name(name: str) -> str:
    """Return raymm's name of a parameter of a peft model."""
    name = name.replace(".base_model.model.", ".").replace(".base_layer.", ".")
    return re.sub(r"\.default(\.weight)?$", "", name)


class _WholeProcess(nn.Module):
    """Single process that calls the model class of transformers."""

    def __init__(self, model: PretrainedVlm) -> None:
        super().__init__()
        self.model, self._described = model.materialize(), [model]

    def loss(self, step: Step, update: int, batch: int) -> torch.Tensor:
        """Return the loss as :meth:`_Plain.loss` does."""
        del update, batch
        return self._described[0].loss(step)

    def named(self) -> Named:
        """Return the parameters as :meth:`_Plain.named` does."""
        return _trainable(self.model)


class _Drawn(nn.Module):
    """Model itself in one process, with the random numbers that its ranks use."""

    def __init__(self, model: MultimodalModule) -> None:
        super().__init__()
        self.model = model

    def loss(self, step: Step, update: int, batch: int) -> torch.Tensor:
        """Return the loss as :meth:`_Plain.loss` does."""
        losses, count = [], _count(step, self.model.preference is not None)
        for number, microbatch in enumerate(step):
            with self.model.drawing(SEED, update, number, batch):
                losses.append(self.model(**microbatch, label_tokens=count))
        return torch.stack(losses).sum()

    def named(self) -> Named:
        """Return the parameters as :meth:`_Plain.named` does."""
        return _trainable(self.model)


@dataclass(frozen=True)
class Training:
    """Result of a few training steps.

    Attributes:
        gradients: by name, of the first update, before clipping.
        before: initial trainable parameters by name.
        after: the same after the steps, or their moving averages.
    """

    losses: list[float]
    gradients: dict[str, torch.Tensor | None]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


def trained(
    feature: Feature, option: Option, bf16: bool = False, packing: bool = False
) -> Training:
    """Train a cell's model in this process.

    Args:
        bf16: True for autocast.
        packing: True to pack the rows of a model that uses random numbers.
    """
    model = described(feature, option, packing)
    if isinstance(model, PretrainedVlm):
        process = _WholeProcess(model)
    else:
        process = _Drawn(model) if feature.draws else _Plain(feature, option, model)
    named = process.named()
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    averages = {name: value.clone() for name, value in before.items()}
    config, gradients = option.config, {}
    matrices = {
        id(child.weight) for name, child in process.named_modules()
        if isinstance(child, nn.Linear | Conv1D) and not name.endswith("lm_head")
    } - {id(c.weight) for c in process.modules() if isinstance(c, nn.Embedding)}
    nothing: Any = None  # Trainer's method does not use self
    names = set(transformers.Trainer.get_decay_parameter_names(nothing, process))
    decayed = {id(p) for name, p in process.named_parameters() if name in names}
    made = _optimizers(named, option, matrices, decayed)
    optimizers = dict(zip(named, made, strict=True))
    losses: list[float] = []
    for update in range(UPDATES):
        for module, mode in option.at.get(update, {}).items():
            _set_mode(module, mode, named, optimizers)
        for batch in range(option.batches):
            with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
                loss = process.loss(step_of(feature), update, batch)
            loss.backward()
            losses.append(float(loss.detach()))
        if not update:
            gradients = {
                name: None if p.grad is None else p.grad.clone() for name, p in named.items()
            }
        if config.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(named.values(), config.max_grad_norm)
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                if config.schedule != "constant":
                    group["lr"] = group["peak"] * _share(config, update)
            with torch.compiler.set_stance("force_eager"):  # torchao's
                optimizer.step()
            optimizer.zero_grad()
        if config.ema is not None:
            for name, parameter in named.items():
                averages[name].lerp_(parameter.detach(), 1 - config.ema.decay)
    after = {name: parameter.detach() for name, parameter in named.items()}
    return Training(losses, gradients, before, averages if option.averages else after)


def _set_mode(
    module: str, mode: str, named: Mapping[str, nn.Parameter],
    optimizers: Mapping[str, torch.optim.Optimizer],
) -> None:
    """Train or freeze a module; optimizer state is reset when it trains again."""
    for name, parameter in named.items():
        if _module_of(name) == module:
            parameter.requires_grad_(mode == "full")
            parameter.grad = None
            optimizers[name].state.clear()


def _module_of(name: str) -> str:
    """Return the plan's name of the module that contains a parameter."""
    if name.startswith("language_model."):
        return "llm"
    return "vision_projector" if ".projector." in name else "vision"


def _share(config: OptimizerConfig, update: int) -> float:
    assert config.schedule == "linear" and config.total_steps and not config.warmup_steps
    least = config.min_lr_ratio
    return least + (1 - least) * (1 - update / config.total_steps)


def _optimizers(
    named: Mapping[str, nn.Parameter], option: Option, matrices: set[int], decayed: set[int]
) -> Iterator[torch.optim.Optimizer]:
    """Yield one optimizer per parameter.

    Args:
        matrices: ids of weights for Muon.
        decayed: ids of parameters that ``transformers.Trainer`` decays.
    """
    for name, parameter in named.items():
        config = option.config
        rule = {**vars(config), **config.modules.get(_module_of(name), {})}
        inner = name.partition(".")[2].partition(".")[2]
        if rule["no_decay"] is None:
            exempt = id(parameter) not in decayed
        else:
            exempt = any(fnmatchcase(inner, pattern) for pattern in rule["no_decay"])
        decay = 0.0 if exempt else rule["weight_decay"]
        group = {"params": [parameter], "peak": rule["lr"]}
        common = dict(lr=rule["lr"], weight_decay=decay)
        if rule["name"] == "muon" and id(parameter) in matrices:
            yield torch.optim.Muon([group], adjust_lr_fn="match_rms_adamw", **common)
        elif rule["name"] == "adamw_8bit":
            from torchao.optim import AdamW8bit

            yield AdamW8bit([group], eps=rule["eps"], **common)
        else:
            yield torch.optim.AdamW([group], eps=rule["eps"], **common)
