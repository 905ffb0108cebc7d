"""`openmla generate`: text from a Hugging Face MLA model on disk, and how it compares."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.cache import check_formats
from openmla.cli.checkpoint import (
    check_backend,
    check_tokens,
    checked_device,
    open_checkpoint,
    read_text,
)
from openmla.cli.models import (
    ByteTokenizer,
    check_attention,
    demo_prompt,
    load_model,
    load_tokenizer,
    note,
    read_config,
)
from openmla.config import MLAConfig
from openmla.errors import ConfigError
from openmla.integrations.transformers import attach, attachment_of, detach
from openmla.plan import Plan

PREFILL_CHUNK = 1024
SHOWN = 300  # characters of a long prompt
DEMO_TEMPERATURE = 0.7  # a small model left to its likeliest bytes soon repeats itself
BOLD, DIM = "1", "2"  # of a terminal's escape sequences


class Run(NamedTuple):
    """What one generation did."""

    tokens: list[int]
    prefill_s: float
    decode_s: float
    cache_bytes: int
    peak_bytes: int  # 0 on a CPU, where the whole process counts, both runs together


class Watch:
    """A streamer that prints text as it comes and keeps the time of every token."""

    def __init__(self, tokenizer: Any, *, shown: bool, num_tokens: int) -> None:
        self.tokenizer, self.shown, self.num_tokens = tokenizer, shown, num_tokens
        self.tokens: list[int] = []
        self.times = [time.perf_counter()]
        self.decoder = tokenizer.stream() if isinstance(tokenizer, ByteTokenizer) else None
        self.decoded = ""
        self.prompt_passed = False

    def put(self, value: Tensor) -> None:
        if not self.prompt_passed:  # generate() sends the prompt first
            self.prompt_passed = True
            return
        self.times.append(time.perf_counter())
        new = value.flatten().tolist()
        self.tokens += new
        if self.shown:
            print(self._text(new), end="", flush=True)
        elif sys.stderr.isatty():
            line = f"\r{len(self.tokens)} of {self.num_tokens} tokens"
            print(line, end="", file=sys.stderr, flush=True)

    def _text(self, new: list[int]) -> str:
        if self.decoder is not None:
            text: str = self.decoder.decode(bytes(token % 256 for token in new))
            return text
        whole: str = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if whole.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""  # half a character
        fresh, self.decoded = whole[len(self.decoded) :], whole
        return fresh

    def end(self) -> None:
        if self.shown:
            print(flush=True)
        elif sys.stderr.isatty():
            print(file=sys.stderr, flush=True)


def run_generate(options: argparse.Namespace) -> int:
    """Check everything, load, generate, and close with a short table."""
    prompt = read_prompt(options)
    device = checked_device(options.device)
    checkpoint = open_checkpoint(options.model, allow_pickle=options.allow_pickle)
    config = read_config(checkpoint.folder)
    check_attention(options.attention, config)
    check_formats(checkpoint.config, options.cache_format or "bf16", options.index_format)
    check_backend(options.backend, device, options.cache_format)
    tokenizer = load_tokenizer(checkpoint.folder)
    tokens = tokenizer.encode(prompt)
    check_tokens(tokens, getattr(config.get_text_config(), "vocab_size", None))
    warn_of_context(len(tokens), options.max_new_tokens, checkpoint.config)
    dense = options.attention == "dense" or (options.attention is None and options.model == "demo")
    model = load_model(checkpoint, device, options.dtype, dense=dense)
    ids = torch.tensor([tokens], device=device)
    model(ids[:, :8], use_cache=False)  # the first pass of a process is slow, whoever runs it
    choice = sampling(options)
    attach(
        model,
        cache_format=options.cache_format,
        kv_scale=options.kv_scale,
        index_format=options.index_format,
        backend=options.backend,
        capture=options.capture,
        absorbed_format=options.absorbed_format,
        prefill_dtype=options.prefill_dtype,
    )
    first_ones = {**choice, "arguments": {**choice["arguments"], "max_new_tokens": 2}}
    timed_on_gpu = options.compare and device.startswith("cuda")
    if timed_on_gpu:
        note("two tokens beforehand, while which kernels are compiled")
        generate_once(model, ids, tokenizer, first_ones)
    print_prompt(prompt)
    ours = generate_once(model, ids, tokenizer, choice, shown=True)
    plan = attachment_of(model).last_plan
    explanation = attachment_of(model).explain()
    memory = attachment_of(model).memory()
    detach(model)
    runs = {"openmla": ours}
    if options.compare:
        note("the same again with plain transformers")
        if timed_on_gpu:
            generate_once(model, ids, tokenizer, first_ones)
        runs["transformers"] = generate_once(model, ids, tokenizer, choice)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    print(f"\n{heading('times')}")
    print_table(runs, ids.shape[1])
    print(f"\nmemory beside weights, with openmla\n{memory}")
    print(f"\nlast step ({dtype})\n{explanation}")
    if isinstance(plan, Plan) and plan.sparse is not None:
        print(f"\n{keys_attended(plan)}")
    if options.compare:
        print(f"\n{verdict(runs['openmla'], runs['transformers'])}")
    return 0


def read_prompt(options: argparse.Namespace, command: str = "generate") -> str:
    """The text to continue: given, in a file, or the demo's."""
    prompt: str | None = options.prompt
    if prompt is None and options.model == "demo":
        return demo_prompt()
    if not prompt:
        raise ConfigError(f"{command}: --prompt must be given, and not be empty.")
    if prompt.startswith("@"):
        return read_text(f"{command}: --prompt", prompt[1:])
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # bytes of a command line that are no text
        raise ConfigError(f"{command}: --prompt must be text in UTF-8: {error}.") from error
    return prompt


def warn_of_context(prompt: int, new: int, config: MLAConfig) -> None:
    """Past a model's context text gets worse."""
    if prompt + new > config.max_positions:
        note(
            f"warning: {prompt + new} tokens with the prompt, more than the model's context of "
            f"{config.max_positions}"
        )


def print_prompt(prompt: str) -> None:
    """The prompt, or the end of a long one, under a heading that tells it from what follows."""
    if len(prompt) <= SHOWN + 100:
        print(f"{heading('prompt')}\n{styled(prompt.rstrip(), DIM)}")
    else:
        print(heading(f"prompt, the last {SHOWN} of {len(prompt)} characters"))
        print(styled(prompt[-SHOWN:].rstrip(), DIM))
    print(heading("generated"), flush=True)


def heading(text: str) -> str:
    return styled(f"--- {text} ---", BOLD)


def styled(text: str, style: str) -> str:
    """Text in a terminal's style; as it is where a file or another program reads it."""
    return f"\033[{style}m{text}\033[0m" if sys.stdout.isatty() else text


def keys_attended(plan: Plan) -> str:
    """How many keys a query of a sparse model attends to."""
    assert plan.sparse is not None and plan.config.indexer is not None
    K, last = plan.config.indexer.topk, int(plan.sparse.row_lens[-1])
    return (
        f"Each query attended to {K} keys at most, as its indexer chose; "
        f"the last one to {min(K, last)} of {last}."
    )


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """generate()'s sampling options, and the seed."""
    temperature = options.temperature
    if temperature is None:
        temperature = DEMO_TEMPERATURE if options.model == "demo" else 0.0
    arguments: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "do_sample": temperature > 0,
    }
    arguments["num_beams"] = 1  # whatever the checkpoint's own choice: text is shown as it comes
    if temperature > 0:
        arguments |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        note(f"choosing at temperature {temperature}, seed {options.seed}")
    return {"seed": options.seed, "arguments": arguments}


def generate_once(
    model: Any, ids: Tensor, tokenizer: Any, choice: dict[str, Any], *, shown: bool = False
) -> Run:
    """One generation, prefill and decode timed apart, with progress while prefilling."""
    on_gpu = ids.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    progress = model.register_forward_pre_hook(PrefillProgress(ids.shape[1]), with_kwargs=True)
    watch = Watch(tokenizer, shown=shown, num_tokens=choice["arguments"]["max_new_tokens"])
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
            **choice["arguments"],
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
    if any(hasattr(module, "openmla") for module in model.modules()):
        return attachment_of(model).used_bytes()
    layers = out.past_key_values.layers
    # V4 keeps one tensor as keys and as values: by address, so that it counts once
    parts = {part.data_ptr(): part for part in tensors_in([vars(layer) for layer in layers])}
    return sum(part.numel() * part.element_size() for part in parts.values())


def tensors_in(holder: Any) -> Iterator[Tensor]:
    """Tensors in a cache: in its layers' fields and, for V4, in dicts of those."""
    if isinstance(holder, Tensor):
        yield holder
    elif isinstance(holder, list | tuple | dict):
        for part in holder.values() if isinstance(holder, dict) else holder:
            yield from tensors_in(part)


def print_table(runs: dict[str, Run], prompt: int) -> None:
    print(f"{'':<24}" + "".join(f"{name:>16}" for name in runs))
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
    """What was faster and by how much, in two plain sentences."""
    same = sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=False))
    findings = [compared_time("prefill", ours.prefill_s, theirs.prefill_s)]
    if ours.decode_s and theirs.decode_s:
        findings.insert(0, compared_time("decode", ours.decode_s, theirs.decode_s))
    size = ours.cache_bytes / theirs.cache_bytes
    if alike(size):
        findings.append("the cache takes about as much memory")
    else:
        fraction = f"{size:.0%} of" if size < 1 else f"{size:.1f} times"
        findings.append(f"the cache takes {fraction} the memory")
    compared = f"With openmla {', '.join(findings[:-1])}, and {findings[-1]}."
    tokens = f"{same} of {len(theirs.tokens)} tokens the same"
    return f"openmla and plain transformers: {tokens}.\n{textwrap.fill(compared, 100)}"


def compared_time(what: str, ours: float, theirs: float) -> str:
    """A ratio of times as one would say it."""
    if alike(ours / theirs):
        return f"{what} takes about as long"
    if ours < theirs:
        return f"{what} is {theirs / ours:.1f} times as fast"
    return f"{what} takes {ours / theirs:.1f} times as long"


def alike(ratio: float) -> bool:
    """Whether one would round a ratio to 1."""
    return 0.95 <= ratio < 1.05
