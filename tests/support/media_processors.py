"""Processor functions that the tests name in their configurations."""

import os
import resource
import signal
from pathlib import Path

import numpy as np
import torch

from raymm.data import Clip
from raymm.data.samples.processors import frames_of, read_audio, read_image


def image(path: str) -> dict[str, torch.Tensor]:
    """Return (3, 8, 8) float32 pixels."""
    pixels = np.asarray(read_image(path).resize((8, 8)), dtype=np.float32)
    return {"pixel_values": torch.from_numpy(pixels).permute(2, 0, 1) / 255}


def logged_image(path: str) -> dict[str, torch.Tensor]:
    """Run ``image``, and add a line to ``decoded.log`` in the folder of the file."""
    with open(Path(path).parent / "decoded.log", "a") as log:
        log.write(path + "\n")
    return image(path)


def natural_size(path: str) -> dict[str, torch.Tensor]:
    """Return pixels at the file's own size, so that items differ in shape."""
    return {"pixel_values": torch.from_numpy(np.array(read_image(path)))}


def sound(path: str) -> dict[str, torch.Tensor]:
    """Return the first 100 samples at 8 kHz, and their mean as a bfloat16 scalar."""
    wave = torch.from_numpy(read_audio(path, 8000)[:100])
    return {"input_features": wave, "level": wave.abs().mean().to(torch.bfloat16)}


def stopped(path: str) -> dict[str, torch.Tensor]:
    """Stop the process."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return image(path)


def fatal(path: str) -> dict[str, torch.Tensor]:
    """Kill the process, as the kernel does when memory runs out."""
    os.kill(os.getpid(), 9)


def fatal_of_one(path: str) -> dict[str, torch.Tensor]:
    """Run ``image``, but kill the process for the file ``i8.png``."""
    if Path(path).name == "i8.png":
        os.kill(os.getpid(), 9)
    return image(path)


def without_files(path: str) -> dict[str, torch.Tensor]:
    """Run ``image`` in a process that may open no more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        open(path)  # noqa: SIM115
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return image(path)


def from_bytes(data: bytes) -> dict[str, torch.Tensor]:
    """Return the encoded item's length."""
    assert type(data) is bytes
    return {"pixel_values": torch.tensor([float(len(data))])}


def from_picture(picture) -> dict[str, torch.Tensor]:
    """Return size and mode of a ``PIL.Image``."""
    return {"pixel_values": torch.tensor([*picture.size, picture.mode == "RGB"])}


def from_frames(frames: list) -> dict[str, torch.Tensor]:
    """Return (4, 3, 8, 8): the first four frames, the last one repeated."""
    pixels = [image(frame)["pixel_values"] for frame in (frames + frames[-1:] * 4)[:4]]
    return {"pixel_values_videos": torch.stack(pixels)}


def from_clip(clip: Clip) -> dict[str, torch.Tensor]:
    """Return (T, 3, 8, 8) float32 frames, and their start times."""
    pixels = [np.asarray(frame.resize((8, 8)), np.float32) for frame in frames_of(clip)]
    return {
        "pixel_values_videos": torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255,
        "times": torch.from_numpy(clip.times),
    }


def track(path: str) -> dict[str, torch.Tensor]:
    """Return half a second of audio at 16 kHz."""
    return {"input_features": torch.from_numpy(read_audio(path, 16_000)[4000:12_000].copy())}
