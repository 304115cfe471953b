"""Mask that slows down one rank, named by a file; imported by ranks with the run's mask."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from raymm.actors.modules import token_layout
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.spans import Span

FILE = "RAYMM_SLOWED_FILE"
SECONDS = 0.5


def causal(
    length: int, spans: Sequence[Span], document_lengths: Sequence[int]
) -> AttentionMask:
    """Return raymm's own causal mask, slowly in the process that the file names."""
    file = Path(os.environ.get(FILE, "/nowhere"))
    if file.exists() and file.read_text() == str(os.getpid()):
        time.sleep(SECONDS)
    return token_layout.causal(length, spans, document_lengths)
