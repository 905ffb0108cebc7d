"""Indexer queries over paged keys: cases, bad input and budgets of the ops that score them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openmla.cache.format import get_format
from openmla.testing import (
    INDEX_FORMATS,
    Inputs,
    lse_budget,
    out_budget,
    paged_rows,
    start_loc,
    strided,
)
from tests.ops.contract import put

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class IndexCase:
    """Indexer queries over a paged cache of keys; index_select's tests use it too."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    HI: int = 4
    DI: int = 32
    BS: int = 16
    format: str = "index_fp8"
    dtype: torch.dtype = torch.bfloat16
    row_lens: tuple[int, ...] | None = None  # keys each token sees; causal unless told
    padding: int = 0  # query rows that belong to no request
    surplus: int = 3  # columns of out past the longest row
    whole: bool = False  # small whole numbers: every sum is exact, and equal scores are many
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def seen(self) -> list[int]:
        """row_lens of the rows that belong to a request."""
        if self.row_lens is not None:
            return list(self.row_lens)
        lens = zip(self.query_lens, self.seq_lens, strict=True)
        return [max(S - n + i + 1, 0) for n, S in lens for i in range(n)]

    def make(self, device: str | torch.device = "cpu") -> Inputs:
        generator = torch.Generator().manual_seed(self.seed)
        T = sum(self.query_lens) + self.padding

        def values(*shape: int, most: int) -> Tensor:
            if self.whole:
                return torch.randint(-most, most + 1, shape, generator=generator).float()
            return torch.randn(*shape, generator=generator)

        keys = [values(S, self.DI, most=7) for S in self.seq_lens]
        if self.whole:
            for key in keys:
                key[:, 0] = 7  # so that the fp8 scale is 2^-6 in both modes
        cache, table = paged_rows(
            [key.to(device) for key in keys],
            D=self.DI,
            format=self.format,
            kv_scale=torch.ones((), device=device),
            BS=self.BS,
            rng=random.Random(self.seed),
            # float32 scales inside the page stay aligned
            page_padding=12 // get_format(self.format).dtype.itemsize,
        )
        num_keys = max(self.seq_lens, default=0) + self.surplus
        row_lens = self.seen() + [num_keys - i % 2 for i in range(self.padding)]
        q_idx = values(T, self.HI, self.DI, most=3).to(device, self.dtype)
        w_idx = values(T, self.HI, most=4).to(device)
        tensors = {
            "q_idx": strided(q_idx),
            "w_idx": strided(w_idx if self.whole else w_idx * (self.HI * self.DI) ** -0.5),
            "cache": cache,
            "block_table": table,
            "query_start_loc": start_loc(self.query_lens, device),
            "row_lens": torch.tensor(row_lens, dtype=torch.int32, device=device),
        }
        scalars = {"format": self.format, "num_keys": num_keys}
        return Inputs(tensors, scalars, ("q_idx", "w_idx"))


BASE = IndexCase("decode", (1, 1, 1), (33, 7, 70), format="index_bf16")
CASES = [
    BASE,
    *(
        IndexCase(f"{format}-{str(dtype)[6:]}", (1, 2), (33, 70), format=format, dtype=dtype)
        for format in INDEX_FORMATS
        for dtype in (torch.bfloat16, FP8)
    ),
    IndexCase("fp16", (1, 2), (33, 70), dtype=torch.float16),
    IndexCase("fp32", (1, 2), (33, 70), format="index_fp32", dtype=torch.float32),
    IndexCase("nothing", (), ()),
    IndexCase("only-padding", (), (), padding=3),
    IndexCase("no-token", (0, 0), (5, 0)),
    IndexCase("empty-request", (1, 0, 0, 2), (5, 0, 9, 2)),
    IndexCase("one-key", (1, 1), (1, 1), HI=1),
    IndexCase("no-key", (1, 2, 1), (0, 1, 20)),
    IndexCase("one-past-a-block", (1, 1), (17, 33)),
    IndexCase("last-block-full", (1, 2), (16, 48)),
    IndexCase("3-heads", (1, 3), (40, 21), HI=3, format="index_fp8_exact"),
    IndexCase("17-heads", (1, 3), (40, 21), HI=17),
    IndexCase("64-heads", (2, 1), (40, 21), HI=64, dtype=FP8),
    IndexCase("verify", (4, 1, 7), (64, 20, 7)),
    IndexCase("own-lengths", (4, 2), (64, 20), row_lens=(0, 64, 3, 17, 20, 0)),
    IndexCase("graph-padding", (1, 2), (30, 9), padding=5),
    IndexCase("block-1", (2, 1), (19, 4), BS=1, format="index_bf16"),
    IndexCase("block-128", (1, 1), (130, 127), BS=128),
    IndexCase("no-spare-column", (1, 2), (33, 70), surplus=0),
    IndexCase("width-256", (1, 2), (33, 20), DI=256, HI=2),
    IndexCase("width-256-fp32", (1, 2), (33, 20), DI=256, HI=2, dtype=torch.float32),
    IndexCase("width-384", (3,), (20,), DI=384, HI=2, dtype=FP8),
    IndexCase("width-24", (1, 2), (33, 20), DI=24, dtype=FP8),
    IndexCase("width-96", (1, 2), (33, 20), DI=96, format="index_bf16"),
    IndexCase("130-heads", (2, 1), (33, 20), DI=16, HI=130, dtype=FP8),
    IndexCase("fp16-on-bf16", (1, 2), (33, 20), dtype=torch.float16, format="index_bf16"),
    IndexCase("many-empty", (2, *(0,) * 140, 3, 1), (9, *(0,) * 140, 20, 5), padding=1),
    IndexCase("v32-widths", (1, 2), (130, 65), HI=64, DI=128, BS=64, dtype=FP8),
    IndexCase("glm5-widths", (3,), (130,), HI=32, DI=128, BS=64, dtype=FP8),
    IndexCase("long", (3, 1), (1100, 513), HI=2, BS=64),
    IndexCase("short-prefill", (70,), (150,), HI=3, BS=64),
]


def stored_key(cache: Tensor, block: int, offset: int, format: str, DI: int) -> Tensor:
    """One key in float64, from the byte table of the format."""
    if get_format(format).dtype != torch.uint8:
        return cache[block, offset].double()
    page, BS = cache[block].flatten(), cache.shape[1]
    values = page[offset * DI : (offset + 1) * DI].view(FP8).double()
    num_scales = max(DI // 128, 1)
    first = BS * DI + 4 * num_scales * offset
    scales = page[first : first + 4 * num_scales].clone().view(torch.float32).double()
    return values * scales.repeat_interleave(DI // num_scales)


def score_budget(actual: Tensor, exact: Tensor, peer: Tensor) -> float:
    """The sharper of lse's bound on the largest error and out's on the RMS; -inf is exact."""
    finite = exact.isfinite()
    return max(
        lse_budget(actual, exact, peer),
        out_budget(actual[finite], exact[finite], peer[finite]),
    )


def unit_budget(actual: Tensor, exact: Tensor, magnitude: Tensor, *, fp8: bool) -> float:
    """The largest share of what matrix units may lose: they cut sums short, those of fp8 early.
    `magnitude` is the scores of absolute values."""
    finite = exact.isfinite()
    assert torch.equal(actual.isfinite(), finite)
    if not bool(finite.any()):
        return 0.0
    # fp8 sums keep some 13 bits. Others are cut after 24, half of the last on average and in one
    # direction, at about 8 steps of a product and 64 heads: 72 / 4 * 2**-24.
    lost = 2**-12 if fp8 else 2**-20
    return float(((actual - exact).abs() / (lost * magnitude + 1e-30))[finite].max())


# index_select takes the same tensors and says the same of them
BAD_INPUT: list[tuple[dict[str, Any], str]] = [
    ({"w_idx": lambda t: t.bfloat16()}, "w_idx must be torch.float32, got torch.bfloat16"),
    ({"q_idx": lambda t: t.double()}, "w_idx must be torch.float64, got torch.float32"),
    ({"cache": lambda t: t.half()}, "cache must be torch.bfloat16 for format index_bf16, got"),
    ({"block_table": lambda t: t[:, :4]}, "block_table must have a column for every 16 keys"),
    ({"block_table": put((2, 4), 12)}, "block_table[2, 4] must be a block of the cache (0..11)"),
    ({"block_table": put((0, 0), -1)}, "block_table[0, 0] must be a block of the cache (0..11)"),
    ({"query_start_loc": put((0,), 1)}, "query_start_loc must start with 0"),
    ({"query_start_loc": put((1,), 3)}, "query_start_loc must not fall"),
    ({"query_start_loc": put((3,), 99)}, "query_start_loc must end within the 3 rows of q_idx"),
    ({"row_lens": put((1,), -1)}, "row_lens must be within 0..num_keys=73, got -1..70"),
    ({"row_lens": put((1,), 74)}, "row_lens must be within 0..num_keys=73, got 33..74"),
    ({"num_keys": 69}, "row_lens must be within 0..num_keys=69, got 7..70"),
    ({"num_keys": -1}, "num_keys must not be negative, got -1"),
]
