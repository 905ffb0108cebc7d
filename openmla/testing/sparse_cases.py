"""Cases for sparse ops: segments of listed rows, and selections as bit masks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from openmla.ops.mqa_sparse import Segment
from openmla.testing.cases import (
    V3_HEADS,
    Inputs,
    RaggedCase,
    paged_rows,
    quantized_queries,
    start_loc,
)
from openmla.testing.memory import poison, strided


@dataclass(frozen=True)
class SparseInputs(Inputs):
    """Arguments of mqa_sparse: absent tensors are omitted, names of the second segment end in _2.

    scalars["segments"] holds (format, kind, span) of each.
    """

    def double(self) -> SparseInputs:
        return replace(self, tensors=super().double().tensors)

    def clone(self) -> SparseInputs:
        return replace(self, tensors=super().clone().tensors)

    def segments(self) -> list[Segment]:
        made = []
        for suffix, (format, kind, span) in zip(("", "_2"), self.scalars["segments"], strict=False):
            table, rows, row_lens = (
                self.tensors.get(name + suffix) for name in ("block_table", "rows", "row_lens")
            )
            cache, kv_scale = self["cache" + suffix], self["kv_scale" + suffix]
            made.append(Segment(cache, kv_scale, format, kind, table, rows, row_lens, span))
        return made

    def run(self, op: Callable[..., Any], *, backend: str) -> Any:
        first, *second = self.segments()
        scalars = {name: value for name, value in self.scalars.items() if name != "segments"}
        return op(
            *(self[name] for name in ("q_latent", "query_start_loc", "positions")),
            first,
            second[0] if second else None,
            self.tensors.get("sink"),
            self.tensors.get("q_scale"),
            **scalars,
            backend=backend,
        )


@dataclass(frozen=True)
class SegmentCase:
    """How one segment of a SparseCase lists its rows; all other rows are NaN."""

    kind: str = "slots"
    K: int = 21  # slots and positions: columns, filled with visible entries
    ratio: int = 1  # slots and positions: tokens per cached entry
    span: int = 0  # window and prefix
    ring: bool = False  # window: a table with only the columns that the step needs
    BS: int = 16
    format: str = "bf16"
    kv_scale: float = 1.0

    def num_rows(self, position: int) -> int:
        """Return the number of rows that a token at a position attends to."""
        if self.kind == "window":
            return min(self.span, position + 1)
        if self.kind == "prefix":
            return (position + 1) // self.span
        return min(self.K, (position + 1) // self.ratio)

    def entries(self, position: int, generator: torch.Generator) -> Tensor:
        """Return [n] i64 entries that a token at a position attends to, numbered in its request."""
        n = self.num_rows(position)
        if self.kind == "window":
            return torch.arange(position + 1 - n, position + 1)
        if self.kind == "prefix":
            return torch.arange(n)
        return torch.randperm((position + 1) // self.ratio, generator=generator)[:n]

    def make(
        self, case: SparseCase, generator: torch.Generator, device: str | torch.device
    ) -> dict[str, Tensor]:
        rng = random.Random(case.seed)
        wanted = [(b, self.entries(p, generator)) for b, p in case.tokens()]
        longest = max(case.query_lens, default=0)
        capacity = -(-(self.span + longest - 1) // self.BS) * self.BS
        per_entry = self.span if self.kind == "prefix" else self.ratio
        kv_scale = torch.tensor(self.kv_scale, dtype=torch.float32, device=device)
        stored = []
        for b, S in enumerate(case.seq_lens):
            size = capacity if self.ring else S // per_entry
            named = [entries for owner, entries in wanted if owner == b]
            used = torch.cat([torch.zeros(0, dtype=torch.int64), *named]).unique()
            rows = torch.full((size, case.D), torch.nan)
            place = used % capacity if self.ring else used
            rows[place] = torch.randn(len(used), case.D, generator=generator)
            stored.append(rows.to(device))
        cache, table = paged_rows(
            stored,
            D=case.D,
            format=self.format,
            kv_scale=kv_scale,
            BS=self.BS,
            rng=rng,
            page_padding=0 if case.contiguous else 5,
        )
        tensors = {"cache": cache, "kv_scale": kv_scale}
        if self.kind != "slots":
            tensors["block_table"] = table[:, : capacity // self.BS] if self.ring else table
        if self.kind in ("slots", "positions"):
            listed = self._list(case, [entries for _, entries in wanted], table.cpu(), cache, rng)
            tensors |= {name: tensor.to(device) for name, tensor in listed.items()}
            if not case.contiguous:
                tensors["rows"] = strided(tensors["rows"])
        return tensors

    def _list(
        self,
        case: SparseCase,
        wanted: Sequence[Tensor],
        table: Tensor,
        cache: Tensor,
        rng: random.Random,
    ) -> dict[str, Tensor]:
        """Return rows and row_lens. For tests, add entries to skip and valid ones past the end."""
        num_slots, in_table = cache.shape[0] * self.BS, table.shape[1] * self.BS
        # the last column of a table is garbage
        skipped = [-1, -(2**31), 2**31 - 1, num_slots if self.kind == "slots" else in_table - 1]
        T = len(wanted) + case.padding
        rows = torch.full((T, self.K), -1, dtype=torch.int32)
        row_lens = torch.full((T,), self.K, dtype=torch.int32)
        for t, ((b, _), entries) in enumerate(zip(case.tokens(), wanted, strict=True)):
            n = len(entries)
            if self.kind == "slots":
                entries = table[b, entries // self.BS].long() * self.BS + entries % self.BS
            row_lens[t] = n if case.contiguous else rng.randint(n, self.K)
            if not case.contiguous and n:
                rows[t] = entries[0]
                rows[t, : row_lens[t]] = torch.tensor(rng.choices(skipped, k=int(row_lens[t])))
            columns = sorted(rng.sample(range(int(row_lens[t])), n))
            rows[t, columns] = entries.to(torch.int32)
        rows[len(wanted) :] = 0  # padding tokens list a valid-looking row
        return {"rows": rows, "row_lens": row_lens}


@dataclass(frozen=True)
class SparseCase:
    """Latent attention over listed rows, in one or two segments: arguments for mqa_sparse."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    first: SegmentCase = SegmentCase()
    second: SegmentCase | None = None
    H: int = 4
    C: int = 32
    R: int = 8
    dtype: torch.dtype = torch.bfloat16
    sink: tuple[float, ...] = ()  # cycled over the heads; empty: no sink
    padding: int = 0  # query rows that belong to no request
    contiguous: bool = False  # plain strides and lists, for benchmarks; tests use odd ones
    q_scale: str = ""  # scale of e4m3 queries: "tensor" or "heads"
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def D(self) -> int:
        return self.C + self.R

    @property
    def parts(self) -> tuple[SegmentCase, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)

    def tokens(self) -> list[tuple[int, int]]:
        """Return (request, position) of every token that belongs to a request."""
        return [
            (b, S - n + i)
            for b, (n, S) in enumerate(zip(self.query_lens, self.seq_lens, strict=True))
            for i in range(n)
        ]

    def make(self, device: str | torch.device = "cpu") -> SparseInputs:
        generator = torch.Generator().manual_seed(self.seed)
        tokens = self.tokens()
        queries = torch.randn(len(tokens), self.H, self.D, generator=generator)
        surplus = poison((self.padding, self.H, self.D), torch.float32)
        q = torch.cat([queries, surplus]).to(device)
        q_scale = None
        if self.q_scale:
            q, q_scale = quantized_queries(q.nan_to_num(), self.q_scale)
        q = q.to(self.dtype)
        positions = [position for _, position in tokens] + [5] * self.padding
        tensors = {
            "q_latent": q if self.contiguous else strided(q),
            "query_start_loc": start_loc(self.query_lens, device),
            "positions": torch.tensor(positions, dtype=torch.int64, device=device),
        }
        for suffix, part in zip(("", "_2"), self.parts, strict=False):
            made = part.make(self, generator, device)
            tensors |= {name + suffix: tensor for name, tensor in made.items()}
        if self.sink:
            sinks = [self.sink[h % len(self.sink)] for h in range(self.H)]
            tensors["sink"] = torch.tensor(sinks, dtype=torch.float32, device=device)
        if q_scale is not None:
            tensors["q_scale"] = q_scale
        scalars = {
            "segments": [(part.format, part.kind, part.span) for part in self.parts],
            "C": self.C,
            "scale": 1.7 * self.D**-0.5,
        }
        return SparseInputs(tensors, scalars, ("q_latent",))


@dataclass(frozen=True)
class MaskedCase:
    """Attention over expanded keys where bits are set: arguments for mha_masked."""

    name: str
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    K: int = 12  # bits per query, at most the visible keys
    H: int = 4
    E: int = 24
    V: int = 16
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True  # whether the bits are causal
    padding: int = 0  # query and key rows that belong to no request
    contiguous: bool = False  # plain strides and masks, for benchmarks; tests use odd ones
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def bits(self) -> list[Tensor]:
        """Return [n, S] bool masks by request; in tests some queries have no bits."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        made = []
        for n, S in zip(self.query_lens, self.key_lens, strict=True):
            bits = torch.zeros((n, S), dtype=torch.bool)
            for i in range(n):
                seen = max(S - n + i + 1, 0) if self.causal else S
                if self.contiguous or i % 7 != 3:
                    bits[i, torch.randperm(seen, generator=generator)[: self.K]] = True
            made.append(bits)
        return made

    def mask(self) -> Tensor:
        """Return [T, words] i32; in tests bits that must not be read are random."""
        T = sum(self.query_lens) + self.padding
        words = -(-max(self.key_lens, default=0) // 32)
        words += 0 if self.contiguous else 2
        generator = torch.Generator().manual_seed(self.seed + 2)
        high = 1 if self.contiguous else 2
        spread = torch.randint(0, high, (T, 32 * words), generator=generator, dtype=torch.uint8)
        start = 0
        for bits in self.bits():
            spread[start : start + bits.shape[0], : bits.shape[1]] = bits
            start += bits.shape[0]
        octets = spread.unflatten(1, (-1, 8)) << torch.arange(8, dtype=torch.uint8)
        return octets.sum(-1, dtype=torch.uint8).view(torch.int32)

    def make(self, device: str | torch.device = "cpu") -> Inputs:
        ragged = RaggedCase(
            self.name,
            self.query_lens,
            self.key_lens,
            H=self.H,
            E=self.E,
            V=self.V,
            dtype=self.dtype,
            padding=self.padding,
            contiguous=self.contiguous,
            seed=self.seed,
        ).make(device)
        mask = self.mask().to(device)
        tensors = {**ragged.tensors, "mask": mask if self.contiguous else strided(mask)}
        scalars = {name: value for name, value in ragged.scalars.items() if name != "causal"}
        return Inputs(tensors, scalars, ragged.widen)


_LATENTS: dict[str, Any] = {"C": 512, "R": 64, "contiguous": True}
_TOP2048 = SegmentCase(K=2048, BS=64)
_TOP2048_FP8 = replace(_TOP2048, format="fp8_ds_mla")
_V4: dict[str, Any] = {"C": 512, "R": 0, "sink": (0.5,), "contiguous": True}
_WINDOW = SegmentCase("window", span=128, ring=True, BS=64)
SPARSE_SHAPES = {
    "tiny-decode-b4-k64": SparseCase(
        "", (1,) * 4, (256,) * 4, SegmentCase(K=64, BS=64), contiguous=True
    ),
    "tiny-window-positions-b4": SparseCase(
        "",
        (1,) * 4,
        (256,) * 4,
        SegmentCase("window", span=32, ring=True),
        SegmentCase("positions", K=32, ratio=4),
        sink=(0.5,),
        contiguous=True,
    ),
    "v32-decode-b64-k2048": SparseCase("", (1,) * 64, (8192,) * 64, _TOP2048, H=128, **_LATENTS),
    "v32-decode-b64-k2048-fp8": SparseCase(
        "", (1,) * 64, (8192,) * 64, _TOP2048_FP8, H=128, **_LATENTS
    ),
    "v32-tp8-decode-b1-k2048": SparseCase("", (1,), (8192,), _TOP2048, H=16, **_LATENTS),
    "v32-tp8-decode-b64-k2048": SparseCase("", (1,) * 64, (8192,) * 64, _TOP2048, H=16, **_LATENTS),
    "v32-prefill-4k": SparseCase("", (4096,), (4096,), _TOP2048, H=128, **_LATENTS),
    "v32-tp8-prefill-4k": SparseCase("", (4096,), (4096,), _TOP2048, H=16, **_LATENTS),
    "glm5-decode-b32-k2048": SparseCase("", (1,) * 32, (8192,) * 32, _TOP2048, H=64, **_LATENTS),
    "glm5-verify4-b16-k2048-fp8": SparseCase(
        "", (4,) * 16, (8192,) * 16, _TOP2048_FP8, H=64, **_LATENTS
    ),
    "v4-flash-c4-decode-b32-s32k": SparseCase(
        "",
        (1,) * 32,
        (32768,) * 32,
        _WINDOW,
        SegmentCase("positions", K=512, ratio=4, BS=64),
        H=64,
        **_V4,
    ),
    "v4-flash-c128-decode-b32-s32k": SparseCase(
        "", (1,) * 32, (32768,) * 32, _WINDOW, SegmentCase("prefix", span=128, BS=2), H=64, **_V4
    ),
    "v4-pro-c4-decode-b1-s64k": SparseCase(
        "",
        (1,),
        (65536,),
        _WINDOW,
        SegmentCase("positions", K=1024, ratio=4, BS=64),
        H=128,
        **_V4,
    ),
}
MASKED_SHAPES = {
    "tiny-prefill-256-k64": MaskedCase("", (256,), (256,), K=64, contiguous=True),
    "v32-prefill-4k": MaskedCase("", (4096,), (4096,), K=2048, H=128, **V3_HEADS),
    "v32-tp8-prefill-4k": MaskedCase("", (4096,), (4096,), K=2048, H=16, **V3_HEADS),
    "v32-tp8-prefill-2x4k": MaskedCase("", (4096,) * 2, (4096,) * 2, K=2048, H=16, **V3_HEADS),
    "v32-tp8-chunk-2k-on-8k": MaskedCase(
        "", (2048,), (8192,), K=2048, H=16, causal=False, **V3_HEADS
    ),
    "glm5-prefill-4k": MaskedCase(
        "", (4096,), (4096,), K=2048, H=64, E=256, V=256, contiguous=True
    ),
}
