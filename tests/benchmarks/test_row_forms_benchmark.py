"""Rows of every form equal those of transformers; the reference's labels are TRL's."""

import pytest
import transformers

from benchmarks.row_forms import WRONG, applies, check, load
from benchmarks.shared.row_cases import CLIP, Media, cases
from benchmarks.shared.row_models import TARGETS
from benchmarks.shared.row_reference import IGNORED, CannotRenderError, reference, trl_mask
from benchmarks.shared.templates import SHAPES

# Rows that are read for every target; the others for two of them.
FOR_ALL = (
    "messages | none | jsonl", "conversations from/value | none | jsonl",
    "prompt/completion messages | none | jsonl", "prompt/completion texts | none | jsonl",
    "loss flag | none | jsonl", "assistant first", "two user turns",
    "tools, content null | none | jsonl", "thoughts in several turns | none | jsonl",
    "images: list, two turns", "images: list, three turns", "images: in an assistant's turn",
    "images: literal mark",
    "images: mark in the middle", "part image: path | jsonl", "images and videos",
    "audios: list, mark",
)
FULL = ("qwen3_5", "qwen3 (tokenizer)")
# TRL's template has other tokens: it writes thoughts in every turn, or a role at the end.
REWRITTEN = ("glm4moe (tokenizer)",)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return a folder with media, and the cases whose rows name them."""
    transformers.logging.set_verbosity_error()
    folder = tmp_path_factory.mktemp("rows")
    return folder, list(cases(Media(folder)))


@pytest.fixture(scope="module")
def models(rows):
    """Return processors and tokenizers by the name of their target, loaded once."""
    loaded = {}

    def get(name):
        if name not in loaded:
            loaded[name] = load(TARGETS[name], rows[0] / "models" / name)
        return loaded[name]

    return get


@pytest.mark.cells(10)
@pytest.mark.parametrize("name", TARGETS)
def test_rows_are_equal_to_the_reference(name, rows, models):
    folder, every = rows
    target = TARGETS[name]
    chosen = [
        case for case in every
        if applies(case, target) and (name in FULL or any(text in case.name for text in FOR_ALL))
    ]
    assert len(chosen) > 4
    cells = {case.name: check(case, target, models(name), folder) for case in chosen}
    assert not {name: cell for name, cell in cells.items() if cell.outcome == WRONG}


def test_there_are_sixty_forms_of_rows(rows):
    assert len({case.name for case in rows[1]}) >= 60
    assert {case.form for case in rows[1]} > {"messages", "alpaca", "query/response", "text"}


@pytest.mark.parametrize("name", [
    name for name, target in TARGETS.items()
    if SHAPES[target.shape].training is not None and not target.training
])
def test_labels_of_the_reference_are_those_of_trl(name, rows, models):
    target, processor = TARGETS[name], models(name)
    tokenizer, shape = getattr(processor, "tokenizer", processor), SHAPES[target.shape]
    compared = 0
    for case in rows[1]:
        if not applies(case, target) or "video" in case.kinds or case.file != "jsonl":
            continue
        for row in case.expected[-1:]:
            try:
                due = reference(processor, target.shape, shape, row, CLIP)
            except CannotRenderError:
                continue
            mask = trl_mask(processor, row, shape, {})
            ids = due["input_ids"][0].tolist()
            if mask is None or list(map(int, mask[0])) != ids:
                continue
            # TRL learns items; white space at the ends of a turn depends on the template.
            texts = [
                "".join(tokenizer.decode([i for i in labels if i != IGNORED]).split())
                for labels in (due["labels"][0].tolist(), map(int, mask[1]))
            ]
            if case.media != "images: in an assistant's turn":
                assert texts[0] == texts[1], case.name
                compared += 1
    assert compared > 10 or name in REWRITTEN
