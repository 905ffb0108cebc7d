"""Entry point of the `openmla` command: one subcommand per file of this folder."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

import torch

from openmla import __version__
from openmla.cli.options import (
    Parser,
    bisect_options,
    calibrate_options,
    eval_options,
    generate_options,
)
from openmla.errors import ConfigError, OpenMLAError, UnsupportedError

COMMANDS = {
    "doctor": "what this machine can run, and why not the rest",
    "generate": "text from a Hugging Face MLA model, as it comes",
    "eval": "bits per byte for every cache format",
    "calibrate": "scales of a model's fp8 cache, found on a text",
    "bisect": "which component of a model's attention is wrong",
    "size": "context that fits on some GPUs, and the least time of a decode step",
    "bench": "time the backends of an op, a step, or a whole model",
}
INTERRUPTED, PIPE_CLOSED = 130, 141  # what shells show for SIGINT and SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status: 2 after a sentence about what is wrong."""
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        except OpenMLAError as error:
            print(f"openmla: {_one_line(error)}", file=sys.stderr)
            return 2
        except (MemoryError, torch.OutOfMemoryError) as error:
            print(f"openmla: out of memory: {_one_line(error)}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("openmla: interrupted.", file=sys.stderr)
            return INTERRUPTED
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read this has left, as `| head` does
        # the interpreter flushes its own stream once more when it ends
        if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
        return PIPE_CLOSED


def _run(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="openmla",
        description="Multi-head latent attention for inference.",
        epilog="commands, each with a --help of its own:\n"
        + "\n".join(f"  {name:<10}{text}" for name, text in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"openmla {__version__}")
    parser.add_argument(
        "--import", action="append", default=[], metavar="MODULE", dest="modules",
        help="import this first, as a module that calls register_backend()",
    )  # fmt: skip
    parser.add_argument("command", choices=COMMANDS, metavar="command")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for the command")
    rest.required = False  # or argparse would name it as missing
    chosen = parser.parse_args(arguments)
    _import_first(chosen.modules)
    if chosen.command == "doctor":
        from openmla.cli.doctor import run_doctor

        return run_doctor(chosen.arguments)
    if chosen.command == "bench":
        from openmla.cli.bench import run_bench

        return run_bench(chosen.arguments)
    if chosen.command == "size":
        from openmla.cli.size import run_size

        return run_size(chosen.arguments)
    readers = {
        "generate": generate_options,
        "eval": eval_options,
        "calibrate": calibrate_options,
        "bisect": bisect_options,
    }
    options = readers[chosen.command](chosen.arguments)
    for package in ("transformers", "safetensors"):
        if find_spec(package) is None:
            raise UnsupportedError(f'{chosen.command}: needs {package}: pip install "openmla[hf]".')
    from openmla.cli.hub import stay_offline

    stay_offline(options.model)
    if chosen.command == "generate":
        from openmla.cli.generate import run_generate

        return run_generate(options)
    if chosen.command == "calibrate":
        from openmla.cli.calibrate import run_calibrate

        return run_calibrate(options)
    if chosen.command == "bisect":
        from openmla.cli.bisect import run_bisect

        return run_bisect(options)
    from openmla.cli.eval import run_eval

    return run_eval(options)


def _import_first(modules: Sequence[str]) -> None:
    """From where the command is called, too: its own folder is what a script would have."""
    if modules and "" not in sys.path:
        sys.path.insert(0, "")
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            raise ConfigError(f"--import must be a module, got {name!r}: {error}.") from error


def _one_line(error: Exception) -> str:
    """Errors that list backends and their reasons, or quote others, have several."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return "; ".join(line for line in lines if line).replace(":; ", ": ")


if __name__ == "__main__":
    raise SystemExit(main())
