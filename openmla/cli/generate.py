"""`openmla generate`: text from a Hugging Face MLA model on disk, and how it compares.

Always offline. A model without tokenizer files is taken as byte-level: one token per byte.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers loads: nothing is ever downloaded

import argparse
import codecs
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationMixin, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from openmla.cli.doctor import cpu_bf16_works
from openmla.errors import ConfigError
from openmla.integrations.transformers import attach, attachment_of, detach

PREFILL_CHUNK = 1024
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="openmla generate", description=__doc__)
    parser.add_argument("--model", required=True, help="a folder with config.json and weights")
    parser.add_argument("--prompt", required=True, help="the text to continue, or @FILE")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--cache-format", help="fp32, bf16, fp16 or fp8; default: as the model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's, if it runs")
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--compare", action="store_true", help="run plain transformers too")
    return parser.parse_args(arguments)


class ByteTokenizer:
    """One token per byte, for models that ship no tokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def stream(self) -> codecs.IncrementalDecoder:
        return codecs.getincrementaldecoder("utf-8")(errors="replace")


class Run(NamedTuple):
    """What one generation did."""

    tokens: list[int]
    prefill_s: float
    decode_s: float
    cache_bytes: int
    peak_bytes: int


class Watch:
    """A streamer that prints text as it comes and keeps the time of every token."""

    def __init__(self, tokenizer: Any, *, show: bool) -> None:
        self.tokenizer, self.show = tokenizer, show
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
        if self.show:
            print(self._text(new), end="", flush=True)

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
        if self.show:
            print(flush=True)


def run_generate(arguments: Sequence[str]) -> int:
    """Load, generate, and close with a short table."""
    options = parse_arguments(arguments)
    folder = Path(options.model)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"generate: --model must be a folder with config.json, got {options.model!r}."
        )
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(folder, device, options.dtype)
    tokenizer = load_tokenizer(folder)
    prompt = options.prompt
    if prompt.startswith("@"):
        prompt = Path(prompt[1:]).read_text(encoding="utf-8")
    ids = torch.tensor([tokenizer.encode(prompt)], device=device)
    if ids.shape[1] == 0:
        raise ConfigError("generate: --prompt must not be empty.")
    attach(model, cache_format=options.cache_format, backend=options.backend)
    print(prompt if len(prompt) < 400 else f"... {prompt[-300:]}", end="", flush=True)
    ours = generate_once(model, ids, tokenizer, options.max_new_tokens, show=True)
    plan = attachment_of(model).last_plan
    lines = plan.explain().splitlines() if plan is not None else []
    explanation = "\n".join(line for line in lines if not line.startswith("rope"))  # the model's
    detach(model)
    runs = {"openmla": ours}
    if options.compare:
        note("the same again with plain transformers")
        runs["transformers"] = generate_once(
            model, ids, tokenizer, options.max_new_tokens, show=False
        )
    print_table(runs, ids.shape[1], str(next(model.parameters()).dtype), explanation)
    return 0


def load_model(folder: Path, device: str, dtype_name: str | None) -> Any:
    config = AutoConfig.from_pretrained(folder)
    wanted = DTYPES[dtype_name] if dtype_name else getattr(config, "dtype", None) or torch.float32
    if device == "cpu" and wanted == torch.bfloat16 and not cpu_bf16_works():
        note("bf16 matrix products die on this CPU: using float32 (openmla doctor tells more)")
        wanted = torch.float32
    note(f"loading {folder.name} as {str(wanted).removeprefix('torch.')} on {device}")
    cls = model_class(config.model_type)
    model = cls.from_pretrained(folder, dtype=wanted)
    return model.to(device).eval().requires_grad_(False)


def model_class(model_type: str) -> Any:
    """The causal language model class of a model type; Mistral 4 is not in the automatic table."""
    import transformers

    names = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "mistral4": "Mistral4ForCausalLM"}
    cls = getattr(transformers, names.get(model_type, ""), None)
    if cls is None or not issubclass(cls, PreTrainedModel | GenerationMixin):
        raise ConfigError(f"generate: {model_type!r} is not a language model transformers knows.")
    return cls


def load_tokenizer(folder: Path) -> Any:
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return AutoTokenizer.from_pretrained(folder)
    note("no tokenizer in the folder: one token per byte")
    return ByteTokenizer()


def generate_once(model: Any, ids: Tensor, tokenizer: Any, new_tokens: int, *, show: bool) -> Run:
    """Greedy generation, prefill and decode timed apart, with progress while prefilling."""
    on_gpu = ids.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    progress = model.register_forward_pre_hook(PrefillProgress(ids.shape[1]), with_kwargs=True)
    watch = Watch(tokenizer, show=show)
    options: dict[str, Any] = {}
    if ids.shape[1] > PREFILL_CHUNK:
        options["prefill_chunk_size"] = PREFILL_CHUNK
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=watch,
            return_dict_in_generate=True,
            **options,
        )
    progress.remove()
    peak = (
        torch.cuda.max_memory_allocated()
        if on_gpu
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
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
        if self.num_tokens > PREFILL_CHUNK and self.seen <= self.num_tokens:
            end = "\n" if self.seen == self.num_tokens else ""
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


def print_table(runs: dict[str, Run], prompt: int, dtype: str, explanation: str) -> None:
    print(f"\n{'':<24}" + "".join(f"{name:>16}" for name in runs))
    each = list(runs.values())
    decoded = [
        f"{(len(run.tokens) - 1) / run.decode_s:.1f} tok/s" if run.decode_s else "-" for run in each
    ]
    rows = {
        f"prefill {prompt} tokens": [f"{prompt / run.prefill_s:.1f} tok/s" for run in each],
        "decode": decoded,
        "cache": [f"{run.cache_bytes / 2**20:.2f} MiB" for run in each],
        "peak memory": [f"{run.peak_bytes / 2**20:.0f} MiB" for run in each],
    }
    for name, cells in rows.items():
        print(f"{name:<24}" + "".join(f"{cell:>16}" for cell in cells))
    if "transformers" in runs:
        ours, theirs = runs["openmla"], runs["transformers"]
        same = sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=False))
        print(f"tokens                  {same} of {len(theirs.tokens)} the same")
        if ours.decode_s and theirs.decode_s:
            print(f"decode                  {theirs.decode_s / ours.decode_s:.2f} x as fast")
            print(f"prefill                 {theirs.prefill_s / ours.prefill_s:.2f} x as fast")
    print(f"\nlast step ({dtype.removeprefix('torch.')})\n{explanation}")


def note(text: str) -> None:
    print(f"generate: {text}", file=sys.stderr, flush=True)
