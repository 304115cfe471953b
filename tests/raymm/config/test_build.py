"""Every field of a configuration rejects invalid values by its name."""

import types
import typing
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.rank.rank_resources import RankResources
from raymm.config.build import model_config
from raymm.config.sections import TrainConfig
from raymm.errors import ClusterError, ConfigError, PlanError
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec

ODD = {
    "a bool": True, "a text": "3", "infinity": float("inf"), "minus infinity": float("-inf"),
    "not a number": float("nan"), "too many digits": 10**400, "a list": [1, "a", True],
    "bytes": b"x",
}


def sections(root: type[BaseModel], where: str = "") -> dict[str, tuple[type[BaseModel], str]]:
    """Return every field of a section and its subsections, by path."""
    found = {}
    for name, field in root.model_fields.items():
        path = f"{where}{name}"
        found[path] = (root, name)
        for inner in leaves(field.annotation):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                found.update(sections(inner, f"{path}."))
    return found


def leaves(annotation: Any) -> list[Any]:
    """Return the component types of an annotation."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        return [leaf for one in typing.get_args(annotation) for leaf in leaves(one)]
    return [annotation]


FIELDS = sections(TrainConfig)


def kinds_of(path: str) -> set[Any]:
    section, name = FIELDS[path]
    return set(leaves(section.model_fields[name].annotation))


def adapter(path: str) -> TypeAdapter:
    section, name = FIELDS[path]
    field = section.model_fields[name]
    annotation = field.annotation
    if field.metadata:
        annotation = typing.Annotated[(annotation, *field.metadata)]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return TypeAdapter(annotation)
    return TypeAdapter(annotation, config=section.model_config)


@pytest.mark.parametrize("path", FIELDS)
def test_odd_values_are_refused(path):
    kinds = kinds_of(path)
    accepted = {"a bool": bool, "a text": str}
    for what, value in ODD.items():
        if accepted.get(what) in kinds or (Any in kinds and what != "a bool"):
            continue
        if what == "a bool" and path.endswith("rebalance"):
            continue
        with pytest.raises((ValidationError, ValueError)):
            adapter(path).validate_python(value)
            pytest.fail(f"{path} takes {what}: {value!r:.40}")


# Numbers whose ranges are checked in the classes that they become.
ELSEWHERE = ("parallel.", "optimizer.", "planning.tokens", "resources.custom")


@pytest.mark.parametrize("path", [
    p for p in FIELDS if {int, float} & kinds_of(p) and not p.startswith(ELSEWHERE)
])
def test_numbers_have_a_range(path):
    for value in (-1, 2**63 + 1):
        with pytest.raises(ValidationError):
            adapter(path).validate_python(value)


@pytest.mark.parametrize("path", [p for p in FIELDS if kinds_of(p) <= {str, type(None)}])
def test_texts_are_not_blank(path):
    for value in ("", "  ", "a\0b", "\ud800"):
        with pytest.raises(ValidationError):
            adapter(path).validate_python(value)


@pytest.mark.parametrize(("field", "value"), [
    ("lr", -1), ("lr", float("inf")), ("lr", float("nan")), ("lr", True), ("lr", "1e-4"),
    ("betas", (2, 2)), ("betas", (0.9, 1)), ("betas", (0.9,)), ("betas", 0.9), ("betas", (-0.1, 0)),
    ("eps", -1), ("eps", 0), ("weight_decay", -0.1), ("weight_decay", float("nan")),
    ("max_grad_norm", 0), ("max_grad_norm", -1), ("min_lr_ratio", 2), ("min_lr_ratio", -1),
    ("warmup_steps", -1), ("warmup_steps", True), ("warmup_steps", 1.0), ("total_steps", 0),
    ("schedule", "step"), ("schedule", "cosine"),
])
def test_optimizer(field, value):
    with pytest.raises(ValueError, match=field):
        OptimizerConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), [
    ("pp", 0), ("pp", True), ("dp", -1), ("tp", 1.0), ("cp", "2"), ("chunks", 0), ("quota", 2.0),
    ("quota", float("nan")), ("layers", (0,)), ("layers", (True,)), ("ranks", (-1,)),
    ("ranks", (0.0,)), ("sharding", "zero2"), ("microbatch_factor", 0),
])
def test_layouts(field, value):
    with pytest.raises(PlanError, match=field):
        ParallelSpec(**{field: value})


@pytest.mark.parametrize("value", [0, -1, True, 1.0])
def test_microbatches(value):
    with pytest.raises(PlanError, match="num_microbatches"):
        MultimodalParallelSpec(num_microbatches=value)


@pytest.mark.parametrize("fields", [
    {"cpus": -1}, {"cpus": float("inf")}, {"cpus": True}, {"cpus": 0}, {"gpus": float("nan")},
    {"custom": {"CPU": 3.0}}, {"custom": {"disk": -1}},
])
def test_resources(fields):
    with pytest.raises(ClusterError, match="resources"):
        RankResources(**fields)


@pytest.mark.parametrize(("values", "parts"), [
    ({"hiden_size": 3}, ["config.hiden_size", "LlamaConfig", "did you mean hidden_size?"]),
    ({"text_config": {}}, ["config.text_config", "accepted: ", "hidden_size"]),
    ({"model_type": "lama"}, ["'lama'", "llama"]),
    ({"model_type": True}, ["True"]),
    ({"hidden_size": "wide"}, ["'llama'", "hidden_size"]),
    (
        {"model_type": "llava", "text_config": {"model_type": "llama", "hiden_size": 3}},
        ["config.text_config.hiden_size", "hidden_size"],
    ),
])
def test_config_values(values, parts):
    with pytest.raises(ConfigError) as caught:
        model_config({"model_type": "llama", **values})
    assert not [part for part in parts if part not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize("values", [
    {"model_type": "llama", "rope_theta": 1e4, "torch_dtype": "float32", "num_labels": 3},
    {"model_type": "gpt2", "hidden_size": 8, "n_layer": 1},
    {"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": 64}},
    {"model_type": "qwen3", "rope_scaling": None, "sliding_window": 4},
])
def test_config_values_that_classes_know_by_other_names(values):
    assert model_config(values).model_type == values["model_type"]
