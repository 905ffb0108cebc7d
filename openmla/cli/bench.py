"""`openmla bench <name>`: time the backends of an op, a step, a whole model; write the page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from openmla.backends import BACKENDS
from openmla.cli.options import Parser
from openmla.cli.terminal import note
from openmla.errors import ConfigError, UnsupportedError

WHOLE = {
    "step": "a decode step of a layer, compared with transformers' module and expanded caches",
    "generate": "decode of a whole random model, compared with plain transformers",
}


INVARIANT, REPORT = "--batch-invariant", "report"


def names() -> tuple[str, ...]:
    """What there is to run: the files of openmla/bench."""
    folder = Path(__file__).parent.parent / "bench"
    found = {path.stem for path in folder.glob("[!_]*.py")} - {"harness"}
    return (*sorted(found & set(BACKENDS)), *(name for name in WHOLE if name in found))


def purpose(op: str) -> str:
    """What an op does, as its module says in the first line."""
    first = (import_module(f"openmla.ops.{op}").__doc__ or "").splitlines()[0]
    return first.partition(": ")[2].rstrip(".")


def run_bench(arguments: Sequence[str]) -> int:
    """Hand the rest of the command line to openmla/bench/<name>.py."""
    if arguments and arguments[0] == INVARIANT:
        import_module("openmla.bench.invariance").run(arguments[1:])
        return 0
    if arguments and arguments[0] == REPORT:
        return run_report(arguments[1:])
    listed = [f"  {name:<21}{WHOLE.get(name) or purpose(name)}" for name in names()]
    listed.append(f"  {INVARIANT:<21}the cost of make_plan(batch_invariant=True)")
    listed.append(f"  {REPORT:<21}write the benchmarks page of the docs from results on disk")
    parser = Parser(
        prog="openmla bench",
        description="Check all backends, then time them round robin in one process. Kernels of "
        "FlashMLA, FlashInfer, DeepGEMM and vLLM are included if they are installed.",
        epilog="Benchmarks (openmla bench NAME --help lists the options of one):\n"
        + "\n".join(listed),
    )
    parser.add_argument("name", choices=names(), metavar="name", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its shapes and options")
    chosen = parser.parse_args(arguments)
    if chosen.name in WHOLE and find_spec("transformers") is None:
        raise UnsupportedError(
            f'bench: {chosen.name} needs transformers: pip install "openmla[hf]".'
        )
    import_module(f"openmla.bench.{chosen.name}").run(chosen.arguments)
    return 0


def run_report(arguments: Sequence[str]) -> int:
    """The benchmarks page, from the JSON files of earlier runs."""
    parser = Parser(
        prog="openmla bench report",
        description="Write benchmarks.md and its pictures from the JSON files of a folder.",
    )
    parser.add_argument(
        "--results",
        default="bench/results",
        metavar="DIR",
        help="folder of JSON files (default: %(default)s)",
    )
    parser.add_argument(
        "--docs", default="docs", metavar="DIR", help="folder of the page (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    results, docs = Path(options.results), Path(options.docs)
    for option, folder in (("--results", results), ("--docs", docs)):
        if not folder.is_dir():
            raise ConfigError(
                f"bench report: {option} {str(folder)!r} is not a folder. Run this in a clone of "
                "the repository, or give one."
            )
    files = sorted(results.glob("*.json"))
    if not files:
        raise ConfigError(
            f"bench report: --results {str(results)!r} has no JSON files. Write some with "
            "openmla bench NAME --json FILE."
        )
    for file in files:
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"bench report: {file.name} is not valid JSON: {error}.") from error
    if find_spec("matplotlib") is None:
        raise UnsupportedError('bench report needs matplotlib: pip install "openmla[plot]".')
    (docs / "images").mkdir(exist_ok=True)
    import_module("openmla.bench.report").write_benchmarks_page(results, docs)
    note(f"wrote {docs / 'benchmarks.md'}")
    return 0
