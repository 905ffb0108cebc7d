"""DeepGEMM's indexer logits (package deep_gemm), on every device and backend that openmla supports.

Names, arguments, defaults and layouts are those of DeepGEMM. Where clean_logits=False leaves what a
query does not see undefined in DeepGEMM, it is always -inf in openmla. Schedules are accepted but
not needed. Any number of heads and any page size work. install() makes `import deep_gemm` find this
module.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from openmla.errors import OpenMLAError, UnsupportedError
from openmla.hardware import multiprocessors
from openmla.integrations import drop_in
from openmla.integrations.drop_in import DropInError, kept, refused, starts
from openmla.ops import index_logits, index_logits_ragged

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "install",
    "uninstall",
]

__version__ = "2.6.1+openmla"

FORMAT = "index_fp8"  # its readers accept any scale
LARGEST_CHUNK = 2**26  # logits held at once when rows are shifted to their starts
# The names of the ops' arguments in this API.
NAMES = {
    "q_idx": "q",
    "w_idx": "weights",
    "cache": "kv_cache",
    "row_lens": "context_lens",
    "num_keys": "max_context_len",
    "k_idx": "kv",
    "k_scale": "scales of kv",
    "starts": "cu_seq_len_k_start",
    "ends": "cu_seq_len_k_end",
}

Pair = Any  # values and their scales; None as scales of fp8 queries


def install(*, force: bool = False) -> bool:
    """Make `import deep_gemm` find this module. Returns whether it does.

    If the original is installed it is kept, unless `force`. Raises once a deep_gemm has been
    imported, because its importers would keep it. Engines that also use deep_gemm for matrix
    products must be configured to use another implementation for them.
    """
    return drop_in.install(__name__, "deep_gemm", force=force)


def uninstall() -> None:
    """Undo install()."""
    drop_in.uninstall(__name__, "deep_gemm")


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"deep_gemm: {name} is not part of openmla's drop-in, which has {', '.join(__all__[:6])}."
    )


def get_num_sms() -> int:
    """Multiprocessors of the current GPU, or the CPU's threads."""
    return multiprocessors(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:  # [num_sms + 1, 2] i32
    """A placeholder schedule of the right shape: openmla's kernels balance themselves."""
    return context_lens.new_zeros((num_sms + 1, 2), dtype=torch.int32)


def fp8_mqa_logits(
    q: Tensor,  # [s_q, h, d] fp8
    kv: Pair,  # ([s_k, d] fp8, [s_k] f32)
    weights: Tensor,  # [s_q, h] f32
    cu_seq_len_k_start: Tensor,  # [s_q] i32
    cu_seq_len_k_end: Tensor,  # [s_q] i32
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:  # [s_q, s_k] f32
    """Scores of packed keys: sum over h of weights * relu(q . k) for start <= k < end, else -inf.

    With max_seqlen_k > 0 each row has that width and begins with the key at its own start.
    """
    return fp8_fp4_mqa_logits(
        (q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k
    )


def fp8_fp4_mqa_logits(
    q: Pair,  # ([s_q, h, d] fp8, None)
    kv: Pair,
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """fp8_mqa_logits() for queries passed as a pair without scales (fp8)."""
    where = "fp8_fp4_mqa_logits"
    try:
        queries, (keys, scales) = _fp8(where, q), _pair(where, "kv", kv)
        begin, end = cu_seq_len_k_start, cu_seq_len_k_end
        if scales is None or scales.dtype != torch.float32:
            raise _no_fp4(where, scales)
        if weights.dtype == torch.bfloat16:
            weights = weights.float()
        if max_seqlen_k == 0:
            logits = index_logits_ragged(queries, weights, keys, scales, begin, end)
        else:
            logits = _from_their_starts(queries, weights, keys, scales, begin, end, max_seqlen_k)
        return _as(where, logits, logits_dtype)
    except OpenMLAError as error:
        raise refused(where, error, NAMES) from error


def fp8_paged_mqa_logits(
    q: Tensor,  # [b, next_n, h, d] fp8
    kv_cache: Tensor,  # [num_blocks, block_kv, 1, d + 4] bytes
    weights: Tensor,  # [b * next_n, h] f32
    context_lens: Tensor,  # [b] or [b, next_n] i32
    block_table: Tensor,  # [b, max_blocks] i32
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:  # [b * next_n, max_context_len] f32
    """Scores of paged keys. A length per request means its tokens come last; a length per token is
    the number of keys it sees. `indices`, which marks shared sequences, has no effect."""
    return fp8_fp4_paged_mqa_logits(
        (q, None), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len,
        clean_logits, torch.float32, indices,
    )  # fmt: skip


def fp8_fp4_paged_mqa_logits(
    q: Pair,  # ([b, next_n, h, d] fp8, None)
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """fp8_paged_mqa_logits() for queries passed as a pair without scales (fp8)."""
    where = "fp8_fp4_paged_mqa_logits"
    try:
        queries = _fp8(where, q)
        if queries.dim() != 4 or kv_cache.dim() != 4 or kv_cache.shape[2] != 1:
            raise DropInError(
                f"{where}: q and kv_cache must be [b, next_n, h, d] and [num_blocks, block_kv, 1, "
                f"d + 4], got {tuple(queries.shape)} and {tuple(kv_cache.shape)}."
            )
        B, n, H, D = queries.shape
        if block_table.shape[:1] != (B,) or context_lens.shape not in ((B,), (B, n)):
            raise DropInError(
                f"{where}: block_table and context_lens must be [b, max_blocks] and [b] or "
                f"[b, next_n] with b={B} and next_n={n}, got {tuple(block_table.shape)} and "
                f"{tuple(context_lens.shape)}."
            )
        if weights.dtype == torch.bfloat16:
            weights = weights.float()
        lens = context_lens.reshape(-1) if context_lens.dim() == 2 or n == 1 else None
        if lens is None:
            lens = (context_lens[:, None] - kept(_tokens_behind, queries, n)).clamp_min(0).view(-1)
        logits = index_logits(
            queries.reshape(B * n, H, D), weights, kv_cache.select(2, 0), block_table,
            kept(starts, queries, B, n), lens, format=FORMAT, num_keys=max_context_len,
        )  # fmt: skip
        return _as(where, logits, logits_dtype)
    except OpenMLAError as error:
        raise refused(where, error, NAMES) from error


def _from_their_starts(
    q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor, begin: Tensor, end: Tensor, width: int
) -> Tensor:
    """Shift rows to their first key, a chunk of tokens at a time to limit memory."""
    T, S = q.shape[0], keys.shape[0]
    found = q.new_full((T, width), -math.inf, dtype=torch.float32)
    columns = torch.arange(width, device=q.device)
    step = max(LARGEST_CHUNK // max(S, width, 1), 1)
    for start in range(0, T if S else 0, step):
        chunk = slice(start, start + step)
        first, last = begin[chunk], end[chunk]
        logits = index_logits_ragged(q[chunk], weights[chunk], keys, scales, first, last)
        places = columns + first[:, None]
        seen = places < last[:, None]
        found[chunk] = logits.gather(1, places.where(seen, 0)).masked_fill_(~seen, -math.inf)
    return found


def _tokens_behind(device: torch.device, n: int) -> Tensor:
    """How many tokens of the same request follow each token."""
    return torch.arange(n - 1, -1, -1, dtype=torch.int32, device=device)


def _pair(where: str, name: str, given: Pair) -> tuple[Tensor, Tensor | None]:
    if isinstance(given, (tuple, list)) and len(given) == 2:
        return given[0], given[1]
    raise DropInError(
        f"{where}: {name} must be a pair of values and scales, got {type(given).__name__}."
    )


def _fp8(where: str, given: Pair) -> Tensor:
    values, scales = (given, None) if isinstance(given, Tensor) else _pair(where, "q", given)
    if scales is not None:
        raise _no_fp4(where, scales)
    return values


def _no_fp4(where: str, scales: Tensor | None) -> UnsupportedError:
    got = None if scales is None else scales.dtype
    return UnsupportedError(
        f"{where}: fp4 is not supported: values must be fp8, with float32 scales for kv and none "
        f"for q, got scales of {got}."
    )


def _as(where: str, logits: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype not in (torch.float32, torch.bfloat16):
        raise DropInError(f"{where}: logits_dtype must be float32 or bfloat16, got {dtype}.")
    return logits if dtype == torch.float32 else logits.to(dtype)
