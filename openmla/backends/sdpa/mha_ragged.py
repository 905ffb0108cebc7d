"""mha_ragged, sdpa: PyTorch's own kernels. CPU flash per request; on CUDA flash or cuDNN.

CUDA needs no host read: flash supports the ragged batch directly. A single request, square or not
causal, runs on cuDNN on SM90, where it is the faster of the two (docs/h200.md has measurements).
cuDNN's ragged form is not used: it builds a new plan on every call and aligns causal at the start.
The CPU code is in _cpu.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from openmla.backends import Problem
from openmla.backends.expanded import aligned, joined
from openmla.backends.sdpa._cpu import attend

aten = torch.ops.aten


def why_not(problem: Problem) -> str | None:
    if problem.dtype.itemsize == 1:
        return f"takes heads of 16 bits and more, this is {problem.dtype}"
    if problem.device == "cpu":
        return None
    if problem.device != "cuda":
        return f"runs on cpu and cuda, this is {problem.device}"
    if problem.batch_invariant:
        return "lets torch pick a kernel by the batch on cuda"
    if problem.capability is not None and problem.capability < (8, 0):
        return f"needs SM80, this is SM{problem.capability[0]}{problem.capability[1]}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"takes fp16 and bf16 on cuda, this is {problem.dtype}"
    if max(problem.E, problem.V) > 256:
        return f"takes heads up to 256 wide on cuda, these are {max(problem.E, problem.V)}"
    return None


def reads_apart(problem: Problem) -> bool:
    return problem.device == "cpu"


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    k_pe: Tensor | None,
    *,
    scale: float,
    causal: bool,
    max_query_len: int,
    max_key_len: int,
) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        bounds = (query_start_loc.tolist(), key_start_loc.tolist())  # CPU tensors
        return attend(q, k, v, k_pe, *bounds, scale, causal)
    k, V = joined(k, k_pe), v.shape[2]
    T, H, _ = q.shape
    if min(max_query_len, max_key_len) == 0:  # no query sees a key
        return q.new_zeros((T, H, V)), q.new_full((T, H), -torch.inf, dtype=torch.float32)
    q, k, v = (aligned(t) for t in (q, k, v))
    one_request = query_start_loc.shape[0] == 2
    square = not causal or max_query_len == max_key_len
    on_hopper = torch.cuda.get_device_capability(q.device) == (9, 0)
    if one_request and square and on_hopper and q.shape[2] % 8 == 0 and V % 8 == 0:
        return _run_cudnn(q, k, v, scale, causal, max_query_len, max_key_len)
    q, k, v = _same_width(q, k, v)
    out, lse, *_ = aten._flash_attention_forward(
        q,
        k,
        v,
        query_start_loc,
        key_start_loc,
        max_query_len,
        max_key_len,
        0.0,
        causal,
        False,
        scale=scale,
    )
    rows = torch.arange(T, device=q.device)
    owned = (rows < query_start_loc[-1])[:, None]
    lse = lse.T  # flash: [H, T], +inf where a query saw nothing (its out is 0) or NaN (out is NaN)
    lse = torch.where(lse == torch.inf, out[:, :, 0] - torch.inf, lse)
    lse = lse.where(owned, -torch.inf).contiguous()
    return out[:, :, :V].where((lse != -torch.inf)[:, :, None], 0), lse


def _same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad with zero columns, which change neither the products nor the sliced output."""
    widest = max(q.shape[2], v.shape[2])
    width = -(-widest // 8) * 8
    q, k, v = (t if t.shape[2] == width else pad(t, (0, width - t.shape[2])) for t in (q, k, v))
    return q, k, v


def _run_cudnn(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, n: int, S: int
) -> tuple[Tensor, Tensor]:
    T, H, V = q.shape[0], q.shape[1], v.shape[2]
    heads_first = (t[None].transpose(1, 2) for t in (q[:n], k[:S], v[:S]))
    attended, attended_lse, *_ = aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, True, 0.0, causal, False, scale=scale
    )
    attended, attended_lse = attended[0].transpose(0, 1), attended_lse[0, :, :, 0].T
    if n == T:
        return attended.contiguous(), attended_lse.contiguous()
    out = q.new_zeros((T, H, V))
    lse = q.new_full((T, H), -torch.inf, dtype=torch.float32)
    out[:n], lse[:n] = attended, attended_lse
    return out, lse
