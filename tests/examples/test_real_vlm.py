"""VLM that the example assembles, from its pretrained parts if they are cached.

Otherwise it uses small replacements.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    EfficientNetModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from examples.alignment import efficientnet_lite
from examples.alignment.cache import Cache, default_root
from examples.alignment.prepare import DATA_STEPS, MODEL_STEPS
from examples.vlm import check_run, check_step, efficientnet, real
from examples.vlm.real import IMAGE_TOKEN, assemble
from examples.vlm.stamp_questions import SIDE, kind_of, write_questions
from raymm.cli.main import main
from raymm.config.sections import load_config
from raymm.monitor.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "examples/vlm/real.yaml")
TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PICTURES = {
    "animals/birds/hen": "A hen.", "animals/mammals/cat": "A cat.", "food/fruit/fig": "A fig.",
    "symbols/alphabets/a": "The letter a.", "symbols/chess/rook": "A rook.",
    "town/flags/red": "A red flag.",
}  # fmt: skip


def lite(size: int):
    """Return the plain module with non-initial weights and statistics, and transformers' version.
    """
    module = efficientnet_lite.build().eval()
    random = torch.Generator().manual_seed(1)
    for name, tensor in module.state_dict().items():
        if "running_var" in name:
            tensor.uniform_(0.5, 1.5, generator=random)
        elif "running_mean" in name or name.endswith("bias"):
            tensor.normal_(0, 0.2, generator=random)
    tower = EfficientNetModel(efficientnet.config(size)).eval()
    tower.load_state_dict(efficientnet.state_dict(module.state_dict(), size))
    return module, tower


def test_the_transformers_class_equals_the_plain_module():
    module, tower = lite(96)
    pixels = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        due, found = module(pixels), tower(pixels).last_hidden_state
    assert due.shape == (2, efficientnet.WIDTH, 3, 3) and due.std() > 0.1
    assert (found - due).norm() <= 1e-6 * due.norm()
    state = dict(module.state_dict())
    del state["blocks.3.bn1.weight"]
    with pytest.raises(ValueError, match="blocks.3.depthwise_conv.depthwise_norm.weight.*None"):
        efficientnet.state_dict(state, 96)


def test_a_folder_of_something_else_is_not_ready(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    assert real.main(["--to", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "has no model/config.json, train.jsonl, heldout.jsonl, images" in said
    for name in real.FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert real.main(["--to", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return a cache as ``examples.alignment.prepare`` fills it, with a small model and few stamps.
    """
    root = tmp_path_factory.mktemp("cache")
    tokenizer = Tokenizer(models.BPE(
        {letter: i for i, letter in enumerate(
            [*TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        )}, [],
    ))  # fmt: skip
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=TOKENS[0], eos_token=TOKENS[2],
        extra_special_tokens=list(TOKENS),
    )
    language = root / "models/smollm2-135m"
    fast.save_pretrained(language)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0,
        eos_token_id=2, bos_token_id=1, initializer_range=0.2,
    )).save_pretrained(language)  # fmt: skip
    vision = root / "models/efficientnet-lite0"
    vision.mkdir()
    save_file(lite(96)[0].state_dict(), vision / "model.safetensors")
    stamps = root / "data/stamps"
    for number, name in enumerate(PICTURES):
        (stamps / f"images/{name}.png").parent.mkdir(parents=True, exist_ok=True)
        colour = (40 * number, 90, 200 - 30 * number, 128)
        Image.new("RGBA", (300, 100 + number), colour).save(stamps / f"images/{name}.png")
    rows = [{
        "id": f"image/{name}", "images": [f"images/{name}.png"], "audio": [],
        "messages": [
            {"role": "user", "content": "?"}, {"role": "assistant", "content": caption},
        ],
    } for name, caption in PICTURES.items()]  # fmt: skip
    rows.append({**rows[0], "id": "both/animals/birds/hen"})
    for split, own in (("train", rows), ("heldout", rows[1:4])):
        (stamps / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    assemble(root, root / "vlm/model")
    assert write_questions(stamps, root / "vlm") == {"train": 12, "heldout": 6}
    return root


def test_questions_have_small_pictures_over_white(cache):
    rows = [json.loads(line) for line in (cache / "vlm/train.jsonl").read_text().splitlines()]
    answers = {row["id"]: row["messages"][-1]["content"] for row in rows}
    assert answers["kind/symbols/alphabets/a"] == "letter"
    assert answers["kind/symbols/chess/rook"] == "symbol"
    assert answers["caption/food/fruit/fig"] == "A fig."
    with Image.open(cache / "vlm" / rows[0]["images"][0]) as picture:
        assert picture.mode == "RGB" and picture.size[0] == SIDE
        assert picture.getpixel((0, 0)) == (127, 172, 227)  # half of it is white
    with pytest.raises(ValueError, match="no kind of 'weather/rain.png'"):
        kind_of("weather/rain.png")


def test_the_folder_is_one_of_transformers(cache):
    folder = cache / "vlm/model"
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    language = LlamaForCausalLM.from_pretrained(cache / "models/smollm2-135m").eval()
    processor = AutoProcessor.from_pretrained(folder)
    ids = torch.tensor([[5, 9, 40, 7]])
    with torch.no_grad():
        due, found = language(ids).logits, model(input_ids=ids).logits
    assert torch.equal(found[..., : due.shape[-1]], due) and found.shape[-1] % 128 == 0
    image = Image.new("RGB", (80, 40), "red")
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a?"}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert text == f"<|im_start|>user\n{IMAGE_TOKEN}a?<|im_end|>\n<|im_start|>assistant\n"
    inputs = processor(text=text, images=[image], return_tensors="pt")
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == 25
    with torch.no_grad():
        seen = model(**inputs).logits
        other = model(**{**inputs, "pixel_values": -inputs["pixel_values"]}).logits
    assert not torch.equal(seen[:, -1], other[:, -1])


def settings(tmp_path, steps: int, **own: object) -> list[str]:
    values = {
        "run.storage_path": tmp_path / "run", "run.steps": steps, "run.precision": "fp32",
        "parallel.language_model.layers": [2, 2], "data.batch_size": 8, "run.eval_every": 2,
        "run.checkpoint_every": 2, "run.evaluate.every": 4, "optimizer.lr": 3e-3,
        "optimizer.warmup_steps": 0, "resources.cpus": 0.1, **own,
    }
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


@pytest.mark.sweep
def test_the_vlm_is_trained_resumed_and_exported(
    cache, tmp_path, monkeypatch, capsys, ray_cluster
):
    monkeypatch.setenv("RAYMM_CACHE", str(cache))
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(["train", CONFIG, *settings(tmp_path, 2)]) == 0
    assert main(["train", CONFIG, *settings(tmp_path, 6)]) == 0
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert main(["export", CONFIG, *settings(tmp_path, 6), "--out", str(out)]) == 0
    config = load_config(CONFIG, settings(tmp_path, 6)[1::2])
    capsys.readouterr()
    assert list(check_run.export_problems(config, out)) == []
    assert "6 of 6 held-out samples are the checkpoint's bit for bit" in capsys.readouterr().out
    found = list(check_run.run_problems(config))
    assert found == ["no more answers are right than the most common ones would be"]
    assert "kind 0.0% (the most common answer: 33.3%)" in capsys.readouterr().out
    with Image.open(run / "answers.png") as picture:
        assert picture.size == (1638, 1352)
    before = load_file(cache / "vlm/model/model.safetensors")
    after = load_file(out / "model.safetensors")
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert any("projector" in name for name in changed) and len(changed) > 10
    assert not any("vision" in name for name in changed)
    after["model.multi_modal_projector.linear_2.bias"] += 1e-6
    save_file(after, out / "model.safetensors", {"format": "pt"})
    assert list(check_run.export_problems(config, out)) == [
        "logits of 6 held-out samples are not the checkpoint's"
    ]


@pytest.mark.cells(1)
@pytest.mark.parametrize("vision", ["{ranks: [0]}", "{ranks: [0, 1], pp: 2}"])
def test_a_step_is_that_of_one_process(vision, cache, tmp_path, monkeypatch, capsys, ray_cluster):
    monkeypatch.setenv("RAYMM_CACHE", str(cache))
    own = settings(tmp_path, 1, **{"parallel.encoders.vision": vision})
    assert check_step.main([CONFIG, *own]) == 0
    assert "the worst differs by" in capsys.readouterr().out


def test_shares_of_right_answers():
    texts = [
        {"id": f"{question}/{n}", "text": text, "answer": answer}
        for n, (question, text, answer) in enumerate([
            ("kind", "food", "food"), ("kind", "food", "animal"), ("kind", "food", "animal"),
            ("caption", "A hen.", "A hen."),
        ])
    ]  # fmt: skip
    right, common = check_run._shares(texts)
    assert right == {"caption": 1.0, "kind": pytest.approx(1 / 3), "all": 0.5}
    assert common == {"caption": 1.0, "kind": pytest.approx(2 / 3), "all": 0.75}


STEPS = (DATA_STEPS["stamps"], *MODEL_STEPS[:2])
PREPARED = Cache(default_root())


@pytest.mark.system
@pytest.mark.skipif(
    not all(PREPARED.holds(step.name, step.recipe()) for step in STEPS),
    reason="the cache has no pretrained weights: `make train` fetches them",
)
def test_the_pretrained_parts_are_unchanged(tmp_path):
    """Check also the exported folder, loaded by transformers alone."""
    assemble(PREPARED.root, tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").eval()
    language = LlamaForCausalLM.from_pretrained(PREPARED.root / "models/smollm2-135m").eval()
    eyes = efficientnet_lite.build().eval()
    eyes.load_state_dict(load_file(PREPARED.root / "models/efficientnet-lite0/model.safetensors"))
    picture = PREPARED.root / "data/stamps/images/animals/birds/hen.png"
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    ids = processor.tokenizer("A picture is worth", return_tensors="pt")["input_ids"]
    pixels = processor.image_processor(Image.open(picture), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        due, found = language(ids).logits, model(input_ids=ids).logits
        seen, features = eyes(pixels), model.model.vision_tower(pixels).last_hidden_state
    assert torch.equal(found[..., : due.shape[-1]], due)
    assert (features - seen).norm() <= 1e-5 * seen.norm()
