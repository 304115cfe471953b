"""EfficientNet-Lite0 and the Whisper conversion, with random weights."""

import pytest
import torch
from torch.nn import functional as F
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from examples.alignment.efficientnet_lite import SamePadConv2d, build, convert_state_dict
from examples.alignment.whisper import encoder_state_dict


def test_efficientnet_shape_and_blocks():
    model = build().requires_grad_(False)
    features = model(torch.randn(2, 3, 224, 224))
    assert features.shape == (2, model.hidden_size, 7, 7)
    assert len(model.blocks) == 16
    # EfficientNet-Lite0 has 4,652,008 parameters; its classifier has 1280 * 1000 + 1000
    assert sum(p.numel() for p in model.parameters()) == 4_652_008 - 1_281_000


def test_only_frozen_batch_norm_ignores_train_mode():
    model = build()
    x = torch.randn(2, 3, 64, 64)
    model.requires_grad_(False).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = model(x)
    assert torch.equal(trained, model.eval()(x))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    model.requires_grad_(True).train()
    model(x)
    assert not torch.equal(before["bn0.running_mean"], model.bn0.running_mean)


@pytest.mark.parametrize(("size", "kernel", "stride"), [(8, 3, 2), (7, 3, 2), (8, 5, 2), (6, 5, 1)])
def test_same_padding(size, kernel, stride):
    conv = SamePadConv2d(1, 1, kernel, stride)
    x = torch.randn(1, 1, size, size + 3)
    out = conv(x)
    assert out.shape[2:] == (-(-size // stride), -(-(size + 3) // stride))
    # oracle: pad by hand, smaller half in front
    pads = []
    for n in (size + 3, size):
        total = max((-(-n // stride) - 1) * stride + kernel - n, 0)
        pads += [total // 2, total - total // 2]
    assert torch.allclose(out, F.conv2d(F.pad(x, pads), conv.weight, stride=stride))


def test_efficientnet_weights_are_renamed_or_refused():
    model = build()
    published = {
        ".".join(f"_{part}" if part[0] in "bcedp" and not part.startswith("bias") else part
                 for part in name.split(".")): tensor
        for name, tensor in model.state_dict().items()
    }  # fmt: skip
    published["_fc.weight"] = torch.zeros(1000, 1280)
    published["_fc.bias"] = torch.zeros(1000)
    assert "_blocks.0._depthwise_conv.weight" in published
    converted = convert_state_dict(published)
    build().load_state_dict(converted, strict=True)
    del published["_bn0.weight"]
    with pytest.raises(ValueError, match="1 tensors missing.*'bn0.weight'"):
        convert_state_dict(published)


def _ctranslate2_names(state: dict, layers: int) -> dict:
    """Return the inverse renaming, written independently from CTranslate2's converter."""
    pairs = {
        "embed_positions.weight": "encoder/position_encodings/encodings",
        "conv1.weight": "encoder/conv1/weight",
        "conv1.bias": "encoder/conv1/bias",
        "conv2.weight": "encoder/conv2/weight",
        "conv2.bias": "encoder/conv2/bias",
        "layer_norm.weight": "encoder/layer_norm/gamma",
        "layer_norm.bias": "encoder/layer_norm/beta",
    }
    tensors = {new: state[old] for old, new in pairs.items()}
    for i in range(layers):
        hf, ct = f"layers.{i}", f"encoder/layer_{i}"
        q, k, v = (f"{hf}.self_attn.{n}_proj" for n in "qkv")
        tensors[f"{ct}/self_attention/linear_0/weight"] = torch.cat(
            [state[f"{q}.weight"], state[f"{k}.weight"], state[f"{v}.weight"]]
        )
        tensors[f"{ct}/self_attention/linear_0/bias"] = torch.cat(
            [state[f"{q}.bias"], torch.zeros_like(state[f"{q}.bias"]), state[f"{v}.bias"]]
        )
        for part in ("weight", "bias"):
            tensors[f"{ct}/self_attention/linear_1/{part}"] = state[
                f"{hf}.self_attn.out_proj.{part}"
            ]
            tensors[f"{ct}/ffn/linear_0/{part}"] = state[f"{hf}.fc1.{part}"]
            tensors[f"{ct}/ffn/linear_1/{part}"] = state[f"{hf}.fc2.{part}"]
        for part, ct_part in (("weight", "gamma"), ("bias", "beta")):
            norm = state[f"{hf}.self_attn_layer_norm.{part}"]
            tensors[f"{ct}/self_attention/layer_norm/{ct_part}"] = norm
            tensors[f"{ct}/ffn/layer_norm/{ct_part}"] = state[f"{hf}.final_layer_norm.{part}"]
    return tensors


def test_whisper_encoder_survives_the_round_trip():
    config = WhisperConfig(
        d_model=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=32,
        max_source_positions=10, num_mel_bins=8,
    )  # fmt: skip
    torch.manual_seed(0)
    encoder = WhisperEncoder(config).eval()
    state = {name: torch.randn_like(tensor) for name, tensor in encoder.state_dict().items()}
    encoder.load_state_dict(state)
    tensors = _ctranslate2_names(state, layers=2)
    converted = encoder_state_dict(tensors)
    assert set(converted) == set(state)
    assert all(torch.equal(converted[name], tensor) for name, tensor in state.items())

    tensors["encoder/layer_1/self_attention/linear_0/bias"][16] = 1.0
    with pytest.raises(ValueError, match="layer_1: the key projection has a bias"):
        encoder_state_dict(tensors)
    del tensors["encoder/conv1/weight"]
    with pytest.raises(ValueError, match="missing tensors .'encoder/conv1/weight'"):
        encoder_state_dict(tensors)
