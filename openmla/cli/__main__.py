"""Entry point of the `openmla` command: one subcommand per file of this folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run one subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="openmla", description="Multi-head latent attention for inference."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser("doctor", help="what this machine can run, and why not the rest")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)

    from openmla.cli.doctor import run_doctor

    return run_doctor(as_json=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
