"""Hooks of mkdocs: links to files outside docs/, words after a fence's language, search ranks.

Pages link to `../examples/engine.py`, which works in the repository. On the site, each linked file
becomes a page with its text, and the link leads to that page. Annotations of fences for tests/docs
("slow", "not run: ...") are removed. Search ranks guides above the API and linked files.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"\]\((?P<up>(?:\.\./)+)(?P<path>[\w./-]+)\)")
FENCE = re.compile(r"^(```\w+) .+$", re.MULTILINE)
SEARCH_BOOST = {"api": 0.5, "source": 0.2}  # by folder
LANGUAGES = {".py": "python", ".md": "markdown", ".json": "json"}


def outside(uri: str, link: re.Match[str]) -> str | None:
    """The path from the repository's root of a link's target outside docs/, else None."""
    path = posixpath.normpath(
        posixpath.join("docs", posixpath.dirname(uri), link["up"] + link["path"])
    )
    return None if path.startswith("docs/") else path


def on_files(files: Files, config: Any) -> Files:
    linked: set[str] = set()
    for file in files.documentation_pages():
        for link in OUTSIDE.finditer(file.content_string):
            linked |= {path for path in [outside(file.src_uri, link)] if path}
    for path in sorted(linked):
        text = (ROOT / path).read_text()
        fence = "`" * 6
        language = LANGUAGES.get(Path(path).suffix, "text")
        page = f"# {path}\n\n{fence}{language}\n{text}\n{fence}\n"
        if path.endswith(".md"):
            page = text
        files.append(File.generated(config, f"source/{path}.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = posixpath.dirname(page.file.src_uri) or "."
    boost = SEARCH_BOOST.get(page.file.src_uri.partition("/")[0])
    if boost is not None:
        page.meta["search"] = {"boost": boost}

    def target(link: re.Match[str]) -> str:
        path = outside(page.file.src_uri, link)
        return f"]({posixpath.relpath(f'source/{path}.md', here)})" if path else link[0]

    return OUTSIDE.sub(target, FENCE.sub(r"\1", markdown))
