"""Cases, poisoned memory and error budgets: how an op is tested, for integrators too.

    inputs = PagedCase("mine", query_lens=(1, 4), seq_lens=(70, 9)).make("cuda")
    actual = inputs.run(mqa_paged, backend="mine")      # before the reference: see below
    exact = inputs.double().run(mqa_paged, backend="reference")
    peer = inputs.run(mqa_paged, backend="reference")
    assert_within_budget(actual, exact, peer)

The op under test runs first, so that it cannot find the right answer in reused memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.cache.format import get_format, raw_view
from openmla.ops.mqa_sparse import Segment

GARBAGE_BLOCK = 2**30 + 7  # a block id no cache has, for table columns nobody may read


# --- memory ------------------------------------------------------------------------------------


def poison(shape: Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """A tensor of 0xFF bytes: NaN in every floating dtype, -1 in signed integers."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    tensor.view(torch.uint8).fill_(0xFF)
    return tensor


def strided(tensor: Tensor) -> Tensor:
    """The same values inside a larger poisoned buffer: rows contiguous, outer strides not."""
    shape = tensor.shape
    around = [size + 1 if dim else size for dim, size in enumerate(shape)]
    around[-1] += 7
    view = poison(around, tensor.dtype, tensor.device)[tuple(slice(size) for size in shape)]
    return view.copy_(tensor)


@contextmanager
def poisoned_memory(on: bool = True) -> Iterator[None]:
    """While this is on, torch.empty and its relatives hand out NaN instead of old memory."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    switches: Any = torch.utils.deterministic
    fill = switches.fill_uninitialized_memory
    torch.use_deterministic_algorithms(on, warn_only=True)
    switches.fill_uninitialized_memory = on
    try:
        yield
    finally:
        switches.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


# --- budgets -----------------------------------------------------------------------------------


class Budget(NamedTuple):
    """Share of the error budget an implementation used; above 1 it is wrong."""

    out: float
    lse: float


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt()) if values.numel() else 0.0


def out_budget(actual: Tensor, exact: Tensor, peer: Tensor) -> float:
    """RMS error over its bound: 1.5 times the peer's, or 0.25 * eps * RMS(exact) if larger.

    The floor serves cases where the peer happens to be exact.
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"out must be {tuple(exact.shape)}, got {tuple(actual.shape)}")
    if bool(actual.isnan().any()):
        raise AssertionError(f"out has {int(actual.isnan().sum())} NaN of {actual.numel()} values")
    error = _rms(actual.double() - exact.double())
    bound = max(
        1.5 * _rms(peer.double() - exact.double()),
        0.25 * torch.finfo(actual.dtype).eps * _rms(exact),
    )
    return 0.0 if error == 0 else error / bound if bound else float("inf")


def lse_budget(actual: Tensor, exact: Tensor, peer: Tensor) -> float:
    """Largest error over its bound: 2 * (the peer's + float32 eps * the largest value).

    The sharp test: a lost key, a wrong scale or a wrong base shows here at every size.
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"lse must be {tuple(exact.shape)}, got {tuple(actual.shape)}")
    if actual.dtype.itemsize < 4:
        raise AssertionError(f"lse must be float32, got {actual.dtype}")
    finite = exact.isfinite()
    if bool((actual[~finite] != -torch.inf).any()) or not bool(actual[finite].isfinite().all()):
        raise AssertionError("lse must be -inf exactly where a query sees no key")
    if not bool(finite.any()):
        return 0.0
    wanted = exact[finite].double()
    error = float((actual[finite].double() - wanted).abs().max())
    peer_error = float((peer[finite].double() - wanted).abs().max())
    eps = torch.finfo(torch.float32).eps
    bound = 2 * (peer_error + eps * max(float(wanted.abs().max()), 1.0))
    return error / bound


Attended = tuple[Tensor, Tensor]


def budget_used(actual: Attended, exact: Attended, peer: Attended) -> Budget:
    """Both shares for an attention op's (out, lse); raises where no tolerance applies."""
    empty = exact[1] == -torch.inf
    lse = lse_budget(actual[1], exact[1], peer[1])
    out = out_budget(actual[0], exact[0], peer[0])
    if bool((actual[0][empty] != 0).any()):
        raise AssertionError("out must be 0 where a query sees no key")
    return Budget(out, lse)


def assert_within_budget(actual: Attended, exact: Attended, peer: Attended) -> None:
    """Raise AssertionError when an attention op errs more than its budget allows."""
    used = budget_used(actual, exact, peer)
    if used.lse > 1:
        raise AssertionError(f"lse errs {used.lse:.2f} times its budget (out: {used.out:.2f})")
    if used.out > 1:
        raise AssertionError(f"out errs {used.out:.2f} times its budget (lse: {used.lse:.2f})")


# --- cases -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """Arguments of one op call: tensors in order, keyword scalars, and which tensors to widen."""

    tensors: dict[str, Tensor]
    scalars: dict[str, Any]
    widen: tuple[str, ...]

    def double(self) -> Inputs:
        """The same values with queries in float64; stored bytes stay as they are."""
        wide = {
            name: tensor.double() if name in self.widen else tensor
            for name, tensor in self.tensors.items()
        }
        return Inputs(wide, self.scalars, self.widen)

    def clone(self) -> Inputs:
        """Fresh tensors with the same strides, for ops that write in place."""
        copies = {name: _clone_strided(tensor) for name, tensor in self.tensors.items()}
        return Inputs(copies, self.scalars, self.widen)

    def run(self, op: Callable[..., Any], *, backend: str) -> Any:
        return op(*self.tensors.values(), **self.scalars, backend=backend)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def _clone_strided(tensor: Tensor) -> Tensor:
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    raw_view(copy).copy_(raw_view(tensor))
    return copy


def start_loc(lens: Sequence[int], device: str | torch.device = "cpu") -> Tensor:
    """[B+1] i32 cumulative lengths."""
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)


def even_splits(seq_lens: Sequence[int], num_splits: int) -> Tensor:
    """[B, X+1] i32 split bounds of equal length, the last ones empty where keys run out."""
    rows = []
    for S in seq_lens:
        size = max(-(-S // num_splits), 1)
        rows.append([min(x * size, S) for x in range(num_splits + 1)])
    return torch.tensor(rows, dtype=torch.int32).reshape(len(seq_lens), num_splits + 1)


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
    """A poisoned cache that holds each request's rows [S, D] in shuffled blocks, and its table.

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
    num_splits: int = 3
    padding: int = 0  # query rows that belong to no request
    contiguous: bool = False  # plain strides, for benchmarks; tests want them odd
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def make(self, device: str | torch.device = "cpu") -> Inputs:
        rng = random.Random(self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        D = self.C + self.R
        T = sum(self.query_lens) + self.padding
        kv_scale = torch.tensor(self.kv_scale, dtype=torch.float32, device=device)
        rows = [torch.randn(S, D, generator=generator).to(device) for S in self.seq_lens]
        cache, table = paged_rows(
            rows,
            D=D,
            format=self.format,
            kv_scale=kv_scale,
            BS=self.BS,
            rng=rng,
            page_padding=0 if self.contiguous else 5,
        )
        q = torch.randn(T, self.H, D, generator=generator).to(device, self.dtype)
        seq_lens = torch.tensor(self.seq_lens, dtype=torch.int32, device=device)
        tensors = {
            "q_latent": q if self.contiguous else strided(q),
            "cache": cache,
            "kv_scale": kv_scale,
            "block_table": table,
            "seq_lens": seq_lens,
            "query_start_loc": start_loc(self.query_lens, device),
            "split_starts": even_splits(self.seq_lens, self.num_splits).to(device),
        }
        scalars = {
            "format": self.format,
            "C": self.C,
            "scale": 1.7 * D**-0.5,
            "causal": self.causal,
            "max_query_len": max(self.query_lens, default=0),
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
    V: int = 16
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    padding: int = 0  # query and key rows that belong to no request
    contiguous: bool = False  # plain strides, for benchmarks; tests want them odd
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
            "k": packed(S, self.E),
            "v": packed(S, self.V),
            "query_start_loc": start_loc(self.query_lens, device),
            "key_start_loc": start_loc(self.key_lens, device),
        }
        scalars = {
            "scale": 1.7 * self.E**-0.5,
            "causal": self.causal,
            "max_query_len": max(self.query_lens, default=0),
            "max_key_len": max(self.key_lens, default=0),
        }
        return Inputs(tensors, scalars, ("q", "k", "v"))


@dataclass(frozen=True)
class SparseInputs(Inputs):
    """Arguments of mqa_sparse: absent tensors are left out, those of a second segment end in _2.

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
            **scalars,
            backend=backend,
        )


@dataclass(frozen=True)
class SegmentCase:
    """How one segment of a SparseCase names its rows; every row nobody names is NaN."""

    kind: str = "slots"
    K: int = 21  # slots and positions: columns, filled with visible entries as far as there are
    ratio: int = 1  # slots and positions: tokens per cached entry
    span: int = 0  # window and prefix
    ring: bool = False  # window: a table with only the columns the step needs
    BS: int = 16
    format: str = "bf16"
    kv_scale: float = 1.0

    def num_rows(self, position: int) -> int:
        """Rows a token at a position attends to."""
        if self.kind == "window":
            return min(self.span, position + 1)
        if self.kind == "prefix":
            return (position + 1) // self.span
        return min(self.K, (position + 1) // self.ratio)

    def entries(self, position: int, generator: torch.Generator) -> Tensor:
        """[n] i64 what a token at a position attends to, counted within its request."""
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
        """rows and row_lens; tests want entries to skip among them and live ones past the end."""
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
        rows[len(wanted) :] = 0  # tokens of no request list what looks like a row
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
    sink: tuple[float, ...] = ()  # the heads take them in turn; none: no sink
    padding: int = 0  # query rows that belong to no request
    contiguous: bool = False  # plain strides and lists, for benchmarks; tests want them odd
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
        """Request and position of every token that has a request."""
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
        q = torch.cat([queries, surplus]).to(device, self.dtype)
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
    K: int = 12  # bits per query, as far as there are keys to see
    H: int = 4
    E: int = 24
    V: int = 16
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True  # whether the bits are
    padding: int = 0  # query and key rows that belong to no request
    contiguous: bool = False  # plain strides and masks, for benchmarks; tests want them odd
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def bits(self) -> list[Tensor]:
        """[n, S] bool of each request; in tests some queries have none."""
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
        """[T, words] i32; in tests all bits that no one may look at are set at random."""
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


# Shapes of benchmarks, named after models and phases; bench/ takes them from here.
_V3_ROWS: dict[str, Any] = {"C": 512, "R": 64, "BS": 64, "contiguous": True}
PAGED_SHAPES = {
    "tiny-decode-b4-s256": PagedCase("", (1,) * 4, (256,) * 4, BS=64, contiguous=True),
    "v2-lite-decode-b1-s16k-fp32": PagedCase(
        "", (1,), (16384,), H=16, format="fp32", dtype=torch.float32, **_V3_ROWS
    ),
    "v3-decode-b1-s8k": PagedCase("", (1,), (8192,), H=128, num_splits=32, **_V3_ROWS),
    "v3-decode-b64-s8k": PagedCase("", (1,) * 64, (8192,) * 64, H=128, **_V3_ROWS),
    "v3-tp8-decode-b64-s8k": PagedCase("", (1,) * 64, (8192,) * 64, H=16, **_V3_ROWS),
    "v3-verify4-b16-s8k": PagedCase("", (4,) * 16, (8192,) * 16, H=128, **_V3_ROWS),
}
_V3_HEADS: dict[str, Any] = {"E": 192, "V": 128, "contiguous": True}
RAGGED_SHAPES = {
    "tiny-prefill-256": RaggedCase("", (256,), (256,), contiguous=True),
    "v3-tp8-prefill-8k": RaggedCase("", (8192,), (8192,), H=16, **_V3_HEADS),
    "v3-tp8-prefill-4x2k": RaggedCase("", (2048,) * 4, (2048,) * 4, H=16, **_V3_HEADS),
    "v3-prefill-8k": RaggedCase("", (8192,), (8192,), H=128, **_V3_HEADS),
    "v3-tp8-chunk-2k-on-8k": RaggedCase("", (2048,), (8192,), H=16, causal=False, **_V3_HEADS),
    "glm-prefill-8k": RaggedCase("", (8192,), (8192,), H=20, E=256, V=256, contiguous=True),
}
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
    "v32-prefill-4k": MaskedCase("", (4096,), (4096,), K=2048, H=128, **_V3_HEADS),
    "v32-tp8-prefill-4k": MaskedCase("", (4096,), (4096,), K=2048, H=16, **_V3_HEADS),
    "v32-tp8-prefill-2x4k": MaskedCase("", (4096,) * 2, (4096,) * 2, K=2048, H=16, **_V3_HEADS),
    "v32-tp8-chunk-2k-on-8k": MaskedCase(
        "", (2048,), (8192,), K=2048, H=16, causal=False, **_V3_HEADS
    ),
    "glm5-prefill-4k": MaskedCase(
        "", (4096,), (4096,), K=2048, H=64, E=256, V=256, contiguous=True
    ),
}
