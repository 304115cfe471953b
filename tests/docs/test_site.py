"""The site has every page, and a broken link fails its build."""

import json
import shutil

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

import raymm
from tests.docs.pages import PAGES, ROOT


@pytest.fixture
def checkout(tmp_path):
    """Copy the pages and their link targets to another folder."""
    for name in (
        "README.md", "mkdocs.yml", "deploy", "benchmarks", "examples", "raymm", "actors",
        "scheduler", "kernels",
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def reference_names() -> list[str]:
    """Return the anchors of the public names: the modules that define them, and their names."""
    public = [getattr(raymm, name) for name in raymm.__all__ if name != "__version__"]
    return [f"{one.__module__}.{one.__qualname__}" for one in public]


def test_pages_exist_and_only_planted_links_are_broken(checkout):
    """Build once: a strict build writes all pages before it fails."""
    with (checkout / "docs" / "masks.md").open("a") as page:
        page.write("\n[x](no-such-page.md) [y](planning.md#no-such-heading)\n")
    site = checkout / "site"
    config = load_config(str(checkout / "mkdocs.yml"), site_dir=str(site), strict=True)
    with pytest.raises(Abort, match="2 warnings in strict mode"):
        build(config)
    names = [str(page.relative_to(ROOT)).removeprefix("docs/") for page in PAGES]
    for page in (*names, "configuration.md", "architecture.md"):
        html = page.replace("README.md", "index.md").replace(".md", ".html")
        assert "<h1" in (site / html).read_text(), page
    assert 'href="checkpoints.html"' in (site / "index.html").read_text()
    assert 'href="deploy/index.html"' in (site / "clusters.html").read_text()
    assert (site / "examples" / "notebook.ipynb").is_file()  # a page links to it
    reference = (site / "reference.html").read_text()
    missing = [name for name in reference_names() if f'id="{name}"' not in reference]
    assert not missing and ":class:`" not in reference
    models = (site / "models.html").read_text()
    for benchmark in ("vlm_matrix", "families"):
        log = ROOT / "benchmarks" / "log" / f"{benchmark}.json"
        for name in json.loads(log.read_text())["classes"]:
            assert f"<code>{name}</code>" in models, name
