"""`openmla size`: how much context fits on some GPUs, and the least time of a decode step."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from openmla.cli.gpus import GPUS, gpu
from openmla.cli.options import Parser, picture_file, whole
from openmla.cli.size_report import Report, Row, as_json, draw, render
from openmla.config import PRESETS, MLAConfig
from openmla.config.schema import MAX_POSITIONS
from openmla.errors import ConfigError, UnsupportedError
from openmla.plan.roofline import predict
from openmla.plan.sizes import (
    HEADS,
    SCHEDULES,
    Split,
    Step,
    room,
    token_bytes,
    tokens_that_fit,
)

MOST_RANKS = 1024
GIB = 2**30
HYBRID = ("kimi_linear", "bailing_hybrid")  # most of their layers are no MLA
BLOCK_SIZE, V4_BLOCK_SIZE = 64, 256


def run_size(arguments: Sequence[str]) -> int:
    """Check everything, work it out, print a table or JSON, draw if asked."""
    options = size_options(arguments)
    if options.plot and find_spec("matplotlib") is None:
        raise UnsupportedError('size: --plot needs matplotlib: pip install "openmla[plot]".')
    report = make_report(options)
    print(json.dumps(as_json(report), indent=2) if options.json else render(report))
    if options.plot:
        draw(report, options.plot)
    return 0


def number(low: float, high: float) -> Callable[[str], float]:
    """A type of option: a number in a range."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be a number from {low:g} to {high:g}, got {text[:40]!r}"
            )
        return value

    return read


def size_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="openmla size",
        description="Context that fits on some GPUs, and the least time of a decode step there.",
    )
    option = parser.add_argument
    option("--model", required=True, help="a preset, as deepseek-v3, or a folder with config.json")
    option("--gpu", type=gpu, required=True, help=f"{', '.join(GPUS)}; or GB,GB/s,TFLOP/s")
    option("--ranks", type=whole(1, MOST_RANKS), default=1, help="GPUs that share the context")
    option("--format", help="of cached rows; default: bf16")
    option("--index-format", default="index_fp8", help="of a sparse model's keys")
    option("--batch", type=whole(1, 65536), default=8, help="requests in a step; default: 8")
    option(
        "--context", type=whole(1, MAX_POSITIONS),
        help="keys of each; default: 32768, or what the model has positions for",
    )  # fmt: skip
    option(
        "--link-gbps", type=number(1e-3, 1e9), metavar="N",
        help="gigabits a second that leave a GPU, one way; default: sending takes no time",
    )  # fmt: skip
    option(
        "--link-us", type=number(0, 1e6), default=0.0, metavar="N",
        help="microseconds of each collective beside that; default: 0",
    )  # fmt: skip
    option(
        "--heads", choices=HEADS, default="own",
        help="own: each rank has its part of heads and weights; all: each has the whole model",
    )  # fmt: skip
    option("--schedule", choices=SCHEDULES, default="auto", help="how outputs are merged")
    option(
        "--weights-gib", type=number(0, 1e6), metavar="N",
        help="of the whole model; default: the folder's files, of a preset none",
    )  # fmt: skip
    option(
        "--read-gib", type=number(0, 1e6), metavar="N",
        help="weights that a step reads, where experts are left out; default: all",
    )  # fmt: skip
    option(
        "--memory-share", type=number(0.01, 1), default=0.9, metavar="N",
        help="of a GPU's memory, for weights and cache; default: 0.9",
    )  # fmt: skip
    option(
        "--block-size", type=whole(1, 65536), metavar="N",
        help="tokens of a block; default: 64, of V4 256",
    )  # fmt: skip
    option("--layers", type=whole(1, 10000), help="those with MLA; default: the model's")
    option("--json", action="store_true", help="print one JSON object")
    option(
        "--plot",
        type=picture_file,
        metavar="FILE",
        help="a picture of memory over context by format, and of the table, as .png",
    )
    return parser.parse_args(arguments)


def make_report(options: argparse.Namespace) -> Report:
    config, weights = read_model(options)
    if options.weights_gib is not None:
        weights = options.weights_gib * GIB
    read_weights = weights if options.read_gib is None else options.read_gib * GIB
    if read_weights > weights:
        raise ConfigError(
            f"size: --read-gib must be no more than the weights' {weights / GIB:g} GiB, "
            f"got {options.read_gib:g}."
        )
    context = options.context or min(config.max_positions, 32768)
    ranks = Split(options.ranks, options.heads, options.schedule)
    formats = options.format or "bf16", options.index_format
    step = Step(config, *formats, options.batch, context, ranks)
    machine = options.gpu._replace(latency=options.link_us * 1e-6)
    if options.link_gbps is not None:
        machine = machine._replace(link=options.link_gbps * 1e9 / 8)
    v4 = config.compressor is not None
    block_size = options.block_size or (V4_BLOCK_SIZE if v4 else BLOCK_SIZE)
    usable = options.memory_share * machine.memory

    def row(size: int) -> Row:
        held = weights / size if options.heads == "own" else weights
        try:
            each = replace(step, ranks=replace(ranks, size=size))
        except ConfigError:  # of all that is checked, only the ranks are other ones
            return Row(size, 0, None)
        fits = tokens_that_fit(each, usable - held, block_size)
        return Row(size, fits, predict(each, machine, read_weights))

    powers = {2**n for n in range(MOST_RANKS.bit_length())}
    sizes = sorted(powers | {options.ranks})
    return Report(
        options.model, step, machine, token_bytes(step), weights, read_weights,
        options.memory_share, block_size, room(step, block_size).fixed,
        [row(size) for size in sizes], row(options.ranks),
    )  # fmt: skip


def read_model(options: argparse.Namespace) -> tuple[MLAConfig, float]:
    """The config behind --model, and the bytes of its weights: 0 where that is not known."""
    name, weights = options.model, 0.0
    if name in PRESETS:
        config = PRESETS[name]
    elif name == "demo" or os.path.isfile(Path(name) / "config.json"):
        config, weights = _read_folder(name, counted=options.weights_gib is None)
    else:
        raise ConfigError(
            "size: --model must be demo, a folder with config.json or one of "
            f"{', '.join(known for known in PRESETS if not known.startswith('tiny'))}, "
            f"got {name[:200]!r}."
        )
    if options.layers is not None:
        config = replace(config, num_layers=options.layers)
    elif config.model_type in HYBRID:
        raise ConfigError(
            f"size: --layers must be given for {config.model_type}: how many of its "
            f"{config.num_layers} layers have MLA, got none."
        )
    return config, weights


def _read_folder(name: str, *, counted: bool) -> tuple[MLAConfig, float]:
    if find_spec("safetensors") is None:
        raise UnsupportedError('size: a folder needs safetensors: pip install "openmla[hf]".')
    from openmla.cli.checkpoint import DEMO, INDEX, SINGLE, open_checkpoint
    from openmla.config.huggingface import read_config

    folder = DEMO if name == "demo" else Path(name)
    config = read_config(folder, rotated=True)  # by the model, whatever its kind of rope
    if not counted:
        return config, 0.0
    if any((folder / file).exists() for file in (SINGLE, INDEX)):
        return config, open_checkpoint(name).num_bytes
    return config, sum(file.stat().st_size for file in folder.glob("pytorch_model*.bin"))
