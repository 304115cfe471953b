"""Calls for features in a model's forward.

These are functions such as ``get_image_features``, or the encoder from ``get_encoder(modality)``.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from raymm.actors.modules.blocks import method_of
from raymm.actors.modules.brief_error import because
from raymm.actors.probe.example_inputs import in_words
from raymm.actors.probe.small_model import trial_copy
from raymm.actors.weights.model_part import Call, is_within
from raymm.errors import USER_CODE_RAISES, NotRunError

_FEATURES = re.compile(r"^get_(\w+)_features$")
_CONFIG = re.compile(r"(_encoder|_model|_tower)?_config$")
_MODALITIES = ("image", "video", "audio")
Inputs = Mapping[str, Any]


@dataclass
class Called:
    """Observed call: its arguments by name, its output, and the submodules that ran."""

    call: Call
    modality: str
    arguments: dict[str, Any]
    output: Any
    modules: set[str]


def run_model(model: nn.Module, inputs: Inputs) -> Any:
    """Run the forward of a Hugging Face VLM as stages do.

    Raises:
        NotRunError: the forward fails.
    """
    try:
        return model(**inputs, use_cache=False)
    except USER_CODE_RAISES as error:  # whatever a model may raise
        raise NotRunError(
            f"{type(model).__name__} does not run on the example{because(error)}; "
            f"its forward must take what a batch has: {in_words(inputs)}"
        ) from error


def calls_of(model: nn.Module, inputs: Inputs) -> list[Called]:
    """Return the outermost calls of feature functions, in order, even if the forward fails later.
    """
    return _observed_run(trial_copy(model), inputs, dict(_functions(model)), fails=True)


def tower_calls(model: nn.Module, inputs: Inputs) -> list[Called]:
    """Return the outermost calls of feature functions, in order, else of encoders by modality.

    Without either, submodules with a separate part of the configuration are used.

    Raises:
        NotRunError: the forward fails.
    """
    calls = _observed_run(model, inputs, dict(_functions(model)))
    run = {name for called in calls for name in called.modules}
    encoders = {
        call: modality for call, modality in _encoders(model)
        if not any(is_within(name, (call.owner,)) for name in run)
    }
    if encoders:
        calls = _observed_run(model, inputs, dict(_functions(model)) | encoders)
    if not calls and (configured := dict(_configured(model))):
        calls = _observed_run(model, inputs, configured)
    return calls


def has_towers(model: nn.Module) -> bool:
    """Return True if the model has feature functions or encoders, called or not."""
    return any(True for _ in itertools.chain(_functions(model), _encoders(model)))


def _functions(model: nn.Module) -> Iterator[tuple[Call, str]]:
    for owner, child in model.named_modules():
        for name in dir(type(child)):
            if (match := _FEATURES.match(name)) and callable(getattr(type(child), name)):
                yield Call(owner, name), match[1]


def _encoders(model: nn.Module) -> Iterator[tuple[Call, str]]:
    names = {id(child): name for name, child in model.named_modules()}
    for modality in _MODALITIES:
        encoder = method_of(model, "get_encoder")(modality)
        if isinstance(encoder, nn.Module) and names.get(id(encoder)):
            yield Call(names[id(encoder)], "forward"), modality


def _configured(model: nn.Module) -> Iterator[tuple[Call, str]]:
    """Yield submodules with a separate part of the configuration, except the text model."""
    config: Any = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return
    text = config.get_text_config()
    modalities = {
        type(section): _CONFIG.sub("", name) for name, section in vars(config).items()
        if isinstance(section, PretrainedConfig) and type(section) not in (type(text), type(config))
    }
    for name, child in model.named_modules():
        if isinstance(child, PreTrainedModel) and type(child.config) in modalities:
            yield Call(name, "forward"), modalities[type(child.config)]


def _observed_run(
    model: nn.Module, inputs: Inputs, functions: Mapping[Call, str], fails: bool = False
) -> list[Called]:
    calls: list[Called] = []
    open_calls: list[Call] = []
    hooks = []
    originals = {call: call.of(model) for call in functions}
    for call, modality in functions.items():
        call.replace(model, _observing(call, modality, originals[call], calls, open_calls))
    for name, child in model.named_modules():
        hooks.append(child.register_forward_pre_hook(
            lambda _, __, name=name: calls[-1].modules.add(name) if open_calls else None
        ))  # fmt: skip
    try:
        run_model(model, inputs)
    except NotRunError:
        if not fails:
            raise
    finally:
        for hook in hooks:
            hook.remove()
        for call in functions:
            vars(model.get_submodule(call.owner)).pop(call.method)
    return calls


def arguments_of(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a call's arguments by name, in the order of the function's parameters."""
    arguments: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        variable = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        arguments |= value if variable else {name: value}
    return arguments


def _observing(
    call: Call, modality: str, function: Callable[..., Any], calls: list[Called],
    open_calls: list[Call],
) -> Callable[..., Any]:  # fmt: skip
    signature = inspect.signature(function)

    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        if open_calls:
            return function(*args, **kwargs)
        arguments = arguments_of(signature, args, kwargs)
        called = Called(call, modality, arguments, None, set())
        calls.append(called)
        open_calls.append(call)
        try:
            called.output = function(*args, **kwargs)
        finally:
            open_calls.pop()
        return called.output

    return observed
