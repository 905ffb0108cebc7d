"""`openmla bench <name>`: times the backends of an op, a decode step, or a whole model."""

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
    "step": "one decode step of a layer, against transformers' module and expanded caches",
    "generate": "decode of a whole random model, against plain transformers",
}


INVARIANT = "--batch-invariant"


def names() -> tuple[str, ...]:
    """What there is to run: the files of openmla/bench."""
    folder = Path(__file__).parent.parent / "bench"
    found = {path.stem for path in folder.glob("[!_]*.py")} - {"harness"}
    return (*sorted(found & set(BACKENDS)), *(name for name in WHOLE if name in found))


def run_bench(arguments: Sequence[str]) -> int:
    """Hand the rest of the command line to openmla/bench/<name>.py."""
    if arguments and arguments[0] == INVARIANT:
        import_module("openmla.bench.invariance").run(arguments[1:])
        return 0
    listed = [f"  {name:<21}{WHOLE.get(name, 'the backends of this op')}" for name in names()]
    listed.append(f"  {INVARIANT:<21}what make_plan(batch_invariant=True) costs")
    parser = Parser(
        prog="openmla bench",
        description="Contenders are checked, then timed in turns in one process.",
        epilog="names, each with a --help of its own:\n" + "\n".join(listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=names(), metavar="name", help="what to time, see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="shapes and options of it")
    chosen = parser.parse_args(arguments)
    if chosen.name in WHOLE and find_spec("transformers") is None:
        raise UnsupportedError(
            f'bench: {chosen.name} needs transformers: pip install "openmla[hf]".'
        )
    import_module(f"openmla.bench.{chosen.name}").run(chosen.arguments)
    return 0
