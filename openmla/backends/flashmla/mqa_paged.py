"""mqa_paged with FlashMLA's dense decode: V3 rows in 16 bits or fp8, pages of 64, on SM90.

This file converts its conventions: every sequence has the same number of queries, lse is
[B, H, queries], and a query without keys has lse +inf. Its fp8 kernel requires e4m3 queries with
one scale for all and rounds probs to e4m3: out has an error of 2 %, compared with 0.2 % for ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.flashmla._package import (
    MAX_SEQUENCES,
    flash_mla,
    legacy,
    why_not_installed,
)
from openmla.backends.flashmla._step import step_of

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
PAGE = 64


def why_not(problem: Problem) -> str | None:
    if problem.capability != (9, 0):
        where = problem.device
        if problem.capability is not None:
            where = "SM{}{}".format(*problem.capability)
        return f"needs SM90, this is {where}"
    if FORMATS.get(problem.format) != problem.dtype:
        return f"takes queries of the cache's dtype, this is {problem.dtype} and {problem.format}"
    if problem.head_scales:
        return "takes one scale for all e4m3 queries, this is one per token and head"
    if (problem.D, problem.C) != (576, 512):
        return f"needs rows of 512 + 64, this is {problem.C} + {problem.D - problem.C}"
    if problem.BS != PAGE:
        return f"needs pages of {PAGE} rows, this is {problem.BS}"
    if not {"rows", "queries"} <= problem.aligned:
        return "needs rows and queries at multiples of 16 bytes, no padding between pages"
    if problem.tokens > MAX_SEQUENCES:
        return f"takes up to {MAX_SEQUENCES} tokens, this is {problem.tokens}"
    if problem.run_length:
        return "cuts keys by what else is in the batch"
    return why_not_installed()


# H200, bench/results/flashmla_adapter_h200.json: with its schedule kept, the adapter takes 1.06 to
# 2.4 times as long as our kernel, because two launches correct out and lse. Only with many keys of
# uneven lengths (64 requests of up to 32768) is it 0.90 to 0.99, but lengths are on the device.
def slower(problem: Problem) -> str | None:
    return "mends its outputs, and is no faster then"


def run(
    q_latent: Tensor,
    cache: Tensor,
    kv_scale: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    format: str,
    C: int,
    scale: float,
    causal: bool,
    max_query_len: int,
    run_length: int,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    T, H, _ = q_latent.shape
    eight_bits = q_scale is not None
    if T == 0 or block_table.numel() == 0 or max_query_len == 0:
        dtype = torch.bfloat16 if eight_bits else q_latent.dtype
        lse = q_latent.new_full((T, H), -torch.inf, dtype=torch.float32)
        return q_latent.new_zeros((T, H, C), dtype=dtype), lse
    step = step_of(cache, block_table, seq_lens, query_start_loc, T, H, max_query_len)
    queries = q_latent.view(torch.uint8) if eight_bits else q_latent  # no fp8 indexing
    queries = queries if step.taken is None else queries[step.taken]
    queries = queries.contiguous().view(q_latent.dtype)
    scales = {}
    if q_scale is not None:
        scales = {"descale_q": q_scale.reshape(1), "descale_k": kv_scale.reshape(1)}
    call = flash_mla().flash_mla_with_kvcache
    out, lse = call(
        queries.unflatten(0, (-1, max_query_len)), cache.unsqueeze(2), step.table, step.lens, C,
        step.schedule, softmax_scale=scale, causal=causal, is_fp8_kvcache=eight_bits, **scales,
        **legacy(call),
    )  # fmt: skip
    out, lse = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
    if step.given is not None:
        out, lse = out[step.given], lse[step.given]
    out = out.masked_fill(step.none[:, None, None], 0)  # padding queries may be NaN
    return out, lse.masked_fill(step.none[:, None], -torch.inf)
