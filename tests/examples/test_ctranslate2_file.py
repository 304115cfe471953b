"""The CTranslate2 reader reads files of a writer for the documented layout."""

import random
import struct

import pytest
import torch

from examples.alignment.ctranslate2_file import read_tensors

_CODES = {torch.float32: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.float16: 4}


def _string(text: str) -> bytes:
    raw = text.encode() + b"\0"
    return struct.pack("<H", len(raw)) + raw


def _model(tensors: dict, aliases: dict, spec: str = "WhisperSpec", version: int = 6) -> bytes:
    data = struct.pack("<I", version) + _string(spec) + struct.pack("<II", 3, len(tensors))
    for name, tensor in tensors.items():
        raw = tensor.contiguous().numpy().tobytes()
        data += _string(name) + struct.pack(f"<B{tensor.ndim}I", tensor.ndim, *tensor.shape)
        data += struct.pack("<BI", _CODES[tensor.dtype], len(raw)) + raw
    data += struct.pack("<I", len(aliases))
    return data + b"".join(_string(a) + _string(n) for a, n in aliases.items())


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "encoder/weight": torch.randn(3, 4, generator=generator),
        "encoder/half": torch.randn(2, 3, 5, generator=generator).half(),
        "encoder/num_heads": torch.tensor(6, dtype=torch.int16),
        "decoder/activation": torch.tensor(3, dtype=torch.int8),
        "empty": torch.empty(0, 4),
    }


def test_reads_written_files(tmp_path, tensors):
    path = tmp_path / "model.bin"
    path.write_bytes(_model(tensors, {"projection": "encoder/weight"}))
    read = read_tensors(path, "WhisperSpec")
    assert set(read) == {*tensors, "projection"}
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert torch.equal(read[name], tensor), name
    assert read["projection"] is read["encoder/weight"]


def test_every_truncation_is_an_error_with_the_path(tmp_path, tensors):
    whole = _model(tensors, {"projection": "encoder/weight"})
    path = tmp_path / "model.bin"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="model.bin: byte"):
            read_tensors(path, "WhisperSpec")


def test_flipped_bytes_give_tensors_or_a_value_error(tmp_path, tensors):
    whole = _model(tensors, {"projection": "encoder/weight"})
    path = tmp_path / "model.bin"
    draw = random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(damaged))] ^= draw.randrange(1, 256)
        path.write_bytes(damaged)
        try:
            read_tensors(path, "WhisperSpec")
        except ValueError:
            refused += 1
    assert refused > 50  # most bytes are weights, which may have any value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "binary version is 99, accepted are"),
        ({"spec": "BertSpec"}, "spec is 'BertSpec', expected 'WhisperSpec'"),
        ({"aliases": {"a": "nowhere"}}, "alias 'a' stands for unknown tensor 'nowhere'"),
    ],
)
def test_wrong_content_is_named(tmp_path, tensors, change, message):
    path = tmp_path / "model.bin"
    path.write_bytes(_model(**{"tensors": tensors, "aliases": {}, **change}))
    with pytest.raises(ValueError, match=message):
        read_tensors(path, "WhisperSpec")


def test_trailing_bytes_and_impossible_counts_are_errors(tmp_path, tensors):
    path = tmp_path / "model.bin"
    path.write_bytes(_model(tensors, {}) + b"x")
    with pytest.raises(ValueError, match="1 bytes follow"):
        read_tensors(path, "WhisperSpec")
    path.write_bytes(
        struct.pack("<I", 6) + _string("WhisperSpec") + struct.pack("<II", 3, 2**32 - 1)
    )
    with pytest.raises(ValueError, match="tensor count is 4294967295"):
        read_tensors(path, "WhisperSpec")
