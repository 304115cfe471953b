"""Captions, transcripts, questions and the split."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.alignment.easy_vqa import choose_question, describe
from examples.alignment.samples import (
    KINDS,
    Sample,
    group_key,
    hash_choice,
    hash_fraction,
    split,
    write_splits,
)
from examples.alignment.stamps import parse_captions, parse_transcripts


def test_captions_by_language():
    text = (
        "\ufeffA  zebra.\r\nfr.utf8=Un zèbre.\nca@valencia.utf8= Una zebra. \n\nde.utf8=\nnoise\n"
    )
    assert parse_captions(text) == {
        "en": "A zebra.",
        "fr": "Un zèbre.",
        "ca@valencia": "Una zebra.",
    }
    assert parse_captions("") == {}
    assert parse_captions("\nfr.utf8=Un zèbre.\n") == {"fr": "Un zèbre."}


def test_transcripts_leave_out_other_sounds():
    text = (
        "; Core sounds: English\n\nvm-press: press\nbeep: [a beep]\nsilence/1: (1 second)\n"
        "join: <beep>\ndir-multi2: ... for ...\nletters/slash: slash [/]\n"
        "at-tone:  At the tone,  the time: noon\ndots: ...\n"
    )
    assert parse_transcripts(text) == {
        "vm-press": "Press",
        "dir-multi2": "For",
        "letters/slash": "Slash",
        "at-tone": "At the tone, the time: noon",
    }


def _mixture(captions: list[str]) -> list[Sample]:
    samples = []
    for i, caption in enumerate(captions):
        samples += [
            Sample(f"image/{i}", caption, "What?", caption, (f"{i}.png",)),
            Sample(f"both/{i}", caption.upper(), "What?", caption, (f"{i}.png",), (f"{i}.ogg",)),
            Sample(f"speech/{i}", caption.rstrip("."), "What?", caption, (), (f"{i}.ogg",)),
            Sample(f"text/{i}", f" {caption}", "What?", caption),
        ]
    return samples


@given(st.lists(st.text(min_size=1, max_size=12), max_size=40))
def test_no_caption_is_in_both_splits(captions):
    samples = _mixture(captions)
    train, heldout = split(samples)
    assert sorted(s.id for s in (*train, *heldout)) == sorted(s.id for s in samples)
    assert not {group_key(s.group) for s in train} & {group_key(s.group) for s in heldout}
    # neither the order nor the other samples matter
    assert split(reversed(samples)) == (train, heldout)
    assert {s.id for s in split(samples[: len(samples) // 2])[1]} <= {s.id for s in heldout}


def test_held_out_fraction_and_shuffle():
    train, heldout = split(_mixture([f"Caption {i}." for i in range(2000)]))
    assert 0.09 < len(heldout) / 8000 < 0.13
    assert {s.kind for s in train} == {s.kind for s in heldout} == set(KINDS)
    assert [s.kind for s in train[:50]] != sorted(s.kind for s in train[:50])


def test_repeated_id_is_refused():
    with pytest.raises(ValueError, match="'a' is not unique"):
        split([Sample("a", "x", "q", "x"), Sample("a", "y", "q", "y")])


def test_rows_follow_the_columns(tmp_path):
    (tmp_path / "a.png").touch()
    (tmp_path / "b.ogg").touch()
    both = Sample("1", "é", "What?", "é", ("a.png",), ("b.ogg",))
    text = Sample("2", "x", "Why?", "x")
    counts = write_splits(tmp_path, [both, text], [text], ["text"])
    assert counts == {"train": {"both": 1, "text": 1}, "heldout": {"text": 1}}
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert rows[0] == {
        "id": "1",
        "messages": [
            {"role": "user", "content": "What?"},
            {"role": "assistant", "content": "é"},
        ],
        "images": ["a.png"],
        "audio": ["b.ogg"],
    }
    assert rows[1]["images"] == rows[1]["audio"] == []


def test_unusable_splits_are_refused(tmp_path):
    text = Sample("2", "x", "Why?", "x")
    with pytest.raises(ValueError, match="heldout has no image samples"):
        image = Sample("1", "x", "q", "x", ("a.png",))
        (tmp_path / "a.png").touch()
        write_splits(tmp_path, [image, text], [text], ["image", "text"])
    with pytest.raises(ValueError, match="sample '3': no file 'gone.png'"):
        write_splits(tmp_path, [Sample("3", "x", "q", "x", ("gone.png",))], [], ["image"])


def test_hash_draws_are_fixed_and_spread():
    values = [hash_fraction(str(i)) for i in range(1000)]
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / 1000 - 0.5) < 0.05
    assert {hash_choice("abc", str(i)) for i in range(50)} == set("abc")
    assert hash_fraction("a") == hash_fraction("a")


def test_easy_vqa_descriptions_and_choice():
    questions = [
        ("what is the green shape?", "circle"),
        ("is there a red shape?", "no"),
        ("is there a triangle?", "no"),
    ]
    assert describe(questions) == "a green circle"
    assert describe(questions[1:]) is None
    assert choose_question(questions[1:], "p") in questions
    chosen = [choose_question(questions, str(i))[1] for i in range(400)]
    assert 0.75 < chosen.count("circle") / 400 < 0.92  # 3/4, and 1/3 of the rest
