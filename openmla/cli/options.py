"""Options of the commands, checked as they are read; nothing here needs transformers."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from openmla.backends.choice import BackendChoice
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
LEAST_SCALE = 1e-12  # its inverse is the largest: no model's values need another
PICTURES = (".png", ".svg", ".pdf")
COOLEST, HOTTEST = 0.01, 100.0  # logits over less are infinite, over more all alike


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one sentence, like all others here."""

    def error(self, message: str) -> NoReturn:
        where = self.prog.removeprefix("openmla").strip()
        sentence = re.sub(r"^argument ([^\s/]+)(/\S+)?: must", r"\1 must", message).rstrip(".")
        raise ConfigError(f"{where + ': ' if where else ''}{sentence}. See {self.prog} --help.")


def whole(low: int, high: int) -> Callable[[str], int]:
    """A type of option: a whole number in a range."""

    def read(text: str) -> int:
        # int() takes underscores too, and refuses thousands of digits with a ValueError
        value = int(text) if re.fullmatch(r"[+-]?\d{1,20}", text) else None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {low} to {high}, got {text[:40]!r}"
            )
        return value

    return read


def temperature(text: str) -> float:
    """A type of option: 0, or what logits can be divided by."""
    value = _number(text)
    if value != 0 and not COOLEST <= value <= HOTTEST:
        raise argparse.ArgumentTypeError(
            f"must be 0 or a number from {COOLEST} to {HOTTEST:.0f}, got {text[:40]!r}"
        )
    return value


def probability(text: str) -> float:
    """A type of option: a share of what is likely."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text[:40]!r}")
    return value


def dtype(text: str) -> str | None:
    """A type of option: a dtype as here, or as transformers and vLLM call it."""
    name = DTYPE_NAMES.get(text, text)
    if name != "auto" and name not in DTYPES:
        known = ", ".join(("auto", *DTYPES, *DTYPE_NAMES))
        raise argparse.ArgumentTypeError(f"must be one of {known}, got {text[:40]!r}")
    return None if name == "auto" else name


def headroom(text: str) -> float:
    """A type of option: a number that makes room, not less."""
    value = _number(text)
    if not 1 <= value <= 1024:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 1024, got {text[:40]!r}")
    return value


def kv_scale(text: str) -> float | str:
    """A type of option: a scale, the name of a file with scales, or "first"."""
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
    """A type of option: a file that can be written when the work is done."""
    if not os.path.isdir(os.path.dirname(text) or ".") or os.path.isdir(text):
        raise argparse.ArgumentTypeError(
            f"must be a file in a folder that is there, got {text[:200]!r}"
        )
    return text


def picture_file(text: str) -> str:
    """A type of option: such a file, of a kind that can be drawn."""
    if not text.lower().endswith(PICTURES):
        raise argparse.ArgumentTypeError(
            f"must be a file that ends in {', '.join(PICTURES)}, got {text[:200]!r}"
        )
    return output_file(text)


def backend(text: str) -> BackendChoice:
    """A type of option: a name, or names per op as mha_ragged=sdpa,mqa_paged=triton."""
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


def _model_parser(command: str, description: str) -> Parser:
    """What generate, eval, calibrate and bisect have in common."""
    parser = Parser(prog=f"openmla {command}", description=description)
    parser.add_argument(
        "--model", required=command != "generate",
        help="demo, a folder with config and weights, or an id of a hub, as owner/model",
    )  # fmt: skip
    parser.add_argument(
        "--attention",
        choices=("dense", "sparse"),
        help="of a V3.2 checkpoint, with or without its indexer; default: sparse and of the demo "
        "dense, eval both",
    )
    if command != "calibrate":
        parser.add_argument("--index-format", default="index_fp32", help="of a sparse model's keys")
    parser.add_argument(
        "--dtype", type=dtype, help=f"{', '.join(DTYPES)}; default: the checkpoint's, if it runs"
    )
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="load pytorch_model.bin where there are no safetensors; a pickle can run any code",
    )
    return parser


def _add_windows(parser: Parser) -> None:
    """A text, and which parts of it are looked at."""
    parser.add_argument("--text", help="a file; default: what was held out of the demo's training")
    parser.add_argument(
        "--windows", type=whole(1, 4096), default=4, help="how many stretches of the text"
    )
    parser.add_argument(
        "--context", type=whole(2, MAX_POSITIONS), help="tokens of a stretch; default: 4096 at most"
    )


def _add_step(parser: Parser) -> None:
    """How an attached model's steps run."""
    parser.add_argument("--cache-format", help="a key of FORMATS; default: as the model")
    parser.add_argument(
        "--kv-scale", type=kv_scale, metavar="S",
        help="scale of an fp8 cache: a number, a file that calibrate wrote, or first, which "
        "measures the first prompt (default: the checkpoint's scales, or 1)",
    )  # fmt: skip
    parser.add_argument(
        "--backend", type=backend, default="auto",
        help="auto, one that doctor lists, or one per op: mha_ragged=sdpa,mqa_paged=triton",
    )  # fmt: skip


def generate_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _model_parser(
        "generate",
        "Text from a Hugging Face MLA model, printed as it comes. Results go to standard output, "
        "progress to the error stream.",
    )
    parser.add_argument("named", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT",
        help="the text to continue, @FILE, or - for standard input, which is read anyway where no "
        "prompt is given and it is no terminal; several: one after the other; the demo has one",
    )  # fmt: skip
    parser.add_argument(
        "--chat", action="store_true",
        help="as a message of a user, by the tokenizer's chat template; in a terminal without "
        "--prompt turn by turn",
    )  # fmt: skip
    parser.add_argument("--system-prompt", metavar="TEXT", help="what a chat begins with")
    parser.add_argument(
        "--max-new-tokens", "--max-tokens", type=whole(1, MAX_POSITIONS), default=128, metavar="N",
        help="default: 128",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=temperature, metavar="T",
        help="0 takes the likeliest token; default: 0, the demo 0.7",
    )  # fmt: skip
    parser.add_argument(
        "--top-p", type=probability, default=1.0, metavar="P", help="likeliest tokens of this share"
    )
    parser.add_argument(
        "--top-k", type=whole(0, 2**31), default=0, metavar="K", help="so many likeliest; 0: all"
    )
    parser.add_argument(
        "--seed", type=whole(0, 2**63 - 1), default=0, help="of the choice, if temperature > 0"
    )
    parser.add_argument(
        "--device-map", metavar="MAP",
        help="where transformers puts parts of the model: auto, balanced, sequential or a device",
    )  # fmt: skip
    parser.add_argument("--revision", help="branch, tag or commit of a hub's model")
    told = parser.add_mutually_exclusive_group()
    told.add_argument(
        "--json", action="store_true",
        help="print one JSON object at the end: texts, tokens, tokens per second",
    )  # fmt: skip
    told.add_argument("--quiet", "-q", action="store_true", help="print the new text only")
    _add_step(parser)
    parser.add_argument(
        "--absorbed-format", choices=("fp8",),
        help="of what decode multiplies by, kv_b_proj; default: as the model",
    )  # fmt: skip
    parser.add_argument(
        "--query-dtype", choices=("fp8", "fp8_static"),
        help="decode queries in fp8; fp8_static: with calibrated scales (default: model dtype)",
    )  # fmt: skip
    parser.add_argument(
        "--prefill-dtype", choices=("fp8",),
        help="of queries and keys of prompts; default: as the model",
    )  # fmt: skip
    parser.add_argument(
        "--capture", action=argparse.BooleanOptionalAction,
        help="record the decode step as one CUDA graph; default: on a GPU",
    )  # fmt: skip
    parser.add_argument("--compare", action="store_true", help="run plain transformers too")
    options = parser.parse_args(arguments)
    if options.named is not None and options.model is not None:
        parser.error("--model must be given once")
    options.model = options.model or options.named
    if options.model is None:
        parser.error("the following arguments are required: --model")
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
    parser = _model_parser("calibrate", "Scales of a model's fp8 cache, found on a text.")
    _add_windows(parser)
    parser.add_argument(
        "--headroom", type=headroom, default=2.0, metavar="H",
        help="how many times the largest value seen the scales hold; default: 2",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=output_file, default="scales.safetensors", metavar="FILE",
        help="default: scales.safetensors",
    )  # fmt: skip
    return parser.parse_args(arguments)


def eval_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _model_parser(
        "eval", "Bits per byte of a text for every cache format, dense and sparse."
    )
    _add_windows(parser)
    parser.add_argument("--formats", help="cache formats, with commas; default: those that fit")
    parser.add_argument(
        "--plot", type=picture_file, metavar="FILE",
        help="a picture of cache bytes against bits per byte, beside plain transformers, as .png; "
        "of a sparse model also FILE-keys: which keys each layer chose, and their attention",
    )  # fmt: skip
    return parser.parse_args(arguments)


def bisect_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _model_parser(
        "bisect", "Which component of a model's attention is wrong, against float64."
    )
    parser.add_argument("--prompt", help="the text to compare on, or @FILE; the demo has one")
    parser.add_argument(
        "--against", metavar="DUMP",
        help="what another engine computed, as docs/bisect.md lays it out; default: this package",
    )  # fmt: skip
    _add_step(parser)
    parser.add_argument(
        "--save", type=output_file, metavar="FILE", help="write this package's own dump"
    )
    parser.add_argument(
        "--plot", type=picture_file, metavar="FILE",
        help="a picture of errors by layer and component, as .png",
    )  # fmt: skip
    return parser.parse_args(arguments)
