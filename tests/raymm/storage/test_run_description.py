"""Fingerprints of a run's files."""

import os

from raymm.storage.run_description import WHOLE_BYTES, fingerprint_of_files


def test_large_files_are_sampled(tmp_path):
    file = tmp_path / "large"
    with open(file, "wb") as target:
        target.truncate(4 * WHOLE_BYTES)
    before = fingerprint_of_files([file])
    os.utime(file, (1, 1))
    assert {**fingerprint_of_files([file]), "times": before["times"]} == before
    for place in (0, 4 * WHOLE_BYTES - 1):
        with open(file, "r+b") as target:
            target.seek(place)
            target.write(b"x")
        after = fingerprint_of_files([file])
        assert after["digest"] != before["digest"]
        before = after
