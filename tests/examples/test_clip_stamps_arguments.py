"""``examples/multiplexed/clip_stamps.py`` rejects unsupported input before it starts."""

import json

import pytest

from examples.multiplexed.clip_stamps import main


@pytest.mark.parametrize("options", [("--steps", "0"), ("--batch-size", "1"), ("--samples", "-1")])
def test_numbers(options, capsys):
    with pytest.raises(SystemExit):
        main(options)
    assert f"argument {options[0]}: is '{options[1]}'; accepted" in capsys.readouterr().err


def test_larger_batches_than_pairs(tmp_path):
    rows = [
        {"images": [f"{i}.png"], "messages": [{"content": f"picture {i}"}]} for i in range(3)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit, match="--batch-size is 4, but 3 pairs were read"):
        main(["--data", str(tmp_path), "--batch-size", "4"])
