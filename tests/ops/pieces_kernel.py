"""What the programs of mqa_sparse's many-heads kernels would do, written down instead of done."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends.triton import _pieces as pieces


@triton.jit
def _record_kernel(  # type: ignore[no-untyped-def]
    query_start_loc, row_lens, found, B, T, units, most, K: tl.constexpr
):
    tokens = pieces.Tokens(query_start_loc, B, row_lens, K, row_lens, 0, 0, 0, 0)
    cut = pieces.cut_tokens(0, T, units, tl.program_id(0), tl.num_programs(0), 0)
    for r in range(0, pieces.num_pieces(cut)):
        piece = pieces.find_piece(tokens, cut, r, 0, pieces.ONE_LIST, False)
        at = found + (tl.program_id(0) * most + r) * 6
        tl.store(at, piece.token)
        tl.store(at + 1, piece.lo)
        tl.store(at + 2, piece.hi)
        tl.store(at + 3, piece.slot)
        tl.store(at + 4, piece.first.to(tl.int32))
        tl.store(at + 5, piece.last.to(tl.int32))


def record_pieces(
    row_lens: list[int], *, K: int, past: int, programs: int, device: str
) -> list[list[tuple[int, ...]]]:
    """Of each program its pieces: token, first row, end, slot, whether the token's first and last.
    The last `past` tokens belong to no request."""
    T, units = len(row_lens), -(-K // 128)
    starts = torch.tensor([0, T - past], dtype=torch.int32, device=device)
    lens = torch.tensor(row_lens, dtype=torch.int32, device=device)
    found: Tensor = torch.full((programs, T + 1, 6), -7, dtype=torch.int32, device=device)
    _record_kernel[(programs,)](starts, lens, found, 1, T, units, T + 1, K=K)
    return [[tuple(piece) for piece in part if piece[0] != -7] for part in found.tolist()]
