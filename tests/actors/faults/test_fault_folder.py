"""Files of a fault."""

from pathlib import Path

from raymm.actors.faults.fault_folder import faults_kept_in, keep


def test_texts_are_in_the_run_folder(tmp_path):
    with faults_kept_in(tmp_path / "outer"), faults_kept_in(tmp_path / "run"):
        folder = Path(keep({"rank-0.txt": "stack", "rank-1.txt": "bad \udcff"}))
    assert folder.parent == tmp_path / "run" / "faults"
    assert {file.name for file in folder.iterdir()} == {"rank-0.txt", "rank-1.txt"}
    assert (folder / "rank-0.txt").read_text() == "stack"


def test_a_folder_that_cannot_be_written_is_no_second_fault(tmp_path):
    (tmp_path / "faults").write_text("in the way")
    with faults_kept_in(tmp_path):
        assert keep({"rank-0.txt": "stack"}).startswith("not saved: ")
