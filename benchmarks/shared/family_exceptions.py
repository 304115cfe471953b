"""Exceptions to the shrinking rules, mostly for classes with inconsistent defaults."""

from __future__ import annotations

from typing import Any

from transformers import PPLCNetV3Config

# By configuration class and dotted name.
AWKWARD: dict[str, dict[str, Any]] = {
    # Patches of the image after four halvings.
    "JanusVQVAEConfig": {"num_patches": 2},
    # The output width of one part must equal the width of the other.
    "DeepseekOcr2VisionConfig": {"sam_config.downsample_channels": [32, 64]},
    # Four adjacent patches are as wide as the intermediate size.
    "Llama4VisionConfig": {"intermediate_size": 256},
    # The defaults project no level.
    "LwDetrConfig": {
        "projector_scale_factors": [1.0],
        "projector_in_channels": [64],
        "num_feature_levels": 1,
    },
    # A patch is an image for the sub-models, whose layers are indexed here.
    "DepthProConfig": {
        "patch_size": 64,
        "merge_padding_value": 0,
        "intermediate_hook_ids": [3, 1],
        "image_model_config.image_size": 64,
        "patch_model_config.image_size": 64,
        "fov_model_config.image_size": 64,
    },
    # The channels are those of this backbone, which is not the default one.
    "PPOCRV6SmallDetConfig": {
        "layer_list_out_channels": [48, 96, 192, 384],
        "backbone_config": PPLCNetV3Config(scale=0.75, divisor=16, out_indices=[2, 3, 4, 5]),
    },
    # The attention layers share weights, which needs several of them.
    "ZambaConfig": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    # The head takes the features of all levels.
    "UVDocConfig": {"backbone_config.out_indices": [1, 2, 3, 4, 5, 6]},
}
