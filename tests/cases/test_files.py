"""Files and media that were once rejected, cut or overlooked."""

import json

import numpy as np
import pytest
import soundfile
import torch
import yaml
from PIL import Image

from raymm.cli.main import main
from raymm.cli.start_settings import Options, first_settings
from raymm.data.readers.detect import detect
from raymm.errors import SampleError
from tests.support.built_rows import BuiltRows, case_file
from tests.support.tiny_folders import tiny

KIND = "qwen2_5_vl"
END = "<|im_end|>\n"
SAY = {"messages": [
    {"role": "user", "content": "Say"}, {"role": "assistant", "content": "Hello."},
]}  # fmt: skip


@pytest.mark.parametrize("name", ["array.json", "blank.jsonl", "bom.jsonl", "one_line.json"])
def test_json_is_read_in_every_layout(name, tmp_path):
    rows = BuiltRows(case_file(f"blank-line-bom-array/{name}", tmp_path), tiny(KIND)[0])
    assert rows.detected.forms == {"messages": 1}
    assert rows.learned() == f"Hello.{END}"


def test_messages_may_be_a_string_of_json(tmp_path):
    rows = BuiltRows(case_file("messages-as-json-string/rows.parquet", tmp_path), tiny(KIND)[0])
    assert len(rows.dataset) >= 1
    assert rows.learned().endswith(END)


def test_media_may_stand_in_message_parts(tmp_path):
    image = Image.new("RGB", (60, 90), "red")
    image.save(tmp_path / "a.png")
    rows = BuiltRows(case_file("inline-parts/rows.jsonl", tmp_path), tiny(KIND)[0])
    assert rows.detected.modalities == {"image": None}
    pixels = rows.processor.image_processor(image, return_tensors="pt")["pixel_values"]
    for index in range(2):
        assert torch.equal(rows.row(index)["pixel_values"], pixels)
        assert rows.learned(index) == f"Hello.{END}"


def test_media_of_late_rows_are_found(tmp_path):
    Image.new("RGB", (60, 90), "red").save(tmp_path / "a.png")
    late = {"images": ["a.png"], "messages": [
        {"role": "user", "content": "<image>What?"}, SAY["messages"][1],
    ]}  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [SAY] * 64 + [late] * 2))
    rows = BuiltRows(file, tiny(KIND)[0])
    assert rows.detected.modalities == {"image": "images"}
    assert rows.detected.items == {"image": 2}
    assert "pixel_values" in rows.row(65) and "pixel_values" not in rows.row(0)


def test_max_length_fits_the_longest_row(tmp_path):
    long = {"messages": [
        SAY["messages"][0], {"role": "assistant", "content": "A red circle. Then " * 300},
    ]}  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [SAY] * 64 + [long]))
    options = Options(None, None, None, None)
    source = {"path": str(file)}
    values = first_settings(tiny(KIND)[0], source, detect(file), tmp_path / "run", options)
    rows = BuiltRows(file, tiny(KIND)[0], max_length=values["data"]["max_length"])
    assert rows.row(64)["input_ids"].shape[1] > 1000
    assert rows.learned(64).endswith(END)


def test_a_folder_of_another_run_is_refused(tmp_path, capsys):
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_text(json.dumps(SAY))
    run = tmp_path / "run"
    run.mkdir()
    earlier = {"model": {"path": tiny(KIND)[0]}, "data": {"train": str(files[0])}}
    (run / "run.yaml").write_text(yaml.safe_dump(earlier))
    words = ["--model", tiny(KIND)[0], "--data", str(files[1]), "--output", str(run)]
    assert main(["train", *words]) == 2
    told = "".join(capsys.readouterr().err.split())
    assert str(files[0]) in told and str(files[1]) in told


def test_sound_beyond_the_window_is_refused(tmp_path):
    soundfile.write(tmp_path / "long.wav", np.zeros(3 * 16_000), 16_000)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"audio": ["long.wav"], "messages": [
        {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "How high?"}]},
        SAY["messages"][1],
    ]}))
    match = r"long\.wav: the sound is 3\.00 s long.*uses only its first \d"
    with pytest.raises(SampleError, match=match):
        BuiltRows(file, tiny("qwen2_audio")[0]).row()
