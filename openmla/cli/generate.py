"""`openmla generate`: streamed text from a Hugging Face MLA model, and a comparison."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.cache import check_formats
from openmla.cli.checkpoint import (
    Checkpoint,
    check_backend,
    check_tokens,
    checked_device,
    open_checkpoint,
)
from openmla.cli.hub import called
from openmla.cli.models import (
    check_attention,
    check_generation,
    input_device,
    load_model,
    load_tokenizer,
    read_config,
    run_once,
)
from openmla.cli.prompts import Messages, check_chat, encode, encode_chat, messages, read_prompts
from openmla.cli.streaming import PrefillProgress, Watch
from openmla.cli.terminal import filled, note, quiet, show, warn
from openmla.config import MLAConfig
from openmla.integrations.transformers import attach, attachment_of, detach
from openmla.plan import Plan

PREFILL_CHUNK = 1024
SHOWN = 300  # characters of a long prompt to print
DEMO_TEMPERATURE = 0.7  # with the most likely bytes a small model soon repeats itself
BOLD, DIM = "1", "2"  # terminal escape codes
COUNTS = (
    "prefill = prompt tokens / time to first token; decode = later tokens / time after the first. "
    "Excludes model loading and a short warm-up pass."
)


class Run(NamedTuple):
    """The result of one generation."""

    tokens: list[int]
    prefill_s: float
    decode_s: float
    cache_bytes: int
    peak_bytes: int  # 0 on a CPU: only the process, with both runs, is measurable
    prompt_tokens: int = 0
    text: str = ""
    decoded: int | None = None  # tokens within decode_s; None: all but the first

    @property
    def prefill_rate(self) -> float:
        return self.prompt_tokens / self.prefill_s

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second, None if there was only one."""
        count = len(self.tokens) - 1 if self.decoded is None else self.decoded
        return count / self.decode_s if self.decode_s else None


def together(runs: Sequence[Run]) -> Run:
    """Combine several prompts: sums of tokens and times, maximum of memory."""
    return Run(
        [token for run in runs for token in run.tokens],
        sum(run.prefill_s for run in runs),
        sum(run.decode_s for run in runs),
        max(run.cache_bytes for run in runs),
        max(run.peak_bytes for run in runs),
        sum(run.prompt_tokens for run in runs),
        decoded=sum(len(run.tokens) - 1 for run in runs),
    )


class Setting(NamedTuple):
    """What is the same for all prompts."""

    model: Any
    tokenizer: Any
    choice: dict[str, Any]  # generate()'s sampling options, and the seed
    device: torch.device


def run_generate(options: argparse.Namespace) -> int:
    """Check everything, load, generate, and print a short table at the end."""
    with quiet(options.quiet):
        prompts = read_prompts(options)
        device = checked_device(options.device)
        checkpoint = open_checkpoint(
            options.model, allow_pickle=options.allow_pickle, revision=options.revision
        )
        config = read_config(checkpoint.folder)
        check_generation(checkpoint.folder, config)
        check_attention(options.attention, config)
        check_formats(checkpoint.config, options.cache_format or "bf16", options.index_format)
        check_backend(options.backend, device, options.cache_format)
        tokenizer = load_tokenizer(checkpoint.folder)
        if options.chat:
            check_chat(tokenizer, called(checkpoint.folder))
        encoded = [encode(tokenizer, prompt, options) for prompt in prompts]
        vocab_size = getattr(config.get_text_config(), "vocab_size", None)
        for tokens in encoded:
            check_tokens(tokens, vocab_size)
            warn_of_context(len(tokens), options.max_new_tokens, checkpoint.config)
        setting = prepared(options, checkpoint, device, tokenizer)
        if not prompts:
            return hold_chat(setting, options)
        return generate_all(setting, options, prompts, encoded)


def prepared(
    options: argparse.Namespace,
    checkpoint: Checkpoint,
    device: str,
    tokenizer: Any,
) -> Setting:
    """The model loaded, warmed up, and attached."""
    dense = options.attention == "dense" or (options.attention is None and options.model == "demo")
    model = load_model(
        checkpoint, device, options.dtype, dense=dense, device_map=options.device_map
    )
    run_once(model, checkpoint.folder)
    setting = Setting(model, tokenizer, sampling(options), input_device(model))
    attach(
        model,
        cache_format=options.cache_format,
        kv_scale=options.kv_scale,
        index_format=options.index_format,
        backend=options.backend,
        capture=options.capture,
        absorbed_format=options.absorbed_format,
        query_dtype=options.query_dtype,
        prefill_dtype=options.prefill_dtype,
    )
    return setting


def generate_all(
    setting: Setting, options: argparse.Namespace, prompts: list[str], encoded: list[list[int]]
) -> int:
    """Run every prompt with openmla, then with plain transformers if requested, and report."""
    model, report = setting.model, not (options.json or options.quiet)
    two = {**setting.choice, "arguments": {**setting.choice["arguments"], "max_new_tokens": 2}}
    timed_on_gpu = options.compare and setting.device.type == "cuda"
    if timed_on_gpu:
        note("warming up with two tokens, while kernels are compiled")
        generate_once(setting._replace(choice=two), encoded[0])
    ours = []
    for number, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True)):
        if report:
            print("\n" * (number > 0), end="")
            print_prompt(prompt)
        ours.append(generate_once(setting, tokens, shown=not options.json))
    attachment = attachment_of(model)
    plan, explanation, memory = attachment.last_plan, attachment.explain(), attachment.memory()
    detach(model)
    theirs = []
    if options.compare:
        note("running plain transformers for comparison")
        if timed_on_gpu:
            generate_once(setting._replace(choice=two), encoded[0])
        theirs = [generate_once(setting, tokens) for tokens in encoded]
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    if options.json:
        found = as_json(options.model, dtype, setting, prompts, ours, theirs)
        print(json.dumps({**found, "explain": str(explanation).splitlines()}, indent=2))
    if not report:
        return 0
    runs = {"openmla": together(ours)} | ({"transformers": together(theirs)} if theirs else {})
    print(f"\n{heading('times')}")
    print_table(runs)
    print(f"\nmemory besides weights, with openmla\n{memory}")
    print(f"\nlast step ({dtype})")
    show(explanation)
    if isinstance(plan, Plan) and plan.select is not None:
        print(f"\n{keys_attended(plan)}")
    if options.compare:
        print(f"\n{verdict(runs['openmla'], runs['transformers'])}")
    return 0


def hold_chat(setting: Setting, options: argparse.Namespace) -> int:
    """Chat on the terminal turn by turn, until the input ends (Ctrl-D)."""
    history: Messages = []
    while True:
        try:
            said = input("> ")
        except EOFError:
            print()
            return 0
        if not said.strip():
            continue
        if not history:
            history = messages(said, options.system_prompt)
        else:
            history.append({"role": "user", "content": said})
        run = generate_once(setting, encode_chat(setting.tokenizer, history), shown=True)
        history.append({"role": "assistant", "content": run.text})
        rate = "" if run.decode_rate is None else f", decode {run.decode_rate:.1f} tok/s"
        note(f"prefill {run.prompt_tokens} tokens, {run.prefill_rate:.1f} tok/s{rate}")


def warn_of_context(prompt: int, new: int, config: MLAConfig) -> None:
    """Warn that text gets worse beyond a model's context."""
    if prompt + new > config.max_positions:
        warn(
            f"{prompt + new} tokens, the prompt's included, exceed the model's context of "
            f"{config.max_positions}"
        )


def print_prompt(prompt: str) -> None:
    """Print the prompt, or the end of a long one, under a heading that sets it off."""
    if len(prompt) <= SHOWN + 100:
        print(f"{heading('prompt')}\n{styled(prompt.rstrip(), DIM)}")
    else:
        print(heading(f"prompt, the last {SHOWN} of {len(prompt)} characters"))
        print(styled(prompt[-SHOWN:].rstrip(), DIM))
    print(heading("generated"), flush=True)


def heading(text: str) -> str:
    return styled(f"--- {text} ---", BOLD)


def styled(text: str, style: str) -> str:
    """Text in a terminal's style; unchanged if output goes to a file or a pipe."""
    return f"\033[{style}m{text}\033[0m" if sys.stdout.isatty() else text


def keys_attended(plan: Plan) -> str:
    """How many keys a query of a sparse model attends to."""
    assert plan.select is not None and plan.config.indexer is not None
    K, last = plan.config.indexer.topk, int(plan.select.row_lens[-1])
    return (
        f"Each query attended to at most {K} keys, selected by the indexer; "
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
    arguments["num_beams"] = 1  # even if the checkpoint sets more: text is streamed
    if temperature > 0:
        arguments |= {"temperature": temperature, "top_k": options.top_k, "top_p": options.top_p}
        note(f"sampling at temperature {temperature}, seed {options.seed}")
    return {"seed": options.seed, "arguments": arguments}


def generate_once(setting: Setting, tokens: list[int], *, shown: bool = False) -> Run:
    """Run one generation with prefill and decode timed separately, and progress during prefill."""
    model, choice = setting.model, setting.choice
    ids = torch.tensor([tokens], device=setting.device)
    on_gpu = setting.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    counter = PrefillProgress(len(tokens), PREFILL_CHUNK)
    progress = model.register_forward_pre_hook(counter, with_kwargs=True)
    num_tokens = choice["arguments"]["max_new_tokens"]
    watch = Watch(setting.tokenizer, shown=shown, num_tokens=num_tokens)
    options: dict[str, Any] = {}
    if len(tokens) > PREFILL_CHUNK:
        options["prefill_chunk_size"] = PREFILL_CHUNK
    torch.manual_seed(choice["seed"])
    try:
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                streamer=watch,
                return_dict_in_generate=True,
                **choice["arguments"],
                **options,
            )
    except KeyboardInterrupt:
        watch.end()  # print the rest, and end the line
        raise
    finally:
        progress.remove()
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    times, used = watch.times, cache_bytes(model, out.past_key_values)
    return Run(
        watch.tokens, times[1] - times[0], times[-1] - times[1], used, peak, len(tokens), watch.text
    )  # fmt: skip


def cache_bytes(model: Any, past: Any) -> int:
    """Actual size of the cache object: openmla's used blocks, or the sum of its tensors."""
    if any(hasattr(module, "openmla") for module in model.modules()):
        return attachment_of(model).used_bytes()
    layers = past.layers
    # V4 keeps one tensor as both keys and values: deduplicate by address
    parts = {part.data_ptr(): part for part in tensors_in([vars(layer) for layer in layers])}
    return sum(part.numel() * part.element_size() for part in parts.values())


def tensors_in(holder: Any) -> Iterator[Tensor]:
    """Tensors in a cache: in its layers' fields and, for V4, in dicts among them."""
    if isinstance(holder, Tensor):
        yield holder
    elif isinstance(holder, list | tuple | dict):
        for part in holder.values() if isinstance(holder, dict) else holder:
            yield from tensors_in(part)


def print_table(runs: dict[str, Run]) -> None:
    print(f"{'':<24}" + "".join(f"{name:>16}" for name in runs))
    each = list(runs.values())
    rates = [run.decode_rate for run in each]
    rows = {
        f"prefill {each[0].prompt_tokens} tokens": [f"{r.prefill_rate:.1f} tok/s" for r in each],
        "decode": ["-" if rate is None else f"{rate:.1f} tok/s" for rate in rates],
        "cache": [f"{run.cache_bytes / 2**20:.2f} MiB" for run in each],
    }
    if all(run.peak_bytes for run in each):
        rows["peak memory"] = [f"{run.peak_bytes / 2**20:.0f} MiB" for run in each]
    for name, cells in rows.items():
        print(f"{name:<24}" + "".join(f"{cell:>16}" for cell in cells))
    print("\n".join(filled(COUNTS)))


def as_json(
    name: str, dtype: str, setting: Setting, prompts: list[str], ours: list[Run], theirs: list[Run]
) -> dict[str, Any]:
    """Results as JSON: one per prompt, in order; times in seconds."""
    ends = setting.model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    results = []
    for number, (prompt, run) in enumerate(zip(prompts, ours, strict=True)):
        found = {"prompt": prompt, **_run_json(run)}
        found["finish_reason"] = "stop" if run.tokens[-1] in ends else "length"
        if theirs:
            other = theirs[number]
            same = sum(a == b for a, b in zip(run.tokens, other.tokens, strict=False))
            found["transformers"] = {**_run_json(other), "same_tokens": same}
        results.append(found)
    device = str(setting.device)
    return {"model": name, "dtype": dtype, "device": device, "results": results, "counts": COUNTS}


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "text": run.text,
        "tokens": run.tokens,
        "prompt_tokens": run.prompt_tokens,
        "prefill_seconds": run.prefill_s,
        "decode_seconds": run.decode_s,
        "prefill_tokens_per_second": run.prefill_rate,
        "decode_tokens_per_second": run.decode_rate,
        "cache_bytes": run.cache_bytes,
        "peak_bytes": run.peak_bytes or None,
    }


def verdict(ours: Run, theirs: Run) -> str:
    """How many tokens agree, and which run was faster by how much."""
    same = sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=False))
    findings = [compared_time("prefill", ours.prefill_s, theirs.prefill_s)]
    if ours.decode_s and theirs.decode_s:
        findings.insert(0, compared_time("decode", ours.decode_s, theirs.decode_s))
    size = ours.cache_bytes / theirs.cache_bytes
    if alike(size):
        findings.append("the cache takes about as much memory")
    else:
        fraction = f"{size:.0%} of" if size < 1 else f"{size:.1f}x"
        findings.append(f"the cache takes {fraction} the memory")
    compared = f"With openmla, {', '.join(findings[:-1])}, and {findings[-1]}."
    tokens = f"{same} of {len(theirs.tokens)} tokens the same as with plain transformers."
    return "\n".join([tokens, *filled(compared)])


def compared_time(what: str, ours: float, theirs: float) -> str:
    """A ratio of times in words."""
    if alike(ours / theirs):
        return f"{what} takes about as long"
    if ours < theirs:
        return f"{what} is {theirs / ours:.1f}x as fast"
    return f"{what} takes {ours / theirs:.1f}x as long"


def alike(ratio: float) -> bool:
    """Whether a ratio rounds to 1."""
    return 0.95 <= ratio < 1.05
