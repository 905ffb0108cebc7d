"""make_plan: order, routes, uploads, buffers, explanations, and what it refuses."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import FrozenInstanceError, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from openmla import (
    PRESETS,
    Batch,
    ConfigError,
    LayerCache,
    Plan,
    ShapeError,
    allocate_cache,
    make_plan,
    plan_buffers,
    warmup,
)
from openmla.plan import default_workspace_tokens
from openmla.plan.types import Absorbed, Expanded, Parts
from openmla.plan.upload import send, send_parts, upload
from tests.plan.dense import BS, make_batch
from tests.plan.groups import absorbed_of, expanded_of, forms_of

CONFIG = PRESETS["tiny-v3"]
CACHE = allocate_cache(CONFIG, num_blocks=64, block_size=BS, format="fp32")


def token_rows(rows: slice | Tensor, T: int) -> list[int]:
    picked: list[int] = torch.arange(T)[rows].tolist()
    return picked


def check_rows(plan: Plan, query_lens: list[int]) -> None:
    """Every token is in exactly one group, and each group packs whole requests in order."""
    T = sum(query_lens)
    parts = []
    assert forms_of(plan) <= {"absorbed", "expanded"}
    for group in plan.groups:
        rows, part = token_rows(group.rows, T), group.part
        if isinstance(part, Absorbed):
            (start_loc,) = part.start_locs
        else:
            assert part is not None
            start_loc = next(part.asks).query_start_loc
        assert rows == sorted(rows) and len(rows) == int(start_loc[-1])
        parts += rows
    assert sorted(parts) == list(range(T))


def test_exhaustive_small_batches() -> None:
    """All mixtures of three requests: forms, routes and every context row exactly once."""
    sizes = [(0, 0), (0, 3), (1, 1), (1, 9), (3, 3), (5, 12), (2, 4)]
    for requests in product(sizes, repeat=3):
        query_lens, seq_lens = (list(part) for part in zip(*requests, strict=True))
        batch = make_batch(query_lens, seq_lens)
        for form, rows_at_once in (("auto", 4), ("expanded", 4), ("expanded", 8), ("expanded", 99)):
            plan = make_plan(batch, CONFIG, CACHE, form=form, workspace_tokens=rows_at_once)
            check_rows(plan, query_lens)
            if plan.group("expanded") is None:
                continue
            prefill = expanded_of(plan)
            with_queries = [b for b in range(3) if form != "expanded" or query_lens[b]]
            contexts = [seq_lens[b] - query_lens[b] for b in with_queries]
            total = sum(seq_lens[b] for b in with_queries)
            if form == "expanded":
                expected = "one-shot" if total <= rows_at_once else "chunked"
                assert prefill.route == (expected if any(contexts) else "new")
            if prefill.route == "chunked" and form == "expanded":
                gathered = sum(chunk.num_keys for chunk in prefill.chunks)
                assert gathered == sum(contexts)
            if prefill.route == "one-shot":
                assert len(prefill.chunks) == 1 and prefill.new_rows is not None
                assert len(prefill.new_rows) == sum(query_lens[b] for b in with_queries)


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 200)).map(lambda t: (t[0], t[0] + t[1])),
        max_size=8,
    ),
    form=st.sampled_from(["auto", "absorbed", "expanded"]),
    blocks=st.integers(1, 30),
)
def test_any_batch(requests: list[tuple[int, int]], form: str, blocks: int) -> None:
    query_lens, seq_lens = [n for n, _ in requests], [S for _, S in requests]
    cache = allocate_cache(CONFIG, num_blocks=512, block_size=BS, format="fp32")
    plan = make_plan(
        make_batch(query_lens, seq_lens), CONFIG, cache, form=form, workspace_tokens=BS * blocks
    )
    check_rows(plan, query_lens)
    if plan.group("expanded") is not None:
        for chunk in expanded_of(plan).chunks:
            assert chunk.num_keys == int(chunk.key_start_loc[-1]) <= BS * blocks
            assert chunk.max_key_len == int(chunk.key_start_loc.diff().max())
            (ask,) = chunk.asks
            assert ask.max_query_len == int(ask.query_start_loc.diff().max())
            assert ask.rows.stop - ask.rows.start == int(ask.query_start_loc[-1])


def test_the_callers_order_needs_no_permutation() -> None:
    """Neighbouring requests are slices; only interleaved forms need indices."""
    big = allocate_cache(CONFIG, num_blocks=512, block_size=BS, format="fp32")
    plan = make_plan(make_batch([1, 1, 90], [50, 60, 90]), CONFIG, big)
    absorbed, expanded = plan.group("absorbed"), plan.group("expanded")
    assert absorbed is not None and expanded is not None
    assert absorbed.rows == slice(0, 2) and expanded.rows == slice(2, 92)
    plan = make_plan(make_batch([1, 90, 1], [50, 90, 60]), CONFIG, big)
    absorbed = plan.group("absorbed")
    assert absorbed is not None and isinstance(absorbed.rows, Tensor)
    assert absorbed.rows.tolist() == [0, 91]


@pytest.mark.parametrize("name", ["tiny-v3", "tiny-v3.2", "tiny-v4"])
def test_a_device_without_kernels_gets_a_plan(name: str) -> None:
    """The meta device stands for mps, xpu and others that torch has: the reference runs there."""
    config = PRESETS[name]
    ring = torch.arange(8, dtype=torch.int32).view(2, 4)
    if config.compressor is not None:
        more: dict[str, Any] = {
            "window_table": ring,
            "state_slots": torch.arange(2, dtype=torch.int32),
        }
        sizes: dict[str, Any] = {"block_size": 128, "max_requests": 2, "max_tokens": 64}
    else:
        more = {"slot_mapping": torch.tensor([19, *range(84, 124)])}
        sizes = {"block_size": 16}
    cache = allocate_cache(
        config, num_blocks=8, layer=1, format="fp32", index_format="index_fp32", device="meta",
        **sizes,
    )  # fmt: skip
    plan = make_plan(Batch([1, 40], [20, 60], ring, **more), config, cache)
    assert set(plan.backends.values()) == {"reference"}
    assert plan.slot_mapping.device.type == "meta" and plan.explain()


def test_plans_are_frozen() -> None:
    plan = make_plan(make_batch([1], [5]), CONFIG, CACHE)
    with pytest.raises(FrozenInstanceError):
        plan.num_tokens = 2  # type: ignore[misc]


def test_explain_counts_launches() -> None:
    """Of kernels that are ours; what torch launches is only named."""
    pytest.importorskip("triton")
    batch = make_batch([1, 30], [9, 33])
    plan = make_plan(batch, CONFIG, CACHE, form="expanded", workspace_tokens=8)
    assert expanded_of(plan).route == "chunked" and len(expanded_of(plan).chunks) == 2
    assert "launches" not in plan.explain()
    ours = {op: plan.calls[op]._replace(backend="triton") for op in ("cache_write", "merge_states")}
    line = replace(plan, calls={**plan.calls, **ours}).explain().splitlines()[-1]
    assert line == (  # of latent_write and cache_write one, and nothing else rotates
        "launches  up to 2 per layer and step: merge_states 2; also what torch launches for "
        "latent_write, mha_ragged, cache_gather"
    )


def test_explain_names_backends_and_reasons() -> None:
    plan = make_plan(make_batch([1, 30], [9, 33]), CONFIG, CACHE, backend="reference")
    text = plan.explain()
    assert "absorbed  1 request," in text and "expanded  1 request," in text
    assert "mqa_paged    reference" in text and "mha_ragged   reference" in text
    assert "latent_write" in text and "cache_write" not in text
    chosen = make_plan(make_batch([30], [33]), CONFIG, CACHE).explain()
    assert "mha_ragged   sdpa" in chosen


def test_explain_says_why_and_how_many_bytes() -> None:
    batch = make_batch([1, 30], [9, 33])
    text = make_plan(batch, CONFIG, CACHE, workspace_tokens=8).explain()
    assert "absorbed  1 request, up to 1 query each" in text
    assert re.search(r"  why     cheaper: 1 new token over 9 keys \(.* from about \d+ new", text)
    assert re.search(r"  why     cheaper: 30 new tokens over 33 keys \(.* from about \d+ new", text)
    # 9 rows of 160 bytes, 3 rows of context
    assert "reads     1.9 KiB of cache per layer: absorbed 1.4 KiB, expanded 480 B" in text
    held = (3 * 40 + 30 * 4 * (24 + 40)) * 4  # 3 rows gathered, 30 expanded
    assert f"  holds   at most {held / 1024:.1f} KiB: " in text and "up to 30 tokens" in text
    for options, message in (
        ({"form": "absorbed"}, "asked for: form='absorbed'"),
        ({"form": "expanded"}, "asked for: form='expanded'"),
    ):
        told = make_plan(batch, CONFIG, CACHE, **options).explain()  # type: ignore[arg-type]
        assert f"  why     {message}" in told and "cheaper" not in told
    few = make_batch([1, 2], [9, 20])
    captured = make_plan(few, CONFIG, CACHE, into=buffers()).explain()
    assert "  why     a captured graph replays one form" in captured
    lens = torch.tensor([9, 20], dtype=torch.int32)
    bounded = make_plan(replace(few, device_seq_lens=lens), CONFIG, CACHE).explain()
    assert "  why     the lengths are known only to the device" in bounded
    assert "reads     at most " in bounded


def test_explain_lists_the_ops_that_run() -> None:
    def ops(plan: Plan, **options: bool) -> list[str]:
        lines = [line.split()[0] for line in plan.explain(**options).splitlines()]
        return [word for word in lines if word in plan.backends]

    plan = make_plan(make_batch([1], [9]), CONFIG, CACHE, backend="reference")
    assert ops(plan) == ["latent_write", "mqa_paged"]  # the first rotates, too
    assert ops(plan, finished=True) == ["cache_write", "mqa_paged"]  # an attached model has rotated
    # on a GPU without kernels rows are finished op by op
    there = {
        op: call._replace(problem=replace(call.problem, device="cuda"))
        for op, call in plan.calls.items()
    }
    assert ops(replace(plan, calls=there)) == ["cache_write", "rope", "mqa_paged"]
    plan = make_plan(make_batch([30], [30]), CONFIG, CACHE)
    assert ops(plan) == ["latent_write", "mha_ragged"]


def test_reprs_are_short() -> None:
    """A line that says what one wants to know; no tensor is printed."""
    batch = make_batch([1, 30], [9, 33])
    plan = make_plan(batch, CONFIG, CACHE, backend="reference")
    assert repr(batch) == (
        "Batch(2 requests, 31 query tokens, longest context 33, tables of 9 blocks)"
    )
    assert repr(plan) == (
        "Plan(deepseek_v3, 31 tokens: 1 requests absorbed, 1 requests expanded; "
        "mqa_paged by reference, mha_ragged by reference)"
    )
    keys = "Keys(part='latent', kind='paged', block_table=[1, 9] int32, lens=[1] int32, span=0)"
    assert repr(absorbed_of(plan)) == (
        f"Absorbed(reads=({keys}), max_query_len=1, start_locs=([2] int32), causal=True)"
    )
    assert repr(plan.group("absorbed")) == (
        f"Group(form='absorbed', rows=0:1, part={absorbed_of(plan)!r}, end='', requests=[0])"
    )
    space = warmup(CONFIG, CACHE, max_requests=2, max_tokens=50, workspace_tokens=20)
    assert repr(space) == "Workspace(20 gathered rows, 50 expanded keys, bfloat16, 17.2 KiB on cpu)"
    for part in (plan, plan.group("absorbed"), expanded_of(plan), batch, space):
        assert "tensor(" not in repr(part) and len(repr(part)) < 400


def test_default_workspace() -> None:
    v3 = PRESETS["deepseek-v3"]
    assert default_workspace_tokens(v3, max_requests=8, block_size=64) == 65536
    small = PRESETS["minicpm3"]
    assert default_workspace_tokens(small, max_requests=8, block_size=64) == 65536
    short = CONFIG.__class__(**{**CONFIG.__dict__, "max_positions": 100})
    assert default_workspace_tokens(short, max_requests=2, block_size=64) == 832
    assert default_workspace_tokens(short, max_requests=2, block_size=1024) == 8192


def test_warmup_bounds_the_peak() -> None:
    sizes: dict[str, Any] = {"max_requests": 2, "max_tokens": 50, "workspace_tokens": 20}
    space = warmup(CONFIG, CACHE, **sizes, backend="reference")
    assert space.rows.shape == (20, 40) and space.keys.shape == (50, 4, 24)
    assert space.expanded.shape == (50, 160)
    assert space.num_bytes == 2 * (20 * 40 + 50 * 96 + 50 * 160)
    apart = warmup(
        CONFIG, CACHE, **sizes, dtype=torch.float32
    )  # torch's kernels take keys in two parts
    assert apart.keys.shape == (0, 4, 24) and apart.num_bytes == 4 * (20 * 40 + 50 * 160)
    batch = Batch([3], [3], torch.tensor([[0]], dtype=torch.int32), torch.arange(3))
    assert (
        make_plan(batch, CONFIG, CACHE, form="expanded", workspace=apart)
        .calls["mha_ragged"]
        .keys_apart
    )
    with pytest.raises(ConfigError, match=r"workspace .* mha_ragged .* reference"):
        make_plan(batch, CONFIG, CACHE, form="expanded", workspace=apart, backend="reference")


def test_workspace_of_fp8_prefill() -> None:
    """Keys are bytes there; a plan is told where it is not for the same prefill_dtype."""
    sizes: dict[str, Any] = {"max_requests": 2, "max_tokens": 50, "workspace_tokens": 20}
    asked: dict[str, Any] = {"backend": "reference", "dtype": torch.float32, "form": "expanded"}
    eight, plain = (
        warmup(CONFIG, CACHE, **sizes, backend="reference", dtype=torch.float32, prefill_dtype=each)
        for each in ("fp8", None)
    )
    assert eight.keys.dtype == torch.float8_e4m3fn and eight.keys.shape == (50, 4, 24)
    assert eight.num_bytes == plain.num_bytes - 3 * 50 * 96
    batch = make_batch([3], [3])
    make_plan(batch, CONFIG, CACHE, **asked, workspace=eight, prefill_dtype="fp8")
    for space, prefill_dtype, kind in ((eight, None, "float8_e4m3fn"), (plain, "fp8", "float32")):
        message = f"workspace must be for prefill_dtype {prefill_dtype!r}, got keys of torch.{kind}"
        with pytest.raises(ConfigError, match=message):
            make_plan(batch, CONFIG, CACHE, **asked, workspace=space, prefill_dtype=prefill_dtype)
        absorbed = asked | {"form": "absorbed"}  # which expands nothing
        make_plan(batch, CONFIG, CACHE, **absorbed, workspace=space, prefill_dtype=prefill_dtype)
    for changes, message in (
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"workspace_tokens": 3}, "workspace_tokens must be at least 1 block of 4 rows, got 3"),
    ):
        with pytest.raises(ConfigError, match=f"warmup: {message}"):
            options: dict[str, Any] = {"max_requests": 1, "max_tokens": 8, **changes}
            warmup(CONFIG, CACHE, **options)
    with pytest.raises(ConfigError, match="warmup: cache has no latent rows"):
        warmup(CONFIG, LayerCache(), max_requests=1, max_tokens=1)


def test_a_workspace_that_does_not_fit_is_refused() -> None:
    space = warmup(
        CONFIG, CACHE, max_requests=2, max_tokens=20, workspace_tokens=8, dtype=torch.float32
    )
    batch = make_batch([21], [30])
    with pytest.raises(ConfigError, match="plan: the workspace has room to expand 20 new tokens"):
        make_plan(batch, CONFIG, CACHE, workspace=space, form="expanded")
    with pytest.raises(ConfigError, match=r"plan: workspace must be torch\.bfloat16"):
        make_plan(batch, CONFIG, CACHE, workspace=space, dtype=torch.bfloat16)
    make_plan(batch, CONFIG, CACHE, workspace=space, form="absorbed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 24}, "latent rows must be W=32 wide for 32 values in fp32, got 40"),
        ({"qk_rope_head_dim": 16}, "latent rows must be W=48 wide for 48 values in fp32, got 40"),
    ],
)
def test_a_cache_of_another_config_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"plan: {message}"):
        make_plan(make_batch([1], [5]), replace(CONFIG, **changes), CACHE)
    with pytest.raises(ConfigError, match="plan: cache must be the LayerCache of one layer, got l"):
        make_plan(make_batch([1], [5]), CONFIG, [CACHE])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 8}, r"expanded of shape \(160,\), got \(320,\)"),
        ({"qk_nope_head_dim": 24, "v_head_dim": 16}, r"keys of shape \(4, 24\), got \(4, 32\)"),
        ({"kv_lora_rank": 24}, r"rows of shape \(40,\), got \(32,\)"),
    ],
)
def test_a_workspace_of_another_config_is_refused(changes: dict[str, Any], message: str) -> None:
    other = replace(CONFIG, **changes)
    cache = allocate_cache(other, num_blocks=64, block_size=BS, format="fp32")
    options: Any = {"max_requests": 2, "max_tokens": 20, "dtype": torch.float32}
    space = warmup(other, cache, workspace_tokens=8, **options)
    for form in ("absorbed", "expanded"):
        with pytest.raises(ConfigError, match=f"plan: workspace must be of this config.*{message}"):
            make_plan(make_batch([3], [9]), CONFIG, CACHE, workspace=space, form=form)
    elsewhere = allocate_cache(CONFIG, num_blocks=64, block_size=BS, format="fp32", device="meta")
    space = warmup(CONFIG, elsewhere, workspace_tokens=8, **options)
    with pytest.raises(ConfigError, match=r"plan: workspace must be on cpu.* got meta"):
        make_plan(make_batch([3], [9]), CONFIG, CACHE, workspace=space)


def test_upload_moves_every_tensor_once() -> None:
    """On the meta device, since there is no other here: shapes and dtypes survive."""
    plan = make_plan(make_batch([1, 9, 9], [9, 30, 20]), CONFIG, CACHE, form="expanded",
                     workspace_tokens=8)  # fmt: skip
    prefill, group = deepcopy(expanded_of(plan)), plan.group("expanded")
    assert prefill.route == "chunked" and prefill.chunks and group is not None
    there = send_parts(Parts((group,), None, None, plan.slot_mapping), torch.device("meta"))
    moved = there.groups[0].part
    assert isinstance(moved, Expanded) and there.slot_mapping.device.type == "meta"
    assert plan.slot_mapping.device.type == "cpu" and there.select is None
    for before, after in zip(prefill.chunks, moved.chunks, strict=True):
        names = ("block_table", "starts", "key_start_loc")
        pairs = [(getattr(before, name), getattr(after, name)) for name in names]
        pairs += [
            (one.query_start_loc, other.query_start_loc)
            for one, other in zip(before.asks, after.asks, strict=True)
        ]
        assert len(pairs) == 4
        for old, new in pairs:
            assert (new.shape, new.dtype, new.device.type) == (old.shape, old.dtype, "meta")
        assert after.num_keys == before.num_keys


def test_what_stands_in_two_places_is_uploaded_once() -> None:
    plan = make_plan(make_batch([4, 9], [5, 20]), CONFIG, CACHE, form="expanded",
                     workspace_tokens=16)  # fmt: skip
    prefill = expanded_of(plan)
    assert prefill.route == "chunked" and prefill.new is not None
    assert prefill.new.query_start_loc is prefill.chunks[0].asks[0].query_start_loc
    (group,), slots = plan.groups, plan.slot_mapping
    send_parts(Parts((group,), None, None, slots), torch.device("meta"))
    moved = expanded_of(plan)  # in place
    assert moved.new is not None and moved.new.query_start_loc.is_meta
    assert moved.new.query_start_loc is moved.chunks[0].asks[0].query_start_loc
    twice = torch.arange(4)
    one, two, other = upload((twice, twice, torch.arange(4)), torch.device("meta"))
    assert one is two and one is not other


def test_an_upload_holds_what_it_was_given() -> None:
    """By send(), which copies to a CPU, too."""
    wide, odd = torch.arange(7) - 3, torch.arange(12, dtype=torch.int32).view(3, 4).t()
    given = (wide, odd[1:], torch.empty(0, dtype=torch.int32), torch.arange(1), None)
    wide_there, odd_there, empty, one, nothing = send(given, torch.device("cpu"))
    assert wide_there.equal(wide) and wide_there.data_ptr() != wide.data_ptr()
    assert odd_there.equal(odd[1:]) and odd_there.is_contiguous()
    assert empty.shape == (0,) and one.tolist() == [0] and nothing is None
    starts = [tensor.data_ptr() for tensor in (wide_there, odd_there, one)]
    assert all((start - starts[0]) % 16 == 0 for start in starts) and len(set(starts)) == 3
    with torch.inference_mode():
        assert not send((wide,), torch.device("cpu"))[0].is_inference()


def buffers() -> dict[str, Tensor]:
    return plan_buffers(CONFIG, CACHE, max_requests=4, max_tokens=8, max_blocks=6)


def test_captured_plans_keep_their_addresses() -> None:
    kept = buffers()
    addresses = {name: tensor.data_ptr() for name, tensor in kept.items()}
    for query_lens, seq_lens in (([1, 2], [9, 20]), ([1], [3]), ([2, 2, 2, 2], [4, 8, 12, 16])):
        batch = make_batch(query_lens, seq_lens)
        plan = make_plan(batch, CONFIG, CACHE, into=kept, form="absorbed")
        assert {name: tensor.data_ptr() for name, tensor in kept.items()} == addresses
        assert forms_of(plan) == {"absorbed"} and plan.num_tokens == 8
        decode = absorbed_of(plan)
        (keys,), (start_loc,) = decode.reads, decode.start_locs
        assert keys.lens is not None and keys.lens.data_ptr() == addresses["seq_lens"]
        B, T = len(query_lens), sum(query_lens)
        assert keys.lens.tolist() == [*seq_lens, *[0] * (4 - B)]
        assert start_loc[B:].tolist() == [T] * (5 - B)
        assert plan.slot_mapping[T:].tolist() == [-1] * (8 - T)
        assert decode.max_query_len == 2


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "message"),
    [
        ([1] * 5, [1] * 5, "the number of requests must be at most 4 with these buffers, got 5"),
        ([3], [3], "the number of query tokens of one request must be at most 2 with"),
        ([1], [25], "the number of block table columns must be at most 6 with"),
    ],
)
def test_what_does_not_fit_a_graph_raises_first(
    query_lens: list[int], seq_lens: list[int], message: str
) -> None:
    kept = buffers()
    before = {name: tensor.clone() for name, tensor in kept.items()}
    with pytest.raises(ConfigError) as error:
        make_plan(make_batch(query_lens, seq_lens), CONFIG, CACHE, into=kept)
    assert f"plan: {message}" in str(error.value)
    with pytest.raises(ConfigError, match="plan: form must be auto or absorbed with into="):
        make_plan(make_batch([2], [9]), CONFIG, CACHE, into=kept, form="expanded")
    assert all(torch.equal(before[name], kept[name]) for name in kept)


def test_bad_buffers() -> None:
    with pytest.raises(ConfigError, match="plan_buffers: max_requests must be a positive"):
        plan_buffers(CONFIG, CACHE, max_requests=0, max_tokens=8, max_blocks=6)
    with pytest.raises(ConfigError, match="plan_buffers: max_tokens must be at least max_req"):
        plan_buffers(CONFIG, CACHE, max_requests=4, max_tokens=3, max_blocks=6)


def test_lengths_known_to_the_device_only() -> None:
    batch = make_batch([1, 2], [12, 8])
    true_lens = torch.tensor([9, 8], dtype=torch.int32)
    bounded = replace(batch, device_seq_lens=true_lens)
    plan = make_plan(bounded, CONFIG, CACHE)
    assert forms_of(plan) == {"absorbed"}
    lens = absorbed_of(plan).reads[0].lens
    assert lens is not None and lens.data_ptr() == true_lens.data_ptr()
    with pytest.raises(
        ConfigError, match="form must not be 'expanded' for requests whose length only"
    ):
        make_plan(bounded, CONFIG, CACHE, form="expanded")


TABLE, SLOTS = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([1, 2, 3])
GOOD: dict[str, Any] = {
    "query_lens": [1, 2],
    "seq_lens": [4, 8],
    "block_table": TABLE,
    "slot_mapping": SLOTS,
}


def test_numpys_integers_are_lengths() -> None:
    np = pytest.importorskip("numpy")
    for kind in (np.int64, np.int32, np.uint8):
        for lens in ([kind(1), kind(2)], np.array([1, 2], dtype=kind)):
            batch = Batch(**{**GOOD, "query_lens": lens, "seq_lens": np.array([4, 8], dtype=kind)})
            assert batch.query_lens == (1, 2) and batch.seq_lens == (4, 8)
            assert {type(n) for n in (*batch.query_lens, *batch.seq_lens)} == {int}
    for odd in (np.array([1.0, 2.0]), np.array([True, True]), np.ones((2, 1), int)):
        with pytest.raises(ShapeError, match="batch: query_lens must be integers, got"):
            Batch(**{**GOOD, "query_lens": odd})
    with pytest.raises(
        ShapeError, match=r"block_table must be a \[B, M\] int32 tensor, got ndarray"
    ):
        Batch(**{**GOOD, "block_table": np.zeros((2, 3), np.int32)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_lens": [1, 2.0]}, "query_lens must be integers, got 2.0"),
        ({"query_lens": [1, True]}, "query_lens must be integers, got True"),
        ({"query_lens": [-1, 4]}, "query_lens[0] must not be negative, got -1"),
        ({"seq_lens": [4]}, "seq_lens must have B=2 lengths like query_lens, got 1"),
        ({"seq_lens": [4, 1]}, "seq_lens[1] must include its 2 new tokens, got 1"),
        ({"seq_lens": torch.zeros(2)}, "seq_lens must be a list or a 1-D integer CPU tensor"),
        ({"block_table": TABLE[0]}, "block_table must be [B, M] int32 with B=2, got (3,)"),
        ({"block_table": TABLE.long()}, "block_table must be [B, M] int32 with B=2, got (2, 3)"),
        ({"slot_mapping": SLOTS[:2]}, "slot_mapping must be [T] int64 with T=3, got (2,)"),
        ({"slot_mapping": SLOTS.int()}, "slot_mapping must be [T] int64 with T=3, got (3,)"),
        ({"device_seq_lens": SLOTS}, "device_seq_lens must be [B] int32 with B=2, got (3,)"),
        ({"query_lens": 3}, "query_lens must be a list of integers, got 3"),
        ({"query_lens": [1, torch.tensor(2)]}, "query_lens must be integers, got tensor(2)"),
        ({"seq_lens": [4, 2**31]}, "seq_lens[1] must be at most 2147483647 (int32), got 2147483"),
        ({"block_table": [[0, 1], [2, 3]]}, "block_table must be a [B, M] int32 tensor, got list"),
        ({"block_table": None}, "block_table must be a [B, M] int32 tensor, got NoneType"),
        ({"slot_mapping": [1, 2, 3]}, "slot_mapping must be a [T] int64 tensor, got list"),
        ({"device_seq_lens": [4, 8]}, "device_seq_lens must be a [B] int32 tensor, got list"),
        ({"window_table": [[0]]}, "window_table must be a [B, M] int32 tensor, got list"),
        ({"state_slots": (0, 1)}, "state_slots must be a [B] int32 tensor, got tuple"),
    ],
)
def test_bad_batches(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError) as error:
        Batch(**{**GOOD, **changes})
    assert f"batch: {message}" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": TABLE + 64}, "block_table[0, 0] must be a block of the cache (0..63)"),
        ({"seq_lens": [4, 13]}, "block_table must have a column for every 4 keys, got M=3"),
        ({"seq_lens": [4, 2**31 - 1]}, "block_table must have a column for every 4 keys, got M=3"),
        ({"slot_mapping": SLOTS + 254}, "slot_mapping must be below N*BS=256, got 257"),
        ({"slot_mapping": SLOTS // 2}, "slot_mapping must name each slot once, got 1 twice"),
        ({"block_table": TABLE.to("meta")}, "block_table must be on cpu or cpu, got meta"),
        ({"slot_mapping": torch.tensor([3, -1, 10])}, "slot_mapping must"),
    ],
)
def test_bad_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError) as error:
        make_plan(Batch(**{**GOOD, **changes}), CONFIG, CACHE)
    assert f"batch: {message}" in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "fast"}, "form must be auto, absorbed, expanded or chosen, got 'fast'"),
        ({"backend": "cuda"}, "backend 'cuda' is not known. Known: auto, triton, gluon, sdpa"),
        ({"dtype": torch.int32}, "dtype must be one of float16, bfloat16, float32, float64, got t"),
        ({"dtype": torch.float8_e4m3fn}, "dtype must be one of float16, bfloat16, float32, float"),
        ({"dtype": "bf16"}, "dtype must be one of float16, bfloat16, float32, float64, got 'bf16'"),
        ({"workspace": 8}, "workspace must be of type Workspace, got int"),
        ({"workspace_tokens": 3}, "workspace_tokens must be at least 1 block of 4 rows, got 3"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(make_batch([1], [5]), CONFIG, CACHE, **options)
    assert f"plan: {message}" in str(error.value)
    with pytest.raises(ConfigError, match="plan: cache has no latent rows"):
        make_plan(make_batch([1], [5]), CONFIG, LayerCache())
