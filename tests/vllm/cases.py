"""What is run: prompts, the options of an engine, and which models run with which of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.vllm.checkpoints import SPARSE, VOCABULARY
from tests.vllm.engine import OURS

NEW = 24  # tokens wanted of a request


def prompts_of(lengths: list[int], shared: int = 0, seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    head = [draw.randrange(2, VOCABULARY) for _ in range(shared)]
    return [head + [draw.randrange(2, VOCABULARY) for _ in range(n)] for n in lengths]


PROMPTS = {
    "uneven": prompts_of([5, 17, 40, 133, 300, 64, 1, 90]),
    "shared": prompts_of([7, 30, 1, 64, 90], shared=200, seed=2),
    # each needs two blocks of 16 at first, and four at its end
    "crowd": prompts_of([*range(17, 31), 16, 32], seed=3),
}


def is_chunked(answer: dict[str, Any], settings: dict[str, Any]) -> str:
    assert settings["chunked prefill"] and settings["batched tokens"] == 64, settings
    return "64 tokens a step, 4 requests at once"


def has_hits(answer: dict[str, Any], settings: dict[str, Any]) -> str:
    # all but the first of five requests find the whole blocks of 200 shared tokens
    assert settings["prefix caching"] and answer["hits"] >= 4 * 192, answer["hits"]
    return f"{answer['hits']} tokens found"


def was_preempted(answer: dict[str, Any], settings: dict[str, Any]) -> str:
    assert answer["preemptions"] > 0, "no request was preempted"
    return f"{answer['preemptions']} preemptions, {settings['blocks']} blocks"


def is_interleaved(answer: dict[str, Any], settings: dict[str, Any]) -> str:
    assert settings["layout"] == "BLNHC", settings
    return "layers interleaved in every block"


def is_stored_as(name: str) -> Callable[[dict[str, Any], dict[str, Any]], str]:
    def look(answer: dict[str, Any], settings: dict[str, Any]) -> str:
        assert settings["cache dtype"] == name, settings
        return ""

    return look


class Option(NamedTuple):
    """How an engine is started and what it is given; with `attach`, a cache that loses bits is
    compared with openmla attached to transformers with these options instead."""

    prompts: str
    options: dict[str, Any]
    look: Callable[[dict[str, Any], dict[str, Any]], str] | None = None
    variables: dict[str, str] = {}  # noqa: RUF012 - of a tuple, never changed
    attach: dict[str, str] | None = None
    first: int = 0  # requests that run before the others arrive


# Products of a batch differ in the last bit from those of a request alone, as attach() runs it, and
# what is rounded to eight bits then may differ in the eighth.
ALONE = {"max_num_seqs": 1}


def stored(name: str, cache_format: str) -> Option:
    return Option(
        "uneven",
        {"kv_cache_dtype": name, **ALONE},
        is_stored_as(name),
        attach={"cache_format": cache_format},
    )


OPTIONS = {
    "chunked prefill": Option(
        "uneven", {"max_num_batched_tokens": 64, "max_num_seqs": 4}, is_chunked
    ),
    "prefix caching": Option("shared", {"enable_prefix_caching": True}, has_hits, first=1),
    "preemption": Option(
        "crowd",
        {"block_size": 16, "num_gpu_blocks_override": 34, "max_model_len": 512, "max_num_seqs": 16},
        was_preempted,
    ),
    "torch.compile": Option("uneven", {"enforce_eager": False}),
    "tensor parallel 2": Option("uneven", {"tensor_parallel_size": 2}),
    "interleaved pages": Option(
        "uneven", {}, is_interleaved, variables={"VLLM_KV_CACHE_LAYOUT": "BLNHC"}
    ),
    "blocks of 128": Option("uneven", {"block_size": 128}),
    "cache bfloat16": stored("bfloat16", "bf16"),
    "cache float16": stored("float16", "fp16"),
    "cache fp8_ds_mla": stored("fp8_ds_mla", "fp8_ds_mla"),
    "cache fp8": stored("fp8", "fp8"),
    "index fp8": Option("uneven", ALONE, attach={"index_format": "index_fp8"}),
}
DENSE_MODELS = ("v2", "v3", "v3-calm", "kimi-k2", "v3-bf16", "v3-fp16")
MAIN = (
    ("v3", "chunked prefill"),
    ("v3", "prefix caching"),
    ("v3", "preemption"),
    ("v3", "torch.compile"),
    ("v3", "tensor parallel 2"),
    ("v3", "interleaved pages"),
    ("v3-calm", "cache fp8_ds_mla"),
    ("v3-calm", "cache fp8"),
    ("v2", "chunked prefill"),
    ("kimi-k2", "chunked prefill"),
    ("v3-bf16", "chunked prefill"),
    ("v3-fp16", "chunked prefill"),
    ("v3.2", "chunked prefill"),
    ("v3.2", "prefix caching"),
    ("v3.2", "preemption"),
    ("v3.2", "torch.compile"),
    ("v3.2-calm", "index fp8"),
    ("glm-5", "chunked prefill"),
    ("glm-5.2", "chunked prefill"),
)
# In these, rounding decides between tokens that are nearly as likely.
ROUNDED = ("v3-bf16", "v3-fp16")


def applies(model: str, option: str) -> bool:
    """A bit that a cache loses makes a router or an indexer choose otherwise: calm models take the
    caches that do, and nothing else. vLLM reads bfloat16 as auto for sparse models."""
    if model in SPARSE and option == "cache bfloat16":
        return False
    if model not in SPARSE and option == "index fp8":
        return False
    return (OPTIONS[option].attach is not None) == model.endswith("-calm")


ALL = tuple(
    (model, option)
    for model in (*DENSE_MODELS, *SPARSE)
    for option in OPTIONS
    if applies(model, option)
)


def engine_options(model: str, option: str) -> dict[str, Any]:
    """With index keys as they are, unless the option is to round them: transformers rounds none."""
    options = {**OURS, **OPTIONS[option].options}
    if model in SPARSE and option != "index fp8":
        # without the second, vLLM's fp8 means packed rows in these models
        given = {"index_format": "index_fp32", "fp8_per_tensor": True}
        options["additional_config"] = {"openmla": given}
    return options


def attach_options(model: str, option: str) -> dict[str, str] | None:
    attach = OPTIONS[option].attach
    if attach is not None and model in SPARSE:
        return {"index_format": "index_fp32", **attach}
    return attach
