"""Entry point of the `openmla` command: one subcommand per file of this folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from openmla.errors import OpenMLAError, UnsupportedError


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run one subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="openmla", description="Multi-head latent attention for inference."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser("doctor", help="what this machine can run, and why not the rest")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.add_argument(
        "--compile", metavar="TARGET", help="compile every kernel: all, or one such as sm_90"
    )
    bench = commands.add_parser(
        "bench", help="time the backends of an op, or a step", add_help=False
    )
    bench.add_argument("name", help="an op of the support table, or step")
    help_text = "text from a Hugging Face MLA model on disk"
    commands.add_parser("generate", help=help_text, add_help=False)
    commands.add_parser("eval", help="bits per byte for every cache format", add_help=False)
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command == "doctor":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if options.command == "bench":
            from openmla.cli.bench import run_bench

            return run_bench(options.name, rest)
        if options.command in ("generate", "eval"):
            if find_spec("transformers") is None:
                raise UnsupportedError(
                    f'{options.command}: needs transformers: pip install "openmla[hf]".'
                )
            if options.command == "eval":
                from openmla.cli.eval import run_eval

                return run_eval(rest)
            from openmla.cli.generate import run_generate

            return run_generate(rest)
        if options.compile:
            from openmla.cli.compile import run_compile

            return run_compile(options.compile)
        from openmla.cli.doctor import run_doctor

        return run_doctor(as_json=options.json)
    except OpenMLAError as error:
        print(f"openmla: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
