"""How much a module has to do for one microbatch, and the module that has to do it.

What shapes do not show (widths, heads, experts per token) is in the few numbers of a Hugging Face
config; nothing is known of a model by name.
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
    """Sizes of an attention module's calls in a forward.

    Attributes:
        rows, keys: of queries and of keys, without heads.
        pairs: of a query and a key that it sees.
        query, key, value, out: widths, of all heads together.
    """

    rows: float
    keys: float
    pairs: float
    query: int
    key: int
    value: int
    out: int

    def joined(self, other: SeenAttention) -> SeenAttention:
        """Return the sizes of these calls and others of the same module."""
        return self._replace(
            rows=self.rows + other.rows, keys=self.keys + other.keys,
            pairs=self.pairs + other.pairs,
        )

    def over(self, tokens: int) -> SeenAttention:
        """Return the sizes divided by a number of tokens."""
        return self._replace(
            rows=self.rows / tokens, keys=self.keys / tokens, pairs=self.pairs / tokens
        )


@dataclass(frozen=True)
class Load:
    """What one module has to do for one microbatch.

    Attributes:
        samples: sequences (images, clips); attention stays within one.
        tokens: of each, as its blocks see them. For an encoder, class tokens included.
        labels: tokens of the microbatch with a label, which the language model's head runs
            on; all of them by default.
        places: of products with weights that were seen to run, by name, for how many places each
            token of its blocks makes them do so; of others it follows from their sizes.
        attention: by name, sizes of the attention modules that were seen to run, for each token of
            the blocks; what others do follows from their widths and the number of tokens.
        handed: elements that the module returns for each token of its blocks; None where they are
            as many as its blocks return.
        streams: elements that each block returns for each token of the blocks; empty where they are
            as wide as the hidden state.
        relayed: elements that every stage but the last hands on beside the hidden state, for each
            token of the blocks: features of towers that later stages read.
        kept: elements that autograd saves in the compute dtype and in fp32 for each token of the
            blocks: before the blocks, by block, after the blocks, and in a head; empty where
            :mod:`raymm.costs.forward_run` runs the module for it.
        mixing: by block, FLOPs of products of two activations for each token of the blocks, without
            those of attention through transformers' interface, and True if the block has such
            attention; empty as ``kept`` is.
        projector_places, projector_handed, projector_kept: as these, of an encoder's projector.
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
        """Return the load of the encoder's projector."""
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
    """Tokens per item of an encoder, from its config: patches (and class tokens) of an image,
    positions of an audio encoder.

    Raises:
        PlanError: if the config does not say.
    """
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
    """The first whole number that a config or a module has under one of the names."""
    for container in containers:
        for name in names:
            value = getattr(container, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


class LoadedModule:
    """A module together with its load, and what all counting of its parts asks of both.

    Args:
        module: parameters may be on the meta device.
        load: what it has to do.
        causal: whether a token sees only those before it; then the module is a language model.

    Attributes:
        hidden: width of its hidden state, None where its config does not say.
        head: the language model's output layer, None without one.
        path: name of its list of blocks, None where it cannot be cut.
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
        """Rows that come to a submodule: as it was seen, else every token, or one per sample in a
        pooling head."""
        if name in self.places:
            return self.places[name] * self.load.total
        if self.pools(name):
            return float(self.load.samples)
        return float(self.load.total)

    def pools(self, name: str) -> bool:
        """Whether a module is part of a pooling head, which makes one token of a sample's."""
        path = name.split(".") if name else []
        for length in range(1, len(path) + 1):
            parent = self.module.get_submodule(".".join(path[:length]))
            if not isinstance(parent, nn.ModuleList | POOLING):
                if "pool" in path[length - 1] or "Pooling" in type(parent).__name__:
                    return True
        return False
