"""One sample as its row says it: text, and media that are not decoded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raymm.data.samples.media import Media


@dataclass(frozen=True)
class Preference:
    """A prompt with two answers; all of them messages, or all of them text.

    Attributes:
        prompt, chosen, rejected: what is asked, the better and the worse answer.
    """

    prompt: Any
    chosen: Any
    rejected: Any

    @property
    def answers(self) -> tuple[Any, Any]:
        """The prompt with the chosen answer, and with the rejected one."""
        return self.prompt + self.chosen, self.prompt + self.rejected


@dataclass(frozen=True)
class Sample:
    """One row. Exactly one of ``messages`` and ``text`` is set; of a row with two answers to the
    chosen one.

    Attributes:
        index: position in the data set, from 0.
        id: the row's ``id``, or its place.
        messages: list of {"role": str, "content": str, list of parts or None}; a part is
            {"type": "text", "text": str} or the place of a media item, {"type": "image"}. Other
            keys go to the chat template, except ``loss``: False masks the labels of the message.
        text: plain text, learned after its first ``prompt_characters`` characters.
        media: modality -> items: absolute paths (``str``), or ``raymm.data.samples.media``
            objects; a modality the sample lacks is absent.
        source: name of the source that it is from.
        place: where the row is: ``FILE:LINE``, ``FILE[INDEX]`` or ``SHARD[KEY]``.
        preference: of a row with two answers, these.
        columns: modality, ``"text"`` or ``"messages"`` -> its column in this source, where known.
        tools: function definitions that the chat template writes, as JSON schemas.
        template: further arguments of the chat template (``chat_template_kwargs``).
        prompt_characters: characters at the start of ``text`` that have no labels.
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
