"""Sources in ``data.train`` and ``data.heldout`` of a configuration."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from raymm.actors.storage.location import check_location
from raymm.data.remote.urls import parse
from raymm.data.samples.row_forms import ACCEPTED, FORMS, TEXT_ROLES
from raymm.files.section import MOST_COUNT, Section, Text
from raymm.packages import is_import_path

# Upper bound on repetitions per epoch; the order of an epoch is in memory.
MOST_REPEAT = 10_000
Weight = Annotated[float, Field(ge=0, le=MOST_REPEAT)]


def _form(name: str) -> str:
    """Return the name of a row form, or the import path of a function that converts rows."""
    if name not in FORMS and not is_import_path(name):
        raise ValueError(f"row form {name!r} is not known; accepted: {ACCEPTED}")
    return name


FormName = Annotated[Text, AfterValidator(_form)]
StepNumber = Annotated[int, Field(ge=0, le=MOST_COUNT)]
# Prefix of the names of datasets on the Hugging Face hub.
HUB = "hf://datasets/"
_HUB_NAME = re.compile(rf"{HUB}[\w.-]+(/[\w.-]+)?")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class SourceConfig(Section):
    """One source of samples.

    Attributes:
        path: file, folder or glob, or the URL of one: ``s3://BUCKET/...``, ``gs://BUCKET/...``, or,
            for one file, ``https://...`` of a server that supports range requests; or a dataset on
            the Hugging Face hub, ``hf://datasets/ORG/NAME``.
        format: ``"json"`` (also JSON lines), ``"parquet"``, ``"tar"`` (webdataset shards) or
            ``"datasets"`` (a folder written by ``save_to_disk``); by suffix if None.
        name: name of the source in samples; by default the file name without its suffix.
        columns: other column names in this source: a role of a row form (``text``, ``messages``,
            ``prompt``, ``chosen``, ``instruction``, ...), ``id`` or a modality -> column; null for
            a source without the modality.
        row_form: overrides ``data.row_form`` for this source.
        ignore_columns: added to ``data.ignore_columns`` for this source.
        subset, split, revision: for a hub dataset: its configuration, the name of a split, and a
            branch, tag or commit.
        repeat: how often each sample comes per epoch, to mix sources in other proportions than
            their sizes: 2 for all samples twice, 0.1 for a tenth of them, 1.5 for all of them and
            half of them again. The part is drawn with ``data.seed`` and is the same in every epoch.
        weight: share of every step relative to the weights of other sources, instead of ``repeat``:
            a number, or a schedule ``{0: 1.0, 1000: 0.2}`` of steps and the weight from each of
            them on. Either all training sources have a weight, or none. Each source then restarts
            independently when it ends.
    """

    path: Text
    format: Literal["json", "parquet", "tar", "datasets"] | None = None
    name: Text | None = None
    columns: dict[str, Text | None] = Field(default_factory=dict)
    row_form: FormName | None = None
    ignore_columns: list[Text] = Field(default_factory=list)
    subset: Text | None = None
    split: Text = "train"
    revision: Text | None = None
    repeat: float = Field(default=1.0, gt=0, le=MOST_REPEAT)
    weight: Weight | dict[StepNumber, Weight] | None = None

    @field_validator("path")
    @classmethod
    def _is_path_or_url(cls, path):
        if not _URL.match(path):
            return path
        if path.startswith("hf://"):
            if not _HUB_NAME.fullmatch(path):
                raise ValueError(
                    f"expected {HUB}ORG/NAME; subset, split and revision are separate fields"
                )
            return path
        if path.startswith("file://"):
            return check_location(path)
        return str(parse(path))

    @field_validator("columns")
    @classmethod
    def _text_has_a_column(cls, columns):
        for role in TEXT_ROLES:
            if role in columns and columns[role] is None:
                raise ValueError(f"{role!r} needs the name of a column, got null")
        return columns

    @model_validator(mode="after")
    def _names_a_split(self):
        if not re.fullmatch(r"[\w.-]+", self.split):
            raise ValueError(f"split is {self.split!r}; accepted: the name of a split")
        by_name = self.path.startswith(HUB)
        is_said = (self.subset, self.split, self.revision) != (None, "train", None)
        if is_said and not by_name:
            raise ValueError(
                f"subset, split and revision are accepted for {HUB}ORG/NAME only, but path is "
                f"{self.path!r}"
            )
        if by_name and self.format is not None:
            raise ValueError(f"format is {self.format!r}; accepted with {self.path}: none")
        return self

    @model_validator(mode="after")
    def _weight_fits(self):
        if self.weight is None:
            return self
        if self.repeat != 1:
            raise ValueError(
                f"weight is {self.weight} and repeat {self.repeat:g}; accepted: one of them, as "
                "both set how often samples come"
            )
        if isinstance(self.weight, dict) and 0 not in self.weight:
            raise ValueError(
                f"weight is {self.weight}; accepted: a schedule with a weight from step 0 on"
            )
        return self

    @property
    def schedule(self) -> dict[int, float]:
        """First step -> weight from that step on; empty without a weight."""
        if self.weight is None:
            return {}
        return dict(self.weight) if isinstance(self.weight, dict) else {0: self.weight}


def as_sources(value: Any) -> list[Any]:
    """Return the sources of a configuration value: a path, a source, or a list of both. Sources
    without a name are named after their file, with a number if several files have the same name."""
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
    stems = Counter(_stem(source["path"]) for source in plain if not source.get("name"))
    stem_counts: Counter = Counter()
    for source in plain:
        stem = _stem(source["path"])
        if not source.get("name") and stems[stem] > 1 and len(plain) > 1:
            stem_counts[stem] += 1
            sources[sources.index(source)] = {**source, "name": f"{stem}-{stem_counts[stem]}"}
    return sources


def check_weights(
    train: Sequence[SourceConfig], heldout: Sequence[SourceConfig], method: str
) -> None:
    """Raise a ``ValueError`` if the weights of the sources of both splits are not consistent, or do
    not fit the batching ``method``."""
    weighted = [source for source in train if source.weight is not None]
    if weighted and len(weighted) < len(train):
        path = next(source.path for source in train if source.weight is None)
        raise ValueError(
            f"train: {path!r} has no weight, but other sources have one; accepted: weights for "
            "all sources, or for none"
        )
    if weighted and method != "random":
        raise ValueError(
            f"train: sources have weights, but batching is {method!r}; accepted: batching "
            "'random', or repeat instead of weight"
        )
    if any(source.weight is not None for source in heldout):
        raise ValueError(
            "heldout: a source has a weight; accepted: no weights, as held-out data is one pass "
            "over all sources"
        )


def _stem(path: str) -> str:
    return Path(urlsplit(path).path if _URL.match(path) else path).stem
