"""One sample as its row says it: text, and media that are not decoded."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from raymm.data.samples.media import Media


@dataclass(frozen=True)
class Sample:
    """One row. Exactly one of ``messages`` and ``text`` is set.

    Attributes:
        index: position in the data set, from 0.
        id: the row's ``id``, or its place.
        messages: list of {"role": str, "content": str or list of parts}; a part is
            {"type": "text", "text": str} or the place of a media item, {"type": "image"}.
        text: plain text to learn whole.
        media: modality -> items: absolute paths (``str``), or ``raymm.data.samples.media``
            objects; a modality the sample lacks is absent.
        source: name of the source that it is from.
        place: where the row is: ``FILE:LINE``, ``FILE[INDEX]`` or ``SHARD[KEY]``.
        columns: modality, ``"text"`` or ``"messages"`` -> its column in this source, where known.
    """

    index: int
    id: str
    messages: list[dict] | None
    text: str | None
    media: dict[str, tuple[Media, ...]]
    source: str = ""
    place: str = ""
    columns: Mapping[str, str] = field(default_factory=dict, repr=False)
