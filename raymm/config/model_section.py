"""The ``model:`` section."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from raymm.actors.adapters.lora_config import ALL_LINEAR, LoraConfig
from raymm.actors.weights.hub_folder import is_hub_id, split_id
from raymm.files.section import MOST_COUNT, Count, ImportPath, Section, Text, Tuple

if TYPE_CHECKING:
    import torch

# Value of ``new_tokens`` for the processor's tokens that have no rows.
FROM_PROCESSOR = "from_processor"


_MOST_NUMBERS = 10**8


class ExampleSection(Section):
    """One tensor: exactly one of ``shape`` and ``values``.

    Attributes:
        shape: shape of a random tensor: normally distributed, or ones if the dtype is not
            floating-point.
        values: the values, as nested lists.
        dtype: dtype of the tensor.
    """

    shape: Tuple[Count] | None = None
    values: list[Any] | None = None
    dtype: Literal[
        "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
        "bool",
    ] = "float32"  # fmt: skip

    @model_validator(mode="after")
    def _check_fields(self) -> ExampleSection:
        if (self.shape is None) == (self.values is None):
            raise ValueError("give exactly one of shape, values")
        if self.shape is not None and prod(self.shape) > _MOST_NUMBERS:
            raise ValueError(f"shape has more than {_MOST_NUMBERS} numbers")
        self.tensor()
        return self

    def tensor(self) -> torch.Tensor:
        """Return the tensor, which is the same every time."""
        import torch

        dtype = getattr(torch, self.dtype)
        if self.values is not None:
            try:
                return torch.tensor(self.values, dtype=dtype)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"values are not a tensor of {self.dtype}: {error}") from None
        assert self.shape is not None  # see _check_fields
        if not dtype.is_floating_point:
            return torch.ones(self.shape, dtype=dtype)
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def example_tensors(
    examples: Mapping[str, ExampleSection] | None,
) -> dict[str, torch.Tensor] | None:
    """Return the tensors by name; None if there are none."""
    if not examples:
        return None
    return {name: section.tensor() for name, section in examples.items()}


class LoraSection(Section):
    """Low-rank adapters: see :class:`raymm.actors.adapters.lora_config.LoraConfig`.

    Attributes:
        r: rank.
    """

    r: Count = 8
    alpha: float = Field(default=16.0, gt=0, le=MOST_COUNT)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: Text | Tuple[Text] = ALL_LINEAR
    dora: bool = False
    use_rslora: bool = False
    base: Literal["int8", "int4"] | None = None

    def build(self) -> LoraConfig:
        return LoraConfig(**self.model_dump())


class AdaptersSection(Section):
    """Adapters that are trained in place of a module's weights.

    Attributes:
        lora: low-rank adapters of the module's linear layers.
    """

    lora: LoraSection


Train = Literal["frozen", "full"] | AdaptersSection


def adapters_of(train: Train) -> LoraConfig | None:
    """Return the adapters of a training mode; None without."""
    return train.lora.build() if isinstance(train, AdaptersSection) else None


def frozen_flag(train: Train) -> bool | None:
    """Return True if a training mode freezes the whole module; None with adapters."""
    return None if isinstance(train, AdaptersSection) else train == "frozen"


def path_with_revision(path: str | None, revision: str | None) -> str | None:
    """Return ``ORG/NAME@REVISION`` for a hub id, and other paths unchanged. Raises ValueError if a
    revision is given for another path."""
    if path is None or revision is None:
        return path
    name, path_revision = split_id(path) if is_hub_id(path) else (path, None)
    if name == path and not is_hub_id(path) or path_revision not in (None, revision):
        raise ValueError(
            f"revision is {revision!r}, but path is {path!r}; accepted: the id of a model on the "
            "hub, ORG/NAME, that is not the path of a local folder"
        )
    return f"{name}@{revision}"


class SourceSection(Section):
    """Source of a module: exactly one of ``path``, ``config`` and ``factory``.

    Attributes:
        path: folder that ``save_pretrained`` wrote, or the hub id of a model, ``ORG/NAME``.
        revision: branch, tag or commit of a model on the hub; by default the main branch.
        config: Hugging Face config values with their ``model_type``, for random weights.
        factory: ``"package.module:function"`` that returns a plain ``nn.Module``.
        kwargs: arguments of the factory.
        weights: safetensors file with the state dict of the factory's module.
        model_class: transformers class name, or its path within transformers, where config or
            folder do not have it.
        missing_weights: ``"fresh"`` draws weights that the folder lacks, or has in other shapes,
            from ``run.seed``, as for the head of a new task. Otherwise such a folder is refused.
        train: ``"full"``; ``"frozen"``; or adapters, ``{lora: {r: 8}}``, under which the weights
            stay frozen.
    """

    path: Text | None = None
    revision: Text | None = None
    config: dict[str, Any] | None = None
    factory: Text | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict)
    weights: Text | None = None
    model_class: Text | None = None
    missing_weights: Literal["fresh"] | None = None
    train: Train = "full"

    @model_validator(mode="after")
    def _one_source(self) -> SourceSection:
        kinds = [name for name in ("path", "config", "factory") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(f"give exactly one of path, config, factory; got {kinds or 'none'}")
        inapplicable = ("model_class",) if self.factory is not None else ("kwargs", "weights")
        if self.path is None:
            inapplicable += ("missing_weights", "revision")
        for name in inapplicable:
            if getattr(self, name):
                raise ValueError(f"{name} is given, but a {kinds[0]} has none; leave it out")
        self.path = path_with_revision(self.path, self.revision)
        return self


class EncoderSection(SourceSection):
    """An encoder and its projector. Callbacks are import paths, ``"package.module:function"``
    (Cornstarch v1, Listing 2).

    Attributes:
        projector: ``"linear"``, or ``"mlp"`` (linear, GELU, linear); None for an encoder whose
            output is as wide as the language model.
        projector_train: ``train`` of the projector.
        hidden_size: width of the projector's input, where the encoder's config does not have it.
        preprocess: callback ``f(inputs) -> inputs`` before the encoder.
        postprocess_module: callback ``f(inputs, output) -> output`` after the encoder.
        postprocess_projector: callback ``f(inputs, output) -> output`` after the projector.
        example_inputs: inputs of the encoder in a batch by name, where they cannot be guessed from
            its config: ``{pixel_values: {shape: [1, 3, 224, 224], dtype: float32}}``.
    """

    projector: Literal["linear", "mlp"] | None = "mlp"
    projector_train: Train = "full"
    hidden_size: Count | None = None
    preprocess: Text | None = None
    postprocess_module: Text | None = None
    postprocess_projector: Text | None = None
    example_inputs: dict[Text, ExampleSection] | None = None


class DpoSection(Section):
    """Direct preference optimisation: see :class:`raymm.kernels.preference.PreferenceLoss`.

    Attributes:
        beta: strength of the penalty for a difference from the reference.
        label_smoothing: probability that the answers of a pair are swapped.
        reference: ``"base"``: only adapters may be trained, and the model without them is the
            reference; ``"initial"``: the model at the start of the run is the reference, evaluated
            on all rows before the first step.
        disable_dropout: train without the dropout of layers and adapters, as TRL does by default.
    """

    beta: float = Field(default=0.1, gt=0, le=MOST_COUNT)
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    reference: Literal["base", "initial"] = "base"
    disable_dropout: bool = True


class LossSection(Section):
    """A loss in place of the cross entropy of tokens.

    Attributes:
        dpo: loss for rows with a ``prompt``, a ``chosen`` and a ``rejected`` answer.
    """

    dpo: DpoSection


class ModelSection(Section):
    """The model: a whole one by ``path``, or its parts.

    Attributes:
        path: folder of a published model, or its hub id, ``ORG/NAME``. Its towers are found
            automatically, and it is exported as one folder again. Its processor prepares the data
            (``data.processor``, by default in the same folder).
        revision: branch, tag or commit of a model on the hub; by default the main branch.
        train: training mode of a whole model by part (``language_model``, ``projector``, and its
            towers, such as ``vision``): ``"full"`` (default), ``"frozen"``, or adapters,
            ``{language_model: {lora: {r: 8}}}``.
        new_tokens: texts that become tokens of a whole model, with new rows in the embedding and
            the output head that start as the mean of the others; or ``"from_processor"``, which
            adds rows for the processor's tokens that have none. The run trains the folder ``model``
            in ``run.storage_path``, which is written once. Next to adapters of the language model,
            only the new rows are trained.
        language_model: the language model.
        encoders: by modality name, as in ``data.modalities``.
        merge: ``"prepend"``, a placeholder token per encoder (``{vision: "<image>"}``), or the
            import path of a merge policy.
        mask: visibility between tokens of the merged sequence: ``"causal"``; ``"multimodal"`` (text
            is causal, an encoder's tokens see one another); ``"multimodal_isolated"`` (an item's
            tokens see their item); ``"causal_with_own_image"`` (causal, and an item's tokens see
            all of it); or the import path of a mask policy. By default the language model's own
            mask.
        packing: run a microbatch's samples as one sequence without padding, each a separate
            document.
        trust_remote_code: run Python files in the folders of models, tokenizers and processors
            (``auto_map``), in every process; otherwise a folder that needs them is refused.
        router_loss: ``"ignore"`` omits the auxiliary router loss of a mixture of experts that its
            config requests (``output_router_logits``). By default that loss is added over all
            tokens of a step, which takes one more forward per step (see own-model). ``"ignore"``
            also accepts a language model whose class computes another loss, which is not used.
        loss: loss in place of the cross entropy of tokens; also the import path of a function,
            ``module:function``, that returns the losses of tokens for their logits and labels.
        stage_hooks: by encoder, import paths ``module:name`` of classes without arguments, or of
            objects, that change its inputs or features: ``{vision: ["my_module:Noise"]}``.
    """

    path: Text | None = None
    revision: Text | None = None
    train: dict[Text, Train] = Field(default_factory=dict)
    new_tokens: Literal["from_processor"] | Tuple[Text] | None = None
    language_model: SourceSection | None = None
    encoders: dict[str, EncoderSection] = Field(default_factory=dict)
    merge: Text | dict[str, Text] = "prepend"
    mask: Text | None = None
    packing: bool = False
    trust_remote_code: bool = False
    router_loss: Literal["ignore"] | None = None
    loss: LossSection | ImportPath | None = None
    stage_hooks: dict[Text, Tuple[ImportPath]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _whole_or_in_parts(self) -> ModelSection:
        if (self.path is None) == (self.language_model is None):
            raise ValueError(
                "give exactly one of path (the folder of a Hugging Face VLM) and language_model"
            )
        if self.path is None and self.train:
            raise ValueError(
                "train is given; accepted for a Hugging Face VLM (path). Set train of each part"
            )
        part_fields = {"encoders", "merge", "mask", "router_loss"}
        extra = self.model_fields_set & part_fields
        if self.path is not None and extra:
            raise ValueError(
                f"{sorted(extra)[0]} is given, but a Hugging Face VLM (path) has its own; leave it "
                "out"
            )
        self.path = path_with_revision(self.path, self.revision)
        return self

    @model_validator(mode="after")
    def _new_tokens_can_be_trained(self) -> ModelSection:
        tokens = self.new_tokens
        if tokens is None:
            return self
        if self.path is None:
            raise ValueError(
                "new_tokens is given; accepted for a Hugging Face VLM (path), not for a model in "
                "parts"
            )
        if not tokens or isinstance(tokens, tuple) and len(set(tokens)) < len(tokens):
            raise ValueError(
                f"new_tokens is {tokens!r}; accepted: different texts, or 'from_processor'"
            )
        if self.train.get("language_model") == "frozen":
            raise ValueError(
                "new_tokens is given, but train.language_model is 'frozen', so they would not be "
                "trained; accepted: 'full', or adapters (the new rows are trained next to them)"
            )
        return self
