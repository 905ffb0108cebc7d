"""`openmla bench <name>`: time the backends of an op, of a step or of a whole model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from openmla.backends import BACKENDS
from openmla.cli.options import Parser
from openmla.errors import UnsupportedError

WHOLE = {
    "step": "a decode step of a layer, compared with transformers' module and expanded caches",
    "generate": "decode of a whole random model, compared with plain transformers",
}


INVARIANT = "--batch-invariant"


def names() -> tuple[str, ...]:
    """Names of the benchmarks: the files of openmla/bench."""
    folder = Path(__file__).parent.parent / "bench"
    found = {path.stem for path in folder.glob("[!_]*.py")}
    return (*sorted(found & set(BACKENDS)), *(name for name in WHOLE if name in found))


def purpose(op: str) -> str:
    """What an op does, from the first line of its module's docstring."""
    first = (import_module(f"openmla.ops.{op}").__doc__ or "").splitlines()[0]
    return first.partition(": ")[2].rstrip(".")


def run_bench(arguments: Sequence[str]) -> int:
    """Pass the rest of the command line to the harness, or to a benchmark with its own options."""
    if arguments and arguments[0] == INVARIANT:
        import_module("openmla.bench.invariance").run(arguments[1:])
        return 0
    listed = [f"  {name:<21}{WHOLE.get(name) or purpose(name)}" for name in names()]
    listed.append(f"  {INVARIANT:<21}the cost of make_plan(batch_invariant=True)")
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
    if chosen.name not in WHOLE:
        import_module("openmla.bench.harness").main(chosen.name, chosen.arguments)
        return 0
    if find_spec("transformers") is None:
        raise UnsupportedError(
            f'bench: {chosen.name} needs transformers: pip install "openmla[hf]".'
        )
    import_module(f"openmla.bench.{chosen.name}").run(chosen.arguments)
    return 0
