"""Between encoder and projector: encoder outputs to a few wide tokens per sample.

Both take ``(inputs, output)``, the encoder's inputs (unused) and its output as a tensor, a
tuple that begins with it, or a Hugging Face ``ModelOutput``.

Shapes: ``B`` samples, ``T`` frames, ``D`` features.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

IMAGE_GRID = 4  # tokens per side: 16 tokens per image
AUDIO_STACK = 10  # frames per token: 25 tokens of 0.2 s from a window of 250 frames


def _hidden_state(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    state = getattr(output, "last_hidden_state", None)
    if state is None and isinstance(output, tuple) and output:
        state = output[0]
    if not isinstance(state, Tensor):
        raise TypeError(
            f"encoder output is a {type(output).__name__}, accepted are a tensor, a tuple that "
            "begins with one, or a ModelOutput with last_hidden_state"
        )
    return state


def pool_image_tokens(inputs: Any, output: Any) -> Tensor:
    """Feature map (B, D, H, W) -> tokens (B, 16, D), row by row, by average pooling."""
    features = _hidden_state(output)
    if features.ndim != 4:
        raise ValueError(f"image features of shape {tuple(features.shape)}, expected (B, D, H, W)")
    return F.adaptive_avg_pool2d(features, IMAGE_GRID).flatten(2).transpose(1, 2)


def stack_audio_frames(inputs: Any, output: Any) -> Tensor:
    """Frames (B, T, D) -> tokens (B, T / 10, 10 D): ten consecutive frames side by side.

    Raises ``ValueError`` if T is not a multiple of ten.
    """
    frames = _hidden_state(output)
    if frames.ndim != 3 or frames.shape[1] % AUDIO_STACK:
        raise ValueError(
            f"audio frames of shape {tuple(frames.shape)}, expected (B, T, D) "
            f"with T a multiple of {AUDIO_STACK}"
        )
    return frames.unflatten(1, (-1, AUDIO_STACK)).flatten(2)
