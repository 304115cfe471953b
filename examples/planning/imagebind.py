"""Plan of a model shaped like ImageBind, whose towers share 8 H100.

    python examples/planning/imagebind.py
    python examples/planning/imagebind.py --gpus 4 --device A100-80GB --batch 128 --out mapping.svg

Six towers as wide and deep as those of ImageBind-Huge (Girdhar et al. 2023), bound to the image by
contrastive losses. Only their sizes matter: nothing is built, no weights, no GPU. The projections
to a common width are left out, so this graph is for planning, not for training.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from transformers import CLIPTextConfig, ViTConfig

import raymm
from raymm.model.contrastive import ContrastiveLoss
from raymm.model.dag_module import DagLoss, DagModule, every
from raymm.model.module_dag import ModuleDag

# Width, blocks, heads, tokens of a sample.
TOWERS = {
    "image": (1280, 32, 16, 257),
    "text": (1024, 24, 16, 77),
    "audio": (768, 12, 12, 229),
    "depth": (384, 12, 8, 197),
    "thermal": (768, 12, 12, 197),
    "imu": (512, 6, 8, 251),
}
TOKENS = {name: tokens for name, (*_, tokens) in TOWERS.items()}


def imagebind_like() -> ModuleDag:
    """The towers, and a contrastive loss of each with the image."""
    nodes: dict[str, DagModule] = {}
    for name, (width, blocks, heads, tokens) in TOWERS.items():
        sizes = dict(hidden_size=width, num_hidden_layers=blocks, num_attention_heads=heads,
                     intermediate_size=4 * width)  # fmt: skip
        if name == "text":
            config = CLIPTextConfig(max_position_embeddings=tokens, vocab_size=49408, **sizes)
        else:
            config = ViTConfig(image_size=224, patch_size=14 if name == "image" else 16, **sizes)
        reads = {"input_ids" if name == "text" else "pixel_values": name}
        nodes[name] = DagModule(config, reads=reads, outputs="pooler_output")
    for name in TOWERS:
        if name != "image":
            nodes[f"image_{name}"] = DagLoss(
                ContrastiveLoss(), inputs={"first": every("image"), "second": every(name)}
            )
    return ModuleDag(nodes)


def main() -> None:
    """Plan, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--device", default="H100")
    parser.add_argument("--batch", type=int, default=64, help="samples of an iteration")
    parser.add_argument("--out", type=Path, default=Path("runs/imagebind/mapping.png"),
                        help=".png or .svg (default: runs/imagebind/mapping.png)")  # fmt: skip
    args = parser.parse_args()
    planned = raymm.plan_multiplexed(
        imagebind_like(), gpus=args.gpus, device=args.device, batch=args.batch, tokens=TOKENS
    )
    console = Console()
    console.print(planned.table())
    console.print(planned.explain(), highlight=False, markup=False, soft_wrap=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"wrote {planned.draw(args.out, f'ImageBind-like towers on {args.gpus} {args.device}')}")


if __name__ == "__main__":
    main()
