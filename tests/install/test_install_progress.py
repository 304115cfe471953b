"""Progress line of an installation, from pip's output."""

from __future__ import annotations

import pytest

from deploy import install


@pytest.fixture
def progress(monkeypatch):
    counts = iter([100, 130])
    monkeypatch.setattr(install, "_installed", lambda: next(counts))
    monkeypatch.setattr(install, "_LOG_SECONDS", 0)
    return install._Progress("installing")


def printed(progress, capsys, line):
    """Return the printed line at the next interval after a line of pip."""
    progress.read(line + "\n")
    waits = iter([False, True])
    progress.done.wait = lambda seconds: next(waits)
    progress.print_until_done()
    return capsys.readouterr().out.splitlines()[-1].rpartition(",")[0]


@pytest.mark.parametrize("line, state", [
    ("Collecting torch==2.14.1", "package 1, resolving torch==2.14.1"),
    ("  Downloading torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl (554.6 MB)",
     "package 0, fetching torch-2.14.1 (554.6 MB)"),
    ("Processing /wheels/torch-2.14.1-cp311-cp311-linux_x86_64.whl",
     "package 0, fetching torch-2.14.1"),
    ("Processing ./.", "package 0, asking pip"),
    ("Installing collected packages: " + ", ".join(map(str, range(131))),
     "unpacked 30 of 131 packages"),
])  # fmt: skip
def test_the_line_shows_pips_progress(progress, capsys, line, state):
    assert printed(progress, capsys, line) == f"installing: {state}"


def test_a_failure_shows_pips_output(capfd):
    assert install.main(["installing", "--no-index", "not-a-package-of-anyone"]) == 1
    output = capfd.readouterr()
    assert "No matching distribution found for not-a-package-of-anyone" in output.err
    assert "installing: failed" in output.out
