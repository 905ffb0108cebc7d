"""Latent attention on a GPU compared with FlashMLA and with FlashAttention 3 (FA3) from vLLM.

    python3 -m bench.latent --json latent.json
    python3 -m bench.latent --only vllm       batches as vLLM passes them; see bench/decode_batch.py
    python3 -m bench.latent --only serving    shapes that servers have; see bench/serving.py
    python3 -m bench.latent --sweep --only h128

One process: each shape's contenders are checked against float64, captured in CUDA graphs of several
calls, and replayed in rotation; times are medians. FlashMLA supports 64 or 128 heads, so fewer are
padded for it. It needs the package flash_mla and, over all keys, pages of 64 rows. FA3 decodes bf16
rows and needs vLLM's _vllm_fa3_C: "fa3" has the arguments that vLLM uses under full CUDA graphs,
"fa3 eager" those that it uses without. Ratios are to the fastest of these kernels.
--sweep runs other tiles of the portable kernel in the same rotation: the winner is written into
backends/triton/_tiles.py by hand.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from bench import fa3
from bench.decode_batch import (
    LOG_UNIFORM,
    UNEVEN,
    C,
    D,
    DecodeBatch,
    decode_batch,
    lengths,
    vllm_batch,
)
from bench.report import Report, judged, script_parser
from bench.serving import dense_shapes, sparse_shapes, summary
from openmla.backends import Problem, forget_choices, slower, why_not
from openmla.backends.segments import alignment, problem_of, query_alignment
from openmla.bench.harness import relative_error, time_graphs
from openmla.bench.inputs import random_cache
from openmla.cache.format import get_format
from openmla.ops import Segment, cache_gather, mqa_paged, mqa_sparse
from openmla.ops.mqa_paged import problem as paged_problem

K, BS = 2048, 64
SCALE = D**-0.5
PEERS = ("flashmla", "fa3")  # parts of the names of other packages' contenders
CHECKED = 64  # requests to check
DECODED = 1024  # more tokens are a prefill of one request
Contender = Callable[..., tuple[Tensor, Tensor]]  # without arguments: out [T, H, C], lse [T, H]


class Shape(NamedTuple):
    contenders: dict[str, Contender]
    exact: tuple[Tensor, Tensor]  # for the first tokens, float64
    calls: int  # per graph
    rows: int  # rows read, for the bandwidth
    row_bytes: int


def cached(num_rows: int, format: str, width: int = D) -> Tensor:
    """Random rows in a cache of blocks."""
    return random_cache(num_rows // BS, BS, format, width, "cuda", std=1 / 3)


def attended(
    q: Tensor, rows: Tensor, scale: float = SCALE, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Float64 attention of q [n, H, D] over rows [n, S, D]."""
    scores = q.double() @ rows.mT * scale
    lse = scores.logsumexp(-1)
    share = 1.0 if sink is None else torch.sigmoid(lse - sink.double())[..., None]
    return scores.softmax(-1) @ rows[..., :C] * share, lse


def taken(q: Tensor, segments: Sequence[Segment]) -> str:
    """Which openmla backend runs a call, apart from FlashMLA's adapter, which would be first."""
    problem = problem_of(q, segments, C=C, run_length=0)
    can = why_not(problem, "gluon") is None and slower(problem, "gluon") is None
    return "gluon" if can else "triton"


def sparse(T: int, H: int, format: str, num_rows: int, calls: int) -> Shape:
    cache, one = cached(num_rows, format), torch.ones((), device="cuda")
    q = (torch.randn(T, H, D, device="cuda") / 3).bfloat16()
    named = torch.randint(0, num_rows, (T, K), device="cuda", dtype=torch.int32)
    lens = torch.full((T,), K, device="cuda", dtype=torch.int32)
    positions = torch.full((T,), num_rows - 1, device="cuda")
    if T > DECODED and format != "bf16":  # one request's positions, as in plans
        table = torch.randperm(num_rows // BS, device="cuda").int()
        slots = (table[(named // BS).long()] * BS + named % BS).int()
        start_loc = torch.tensor([0, T], device="cuda", dtype=torch.int32)
        segment = Segment(cache, one, format, "positions", table[None], named, lens)
    else:
        slots, start_loc = named, torch.arange(T + 1, device="cuda", dtype=torch.int32)
        segment = Segment(cache, one, format, "slots", rows=slots, row_lens=lens)

    ours = partial(
        mqa_sparse, q, start_loc, positions, segment, C=C, scale=SCALE,
        backend=taken(q, [segment]),
    )  # fmt: skip
    eight: dict[str, Contender] = {}
    if format == "fp8_ds_mla":
        e4m3 = q.to(torch.float8_e4m3fn)
        q = e4m3.bfloat16()  # all contenders' queries
        ours = partial(ours.func, q, *ours.args[1:], **ours.keywords)
        scales = torch.ones(q.shape[:2], device="cuda")
        own = partial(ours.func, e4m3, *ours.args[1:], **{**ours.keywords, "q_scale": scales})
        eight["openmla e4m3"] = partial(own, backend=taken(e4m3, [segment]))
        if T <= DECODED:
            eight["triton e4m3"] = partial(own, backend="triton")
    few = slots[:2].flatten().long()
    rows = get_format(format).read(cache, few, one, torch.float64, D).view(-1, K, D)
    contenders: dict[str, Contender] = {"openmla": ours, **eight}
    if find_spec("flash_mla") is not None:
        contenders |= _flash_listed(q, [cache], [slots], format)
        given = Segment(cache, one, format, "slots", rows=slots, row_lens=lens)
        call = partial(mqa_sparse, q, start_loc, positions, given, C=C, scale=SCALE)
        contenders |= adapted(problem_of(q, [given], C=C, run_length=0), call) if H >= 64 else {}
    exact = attended(q[:2], rows)
    return Shape(contenders, exact, calls, T * K, get_format(format).row_bytes(D))


def adapted(problem: Problem, call: Callable[..., tuple[Tensor, Tensor]]) -> dict[str, Contender]:
    """FlashMLA as `auto` would run it, conversions included; `slower` is based on this."""
    if why_not(problem, "flashmla") is not None:
        return {}
    return {"flashmla adapter": partial(call, backend="flashmla")}


def legacy_side(flash: Any) -> dict[str, Any]:
    """Select the SM90 kernels in sgl-flash-mla."""
    taken = inspect.signature(flash.flash_mla_with_kvcache).parameters
    return {"use_legacy": True} if "use_legacy" in taken else {}


def _flash_listed(
    q: Tensor, caches: Sequence[Tensor], slots: Sequence[Tensor], format: str,
    sink: Tensor | None = None,
) -> dict[str, Contender]:  # fmt: skip
    """FlashMLA over lists of slots, one list per cache. Its decode kernel reads packed rows.
    Prefill also has its bf16 kernel with openmla's gather of all rows, which a layer would need.
    With two caches (V4), that kernel over rows gathered beforehand replaces the decode kernel."""
    flash = import_module("flash_mla")
    (T, H, width), side = q.shape, legacy_side(flash)
    padded = q if H >= 64 else torch.zeros(T, 64, width, device=q.device, dtype=q.dtype)
    padded[:, :H] = q
    sinks: dict[str, Tensor] = {}
    if sink is not None:
        sinks["attn_sink"] = torch.full((padded.shape[1],), -torch.inf, device=q.device)
        sinks["attn_sink"][:H] = sink
    extra: dict[str, Tensor] = {}
    if len(caches) == 2:
        extra = {
            "extra_k_cache": caches[1].unsqueeze(2),
            "extra_indices_in_kvcache": slots[1].unsqueeze(1),
        }
    metadata, _ = flash.get_mla_metadata()

    def decode() -> tuple[Tensor, Tensor]:
        out, lse = flash.flash_mla_with_kvcache(
            padded.unsqueeze(1), caches[0].unsqueeze(2), None, None, C, metadata,
            softmax_scale=width**-0.5, is_fp8_kvcache=True, indices=slots[0].unsqueeze(1), **sinks,
            **extra, **side,
        )  # fmt: skip
        return out[:, 0, :H], lse[:, :H, 0]

    if T <= DECODED and format != "bf16":
        return {"flashmla": decode}
    starts = itertools.accumulate((len(cache) * BS for cache in caches), initial=0)
    listed = torch.cat([each + start for each, start in zip(slots, starts, strict=False)], 1)

    def prefill(rows: Tensor) -> tuple[Tensor, Tensor]:
        out, _, lse = flash.flash_mla_sparse_fwd(
            padded, rows.view(-1, 1, width), listed.unsqueeze(1), width**-0.5, **sinks, **side
        )
        return out[:, :H], lse[:, :H]

    if format == "bf16":
        return {"flashmla": partial(prefill, caches[0])}
    copy = q.new_empty(sum(len(cache) for cache in caches) * BS, width)
    gather = gather_all(copy, caches, format)
    gather()

    def gathered() -> tuple[Tensor, Tensor]:
        gather()
        return prefill(copy)

    own = partial(prefill, copy) if extra else decode
    return {"flashmla": own, "gather+flashmla": gathered}


def paged(keys: str, H: int, new: int, calls: int, format: str = "bf16") -> Shape:
    """Dense decode with `new` query tokens per request, causal among themselves."""
    lens = lengths(keys)
    blocks = [-(-S // BS) for S in lens]
    cache = cached(sum(blocks) * BS, format)
    free = torch.randperm(sum(blocks), device="cuda").int().split(blocks)
    table = torch.nn.utils.rnn.pad_sequence(list(free), batch_first=True)
    q = (torch.randn(len(lens) * new, H, D, device="cuda") / 3).bfloat16()
    if format != "bf16":  # other contenders' queries are fp8
        q = q.to(torch.float8_e4m3fn).bfloat16()
    # one cache per call, as in a model's layers
    copies = calls - 1 if format == "bf16" else 0
    layers = (cache, *(cache.clone() for _ in range(copies)))
    batch = decode_batch((q[..., :C], q[..., C:]), layers, table, lens, new)
    return dense(batch, calls, format)


def served(
    keys: str, H: int, new: int, page: int, layout: str = "LBNHC", device: str = "cuda"
) -> Shape:
    """Dense decode as vLLM passes it, one call per layer in a graph. "cat+openmla" is what
    openmla's vLLM backend runs: it joins the two parts of the queries first. FA3 takes them
    separately."""
    batch = vllm_batch(keys, H, new, page, layout, device)
    shape = dense(batch, len(batch.layers))
    ours = shape.contenders["openmla"]

    def joined() -> tuple[Tensor, Tensor]:
        return ours(q=torch.cat(batch.halves, -1))

    return shape._replace(contenders={**shape.contenders, "cat+openmla": joined})


def in_turn(call: Contender, layers: Sequence[Tensor]) -> Contender:
    """Call `call` with the cache of the next layer each time."""
    caches = itertools.cycle(layers)
    return lambda **changed: call(next(caches), **changed)


def exact_paged(batch: DecodeBatch, format: str) -> tuple[Tensor, Tensor]:
    """Every query of the first requests, in float64."""
    cache, one = batch.layers[0], torch.ones((), device=batch.q.device)
    page, found = cache.shape[1], []
    for b, S in enumerate(batch.lens[:CHECKED]):
        positions = torch.arange(S, device=batch.q.device)
        slots = batch.table[b, positions // page].long() * page + positions % page
        rows = get_format(format).read(cache, slots, one, torch.float64, D)
        for i in range(batch.new):
            seen = rows[: S - batch.new + 1 + i]
            found.append(attended(batch.q[b * batch.new + i][None], seen[None]))
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs), torch.cat(lses)


def dense(batch: DecodeBatch, calls: int, format: str = "bf16") -> Shape:
    """Contenders for a step over all keys."""
    cache, one = batch.layers[0], torch.ones((), device=batch.q.device)
    T, H, _ = batch.q.shape
    asked = paged_problem(
        batch.q.device, batch.q.dtype, format, H=H, D=D, C=C, BS=cache.shape[1], tokens=T,
        max_query_len=batch.new, run_length=0,
        aligned=alignment(batch.layers) | query_alignment(batch.q),
    )  # fmt: skip

    def attend(
        cache: Tensor, q: Tensor = batch.q, scales: Tensor | None = None, *, backend: str,
        format: str = format,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return mqa_paged(
            q, cache, one, batch.table, batch.seq_lens, batch.start_loc, scales, format=format, C=C,
            scale=SCALE, causal=True, max_query_len=batch.new, backend=backend,
        )  # fmt: skip

    able = [name for name in ("gluon", "triton") if why_not(asked, name) is None]
    chosen = able[0] if able else "auto"  # on a CPU
    contenders: dict[str, Contender] = {
        "openmla": in_turn(partial(attend, backend=chosen), batch.layers)
    }
    if format == "bf16":
        if find_spec("flash_mla") is not None and cache.shape[1] == BS:
            contenders["flashmla"] = in_turn(_flash_paged(batch), batch.layers)
        if fa3.why_absent() is None:
            for name, decode in fa3.decoders(batch):
                contenders[name] = in_turn(decode, batch.layers)
    eight, scales = batch.q.to(torch.float8_e4m3fn), torch.ones(T, H, device=batch.q.device)
    with_e4m3 = partial(attend, cache, eight, scales)
    if format == "fp8_ds_mla":
        contenders["triton e4m3"] = partial(with_e4m3, backend="triton")
    if format == "fp8":
        copy = get_format(format).decode(cache, one, torch.bfloat16, D)
        contenders |= {
            "openmla bf16": partial(attend, copy, format="bf16", backend="gluon"),
            "triton": partial(attend, cache, backend="triton"),
        }
        for name, backend in (("openmla e4m3", "gluon"), ("triton e4m3", "triton")):
            contenders[name] = partial(with_e4m3, backend=backend)
        if find_spec("flash_mla") is not None:
            contenders["flashmla"] = partial(_flash_paged(batch, fp8=True), cache)
    exact = exact_paged(batch, format)
    return Shape(contenders, exact, calls, sum(batch.lens), get_format(format).row_bytes(D))


def _flash_paged(
    batch: DecodeBatch, fp8: bool = False
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """FlashMLA over all keys. With fp8 queries, it rounds probs to fp8."""
    flash = import_module("flash_mla.flash_mla_interface" if fp8 else "flash_mla")
    metadata, _ = flash.get_mla_metadata()
    q, new, more = batch.q, batch.new, legacy_side(flash)
    if fp8:
        q, one = q.to(torch.float8_e4m3fn), torch.ones(1, device="cuda")
        metadata.tile_scheduler_metadata, metadata.num_splits = flash.get_mla_decoding_metadata(
            batch.seq_lens, new * q.shape[1], 1, q.shape[1], True, use_legacy=True
        )
        more = {"is_fp8_kvcache": True, "use_legacy": True, "descale_q": one, "descale_k": one}
    queries = q.view(-1, new, *q.shape[1:])

    def decode(cache: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash.flash_mla_with_kvcache(
            queries, cache.unsqueeze(2), batch.table, batch.seq_lens, C, metadata,
            softmax_scale=SCALE, causal=True, **more,
        )  # fmt: skip
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    return decode


def compressed(T: int, H: int, chosen: int, calls: int) -> Shape:
    """V4: each token over its last 128 rows and its selected entries, with a sink. Decode has one
    token per request; prefill has one request with consecutive tokens."""
    window, format, M, entries, scale = 128, "fp8_dsv4", 4, 32768, C**-0.5
    one, prefill = torch.ones((), device="cuda"), T > DECODED
    B = 1 if prefill else T
    columns = (T + window) // BS if prefill else M
    rows = cached(B * columns * BS, format, C)
    pool = cached(max(B, 4) * entries, format, C)
    q = (torch.randn(T, H, C, device="cuda") / 3).bfloat16()
    sink = torch.randn(H, device="cuda")
    ring = torch.randperm(B * columns, device="cuda").int().view(B, columns)
    table = torch.randperm(len(pool), device="cuda")[: B * entries // BS].int().view(B, -1)
    positions = (
        torch.arange(window, window + T, device="cuda")
        if prefill
        else (torch.full((T,), 100_000, device="cuda"))
    )
    named = torch.randint(0, entries, (T, chosen), device="cuda", dtype=torch.int32)
    lens = torch.full((T,), chosen, device="cuda", dtype=torch.int32)
    start_loc = torch.tensor([0, T] if prefill else range(T + 1), device="cuda").int()
    first = Segment(rows, one, format, "window", block_table=ring, span=window)
    second = Segment(pool, one, format, "positions", table, named, lens)

    ours = partial(
        mqa_sparse, q, start_loc, positions, first, second, sink, C=C, scale=scale,
        backend=taken(q, [first, second]),
    )  # fmt: skip
    owner = torch.zeros(T, device="cuda").long() if prefill else torch.arange(T, device="cuda")
    last = positions[:, None] - torch.arange(window, device="cuda")
    near = (ring[owner[:, None], last // BS % columns] * BS + last % BS).int()
    far = table[owner[:, None], named.long() // BS] * BS + named % BS
    layout = get_format(format)
    both = [
        layout.read(cache, slots[:2].flatten().long(), one, torch.float64, C).view(-1, n, C)
        for cache, slots, n in ((rows, near, window), (pool, far, chosen))
    ]
    exact = attended(q[:2], torch.cat(both, 1), scale, sink)
    contenders: dict[str, Contender] = {"openmla": ours}
    if find_spec("flash_mla") is not None:
        contenders |= _flash_listed(q, [rows, pool], [near, far], format, sink)
        call = partial(mqa_sparse, q, start_loc, positions, first, second, sink, C=C, scale=scale)
        contenders |= adapted(problem_of(q, [first, second], C=C, run_length=0), call)
    return Shape(contenders, exact, calls, T * (window + chosen), layout.row_bytes(C))


def gather_all(out: Tensor, caches: Sequence[Tensor], format: str) -> Callable[[], None]:
    """A function that writes every row of some caches, one cache after another, in 16 bits."""
    calls, first = [], 0
    for cache in caches:
        N, BS, _ = cache.shape
        table = torch.arange(N, device=cache.device, dtype=torch.int32)[None]
        bounds = torch.tensor([0, N * BS], device=cache.device, dtype=torch.int32)
        one, rows = torch.ones((), device=cache.device), out[first : first + N * BS]
        asked = (rows, cache, one, table, bounds[:1], bounds)
        calls.append(partial(cache_gather, *asked, format=format))
        first += N * BS

    def gather() -> None:
        for call in calls:
            call()

    return gather


def tiles(title: str, ours: Callable[..., tuple[Tensor, Tensor]]) -> dict[str, Contender]:
    """The same call with other tiles."""
    launch = import_module("openmla.backends.triton._launch")
    Config = import_module("openmla.backends.triton._tiles").Config
    wide = [
        (64, 64, 8, 2), (64, 64, 8, 2, 512, False), (64, 64, 8, 3), (64, 64, 8, 3, 512, False),
        (64, 64, 8, 2, 256), (64, 64, 8, 2, 256, False), (64, 64, 8, 3, 256),
        (64, 64, 8, 3, 256, False),
    ]  # fmt: skip
    few = [
        (16, 64, 4, 2, 256), (16, 64, 4, 2, 256, False), (16, 64, 4, 3, 256), (16, 32, 4, 2, 256),
        (16, 32, 4, 2, 256, False), (16, 32, 4, 3, 256), (16, 32, 4, 2), (16, 32, 4, 3),
    ]  # fmt: skip
    few_heads = "-h16-" in title or "-h8-" in title

    def tried(config: Any) -> tuple[Tensor, Tensor]:
        forget_choices()  # otherwise calls repeat their first backend and config
        with patch.object(launch, "config_of", lambda *_: config):
            return ours(backend="triton")

    rows = few if few_heads else wide
    return {"x".join(map(str, row)): partial(tried, Config(*row)) for row in rows}


def shapes() -> Iterator[tuple[str, Callable[[], Shape]]]:
    """Names and functions that make the shapes, so that only requested shapes are made."""
    for H in (16, 32, 64, 128):
        for B in (1, 4, 16, 64, 128):
            make = partial(sparse, B, H, "fp8_ds_mla", 524288, 20)
            yield f"sparse-decode-fp8_ds_mla-h{H}-b{B}", make
    for H in (16, 128):
        for format in ("bf16", "fp8_ds_mla"):
            make = partial(sparse, 4096, H, format, 32768, 2)
            yield f"sparse-prefill-{format}-h{H}-t4096", make
    for keys in ("64x4096", "16x8192", "128x2048", "1x131072", "1x32768", "4x1024", UNEVEN):
        for H in (8, 16, 32, 64, 128):
            yield f"dense-decode-bf16-h{H}-{keys}", partial(paged, keys, H, 1, 10)
    for new in (2, 4):
        for keys in ("16x8192", "64x4096"):
            for H in (8, 16, 32, 64, 128):
                yield f"dense-verify{new}-bf16-h{H}-{keys}", partial(paged, keys, H, new, 10)
    yield "dense-decode-bf16-h16-64x16384", partial(paged, "64x16384", 16, 1, 5)
    for keys, heads in (
        ("64x16384", (16,)),
        ("64x4096", (8, 16, 32, 64, 128)),
        (UNEVEN, (16, 128)),
    ):
        for H in heads:
            yield f"dense-decode-fp8-h{H}-{keys}", partial(paged, keys, H, 1, 5, "fp8")
    for H in (16, 32, 64, 128):
        make = partial(paged, "64x4096", H, 1, 5, "fp8_ds_mla")
        yield f"dense-decode-fp8_ds_mla-h{H}-64x4096", make
    for H, chosen in ((8, 512), (16, 512), (64, 512), (128, 1024)):
        for B in (1, 16, 64, 128):
            yield f"v4-decode-h{H}-b{B}-k{chosen}", partial(compressed, B, H, chosen, 20)
    yield "v4-prefill-h64-t4096-k512", partial(compressed, 4096, 64, 512, 2)
    yield from vllm_shapes()
    yield from serving_shapes()


def serving_shapes() -> Iterator[tuple[str, Callable[[], Shape]]]:
    for name, keys, H, new, page, format in dense_shapes():
        if format == "bf16":
            yield name, partial(served, keys, H, new, page)
        else:
            yield name, partial(paged, keys, H, new, 5, format)
    for name, kind, H, B in sparse_shapes():
        if kind == "v4":
            yield name, partial(compressed, B, H, 512 if H < 128 else 1024, 10)
        else:
            yield name, partial(sparse, B, H, "fp8_ds_mla", 524288, 10)


def vllm_shapes() -> Iterator[tuple[str, Callable[[], Shape]]]:
    """Decode steps as vLLM passes them to attention: pages of 16 rows by default, of 64 for its
    FLASHMLA."""
    uneven = [f"{B}x{LOG_UNIFORM}" for B in (16, 64, 128)]
    even = ["1x1024", "1x32768", "16x8192", "64x4096", "128x2048"]
    for H in (16, 128):
        for keys in (*even, *uneven):
            yield f"vllm-decode-h{H}-p16-{keys}", partial(served, keys, H, 1, 16)
        for keys in ("64x4096", f"64x{LOG_UNIFORM}"):
            yield f"vllm-decode-h{H}-p64-{keys}", partial(served, keys, H, 1, 64)
    yield "vllm-verify2-h16-p16-64x4096", partial(served, "64x4096", 16, 2, 16)
    yield "vllm-decode-h16-p16-64x4096-BLNHC", partial(served, "64x4096", 16, 1, 16, "BLNHC")


def errors(result: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Relative error of out, largest error of lse, over the tokens that were computed exactly."""
    n = len(exact[0])
    out, lse = (each[:n] for each in result)
    return relative_error(out, exact[0]), float((lse.double() - exact[1]).abs().max())


def is_baseline(name: str) -> bool:
    """Whether ratios may be to this contender; adapters of other packages' kernels do not count."""
    return name.endswith("flashmla") or name.startswith("fa3")


def absent() -> dict[str, str]:
    """Baselines that are not available, and why."""
    missing = {"fa3": fa3.why_absent()}
    if find_spec("flash_mla") is None:
        missing["flashmla"] = "package flash_mla is not installed"
    return {name: why for name, why in missing.items() if why is not None}


def run(arguments: Sequence[str] | None = None) -> None:
    parser = script_parser("latent", __doc__)
    parser.add_argument("--sweep", action="store_true", help="also time other tiles")
    columns = f"{'us':>9} {'ratio':>6} {'TB/s':>6} {'error':>8}"
    report = Report(parser, arguments, f"{'shape':<36} {'contender':<17} {columns}", resume=True)
    torch.manual_seed(0)
    for name, why in absent().items():
        print(f"without {name}: {why}")
    for title, make in shapes():
        if not report.wants(title):
            continue
        shape = make()
        if report.options.sweep:
            shape.contenders.update(tiles(title, shape.contenders["openmla"]))
        found = judged(title, shape.contenders, partial(errors, exact=shape.exact), PEERS)
        limits = {"flashmla": 5e-2} if "-fp8-" in title else {}  # probs in fp8
        if "fp8_ds_mla" not in title:  # fp8_ds_mla widens queries; the others multiply in fp8
            limits |= {name: 8e-3 for name in found if name.endswith("e4m3")}
        right = [name for name, (error, _) in found.items() if error < limits.get(name, 4e-3)]
        times = time_graphs({name: shape.contenders[name] for name in right}, shape.calls)
        for name, (error, lse_error) in found.items():
            if name not in times:
                print(f"{title:<36} {name:<13} WRONG, error {error:.4f}")
                continue
            theirs = [us for peer, us in times.items() if is_baseline(peer)]
            ratio = min(theirs) / times[name] if theirs else None
            rate = shape.rows * shape.row_bytes / times[name] / 1e6
            shown = "" if ratio is None else f"{ratio:.2f}"
            print(
                f"{title:<36} {name:<17} {times[name]:>9.1f} {shown:>6} {rate:>6.2f} {error:>8.5f}",
                flush=True,
            )
            flashmla = times["flashmla"] / times[name] if "flashmla" in times else None
            report.rows.append(
                {"shape": title, "contender": name, "us": times[name], "ratio": ratio,
                 "to_flashmla": flashmla, "error": error, "lse_error": lse_error}
            )  # fmt: skip
        report.save()
    for line in summary(report.rows):
        print(line)


if __name__ == "__main__":
    run()
