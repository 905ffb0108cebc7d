"""How a token's rows are cut into runs, and what these kernels are compiled ahead of time for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.backends.triton._build import Build, cdiv
from openmla.backends.triton._launch import num_runs


class Runs(NamedTuple):
    """How rows are cut: in so many runs, of so many rows if that is fixed; if split,
    into partial results of their own."""

    X: int
    length: int
    split: bool
    target: Tensor
    target_lse: Tensor


def cut_runs(
    q: Tensor, out: Tensor, lse: Tensor, sink: Tensor | None, *, width: int, run_length: int,
    block_h: int, block_n: int,
) -> Runs:  # fmt: skip
    """Runs of whole blocks of rows, `width` of them at most."""
    T, H, _ = q.shape
    length = cdiv(run_length, block_n) * block_n
    X = num_runs(cdiv(H, block_h) * T, cdiv(width, block_n), q.device, block_h)
    if length:
        X = max(cdiv(width, length), 1)
    # with fixed runs a sink's share is a product of its own, however many runs there are
    split = X > 1 or (length > 0 and sink is not None)
    if split:
        out = q.new_empty((T, X, H, 512), dtype=torch.float32)
        lse = q.new_empty((T, X, H), dtype=torch.float32)
    return Runs(X, length, split, out, lse)


def heads_build(
    name: str, kernel: Any, constants: Mapping[str, Any], capability: int, fp_fusion: bool
) -> Build:
    """Of a kernel of 16 or 64 heads a program; they call the same things the same."""
    types = {
        **dict.fromkeys(("floats", "sink", "lse"), "*fp32"),
        **dict.fromkeys(("words", "words_1", "words_2", "row_ids", "row_lens"), "*i32"),
        **dict.fromkeys(("query_start_loc", "table", "table_1", "table_2"), "*i32"),
        "q": "*bf16",
        "out": "*fp32" if constants["SPLIT"] else "*bf16",
        "positions": "*i64",
        "qk_scale": "fp32",
    }
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    return Build(name, kernel, signature, constants, 4, 1, capability, fp_fusion)
