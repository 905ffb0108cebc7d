"""The drop-in for flash_mla: what its functions mean, by plain loops; signatures; refusals."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from openmla.cache.format import FORMATS
from openmla.errors import ConfigError, OpenMLAError, UnsupportedError
from openmla.integrations import deep_gemm, flash_mla
from openmla.integrations.flash_mla import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_decoding_metadata,
    get_mla_metadata,
)
from openmla.integrations.later import Later

ONE = torch.tensor(1.0)
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def on(device: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call there, its results here."""
    args, kwargs = tree_map_only(Tensor, lambda each: each.to(device), (args, kwargs))
    return tree_map_only(Tensor, lambda each: each.cpu(), function(*args, **kwargs))


def attended(
    q: Tensor, rows: Tensor, C: int, scale: float, sink: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One token [H, D] over its rows [n, D] in float64: out, their lse, largest logit."""
    if len(rows) == 0:
        none = q.new_full(q.shape[:1], math.inf, dtype=torch.float64)
        return q.new_zeros((len(q), C), dtype=torch.float64), none, -none
    logits = scale * (q.double() @ rows.double().T)
    weights = logits.exp()
    below = weights.sum(-1)
    total = below if sink is None else below + sink.double().exp()
    out = (weights @ rows[:, :C].double()) / total[:, None]
    return out, below.log(), logits.amax(-1)


def close(actual: Tensor, exact: Tensor, dtype: torch.dtype = BF16) -> None:
    """Within a rounding or two of the result's own dtype."""
    assert actual.dtype == dtype and actual.shape == exact.shape
    finite = exact.isfinite()
    assert torch.equal(actual.isfinite(), finite)
    assert torch.equal(actual[~finite].double(), exact[~finite])
    room = {BF16: 2e-2, FP16: 3e-3, torch.float32: 1e-4}[dtype]
    largest = exact[finite].abs().max() if finite.any() else torch.tensor(0.0)
    assert ((actual.double() - exact)[finite].abs() <= room * (0.2 + largest)).all()


def paged(
    lens: Sequence[int], BS: int, G: int, D: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Pages in no order, NaN where nobody looks, and a table with nonsense in unused columns."""
    M = max(-(-max(lens) // BS), 1) + 1
    pages = torch.randn(len(lens) * M, BS, G, D).mul(0.5).to(dtype)
    table = torch.randperm(len(lens) * M).int().view(len(lens), M)
    for b, S in enumerate(lens):
        used = -(-S // BS)
        if S % BS:
            pages[table[b, used - 1], S % BS :] = math.nan
        pages[table[b, used:].long()] = math.nan
        table[b, used:] = 2147480000
    return pages, table


@pytest.mark.parametrize(
    ("H", "G", "n", "BS", "dtype", "causal"),
    [
        (16, 1, 1, 64, BF16, False),
        (17, 1, 3, 64, BF16, True),
        (8, 1, 2, 16, FP16, True),
        (12, 3, 2, 64, BF16, True),
        (3, 1, 4, 7, BF16, False),
    ],
)
def test_dense(
    H: int, G: int, n: int, BS: int, dtype: torch.dtype, causal: bool, device: str
) -> None:
    torch.manual_seed(0)
    lens, D, C = [0, 1, 2, 70, 64], 576, 512
    pages, table = paged(lens, BS, G, D, dtype)
    q = torch.randn(len(lens), n, H, D).mul(0.3).to(dtype)
    cache_seqlens = torch.tensor(lens, dtype=torch.int32)
    out, lse = on(
        device, flash_mla_with_kvcache, q, pages, table, cache_seqlens, C, get_mla_metadata()[0],
        causal=causal,
    )  # fmt: skip
    assert out.shape == (len(lens), n, H, C) and lse.shape == (len(lens), H, n)
    assert out.is_contiguous() and lse.is_contiguous()
    for b, S in enumerate(lens):
        rows = pages[table[b, : -(-S // BS)].long()].flatten(0, 1)[:S]
        for i in range(n):
            seen = max(S - (n - 1 - i), 0) if causal and n > 1 else S
            for g in range(G):
                heads = slice(g * H // G, (g + 1) * H // G)
                exact = attended(q[b, i, heads], rows[:seen, g], C, D**-0.5)
                close(out[b, i, heads], exact[0], dtype)
                close(lse[b, heads, i], exact[1], torch.float32)


def test_schedules_of_either_kind_serve_a_call() -> None:
    pages, table = paged([5, 9], 64, 1, 576, BF16)
    q, lens = torch.randn(2, 1, 16, 576).to(BF16), torch.tensor([5, 9], dtype=torch.int32)
    new, nothing = get_mla_metadata()
    assert isinstance(new, FlashMLASchedMeta) and nothing is None
    old, splits = get_mla_metadata(lens, 16, 1)
    assert splits is not None and old.dtype == splits.dtype == torch.int32
    assert old.shape[1] == 8 and splits.shape == (3,)
    named, _ = get_mla_metadata(cache_seqlens=lens, num_q_tokens_per_head_k=16, num_heads_k=1)
    assert named.shape == old.shape
    again, _ = get_mla_decoding_metadata(lens, 16, 1, is_fp8_kvcache=True, use_legacy=True)
    assert again.shape == old.shape
    ways = [(new, None), (new, None), (old, splits)]
    results = [flash_mla_with_kvcache(q, pages, table, lens, 512, *way) for way in ways]
    assert all(torch.equal(out, results[0][0]) for out, _ in results)
    assert new.have_initialized and new.config is not None and new.config.h_q == 16
    # lengths may change under the same schedule: nothing of ours depends on them
    flash_mla_with_kvcache(q, pages, table, lens - 1, 512, new)


def test_dense_fp8_with_scales(device: str) -> None:
    torch.manual_seed(1)
    lens, D, C = [3, 130, 0], 576, 512
    pages, table = paged(lens, 64, 1, D, torch.float32)
    pages, q = pages.nan_to_num().to(FP8), torch.randn(3, 2, 16, D).to(FP8)
    seqlens, of_q, of_k = torch.tensor(lens, dtype=torch.int32), 0.3, 0.7
    out, lse = on(
        device, flash_mla_with_kvcache, q, pages, table, seqlens, C, get_mla_metadata()[0],
        causal=True, is_fp8_kvcache=True, descale_q=torch.tensor([of_q]),
        descale_k=torch.tensor([of_k]), use_legacy=True,
    )  # fmt: skip
    for b, S in enumerate(lens):
        rows = of_k * pages[table[b, : -(-S // 64)].long()].flatten(0, 2)[:S].double()
        for i in range(2):
            seen = max(S - 1 + i, 0)
            exact = attended(of_q * q[b, i].double(), rows[:seen], C, D**-0.5)
            close(out[b, i], exact[0])
            close(lse[b, :, i], exact[1], torch.float32)


def stored(format: str, N: int, BS: int, D: int) -> tuple[Tensor, Tensor]:
    """Pages [N, BS, 1, W] of a format, padding behind each, and their rows as numbers."""
    layout = FORMATS[format]
    W, page = layout.width(D), -(-BS * layout.width(D) // 576) * 576 + 1152
    whole = torch.zeros(N, page, dtype=layout.dtype)
    pages = whole[:, : BS * W].view(N, BS, W)
    slots = torch.arange(N * BS)
    layout.write(pages, slots, torch.randn(N * BS, D).mul(0.5), ONE)
    return pages.unsqueeze(2), layout.read(pages, slots, ONE, torch.float32, D)


@pytest.mark.parametrize(("format", "D"), [("fp8_ds_mla", 576), ("fp8_dsv4", 512), ("bf16", 576)])
def test_dense_fp8_queries_over_rows_with_their_own_scales(
    format: str, D: int, device: str
) -> None:
    torch.manual_seed(1)
    pages, rows = stored(format, 3, 64, D)
    q, lens, of_q = torch.randn(2, 2, 16, D).to(FP8), [3, 130], 0.03
    table = torch.arange(3, dtype=torch.int32).expand(2, 3)
    out, lse = on(
        device, flash_mla_with_kvcache, q, pages, table, torch.tensor(lens, dtype=torch.int32), 512,
        get_mla_metadata()[0], causal=True, descale_q=torch.tensor([of_q]),
    )  # fmt: skip
    for b, S in enumerate(lens):
        for i in range(2):
            exact = attended(of_q * q[b, i].double(), rows[: S - 1 + i], 512, D**-0.5)
            close(out[b, i], exact[0])
            close(lse[b, :, i], exact[1], torch.float32)


@pytest.mark.parametrize(
    ("format", "D", "H", "n", "BS", "viewed"),
    [
        ("fp8_ds_mla", 576, 64, 1, 64, torch.uint8),
        ("fp8_ds_mla", 576, 17, 2, 5, FP8),
        ("fp8_dsv4", 512, 8, 3, 61, torch.int8),
        ("fp8_dsv4", 512, 16, 1, 2, torch.uint8),
    ],
)
def test_listed(
    format: str, D: int, H: int, n: int, BS: int, viewed: torch.dtype, device: str
) -> None:
    torch.manual_seed(2)
    B, K, C = 4, 12, 512
    pages, rows = stored(format, 6, BS, D)
    q = torch.randn(B, n + 1, H, D).mul(0.3).to(BF16)[:, :n]
    indices = torch.randint(-1, len(rows), (B, n, K + 3), dtype=torch.int32)[..., :K]
    indices[0] = -1
    sink = torch.randn(H)
    sink[0], sink[1] = math.inf, -math.inf
    topk_length = torch.tensor([K, 0, 5, 99], dtype=torch.int32)
    for lens, of in ((None, None), (topk_length, sink), (None, sink)):
        out, lse = on(
            device, flash_mla_with_kvcache, q, pages.view(viewed), None, None, C,
            get_mla_metadata()[0], indices=indices, attn_sink=of, topk_length=lens,
            softmax_scale=0.07,
        )  # fmt: skip
        assert out.shape == (B, n, H, C) and lse.shape == (B, H, n)
        for b in range(B):
            for i in range(n):
                named = indices[b, i, : K if lens is None else lens[b]]
                exact = attended(q[b, i], rows[named[named >= 0].long()], C, 0.07, of)
                close(out[b, i], exact[0])
                close(lse[b, :, i], exact[1], torch.float32)


def test_an_extra_cache(device: str) -> None:
    torch.manual_seed(3)
    B, n, H, D = 3, 2, 16, 512
    pages, rows = stored("fp8_dsv4", 3, 64, D)
    more_pages, more_rows = stored("fp8_dsv4", 5, 2, D)
    q, sink = torch.randn(B, n, H, D).mul(0.3).to(BF16), torch.randn(H)
    indices = torch.randint(-1, len(rows), (B, n, 8), dtype=torch.int32)
    more = torch.randint(-1, len(more_rows), (B, n, 6), dtype=torch.int32)
    lens, more_lens = torch.tensor([8, 3, 0]).int(), torch.tensor([0, 6, 0]).int()
    out, lse = on(
        device, flash_mla_with_kvcache, q, pages, None, None, 512, get_mla_metadata()[0], None,
        0.05, False, True, indices, sink, more_pages, more, lens, more_lens,
    )  # fmt: skip
    for b in range(B):
        for i in range(n):
            first, second = indices[b, i, : lens[b]], more[b, i, : more_lens[b]]
            seen = [rows[first[first >= 0].long()], more_rows[second[second >= 0].long()]]
            exact = attended(q[b, i], torch.cat(seen), 512, 0.05, sink)
            close(out[b, i], exact[0])
            close(lse[b, :, i], exact[1], torch.float32)
    assert (lse[2] == math.inf).all() and not out[2].any()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_lists_of_16_bit_rows(dtype: torch.dtype, device: str) -> None:
    """Which theirs has no decode kernel for."""
    torch.manual_seed(4)
    pages = torch.randn(4, 16, 1, 576).mul(0.5).to(dtype)
    q = torch.randn(2, 1, 8, 576).mul(0.3).to(dtype)
    indices = torch.randint(0, 64, (2, 1, 9), dtype=torch.int32)
    out, lse = on(
        device, flash_mla_with_kvcache, q, pages, None, None, 512, get_mla_metadata()[0],
        indices=indices,
    )  # fmt: skip
    for b in range(2):
        exact = attended(q[b, 0], pages.flatten(0, 2)[indices[b, 0].long()], 512, 576**-0.5)
        close(out[b, 0], exact[0], dtype)
        close(lse[b, :, 0], exact[1], torch.float32)


def test_rows_without_rope_go_by_name() -> None:
    """528 bytes are V4.1's too, which nothing here reads."""
    pages, rows = stored("fp8_ds_mla", 2, 8, 512)
    q = torch.randn(1, 1, 8, 512).mul(0.3).to(BF16)
    indices = torch.arange(16, dtype=torch.int32).view(1, 1, 16)
    call: dict[str, Any] = {"head_dim_v": 512, "indices": indices, "softmax_scale": 0.05}
    shape = (q, pages, None, None)
    out, _ = flash_mla_with_kvcache(
        *shape, tile_scheduler_metadata=get_mla_metadata()[0], kv_format="V32_NO_ROPE", **call
    )
    close(out[0, 0], attended(q[0, 0], rows, 512, 0.05)[0])
    for kv_format in (None, "V41", "V4"):
        with pytest.raises(RuntimeError, match=r"kv_format must be|rows of"):
            flash_mla_with_kvcache(
                *shape, tile_scheduler_metadata=get_mla_metadata()[0], kv_format=kv_format, **call
            )


@pytest.mark.parametrize(("D", "H"), [(576, 16), (512, 17)])
def test_prefill(D: int, H: int, device: str) -> None:
    torch.manual_seed(5)
    T, S, K = 7, 40, 9
    kv = torch.randn(S, 2, D + 8).mul(0.5).to(BF16)[:, :1, :D]
    q = torch.randn(T, H + 1, D).mul(0.3).to(BF16)[:, :H]
    nonsense = torch.tensor([-(2**31), -5, -1, S, 114514, 2**31 - 1]).int()
    indices = torch.randint(0, S, (T, 1, K), dtype=torch.int32)
    hidden = torch.rand(T, 1, K) < 0.3
    indices[hidden] = nonsense[torch.randint(0, 6, (int(hidden.sum()),))]
    indices[2] = -1
    sink, lens = torch.randn(H), torch.tensor([9, 0, 9, 3, 9, 1, 8]).int()
    for of, length in ((None, None), (sink, lens)):
        out, largest, lse = on(
            device, flash_mla_sparse_fwd, q, kv, indices, 0.1, attn_sink=of, topk_length=length
        )
        assert largest is not None and lse is not None
        for t in range(T):
            named = indices[t, 0, : K if length is None else length[t]]
            rows = kv[named[(named >= 0) & (named < S)].long(), 0]
            exact = attended(q[t], rows, 512, 0.1, of)
            close(out[t], exact[0])
            close(lse[t], exact[1], torch.float32)
            close(largest[t], exact[2], torch.float32)


def test_statistics_are_natural_base_two_or_absent() -> None:
    torch.manual_seed(6)
    q, kv = torch.randn(3, 8, 576).to(BF16), torch.randn(20, 1, 576).to(BF16)
    indices = torch.randint(-1, 20, (3, 1, 6), dtype=torch.int32)
    out, largest, lse = flash_mla_sparse_fwd(q, kv, indices, 0.05)
    in_twos = flash_mla_sparse_fwd(q, kv, indices, 0.05, return_log2_lse=True)
    assert largest is not None and lse is not None and in_twos[1] is not None
    torch.testing.assert_close(in_twos[1] + 0, largest * math.log2(math.e))
    torch.testing.assert_close(in_twos[2], lse * math.log2(math.e))
    none = flash_mla_sparse_fwd(q, kv, indices, 0.05, return_log2_lse=False)
    assert torch.equal(none[0], out) and none[1:] == (None, None)


@torch.inference_mode(False)
def test_largest_logits_are_computed_when_read() -> None:
    q, kv = torch.randn(2, 8, 576).to(BF16), torch.randn(9, 1, 576).to(BF16)
    indices = torch.arange(18, dtype=torch.int32).view(2, 1, 9) % 9
    largest = flash_mla_sparse_fwd(q, kv, indices, 0.05)[1]
    assert isinstance(largest, Later) and largest.shape == (2, 8) and largest._made is None
    exact = (0.05 * (q.float() @ kv[:, 0].float().T)).amax(-1)
    torch.testing.assert_close(largest.clone(), exact)
    assert largest.tolist() == largest.numpy().tolist()
    unread = flash_mla_sparse_fwd(q, kv, indices, 0.05)[1]
    assert unread is not None
    q.zero_()
    torch.testing.assert_close(largest.clone(), exact)
    with pytest.raises(
        UnsupportedError, match="an input was written to before max_logits was read"
    ):
        unread.sum()
    with torch.inference_mode():
        inside = flash_mla_sparse_fwd(q, kv, indices, 0.05)[1]
        assert inside is not None and not (inside != 0).any()


def test_batch_invariance_is_a_fixed_cut() -> None:
    torch.manual_seed(7)
    pages, table = paged([200, 1100, 17], 64, 1, 576, BF16)
    q, lens = torch.randn(3, 1, 16, 576).to(BF16), torch.tensor([200, 1100, 17]).int()
    whole, _ = flash_mla_with_kvcache(
        q, pages, table, lens, 512, get_mla_metadata()[0], enable_batch_invariant=True
    )
    for b in range(3):
        alone, _ = flash_mla_with_kvcache(
            q[b : b + 1], pages, table[b : b + 1], lens[b : b + 1], 512, get_mla_metadata()[0],
            enable_batch_invariant=True,
        )  # fmt: skip
        assert torch.equal(whole[b : b + 1], alone)


def test_nothing_is_asked() -> None:
    pages, table = paged([5], 64, 1, 576, BF16)
    q, none = torch.randn(1, 2, 8, 576).to(BF16), torch.zeros(1, 2, 0, dtype=torch.int32)
    schedule = get_mla_metadata()[0]
    out, lse = flash_mla_with_kvcache(q, pages, None, None, 512, schedule, indices=none)
    assert not out.any() and (lse == math.inf).all()
    lens = torch.tensor([5], dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(q[:0], pages, table[:0], lens[:0], 512, get_mla_metadata()[0])
    assert out.shape == (0, 2, 8, 512) and lse.shape == (0, 8, 2)
    out, largest, _ = flash_mla_sparse_fwd(q[0, :0], pages[0], none.view(2, 1, 0)[:0], 0.1)
    assert out.shape == (0, 8, 512) and largest is not None and largest.clone().shape == (0, 8)


def test_calls_are_traced_whole() -> None:
    pages, table = paged([5, 70], 64, 1, 576, BF16)
    q, lens = torch.randn(2, 1, 8, 576).to(BF16), torch.tensor([5, 70], dtype=torch.int32)
    listed = torch.tensor([[[0, 3]], [[2, -1]]], dtype=torch.int32)

    def step(q: Tensor, pages: Tensor) -> list[Any]:
        dense = flash_mla_with_kvcache(q, pages, table, lens, 512, get_mla_metadata()[0])
        return [*dense, *flash_mla_sparse_fwd(q[:, 0], pages[:4].flatten(0, 1), listed, 0.1)]

    torch.compiler.reset()
    pages.nan_to_num_()
    found = torch.compile(step, fullgraph=True, backend="eager")(q, pages)
    for traced, eager in zip(found, step(q, pages), strict=True):
        torch.testing.assert_close(traced, eager + 0)


def test_results_go_into_a_buffer_that_is_given() -> None:
    pages, table = paged([5, 70], 64, 1, 576, BF16)
    q, lens = torch.randn(2, 1, 8, 576).to(BF16), torch.tensor([5, 70], dtype=torch.int32)
    listed = torch.tensor([[[0, 3]], [[2, -1]]], dtype=torch.int32)
    rows = torch.randn(9, 1, 576).to(BF16)
    wide = torch.zeros(2, 1, 8, 600, dtype=BF16)
    for given in ({"block_table": table, "cache_seqlens": lens},
                  {"block_table": None, "cache_seqlens": None, "indices": listed}):  # fmt: skip
        call: dict[str, Any] = {"q": q, "k_cache": pages.nan_to_num(), "head_dim_v": 512, **given}
        expected = flash_mla_with_kvcache(tile_scheduler_metadata=get_mla_metadata()[0], **call)
        out = wide[..., :512]
        found = flash_mla_with_kvcache(
            tile_scheduler_metadata=get_mla_metadata()[0], out=out, **call
        )
        assert found[0] is out and torch.equal(out, expected[0])
        assert torch.equal(found[1], expected[1])
    room = torch.zeros(2, 8, 512, dtype=BF16)
    assert flash_mla_sparse_fwd(q[:, 0], rows, listed, 0.1, out=room)[0] is room
    assert torch.equal(room, flash_mla_sparse_fwd(q[:, 0], rows, listed, 0.1)[0])
    for bad in (room[:1], room.float(), [0.0]):
        with pytest.raises(RuntimeError, match="flash_mla_sparse_fwd: out must be a tensor of "):
            flash_mla_sparse_fwd(q[:, 0], rows, listed, 0.1, out=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("topk", [0, 16])
def test_warm_calls_what_an_engine_will(
    kv_format: str, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: dict[str, set[tuple[int, ...]]] = {}

    def counted(op: Any, name: str, q: Tensor, *args: Any, **options: Any) -> Any:
        called.setdefault(name, set()).add(tuple(q.shape))
        return op(q, *args, **options)

    for module, name in (
        (flash_mla, "mqa_paged"),
        (flash_mla, "mqa_sparse"),
        (deep_gemm, "index_logits"),
        (deep_gemm, "index_logits_ragged"),
    ):
        monkeypatch.setattr(module, name, partial(counted, getattr(module, name), name))
    flash_mla.warm(
        4, kv_format=kv_format, page_size=16, max_requests=3, max_query_len=2, max_keys=40,
        topk=topk, index_heads=2, index_head_dim=32, device="cpu",
    )  # fmt: skip
    tokens = {(n, 4, 576) for n in (1, 2, 3, 6)}
    if topk:
        assert "mqa_paged" not in called
        assert called["mqa_sparse"] == tokens | {(256, 4, 576)}
    else:
        assert called["mqa_paged"] == tokens and "mqa_sparse" not in called
    assert called["index_logits_ragged"] == {(1, 2, 32), (256, 2, 32)}
    assert called["index_logits"] == {(n, 2, 32) for n in (1, 2, 3, 6)}
    with pytest.raises(ConfigError, match="warm: max_requests must be a positive integer, got 0"):
        flash_mla.warm(4, max_requests=0, device="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_call_follows_its_lengths() -> None:
    torch.manual_seed(8)
    pages, table = (each.cuda() for each in paged([900, 900], 64, 1, 576, BF16))
    q, lens = torch.randn(2, 2, 16, 576).to(BF16).cuda(), torch.tensor([900, 3]).int().cuda()
    listed = torch.randint(0, 64, (2, 2, 32), dtype=torch.int32).cuda()
    counts = torch.tensor([32, 5]).int().cuda()
    chosen = pages[table[0, :1].long()]

    def step() -> list[Any]:
        dense = flash_mla_with_kvcache(
            q, pages, table, lens, 512, get_mla_metadata()[0], causal=True
        )
        few = flash_mla_with_kvcache(
            q, chosen, None, None, 512, get_mla_metadata()[0], indices=listed, topk_length=counts
        )
        long = flash_mla_sparse_fwd(q[0], chosen.flatten(0, 1), listed[0, :, None], 0.05)
        return [*dense, *few, long[0], long[2]]

    for _ in range(6):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for new_lens, new_counts in (([1, 900], [0, 32]), ([0, 64], [7, 7])):
        lens.copy_(torch.tensor(new_lens))
        counts.copy_(torch.tensor(new_counts))
        graph.replay()
        for replayed, eager in zip(captured, step(), strict=True):
            torch.testing.assert_close(replayed, eager, equal_nan=True)


EMPTY = inspect.Parameter.empty
SIGNATURES: dict[str, dict[str, Any]] = {
    "flash_mla_with_kvcache": {
        "q": EMPTY,
        "k_cache": EMPTY,
        "block_table": EMPTY,
        "cache_seqlens": EMPTY,
        "head_dim_v": EMPTY,
        "tile_scheduler_metadata": EMPTY,
        "num_splits": None,
        "softmax_scale": None,
        "causal": False,
        "is_fp8_kvcache": None,
        "indices": None,
        "attn_sink": None,
        "extra_k_cache": None,
        "extra_indices_in_kvcache": None,
        "topk_length": None,
        "extra_topk_length": None,
        "enable_batch_invariant": False,
        "use_legacy": False,
        "kv_format": None,
        "descale_q": None,
        "descale_k": None,
        "out": None,
    },
    "flash_mla_sparse_fwd": {
        "q": EMPTY,
        "kv": EMPTY,
        "indices": EMPTY,
        "sm_scale": EMPTY,
        "d_v": 512,
        "attn_sink": None,
        "topk_length": None,
        "use_legacy": False,
        "return_log2_lse": None,
        "out": None,
    },
    "get_mla_metadata": {"args": EMPTY, "kwargs": EMPTY},
    "get_mla_decoding_metadata": {
        "seqlens_k": EMPTY,
        "num_q_tokens_per_head_k": EMPTY,
        "h_k": EMPTY,
        "h_q": None,
        "is_fp8_kvcache": False,
        "topk": None,
        "use_legacy": False,
    },
    "has_legacy": {},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_originals(name: str) -> None:
    parameters = inspect.signature(getattr(flash_mla, name)).parameters
    found = [(each, parameter.default) for each, parameter in parameters.items()]
    assert found == list(SIGNATURES[name].items())


def listed_call(**changes: Any) -> dict[str, Any]:
    pages, _ = stored("fp8_dsv4", 2, 8, 512)
    call = {
        "q": torch.randn(2, 1, 8, 512).to(BF16),
        "k_cache": pages,
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": get_mla_metadata()[0],
        "indices": torch.zeros(2, 1, 4, dtype=torch.int32),
    }
    return {**call, **changes}


def dense_call(**changes: Any) -> dict[str, Any]:
    pages, table = paged([5, 9], 64, 1, 576, BF16)
    call = {
        "q": torch.randn(2, 2, 8, 576).to(BF16),
        "k_cache": pages,
        "block_table": table,
        "cache_seqlens": torch.tensor([5, 9], dtype=torch.int32),
        "head_dim_v": 512,
        "tile_scheduler_metadata": get_mla_metadata()[0],
    }
    return {**call, **changes}


I32 = torch.int32
BAD: list[tuple[str, dict[str, Any], type[Exception]]] = [
    # what their Python asserts
    ("must be what get_mla_metadata", dense_call(tile_scheduler_metadata=None), AssertionError),
    ("num_splits must be None", dense_call(num_splits=torch.zeros(3)), AssertionError),
    ("causal is not supported with indices", listed_call(causal=True), AssertionError),
    ("is_fp8_kvcache must be True", listed_call(is_fp8_kvcache=False), AssertionError),
    ("attn_sink is not supported without", dense_call(attn_sink=torch.zeros(8)), AssertionError),
    ("pass block_table and cache_seqlens", dense_call(block_table=None), AssertionError),
    ("descale_q must be None for q", dense_call(descale_q=torch.ones(1)), AssertionError),
    ("descale_k must be None for rows of bf16", dense_call(descale_k=torch.ones(1)),
     AssertionError),
    ("descale_k must be None for rows of fp8_dsv4", listed_call(descale_k=torch.ones(1)),
     AssertionError),
    # what their C++ checks
    ("cache_seqlens must be int32", dense_call(cache_seqlens=torch.tensor([5, 9])), RuntimeError),
    ("of the 2 requests", dense_call(cache_seqlens=torch.tensor([5], dtype=I32)), RuntimeError),
    ("is_fp8_kvcache must be False", dense_call(is_fp8_kvcache=True), RuntimeError),
    ("must be a multiple of those", dense_call(k_cache=torch.zeros(4, 64, 3, 576, dtype=BF16)),
     RuntimeError),
    ("k_cache must be", dense_call(k_cache=torch.zeros(4, 64, 1, 512, dtype=BF16)), RuntimeError),
    ("must be a block of the k_cache", dense_call(block_table=torch.full((2, 1), 99, dtype=I32)),
     RuntimeError),
    ("indices must be int32", listed_call(indices=torch.zeros(2, 1, 4).long()), RuntimeError),
    ("with b=2 and s_q=1", listed_call(indices=torch.zeros(1, 2, 4, dtype=I32)), RuntimeError),
    ("topk_length must be", listed_call(topk_length=torch.zeros(3, dtype=I32)), RuntimeError),
    ("attn_sink must be", listed_call(attn_sink=torch.zeros(9)), RuntimeError),
    ("extra_topk_length is not supported without extra_k_cache",
     listed_call(extra_topk_length=torch.zeros(2, dtype=I32)), RuntimeError),
    ("extra_indices_in_kvcache must be",
     listed_call(extra_k_cache=stored("fp8_dsv4", 1, 8, 512)[0]), RuntimeError),
    ("rows of 584 bytes", listed_call(k_cache=torch.zeros(2, 8, 1, 600, dtype=torch.uint8)),
     RuntimeError),
    ("1, d] with indices", listed_call(k_cache=torch.zeros(2, 8, 2, 584, dtype=torch.uint8)),
     RuntimeError),
    ("head_dim_v must be within", listed_call(head_dim_v=600), RuntimeError),
]  # fmt: skip


@pytest.mark.parametrize(("message", "call", "kind"), BAD, ids=[message for message, *_ in BAD])
def test_bad_input_raises_as_theirs_does(
    message: str, call: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind, match="flash_mla_with_kvcache: ") as caught:
        flash_mla_with_kvcache(**call)
    assert message in str(caught.value) and isinstance(caught.value, OpenMLAError)
    schedule = call["tile_scheduler_metadata"]
    assert schedule is None or not schedule.have_initialized


def test_a_schedule_is_for_one_shape() -> None:
    call = dense_call()
    flash_mla_with_kvcache(**call)
    with pytest.raises(AssertionError, match="h_q must be 8, as in the first call"):
        flash_mla_with_kvcache(**{**call, "q": call["q"][:, :, :4]})


def test_bad_prefill_raises_as_theirs_does() -> None:
    q, kv = torch.randn(3, 8, 576).to(BF16), torch.randn(20, 1, 576).to(BF16)
    indices = torch.zeros(3, 1, 6, dtype=torch.int32)
    for message, call in (
        ("q and kv must be of one dtype", (q, kv.float(), indices)),
        ("kv and indices must be", (q, kv, indices[:, 0])),
        ("indices must be", (q, kv, indices[:2])),
        ("indices must be int32", (q, kv, indices.long())),
        ("kv must be", (q[..., :512], kv, indices)),
    ):
        with pytest.raises(RuntimeError, match="flash_mla_sparse_fwd: ") as caught:
            flash_mla_sparse_fwd(*call, 0.1)
        assert message in str(caught.value)
