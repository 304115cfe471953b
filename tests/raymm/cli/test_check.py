"""Output and exit codes of ``raymm check``."""

import pytest
import torch

from tests.raymm.storage.test_inspection import stored


def test_a_whole_checkpoint_has_a_line_with_its_size(tmp_path, raymm):
    for step in (1, 2):
        stored(tmp_path / "checkpoints" / f"step-0000000{step}", {"llm/a": torch.zeros(2**18)})
    code, text = raymm("check", str(tmp_path))
    newest, oldest = text.splitlines()
    assert code == 0 and {newest.split()[0], oldest.split()[0]} == {"whole"}
    assert newest.endswith("step 2, 1 tensors in 1 file, 1.0 MB") or oldest.endswith(
        "step 2, 1 tensors in 1 file, 1.0 MB"
    )


def test_a_comparison_shows_the_largest_differences(tmp_path, raymm):
    names = [f"llm/{number:02d}" for number in range(22)]
    first = {name: torch.ones(4) for name in names}
    second = {name: torch.ones(4) + number for number, name in enumerate(names)}
    first["llm/gone"] = second["llm/shape"] = torch.ones(2)
    folders = [
        stored(tmp_path / f"step-0000000{step}", tensors)
        for step, tensors in ((1, first), (2, second))
    ]
    code, text = raymm("check", str(folders[0]), "--against", str(folders[1]))
    assert code == 1
    assert "1 tensors are the same; 21 differ; 1 are in the first only, 1 in the second" in text
    assert f"only in {folders[0]}: llm/gone" in text
    assert "llm/21" in text and "llm/02" in text and "llm/01" not in text  # 20 are shown
    assert raymm("check", str(folders[0]), "--against", str(folders[0]))[0] == 0


@pytest.mark.parametrize("arguments, words", [
    (["nowhere"], "has no checkpoint; expected the folder of a run"),
    (["s3:bucket"], "location is 's3:bucket'"),
    (["runs/x", "--keep", "0"], "--keep is 0; expected at least 1"),
    (["runs/x/checkpoints/step-00000001", "--keep", "1"], "--keep needs a run's folder"),
])
def test_refusals(raymm, arguments, words):
    code, text = raymm("check", *arguments)
    assert code == 2 and words in " ".join(text.split()), text
