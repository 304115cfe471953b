"""The README's Python examples run as they stand, and do what the text around them says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TRAINING, MASKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
# What the second example is given: a model folder and some tokens.
GIVEN = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

folder, input_ids = "tiny", torch.arange(1000)[None] % 61
tiny = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2)
LlamaForCausalLM(LlamaConfig(vocab_size=61, **tiny)).save_pretrained(folder)
"""
# A change of the first document changes its outputs and none of the second's.
CHECK = """
with torch.no_grad():
    before = model(input_ids, raymm_mask=mask).logits
    input_ids[0, 3] += 1
    after = model(input_ids, raymm_mask=mask).logits
same = (before == after).all(dim=-1)[0]
print("hidden", bool(same[600:].all()), "seen", bool((~same[300:600]).all()))
"""


def run(code: str, folder: Path) -> str:
    script = folder / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ray
def test_the_training_example(tmp_path):
    lines = run(TRAINING, tmp_path).splitlines()
    losses = [float(line.split()[1]) for line in lines if line[:1].isdigit()]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_the_mask_example(tmp_path):
    assert "hidden True seen True" in run(GIVEN + MASKS + CHECK, tmp_path)
    assert (tmp_path / "mask.png").stat().st_size > 5_000
