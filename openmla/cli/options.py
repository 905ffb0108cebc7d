"""Options of the commands, checked while parsing; this file needs no transformers."""

from __future__ import annotations

import argparse
import math
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from openmla.backends.choice import BackendChoice
from openmla.cache.format import FORMATS
from openmla.config.schema import MAX_POSITIONS
from openmla.errors import ConfigError

DTYPES = ("fp32", "bf16", "fp16")
DTYPE_NAMES = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
}
LEAST_SCALE = 1e-12  # with the largest inverse: no model's values need another
PICTURES = (".png", ".svg", ".pdf")
COOLEST, HOTTEST = 0.01, 100.0  # logits divided by less are infinite, by more all alike


class HelpText(argparse.HelpFormatter):
    """Help that wraps at the terminal's width and does not break words or option names. Lines of a
    description stay lines; continuations of indented ones begin under their second column."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(
            " ".join(text.split()), width, break_on_hyphens=False, break_long_words=False
        )

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = []
        for line in text.splitlines():
            column = re.match(r" +\S+ +", line)
            further = " " * len(column.group()) if column else ""
            lines += textwrap.wrap(
                line, width, initial_indent=indent, subsequent_indent=indent + further,
                break_on_hyphens=False, break_long_words=False,
            ) or [""]  # fmt: skip
        return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with one-line errors, like all others of openmla."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=HelpText, **options)

    def error(self, message: str) -> NoReturn:
        where = self.prog.removeprefix("openmla").strip()
        sentence = re.sub(r"^argument ([^\s/]+)(/\S+)?: must", r"\1 must", message).rstrip(".")
        raise ConfigError(f"{where + ': ' if where else ''}{sentence}. See {self.prog} --help.")


def whole(low: int, high: int) -> Callable[[str], int]:
    """Option type: a whole number in a range."""

    def read(text: str) -> int:
        # int() also accepts underscores, and raises ValueError for thousands of digits
        value = int(text) if re.fullmatch(r"[+-]?\d{1,20}", text) else None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {low} to {high}, got {text[:40]!r}"
            )
        return value

    return read


def temperature(text: str) -> float:
    """Option type: 0, or a number that logits can be divided by."""
    value = _number(text)
    if value != 0 and not COOLEST <= value <= HOTTEST:
        raise argparse.ArgumentTypeError(
            f"must be 0 or a number from {COOLEST} to {HOTTEST:.0f}, got {text[:40]!r}"
        )
    return value


def probability(text: str) -> float:
    """Option type: a probability above 0."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text[:40]!r}")
    return value


def dtype(text: str) -> str | None:
    """Option type: a dtype by openmla's name, or by that of transformers and vLLM."""
    name = DTYPE_NAMES.get(text, text)
    if name != "auto" and name not in DTYPES:
        known = ", ".join(("auto", *DTYPES, *DTYPE_NAMES))
        raise argparse.ArgumentTypeError(f"must be one of {known}, got {text[:40]!r}")
    return None if name == "auto" else name


def headroom(text: str) -> float:
    """Option type: a safety margin of at least 1."""
    value = _number(text)
    if not 1 <= value <= 1024:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 1024, got {text[:40]!r}")
    return value


def kv_scale(text: str) -> float | str:
    """Option type: a scale, the name of a file with scales, or "first"."""
    value = _number(text)
    if math.isnan(value) and text.strip().lower() != "nan":
        return text
    if not LEAST_SCALE <= value <= 1 / LEAST_SCALE:
        raise argparse.ArgumentTypeError(
            f"must be positive and from {LEAST_SCALE:g} to {1 / LEAST_SCALE:g}, or a file, "
            f"got {text[:40]!r}"
        )
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def output_file(text: str) -> str:
    """Option type: a file that can be written at the end."""
    if not os.path.isdir(os.path.dirname(text) or ".") or os.path.isdir(text):
        raise argparse.ArgumentTypeError(
            f"must be a file in an existing folder, got {text[:200]!r}"
        )
    return text


def picture_file(text: str) -> str:
    """Option type: an output file in a supported picture format."""
    if not text.lower().endswith(PICTURES):
        raise argparse.ArgumentTypeError(
            f"must be a file that ends in {', '.join(PICTURES)}, got {text[:200]!r}"
        )
    return output_file(text)


def backend(text: str) -> BackendChoice:
    """Option type: a name, or names per op such as mha_ragged=sdpa,mqa_paged=triton."""
    if "=" not in text:
        return text
    asked: dict[str, str] = {}
    for part in text.split(","):
        op, sign, name = (word.strip() for word in part.partition("="))
        if not (op and sign and name) or op in asked:
            raise argparse.ArgumentTypeError(
                f"must be a name, or op=name with commas between, each op once, got {text[:80]!r}"
            )
        asked[op] = name
    return asked


def add_model(parser: argparse.ArgumentParser, what: str, default: str | None = None) -> None:
    """Add the model argument, positional or as --model."""
    group = parser.add_mutually_exclusive_group(required=default is None)
    # the default of an omitted positional would replace the value of --model
    group.add_argument("model", nargs="?", metavar="MODEL", help=what, default=argparse.SUPPRESS)
    again = "the model, if it is not the first argument"
    group.add_argument("--model", metavar="MODEL", help=again, default=default)


def _model_parser(command: str, description: str) -> Parser:
    """The common options of generate, eval, calibrate and bisect."""
    parser = Parser(prog=f"openmla {command}", description=description)
    add_model(parser, '"demo", a local folder, or a Hugging Face model ID (owner/name)')
    parser.add_argument("--revision", help="Hub branch, tag or commit (default: main)")
    default = "both" if command == "eval" else "sparse; dense for the demo"
    parser.add_argument(
        "--attention",
        choices=("dense", "sparse"),
        help="run a V3.2 checkpoint with its indexer (sparse) or without it (dense) "
        f"(default: {default})",
    )
    if command != "calibrate":
        parser.add_argument(
            "--index-format", default="index_fp32", metavar="FORMAT",
            help=f"cache format of a sparse model's indexer keys, {names('index')} "
            "(default: %(default)s)",
        )  # fmt: skip
    parser.add_argument(
        "--dtype", type=dtype, metavar="DTYPE",
        help=f"dtype to compute in, {', '.join(DTYPES)} (default: the checkpoint's dtype, or fp32 "
        "on a CPU that cannot run bf16)",
    )  # fmt: skip
    parser.add_argument(
        "--device",
        help="device to run on, such as cpu or cuda:0 (default: cuda if available, else cpu)",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="load pytorch_model.bin if there are no safetensors; a pickle can run any code",
    )
    return parser


def names(holds: str) -> str:
    """Cache formats for latent rows or for indexer keys."""
    return ", ".join(name for name, layout in FORMATS.items() if layout.holds == holds)


def _add_windows(parser: Parser) -> None:
    """Options for a text and the parts of it to use."""
    parser.add_argument(
        "--text", metavar="FILE",
        help="text file to measure on (default: the demo's held-out text; required for other "
        "models)",
    )  # fmt: skip
    parser.add_argument(
        "--windows", type=whole(1, 4096), default=4, metavar="N",
        help="number of chunks taken from the text, evenly spaced (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=whole(2, MAX_POSITIONS), metavar="N",
        help="tokens per chunk (default: the model's context, at most 4096)",
    )  # fmt: skip


def _add_step(parser: Parser) -> None:
    """Options for the steps of an attached model."""
    parser.add_argument(
        "--cache-format", metavar="FORMAT",
        help=f"format of cached rows, {names('latent')} (default: the model's dtype)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-scale", type=kv_scale, metavar="S",
        help="scale of an fp8 cache: a number, a file written by openmla calibrate, or first to "
        "measure the first prompt (default: the checkpoint's scales, or 1)",
    )  # fmt: skip
    parser.add_argument(
        "--backend", type=backend, default="auto", metavar="NAME",
        help="backend of all ops, auto or a name that openmla doctor lists, or a backend per op as "
        "in mha_ragged=sdpa,mqa_paged=triton (default: %(default)s)",
    )  # fmt: skip


def add_plot(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--plot", type=picture_file, metavar="FILE",
        help=f"draw {what}, as {', '.join(PICTURES[:-1])} or {PICTURES[-1]} (default: no picture)",
    )  # fmt: skip


def generate_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _model_parser(
        "generate",
        "Generate text with a Hugging Face MLA model. Text is streamed to standard output, "
        "progress to standard error.",
    )
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT",
        help="text to continue, @FILE to read a file, or - for stdin; repeat for several prompts "
        "(default: piped stdin, or a built-in prompt for the demo)",
    )  # fmt: skip
    parser.add_argument(
        "--chat", action="store_true",
        help="send the prompt as a user's message, by the tokenizer's chat template; in a terminal "
        "without --prompt, chat turn by turn",
    )  # fmt: skip
    parser.add_argument(
        "--system-prompt", metavar="TEXT", help="system message of a chat (default: none)"
    )
    parser.add_argument(
        "--max-new-tokens", "--max-tokens", type=whole(1, MAX_POSITIONS), default=128, metavar="N",
        help="most tokens to generate per prompt (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=temperature, metavar="T",
        help="sampling temperature; 0 takes the most likely token (default: 0; 0.7 for the demo)",
    )  # fmt: skip
    parser.add_argument(
        "--top-p", type=probability, default=1.0, metavar="P",
        help="sample from the smallest set of tokens with total probability P (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--top-k", type=whole(0, 2**31), default=0, metavar="K",
        help="sample from the K most likely tokens (default: 0 = all)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=whole(0, 2**63 - 1), default=0, metavar="N",
        help="random seed for sampling (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--device-map", metavar="MAP",
        help="how transformers places the model's layers, auto, balanced, sequential or a device "
        "(default: all on --device)",
    )  # fmt: skip
    told = parser.add_mutually_exclusive_group()
    told.add_argument(
        "--json", action="store_true",
        help="print one JSON object at the end: texts, tokens, tokens per second",
    )  # fmt: skip
    told.add_argument("--quiet", "-q", action="store_true", help="print only the new text")
    _add_step(parser)
    parser.add_argument(
        "--absorbed-format", choices=("fp8",),
        help="format of the absorbed kv_b_proj weights that decode multiplies by "
        "(default: the model's dtype)",
    )  # fmt: skip
    parser.add_argument(
        "--query-dtype", choices=("fp8", "fp8_static"),
        help="dtype of decode queries, fp8 or fp8_static (with calibrated scales) "
        "(default: the model's dtype)",
    )  # fmt: skip
    parser.add_argument(
        "--prefill-dtype", choices=("fp8",),
        help="dtype of expanded queries and keys in prefill (default: the model's dtype)",
    )  # fmt: skip
    parser.add_argument(
        "--capture", action=argparse.BooleanOptionalAction,
        help="capture decode steps as CUDA graphs (default: only on a GPU)",
    )  # fmt: skip
    parser.add_argument(
        "--compare", action="store_true", help="also run plain transformers, and compare"
    )
    options = parser.parse_args(arguments)
    if options.system_prompt is not None and not options.chat:
        parser.error("--system-prompt needs --chat")
    if options.device_map is not None and options.device is not None:
        parser.error("--device-map must not be given with --device")
    sampled = options.temperature or (options.temperature is None and options.model == "demo")
    if not sampled and (options.top_k or options.top_p < 1):
        parser.error("--top-k and --top-p need a --temperature above 0")
    if options.quiet and options.compare:
        parser.error("--compare has nothing to print with --quiet")
    return options


def calibrate_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _model_parser("calibrate", "Find scales for a model's fp8 cache on a text.")
    _add_windows(parser)
    parser.add_argument(
        "--headroom", type=headroom, default=2.0, metavar="H",
        help="safety margin; scales cover H times the largest value seen (default: 2)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=output_file, default="scales.safetensors", metavar="FILE",
        help="file to write the scales to (default: %(default)s)",
    )  # fmt: skip
    return parser.parse_args(arguments)


def eval_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _model_parser(
        "eval", "Measure bits per byte of a text for every cache format, dense and sparse."
    )
    _add_windows(parser)
    parser.add_argument(
        "--formats", metavar="LIST",
        help=f"cache formats to compare, separated by commas, {names('latent')}, fp8+scales "
        "(default: all that fit the model, and rows for fp8 weights, queries and prefill)",
    )  # fmt: skip
    add_plot(
        parser,
        "cache bytes against bits per byte, compared with plain transformers; for a sparse model "
        "FILE-keys shows which keys each layer selects",
    )
    return parser.parse_args(arguments)


def bisect_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _model_parser(
        "bisect", "Find the component of a model's attention that is wrong, against float64."
    )
    parser.add_argument(
        "--prompt", metavar="TEXT",
        help="text to compare on, @FILE to read a file, or - for stdin (default: piped stdin, or "
        "a built-in prompt for the demo)",
    )  # fmt: skip
    parser.add_argument(
        "--against", metavar="DUMP",
        help="dump of another engine, in the layout of docs/bisect.md (default: run openmla)",
    )  # fmt: skip
    _add_step(parser)
    parser.add_argument(
        "--save", type=output_file, metavar="FILE",
        help="write openmla's own dump to a file (default: not written)",
    )  # fmt: skip
    add_plot(parser, "errors by layer and component")
    return parser.parse_args(arguments)
