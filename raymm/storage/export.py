"""Export of trained modules as Hugging Face folders, and of adapters as ``peft`` folders."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from functools import singledispatchmethod
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.pytorch_utils import Conv1D

from raymm.actors.adapters.lora import MAGNITUDE, AdaptedLayer, has_adapters, is_adapter, plain_copy
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.optimizer.finite import not_finite
from raymm.actors.probe.example_inputs import example_inputs
from raymm.actors.storage.folder import PARTIAL, set_file_modes
from raymm.actors.weights.hub_folder import is_hub_id, local_folder, split_id
from raymm.actors.weights.parametrized import computes_weights, with_weights_of_its_class
from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.actors.weights.stored_weights import quiet_loading, weight_files
from raymm.data.conversations.processor import ModelProcessor
from raymm.data.conversations.text import load_tokenizer
from raymm.errors import USER_CODE_RAISES, CheckpointError, ModelError
from raymm.files.output import Output
from raymm.model.features import EXPORT
from raymm.model.modality_module import ModalityModule
from raymm.model.model import Model
from raymm.model.multimodal import MultimodalModule
from raymm.model.vlm import PretrainedVlm
from raymm.runtime.skipped_step import MAX_NAMED
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import load_into_model

# Prefix of a model's layers in ``peft``.
_PREFIX = "base_model.model."


def save_adapters(module: nn.Module, folder: Path, base: str | None, causal: bool) -> None:
    """Write the adapters of a module.

    Args:
        base: folder or hub id of the module without adapters; None if users pass it to ``peft``.
        causal: True for a causal language model, which ``peft`` wraps as such.
    """
    layers = {name: m for name, m in module.named_modules() if isinstance(m, AdaptedLayer)}
    lora = next(iter(layers.values())).lora
    adapters = {name: layer.lora for name, layer in layers.items()}
    # peft has one use_rslora for all layers, so the alphas of layers with the other scaling change.
    alphas = {name: _alpha(adapter, lora.use_rslora) for name, adapter in adapters.items()}
    revision = None
    if base is not None and is_hub_id(base):
        base, revision = split_id(base)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM" if causal else None,
        "base_model_name_or_path": base, "revision": revision, "inference_mode": True, "r": lora.r,
        "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": list(layers),
        "rank_pattern": {n: adapter.r for n, adapter in adapters.items() if adapter.r != lora.r},
        "alpha_pattern": {n: alpha for n, alpha in alphas.items() if alpha != lora.alpha},
        "use_dora": lora.dora, "use_rslora": lora.use_rslora, "bias": "none",
        "fan_in_fan_out": any(isinstance(layer, Conv1D) for layer in layers.values()),
    }
    tensors = {
        f"{_PREFIX}{name}" + ("" if name.endswith(MAGNITUDE) else ".weight"):
        parameter.detach().contiguous()
        for name, parameter in module.named_parameters() if is_adapter(name)
    }
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "adapter_model.safetensors")


def _alpha(lora: LoraConfig, use_rslora: bool) -> float:
    """Return the alpha with which peft scales like ``lora``, given a ``use_rslora``."""
    if lora.use_rslora == use_rslora:
        return lora.alpha
    return lora.scaling * (math.sqrt(lora.r) if use_rslora else lora.r)


SOURCE = "source"
DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
_STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Tolerance relative to the largest logit: products round depending on memory alignment.
_NOISE = 1e-5
_SHOWN = 3


class ModelFolder:
    """Writer of a model's folder.

    Args:
        source: folder or hub id that the model was loaded from; None for random weights.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; ``"source"`` stores every tensor in
            the dtype that the source's file has for its key, and fp32 without a source.

    Raises:
        ModelError: ``dtype`` is unknown, or the source's own format is quantised.
    """

    def __init__(self, source: str | None, dtype: str) -> None:
        if dtype != SOURCE and dtype not in DTYPES:
            raise ModelError(f"dtype is {dtype!r}; accepted: {SOURCE}, {', '.join(DTYPES)}")
        self._folder = None if source is None else Path(local_folder(source))
        self._forced = DTYPES.get(dtype)
        self._config: dict[str, Any] = {}
        if self._folder is not None:
            self._config = json.loads((self._folder / "config.json").read_bytes())
        quantised = self._config.get("quantization_config")
        if quantised and self._forced is None:
            raise ModelError(
                f"dtype is {dtype!r}, but the weights of {source!r} are quantised "
                f"({quantised.get('quant_method')}), which cannot be written; accepted: "
                f"{', '.join(DTYPES)}. Set --dtype bfloat16 to write them without quantisation, or "
                "train adapters and export without --merge"
            )

    def save(
        self, module: PreTrainedModel, folder: Path, inputs: Mapping[str, Any] | None,
        shard_size: str = "50GB",
    ) -> None:
        """Write a model, and compare it with what ``from_pretrained`` reads. Raise a
        ``CheckpointError`` if the folder read back has other keys, values or outputs.

        Args:
            module: on the CPU with weights in fp32; not modified.
            inputs: arguments of the forward whose outputs are compared. If None, inputs for its
                class are tried; if it takes none of them, only tensors are compared.
        """
        module = _of_its_class(module)
        if inputs is None:
            with contextlib.suppress(ModelError):
                inputs = example_inputs(module)
        shell = _without_false_claims(module)
        ignored = set(shell._keys_to_ignore_on_save or ())
        tensors = {n: t for n, t in shell.state_dict().items() if n not in ignored}
        tensors = remove_tied_weights_from_state_dict(tensors, shell)
        tensors = revert_weight_conversion(shell, tensors)
        stored = self._stored_dtypes(shell)
        usual = self._forced or Counter(stored.values()).most_common(1)[0][0]
        tensors = {
            name: tensor if not tensor.is_floating_point()
            else tensor.to(self._forced or stored.get(name, usual))
            for name, tensor in tensors.items()
        }
        dtypes = {t.dtype for t in tensors.values() if t.is_floating_point()}
        shell.save_pretrained(  # empties the dictionary while writing
            folder, state_dict=tensors, save_original_format=False, max_shard_size=shard_size
        )
        self._write_config(folder / "config.json", usual)
        if problem := _difference(module, folder, dtypes, inputs):
            raise CheckpointError(
                f"the exported {type(module).__name__} is not the trained model: {problem}; "
                "nothing is written. Export adapters without merging them, or report this class"
            )

    def _stored_dtypes(self, module: PreTrainedModel) -> dict[str, torch.dtype]:
        """Return the source's dtype of each floating-point key; a placeholder without a source."""
        dtypes: dict[str, torch.dtype] = {}
        for file in [] if self._folder is None else weight_files(self._folder, module.config):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    if dtype := _STORED.get(opened.get_slice(name).get_dtype()):
                        dtypes[name] = dtype
        return dtypes or {"": torch.float32}

    def _write_config(self, file: Path, usual: torch.dtype) -> None:
        """Replace the dtypes that loading in fp32 left in the configuration."""
        if self._folder is None and self._forced is None:
            return
        written = json.loads(file.read_bytes())
        name = str(usual).removeprefix("torch.")
        source = self._config
        dtype = None if self._forced is not None else source.get("dtype", source.get("torch_dtype"))
        _set_dtypes(written, source, None if self._forced is None else name)
        written["dtype"] = dtype or name
        # Sections keep the order of transformers, which sorts numeric keys as numbers.
        file.write_text(json.dumps(dict(sorted(written.items())), indent=2) + "\n")


def _set_dtypes(written: dict[str, Any], source: dict[str, Any], forced: str | None) -> None:
    if "dtype" in written:
        source_dtype = source.get("dtype", source.get("torch_dtype"))
        written["dtype"] = forced if source_dtype and forced else source_dtype
        if not {"dtype", "torch_dtype"} & source.keys():
            del written["dtype"]
    for name, section in written.items():
        if isinstance(section, dict):
            source_section = source.get(name)
            _set_dtypes(section, source_section if isinstance(source_section, dict) else {}, forced)


def _of_its_class(module: PreTrainedModel) -> PreTrainedModel:
    """Return a module whose files have all weights that its class's ``from_pretrained`` expects."""
    if not computes_weights(module):
        return module
    with torch.device("meta"):
        plain = type(module)(copy.deepcopy(module.config))
    return with_weights_of_its_class(module, plain)


def _without_false_claims(module: PreTrainedModel) -> PreTrainedModel:
    """Return a shallow copy whose configuration does not claim quantized weights, or tied weights
    that training or merging made different."""
    shell = copy.copy(module)
    shell.config = copy.deepcopy(module.config)
    if getattr(shell.config, "quantization_config", None) is not None:
        delattr(shell.config, "quantization_config")
        for name in ("hf_quantizer", "_weight_conversions"):
            shell.__dict__.pop(name, None)
    tensors = dict(module.named_parameters(remove_duplicate=False))
    pairs = [
        (tensors[name], tensors[origin]) for name, origin in module.all_tied_weights_keys.items()
        if name in tensors and origin in tensors
    ]
    if any(a is not b and not torch.equal(a, b) for a, b in pairs):
        for config in (shell.config, shell.config.get_text_config()):
            config.tie_word_embeddings = False
        shell.all_tied_weights_keys = {}
    return shell


def _difference(
    module: PreTrainedModel, folder: Path, dtypes: set[torch.dtype],
    inputs: Mapping[str, Any] | None,
) -> str | None:
    """Return how the model read from a folder differs from the written one, or None. Values may be
    rounded to any of ``dtypes``."""
    try:
        with quiet_loading():
            loaded: Any = type(module).from_pretrained(
                folder, local_files_only=True, use_safetensors=True, dtype=torch.float32,
                output_loading_info=True,
            )
    except USER_CODE_RAISES as error:
        return f"it cannot be read ({type(error).__name__}: {error})"
    reloaded, info = loaded
    state, read = module.state_dict(), reloaded.state_dict()
    ignored = set(module._keys_to_ignore_on_save or ())
    lost_keys = {n for kind in ("missing_keys", "unexpected_keys") for n in info[kind]} - ignored
    if lost_keys := lost_keys | (state.keys() ^ read.keys()) - ignored:
        return f"its keys differ in {', '.join(sorted(lost_keys)[:_SHOWN])}"
    for name in state.keys() - ignored:
        value, read_value = state[name], read[name]
        if not torch.equal(value, read_value) and not any(
            torch.equal(value.to(dtype).to(read_value.dtype), read_value) for dtype in dtypes
        ):
            return f"the values of {name} differ"
        if not torch.isfinite(read_value).all() and torch.isfinite(value).all():
            return f"{name} has values too large for the dtype"
    if inputs is None:
        return None
    reloaded.eval()
    modes = {child: child.training for child in module.modules()}
    try:
        module.eval()
        expected = _output(lambda **kw: torch.func.functional_call(
            module, read, (), kw, tie_weights=False
        ), inputs)
    finally:
        for child, mode in modes.items():
            child.training = mode
    if expected is None:
        return None
    difference = float((_output(reloaded, inputs) - expected).abs().max())
    if not difference <= _NOISE * float(expected.abs().max()):
        return f"its outputs differ by {difference:.3g} of {float(expected.abs().max()):.3g}"
    return None


def _output(run: Any, inputs: Mapping[str, Any]) -> Any:
    """Return the first output in fp32; None if it is not a tensor."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        out = run(**copy.deepcopy(dict(inputs)))
    first = out if isinstance(out, torch.Tensor) else getattr(out, "logits", None)
    first = cast(Any, out)[0] if first is None else first
    return first.float() if isinstance(first, torch.Tensor) else None


def export_model(
    model: Model, storage: str, output: str, tokenizer: str | None = None,
    say: Callable[[str], None] = print,
    trust_remote_code: bool = False,
    merge: bool = False,
    shard_size: str = "5GB",
    averaged: bool = False,
    dtype: str = SOURCE,
) -> list[Path]:
    """Write the modules of the newest intact checkpoint.

    Args:
        model: model description of the run; materialized in this process.
        output: new folder. Gets ``language_model/``, ``{encoder}_encoder/`` and
            ``{encoder}_projector/``. For a Hugging Face VLM it becomes a folder of the model's
            class, with the same keys, in shards.
        tokenizer: folder of the tokenizer to add to the language model. For a Hugging Face VLM,
            folder of the processor, whose template and files are added to the weights.
        say: called with a line about each newer checkpoint that is corrupt.
        trust_remote_code: True to run Python files in the folder of the tokenizer or processor.
        merge: add adapters to the weights of their modules. Otherwise adapters become ``peft``
            folders that name the folder of the module without adapters. A module without a folder
            is also written, as ``{module}_base``. A Hugging Face VLM gets ``model/`` and
            ``adapters/``, or only adapters if nothing else is trained.
        shard_size: maximum file size for a Hugging Face VLM, in the notation of transformers.
        averaged: write moving averages of trained weights (``optimizer.ema``).
        dtype: ``"source"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``; ``"source"`` stores
            each tensor in the dtype of the folder that it was loaded from, or fp32 without one.

    Returns:
        The written folders. Modules without a Hugging Face class are written as
        ``model.safetensors`` with their state dict.

    Raises:
        ConfigError: ``output`` exists or cannot be created. Raised before anything is read.
        CheckpointError: there is no intact checkpoint, it belongs to another model, has no
            averages, or a weight is not finite; or the written model differs from the trained one
            when read back.
        ModelError: a folder's format or ``dtype`` cannot be written.
    """
    destination = Output.new_folder("output (--out)", output)
    destination.check()
    target = destination.target
    writer = _Writer(target, merge, shard_size, dtype)
    writer.check(model)
    checkpoint = CheckpointStore(storage).newest()
    if checkpoint is None:
        raise CheckpointError(
            f"run.storage_path is {storage!r}, which has no checkpoint; run `raymm train` first, "
            "or set it to the folder of a run"
        )
    for line in checkpoint.warnings():
        say(line)
    load_into_model(model, checkpoint.folder, averaged)
    _check_finite(model.materialize(), checkpoint.folder)
    temporary = target.with_name(f".{target.name}{PARTIAL}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with destination.writing():
            names = writer.write(model, temporary)
            if tokenizer is not None:
                writer.write_tokenizer(model, temporary, tokenizer, trust_remote_code)
            set_file_modes(temporary)
            temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [target / name for name in names]


def _check_finite(model: nn.Module, checkpoint: Path | str) -> None:
    """Raise CheckpointError for weights that are not finite. Buffers may be infinite, as additive
    masks are, but not NaN."""
    tensors = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
    tensors += [
        (name, buffer) for name, buffer in model.named_buffers() if bool(buffer.isnan().any())
    ]
    if names := not_finite(tensors):
        suffix = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        raise CheckpointError(
            f"with {checkpoint} the model has weights that are not finite: "
            f"{', '.join(names[:MAX_NAMED])}{suffix}; nothing is written. Look at the folders that "
            "frozen modules come from, or export an earlier checkpoint (move later ones away)"
        )


class _Writer:
    def __init__(self, final: Path, merge: bool, shard_size: str, dtype: str) -> None:
        self._final, self._merge = final, merge
        self._shard_size, self._dtype = shard_size, dtype
        self._names: list[str] = []

    @singledispatchmethod
    def check(self, model: Model) -> None:
        """Raise ModelError if a folder cannot be written in the dtype."""
        model.require(EXPORT)

    @check.register
    def _(self, model: PretrainedVlm) -> None:
        if not self._adapters_only(model):
            ModelFolder(_path(model.source), self._dtype)

    @check.register
    def _(self, model: MultimodalModule) -> None:
        for modality in (model.language_model, *model.encoders.values()):
            if modality.lora is None or self._merge:
                ModelFolder(modality.folder, self._dtype)

    def _adapters_only(self, model: PretrainedVlm) -> bool:
        trained = frozenset().union(*model.trained.values())
        return (
            bool(model.adapters) and not self._merge and _path(model.source) is not None
            and all(map(is_adapter, trained))
        )

    @singledispatchmethod
    def write_tokenizer(
        self, model: Model, folder: Path, tokenizer: str, trust_remote_code: bool
    ) -> None:
        """Add the files of a tokenizer, or of a processor, to the written model."""

    @write_tokenizer.register
    def _(
        self, model: PretrainedVlm, folder: Path, tokenizer: str, trust_remote_code: bool
    ) -> None:
        in_model = folder / "model"
        target = in_model if in_model.is_dir() else folder
        ModelProcessor(tokenizer, trust_remote_code).save(target)

    @write_tokenizer.register
    def _(
        self, model: MultimodalModule, folder: Path, tokenizer: str, trust_remote_code: bool
    ) -> None:
        loaded = load_tokenizer(tokenizer, trust_remote_code)
        loaded.save_pretrained(folder / "language_model")

    @singledispatchmethod
    def write(self, model: Model, folder: Path) -> list[str]:
        """Write a model, which is materialized, and its adapters unless merged. Return the names of
        the folders."""
        raise TypeError(f"no format for {type(model).__name__}")

    @write.register
    def _(self, model: PretrainedVlm, folder: Path) -> list[str]:
        source, whole = _path(model.source), model.materialize()

        def save(module: nn.Module, name: str) -> None:
            writer = ModelFolder(source, self._dtype)
            example, plain = dict(model.example), cast(PreTrainedModel, module)
            writer.save(plain, folder / name, example, self._shard_size)

        if not model.adapters or self._merge:
            save(plain_copy(whole, merged=True) if model.adapters else whole, "")
            return [""]
        if self._adapters_only(model):
            save_adapters(whole, folder, source, causal=False)
            return [""]
        save(plain_copy(whole, merged=False), "model")
        save_adapters(whole, folder / "adapters", str(self._final / "model"), causal=False)
        return ["model", "adapters"]

    @write.register
    def _(self, model: MultimodalModule, folder: Path) -> list[str]:
        language = model.language_model
        module = language.materialize()
        sample = {"input_ids": torch.arange(8)[None] % _vocabulary(module)}
        self._add(folder, "language_model", module, language, sample)
        for name, encoder in model.encoders.items():
            module = encoder.materialize()
            self._add(folder, f"{name}_encoder", module, encoder, None)
            if encoder.projector is not None:
                self._add(folder, f"{name}_projector", encoder.projector, None, None)
        return self._names

    def _add(
        self, folder: Path, name: str, module: nn.Module, part: ModalityModule | None,
        inputs: Mapping[str, Any] | None,
    ) -> None:
        self._names.append(name)
        source = None if part is None else part.folder
        if not has_adapters(module) or self._merge:
            plain = plain_copy(module, merged=True) if has_adapters(module) else module
            self._save(plain, folder / name, source, inputs)
            return
        base = source
        if base is None:
            self._names.append(f"{name}_base")
            base = str(self._final / f"{name}_base")
            plain = plain_copy(module, merged=False)
            self._save(plain, folder / f"{name}_base", None, inputs)
        save_adapters(module, folder / name, base, name == "language_model")

    def _save(
        self, module: nn.Module, folder: Path, source: str | None, inputs: Mapping[str, Any] | None
    ) -> None:
        if isinstance(module, PreTrainedModel):
            ModelFolder(source, self._dtype).save(module, folder, inputs)
            return
        folder.mkdir(parents=True)
        tensors = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")


def _path(source: Any) -> str | None:
    return source.path if isinstance(source, PretrainedSource) else None


def _vocabulary(module: nn.Module) -> int:
    embedding = getattr(module, "get_input_embeddings", lambda: None)()
    return len(embedding.weight) if isinstance(embedding, nn.Embedding) else 1
