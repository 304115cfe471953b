"""The sources of ``data.train`` and ``data.heldout`` of a configuration."""

from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from raymm.data.samples.rows import TEXT_ROLES
from raymm.files.section import Section, Text

# How often a source's samples may come per epoch, whose order is kept in memory.
MOST_REPEAT = 10_000


class SourceConfig(Section):
    """One source of samples.

    Attributes:
        path: file, folder or glob.
        format: ``"json"`` (or JSONL), ``"parquet"``, ``"tar"`` (webdataset's shards) or
            ``"datasets"`` (a folder of ``save_to_disk``); by suffix if None.
        name: samples carry it; by default the file's name without its suffix.
        columns: where columns have other names in this source: ``text``, ``messages``, ``prompt``,
            ``chosen``, ``rejected``, ``id`` or a modality -> column; null says that this source
            lacks the modality.
        repeat: how often each of its samples comes per epoch, which mixes sources in other
            proportions than their sizes. 2 is all of them twice, 0.1 a tenth of them, 1.5 all of
            them and half of them again: that part is drawn with ``data.seed`` and the same in
            every epoch.
    """

    path: Text
    format: Literal["json", "parquet", "tar", "datasets"] | None = None
    name: Text | None = None
    columns: dict[str, Text | None] = Field(default_factory=dict)
    repeat: float = Field(default=1.0, gt=0, le=MOST_REPEAT)

    @field_validator("columns")
    @classmethod
    def _text_has_a_column(cls, columns):
        for role in TEXT_ROLES:
            if role in columns and columns[role] is None:
                raise ValueError(f"{role!r} needs the name of a column, got null")
        return columns


def as_sources(value: Any) -> list[Any]:
    """Sources of what a configuration may say: a path, a source, or a list of both. Sources
    without a name get their file's, numbered where several would have the same."""
    values = value if isinstance(value, list | tuple) else [value]
    values = [{"path": source} if isinstance(source, str | Path) else source for source in values]
    sources = []
    for source in values:
        source = source.model_dump() if isinstance(source, SourceConfig) else source
        if isinstance(source, dict) and isinstance(source.get("path"), Path):
            source = {**source, "path": str(source["path"])}
        sources.append(source)
    plain = [
        source for source in sources
        if isinstance(source, dict) and isinstance(source.get("path"), str)
    ]
    stems = Counter(Path(source["path"]).stem for source in plain if not source.get("name"))
    seen: Counter = Counter()
    for source in plain:
        stem = Path(source["path"]).stem
        if not source.get("name") and stems[stem] > 1 and len(plain) > 1:
            seen[stem] += 1
            sources[sources.index(source)] = {**source, "name": f"{stem}-{seen[stem]}"}
    return sources
