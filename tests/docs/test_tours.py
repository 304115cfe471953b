"""Guided tours have the functions in order, and pictures that show them."""

import re

import pytest

from tests.house import ROOT
from tests.tour_picture import TOURS, drawing, picture, sections


def page(tour):
    return (ROOT / "docs" / f"{tour}.md").read_text()


@pytest.mark.parametrize("tour", TOURS)
def test_a_picture_shows_the_functions_of_its_page(tour):
    assert picture(tour).read_text() == drawing(page(tour)), "run python -m tests.tour_picture"
    assert f"](images/{tour}.svg)" in page(tour)


@pytest.mark.parametrize("tour", TOURS)
def test_every_numbered_item_begins_with_a_function(tour):
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", page(tour), re.M)]
    functions = [name for section in sections(page(tour)) for name in section.functions]
    assert numbers == list(range(1, len(functions) + 1)) and len(numbers) > 20


@pytest.mark.parametrize("tour", TOURS)
def test_numbers_that_pages_refer_to_exist(tour):
    for other, number in re.findall(r"\]\((a-\w+)\.md\),\s+function (\d+)", page(tour)):
        assert f"\n{number}. [`" in page(other)


def test_a_section_has_the_process_of_its_heading():
    text = (
        "## Notes\n1. [`of_no_section`](x.py) is left out.\n## Driver: asks\n"
        "2. [`First.ask`](x.py) calls [`second`](x.py).\n\n## Each rank: answers\n"
        "3. [`third`](x.py) ends.\n## Driver: rests\nNothing.\n"
    )
    assert sections(text) == [
        ("Driver", "asks", ["First.ask"]), ("Each rank", "answers", ["third"]),
    ]
    assert drawing(text).count('class="arrow"') == 1
