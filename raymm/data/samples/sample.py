"""Sample of a row: its text, and media before decoding."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raymm.data.samples.media import Media


@dataclass(frozen=True)
class Preference:
    """Prompt with a chosen (better) and a rejected (worse) answer; all of them messages, or all
    text."""

    prompt: Any
    chosen: Any
    rejected: Any

    @property
    def answers(self) -> tuple[Any, Any]:
        """The prompt with the chosen answer, and with the rejected answer."""
        return self.prompt + self.chosen, self.prompt + self.rejected


@dataclass(frozen=True)
class Sample:
    """One row. Exactly one of ``messages`` and ``text`` is set; for a row with two answers, from
    the chosen one.

    Attributes:
        id: the ``id`` of the row, or its place.
        messages: list of {"role": str, "content": str, list of parts or None}; a part is {"type":
            "text", "text": str} or a placeholder of a media item, {"type": "image"}. Other keys go
            to the chat template, except ``loss``: False masks the labels of the message.
        text: plain text, learned after its first ``prompt_characters`` characters.
        media: modality -> items: absolute paths (``str``), or ``raymm.data.samples.media`` objects;
            modalities without items are absent.
        place: location of the row: ``FILE:LINE``, ``FILE[INDEX]`` or ``SHARD[KEY]``.
        preference: both answers, if the row has two.
        columns: modality, ``"text"`` or ``"messages"`` -> its column in this source, where known.
        tools: function definitions for the chat template, as JSON schemas.
        template: further arguments of the chat template (``chat_template_kwargs``).
        prompt_characters: number of characters at the start of ``text`` without labels.
    """

    index: int
    id: str
    messages: list[dict] | None
    text: str | None
    media: dict[str, tuple[Media, ...]]
    source: str = ""
    place: str = ""
    preference: Preference | None = None
    columns: Mapping[str, str] = field(default_factory=dict, repr=False)
    tools: list[dict] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    prompt_characters: int = 0
