"""`openmla bench <name>`: runs a benchmark of the source tree this package was installed from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import openmla
from openmla.errors import ConfigError, UnsupportedError


def run_bench(name: str, arguments: Sequence[str]) -> int:
    """Benchmarks live beside the package, not in it: bench/<name>.py of a clone."""
    root = Path(openmla.__file__).resolve().parent.parent
    names = sorted(path.stem for path in (root / "bench").glob("[!_]*.py"))
    names = [found for found in names if found != "harness"]
    if not names:
        raise UnsupportedError(
            "bench: the benchmarks are not installed with the package. Run this from a clone, "
            "installed with pip install -e ."
        )
    if name not in names:
        raise ConfigError(f"bench: {name!r} is not known. Known: {', '.join(names)}.")
    sys.path.insert(0, str(root))
    import_module(f"bench.{name}").run(arguments)
    return 0
