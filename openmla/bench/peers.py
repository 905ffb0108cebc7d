"""Kernels of other packages that benchmarks include wherever they are installed.

flash_mla is a backend of mqa_sparse and is timed as "flashmla". The others are defined in this
file: found by name, called as their own engines call them, checked against the same exact results,
and never required.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from openmla.backends.requirements import is_ours
from openmla.hardware import multiprocessors
from openmla.testing import Inputs, out_budget

WORKSPACE = 128 << 20  # bytes, as FlashInfer requires
LOGITS_ERROR = 2**-9  # relative RMS: fp8 products are summed in fewer bits than float32 has
PAGE = 64  # tokens, the only page size that DeepGEMM's paged kernels support


class Prepared(NamedTuple):
    """A call to time, and a function from its result to the op's output (attention: out)."""

    call: Callable[[], Any]
    result: Callable[[Any], Tensor]


class Peer(NamedTuple):
    """Another package's kernel for an op."""

    name: str
    package: str
    suits: Callable[[Inputs], str | None]  # result, exact, reference -> share of budget
    prepare: Callable[[Inputs], Prepared]
    judge: Callable[[Tensor, Any, Any], float]  # -> share of the error budget

    def absent(self, device: str) -> str | None:
        """Why it cannot run on this machine at all."""
        if is_ours(self.package):
            return f"package {self.package} is openmla's own drop-in"
        if find_spec(self.package) is None:
            return f"package {self.package} is not installed"
        return None if device == "cuda" else f"runs on cuda, this is {device}"


def attention_error(actual: Tensor, exact: Any, reference: Any) -> float:
    """Check out only: lse has other bases and precisions in other packages."""
    return out_budget(actual, exact[0], reference[0])


def logits_error(actual: Tensor, exact: Any, reference: Any) -> float:
    seen = exact != -torch.inf
    if bool((actual[~seen] != -torch.inf).any()):
        raise AssertionError("logits must be -inf where a query sees no key")
    wanted = exact[seen].double()
    return float((actual[seen].double() - wanted).norm() / wanted.norm()) / LOGITS_ERROR


def peers_of(op: str) -> tuple[Peer, ...]:
    return PEERS.get(op, ())


def _sixteen_bits(inputs: Inputs) -> str | None:
    kind = inputs.tensors["cache"].dtype if "cache" in inputs.tensors else inputs["q"].dtype
    plain = kind in (torch.bfloat16, torch.float16)
    return None if plain else f"takes 16-bit rows, these are {str(kind).removeprefix('torch.')}"


def _one_token(inputs: Inputs) -> str | None:
    several = inputs.scalars["max_query_len"] > 1
    return "takes one token a request" if several else _sixteen_bits(inputs)


def _whole_keys(inputs: Inputs) -> str | None:
    return "takes keys in one piece" if "k_pe" in inputs.tensors else _sixteen_bits(inputs)


def _fp8_pages(inputs: Inputs) -> str | None:
    if inputs.scalars["format"] not in ("index_fp8", "index_fp8_exact"):
        return f"takes fp8 keys, these are {inputs.scalars['format']}"
    BS = inputs["cache"].shape[1]
    return None if BS == PAGE else f"takes pages of {PAGE} keys, these have {BS}"


def _flashinfer_paged(inputs: Inputs) -> Prepared:
    cache, q, C = inputs["cache"], inputs["q_latent"], inputs.scalars["C"]
    BS, lens = cache.shape[1], inputs["seq_lens"]
    counts = [-(-S // BS) for S in lens.tolist()]
    table = inputs["block_table"]
    pages = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
    starts = torch.tensor([0, *counts], device=q.device).cumsum(0).int()
    workspace = torch.empty(WORKSPACE, dtype=torch.int8, device=q.device)
    wrapper = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(workspace)
    wrapper.plan(
        inputs["query_start_loc"], starts, pages, lens, q.shape[1], C, q.shape[2] - C, BS,
        inputs.scalars["causal"], inputs.scalars["scale"], q.dtype, cache.dtype,
    )  # fmt: skip
    given = (q[..., :C].contiguous(), q[..., C:].contiguous(), cache[..., :C], cache[..., C:])
    return Prepared(lambda: wrapper.run(*given), lambda out: out)


def _flashinfer_ragged(inputs: Inputs) -> Prepared:
    q, k, v = (inputs[name] for name in "qkv")
    workspace = torch.empty(WORKSPACE, dtype=torch.int8, device=q.device)
    module = import_module("flashinfer.prefill")
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        inputs["query_start_loc"], inputs["key_start_loc"], q.shape[1], k.shape[1], q.shape[2],
        head_dim_vo=v.shape[2], causal=inputs.scalars["causal"],
        sm_scale=inputs.scalars["scale"], q_data_type=q.dtype,
    )  # fmt: skip
    return Prepared(lambda: wrapper.run(q, k, v), lambda out: out)


def _vllm_decode(inputs: Inputs) -> Prepared:
    module = import_module("vllm.v1.attention.ops.triton_decode_attention")
    q, C = inputs["q_latent"], inputs.scalars["C"]
    B, H = q.shape[:2]
    rows = inputs["cache"].unsqueeze(2)
    # enough splits for two programs per multiprocessor; vLLM's own backend uses at least 4
    programs = B * math.ceil(H / 16)
    splits = min(max(4, 2 * multiprocessors(q.device) // programs), 64)
    out, lse = q.new_empty(B, H, C), q.new_empty(B, H)
    parts = torch.empty(B, H, splits, C + 1, dtype=torch.float32, device=q.device)

    def call() -> Tensor:
        module.decode_attention_fwd(
            q, rows, rows[..., :C], out, lse, inputs["block_table"], inputs["seq_lens"], parts,
            splits, inputs.scalars["scale"], rows.shape[1],
        )  # fmt: skip
        return out

    return Prepared(call, lambda out: out)


def _deep_gemm_paged(inputs: Inputs) -> Prepared:
    package = import_module("deep_gemm")
    lens, num_keys = inputs["row_lens"], inputs.scalars["num_keys"]
    T, H, D = inputs["q_idx"].shape
    n = T // (inputs["query_start_loc"].shape[0] - 1)
    q, context = inputs["q_idx"].view(T // n, n, H, D), lens.view(T // n, n)
    width = -(-num_keys // PAGE)
    table = inputs["block_table"][:, :width].contiguous()
    schedule = package.get_paged_mqa_logits_metadata(context, PAGE, package.get_num_sms())
    given = (q, inputs["cache"].unsqueeze(2), inputs["w_idx"], context, table, schedule)

    def result(found: Any) -> Tensor:
        logits = to_torch(found)[:, :num_keys].clone()
        unseen = torch.arange(num_keys, device=q.device) >= lens[:, None]
        return logits.masked_fill_(unseen, -torch.inf)

    return Prepared(lambda: package.fp8_paged_mqa_logits(*given, width * PAGE), result)


def _deep_gemm_ragged(inputs: Inputs) -> Prepared:
    package = import_module("deep_gemm")
    keys = (inputs["k_idx"], inputs["k_scale"])
    given = (inputs["q_idx"], keys, inputs["w_idx"], inputs["starts"], inputs["ends"])
    return Prepared(lambda: package.fp8_mqa_logits(*given, clean_logits=True), to_torch)


def to_torch(found: Any) -> Tensor:
    """Convert what sgl-deep-gemm returns, which may be another library's tensor."""
    return found if isinstance(found, Tensor) else from_dlpack(found)


PEERS = {
    "mqa_paged": (
        Peer("flashinfer", "flashinfer", _sixteen_bits, _flashinfer_paged, attention_error),
        Peer("vllm (Triton)", "vllm", _one_token, _vllm_decode, attention_error),
    ),
    "mha_ragged": (
        Peer("flashinfer", "flashinfer", _whole_keys, _flashinfer_ragged, attention_error),
    ),
    "index_logits": (Peer("deep_gemm", "deep_gemm", _fp8_pages, _deep_gemm_paged, logits_error),),
    "index_logits_ragged": (
        Peer("deep_gemm", "deep_gemm", lambda inputs: None, _deep_gemm_ragged, logits_error),
    ),
}
