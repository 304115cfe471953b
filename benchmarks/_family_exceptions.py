"""What no rule makes fit, mostly as a class's own defaults do not fit each other."""

from __future__ import annotations

from typing import Any

from transformers import PPLCNetV3Config

# By configuration class and dotted name.
AWKWARD: dict[str, dict[str, Any]] = {
    # Patches of the image, after halving it four times.
    "JanusVQVAEConfig": {"num_patches": 2},
    # What one part gives must be as wide as the other one is.
    "DeepseekOcr2VisionConfig": {"sam_config.downsample_channels": [32, 64]},
    # Four neighbours side by side are as wide as what comes between.
    "Llama4VisionConfig": {"intermediate_size": 256},
    # Its defaults project no level.
    "LwDetrConfig": {
        "projector_scale_factors": [1.0],
        "projector_in_channels": [64],
        "num_feature_levels": 1,
    },
    # A patch is an image of its parts, and their layers are numbered here.
    "DepthProConfig": {
        "patch_size": 64,
        "merge_padding_value": 0,
        "intermediate_hook_ids": [3, 1],
        "image_model_config.image_size": 64,
        "patch_model_config.image_size": 64,
        "fov_model_config.image_size": 64,
    },
    # Its channels are of this backbone, though its default is another.
    "PPOCRV6SmallDetConfig": {
        "layer_list_out_channels": [48, 96, 192, 384],
        "backbone_config": PPLCNetV3Config(scale=0.75, divisor=16, out_indices=[2, 3, 4, 5]),
    },
    # Its layers of attention share their weights, for which there must be several.
    "ZambaConfig": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    # Its head takes the features of all levels.
    "UVDocConfig": {"backbone_config.out_indices": [1, 2, 3, 4, 5, 6]},
}
