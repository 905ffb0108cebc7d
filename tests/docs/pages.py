"""The pages of README and docs, their fenced blocks and what these say about being run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)(?: ([^\n]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block. `told` is what stands behind its language: nothing, slow, not run: why."""

    page: Path
    number: int
    language: str
    told: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}, block {self.number}"

    @property
    def runs(self) -> bool:
        return self.language in ("python", "bash") and not self.told.startswith("not run: ")


def blocks(page: Path) -> list[Block]:
    return [
        Block(page, number, language, told, code)
        for number, (language, told, code) in enumerate(FENCE.findall(page.read_text()), start=1)
    ]
