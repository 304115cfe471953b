"""Hooks of mkdocs for pages and files outside this folder.

Links on pages use paths of the repository, so that they also work there. README.md becomes the
site's first page, pages of other folders that the navigation names keep their paths, and any other
file that a page links to is copied next to the pages. ``configuration.md`` is generated from the
classes that check a configuration, ``reference.md`` from the public names of the package, and
``models.md`` from results of benchmarks.
"""

import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from models import models_page
from reference import configuration_page, python_page

import raymm

ROOT = Path(__file__).resolve().parent.parent
FIRST = ("README.md", "index.md")
GENERATED = {
    "configuration.md": configuration_page, "reference.md": python_page, "models.md": models_page,
}
_LINK = re.compile(r"(\]\()([\w./-]+)((?:#[\w-]+)?\))")


def site_path(path: str) -> str:
    """Return the site's path of a file of the repository."""
    return FIRST[1] if path == FIRST[0] else path.removeprefix("docs/")


def repository_path(page: str) -> str:
    """Return the source file of a page of the site."""
    if page == FIRST[1]:
        return FIRST[0]
    return f"docs/{page}" if (ROOT / "docs" / page).is_file() or page in GENERATED else page


def linked(markdown: str, page: str) -> Iterator[str]:
    """Yield the files of the repository that a page links to."""
    folder = posixpath.dirname(repository_path(page))
    for _, target, _ in _LINK.findall(markdown):
        yield posixpath.normpath(posixpath.join(folder, target))


def on_config(config: Any) -> Any:
    """Let the Python reference find the package where this process has found it."""
    handlers = config.plugins["mkdocstrings"].config.handlers
    handlers["python"]["paths"] = [str(Path(inspect.getfile(raymm)).resolve().parents[1])]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files that are not in this folder."""
    def add(path: str, **content: Any) -> None:
        files.append(File.generated(config, site_path(path), **content))

    for name, page in GENERATED.items():
        add(f"docs/{name}", content=page())
    add(FIRST[0], abs_src_path=str(ROOT / FIRST[0]))
    for entry in _pages_of(config.nav):
        if files.get_file_from_path(entry) is None:
            add(entry, abs_src_path=str(ROOT / entry))
    for page in list(files.documentation_pages()):
        for path in linked(page.content_string, page.src_uri):
            if (ROOT / path).is_file() and files.get_file_from_path(site_path(path)) is None:
                add(path, abs_src_path=str(ROOT / path))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links to paths of the site. A link to a folder becomes plain text."""
    folder = posixpath.dirname(repository_path(page.file.src_uri))
    start = posixpath.dirname(page.file.src_uri)

    def on_the_site(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        return f"{before}{posixpath.relpath(site_path(path), start or '.')}{after}"

    return _LINK.sub(on_the_site, markdown)


def _pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav.values() if isinstance(nav, dict) else nav:
        yield from _pages_of(entry)
