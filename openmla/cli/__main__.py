"""Entry point of the `openmla` command: one subcommand per file of this folder."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from openmla import __version__
from openmla.cli.hub import stay_offline
from openmla.cli.options import (
    Parser,
    bisect_options,
    calibrate_options,
    eval_options,
    generate_options,
)
from openmla.cli.terminal import note, quiet
from openmla.errors import ConfigError, OpenMLAError, UnsupportedError

COMMANDS = {
    "doctor": "report what this machine can run, and why not the rest",
    "generate": "generate text with a Hugging Face MLA model",
    "eval": "measure bits per byte of a text for every cache format",
    "calibrate": "find scales for a model's fp8 cache on a text",
    "bisect": "find the component of a model's attention that is wrong",
    "size": "compute how much context fits on your GPUs, and a lower bound on step time",
    "bench": "time the backends of an op, a step, or a whole model",
}
# Commands that run a Hugging Face model; their options are read before transformers is imported.
OPTIONS = {
    "generate": generate_options,
    "eval": eval_options,
    "calibrate": calibrate_options,
    "bisect": bisect_options,
}
INTERRUPTED, PIPE_CLOSED = 130, 141  # exit status for SIGINT and SIGPIPE, as in shells


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit status: 2 after a one-line error."""
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
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        # the interpreter flushes its own stream once more at exit
        if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
        return PIPE_CLOSED


def _run(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="openmla",
        description="Multi-head latent attention for inference.",
        epilog="Commands (openmla COMMAND --help lists the options of one):\n"
        + "\n".join(f"  {name:<11}{text}" for name, text in COMMANDS.items()),
    )
    parser.add_argument("--version", action="version", version=f"openmla {__version__}")
    parser.add_argument(
        "--import", action="append", default=[], metavar="MODULE", dest="modules",
        help="import a module first, such as one that calls register_backend()",
    )  # fmt: skip
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of those below")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its options")
    rest.required = False  # otherwise argparse would report it as missing
    chosen = parser.parse_args(arguments)
    name, options = chosen.command, chosen.arguments
    _import_first(chosen.modules)
    if name in OPTIONS:
        options = OPTIONS[name](options)
        for package in ("transformers", "safetensors"):
            if find_spec(package) is None:
                raise UnsupportedError(f'{name} needs {package}: pip install "openmla[hf]".')
        stay_offline(options.model)
        if "transformers" not in sys.modules:
            with quiet(getattr(options, "quiet", False)):
                note("importing transformers")
    command: Callable[[Any], int] = getattr(import_module(f"openmla.cli.{name}"), f"run_{name}")
    return command(options)


def _import_first(modules: Sequence[str]) -> None:
    """Make modules of the current folder importable, as in a script."""
    if modules and "" not in sys.path:
        sys.path.insert(0, "")
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"--import {name}: the module cannot be imported: {error}."
            ) from error


def _one_line(error: Exception) -> str:
    """Join the lines of an error that lists backends and their reasons, or quotes others."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return "; ".join(line for line in lines if line).replace(":; ", ": ")


if __name__ == "__main__":
    raise SystemExit(main())
