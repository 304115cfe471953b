"""Examples in the table of row forms are read as described."""

import json
import re

import pytest

from raymm.data.readers import open_source
from raymm.data.readers.detect import detect
from raymm.data.samples.row_forms import FORMS
from tests.docs.pages import ROOT

ROW = re.compile(r"^\| `(\w+)` \| .*? \| (`\{.*`) \|$", re.M)
PAGE = (ROOT / "docs" / "own-data.md").read_text()
EXAMPLES = {
    name: "".join(re.findall(r"`(.*?)`", cell)) for name, cell in ROW.findall(PAGE)
}
SUNNY = {"role": "assistant", "content": "It is sunny."}


def chat(*turns):
    return [
        {"role": ("user", "assistant")[number % 2], "content": turn}
        for number, turn in enumerate(turns)
    ]


# Results of the examples according to the text around them.
BECOMES = {
    "messages": chat("What is in the picture?", "A red circle."),
    "conversations": chat("What is in the picture?", "A red circle."),
    "alpaca": chat("Translate to French.\nGood morning.", "Bonjour."),
    "query_response": chat(
        "Hello.", "Hello. What can I do?", "How is the weather in Paris?", "It is sunny."
    ),
    "prompt_completion": "The weather in Paris is sunny.",
    "preference": "How is the weather? Sunny in Paris.",
    "text": "The weather in Paris is sunny.",
}


def test_the_table_has_every_row_form():
    assert list(EXAMPLES) and set(EXAMPLES) == set(FORMS) == set(BECOMES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_read_as_its_form(name, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(json.loads(EXAMPLES[name])) + "\n")
    detected = detect(file)
    assert detected.forms == {name: 1} and not detected.unused
    sample = open_source(file, "json")[0]
    assert (sample.messages or sample.text) == BECOMES[name]
    if name == "prompt_completion":
        assert sample.text[sample.prompt_characters :] == " sunny."


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_three_lines(name):
    cell = next(cell for form, cell in ROW.findall(PAGE) if form == name)
    assert cell.count("<br>") == 2
