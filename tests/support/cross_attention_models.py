"""Small Mllama and Idefics models with batches of several images.

One process runs them as their documentation describes; other processes shard their tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import (
    IdeficsConfig,
    IdeficsForVisionText2Text,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PreTrainedModel,
)

from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.mask.convert import cross_masks
from tests.support.shared_batch import SharedBatch, padded_causal_masks

VOCABULARY, HIDDEN, HEADS, LENGTHS = 61, 32, 4, (23, 17)
IGNORED = -100
# Source of the visual tokens; not sharded, and not run on the processes.
BEFORE_THE_TEXT_MODEL = ("model.vision_model", "model.multi_modal_projector")


def mllama() -> MllamaForConditionalGeneration:
    """Return 4 layers; 1 and 3 attend to tiles of 5 patches; 2 key heads."""
    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2,
        "intermediate_size": 32, "image_size": 8, "patch_size": 4, "max_num_tiles": 2,
        "vision_output_dim": 32, "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    }  # fmt: skip
    text = {
        "hidden_size": HIDDEN, "num_hidden_layers": 4, "num_attention_heads": HEADS,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": VOCABULARY,
        "cross_attention_layers": [1, 3], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    config = MllamaConfig(vision_config=vision, text_config=text)
    return initialized(MllamaForConditionalGeneration, config)


def idefics() -> IdeficsForVisionText2Text:
    """Return 4 layers, with gated cross attention before 0 and 2; images of 5 patches."""
    vision = {
        "embed_dim": 16, "image_size": 8, "patch_size": 4, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 32,
    }  # fmt: skip
    config = IdeficsConfig(
        vocab_size=VOCABULARY, additional_vocab_size=0, hidden_size=HIDDEN, intermediate_size=48,
        num_hidden_layers=4, num_attention_heads=HEADS, cross_layer_interval=2,
        qk_layer_norms=True, alpha_type="vector", use_resampler=False, vision_config=vision,
    )  # fmt: skip
    return initialized(IdeficsForVisionText2Text, config)


def initialized(kind: type[PreTrainedModel], config) -> PreTrainedModel:
    """Initialize with large random weights, so that all parts matter; gates start at 0."""
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            nn.init.normal_(parameter)
        elif parameter.dim() > 1 and "alpha" not in name and "norm" not in name:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        elif "gate" in name or "alpha" in name or "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.requires_grad_().train()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"mllama": mllama, "idefics": idefics}
IMAGES, TILES, PATCHES = 3, 2, 5
STATES = {"mllama": (IMAGES * TILES * PATCHES, HIDDEN), "idefics": (IMAGES * PATCHES, 16)}
MASK_NAMES = {"mllama": "cross_attention_mask", "idefics": "image_attention_mask"}
CROSS_LAYERS = 2
SELF_LAYERS = {"mllama": 2, "idefics": 4}


@dataclass(frozen=True)
class Batch:
    """Two samples of up to three images; the first tokens of a sample see none.

    Attributes:
        ids, attention_mask, targets: (B, T); a target is the token to predict.
        shown: (B, T, images), for Mllama (B, T, images, tiles).
        pixels: pixels of all images.
    """

    ids: torch.Tensor
    attention_mask: torch.Tensor
    targets: torch.Tensor
    shown: torch.Tensor
    pixels: dict[str, torch.Tensor] = field(repr=False)


def batch_of(family: str, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    size, longest = len(LENGTHS), max(LENGTHS)
    position = torch.arange(longest)
    mask = (position[None] < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(3, VOCABULARY, (size, longest), generator=generator)
    targets = ids.roll(-1, dims=1).masked_fill(mask.roll(-1, dims=1) == 0, IGNORED)
    targets[:, -1] = IGNORED
    # Sample 0: an image from token 4, another from 9, a third from 15. Sample 1: its rows have no
    # image, one, or both without the middle one, in an order that depends on the seed.
    shown = torch.zeros(size, longest, IMAGES, dtype=torch.long)
    for image, start in enumerate((4, 9, 15)):
        shown[0, start + seed :, image] = 1
    shown[1] = torch.tensor([[0, 0, 0], [1, 0, 0], [1, 0, 1]])[(position + seed) // 5 % 3]
    pixels = torch.randn(size, IMAGES, TILES, 3, 8, 8, generator=generator)
    if family == "idefics":
        return Batch(ids, mask, targets, shown, {"pixel_values": pixels[:, :, 0]})
    tiles = torch.ones(size, IMAGES, TILES, dtype=torch.long)
    tiles[0, 1, 1] = 0  # an image of one tile
    return Batch(
        ids, mask, targets, shown[..., None] * tiles[:, None],
        {"pixel_values": pixels, "aspect_ratio_mask": tiles,
         "aspect_ratio_ids": torch.where(tiles.sum(-1) == 2, 2, 1)},
    )  # fmt: skip


def loss_arguments(targets: torch.Tensor, count: int) -> dict:
    """Return arguments for a loss that is summed over targets and divided by ``count``."""
    return {"labels": targets, "shift_labels": targets, "num_items_in_batch": torch.tensor(count)}


def count_of(batch: Batch) -> int:
    return int((batch.targets != IGNORED).sum())


def one_process(model, family: str, batch: Batch, states: torch.Tensor | None = None):
    """Run the model as documented, and return its visual tokens, which get a gradient.

    With ``states``, use these instead.
    """
    made = [] if states is None else [states]
    pixels = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in batch.pixels.items()}
    mask = {MASK_NAMES[family]: batch.shown}
    if states is not None and family == "mllama":
        pixels = {"cross_attention_states": states}
    elif states is not None:
        pixels = {"image_encoder_embeddings": states.unflatten(1, (IMAGES, PATCHES))}

    def keep(module, inputs, output):
        made.append(output if family == "mllama" else output.last_hidden_state)
        made[0].retain_grad()

    maker = model.model.multi_modal_projector if family == "mllama" else model.model.vision_model
    hook = maker.register_forward_hook(keep)
    out = model(
        input_ids=batch.ids, attention_mask=batch.attention_mask, position_ids=positions(batch),
        use_cache=False, **pixels, **mask, **loss_arguments(batch.targets, count_of(batch)),
    )  # fmt: skip
    hook.remove()
    return out, made[0]


def positions(batch: Batch) -> torch.Tensor:
    return torch.arange(batch.ids.shape[1]).expand_as(batch.ids)


def shared(exchange, family: str, batch: Batch, text, visual, **options) -> SharedBatch:
    shown, blind = batch.shown, "nothing"
    if family == "mllama":
        shown, blind = shown.flatten(2), "everything"
    return SharedBatch(
        exchange, text, visual, padded_causal_masks(batch.attention_mask),
        cross_masks(shown, PATCHES, blind=blind), **options,
    )  # fmt: skip


def this_process(model, family: str, batch: Batch, share: SharedBatch, states: torch.Tensor):
    """Run the same forward on this process's shards."""
    visual = share.of_visual(states)
    row = share.of_text(batch.shown)  # only marks rows that see something
    if family == "mllama":
        given = {
            "cross_attention_states": visual,
            "cross_attention_mask": row.amax(dim=(2, 3), keepdim=True),
        }
    else:
        given = {
            "image_encoder_embeddings": visual[:, None],
            "image_attention_mask": row.amax(dim=2, keepdim=True),
        }
    targets = share.of_text(batch.targets)
    return model(
        input_ids=share.of_text(batch.ids), position_ids=share.of_text(positions(batch)),
        use_cache=False, **given, **share.arguments(),
        **loss_arguments(targets, count_of(batch)),
    )  # fmt: skip


def layouts(name: str, ranks: int, visual_tokens: int) -> tuple[ContextLayout, ContextLayout]:
    """Return text and visual tokens of every process."""
    length = max(LENGTHS)
    if name == "even":
        return ContextLayout.even(length, ranks), ContextLayout.even(visual_tokens, ranks)
    # Ragged: the last process has the first and the last tokens, the first has few; visual tokens
    # are on the first and the last process, cut within an image.
    edges = [2, *(2 + (length - 6) * (i + 1) // (ranks - 1) for i in range(ranks - 1))]
    text = [((a, b),) for a, b in zip(edges, edges[1:], strict=False)]
    text.append(((0, 2), (edges[-1], length)))
    cut = PATCHES + 2
    visual = [((0, cut),), *[()] * (ranks - 2), ((cut, visual_tokens),)]
    if name == "one_has_no_visual_tokens" and ranks == 2:
        visual = [(), ((0, visual_tokens),)]
    return ContextLayout(tuple(text)), ContextLayout(tuple(visual))
