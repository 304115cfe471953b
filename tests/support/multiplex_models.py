"""Tiny models as graphs of modules, each with an oracle: the same modules called by hand."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from raymm.model.contrastive import ContrastiveLoss
from raymm.model.dag_module import DagLoss, DagModule, every
from raymm.model.modality_module import ModalityModule
from raymm.model.module_dag import ModuleDag
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.multiplex.mapping import MultiplexStage, Placement

STEPS = 10
V = 31
WIDTH = 12

# Relative to a gradient's own norm.
GRADIENT_TOLERANCE = 1e-5
# A key's bias has no influence on attention: its gradient is rounding error.
NO_GRADIENT = "k_proj.bias"


def mapping_of(
    gpus: int, *stages: Mapping[str, tuple[tuple[int, ...], int]], slices: int = 1
) -> StageMapping:
    """Return a mapping from stages of modules with GPUs, quota and slices."""
    return StageMapping(gpus, STEPS, tuple(
        MultiplexStage(tuple(Placement(m, *place) for m, place in one.items()), 1.0)
        for one in stages
    ), slices=slices)


def clip_model(seed: int = 0) -> hf.CLIPModel:
    """Return a CLIP whose towers and projections all have different sizes."""
    torch.manual_seed(seed)
    vision = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                  num_attention_heads=2, image_size=8, patch_size=4)  # fmt: skip
    text = dict(hidden_size=20, intermediate_size=28, num_hidden_layers=1,
                num_attention_heads=2, vocab_size=V, max_position_embeddings=9,
                eos_token_id=2, bos_token_id=0, pad_token_id=1)  # fmt: skip
    model = hf.CLIPModel(hf.CLIPConfig(
        vision_config=vision, text_config=text, projection_dim=WIDTH
    ))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def clip_batch(size: int, seed: int) -> dict[str, torch.Tensor]:
    """Return images and texts of different lengths."""
    torch.manual_seed(1000 + seed)
    lengths = torch.randint(3, 9, (size, 1))
    return {
        "pixel_values": torch.randn(size, 3, 8, 8),
        "input_ids": torch.randint(3, V, (size, 8)),
        "attention_mask": (torch.arange(8)[None] < lengths).long(),
    }


class Tower(nn.Module):
    """Tower from (B, F) to (B, WIDTH)."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


OTHERS = {"text": 5, "audio": 7, "depth": 6, "thermal": 4, "imu": 3}
FROZEN = ("depth", "thermal")
WEIGHTS = {"text": 1.0, "audio": 0.5, "depth": 2.0, "thermal": 1.0, "imu": 0.3}


class ImageBind(nn.Module):
    """Six towers and, for each other modality, its distance to the image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.towers = nn.ModuleDict({
            "image": Tower(9, 16), **{name: Tower(f, 8 + f) for name, f in OTHERS.items()}
        })
        for name in FROZEN:
            self.towers[name].requires_grad_(False)
        self.losses = nn.ModuleDict({
            name: ContrastiveLoss(0.5 + i, learnable=name != "imu")
            for i, name in enumerate(OTHERS)
        })

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        embeds = {name: F.normalize(t(batch[name]), dim=-1) for name, t in self.towers.items()}
        total = 0.0
        for name, loss in self.losses.items():
            logits = loss.logit_scale.exp() * embeds["image"] @ embeds[name].T
            labels = torch.arange(len(logits))
            both = F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)
            total = total + WEIGHTS[name] * both / 2
        return total

    def dag(self) -> ModuleDag:
        nodes = {name: DagModule(t, reads={"x": name}) for name, t in self.towers.items()}
        for name, loss in self.losses.items():
            nodes[f"{name}_loss"] = DagLoss(
                loss, inputs={"first": every("image"), "second": every(name)},
                weight=WEIGHTS[name], draws=False,
            )
        return ModuleDag(nodes)


def imagebind_batch(size: int, seed: int) -> dict[str, torch.Tensor]:
    """Return features of all six modalities."""
    torch.manual_seed(2000 + seed)
    return {name: torch.randn(size, f) for name, f in {"image": 9, **OTHERS}.items()}


class Backbone(nn.Module):
    """Transformer over the concatenated tokens of two modalities."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 20, 0.0, batch_first=True)
        self.scale = nn.Linear(1, 1)

    def forward(self, vision: torch.Tensor, audio: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens = self.layer(torch.cat([vision, audio[:, None]], 1))
        return tokens, self.scale(tokens.mean(1)[:, :1])


class TextDecoder(nn.Module):
    """Cross entropies of tokens: sums per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, WIDTH)
        self.head = nn.Linear(WIDTH, V)

    def forward(
        self, states: tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor
    ) -> torch.Tensor:
        tokens, scale = states
        before = self.embed(labels.clamp(min=0)) + tokens.mean(1, keepdim=True)
        logits = self.head(before[:, :-1] * (1 + scale[..., None]))
        return F.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="none"
        ).view(len(labels), -1).sum(1)


class ImageDecoder(nn.Module):
    """Squared error of a small picture: means per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, tokens: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
        return (self.head(tokens.mean(1)) - picture).square().mean(1)


class Unified(nn.Module):
    """Two encoders (vision frozen, with a trained projector), a frozen backbone, two decoders."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.vision = hf.CLIPVisionModel(hf.CLIPVisionConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            image_size=8, patch_size=4,
        )).requires_grad_(False).eval()
        self.audio = Tower(7, 11).requires_grad_(False).eval()
        self.project = nn.Linear(16, WIDTH)
        self.adapt = Tower(WIDTH, 10)
        self.backbone = Backbone().requires_grad_(False).eval()
        self.text = TextDecoder()
        self.image = ImageDecoder()

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        vision = self.project(self.vision(batch["pixel_values"]).last_hidden_state)
        audio = self.adapt(self.audio(batch["sound"]))
        states = self.backbone(vision, audio)
        count = batch["label_count"].sum()
        return (
            self.text(states, batch["labels"]).sum() / count
            + 0.7 * self.image(states[0], batch["picture"]).mean()
        )

    def dag(self) -> ModuleDag:
        return ModuleDag({
            "vision": DagModule(
                ModalityModule(self.vision, self.project, frozen=True, projector_frozen=False),
                reads="pixel_values",
            ),
            "audio": DagModule(self.audio, reads={"x": "sound"}),
            "adapt": DagModule(self.adapt, inputs={"x": "audio"}),
            "backbone": DagModule(self.backbone, inputs={"vision": "vision", "audio": "adapt"}),
            "text": DagLoss(
                self.text, reads="labels", inputs={"states": "backbone"}, divide_by="label_count"
            ),
            "image": DagLoss(
                self.image, reads="picture", inputs={"tokens": "backbone.0"}, weight=0.7
            ),
        })

    def dag_name(self, name: str) -> str:
        """Return the graph's name of a parameter."""
        owner, _, rest = name.partition(".")
        if owner in ("vision", "project"):
            return f"vision.chain.{'module' if owner == 'vision' else 'projector'}.{rest}"
        return name


def unified_batch(size: int, seed: int) -> dict[str, torch.Tensor]:
    """Return pictures, audio, and texts with different numbers of labels."""
    torch.manual_seed(3000 + seed)
    labels = torch.randint(0, V, (size, 6))
    labels[torch.rand(size, 6) < 0.3] = -100
    labels[0, 1] = 5
    return {
        "pixel_values": torch.randn(size, 3, 8, 8), "sound": torch.randn(size, 7),
        "labels": labels, "label_count": (labels[:, 1:] != -100).sum(1),
        "picture": torch.randn(size, 8),
    }


def gradient_problems(
    actual: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None]
) -> list[str]:
    """Return the errors of gradients, each relative to its own norm; empty if there are none."""
    found = [f"{name}: only on one side" for name in actual.keys() ^ expected.keys()]
    largest = max(float(g.norm()) for g in expected.values() if g is not None)
    for name in actual.keys() & expected.keys():
        mine, due = actual[name], expected[name]
        if (mine is None) != (due is None):
            found.append(f"{name}: None on one side only")
        elif due is not None:
            error, norm = float((mine.double() - due.double()).norm()), float(due.norm())
            floor = 1e-6 * largest if name.endswith(NO_GRADIENT) else 0.0
            if not error <= max(GRADIENT_TOLERANCE * norm, floor):
                found.append(f"{name}: error {error:.2e} of {norm:.2e}")
    return sorted(found)


class MeanSquare(nn.Module):
    """Mean square from (b, F) to (b,)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean(1)


class Failing(nn.Module):
    """Tower that raises on request."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
        if (code == 1).any():
            raise ArithmeticError("made to fail")
        return x * self.weight


class Pooled(nn.Module):
    """States (b, WIDTH), and a pooled output."""

    def __init__(self) -> None:
        super().__init__()
        self.states, self.pool = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        states = self.states(x)
        return {"states": states, "pooled": self.pool(states).tanh()}


class PooledError(nn.Module):
    """Error that reads the pooled output only for samples that use it."""

    def forward(self, x: dict[str, torch.Tensor], used: torch.Tensor) -> torch.Tensor:
        error = x["states"].square().mean(1)
        return error + used * x["pooled"].mean(1) if used.any() else error


def pooled_dag(seed: int = 0) -> ModuleDag:
    """Return a graph of two towers with unused outputs.

    One tower's reader may ignore the pooled output; the other's reader names another output.
    """
    torch.manual_seed(seed)
    return ModuleDag({
        "tower": DagModule(Pooled(), reads="x"),
        "other": DagModule(Pooled(), reads="x"),
        "error": DagLoss(PooledError(), reads="used", inputs={"x": "tower"}),
        "mean": DagLoss(MeanSquare(), inputs={"x": "other.states"}),
    })


class OwnLength(nn.Module):
    """Module that pads to the longest of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[:, None].expand(-1, int(length.max()), -1)


class Doubling(nn.Module):
    """Module that doubles its input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).mean(1)
