"""The ``cache:`` section: results that a run computes once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymm.files.section import Section, Text

MOST_GIB = 2**20


class CacheSection(Section):
    """Results that a run computes once.

    Attributes:
        features: where the features of frozen encoders, or of the frozen layers before an encoder's
            first trained one, are cached: ``"disk"``, across runs; ``"host"``, in host memory
            (``/dev/shm``) while the run lasts; ``"none"``, nowhere, but encoders still process
            every item separately, as with a cache. The key of a feature consists of the item's
            content, the encoder's weights, the code of its classes, callbacks and processor with
            all user modules that these import, the precision and ``tp``. Once all items of a step
            are cached, they are not decoded, and the step's program does not run the encoder.
            Processors and callbacks must be deterministic. For a whole model, the features of its
            frozen towers are cached; its processor runs every time.
        folder: folder for ``"disk"`` that all nodes can reach; by default ``features`` in
            ``~/.cache/raymm``.
        version: text that is part of the folder's name. Change it together with files that user
            code reads. Required with ``"disk"`` if changes of the code cannot be detected.
        room_gib: maximum size of all features in the folder. Features beyond it are computed every
            time.
    """

    features: Literal["disk", "host", "none"] = "disk"
    folder: Text | None = None
    version: Text | None = None
    room_gib: Annotated[float, Field(gt=0, le=MOST_GIB)] = 20.0
