"""The site, without mkdocs: nav and links lead somewhere, pages begin alike, nothing is stale."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import openmla
from openmla.parallel import __all__ as over_ranks
from tests.docs.pages import DOCS, PAGES, ROOT, blocks
from tools.benchmarks_page import PLOTS, Results, benchmarks_page, digest, write_benchmarks_page
from tools.draw import IMAGES, PICTURES
from tools.setup_docs import requirements
from tools.support_table import RESULTS, TABLES, with_tables

SITE = sorted(DOCS.rglob("*.md"))
GENERATED = (DOCS / "benchmarks.md", DOCS / "api" / "ops.md")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """A page without its fenced blocks and inline code."""
    text = page.read_text()
    for block in blocks(page):
        text = text.replace(block.code, "")
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as mkdocs and GitHub make them."""
    found = re.findall(
        r"^#+ (.+)$", prose(page) if page not in GENERATED else page.read_text(), re.M
    )
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in found}


def test_nav_names_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    assert sorted(named) == sorted(page.relative_to(DOCS).as_posix() for page in SITE)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        assert "://" not in link, f"{relative(page)} links to another host: {link}"
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{relative(page)}: there is no {link}"
        if anchor and not anchor.startswith("openmla."):  # those of mkdocstrings: `make docs`
            assert anchor in anchors(target), f"{relative(page)}: no heading for {link}"


@pytest.mark.parametrize("page", SITE, ids=relative)
def test_a_page_begins_with_what_it_is_for(page: Path) -> None:
    title, _, rest = page.read_text().partition("\n\n")
    assert title.startswith("# ") and rest[:1].isalpha(), "a sentence before anything else"
    if page not in GENERATED:
        assert len(rest.splitlines()) <= 200, f"{page.name} is more than one sits down to read"


@pytest.mark.parametrize("page", list(TABLES), ids=relative)
def test_tables_are_fresh(page: Path) -> None:
    pytest.importorskip("triton")  # who takes what on a GPU is asked of its kernels
    assert page.read_text() == with_tables(page), "run: make table"


def test_the_benchmarks_page_is_fresh() -> None:
    results = Results(RESULTS)
    assert (DOCS / "benchmarks.md").read_text() == benchmarks_page(results), "run: make table"
    for name, plot in PLOTS.items():
        drawn = (IMAGES / f"{name}.svg").read_text()
        assert f"data {digest(plot.data(results))}" in drawn, (
            f"{name}.svg is stale, run: make table"
        )


def test_the_page_is_written_with_its_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "images").mkdir()
    write_benchmarks_page(RESULTS, tmp_path)
    assert (tmp_path / "benchmarks.md").read_text() == (DOCS / "benchmarks.md").read_text()
    for name in PLOTS:
        drawn = (tmp_path / "images" / f"{name}.svg").read_text()
        assert drawn.startswith("<?xml") and "<text" in drawn


def test_pictures_are_drawn_by_their_script() -> None:
    for draw in PICTURES:
        picture = draw()
        drawn = (IMAGES / f"{picture.name}.svg").read_text()
        assert drawn == picture.svg(), "run: python -m tools.draw"


def test_every_picture_is_shown() -> None:
    shown = "".join(page.read_text() for page in PAGES)
    for picture in IMAGES.iterdir():
        assert f"images/{picture.name})" in shown, f"no page shows {picture.name}"


def test_the_api_pages_have_every_public_name() -> None:
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    listed = set(re.findall(r"^::: openmla\.(?:[\w.]+\.)?(\w+)$", text, re.MULTILINE))
    tables = {"PRESETS", "FORMATS", "OUTPUT_FORMATS", "ops"}
    assert {*openmla.__all__, *over_ranks} - tables <= listed
    assert all(f"`openmla.{name}`" in text for name in tables - {"ops"})


def test_the_site_needs_what_the_extra_has() -> None:
    assert any(package.startswith("mkdocs-material") for package in requirements())
