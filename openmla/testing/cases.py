"""Cases for dense ops: random inputs, cached in shuffled, poisoned pages."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from openmla.cache.format import FORMATS, FP8_MAX, get_format, raw_view, to_fp8
from openmla.testing.memory import poison, strided

GARBAGE_BLOCK = 2**30 + 7  # an invalid block ID, for table columns that must not be read
LATENT_FORMATS, INDEX_FORMATS = (
    tuple(name for name, layout in FORMATS.items() if layout.holds == rows)
    for rows in ("latent", "index")
)


@dataclass(frozen=True)
class Inputs:
    """Arguments of one op call: tensors in order, keyword scalars, and which tensors to widen."""

    tensors: dict[str, Tensor]
    scalars: dict[str, Any]
    widen: tuple[str, ...]

    def double(self) -> Inputs:
        """Return inputs with queries in float64, times their scale. Stored bytes do not change."""
        wide = {
            name: tensor.double() if name in self.widen else tensor
            for name, tensor in self.tensors.items()
        }
        if wide.get("q_scale") is not None:
            scale = wide.pop("q_scale").double()
            wide["q_latent"] = wide["q_latent"] * (scale[..., None] if scale.dim() else scale)
        return Inputs(wide, self.scalars, self.widen)

    def clone(self) -> Inputs:
        """Copy tensors with their strides, for ops that write in place."""
        copies = {name: _clone_strided(tensor) for name, tensor in self.tensors.items()}
        return Inputs(copies, self.scalars, self.widen)

    def run(self, op: Callable[..., Any], *, backend: str) -> Any:
        return op(*self.tensors.values(), **self.scalars, backend=backend)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def _clone_strided(tensor: Any) -> Any:
    if tensor is None:  # an omitted argument
        return None
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    raw_view(copy).copy_(raw_view(tensor))
    return copy


def start_loc(lens: Sequence[int], device: str | torch.device = "cpu") -> Tensor:
    """Return [B+1] i32 cumulative lengths."""
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)


def paged_rows(
    rows: Sequence[Tensor],
    *,
    D: int,
    format: str,
    kv_scale: Tensor,
    BS: int,
    rng: random.Random,
    spare_blocks: int = 3,
    page_padding: int = 5,
) -> tuple[Tensor, Tensor]:
    """Return a poisoned cache with each request's rows [S, D] in shuffled blocks, and its table.

    Pages are strided (padding between them), unused slots are NaN, unused columns are garbage.
    """
    layout = get_format(format)
    device = kv_scale.device
    needs = [-(-len(request) // BS) for request in rows]
    N = sum(needs) + spare_blocks
    W = layout.width(D)
    flat = poison((N, BS * W + page_padding), layout.dtype, device)
    cache = flat[:, : BS * W].unflatten(1, (BS, W))
    order = list(range(N))
    rng.shuffle(order)
    M = max(needs, default=0) + 2
    table = torch.full((len(rows), M + 1), GARBAGE_BLOCK, dtype=torch.int32)[:, :M]
    table[:, 1::2] = -GARBAGE_BLOCK
    for b, request in enumerate(rows):
        blocks = [order.pop() for _ in range(needs[b])]
        table[b, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        positions = torch.arange(len(request), device=device)
        where = torch.tensor(blocks, dtype=torch.int64, device=device)[positions // BS]
        layout.write(cache, where * BS + positions % BS, request, kv_scale)
    return cache, table.to(device)


def quantized_queries(q: Tensor, scale: str) -> tuple[Tensor, Tensor]:
    """Return e4m3 queries and their scale: one for all of them, or one per token and head."""
    largest = q.abs().amax(-1).clamp_min(1e-10)  # [T, H]
    if scale == "tensor":
        largest = largest.amax() if q.numel() else largest.new_ones(())
    q_scale = largest / FP8_MAX
    return to_fp8(q / (q_scale[..., None] if q_scale.dim() else q_scale)), q_scale


@dataclass(frozen=True)
class PagedCase:
    """Latent attention over a paged cache: arguments for mqa_paged."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    H: int = 4
    C: int = 32
    R: int = 8
    BS: int = 16
    format: str = "bf16"
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    kv_scale: float = 1.0
    run_length: int = 0
    padding: int = 0  # query rows that belong to no request
    contiguous: bool = False  # plain strides, for benchmarks; tests use odd ones
    q_scale: str = ""  # scale of e4m3 queries: "tensor" or "heads"
    outliers: float = 1.0  # factor of some columns of queries and rows
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def make(self, device: str | torch.device = "cpu") -> Inputs:
        rng = random.Random(self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        D = self.C + self.R
        T = sum(self.query_lens) + self.padding
        kv_scale = torch.tensor(self.kv_scale, dtype=torch.float32, device=device)
        columns = torch.ones(D)
        columns[:: max(D // 4, 1)] = self.outliers
        rows = [
            (torch.randn(S, D, generator=generator) * columns).to(device) for S in self.seq_lens
        ]
        cache, table = paged_rows(
            rows,
            D=D,
            format=self.format,
            kv_scale=kv_scale,
            BS=self.BS,
            rng=rng,
            page_padding=0 if self.contiguous else 5,
        )
        q = torch.randn(T, self.H, D, generator=generator) * columns
        q_scale = None
        if self.q_scale:
            q, q_scale = quantized_queries(q.to(device), self.q_scale)
        q = q.to(device, self.dtype)
        seq_lens = torch.tensor(self.seq_lens, dtype=torch.int32, device=device)
        tensors = {
            "q_latent": q if self.contiguous else strided(q),
            "cache": cache,
            "kv_scale": kv_scale,
            "block_table": table,
            "seq_lens": seq_lens,
            "query_start_loc": start_loc(self.query_lens, device),
        }
        if q_scale is not None:
            tensors["q_scale"] = q_scale
        scalars = {
            "format": self.format,
            "C": self.C,
            "scale": 1.7 * D**-0.5,
            "causal": self.causal,
            "max_query_len": max(self.query_lens, default=0),
            "run_length": self.run_length,
        }
        return Inputs(tensors, scalars, ("q_latent",))


@dataclass(frozen=True)
class RaggedCase:
    """Attention over packed, expanded keys and values: arguments for mha_ragged."""

    name: str
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    H: int = 4
    E: int = 24
    R: int = 0  # shared key columns, passed separately
    V: int = 16
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    padding: int = 0  # query and key rows that belong to no request
    contiguous: bool = False  # plain strides, for benchmarks; tests use odd ones
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def make(self, device: str | torch.device = "cpu") -> Inputs:
        generator = torch.Generator().manual_seed(self.seed)
        T, S = sum(self.query_lens), sum(self.key_lens)

        def packed(num_rows: int, width: int) -> Tensor:
            values = torch.randn(num_rows, self.H, width, generator=generator)
            surplus = poison((self.padding, self.H, width), torch.float32)
            rows = torch.cat([values, surplus]).to(device, self.dtype)
            return rows if self.contiguous else strided(rows)

        tensors = {
            "q": packed(T, self.E),
            "k": packed(S, self.E - self.R),
            "v": packed(S, self.V),
            "query_start_loc": start_loc(self.query_lens, device),
            "key_start_loc": start_loc(self.key_lens, device),
        }
        if self.R:
            tensors["k_pe"] = packed(S, self.R)[:, 0]
        scalars = {
            "scale": 1.7 * self.E**-0.5,
            "causal": self.causal,
            "max_query_len": max(self.query_lens, default=0),
            "max_key_len": max(self.key_lens, default=0),
        }
        return Inputs(tensors, scalars, ("q", "k", "v", *(("k_pe",) if self.R else ())))


# Benchmark shapes, named after models and phases, used by openmla/bench.
_V3_ROWS: dict[str, Any] = {"C": 512, "R": 64, "BS": 64, "contiguous": True}
PAGED_SHAPES = {
    "tiny-decode-b4-s256": PagedCase("", (1,) * 4, (256,) * 4, BS=64, contiguous=True),
    "v2-lite-decode-b1-s16k-fp32": PagedCase(
        "", (1,), (16384,), H=16, format="fp32", dtype=torch.float32, **_V3_ROWS
    ),
    "v3-decode-b1-s8k": PagedCase("", (1,), (8192,), H=128, **_V3_ROWS),
    "v3-decode-b64-s8k": PagedCase("", (1,) * 64, (8192,) * 64, H=128, **_V3_ROWS),
    "v3-tp8-decode-b64-s8k": PagedCase("", (1,) * 64, (8192,) * 64, H=16, **_V3_ROWS),
    "v3-verify4-b16-s8k": PagedCase("", (4,) * 16, (8192,) * 16, H=128, **_V3_ROWS),
}
V3_HEADS: dict[str, Any] = {"E": 192, "V": 128, "contiguous": True}
RAGGED_SHAPES = {
    "tiny-prefill-256": RaggedCase("", (256,), (256,), contiguous=True),
    "v3-tp8-prefill-8k": RaggedCase("", (8192,), (8192,), H=16, **V3_HEADS),
    "v3-tp8-prefill-4x2k": RaggedCase("", (2048,) * 4, (2048,) * 4, H=16, **V3_HEADS),
    "v3-prefill-8k": RaggedCase("", (8192,), (8192,), H=128, **V3_HEADS),
    "v3-tp8-chunk-2k-on-8k": RaggedCase("", (2048,), (8192,), H=16, causal=False, **V3_HEADS),
    "glm-prefill-8k": RaggedCase("", (8192,), (8192,), H=20, E=256, V=256, contiguous=True),
}
