"""Plans of V4's layers: values, sizes, chunks, captured buffers, workspace, and what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmla import (
    PRESETS,
    Batch,
    CompressedPool,
    ConfigError,
    LayerCache,
    PagedCache,
    Plan,
    ShapeError,
    allocate_cache,
    make_plan,
    plan_buffers,
    warmup,
)
from openmla.plan.types import ScoreChunk
from openmla.plan.workspace import LOGITS_BYTES
from tests.plan.captured import tensors_of
from tests.plan.groups import absorbed_of, forms_of
from tests.plan.v4 import BS, CONFIG, make_batch, make_cache

FLASH = PRESETS["deepseek-v4-flash"]
RATIOS = (0, 4, 128)
K, WINDOW = 32, 32
MILLION = 2**20


def plan_of(ratio: int, query_lens: list[int], seq_lens: list[int], **options: Any) -> Plan:
    cache = make_cache(ratio)
    return make_plan(make_batch(cache, query_lens, seq_lens), CONFIG, cache, **options)


def max_entries(plan: Plan) -> int:
    """The most that one token sees."""
    assert (plan.pool is None) == (plan.ratio == 0)
    return 0 if plan.pool is None else plan.pool.max_entries


def chunks_of(plan: Plan) -> tuple[ScoreChunk, ...]:
    """In which tokens are scored; none where they select nothing."""
    if plan.select is None:
        return ()
    assert plan.select.chunks
    return plan.select.chunks


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_v4_plan_holds_positions_slots_and_lengths(ratio: int) -> None:
    cache = make_cache(ratio)
    batch = make_batch(cache, [3, 0, 1, 5], [10, 40, 129, 5])
    plan = make_plan(batch, CONFIG, cache)
    step = plan.shared
    assert step is not None and batch.window_table is not None
    assert forms_of(plan) == {"absorbed"} and plan.select is None
    assert plan.ratio == ratio and plan.groups[0].rows == slice(0, 9) and plan.num_tokens == 9
    assert step.query_start_loc.tolist() == [0, 3, 3, 4, 9]
    assert step.positions.tolist() == [7, 8, 9, 128, 0, 1, 2, 3, 4]
    assert step.positions.dtype == plan.slot_mapping.dtype == torch.int64
    owners, M = [0, 0, 0, 2, 3, 3, 3, 3, 3], batch.window_table.shape[1]
    slots = [
        int(batch.window_table[b, (p // BS) % M]) * BS + p % BS
        for b, p in zip(owners, step.positions.tolist(), strict=True)
    ]
    assert plan.slot_mapping.tolist() == slots
    seen = [(p + 1) // ratio if ratio else 0 for p in step.positions.tolist()]
    assert max_entries(plan) == max(seen)
    assert step.window_table is batch.window_table and step.block_table is batch.block_table
    assert step.state_slots is batch.state_slots
    part, kinds = absorbed_of(plan), [("window", "window", WINDOW)]
    kinds += [("compressed", "prefix", ratio)] if ratio else []
    assert [(keys.part, keys.kind, keys.span) for keys in part.reads] == kinds
    tables = [step.window_table, step.block_table][: len(kinds)]
    assert all(k.block_table is table for k, table in zip(part.reads, tables, strict=True))
    assert part.positions is step.positions and part.start_locs == (step.query_start_loc,)
    if plan.pool is not None:
        assert plan.pool.ratio == ratio
        for name in ("positions", "query_start_loc", "block_table", "state_slots"):
            assert getattr(plan.pool, name) is getattr(step, name)
    assert plan.geometry == cache.geometry


def test_a_choice_only_past_k() -> None:
    for length in (4 * K + 3, 4 * K + 4):
        plan = plan_of(4, [2, 1], [length, 50])
        choosing = length // 4 > K
        assert plan.chooses == (forms_of(plan) == {"chosen"}) == choosing
        assert plan.select is None or plan.select.chunks
        assert ("index_logits" in plan.backends) == choosing
        kinds = [plan.problem("mqa_sparse").kinds]
        assert kinds == [("window", "positions" if choosing else "prefix")]
        assert "compress_kv" in plan.backends
    many = plan_of(128, [2], [600])
    assert many.select is None and forms_of(many) == {"absorbed"}
    only = plan_of(0, [2], [600])
    kinds = [only.problem("mqa_sparse").kinds]
    assert kinds == [("window",)] and "compress_kv" not in only.backends


def test_only_real_tokens_decide_on_a_choice() -> None:
    """A long request that waits makes nobody choose."""
    plan = plan_of(4, [0, 2], [500, 100])
    assert plan.select is None and forms_of(plan) == {"absorbed"}
    assert max_entries(plan) == 25


@pytest.mark.parametrize("ratio", RATIOS)
def test_steps_without_tokens_or_requests(ratio: int) -> None:
    for lens in ([], [0, 0]):
        plan = plan_of(ratio, list(lens), list(lens))
        step = plan.shared
        assert step is not None and plan.num_tokens == 0 and max_entries(plan) == 0
        assert step.query_start_loc.tolist() == [0] * (len(lens) + 1)
        assert plan.explain()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), min_size=1, max_size=4),
    st.integers(1, 900),
)
def test_chunks_cover_every_token_once_within_the_bound(
    requests: list[tuple[int, int]], bound: int
) -> None:
    query_lens = [n for n, _ in requests]
    seq_lens = [n + context for n, context in requests]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("openmla.plan.groups.LOGITS_BYTES", 4 * bound)
        plan = plan_of(4, query_lens, seq_lens)
    assert plan.shared is not None
    lens = [(p + 1) // 4 for p in plan.shared.positions.tolist()]
    step = plan.select  # made where tokens choose, and there alone
    if max(lens, default=0) <= K:
        assert step is None
        return
    assert step is not None
    assert step.row_lens.tolist() == lens and step.row_lens.dtype == torch.int32
    assert step.num_rows == len(lens) and plan.groups[0].selected == slice(0, len(lens))
    rows = [row for chunk in step.chunks for row in range(chunk.rows.start, chunk.rows.stop)]
    assert rows == list(range(len(lens)))
    for chunk in step.chunks:
        seen = lens[chunk.rows]
        assert chunk.num_keys == max(seen)
        assert len(seen) * chunk.num_keys <= bound or len(seen) == 1


def million(ratio: int, **changes: Any) -> tuple[LayerCache, Batch]:
    """The last 8192 of a million tokens, beside two requests that decode."""
    given = {
        "num_blocks": 4200,
        "block_size": 256,
        "format": "fp8_dsv4",
        "index_format": "index_fp8",
        "max_tokens": 8194,
        "window_block_size": 64,
        "device": "meta",
    }
    cache = make_cache(ratio, FLASH, **{**given, **changes})
    return cache, make_batch(cache, [8192, 1, 1], [MILLION, 70, 9000])


@pytest.mark.parametrize("ratio", RATIOS)
def test_no_list_is_made(ratio: int) -> None:
    """A million tokens: a plan holds a few numbers per token and the tables, nothing else."""
    cache, batch = million(ratio)
    plan = make_plan(batch, FLASH, cache)
    assert batch.window_table is not None and plan.shared is not None
    found = list({id(tensor): tensor for tensor in tensors_of(plan)}.values())
    assert len(found) >= 6
    T, tables = 8194, batch.block_table.numel() + batch.window_table.numel()
    assert all(tensor.numel() <= max(T, tables) for tensor in found)
    each = 8 + 8 + 4 + (4 if ratio == 4 else 0)  # slot, position, entries seen; entries chosen
    scored = () if plan.select is None else plan.select.chunks
    chunks = 4 * len(scored) * len(plan.shared.query_start_loc)
    most = max((chunk.rows.stop - chunk.rows.start for chunk in scored), default=0)
    bound = T * each + 4 * tables + chunks + 4 * most + 100
    assert sum(tensor.nbytes for tensor in found) <= bound
    assert max_entries(plan) == (MILLION // ratio if ratio else 0)
    assert batch.window_table.shape[1] <= (8192 + 128 + 8) // 64 + 2  # of a million tokens' 16384


def test_scores_are_bounded_at_a_million() -> None:
    cache, batch = million(4)
    plan = make_plan(batch, FLASH, cache)
    step = plan.select
    assert step is not None and step.chunks
    assert 0.9 * LOGITS_BYTES < step.score_bytes <= LOGITS_BYTES
    assert step.query_bytes == 13 * 64 * 128  # quantised to fp8
    assert len(step.chunks) >= 8192 * MILLION // LOGITS_BYTES
    text = plan.explain()
    assert "entries   one per 4 tokens; each token selects 512 of up to 262,144 entries" in text
    assert f"scores    in {len(step.chunks)} chunks of at most 256.0 MiB (limit 256.0 MiB)" in text
    assert "selection 16.0 MiB" in text


@pytest.mark.parametrize("ratio", RATIOS)
def test_lengths_known_on_the_device_only(ratio: int) -> None:
    cache = make_cache(ratio)
    true_lens = torch.tensor([100, 140], dtype=torch.int32)
    batch = make_batch(cache, [1, 3], [120, 144], device_seq_lens=true_lens)
    plan = make_plan(batch, CONFIG, cache)
    assert plan.shared is not None and batch.window_table is not None
    assert plan.shared.positions.tolist() == [99, 137, 138, 139]
    assert (plan.select is None) == (ratio != 4)
    if plan.select is not None:
        assert plan.select.row_lens.tolist() == [100 // 4, 138 // 4, 139 // 4, 140 // 4]
        assert plan.select.row_lens.dtype == torch.int32
    M = batch.window_table.shape[1]
    wanted = [
        int(batch.window_table[b, p // BS % M]) * BS + p % BS
        for b, p in ((0, 99), (1, 137), (1, 138), (1, 139))
    ]
    assert plan.slot_mapping.tolist() == wanted
    assert max_entries(plan) == (144 // ratio if ratio else 0)  # shapes come from the bounds
    if plan.select is not None:
        assert [chunk.num_keys for chunk in plan.select.chunks] == [36]
    buffers = plan_buffers(CONFIG, cache, max_requests=3, max_tokens=9, max_blocks=2)
    columns = buffers["window_table"].shape[1]
    batch = make_batch(cache, [1, 3], [120, 144], device_seq_lens=true_lens, window_columns=columns)
    captured = make_plan(batch, CONFIG, cache, into=buffers).shared
    assert captured is not None
    assert captured.positions.tolist() == [99, 137, 138, 139, *[0] * 5]


def test_a_request_the_device_knows_to_be_empty_writes_nothing() -> None:
    cache = make_cache(0)
    true_lens = torch.tensor([100, 0], dtype=torch.int32)
    batch = make_batch(cache, [1, 1], [120, 90], device_seq_lens=true_lens)
    assert make_plan(batch, CONFIG, cache).slot_mapping[1] == -1


@pytest.mark.parametrize("ratio", RATIOS)
def test_captured_plans_keep_their_shapes_and_pad_with_nothing(ratio: int) -> None:
    cache = make_cache(ratio)
    buffers = plan_buffers(CONFIG, cache, max_requests=3, max_tokens=9, max_blocks=4)
    addresses = {name: tensor.data_ptr() for name, tensor in buffers.items()}
    columns = buffers["window_table"].shape[1]
    first, second = (
        make_plan(make_batch(cache, *lens, window_columns=columns), CONFIG, cache, into=buffers)
        for lens in (([1, 3], [400, 133]), ([2], [7]))
    )
    assert first.num_tokens == second.num_tokens == 9
    assert chunks_of(first) == chunks_of(second)
    assert max_entries(first) == max_entries(second)
    assert first.calls == second.calls
    assert bool(chunks_of(first)) == (ratio == 4)
    assert {name: tensor.data_ptr() for name, tensor in buffers.items()} == addresses
    step = second.shared
    assert step is not None and step.positions.tolist() == [5, 6, *[0] * 7]
    assert second.select is None or not second.select.row_lens[2:].any()
    assert step.state_slots[1:].tolist() == [-1, -1]
    assert step.query_start_loc.tolist() == [0, 2, 2, 2]
    assert second.slot_mapping[2:].tolist() == [-1] * 7
    assert step.positions.data_ptr() == addresses["positions"]


@pytest.mark.parametrize("block", [-1, 4096])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("B", [2, 20])  # many are looked at otherwise than few
def test_rings_are_checked_where_they_are_read(B: int, n: int, block: int) -> None:
    assert CONFIG.compressor is not None
    sizes: dict[str, Any] = {"max_requests": B, "num_blocks": 4 * B, "max_tokens": 600 + 8 * B}
    cache, span = make_cache(0, **sizes), CONFIG.compressor.window
    lens = [n + 5 + 11 * b for b in range(B)]
    given = make_batch(cache, [n] * B, lens, window_columns=6)
    assert given.window_table is not None
    for b, S in enumerate(lens):
        read = {p // BS % 6 for p in range(max(S - n - span + 1, 0), S)}
        for column in range(6):
            table = given.window_table.clone()
            table[b, column] = block
            batch = replace(given, window_table=table)
            if column in read:
                with pytest.raises(ShapeError, match=rf"window_table\[{b}, {column}\] must be"):
                    make_plan(batch, CONFIG, cache)
            else:
                make_plan(batch, CONFIG, cache)


@pytest.mark.parametrize("tokens_each", [1, 4])
def test_rings_of_captured_plans_are_wide_enough(tokens_each: int) -> None:
    """Whatever a request's length, and after drafts were taken back."""
    cache = make_cache(0, rollback=6)
    assert cache.geometry is not None
    buffers = plan_buffers(CONFIG, cache, max_requests=1, max_tokens=tokens_each, max_blocks=8)
    columns = buffers["window_table"].shape[1]
    pool = CompressedPool(cache.geometry)
    pool.take({"r": 61})
    for turn in range(80):
        pool.take({"r": tokens_each})
        table = pool.tables(["r"], window_columns=columns).window_table
        assert table.shape[1] == columns
        if turn % 3 == 0:
            pool.truncate("r", pool.seq_len("r") - tokens_each)
    assert columns * BS < WINDOW + tokens_each + 6 + 2 * BS


COMMON = ("query_start_loc", "positions", "window_table", "block_table", "state_slots")


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
def test_plans_of_one_batch_share_what_layers_have_in_common(captured: bool, bounded: bool) -> None:
    """And are what they would be by themselves."""
    caches = {ratio: make_cache(ratio) for ratio in RATIOS}
    sizes: Any = {"max_requests": 3, "max_tokens": 9, "max_blocks": 6}
    buffers: dict[int, Any] = dict.fromkeys(RATIOS)
    columns = 0
    if captured:
        for ratio, cache in caches.items():
            buffers[ratio] = plan_buffers(CONFIG, cache, **sizes, beside=buffers[0])
        columns = buffers[0]["window_table"].shape[1]
    batch = make_batch(caches[0], [1, 3], [400, 133], window_columns=columns)
    if bounded:
        batch = replace(batch, device_seq_lens=torch.tensor([390, 133], dtype=torch.int32))
    first = make_plan(batch, CONFIG, caches[0], into=buffers[0])
    assert first.shared is not None
    for ratio in (4, 128):
        plan = make_plan(batch, CONFIG, caches[ratio], into=buffers[ratio], beside=first)
        step = plan.shared
        assert step is not None and plan.slot_mapping is first.slot_mapping
        assert all(getattr(step, name) is getattr(first.shared, name) for name in COMMON)
        assert step.key is first.shared.key
        own = plan_buffers(CONFIG, caches[ratio], **sizes) if captured else None
        alone = make_plan(batch, CONFIG, caches[ratio], into=own)
        assert alone.calls == plan.calls
        pairs = list(zip(tensors_of(alone), tensors_of(plan), strict=True))
        assert pairs and all(torch.equal(one, other) for one, other in pairs)
        assert bool(chunks_of(plan)) == (ratio == 4)


def test_plans_that_do_not_belong_beside_one_another() -> None:
    zeros, fours = make_cache(0), make_cache(4)
    batch = make_batch(zeros, [1, 3], [400, 133])
    plan = make_plan(batch, CONFIG, zeros)
    with pytest.raises(ConfigError, match="beside must be a plan of the same batch and config"):
        make_plan(replace(batch), CONFIG, fours, beside=plan)
    with pytest.raises(ConfigError, match=r"beside must .* same geometry"):
        make_plan(batch, CONFIG, make_cache(4, window_block_size=8), beside=plan)
    geometry = fours.geometry
    assert geometry is not None
    larger = fours.grown(2 * geometry.num_blocks, geometry.window_blocks, 2 * geometry.num_states)
    make_plan(batch, CONFIG, larger, beside=plan)  # zeros has none of what has grown
    sizes: Any = {"max_requests": 3, "max_tokens": 9, "max_blocks": 6}
    into = plan_buffers(CONFIG, fours, **sizes)
    with pytest.raises(ConfigError, match=r"beside must have 9 rows, got 4\. Pass into= to both"):
        make_plan(batch, CONFIG, fours, beside=plan, into=into)
    with pytest.raises(
        ConfigError, match="plan_buffers: beside must be DeepSeek V4 buffers of the sa"
    ):
        plan_buffers(CONFIG, fours, **{**sizes, "max_blocks": 7}, beside=into)
    dense = PRESETS["tiny-v3"]
    cache = allocate_cache(dense, num_blocks=4, block_size=4, format="fp32")
    one = Batch([1], [1], torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ConfigError, match="beside must be None for deepseek_v3: one plan ser"):
        make_plan(one, dense, cache, beside=plan)


def test_workspace() -> None:
    fours = make_cache(4)
    space = warmup(CONFIG, fours, max_requests=2, max_tokens=10)
    assert space.selection.shape == (10, K) and space.selection.dtype == torch.int32
    assert space.num_bytes == 4 * 10 * K and space.num_rows == 0
    batch = make_batch(fours, [10], [400])
    plan = make_plan(batch, CONFIG, fours, workspace=space)
    assert plan.workspace is space
    for ratio in (0, 128):  # one workspace serves all layers
        other = make_cache(ratio)
        nothing = warmup(CONFIG, other, max_requests=2, max_tokens=10)
        assert nothing.num_bytes == 0
        make_plan(make_batch(other, [50], [400]), CONFIG, other, workspace=space)
        with pytest.raises(ConfigError, match="workspace must be of a layer that selects"):
            make_plan(batch, CONFIG, fours, workspace=nothing)
    with pytest.raises(ConfigError, match="at most 10 tokens in this workspace, got 11"):
        make_plan(make_batch(fours, [11], [400]), CONFIG, fours, workspace=space)
    for name in ("max_requests", "max_tokens"):
        sizes: dict[str, Any] = {"max_requests": 1, "max_tokens": 1, name: 0}
        with pytest.raises(ConfigError, match=f"warmup: {name} must be at least 1, got 0"):
            warmup(CONFIG, fours, **sizes)
    flash = warmup(FLASH, million(4)[0], max_requests=8, max_tokens=8192)
    assert flash.num_bytes == 8192 * 512 * 4


@pytest.mark.parametrize("name", ["window", "compressed", "state", "index"])
def test_parts_of_another_config_are_refused(name: str) -> None:
    cache = make_cache(4)
    batch = make_batch(cache, [2], [9])
    part = getattr(cache, name)
    narrow: Any = PagedCache(part.data[:, :, :-1], part.format, part.kv_scale)
    with pytest.raises(ConfigError, match=f"plan: {name} rows must be W="):
        make_plan(batch, CONFIG, replace(cache, **{name: narrow}))
    if name == "state":
        short = PagedCache(part.data[:, :6], part.format, part.kv_scale)
        with pytest.raises(ConfigError, match="state must have at least 7 rows for ratio 4, got 6"):
            make_plan(batch, CONFIG, replace(cache, state=short))


def test_explain_says_what_each_token_sees() -> None:
    text = plan_of(0, [40, 2], [60, 70]).explain()
    assert "window    42 tokens of 2 requests, each over its last 32 rows" in text
    assert "entries   one per" not in text
    assert "  why     absorbed is the only form" in text
    text = plan_of(4, [40, 2], [60, 70]).explain()
    assert (
        "entries   one per 4 tokens; each token sees all of up to 17 entries: no more than 32"
        in text
    )
    text = plan_of(4, [40, 2], [60, 300]).explain()
    assert "entries   one per 4 tokens; each token selects 32 of up to 75 entries" in text
    assert "scores    in 1 chunk of at most 0.0 MiB (limit 256.0 MiB), selection 0.0 MiB" in text
    assert "index_topk   reference" in text
    text = plan_of(128, [40, 2], [60, 300]).explain()
    assert "entries   one per 128 tokens; each token sees all of up to 2 entries" in text
    assert "compress_kv  reference" in text and "index_topk" not in text


def test_explain_counts_the_bytes_of_a_million_tokens() -> None:
    """By kind of layer and in all, what allocate_cache allocates; one of each kind is real."""
    given = {"num_blocks": 4096, "block_size": 256, "format": "fp8_dsv4"}
    assert FLASH.compressor is not None
    real: set[int] = set()
    sums: dict[int, dict[str, int]] = {}
    batch, total = None, 0
    for layer, ratio in enumerate(FLASH.compressor.ratios):
        cache = allocate_cache(
            FLASH,
            **given,  # type: ignore[arg-type]
            layer=layer,
            max_requests=8,
            max_tokens=8192,
            device="meta" if ratio in real else "cpu",
        )
        if ratio not in real:
            real.add(ratio)
            batch = make_batch(cache, [1], [5000])
            text = make_plan(batch, FLASH, cache).explain()
        mine = sums.setdefault(ratio, {"layers": 0, "grows": 0, "window": 0, "state": 0})
        mine["layers"] += 1
        for name in ("window", "compressed", "index", "state"):
            part = getattr(cache, name)
            if part is not None:
                size = part.data.untyped_storage().nbytes()
                mine["grows" if name in ("compressed", "index") else name] += size
                total += size
    assert real == set(RATIOS)
    lines = [line.split() for line in text.splitlines()]
    start = next(i for i, words in enumerate(lines) if words[:2] == ["ratio", "layers"])
    for words in lines[start + 1 : start + 4]:
        ratio, layers, *_ = (int(word) for word in words[:2])
        entries, padding, window, state, all_of_it = (int(word) for word in words[3:])
        mine = sums[ratio]
        assert layers == mine["layers"] and entries + padding == mine["grows"]
        assert (window, state) == (mine["window"], mine["state"])
        assert all_of_it == mine["grows"] + window + state
    words = lines[start + 4]
    assert words[:3] == ["total", "43", "3850.25"] and int(words[-1]) == total
    assert int(words[3]) == 3850.25 * MILLION
    assert "cache     1,048,576 tokens in blocks of 256, fp8_dsv4 and index_fp8" in text
    assert "entries (3.76 GiB)" in text and f"{total / 2**30:.2f} GiB in total" in text


def test_a_cache_of_ones_own_says_nothing_of_others() -> None:
    """Without allocate_cache's geometry there is a plan all the same."""
    cache = make_cache(4)
    batch = make_batch(cache, [2], [300])
    plan = make_plan(batch, CONFIG, replace(cache, geometry=None))
    assert "tokens in blocks of" not in plan.explain() and "GiB" not in plan.explain()
    assert plan.calls == make_plan(batch, CONFIG, cache).calls


def test_reprs_are_short() -> None:
    plan = plan_of(4, [40, 2], [60, 70], backend="reference")
    assert (
        repr(plan) == "Plan(deepseek_v4, 42 tokens: 2 requests, ratio 4; mqa_sparse by reference)"
    )
    for part in (*plan.groups, plan.pool, plan_of(4, [40, 2], [60, 300]).select):
        assert part is not None and "tensor(" not in repr(part) and len(repr(part)) < 400
    cache = make_cache(4)
    assert repr(cache).startswith("LayerCache(ratio 4; index: index_fp32, 32 blocks of 32 rows, 16")
    assert cache.geometry is not None
    pool = CompressedPool(cache.geometry)
    pool.take({"a": 20})
    assert repr(pool).startswith("CompressedPool(entries: 1 of 32 blocks of 128 tokens used, 31 fr")
    assert repr(pool).endswith("states: 1 of 4 blocks used, 3 free; 1 requests)")


def test_named_backends() -> None:
    plan = plan_of(4, [2], [300], backend="reference")
    assert set(plan.backends.values()) == {"reference"}
    with pytest.raises(ConfigError, match="plan: backend 'fast' is not known"):
        plan_of(4, [2], [300], backend="fast")


def test_the_dtype_of_queries_is_the_caches_or_bf16() -> None:
    for format, chosen, wanted in (
        ("fp32", None, torch.float32),
        ("bf16", None, torch.bfloat16),
        ("bf16", torch.float32, torch.float32),
    ):
        cache = make_cache(0, format=format)
        plan = make_plan(make_batch(cache, [1], [9]), CONFIG, cache, dtype=chosen)
        dtypes = {op: call.problem.dtype for op, call in plan.calls.items()}
        assert dtypes["mqa_sparse"] == dtypes["rope"] == wanted
    cache, batch = million(4)
    plan = make_plan(batch, FLASH, cache)
    dtypes = {op: call.problem.dtype for op, call in plan.calls.items()}
    assert dtypes["mqa_sparse"] == torch.bfloat16
    assert dtypes["compress_kv"] == dtypes["index_topk"] == torch.float32
