"""``raymm data preview`` prints rows as training reads them."""

import json

import pytest
from PIL import Image

from benchmarks.shared.row_models import TARGETS, save
from raymm.cli.main import main
from tests.support.tiny_folders import tiny

ANSWER = {"role": "assistant", "content": "It is sunny."}
ROW = {"id": "one", "messages": [{"role": "user", "content": "How is it?"}, ANSWER]}


def write(folder, *rows):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(save(TARGETS["qwen3 (tokenizer)"], tmp_path_factory.mktemp("tokenizer")))


def test_learned_tokens_are_marked(tokenizer, tmp_path, capsys):
    file = write(tmp_path, ROW | {"source": "web"}, ROW, ROW)
    assert main(["data", "preview", file, "--model", tokenizer, "--rows", "2"]) == 0
    out = capsys.readouterr().out
    assert "3 rows of the form messages; not used: source" in out
    assert out.count("[[<think>↵\n↵\n</think>↵\n↵\nIt is sunny.<|im_end|>↵\n]]") == 2
    assert "<|im_start|>assistant\n[[" in out
    assert "row 0, one: 26 tokens (26 text, 0 media), 12 learned\n" in out


def test_items_have_sizes_and_numbers_of_tokens(tmp_path, capsys):
    Image.new("RGB", (56, 84), "red").save(tmp_path / "a.png")
    asked = {"role": "user", "content": "<image>What?"}
    file = write(tmp_path, {"messages": [asked, ANSWER], "images": ["a.png"]}, ROW)
    assert main(["data", "preview", file, "--model", tiny("qwen2_5_vl")[0]]) == 0
    out = capsys.readouterr().out
    assert "1 image item in column 'images'" in out
    assert "<|image_pad|> x 6<|vision_end|>" in out  # 2 x 3 patches of 28 x 28 pixels
    # The item is the text of the template, with the item's start and end tokens.
    title = next(line for line in out.splitlines() if line.startswith("row 0, rows.jsonl:1: "))
    assert " text, 8 media), " in title and title.endswith(" learned; image 56 x 84 pixels")
    assert "row 1, one: " in out and ", 0 media)" in out


def test_a_row_that_cannot_be_used_is_named(tokenizer, tmp_path, capsys):
    silent = {"messages": [{"role": "user", "content": "Hello."}]}
    file = write(tmp_path, silent, ROW)
    assert main(["data", "preview", file, "--model", tokenizer]) == 1
    out = capsys.readouterr().out
    assert "row 0 cannot be used" in out and "no label token" in out
    assert "row 1, one: " in out


def test_both_answers_of_a_preference_are_shown(tokenizer, tmp_path, capsys):
    prompt = ROW["messages"][:1]
    worse = {"role": "assistant", "content": "Who knows."}
    file = write(tmp_path, {"prompt": prompt, "chosen": [ANSWER], "rejected": [worse]})
    assert main(["data", "preview", file, "--model", tokenizer]) == 0
    out = capsys.readouterr().out
    assert "(chosen)" in out and "It is sunny." in out
    assert "(rejected)" in out and "Who knows." in out


def test_a_picture_can_be_saved(tokenizer, tmp_path, capsys):
    picture = tmp_path / "preview.svg"
    words = ["data", "preview", write(tmp_path, ROW), "--model", tokenizer, "--svg", str(picture)]
    assert main(words) == 0
    text = picture.read_text()
    assert text.startswith("<svg") and "sunny" in text and "http://www.w3.org" in text
    assert "https://" not in text.replace("https://www.textualize.io", "")


@pytest.mark.parametrize("words, sentence", [
    (["--rows", "0"], "--rows is 0; accepted: at least 1"),
    (["--model", "nowhere/at/all"], "--model is 'nowhere/at/all', which is not a local folder"),
])
def test_wrong_options_are_explained(words, sentence, tokenizer, tmp_path, capsys):
    given = ["data", "preview", write(tmp_path, ROW), "--model", tokenizer, *words]
    assert main(given) == 2
    assert sentence in capsys.readouterr().err


def test_media_need_a_model_that_takes_them(tokenizer, tmp_path, capsys):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    file = write(tmp_path, ROW | {"images": ["a.png"]})
    assert main(["data", "preview", file, "--model", tokenizer]) == 2
    assert "has items of image" in capsys.readouterr().err
