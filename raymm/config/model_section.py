"""The configuration of the model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from raymm.actors.adapters.lora_config import ALL_LINEAR, LoraConfig
from raymm.actors.weights.hub_folder import is_hub_id, split_id
from raymm.config.example_section import ExampleSection
from raymm.files.section import MOST_COUNT, Count, Section, Text, Tuple

# Of ``new_tokens``: those of the processor that have no rows.
FROM_PROCESSOR = "from_processor"


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
    """What is trained of a module in place of its weights.

    Attributes:
        lora: low-rank adapters of its linear layers.
    """

    lora: LoraSection


Train = Literal["frozen", "full"] | AdaptersSection


def adapters_of(train: Train) -> LoraConfig | None:
    """The adapters that a mode asks for."""
    return train.lora.build() if isinstance(train, AdaptersSection) else None


def frozen_flag(train: Train) -> bool | None:
    """Whether a mode freezes a whole module; None where adapters say what is trained."""
    return None if isinstance(train, AdaptersSection) else train == "frozen"


def path_with_revision(path: str | None, revision: str | None) -> str | None:
    """Return ``ORG/NAME@REVISION`` for the id of a model on the hub, other paths as they are.

    Raises:
        ValueError: a revision of what is no id.
    """
    if path is None or revision is None:
        return path
    name, said = split_id(path) if is_hub_id(path) else (path, None)
    if name == path and not is_hub_id(path) or said not in (None, revision):
        raise ValueError(
            f"revision is {revision!r}, but path is {path!r}; accepted: the id of a model on the "
            "hub, ORG/NAME, that is not the path of a local folder"
        )
    return f"{name}@{revision}"


class SourceSection(Section):
    """Where a module comes from: exactly one of ``path``, ``config``, ``factory``.

    Attributes:
        path: folder that ``save_pretrained`` wrote, or the id of a model on the hub, ``ORG/NAME``.
        revision: branch, tag or commit of a model on the hub; by default the main branch.
        config: Hugging Face config values with their ``model_type``; random weights.
        factory: ``"package.module:function"`` that returns a plain ``nn.Module``.
        kwargs: the factory's arguments.
        weights: safetensors file with the factory module's state dict.
        model_class: transformers class name, or its path within transformers, where config or
            folder do not say which.
        missing_weights: ``"fresh"`` draws weights that the folder lacks, or has in other shapes,
            from ``run.seed``, as for the head of a new task; without it, such a folder is refused.
        train: ``"full"``; ``"frozen"``, the module's weights stay as they are; or adapters,
            ``{lora: {r: 8}}``, under which they do.
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
        of_others = ("model_class",) if self.factory is not None else ("kwargs", "weights")
        if self.path is None:
            of_others += ("missing_weights", "revision")
        for name in of_others:
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
        projector_train: as ``train``, of the projector.
        hidden_size: width of what the projector gets, where the encoder's config does not say.
        preprocess: callback ``f(inputs) -> inputs`` before the encoder.
        postprocess_module: callback ``f(inputs, output) -> output`` after the encoder.
        postprocess_projector: callback ``f(inputs, output) -> output`` after the projector.
        example_inputs: what a batch has for the encoder, by name, where it cannot be guessed from
            the encoder's config: ``{pixel_values: {shape: [1, 3, 224, 224], dtype: float32}}``.
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
        beta: how much it costs to be another than the reference.
        label_smoothing: probability that a pair is the wrong way round.
        reference: ``"base"``: what trains must be adapters, and the model without them is the
            reference; ``"initial"``: it is the model that the run begins with, whatever trains,
            which is asked of all rows before the first step.
        disable_dropout: train without the dropout of layers and adapters, as TRL does by default.
    """

    beta: float = Field(default=0.1, gt=0, le=MOST_COUNT)
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    reference: Literal["base", "initial"] = "base"
    disable_dropout: bool = True


class LossSection(Section):
    """A loss in place of the cross entropy of tokens.

    Attributes:
        dpo: of rows with a ``prompt``, a ``chosen`` and a ``rejected`` answer.
    """

    dpo: DpoSection


class ModelSection(Section):
    """The model: a whole one by ``path``, or by its parts.

    Attributes:
        path: folder of a whole model, as it is published, or its id on the hub, ``ORG/NAME``: its
            towers are found in it, and it is exported as one folder again. Its processor makes the
            data (``data.processor``, by default of the same folder).
        revision: branch, tag or commit of a model on the hub; by default the main branch.
        train: of a whole model by part (``language_model``, ``projector``, and its towers, such as
            ``vision``), ``"full"`` (what is not named), ``"frozen"``, or adapters, as of a part:
            ``{language_model: {lora: {r: 8}}}``.
        new_tokens: of a whole model, texts that become tokens with rows of their own in the
            embedding and the output head, which begin as the mean of the others; or
            ``"from_processor"``, which gives rows to the tokens of the processor that have none.
            The run trains the folder ``model`` in ``run.storage_path``, which is written once.
            Next to adapters of the language model, only the new rows are trained.
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
        trust_remote_code: run Python files that folders of models, tokenizers and processors
            bring (``auto_map``), in every process; otherwise a folder that needs them is refused.
        router_loss: ``"ignore"`` leaves out what a mixture of experts adds to its loss for its
            routers if its config has ``output_router_logits``; without it, that is added over all
            tokens of a step, which takes a forward more per step (see own-model). ``"ignore"``
            also accepts a language model whose class computes another loss, which is not used.
        loss: another than the cross entropy of tokens.
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
    loss: LossSection | None = None

    @model_validator(mode="after")
    def _whole_or_in_parts(self) -> ModelSection:
        if (self.path is None) == (self.language_model is None):
            raise ValueError(
                "give exactly one of path (the folder of a whole model) and language_model"
            )
        if self.path is None and self.train:
            raise ValueError(
                "train is given; accepted for a whole model (path). Give each part its own train"
            )
        parts = {"encoders", "merge", "mask", "router_loss", "loss"}
        own = self.model_fields_set & parts
        if self.path is not None and own:
            raise ValueError(
                f"{sorted(own)[0]} is given, but a whole model (path) has its own; leave it out"
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
                "new_tokens is given; accepted for a whole model (path), not for a model in parts"
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
