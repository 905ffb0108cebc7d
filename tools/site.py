"""Hooks of mkdocs: links to files outside docs/, and words behind a fence's language.

Pages link to `../examples/engine.py`, as people read them in the repository. The site has no such
file, so each that is linked becomes a page with its text, and the link goes there. What a fence
says to tests/docs ("slow", "not run: ...") is nothing for readers and is taken away.
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
LANGUAGES = {".py": "python", ".md": "markdown", ".json": "json"}


def outside(uri: str, link: re.Match[str]) -> str | None:
    """The path from the repository's root of what a page's link names, if it is not in docs/."""
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

    def target(link: re.Match[str]) -> str:
        path = outside(page.file.src_uri, link)
        return f"]({posixpath.relpath(f'source/{path}.md', here)})" if path else link[0]

    return OUTSIDE.sub(target, FENCE.sub(r"\1", markdown))
