"""`openmla generate`: text from a Hugging Face MLA model on disk, and how it compares."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.cli.models import (
    DTYPES,
    ByteTokenizer,
    add_attention_option,
    demo_prompt,
    load_model,
    load_tokenizer,
    model_folder,
    note,
    wants_dense,
)
from openmla.errors import ConfigError, UnsupportedError
from openmla.integrations.transformers import attach, attachment_of, detach
from openmla.plan import Plan

PREFILL_CHUNK = 1024
THE_MODELS = ("rope", "latent_write")  # what an attached model does itself
DEMO_TEMPERATURE = 0.7  # a small model left to its likeliest bytes soon repeats itself


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="openmla generate", description=__doc__)
    parser.add_argument("--model", required=True, help="demo, or a folder with config and weights")
    parser.add_argument("--prompt", help="the text to continue, or @FILE; the demo has one")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--temperature", type=float, help="0 takes the likeliest token; default: 0, the demo 0.7"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice, if temperature > 0")
    add_attention_option(parser)
    parser.add_argument("--cache-format", help="a key of FORMATS; default: as the model")
    parser.add_argument("--index-format", default="index_fp32", help="of a sparse model's keys")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's, if it runs")
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument(
        "--capture", action=argparse.BooleanOptionalAction,
        help="record the decode step as one CUDA graph; default: on a GPU",
    )  # fmt: skip
    parser.add_argument("--compare", action="store_true", help="run plain transformers too")
    return parser.parse_args(arguments)


class Run(NamedTuple):
    """What one generation did."""

    tokens: list[int]
    prefill_s: float
    decode_s: float
    cache_bytes: int
    peak_bytes: int  # 0 on a CPU, where the whole process counts, both runs together


class Watch:
    """A streamer that prints text as it comes and keeps the time of every token."""

    def __init__(self, tokenizer: Any, before: str | None) -> None:
        """`before` is shown in front of the first token; None shows nothing at all."""
        self.tokenizer, self.before = tokenizer, before
        self.tokens: list[int] = []
        self.times = [time.perf_counter()]
        self.decoder = tokenizer.stream() if isinstance(tokenizer, ByteTokenizer) else None
        self.shown = ""
        self.prompt_passed = False

    def put(self, value: Tensor) -> None:
        if not self.prompt_passed:  # generate() sends the prompt first
            self.prompt_passed = True
            return
        self.times.append(time.perf_counter())
        new = value.flatten().tolist()
        self.tokens += new
        if self.before is not None:
            print(self.before + self._text(new), end="", flush=True)
            self.before = ""

    def _text(self, new: list[int]) -> str:
        if self.decoder is not None:
            text: str = self.decoder.decode(bytes(token % 256 for token in new))
            return text
        whole: str = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if whole.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""  # half a character
        fresh, self.shown = whole[len(self.shown) :], whole
        return fresh

    def end(self) -> None:
        if self.before is not None:
            print(flush=True)


def run_generate(arguments: Sequence[str]) -> int:
    """Load, generate, and close with a short table."""
    options = parse_arguments(arguments)
    folder = model_folder(options.model)
    prompt = options.prompt
    if prompt is None and options.model == "demo":
        prompt = demo_prompt()
    if not prompt:
        raise ConfigError("generate: --prompt must be given, and not be empty.")
    if options.max_new_tokens < 1:
        raise ConfigError(
            f"generate: --max-new-tokens must be positive, got {options.max_new_tokens}."
        )
    if prompt.startswith("@"):
        prompt = Path(prompt[1:]).read_text(encoding="utf-8")
        if not prompt:
            raise ConfigError(f"generate: {options.prompt[1:]} must not be empty.")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dense = wants_dense(options.model, options.attention)
    model = load_model(folder, device, options.dtype, dense=dense)
    if options.attention == "sparse" and not hasattr(model.config, "index_topk"):
        raise UnsupportedError(
            f"generate: {model.config.model_type} has no sparse attention. Leave the option out."
        )
    tokenizer = load_tokenizer(folder)
    ids = torch.tensor([tokenizer.encode(prompt)], device=device)
    model(ids[:, :8], use_cache=False)  # the first pass of a process is slow, whoever runs it
    choice = sampling(options)
    attach(
        model,
        cache_format=options.cache_format,
        index_format=options.index_format,
        backend=options.backend,
        capture=options.capture,
    )
    shown = prompt if len(prompt) < 400 else f"... {prompt[-300:]}"
    first_ones = {**choice, "told": {**choice["told"], "max_new_tokens": 2}}
    timed_on_gpu = options.compare and device.startswith("cuda")
    if timed_on_gpu:
        note("two tokens beforehand, while which kernels are compiled")
        generate_once(model, ids, tokenizer, first_ones)
    ours = generate_once(model, ids, tokenizer, choice, before=shown)
    plan = attachment_of(model).last_plan
    lines = plan.explain().splitlines() if plan is not None else []
    explanation = "\n".join(line for line in lines if not line.startswith(THE_MODELS))
    detach(model)
    runs = {"openmla": ours}
    if options.compare:
        note("the same again with plain transformers")
        if timed_on_gpu:
            generate_once(model, ids, tokenizer, first_ones)
        runs["transformers"] = generate_once(model, ids, tokenizer, choice)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    print_table(runs, ids.shape[1])
    print(f"\nlast step ({dtype})\n{explanation}")
    if plan is not None and plan.sparse is not None:
        print(f"\n{keys_attended(plan)}")
    if options.compare:
        print(f"\n{verdict(runs['openmla'], runs['transformers'])}")
    return 0


def keys_attended(plan: Plan) -> str:
    """How many keys a query of a sparse model attends to."""
    assert plan.sparse is not None and plan.config.indexer is not None
    K, last = plan.config.indexer.topk, int(plan.sparse.row_lens[-1])
    return (
        f"Each query attended to {K} keys at most, as its indexer chose; "
        f"the last one to {min(K, last)} of {last}."
    )


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """What generate() is told about choosing tokens."""
    temperature = options.temperature
    if temperature is None:
        temperature = DEMO_TEMPERATURE if options.model == "demo" else 0.0
    told: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        told |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        note(f"choosing at temperature {temperature}, seed {options.seed}")
    return {"seed": options.seed, "told": told}


def generate_once(
    model: Any, ids: Tensor, tokenizer: Any, choice: dict[str, Any], before: str | None = None
) -> Run:
    """One generation, prefill and decode timed apart, with progress while prefilling."""
    on_gpu = ids.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    progress = model.register_forward_pre_hook(PrefillProgress(ids.shape[1]), with_kwargs=True)
    watch = Watch(tokenizer, before)
    options: dict[str, Any] = {}
    if ids.shape[1] > PREFILL_CHUNK:
        options["prefill_chunk_size"] = PREFILL_CHUNK
    torch.manual_seed(choice["seed"])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=watch,
            return_dict_in_generate=True,
            **choice["told"],
            **options,
        )
    progress.remove()
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    times = watch.times
    return Run(
        watch.tokens, times[1] - times[0], times[-1] - times[1], cache_bytes(model, out), peak
    )


class PrefillProgress:
    """Says how far a long prompt is, on the error stream."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self.seen = num_tokens, 0

    def __call__(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        self.seen += 0 if ids is None else ids.shape[1]
        done = self.seen == self.num_tokens
        shown = self.seen <= self.num_tokens and (done or sys.stderr.isatty())
        if self.num_tokens > PREFILL_CHUNK and shown:
            end = "\n" if done else ""
            text = f"\rprefill {self.seen} of {self.num_tokens} tokens"
            print(text, end=end, file=sys.stderr, flush=True)


def cache_bytes(model: Any, out: Any) -> int:
    """What the cache object really holds: our used blocks, or the sum of its tensors."""
    if hasattr(next(m for m in model.modules() if hasattr(m, "kv_b_proj")), "openmla"):
        return attachment_of(model).used_bytes()
    return sum(
        part.numel() * part.element_size()
        for layer in out.past_key_values.layers
        for part in vars(layer).values()
        if isinstance(part, Tensor)
    )


def print_table(runs: dict[str, Run], prompt: int) -> None:
    print(f"\n{'':<24}" + "".join(f"{name:>16}" for name in runs))
    each = list(runs.values())
    decoded = [
        f"{(len(run.tokens) - 1) / run.decode_s:.1f} tok/s" if run.decode_s else "-" for run in each
    ]
    rows = {
        f"prefill {prompt} tokens": [f"{prompt / run.prefill_s:.1f} tok/s" for run in each],
        "decode": decoded,
        "cache": [f"{run.cache_bytes / 2**20:.2f} MiB" for run in each],
    }
    if all(run.peak_bytes for run in each):
        rows["peak memory"] = [f"{run.peak_bytes / 2**20:.0f} MiB" for run in each]
    for name, cells in rows.items():
        print(f"{name:<24}" + "".join(f"{cell:>16}" for cell in cells))


def verdict(ours: Run, theirs: Run) -> str:
    """What was faster and by how much, in a sentence or two."""
    same = sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=False))
    text = f"openmla and plain transformers: {same} of {len(theirs.tokens)} tokens the same"
    if ours.decode_s and theirs.decode_s:
        text += f", decode {theirs.decode_s / ours.decode_s:.2f} x as fast"
    text += f", prefill {theirs.prefill_s / ours.prefill_s:.2f} x as fast"
    return f"{text}, cache {ours.cache_bytes / theirs.cache_bytes:.2f} x the size."
