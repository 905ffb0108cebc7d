"""Arguments for bench.dropin: random sets, the originals' published shapes, small calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla import ops
from openmla.bench.inputs import fill
from openmla.bench.peers import to_torch
from openmla.cache.format import FORMATS, get_format
from openmla.integrations import deep_gemm, flash_mla
from openmla.ops import Segment

BF16, FP16, FP8, I32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32


SIGNS: tuple[Callable[[Tensor], Tensor], ...] = (torch.clone, torch.abs)


class Case(NamedTuple):
    package: str
    title: str
    call: Callable[..., Any]  # takes a package, and whether it is the original
    exact: Callable[[], tuple[Tensor, Tensor]] | None = None  # logits; logits of absolute values
    calls: int = 8  # calls per graph
    small: Callable[[], Case] | None = None  # the same kind, small enough to check


def legacy(theirs: bool, package: Any) -> dict[str, bool]:
    """The original's switch to its Hopper kernels."""
    return {"use_legacy": True} if theirs and package is not flash_mla else {}


def table_of(lens: list[int], BS: int, device: str) -> tuple[int, Tensor]:
    """Number of pages, and a table in random order."""
    M = max(-(-max(lens) // BS), 1)
    return len(lens) * M, torch.randperm(len(lens) * M, device=device).int().view(len(lens), M)


def dense_case(
    lens: list[int], n: int, H: int, G: int, dtype: torch.dtype, causal: bool, device: str,
    **more: Any,
) -> Case:  # fmt: skip
    N, table = table_of(lens, 64, device)
    pages = torch.randn(N, 64, G, 576, device=device, dtype=BF16).div_(4).to(dtype)
    q = torch.randn(len(lens), n, H, 576, device=device, dtype=BF16).div_(4).to(dtype)
    seqlens = torch.tensor(lens, dtype=I32, device=device)
    fp8 = dtype == FP8
    scales: dict[str, Any] = {}
    if fp8:
        named = ("descale_q", "descale_k")
        scales = {name: torch.rand(1, device=device) + 0.5 for name in named}
    schedules: dict[bool, Any] = {}

    def call(package: Any, theirs: bool = False) -> Any:
        schedule = schedules.get(theirs)
        if schedule is None:
            schedule = schedules[theirs] = package.get_mla_metadata()[0]
            if fp8 and theirs:
                made = package.get_mla_decoding_metadata(
                    seqlens, n * H // G, G, is_fp8_kvcache=True, use_legacy=True
                )
                schedule.tile_scheduler_metadata, schedule.num_splits = made
        return package.flash_mla_with_kvcache(
            q, pages, table, seqlens, 512, schedule, causal=causal, is_fp8_kvcache=fp8, **scales,
            **legacy(theirs, package),
        )  # fmt: skip

    title = f"b={len(lens)} n={n} H={H} G={G} {dtype} causal={causal} lens={lens[:6]}"
    return Case("flash_mla", title, call, **more)


def lengths(chance: Random, B: int, n: int) -> list[int]:
    """Random lengths: some without keys, some as long as their tokens, the rest long."""
    return [chance.choice((0, n, n + 1, 63, 64, 65, chance.randrange(n, 3000))) for _ in range(B)]


# Tokens, heads of queries and of keys, dtype, causal. Each combination has kernels of its own,
# which take longer to compile than to run, so a process may draw from a part of them.
DENSE_KERNELS = [
    (1, 128, 1, BF16, False), (2, 128, 1, BF16, True), (1, 64, 1, BF16, False),
    (1, 16, 1, BF16, True), (2, 128, 2, BF16, False), (1, 64, 1, FP16, True),
    (2, 16, 1, BF16, True), (1, 128, 2, BF16, False), (2, 64, 1, FP16, False),
]  # fmt: skip
FP8_KERNELS = [(n, H, 1, FP8, n == 2) for n in (1, 2) for H in (128, 16)]


def dense(chance: Random, device: str, part: slice) -> Case:
    n, H, G, dtype, causal = chance.choice(DENSE_KERNELS[part])
    lens = lengths(chance, chance.randrange(1, 12), n)
    return dense_case(lens, n, H, G, dtype, causal, device)


def dense_fp8(chance: Random, device: str, part: slice) -> Case:
    n, H, G, dtype, causal = chance.choice(FP8_KERNELS[part])
    lens = [max(each, n) for each in lengths(chance, chance.randrange(1, 10), n)]
    return dense_case(lens, n, H, G, dtype, causal, device)


def stored(format: str, N: int, BS: int, D: int, device: str) -> Tensor:
    """Pages [N, BS, 1, W], each at a multiple of 576 bytes."""
    layout = get_format(format)
    whole = torch.zeros(N, layout.page_width(D, BS), dtype=layout.dtype, device=device)
    pages = whole[:, : BS * layout.width(D)].view(N, BS, layout.width(D))
    return fill(pages, format, D, std=1 / 4).unsqueeze(2)


def listed_case(
    B: int, n: int, H: int, D: int, widths: list[int], blocks: list[tuple[int, int]], device: str,
    *, sink: bool, lens: list[bool], holes: float, **more: Any,
) -> Case:  # fmt: skip
    """One or two segments: `widths` rows each, of caches of (pages, rows per page)."""
    format = "fp8_ds_mla" if D == 576 else "fp8_dsv4"
    q = torch.randn(B, n, H, D, device=device, dtype=BF16) / 4
    caches = [stored(format, N, BS, D, device) for N, BS in blocks]
    slots = []
    for (N, BS), K in zip(blocks, widths, strict=True):
        named = torch.randint(0, N * BS, (B, n, K), dtype=I32, device=device)
        named.masked_fill_(torch.rand(B, n, K, device=device) < holes, -1)
        if holes:
            named[0] = -1
        slots.append(named)
    counts = [
        torch.randint(0, K + 1, (B,), dtype=I32, device=device) if given else None
        for K, given in zip(widths, lens, strict=True)
    ]
    sinks = torch.randn(H, device=device) if sink else None
    if sinks is not None and holes:
        sinks[0], sinks[1] = math.inf, -math.inf
    arguments: dict[str, Any] = {"attn_sink": sinks, "indices": slots[0], "topk_length": counts[0]}
    if len(widths) == 2:
        arguments |= {"extra_k_cache": caches[1], "extra_indices_in_kvcache": slots[1]}
        arguments["extra_topk_length"] = counts[1]
    schedules: dict[bool, Any] = {}

    def call(package: Any, theirs: bool = False) -> Any:
        if theirs not in schedules:
            schedules[theirs] = package.get_mla_metadata()[0]
        return package.flash_mla_with_kvcache(
            q, caches[0], None, None, 512, schedules[theirs], softmax_scale=D**-0.5,
            is_fp8_kvcache=True, **arguments, **legacy(theirs, package),
        )  # fmt: skip

    title = f"b={B} n={n} H={H} D={D} widths={widths} blocks={blocks} sink={sink} lens={lens}"
    return Case("flash_mla", title, call, **more)


# Heads, sink; and for V4 whether there are two caches, and the second one's page size.
LISTED_KERNELS = [(128, True), (64, True), (64, False), (128, False)]
V4_KERNELS = [
    (64, True, True, 2), (128, True, True, 64), (64, False, True, 64), (128, False, False, 64),
    (64, True, False, 64), (128, True, True, 2), (64, False, True, 2), (128, True, False, 64),
]  # fmt: skip


def listed(chance: Random, device: str, part: slice) -> Case:
    """Cases for V3.2, including lists with lengths, which the original rejects."""
    H, sink = chance.choice(LISTED_KERNELS[part])
    return listed_case(
        chance.randrange(1, 40), chance.choice((1, 2, 3)), H, 576,
        [64 * chance.choice((1, 2, 9, 32))], [(chance.randrange(2, 60), 64)], device,
        sink=sink, lens=[chance.random() < 0.1], holes=chance.choice((0, 0.3)),
    )  # fmt: skip


def listed_v4(chance: Random, device: str, part: slice) -> Case:
    H, sink, two, page = chance.choice(V4_KERNELS[part])
    blocks = [(chance.randrange(2, 40), 64), (chance.randrange(2, 90), page)]
    return listed_case(
        chance.randrange(1, 40), chance.choice((1, 2, 3)), H, 512,
        [64 * chance.choice((1, 2, 8)) for _ in range(1 + two)], blocks[: 1 + two], device,
        sink=sink, lens=[chance.random() < 0.4 for _ in range(1 + two)],
        holes=chance.choice((0, 0.3)),
    )  # fmt: skip


def prefill_case(
    T: int, S: int, H: int, D: int, K: int, device: str, *, sink: bool, lens: bool, holes: bool,
    log2: bool | None = None, **more: Any,
) -> Case:  # fmt: skip
    q = torch.randn(T, H, D, device=device, dtype=BF16) / 4
    kv = torch.randn(S, 1, D, device=device, dtype=BF16) / 4
    indices = torch.randint(0, S, (T, 1, K), dtype=I32, device=device)
    if holes:
        for value in (-1, S, 2**31 - 1, -(2**31)):
            indices.masked_fill_(torch.rand(T, 1, K, device=device) < 0.1, value)
        indices[0] = -1
    arguments: dict[str, Any] = {} if log2 is None else {"return_log2_lse": log2}
    arguments["attn_sink"] = torch.randn(H, device=device) if sink else None
    if lens:
        arguments["topk_length"] = torch.randint(0, K + 1, (T,), dtype=I32, device=device)

    def call(package: Any, theirs: bool = False) -> Any:
        found = package.flash_mla_sparse_fwd(
            q, kv, indices, D**-0.5, **arguments, **legacy(theirs, package)
        )
        return found

    title = f"T={T} S={S} H={H} D={D} K={K} sink={sink} lens={lens} holes={holes} log2={log2}"
    return Case("flash_mla", title, call, **more)


def prefill(chance: Random, device: str, part: slice) -> Case:
    return prefill_case(
        chance.choice((1, 7, 62)), chance.randrange(50, 2000), chance.choice((64, 128)),
        chance.choice((576, 512)), 128 * chance.choice((1, 2, 4)), device,
        sink=chance.random() < 0.5, lens=chance.random() < 0.5, holes=chance.random() < 0.5,
        log2=chance.choice((None, None, True, False)),
    )  # fmt: skip


def ragged_case(T: int, S: int, H: int, compressed: bool, device: str, **more: Any) -> Case:
    q = torch.randn(T, H, 128, device=device).to(FP8)
    keys, scales = torch.randn(S, 128, device=device).to(FP8), torch.rand(S, device=device) + 0.1
    w = torch.randn(T, H, device=device)
    ends = torch.arange(S - T + 1, S + 1, device=device, dtype=I32)
    begins = (ends // 3).int() if compressed else torch.zeros_like(ends)
    width = int((ends - begins).max()) if compressed else 0

    def call(package: Any, theirs: bool = False) -> Tensor:
        return to_torch(
            package.fp8_mqa_logits(
                q, (keys, scales), w, begins, ends, clean_logits=not compressed, max_seqlen_k=width
            )
        )

    def exact() -> tuple[Tensor, Tensor]:
        columns = torch.arange(width or S, device=device) + begins[:, None] * bool(width)
        seen = (columns >= begins[:, None]) & (columns < ends[:, None])
        found = []
        for sign in SIGNS:
            scores = torch.einsum("thd,sd->ths", sign(q.double()), sign(keys.double())).relu_()
            both = torch.einsum("ths,th->ts", scores, sign(w.double())) * scales.double()
            found.append(both.gather(1, columns.where(seen, 0)).masked_fill_(~seen, -torch.inf))
        return found[0], found[1]

    return Case("deep_gemm", f"T={T} S={S} H={H} compressed={compressed}", call, exact, **more)


def paged_case(lens: list[int], n: int, H: int, device: str, **more: Any) -> Case:
    layout, B = FORMATS["index_fp8_exact"], len(lens)
    N, table = table_of(lens, 64, device)
    pages = torch.zeros(N, 64, 132, dtype=torch.uint8, device=device)
    one = torch.ones((), device=device)
    fill(pages, layout.name, 128)
    q, w = torch.randn(B, n, H, 128, device=device).to(FP8), torch.randn(B * n, H, device=device)
    # one length per token; the last one is the request's
    behind = torch.arange(n - 1, -1, -1, device=device, dtype=I32)
    context = torch.tensor(lens, dtype=I32, device=device)[:, None] - behind
    M = table.shape[1] * 64
    schedules: dict[bool, Tensor] = {}

    def call(package: Any, theirs: bool = False) -> Tensor:
        if theirs not in schedules:
            sms = package.get_num_sms()
            schedules[theirs] = package.get_paged_mqa_logits_metadata(context, 64, sms)
        return to_torch(
            package.fp8_paged_mqa_logits(
                q, pages.unsqueeze(2), w, context, table, schedules[theirs], M
            )
        )

    def exact() -> tuple[Tensor, Tensor]:
        both = [q.new_full((B * n, M), -torch.inf, dtype=torch.float64) for _ in range(2)]
        for b, S in enumerate(lens):
            at, mine = torch.arange(S, device=device), slice(b * n, b * n + n)
            slots = table[b].long()[at // 64] * 64 + at % 64
            keys = layout.read(pages, slots, one, torch.float64, 128)
            for found, sign in zip(both, SIGNS, strict=True):
                scores = torch.einsum("nhd,sd->nhs", sign(q[b].double()), sign(keys)).relu_()
                found[mine, :S] = torch.einsum(
                    "nhs,nh->ns", scores, sign(w[mine].double())
                ).masked_fill_(at >= context[b][:, None], -torch.inf)
        return both[0], both[1]

    return Case("deep_gemm", f"b={B} n={n} H={H} lens={lens[:6]}", call, exact, **more)


def logits(chance: Random, device: str, part: slice) -> Case:
    if chance.random() < 0.5:
        T = chance.choice((1, 64, 300))
        return ragged_case(T, T + chance.randrange(1, 2000), 64, chance.random() < 0.5, device)
    lens = [chance.randrange(2, 2000) for _ in range(chance.randrange(1, 20))]
    return paged_case(lens, 1, 64, device)


def spread(B: int, S: int) -> list[int]:
    """Lengths around S, the same every time."""
    return [max(2, int(Random(number).gauss(S, S / 2))) for number in range(B)]


def sized(
    make: Callable[..., Case], large: Sequence[Any], small: Sequence[Any], calls: int, **same: Any
) -> Callable[[], Case]:
    """A shape to time, with one of the same kind that is small enough to check."""
    checked = partial(make, *small, "cuda", **same)
    return partial(make, *large, "cuda", calls=calls, small=checked, **same)


DENSE = {
    f"dense-b128-n{n}-s{S}": sized(
        dense_case, (spread(128, S), *rest), (spread(8, S // 16), *rest), calls=4
    )
    for n in (1, 2)
    for rest in [(n, 128, 1, BF16, True)]
    for S in (4096, 16384)
}
SPARSE = {
    f"v32-decode-b{B}-h128": sized(
        listed_case, (B, 2, 128, 576, [2048], [(B * 512, 64)]),
        (4, 2, 128, 576, [2048], [(64, 64)]), calls=8, sink=True, lens=[False], holes=0,
    )
    for B in (2, 64, 128)
} | {
    f"v4-decode-b{B}-h{H}-{extra}-page{BS}": sized(
        listed_case, (B, 2, H, 512, [128, extra], [(B * 64, 256), (B * 16384 // BS, BS)]),
        (4, 2, H, 512, [128, extra], [(16, 256), (4096 // BS, BS)]), calls=8,
        sink=True, lens=[False, BS == 2], holes=0,
    )
    for B in (2, 64, 128)
    for H, extra, BS in ((64, 512, 64), (128, 1024, 64), (64, 1024, 2))
} | {
    f"prefill-4096x{S}-h{H}-d{D}-k{K}": sized(
        prefill_case, (4096, S, H, D, K), (32, 4096, H, D, K), calls=2,
        sink=True, lens=False, holes=False,
    )
    for S, H, D, K in ((8192, 128, 576, 2048), (65536, 128, 576, 2048), (32768, 64, 512, 512),
                       (32768, 128, 512, 1024))
}  # fmt: skip
OTHERS = {
    "dense-fp8-b64-h128-s4096": sized(
        dense_case, ([4096] * 64, 1, 128, 1, FP8, False), ([500] * 4, 1, 128, 1, FP8, False), 4
    ),
    "logits-2048x65536-h64": sized(ragged_case, (2048, 65536, 64, False), (64, 1000, 64, False), 2),
    "logits-compressed-2048x65536-h64": sized(
        ragged_case, (2048, 65536, 64, True), (64, 1000, 64, True), 2
    ),
    "paged-logits-b256-s8192-h64": sized(
        paged_case, (spread(256, 8192), 1, 64), (spread(8, 600), 1, 64), 4
    ),
}
PUBLISHED = DENSE | SPARSE | OTHERS


def overheads(device: str) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Small calls, each through the drop-in and through the op with its arguments ready."""
    heads = 16 if device == "cpu" else 128
    lens, one = [64, 10], torch.ones((), device=device)
    start = torch.tensor([0, 1, 2], dtype=I32, device=device)
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    N, table = table_of(lens, 64, device)
    pages = torch.randn(N, 64, 1, 576, device=device, dtype=BF16)
    q = torch.randn(2, 1, heads, 576, device=device, dtype=BF16)
    seqlens = torch.tensor(lens, dtype=I32, device=device)
    schedule, schedule_2, schedule_3 = (flash_mla.get_mla_metadata()[0] for _ in range(3))
    v3, v4 = (
        stored(name, 4, 64, D, device) for name, D in (("fp8_ds_mla", 576), ("fp8_dsv4", 512))
    )
    listed = torch.randint(0, 256, (2, 1, 64), dtype=I32, device=device)
    counts = torch.full((2,), 64, dtype=I32, device=device)
    sink, whole = torch.randn(heads, device=device), torch.tensor([0, 2], dtype=I32, device=device)
    q4 = q[..., :512].contiguous()
    rows = pages.view(-1, 1, 576)
    q8 = torch.randn(2, 64, 128, device=device).to(FP8)
    w, k8 = torch.randn(2, 64, device=device), torch.randn(100, 128, device=device).to(FP8)
    scales = torch.ones(100, device=device)
    low, high = (torch.full((2,), value, dtype=I32, device=device) for value in (0, 90))
    keys = torch.zeros(N, 64, 132, dtype=torch.uint8, device=device)
    flat_q, paged_q, paged_keys = q[:, 0], q8[:, None], keys[:, :, None]
    paged_lens = seqlens[:, None]

    def segment(cache: Tensor, format: str) -> Segment:
        return Segment(cache, one, format, "slots", None, listed[:, 0], counts)

    return {
        "dense": (
            lambda: flash_mla.flash_mla_with_kvcache(q, pages, table, seqlens, 512, schedule),
            lambda: ops.mqa_paged(
                q[:, 0], pages[:, :, 0], one, table, seqlens, start, format="bf16", C=512,
                scale=0.04, causal=False, max_query_len=1,
            ),
        ),
        "listed V3.2": (
            lambda: flash_mla.flash_mla_with_kvcache(
                q, v3, None, None, 512, schedule_2, indices=listed
            ),
            lambda: ops.mqa_sparse(
                q[:, 0], whole, zeros, segment(v3[:, :, 0], "fp8_ds_mla"), C=512, scale=0.04
            ),
        ),
        "listed V4, extra, sink": (
            lambda: flash_mla.flash_mla_with_kvcache(
                q4, v4, None, None, 512, schedule_3, indices=listed, attn_sink=sink,
                extra_k_cache=v4, extra_indices_in_kvcache=listed, topk_length=counts,
            ),
            lambda: ops.mqa_sparse(
                q4[:, 0], whole, zeros, segment(v4[:, :, 0], "fp8_dsv4"),
                segment(v4[:, :, 0], "fp8_dsv4"), sink, C=512, scale=0.04,
            ),
        ),
        "prefill": (
            lambda: flash_mla.flash_mla_sparse_fwd(flat_q, rows, listed, 0.04),
            lambda: ops.mqa_sparse(
                q[:, 0], whole, zeros, segment(rows.view(1, -1, 576), "bf16"), C=512, scale=0.04
            ),
        ),
        "logits": (
            lambda: deep_gemm.fp8_mqa_logits(q8, (k8, scales), w, low, high),
            lambda: ops.index_logits_ragged(q8, w, k8, scales, low, high),
        ),
        "paged logits": (
            lambda: deep_gemm.fp8_paged_mqa_logits(
                paged_q, paged_keys, w, paged_lens, table, None, 64
            ),
            lambda: ops.index_logits(
                q8, w, keys, table, start, seqlens, format="index_fp8", num_keys=64
            ),
        ),
    }  # fmt: skip
