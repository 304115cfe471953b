"""``examples/planning/imagebind.py`` plans and draws as described."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.system
def test_six_towers_are_mapped_and_drawn(tmp_path):
    picture = tmp_path / "runs" / "imagebind" / "mapping.png"
    done = subprocess.run(
        [sys.executable, ROOT / "examples/planning/imagebind.py", "--gpus", "2", "--batch", "8"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for tower in ("image", "text", "audio", "depth", "thermal", "imu"):
        assert f" {tower} " in done.stdout
    assert "multiplexed (estimates)" in done.stdout
    with Image.open(picture) as image:
        assert image.width > 800
