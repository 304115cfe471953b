"""The stamps mixture: pictures with captions, speech with transcripts, both, and text only.

Sources: Tux Paint's stamps (Debian ``tuxpaint-stamps-default``, GPL-2) with captions and
spoken captions in many languages, and Asterisk's telephone announcements (Debian
``asterisk-core-sounds-en-wav`` and ``asterisk-core-sounds-en``, CC-BY-SA).
"""

import gzip
import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import soundfile

from examples.alignment.processors import AUDIO_WINDOW
from examples.alignment.samples import (
    KINDS,
    Sample,
    group_key,
    hash_choice,
    hash_fraction,
    split,
    summary,
    write_splits,
)

MAX_WORDS = 40  # of an answer
MIN_SECONDS = 0.2  # of a clip
# Languages that the small language model has seen something of, for text-only translation
_LANGUAGES = {"fr": "French", "es": "Spanish", "de": "German", "it": "Italian", "nl": "Dutch"}
_SPOKEN = {
    "be": "Belarusian", "bg": "Bulgarian", "ca": "Catalan", "da": "Danish", "el": "Greek",
    "es": "Spanish", "fr": "French", "lt": "Lithuanian", "nl": "Dutch", "ro": "Romanian",
    "ru": "Russian",
}  # fmt: skip
_TEXT_FRACTION = 0.25  # of the captions also give a text-only sample

_STAMPS = Path("usr/share/tuxpaint/stamps")
_SOUNDS = Path("usr/share/asterisk/sounds/en_US_f_Allison")
_TRANSCRIPTS = Path("usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz")
_CAPTION_LINE = re.compile(r"([A-Za-z_@]+)\.utf8=(.*)")


def parse_captions(text: str) -> dict[str, str]:
    """Captions by language of a stamp's ``.txt``: first line English, then ``fr.utf8=...``.

    Lines of another form and empty captions are left out; so is English if line 1 is empty.
    """
    first, *rest = text.lstrip("\ufeff").splitlines() or [""]
    captions = {"en": " ".join(first.split())}
    for line in rest:
        if match := _CAPTION_LINE.fullmatch(line.strip()):
            captions[match[1]] = " ".join(match[2].split())
    return {language: caption for language, caption in captions.items() if caption}


def parse_transcripts(text: str) -> dict[str, str]:
    """Return transcripts by clip name from a list, ``name: words``; ``;`` begins a comment.

    Leaves out descriptions of sounds other than speech (``[beep]``, ``(1 second of silence)``), and
    the dots at the end of an announcement that continues in another clip.
    """
    transcripts = {}
    for line in text.splitlines():
        name, colon, words = line.strip().partition(":")
        words = " ".join(words.split())
        if not colon or name.startswith(";") or words.startswith(("[", "(", "<")):
            continue
        words = re.sub(r"\s*\[[^\]]*\]", "", words)  # "slash [/]"
        words = words.removeprefix("...").removesuffix("...").strip()
        if words:
            transcripts[name.strip()] = words[0].upper() + words[1:]
    return transcripts


def clip_seconds(path: Path) -> float:
    """Length in seconds by the header; raises ``RuntimeError`` if libsndfile cannot read it."""
    info = soundfile.info(path)
    return info.frames / info.samplerate


def _is_usable_clip(path: Path) -> bool:
    return path.is_file() and MIN_SECONDS <= clip_seconds(path) <= AUDIO_WINDOW


def _is_short(answer: str) -> bool:
    return len(answer.split()) <= MAX_WORDS


class _Media:
    """Copies media into the data set's folder, each file once."""

    def __init__(self, out: Path):
        self.out = out

    def add(self, source: Path, name: str) -> str:
        target = self.out / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        return name


def _clip_with_stamp(stem: Path, captions: dict[str, str]) -> tuple[Path, str] | None:
    """A clip that goes with the stamp and what to ask about both, or None."""
    english = stem.with_name(f"{stem.name}_desc.ogg")
    if _is_usable_clip(english):
        return english, "What do you see and hear?"
    for extension in ("ogg", "wav"):
        effect = stem.with_name(f"{stem.name}.{extension}")
        if _is_usable_clip(effect):
            return effect, "You see it and hear its sound. What is it?"
    clips = {language: stem.with_name(f"{stem.name}_desc_{language}.ogg") for language in _SPOKEN}
    usable = [language for language, clip in clips.items() if _is_usable_clip(clip)]
    if not usable:
        return None
    language = hash_choice(usable, f"language {stem.name} {captions['en']}")
    return clips[language], f"You see it and hear its name in {_SPOKEN[language]}. What is it?"


def _text_sample(stem: str, captions: dict[str, str]) -> Sample | None:
    known = [language for language in _LANGUAGES if captions.get(language)]
    caption = captions["en"]
    if not known or hash_fraction(f"text {caption}") >= _TEXT_FRACTION:
        return None
    language = hash_choice(known, f"translate {caption}")
    question = f"Translate from {_LANGUAGES[language]} to English: {captions[language]}"
    return Sample(f"text/{stem}", caption, question, caption)


def stamp_samples(stamps: Path, media: _Media) -> Iterator[Sample]:
    """Samples of every stamp with a caption: its picture; with a clip; its caption's text."""
    seen_pictures: set[bytes] = set()
    seen_captions: set[str] = set()
    for picture in sorted(stamps.rglob("*.png")):
        text = picture.with_suffix(".txt")
        if not text.is_file():  # mirrored variants have no caption
            continue
        captions = parse_captions(text.read_text(encoding="utf-8"))
        caption = captions.get("en", "")
        # One picture comes twice under two captions; in both splits it would be a leak.
        digest = hashlib.sha256(picture.read_bytes()).digest()
        if not caption or not _is_short(caption) or digest in seen_pictures:
            continue
        seen_pictures.add(digest)
        stem = picture.relative_to(stamps).with_suffix("").as_posix()
        image = media.add(picture, f"images/{stem}.png")
        yield Sample(f"image/{stem}", caption, "What is in the picture?", caption, (image,))
        if clip := _clip_with_stamp(picture.with_suffix(""), captions):
            path, question = clip
            audio = media.add(path, f"audio/stamps/{path.relative_to(stamps).as_posix()}")
            yield Sample(f"both/{stem}", caption, question, caption, (image,), (audio,))
        if group_key(caption) not in seen_captions:
            seen_captions.add(group_key(caption))
            if sample := _text_sample(stem, captions):
                yield sample


def speech_samples(sounds: Path, transcripts: dict[str, str], media: _Media) -> Iterator[Sample]:
    """A sample for every transcribed clip that fits the encoder's window."""
    for name, transcript in sorted(transcripts.items()):
        clip = sounds / f"{name}.wav"
        if _is_short(transcript) and _is_usable_clip(clip):
            audio = media.add(clip, f"audio/asterisk/{name}.wav")
            yield Sample(f"speech/{name}", transcript, "What is said?", transcript, (), (audio,))


def prepare(sources: dict[str, Path], out: Path) -> str:
    """Write the data set into ``out`` from unpacked packages; returns a summary of it."""
    media = _Media(out)
    stamps = sources["tuxpaint-stamps-default"]
    sounds = sources["asterisk-core-sounds-en-wav"]
    with gzip.open(sources["asterisk-core-sounds-en"] / _TRANSCRIPTS, "rt") as file:
        transcripts = parse_transcripts(file.read())
    samples = [
        *stamp_samples(stamps / _STAMPS, media),
        *speech_samples(sounds / _SOUNDS, transcripts, media),
    ]
    for name, folder in sources.items():
        licence = folder / "usr/share/doc" / name / "copyright"
        shutil.copyfile(licence, out / f"copyright-{name}.txt")
    train, heldout = split(samples)
    counts = write_splits(out, train, heldout, KINDS)
    seconds = [clip_seconds(out / path) for sample in samples for path in sample.audio]
    return (
        f"{summary(counts)}; {len(seconds)} clips of {min(seconds):.1f} to {max(seconds):.1f} s, "
        f"mean {sum(seconds) / len(seconds):.1f} s"
    )
