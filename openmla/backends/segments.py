"""Segment: one source of rows for latent attention, passed from the planner to the kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress, product
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from openmla.backends import Problem, bucketed, problem_on
from openmla.hardware import multiprocessors


class Segment(NamedTuple):
    """One source of rows; fields that a kind does not need are None or 0.

    Attributes:
        cache: pages of latent rows.
        kv_scale: scale of format fp8; other formats ignore it.
        format: a key of openmla.FORMATS that holds latent rows.
        kind: "slots", "positions", "window" or "prefix". The docstring of openmla.ops.mqa_sparse
            defines them.
        block_table: block numbers of each request's rows, for all kinds except slots.
        rows: rows that each token attends to, for slots and positions.
        row_lens: number of rows of each token, for slots and positions.
        span: positions of a window, or tokens per entry of a prefix.

    ```python
    import torch
    from openmla.ops import Segment

    cache, kv_scale = torch.randn(4, 4, 6), torch.tensor(1.0)  # 4 blocks of 4 rows
    block_table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    window = Segment(cache, kv_scale, "fp32", "window", block_table, span=8)
    print(window.width)  # 8: a token attends to at most 8 rows
    ```
    """

    cache: Tensor  # [N, BS, W]
    kv_scale: Tensor  # [] f32
    format: str
    kind: str
    block_table: Tensor | None = None  # [B, M] i32
    rows: Tensor | None = None  # [T, K] i32
    row_lens: Tensor | None = None  # [T] i32
    span: int = 0

    @property
    def width(self) -> int:
        """Upper bound on the rows of one token, from shapes only."""
        if self.rows is not None:
            return self.rows.shape[1]
        assert self.block_table is not None
        in_table = self.block_table.shape[1] * self.cache.shape[1]
        return min(self.span, in_table) if self.kind == "window" else in_table


def problem_of(q: Tensor, segments: Sequence[Segment], *, C: int, run_length: int) -> Problem:
    """Return the problem of an mqa_sparse call."""
    T, H, D = q.shape
    aligned = alignment(segment.cache for segment in segments) | query_alignment(q)
    return problem(
        q.device, q.dtype, [segment.format for segment in segments],
        tuple(segment.kind for segment in segments), H=H, D=D, C=C, tokens=T, aligned=aligned,
        run_length=run_length,
    )  # fmt: skip


def problem(
    device: torch.device, dtype: torch.dtype, formats: Sequence[str], kinds: tuple[str, ...], *,
    H: int, D: int, C: int, tokens: int, aligned: frozenset[str], run_length: int,
) -> Problem:  # fmt: skip
    """Return the problem of an mqa_sparse call whose tensors do not exist yet."""
    return problem_on(
        device,
        "mqa_sparse",
        multiprocessors=multiprocessors(device),
        dtype=dtype,
        format=" ".join(dict.fromkeys(formats)),
        H=H,
        D=D,
        C=C,
        tokens=bucketed(tokens),
        kinds=kinds,
        aligned=aligned,
        run_length=run_length,
    )


def alignment(caches: Iterable[Tensor]) -> frozenset[str]:
    """Return which of "pages", "rows" (16-byte aligned), "tight" (no gaps) hold for all caches."""
    pages = rows = tight = True
    for cache in caches:
        traced = isinstance(cache, FakeTensor)  # counts as aligned, as allocated tensors are
        (N, BS, W), (page, row, _), size = cache.shape, cache.stride(), cache.element_size()
        start = N * BS * W > 0 and (traced or cache.data_ptr() % 16 == 0)
        pages = pages and start and page * size % 16 == 0
        dense = page == BS * row
        rows = rows and start and row * size % 16 == 0 and dense and N * BS * W < 2**33
        tight = tight and (row == W or BS == 1)
    return _ALIGNED[bool(pages), bool(rows), bool(tight)]


_ALIGNED = {
    found: frozenset(compress(("pages", "rows", "tight"), found))
    for found in product((False, True), repeat=3)
}


def query_alignment(q: Tensor) -> frozenset[str]:
    """Return {"queries"} if the queries of every head start at multiples of 16 bytes."""
    traced = isinstance(q, FakeTensor)
    start = traced or q.data_ptr() % 16 == 0
    aligned = start and q.stride(0) % 16 == 0 and q.stride(1) % 16 == 0
    return frozenset(("queries",)) if aligned else frozenset()
