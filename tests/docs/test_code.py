"""Every code block of README and of the pages runs, on a CPU; those marked slow in `make test-all`.

Python blocks of a page share their names, in order. Commands run in an empty folder, where DIR is
the demo model and FILE the start of its held-out text; `openmla ...` runs in this process.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from openmla import OUTPUT_FORMATS, decode_output
from openmla.cli.__main__ import main
from openmla.testing import poisoned_memory
from tests.docs.pages import PAGES, ROOT, Block, blocks

pytest.importorskip("transformers")

DEMO = ROOT / "openmla" / "demo"

# Pages whose blocks of a language another test runs, and looks at what comes out.
ELSEWHERE = {
    ("README.md", "python"): "tests/test_readme.py",
    ("bisect.md", "python"): "tests/bisect/test_page.py",
    ("drop-in.md", "python"): "tests/integrations/test_drop_in.py",
    ("scales.md", "python"): "tests/integrations/test_scales.py",
    ("size.md", "bash"): "tests/cli/test_size.py",
}

# What readers of a page have already when they come to its first block.
MODEL = """
from pathlib import Path
import torch, openmla
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(Path(openmla.__file__).parent / "demo")
"""
LAYER = """
config = openmla.PRESETS["tiny-v3"]
cache = openmla.allocate_cache(config, num_blocks=8, block_size=16, format="fp32")
weights = openmla.absorb(torch.randn(config.num_heads * 40, 32), config)
kv_b = weights.kv_b
w_uk, w_uv = (part.to(torch.float8_e4m3fn) for part in (weights.w_uk, weights.w_uv))
uk_scale = uv_scale = torch.ones(config.num_heads, 1, 1)
"""
BEFORE = {
    "absorbed-weights.md": MODEL + LAYER,
    "adding-a-kernel.md": "import openmla",
    "cache-formats.md": """
import openmla
config = openmla.PRESETS["deepseek-v3"]
cache = openmla.allocate_cache(config, num_blocks=1024, block_size=64, format="fp8")
""",
    "context-parallel.md": MODEL
    + """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
""",
    "engines-compile.md": """
import torch
from torch._dynamo.utils import counters
torch.compiler.reset()
counters.clear()
""",
}
AFTER = {"adding-a-kernel.md": 'openmla.unregister_backend("merge_states", "mine")'}
# What the names of a page hold once it has run.
HOLDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "engines.md": lambda names: names["out_latent"].isfinite().all(),
    # the prompts, and twenty steps of decode
    "engines-compile.md": lambda names: (
        names["out"].isfinite().all() and names["counters"]["stats"]["unique_graphs"] == 2
    ),
    "engines-plans.md": lambda names: names["plan"].num_tokens == 4 and not names["out"][2:].any(),
    "quantized-outputs.md": lambda names: (
        decode_output(names["out"]).isfinite().all()
        and "output    nvfp4: " in names["plan"].explain()
    ),
}
# Names that mean something else where a block begins anew: here a V4 model, cut to four layers.
BETWEEN = {
    ("cache-formats.md", 2): """
from dataclasses import replace
config = openmla.PRESETS["deepseek-v4-flash"]
ratios = replace(config.compressor, ratios=config.compressor.ratios[:4])
config = replace(config, num_layers=4, compressor=ratios)
"""
}


def here(page: Path) -> list[Block]:
    return [block for block in blocks(page) if (page.name, block.language) not in ELSEWHERE]


def run_page(page: Path, folder: Path, told: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(BEFORE.get(page.name, ""), names)
    for block in here(page):
        if block.runs and block.told == told:
            exec(BETWEEN.get((page.name, block.number), ""), names)
            if block.language == "python":
                exec(compile(block.code, block.name, "exec"), names)
            else:
                run_commands(block, folder)
    exec(AFTER.get(page.name, ""), names)
    if told == "" and page.name in HOLDS:
        assert HOLDS[page.name](names)


def run_commands(block: Block, folder: Path) -> None:
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["openmla"]:
            assert main(words[1:]) == 0, f"{block.name}: {line}"
        elif words:
            assert words[0] in ("python", "python3"), f"{block.name}: {line} is not a known command"
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            command = [sys.executable, *words[1:]]
            subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "DIR").symlink_to(DEMO)
    (tmp_path / "FILE").write_bytes((DEMO / "heldout.txt").read_bytes()[:600])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def running(told: str) -> list[Any]:
    found = [page for page in PAGES if any(b.runs and b.told == told for b in here(page))]
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in found]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("page", running(""))
def test_code_runs(page: Path, folder: Path) -> None:
    with torch.inference_mode(False), poisoned_memory(on=False):  # as readers run it
        try:
            run_page(page, folder, "")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("page", running("slow"))
def test_slow_code_runs(page: Path, folder: Path) -> None:
    with torch.inference_mode(False), poisoned_memory(on=False):
        run_page(page, folder, "slow")


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.language in ("python", "bash", "text"), f"{block.name}: no language"
            known = block.told in ("", "slow") or block.told.startswith("not run: ")
            assert known, f"{block.name}: {block.told!r} is neither slow nor 'not run: why'"


# All that no test runs, by page.
NOT_RUN = {
    "README.md": [
        "`make test` installs the same way, in an environment of its own",
        "these are what CI runs",
    ],
    "CONTRIBUTING.md": ["these are what CI runs", "a release, by hand"],
    "adding-a-kernel.md": ["a skeleton", "a skeleton", "`<op>` stands for a name"],
    "drop-in.md": ["needs an H200 and both originals"],
    "quickstart.md": ["`make test` installs the same way, in an environment of its own"],
    "vllm.md": ["needs vLLM; `make test-vllm` runs it"],
}


def test_few_blocks_are_not_run() -> None:
    told = {page.name: [block.told for block in blocks(page)] for page in PAGES}
    skipped = {
        name: [why[9:] for why in all_ if why[:9] == "not run: "] for name, all_ in told.items()
    }
    assert {name: reasons for name, reasons in skipped.items() if reasons} == NOT_RUN


def test_pages_are_short_and_complete() -> None:
    """A page is no longer than one sits down to read; those for engines name one another."""
    long = {"README.md", "CONTRIBUTING.md", "benchmarks.md", "ops.md"}  # the last are made
    for page in PAGES:
        assert page.name in long or len(page.read_text().splitlines()) <= 200, page.name
    names = ("engines.md", "engines-plans.md", "engines-compile.md")
    for name in names:
        text = (ROOT / "docs" / name).read_text()
        assert all(f"]({other})" in text for other in names if other != name), name
        assert f"](docs/{name})" in (ROOT / "README.md").read_text()
    formats = (ROOT / "docs" / "quantized-outputs.md").read_text()
    assert all(f"`{name}`" in formats for name in OUTPUT_FORMATS)


def test_commands_stand_in_fences() -> None:
    for page in PAGES:
        assert not re.search(r"^    openmla \w", page.read_text(), re.MULTILINE), page.name


def test_what_runs_elsewhere_does() -> None:
    pages = {page.name: page for page in PAGES}
    for (name, language), test in ELSEWHERE.items():
        assert name in (ROOT / test).read_text(), f"{test} does not name {name}"
        assert any(b.language == language and b.runs for b in blocks(pages[name])), name
