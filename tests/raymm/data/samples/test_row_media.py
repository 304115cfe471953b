"""Media in columns and in parts of messages: paths, bytes, base64, frames, and rejections."""

import base64
import io
import wave
from pathlib import Path

import pytest
from PIL import Image

from raymm.data.samples.folders import MediaFolders
from raymm.data.samples.headers import Limits
from raymm.data.samples.media import MediaBytes
from raymm.data.samples.rows import RowRules, parse_row
from raymm.errors import SampleError

FOLDERS = MediaFolders(Path("/data"))
PARTS = {"image": "image", "video": "video", "audio": "audio"}


def image_bytes() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (9, 7), (200, 10, 30)).save(file, "PNG")
    return file.getvalue()


def sound_bytes() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 16000, 0, "NONE", ""))
        sound.writeframes(bytes(200))
    return file.getvalue()


IMAGE, SOUND = image_bytes(), sound_bytes()
TEXT, SOUND_TEXT = base64.b64encode(IMAGE).decode(), base64.b64encode(SOUND).decode()
URI = f"data:image/png;base64,{TEXT}"


def parse(row, **rules):
    return parse_row(row, RowRules(**{"parts": PARTS, **rules}), FOLDERS, "row")


def of_parts(*parts, **rules):
    text = {"type": "text", "text": "what"}
    return parse({"messages": [{"role": "user", "content": [*parts, text]}]}, **rules)


def values(items):
    return [item.data if isinstance(item, MediaBytes) else item for item in items]


@pytest.mark.parametrize(("value", "expected"), [
    (None, []), ("", []), ([], []), ("a.png", ["/data/a.png"]),
    (["a.png", "b/c.png"], ["/data/a.png", "/data/b/c.png"]), (IMAGE, [IMAGE]),
    ({"bytes": IMAGE, "path": "a.png"}, [IMAGE]),
    ({"bytes": None, "path": "a.png"}, ["/data/a.png"]),
    ({"bytes": TEXT}, [IMAGE]), ({"bytes": TEXT.rstrip("=")}, [IMAGE]), (URI, [IMAGE]),
    (TEXT, [IMAGE]), ([TEXT, "a.png"], [IMAGE, "/data/a.png"]), ({"url": URI}, [IMAGE]),
    ({"url": "a.png"}, ["/data/a.png"]), ("file:///data/a.png", ["/data/a.png"]),
    ({"base64": TEXT, "path": None}, [IMAGE]),
])
def test_values_of_a_column(value, expected):
    for column in ("image", "images"):
        parsed = parse({"text": "a", column: value}, columns={"image": column})
        assert values(parsed.media.get("image", ())) == expected
        assert not parsed.inline and not parsed.unused


@pytest.mark.parametrize(("part", "kind", "expected"), [
    ({"type": "image", "image": "a.png"}, "image", "/data/a.png"),
    ({"type": "image", "image": "file:///data/a.png"}, "image", "/data/a.png"),
    ({"type": "image", "image": URI}, "image", IMAGE),
    ({"type": "image", "image": {"bytes": IMAGE, "path": None}}, "image", IMAGE),
    ({"type": "image", "image": IMAGE, "text": None}, "image", IMAGE),
    ({"type": "image", "path": "a.png"}, "image", "/data/a.png"),
    ({"type": "image", "url": "a.png"}, "image", "/data/a.png"),
    ({"type": "image", "base64": TEXT}, "image", IMAGE),
    ({"type": "image", "bytes": IMAGE, "path": "a.png"}, "image", IMAGE),
    ({"type": "image_url", "image_url": {"url": URI}}, "image", IMAGE),
    ({"type": "image_url", "image_url": "a.png"}, "image", "/data/a.png"),
    ({"type": "input_image", "image_url": URI}, "image", IMAGE),
    ({"type": "input_audio", "input_audio": {"data": SOUND_TEXT, "format": "wav"}}, "audio", SOUND),
    ({"type": "audio", "audio": "a.wav"}, "audio", "/data/a.wav"),
    ({"type": "audio_url", "audio_url": {"url": "a.wav"}}, "audio", "/data/a.wav"),
    ({"type": "video", "video": "a.mp4"}, "video", "/data/a.mp4"),
    ({"type": "video_url", "video_url": {"url": "a.mp4"}}, "video", "/data/a.mp4"),
    ({"type": "video", "video": ["a.png", URI]}, "video", ("/data/a.png", IMAGE)),
])
def test_items_of_parts_leave_placeholders(part, kind, expected):
    parsed = of_parts(part)
    (item,) = parsed.media[kind]
    item = tuple(values(item)) if isinstance(item, tuple) else values([item])[0]
    assert item == expected and parsed.inline == {kind}
    assert parsed.text.messages[0]["content"] == [{"type": kind}, {"type": "text", "text": "what"}]
    assert not parsed.unused


def test_items_of_parts_keep_their_order():
    messages = [
        {"role": "user", "content": [{"type": "image", "image": f"{n}.png"} for n in range(2)]},
        {"role": "assistant", "content": [{"type": "image", "image": "2.png"}]},
    ]
    assert parse({"messages": messages}).media["image"] == tuple(
        f"/data/{n}.png" for n in range(3)
    )


def test_rows_may_have_placeholders_and_items():
    parsed = of_parts(
        {"type": "image"}, {"type": "audio", "audio": "a.wav"}, columns={"image": "images"}
    )
    assert parsed.media == {"audio": ("/data/a.wav",)}
    row = {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}],
           "images": ["b.png"]}
    with pytest.raises(SampleError, match="column 'images' and in parts.*one of them"):
        parse(row, columns={"image": "images"})


def test_placeholder_numbers_must_match_their_items():
    places = [{"type": "image", "index": number} for number in (0, 1)]
    assert of_parts(*places).text.messages[0]["content"][:2] == [{"type": "image"}] * 2
    with pytest.raises(SampleError, match=r"content\[0\] has index 1"):
        of_parts(*places[::-1])


def test_parts_take_the_type_that_the_modality_names():
    parsed = of_parts({"type": "scan", "scan": "a.png"}, parts={"scan": "vision"})
    assert parsed.media == {"vision": ("/data/a.png",)}
    assert parsed.text.messages[0]["content"][0] == {"type": "scan"}
    with pytest.raises(SampleError, match=r"'image_url', but no modality accepts it.*\['scan'\]"):
        of_parts({"type": "image_url", "image_url": "a.png"}, parts={"scan": "vision"})


def test_keys_of_parts_that_nothing_uses_are_unused():
    url = {"url": "a.png", "detail": "high"}
    parsed = of_parts({"type": "image_url", "image_url": url, "max_pixels": 9})
    assert parsed.unused == {"detail", "max_pixels"}
    ignore = frozenset({"detail", "max_pixels"})
    assert not of_parts({"type": "image_url", "image_url": url}, ignore_columns=ignore).unused


@pytest.mark.parametrize("source", [
    lambda name: {"type": "image", "image": name}, lambda name: {"type": "image", "url": name},
    lambda name: {"type": "image_url", "image_url": {"url": name}},
    lambda name: {"type": "image", "image": {"path": name}},
    lambda name: {"type": "video", "video": ["a.png", name]},
])
@pytest.mark.parametrize("name", [
    "../secret.png", "/etc/passwd", "file:///etc/passwd", "file://../x", "sub/../../x",
    "https://a.b/c.png", "s3://bucket/c.png",
])
def test_parts_may_not_leave_the_folders(source, name):
    with pytest.raises(SampleError, match="media_folders"):
        of_parts(source(name))


@pytest.mark.parametrize("value", [TEXT, URI, {"bytes": TEXT}, {"url": URI}])
def test_limits_hold_for_base64(value):
    for size, fits in ((len(IMAGE), True), (len(IMAGE) // 2, False)):
        rules = {"limits": Limits(max_item_bytes=size), "columns": {"image": "images"}}
        if fits:
            assert values(parse({"text": "a", "images": value}, **rules).media["image"]) == [IMAGE]
            continue
        for row in ({"text": "a", "images": value}, {"messages": [
            {"role": "user", "content": [{"type": "image", "image": value}]}
        ]}):
            with pytest.raises(SampleError, match="max_item_bytes"):
                parse(row, **rules)


@pytest.mark.parametrize("text", [
    "a" * 64, "//server/share/folder/" + "x" * 42, "0123456789abcdef" * 4, "UklGRg" * 12,
    base64.b64encode(b"hello world, this is no medium at all, only some text").decode(),
])
def test_texts_that_only_look_like_base64_are_paths(text):
    rules = {"columns": {"image": "images"}}
    try:
        (item,) = parse({"text": "a", "images": text}, **rules).media["image"]
    except SampleError:
        return
    assert item == f"/data/{text}"


@pytest.mark.parametrize(("value", "message"), [
    ({"path": "", "bytes": None}, "neither 'bytes' nor 'path'"),
    ({"array": [0.1], "sampling_rate": 16000}, "dict with .'array', 'sampling_rate'"),
    ({"bytes": [1, 2]}, "'bytes' are list"), (5, "got int"), ([None], "got NoneType"),
    ({"bytes": "no base64!"}, "invalid base64"), ("file://", "an empty path"),
])
def test_values_that_are_not_items_are_refused(value, message):
    with pytest.raises(SampleError, match=message):
        parse({"text": "a", "images": value}, columns={"image": "images"})


def test_media_of_an_answer_of_a_pair_are_refused():
    answer = {"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}
    prompt = [{"role": "user", "content": "draw"}]
    with pytest.raises(SampleError, match="an answer has media"):
        parse({"prompt": prompt, "chosen": [answer], "rejected": [answer]})


def test_a_text_with_an_item_is_refused():
    with pytest.raises(SampleError, match=r"content\[0\] has type 'text' and 'image'; .*separate"):
        of_parts({"type": "text", "text": "a", "image": "a.png"})
