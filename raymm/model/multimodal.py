"""A multimodal model of parts: encoders with projectors that feed a language model.

Names follow Cornstarch v1, Listings 1 and 2.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn

from raymm.actors.adapters.lora import without_adapters
from raymm.actors.experts.router_loss import Mixture
from raymm.actors.modules.blocks import checkpoints_itself, input_embeddings, num_blocks
from raymm.actors.modules.brief_error import because
from raymm.actors.modules.draws import module_draws
from raymm.actors.modules.merge import CrossAttend, MergePolicy, Prepend, ReplaceTokens
from raymm.actors.modules.message import Decode, Message, MicrobatchContext
from raymm.actors.modules.token_layout import MASKS, MaskPolicy
from raymm.actors.probe.attention import find_mixers, probe_mask, probe_packing
from raymm.actors.probe.cut import small_language_model
from raymm.actors.probe.experts.own_loss import check_language_loss
from raymm.actors.probe.experts.router_loss import mixture_of
from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.quota.generators import generators_kept
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.stages.labels import label_mask
from raymm.actors.stages.language import REFERENCE, LanguageSpec, LanguageStage
from raymm.actors.stages.token_loss import TokenLoss
from raymm.actors.weights.source import LiveSource, ModuleSource
from raymm.errors import USER_CODE_RAISES, ModelError
from raymm.kernels.mask.spans import MAX_KIND
from raymm.kernels.preference import PreferenceLoss
from raymm.model.batch_rules import Vocabulary, complete_microbatch, text_inputs
from raymm.model.features import Kind
from raymm.model.modality_module import ModalityModel, ModalityModule, check_weights
from raymm.model.model import LANGUAGE_MODEL, only_loss
from raymm.model.module import EncoderModule, LanguageModule, Module
from raymm.model.ports import language_ports
from raymm.model.trainable_layers import any_trainable, counted, trainable_blocks
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode

# Policies that always read the features of all encoders; others may ignore some.
_READ_ALL = (CrossAttend, Prepend, ReplaceTokens)
_RESERVED = frozenset({LANGUAGE_MODEL, "text", "input_ids", "attention_mask", "labels"})
# Two texts whose last tokens are generated; the second text is shorter.
_TEXTS, _LAST = (tuple(range(2, 10)), tuple(range(10, 15))), 2
# Tolerance relative to the largest logit.
_ALIKE = 1e-3


def _embedding_width(source: ModuleSource) -> int | None:
    """Return the width of the language model's input embeddings; None if unknown. The config's
    hidden size may differ: some models (OPT-350m) project their embeddings up to it."""
    skeleton = source.skeleton()
    find = getattr(skeleton, "get_input_embeddings", None)
    weight = getattr(find() if find else None, "weight", None)
    return None if weight is None else weight.shape[1]


class MultimodalModule(nn.Module, ModalityModel):
    """Encoders that feed a language model.

    ``forward`` runs everything in this process and is the reference of parallel training. Encoders
    become attributes ``{name}_encoder``.

    Args:
        encoders: by modality name, as in the data.
        language_model: a :class:`ModalityModule`, or anything that it accepts as ``module``.
        preprocess_callback: the merge policy, ``f(encoder_outputs, inputs) -> inputs``
            (:mod:`raymm.actors.modules.merge`). The default puts modality tokens before the text.
        mask: visibility between tokens of the merged sequence: a mask policy, or a name of
            :data:`raymm.actors.modules.token_layout.MASKS` (``"causal"``, ``"multimodal"``,
            ``"multimodal_isolated"``, ``"causal_with_own_image"``). The default is the language
            model's own mask.
        packing: True to run a microbatch's rows as one sequence without padding, each row a
            separate document, with the same loss. The language model must obey masks and position
            ids.
        router_loss: ``"ignore"`` omits the auxiliary router loss of a mixture of experts that its
            config requests (``output_router_logits``). By default the loss is added as in
            transformers, over all tokens of a step.
        preference: the loss for pairs of answers, in consecutive rows, chosen and rejected; the
            labels are the tokens of the answer. Only adapters may train: without them the model is
            the reference. None for cross entropy.
        token_loss: function in place of the cross entropy of tokens: the losses (N,) of N tokens
            for their logits (N, V) and labels (N,). The loss of a token must not depend on others.

    Raises:
        ModelError: reserved names, widths that do not match, or a folder that lacks weights. Other
            findings about weights are logged.
    """

    kind = Kind.PARTS
    text_module = LANGUAGE_MODEL
    separate_features = rows_in_layout = True

    def __init__(
        self,
        encoders: Mapping[str, ModalityModule] | None = None,
        language_model: Any = None,
        preprocess_callback: MergePolicy | None = None,
        mask: str | MaskPolicy | None = None,
        packing: bool = False,
        router_loss: str | None = None,
        preference: PreferenceLoss | None = None,
        token_loss: TokenLoss | None = None,
    ) -> None:
        super().__init__()
        if router_loss not in (None, "ignore"):
            raise ModelError(f"router_loss is {router_loss!r}; accepted: 'ignore', None")
        self.router_loss, self.preference = router_loss, preference
        self.token_loss = only_loss(preference, token_loss)
        if not isinstance(language_model, ModalityModule):
            language_model = ModalityModule(language_model)
        language_model.set_causal()
        self.language_model = language_model
        self.merge: MergePolicy = preprocess_callback or Prepend()
        self.mask = _mask_policy(mask)
        self.packing = packing
        self._drawn: tuple[int, int, int, int] | None = None
        self.encoder_names = tuple(encoders or {})
        llm_source = language_model.source()
        if self.mask is not None:
            if len(self.encoder_names) > MAX_KIND:
                raise ModelError(
                    f"a mask distinguishes at most {MAX_KIND} encoders, got "
                    f"{len(self.encoder_names)}"
                )
        mixes = self.mask is not None or packing
        self.mixers = find_mixers(llm_source) if mixes else frozenset[str]()
        if self.mask is not None:
            probe_mask(llm_source, self.mixers)
        if packing and (ports := getattr(self.merge, "ports", ())):
            raise ModelError(
                f"packing is True, but the merge policy passes {', '.join(ports)} of each sample "
                "to layers; accepted: False"
            )
        if packing:
            probe_packing(llm_source, self.mask is not None, self.mixers)
        width = _embedding_width(llm_source)
        check_weights("the language model", llm_source)
        for name, encoder in (encoders or {}).items():
            if name in _RESERVED or not name.isidentifier():
                raise ModelError(
                    f"an encoder is named {name!r}; it must be an identifier other than "
                    f"{', '.join(sorted(_RESERVED))}"
                )
            source = encoder.source()
            check_weights(f"encoder {name!r}", source)
            in_features = encoder.output_size(source)
            out_features = width or language_model.output_size(llm_source)
            encoder.build_projector(name, in_features, out_features)
            self.add_module(f"{name}_encoder", encoder)

    @property
    def encoders(self) -> dict[str, ModalityModule]:
        return {name: getattr(self, f"{name}_encoder") for name in self.encoder_names}

    @property
    def graph(self) -> ModuleGraph:
        """Graph in which every encoder feeds the language model."""
        return module_graph(self)

    @property
    def module_names(self) -> tuple[str, ...]:
        """Names of the encoders, then of the language model."""
        return (*self.encoder_names, LANGUAGE_MODEL)

    def freeze(self, encoders: bool = True, projectors: bool = False, llm: bool = True) -> None:
        """Freeze or unfreeze all parts at once; the defaults are those of alignment training."""
        for encoder in self.encoders.values():
            encoder.freeze(encoders, projectors)
        self.language_model.freeze(llm)

    @property
    def computed_attention(self) -> frozenset[str]:
        masked = self.mask is not None or self.packing
        return frozenset({LANGUAGE_MODEL} if masked else ())

    @property
    def adapts_language(self) -> bool:
        return bool(self.language_model.lora)

    @property
    def vocabulary(self) -> int | None:
        source = self.language_model.source()
        return Vocabulary.of(source.skeleton()).ids

    def give_examples(self, items: Callable[[], Mapping[str, dict[str, Any]]]) -> None:
        for name, item in items().items():
            self.encoders[name].give_example(item)

    def check_generates(self) -> None:
        if isinstance(self.merge, CrossAttend) or hasattr(self.merge, "model_arguments"):
            raise ModelError(
                f"to generate text, the merge policy must insert items among the tokens; it is "
                f"{type(self.merge).__name__}; accepted: prepend, or token ids"
            )
        if self.packing or self.mask is not None and self.mask not in MASKS.values():
            raise ModelError(
                "to generate text, each token must attend to all tokens before it; accepted: no "
                f"packing, and no mask or one of {', '.join(MASKS)}"
            )
        reason = why_not_written(self.language_model.source())
        if reason is not None:
            raise ModelError(
                f"to generate text, the language model must continue from cached keys and values: "
                f"{reason}; use another language model, or a Hugging Face VLM (model: "
                "{path: FOLDER, train: ...})"
            )

    @property
    def modalities(self) -> dict[str, ModalityModule]:
        return {**self.encoders, LANGUAGE_MODEL: self.language_model}

    def parameter_name(self, module: str, name: str) -> str:
        return f"{'language_model' if module == LANGUAGE_MODEL else f'{module}_encoder'}.{name}"

    def check_loss(self) -> None:
        """Check that the loss of the language model is the cross entropy used for training.

        Raises:
            ProbeError: its class computes another loss that ``router_loss`` does not ignore, or its
                logits depend on earlier forwards. :attr:`mixture` checks the router loss of a
                mixture of experts.
        """
        mixture = self.mixture
        ignore = self.router_loss == "ignore" or mixture is not None and mixture.loss is not None
        check_language_loss(self.language_model.source(), ignore)

    def parameter_counts(self) -> dict[str, tuple[int, int]]:
        """Return (trained elements, all elements) of the parameters, by module and projector."""
        modules: dict[str, nn.Module] = {}
        for name, encoder in self.encoders.items():
            modules[name] = encoder.source().skeleton()
            if encoder.projector is not None:
                modules[f"{name}_projector"] = encoder.projector
        modules[LANGUAGE_MODEL] = self.language_model.source().skeleton()
        return {name: counted(module.parameters()) for name, module in modules.items()}

    def module(self, name: str) -> Module:
        if name == LANGUAGE_MODEL:
            return LanguageModule(self.language_spec())
        return EncoderModule(self.encoder_spec(name), self.encoders[name].example_inputs)

    def spec(self, name: str) -> EncoderSpec | LanguageSpec:
        """Return the spec of a module for the ranks."""
        if name == LANGUAGE_MODEL:
            return self.language_spec()
        return self.encoder_spec(name)

    def encoder_spec(self, name: str) -> EncoderSpec:
        encoder = self.encoders[name]
        source = encoder.source()
        projector = None if encoder.projector is None else LiveSource.of(encoder.projector)
        return EncoderSpec(
            name=name,
            source=source,
            num_blocks=num_blocks(source.skeleton()),
            projector=projector,
            preprocess=encoder.preprocess_callback,
            postprocess_module=encoder.postprocess_module_callback,
            postprocess_projector=encoder.postprocess_projector_callback,
            optional=not isinstance(self.merge, _READ_ALL),
            disable_dropout=self._disables_dropout,
        )

    @property
    def _disables_dropout(self) -> bool:
        return self.preference is not None and self.preference.disable_dropout

    def language_spec(self) -> LanguageSpec:
        source = self.language_model.source()
        return self._language_spec(source, num_blocks(source.skeleton()))

    def _language_spec(self, source: ModuleSource, blocks: int) -> LanguageSpec:
        return LanguageSpec(
            LANGUAGE_MODEL, source, blocks, self.merge,
            mask=self.mask, encoders=self.encoder_names, packing=self.packing, mixers=self.mixers,
            preference=self.preference, token_loss=self.token_loss, mixture=self.mixture,
        )

    @cached_property
    def mixture(self) -> Mixture | None:
        """Mixture of experts of the language model; None if it has none. Raises ProbeError if the
        model adds a term to its loss that stages cannot add up."""
        source = self.language_model.source()
        return mixture_of(source, ignore=self.router_loss == "ignore")

    def materialize(self) -> MultimodalModule:
        """Load all weights into this process. ``forward`` does so when needed."""
        for encoder in self.encoders.values():
            encoder.materialize()
        self.language_model.materialize()
        return self

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        label_tokens: int | None = None,
        reference: torch.Tensor | None = None,
        **modalities: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the loss of a microbatch, computed in this process.

        Args:
            input_ids: (B, T) int64, B and T at least 1; ids of the vocabulary, padding too.
            labels: (B, T) int64, -100 for tokens without a label, such as padding. The first label
                of a row never counts.
            attention_mask: (B, T) bools or integers, 1 for real tokens, at least one per row; None
                if all tokens are real. Padding precedes or follows a row's tokens.
            label_tokens: divisor of the loss; by default the microbatch's number of labels, or of
                pairs.
            reference: (B,) log-probabilities of the reference for pairs of answers; by default
                computed by the model without its adapters.
            **modalities: per encoder, a dict of its keyword arguments, tensors with at least one
                item, and ``sample_index`` (n_items,) int64, the row of each item (by default item i
                is in row i, if there are as many items as rows). None if there are no items.

        Returns:
            Scalar: sum of token cross entropies over label tokens / ``label_tokens``, plus the
            router loss of this microbatch if the config of a mixture of experts requests it.

        Raises:
            DataError: a key, dtype, shape or value that is not accepted.
        """
        self.materialize()
        language_model = self.language_model.materialize()
        microbatch = complete_microbatch(
            {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask,
             **modalities}, self.encoder_names, Vocabulary.of(language_model),
        )
        if label_tokens is None:
            counted = self.preference is None
            pairs = len(microbatch["labels"]) // 2
            label_tokens = int(label_mask(microbatch["labels"]).sum()) if counted else pairs
        text = text_inputs(microbatch)
        if self.preference is not None:
            if reference is None and self.preference.asked_once:
                raise ModelError(
                    "reference is None; give each row's log-probability under the initial weights"
                )
            text[REFERENCE] = (
                self.scores(microbatch, label_tokens) if reference is None else reference
            )
        return self._outcome(microbatch, text, label_tokens)

    def scores(self, microbatch: dict[str, Any], label_tokens: int = 1) -> torch.Tensor:
        """Return the log-probabilities of each row's labels in a complete microbatch of pairs of
        answers, (B,), without adapters and gradients. ``label_tokens`` has no effect on the
        result."""
        with torch.no_grad(), without_adapters(self):
            return self._outcome(microbatch, text_inputs(microbatch), label_tokens)

    def _outcome(
        self, microbatch: dict[str, Any], text: dict[str, Any], label_tokens: int
    ) -> torch.Tensor:
        """Return the loss, or the rows' log-probabilities for pairs without a known reference."""
        language_model = self.language_model.materialize()
        received: dict[str, Message] = {}
        for name in self.encoder_names:
            if name in microbatch:
                encoder = self.encoders[name]
                spec = replace(
                    light_encoder_spec(name, encoder), disable_dropout=self._disables_dropout
                )
                stage = EncoderStage(spec, 0, 2, encoder.module, encoder.projector)
                stage.attach_hooks(self.hooks_of(name))
                try:
                    received[name] = stage.run(
                        microbatch[name], {}, self._context(name, label_tokens)
                    )
                finally:
                    stage.detach()
        spec = self._language_spec(cast(ModuleSource, None), 1)  # no source is needed
        stage = LanguageStage(spec, 0, 1, language_model)
        context = self._context(LANGUAGE_MODEL, label_tokens)
        if self.preference is not None:
            context = context._replace(sample_ids=tuple(map(str, range(len(text["labels"])))))
        try:
            message = stage.run(text, received, context)
        finally:
            stage.detach()
        outcome = message.scores if message.loss is None else message.loss
        assert outcome is not None  # a whole language model returns one of both
        return outcome

    @contextlib.contextmanager
    def drawing(self, seed: int, step: int, microbatch: int, batch: int = 0) -> Iterator[None]:
        """Context manager in which :meth:`forward` draws the random numbers (dropout, skipped
        blocks) of a run's ranks for one microbatch, independently of the cuts. The generators are
        restored afterwards.

        Args:
            seed: seed of the run, see :class:`raymm.runtime.parallel_model.ParallelModel`.
            step: number of the step, from 0.
            microbatch: number within the batch, from 0.
            batch: number of the ``execute`` before the optimizer's step, from 0.

        Raises:
            ModelError: a module uses its own gradient checkpointing, whose backward would draw
                other numbers.
        """
        for name, child in self.materialize().named_children():
            module = getattr(child, "module", None)
            if module is not None and checkpoints_itself(module):
                raise ModelError(f"{name} uses its own gradient checkpointing; disable it")
        self._drawn = seed, step, microbatch, batch
        try:
            with generators_kept():
                yield
        finally:
            self._drawn = None

    def _context(self, module: str, label_tokens: int) -> MicrobatchContext:
        if self._drawn is None:
            return MicrobatchContext(label_tokens, router_loss=True, training=self.training)
        seed, step, microbatch, batch = self._drawn
        draws = module_draws(seed, step, module, microbatch, batch=batch)
        return MicrobatchContext(
            label_tokens, microbatch, draws=draws, router_loss=True, training=self.training
        )


def light_encoder_spec(name: str, encoder: ModalityModule) -> EncoderSpec:
    """Return the spec of an encoder in this process, without sources: a stage calls the existing
    modules."""
    return EncoderSpec(
        name, cast(ModuleSource, None), 1, cast(ModuleSource | None, encoder.projector),
        encoder.preprocess_callback, encoder.postprocess_module_callback,
        encoder.postprocess_projector_callback,
    )


def _mask_policy(mask: str | MaskPolicy | None) -> MaskPolicy | None:
    if mask is None or callable(mask):
        return mask
    if not isinstance(mask, str) or mask not in MASKS:
        raise ModelError(f"mask is {mask!r}; expected a function or one of {', '.join(MASKS)}")
    return MASKS[mask]


def module_graph(model: MultimodalModule) -> ModuleGraph:
    """Return the graph of a model of parts, in which every encoder feeds the language model."""
    nodes = []
    for name in model.encoder_names:
        spec = model.encoder_spec(name)
        flags = trainable_blocks(spec.source.skeleton(), spec.num_blocks)
        if spec.projector is not None:
            flags += (any_trainable(spec.projector.skeleton()),)
        nodes.append(ModuleNode(name, flags, spec.projector is not None))
    language = model.language_spec()
    flags = trainable_blocks(language.source.skeleton(), language.num_blocks)
    nodes.append(ModuleNode(LANGUAGE_MODEL, flags))
    edges = tuple((n, LANGUAGE_MODEL) for n in model.encoder_names)
    return ModuleGraph(tuple(nodes), edges, (), language_ports(language))




@plain_torch()
def why_not_written(source: ModuleSource) -> str | None:
    """Return why a language model cannot generate from embeddings and cached keys and values, or
    None.

    A small copy of the model is tried. It must compute the same logits as for all tokens at once,
    and must not mix up texts that take turns.
    """
    model = small_language_model(source).eval()
    name = type(model).__name__
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return f"{name} does not accept cached keys and values (past_key_values)"
    vocabulary = input_embeddings(model).weight.shape[0]
    texts = [torch.tensor([text]) % vocabulary for text in _TEXTS]
    try:
        with torch.no_grad():
            full_logits = [_at_once(copy.deepcopy(model), text) for text in texts]
            return _one_by_one(model, source, texts, full_logits)
    except USER_CODE_RAISES as error:  # whatever a model may raise
        return f"{name} cannot continue from cached keys and values{because(error)}"


def _at_once(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits (T, V) of all tokens in one forward."""
    logits = _Logits(model)
    model(inputs_embeds=input_embeddings(model)(ids), use_cache=False)
    return torch.stack(logits.rows)


def _one_by_one(
    model: nn.Module, source: ModuleSource, texts: list[torch.Tensor], whole: list[torch.Tensor]
) -> str | None:
    blocks, logits = num_blocks(model), _Logits(model)
    stage = LanguageStage(LanguageSpec(LANGUAGE_MODEL, source, blocks, Prepend()), 0, blocks, model)
    prompts = [(((n,), True), text[:, : -_LAST]) for n, text in enumerate(texts)]
    last_tokens = [torch.cat([text[:, -b, None] for text in texts]) for b in range(_LAST, 0, -1)]
    lengths = [0] * len(texts)
    for (numbers, first), ids in [*prompts, *((((0, 1), False), ids) for ids in last_tokens)]:
        inputs = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids),
            "labels": torch.full_like(ids, -100), "sample_index": {},
        }
        logits.rows.clear()
        stage.run(inputs, {}, MicrobatchContext(1, decode=Decode(numbers, first)))
        for number, row in zip(numbers, logits.rows[-len(numbers) :], strict=True):
            lengths[number] += ids.shape[1]
            expected = whole[number]
            error = float((row - expected[lengths[number] - 1]).abs().max() / expected.abs().max())
            if not error <= _ALIKE:
                return (
                    f"{type(model).__name__} computes different logits for token {lengths[number]} "
                    f"from cached keys and values than from all tokens at once (by {error:.1e} of "
                    "the largest)"
                )
    return None


class _Logits:
    def __init__(self, model: nn.Module) -> None:
        self.rows: list[torch.Tensor] = []
        head = model.get_output_embeddings()  # type: ignore[operator]
        head.register_forward_hook(lambda *called: self.rows.extend(called[2].flatten(0, -2)))
