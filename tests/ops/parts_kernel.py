"""What persistent programs of mqa_paged would do, written down instead of done."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends.triton._parts import find_part, find_run, next_run


@triton.jit
def _record_kernel(  # type: ignore[no-untyped-def]
    query_start_loc, seq_lens, runs, B, unit, most,
    TOKENS: tl.constexpr, CAUSAL: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0)
    num_runs, request, item, first_unit, last_unit, index = find_part(
        query_start_loc, seq_lens, B, unit, p, tl.num_programs(0), TOKENS, FIXED
    )
    for r in range(0, num_runs):
        token, tokens, _, lo, hi, slot, _, _ = find_run(
            query_start_loc, seq_lens, unit, r, num_runs, request, item, first_unit, last_unit,
            index, TOKENS, CAUSAL, FIXED,
        )  # fmt: skip
        at = runs + (p * most + r) * 6
        tl.store(at, request)
        tl.store(at + 1, token)
        tl.store(at + 2, tokens)
        tl.store(at + 3, lo)
        tl.store(at + 4, hi)
        tl.store(at + 5, slot)
        request, item, first_unit = next_run(
            query_start_loc, seq_lens, B, unit, request, item, first_unit, TOKENS, FIXED
        )


def record(
    query_lens: list[int], seq_lens: list[int], *, programs: int, unit: int, tokens: int,
    fixed: bool, device: str,
) -> list[list[tuple[int, ...]]]:  # fmt: skip
    """Of each program its runs: request, first token, tokens, first key, end, slot."""
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    most = sum(
        -(-n // tokens) * (-(-S // unit) + 1) for n, S in zip(query_lens, seq_lens, strict=True)
    )
    runs: Tensor = torch.full((programs, max(most, 1), 6), -7, dtype=torch.int32, device=device)
    _record_kernel[(programs,)](
        starts.to(device), lens.to(device), runs, len(query_lens), unit, max(most, 1),
        TOKENS=tokens, CAUSAL=True, FIXED=fixed,
    )  # fmt: skip
    return [[tuple(run) for run in part if run[0] != -7] for part in runs.tolist()]
