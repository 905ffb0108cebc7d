"""Entry point of the `openmla` command. It is outside the package because importing the package
imports PyTorch, which takes seconds; this prints a line first."""

from __future__ import annotations

import sys

SILENT = {"-q", "--quiet", "-h", "--help", "--version"}


def main() -> int:
    if len(sys.argv) > 1 and SILENT.isdisjoint(sys.argv):
        print("openmla: importing PyTorch", file=sys.stderr, flush=True)
    from openmla.cli.__main__ import main as run

    return run()
