"""Load of a module for one microbatch.

Numbers that shapes do not show (widths, heads, experts per token) come from the Hugging Face
config. No model is known by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from raymm.actors.modules.blocks import find_blocks
from raymm.errors import PlanError

WIDTH = ("hidden_size", "d_model", "n_embd")
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "encoder_attention_heads")
POOLING = nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d | nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d


class SeenAttention(NamedTuple):
    """Observed sizes of an attention module's calls in a forward.

    Attributes:
        rows, keys: rows of queries and of keys, without heads.
        pairs: visible pairs of a query and a key.
        query, key, value, out: widths of all heads together.
    """

    rows: float
    keys: float
    pairs: float
    query: int
    key: int
    value: int
    out: int

    def joined(self, other: SeenAttention) -> SeenAttention:
        """Return the sizes of these and other calls of the same module."""
        return self._replace(
            rows=self.rows + other.rows, keys=self.keys + other.keys, pairs=self.pairs + other.pairs
        )

    def over(self, tokens: int) -> SeenAttention:
        return self._replace(
            rows=self.rows / tokens, keys=self.keys / tokens, pairs=self.pairs / tokens
        )


@dataclass(frozen=True)
class Load:
    """Load of one module for one microbatch. "Per token" means per token of the module's blocks.

    Attributes:
        samples: sequences (images, clips); attention stays within one.
        tokens: tokens per sample in the blocks, with class tokens of an encoder.
        labels: tokens with a label, which the language model's head runs on; None for all tokens.
        places: observed rows of products with weights per token, by name. Other rows follow from
            the sizes of products.
        attention: observed sizes of attention modules per token, by name. Other attention follows
            from widths and the number of tokens.
        handed: output elements per token; None if they equal those of the blocks.
        streams: output elements of each block per token; empty if blocks are as wide as the hidden
            state.
        relayed: elements per token that every stage but the last sends in addition to the hidden
            state: tower features that later stages read.
        kept: elements that autograd saves in the compute dtype and in fp32 per token: before the
            blocks, by block, after the blocks, and in a head. Empty if
            :mod:`raymm.costs.forward_run` runs the module.
        mixing: by block, FLOPs per token of products of two activations without attention through
            transformers' interface, and True if the block has such attention. Empty if ``kept`` is.
        projector_places, projector_handed, projector_kept: the same for an encoder's projector.
    """

    samples: int
    tokens: int
    labels: int | None = None
    places: tuple[tuple[str, float], ...] = ()
    attention: tuple[tuple[str, SeenAttention], ...] = ()
    handed: float | None = None
    streams: tuple[float, ...] = ()
    relayed: float = 0.0
    kept: tuple[tuple[float, float], ...] = ()
    mixing: tuple[tuple[float, bool], ...] = ()
    projector_places: tuple[tuple[str, float], ...] = ()
    projector_handed: float | None = None
    projector_kept: tuple[tuple[float, float], ...] = ()

    def of_projector(self) -> Load:
        return replace(
            self, places=self.projector_places, attention=(), handed=self.projector_handed,
            streams=(), kept=self.projector_kept, mixing=(),
        )

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("tokens", 1), ("labels", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise PlanError(f"{name} is {value!r}; it must be a whole number >= {least}")
        if self.labels is not None and self.labels > self.total:
            raise PlanError(f"labels is {self.labels}, but there are only {self.total} tokens")

    @property
    def total(self) -> int:
        """Tokens of the microbatch."""
        return self.samples * self.tokens


def default_tokens(module: nn.Module) -> int:
    """Return an encoder's tokens per item from its config: patches (and class tokens) of an image,
    or positions of an audio encoder. Raises PlanError if the config does not have them."""
    config = getattr(module, "config", None)
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    positions = getattr(config, "max_source_positions", None)
    if isinstance(positions, int):
        return positions
    if size is None or patch is None:
        raise PlanError(
            f"the config of {type(module).__name__} does not say how many tokens an item has; "
            "give the encoder's Load"
        )
    height, width = size if isinstance(size, list | tuple) else (size, size)
    down, across = patch if isinstance(patch, list | tuple) else (patch, patch)
    hidden = config_number(WIDTH, config) or 1
    special = sum(
        parameter.numel() // hidden
        for name, parameter in module.named_parameters()
        if name.rpartition(".")[2]
        in ("cls_token", "class_embedding", "distillation_token", "register_tokens")
    )
    return (height // down) * (width // across) + special


def config_number(names: tuple[str, ...], *containers: Any) -> int | None:
    """Return the first integer that a config or a module has under one of the names."""
    for container in containers:
        for name in names:
            value = getattr(container, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


class LoadedModule:
    """A module with its load, and the properties that counters of its parts need.

    Args:
        module: parameters may be on the meta device.
        causal: True for a language model, in which a token sees only earlier tokens.

    Attributes:
        hidden: width of the hidden state; None if the config does not have it.
        head: output layer of the language model; None without one.
        path: name of the list of blocks; None if the module cannot be cut.
    """

    def __init__(self, module: nn.Module, load: Load, causal: bool) -> None:
        config: Any = getattr(module, "config", None)
        if hasattr(config, "get_text_config") and causal:
            config = config.get_text_config()
        self.module, self.load, self.causal, self.config = module, load, causal, config
        find_head = getattr(module, "get_output_embeddings", None)
        self.head = find_head() if find_head is not None and causal else None
        self.hidden = config_number(WIDTH, config)
        self.path = find_blocks(module)
        self.places = dict(load.places)
        self.seen = dict(load.attention)

    def rows(self, name: str) -> float:
        """Return the rows that enter a submodule: as observed, otherwise all tokens, or one per
        sample in a pooling head."""
        if name in self.places:
            return self.places[name] * self.load.total
        if self.pools(name):
            return float(self.load.samples)
        return float(self.load.total)

    def pools(self, name: str) -> bool:
        """Return True if a module is part of a pooling head, which reduces a sample to one
        token."""
        path = name.split(".") if name else []
        for length in range(1, len(path) + 1):
            parent = self.module.get_submodule(".".join(path[:length]))
            if not isinstance(parent, nn.ModuleList | POOLING):
                if "pool" in path[length - 1] or "Pooling" in type(parent).__name__:
                    return True
        return False
