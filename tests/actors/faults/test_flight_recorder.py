"""Files of NCCL's flight recorder."""

import os
from typing import NamedTuple

from raymm.actors.faults import flight_recorder
from raymm.actors.faults.flight_recorder import record_flight, records, records_text


class Look(NamedTuple):
    records: tuple[str, ...]


def test_files_of_a_process_are_found_by_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(flight_recorder.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"})
    record_flight()
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ  # the user's older variable takes precedence
    prefix = os.environ["TORCH_FR_DUMP_TEMP_FILE"]
    files = [f"{prefix}{rank}" for rank in (0, 1)]
    for file in (*files, str(tmp_path / f"raymm-nccl-{os.getpid()}0-rank-0")):
        open(file, "w").close()
    assert records(os.getpid()) == tuple(files)


def test_only_ranks_with_files_are_listed():
    looks = {1: Look(("/tmp/b", "/tmp/c")), 0: Look(())}
    text = records_text(["rank 0 (llm)", "rank 1 (llm)"], looks)
    assert text.endswith("of rank 1 (llm): /tmp/b, /tmp/c") and text.count("\n") == 1
    assert records_text(["rank 0 (llm)"], {0: Look(())}) == ""
