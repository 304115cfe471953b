"""The ``cache:`` section: what of a run is computed once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymm.files.section import Section, Text

MOST_GIB = 2**20


class CacheSection(Section):
    """What of a run is computed once.

    Attributes:
        features: where what frozen encoders, or the frozen layers before their first trained one,
            make of items is kept, by the items' content, the encoder's weights, the code of its
            classes, callbacks and processor with all user modules that it imports, precision and
            ``tp``: ``"disk"``, from run to
            run; ``"host"``, in the memory of the hosts (``/dev/shm``) while the run lasts. From
            when all of a step's items are known, nobody decodes them, and the encoder's
            instructions are not in the step's program. Processors and callbacks must always make
            the same of an item. Of a whole model, what its frozen towers make of what its processor
            makes of an item: the processor runs every time. ``"none"``: encoders compute every item
            by itself, as where features are kept, and nothing is.
        folder: for ``"disk"``, one that all nodes can reach; by default ``features`` below
            ``~/.cache/raymm``.
        version: text that counts in the name of the folder. Change it together with files that user
            code reads. Needed with ``"disk"`` where changes of the code could not be noticed.
        room_gib: that all features in the folder may take. What is beyond is computed every time.
    """

    features: Literal["disk", "host", "none"] = "disk"
    folder: Text | None = None
    version: Text | None = None
    room_gib: Annotated[float, Field(gt=0, le=MOST_GIB)] = 20.0
