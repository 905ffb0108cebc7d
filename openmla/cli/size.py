"""`openmla size`: how much context fits on some GPUs, and a lower bound on a decode step's time."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from openmla.cli.gpus import SIZED, gpu
from openmla.cli.hub import fetched, is_hub_id
from openmla.cli.options import Parser, add_model, add_plot, names, whole
from openmla.cli.pictures import check_plot
from openmla.cli.roofline import predict
from openmla.cli.size_report import Report, Row, as_json, draw, render
from openmla.cli.sizes import (
    HEADS,
    SCHEDULES,
    Split,
    Step,
    room,
    token_bytes,
    tokens_that_fit,
)
from openmla.cli.weights import FIELDS, Weights, estimated
from openmla.config import PRESETS, MLAConfig
from openmla.config.huggingface import read_config
from openmla.config.schema import MAX_POSITIONS
from openmla.config.sources import text_fields
from openmla.errors import ConfigError, UnsupportedError

MOST_RANKS = 1024
GIB = 2**30
HYBRID = ("kimi_linear", "bailing_hybrid")  # most of their layers are not MLA
BLOCK_SIZE, V4_BLOCK_SIZE = 64, 256


def run_size(arguments: Sequence[str]) -> int:
    """Check everything, compute, print a table or JSON, draw if asked."""
    options = size_options(arguments)
    check_plot("size", options.plot)
    report = make_report(options)
    print(json.dumps(as_json(report), indent=2) if options.json else render(report))
    if options.plot:
        draw(report, options.plot)
    return 0


def number(low: float, high: float) -> Callable[[str], float]:
    """Option type: a number in a range."""

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
        description="Compute how much context fits on your GPUs, and a lower bound on the time of "
        "a decode step there.",
    )
    option = parser.add_argument
    presets = ", ".join(name for name in PRESETS if not name.startswith("tiny"))
    add_model(
        parser,
        f'a preset ({presets}), "demo", a local folder with a config.json, or a Hugging Face model '
        "ID (owner/name), of which only the config is fetched",
    )
    option(
        "--gpu", type=gpu, required=True, metavar="GPU",
        help=f"GPU by name, {', '.join(SIZED)}, or as GB,GB/s,TFLOP/s",
    )  # fmt: skip
    option(
        "--ranks", type=whole(1, MOST_RANKS), default=1, metavar="N",
        help="number of GPUs that share the context (default: %(default)s)",
    )  # fmt: skip
    option(
        "--format", default="bf16", metavar="FORMAT",
        help=f"format of cached rows, {names('latent')} (default: %(default)s)",
    )  # fmt: skip
    option(
        "--index-format", default="index_fp8", metavar="FORMAT",
        help=f"cache format of a sparse model's indexer keys, {names('index')} "
        "(default: %(default)s)",
    )  # fmt: skip
    option(
        "--batch", type=whole(1, 65536), default=8, metavar="N",
        help="number of requests in a step (default: %(default)s)",
    )  # fmt: skip
    option(
        "--context", type=whole(1, MAX_POSITIONS), metavar="N",
        help="tokens of context per request (default: the model's context, at most 32768)",
    )  # fmt: skip
    option(
        "--link-gbps", type=number(1e-3, 1e9), metavar="N",
        help="gigabits per second that leave a GPU, one way (default: communication takes no time)",
    )  # fmt: skip
    option(
        "--link-us", type=number(0, 1e6), default=0.0, metavar="N",
        help="latency in microseconds of each collective (default: 0)",
    )  # fmt: skip
    option(
        "--heads", choices=HEADS, default="own",
        help="what each GPU has: its part of the heads and weights (own) or the whole model (all) "
        "(default: %(default)s)",
    )  # fmt: skip
    option(
        "--schedule", choices=SCHEDULES, default="auto",
        help="how partial outputs are merged across GPUs (default: %(default)s)",
    )  # fmt: skip
    option(
        "--weights-gib", type=number(0, 1e6), metavar="N",
        help="size of the whole model's weights (default: that of the folder's files, else "
        "estimated from the config)",
    )  # fmt: skip
    option(
        "--read-gib", type=number(0, 1e6), metavar="N",
        help="weights that a step reads, without the experts that no token selects (default: all, "
        "or with an estimate those of one token)",
    )  # fmt: skip
    option(
        "--memory-share", type=number(0.01, 1), default=0.9, metavar="N",
        help="part of a GPU's memory for weights and cache (default: %(default)s)",
    )  # fmt: skip
    option(
        "--block-size", type=whole(1, 65536), metavar="N",
        help="tokens per cache block (default: 64; 256 for V4)",
    )  # fmt: skip
    option(
        "--layers", type=whole(1, 10000), metavar="N",
        help="number of layers with MLA (default: all; required for hybrid models)",
    )  # fmt: skip
    option("--json", action="store_true", help="print one JSON object")
    add_plot(parser, "memory over context for every cache format, and the table")
    return parser.parse_args(arguments)


def make_report(options: argparse.Namespace) -> Report:
    config, weights = read_model(options)
    if options.weights_gib is not None:
        given = options.weights_gib * GIB
        weights = Weights(given, given, "as given by --weights-gib")
    if options.read_gib is not None:
        if weights is None or options.read_gib * GIB > weights.total:
            has = "unknown" if weights is None else f"{weights.total / GIB:g} GiB"
            raise ConfigError(
                f"size: --read-gib {options.read_gib:g} exceeds the weights' size, which is {has}. "
                "Give --weights-gib."
            )
        weights = weights._replace(read=options.read_gib * GIB)
    context = options.context or min(config.max_positions, 32768)
    ranks = Split(options.ranks, options.heads, options.schedule)
    step = Step(config, options.format, options.index_format, options.batch, context, ranks)
    machine = options.gpu._replace(latency=options.link_us * 1e-6)
    if options.link_gbps is not None:
        machine = machine._replace(link=options.link_gbps * 1e9 / 8)
    v4 = config.compressor is not None
    block_size = options.block_size or (V4_BLOCK_SIZE if v4 else BLOCK_SIZE)
    usable = options.memory_share * machine.memory

    def row(size: int) -> Row:
        held = weights.total if weights else 0.0
        held = held / size if options.heads == "own" else held
        try:
            each = replace(step, ranks=replace(ranks, size=size))
        except ConfigError:  # among all checked values only the ranks differ
            return Row(size, 0, None)
        fits = tokens_that_fit(each, usable - held, block_size)
        return Row(size, fits, predict(each, machine, weights.read if weights else 0.0))

    powers = {2**n for n in range(MOST_RANKS.bit_length())}
    sizes = sorted(powers | {options.ranks})
    return Report(
        options.model, step, machine, token_bytes(step), weights, options.memory_share,
        block_size, room(step, block_size).fixed, [row(size) for size in sizes], row(options.ranks),
    )  # fmt: skip


def read_model(options: argparse.Namespace) -> tuple[MLAConfig, Weights | None]:
    """The config behind --model, and its weights if their size is known from it."""
    name = options.model
    if name in PRESETS:
        config, weights = PRESETS[name], estimated(PRESETS[name], FIELDS.get(name, {}))
    elif name == "demo" or os.path.isfile(Path(name) / "config.json") or is_hub_id(name):
        config, weights = _read_folder(name, counted=options.weights_gib is None)
    else:
        near = get_close_matches(name[-200:].lower().split("/")[-1], PRESETS)
        nearest = f" Nearest preset: {near[0]}." if near else ""
        raise ConfigError(
            f"size: {name[:200]!r} is no preset, not demo, no folder with a config.json and no "
            f"model ID."
            f"{nearest} See openmla size --help."
        )
    if options.layers is not None:
        config = replace(config, num_layers=options.layers)
    elif config.model_type in HYBRID:
        raise ConfigError(
            f"size: only some of the {config.num_layers} layers of a {config.model_type} model "
            "have MLA. Give their number by --layers."
        )
    return config, weights


def _read_folder(name: str, *, counted: bool) -> tuple[MLAConfig, Weights | None]:
    if find_spec("safetensors") is None:
        raise UnsupportedError('size: a folder needs safetensors: pip install "openmla[hf]".')
    from openmla.cli.checkpoint import DEMO, INDEX, SINGLE, open_checkpoint

    folder = DEMO if name == "demo" else Path(name)
    if is_hub_id(name):
        folder = fetched(name, weights=False)
    config = read_config(folder, rotated=True)  # read as if rotated by the model, for any RoPE type
    if config.kinds:
        raise UnsupportedError(
            f"size: {config.model_type} is not supported, because its layers differ in size. "
            "Attach the model and print openmla.attachment_of(model).memory()."
        )
    if not counted:
        return config, None
    if any((folder / file).exists() for file in (SINGLE, INDEX)):
        size = open_checkpoint(str(folder)).num_bytes
    else:
        size = sum(file.stat().st_size for file in folder.glob("pytorch_model*.bin"))
    if not size:
        return config, estimated(config, text_fields(folder)[0])
    return config, Weights(float(size), float(size), "by the folder's files")
