"""Writes tables of docs/ and README.md from the code: models, GPUs, formats, errors, ops, ...

    python -m tools.support_table        # also the benchmarks page; `make table`

Tests fail while they are stale.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import combinations, product
from pathlib import Path
from typing import Any

from openmla.backends import BACKENDS, all_backends
from openmla.cache.format import FORMATS
from openmla.cli.bench import purpose
from openmla.cli.doctor import ops_of, ops_on
from openmla.cli.gpus import GPUS, RAN, TARGETS
from openmla.cli.sizes import Step, token_bytes
from openmla.config import PRESETS, MLAConfig
from openmla.plan.options import REFUSALS, Combination, PlanOptions
from tools.models_table import WHERE, models_rows, wrappers_rows

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "support.md"
MODELS_PAGE = ROOT / "docs" / "models.md"
OPS_PAGE = ROOT / "docs" / "api" / "ops.md"
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
COMPATIBILITY = RESULTS / "compatibility.json"

HYBRID = ("kimi_linear", "bailing_hybrid", "gigachat3_5")  # only their MLA layers have a cache
# Parts of a step, and the row of `openmla doctor` that reports each part.
WORK = {
    "prefill": "mha_ragged",
    "dense decode": "mqa_paged",
    "sparse decode": "mqa_sparse fp8_ds_mla",
    "V4 decode": "mqa_sparse fp8_dsv4",
    "indexer": "index_logits",
    "cache write": "latent_write",
}
SCALES = {
    "fp8": "one per layer ([calibrate](scales.md))",
    "fp8_ds_mla": "one per 128 values, powers of two",
    "fp8_ds_mla_exact": "one per 128 values",
    "fp8_dsv4": "one per 64 values, powers of two",
    "index_fp8": "one per key, powers of two",
    "index_fp8_exact": "one per key",
}


def table(head: list[str], rows: list[list[str]], *, right: int = 0) -> str:
    """A Markdown table whose last `right` columns are numbers."""
    left = len(head) - right
    lines = [head, ["---"] * left + ["--:"] * right, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def models_table() -> str:
    """One row per model type with MLA."""
    return table(["model", "`model_type`", "attention", *WHERE, "`attach`", "layer"], models_rows())


def wrappers_table() -> str:
    """One row per model around one of those."""
    return table(["model", "`model_type`", "text model", *WHERE, "`attach`"], wrappers_rows())


def presets_table() -> str:
    """Released models: KiB of cache per token of context, over all layers."""
    rows = []
    for name, config in PRESETS.items():
        if name.startswith("tiny-") or config.model_type in HYBRID:
            continue
        packed = "fp8_dsv4" if config.compressor else "fp8_ds_mla"
        sizes = [token_bytes(Step(config, format)).total / 1024 for format in ("bf16", packed)]
        expanded = "" if config.compressor else f"{expanded_bytes(config) / 1024:,.0f}"
        counts = [str(config.num_heads), str(config.num_layers)]
        rows.append([f"`{name}`", *counts, *(f"{size:.1f}" for size in sizes), packed, expanded])
    head = ["preset", "heads", "layers", "bf16", "fp8", "fp8 format", "expanded K and V"]
    return table(head, rows, right=6)


def expanded_bytes(config: MLAConfig) -> int:
    """Bytes of a token's bf16 keys and values of every head, which MLA does not need to store."""
    width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return 2 * config.num_layers * config.num_heads * width


def gpus_table() -> str:
    """The default backend of each part of a step, at DeepSeek shapes in bf16, without FlashMLA."""
    rows = [["CPU (x86)", "", *taken(ops_of("cpu", None, 0)), "run"]]
    for target, gpu in TARGETS.items():
        status = "run" if target in RAN else "compiled"
        rows.append([cards(target), target, *taken(ops_on(gpu)), status])
    return table(["GPU", "", *WORK, "status"], rows)


def cards(target: str) -> str:
    return ", ".join(dict.fromkeys(gpu.title for gpu in GPUS.values() if gpu.target == target))


def matrix_table() -> str:
    """What ran and what was only compiled, by GPU and feature. Every GPU has kernels for V4."""
    head = ["", "prefill and decode", "sparse MLA", "V4", "fp8 queries, fp8 prefill", "vLLM"]
    rows = [["CPU (x86)", *["run"] * 5]]
    for target in TARGETS:
        status = "run" if target in RAN else "compiled"
        amd = target.startswith("gfx")
        fp8 = "no" if amd or int(target.removeprefix("sm_")) < 89 else status
        vllm = "no" if amd else status
        rows.append([f"{cards(target)}, {target}", *[status] * 3, fp8, vllm])
    return table(head, rows)


def taken(found: dict[str, dict[str, str]]) -> list[str]:
    return [
        next(name for name, cell in found[op].items() if cell[:3] == "yes" and name != "flashmla")
        for op in WORK.values()
    ]


def formats_table() -> str:
    """Bytes per row: V2 and V3 have 576 values, V4 has 512, an indexer key has 128."""
    rows = []
    for name, layout in FORMATS.items():
        width = 128 if layout.holds == "index" else 512 if name == "fp8_dsv4" else 576
        dtype = "bytes" if layout.packed else str(layout.dtype).removeprefix("torch.")
        number = str(layout.row_bytes(width))
        rows.append([f"`{name}`", layout.holds, dtype, SCALES.get(name, ""), str(width), number])
    return table(["format", "holds", "dtype", "scales", "values", "bytes"], rows, right=2)


def ops_table() -> str:
    """One row per op, one column per backend, from the files in the tree."""
    backends = all_backends()
    rows = []
    for op, names in BACKENDS.items():
        rows.append(
            [f"`{op}`", purpose(op), *("yes" if name in names else "" for name in backends)]
        )
    return table(["op", "what it does", *(f"`{name}`" for name in backends)], rows)


# Non-default arguments of make_plan(), to find unsupported combinations.
ASKED: tuple[dict[str, Any], ...] = (
    {"form": "expanded"},
    {"form": "chosen"},
    {"workspace_tokens": 4096},
    {"compiled": True},
    {"batch_invariant": True},
    {"output": "fp8"},
    {"query_dtype": "fp8"},
    {"prefill_dtype": "fp8"},
    {"context": "gather"},
)


def asked_together() -> Iterator[Combination]:
    """Combinations to check: one option or two, for V3, V4 or a layer with a window, with buffers,
    beside=, over ranks."""
    pairs = ({**one, **other} for one, other in combinations(ASKED, 2))
    v3 = PRESETS["deepseek-v3"]
    configs = v3, PRESETS["deepseek-v4-flash"], replace(v3, window=512)
    for options, config in product(({}, *ASKED, *pairs), configs):
        for given in product((False, True), repeat=3):
            yield Combination(PlanOptions(**options), config, *given)


def refusals_table() -> str:
    """One row per combination that make_plan() does not support, with the reason it gives."""
    rows = []
    for refusal in REFUSALS:
        asked = next(each for each in asked_together() if refusal.applies(each))
        rows.append([refusal.what, f"`{refusal.name}` {refusal.sentence(asked)}"])
    return table(["combination", "error"], rows)


def versions_table() -> str:
    """One row per run: versions, machine, the command, and its result."""
    runs: list[dict[str, Any]] = json.loads(COMPATIBILITY.read_text())["runs"]
    columns = ["python", "torch", "triton", "transformers", "machine", "command", "result"]
    rows = [
        [f"`{run[name]}`" if name == "command" and run[name] else run[name] for name in columns]
        for run in runs
    ]
    return table(columns, rows)


def signature_of(function: Any) -> str:
    """One line per parameter, without shape texts."""
    lines, starred = [f"{function.__name__}("], False
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            lines, starred = [*lines, "    *,"], True
        value = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        kind = re.sub(r"^Annotated\[(.+), '.+'\]$", r"\1", parameter.annotation)
        kind = "int" if kind == "Size" else kind
        lines.append(f"    {parameter.name}: {kind}{value},")
    return "\n".join([*lines, f") -> {signature.return_annotation}"])


def contracts() -> str:
    """Every op's signature and docstring, which is its specification."""
    parts = []
    for op in BACKENDS:
        module = import_module(f"openmla.ops.{op}")
        name, _, contract = (module.__doc__ or "").strip().partition(": ")
        parts += [f"## {name}", f"```text\n{signature_of(getattr(module, op))}\n```"]
        parts += [f"```text\n{contract}\n```"]
    return "\n" + "\n\n".join(parts) + "\n"


# Content between markers, by page: "<!-- models: make table -->" and "<!-- end of models -->".
TABLES = {
    MODELS_PAGE: {
        "models": models_table,
        "wrappers": wrappers_table,
        "presets": presets_table,
    },
    PAGE: {
        "gpus": gpus_table,
        "formats": formats_table,
        "refusals": refusals_table,
        "ops": ops_table,
        "versions": versions_table,
    },
    OPS_PAGE: {"contracts": contracts},
    README: {"matrix": matrix_table},
}


def with_tables(path: Path) -> str:
    """A page's text with the parts between its markers replaced."""
    page = path.read_text()
    for name, make in TABLES[path].items():
        begin, end = f"<!-- {name}: make table -->", f"<!-- end of {name} -->"
        head, found, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{path.name} has no place for {name}: {begin} ... {end}")
        page = f"{head}{begin}\n{make()}\n{end}{tail}"
    return page


if __name__ == "__main__":
    from tools.benchmarks_page import write_benchmarks_page

    for page in TABLES:
        page.write_text(with_tables(page))
    write_benchmarks_page(RESULTS, ROOT / "docs")
