"""Rows, media and files in all supported forms, each with a conversion written by hand."""

from __future__ import annotations

import base64
import gzip
import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow
import soundfile
from PIL import Image
from pyarrow import parquet

from benchmarks.shared.row_reference import Expected

SOUND_RATE = 16_000
# The clip: frames, frames per second, frames per second of an item, and indices of those frames.
CLIP_FRAMES, CLIP_RATE, ITEM_RATE = 16, 8, 2
ITEM_FRAMES = (0, 4, 8, 12)
CLIP = {
    "do_sample_frames": False,
    "video_metadata": [{
        "total_num_frames": CLIP_FRAMES, "fps": float(CLIP_RATE),
        "duration": CLIP_FRAMES / CLIP_RATE, "height": 64, "width": 96,
        "frames_indices": list(ITEM_FRAMES),
    }],
}  # fmt: skip
TOOL = {"type": "function", "function": {
    "name": "weather", "description": "Weather of a city.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
    },
}}  # fmt: skip
_CALL = {"id": "call00001", "type": "function",
         "function": {"name": "weather", "arguments": {"city": "Paris"}}}
_MARK = "<image>"

Turn = tuple[str, Any]
Value = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Rows of one form, with media of one form, in files of one form.

    Attributes:
        form, media, file: names of the three; together they name the case.
        needs: required features of the template (``"tools"``, ``"thinks"``) or of the model
            (``"tokenizer"`` for text alone, ``"processor"`` for media).
        config: additional values of the section ``data``.
    """

    form: str
    media: str
    file: str
    rows: Sequence[Value]
    expected: Sequence[Expected]
    needs: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the three names, joined."""
        return f"{self.form} | {self.media} | {self.file}"

    @property
    def kinds(self) -> set[str]:
        """Return the kinds of the media items."""
        return {
            part["type"] for row in self.expected for message in row.messages or ()
            if isinstance(message.get("content"), list) for part in message["content"]
        } - {"text"}


class Media:
    """Pictures, a clip and sounds, written to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        random = np.random.default_rng(0)
        self.pictures = {"a.png": (96, 96), "b.png": (128, 80)}
        for name, (width, height) in self.pictures.items():
            pixels = random.integers(0, 255, (height // 8, width // 8, 3), np.uint8)
            Image.fromarray(pixels).resize((width, height)).save(folder / name)
        for number, name in enumerate(("a.wav", "b.wav")):
            times = np.arange(SOUND_RATE * (number + 1) // 4) / SOUND_RATE
            soundfile.write(folder / name, np.sin(2765 * times) / 2, SOUND_RATE)
        with av.open(str(folder / "clip.mp4"), "w") as container:
            stream: Any = container.add_stream("libx264", rate=CLIP_RATE)
            stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
            for number in range(CLIP_FRAMES):
                pixels = np.full((64, 96, 3), number * 15, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())

    def bytes(self, name: str) -> bytes:
        """Return the content of a file."""
        return (self.folder / name).read_bytes()

    def text(self, name: str) -> str:
        """Return a file in Base64."""
        return base64.b64encode(self.bytes(name)).decode()

    @cache  # noqa: B019  one object per run
    def item(self, name: str) -> dict[str, Any]:
        """Return a message part with a file's decoded item."""
        if name.endswith(".png"):
            return {"type": "image", "image": Image.open(self.folder / name).convert("RGB")}
        if name.endswith(".wav"):
            samples, _ = soundfile.read(self.folder / name, dtype="float32")
            return {"type": "audio", "audio": samples}
        with av.open(str(self.folder / name)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return {"type": "video", "video": np.stack([frames[index] for index in ITEM_FRAMES])}


def convert(turns: Sequence[Turn], items: Sequence[dict[str, Any]] = ()) -> list[Value]:
    """Convert turns to messages; ``<image>`` in a text becomes the next item.

    Args:
        turns: (role, text) pairs.
    """
    left, messages = list(items), []
    for role, text in turns:
        pieces = text.split(_MARK)
        if len(pieces) == 1:
            messages.append({"role": role, "content": text})
            continue
        parts: list[Value] = []
        for number, piece in enumerate(pieces):
            parts += [left.pop(0)] if number else []
            parts += [{"type": "text", "text": piece}] if piece else []
        messages.append({"role": role, "content": parts})
    assert not left, "items without a place"
    return messages


# Forms of rows: turns -> columns. Texts may contain marks.
_NAMES = {"user": "human", "assistant": "gpt", "system": "system"}


def _messages(turns: Sequence[Turn]) -> Value:
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def _parts(turns: Sequence[Turn]) -> Value:
    messages = []
    for role, text in turns:
        pieces, parts = text.split(_MARK), []
        for number, piece in enumerate(pieces):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": piece}] if piece else []
        messages.append({"role": role, "content": parts})
    return {"messages": messages}


def _json_string(turns: Sequence[Turn]) -> Value:
    return {"messages": json.dumps(_messages(turns)["messages"])}


def _sharegpt(turns: Sequence[Turn]) -> Value:
    return {"conversations": [{"from": _NAMES[role], "value": text} for role, text in turns]}


def _conversations(turns: Sequence[Turn]) -> Value:
    return {"conversations": _messages(turns)["messages"]}


def _alpaca(turns: Sequence[Turn]) -> Value:
    (_, asked), (_, answer) = turns
    return {"instruction": asked, "output": answer}


def _query(turns: Sequence[Turn]) -> Value:
    *history, (_, asked), (_, answer) = turns
    pairs = [[history[i][1], history[i + 1][1]] for i in range(0, len(history), 2)]
    return {"query": asked, "response": answer} | ({"history": pairs} if pairs else {})


def _completion(turns: Sequence[Turn]) -> Value:
    messages = _messages(turns)["messages"]
    return {"prompt": messages[:-1], "completion": messages[-1:]}


FORMS: dict[str, Callable[[Sequence[Turn]], Value]] = {
    "messages": _messages, "messages of parts": _parts, "messages as JSON": _json_string,
    "conversations from/value": _sharegpt, "conversations role/content": _conversations,
    "alpaca": _alpaca, "query/response": _query, "prompt/completion messages": _completion,
}  # fmt: skip
_ONE: tuple[Turn, ...] = (("user", "How is the weather in Paris?"), ("assistant", "It is sunny."))
_TWO = (("user", "Hello."), ("assistant", "Hello. What is it?"), *_ONE)
_SYSTEM = (("system", "Let me think."), *_ONE)
_SHORT = ("alpaca",)  # forms with one question and one answer


# Files: rows -> path to open.
def _lines(rows: Sequence[Value]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _zst(data: bytes) -> bytes:
    target = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(target, "zstd") as stream:
        stream.write(data)
    return target.getvalue().to_pybytes()


def _parquet(rows: Sequence[Value]) -> bytes:
    target = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), target)
    return target.getvalue()


_WRITERS: dict[str, Callable[[Sequence[Value]], Mapping[str, bytes]]] = {
    "jsonl": lambda rows: {"rows.jsonl": _lines(rows)},
    "jsonl, blank lines and BOM": lambda rows: {
        "rows.jsonl": b"\xef\xbb\xbf" + _lines(rows).replace(b"\n", b"\n\n") + b"  \n",
    },
    "JSON array": lambda rows: {"rows.json": json.dumps(list(rows), indent=2).encode()},
    "JSON array on one line": lambda rows: {"rows.json": json.dumps(list(rows)).encode()},
    "jsonl.gz": lambda rows: {"rows.jsonl.gz": gzip.compress(_lines(rows))},
    "jsonl.zst": lambda rows: {"rows.jsonl.zst": _zst(_lines(rows))},
    "json.gz": lambda rows: {"rows.json.gz": gzip.compress(json.dumps(list(rows)).encode())},
    "folder of jsonl": lambda rows: {
        f"rows/{number}.jsonl": _lines([row]) for number, row in enumerate(rows)
    },
    "folder of JSON arrays": lambda rows: {
        f"rows/{number}.json": json.dumps([row]).encode() for number, row in enumerate(rows)
    },
    "parquet": lambda rows: {"rows.parquet": _parquet(rows)},
    "folder of parquet": lambda rows: {
        f"rows/{number}.parquet": _parquet([row]) for number, row in enumerate(rows)
    },
}  # fmt: skip
FILES = tuple(_WRITERS)


def write(case: Case, folder: Path) -> Path:
    """Write the rows of a case into a folder that has the media; return the path to open."""
    first = None
    for name, data in _WRITERS[case.file](case.rows).items():
        path = folder / name
        if not path.parent.is_dir():  # a folder of rows contains their media
            path.parent.mkdir()
            for file in folder.glob("*.png"):
                shutil.copy(file, path.parent)
        path.write_bytes(data)
        first = first or path
    assert first is not None
    return first if first.parent == folder else first.parent


def cases(media: Media) -> Iterator[Case]:
    """Yield all cases.

    Args:
        media: files that rows name, in the folder of the rows.
    """
    yield from _text_forms()
    yield from _special_forms()
    yield from _pictures(media)
    yield from _other_media(media)


def _case(form: str, file: str, *conversations: Sequence[Turn]) -> Case:
    return Case(
        form, "none", file, [FORMS[form](turns) for turns in conversations],
        [_expected(form, turns) for turns in conversations],
    )


def _expected(form: str, turns: Sequence[Turn], items: Sequence[Value] = ()) -> Expected:
    """Convert turns; in a prompt with a completion, only the completion is learned."""
    replies = sum(role == "assistant" for role, _ in turns)
    learned = (False,) * (replies - 1) + (True,) if form.startswith("prompt/completion") else None
    return Expected(convert(turns, items), learned=learned)


def _text_forms() -> Iterator[Case]:
    for form in FORMS:
        yield _case(form, "jsonl", *((_ONE,) if form in _SHORT else (_ONE, _TWO)))
    for form in ("messages", "conversations from/value", "messages of parts"):
        yield Case(
            f"{form}, system", "none", "jsonl", [FORMS[form](_SYSTEM)], [Expected(convert(_SYSTEM))]
        )
    for file in FILES[1:]:
        for form in ("messages", "conversations from/value", "alpaca", "query/response"):
            yield _case(form, file, _ONE, (("user", "Hello."), ("assistant", "Thanks")))
    yield _case("messages as JSON", "parquet", _ONE, _TWO)
    yield _case("prompt/completion messages", "parquet", _ONE, _TWO)
    text = "How is the weather in Paris? It is sunny."
    for file in ("jsonl", "jsonl.gz", "parquet"):
        yield Case("text", "none", file, [{"text": text}], [Expected(text=text)])


def _special_forms() -> Iterator[Case]:
    (_, asked), (_, answer) = _ONE

    def one(form: str, rows: Value | Sequence[Value], *expected: Expected, **more: Any) -> Case:
        file = more.pop("file", "jsonl")
        values = rows if isinstance(rows, list) else [rows]
        return Case(form, "none", file, values, expected, **more)

    messages = convert(_ONE)
    yield one("alpaca with input", {"instruction": "What is it?", "input": asked, "output": answer},
              Expected(convert((("user", f"What is it?\n{asked}"), _ONE[1]))))
    yield one("alpaca with empty input", {"instruction": asked, "input": "", "output": answer},
              Expected(messages))
    yield one("alpaca with system and history",
              {"instruction": asked, "input": "", "output": answer, "system": "Let me think.",
               "history": [["Hello.", "Thanks"]]},
              Expected(convert((("system", "Let me think."), ("user", "Hello."),
                                ("assistant", "Thanks"), *_ONE))))
    yield one("query/response with system",
              {"system": "Let me think.", "query": asked, "response": answer},
              Expected(convert(_SYSTEM)))
    for file in ("jsonl", "parquet"):
        yield one("prompt/completion texts", {"prompt": asked, "completion": " It is sunny."},
                  Expected(text=f"{asked} It is sunny.{{eos}}", prompt=len(asked)), file=file)
    two = convert(_TWO)
    yield one("prompt/completion messages, an answer in the prompt",
              {"prompt": two[:3], "completion": two[3:]}, Expected(two, learned=(False, True)))
    for file in ("jsonl", "parquet"):
        yield one("preference messages",
                  {"prompt": messages[:1], "chosen": messages[1:],
                   "rejected": [{"role": "assistant", "content": "Hello."}]},
                  Expected(messages),
                  Expected([messages[0], {"role": "assistant", "content": "Hello."}]),
                  file=file, needs=("tokenizer",), config={"preferences": True})
    worse = [messages[0], {"role": "assistant", "content": "Hello."}]
    yield one("preference messages without a prompt", {"chosen": messages, "rejected": worse},
              Expected(messages), Expected(worse),
              needs=("tokenizer",), config={"preferences": True})
    yield one("preference texts", {"prompt": asked, "chosen": " It is sunny.", "rejected": " No."},
              Expected(text=f"{asked} It is sunny.{{eos}}", prompt=len(asked)),
              Expected(text=f"{asked} No.{{eos}}", prompt=len(asked)),
              needs=("tokenizer",), config={"preferences": True})
    yield from _flags(one, two)
    yield from _tools(one)
    yield one("chat_template_kwargs", {"messages": two, "chat_template_kwargs": {
        "enable_thinking": False}}, Expected(two, template={"enable_thinking": False}),
        needs=("thinks",))
    thoughts = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "<think>\nLet me think.\n</think>\n\nThanks"},
        *messages[:1],
        {"role": "assistant", "content": "It is sunny.", "reasoning_content": "In Paris?"},
    ]
    yield one("thoughts in several turns", {"messages": thoughts}, Expected(thoughts),
              needs=("thinks",))
    yield one("thoughts in several turns", {"messages": thoughts}, Expected(thoughts),
              needs=("thinks",), file="parquet")
    first = [{"role": "assistant", "content": "Hello."}, *messages]
    yield one("assistant first", {"messages": first}, Expected(first))
    again = [{"role": "user", "content": "Hello."}, *messages]
    yield one("two user turns in a row", {"messages": again}, Expected(again))
    yield one("a column that is not used", {"messages": messages, "source": "web"},
              Expected(messages))
    marked = [{"role": "user", "content": "What is <image> or \\<image>?"}, messages[1]]
    yield one("marks for a model of text", {"messages": marked}, Expected(marked),
              needs=("tokenizer",))
    literal = [{"role": "user", "content": "What is <image> or <image>?"}, messages[1]]
    yield one("marks in a file without media", {"messages": marked}, Expected(literal),
              needs=("processor",))


def _flags(one: Callable[..., Case], two: list[Value]) -> Iterator[Case]:
    for key, value in (("loss", False), ("weight", 0), ("train", False)):
        flagged = [two[0], {**two[1], key: value}, *two[2:]]
        yield one(f"{key} flag", {"messages": flagged}, Expected(two, learned=(False, True)))
    flagged = [two[0], {**two[1], "loss": False}, *two[2:]]
    yield one("loss flag", {"messages": flagged}, Expected(two, learned=(False, True)),
              file="parquet")
    shared = [
        {"from": _NAMES[m["role"]], "value": m["content"], **({"loss": False} if i == 1 else {})}
        for i, m in enumerate(two)
    ]
    yield one("loss flag in conversations", {"conversations": shared},
              Expected(two, learned=(False, True)))


def _tools(one: Callable[..., Case]) -> Iterator[Case]:
    asked, answer = convert(_ONE)
    for form, content in (("tools, content null", None), ("tools, content empty", "")):
        called = [
            asked, {"role": "assistant", "content": content, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "sunny"},
            answer,
        ]
        for file in ("jsonl", "parquet") if content is None else ("jsonl",):
            yield one(form, {"messages": called, "tools": [TOOL]}, Expected(called, tools=[TOOL]),
                      file=file, needs=("tools",))
    yield one("tools as JSON", {"messages": called, "tools": json.dumps([TOOL])},
              Expected(called, tools=[TOOL]), needs=("tools",))
    yield one("tools without calls", {"messages": [asked, answer], "tools": [TOOL]},
              Expected([asked, answer], tools=[TOOL]), needs=("tools",))


def _pictures(media: Media) -> Iterator[Case]:
    a, b = media.item("a.png"), media.item("b.png")
    answer = ("assistant", "A red circle.")
    asked: tuple[Turn, ...] = (("user", "<image>What is in the picture?"), answer)
    middle = (("user", "What is <image> in the picture?"), answer)
    both = (("user", "<image><image>What is it?"), answer)
    turns = (*asked, ("user", "And <image> in it?"), ("assistant", "Thanks"))
    one = [Expected(convert(asked, [a]))]
    for form, make in FORMS.items():
        yield Case(form, "images: list, mark", "jsonl", [make(asked) | {"images": ["a.png"]}], one)
        if form not in _SHORT:
            yield Case(form, "images: list, two turns", "jsonl",
                       [make(turns) | {"images": ["a.png", "b.png"]}],
                       [_expected(form, turns, [a, b])])
    # Some processors encode one picture differently from several.
    third = (("user", "Say"), ("assistant", "First"), *turns, ("user", "<image>"), answer)
    yield Case("messages", "images: list, three turns", "jsonl",
               [_messages(third) | {"images": ["a.png", "b.png", "a.png"]}],
               [Expected(convert(third, [a, b, a]))])
    row = _messages(asked)
    columns = {
        "image: path": {"image": "a.png"}, "images: path": {"images": "a.png"},
        "image: list": {"image": ["a.png"]},
        "images: dict with path": {"images": [{"path": "a.png"}]},
        "images: data URI": {"images": [f"data:image/png;base64,{media.text('a.png')}"]},
        "images: base64 in bytes": {"images": [{"bytes": media.text("a.png")}]},
    }  # fmt: skip
    for name, column in columns.items():
        yield Case("messages", name, "jsonl", [row | column], one)
    raw = media.bytes("a.png")
    for name, column in {
        "images: bytes": {"images": [raw]}, "image: bytes": {"image": raw},
        "image: dict with bytes": {"image": {"bytes": raw, "path": None}},
        "images: dicts with bytes": {"images": [{"bytes": raw, "path": "a.png"}]},
    }.items():
        yield Case("messages", name, "parquet", [row | column], one)
    without = _messages((("user", "What is in the picture?"), answer)) | {"images": ["a.png"]}
    yield Case("messages", "images: list, no place", "jsonl", [without], one)
    plain = Expected(convert(_ONE))
    yield Case("messages", "images: null in one row", "jsonl",
               [row | {"images": ["a.png"]}, _messages(_ONE) | {"images": None}], [*one, plain])
    yield Case("messages", "images: empty in one row", "parquet",
               [row | {"images": ["a.png"]}, _messages(_ONE) | {"images": []}], [*one, plain])
    yield Case("messages", "images: two in a turn", "jsonl",
               [_messages(both) | {"images": ["a.png", "b.png"]}],
               [Expected(convert(both, [a, b]))])
    for form in ("messages", "messages of parts"):
        yield Case(form, "images: mark in the middle", "jsonl",
                   [FORMS[form](middle) | {"images": ["a.png"]}], [Expected(convert(middle, [a]))])
    escaped = (("user", "<image>What is \\<image>?"), answer)
    parts = [a, {"type": "text", "text": "What is <image>?"}]
    yield Case("messages", "images: literal mark", "jsonl",
               [_messages(escaped) | {"images": ["a.png"]}],
               [Expected([{"role": "user", "content": parts}, *convert(asked[1:])])])
    literal = [{"role": "user", "content": "What is <image>?"}, *convert(_ONE)[1:]]
    yield Case("messages", "images: literal mark in a row without", "jsonl", [
        _messages(asked) | {"images": ["a.png"]},
        {"messages": [{"role": "user", "content": "What is \\<image>?"}, literal[1]]},
    ], [*one, Expected(literal)])
    reply = [{"role": "user", "content": "What is it?"},
             {"role": "assistant", "content": [a, {"type": "text", "text": "A red circle."}]}]
    bare = [reply[0], {"role": "assistant", "content": [{"type": "image"}, reply[1]["content"][1]]}]
    yield Case("messages", "images: in an assistant's turn", "jsonl",
               [{"messages": bare, "images": ["a.png"]}], [Expected(reply)])
    late = [_messages(_ONE) for _ in range(70)]
    yield Case("messages", "images: in the last row of 71", "jsonl",
               [*late, row | {"images": ["a.png"]}], [*[plain] * 70, *one])
    for file in FILES[1:]:
        yield Case("conversations from/value", "images: list, mark", file,
                   [_sharegpt(asked) | {"images": ["a.png"]}], one)
    yield Case("alpaca", "images: list, mark", "parquet",
               [_alpaca(asked) | {"images": ["a.png"]}], one)
    yield from _inline_pictures(media, one)


def _inline_pictures(media: Media, one: list[Expected]) -> Iterator[Case]:
    uri = f"data:image/png;base64,{media.text('a.png')}"
    inline: dict[str, Value] = {
        "part image: path": {"type": "image", "image": "a.png"},
        "part image: data URI": {"type": "image", "image": uri},
        "part image: path key": {"type": "image", "path": "a.png"},
        "part image: url key": {"type": "image", "url": "a.png"},
        "part image: base64 key": {"type": "image", "base64": media.text("a.png")},
        "part image_url: data URI": {"type": "image_url", "image_url": {"url": uri}},
        "part image_url: string": {"type": "image_url", "image_url": uri},
        "part image_url: path": {"type": "image_url", "image_url": {"url": "a.png"}},
    }
    question = {"type": "text", "text": "What is in the picture?"}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A red circle."}]}
    expected = [Expected([one[0].messages[0], answer])] if one[0].messages else []
    for name, part in inline.items():
        value = {"messages": [{"role": "user", "content": [part, question]}, answer]}
        for file in ("jsonl", "parquet") if name.endswith((": path", ": data URI")) else ("jsonl",):
            yield Case("messages of parts", name, file, [value], expected)
    part = {"type": "image", "image": {"bytes": media.bytes("a.png"), "path": None}}
    value = {"messages": [{"role": "user", "content": [part, question]}, answer]}
    yield Case("messages of parts", "part image: dict with bytes", "parquet", [value], expected)
    value = [{"role": "user", "content": [inline["part image: path"], question]}, answer]
    yield Case("messages as JSON", "part image: path", "parquet",
               [{"messages": json.dumps(value)}], expected)


def _other_media(media: Media) -> Iterator[Case]:
    clip, first, second = (media.item(name) for name in ("clip.mp4", "a.wav", "b.wav"))
    asked = {"type": "text", "text": "What is it?"}
    answer = {"role": "assistant", "content": "A tone."}

    def row(*parts: Value, **columns: Any) -> Value:
        return {"messages": [{"role": "user", "content": [*parts, asked]}, answer], **columns}

    def expected(*items: Value) -> list[Expected]:
        return [Expected([{"role": "user", "content": [*items, asked]}, answer])]

    def marked(mark: str) -> Value:
        return {"messages": [{"role": "user", "content": f"{mark}What is it?"}, answer]}

    rate = {"video": {"video": {"fps": ITEM_RATE}}}
    for name, value in {
        "video: path": row({"type": "video"}, video="clip.mp4"),
        "videos: list, mark": marked("<video>") | {"videos": ["clip.mp4"]},
        "part video: path": row({"type": "video", "video": "clip.mp4"}),
    }.items():
        yield Case("messages", name, "jsonl", [value], expected(clip), config={"modalities": rate})
    picture = media.item("a.png")
    yield Case("messages", "images and videos", "jsonl", [
        row({"type": "image"}, {"type": "video"}, images=["a.png"], videos=["clip.mp4"]),
    ], expected(picture, clip), config={"modalities": rate})
    for name, value in {
        "audio: path": row({"type": "audio"}, audio="a.wav"),
        "audios: list, mark": marked("<audio>") | {"audios": ["a.wav"]},
        "part audio: path": row({"type": "audio", "audio": "a.wav"}),
        "part input_audio: base64": row({
            "type": "input_audio", "input_audio": {"data": media.text("a.wav"), "format": "wav"},
        }),
    }.items():
        yield Case("messages", name, "jsonl", [value], expected(first))
    yield Case("messages", "audio: two", "jsonl", [
        row({"type": "audio"}, {"type": "audio"}, audio=["a.wav", "b.wav"]),
    ], expected(first, second))
    yield Case("messages", "audio: bytes", "parquet", [
        marked("<audio>") | {"audio": [media.bytes("a.wav")]},
    ], expected(first))
    yield Case("conversations from/value", "audios: list, mark", "jsonl", [{
        "conversations": [{"from": "human", "value": "<audio>What is it?"},
                          {"from": "gpt", "value": "A tone."}], "audios": ["a.wav"],
    }], expected(first))
